"""Which bytes of which objects hold a range of offsets: pure, from the descriptors alone.

In each object the range runs from the index entry at or before the first offset wanted to the
entry after the last one, so whoever reads it scans a little more than was asked for: at most two
intervals of the index. It is cut into chunks of a bounded size, anywhere, also inside frames.

What a caller gets wrong: the first frame of a range is the index entry's, not the offset wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from forebay.format.descriptor import ObjectDescriptor


class ObjectRange(NamedTuple):
    """Whole frames of one object, as its index tells."""

    descriptor: ObjectDescriptor
    offset: int
    """Of the frame at `start`."""
    start: int
    end: int

    @property
    def next_offset(self) -> int | None:
        """The offset of the frame that follows the range; None if the index does not say."""
        descriptor = self.descriptor
        if self.end == descriptor.size:
            return descriptor.next_offset
        index = descriptor.offset_index or ()
        at = bisect_left(index, self.end, key=lambda entry: entry[1])
        return index[at][0] if at < len(index) and index[at][1] == self.end else None


class Chunk(NamedTuple):
    """What one request fetches: the bytes `start..end` of the object."""

    range: ObjectRange
    start: int
    end: int

    @property
    def first(self) -> bool:
        return self.start == self.range.start

    @property
    def last(self) -> bool:
        return self.end == self.range.end


def object_range(descriptor: ObjectDescriptor, start: int, end: int | None) -> ObjectRange:
    """What to read of the object for the offsets from `start` up to, not including, `end`."""
    offset, position = descriptor.seek(start)
    whole = end is None or end > descriptor.end_offset
    stop = descriptor.size if whole or end is None else descriptor.position_after(end - 1)
    return ObjectRange(descriptor, offset, position, stop)


def chunks(wanted: ObjectRange, chunk_bytes: int) -> Iterator[Chunk]:
    """The range in pieces of at most `chunk_bytes`, in order."""
    for start in range(wanted.start, wanted.end, chunk_bytes):
        yield Chunk(wanted, start, min(start + chunk_bytes, wanted.end))


def byte_ranges(
    descriptors: Iterable[ObjectDescriptor], start: int, end: int | None, chunk_bytes: int
) -> Iterator[Chunk]:
    """Object by object, what to fetch for the offsets from `start` up to, not including, `end`.

    Objects that hold none of them are left out. Where objects overlap, the earlier one serves.
    """
    for descriptor in descriptors:
        if end is not None and start >= end:
            return
        if descriptor.end_offset < start:
            continue
        if end is not None and descriptor.start_offset >= end:
            return
        yield from chunks(object_range(descriptor, start, end), chunk_bytes)
        start = descriptor.next_offset
