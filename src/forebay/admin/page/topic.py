"""One topic as the page shows it: its numbers, and which offsets are where (spans).

A message can be in several tiers at once, so spans of different tiers overlap; those of one tier do
not. An offset between the start and the end of a topic that no tier holds is in a gap. A gap says
whether the catalog knows of it (`lost`, `unknown` or `accepted`) or not (`missing`, which is
damage).

Beware: `bounded` joins only spans that are too narrow to be seen. Ask for a narrower window to see
the parts.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta
from msgspec.structs import replace

from forebay.admin.context import ServerContext
from forebay.admin.page.history import TopicTrace, bytes_after
from forebay.admin.page.subscriptions import SubscriptionLine
from forebay.admin.page.topic_states import OBJECTS_READ, TopicState
from forebay.admin.records import Count, OffsetRange, Record, Seconds
from forebay.catalog.records import TopicRecord, ranges_within
from forebay.config.topics import differing
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import parse_ledger
from forebay.topic.describe import UploadedBy, kept_because, uploaded_by
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

Tier: TypeAlias = Literal["memory", "segment", "object", "verified", "gap"]
_RANGES_MAX = 100
_LANES = 4
"""Memory, segments, objects (verified or not), gaps."""


# ---- records ----------------------------------------------------------------------------------


class Span(Record, frozen=True, omit_defaults=True):
    """A range of offsets in one tier. A field that has its default is left out."""

    start: Count
    end: Annotated[Count, Meta(description="One more than the last offset.")]
    tier: Tier
    state: str
    name: Annotated[
        str | None, Meta(description="The file or the object; the first one if spans were joined.")
    ] = None
    bytes: Annotated[Count | None, Meta(description="Null in memory and in a gap.")] = None
    created: Annotated[
        Seconds | None,
        Meta(description="When the segment was last written to; null for other tiers."),
    ] = None
    kept_because: Annotated[
        str | None,
        Meta(description="Why retention keeps a segment; null if it may be deleted."),
    ] = None
    merged: Annotated[Count, Meta(description="How many spans were joined into this one.")] = 1
    codec: Annotated[
        str | None, Meta(description="How the object is compressed; null if it is not.")
    ] = None
    raw_bytes: Annotated[
        Count | None, Meta(description="Bytes before compression; null if it is not compressed.")
    ] = None
    ledger: Annotated[
        str | None,
        Meta(description="The id of the Pulsar ledger that the object is; null if it is none."),
    ] = None


class Sizes(Record, frozen=True):
    """Numbers of a topic, or sums over topics."""

    messages: Count = 0
    memory_messages: Count = 0
    segments: Count = 0
    segment_messages: Count = 0
    segment_bytes: Count = 0
    objects: Count = 0
    object_messages: Count = 0
    object_bytes: Count = 0
    verified_messages: Count = 0
    verified_objects: Count = 0
    gaps: Count = 0
    lost_offsets: Annotated[
        Count,
        Meta(description="Offsets, not messages: most offsets of a lost range were never used."),
    ] = 0
    unknown_offsets: Annotated[
        Count, Meta(description="Offsets that may never have been used.")
    ] = 0
    accepted_offsets: Annotated[
        Count, Meta(description="Offsets that were lost or unknown. Readers jump over them.")
    ] = 0
    missing_offsets: Count = 0
    lag_messages: Count = 0


class Lag(Record, frozen=True):
    """The messages that are synced and not uploaded."""

    messages: Count
    bytes: Count
    seconds: Annotated[float, Meta(description="How long the oldest message has waited.")]


class Rates(Record, frozen=True):
    """Messages a second."""

    appended: float
    uploaded: float


class TopicRow(Record, frozen=True):
    """One topic."""

    name: str
    open: bool
    start: Count
    appended: Count
    synced: Count
    uploaded: Count
    verified: Count
    memory: OffsetRange | None
    lost: list[OffsetRange]
    unknown: list[OffsetRange]
    accepted: list[OffsetRange]
    lag: Lag
    rates: Rates
    trouble: str | None
    uploaded_by: Annotated[
        UploadedBy | None,
        Meta(description="What uploads the topic in the background; null if nothing does."),
    ]
    upload_seconds: Annotated[
        float | None,
        Meta(description="After how long a message is uploaded at the latest; null for no limit."),
    ]
    own_settings: Annotated[
        dict[str, str], Meta(description="The settings that the topic has of its own.")
    ]
    subscriptions: Annotated[
        list[SubscriptionLine], Meta(description="The first ones; see `subscriptions_total`.")
    ]
    subscriptions_total: Count
    sizes: Sizes
    spans: list[Span]


# ---- a topic ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicPage:
    row: TopicRow
    """The topic's part of the overview."""
    missing: list[tuple[int, int]]
    """Ranges of offsets that should be in some tier and are in none."""


