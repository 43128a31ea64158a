"""`StoreView`: read-only access to the topics of a store, for a process that does not own them.

It reads both tiers: the local log, if it is on this machine, up to the position that its owner
published; and objects before it or instead of it. A view takes no lease and no lock, changes no
epoch, starts no background work, and creates no file, not even the catalog.

Beware: a view is a snapshot. `refresh` moves it forward. A reader ends where the view ended when
the reader was created.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.catalog.adopt import restored
from forebay.catalog.records import Owner, TopicRecord, offset_before
from forebay.catalog.topic_settings import read_namespace_policies, read_topic_settings
from forebay.client.address import wal_root
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    ForebayError,
    MissingData,
    OffsetOutOfRange,
    UnknownTopic,
    UsageError,
)
from forebay.files.disk import Disk
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import SegmentNames, TopicName, parse_topic
from forebay.read.by_time import TimeSearch
from forebay.settings import StoreSettings
from forebay.topic.configure import accepted
from forebay.topic.deletion import not_deleted, topics_below
from forebay.topic.resources import StoreResources, catalog_file
from forebay.wal.checkpoints import read_published
from forebay.wal.identity import read_log_id
from forebay.wal.reader import LogReader, Plan, ReadableLog
from forebay.wal.segment import Segment, SegmentIndexes
from forebay.wal.view import LogView
from forebay.wal.watermarks import Visibility, Waiter


class StoreView:
    """All topics of one store, for reading. Not thread-safe."""

    def __init__(
        self,
        source: StoreSettings | StoreResources,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`source` is settings, or open resources, which `close` leaves open."""
        given = source if isinstance(source, StoreResources) else None
        settings = source.settings if isinstance(source, StoreResources) else source
        if settings.data is None:
            raise UsageError("a store in memory can be read only by its own process")
        self.settings = replace(settings, data=Path(settings.data).absolute())
        self.clock = since_1970(clock)
        self._resources = given or StoreResources(self.settings, clock)
        self._own_resources = given is None
        self._has_catalog = given is not None
        self.disk = disk or self._resources.disk

    @property
    def name(self) -> str:
        return str(self.settings.data)

    def resources(self) -> StoreResources | None:
        """Returns the catalog and the objects; None while there is no catalog."""
        if not self._has_catalog:
            path = catalog_file(self.settings)
            if path is not None and not path.exists():
                return None
            self._has_catalog = True
        return self._resources

    def topics(self) -> list[str]:
        """Returns the names of all topics in the catalog or in a local directory, sorted."""
        resources = self.resources()
        local = topics_below(wal_root(self.settings), self._list)
        if resources is None:
            return sorted(map(str, local))
        found = set(resources.catalog.topics())
        found.update(not_deleted(resources.catalog, local - found))
        return sorted(map(str, found))

    def topic(self, name: str) -> TopicView:
        """Returns a view of the topic; UnknownTopic if neither catalog nor directory has it."""
        return TopicView(self, name)

    def directory(self, topic: TopicName) -> Path:
        """Returns the directory of the topic's local log, which may not exist."""
        return wal_root(self.settings) / topic.namespace / topic.topic

    def _list(self, path: Path) -> list[str]:
        try:
            return self.disk.list_dir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        """Closes what the view opened. Idempotent. Readers must have been closed before."""
        if self._own_resources:
            self._resources.close()

    def __enter__(self) -> StoreView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class TopicView:
    """One topic at one moment, over both tiers. Not thread-safe."""

    def __init__(
        self, source: StoreSettings | StoreResources | StoreView, topic: str | TopicName
    ) -> None:
        self.store = source if isinstance(source, StoreView) else StoreView(source)
        self._own_store = self.store is not source
        self.topic = topic if isinstance(topic, TopicName) else parse_topic(topic)
        self.directory = self.store.directory(self.topic)
        self.record: TopicRecord | None = None
        """The topic's record in the catalog, if there is one."""
        self._names = SegmentNames(self.store.settings.wal.file_name)
        self.indexes = SegmentIndexes(self.store.disk, self._names)
        self._log_id: str | None = None
        self._local: LogView | None = None
        self._end = 0
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def has_local_log(self) -> bool:
        """Whether the topic's newest messages are in a log on this machine."""
        return self._local is not None

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        record, local = self.record, self._local
        # Messages before the log's start can only be in objects.
        if record is not None and (record.tail > record.start_offset or local is None):
            return record.start_offset
        return 0 if local is None else local.start_offset

    @property
    def end_offset(self) -> int:
        """One more than the last synced offset, or without a local log the last uploaded one."""
        return self._end

    def refresh(self) -> None:
        """Moves the view to the current state. Raises UnknownTopic if the topic does not exist."""
        # The record first: what is uploaded was synced and published before.
        resources = self.store.resources()
        record = None if resources is None else resources.catalog.find(self.topic)
        if record is not None and record.is_deleted:  # whatever a directory here holds
            raise UnknownTopic(
                f"there is no topic {self.topic} in {self.store.name}: it was deleted"
            )
        self.record = record
        self._local = self._look()
        if self._local is not None:
            self._end = self._local.end_offset
        elif self.record is not None:
            self._end = self.record.tail
        else:
            raise UnknownTopic(f"there is no topic {self.topic} in {self.store.name}")

    def _look(self) -> LogView | None:
        """Returns the local log, if it is the log with the topic's newest messages."""
        if not self._begun():
            return None
        record = self.record
        log_id = read_log_id(self.store.disk, self.directory)
        if record is not None and restored(record.log_id) not in (None, log_id):
            return None
        view = self._local
        if view is None or log_id != self._log_id:
            file_name = self.store.settings.wal.file_name
            view = LogView(self.directory, file_name=file_name, disk=self.store.disk)
            self._log_id, self.indexes = log_id, SegmentIndexes(self.store.disk, self._names)
        else:
            view.refresh()
        # A log that ends before the objects do is an older copy: its owner will set it aside.
        return None if record is not None and view.end_offset < record.tail else view

    def _begun(self) -> bool:
        """Whether the directory has a log with a published position or a segment."""
        disk = self.store.disk
        if not disk.exists(self.directory):
            return False
        if read_published(disk, self.directory) is not None:
            return True
        return any(self._names.parse(name) is not None for name in disk.list_dir(self.directory))

    # -- reading --------------------------------------------------------------------------------

    def reader(self, start: int, end: int | None = None) -> LogReader:
        """Returns a reader of the messages from `start` to `end`, or to the end of the view.

        It never waits for more. At a lost range it raises LostOffsets, whose `end` is where to
        continue. Raises OffsetOutOfRange if `start` is not in the topic.
        """
        if not self.start_offset <= start <= self.end_offset:
            raise OffsetOutOfRange(
                f"{self.topic}: offset {start} is not in the topic: its oldest is "
                f"{self.start_offset}, its next {self.end_offset}",
                start=self.start_offset,
                end=self.end_offset,
            )
        stop = self.end_offset if end is None else min(end, self.end_offset)
        return LogReader(
            self._log(), self.store.disk, self.indexes, start, end=stop, visibility="synced"
        )

    def reader_at_time(
        self, time_ms: int, end: int | None = None, objects: StoreResources | None = None
    ) -> LogReader:
        """Returns a reader at the first message that was published at `time_ms` or later.

        If no message of the view is, the reader is at the end of the view, or at `end` if that
        comes before. `objects` reads the objects, if it is not the view itself. Otherwise like
        `reader`.
        """
        stop = self.end_offset if end is None else min(end, self.end_offset)

        def open_reader(start: int, known: ObjectDescriptor | None) -> LogReader:
            log, disk = self._log(known, objects), self.store.disk
            return LogReader(log, disk, self.indexes, start, end=stop, visibility="synced")

        resources, record = self.store.resources(), self.record
        catalog = None if resources is None or record is None else resources.catalog
        tail = 0 if record is None else record.tail
        local = _NoLog(self._end) if self._local is None else _LocalLog(self._local)
        search = TimeSearch(self.topic, catalog, tail, local, self.indexes)
        return search.reader(time_ms, self.start_offset, stop, open_reader)

    def offset_at_time(self, time_ms: int, objects: StoreResources | None = None) -> int:
        """Returns the first offset that was published at `time_ms` or later; else the end."""
        with self.reader_at_time(time_ms, objects=objects) as reader:
            return reader.position

    def offset_of_last(self, count: int) -> int:
        """Returns the offset of the first of the last `count` messages of the view."""
        record = self.record or TopicRecord()
        return max(offset_before(record, self.end_offset, count), self.start_offset)

    def _log(
        self, known: ObjectDescriptor | None = None, objects: StoreResources | None = None
    ) -> ReadableLog:
        resources = objects or self.store.resources()
        local = None if self._local is None else _LocalLog(self._local)
        if resources is not None and self.record is not None:
            return resources.tiered_log(self.topic, local or _NoLog(self._end), known)
        assert local is not None, "refresh raised UnknownTopic otherwise"
        return local

    # -- segments, objects, owner ---------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """Returns the local files, oldest first."""
        return [] if self._local is None else self._local.segments()

    def objects(self, start: int = 0) -> list[ObjectDescriptor]:
        """Returns the committed objects from the one that holds `start`, oldest first."""
        resources = self.store.resources()
        return (
            []
            if resources is None
            else list(resources.catalog.get_object_descriptors(self.topic, start))
        )

    def owner(self) -> Owner | None:
        """Returns the owner of the topic, or None if no living process owns it."""
        resources = self.store.resources()
        return None if resources is None else resources.catalog.owner(self.topic)

    def own_settings(self) -> dict[str, Any]:
        """Reads the settings that the topic has of its own; DescriptorError if they are damaged."""
        resources = self.store.resources()
        return {} if resources is None else read_topic_settings(resources.catalog, self.topic)

    def namespace_policies(self) -> dict[str, Any]:
        """Reads the offload policies of the topic's namespace; DescriptorError if damaged."""
        resources = self.store.resources()
        if resources is None:
            return {}
        return read_namespace_policies(resources.catalog, self.topic.namespace)

    def settings(self) -> StoreSettings:
        """Reads the settings of the store with those of the namespace and the topic in place.

        DescriptorError if they are damaged, or not accepted by this release.
        """
        own = self.own_settings()
        return accepted(self.topic, self.store.settings, own, self.namespace_policies())

    def close(self) -> None:
        """Closes what the view opened itself."""
        if self._own_store:
            self.store.close()

    def __enter__(self) -> TopicView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Unwaited:
    """For logs whose readers have an end and never wait."""

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        raise NotImplementedError("a reader of a view never waits")

    def delist(
        self,
        waiter: Waiter,  # noqa: ARG002  # as the protocol has it
        visibility: Visibility,  # noqa: ARG002
    ) -> bool:
        return False


class _LocalLog(_Unwaited):
    """A view of the local log. It refreshes when retention removed what a reader wants."""

    def __init__(self, view: LogView) -> None:
        self._view = view

    @property
    def start_offset(self) -> int:
        return self._view.start_offset

    def segments(self) -> list[Segment]:
        return self._view.segments()

    def plan(self, reader: LogReader) -> Plan:
        try:
            return self._view.plan(reader)
        except MissingData:
            self._view.refresh()
            return self._view.plan(reader)

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None:
        self._view.refresh()
        if reader.wanted < self.start_offset:
            return None
        return self._view.gone(reader, segment)


class _NoLog(_Unwaited):
    """Stands for a missing local log: everything before `end` is in objects."""

    def __init__(self, end: int) -> None:
        self.start_offset = end

    def segments(self) -> list[Segment]:
        return []

    def plan(self, reader: LogReader) -> Plan:
        raise OffsetOutOfRange(
            f"offset {reader.wanted} is not in an object yet", start=0, end=self.start_offset
        )

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None:
        raise NotImplementedError(f"{segment.path} was planned for {reader.wanted} without a log")
