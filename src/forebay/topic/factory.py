"""`WalStorageFactory`: opens the storages of topics, keeps them, and closes them.

There is one storage for each topic of a store: the log below the data directory, the objects, and
the background work (writing, uploading, deleting), all on a bounded number of threads. A topic
whose log stopped after an error, or that was fenced, is opened again, with recovery, when it is
asked for again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from forebay.catalog.catalog import Catalog
from forebay.client.address import wal_root
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import ForebayError, LogClosed, TopicFenced
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.names import TopicName, is_topic, parse_topic
from forebay.limits import CLOSE_SECONDS_MAX, FOLLOW_SECONDS
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings
from forebay.topic.metrics import TopicGauges
from forebay.topic.opening import TopicClaim
from forebay.topic.resources import StoreResources
from forebay.topic.storage import WalStorage
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.retention import Deleter

_log: Final = logging.getLogger("forebay.topic")
FAILURES: Final = Counter(
    "forebay_background_failures_total",
    "Runs of background work that ended with an error, by kind.",
    ["kind"],
)


class Maintained(Protocol):
    """A topic with periodic background work."""

    @property
    def name(self) -> str: ...

    def fence(self, error: TopicFenced) -> None: ...


class Background:
    """Periodic work of topics (upload, retention) on a bounded pool: timers, not threads.

    A run that failed is logged, counted, and tried again at the next turn, whatever failed: a bug
    must not end a topic's uploads in silence. A topic that was closed or fenced stops for good.
    """

    def __init__(self, pool: WriterPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    def every(
        self,
        seconds: float,
        owner: Maintained,
        task: Callable[[Maintained], None],
        *,
        first: float | None = None,
    ) -> None:
        """Runs `task(owner)` again `seconds` after it ended, while somebody else holds the owner.

        It ends when the task raises LogClosed or TopicFenced.
        """
        reference = weakref.ref(owner)
        name = owner.name

        def run() -> None:
            alive = reference()
            if alive is None:
                return
            try:
                task(alive)
            except LogClosed:
                return
            except TopicFenced as error:
                alive.fence(error)
                return
            except Exception as error:  # noqa: BLE001  # reported, and tried again: it must not end
                _report(name, error)
            self._pool.call_at(self._clock.monotonic() + seconds, run)

        delay = seconds if first is None else first
        self._pool.call_at(self._clock.monotonic() + delay, run)


def _report(topic: str, error: Exception) -> None:
    """Logs the error; one that nobody raises on purpose is a bug and comes with its traceback."""
    FAILURES.add(1, type(error).__name__)
    expected = isinstance(error, ForebayError | OSError)
    event(
        _log,
        logging.WARNING if isinstance(error, ForebayError) else logging.ERROR,
        "background work failed",
        trace=None if expected else error,
        topic=topic,
        error=error if expected else repr(error),
    )


class WalStorageFactory:
    """All topics of one store. Thread-safe."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        catalog: Catalog | None = None,
        store: CloudStore | None = None,
    ) -> None:
        if settings.data is not None:
            # A process that changes its working directory must not move its store.
            settings = replace(settings, data=Path(settings.data).absolute())
        self.settings = settings
        self._disk = disk or LocalDisk()
        self._clock = clock
        self._deleter = Deleter(settings.deleter)
        self.resources = (
            StoreResources(settings, clock, catalog=catalog, store=store).open()
            if settings.data is not None
            else None
        )
        self._pool = WriterPool(settings.writer_threads, clock)
        self._background_pool = WriterPool(
            settings.uploader.concurrent_topics, clock, name="background"
        )
        self._background = Background(self._background_pool, clock)
        self._lock = threading.Lock()
        self._storages: dict[TopicName, WalStorage] = {}
        self._opening: dict[TopicName, threading.Lock] = {}
        self._closed = False
        self._closing = threading.RLock()
        self.closed = False
        """Whether a `close` came to its end: one that was interrupted is to be called again."""
        self._pid = os.getpid()
        self._gauges = TopicGauges(self.storages, clock)

    def for_topic(self, name: str) -> WalStorage:
        """The topic's storage, opened, recovered or created on first use."""
        topic = parse_topic(name)
        self._require_own()
        with self._lock:
            self._require_open()
            storage = self._storages.get(topic)
            if storage is not None and not storage.wal.ended:
                return storage
            turn = self._opening.setdefault(topic, threading.Lock())
        with turn:
            return self._open(topic)

    def _open(self, topic: TopicName) -> WalStorage:
        with self._lock:
            self._require_open()
            storage = self._storages.get(topic)
        known_offset = 0
        if storage is not None:
            if not storage.wal.ended:
                return storage
            storage.abandon()
            known_offset = storage.wal.watermarks().synced
        storage = self._open_storage(topic, known_offset)
        with self._lock:
            if not self._closed:
                self._storages[topic] = storage
                self._tend(storage)
                return storage
        storage.close()
        raise LogClosed("the store is closed")

    def _open_storage(self, topic: TopicName, known_offset: int) -> WalStorage:
        directory = self._directory(topic)
        claim = self._claim(topic, directory)
        wal = Wal(
            replace(self.settings.wal, dir=directory),
            str(topic),
            disk=self._disk,
            clock=self._clock,
            pool=self._pool,
            known_offset=known_offset,
            claim=claim,
        )
        try:
            return WalStorage(wal, self._deleter, self.resources, claim)
        except BaseException:
            wal.shutdown()
            raise

    def _claim(self, topic: TopicName, directory: Path | None) -> TopicClaim | None:
        if self.resources is None or directory is None:
            return None
        return TopicClaim(
            self.resources.session,
            self.resources.store,
            topic,
            self._disk,
            directory,
            wait_seconds=2 * self.settings.metadata.lease_seconds,
        )

    def _tend(self, storage: WalStorage) -> None:
        """Begins the work behind a topic."""
        if storage.uploader is None:
            return
        uploader = self.settings.uploader
        if uploader.enabled and uploader.runner == "inline":
            self._background.every(uploader.interval_seconds, storage, _upload, first=0)
        elif uploader.enabled:
            seconds = min(uploader.interval_seconds, FOLLOW_SECONDS)
            self._background.every(seconds, storage, _follow)
        minutes = self.settings.deleter.check_interval_minutes
        self._background.every(minutes * 60, storage, _trim)

    def _directory(self, topic: TopicName) -> Path | None:
        root = self._wal_root()
        return None if root is None else root / topic.namespace / topic.topic

    def _wal_root(self) -> Path | None:
        return None if self.settings.data is None else wal_root(self.settings)

    def opened(self, name: str) -> WalStorage | None:
        """The topic's storage if it is open and in order; opens nothing."""
        with self._lock:
            storage = self._storages.get(parse_topic(name))
        return storage if storage is not None and not storage.wal.ended else None

    def storages(self) -> list[WalStorage]:
        """Those that are open and in order now."""
        with self._lock:
            return [each for each in self._storages.values() if not each.wal.ended]

    def topics(self) -> list[str]:
        """The names of all topics, open or not, sorted."""
        self._require_own()
        with self._lock:
            names = {str(topic) for topic in self._storages}
        if self.resources is not None:
            names.update(str(topic) for topic in self.resources.catalog.topics())
        root = self._wal_root()
        if root is not None:
            for namespace in self._list(root):
                found = (f"/{namespace}/{topic}" for topic in self._list(root / namespace))
                names.update(name for name in found if is_topic(name))
        return sorted(names)

    def _list(self, path: Path) -> list[str]:
        try:
            return self._disk.list_dir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        """Syncs and closes every topic; the first error is raised after all were tried.

        What still waits for an object store is waited for CLOSE_SECONDS_MAX, all topics together.
        In a forked child it does nothing: the topics belong to the parent. Interrupted, it can be
        called again, and goes on.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self.closed:
                self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            storages = list(self._storages.values())
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        for storage in storages:
            if storage.uploader is not None:
                storage.uploader.stop()
        closers: list[Callable[[], None]] = [
            partial(_close_by, storage.close, deadline) for storage in storages
        ]
        closers += [partial(_close_by, self._background_pool.close, deadline), self._pool.close]
        if self.resources is not None:
            closers.append(self.resources.close)
        close_all([*closers, self._forget])

    def _forget(self) -> None:
        self.closed = True
        self._storages.clear()

    def _require_own(self) -> None:
        """Raises in a forked child, where the locks may be taken and the threads are not there."""
        if os.getpid() != self._pid:
            raise LogClosed(
                "the store was opened before this process was forked and belongs to its parent; "
                "open stores after forking"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise LogClosed("the store is closed")


def _upload(storage: Maintained) -> None:
    assert isinstance(storage, WalStorage)
    storage.upload_due()


def _follow(storage: Maintained) -> None:
    """Somebody else uploads: the watermarks are what the catalog says."""
    assert isinstance(storage, WalStorage)
    storage.follow_uploads()


def _trim(storage: Maintained) -> None:
    assert isinstance(storage, WalStorage)
    storage.trim_due()


def _close_by(close: Callable[[float], None], deadline: float) -> None:
    close(max(deadline - time.monotonic(), 0))


def close_all(closers: list[Callable[[], None]]) -> None:
    """Calls all of them, even when some raise; then raises the first error."""
    first: Exception | None = None
    for close in closers:
        try:
            close()
        except Exception as error:  # noqa: BLE001  # re-raised below, once all were tried
            first = first or error
    if first is not None:
        raise first
