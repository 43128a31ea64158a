"""Plans which bytes of which segments make the next objects of a topic, and reads those bytes.

`plan_object` decides. It takes whole segments as long as they fit, and cuts the last one at a frame
boundary; its only I/O is through `cut`. It plans nothing until an object is full, or its oldest
message has waited long enough (*overdue*). Quiet topics therefore do not produce many small
objects, and no message waits forever. `TopicPlanner` applies it to one topic, for its owner and for
the Spark driver. `SegmentSource` reads the planned frames. It checks every CRC and the order of the
offsets, and does not decode payloads.

Beware: a plan belongs to one log. After a topic's log was replaced, the old positions and indexes
are meaningless; make a new `SegmentSource`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from forebay.clock import Clock
from forebay.config.offload_policies import Thresholds
from forebay.errors import CorruptFrame, ForebayError, MissingData
from forebay.files.disk import Disk, ReadFile
from forebay.format.frame import Scan
from forebay.format.message import message_columns
from forebay.format.names import ObjectName, SegmentNames, TopicName
from forebay.limits import READ_CHUNK_BYTES
from forebay.settings import UploaderSettings
from forebay.upload.triggers import select_ledgers
from forebay.wal.segment import ChunkReader, LogPosition, Segment, SegmentIndexes, require_complete


@dataclass(frozen=True, slots=True)
class Extent:
    """Whole frames of one segment: bytes `start..end`, offsets `first_offset..next_offset`."""

    seq: int
    path: Path
    start: int
    end: int
    first_offset: int
    next_offset: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Closed(StrEnum):
    """What completes an object: the first limit that it reaches."""

    BYTES = "bytes"
    MESSAGES = "messages"
    SEGMENT = "segment end"
    """The next segment does not fit any more, and is not cut."""
    BATCH = "batch"
    """`max_batch_bytes`, which is less than `max_object_bytes`."""
    AGE = "age"
    IDLE = "idle"
    FORCED = "forced"
    DAMAGE = "damaged frame"
    """The object ends before a frame that cannot be read."""


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object to be written. Its extents follow each other without a gap."""

    extents: tuple[Extent, ...]
    closed_by: Closed = Closed.AGE
    compressed: bool = False
    ledger: bool = False
    """Whether it is written as a ledger of Pulsar."""

    @property
    def full(self) -> bool:
        """Whether a limit of objects ended it. Otherwise the object has room for more."""
        return self.closed_by in (Closed.BYTES, Closed.MESSAGES, Closed.SEGMENT)

    @property
    def start_offset(self) -> int:
        return self.extents[0].first_offset

    @property
    def next_offset(self) -> int:
        return self.extents[-1].next_offset

    @property
    def size(self) -> int:
        """Bytes of the frames, before compression."""
        return sum(extent.size for extent in self.extents)

    @property
    def end(self) -> LogPosition:
        """The log position at which the next object begins."""
        last = self.extents[-1]
        return LogPosition(last.seq, last.end, last.next_offset)

    @property
    def span(self) -> tuple[int, int]:
        """Its offsets, the end not included."""
        return self.start_offset, self.next_offset

    @property
    def name(self) -> ObjectName:
        """Its name; that of a ledger is chosen when it is intended."""
        return ObjectName(self.start_offset, self.next_offset - 1, compressed=self.compressed)

    def holds(self, error: ForebayError) -> bool:
        """Whether the error is a damaged frame in the segments that the object is built from.

        False for a damaged frame in the object itself, found when the object was read back.
        """
        return isinstance(error, CorruptFrame) and any(
            each.path == Path(error.file) and each.start <= error.position <= each.end
            for each in self.extents
        )

    def before(self, damage: CorruptFrame) -> PlannedObject | None:
        """Returns the part before a damaged frame (see `holds`), or None if it is empty."""
        kept: list[Extent] = []
        for extent in self.extents:
            if extent.path == Path(damage.file):
                if damage.position > extent.start and damage.offset is not None:
                    kept.append(replace(extent, end=damage.position, next_offset=damage.offset))
                break
            kept.append(extent)
        return replace(self, extents=tuple(kept), closed_by=Closed.DAMAGE) if kept else None


class Cut(Protocol):
    """Finds the last frame boundary of a segment within limits. It does I/O."""

    def __call__(
        self, segment: Segment, start: LogPosition, bytes_max: int, messages_max: int | None
    ) -> LogPosition:
        """Returns the last frame boundary within the limits; `start` if not even one frame fits.

        `bytes_max` and `messages_max` count from `start`.
        """


