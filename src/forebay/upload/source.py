"""Raw frames out of segments, checked and never decoded.

Every frame's CRC and the order of the offsets are checked on the way. A frame that fails is
CorruptFrame with its file and position: nothing behind it is handed out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from forebay.errors import CorruptFrame, MissingData
from forebay.files.disk import Disk, ReadFile
from forebay.format.frame import Scan
from forebay.format.message import message_columns
from forebay.format.names import SegmentNames
from forebay.limits import READ_CHUNK_BYTES
from forebay.upload.plan import Extent, Place
from forebay.wal.chunks import ChunkReader, require_complete
from forebay.wal.indexes import SegmentIndexes
from forebay.wal.segment import Segment


class SegmentSource:
    """The segments of one log as the uploader sees them. Thread-safe: it holds no position."""

    def __init__(self, disk: Disk, names: SegmentNames) -> None:
        self._disk = disk
        self._indexes = SegmentIndexes(disk, names)

    def frames(
        self, extents: Iterable[Extent], chunk_bytes: int = READ_CHUNK_BYTES
    ) -> Iterator[Scan]:
        """Whole frames, a chunk at a time; each is valid until the next is asked for."""
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
                f"{extent.path} is missing, and offsets {extent.first_offset} to "
                f"{extent.next_offset - 1} of it were not uploaded"
            ) from error

    def locate(self, segment: Segment, offset: int) -> Place:
        """Where the frame of `offset` begins, or the segment's end for the offset after it."""
        if offset == segment.end_offset:
            return Place(segment.seq, segment.size, offset)
        first, position = self._indexes.seek(segment, offset)
        start = Place(segment.seq, position, first)
        return start if first == offset else self.cut(segment, start, segment.size, offset - first)

    def holds(self, segment: Segment, place: Place) -> bool:
        """Whether the frame of `place.offset` really begins at that position."""
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

    def publish_time(self, segment: Segment, place: Place) -> int | None:
        """When the message at `place` was published, in milliseconds; None if none is there."""
        file = self._disk.open_read(segment.path)
        try:
            found = ChunkReader(1).read(file, place.position, segment.size, place.offset)
            if not len(found):
                return None
            return message_columns(found).publish_times[0]
        finally:
            file.close()

    def cut(
        self, segment: Segment, start: Place, bytes_max: int, messages_max: int | None
    ) -> Place:
        """The last frame boundary at most so far behind `start`; see `plan.Cut`."""
        at = start
        limit = min(start.position + bytes_max, segment.size)
        last = segment.end_offset if messages_max is None else start.offset + messages_max
        last = min(last, segment.end_offset)
        # Jump as far as the index is sure to be within both bounds, then walk the frames.
        offset, position = self._indexes.floor(segment, last, limit)
        if position > at.position:
            at = Place(segment.seq, position, offset)
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
                at = Place(segment.seq, at.position + end, at.offset + count)
                if count < len(found):
                    break
        finally:
            file.close()
        return at


def _ending_before(found: Scan, limit: int) -> int:
    """How many of the frames end at or before the position."""
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
