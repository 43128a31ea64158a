"""Python programs that drive Spark in processes of their own, and can be killed with their JVM.

A process has one Spark context, and that of the tests is in local mode: what needs another master,
or has to die in the middle, runs here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from support.paths import TESTS
from support.spark_cluster import end_session

PATIENCE: Final = 400.0
LINES_SHOWN: Final = 40


class DriverProcess:
    """A Python program with its own session of processes. Its output is read as it comes."""

    def __init__(
        self, arguments: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        """`arguments` follow the interpreter; the tests' folder is on the path of the program."""
        env = {**(environment or os.environ), "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    @property
    def lines(self) -> list[str]:
        """All that it said so far."""
        return list(self._lines)

    def wait_until(self, ready: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Until a condition holds; fails at once if the program ends before."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert self._process.poll() is None, f"it ended before {what}: {self._tail()}"
            assert time.monotonic() < deadline, f"{what} did not happen: {self._tail()}"
            time.sleep(0.02)

    def finish(self, seconds: float = PATIENCE) -> list[str]:
        """Its lines, when it has ended well."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self._tail()}") from None
        self._reader.join(seconds)
        assert code == 0, f"it ended with {code}: {self._tail()}"
        return self.lines

    def kill(self) -> None:
        """SIGKILL for the program, its JVM and its Python workers."""
        end_session(self._process)

    def _tail(self) -> str:
        return "\n".join(self._lines[-LINES_SHOWN:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._reader.join(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()
