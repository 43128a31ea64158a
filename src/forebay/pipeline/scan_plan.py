"""From offsets of a topic to the pieces that hold them: objects first, then segments.

Everything that is in a committed object is read from there, wherever the tasks run; only what was
not uploaded yet is read from the segments, up to the synced end of the view and no further. The
chain is checked on the way: a range that no tier holds is an error, and one that the catalog
knows to be lost is an error unless the caller says that losses are to be stepped over.

Descriptors are taken a page at a time, and their indexes only where a cut needs them, so that a
plan over 100,000 objects stays small.

What a caller gets wrong: a plan holds offsets first and places second. When a place is gone by
the time it is read, the offsets are planned anew; their bytes never change.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import TopicRecord
from forebay.errors import LostOffsets, MissingData, OffsetOutOfRange
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, decode_outline
from forebay.format.names import TopicName
from forebay.limits import SEGMENT_INDEX_BYTES
from forebay.logs import event
from forebay.pipeline.scan_pieces import SPLIT_BYTES, Piece, object_pieces, thinned
from forebay.topic.view import TopicView
from forebay.wal.segment import Segment

_log: Final = logging.getLogger("forebay.pipeline")

EARLIEST: Final = -2
LATEST: Final = -1
"""As in Kafka's JSON: the topic's oldest offset, and the one after its newest."""

_ENTRIES_A_CUT: Final = 4
"""Index entries that are looked at for each cut: one of them is near enough."""

_PLACES_MAX: Final = 64
"""Remembered for each segment, and segments remembered: some kilobytes."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets `start..end` of a topic, the latter not included."""

    topic: TopicName
    start: int
    end: int


class KnownPlaces:
    """Frame boundaries of growing segments that a long-lived planner has seen.

    The index of the active segment is its owner's: another process knows no place inside it but
    those where it once ended. A planner that comes back again and again notes them here, and its
    tasks start there instead of at the segment's first frame.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Path, int], list[tuple[int, int]]] = OrderedDict()

    def note(self, view: TopicView) -> None:
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
        """(offset, position) inside the segment, ascending."""
        return self._known.get((segment.path, segment.first_offset), ())


def resolve_range(
    view: TopicView, start: int, end: int, *, fail_on_data_loss: bool = True
) -> OffsetRange:
    """EARLIEST and LATEST as they are now, and offsets that are in the topic.

    An offset that is not in it raises OffsetOutOfRange, or is moved to the nearest one that is,
    with a warning, where losses are to be stepped over.
    """
    oldest, newest = view.start_offset, view.end_offset
    bounds = {EARLIEST: oldest, LATEST: newest}
    found = []
    for what, wanted in (("starting", start), ("ending", end)):
        offset = bounds.get(wanted, wanted)
        inside = min(max(offset, oldest), newest)
        # Everything below the start that ends there is nothing: no message is missed.
        harmless = what == "ending" and offset < oldest and (start == EARLIEST or start >= offset)
        if inside != offset and not harmless:
            said = f"the {what} offset {offset} is not in it: its oldest is {oldest}, its next "
            if fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"{view.topic}: {said}{newest}; with failOnDataLoss=false the scan takes what "
                    "there is",
                    start=oldest,
                    end=newest,
                )
            event(
                _log,
                logging.WARNING,
                "offset moved into the topic",
                topic=view.topic,
                which=what,
                wanted=offset,
                taken=inside,
            )
        found.append(inside)
    return OffsetRange(view.topic, found[0], max(found))


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

    The range must lie inside the view. LostOffsets where it crosses a lost range, unless losses
    are stepped over; MissingData where it should be somewhere and is not.
    """
    return _Walk(view, start, end, split_bytes, fail_on_data_loss, places).run()


def recut(view: TopicView, piece: Piece, split_bytes: int) -> list[Piece]:
    """The same offsets in smaller pieces: for `splits`, where more tasks are wanted."""
    return plan_topic(view, piece.first, piece.next, split_bytes=split_bytes)


def outlines(
    catalog: Catalog, topic: TopicName, start: int, end: int, split_bytes: int
) -> Iterator[ObjectDescriptor]:
    """The descriptors of `start..end`, with as much of their indexes as cutting them needs."""

    def decode(data: bytes) -> ObjectDescriptor:
        found = decode_outline(data)
        if start <= found.start_offset and found.next_offset <= end:
            parts = -(-found.size // split_bytes)
            return found if parts <= 1 else decode_outline(data, _ENTRIES_A_CUT * parts)
        return thinned(decode_descriptor(data), start, end, split_bytes)

    while start < end and (page := catalog.descriptors(topic, start, end, decoder=decode)):
        yield from page
        start = page[-1].next_offset


class _Walk:
    """One plan while it is made; `at` is the next offset without a piece."""

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
            before = self.at
            self._take_objects()
            self._take_segments()
            if self.at == before and not self._look_again():
                self._step_over_hole()
        return self._pieces

    def _catalog(self) -> Catalog | None:
        tiers = self._view.store.tiers()
        return None if tiers is None else tiers.catalog

    def _take_objects(self) -> None:
        """As far as objects follow each other from `at` on."""
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
                self._pieces += self._segment_pieces(segment, self.at, stop)
                self.at = stop

    def _look_again(self) -> bool:
        """Whether the catalog is further than it was: an upload was faster than this plan."""
        catalog, known = self._catalog(), self._record
        if catalog is None:
            return False
        self._record = catalog.record(self._topic)
        return self._record is not None and (known is None or self._record.tail > known.tail)

    def _step_over_hole(self) -> None:
        """Moves on behind what is known to be gone; raises where that is an error."""
        record = self._record or TopicRecord()
        hole = record.lost_range(self.at)
        if hole is None and self.at < record.start_offset:
            hole = (self.at, record.start_offset)  # retention went on while this was planned
        if hole is None:
            raise MissingData(
                f"{self._topic}: offset {self.at} is in no object and in no segment, and it should "
                f"be: the objects go from {record.start_offset} to {record.tail}, the topic to "
                f"{self._view.end_offset}"
            )
        if self._fail:
            raise LostOffsets(
                f"{self._topic}: offsets {hole[0]} to {hole[1] - 1} are gone: lost with the log of "
                "an earlier owner, or removed by retention; start at offset "
                f"{hole[1]}, or step over them with failOnDataLoss=false",
                start=hole[0],
                end=hole[1],
            )
        event(
            _log,
            logging.WARNING,
            "lost offsets stepped over",
            topic=self._topic,
            first=self.at,
            next=min(hole[1], self.end),
        )
        self.at = min(hole[1], self.end)

    # -- segments -------------------------------------------------------------------------------

    def _segment_pieces(self, segment: Segment, first: int, stop: int) -> list[Piece]:
        """What the segment holds of `first..stop`, cut where a place is known."""
        at, begin = self._seek(segment, first)
        last, position = self._seek(segment, stop)
        if last == stop:
            end = near = position
        else:
            end = segment.size
            # The active segment has no index here: about as far as its messages are long.
            near = segment.size * (stop - segment.first_offset) // segment.count
            near = max(near if segment.index else position + SEGMENT_INDEX_BYTES, position)
        size = max(min(near, segment.size) - begin, 1)
        whole = Piece(self._topic, first, stop, at, begin, end, size, path=segment.path)
        return self._cut(segment, whole)

    def _seek(self, segment: Segment, offset: int) -> tuple[int, int]:
        """The last known (offset, position) at or before `offset`, which may be the end."""
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
