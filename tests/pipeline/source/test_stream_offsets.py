"""Positions of a stream, how a batch is limited, and which topics it reads: without any store."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.catalog.records import TopicRecord
from forebay.errors import UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.pipeline.source.stream_offsets import (
    PositionMap,
    TopicEnds,
    decode_positions,
    encode_positions,
    limit_bytes,
    limit_messages,
    outlook,
    ranges,
    share,
    stream_lag,
)

A, B, C = (parse_topic(name) for name in ("/default/a", "/default/b", "/default/c-part-3"))

names = st.sampled_from([*"abcdefgh", "a-part-0", "a-part-12", "x-part-"]).map(parse_topic)
positions = st.dictionaries(names, st.integers(0, 2**63 - 1), max_size=8)
small = st.dictionaries(names, st.integers(0, 50), max_size=8)


@given(positions)
def test_positions_survive_the_way_through_a_checkpoint(found: dict[TopicName, int]) -> None:
    text = json.dumps(encode_positions(found))
    assert decode_positions(json.loads(text)) == found
    assert text == json.dumps(encode_positions(dict(reversed(found.items()))))


def test_a_topic_and_its_partition_0_are_two() -> None:
    both = {parse_topic("a"): 1, parse_topic("a-part-0"): 2}
    assert encode_positions(both) == {"/default/a": {"0": 1}, "/default/a-part-0": {"0": 2}}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"/default/a": 3},
        {"/default/a": {}},
        {"/default/a": {"1": 3}},
        {"/default/a": {"0": 3, "1": 4}},
        {"/default/a": {"0": -1}},
        {"/default/a": {"0": True}},
        {"/default/a": {"0": 2**63}},
        {"/default/a": {"0": "3"}},
        {"a/b/c/d": {"0": 3}},
        {"/default/a": {"0": 1}, "a": {"0": 2}},
    ],
)
def test_what_is_no_position_is_refused(document: Any) -> None:
    with pytest.raises(UsageError, match="position"):
        decode_positions(document)


# -- limits ---------------------------------------------------------------------------------------


@given(small, st.integers(1, 200), st.integers(0, 1000))
def test_a_limit_is_shared_out_whole_and_never_passed(
    wanted: dict[TopicName, int], limit: int, turn: int
) -> None:
    found = share(wanted, limit, turn=turn)
    assert sum(found.values()) == min(limit, sum(wanted.values()))
    assert all(0 < amount <= wanted[topic] for topic, amount in found.items())
    waiting = [topic for topic, amount in wanted.items() if amount]
    assert len(found) == min(len(waiting), limit)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(2, 10**6))
def test_shares_are_in_proportion_to_what_is_wanted(one: int, other: int, limit: int) -> None:
    found = share({A: one, B: other}, limit)
    if one + other > limit:
        fair = limit * one / (one + other)
        assert abs(found[A] - fair) <= 2


def test_with_fewer_messages_than_topics_everyone_has_a_turn() -> None:
    end = {parse_topic(f"t{number}"): 10 for number in range(7)}
    at = dict.fromkeys(end, 0)
    for _ in range(4):
        at = limit_messages(at, end, 2)
    assert sorted(at.values()) == [1] * 6 + [2]


@given(small, small, st.integers(1, 30))
def test_limited_batches_come_to_the_end(
    start: dict[TopicName, int], more: dict[TopicName, int], limit: int
) -> None:
    end = {topic: offset + more.get(topic, 0) for topic, offset in start.items()}
    at, batches = start, 0
    while at != end:
        after = limit_messages(at, end, limit)
        assert 0 < sum(after.values()) - sum(at.values()) <= limit
        at = after
        batches += 1
    assert batches == -(-sum(end[topic] - start[topic] for topic in start) // limit)


class Even:
    """Messages of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def message_bytes(self, first: int, end: int) -> int:
        return self.size

    def reach(self, first: int, end: int, limit: int) -> int:
        return min(first + limit // self.size, end)


@given(small, st.integers(1, 400))
def test_batches_limited_by_bytes_come_to_the_end(end: dict[TopicName, int], limit: int) -> None:
    sizes = {topic: Even(7 * number + 1) for number, topic in enumerate(sorted(end))}
    at = dict.fromkeys(end, 0)
    while at != end:
        after = limit_bytes(at, end, limit, sizes)
        moved = {topic: after[topic] - at[topic] for topic in end if after[topic] > at[topic]}
        size = sum(count * sizes[topic].size for topic, count in moved.items())
        assert moved
        assert size <= limit or sum(moved.values()) == 1
        at = after


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), min_size=1, max_size=8),
    st.data(),
)
def test_a_measured_stretch_ascends_and_keeps_its_known_places(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    places = [(7, 0)]
    for messages, size in steps:
        places.append((places[-1][0] + messages, places[-1][1] + messages * size))
    known = PositionMap(tuple(places))
    assert [known.position(offset) for offset, _ in places] == [at for _, at in places]
    assert [known.offset(at) for _, at in places] == [offset for offset, _ in places]
    offset = data.draw(st.integers(known.first, known.next - 1))
    assert known.position(offset) < known.position(offset + 1)
    assert known.offset(known.position(offset)) in (offset - 1, offset)


# -- topics ---------------------------------------------------------------------------------------


def test_a_new_topic_begins_at_its_oldest_offset_in_a_batch_that_reads_none_of_it() -> None:
    seen = outlook({A: 5}, {A: TopicEnds(0, 9), B: TopicEnds(3, 8)})
    assert (seen.start, seen.end, seen.new, seen.losses) == ({A: 5}, {A: 9}, {B: 3}, ())
    assert ranges({A: 5}, {**seen.end, **seen.new}) == {A: (5, 9)}


@pytest.mark.parametrize(
    ("now", "said", "start", "end"),
    [
        ({}, "/default/a is gone; the stream was at offset 5", {}, {}),
        ({A: TopicEnds(7, 9)}, "offsets 5 to 6; the oldest is 7", {A: 7}, {A: 9}),
        ({A: TopicEnds(9, 9)}, "offsets 5 to 8", {A: 9}, {A: 9}),
        ({A: TopicEnds(0, 3)}, "ends at offset 3, but the stream was at 5", {A: 5}, {A: 5}),
    ],
)
def test_what_cannot_be_read_any_more_is_named(
    now: dict[TopicName, TopicEnds],
    said: str,
    start: dict[TopicName, int],
    end: dict[TopicName, int],
) -> None:
    seen = outlook({A: 5}, now)
    [loss] = seen.losses

    assert re.search(said, str(loss))
    assert (seen.start, seen.end, seen.new) == (start, end, {})


@given(small, st.dictionaries(names, st.tuples(st.integers(0, 60), st.integers(0, 60))))
def test_a_stream_never_goes_back(
    position: dict[TopicName, int], bounds: dict[TopicName, tuple[int, int]]
) -> None:
    now = {topic: TopicEnds(min(pair), max(pair)) for topic, pair in bounds.items()}
    seen = outlook(position, now)
    assert seen.start.keys() == seen.end.keys() == position.keys() & now.keys()
    assert all(position[topic] <= seen.start[topic] <= seen.end[topic] for topic in seen.start)
    assert seen.new == {topic: now[topic].start for topic in now.keys() - position.keys()}
    assert {loss.topic for loss in seen.losses} == {
        topic
        for topic, offset in position.items()
        if topic not in now or not now[topic].start <= offset <= now[topic].end
    }


# -- lag ------------------------------------------------------------------------------------------


def test_the_lag_of_each_topic_is_in_the_progress() -> None:
    newest, done = encode_positions({A: 9, B: 4, C: 2}), encode_positions({A: 3, B: 4})
    name = "org.apache.spark.sql.PythonMicroBatchStreamWithTriggerAvailableNow@71401c39"
    source = {"description": name, "latestOffset": newest, "endOffset": done}
    kafka = {"description": "KafkaV2", "latestOffset": {"k": {"0": 5}}, "endOffset": None}
    other = {"description": name, "latestOffset": {"index": 3}, "endOffset": {"index": 2}}
    progress = {"sources": [source, kafka, other]}
    assert stream_lag(progress) == {"/default/a": 6, "/default/b": 0, "/default/c-part-3": 2}
    as_text = {**source, "latestOffset": json.dumps(newest), "endOffset": json.dumps(done)}
    assert stream_lag({"sources": [as_text]}) == stream_lag(progress)
    assert stream_lag({"sources": [{**source, "latestOffset": None}]}) == {}


# ---- holes ----

WIDE = 2**40


class _TenBytes:
    """Each message has 10 bytes; `hole` has none."""

    def __init__(self, hole: tuple[int, int]) -> None:
        self._hole = hole

    def message_bytes(self, first: int, end: int) -> int:
        return 10

    def reach(self, first: int, end: int, limit: int) -> int:
        at, left = first, limit // 10
        if at < self._hole[0]:
            step = min(left, self._hole[0] - at)
            at, left = at + step, left - step
        if left and self._hole[0] <= at < self._hole[1]:
            at = self._hole[1]
        return min(at + left, end)


ACCEPTED = TopicRecord(accepted=((10, WIDE),))
UNKNOWN = TopicRecord(unknown=((10, WIDE),))


@pytest.mark.parametrize(
    ("record", "fail", "crossed"),
    [
        (ACCEPTED, True, True),
        (ACCEPTED, False, True),
        (UNKNOWN, False, True),
        (UNKNOWN, True, False),
    ],
)
def test_a_batch_that_reaches_a_hole_ends_after_it(
    record: TopicRecord, fail: bool, crossed: bool
) -> None:
    end, holes = {A: WIDE + 10}, {A: record}
    reached = WIDE if crossed else 10
    sizes = {A: _TenBytes((10, WIDE))}
    for start, limit, expected in ((0, 4, 4), (4, 6, reached), (4, 8, WIDE + 2), (12, 3, WIDE + 3)):
        found = limit_messages({A: start}, end, limit, holes, fail_on_data_loss=fail)
        assert found == {A: expected}
        found = limit_bytes({A: start}, end, 10 * limit, sizes, holes, fail_on_data_loss=fail)
        assert found == {A: expected}


def test_a_hole_at_the_end_takes_one_batch() -> None:
    holes = {A: UNKNOWN}
    for fail in (True, False):
        found = limit_messages({A: 10}, {A: WIDE}, 5, holes, fail_on_data_loss=fail)
        assert found == {A: WIDE}
        found = limit_bytes({A: 10}, {A: WIDE}, 5, {}, holes, fail_on_data_loss=fail)
        assert found == {A: WIDE}


def test_a_hole_takes_nothing_from_the_share_of_other_topics() -> None:
    start, end = {A: 5, B: 0}, {A: WIDE + 5, B: 10}
    assert limit_messages(start, end, 10, {A: ACCEPTED}) == {A: WIDE, B: 5}


def test_a_stream_in_a_hole_of_which_retention_deleted_the_beginning_loses_nothing() -> None:
    now = {A: TopicEnds(WIDE, WIDE + 5, ACCEPTED)}
    assert outlook({A: 10}, now).losses == ()
    assert outlook({A: 10}, now).start == {A: WIDE}
    assert outlook({A: 9}, now).losses != ()
    unknown = {A: TopicEnds(WIDE, WIDE + 5, UNKNOWN)}
    assert outlook({A: 10}, unknown).losses != ()
    assert outlook({A: 10}, unknown, fail_on_data_loss=False).losses == ()
