"""One topic as the page shows it: its numbers, and its ranges of offsets by tier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forebay.admin.history import Trace, bytes_after
from forebay.admin.site import Site
from forebay.admin.spans import (
    Span,
    bounded,
    gap_spans,
    memory_spans,
    object_spans,
    segment_spans,
    within,
)
from forebay.admin.topic_states import TopicState
from forebay.topic.describe import kept_because


@dataclass(frozen=True, slots=True)
class TopicPage:
    name: str
    facts: dict[str, Any]
    sizes: dict[str, int]
    """What adds up over topics."""
    missing: list[tuple[int, int]]
    """Offsets that should be somewhere and are nowhere."""
    trouble: str | None


def all_spans(site: Site, state: TopicState) -> list[Span]:
    first = state.segments[0].first_offset if state.segments else 0
    kept = kept_because(
        state.segments,
        state.record,
        [each for each in state.objects if each.next_offset > first],
        site.settings.deleter,
        int(time.time() * 1000),
    )
    held = [
        *memory_spans(state.memory, state.marks),
        *segment_spans(state.segments, state.marks, kept),
        *object_spans(state.objects, state.marks.verified),
    ]
    return [*held, *gap_spans(state.start, state.marks.appended, held, state.record)]


def window_spans(
    site: Site, state: TopicState, start: int, end: int, most: int
) -> list[dict[str, Any]]:
    """The ranges that a window shows, as JSON has them."""
    stop = min(end, max(state.marks.appended, start + 1))
    found = within(all_spans(site, state), start, stop)
    return [_plain(each) for each in bounded(found, start, stop, most)]


def topic_page(site: Site, state: TopicState, most: int) -> TopicPage:
    """With at most about `most` ranges."""
    spans = all_spans(site, state)
    marks = state.marks
    trace = site.watch.history.trace(state.name)
    append_rate, upload_rate = trace.rates() if trace is not None else (0.0, 0.0)
    sizes = _sizes(state, spans)
    facts: dict[str, Any] = {
        "name": state.name,
        "open": state.open,
        "start": state.start,
        "appended": marks.appended,
        "synced": marks.synced,
        "uploaded": marks.uploaded,
        "verified": marks.verified,
        "memory": [state.memory.start, state.memory.stop] if state.memory else None,
        "lost": [(each.start, each.end) for each in spans if each.state == "lost"][:100],
        "lag": {
            "messages": max(marks.synced - marks.uploaded, 0),
            "bytes": bytes_after(state.segments, marks.uploaded),
            "seconds": _waited(state, trace),
        },
        "rates": {"appended": append_rate, "uploaded": upload_rate},
        "trouble": state.trouble,
        "sizes": sizes,
        "spans": [_plain(each) for each in bounded(spans, state.start, marks.appended, most)],
    }
    missing = [(each.start, each.end) for each in spans if each.state == "missing"]
    return TopicPage(state.name, facts, sizes, missing, state.trouble)


def _waited(state: TopicState, trace: Trace | None) -> float:
    """How long the oldest message that is not uploaded has waited; about, where nobody watched."""
    marks = state.marks
    if marks.uploaded >= marks.synced:
        return 0.0
    since = trace.waiting_since() if trace is not None else None
    if since is None:
        holding = [each for each in state.segments if each.end_offset > marks.uploaded]
        since = holding[0].created_ms / 1000 if holding else None
    return 0.0 if since is None else round(max(time.time() - since, 0.0), 3)


def _sizes(state: TopicState, spans: Sequence[Span]) -> dict[str, int]:
    marks = state.marks
    gaps = [each for each in spans if each.tier == "gap"]
    lost = sum(each.end - each.start for each in gaps if each.state == "lost")
    missing = sum(each.end - each.start for each in gaps if each.state == "missing")
    local = state.segments
    return {
        "messages": max(marks.appended - state.start - lost - missing, 0),
        "memory_messages": len(state.memory),
        "segments": len(local),
        "segment_messages": sum(each.count for each in local),
        "segment_bytes": sum(each.size for each in local),
        "objects": len(state.objects),
        "object_messages": sum(each.count for each in state.objects),
        "object_bytes": sum(each.size for each in state.objects),
        "verified_messages": sum(
            each.count for each in state.objects if each.next_offset <= marks.verified
        ),
        "verified_objects": sum(each.next_offset <= marks.verified for each in state.objects),
        "gaps": len(gaps),
        # Offsets, not messages: a crash loses what was reserved, and most of it was never used.
        "lost_offsets": lost,
        "missing_offsets": missing,
        "lag_messages": max(marks.synced - marks.uploaded, 0),
    }


def _plain(span: Span) -> dict[str, Any]:
    """Without what says nothing: there may be thousands of them."""
    found = {name: value for name, value in asdict(span).items() if value is not None}
    if span.merged == 1:
        del found["merged"]
    return found
