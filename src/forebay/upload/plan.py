"""Which bytes of which segments make the next object: a pure decision.

Segments are taken whole as far as they fit, and the last one is cut at a frame where it does not.
Nothing is planned until an object is full, unless it is overdue: quiet topics make no small
objects, and no message waits for ever. Inline and Spark runners plan with the same function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from forebay.settings import UploaderSettings
from forebay.wal.segment import Segment


class Place(NamedTuple):
    """A frame boundary in the log: the frame that begins there has this offset."""

    seq: int
    position: int
    offset: int


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


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object to be: its extents follow each other without a gap."""

    extents: tuple[Extent, ...]

    @property
    def start_offset(self) -> int:
        return self.extents[0].first_offset

    @property
    def next_offset(self) -> int:
        return self.extents[-1].next_offset

    @property
    def size(self) -> int:
        return sum(extent.size for extent in self.extents)

    @property
    def end(self) -> Place:
        """Where the next object begins."""
        last = self.extents[-1]
        return Place(last.seq, last.end, last.next_offset)

    def cut_at(self, path: Path, position: int, offset: int) -> PlannedObject | None:
        """What is left before a frame of it; None if that is nothing."""
        kept: list[Extent] = []
        for extent in self.extents:
            if extent.path == path:
                if position > extent.start:
                    kept.append(replace(extent, end=position, next_offset=offset))
                break
            kept.append(extent)
        return PlannedObject(tuple(kept)) if kept else None


class Cut(Protocol):
    """Finds the last frame boundary of a segment within bounds."""

    def __call__(
        self, segment: Segment, start: Place, bytes_max: int, messages_max: int | None
    ) -> Place:
        """At most so many bytes and messages after `start`; `start` if not one frame fits."""


def plan_object(
    segments: Iterable[Segment],
    start: Place,
    settings: UploaderSettings,
    cut: Cut,
    *,
    overdue: bool,
    whole_segments: bool = False,
) -> PlannedObject | None:
    """The next object from `start` on, or None if it is too early for one.

    `overdue` takes what is there. An object is never over its bounds, but for a single frame that
    is larger than all of them. `whole_segments` ends an object with a segment where it can, and
    cuts only a segment that is larger than an object.
    """
    extents: list[Extent] = []
    room = settings.max_object_bytes
    messages = settings.max_object_messages
    at = start
    full = False
    for segment in segments:
        if segment.end_offset <= at.offset or segment.seq < at.seq:
            continue
        if segment.seq != at.seq:
            at = Place(segment.seq, 0, at.offset)
        stop = Place(segment.seq, segment.size, segment.end_offset)
        count = stop.offset - at.offset
        if stop.position - at.position > room or (messages is not None and count > messages):
            full = True
            if whole_segments and extents:
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
        if full or room <= 0 or messages == 0:
            full = True
            break
    if not extents or not (full or overdue):
        return None
    return PlannedObject(tuple(extents))


def _extent(segment: Segment, start: Place, stop: Place) -> Extent:
    return Extent(
        segment.seq, segment.path, start.position, stop.position, start.offset, stop.offset
    )
