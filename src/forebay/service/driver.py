"""`DriverProcess`: the Spark driver of a server, as the server holds it.

A process of its own, because a JVM that dies, or is killed for its memory, must not take the
messages with it. It tells all the time that it runs; when it does not, it hangs, and is killed with
all that it started. What it says is in `forebay.pipeline.driver`; what Spark says is in
`<data>/spark.log`, which is begun anew with each server and does not grow past a bound.
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
"""After which a driver hangs: thirty of its beats."""
_LOOKS: Final = 30
"""At the silence, before it is one: each after the event loop had its turn to hear something."""

Told = Callable[[int, int, int], None]
"""Tasks that are done, all of them, and which Spark job of the order it is."""


class DriverEnded(Exception):
    """The driver's process is gone, or never became ready."""


def own_program() -> list[str]:
    """What is run as the driver."""
    from forebay.pipeline import driver

    return [sys.executable, "-m", driver.__name__]


class DriverProcess:
    """One driver, from its start to its end. On the event loop's thread."""

    def __init__(
        self,
        settings: StoreSettings,
        program: Sequence[str],
        *,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._silence_seconds = silence_seconds
        self._heard = True
        self._watcher: asyncio.Task[None] | None = None
        self._program = list(program)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[str] = loop.create_future()
        self._ready.add_done_callback(_looked_at)
        self._outcome: asyncio.Future[Outcome] | None = None
        self._order: Order | None = None
        self._told: Told = lambda _done, _total, _step: None
        self._refused: str | None = None
        self.ended: asyncio.Future[str] = loop.create_future()
        """Why it ended, once it has."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process; `ready` says when it can do anything."""
        level = logging.getLogger("forebay").getEffectiveLevel()
        orders = await asyncio.to_thread(Orders(self._settings, level).encode)
        with _open_log(Path(self._settings.data or "") / LOG_FILE) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
                # Not for it: a Ctrl-C on the terminal. It is told to end by its input.
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read(self._process))
        self._watcher = asyncio.create_task(self._watch(self._process))
        self._write(orders)

    async def ready(self) -> str:
        """Where Spark runs, once it does; DriverEnded if it does not."""
        try:
            async with asyncio.timeout(_START_SECONDS_MAX):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise DriverEnded(f"Spark did not start in {_START_SECONDS_MAX} seconds") from None

    async def carry_out(self, order: Order, told: Told) -> Outcome:
        """One order at a time; DriverEnded if the driver ended before it did."""
        assert self._order is None, "one order at a time"
        self._outcome = asyncio.get_running_loop().create_future()
        self._order, self._told = order, told
        try:
            if self.ended.done():
                raise DriverEnded(self.ended.result())
            self._say(
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
        self._say(do="cancel", id=job)

    async def stop(self) -> None:
        """Ends its input, and so the process; kills what does not end. Idempotent."""
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

    # -- what is said and heard -----------------------------------------------------------------

    def _say(self, **told: Any) -> None:
        self._write(json.dumps(told).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Orders are small and few; what cannot be written is told by the process's end."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, RuntimeError):
            self._process.stdin.write(data)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._heard = True
                self._hear(line)
        except ValueError:  # longer than a line may be: it is not ours
            _kill(process)
        code = await process.wait()
        reason = self._refused or _reason(code)
        self.ended.set_result(reason)
        for waiting in (self._ready, self._outcome):
            if waiting is not None and not waiting.done():
                waiting.set_exception(DriverEnded(reason))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills it when it is silent for too long.

        Looks are counted, not seconds: while this process itself is stopped, nobody is silent.
        """
        silent = 0
        while silent < _LOOKS:
            await asyncio.sleep(self._silence_seconds / _LOOKS)
            silent = 0 if self._heard else silent + 1
            self._heard = False
        self._refused = (
            f"the Spark driver hung: it said nothing for {self._silence_seconds:.0f} seconds, and "
            "was killed"
        )
        _kill(process)

    def _hear(self, line: bytes) -> None:
        try:
            told = json.loads(line)
            self._take(told)
        except (ValueError, KeyError, TypeError) as error:
            event(_log, logging.WARNING, "the Spark driver said what nobody knows", error=error)

    def _take(self, told: dict[str, Any]) -> None:
        kind = told["event"]
        if kind == "beat":
            return
        if kind == "log":
            logger = logging.getLogger(str(told["logger"]))
            event(logger, int(told["level"]), str(told["text"]), **dict(told["fields"]))
        elif kind == "counted":
            metrics.add_growth(
                [(name, tuple(labels), more) for name, labels, more in told["counts"]]
            )
        elif kind == "ready":
            self._ready.set_result(str(told["master"]))
        elif kind == "refused":
            self._refused = str(told["error"])
        elif self._order is None or told["id"] != self._order.id:
            return
        elif kind == "progress":
            self._told(int(told["done"]), int(told["total"]), int(told["step"]))
        elif kind == "ended" and self._outcome is not None and not self._outcome.done():
            summary = {str(name): int(value) for name, value in told["summary"].items()}
            details = tuple(map(str, told["details"]))
            self._outcome.set_result(Outcome(told["state"], summary, told["error"], details))


def _kill(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _looked_at(future: asyncio.Future[str]) -> None:
    """An error that nobody waits for is told otherwise."""
    if not future.cancelled():
        future.exception()


def _reason(code: int) -> str:
    if code < 0:
        return f"the Spark driver was ended by {signal.Signals(-code).name}"
    if code == REFUSED:
        return "Spark did not start"
    return f"the Spark driver ended with code {code}; {LOG_FILE} in the data directory says more"


def _open_log(path: Path) -> Any:
    """For one process to write to; cut if the one before left it too large.

    For the eyes of its owner alone: Spark writes down what it is configured with.
    """
    bound_log(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
    os.fchmod(fd, _MODE)
    return os.fdopen(fd, "ab")


def bound_log(path: Path) -> None:
    """Begins the log anew if it is over its bound; who writes to it goes on at its end."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            os.truncate(path, 0)


def renew_log(path: Path) -> None:
    """At the start of a server: the last one's is kept, the one before goes."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(path.name + ".1"))
