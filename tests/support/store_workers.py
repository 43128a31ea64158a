"""Real processes that use a store (`worker_process.py`), for tests that stop and kill them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from forebay.settings import StoreSettings
from support.paths import SUPPORT

T = TypeVar("T")

SCRIPT: Final = SUPPORT / "worker_process.py"
PATIENCE: Final = 100.0
"""Seconds to wait for what must happen."""


@dataclass(frozen=True)
class Ack:
    """A message that the process says is stored."""

    offset: int
    started: float
    """The monotonic time, of all processes, at which the append began."""
    durability: str
    payload: bytes


def as_json(settings: StoreSettings, name: str) -> dict[str, Any]:
    """What the worker takes."""
    return {
        "name": name,
        "data": str(settings.data),
        "wal": asdict(settings.wal),
        "uploader": asdict(settings.uploader),
        "cloud": {
            **asdict(replace(settings.cloud, options={})),
            "options": dict(settings.cloud.options),
        },
        "deleter": asdict(settings.deleter),
        "metadata": asdict(settings.metadata),
    }


class WorkerProcess:
    """A thread reads the lines that it writes, so that it never waits for the test."""

    def __init__(self, given: dict[str, Any], errors: Path) -> None:
        with errors.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._ended = False
        self.ended_with: int | None = None
        """The exit code, or minus the signal, once it was killed."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.send(json.dumps(given, default=str))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # the process died while it wrote the line
            with self._changed:
                self._lines.append(line[:-1].decode())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- asking ---------------------------------------------------------------------------------

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, command: str) -> list[str]:
        """Waits for the command's end; returns its lines, the last of which is done or error."""
        before = len(self._lines)
        self.send(command)
        return self.wait_until(
            lambda lines: (
                lines[before:]
                if lines[before:] and lines[-1].startswith(("done", "error"))
                else None
            )
        )

    def wait_until(self, look: Callable[[list[str]], T | None], seconds: float = PATIENCE) -> T:
        """What `look` makes of the lines so far, as soon as it is not None."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (found := look(self._lines)) is None:
                left = deadline - time.monotonic()
                assert left > 0, f"it did not happen; the last lines: {self._lines[-5:]}"
                assert not self._ended, f"the process ended; the last lines: {self._lines[-5:]}"
                self._changed.wait(left)
            return found

    def wait_for_acks(self, count: int) -> None:
        self.wait_until(
            lambda lines: sum(line.startswith("ack ") for line in lines) >= count or None
        )

    def acks(self, since: int = 0) -> list[Ack]:
        with self._changed:
            lines = self._lines[since:]
        found = []
        for line in lines:
            if line.startswith("ack "):
                _, offset, started, durability, payload = line.split(" ", 4)
                found.append(Ack(int(offset), float(started), durability, payload.encode()))
        return found

    def errors(self) -> list[str]:
        with self._changed:
            return [line for line in self._lines if line.startswith("error ")]

    @property
    def count(self) -> int:
        """Lines so far."""
        with self._changed:
            return len(self._lines)

    # -- signals --------------------------------------------------------------------------------

    def stop(self) -> float:
        """SIGSTOP; returns the monotonic time at which all of its threads stood still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        return time.monotonic()

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; afterwards all that it wrote has been read."""
        self._process.kill()
        self.ended_with = self._process.wait()
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive()

    def close(self) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
