"""The process that holds a server's Spark session: `python -m forebay.pipeline.driver`.

It reads from standard input: first the store's settings (eight bytes of length, little-endian, and
a pickle, so that no secret is in an argument or in the environment), then lines of JSON. It writes
lines of JSON to its original standard output, and redirects standard output to standard error, so
that what Spark prints does not get between them.

    {"do": "run", "id": "7", "kind": "offload", "topics": [], "options": {}}
    {"do": "cancel", "id": "7"}

    {"event": "beat"}                               every two seconds
    {"event": "ready", "master": "local[*,4]"}      or {"event": "refused", "error": "..."}
    {"event": "progress", "id": "7", "done": 3, "total": 20, "step": 1}
    {"event": "ended", "id": "7", "state": "done", "summary": {...}, "error": null, "details": []}
    {"event": "counted", "counts": [["forebay_...", ["label"], 3.0]]}
    {"event": "log", "logger": "forebay.pipeline", "level": 20, "text": "...", "fields": {...}}

It runs one order at a time. The process and its JVM end when the input ends, so none is left
behind when the server is killed.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import shutil
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from forebay import metrics
from forebay.errors import ForebayError
from forebay.files.local import make_private_dirs
from forebay.logs import fields_of
from forebay.pipeline.execute import SparkExecutor
from forebay.pipeline.location import job_settings
from forebay.pipeline.session import spark_session
from forebay.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from forebay.pipeline.jobs.offload import Offload


WORK_FOLDER: Final = "spark-work"
"""The folder of Spark's temporary files, in the data directory."""
LENGTH_BYTES: Final = 8
LINE_BYTES_MAX: Final = 1024 * 1024
"""The longest line of an event."""
DETAILS_MAX: Final = 20
TEXT_MAX: Final = 2000
BEAT_SECONDS: Final = 2.0
"""Time between two heartbeats."""
REFUSED, GONE = 2, 3
"""Exit codes: Spark did not start; Spark ended by itself."""
_LOOK_SECONDS: Final = 2.0
_END_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What a driver reads first: the settings, and the level from which to send log lines."""

    settings: StoreSettings
    log_level: int = logging.WARNING

    def encode(self) -> bytes:
        body = pickle.dumps(self)
        return len(body).to_bytes(LENGTH_BYTES, "little") + body


@dataclass(frozen=True, slots=True)
class Order:
    """One job to run: `kind` is offload, compact or verify."""

    id: str
    kind: str
    topics: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an order; `state` is `done`, `failed` or `cancelled`."""

    state: str
    summary: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    details: tuple[str, ...] = ()


class Cancelled(Exception):
    """The job was cancelled."""


class Events:
    """Writes events to the process that started this one. Thread-safe."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def tell(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, **facts}, default=str)
        # The server may be gone. The thread that reads the input notices that, and ends us.
        with self._lock, suppress(OSError, ValueError):
            self._file.write(line + "\n")
            self._file.flush()


def beat(events: Events) -> None:
    """Sends heartbeats for ever; the server kills a driver that sends none."""
    while True:
        events.tell("beat")
        time.sleep(BEAT_SECONDS)


class LogEvents(logging.Handler):
    """Sends log records as events."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        text, fields = fields_of(record)
        trace = {"trace": _cut(self.format(record))} if record.exc_info else {}
        shown = {
            name: value if value is None or isinstance(value, int | float) else _cut(str(value))
            for name, value in {**fields, **trace}.items()
        }
        self._events.tell(
            "log", logger=record.name, level=record.levelno, text=_cut(text), fields=shown
        )


