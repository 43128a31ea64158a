"""Decides which offsets of a topic go into the next commit of a table. Does no I/O.

A commit is bounded by rows and by bytes, so that a long backfill makes progress in many commits.
Bytes are the size of the stored frames. They are estimated without an index: all messages of an
object or a segment are assumed to have the same size.

Beware: `after` is where the table ends, `start` is where the batch starts. They differ only if the
offsets between them do not exist, and either that was accepted or `allow_gaps` is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forebay.catalog.records import TopicRecord, skip_holes
from forebay.errors import OffsetOutOfRange
from forebay.read.holes import lost_error

_WHOLE: Final = TopicRecord()


@dataclass(frozen=True, slots=True)
class SizedRange:
    """The offsets `start..end` of an object or a segment, without `end`, and its bytes."""

    start: int
    end: int
    size: int


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """The offsets of a topic that can be read now."""

    topic: str
    start: int
    """The oldest offset that can be read."""
    end: int
    """One more than the last synced offset."""
    record: TopicRecord = _WHOLE
    """Has the ranges without messages."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The maximum rows and bytes of one commit. A single larger message is still committed."""

    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The offsets `start..end`, without `end`, for a table that ends at `after`."""

    after: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


def next_start(offsets: TopicOffsets, after: int, *, allow_gaps: bool) -> int:
    """Returns the offset to read from: `after`, or after an accepted range that contains it.

    Raises OffsetOutOfRange if retention has deleted that offset, and LostOffsets if it is lost or
    unknown. With `allow_gaps`, returns the next offset that exists instead.
    """
    record = offsets.record
    accepted = record.accepted_range(after)
    start = after if accepted is None else accepted[1]
    if start < offsets.start:
        if not allow_gaps:
            raise OffsetOutOfRange(
                f"{offsets.topic}: the table needs offset {start} next, but the oldest one is "
                f"{offsets.start}: the offsets between them were deleted before they were "
                "exported. To skip them, allow gaps (--allow-gaps)",
                start=offsets.start,
                end=offsets.end,
            )
        start = offsets.start
    if allow_gaps:
        return skip_holes(record, start)
    lost = record.lost_range(start)
    if lost is not None:
        skip = "skip it: allow gaps (--allow-gaps)"
        raise lost_error(offsets.topic, record, lost, skip)
    return start


def only_gone(offsets: TopicOffsets, first: int, end: int) -> bool:
    """Whether every offset of `first..end` is deleted or in a hole. True for an empty range."""
    at = skip_holes(offsets.record, max(first, min(offsets.start, end)))
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
    """Returns the next batch, or None if the table has everything up to `end`.

    `sizes` must be in the order of offsets. A batch ends where a hole begins. Raises the
    errors of `next_start`.
    """
    stop = offsets.end if end is None else min(end, offsets.end)
    if after >= stop:
        return None
    start = next_start(offsets, after, allow_gaps=allow_gaps)
    if start >= stop:
        return None
    stop = min([stop, *(first for first, _ in offsets.record.holes if first > start)])
    stop = min(stop, start + bounds.rows)
    return Batch(after, start, _within(start, stop, sizes, bounds.size))


def _within(start: int, stop: int, sizes: Iterable[SizedRange], size_max: int) -> int:
    """The end of a range from `start`: at most `size_max` bytes long, and at most `stop`."""
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
