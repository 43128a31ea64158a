"""`TieredLog`: one log over both tiers, objects first and then the local log.

Before every chunk a reader asks where its next offset is. Offsets before the local log's start are
in objects; later ones are in segments and memory. When retention moves that start, the next plan
uses the new one. So a reader passes from tier to tier without a gap or a duplicate, however long it
takes, and holds a segment for one chunk at most.

Beware: before the local log's start, every offset must be in an object. If it is not, it was lost,
was removed by remote retention, or is missing. Each is its own error, and nothing is skipped but
the ranges whose loss an operator accepted.
"""

from __future__ import annotations

from typing import Protocol

from forebay.catalog.catalog import Catalog, was_deleted
from forebay.catalog.records import TopicRecord
from forebay.errors import ForebayError, MissingData, OffsetOutOfRange
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.names import TopicName
from forebay.interrupts import run_aside
from forebay.read.fetch_pool import FetchPool
from forebay.read.holes import lost_error, report_jump
from forebay.read.metrics import HANDOFFS
from forebay.read.object_stream import ObjectStream
from forebay.read.sidecar_index import SidecarIndexes
from forebay.read.verify import ReadableStore
from forebay.settings import CloudReaderSettings
from forebay.wal.reader import LogReader, Plan
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Visibility, Waiter


class LocalTier(Protocol):
    """The local log: a `Wal`, or a `LogView` of a log that another process owns."""

    @property
    def start_offset(self) -> int: ...

    def plan(self, reader: LogReader) -> Plan: ...

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None: ...

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool: ...

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool: ...


class TieredLog:
    """Takes the place of the local log for a reader of both tiers. Thread-safe."""

    def __init__(
        self,
        topic: TopicName,
        log: LocalTier,
        source: CatalogSource | KnownFirst,
        store: ReadableStore,
        pool: FetchPool,
        settings: CloudReaderSettings,
        indexes: SidecarIndexes | None = None,
    ) -> None:
        self._topic = topic
        self._log = log
        self._source = source
        self._store = store
        self._pool = pool
        self._settings = settings
        self._indexes = indexes

    def plan(self, reader: LogReader) -> Plan:
        past = reader.past
        if isinstance(past, _ObjectTier) and past.resume_offset > reader.wanted:
            reader.position = past.resume_offset
            reader.rewind()
            if reader.finished:  # the rest of what it wanted was skipped
                return past
        if reader.wanted >= self._log.start_offset:
            try:
                plan = self._log.plan(reader)
            except OffsetOutOfRange:
                # Retention has just removed the segment: its messages are in objects.
                if reader.wanted >= self._log.start_offset:
                    raise
            else:
                if reader.past is not None:
                    reader.leave_past()
                    HANDOFFS.add()
                return plan
        reader.pinned = None
        if reader.past is None:
            start = reader.wanted
            stream = ObjectStream(
                self._topic,
                self._store,
                self._source,
                self._pool,
                self._settings,
                start,
                start,
                indexes=self._indexes,
            )
            reader.past = _ObjectTier(self._log, self._source, stream)
            if reader.closed:  # by another thread, before `past` was set
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


class _ObjectTier:
    """Reads objects for one reader, up to where the local log started when a stream began."""

    def __init__(
        self, log: LocalTier, source: CatalogSource | KnownFirst, stream: ObjectStream
    ) -> None:
        self._log = log
        self._source = source
        self._stream = stream
        self._ended = True
        self._held: Scan | None = None
        self.resume_offset = 0
        """Where the reader continues after damaged messages that a lenient stream skipped, or after
        an accepted range."""

    def read(self, offset: int, end: int | None, bytes_max: int | None) -> Scan | None:
        if end is not None and offset >= end:
            return None
        held, self._held = self._held, None
        if held is not None and held.offsets[0] == offset:
            return held
        stream = self._stream
        stream.limit(bytes_max)
        if self._ended or stream.offset != offset:
            handoff = self._log.start_offset
            if offset >= handoff:
                return None
            stream.seek(offset, handoff if end is None else min(end, handoff))
            self._ended = False
        frames = stream.next()
        if frames is None:
            self._ended = True
            self.resume_offset = stream.offset
            if stream.offset == offset < self._log.start_offset and not stream.closed:
                self.resume_offset = run_aside(lambda: self._after_hole(offset))
        elif frames.offsets[0] > offset:
            self.resume_offset, self._held = frames.offsets[0], frames
            return None
        return frames

    def _after_hole(self, offset: int) -> int:
        """Returns the offset, if an object holds it, or the end of the accepted range around it.

        Raises if it is in neither. Asks the catalog: the stream may be out of date.
        """
        if self._source.descriptors(offset, offset + 1, 1):
            return offset
        end = self._source.jump(offset)
        report_jump(self._source.topic, offset, end)
        return end

    def close(self) -> None:
        self._stream.close()


class KnownFirst:
    """A `DescriptorSource` that knows one object already, and asks another source for the rest.

    It answers with that object once: if the object is gone, the next request goes to the source.
    """

    def __init__(self, known: ObjectDescriptor, source: CatalogSource) -> None:
        self._known: ObjectDescriptor | None = known
        self._source = source
        self.topic = source.topic

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        known, self._known = self._known, None
        if known is not None and known.start_offset <= start <= known.end_offset:
            return [known]
        return self._source.descriptors(start, end, limit)

    def missing(self, offset: int) -> ForebayError | None:
        return self._source.missing(offset)

    def jump(self, offset: int) -> int:
        return self._source.jump(offset)


class CatalogSource:
    """A `DescriptorSource` that reads one topic's descriptors from the catalog."""

    def __init__(self, catalog: Catalog, topic: TopicName) -> None:
        self._catalog = catalog
        self.topic = topic

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        return self._catalog.get_object_descriptors_range(self.topic, start, end, limit)

    def missing(self, offset: int) -> ForebayError | None:
        """Returns the error that says why no object holds the offset; None if that is accepted."""
        record = self._catalog.record(self.topic)
        if record is not None and record.accepted_range(offset) is not None:
            return None
        return self._why(record, offset)

    def jump(self, offset: int) -> int:
        """Returns the end of the accepted range that contains the offset.

        Raises the error of `missing` if there is none.
        """
        record = self._catalog.record(self.topic)
        hole = None if record is None else record.accepted_range(offset)
        if hole is None:
            raise self._why(record, offset)
        return hole[1]

    def _why(self, record: TopicRecord | None, offset: int) -> ForebayError:
        if record is None:
            left = self._catalog.find(self.topic)
            if left is not None and left.is_deleted:
                return was_deleted(self.topic)
            return MissingData(f"{self.topic}: there is no such topic in {self._catalog.name}")
        hole = record.lost_range(offset)
        if hole is not None:
            return lost_error(self.topic, record, hole)
        if offset < record.start_offset:
            return OffsetOutOfRange(
                f"{self.topic}: offset {offset} was removed by retention; "
                f"the oldest offset is {record.start_offset}",
                start=record.start_offset,
                end=record.tail,
            )
        return MissingData(
            f"{self.topic}: offset {offset} is missing: it is in no object and in no segment, "
            f"although the objects cover offsets {record.start_offset} to {record.tail}; "
            "run `forebay repair`"
        )
