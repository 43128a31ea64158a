"""Which bytes to fetch: enough, in bounded pieces, and hardly more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.descriptor import ObjectDescriptor
from forebay.read.ranges import byte_ranges, chunks, object_range
from stored_objects import StoredTopic, payload


def described(start: int, sizes: list[int], every: int | None) -> ObjectDescriptor:
    """An object with frames of these sizes."""
    positions = [sum(sizes[:at]) for at in range(len(sizes))]
    index = [(start + at, positions[at]) for at in range(0, len(sizes), every or 1)]
    return ObjectDescriptor(
        f"data-{start}",
        start,
        start + len(sizes) - 1,
        sum(sizes),
        None,
        0,
        offset_index=tuple(index) if every else None,
    )


def bounds(sizes: list[int], first: int, last: int) -> tuple[int, int]:
    return sum(sizes[:first]), sum(sizes[: last + 1])


sizes_of_frames = st.lists(st.integers(26, 90), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=sizes_of_frames, every=st.none() | st.integers(1, 5))
def test_a_range_holds_the_frames_and_at_most_two_intervals_more(
    data: st.DataObject, sizes: list[int], every: int | None
) -> None:
    object_ = described(100, sizes, every)
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    wanted = object_range(object_, 100 + first, 100 + last + 1)
    start, end = bounds(sizes, first, last)
    assert 0 <= wanted.start <= start < end <= wanted.end <= object_.size
    assert wanted.start == bounds(sizes, 0, wanted.offset - 100 - 1)[1]
    if every:
        # Fewer frames before and after than an interval has.
        assert first - (wanted.offset - 100) < every
        assert wanted.next_offset is not None
        assert wanted.next_offset - (100 + last + 1) < every
        assert wanted.end == sum(sizes[: wanted.next_offset - 100])


@settings(max_examples=200, deadline=None)
@given(sizes=sizes_of_frames, chunk_bytes=st.integers(1, 200))
def test_chunks_are_the_range_cut_into_bounded_pieces(sizes: list[int], chunk_bytes: int) -> None:
    wanted = object_range(described(0, sizes, 2), 0, None)
    pieces = list(chunks(wanted, chunk_bytes))
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (wanted.start, wanted.end)
    assert all(0 < piece.end - piece.start <= chunk_bytes for piece in pieces)
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_every_range_over_three_objects_covers_what_is_asked_for() -> None:
    topic = StoredTopic()
    made = [
        topic.add(start, [payload(start + n, 10 + n) for n in range(5)]) for start in (0, 5, 10)
    ]
    for start in range(16):
        for end in [*range(start, 17), None]:
            asked = list(byte_ranges(topic.named, start, end, 40))
            needed = [
                one
                for one in made
                if one.end_offset >= start and one.start_offset < (17 if end is None else end)
            ]
            if end == start:
                needed = []
            ids = list(dict.fromkeys(piece.range.descriptor.object_id for piece in asked))
            assert ids == [one.object_id for one in needed]
            for one in needed:
                first = max(start, one.start_offset)
                own = [piece for piece in asked if piece.range.descriptor is one]
                assert own[0].range.offset <= first
                after = own[-1].range.next_offset
                assert after is not None
                assert after >= min(one.next_offset, one.next_offset if end is None else end)


def test_objects_with_a_gap_between_are_each_asked_for() -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0)])
    topic.add(7, [payload(7)])
    found = [piece.range.offset for piece in byte_ranges(topic.named, 0, None, 1000)]
    assert found == [0, 7]


def test_where_objects_overlap_the_earlier_one_serves() -> None:
    one, other = described(0, [30] * 6, 1), described(4, [30] * 6, 1)
    found = [(p.range.offset, p.start, p.end) for p in byte_ranges([one, other], 3, 9, 1000)]
    assert found == [(3, 90, 180), (6, 60, 150)]


def test_an_object_inside_another_is_left_out() -> None:
    one, inner = described(0, [30] * 6, 1), described(2, [30] * 2, 1)
    assert [p.range.descriptor for p in byte_ranges([one, inner], 0, None, 1000)] == [one]


@pytest.mark.parametrize("index", [None, ()])
def test_an_object_without_an_index_is_read_whole(
    index: tuple[tuple[int, int], ...] | None,
) -> None:
    object_ = ObjectDescriptor("data-3", 3, 9, 700, None, 0, offset_index=index)
    wanted = object_range(object_, 5, 6)
    assert (wanted.offset, wanted.start, wanted.end, wanted.next_offset) == (3, 0, 700, 10)
