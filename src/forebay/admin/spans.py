"""Spans: which offsets of a topic are where, as ranges to draw. Pure.

A message can be in several tiers at once, so spans of different tiers overlap; those of one tier
do not. An offset between the start and the end of a topic that no tier holds is in a gap, and a
gap says whether the catalog knows of it (`lost`) or not (`missing`, which is damage).

What a caller gets wrong: `bounded` joins only what is too narrow to be seen. Ask for a narrower
window to see the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from forebay.catalog.records import TopicRecord
from forebay.format.descriptor import ObjectDescriptor
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

Tier: TypeAlias = Literal["memory", "segment", "object", "verified", "gap"]
_LANES = 4
"""Memory, segments, objects (verified or not), gaps."""


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    end: int
    """One more than the last offset."""
    tier: Tier
    state: str
    name: str | None = None
    """The file or the object; of several, the first one."""
    bytes: int | None = None
    """None in memory and in a gap."""
    created: float | None = None
    """Seconds since 1970-01-01 UTC; of a segment, when it was last written to."""
    kept_because: str | None = None
    """Why retention leaves a segment alone; None if it may go, and for other tiers."""
    merged: int = 1
    """How many spans this one stands for."""


def memory_spans(held: range, marks: Watermarks) -> list[Span]:
    """What is synced and still at hand, and what is in memory alone."""
    border = min(max(marks.synced, held.start), held.stop)
    found = [
        Span(held.start, border, "memory", "synced"),
        Span(border, held.stop, "memory", "not synced"),
    ]
    return [span for span in found if span.end > span.start]


def segment_spans(
    segments: Sequence[Segment], marks: Watermarks, kept: Sequence[str | None]
) -> list[Span]:
    """`kept`: for each segment why it stays, None if it may go."""
    return [
        Span(
            each.first_offset,
            each.end_offset,
            "segment",
            _stage(each.end_offset, marks),
            each.path.name,
            each.size,
            each.modified_ms / 1000,
            why,
        )
        for each, why in zip(segments, kept, strict=True)
        if each.count
    ]


def _stage(end: int, marks: Watermarks) -> str:
    if end <= marks.verified:
        return "verified"
    return "uploaded" if end <= marks.uploaded else "not uploaded"


def object_spans(objects: Iterable[ObjectDescriptor], verified: int) -> list[Span]:
    return [
        Span(
            each.start_offset,
            each.next_offset,
            "verified" if each.next_offset <= verified else "object",
            "verified" if each.next_offset <= verified else "not yet read back",
            each.object_id,
            each.size,
            each.created_at,
        )
        for each in objects
    ]


def gap_spans(start: int, end: int, held: Iterable[Span], record: TopicRecord | None) -> list[Span]:
    """What no tier holds between `start` and `end`."""
    lost = () if record is None else record.lost
    found = [
        Span(max(begin, start), min(stop, end), "gap", "lost")
        for begin, stop in lost
        if begin < end and stop > start
    ]
    at = start
    missing: list[Span] = []
    for span in sorted([*held, *found], key=lambda each: each.start):
        if span.start > at:
            missing.append(Span(at, min(span.start, end), "gap", "missing"))
        at = max(at, span.end)
        if at >= end:
            break
    if at < end:
        missing.append(Span(at, end, "gap", "missing"))
    return [*found, *missing]


def within(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Those that a window shows, whole."""
    return [span for span in spans if span.start < end and span.end > start]


def bounded(spans: Sequence[Span], start: int, end: int, most: int) -> list[Span]:
    """At most about `most` spans of a window, by start: the narrowest neighbours are joined.

    Neighbours of one lane are joined while they are together no wider than a cell. Any two that
    are left next to each other are wider, so that a lane has at most two for each cell.
    """
    if len(spans) > most:
        cells = max(most // (2 * _LANES), 1)
        width = max((end - start) / cells, 1)
        lanes: dict[str, list[Span]] = {}
        for span in sorted(spans, key=lambda each: each.start):
            lane = lanes.setdefault("object" if span.tier == "verified" else span.tier, [])
            if lane and lane[-1].tier == span.tier and span.end - lane[-1].start <= width:
                lane[-1] = _joined(lane[-1], span)
            else:
                lane.append(span)
        spans = [span for lane in lanes.values() for span in lane]
    return sorted(spans, key=lambda each: (each.start, each.tier))


def _joined(one: Span, other: Span) -> Span:
    return replace(
        one,
        end=other.end,
        state=one.state if one.state == other.state else "mixed",
        bytes=None if one.bytes is None else one.bytes + (other.bytes or 0),
        created=other.created,
        kept_because=one.kept_because if one.kept_because == other.kept_because else "mixed",
        merged=one.merged + other.merged,
    )
