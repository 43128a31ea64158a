"""Which bytes to fetch next: all that are needed, hardly more, in bounded chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.descriptor import ObjectDescriptor
from forebay.read.plan import (
    DESCRIPTOR_PAGE,
    Chunk,
    KnownObjects,
    Plan,
    Position,
    object_range,
    plan,
    position_after,
    position_of,
)
from support.stored_objects import StoredTopic, payload


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
    pieces = list(wanted.chunks(chunk_bytes))
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (wanted.start, wanted.end)
    assert all(0 < piece.end - piece.start <= chunk_bytes for piece in pieces)
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def planned(
    descriptors: Sequence[ObjectDescriptor],
    start: int,
    end: int | None = None,
    *,
    chunk_bytes: int = 1000,
    count: int = 100,
    complete: bool = True,
) -> Plan:
    known = KnownObjects(tuple(descriptors), complete)
    return plan(Position(start), known, end=end, chunk_bytes=chunk_bytes, count=count)


def test_every_range_over_three_objects_covers_what_is_asked_for() -> None:
    topic = StoredTopic()
    made = [
        topic.add(start, [payload(start + n, 10 + n) for n in range(5)]) for start in (0, 5, 10)
    ]
    for start in range(16):
        for end in [*range(start, 17), None]:
            asked = planned(topic.named, start, end, chunk_bytes=40).chunks
            needed = [
                one
                for one in made
                if one.end_offset >= start and one.start_offset < (17 if end is None else end)
            ]
            if end == start:
                needed = []
            ids = list(dict.fromkeys(chunk.range.descriptor.object_id for chunk in asked))
            assert ids == [one.object_id for one in needed]
            for one in needed:
                first = max(start, one.start_offset)
                own = [chunk for chunk in asked if chunk.range.descriptor is one]
                assert own[0].range.offset <= first
                after = own[-1].range.next_offset
                assert after is not None
                assert after >= min(one.next_offset, one.next_offset if end is None else end)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_plan_goes_on_where_the_one_before_it_was(data: st.DataObject) -> None:
    start, descriptors = 0, []
    for sizes in data.draw(st.lists(sizes_of_frames, min_size=1, max_size=5)):
        descriptors.append(described(start, sizes, data.draw(st.none() | st.integers(1, 4))))
        start += len(sizes)
    first = data.draw(st.integers(0, start - 1))
    end = data.draw(st.none() | st.integers(first, start + 2))
    chunk_bytes, count = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 4))
    known = KnownObjects(tuple(descriptors), complete=True)
    whole = plan(Position(first), known, end=end, chunk_bytes=chunk_bytes, count=10**6).chunks
    position = Position(first)
    found: list[Chunk] = []
    while chunks := plan(position, known, end=end, chunk_bytes=chunk_bytes, count=count).chunks:
        again = plan(position, known, end=end, chunk_bytes=chunk_bytes, count=count)
        assert again.chunks == chunks, "a plan changes nothing"
        taken = data.draw(st.integers(1, len(chunks)))
        if taken < len(chunks):
            behind = position_after(chunks[taken - 1])
            rest = plan(behind, known, end=end, chunk_bytes=chunk_bytes, count=1)
            from_it = position_of(chunks[taken])
            assert rest.chunks == chunks[taken : taken + 1]
            assert plan(from_it, known, end=end, chunk_bytes=chunk_bytes, count=1) == rest
        found += chunks[:taken]
        position = position_after(found[-1])
    assert tuple(found) == whole


def test_a_plan_ends_before_a_gap_and_names_it() -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0)])
    topic.add(7, [payload(7)])
    found = planned(topic.named, 0, complete=False)
    assert [chunk.range.offset for chunk in found.chunks] == [0]
    assert (found.gap, found.page) == (1, None)
    assert planned(topic.named, 1, complete=False) == Plan((), None, 1)
    assert planned(topic.named, 0, 1).gap is None
    behind = planned(topic.named, 7)
    assert [chunk.range.offset for chunk in behind.chunks] == [7]
    assert behind.gap is None


def test_where_objects_overlap_the_earlier_one_serves() -> None:
    one, other = described(0, [30] * 6, 1), described(4, [30] * 6, 1)
    found = [(c.range.offset, c.start, c.end) for c in planned([one, other], 3, 9).chunks]
    assert found == [(3, 90, 180), (6, 60, 150)]


def test_an_object_inside_another_is_left_out() -> None:
    one, inner, after = described(0, [30] * 6, 1), described(2, [30] * 2, 1), described(6, [30], 1)
    found = planned([one, inner, after], 0).chunks
    assert [chunk.range.descriptor for chunk in found] == [one, after]


def test_the_rest_of_an_object_comes_first() -> None:
    one, other = described(0, [30] * 6, 1), described(6, [30] * 6, 1)
    rest = Position(6, object_range(one, 2, None), 100)
    known = KnownObjects((other,), complete=True)
    found = plan(rest, known, end=None, chunk_bytes=50, count=3).chunks
    assert [(c.range.descriptor, c.start, c.end) for c in found] == [
        (one, 100, 150),
        (one, 150, 180),
        (other, 0, 50),
    ]
    assert not found[0].first
    assert found[1].last


# ---- further descriptors ----


def page_of(count: int) -> list[ObjectDescriptor]:
    return [described(start, [30], None) for start in range(count)]


def test_without_an_object_for_the_next_offset_descriptors_are_asked_for_from_there() -> None:
    assert planned([], 5, complete=False) == Plan((), 5, None)
    assert planned(page_of(3), 3, complete=False) == Plan((), 3, None)
    assert planned([], 5) == planned(page_of(3), 3) == Plan((), None, None)


def test_descriptors_are_asked_for_once_half_a_page_is_left() -> None:
    half = DESCRIPTOR_PAGE // 2
    for count in range(1, DESCRIPTOR_PAGE + 1):
        page = planned(page_of(DESCRIPTOR_PAGE), 0, count=count, complete=False).page
        assert page == (DESCRIPTOR_PAGE if count >= half else None)
        assert planned(page_of(DESCRIPTOR_PAGE), 0, count=count).page is None


def test_no_descriptors_are_asked_for_beyond_the_end() -> None:
    assert planned([], 5, 5, complete=False) == Plan((), None, None)
    assert planned(page_of(3), 0, 3, complete=False).page is None
    assert planned(page_of(3), 0, 4, complete=False).page == 3


def test_more_descriptors_make_a_plan_longer_and_change_none_of_its_chunks() -> None:
    descriptors = [described(start, [30, 40, 50], 2) for start in range(0, 30, 3)]
    whole = planned(descriptors, 4, 25, chunk_bytes=50).chunks
    for known in range(len(descriptors)):
        found = planned(descriptors[:known], 4, 25, chunk_bytes=50, complete=False).chunks
        assert found == whole[: len(found)]


@pytest.mark.parametrize("index", [None, ()])
def test_an_object_without_an_index_is_read_whole(
    index: tuple[tuple[int, int], ...] | None,
) -> None:
    object_ = ObjectDescriptor("data-3", 3, 9, 700, None, 0, offset_index=index)
    wanted = object_range(object_, 5, 6)
    assert (wanted.offset, wanted.start, wanted.end, wanted.next_offset) == (3, 0, 700, 10)
