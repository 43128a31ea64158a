"""`gather` of the plain codec and of its compiled twin: the same columns, the same refusals."""

from __future__ import annotations

import struct
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import pure
from support.codec_twins import native, outcome, same

spans = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(0, 20)),
    st.tuples(st.integers(-5, 70), st.integers(-3, 70)),
    st.tuples(
        st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63)]),
        st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63)]),
    ),
)


def columns(pairs: list[tuple[int, int]]) -> tuple[array[int], array[int]]:
    return array("q", [at for at, _ in pairs]), array("q", [length for _, length in pairs])


@given(st.binary(max_size=64), st.lists(spans, max_size=20))
def test_both_gather_alike_or_refuse_alike(buffer: bytes, pairs: list[tuple[int, int]]) -> None:
    result = same("gather", buffer, *columns(pairs))
    inside = all(length < 0 or (at >= 0 and at + length <= len(buffer)) for at, length in pairs)
    assert (result is ValueError) == (not inside)


@given(st.binary(max_size=200), st.data())
def test_what_is_gathered_is_the_spans(buffer: bytes, data: st.DataObject) -> None:
    places = st.integers(0, len(buffer)).flatmap(
        lambda at: st.tuples(st.just(at), st.integers(-1, len(buffer) - at))
    )
    pairs = data.draw(st.lists(places, max_size=30))
    result = same("gather", memoryview(buffer), *columns(pairs))
    assert isinstance(result, tuple)
    offsets, gathered, validity = result
    ends = struct.unpack(f"<{len(pairs) + 1}i", offsets)
    for row, (at, length) in enumerate(pairs):
        found = gathered[ends[row] : ends[row + 1]]
        assert found == (b"" if length < 0 else buffer[at : at + length])
        if validity is not None:
            assert validity[row // 8] >> row % 8 & 1 == (length >= 0)
    assert (validity is None) == all(length >= 0 for _, length in pairs)


def test_large_columns_are_copied_whole() -> None:
    buffer = bytes(range(256)) * 4096
    pairs = [(at * 8, 8) for at in range(len(buffer) // 8)]
    result = same("gather", buffer, *columns(pairs))
    assert isinstance(result, tuple)
    assert result[1] == buffer


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [(b"1234567", b"1234567"), (bytes(8), bytes(16)), (bytes(16), bytes(8)), (bytes(8), bytes(9))],
)
def test_columns_of_different_counts_are_refused_alike(positions: bytes, lengths: bytes) -> None:
    assert same("gather", b"some bytes", positions, lengths) is ValueError


@pytest.mark.parametrize("args", [(b"", [], []), ("", b"", b""), (b"", b""), (b"", b"", b"", b"")])
def test_what_is_no_column_is_refused_alike(args: tuple[object, ...]) -> None:
    assert same("gather", *args) is TypeError


def test_more_than_arrow_can_address_is_refused_alike() -> None:
    buffer = bytes(16 * 1024 * 1024)
    rows = 2**31 // len(buffer)
    enough = columns([(0, len(buffer))] * (rows - 1) + [(0, len(buffer) - 1)])
    too_much = columns([(0, len(buffer))] * rows)
    assert sum(enough[1]) == pure.GATHER_BYTES_MAX
    assert outcome(native.gather, buffer, *too_much) is OverflowError
    # The plain twin adds up the lengths before it copies anything.
    assert outcome(pure.gather, buffer, *too_much) is OverflowError


def test_the_compiled_twin_keeps_no_reference() -> None:
    buffer, (positions, lengths) = bytearray(40), columns([(0, 10), (5, 5), (0, -1)])
    bad = array("q", [10, 90, 1])
    watched = [buffer, positions, lengths, bad, None]
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        outcome(native.gather, buffer, positions, lengths)
        outcome(native.gather, buffer, positions, bad)
    after = [sys.getrefcount(thing) for thing in watched]
    assert after[:-1] == before[:-1]
    assert abs(after[-1] - before[-1]) < 500  # other threads use None too
    buffer.clear()
