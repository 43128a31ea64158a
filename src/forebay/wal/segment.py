"""Segments: the files of a log, and the set of them at one moment.

`SegmentSet` is an immutable snapshot. The writer replaces it after each sync, readers take it as
it is; a frame that a snapshot covers is synced and stays where it is until retention removes the
whole segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.format.segment_index import SegmentIndex


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
    """Of the active segment; those of sealed ones are loaded when a reader needs them."""

    @property
    def count(self) -> int:
        return self.end_offset - self.first_offset


@dataclass(frozen=True, slots=True)
class SegmentSet:
    """Sealed segments, oldest first, and the active one, if any was begun."""

    sealed: tuple[Segment, ...] = ()
    active: Segment | None = None

    def __iter__(self) -> Iterator[Segment]:
        yield from self.sealed
        if self.active is not None:
            yield self.active

    @property
    def start_offset(self) -> int | None:
        """The oldest offset in a file; None while no file was begun."""
        if self.sealed:
            return self.sealed[0].first_offset
        return self.active.first_offset if self.active is not None else None

    def find(self, offset: int) -> Segment | None:
        """The segment that holds `offset`, synced."""
        active = self.active
        if active is not None and active.first_offset <= offset < active.end_offset:
            return active
        at = bisect_right(self.sealed, offset, key=lambda segment: segment.first_offset) - 1
        if at >= 0 and offset < self.sealed[at].end_offset:
            return self.sealed[at]
        return None
