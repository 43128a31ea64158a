"""Plans which bytes of which objects a stream fetches next. Nothing here does I/O or keeps state.

`plan` takes a position, the known descriptors and the limits. It returns the next chunks to fetch,
and the offset from which more descriptors are needed. In each object the bytes run from the index
entry at or before the first offset wanted to the entry after the last one, so at most two index
intervals are fetched in excess. They are cut into chunks at any byte, also inside a frame.

Beware: the first frame of a range is that of the index entry, which may come before the first
offset wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from forebay.format.descriptor import ObjectDescriptor

DESCRIPTOR_PAGE: Final = 16
"""Descriptors in one request. A descriptor with a full index takes half a megabyte."""


class ObjectRange(NamedTuple):
    """Whole frames of one object: the bytes `start..end`, which are frame boundaries."""

    descriptor: ObjectDescriptor
    offset: int
    """The offset of the frame at `start`."""
    start: int
    end: int

    @property
    def next_offset(self) -> int | None:
        """The offset of the frame after the range; None if the index does not have it."""
        descriptor = self.descriptor
        if self.end == descriptor.size:
            return descriptor.next_offset
        index = descriptor.offset_index or ()
        at = bisect_left(index, self.end, key=lambda entry: entry[1])
        return index[at][0] if at < len(index) and index[at][1] == self.end else None

    def chunks(self, chunk_bytes: int, start: int | None = None) -> Iterator[Chunk]:
        """Yields the range from byte `start` on, in chunks of at most `chunk_bytes`."""
        for at in range(self.start if start is None else start, self.end, chunk_bytes):
            yield Chunk(self, at, min(at + chunk_bytes, self.end))


class Chunk(NamedTuple):
    """The bytes `start..end` of an object, which one request fetches."""

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
    """Where a stream continues: with the rest of `range`, if there is one, then at `offset`."""

    offset: int
    """The first offset after `range`."""
    range: ObjectRange | None = None
    start: int = 0
    """The byte at which the rest of `range` begins."""


def position_of(chunk: Chunk) -> Position:
    """Returns the position of a stream whose next chunk is this one."""
    return Position(chunk.range.descriptor.next_offset, chunk.range, chunk.start)


def position_after(chunk: Chunk) -> Position:
    """Returns the position of a stream whose last chunk was this one."""
    offset = chunk.range.descriptor.next_offset
    return Position(offset) if chunk.last else Position(offset, chunk.range, chunk.end)


class KnownObjects(NamedTuple):
    """The objects that a stream knows, oldest first. Some may be before its position."""

    descriptors: tuple[ObjectDescriptor, ...] = ()
    complete: bool = False
    """Whether the catalog had no more when it was asked."""


class Plan(NamedTuple):
    """What to fetch next."""

    chunks: tuple[Chunk, ...]
    """In order. Fewer than asked for, or none, if the known objects end before."""
    page: int | None
    """The offset from which to request more descriptors; None if none are needed yet."""
    gap: int | None
    """The offset after the chunks, if no object holds it but a later object is known."""


def plan(
    position: Position, known: KnownObjects, *, end: int | None, chunk_bytes: int, count: int
) -> Plan:
    """Plans the next `count` chunks from `position` on, for offsets before `end`.

    Returns fewer chunks if the known objects hold no more. Where objects overlap, the earlier one
    is used.
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
    """Returns the bytes to read for the offsets `start..end` of the object, end not included."""
    offset, position = descriptor.seek(start)
    whole = end is None or end > descriptor.end_offset
    stop = descriptor.size if whole or end is None else descriptor.position_after(end - 1)
    return ObjectRange(descriptor, offset, position, stop)
