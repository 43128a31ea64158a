"""One log over both tiers: objects first, then what the log itself holds.

A reader asks before every piece where its next offset is. Below the log's start that is in
objects, from there on in segments and memory; when retention moves the start, the next question
gets the new answer. So a reader crosses from tier to tier without a gap or a duplicate, however
long it takes, and holds a segment for one piece at most.
"""

from __future__ import annotations

from typing import Final, Protocol

from forebay.catalog.catalog import Catalog
from forebay.errors import ForebayError, LostOffsets, MissingData, OffsetOutOfRange
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.names import TopicName
from forebay.metrics import Counter
from forebay.read.fetch import FetchPool
from forebay.read.history import ObjectStream, RangeStore
from forebay.settings import CloudReaderSettings
from forebay.wal.reader import LogReader, Plan
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Visibility, Waiter

HAND_OVERS: Final = Counter(
    "forebay_handoff_cloud_to_wal_total", "Readers that went from objects over to the log."
)


class CatalogSource:
    """The descriptors of one topic, for readers of its objects."""

    def __init__(self, catalog: Catalog, topic: TopicName) -> None:
        self._catalog = catalog
        self._topic = topic

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        return self._catalog.descriptors(self._topic, start, end, limit)

    def missing(self, offset: int) -> ForebayError:
        """Why no object holds an offset that should be in one."""
        record = self._catalog.record(self._topic)
        if record is None:
            return MissingData(f"{self._topic}: {self._catalog.name} does not know it")
        hole = record.lost_range(offset)
        if hole is not None:
            return LostOffsets(
                f"{self._topic}: offsets {hole[0]} to {hole[1] - 1} are lost: reserved by "
                "an owner whose log did not come back, and are in no object; "
                f"go on from offset {hole[1]}",
                start=hole[0],
                end=hole[1],
            )
        if offset < record.start_offset:
            return OffsetOutOfRange(
                f"{self._topic}: offset {offset} is not in the log: retention removed it; "
                f"the oldest one is {record.start_offset}",
                start=record.start_offset,
                end=record.tail,
            )
        return MissingData(
            f"{self._topic}: offset {offset} is in no object and in no segment, and it should be: "
            f"the objects go from {record.start_offset} to {record.tail}"
        )


class LocalEnd(Protocol):
    """The newest part of the log: a `Wal`, or a `LogView` of somebody else's."""

    @property
    def start_offset(self) -> int: ...

    def plan(self, reader: LogReader) -> Plan: ...

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None: ...

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool: ...

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool: ...


class TieredLog:
    """What a reader over both tiers asks instead of the log alone."""

    def __init__(
        self,
        topic: TopicName,
        log: LocalEnd,
        source: CatalogSource,
        store: RangeStore,
        pool: FetchPool,
        settings: CloudReaderSettings,
    ) -> None:
        self.topic = topic
        self.source = source
        self._log = log
        self._store = store
        self._pool = pool
        self._settings = settings

    def plan(self, reader: LogReader) -> Plan:
        if reader.wanted >= self._log.start_offset:
            try:
                plan = self._log.plan(reader)
            except OffsetOutOfRange:
                # Retention was faster than we were: what it removed is in objects.
                if reader.wanted >= self._log.start_offset:
                    raise
            else:
                if reader.past is not None:
                    reader.leave_past()
                    HAND_OVERS.add()
                return plan
        reader.pinned = None
        if reader.past is None:
            reader.past = _Objects(self)
            if reader.closed:  # from another thread, which saw nothing to close
                reader.past.close()
        return reader.past

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None:
        if reader.wanted < self._log.start_offset:
            return None
        return self._log.gone(reader, segment)

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        return self._log.enlist(target, waiter, visibility)

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        return self._log.delist(waiter, visibility)

    def hand_over(self) -> int:
        """The first offset that the log itself has."""
        return self._log.start_offset

    def stream(self, start: int, end: int | None) -> ObjectStream:
        return ObjectStream(
            self.topic, self._store, self.source, self._pool, self._settings, start, end
        )


class _Objects:
    """What one reader reads from objects: up to the hand-over, as it was when it began."""

    def __init__(self, log: TieredLog) -> None:
        self._log = log
        self._stream: ObjectStream | None = None
        self._closed = False

    def read(self, offset: int, end: int | None) -> Scan | None:
        stream = self._stream
        if stream is None or stream.offset != offset:
            if stream is not None:
                stream.close()
            hand_over = self._log.hand_over()
            if offset >= hand_over:
                return None
            stop = hand_over if end is None else min(end, hand_over)
            stream = self._stream = self._log.stream(offset, stop)
            if self._closed:
                stream.close()
        frames = stream.next()
        if frames is None:
            self._stream = None
            stream.close()
            if offset < self._log.hand_over() and stream.offset == offset and not self._closed:
                self._require_progress(offset)
        return frames

    def _require_progress(self, offset: int) -> None:
        """Below the hand-over every offset is in an object: raises if this one is in none."""
        if not self._log.source.descriptors(offset, offset + 1, 1):
            raise self._log.source.missing(offset)

    def close(self) -> None:
        self._closed = True
        stream = self._stream
        if stream is not None:
            stream.close()
