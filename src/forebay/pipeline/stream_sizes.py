"""How many bytes the messages of a topic take, about, by the indexes of its objects and segments.

An index knows the position of one message in a thousand, or one in a mebibyte; between two that it
knows, messages are taken to be of one size. Nothing is read but descriptors and index files, and
of those no more than the asked-for bytes need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forebay.format.descriptor import ObjectDescriptor
from forebay.pipeline.scan_plan import KnownPlaces
from forebay.topic.view import TopicView
from forebay.wal.segment import Segment

_PAGE: Final = 2
"""Descriptors asked for at once: each may have an index of some hundred kilobytes."""
_PARTS: Final = 16
"""In which a segment is looked at."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One object or segment: known (offset, position) in it, its beginning and its end included."""

    places: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        return self.places[0][0]

    @property
    def next(self) -> int:
        return self.places[-1][0]

    def position(self, offset: int) -> int:
        """About where the message of the offset begins."""
        at = bisect_right(self.places, offset, key=lambda place: place[0])
        (low, begin), (high, end) = self._between(at)
        return begin + (end - begin) * (offset - low) // (high - low)

    def offset(self, position: int) -> int:
        """About which message is at the position; the one before it, if in doubt."""
        at = bisect_right(self.places, position, key=lambda place: place[1])
        (low, begin), (high, end) = self._between(at)
        return low + (high - low) * (position - begin) // (end - begin)

    def _between(self, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
        after = min(max(at, 1), len(self.places) - 1)
        return self.places[after - 1], self.places[after]


class TopicRuler:
    """Measures one topic. Remembers the object that it measured last."""

    def __init__(self, view: TopicView, known: KnownPlaces) -> None:
        self._view = view
        self._known = known
        self._held: Stretch | None = None

    def message_bytes(self, first: int, end: int) -> int:
        """Of one message at `first` or after it: at least 1."""
        for stretch in self._stretches(first, end):
            at = min(max(first, stretch.first), stretch.next - 1)
            return max(stretch.position(at + 1) - stretch.position(at), 1)
        return 1

    def reach(self, first: int, end: int, limit: int) -> int:
        """The offset up to which the messages from `first` take about `limit` bytes."""
        at, left = first, limit
        for stretch in self._stretches(first, end):
            at = max(at, stretch.first)
            stop = min(stretch.next, end)
            begin = stretch.position(at)
            size = stretch.position(stop) - begin
            if size > left:
                return min(max(stretch.offset(begin + left), at), stop)
            left -= size
            at = stop
        return at

    def _stretches(self, first: int, end: int) -> Iterator[Stretch]:
        """Those that hold `first..end`, in order; a range that is lost is in none."""
        at = first
        held = self._held
        if held is not None and held.first <= at < held.next:
            yield held
            at = held.next
        while at < end and (page := self._objects(at, end)):
            for descriptor in page:
                self._held = _of_object(descriptor)
                yield self._held
                at = descriptor.next_offset
        for segment in self._view.segments():
            if at < min(segment.end_offset, end):
                yield self._of_segment(segment)
                at = segment.end_offset

    def _objects(self, first: int, end: int) -> list[ObjectDescriptor]:
        tiers, record = self._view.store.tiers(), self._view.record
        if tiers is None or record is None or first >= record.tail:
            return []
        return tiers.catalog.descriptors(self._view.topic, first, end, _PAGE)

    def _of_segment(self, segment: Segment) -> Stretch:
        last = segment.end_offset - 1
        places = {(segment.first_offset, 0), *self._known.of(segment)}
        try:
            for part in range(1, _PARTS):
                places.add(self._view.indexes.floor(segment, last, segment.size * part // _PARTS))
        except FileNotFoundError:
            pass  # retention was faster; the segment's two ends serve
        return _stretch(places, segment.end_offset, segment.size)


def _of_object(descriptor: ObjectDescriptor) -> Stretch:
    places = {(descriptor.start_offset, 0), *(descriptor.offset_index or ())}
    return _stretch(places, descriptor.next_offset, descriptor.size)


def _stretch(places: set[tuple[int, int]], end: int, size: int) -> Stretch:
    """Ascending in both, whatever came in."""
    found: list[tuple[int, int]] = []
    for place in sorted(places):
        if not found or (place[0] > found[-1][0] and place[1] > found[-1][1]):
            found.append(place)
    while len(found) > 1 and (found[-1][0] >= end or found[-1][1] >= size):
        found.pop()
    return Stretch((*found, (end, size)))