def all_spans(context: ServerContext, state: TopicState) -> list[Span]:
    first = state.segments[0].first_offset if state.segments else 0
    kept = kept_because(
        state.segments,
        state.record,
        [each for each in state.objects if each.next_offset > first],
        (state.settings or context.settings).deleter,
        int(time.time() * 1000),
    )
    held = [
        *memory_spans(state.memory, state.marks),
        *segment_spans(state.segments, state.marks, kept),
        *older_spans(state),
        *object_spans(state.objects, state.marks.verified),
    ]
    return [*held, *gap_spans(state.start, state.marks.appended, held, state.record)]


def window_spans(
    context: ServerContext, state: TopicState, start: int, end: int, most: int
) -> list[Span]:
    """The spans in a window. Objects of it that are not among the newest are read now."""
    stop = min(end, max(state.marks.appended, start + 1))
    if state.objects and start < state.objects[0].start_offset:
        border = state.objects[0].start_offset
        more = context.watch.states.objects_between(state.name, start, min(stop, border))
        if more and more[-1].next_offset >= min(stop, border):
            state = dataclasses.replace(state, objects=[*more, *state.objects])
    found = within(all_spans(context, state), start, stop)
    return bounded(found, start, stop, most)


def topic_page(context: ServerContext, state: TopicState, most: int) -> TopicPage:
    """Builds the page of one topic, with at most about `most` spans."""
    spans = all_spans(context, state)
    marks = state.marks
    trace = context.watch.history.trace(state.name)
    settings = state.settings or context.settings
    subscriptions, total = context.page_subscriptions.rows(state)
    append_rate, upload_rate = trace.rates() if trace is not None else (0.0, 0.0)
    row = TopicRow(
        name=state.name,
        open=state.open,
        start=state.start,
        appended=marks.appended,
        synced=marks.synced,
        uploaded=marks.uploaded,
        verified=marks.verified,
        memory=(state.memory.start, state.memory.stop) if state.memory else None,
        lost=_gaps(spans, "lost")[:_RANGES_MAX],
        unknown=_gaps(spans, "unknown")[:_RANGES_MAX],
        accepted=_gaps(spans, "accepted")[:_RANGES_MAX],
        lag=Lag(
            max(marks.synced - marks.uploaded, 0),
            bytes_after(state.segments, marks.uploaded),
            _lag_seconds(state, trace),
        ),
        rates=Rates(append_rate, upload_rate),
        trouble=state.trouble,
        uploaded_by=uploaded_by(settings.uploader),
        upload_seconds=settings.uploader.max_open_seconds,
        own_settings=differing(context.settings, settings),
        subscriptions=subscriptions,
        subscriptions_total=total,
        sizes=_sizes(state, spans),
        spans=bounded(spans, state.start, marks.appended, most),
    )
    return TopicPage(row, _gaps(spans, "missing"))


def _gaps(spans: Iterable[Span], state: str) -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in spans if each.tier == "gap" and each.state == state]


def _lag_seconds(state: TopicState, trace: TopicTrace | None) -> float:
    """How long the oldest message that is not uploaded has waited; estimated without a trace."""
    marks = state.marks
    if marks.uploaded >= marks.synced:
        return 0.0
    since = trace.waiting_since() if trace is not None else None
    if since is None:
        holding = [each for each in state.segments if each.end_offset > marks.uploaded]
        since = holding[0].created_ms / 1000 if holding else None
    return 0.0 if since is None else round(max(time.time() - since, 0.0), 3)


def _sizes(state: TopicState, spans: Sequence[Span]) -> Sizes:
    marks = state.marks
    older = [each for each in older_spans(state) if each.tier == "verified"]
    older_messages = sum(each.end - each.start for each in older)
    older_objects = sum(each.merged for each in older)
    gaps = [each for each in spans if each.tier == "gap"]
    without = Counter[str]()
    for each in gaps:
        without[each.state] += each.end - each.start
    local = state.segments
    return Sizes(
        messages=max(marks.appended - state.start - without.total(), 0),
        memory_messages=len(state.memory),
        segments=len(local),
        segment_messages=sum(each.count for each in local),
        segment_bytes=sum(each.size for each in local),
        objects=max(state.totals.objects, len(state.objects)),
        object_messages=sum(each.count for each in state.objects) + older_messages,
        object_bytes=max(state.totals.bytes, sum(each.size for each in state.objects)),
        verified_messages=older_messages
        + sum(each.count for each in state.objects if each.next_offset <= marks.verified),
        verified_objects=older_objects
        + sum(each.next_offset <= marks.verified for each in state.objects),
        gaps=len(gaps),
        lost_offsets=without["lost"],
        unknown_offsets=without["unknown"],
        accepted_offsets=without["accepted"],
        missing_offsets=without["missing"],
        lag_messages=max(marks.synced - marks.uploaded, 0),
    )


