"""Pieces of a topic, and splits of pieces: what a scan hands to its tasks. Pure.

A piece is a range of offsets together with where its bytes were when the scan was planned: in one
object, or in one segment. It is small and can be pickled. Of an object's index it carries the
entries for its own two ends and no others, in a descriptor that is otherwise the object's.

What a caller gets wrong: the first frame at `begin` is the one of `at`, which may be before
`first`: cuts are made where an index has an entry, and the ends of a range lie anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from forebay.format.descriptor import Index, ObjectDescriptor
from forebay.format.names import TopicName
from forebay.limits import MIB
from forebay.pipeline.packing import pack
from forebay.read.ranges import object_range

SPLIT_BYTES: Final = 128 * MIB
"""Of one task. Its fixed cost of some 20 ms is then a small part of it."""


class Piece(NamedTuple):
    """The offsets `first..next` of a topic, the latter not included, in one object or segment.

    A tuple, because a plan may have hundreds of thousands of them.
    """

    topic: TopicName
    first: int
    next: int
    at: int
    """The offset of the frame at `begin`: `first`, or one before it."""
    begin: int
    end: int
    """No frame of the piece ends beyond this position."""
    size: int
    """About how many bytes are read for it."""
    descriptor: ObjectDescriptor | None = None
    """Of the object that holds it, with the index entries that the piece needs."""
    path: Path | None = None
    """Of the segment that holds it."""

    @property
    def messages(self) -> int:
        return self.next - self.first

    @property
    def place(self) -> str:
        """The object or the file, for people."""
        return str(self.path) if self.descriptor is None else self.descriptor.object_id


@dataclass(frozen=True, slots=True)
class Split:
    """What one task reads, in this order."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def count(self) -> int:
        return sum(piece.messages for piece in self.pieces)


# -- objects ------------------------------------------------------------------------------------


def object_pieces(
    topic: TopicName, descriptor: ObjectDescriptor, start: int, end: int, split_bytes: int
) -> list[Piece]:
    """What the object holds of `start..end`, cut where its index has an entry."""
    size = descriptor.size
    if start <= descriptor.start_offset and descriptor.end_offset < end and size <= split_bytes:
        slim = replace(descriptor, offset_index=None) if descriptor.offset_index else descriptor
        first, stop = descriptor.start_offset, descriptor.end_offset + 1
        return [Piece(topic, first, stop, first, 0, size, size, slim)]
    first, stop = max(start, descriptor.start_offset), min(end, descriptor.next_offset)
    wanted = object_range(descriptor, first, stop)
    inside = [entry for entry in descriptor.offset_index or () if first < entry[0] < stop]
    cuts = cut_places(inside, wanted.start, wanted.end, split_bytes)
    bounds = [first, *(offset for offset, _ in cuts), stop]
    return [
        _object_piece(topic, descriptor, bounds[number], bounds[number + 1])
        for number in range(len(bounds) - 1)
    ]


def _object_piece(topic: TopicName, descriptor: ObjectDescriptor, first: int, stop: int) -> Piece:
    wanted = object_range(descriptor, first, stop)
    slim = replace(descriptor, offset_index=_ends(descriptor, first, stop))
    size = wanted.end - wanted.start
    return Piece(topic, first, stop, wanted.offset, wanted.start, wanted.end, size, slim)


def _ends(descriptor: ObjectDescriptor, first: int, stop: int) -> Index | None:
    """The index entries that lead to the same bytes for `first..stop` as the whole index does."""
    index = descriptor.offset_index
    if not index or (first == descriptor.start_offset and stop == descriptor.next_offset):
        return None
    kept = {index[0], descriptor.seek(first)}
    after = next((entry for entry in index if entry[0] >= stop), None)
    if after is not None:
        kept.add(after)
    return tuple(sorted(kept))


def thinned(
    descriptor: ObjectDescriptor, start: int, end: int, split_bytes: int
) -> ObjectDescriptor:
    """The same for `object_pieces` with these arguments; it holds a few entries instead of all."""
    pieces = object_pieces(TopicName("", ""), descriptor, start, end, split_bytes)
    kept = {entry for piece in pieces if piece.descriptor for entry in _index(piece.descriptor)}
    return replace(descriptor, offset_index=tuple(sorted(kept)) or None)


def _index(descriptor: ObjectDescriptor) -> Index:
    return descriptor.offset_index or ()


def joined(pieces: Sequence[Piece]) -> list[ObjectDescriptor]:
    """The descriptors of pieces that follow each other, one for each object."""
    found: dict[str, ObjectDescriptor] = {}
    for piece in pieces:
        descriptor = piece.descriptor
        assert descriptor is not None, "pieces of objects are joined"
        before = found.get(descriptor.object_id)
        if before is not None:
            index = tuple(sorted({*_index(before), *_index(descriptor)})) or None
            descriptor = replace(descriptor, offset_index=index)
        found[descriptor.object_id] = descriptor
    return list(found.values())


# -- cutting and packing ------------------------------------------------------------------------


def cut_places(
    index: Sequence[tuple[int, int]], begin: int, end: int, split_bytes: int
) -> list[tuple[int, int]]:
    """The entries of `index` that cut `begin..end` into parts of about the same size.

    As many parts as it takes for none to be larger than `split_bytes`, where the index has entries
    for so many.
    """
    parts = -(-(end - begin) // max(split_bytes, 1))
    cuts: list[tuple[int, int]] = []
    last = begin
    for number in range(1, parts):
        wanted = begin + (end - begin) * number // parts
        at = bisect_right(index, wanted, key=lambda entry: entry[1])
        near = index[max(at - 1, 0) : at + 1]
        if near:
            entry = min(near, key=lambda each: abs(each[1] - wanted))
            if entry[1] > last:
                cuts.append(entry)
                last = entry[1]
    return cuts


def splits(
    pieces: Sequence[Piece],
    split_bytes: int = SPLIT_BYTES,
    least: int = 1,
    recut: Callable[[Piece, int], Sequence[Piece]] | None = None,
) -> list[Split]:
    """Pieces into tasks of about `split_bytes`; at least `least` of them where that can be.

    Neighbours in a topic stay together, so that one task reads them in one go; what is small
    shares a task. For more tasks than the pieces allow, `recut` cuts a piece once more.
    """
    total = sum(piece.size for piece in pieces)
    target = max(min(split_bytes, -(-total // max(least, 1))), 1)
    if recut is not None and target < split_bytes and len(pieces) < least:
        pieces = [
            part
            for piece in pieces
            for part in (recut(piece, target) if piece.size > target else (piece,))
        ]
    runs: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is None or last.topic != piece.topic or size + piece.size > target:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += piece.size
    if len(runs) < least:
        runs = [[piece] for piece in pieces]
    groups = pack(runs, lambda run: sum(piece.size for piece in run), target, least=least)
    return [Split(tuple(piece for run in group for piece in run)) for group in groups]
