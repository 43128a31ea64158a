"""`forebay serve` and `forebay up` in processes of their own, which tests stop, kill and starve."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from forebay.client.http import ServerClient, topic_path
from forebay.errors import ForebayError, ServiceUnavailable
from forebay.format.names import parse_topic
from forebay.settings import ServerAddress
from support.spark_cluster import end_session

PATIENCE: Final = 400.0
"""Seconds that anything may take on a busy machine before it counts as hung."""
NDJSON: Final = {"Content-Type": "application/x-ndjson"}
_LOOK_SECONDS: Final = 0.02


class ServerProcess:
    """A server over a directory or a configuration file, on a free port of the loopback."""

    def __init__(
        self,
        command: str,
        place: Path,
        log: Path,
        before: Sequence[str] = (),
        options: Sequence[str] = (),
        broker: str = "127.0.0.1:0",
    ) -> None:
        """`place`: a directory, or a file that ends with `.yml`; `before` goes before Python.

        `options` go before the command. `broker` is the address of the gRPC server.
        """
        option = "--config" if place.suffix == ".yml" else "--data"
        self._log = log
        servers = ["--listen", "127.0.0.1:0", "--broker", broker]
        arguments = [*options, command, option, str(place), *servers, "--json"]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-m", "forebay", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait(PATIENCE)}: {self.said}"
        self.where: dict[str, Any] = json.loads(line)
        self.client = self.new_client()

    @property
    def pid(self) -> int:
        return int(self.where["pid"])

    @property
    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def new_client(self, timeout_seconds: float = PATIENCE) -> ServerClient:
        address = ServerAddress(self.where["url"], self.where["instance"])
        return ServerClient(address, timeout_seconds=timeout_seconds)

    def wait_until(self, ready: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert self._process.poll() is None, f"it ended before {what}: {self.said}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self.said}"
            time.sleep(_LOOK_SECONDS)

    def wait_ready(self) -> None:
        self.wait_until(self._is_ready, "it was ready")

    def _is_ready(self) -> bool:
        try:
            return bool(self.client.json("GET", "/readyz")["status"] == "ready")
        except ForebayError:
            return False

    # -- messages and jobs ----------------------------------------------------------------------

    def produce(
        self, topic: str, payloads: Iterable[str], client: ServerClient | None = None
    ) -> Any:
        body = b"".join(json.dumps({"payload": each}).encode() + b"\n" for each in payloads)
        path = topic_path(parse_topic(topic), "messages")
        answer = (client or self.client).request("POST", path, body=body, headers=NDJSON)
        try:
            return json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailable(f"the answer broke off: {error!r}") from error

    def consume(self, topic: str) -> list[Any]:
        """Everything from the oldest message to the last one of now."""
        with self.new_client() as client:
            path = topic_path(parse_topic(topic), "messages")
            return [json.loads(line) for line in client.lines(path, {"start": "earliest"})]

    def jobs(self, **query: str) -> list[Any]:
        return list(self.client.json("GET", "/v1/jobs", query=query)["jobs"])

    def spark(self) -> Any:
        return self.client.json("GET", "/v1/jobs")["spark"]

    def wait_for_spark(self) -> None:
        self.wait_until(lambda: self.spark()["state"] in {"ready", "working"}, "Spark was ready")

    def run_job(self, kind: str, **more: Any) -> Any:
        """The job, when it is over."""
        job = self.client.json("POST", "/v1/jobs", value={"kind": kind, **more})
        found: dict[str, Any] = {}

        def over() -> bool:
            found.update(self.client.json("GET", f"/v1/jobs/{job['id']}"))
            return found["state"] not in {"queued", "running"}

        self.wait_until(over, f"{kind} was over")
        return found

    # -- its end --------------------------------------------------------------------------------

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = PATIENCE) -> int:
        """Asks it to end, and returns its exit code."""
        os.kill(self.pid, number)
        return self.wait(seconds)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self._process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL for the server alone."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        end_session(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def session_of(pid: int) -> list[int]:
    """All processes of the session that a process leads."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
