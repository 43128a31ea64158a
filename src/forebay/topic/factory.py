"""`WalStorageFactory`: opens the topics of a store, keeps them open, and closes them.

Each topic has one storage: its log below the data directory, its objects, and the background work
(writing, uploading, deleting). All topics share a bounded number of threads.

Beware: a storage whose log stopped after an error, or that was fenced, stays unusable. Call
`for_topic` again: it opens the topic again, with recovery.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from forebay.catalog.catalog import Catalog
from forebay.catalog.nonreliable import (
    delete_nonreliable,
    find_nonreliable,
    nonreliable_topics,
    require_not_nonreliable,
)
from forebay.catalog.records import Deletion
from forebay.client.address import wal_root
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    DescriptorError,
    ForebayError,
    LogClosed,
    ServiceError,
    TopicDeleted,
    TopicFenced,
    UnknownTopic,
)
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.names import TopicName, is_topic, parse_topic
from forebay.interrupts import run_aside
from forebay.limits import CLOSE_SECONDS_MAX, CLOSE_THREADS, FOLLOW_SECONDS
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings
from forebay.topic.deletion import LocalDeletion, deleted_here, not_deleted, topics_below
from forebay.topic.metrics import TopicGauges
from forebay.topic.opening import TopicClaim
from forebay.topic.partitions import (
    CreatedTopic,
    has_no_partitions,
    partition_names,
    partitions_of,
    require_no_partitions,
    require_not_fewer,
)
from forebay.topic.resources import StoreResources
from forebay.topic.storage import WalStorage
from forebay.upload.deletion import DeletedTopic, begin_deletion, finish_deletion
from forebay.upload.sweeper import Sweeper
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.retention import Deleter
from forebay.wal.watermarks import ThreadWaiter

_log: Final = logging.getLogger("forebay.topic")
FAILURES: Final = Counter(
    "forebay_background_failures_total",
    "Runs of background work that failed, by kind of error.",
    ["kind"],
)
_PRODUCERS_SECONDS: Final = 1.0
"""The delay before the numbers of idempotent producers are written to the catalog."""
_OPENINGS_MAX: Final = 5
"""How often a topic is opened again because it was deleted meanwhile."""
_RELEASE_SHARE: Final = 0.8
"""The part of the time for the catalog in which topics are given up one by one. The rest is for
the one request that ends the lease: it frees all of them."""


class Maintained(Protocol):
    """A topic with periodic background work."""

    @property
    def name(self) -> str: ...

    def fence(self, error: TopicFenced) -> None: ...


class Background:
    """Runs the periodic work of topics (upload, retention) on a bounded pool, by timers.

    A run that fails, for whatever reason, is logged, counted and tried again the next time: a bug
    must not silently end a topic's uploads. The work of a closed or fenced topic ends.
    """

    def __init__(self, pool: WriterPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock

    def every(
        self,
        seconds: float,
        owner: Maintained,
        task: Callable[[Maintained], bool | None],
        *,
        first: float | None = None,
    ) -> None:
        """Runs `task(owner)` repeatedly, with `seconds` between the end of a run and the next.

        A run that returns True is repeated as soon as the work of others, which waits, is done.
        `first` is the delay before the first run. It ends when the task raises LogClosed or
        TopicFenced, or when the owner is garbage collected: only a weak reference is kept.
        """
        reference = weakref.ref(owner)
        name = owner.name

        def run() -> None:
            alive = reference()
            if alive is None:
                return
            pause = seconds
            try:
                if task(alive):
                    pause = 0
            except LogClosed:
                return
            except TopicFenced as error:
                alive.fence(error)
                return
            except Exception as error:  # noqa: BLE001  # reported, and tried again
                _report(name, error)
            self._pool.call_at(self._clock.monotonic() + pause, run)

        delay = seconds if first is None else first
        self._pool.call_at(self._clock.monotonic() + delay, run)

    def once(self, seconds: float, owner: Maintained, task: Callable[[Maintained], None]) -> None:
        """Runs `task(owner)` after `seconds`, and after every failure again."""

        def run(alive: Maintained) -> None:
            task(alive)
            raise LogClosed("done")

        self.every(seconds, owner, run)


def _report(topic: str, error: Exception) -> None:
    """Logs the error. An unexpected class of error is a bug and is logged with its traceback."""
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
            # Absolute, so that a change of the working directory does not move the store.
            settings = replace(settings, data=Path(settings.data).absolute())
        self.settings = settings
        self._disk = disk or LocalDisk()
        self._clock = clock = since_1970(clock)
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
        self._sweeper = self._new_sweeper()
        self._lock = threading.Lock()
        self._storages: dict[TopicName, WalStorage] = {}
        self._opening: dict[TopicName, threading.Lock] = {}
        self.on_deleted: list[Callable[[TopicName], None]] = []
        """Called when this process has deleted a topic, on the deleting thread."""
        self._kinds: dict[TopicName, threading.Lock] = {}
        """For each base name: one call at a time creates or deletes a topic with partitions."""
        self._begins: dict[TopicName, int] = {}
        """Where topics begin that were deleted from a store in memory."""
        self._closed = False
        self._closing = threading.RLock()
        self._revoke_by = float("-inf")
        self.closed = False
        """Whether `close` has finished. After an interrupt, `close` must be called again."""
        self._pid = os.getpid()
        self._gauges = TopicGauges(self.storages, clock)

    def _new_sweeper(self) -> Sweeper | None:
        if self.resources is None:
            return None
        catalog, store = self.resources.catalog, self.resources.store
        return Sweeper(
            catalog,
            store,
            self.settings.sweeper,
            self._background_pool,
            self._clock,
            before=self._finish_deletions,
        )

    def for_topic(self, name: str) -> WalStorage:
        """Returns the topic's storage. Opens, recovers or creates the topic on first use.

        A topic that was deleted is created again, after its deletion was finished if it was
        interrupted.

        Raises TopicOwned if another process owns the topic, CorruptLog (MissingData) if data is
        damaged or missing, TopicKindConflict if the topic is not a stored one, and LogClosed after
        `close`. An interrupt ends the wait and not the
        opening: the next call returns the topic.
        """
        topic = parse_topic(name)
        self._require_own()
        storage = self._storages.get(topic)
        if storage is not None and not storage.wal.ended and not self._closed:
            return storage
        return run_aside(partial(self._open_in_turn, topic))

    def _open_in_turn(self, topic: TopicName) -> WalStorage:
        with self._lock:
            self._require_open()
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
                self._start_background(storage)
                return storage
        storage.close()
        raise LogClosed("the store is closed; open it again")

    def _open_storage(self, topic: TopicName, known_offset: int) -> WalStorage:
        for _ in range(_OPENINGS_MAX):
            if self._finish_deletion(topic):
                known_offset = 0  # what this process knew of the topic was deleted
            try:
                return self._open_log(topic, known_offset or self._begins.get(topic, 0))
            except TopicDeleted as error:  # meanwhile, by another process
                last = error
        raise last

    def _open_log(self, topic: TopicName, known_offset: int) -> WalStorage:
        directory = self._directory(topic)
        if directory is not None:
            self._require_stored(topic, directory)
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
            storage = WalStorage(wal, self._deleter, self.resources, claim)
            # Without them the topic opens, too: they are read again before an upload or a trim.
            with suppress(ServiceError, DescriptorError):
                storage.refresh_settings()
        except BaseException:
            wal.shutdown()
            raise
        return storage

    def _require_stored(self, topic: TopicName, directory: Path) -> None:
        """Raises TopicKindConflict if the topic is not a stored one, before it gets a directory."""
        if self.resources is not None and not self._list(directory):
            catalog = self.resources.catalog
            if catalog.record(topic) is None:
                require_not_nonreliable(catalog, topic)

    # -- creating -------------------------------------------------------------------------------

    def create(self, name: str, partitions: int | None = None) -> CreatedTopic:
        """Creates the topic, or so many partitions of it; what exists is left as it is.

        Raises TopicConflict if a topic with partitions and one without would have the same name,
        and if there are more partitions already; UsageError for a wrong number of them.
        """
        topic = parse_topic(name)
        wanted = [topic] if partitions is None else partition_names(topic, partitions)
        self._require_own()
        with self._kind_lock(topic):
            there = run_aside(partial(self._require_one_kind, topic, wanted, partitions))
            for each in wanted:
                self.for_topic(str(each))
        return CreatedTopic(
            str(topic),
            created=not there.issuperset(wanted),
            partitions=() if partitions is None else tuple(map(str, wanted)),
        )

    def _kind_lock(self, topic: TopicName) -> threading.Lock:
        with self._lock:
            return self._kinds.setdefault(parse_topic(topic.base), threading.Lock())

    def _require_one_kind(
        self, topic: TopicName, wanted: list[TopicName], partitions: int | None
    ) -> set[TopicName]:
        """Returns the topics of this name that exist, with or without partitions."""
        base = parse_topic(topic.base)
        there = self._same_base(base)
        if partitions is not None:
            require_not_fewer(base, partitions_of(base, there), partitions)
        if base in there and wanted != [base]:
            raise has_no_partitions(wanted[0])
        if wanted == [base]:
            require_no_partitions(base, there)
        return there

    def partitions(self, name: str) -> list[str]:
        """Returns the names of the partitions of a topic, ordered by their numbers."""
        base = parse_topic(name)
        self._require_own()
        return run_aside(lambda: [str(each) for each in partitions_of(base, self._same_base(base))])

    def _same_base(self, base: TopicName, *, deleting: bool = False) -> set[TopicName]:
        """Returns the topic and its partitions, as far as they exist.

        With `deleting`, also those whose deletion was not finished.
        """
        found = {each for each in self._storages.copy() if each.base == str(base)}
        root = self._wal_root()
        if self.resources is None or root is None:
            return found
        names = (f"/{base.namespace}/{name}" for name in self._list(root / base.namespace))
        local = {parse_topic(name) for name in names if is_topic(name)}
        catalog = self.resources.catalog
        stored = {base, *catalog.topics(f"{base.namespace}/{base.topic}-part-", deleted=True)}
        stored.update(each.name for each in nonreliable_topics(catalog))
        found |= {each for each in local | stored if each.base == str(base)}
        return {each for each in found if self._is_there(each, deleting=deleting)}

    def _is_there(self, topic: TopicName, *, deleting: bool) -> bool:
        assert self.resources is not None
        catalog = self.resources.catalog
        record = catalog.find(topic)
        if find_nonreliable(catalog, topic) is not None:
            return True
        if record is not None and record.is_deleted:
            return deleting and record.deletion is Deletion.DELETING
        directory = self._directory(topic)
        return record is not None or (directory is not None and self._disk.exists(directory))

    # -- deleting -------------------------------------------------------------------------------

    def delete_partitions(self, name: str) -> list[DeletedTopic]:
        """Deletes all partitions of a topic, the highest number first; see `delete`.

        Raises UnknownTopic if there is none. After an error, call it again for the rest.
        """
        base = parse_topic(name)
        self._require_own()
        with self._kind_lock(base):
            there = run_aside(lambda: self._same_base(base, deleting=True))
            found = partitions_of(base, there)
            if not found:
                raise UnknownTopic(f"{base} has no partitions in this store")
            return [self.delete(str(each)) for each in reversed(found)]

    def delete(self, name: str) -> DeletedTopic:
        """Deletes the topic with everything that belongs to it; see `forebay.upload.deletion`.

        Whoever has it open in this process gets TopicDeleted. A deletion that was interrupted is
        finished. Raises UnknownTopic, TopicOwned if another process owns the topic, and
        ServiceError if the catalog or the object store is away: call it again to finish it.
        """
        topic = parse_topic(name)
        self._require_own()
        self.require_outside()
        return run_aside(partial(self._delete_in_turn, topic))

    def _delete_in_turn(self, topic: TopicName) -> DeletedTopic:
        with self._lock:
            self._require_open()
            turn = self._opening.setdefault(topic, threading.Lock())
        with turn:
            return self._delete(topic)

    def _delete(self, topic: TopicName) -> DeletedTopic:
        resources, directory = self.resources, self._directory(topic)
        if resources is None or directory is None:
            return self._delete_from_memory(topic)
        if resources.catalog.record(topic) is None and delete_nonreliable(resources.catalog, topic):
            self._tell_deleted(topic)
            return DeletedTopic(str(topic), 0)
        if resources.catalog.find(topic) is None:
            if not self._disk.exists(directory):
                raise self._unknown(topic)
            self._open(topic)  # a log that the catalog does not know: it says where it ends
        storage = self._storages.get(topic)
        local = LocalDeletion(resources, self._disk, directory, topic, storage)
        try:
            with local.locked():
                record = begin_deletion(
                    resources.catalog,
                    resources.store,
                    topic,
                    ended=local.ended,
                    end=local.end,
                    before=local.end_storage,
                )
                files = local.remove()
        except UnknownTopic:
            self._finish_deletion(topic)  # another machine may have deleted it
            raise
        self._storages.pop(topic, None)
        self._tell_deleted(topic)
        done = finish_deletion(resources.catalog, resources.store, topic)
        if done is None:  # another process finished it, and has created the topic again
            done = DeletedTopic(str(topic), record.tail)
        return replace(done, files=files)

    def _tell_deleted(self, topic: TopicName) -> None:
        for call in [*self.on_deleted]:
            call(topic)

    def _unknown(self, topic: TopicName) -> UnknownTopic:
        found = partitions_of(topic, self._same_base(topic))
        more = f"; it has {len(found)} partitions, such as {found[0]}" if found else ""
        return UnknownTopic(f"there is no topic {topic} in this store{more}")

    def _delete_from_memory(self, topic: TopicName) -> DeletedTopic:
        storage = self._storages.get(topic)
        if storage is None:
            raise self._unknown(topic)
        storage.end_for_deletion(deleted_here(topic))
        storage.abandon()
        self._begins[topic] = storage.wal.current_offset()
        del self._storages[topic]
        self._tell_deleted(topic)
        return DeletedTopic(str(topic), self._begins[topic])

    def finish_deletions(self) -> list[str]:
        """Finishes the deletions of topics that were interrupted; returns their names.

        Removes local logs, too, whose topics were deleted from other machines. A topic that is in
        use, or a service that is away, is logged and left for the next time.
        """
        self._require_own()
        return run_aside(self._finish_deletions)

    def _finish_deletions(self) -> list[str]:
        if self.resources is None:
            return []
        catalog, done = self.resources.catalog, []
        local = self._local_topics()
        for topic in catalog.topics(deleted=True):
            record = catalog.find(topic)
            if record is None or not record.is_deleted:
                continue
            if record.deletion is Deletion.DELETED and topic not in local:
                continue
            try:
                self._finish_in_turn(topic)
                done.append(str(topic))
            except (ForebayError, OSError) as error:
                event(
                    _log,
                    logging.WARNING,
                    "a deletion could not be finished: it is tried again",
                    topic=topic,
                    error=error,
                )
        return done

    def _finish_in_turn(self, topic: TopicName) -> None:
        with self._lock:
            self._require_open()
            turn = self._opening.setdefault(topic, threading.Lock())
        with turn:
            self._finish_deletion(topic)

    def _finish_deletion(self, topic: TopicName) -> bool:
        """Removes what is left of a topic that was deleted; False if it was not."""
        resources, directory = self.resources, self._directory(topic)
        if resources is None or directory is None:
            return False
        record = resources.catalog.find(topic)
        if record is None or not record.is_deleted:
            return False
        storage = self._storages.get(topic)
        if storage is not None:  # fenced, because another process has deleted the topic
            storage.end_for_deletion(deleted_here(topic))
            storage.abandon()
        local = LocalDeletion(resources, self._disk, directory, topic, None)
        with local.locked():
            local.remove()
        self._storages.pop(topic, None)
        finish_deletion(resources.catalog, resources.store, topic)
        return True

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

    def _start_background(self, storage: WalStorage) -> None:
        """Starts the background work of a topic."""
        if storage.uploader is None:
            return
        if self._sweeper is not None:
            self._sweeper.start()
        reference, flush = weakref.ref(storage), self._background.once
        seconds = self.settings.metadata.progress_flush_interval_seconds

        def schedule() -> None:
            alive = reference()
            if alive is not None:
                flush(seconds, alive, _flush_cursors)

        storage.cursors.schedule = schedule

        def schedule_producers() -> None:
            alive = reference()
            if alive is not None:
                flush(_PRODUCERS_SECONDS, alive, _flush_producers)

        storage.producers.schedule = schedule_producers
        uploader = self.settings.uploader
        if uploader.enabled:
            self._background.every(uploader.interval_seconds, storage, _upload, first=0)
        if uploader.enabled and uploader.runner == "spark":
            follow_seconds = min(uploader.interval_seconds, FOLLOW_SECONDS)
            self._background.every(follow_seconds, storage, _follow)
        minutes = self.settings.deleter.check_interval_minutes
        self._background.every(minutes * 60, storage, _trim)

    def _directory(self, topic: TopicName) -> Path | None:
        root = self._wal_root()
        return None if root is None else root / topic.namespace / topic.topic

    def _wal_root(self) -> Path | None:
        return None if self.settings.data is None else wal_root(self.settings)

    def opened(self, name: str) -> WalStorage | None:
        """Returns the topic's storage if it is open and has not stopped; None otherwise."""
        storage = self._storages.get(parse_topic(name))
        return storage if storage is not None and not storage.wal.ended else None

    def storages(self) -> list[WalStorage]:
        """Returns the storages that are open and have not stopped."""
        return [each for each in self._storages.copy().values() if not each.wal.ended]

    def seal_for_ledgers(self, wanted: Collection[str]) -> None:
        """See `Store.seal_for_ledgers`; without names, seals all open topics of ledgers."""
        for storage in self.storages():
            if storage.uploader is None or (wanted and storage.name not in wanted):
                continue
            try:
                storage.seal_for_ledgers()
            except ForebayError as error:
                text = "segment not sealed: its ledger ends inside of it"
                event(_log, logging.WARNING, text, topic=storage.name, error=error)

    def topics(self) -> list[str]:
        """Returns the names of all topics, open or not, sorted."""
        self._require_own()
        return run_aside(self._topics)

    def _topics(self) -> list[str]:
        found = set(self._storages.copy())
        if self.resources is not None:
            catalog = self.resources.catalog
            known = set(catalog.topics())
            found = known.union(not_deleted(catalog, (found | self._local_topics()) - known))
        return sorted(map(str, found))

    def _local_topics(self) -> set[TopicName]:
        """The topics with a directory here."""
        root = self._wal_root()
        return set() if root is None else topics_below(root, self._list)

    def _list(self, path: Path) -> list[str]:
        try:
            return self._disk.list_dir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def require_outside(self) -> None:
        """Raises UsageError if the calling thread is in the middle of a call on a log.

        Another thread would wait for that log's lock, and this one for the other thread.
        """
        for storage in self._storages.copy().values():
            storage.wal.require_outside()

    def close(self) -> None:
        """Syncs and closes every topic. Raises the first error after all were tried.

        All logs are synced first, while the lease is valid, so that what they queued is confirmed
        although the catalog may be away. Then requests to the object store are waited for, at most
        CLOSE_SECONDS_MAX, and the topics are given up, within `metadata.timeout_seconds`: both for
        all topics together. A topic that could not be given up becomes free when the lease ends.

        In a forked child it does nothing, because the topics belong to the parent. If it is
        interrupted, call it again to continue.
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
        uploaders = [each.uploader for each in storages if each.uploader is not None]
        for uploader in uploaders:
            uploader.stop()
        if self._sweeper is not None:
            self._sweeper.stop()
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        self._finish_by(deadline)
        _sync_all(storages)
        closers: list[Callable[[], None]] = [
            partial(side_by_side, [partial(_close_by, each.close, deadline) for each in uploaders]),
            partial(self._give_up, storages),
            partial(_close_by, self._background_pool.close, deadline),
            self._pool.close,
        ]
        if self._sweeper is not None:
            closers.append(partial(_close_by, self._sweeper.close, deadline))
        if self.resources is not None:
            closers.append(partial(self._close_resources, self.resources))
        close_all([*closers, self._forget])

    def _give_up(self, storages: list[WalStorage]) -> None:
        """Closes the topics, whose uploads have ended, with one deadline for the catalog."""
        seconds = self.settings.metadata.timeout_seconds
        began = time.monotonic()
        self._revoke_by = began + seconds
        self._finish_by(began + _RELEASE_SHARE * seconds)
        side_by_side([partial(storage.close, 0) for storage in storages])

    def _close_resources(self, resources: StoreResources) -> None:
        """Ends the lease, with the time that is left for it, and closes everything else."""
        # Background work may have taken longer than that: the lease has its share in any case.
        share = (1 - _RELEASE_SHARE) * self.settings.metadata.timeout_seconds
        resources.finish_by(max(self._revoke_by, time.monotonic() + share))
        resources.close()

    def _finish_by(self, deadline: float) -> None:
        if self.resources is not None:
            self.resources.finish_by(deadline)

    def _forget(self) -> None:
        self.closed = True
        self._storages.clear()

    def _require_own(self) -> None:
        """Raises LogClosed in a forked child, which lacks the threads and may find locks taken."""
        if os.getpid() != self._pid:
            raise LogClosed(
                "this process was forked after the store was opened, so the store belongs to its "
                "parent; open stores after forking"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise LogClosed("the store is closed; open it again")


def _upload(storage: Maintained) -> bool:
    """Uploads what is due, unless the topic is left to the Spark pipeline."""
    assert isinstance(storage, WalStorage)
    return storage.uploads_itself and storage.upload_due()


def _follow(storage: Maintained) -> None:
    """Another process may upload: reads the watermarks and the settings from the catalog."""
    assert isinstance(storage, WalStorage)
    storage.follow_uploads()


def _flush_cursors(storage: Maintained) -> None:
    assert isinstance(storage, WalStorage)
    if not storage.wal.ended:
        storage.flush_cursors()


def _flush_producers(storage: Maintained) -> None:
    assert isinstance(storage, WalStorage)
    if not storage.wal.ended:
        storage.flush_producers()


def _trim(storage: Maintained) -> None:
    assert isinstance(storage, WalStorage)
    try:
        storage.trim_due()
    finally:
        storage.index_chain()


def _sync_all(storages: list[WalStorage]) -> None:
    """Syncs what all logs have queued, at once. An error of a log is left to its `close`."""
    waiters = []
    for storage in storages:
        waiter = ThreadWaiter()
        with suppress(ForebayError, RuntimeError):  # without threads, `close` syncs by itself
            if storage.wal.enlist(storage.wal.current_offset(), waiter, "synced"):
                waiters.append(waiter)
    for waiter in waiters:
        waiter.wait()


def _close_by(close: Callable[[float], None], deadline: float) -> None:
    close(max(deadline - time.monotonic(), 0))


def close_all(closers: list[Callable[[], None]]) -> None:
    """Calls all of them, even if some raise. Then raises the first error."""
    first: Exception | None = None
    for close in closers:
        try:
            close()
        except Exception as error:  # noqa: BLE001  # re-raised below, once all were tried
            first = first or error
    if first is not None:
        raise first


def side_by_side(tasks: list[Callable[[], None]]) -> None:
    """Calls all of them, on up to CLOSE_THREADS threads, even if some raise.

    Then raises the first error. The calling thread works too: while the interpreter exits, no other
    can be started. If it is interrupted, what the others have begun goes on.
    """
    waiting = deque(enumerate(tasks))
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while waiting:
            try:
                number, task = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                task()
            except BaseException as error:  # noqa: BLE001  # raised below, once all were tried
                errors[number] = error

    threads: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # there are no more threads: the running ones suffice
            for _ in range(min(len(tasks), CLOSE_THREADS) - 1):
                thread = threading.Thread(target=work, name="forebay-closing", daemon=True)
                thread.start()
                threads.append(thread)
        work()
        for thread in threads:
            thread.join()
    except BaseException:
        waiting.clear()
        raise
    if errors:
        raise errors[min(errors)]