def summed(sizes: Sequence[Sizes]) -> Sizes:
    """The sum of each number."""
    names = Sizes.__struct_fields__
    return Sizes(**{name: sum(getattr(each, name) for each in sizes) for name in names})


# ---- spans; pure ------------------------------------------------------------------------------


def memory_spans(held: range, marks: Watermarks) -> list[Span]:
    """Spans of the messages in memory: the synced ones, and those that are not synced."""
    border = min(max(marks.synced, held.start), held.stop)
    found = [
        Span(held.start, border, "memory", "synced"),
        Span(border, held.stop, "memory", "not synced"),
    ]
    return [span for span in found if span.end > span.start]


def segment_spans(
    segments: Sequence[Segment], marks: Watermarks, kept: Sequence[str | None]
) -> list[Span]:
    """`kept` says for each segment why retention keeps it; None if it may be deleted."""
    return [
        Span(
            each.first_offset,
            each.end_offset,
            "segment",
            _segment_state(each.end_offset, marks),
            each.path.name,
            each.size,
            each.modified_ms / 1000,
            why,
        )
        for each, why in zip(segments, kept, strict=True)
        if each.count
    ]


def _segment_state(end: int, marks: Watermarks) -> str:
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
            codec=each.codec,
            raw_bytes=None if each.codec is None else each.raw_size,
            ledger=_ledger_of(each),
        )
        for each in objects
    ]


def _ledger_of(descriptor: ObjectDescriptor) -> str | None:
    """The id as text: JavaScript's numbers are too small for some."""
    name = parse_ledger(descriptor.object_id)
    return None if name is None else str(name.ledger_id)


def older_spans(state: TopicState) -> list[Span]:
    """One span for the objects before the newest ones, or several if lost offsets are between."""
    if len(state.objects) < OBJECTS_READ:
        return []  # these are all
    end = min(state.objects[0].start_offset, state.record.tail if state.record else 0)
    borders = [state.start]
    for begin, stop in () if state.record is None else state.record.holes:
        if state.start < stop and begin < end:
            borders += [max(begin, state.start), stop]
    borders.append(end)
    count = max(state.totals.objects - len(state.objects), 1)
    size = max(state.totals.bytes - sum(each.size for each in state.objects), 0)
    found: list[Span] = []
    for begin, stop in zip(borders[::2], borders[1::2], strict=True):
        if begin < stop:
            first = not found
            verified = stop <= state.marks.verified
            found.append(
                Span(
                    begin,
                    stop,
                    "verified" if verified else "object",
                    "verified" if verified else "not yet read back",
                    None,
                    size if first else 0,
                    merged=count if first else 1,
                )
            )
    return found


def gap_spans(start: int, end: int, held: Iterable[Span], record: TopicRecord | None) -> list[Span]:
    """Spans of the offsets between `start` and `end` that no tier has."""
    record = record or TopicRecord()
    kinds = (("lost", record.lost), ("unknown", record.unknown), ("accepted", record.accepted))
    found = [
        Span(*each, "gap", kind)
        for kind, ranges in kinds
        for each in ranges_within(ranges, start, end)
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
    """Returns the spans that overlap a window, unclipped."""
    return [span for span in spans if span.start < end and span.end > start]


def bounded(spans: Sequence[Span], start: int, end: int, most: int) -> list[Span]:
    """At most about `most` spans of a window, by start: the narrowest neighbours are joined.

    Neighbours of one lane are joined while they are together no wider than a cell. Any two that
    remain next to each other are wider, so a lane has at most two for each cell.
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
    codec = one.codec if one.codec == other.codec else "mixed"
    return replace(
        one,
        end=other.end,
        state=one.state if one.state == other.state else "mixed",
        bytes=None if one.bytes is None else one.bytes + (other.bytes or 0),
        created=other.created,
        kept_because=one.kept_because if one.kept_because == other.kept_because else "mixed",
        merged=one.merged + other.merged,
        codec=codec,
        raw_bytes=None if codec is None else _raw_bytes(one) + _raw_bytes(other),
        ledger=one.ledger if (one.ledger is None) == (other.ledger is None) else "mixed",
    )


def _raw_bytes(span: Span) -> int:
    return (span.bytes or 0) if span.raw_bytes is None else span.raw_bytes
