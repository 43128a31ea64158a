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
class SizedRange:
    """Offsets of a topic with their size in bytes: those of an object, or of a segment."""

    start: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """What of a topic can be read at one moment."""

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


def next_start(offsets: TopicOffsets, after: int, *, allow_gaps: bool) -> int:
    """The offset to read from; OffsetOutOfRange if the one that is due is gone."""
    start = after
    if start < offsets.start:
        if not allow_gaps:
            raise OffsetOutOfRange(
                f"{offsets.topic}: offset {start} is next for the table, and the oldest that can "
                f"be read is {offsets.start}: what is between them was deleted before it was "
                "exported; to go on without it, allow gaps (--allow-gaps)",
                start=offsets.start,
                end=offsets.end,
            )
        start = offsets.start
    for first, end in offsets.lost:
        if first <= start < end:
            if not allow_gaps:
                raise LostOffsets(
                    f"{offsets.topic}: offsets {start} to {end - 1} are lost; to go on after them, "
                    "allow gaps (--allow-gaps)",
                    start=start,
                    end=end,
                )
            start = end
    return start


def only_gone(offsets: TopicOffsets, first: int, end: int) -> bool:
    """Whether nothing between the offsets can be read any more; so too if nothing is between."""
    at = max(first, min(offsets.start, end))
    for lost, after in sorted(offsets.lost):
        if lost <= at < after:
            at = after
    return first <= end <= at


def next_batch(
    offsets: TopicOffsets,
    after: int,
    sizes: Iterable[SizedRange],
    bounds: Bounds,
    *,
    end: int | None = None,
    allow_gaps: bool = False,
) -> Batch | None:
    """What to export next, or None if the table has everything up to `end`.

    `sizes` are in the order of their offsets. A batch ends where a lost range begins.
    """
    stop = offsets.end if end is None else min(end, offsets.end)
    if after >= stop:
        return None
    start = next_start(offsets, after, allow_gaps=allow_gaps)
    if start >= stop:
        return None
    stop = min([stop, *(first for first, _ in offsets.lost if first > start)])
    stop = min(stop, start + bounds.rows)
    return Batch(after, start, _within(start, stop, sizes, bounds.size))


def _within(start: int, stop: int, sizes: Iterable[SizedRange], size_max: int) -> int:
    """The last end up to `stop` before which there are at most `size_max` bytes."""
    at, left = start, size_max
    for known in sizes:
        first, end = max(known.start, at), min(known.end, stop)
        if first >= end:
            continue
        each = max(known.size / (known.end - known.start), 1)
        fit = int(left / each)
        if fit < end - first:
            return max(first + fit, start + 1)
        at, left = end, left - int(each * (end - first))
    return stop
