"""`Watch`: collects the data that the page of a server shows.

It runs two threads while the server runs. One adds a sample to the history every two seconds. The
other probes the object store while the page is open in a browser. A logging handler keeps the
warnings and errors of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta
from msgspec.structs import replace

from forebay.admin.page.history import INTERVAL_SECONDS, History
from forebay.admin.page.topic_states import TopicStates
from forebay.admin.records import Count, Record, Seconds
from forebay.errors import ForebayError, LogClosed, ObjectMissing, ServiceUnavailable
from forebay.logs import event, fields_of
from forebay.topic.store import Store

LOG_EVENTS_MAX: Final = 200
TEXT_MAX: Final = 1000
"""Characters of a text or a field. A longer one is cut, and marked as cut."""
FIELDS_MAX: Final = 20
_IDENTIFYING: Final = ("topic", "kind", "job", "file", "object", "path")
PROBE_KEY: Final = "forebay-is-the-store-there"
PROBE_SECONDS: Final = 3.0
PROBE_TIMEOUT_SECONDS: Final = 3.0
WATCHED_SECONDS: Final = 30.0
"""The store is not probed if nobody has requested the result for this long."""
_JOIN_SECONDS: Final = 3.0
_log: Final = logging.getLogger("forebay.admin")


class Watch:
    """The data for the page of one server. It can be read before `Watch` is started."""

    def __init__(self, store: Store) -> None:
        self.states = TopicStates(store)
        self.history = History(store, self.states)
        self.log_events = LogEvents()
        self.store_probe = StoreProbe(lambda: probe_objects(store))
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around the life of a server."""
        self.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.stop)

    def start(self) -> None:
        logging.getLogger("forebay").addHandler(self.log_events)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample, name="forebay-history", daemon=True),
            threading.Thread(target=self._probe, name="forebay-store-probe", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the threads, but not for a store that does not respond."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        logging.getLogger("forebay").removeHandler(self.log_events)

    def _sample(self) -> None:
        self._every(INTERVAL_SECONDS, self.history.sample)

    def _probe(self) -> None:
        probe = self.store_probe
        self._every(PROBE_SECONDS, lambda: probe.run_once() if probe.is_watched() else None)

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        stopping = self._stopping
        while True:
            try:
                act()
            except LogClosed:
                return
            except (ForebayError, OSError) as error:
                event(_log, logging.WARNING, "watching the store failed", error=error)
            if stopping.wait(seconds):
                return


# ---- log events -------------------------------------------------------------------------------


class LogEvent(Record, frozen=True):
    """A warning or an error, once for all its repetitions."""

    level: Literal["warning", "error"]
    text: str
    logger: str
    first: Seconds
    last: Seconds
    count: Count
    fields: Annotated[Mapping[str, str], Meta(description="The fields of the newest occurrence.")]


class LogEvents(logging.Handler):
    """The last warnings and errors of the process, for the logger `forebay`. Thread-safe.

    Records with the same text and the same identifying fields are one event with a count, so that
    two topics with the same trouble are two events.
    """

    def __init__(self, most: int = LOG_EVENTS_MAX) -> None:
        super().__init__(logging.WARNING)
        self._most = most
        self._events: OrderedDict[tuple[str, ...], LogEvent] = OrderedDict()
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        text, given = fields_of(record)
        fields = {name: _cut(str(value)) for name, value in list(given.items())[:FIELDS_MAX]}
        identity = (fields.get(name, "") for name in _IDENTIFYING)
        key = (record.levelname, record.name, _cut(text), *identity)
        level: Literal["warning", "error"]
        level = "error" if record.levelno >= logging.ERROR else "warning"
        new = LogEvent(level, _cut(text), record.name, record.created, record.created, 1, fields)
        with self._guard:
            before = self._events.pop(key, None)
            if before is not None:
                new = replace(new, first=before.first, count=before.count + 1)
            self._events[key] = new
            while len(self._events) > self._most:
                self._events.popitem(last=False)

    def recent(self, limit: int = LOG_EVENTS_MAX) -> list[LogEvent]:
        """The newest first."""
        with self._guard:
            found = list(self._events.values())
        return found[::-1][:limit]


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + " …"


# ---- the store probe --------------------------------------------------------------------------


class ProbeResult(Record, frozen=True):
    state: Literal["unknown", "answers", "away"]
    since: Seconds | None = None
    """When this state began."""
    why: str | None = None


class StoreProbe:
    """Whether the object store responds. `run_once` is for one thread, the rest for any.

    A separate probe is needed: the client of a store retries for minutes before it fails, and
    uploads may run in another process. A probe without a result after several seconds counts as
    failed, even while it still waits.
    """

    def __init__(self, probe: Callable[[], None]) -> None:
        """`probe` raises a ForebayError if the store does not respond as it should."""
        self._probe = probe
        self._lock = threading.Lock()
        self._result = ProbeResult("unknown")
        self._probing_since: float | None = None
        """When the running probe began, by the monotonic clock."""
        self._watched_at = -WATCHED_SECONDS

    def result(self) -> ProbeResult:
        """Returns the current state. Each call keeps the probes running for WATCHED_SECONDS."""
        with self._lock:
            now = time.monotonic()
            self._watched_at = now
            if (
                self._probing_since is not None
                and now - self._probing_since > PROBE_TIMEOUT_SECONDS
            ):
                began = time.time() - (now - self._probing_since)
                self._set(ProbeResult("away", began, "it does not answer"))
            return self._result

    def is_watched(self) -> bool:
        return time.monotonic() - self._watched_at < WATCHED_SECONDS

    def run_once(self) -> None:
        """Runs one probe. This may block for minutes."""
        with self._lock:
            self._probing_since = time.monotonic()
        found = ProbeResult("answers", time.time())
        try:
            self._probe()
        except ForebayError as error:
            found = ProbeResult("away", time.time(), str(error))
        finally:
            with self._lock:
                self._probing_since = None
        with self._lock:
            self._set(found)

    def _set(self, found: ProbeResult) -> None:
        if found.state != self._result.state:
            self._result = found


def probe_objects(store: Store) -> None:
    """Asks the store's object store for an object that does not exist: ObjectMissing is success."""
    with store.view() as view:
        resources = view.resources()
        if resources is None:
            return
        local = resources.store.local_path(PROBE_KEY)
        if local is not None:
            _require_directory(local.parent)
            return
        with contextlib.suppress(ObjectMissing):
            resources.store.head(PROBE_KEY)


def _require_directory(path: Path) -> None:
    """A store in a directory says that an object is missing whatever is wrong with it."""
    if not path.exists():
        return  # the first upload creates it
    if not path.is_dir():
        raise ServiceUnavailable(f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ServiceUnavailable(f"{path} cannot be written to: check the permissions")
