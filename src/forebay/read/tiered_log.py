"""`TieredLog`: one log over both tiers, objects first and then the local log.

Before every chunk a reader asks where its next offset is. Offsets before the local log's start are
in objects; later ones are in segments and memory. When retention moves that start, the next plan
uses the new one. So a reader passes from tier to tier without a gap or a duplicate, however long it
takes, and holds a segment for one chunk at most.

Beware: before the local log's start, every offset must be in an object. If it is not, it was lost,
was removed by remote retention, or is missing. Each is its own error, and nothing is skipped.
"""

from __future__ import annotations

from typing import Protocol

from forebay.catalog.catalog import Catalog
from forebay.errors import ForebayError, LostOffsets, MissingData, OffsetOutOfRange
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.names import TopicName
from forebay.read.metrics import HANDOFFS
from forebay.read.object_stream import FetchPool, ObjectStream, RangeStore
from forebay.read.sidecar_index import SidecarIndexes
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
        source: CatalogSource,
        store: RangeStore,
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

    def __init__(self, log: LocalTier, source: CatalogSource, stream: ObjectStream) -> None:
        self._log = log
        self._source = source
        self._stream = stream
        self._ended = True
        self._held: Scan | None = None
        self.resume_offset = 0
        """Where the reader continues after messages that a lenient stream skipped."""

    def read(self, offset: int, end: int | None) -> Scan | None:
        if end is not None and offset >= end:
            return None
        held, self._held = self._held, None
        if held is not None and held.offsets[0] == offset:
            return held
        stream = self._stream
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
                self._require_object(offset)
        elif frames.offsets[0] > offset:
            self.resume_offset, self._held = frames.offsets[0], frames
            return None
        return frames

    def _require_object(self, offset: int) -> None:
        """Raises if no object holds the offset. Asks the catalog: the stream may be out of date."""
        if not self._source.descriptors(offset, offset + 1, 1):
            raise self._source.missing(offset)

    def close(self) -> None:
        self._stream.close()


class CatalogSource:
    """A `DescriptorSource` that reads one topic's descriptors from the catalog."""

    def __init__(self, catalog: Catalog, topic: TopicName) -> None:
        self._catalog = catalog
        self._topic = topic

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        return self._catalog.get_object_descriptors_range(self._topic, start, end, limit)

    def missing(self, offset: int) -> ForebayError:
        """Returns the error that says why no object holds the offset."""
        record = self._catalog.record(self._topic)
        if record is None:
            return MissingData(f"{self._topic}: there is no such topic in {self._catalog.name}")
        hole = record.lost_range(offset)
        if hole is not None:
            return LostOffsets(
                f"{self._topic}: offsets {hole[0]} to {hole[1] - 1} are lost: an owner whose log "
                "is gone reserved them, and they are in no object; "
                f"continue at offset {hole[1]}",
                start=hole[0],
                end=hole[1],
            )
        if offset < record.start_offset:
            return OffsetOutOfRange(
                f"{self._topic}: offset {offset} was removed by retention; "
                f"the oldest offset is {record.start_offset}",
                start=record.start_offset,
                end=record.tail,
            )
        return MissingData(
            f"{self._topic}: offset {offset} is missing: it is in no object and in no segment, "
            f"although the objects cover offsets {record.start_offset} to {record.tail}; "
            "run `forebay repair`"
        )
