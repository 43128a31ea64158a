"""Plans a scan: which objects and segments hold a range of offsets, cut into pieces and splits.

Messages in committed objects are read from the objects. Only the rest is read from segments, up to
the synced end of the view. A range that neither holds raises MissingData. Offsets that the catalog
records as lost or unknown raise LostOffsets, or are skipped if the caller says so. Accepted ranges
are skipped always. However wide a range without messages is, it takes one step.

A `Piece` is a range of offsets, with the object or the segment that held it when it was planned. A
`Split` is the pieces of one task. Both can be pickled and are small: a piece carries only the index
entries for its two ends, so that a plan over 100,000 objects fits in memory.

Beware: an object or segment of a plan may not exist any more when a task reads it. The offsets are
then planned again (`scan`). And the frame at `begin` has the offset `at`, which may be before
`first`, because pieces begin where an index has an entry.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.errors import MissingData, OffsetOutOfRange
from forebay.format.descriptor import Index, ObjectDescriptor, decode_descriptor, decode_outline
from forebay.format.names import TopicName
from forebay.limits import MIB, SEGMENT_INDEX_BYTES
from forebay.logs import event
from forebay.pipeline.execute import pack
from forebay.read.holes import lost_error, report_jump
from forebay.read.plan import object_range
from forebay.topic.view import TopicView
from forebay.wal.segment import Segment

_log: Final = logging.getLogger("forebay.pipeline")

EARLIEST: Final = -2
LATEST: Final = -1
"""The topic's oldest offset, and the one after its newest, numbered as in Kafka's JSON."""
SPLIT_BYTES: Final = 128 * MIB
"""Bytes of one task; the fixed cost of a task, some 20 ms, is then a small part."""
_ENTRIES_A_CUT: Final = 4
"""Index entries to decode for each cut: enough that one is near it."""
_PLACES_MAX: Final = 64
"""The most places to remember of a segment, and the most segments: some kilobytes."""


class Piece(NamedTuple):
    """The offsets `first..next` of a topic, without `next`, in one object or segment.

    A tuple, because a plan may have hundreds of thousands of pieces.
    """

    topic: TopicName
    first: int
    next: int
    at: int
    """The offset of the frame at `begin`: `first`, or an offset before it."""
    begin: int
    """The position at which to start reading."""
    end: int
    """No frame of the piece ends after this position."""
    size: int
    """About how many bytes of frames are read for it."""
    descriptor: ObjectDescriptor | None = None
    """The object that holds it, with only the index entries that the piece needs."""
    path: Path | None = None
    """The segment that holds it, if there is no descriptor."""

    @property
    def messages(self) -> int:
        return self.next - self.first

    @property
    def place(self) -> str:
        """The name of the object or the file, for messages."""
        return str(self.path) if self.descriptor is None else self.descriptor.object_id


@dataclass(frozen=True, slots=True)
class Split:
    """The pieces that one task reads, in this order."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def count(self) -> int:
        return sum(piece.messages for piece in self.pieces)


# ---- pieces and splits: pure


