"""The index of an object while it is written: sparse, exact, and never too large."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay.format.index as object_index
from forebay.format.frame import HEADER_BYTES, encode_frame, scan
from forebay.format.index import ObjectIndex
from forebay.limits import OBJECT_INDEX_BYTES, OBJECT_INDEX_MESSAGES

Frames = list[tuple[int, int]]


def frames_of(first: int, sizes: list[int]) -> tuple[bytes, Frames]:
    """A buffer of frames, and (offset, position) of each."""
    data, places = bytearray(), []
    for number, size in enumerate(sizes):
        places.append((first + number, len(data)))
        data += encode_frame(first + number, bytes(size))
    return bytes(data), places


SMALL = {"every_messages": 5, "every_bytes": 300}
"""Intervals that a few frames reach."""


def indexed(
    data: bytes, places: Frames, cuts: list[int], intervals: dict[str, int] | None = None
) -> ObjectIndex:
    """The index of the frames, added in pieces that are cut before these frames."""
    index = ObjectIndex((), **(intervals or {}))
    starts = sorted({0, *cuts})
    ends = [*starts[1:], len(places)]
    for start, end in zip(starts, ends, strict=True):
        position = places[start][1]
        until = places[end][1] if end < len(places) else len(data)
        index.add(scan(data[position:until]), position)
    return index


def wanted(places: Frames, messages: int, bytes_: int) -> Frames:
    """The entries that the rule gives, found frame by frame."""
    entries: Frames = []
    for offset, position in places:
        if (
            not entries
            or offset >= entries[-1][0] + messages
            or position >= entries[-1][1] + bytes_
        ):
            entries.append((offset, position))
    return entries


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small bound, which a few frames reach."""
    monkeypatch.setattr(object_index, "OBJECT_INDEX_ENTRIES_MAX", 8)


@pytest.mark.usefixtures("small")
def test_entries_come_by_count_or_by_bytes_wherever_pieces_are_cut() -> None:
    sizes = [10, 10, 10, 10, 10, 10, 290, 10, 500, 10, 10, 10, 10, 10, 10, 10]
    data, places = frames_of(70, sizes)
    expected = wanted(places, 5, 300)
    assert len(expected) > 4
    for cut in range(1, len(sizes)):
        assert indexed(data, places, [cut], SMALL).entries == expected
    assert indexed(data, places, list(range(len(sizes))), SMALL).entries == expected


@pytest.mark.usefixtures("small")
@settings(max_examples=100)
@given(data=st.data(), first=st.integers(0, 2**62))
def test_however_many_frames_the_entries_are_few_true_and_evenly_spread(
    data: st.DataObject, first: int
) -> None:
    sizes = data.draw(st.lists(st.integers(10, 400), min_size=1, max_size=150))
    cuts = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5))
    raw, places = frames_of(first, sizes)
    index = indexed(raw, places, cuts, SMALL)
    entries = index.frozen()
    assert entries == tuple(index.entries)
    assert entries[0] == (first, 0)
    assert set(entries) <= set(places)
    assert list(entries) == sorted(entries)
    assert len(entries) <= 8
    assert indexed(raw, places, [], SMALL).frozen() == entries
    # Between two entries lies less than the final interval and one frame.
    doublings = 1
    while len(wanted(places, 5 * doublings, 300 * doublings)) > 8:
        doublings *= 2
    for (offset, _), (later, _) in pairwise(entries):
        assert later - offset <= 5 * 2 * doublings


def test_the_intervals_are_those_of_the_limits() -> None:
    data, places = frames_of(0, [10] * (2 * OBJECT_INDEX_MESSAGES + 1))
    assert [offset for offset, _ in indexed(data, places, []).entries] == [0, 1000, 2000]
    data, places = frames_of(0, [OBJECT_INDEX_BYTES // 2] * 6)
    step = OBJECT_INDEX_BYTES // 2 + HEADER_BYTES
    assert indexed(data, places, []).entries == [(0, 0), (2, 2 * step), (4, 4 * step)]


def test_frames_need_not_begin_where_their_buffer_begins() -> None:
    data, places = frames_of(9, [20] * 4)
    index = ObjectIndex()
    index.add(scan(b"\xff" * 13 + data, 13), 0)
    assert index.entries == [(9, 0)]
    other = ObjectIndex([(3, 0)])
    other.add(scan(b"\xff" * 13 + data, 13), 2 * OBJECT_INDEX_BYTES)
    assert other.entries == [(3, 0), (9, 2 * OBJECT_INDEX_BYTES)]
    assert places[0] == (9, 0)


def test_no_frames_add_nothing() -> None:
    index = ObjectIndex()
    index.add(scan(b""), 0)
    assert index.frozen() == ()


def test_an_index_that_goes_on_keeps_its_entries() -> None:
    data, places = frames_of(0, [10] * 2500)
    whole = indexed(data, places, [])
    half = places[1200][1]
    index = ObjectIndex(indexed(data[:half], places[:1200], []).frozen())
    index.add(scan(data[half:]), half)
    assert index.entries == whole.entries
