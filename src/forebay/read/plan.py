"""Which bytes of which objects a stream fetches next: pure, nothing here does I/O or keeps state.

`plan` goes from a position, the known descriptors and the settings to the chunks to fetch from
there on, and says from where further descriptors are needed. In each object the bytes run from
the index entry at or before the first offset wanted to the entry after the last one: at most two
intervals of the index more than was asked for. They are cut into chunks of a bounded size,
anywhere, also inside frames.

What a caller gets wrong: the first frame of a range is the index entry's, not the offset wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from forebay.format.descriptor import ObjectDescriptor

DESCRIPTOR_PAGE: Final = 16
"""Descriptors that are asked for at a time: with a full index one takes half a megabyte."""


class ObjectRange(NamedTuple):
    """Whole frames of one object, by its index."""

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

    def chunks(self, chunk_bytes: int, start: int | None = None) -> Iterator[Chunk]:
        """The range from the byte `start` on, in chunks of at most `chunk_bytes`, in order."""
        for at in range(self.start if start is None else start, self.end, chunk_bytes):
            yield Chunk(self, at, min(at + chunk_bytes, self.end))


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


class Position(NamedTuple):
    """Where a stream goes on: first the rest of an object, if there is one, then at an offset."""

    offset: int
    """The first one behind the rest."""
    range: ObjectRange | None = None
    start: int = 0
    """The byte of the object where the rest of the range begins."""


def position_of(chunk: Chunk) -> Position:
    """Where a stream goes on that is to fetch this chunk next."""
    return Position(chunk.range.descriptor.next_offset, chunk.range, chunk.start)


def position_after(chunk: Chunk) -> Position:
    """Where a stream goes on that fetched this chunk last."""
    offset = chunk.range.descriptor.next_offset
    return Position(offset) if chunk.last else Position(offset, chunk.range, chunk.end)


class KnownObjects(NamedTuple):
    """The objects that a stream knows of, the oldest first; some may be before its position."""

    descriptors: tuple[ObjectDescriptor, ...] = ()
    complete: bool = False
    """Whether there were no further ones when the catalog was asked."""


class Plan(NamedTuple):
    """What to fetch next."""

    chunks: tuple[Chunk, ...]
    """In order; fewer than asked for, or none, where no known object goes on."""
    page: int | None
    """The offset from which to ask for further descriptors; None if that is not needed yet."""
    gap: int | None
    """The offset behind the chunks if no object holds it though a later one is known."""


def plan(
    position: Position, known: KnownObjects, *, end: int | None, chunk_bytes: int, count: int
) -> Plan:
    """The next `count` chunks of a stream of the offsets before `end`, or as many as are known.

    Where objects overlap, the earlier one serves.
    """
    offset = position.offset
    chunks: list[Chunk] = []
    if position.range is not None:
        chunks.extend(islice(position.range.chunks(chunk_bytes, position.start), count))
    unplanned = len(known.descriptors)
    gap = None
    for descriptor in known.descriptors:
        if len(chunks) == count or (end is not None and offset >= end):
            break
        if descriptor.start_offset > offset:
            gap = offset
            break
        unplanned -= 1
        if descriptor.end_offset >= offset:
            wanted = object_range(descriptor, offset, end)
            chunks.extend(islice(wanted.chunks(chunk_bytes), count - len(chunks)))
            offset = descriptor.next_offset
    page = None
    if gap is None and not known.complete and unplanned <= DESCRIPTOR_PAGE // 2:
        page = max((each.next_offset for each in known.descriptors), default=offset)
        if end is not None and page >= end:
            page = None
    return Plan(tuple(chunks), page, gap)


def object_range(descriptor: ObjectDescriptor, start: int, end: int | None) -> ObjectRange:
    """What to read of the object for the offsets from `start` up to, not including, `end`."""
    offset, position = descriptor.seek(start)
    whole = end is None or end > descriptor.end_offset
    stop = descriptor.size if whole or end is None else descriptor.position_after(end - 1)
    return ObjectRange(descriptor, offset, position, stop)
