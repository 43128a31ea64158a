"""`DriverProcess`: the server's side of the Spark driver.

The driver is a separate process, so that the server survives when the JVM dies or is killed for its
memory use. The driver sends heartbeats. When they stop, the server kills the driver with all its
children. The lines that it sends are documented in `forebay.pipeline.driver`. Spark's own output
goes to `<data>/spark.log`, which is bounded; each start of a server begins a new one.

Beware: `start` returns before Spark runs. Await `ready` before `run_order`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from forebay import metrics
from forebay.files.local import open_private
from forebay.logs import event
from forebay.pipeline.driver import LINE_BYTES_MAX, REFUSED, Order, Orders, Outcome
from forebay.settings import StoreSettings

_log: Final = logging.getLogger("forebay.service")
LOG_FILE: Final = "spark.log"
_MODE: Final = 0o600
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
_START_SECONDS_MAX: Final = 600
_END_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 60.0
"""A driver that sends nothing for so long is killed: thirty heartbeats."""
_SILENCE_CHECKS: Final = 30
"""Checks in a row that find no new line before a driver is killed. Between two of them the event
loop had time to read one."""

OnProgress = Callable[[int, int, int], None]
"""Called with the tasks that are done, all tasks, and the number of the Spark job in the order."""


class DriverEnded(Exception):
    """The driver's process ended, or did not become ready in time."""


def driver_command() -> list[str]:
    return [sys.executable, "-m", "forebay.pipeline.driver"]


class DriverProcess:
    """One driver process, from its start to its end. Use it on the event loop's thread only."""

    def __init__(
        self,
        settings: StoreSettings,
        command: Sequence[str],
        *,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._silence_seconds = silence_seconds
        self._received = True
        self._watcher: asyncio.Task[None] | None = None
        self._command = list(command)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str] = loop.create_future()
        self._ready.add_done_callback(_retrieve)
        self._outcome: asyncio.Future[Outcome] | None = None
        self._order: Order | None = None
        self._on_progress: OnProgress = lambda _done, _total, _step: None
        self._refused: str | None = None
        self.ended: asyncio.Future[str] = loop.create_future()
        """Done when the process has ended; its result is the reason."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process, and returns before Spark runs: await `ready` next."""
        level = logging.getLogger("forebay").getEffectiveLevel()
        orders = await asyncio.to_thread(Orders(self._settings, level).encode)
        with _open_log(Path(self._settings.data or "") / LOG_FILE) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
                # Ctrl-C on the terminal must not reach the driver, which ends with its input.
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read(self._process))
        self._watcher = asyncio.create_task(self._watch(self._process))
        self._write(orders)

    async def ready(self) -> str:
        """Waits until Spark runs, and returns its master; DriverEnded if it does not start."""
        try:
            async with asyncio.timeout(_START_SECONDS_MAX):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise DriverEnded(f"Spark did not start in {_START_SECONDS_MAX} seconds") from None

    async def run_order(self, order: Order, on_progress: OnProgress) -> Outcome:
        """Runs one order and returns its outcome; DriverEnded if the driver ends before.

        Only one order may run at a time.
        """
        assert self._order is None, "one order at a time"
        self._outcome = asyncio.get_running_loop().create_future()
        self._order, self._on_progress = order, on_progress
        try:
            if self.ended.done():
                raise DriverEnded(self.ended.result())
            self._send(
                do="run",
                id=order.id,
                kind=order.kind,
                topics=list(order.topics),
                options=order.options,
            )
            return await self._outcome
        finally:
            self._order = self._outcome = None

    def cancel(self, job: str) -> None:
        self._send(do="cancel", id=job)

    async def stop(self) -> None:
        """Closes the driver's input, which ends it, and kills it if it does not end. Idempotent."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            _kill(process)
            await process.wait()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._reader is not None:
            await self._reader

    # -- lines in and out -----------------------------------------------------------------------

    def _send(self, **fields: Any) -> None:
        self._write(json.dumps(fields).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Writes without waiting, as orders are small. If the process died, `ended` says so."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):
            self._process.stdin.write(data)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._received = True
                self._on_line(line)
        except ValueError:  # a line over the limit, which our driver does not send
            _kill(process)
        code = await process.wait()
        reason = self._refused or _reason(code)
        self.ended.set_result(reason)
        for waiting in (self._ready, self._outcome):
            if waiting is not None and not waiting.done():
                waiting.set_exception(DriverEnded(reason))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills the process when it is silent for too long.

        Counts checks, not seconds: while this process is suspended, it cannot read what the driver
        sends.
        """
        silent = 0
        while silent < _SILENCE_CHECKS:
            await asyncio.sleep(self._silence_seconds / _SILENCE_CHECKS)
            silent = 0 if self._received else silent + 1
            self._received = False
        self._refused = (
            f"the Spark driver hung: it sent nothing for {self._silence_seconds:.0f} seconds, and "
            "was killed"
        )
        _kill(process)

    def _on_line(self, line: bytes) -> None:
        try:
            self._on_event(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            event(_log, logging.WARNING, "the Spark driver sent an unknown line", error=error)

    def _on_event(self, fields: dict[str, Any]) -> None:
        kind = fields["event"]
        if kind == "beat":
            return
        if kind == "log":
            logger = logging.getLogger(str(fields["logger"]))
            event(logger, int(fields["level"]), str(fields["text"]), **dict(fields["fields"]))
        elif kind == "counted":
            metrics.add_growth(
                [(name, tuple(labels), more) for name, labels, more in fields["counts"]]
            )
        elif kind == "ready":
            self._ready.set_result(str(fields["master"]))
        elif kind == "refused":
            self._refused = str(fields["error"])
        elif self._order is None or fields["id"] != self._order.id:
            return
        elif kind == "progress":
            self._on_progress(int(fields["done"]), int(fields["total"]), int(fields["step"]))
        elif kind == "ended" and self._outcome is not None and not self._outcome.done():
            summary = {str(name): int(value) for name, value in fields["summary"].items()}
            details = tuple(map(str, fields["details"]))
            self._outcome.set_result(Outcome(fields["state"], summary, fields["error"], details))


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kills the process with all its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _retrieve(future: asyncio.Future[str]) -> None:
    """Marks the error as retrieved: asyncio logs errors that nobody awaits."""
    if not future.cancelled():
        future.exception()


def _reason(code: int) -> str:
    if code < 0:
        return f"the Spark driver was killed by {signal.Signals(-code).name}"
    if code == REFUSED:
        return "Spark did not start"
    return f"the Spark driver ended with code {code}; see {LOG_FILE} in the data directory"


def _open_log(path: Path) -> Any:
    """Opens the log for a driver to append to; truncates it first if it is too large.

    Only its owner can read the file: Spark logs its configuration.
    """
    bound_log(path)
    fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.fchmod(fd, _MODE)  # of a file of an earlier release, too
    return os.fdopen(fd, "ab")


def bound_log(path: Path) -> None:
    """Truncates the log if it is too large; a process may go on appending to it."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            os.truncate(path, 0)


def rotate_log(path: Path) -> None:
    """Renames the log of the previous server to `<name>.1`, and so drops an older one."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(path.name + ".1"))