def plan_object(
    segments: Iterable[Segment],
    start: LogPosition,
    settings: UploaderSettings,
    cut: Cut,
    *,
    overdue: bool,
    whole_segments: bool = False,
) -> PlannedObject | None:
    """Returns the next object, which begins at `start`; None if there is not enough data yet.

    With `overdue`, an object is planned however small it is. An object exceeds the size limits only
    if a single frame does. With `whole_segments`, an object ends at the end of a segment, unless
    that segment alone is too large for one object.
    """
    extents: list[Extent] = []
    room = batch_bytes(settings)
    messages = settings.max_object_messages
    by_size = Closed.BYTES if room == settings.object_bytes_max else Closed.BATCH
    at = start
    full: Closed | None = None
    for segment in segments:
        if segment.end_offset <= at.offset or segment.seq < at.seq:
            continue
        if segment.seq != at.seq:
            at = LogPosition(segment.seq, 0, at.offset)
        stop = LogPosition(segment.seq, segment.size, segment.end_offset)
        count = stop.offset - at.offset
        if stop.position - at.position > room or (messages is not None and count > messages):
            full = by_size if stop.position - at.position > room else Closed.MESSAGES
            if whole_segments and extents:
                full = Closed.SEGMENT
                break
            stop = cut(segment, at, room, messages)
            if stop == at and not extents:
                stop = cut(segment, at, segment.size, 1)
        if stop != at:
            extents.append(_extent(segment, at, stop))
            room -= stop.position - at.position
            if messages is not None:
                messages -= stop.offset - at.offset
        at = stop
        if messages == 0:
            full = Closed.MESSAGES
        elif room <= 0:
            full = by_size
        if full is not None:
            break
    if not extents or not (full or overdue):
        return None
    compressed = settings.compression != "none"
    return PlannedObject(tuple(extents), full or Closed.AGE, compressed, settings.ledgers)


def batch_bytes(settings: UploaderSettings) -> int:
    """The most bytes of one plan: those of an object, or of a cycle if that is less."""
    most = settings.object_bytes_max
    return most if settings.max_batch_bytes is None else min(most, settings.max_batch_bytes)


def _extent(segment: Segment, start: LogPosition, stop: LogPosition) -> Extent:
    return Extent(
        segment.seq, segment.path, start.position, stop.position, start.offset, stop.offset
    )


