"""`WalStorage` and `WalStorageFactory`: one topic's storage, and where it comes from.

The factory keeps one storage for each topic of a data directory (`wal/<namespace>/<topic>/`), all
on the same writer threads. A topic whose log stopped after an error of the disk is opened anew,
with recovery, when it is asked for again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import LogClosed, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.message import StreamMessage
from forebay.format.names import TopicName, is_topic, parse_topic
from forebay.settings import StoreSettings
from forebay.wal.append import Durability
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.reader import LogReader
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where a reader begins: build it with `latest()` or `offset(n)`."""

    value: int | Literal["latest"]

    @classmethod
    def latest(cls) -> StartPosition:
        """After the last message appended so far."""
        return cls("latest")

    @classmethod
    def offset(cls, number: int) -> StartPosition:
        if number < 0:
            raise UsageError(f"offset {number} is negative")
        return cls(number)


class WalStorage:
    """One topic: its log, and what is kept about it."""

    def __init__(self, wal: Wal, deleter: Deleter) -> None:
        self.wal = wal
        self._deleter = deleter
        self._acknowledged = 0
        self._lock = threading.Lock()

    def append_message(self, message: StreamMessage, durability: Durability = "buffered") -> int:
        """Appends the message as it is, but for its offset, which is answered."""
        return self.wal.append_message(message, durability)

    def create_reader(self, start: StartPosition) -> LogReader:
        """A live reader: it waits at the end of the log until it is closed."""
        return self.wal.tail_reader(start.value)

    def ack_checkpoint(self, up_to_offset: int) -> None:
        """Notes that consumers are done with everything up to and including the offset."""
        self.wal.wait(up_to_offset)
        with self._lock:
            self._acknowledged = max(self._acknowledged, up_to_offset + 1)

    @property
    def acknowledged(self) -> int:
        """One more than the highest offset that was given to `ack_checkpoint`."""
        return self._acknowledged

    def flush(self) -> None:
        self.wal.flush()

    def trim_local(self) -> list[Segment]:
        """One retention pass. Only what is also in verified objects may go."""
        return self.wal.retain(self._deleter, self.wal.watermarks().verified)

    def close(self) -> None:
        self.wal.shutdown()


class WalStorageFactory:
    """All topics of one store. Thread-safe."""

    def __init__(
        self, settings: StoreSettings, *, disk: Disk | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if settings.data is not None:
            # A process that changes its working directory must not move its store.
            settings = replace(settings, data=Path(settings.data).absolute())
        self.settings = settings
        self._disk = disk or LocalDisk()
        self._clock = clock
        self._pool = WriterPool(settings.writer_threads, clock)
        self._deleter = Deleter(settings.deleter)
        self._lock = threading.Lock()
        self._storages: dict[TopicName, WalStorage] = {}
        self._opening: dict[TopicName, threading.Lock] = {}
        self._closed = False
        self._pid = os.getpid()

    def for_topic(self, name: str) -> WalStorage:
        """The topic's storage, opened, recovered or created on first use."""
        topic = parse_topic(name)
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
            storage.wal.abandon()
            known_offset = storage.wal.watermarks().synced
        storage = WalStorage(self._open_wal(topic, known_offset), self._deleter)
        with self._lock:
            if not self._closed:
                self._storages[topic] = storage
                return storage
        storage.close()
        raise LogClosed("the store is closed")

    def _open_wal(self, topic: TopicName, known_offset: int) -> Wal:
        directory = self._directory(topic)
        settings = replace(self.settings.wal, dir=directory)
        return Wal(
            settings,
            str(topic),
            disk=self._disk,
            clock=self._clock,
            pool=self._pool,
            known_offset=known_offset,
        )

    def _directory(self, topic: TopicName) -> Path | None:
        data = self.settings.data
        return None if data is None else Path(data) / "wal" / topic.namespace / topic.topic

    def topics(self) -> list[str]:
        """The names of all topics, open or not, sorted."""
        with self._lock:
            names = {str(topic) for topic in self._storages}
        if self.settings.data is not None:
            root = Path(self.settings.data) / "wal"
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

        In a forked child it does nothing: the topics belong to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            storages = list(self._storages.values())
            self._storages.clear()
        try:
            close_all([storage.close for storage in storages])
        finally:
            self._pool.close()

    def _require_open(self) -> None:
        if self._closed:
            raise LogClosed("the store is closed")


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
