"""Segments: the files of a log, and how to read frames from them.

`SegmentSet` is an immutable snapshot of the segments. The writer replaces it after each sync. A
frame that a snapshot covers is synced, and stays in place until retention removes the whole
segment. `ChunkReader` reads frames from a segment in bounded memory. `SegmentIndexes` finds the
position in a segment to start from.

Beware: a `ChunkReader` reuses one buffer for every chunk, so the scan that `read` returns is valid
only until the next read.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from forebay.errors import CorruptFrame
from forebay.files.disk import Disk, ReadFile, read_file
from forebay.format.frame import HEADER_BYTES, End, FrameTooLarge, Scan, frame_bytes, scan
from forebay.format.index import SegmentIndex, decode_index
from forebay.format.names import SegmentNames
from forebay.interrupts import holding
from forebay.limits import (
    READ_CHUNK_BYTES,
    SEGMENT_INDEX_BYTES,
    SEGMENT_INDEX_ENTRIES_MAX,
    SEGMENT_INDEXES_MAX,
)


class LogPosition(NamedTuple):
    """A frame boundary in the log: the frame that begins there has this offset."""

    seq: int
    position: int
    offset: int


@dataclass(frozen=True, slots=True)
class Segment:
    seq: int
    path: Path
    first_offset: int
    end_offset: int
    """One more than the last synced offset in it."""
    size: int
    """Synced bytes."""
    created_ms: int
    modified_ms: int
    """When its newest frame was written, by the wall clock."""
    index: SegmentIndex | None = None
    """Set for the active segment. The index of a sealed segment is loaded when needed."""

    @property
    def count(self) -> int:
        return self.end_offset - self.first_offset

    @property
    def sealed(self) -> bool:
        """Whether nothing will be added to it any more."""
        return self.index is None


@dataclass(frozen=True, slots=True)
class SegmentSet:
    """The segments of a log: sealed ones, oldest first, then the active one, if any."""

    sealed: tuple[Segment, ...] = ()
    active: Segment | None = None

    def __iter__(self) -> Iterator[Segment]:
        yield from self.sealed
        if self.active is not None:
            yield self.active

    @property
    def start_offset(self) -> int | None:
        """The oldest offset in a segment; None if there is no segment."""
        if self.sealed:
            return self.sealed[0].first_offset
        return self.active.first_offset if self.active is not None else None

    def find(self, offset: int) -> Segment | None:
        """The segment whose synced part holds `offset`; None if there is none."""
        active = self.active
        if active is not None and active.first_offset <= offset < active.end_offset:
            return active
        at = bisect_right(self.sealed, offset, key=lambda segment: segment.first_offset) - 1
        if at >= 0 and offset < self.sealed[at].end_offset:
            return self.sealed[at]
        return None


class ChunkReader:
    """Reads frames from a segment, a chunk at a time, into one buffer.

    The buffer is reused, because allocating a new one causes page faults. A frame larger than the
    buffer is read into a separate one. Not thread-safe.
    """

    __slots__ = ("_buffer", "_frame_bytes_max")

    def __init__(
        self, chunk_bytes: int = READ_CHUNK_BYTES, frame_bytes_max: int | None = None
    ) -> None:
        self._buffer = bytearray(max(chunk_bytes, HEADER_BYTES))
        self._frame_bytes_max = frame_bytes_max

    def read(self, file: ReadFile, position: int, limit: int, expected: int | None) -> Scan:
        """Reads and scans whole frames from `position`. Bytes at `limit` and after are ignored.

        Positions in the scan are relative to `position`. The scan ends TORN only if a frame reaches
        beyond `limit`, never because the chunk was too small. Raises OSError if `position` is below
        `limit` and the file has no bytes there, and FrameTooLarge instead of allocating more than
        `frame_bytes_max` for a frame.
        """
        chunk = self._fetch(file, position, min(limit - position, len(self._buffer)))
        if not len(chunk) and position < limit:
            raise OSError(errno.EIO, f"no bytes at position {position}, but {limit} were expected")
        found = scan(chunk, expected=expected, consecutive=True)
        if found.end is not End.TORN or position + len(chunk) >= limit:
            return found
        if len(found):
            return replace(found, end=End.COMPLETE)
        size = frame_bytes(chunk, 0)
        if size is None or size > limit - position:
            return found
        if self._frame_bytes_max is not None and size > self._frame_bytes_max:
            raise FrameTooLarge(size)
        whole = bytearray(size)
        taken = file.read_into(memoryview(whole), position)
        return scan(memoryview(whole)[:taken], expected=expected, consecutive=True)

    def _fetch(self, file: ReadFile, position: int, size: int) -> memoryview:
        window = memoryview(self._buffer)[: max(size, 0)]
        return window[: file.read_into(window, position)]


def index_frames(index: SegmentIndex, frames: Scan, base: int) -> None:
    """Adds an index entry for about every SEGMENT_INDEX_BYTES of the scanned frames.

    `base` is the position in the segment where the scan began.
    """
    at = 0
    while at < len(frames):
        position = frames.positions[at]
        index.add(frames.offsets[at], base + position - HEADER_BYTES)
        at = bisect_left(frames.positions, position + SEGMENT_INDEX_BYTES, at + 1)


def scan_segment(
    file: ReadFile, chunks: ChunkReader, limit: int, expected: int | None, index: SegmentIndex
) -> Iterator[tuple[int, Scan]]:
    """Yields (position, scan) from the start of a segment, and adds the frames to `index`.

    Their publish times are added too. Stops after the first scan that is not COMPLETE. A scan is
    valid until the next one.
    """
    position = 0
    while position < limit:
        found = chunks.read(file, position, limit, expected)
        index_frames(index, found, position)
        index.survey(found)
        yield position, found
        if found.end is not End.COMPLETE:
            return
        position += found.safe_length
        expected = found.offset


def load_index(disk: Disk, path: Path, index_path: Path, first_offset: int) -> SegmentIndex:
    """The index of a sealed segment: read from its file, or built by scanning the segment."""
    size = disk.size(path)
    try:
        raw = read_file(disk, index_path, bytes_max=64 + 16 * SEGMENT_INDEX_ENTRIES_MAX)
        index = decode_index(raw, size)
        if index is not None and index.offsets[0] == first_offset:
            return index
    except (OSError, ValueError):
        # The index file is only a cache: the index can be built from the segment.
        pass
    return build_index(disk, path, first_offset)


def build_index(disk: Disk, path: Path, first_offset: int) -> SegmentIndex:
    """Builds an index by scanning a whole sealed segment; raises CorruptFrame for any damage."""
    index = SegmentIndex(0)
    with closing(disk.open_read(path)) as file:
        for position, found in scan_segment(file, ChunkReader(), file.size(), first_offset, index):
            require_complete(found, path, position)
    return index


def require_complete(found: Scan, path: Path | str, base: int) -> None:
    """Raises CorruptFrame unless the scan ended at a frame boundary.

    For files that cannot have a torn tail. `base` is the position in the file where the scan began.
    """
    if found.end is not End.COMPLETE:
        raise CorruptFrame(
            found.end.describe(),
            file=str(path),
            position=base + found.safe_length,
            offset=found.offset,
        )


class SegmentIndexes:
    """Indexes of sealed segments, loaded when a reader starts in the middle of one.

    Keeps the SEGMENT_INDEXES_MAX most recently used. Thread-safe.
    """

    def __init__(self, disk: Disk, names: SegmentNames) -> None:
        self._disk = disk
        self._names = names
        self._lock = threading.RLock()
        self._known: OrderedDict[int, SegmentIndex] = OrderedDict()

    def seek(self, segment: Segment, offset: int) -> tuple[int, int]:
        """The (offset, position) of a frame at or shortly before `offset`."""
        if offset == segment.first_offset:
            return offset, 0
        return (segment.index or self._sealed(segment)).seek(offset)

    def floor(self, segment: Segment, offset: int, position: int) -> tuple[int, int]:
        """The last indexed (offset, position) at or before both arguments."""
        index = segment.index or self._sealed(segment)
        return index.floor(offset, position)

    def highest_publish_time(self, segment: Segment) -> int | None:
        """The highest publish time of the segment's messages; None if its index does not say."""
        try:
            return (segment.index or self._sealed(segment)).highest_publish_time
        except FileNotFoundError:  # retention has removed it: its messages are in objects
            return None

    def _sealed(self, segment: Segment) -> SegmentIndex:
        index = holding(self._lock, lambda: self._recall(segment.seq))
        if index is not None:
            return index
        path = segment.path.with_name(self._names.index(segment.seq))
        loaded = load_index(self._disk, segment.path, path, segment.first_offset)
        holding(self._lock, lambda: self._remember(segment.seq, loaded))
        return loaded

    def _recall(self, seq: int) -> SegmentIndex | None:
        index = self._known.get(seq)
        if index is not None:
            self._known.move_to_end(seq)
        return index

    def _remember(self, seq: int, index: SegmentIndex) -> None:
        self._known[seq] = index
        while len(self._known) > SEGMENT_INDEXES_MAX:
            self._known.popitem(last=False)