class Driver:
    """Runs orders on one Spark session."""

    def __init__(self, orders: Orders, commands: IO[bytes], events: Events) -> None:
        self._settings = _with_own_folder(job_settings(orders.settings))
        self._commands = commands
        self._events = events
        self._orders: queue.Queue[Order | None] = queue.Queue()
        self._session: SparkSession | None = None
        self._cancelled: set[str] = set()
        self._current: str | None = None
        self._ending = False
        self._step = 0
        self._reported = (-1, -1)

    def run(self) -> int:
        """Runs orders until the input ends; returns the exit code."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        try:
            session = spark_session(self._settings.spark, app_name="forebay")
        except ForebayError as error:
            self._events.tell("refused", error=_cut(str(error)))
            return REFUSED
        self._session = session
        self._events.tell("ready", master=session.sparkContext.master)
        from forebay.pipeline.jobs.offload import Offload

        executor = SparkExecutor(session)
        with Offload(self._settings, executor, progress=self._progress) as offload:
            code = self._serve(offload, executor)
        if code == 0:
            session.stop()
        return code

    def _serve(self, offload: Offload, executor: SparkExecutor) -> int:
        while True:
            try:
                order = self._orders.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if not executor.alive():
                    return GONE
                continue
            if order is None:
                return 0
            before = metrics.counter_values()
            outcome = self._run_order(offload, order)
            self._events.tell("counted", counts=metrics.counter_growth(before))
            alive = outcome.state != "failed" or executor.alive()
            self._events.tell("ended", id=order.id, **_facts(outcome))
            if not alive:
                return GONE

    def _listen(self) -> None:
        for line in self._commands:
            command = json.loads(line)
            if command["do"] == "cancel":
                self._cancel(command["id"])
            else:
                self._orders.put(
                    Order(
                        command["id"],
                        command["kind"],
                        tuple(command["topics"]),
                        command["options"],
                    )
                )
        self._ending = True
        self._orders.put(None)
        self._cancel(self._current)
        # If Spark is still starting, or hangs, it does so in the JVM, which ends with this process.
        if self._session is not None:
            time.sleep(_END_SECONDS)
        os._exit(1)

    def _cancel(self, job: str | None) -> None:
        if job is not None:
            self._cancelled.add(job)
        if job == self._current and self._session is not None:
            with suppress(Exception):  # the JVM may be gone; the thread that runs the job notices
                self._session.sparkContext.cancelAllJobs()

    def _run_order(self, offload: Offload, order: Order) -> Outcome:
        self._current, self._step = order.id, 0
        try:
            self._check_cancelled()
            outcome = self._job(offload, order)
        except Cancelled:
            outcome = Outcome("cancelled")
        except ForebayError as error:
            outcome = Outcome("failed", error=_cut(str(error)))
        except Exception as error:  # noqa: BLE001  # a bug ends one job only; its trace is in the log
            traceback.print_exc()
            outcome = Outcome("failed", error=_cut(f"a bug: {error!r}; spark.log has the trace"))
        stopped = self._ending or order.id in self._cancelled
        self._current = None
        self._cancelled.discard(order.id)
        return replace(outcome, state="cancelled") if stopped else outcome

    def _check_cancelled(self) -> None:
        if self._ending or self._current in self._cancelled:
            raise Cancelled

    def _progress(self, done: int, total: int) -> None:
        """Called before each Spark job of an order, and as its tasks end. Raises Cancelled."""
        self._check_cancelled()
        if done == 0 and self._reported != (0, total):
            self._step += 1
        if self._reported != (done, total):
            self._reported = (done, total)
            self._events.tell("progress", id=self._current, done=done, total=total, step=self._step)

    def _job(self, offload: Offload, order: Order) -> Outcome:
        topics, options = order.topics or None, dict(order.options)
        if order.kind == "offload":
            report = offload.once(topics, force=not options.get("due", False))
            failed = [f"{row.topic}: {row.error}" for row in report.rows if row.error is not None]
            return _outcome(report, failed, "topics", "objects", "messages", "bytes")
        if order.kind == "compact":
            from forebay.pipeline.jobs.compact import compact

            compacted = compact(
                self._settings,
                topics,
                target_bytes=options.get("target_bytes"),
                max_bytes=options.get("budget_bytes"),
                compression=options.get("compression"),
                spark=self._session,
                progress=self._progress,
            )
            failed = [f"{row.topic}: {row.error}" for row in compacted.rows if row.error]
            names = ("objects", "replaced", "bytes", "errors", "left_groups", "left_bytes")
            return _outcome(compacted, failed, *names)
        from forebay.pipeline.jobs.verify import verify

        assert order.kind == "verify", order.kind
        verified = verify(
            self._settings,
            topics,
            incremental=options.get("incremental", False),
            budget_bytes=options.get("budget_bytes"),
            orphans=options.get("orphans", True),
            spark=self._session,
            progress=self._progress,
        )
        findings = [
            f"{row.severity}: {row.kind}: {row.topic}, {row.object_id}: {row.detail}"
            for row in verified.findings
            if row.severity != "note"
        ]
        counts = ("topics", "objects", "bytes", "messages", "errors", "warnings", "notes")
        return _outcome(verified, findings, *counts)


def _outcome(report: Any, wrong: list[str], *names: str) -> Outcome:
    summary = {name: int(getattr(report, name)) for name in names}
    if report.ok:
        return Outcome("done", summary)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    details = tuple(_cut(each) for each in wrong[:DETAILS_MAX])
    return Outcome("failed", summary, details[0] + more if details else "it failed", details)


def _facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "state": outcome.state,
        "summary": outcome.summary,
        "error": outcome.error,
        "details": list(outcome.details),
    }


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + " …"


def _with_own_folder(settings: StoreSettings) -> StoreSettings:
    """Puts Spark's files below the data directory, and removes those of a driver that was killed.

    For a cluster the settings stay as they are.
    """
    if not settings.spark.master.startswith("local") or settings.data is None:
        return settings
    folder = Path(settings.data) / WORK_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    own = folder / str(os.getpid())
    make_private_dirs(own)
    options = {
        "spark.local.dir": str(own),
        "spark.sql.warehouse.dir": str(own / "warehouse"),
        **settings.spark.options,
    }
    return replace(settings, spark=replace(settings.spark, options=options))


def main() -> None:
    events = Events(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    os.umask(0o077)  # Spark writes below the data directory too
    threading.Thread(target=beat, args=(events,), name="beat", daemon=True).start()
    commands = sys.stdin.buffer
    length = int.from_bytes(commands.read(LENGTH_BYTES), "little")
    body = commands.read(length)
    if not length or len(body) < length:
        sys.exit(0)  # the server is gone already
    orders = pickle.loads(body)  # noqa: S301  # from the process that started this one
    assert isinstance(orders, Orders)
    logger = logging.getLogger("forebay")
    logger.setLevel(orders.log_level)
    logger.addHandler(LogEvents(events))
    code = Driver(orders, commands, events).run()
    sys.stdout.flush()
    os._exit(code)  # not sys.exit, which would wait for the thread that reads the input


if __name__ == "__main__":
    # Import the module under its own name: the pickle names `forebay.pipeline.driver.Orders`, and
    # the class of this module is `__main__.Orders`.
    from forebay.pipeline import driver  # noqa: PLW0406

    driver.main()
