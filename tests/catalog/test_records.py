"""The record of a topic: its holes, and fields of other releases."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.catalog.records import (
    TopicRecord,
    decode_record,
    encode_record,
    messages_between,
    offset_after,
    ranges_within,
    skip_holes,
)
from forebay.errors import DescriptorError
from forebay.limits import LOST_RANGES_MAX

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "unknown", "accepted"]),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=12,
)


def _members(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    assert all(start < end for start, end in ranges)
    assert all(one[1] < then[0] for one, then in pairwise(ranges))
    return {each for start, end in ranges for each in range(start, end)}


@given(_STEPS)
def test_holes_are_what_the_steps_made(steps: list[tuple[str, int, int]]) -> None:
    record = TopicRecord()
    lost: set[int] = set()
    unknown: set[int] = set()
    accepted: set[int] = set()
    for kind, start, end in steps:
        wanted = set(range(start, end))
        if kind == "lost":
            lost |= wanted - unknown - accepted
            record = record.with_lost(start, end)
        elif kind == "unknown":
            unknown |= wanted - lost - accepted
            record = record.with_unknown(start, end)
        else:
            accepted |= wanted & (lost | unknown)
            lost, unknown = lost - wanted, unknown - wanted
            record = record.with_accepted(start, end)
    found = [
        {each for start, end in ranges for each in range(start, end)}
        for ranges in (record.lost, record.unknown, record.accepted)
    ]
    assert found == [lost, unknown, accepted]
    assert _members(record.holes) == lost | unknown | accepted
    assert decode_record(encode_record(record), TopicRecord, "it") == record
    for offset in range(42):
        assert skip_holes(record, offset) == next(
            each for each in range(offset, 99) if each not in lost | unknown | accepted
        )
        run = record.lost_range(offset)
        assert (run is not None) == (offset in lost | unknown)
        if run is not None:
            assert run[0] - 1 not in lost | unknown
            assert run[1] not in lost | unknown
            assert set(range(*run)) <= lost | unknown
        jump = record.accepted_range(offset)
        assert (jump is not None) == (offset in accepted)
    assert messages_between(record, 3, 30) == len(set(range(3, 30)) - lost - unknown - accepted)


def test_a_record_keeps_the_fields_of_a_later_release() -> None:
    record = TopicRecord(epoch=3, tail=7, reserved=9)
    body = json.loads(encode_record(record)) | {"later": {"a": [1, None]}, "zone": "b"}
    found = decode_record(json.dumps(body).encode(), TopicRecord, "it")
    changed = found.with_lost(3, 5)
    assert json.loads(encode_record(changed)) == body | {"lost": [[3, 5]]}


def test_a_record_of_the_first_release_has_defaults() -> None:
    data = (
        b'{"epoch":3,"log_id":"a","lost":[[1,2]],"reserved":9,"start_offset":0,"tail":7,'
        b'"verified":7}'
    )
    assert decode_record(data, TopicRecord, "it") == TopicRecord(3, "a", 0, 7, 7, 9, ((1, 2),))


def test_a_record_has_room_for_a_bounded_number_of_ranges() -> None:
    ranges = tuple((2 * each, 2 * each + 1) for each in range(LOST_RANGES_MAX))
    record = TopicRecord(lost=ranges)
    after = 2 * LOST_RANGES_MAX
    with pytest.raises(DescriptorError, match="no more room"):
        record.with_unknown(after, after + 1)
    assert record.with_lost(1, 2).lost[0] == (0, 3)


@given(_STEPS, st.integers(0, 45), st.integers(0, 60))
def test_an_offset_after_messages_counts_only_messages(
    steps: list[tuple[str, int, int]], start: int, count: int
) -> None:
    record = _made(steps)
    holes = _members(record.holes)
    expected, left = start, count
    at = start
    while left:
        if at not in holes:
            left -= 1
            expected = at + 1
        at += 1
    assert offset_after(record, start, count) == expected
    assert messages_between(record, start, expected) == count


def test_an_offset_after_a_wide_hole_takes_one_step() -> None:
    record = TopicRecord(unknown=((10, 2**40),))
    assert offset_after(record, 8, 2) == 10
    assert offset_after(record, 8, 3) == 2**40 + 1
    assert offset_after(record, 2**20, 1) == 2**40 + 1


@given(_STEPS, st.integers(0, 45))
def test_every_offset_in_a_hole_has_one_kind(steps: list[tuple[str, int, int]], at: int) -> None:
    record = _made(steps)
    kind = record.hole_kind(at)
    assert (kind is not None) == (at in _members(record.holes))
    assert (record.accepted_range(at) is not None) == (kind == "accepted")
    assert (record.lost_range(at) is not None) == (kind in ("lost", "unknown"))


def test_the_parts_of_ranges_inside_a_range() -> None:
    ranges = [(1, 5), (7, 9), (12, 20)]
    assert ranges_within(ranges, 3, 14) == [(3, 5), (7, 9), (12, 14)]
    assert ranges_within(ranges, 5, 7) == []


def _made(steps: list[tuple[str, int, int]]) -> TopicRecord:
    record = TopicRecord()
    for kind, start, end in steps:
        change = getattr(record, f"with_{kind}")
        record = change(start, end)
    return record
