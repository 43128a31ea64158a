"""Which offsets of a topic go into the next commit of a table: a pure decision.

A commit is bounded by rows and by bytes, so that a long backfill is many commits, each of
which counts when it is made. Bytes are those of the stored frames, spread evenly over the
messages of an object or a segment: an estimate, which needs no index.

What a caller gets wrong: `after` is where the table had got to, `start` is where the batch
reads from. They differ when offsets between them are gone, and only with `allow_gaps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.errors import (
    LostOffsets,
    OffsetOutOfRange,
)


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of a topic with its size: an object, or a segment."""

    start: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """A topic at one moment."""

    topic: str
    start: int
    """The oldest offset that can be read."""
    end: int
    """One more than the last synced offset."""
    lost: tuple[tuple[int, int], ...] = ()
    """Ranges that were handed out and whose messages are gone."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one commit holds at most; a single message may be larger."""

    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The offsets `start..end`, the latter not included, for a table that had got to `after`."""

    after: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


def next_start(span: Span, after: int, *, allow_gaps: bool) -> int:
    """The offset to read from; OffsetOutOfRange if the one that is due is gone."""
    start = after
    if start < span.start:
        if not allow_gaps:
            raise OffsetOutOfRange(
                f"{span.topic}: offset {start} is next for the table, and the oldest that can "
                f"be read is {span.start}: what is between them was deleted before it was "
                "exported; to go on without it, allow gaps (--allow-gaps)",
                start=span.start,
                end=span.end,
            )
        start = span.start
    for first, end in span.lost:
        if first <= start < end:
            if not allow_gaps:
                raise LostOffsets(
                    f"{span.topic}: offsets {start} to {end - 1} are lost; to go on after them, "
                    "allow gaps (--allow-gaps)",
                    start=start,
                    end=end,
                )
            start = end
    return start


def only_gone(span: Span, first: int, end: int) -> bool:
    """Whether nothing between the offsets can be read any more; so too if nothing is between."""
    at = max(first, min(span.start, end))
    for lost, after in sorted(span.lost):
        if lost <= at < after:
            at = after
    return first <= end <= at


def next_batch(
    span: Span,
    after: int,
    extents: Iterable[Extent],
    bounds: Bounds,
    *,
    end: int | None = None,
    allow_gaps: bool = False,
) -> Batch | None:
    """What to export next, or None if the table has everything up to `end`.

    `extents` are in the order of their offsets. A batch ends where a lost range begins.
    """
    stop = span.end if end is None else min(end, span.end)
    if after >= stop:
        return None
    start = next_start(span, after, allow_gaps=allow_gaps)
    if start >= stop:
        return None
    stop = min([stop, *(first for first, _ in span.lost if first > start)])
    stop = min(stop, start + bounds.rows)
    return Batch(after, start, _within(start, stop, extents, bounds.size))


def _within(start: int, stop: int, extents: Iterable[Extent], size_max: int) -> int:
    """The last end up to `stop` before which there are at most `size_max` bytes."""
    at, left = start, size_max
    for extent in extents:
        first, end = max(extent.start, at), min(extent.end, stop)
        if first >= end:
            continue
        each = max(extent.size / (extent.end - extent.start), 1)
        fit = int(left / each)
        if fit < end - first:
            return max(first + fit, start + 1)
        at, left = end, left - int(each * (end - first))
    return stop
