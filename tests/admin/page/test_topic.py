"""Spans: which offsets are where, and how many of them are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forebay.admin.page.topic import (
    Span,
    bounded,
    gap_spans,
    memory_spans,
    object_spans,
    older_spans,
    segment_spans,
    within,
)
from forebay.admin.page.topic_states import OBJECTS_READ, TopicState
from forebay.catalog.chain import Totals
from forebay.catalog.records import TopicRecord
from forebay.format.descriptor import ObjectDescriptor
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

MARKS = Watermarks(appended=120, synced=110, uploaded=60, verified=30)


def segment(first: int, end: int) -> Segment:
    return Segment(first, Path(f"/wal/wal.{first}.log"), first, end, 10 * (end - first), 1000, 2000)


def stored(first: int, end: int) -> ObjectDescriptor:
    return ObjectDescriptor(f"data-{first}-{end - 1}.dnb1", first, end - 1, 500, None, 7)


def test_memory_is_told_apart_by_what_is_synced() -> None:
    assert memory_spans(range(90, 120), MARKS) == [
        Span(90, 110, "memory", "synced"),
        Span(110, 120, "memory", "not synced"),
    ]
    assert memory_spans(range(110, 110), MARKS) == []


def test_segments_say_how_far_they_are_and_why_they_stay() -> None:
    segments = [segment(0, 30), segment(30, 60), segment(60, 110)]
    found = segment_spans(segments, MARKS, [None, "too young", "newest"])
    assert [(each.state, each.kept_because) for each in found] == [
        ("verified", None),
        ("uploaded", "too young"),
        ("not uploaded", "newest"),
    ]
    assert found[0].name == "wal.0.log"
    assert found[0].bytes == 300


def test_objects_are_verified_below_the_watermark() -> None:
    found = object_spans([stored(0, 30), stored(30, 60)], MARKS.verified)
    assert [each.tier for each in found] == ["verified", "object"]


def test_a_ledger_is_told_from_objects_of_frames() -> None:
    name = "00000000-0000-4000-8000-000000000000-ledger-9223372036854775807"
    one = replace(stored(30, 60), object_id=name, format="pulsar", raw_size=2000)
    other = replace(stored(60, 90), object_id=name[:-1] + "6", format="pulsar", raw_size=2000)
    plain, first, second = object_spans([stored(0, 30), one, other], 90)
    assert (plain.ledger, first.ledger) == (None, "9223372036854775807")
    assert (first.codec, first.raw_bytes) == (None, None)
    assert bounded([first, second], 0, 90, 1)[0].ledger == first.ledger
    assert bounded([plain, first, second], 0, 90, 1)[0].ledger == "mixed"


def test_compressed_objects_say_how_and_how_large_they_were_before() -> None:
    packed = replace(stored(30, 60), codec="zstd", raw_size=2000)
    plain, compressed = object_spans([stored(0, 30), packed], 60)
    assert (plain.codec, plain.raw_bytes) == (None, None)
    assert (compressed.codec, compressed.bytes, compressed.raw_bytes) == ("zstd", 500, 2000)
    [joined] = bounded([plain, compressed], 0, 60, 1)
    assert (joined.codec, joined.bytes, joined.raw_bytes) == ("mixed", 1000, 2500)


def test_older_objects_are_one_span_that_leaves_out_what_is_lost() -> None:
    newest = [stored(100 + at, 101 + at) for at in range(OBJECTS_READ)]
    end = newest[-1].next_offset
    state = TopicState(
        "/default/t",
        open=True,
        start=10,
        marks=Watermarks(end, end, end, end),
        objects=newest,
        totals=Totals(OBJECTS_READ + 7, 500 * OBJECTS_READ + 900),
        record=TopicRecord(tail=end, lost=((30, 40),)),
    )
    first, second = older_spans(state)
    assert (first.start, first.end, first.merged, first.bytes) == (10, 30, 7, 900)
    assert (second.start, second.end, second.tier) == (40, 100, "verified")
    few = replace(state, objects=newest[:9])
    assert older_spans(few) == []  # all of them were read: what is missing is missing


def test_what_no_tier_holds_is_a_gap_and_says_whether_it_is_known() -> None:
    held = [Span(0, 30, "verified", "verified"), Span(80, 100, "segment", "not uploaded")]
    record = TopicRecord(lost=((30, 50), (200, 300)))
    assert gap_spans(0, 110, held, record) == [
        Span(30, 50, "gap", "lost"),
        Span(50, 80, "gap", "missing"),
        Span(100, 110, "gap", "missing"),
    ]
    assert gap_spans(0, 30, held, record) == []


def test_gaps_that_the_catalog_knows_are_told_apart() -> None:
    held = [Span(0, 10, "verified", "verified"), Span(2**40, 2**40 + 5, "segment", "not uploaded")]
    record = TopicRecord(lost=((10, 20),), unknown=((20, 30),), accepted=((30, 2**40),))
    assert gap_spans(0, 2**40 + 5, held, record) == [
        Span(10, 20, "gap", "lost"),
        Span(20, 30, "gap", "unknown"),
        Span(30, 2**40, "gap", "accepted"),
    ]
    assert gap_spans(25, 35, held, record) == [
        Span(25, 30, "gap", "unknown"),
        Span(30, 35, "gap", "accepted"),
    ]


def test_a_window_shows_what_it_touches() -> None:
    spans = [Span(0, 10, "segment", "x"), Span(10, 20, "segment", "x")]
    assert within(spans, 10, 11) == spans[1:]
    assert within(spans, 9, 11) == spans


def test_few_spans_are_left_as_they_are() -> None:
    spans = [Span(at, at + 1, "segment", "x") for at in range(50)]
    assert bounded(spans, 0, 50, 50) == spans


def test_joined_spans_add_up() -> None:
    spans = [Span(at, at + 1, "verified", "verified", f"o{at}", 10, at) for at in range(1000)]
    found = bounded(spans, 0, 1000, 80)
    assert sum(each.merged for each in found) == 1000
    assert sum(each.bytes or 0 for each in found) == 10_000
    assert found[0].name == "o0"
    assert found[0].end == found[1].start


LENGTHS = st.lists(st.integers(1, 10_000), max_size=1500)
TIERS = st.sampled_from(["memory", "segment", "object", "gap"])


@given(st.dictionaries(TIERS, LENGTHS), st.integers(20, 400))
def test_however_many_there_are_the_answer_is_bounded_and_leaves_nothing_out(
    lanes: dict[str, list[int]], most: int
) -> None:
    spans = []
    for tier, lengths in lanes.items():
        at = 0
        for length in lengths:
            spans.append(Span(at, at + length, tier, "x"))  # type: ignore[arg-type]
            at += length
    end = max((each.end for each in spans), default=1)
    found = bounded(spans, 0, end, most)
    assert len(found) <= max(most + 8, 16)
    assert sum(each.merged for each in found) == len(spans)
    for tier, lengths in lanes.items():
        own = [each for each in found if each.tier == tier]
        assert sum(each.end - each.start for each in own) == sum(lengths)