class TopicPlanner:
    """Plans the objects of one topic from the log that `source` reads. It keeps no state."""

    def __init__(
        self,
        topic: TopicName,
        source: SegmentSource,
        settings: UploaderSettings,
        clock: Clock,
        *,
        whole_segments: bool = False,
        owned: bool = True,
    ) -> None:
        """`owned` says that the log is this process's own, so that it can seal its segments."""
        self._topic = topic
        self._source = source
        self._settings = settings
        self._clock = clock
        self._whole_segments = whole_segments or settings.ledgers
        self._owned = owned

    def due(
        self,
        segments: Iterable[Segment],
        tail: int,
        known: LogPosition | None,
        *,
        force: bool,
        waiting_since: Callable[[Segment, LogPosition], Iterable[int]],
    ) -> Iterator[PlannedObject]:
        """Yields the objects that are due, beginning at the tail of the chain.

        `force` plans everything regardless of the thresholds. Ledgers hold sealed segments only, so
        who forces them seals the log before. In the log of another process, the last ledger then
        holds the segment that is not sealed, as far as it is synced. `known` is a possible position
        of the tail in the log; it is checked before use. `waiting_since` returns lower bounds, in
        milliseconds, of the time when the oldest message that is not uploaded was written. The
        latest of them is used.
        """
        left = self.segments_from(segments, tail)
        if self._settings.ledgers:
            left = self._offloadable(left, force=force)
        if not left:
            return
        start = self.locate(left[0], tail, known)
        always = force or self._settings.ledgers
        overdue = always or self._overdue(waiting_since(left[0], start))
        while True:
            planned = plan_object(
                left,
                start,
                self._settings,
                self._source.cut,
                overdue=overdue,
                whole_segments=self._whole_segments,
            )
            if planned is None:
                return
            if force and planned.closed_by is Closed.AGE:
                planned = replace(planned, closed_by=Closed.FORCED)
            yield planned
            start = planned.end
            overdue = always  # only the first object contains the oldest message

    def _offloadable(self, segments: list[Segment], *, force: bool) -> list[Segment]:
        """Returns those of the segments, the oldest first, that go into ledgers now."""
        sealed = [each for each in segments if each.sealed]
        if force:
            return sealed if self._owned else segments
        settings = self._settings
        limits = Thresholds(settings.offload_threshold_bytes, settings.offload_threshold_seconds)
        facts = [SealedSegment(each) for each in sealed]
        chosen = select_ledgers(facts, limits, self._clock.now_ms())
        last = chosen[-1].ledger_id if chosen else -1
        return [each for each in sealed if each.seq <= last]

    def segments_from(self, segments: Iterable[Segment], offset: int) -> list[Segment]:
        """Returns the segments that have messages at or after `offset`.

        Raises MissingData if the first of them begins after `offset`.
        """
        left = [each for each in segments if each.end_offset > offset]
        if left and left[0].first_offset > offset:
            raise MissingData(
                f"{self._topic}: the objects end at offset {offset}, but the segments begin at "
                f"{left[0].first_offset}: the messages in between are missing"
            )
        return left

    def locate(self, segment: Segment, offset: int, known: LogPosition | None) -> LogPosition:
        """Returns where the frame of `offset` begins: `known` if correct, else from the index."""
        if (
            known is not None
            and (known.seq, known.offset) == (segment.seq, offset)
            and self._source.holds(segment, known)
        ):
            return known
        return self._source.locate(segment, offset)

    def _overdue(self, since: Iterable[int]) -> bool:
        if self._settings.max_open_seconds is None:
            return False
        now = self._clock.now_ms()
        # Ignore times in the future: a clock was wrong, or was set back.
        latest = max((each for each in since if each <= now), default=0)
        return now - latest >= self._settings.max_open_seconds * 1000


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment as what triggers an offload sees it: as a ledger that is closed."""

    segment: Segment
    offloaded: bool = False

    @property
    def ledger_id(self) -> int:
        return self.segment.seq

    @property
    def size(self) -> int:
        return self.segment.size

    @property
    def closed_ms(self) -> int | None:
        return self.segment.modified_ms if self.segment.sealed else None


class SegmentSource:
    """Reads raw frames from the segments of one log. Thread-safe.

    Raises CorruptFrame, with file and position, at a frame that fails its check.
    """

    def __init__(self, disk: Disk, names: SegmentNames) -> None:
        self._disk = disk
        self._indexes = SegmentIndexes(disk, names)

    def frames(
        self, extents: Iterable[Extent], chunk_bytes: int = READ_CHUNK_BYTES
    ) -> Iterator[Scan]:
        """Yields whole frames, a chunk at a time. A chunk is valid until the next one is taken.

        Raises MissingData if a segment does not exist.
        """
        chunks = ChunkReader(chunk_bytes)
        for extent in extents:
            file = self._open(extent)
            try:
                yield from _read(file, chunks, extent)
            finally:
                file.close()

    def _open(self, extent: Extent) -> ReadFile:
        try:
            return self._disk.open_read(extent.path)
        except FileNotFoundError as error:
            raise MissingData(
                f"{extent.path} is missing, and its offsets {extent.first_offset} to "
                f"{extent.next_offset - 1} were not uploaded"
            ) from error

    def locate(self, segment: Segment, offset: int) -> LogPosition:
        """Returns where the frame of `offset` begins. `offset` may be the segment's end offset."""
        if offset == segment.end_offset:
            return LogPosition(segment.seq, segment.size, offset)
        first, position = self._indexes.seek(segment, offset)
        start = LogPosition(segment.seq, position, first)
        return start if first == offset else self.cut(segment, start, segment.size, offset - first)

    def holds(self, segment: Segment, place: LogPosition) -> bool:
        """Reads `place.position`, and returns whether the frame of `place.offset` begins there."""
        if place.position == segment.size:
            return place.offset == segment.end_offset
        if not 0 <= place.position < segment.size:
            return False
        file = self._disk.open_read(segment.path)
        try:
            found = ChunkReader(1).read(file, place.position, segment.size, place.offset)
        finally:
            file.close()
        return len(found) > 0

    def publish_time(self, segment: Segment, place: LogPosition) -> int | None:
        """Returns the publish time of the message at `place` in milliseconds, or None."""
        file = self._disk.open_read(segment.path)
        try:
            found = ChunkReader(1).read(file, place.position, segment.size, place.offset)
            if not len(found):
                return None
            return message_columns(found).publish_times[0]
        finally:
            file.close()

    def cut(
        self, segment: Segment, start: LogPosition, bytes_max: int, messages_max: int | None
    ) -> LogPosition:
        """Returns the last frame boundary within the limits; see `Cut`."""
        at = start
        limit = min(start.position + bytes_max, segment.size)
        last = segment.end_offset if messages_max is None else start.offset + messages_max
        last = min(last, segment.end_offset)
        # Jump to the last index entry within both limits, then walk the frames.
        offset, position = self._indexes.floor(segment, last, limit)
        if position > at.position:
            at = LogPosition(segment.seq, position, offset)
        file = self._disk.open_read(segment.path)
        try:
            chunks = ChunkReader()
            while at.position < limit and at.offset < last:
                found = chunks.read(file, at.position, segment.size, at.offset)
                if not len(found):
                    require_complete(found, segment.path, at.position)
                count = min(_ending_before(found, limit - at.position), last - at.offset)
                if count == 0:
                    break
                end = found.positions[count - 1] + found.lengths[count - 1]
                at = LogPosition(segment.seq, at.position + end, at.offset + count)
                if count < len(found):
                    break
        finally:
            file.close()
        return at


def _ending_before(found: Scan, limit: int) -> int:
    """Returns how many of the frames end at or before `limit`."""
    return bisect_right(
        range(len(found)), limit, key=lambda at: found.positions[at] + found.lengths[at]
    )


def _read(file: ReadFile, chunks: ChunkReader, extent: Extent) -> Iterator[Scan]:
    position, offset = extent.start, extent.first_offset
    while position < extent.end:
        found = chunks.read(file, position, extent.end, offset)
        if len(found):
            yield found
            position += found.safe_length
            offset += len(found)
        else:
            require_complete(found, extent.path, position)
    if offset != extent.next_offset:
        raise CorruptFrame(
            f"the frames end at offset {offset}, not at {extent.next_offset}",
            file=str(extent.path),
            position=position,
            offset=offset,
        )
