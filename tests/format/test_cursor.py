"""Cursors: what was acknowledged comes back, only ever grows, and stays small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DescriptorError, UsageError
from forebay.format.cursor import Cursor, decode_cursor_row, encode_cursor_row
from forebay.limits import CURSOR_BYTES_MAX, OFFSET_MAX

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=12)


def made(ranges: list[tuple[int, int]]) -> tuple[Cursor, set[int]]:
    cursor, wanted = Cursor(), set()
    for start, length in ranges:
        cursor = cursor.with_range(start, start + length)
        wanted |= set(range(start, start + length))
    return cursor, wanted


@settings(max_examples=60)
@given(ranges=RANGES)
def test_a_cursor_contains_exactly_what_was_added(ranges: list[tuple[int, int]]) -> None:
    cursor, wanted = made(ranges)
    assert {offset for offset in range(80) if cursor.contains(offset)} == wanted
    lowest = next(offset for offset in range(80) if offset not in wanted)
    assert cursor.position == lowest, "the lowest offset that is not acknowledged"
    ends = [cursor.position, *(end for _, end in cursor.ranges)]
    assert all(start > end for (start, _), end in zip(cursor.ranges, ends, strict=False))


@settings(max_examples=60)
@given(ranges=RANGES, end=st.integers(0, 80))
def test_a_cursor_before_an_offset_has_what_is_below_it(
    ranges: list[tuple[int, int]], end: int
) -> None:
    cursor, wanted = made(ranges)
    kept = cursor.before(end)
    assert {offset for offset in range(80) if kept.contains(offset)} == {
        offset for offset in wanted if offset < end
    }
    assert (kept is cursor) == all(offset < end for offset in wanted)
    assert all(first < last for first, last in kept.ranges)


@settings(max_examples=60)
@given(ranges=RANGES, others=RANGES)
def test_two_cursors_merge_into_what_either_has(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    (one, has), (other, has_too) = made(ranges), made(others)
    for merged in (one.merged(other), other.merged(one)):
        assert {offset for offset in range(80) if merged.contains(offset)} == has | has_too


@settings(max_examples=60)
@given(ranges=RANGES, epoch=st.integers(0, OFFSET_MAX), updated=st.integers(0, OFFSET_MAX))
def test_a_cursor_comes_back_as_it_was(
    ranges: list[tuple[int, int]], epoch: int, updated: int
) -> None:
    cursor = replace(made(ranges)[0], epoch=epoch, updated_ms=updated)
    assert decode_cursor_row(encode_cursor_row(cursor), "it") == cursor


def test_the_example_of_the_document_is_encoded_so() -> None:
    cursor = Cursor(1200, ((1203, 1205), (1215, 1216)), 7, 1_790_000_000_000)
    row = b'{"epoch":7,"position":1200,"ranges":[3,2,10,1],"updated_ms":1790000000000}'
    assert encode_cursor_row(cursor) == row
    assert decode_cursor_row(row, "it") == cursor


def test_a_cursor_with_too_many_ranges_loses_the_highest_ones() -> None:
    ranges = tuple((at, at + 1) for at in range(10, 200_000, 2))
    cursor = Cursor(5, ranges)
    row = encode_cursor_row(cursor)
    assert CURSOR_BYTES_MAX - 10 <= len(row) <= CURSOR_BYTES_MAX
    kept = decode_cursor_row(row, "it")
    assert kept.position == 5
    assert kept.ranges == ranges[: len(kept.ranges)]


def test_fields_of_a_later_release_are_kept() -> None:
    row = b'{"epoch":1,"later":{"a":[1]},"position":3,"ranges":[],"updated_ms":4}'
    cursor = decode_cursor_row(row, "it").with_range(0, 9)
    assert json.loads(encode_cursor_row(cursor))["later"] == {"a": [1]}
    assert decode_cursor_row(b'{"position":3}', "it") == Cursor(3)


def test_a_cut_row_is_an_error_at_every_byte() -> None:
    row = encode_cursor_row(Cursor(1200, ((1203, 1205), (1215, 1216)), 7, 1_790_000_000_000))
    for length in range(len(row)):
        with pytest.raises(DescriptorError, match="it"):
            decode_cursor_row(row[:length], "it")


@pytest.mark.parametrize(
    "row",
    [
        b"7",
        b"{}",
        b'{"position":-1}',
        b'{"position":true}',
        b'{"position":1,"ranges":7}',
        b'{"position":1,"ranges":[1]}',
        b'{"position":1,"ranges":[0,1]}',
        b'{"position":1,"ranges":[1,0]}',
        b'{"position":1,"ranges":[1,"2"]}',
        b'{"position":1,"ranges":[1,%d]}' % OFFSET_MAX,
        b'{"position":1,"epoch":null}',
        b"[" * 100_000,
        b'{"position":1,"x":"' + b"x" * 70_000 + b'"}',
    ],
)
def test_a_damaged_row_is_an_error_that_names_it(row: bytes) -> None:
    with pytest.raises(DescriptorError, match="it"):
        decode_cursor_row(row, "it")


@pytest.mark.parametrize("bad", [(-1, 3), (5, 4), (0, OFFSET_MAX + 1)])
def test_a_range_that_is_none_is_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="not a range of offsets"):
        Cursor().with_range(*bad)
