"""`JobQueue`: the jobs of a server and the pipeline's cycles, one at a time on its Spark driver.

A driver that ends or hangs is restarted, with a backoff until one makes progress. The job that was
running ends as `lost`. What it committed stays committed, and the next job does not repeat it. A
cycle that was running is due again. A cycle that uploaded nothing is not recorded, and failed
cycles in a row are recorded as one.

`<data>/jobs.ndjson` keeps the last jobs, one line of JSON each, the oldest first. It is for people
only: no decision depends on it. The file is replaced as a whole, so that a crash leaves the old or
the new one. A line that cannot be read is left out, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import DecodeError
from msgspec.json import Decoder
from msgspec.structs import replace

from forebay.admin.jobs import (
    CANCELLED,
    FAILED,
    LOST,
    QUEUED,
    RUNNING,
    DriverStatus,
    JobRecord,
    JobsFull,
)
from forebay.admin.records import json_line
from forebay.files.local import LocalDisk, open_private
from forebay.format.names import JOBS_FILE
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.driver import Order, Outcome
from forebay.service.driver import (
    LOG_FILE,
    SILENCE_SECONDS,
    DriverEnded,
    DriverProcess,
    bound_log,
    driver_command,
    rotate_log,
)
from forebay.settings import StoreSettings

_log: Final = logging.getLogger("forebay.service")
JOBS: Final = Counter(
    "forebay_jobs_total",
    "Jobs, and cycles that uploaded something, by how they ended.",
    ["kind", "state"],
)
RESTARTS: Final = Counter("forebay_spark_restarts_total", "Spark drivers that ended by themselves.")
WAITING_MAX: Final = 32
"""The most jobs in the queue."""
_CYCLE: Final = "interval"
_REQUEST: Final = "request"
JOBS_KEPT: Final = 200
_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
_RECORD: Final = Decoder(JobRecord)


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """How long to wait before a driver is restarted, while none makes progress."""

    first_seconds: float = 0.5
    most_seconds: float = 60.0

    def delay_seconds(self, ends: int) -> float:
        """The delay after `ends` drivers in a row that ended without progress."""
        return float(min(self.first_seconds * 2 ** min(ends - 1, 20), self.most_seconds))


_BACKOFF: Final = RestartBackoff()


class JobQueue:
    """Implements `forebay.admin.jobs.Jobs`. Jobs wait until `run` runs.

    `list`, `get` and `driver` may be called from any thread; the rest on the event loop's thread.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        command: Sequence[str] | None = None,
        backoff: RestartBackoff = _BACKOFF,
        silence_seconds: float = SILENCE_SECONDS,
        seal: Callable[[Sequence[str]], None] = lambda _topics: None,
    ) -> None:
        """`command` replaces the command that starts a driver.

        `seal` is called before topics are uploaded to their ends, with their names, or with none
        for all topics: the driver does not own them, and cannot begin new segments.
        """
        self._seal = seal
        self._silence_seconds = silence_seconds
        self._settings = settings
        self._command = driver_command() if command is None else list(command)
        self._backoff = backoff
        self._data = Path(settings.data or "")
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._records: dict[str, JobRecord] = {}
        """In the order of their creation."""
        self._waiting: deque[str] = deque()
        self._current: str | None = None
        self._driver: DriverProcess | None = None
        self._status = DriverStatus("starting", settings.spark.master, time.time())
        self._ends = 0
        """Drivers in a row that ended without progress."""
        self._next_cycle = 0.0
        self._turn_of_jobs = False
        self._changed = asyncio.Event()
        self._unwritten = asyncio.Event()

    # -- the port -------------------------------------------------------------------------------

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        if len(self._waiting) >= WAITING_MAX:
            raise JobsFull(f"{WAITING_MAX} jobs are waiting already: try again when some are done")
        job = _new(kind, tuple(topics), dict(options), _REQUEST, QUEUED)
        self._put(job)
        self._waiting.append(job.id)
        self._changed.set()
        return job

    def list(self) -> Sequence[JobRecord]:
        with self._guard:
            return list(self._records.values())[::-1]

    def get(self, job_id: str) -> JobRecord | None:
        with self._guard:
            return self._records.get(job_id)

    def cancel(self, job_id: str) -> JobRecord | None:
        job = self.get(job_id)
        if job is None or job.over:
            return job
        if job.state == QUEUED:
            with suppress(ValueError):
                self._waiting.remove(job_id)
            return self._end(job, CANCELLED, "cancelled before it started")
        if self._driver is not None:
            self._driver.cancel(job_id)
        return job

    def driver(self) -> DriverStatus:
        return self._status

    # -- running --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until it is cancelled; then stops the driver, and cancels unfinished jobs."""
        path = self._data / JOBS_FILE
        past = await asyncio.to_thread(read_jobs, path)
        with self._guard:
            self._records = {**{job.id: job for job in past}, **self._records}
        await asyncio.to_thread(rotate_log, self._data / LOG_FILE)
        writer = asyncio.create_task(self._write_changes(path))
        try:
            while True:
                await self._one_driver()
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer
            for job in self.list():
                if not job.over:
                    self._end(job, CANCELLED, "the server was stopped")
            self._set_status("stopped", pid=None, error=None)
            await asyncio.to_thread(self._write, path)

    async def _one_driver(self) -> None:
        """Runs one driver until it ends, and waits before the next one."""
        driver = self._driver = DriverProcess(
            self._settings, self._command, silence_seconds=self._silence_seconds
        )
        ready = False
        try:
            await driver.start()
            self._set_status("starting", pid=driver.pid)
            master = await driver.ready()
            ready = True
            event(_log, logging.INFO, "Spark is ready", master=master, pid=driver.pid)
            self._set_status("ready", error=None)
            await self._run_jobs(driver)
        except (DriverEnded, OSError) as error:
            reason = str(error)
        finally:
            await driver.stop()
            self._driver = None
        self._ends += 1
        delay = self._backoff.delay_seconds(self._ends)
        RESTARTS.add()
        event(
            _log,
            logging.WARNING,
            "the Spark driver ended; it will be restarted" if ready else "Spark did not start",
            error=reason,
            again_in_seconds=delay,
        )
        restarts = self._status.restarts + 1
        self._set_status("restarting", pid=None, error=reason, restarts=restarts)
        await asyncio.sleep(delay)

    async def _run_jobs(self, driver: DriverProcess) -> None:
        """Runs jobs and cycles until the driver ends; then raises DriverEnded."""
        while True:
            if driver.ended.done():
                raise DriverEnded(driver.ended.result())
            job = self._next()
            if job is None:
                await self._idle(driver)
                continue
            self._current = job.id
            self._set_status("working")
            try:
                await self._run_job(driver, job)
            finally:
                self._current = None
            self._set_status("ready")

    def _next(self) -> JobRecord | None:
        """The next job or cycle to run, or None. Jobs and cycles that are due take turns."""
        due = self._settings.uploader.enabled and time.monotonic() >= self._next_cycle
        if self._waiting and (self._turn_of_jobs or not due):
            self._turn_of_jobs = False
            job = self.get(self._waiting.popleft())
            assert job is not None, "a job that waits is recorded"
            return self._put(replace(job, state=RUNNING, started=time.time()))
        self._turn_of_jobs = True
        return _new("offload", (), {"due": True}, _CYCLE, RUNNING) if due else None

    async def _idle(self, driver: DriverProcess) -> None:
        """Waits until there is something to do, or the driver has ended."""
        self._changed.clear()
        if self._waiting:
            return
        left = self._next_cycle - time.monotonic() if self._settings.uploader.enabled else None
        changed = asyncio.create_task(self._changed.wait())
        try:
            ends: list[asyncio.Future[Any]] = [changed, driver.ended]
            await asyncio.wait(
                ends,
                timeout=None if left is None else max(left, 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()

    async def _run_job(self, driver: DriverProcess, job: JobRecord) -> None:
        bound_log(self._data / LOG_FILE)
        order = Order(job.id, job.kind, job.topics, dict(job.options))

        def on_progress(done: int, total: int, step: int) -> None:
            if done:
                self._ends = 0
            label = f"{job.kind}: step {step}"
            now = self.get(job.id) or job  # a cycle is recorded once it makes progress
            self._put(replace(now, done=done, total=total, label=label))

        if job.kind == "offload" and not job.options.get("due", False):
            await asyncio.to_thread(self._seal, job.topics)
        try:
            outcome = await driver.run_order(order, on_progress)
        except DriverEnded as error:
            self._lose(job, str(error))
            raise
        self._ends = 0
        if job.trigger == _CYCLE:
            self._next_cycle = time.monotonic() + self._settings.uploader.interval_seconds
            self._end_cycle(job, outcome)
        else:
            self._end(self.get(job.id) or job, outcome.state, outcome.error, outcome)

    # -- records --------------------------------------------------------------------------------

    def _lose(self, job: JobRecord, reason: str) -> None:
        found = self.get(job.id)
        if found is not None:
            self._end(found, LOST, f"{reason}; what was committed stays committed")
        self._next_cycle = 0.0

    def _end_cycle(self, job: JobRecord, outcome: Outcome) -> None:
        found = self.get(job.id)
        if outcome.state == FAILED:
            before = self._last_cycle(job.id)
            if before is not None and before.state == FAILED:
                self._forget(job.id)
                job = replace(before, attempts=before.attempts + 1)
                found = None
            event(
                _log,
                logging.WARNING,
                "a cycle of the pipeline failed; it will be retried",
                error=outcome.error,
                attempts=job.attempts,
            )
        elif not outcome.summary.get("objects") and outcome.state != CANCELLED:
            self._forget(job.id)  # it uploaded nothing; at most it read objects back
            return
        self._end(found or job, outcome.state, outcome.error, outcome)

    def _last_cycle(self, but: str) -> JobRecord | None:
        cycles = (job for job in self.list() if job.trigger == _CYCLE and job.id != but)
        return next(cycles, None)

    def _end(
        self, job: JobRecord, state: str, error: str | None, outcome: Outcome | None = None
    ) -> JobRecord:
        JOBS.add(1, job.kind, state)
        ended = replace(job, state=state, error=error, ended=time.time())
        if outcome is not None:
            ended = replace(ended, summary=outcome.summary, details=outcome.details)
        if job.trigger == _REQUEST:
            level = logging.INFO if error is None else logging.WARNING
            event(_log, level, "job ended", job=job.id, kind=job.kind, state=state, error=error)
        return self._put(ended)

    def _put(self, job: JobRecord) -> JobRecord:
        with self._guard:
            self._records[job.id] = job
            past = [each for each in self._records.values() if each.over]
            # Cycles are dropped before requested jobs, as they come every few seconds.
            past.sort(key=lambda each: each.trigger == _REQUEST)
            over = (each.id for each in past)
            while len(self._records) > JOBS_KEPT and (oldest := next(over, None)) is not None:
                del self._records[oldest]
        self._unwritten.set()
        return job

    def _forget(self, job_id: str) -> None:
        with self._guard:
            self._records.pop(job_id, None)

    def _set_status(self, state: str, **changes: object) -> None:
        status = replace(self._status, state=state, **changes)
        if state != self._status.state:
            status = replace(status, since=time.time())
        self._status = status

    async def _write_changes(self, path: Path) -> None:
        """Writes changes a second after they happen, so that not every progress costs a sync."""
        while True:
            await self._unwritten.wait()
            await asyncio.sleep(1)
            self._unwritten.clear()
            await asyncio.to_thread(self._write, path)

    def _write(self, path: Path) -> None:
        try:
            with self._writing:
                write_jobs(path, self.list()[::-1])
        except OSError as error:
            event(_log, logging.WARNING, "past jobs cannot be written", file=path, error=error)


def _new(
    kind: str,
    topics: tuple[str, ...],
    options: dict[str, int | bool | str],
    trigger: str,
    state: str,
) -> JobRecord:
    now = time.time()
    started = now if state == RUNNING else None
    return JobRecord(secrets.token_hex(6), kind, topics, options, trigger, state, now, started)


# ---- the file of past jobs --------------------------------------------------------------------


def read_jobs(path: Path) -> list[JobRecord]:
    """The jobs in the file. A job that was unfinished when its server ended is `lost`.

    An unreadable file or line is logged, not raised.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_FILE_BYTES_MAX).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        event(_log, logging.WARNING, "past jobs cannot be read", file=path, error=error)
        return []
    found = [_record(line) for line in lines]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        event(
            _log,
            logging.WARNING,
            "past jobs are left out: their lines are damaged",
            file=path,
            lines=len(found) - len(known),
        )
    return known[-JOBS_KEPT:]


def _record(line: bytes) -> JobRecord | None:
    try:
        record = _RECORD.decode(line)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if record.over:
        return record
    return replace(record, state=LOST, error="the server ended before the job did")


def write_jobs(path: Path, jobs: Iterable[JobRecord]) -> None:
    """Replaces the file, and syncs it. After an OSError the old file is unchanged.

    It is private to its user: the text of an error may contain anything.
    """
    lines = [json_line(job) for job in jobs]
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with open(draft, "xb", opener=open_private) as file:
        file.write(b"".join(lines[-JOBS_KEPT:]))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    LocalDisk().sync_dir(path.parent)