def object_pieces(
    topic: TopicName, descriptor: ObjectDescriptor, start: int, end: int, split_bytes: int
) -> list[Piece]:
    """The part of `start..end` that the object holds, cut at index entries.

    `split_bytes` and the sizes of pieces count bytes before compression: these take the time.
    """
    size = descriptor.logical_size
    if start <= descriptor.start_offset and descriptor.end_offset < end and size <= split_bytes:
        slim = replace(descriptor, offset_index=None) if descriptor.offset_index else descriptor
        first, stop = descriptor.start_offset, descriptor.end_offset + 1
        return [Piece(topic, first, stop, first, 0, descriptor.size, size, slim)]
    first, stop = max(start, descriptor.start_offset), min(end, descriptor.next_offset)
    wanted = object_range(descriptor, first, stop)
    inside = [entry for entry in descriptor.offset_index or () if first < entry[0] < stop]
    stored_bytes = max(split_bytes * descriptor.size // max(size, 1), 1)
    cuts = cut_places(inside, wanted.start, wanted.end, stored_bytes)
    bounds = [first, *(offset for offset, _ in cuts), stop]
    return [
        _object_piece(topic, descriptor, bounds[number], bounds[number + 1])
        for number in range(len(bounds) - 1)
    ]


def _object_piece(topic: TopicName, descriptor: ObjectDescriptor, first: int, stop: int) -> Piece:
    wanted = object_range(descriptor, first, stop)
    slim = replace(descriptor, offset_index=_ends(descriptor, first, stop))
    stored = wanted.end - wanted.start
    size = stored * descriptor.logical_size // max(descriptor.size, 1)
    return Piece(topic, first, stop, wanted.offset, wanted.start, wanted.end, size, slim)


def _ends(descriptor: ObjectDescriptor, first: int, stop: int) -> Index | None:
    """The few index entries that give the same positions for `first..stop` as the whole index."""
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
    """The descriptor with only the index entries that `object_pieces` needs for these arguments."""
    pieces = object_pieces(TopicName("", ""), descriptor, start, end, split_bytes)
    kept = {entry for piece in pieces if piece.descriptor for entry in _index(piece.descriptor)}
    return replace(descriptor, offset_index=tuple(sorted(kept)) or None)


def _index(descriptor: ObjectDescriptor) -> Index:
    return descriptor.offset_index or ()


def joined(pieces: Sequence[Piece]) -> list[ObjectDescriptor]:
    """The descriptors of consecutive pieces of objects, one for each object."""
    found: dict[str, ObjectDescriptor] = {}
    for piece in pieces:
        descriptor = piece.descriptor
        assert descriptor is not None, "all pieces are in objects"
        before = found.get(descriptor.object_id)
        if before is not None:
            index = tuple(sorted({*_index(before), *_index(descriptor)})) or None
            descriptor = replace(descriptor, offset_index=index)
        found[descriptor.object_id] = descriptor
    return list(found.values())


def cut_places(
    index: Sequence[tuple[int, int]], begin: int, end: int, split_bytes: int
) -> list[tuple[int, int]]:
    """The entries of `index` that cut `begin..end` into parts of about the same size.

    No part is larger than `split_bytes`, if the index has enough entries.
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
    """Groups pieces into splits of about `split_bytes`, but at least `least` splits if possible.

    Neighbours in a topic stay together, so that one task reads them in one go. Small groups share a
    split. Where `least` asks for smaller splits than `split_bytes`, `recut` cuts every piece that
    is larger than its share, and then the largest ones again while there are too few.
    """
    total = sum(piece.size for piece in pieces)
    target = max(min(split_bytes, -(-total // max(least, 1))), 1)
    if recut is not None and target < split_bytes:
        pieces = _cut_to(pieces, target, least, recut)
    neighbours: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        last = neighbours[-1][-1] if neighbours else None
        if last is None or last.topic != piece.topic or size + piece.size > target:
            neighbours.append([])
            size = 0
        neighbours[-1].append(piece)
        size += piece.size
    if len(neighbours) < least:
        neighbours = [[piece] for piece in pieces]
    groups = pack(neighbours, lambda some: sum(piece.size for piece in some), target, least=least)
    return [Split(tuple(piece for some in group for piece in some)) for group in groups]


def _cut_to(
    pieces: Sequence[Piece],
    target: int,
    least: int,
    recut: Callable[[Piece, int], Sequence[Piece]],
) -> Sequence[Piece]:
    """The pieces, cut so that none is much larger than `target` and there are at least `least`.

    Indexes decide where a piece can be cut, so the first cuts may be too few. Then smaller ones are
    tried, until no piece can be cut.
    """
    whole: set[tuple[TopicName, int]] = set()
    """The first offsets of pieces that could not be cut."""
    while True:
        cut: list[Piece] = []
        for piece in pieces:
            small = piece.size <= target or (piece.topic, piece.first) in whole
            parts = [piece] if small else recut(piece, target)
            if not small and len(parts) == 1:
                whole.add((piece.topic, piece.first))
            cut += parts
        if len(cut) >= least or len(cut) == len(whole) or target <= 1:
            return cut
        pieces, target = cut, target // 2


# ---- planning a topic


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets `start..end` of a topic, without `end`."""

    topic: TopicName
    start: int
    end: int


class KnownPlaces:
    """Frame boundaries inside growing segments, for a planner that plans again and again.

    The index of the active segment is in its owner's memory. All that another process knows are the
    positions where the segment ended when it looked. With these, tasks of the next plan start near
    their first offset, not at the first frame of the segment.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Path, int], list[tuple[int, int]]] = OrderedDict()

    def remember(self, view: TopicView) -> None:
        """Remembers where the newest segment of the view ends."""
        segments = view.segments()
        if not segments:
            return
        newest = segments[-1]
        places = self._known.setdefault((newest.path, newest.first_offset), [])
        self._known.move_to_end((newest.path, newest.first_offset))
        if not places or places[-1][0] < newest.end_offset:
            places.append((newest.end_offset, newest.size))
        if len(places) > _PLACES_MAX:
            del places[: len(places) // 2 : 2]
        while len(self._known) > _PLACES_MAX:
            self._known.popitem(last=False)

    def of(self, segment: Segment) -> Sequence[tuple[int, int]]:
        """The known (offset, position) pairs inside the segment, ascending."""
        return self._known.get((segment.path, segment.first_offset), ())


def resolve_range(
    view: TopicView, start: int, end: int, *, fail_on_data_loss: bool = True
) -> OffsetRange:
    """The range as offsets, with EARLIEST and LATEST replaced by the topic's ends as of the view.

    OffsetOutOfRange for an offset outside the topic. Without `fail_on_data_loss` it is moved to the
    nearest end, with a warning.
    """
    oldest, newest = view.start_offset, view.end_offset
    bounds = {EARLIEST: oldest, LATEST: newest}
    found = []
    for what, wanted in (("starting", start), ("ending", end)):
        offset = bounds.get(wanted, wanted)
        inside = min(max(offset, oldest), newest)
        # A range that ends before the oldest offset, and is empty, misses no message.
        harmless = what == "ending" and offset < oldest and (start == EARLIEST or start >= offset)
        if inside != offset and not harmless:
            said = f"the {what} offset {offset} is not in it: the oldest is {oldest}, the next one "
            if fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"{view.topic}: {said}{newest}; set failOnDataLoss=false to read what there is",
                    start=oldest,
                    end=newest,
                )
            event(
                _log,
                logging.WARNING,
                "offset outside the topic replaced by the nearest one",
                topic=view.topic,
                which=what,
                wanted=offset,
                taken=inside,
            )
        found.append(inside)
    return OffsetRange(view.topic, found[0], max(found))


def after_skipped(record: TopicRecord, offset: int, *, fail_on_data_loss: bool) -> int:
    """The offset, or the end of the range around it that a plan skips without an error."""
    if not fail_on_data_loss:
        return skip_holes(record, offset)
    hole = record.accepted_range(offset)
    return offset if hole is None else hole[1]


def plan_topic(
    view: TopicView,
    start: int,
    end: int,
    *,
    split_bytes: int = SPLIT_BYTES,
    fail_on_data_loss: bool = True,
    places: KnownPlaces | None = None,
) -> list[Piece]:
    """The pieces that hold exactly `start..end`, in order, none much larger than `split_bytes`.

    The range must lie inside the view. Accepted ranges are skipped. LostOffsets if it crosses a
    range that is lost or unknown; without `fail_on_data_loss` that is skipped, too. MissingData if
    other offsets are missing. A segment that is deleted meanwhile is in objects by then.
    """
    return _Walk(view, start, end, split_bytes, fail_on_data_loss, places).run()


def recut(view: TopicView, piece: Piece, split_bytes: int) -> list[Piece]:
    """The offsets of the piece in smaller pieces. The `recut` argument of `splits`."""
    return plan_topic(view, piece.first, piece.next, split_bytes=split_bytes)


def outlines(
    catalog: Catalog, topic: TopicName, start: int, end: int, split_bytes: int
) -> Iterator[ObjectDescriptor]:
    """Yields the descriptors of `start..end`, with the index entries needed to cut them."""

    def decode(data: bytes) -> ObjectDescriptor:
        found = decode_outline(data)
        if start <= found.start_offset and found.next_offset <= end:
            parts = -(-found.logical_size // split_bytes)
            return found if parts <= 1 else decode_outline(data, _ENTRIES_A_CUT * parts)
        return thinned(decode_descriptor(data), start, end, split_bytes)

    while start < end and (
        page := catalog.get_object_descriptors_range(topic, start, end, decoder=decode)
    ):
        yield from page
        start = page[-1].next_offset


class _Walk:
    """Makes one plan; `at` is the next offset that has no piece yet."""

    def __init__(
        self,
        view: TopicView,
        start: int,
        end: int,
        split_bytes: int,
        fail_on_data_loss: bool,
        places: KnownPlaces | None,
    ) -> None:
        self._view = view
        self._topic = view.topic
        self._record = view.record
        self._split_bytes = split_bytes
        self._fail = fail_on_data_loss
        self._places = places
        self._pieces: list[Piece] = []
        self.at = start
        self.end = end

    def run(self) -> list[Piece]:
        while self.at < self.end:
            if self._jump():
                continue
            before = self.at
            self._take_objects()
            self._take_segments()
            if self.at == before and not self._look_again():
                self._step_over_hole()
        return self._pieces

    def _catalog(self) -> Catalog | None:
        resources = self._view.store.resources()
        return None if resources is None else resources.catalog

    def _take_objects(self) -> None:
        """Adds the objects that follow each other without a gap from `at` on."""
        catalog, record = self._catalog(), self._record
        if catalog is None or record is None:
            return
        end = min(self.end, record.tail)
        for descriptor in outlines(catalog, self._topic, self.at, end, self._split_bytes):
            if descriptor.start_offset > self.at or descriptor.end_offset < self.at:
                return
            self._pieces += object_pieces(
                self._topic, descriptor, self.at, self.end, self._split_bytes
            )
            self.at = min(descriptor.next_offset, self.end)

    def _take_segments(self) -> None:
        for segment in self._view.segments():
            if segment.first_offset <= self.at < min(segment.end_offset, self.end):
                stop = min(segment.end_offset, self.end)
                try:
                    self._pieces += self._segment_pieces(segment, self.at, stop)
                except FileNotFoundError:
                    return  # retention deleted it after it was uploaded: the catalog knows more
                self.at = stop

    def _look_again(self) -> bool:
        """Reads the record again; whether its tail has moved, by an upload since the last look."""
        catalog, known = self._catalog(), self._record
        if catalog is None:
            return False
        self._record = catalog.record(self._topic)
        return self._record is not None and (known is None or self._record.tail > known.tail)

    def _jump(self) -> bool:
        """Moves `at` to the end of the accepted range that contains it; whether there is one."""
        hole = None if self._record is None else self._record.accepted_range(self.at)
        if hole is None:
            return False
        report_jump(self._topic, self.at, hole[1])
        self.at = min(hole[1], self.end)
        return True

    def _step_over_hole(self) -> None:
        """Moves `at` to the end of a lost or deleted range, or raises."""
        if self._jump():  # it was accepted after the view was made
            return
        record = self._record or TopicRecord()
        lost = hole = record.lost_range(self.at)
        if hole is None and self.at < record.start_offset:
            hole = (self.at, record.start_offset)  # retention has deleted it meanwhile
        if hole is None:
            raise MissingData(
                f"{self._topic}: offset {self.at} is missing: no object and no segment holds it. "
                f"The objects go from {record.start_offset} to {record.tail}, the topic to "
                f"{self._view.end_offset}"
            )
        if self._fail and lost is not None:
            raise lost_error(
                self._topic, record, lost, "skip it with the option failOnDataLoss=false"
            )
        if self._fail:
            raise OffsetOutOfRange(
                f"{self._topic}: retention has deleted offsets {hole[0]} to {hole[1] - 1}; the "
                "option failOnDataLoss=false skips what was deleted",
                start=hole[1],
                end=self._view.end_offset,
            )
        event(
            _log,
            logging.WARNING,
            "lost offsets skipped",
            topic=self._topic,
            first=self.at,
            next=min(hole[1], self.end),
        )
        self.at = min(hole[1], self.end)

    def _segment_pieces(self, segment: Segment, first: int, stop: int) -> list[Piece]:
        """The part of `first..stop` that the segment holds, cut at known positions."""
        at, begin = self._seek(segment, first)
        last, position = self._seek(segment, stop)
        if last == stop:
            end = near = position
        else:
            end = segment.size
            # The active segment has no index here: estimate by the mean length of its messages.
            near = segment.size * (stop - segment.first_offset) // segment.count
            near = max(near if segment.index else position + SEGMENT_INDEX_BYTES, position)
        size = max(min(near, segment.size) - begin, 1)
        whole = Piece(self._topic, first, stop, at, begin, end, size, path=segment.path)
        return self._cut(segment, whole)

    def _seek(self, segment: Segment, offset: int) -> tuple[int, int]:
        """The last known (offset, position) at or before `offset`."""
        if offset == segment.end_offset:
            return offset, segment.size
        found = self._view.indexes.seek(segment, offset)
        known = () if self._places is None else self._places.of(segment)
        return max([found, *(place for place in known if place[0] <= offset)])

    def _cut(self, segment: Segment, whole: Piece) -> list[Piece]:
        parts = -(-whole.size // max(self._split_bytes, 1))
        done: list[Piece] = []
        rest = whole
        for number in range(1, parts):
            wanted = whole.begin + whole.size * number // parts
            offset, position = self._view.indexes.floor(
                segment, whole.next - 1, wanted + SEGMENT_INDEX_BYTES // 2
            )
            if offset > rest.first and position > rest.begin:
                size = position - rest.begin
                done.append(rest._replace(next=offset, end=position, size=size))
                left = max(whole.begin + whole.size - position, 1)
                rest = rest._replace(first=offset, at=offset, begin=position, size=left)
        return [*done, rest]
