"""The segment index: sparse, sorted, and used only if every byte of it is right."""

from __future__ import annotations

import struct
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.index import SegmentIndex, decode_index, encode_index
from forebay.limits import SEGMENT_INDEX_BYTES, SEGMENT_INDEX_ENTRIES_MAX

SEGMENT_BYTES = 1_000_000


def index_of(frames: list[tuple[int, int]]) -> SegmentIndex:
    index = SegmentIndex()
    for offset, position in frames:
        index.add(offset, position)
    return index


def small() -> SegmentIndex:
    return index_of([(3, 0), (450, 70_000), (900, 140_000)])


def entries(index: SegmentIndex) -> list[tuple[int, int]]:
    return list(zip(index.offsets, index.positions, strict=True))


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(offset, position) of every frame of a segment."""
    sizes = draw(st.lists(st.integers(26, 3 * SEGMENT_INDEX_BYTES), min_size=1, max_size=40))
    first, position, frames = draw(st.integers(0, 2**62)), 0, []
    for number, size in enumerate(sizes):
        frames.append((first + number, position))
        position += size
    return frames


@settings(max_examples=100)
@given(frames=logs(), segment_bytes=st.integers(0, 2**64 - 1))
def test_an_index_comes_back_as_it_was(frames: list[tuple[int, int]], segment_bytes: int) -> None:
    index = index_of(frames)
    decoded = decode_index(encode_index(index, segment_bytes), segment_bytes)
    assert decoded is not None
    assert entries(decoded) == entries(index)
    assert len(decoded) == len(index)


@settings(max_examples=100)
@given(frames=logs())
def test_entries_are_sparse_and_start_with_the_first_frame(frames: list[tuple[int, int]]) -> None:
    index = index_of(frames)
    positions = list(index.positions)
    assert (index.offsets[0], positions[0]) == frames[0]
    for before, after in pairwise(positions):
        assert after - before >= SEGMENT_INDEX_BYTES
    assert set(entries(index)) <= set(frames)


@settings(max_examples=100)
@given(frames=logs())
def test_seek_answers_the_last_entry_at_or_before_the_offset(
    frames: list[tuple[int, int]],
) -> None:
    index = index_of(frames)
    for offset, position in frames:
        found, at = index.seek(offset)
        assert found <= offset
        assert at <= position
        assert (found, at) == max(entry for entry in entries(index) if entry[0] <= offset)
    assert index.seek(2**64 - 1) == entries(index)[-1]


def test_an_offset_before_the_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="before the segment"):
        small().seek(2)
    with pytest.raises(ValueError, match="before the segment"):
        SegmentIndex().seek(0)


def test_an_index_cut_at_any_byte_is_none() -> None:
    data = encode_index(small(), SEGMENT_BYTES)
    for cut in range(len(data)):
        assert decode_index(data[:cut], SEGMENT_BYTES) is None


def test_bytes_behind_an_index_make_it_none() -> None:
    assert decode_index(encode_index(small(), SEGMENT_BYTES) + b"\0", SEGMENT_BYTES) is None


def test_every_single_bit_of_damage_makes_it_none() -> None:
    data = encode_index(small(), SEGMENT_BYTES)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            assert decode_index(bytes(damaged), SEGMENT_BYTES) is None


def test_the_index_of_another_segment_size_is_none() -> None:
    data = encode_index(small(), SEGMENT_BYTES)
    assert decode_index(data, SEGMENT_BYTES + 1) is None


def test_an_index_without_entries_is_none() -> None:
    assert decode_index(encode_index(SegmentIndex(), SEGMENT_BYTES), SEGMENT_BYTES) is None


def test_an_index_with_more_entries_than_the_limit_is_none() -> None:
    index = SegmentIndex()
    index.offsets.extend(range(SEGMENT_INDEX_ENTRIES_MAX + 1))
    index.positions.extend(range(SEGMENT_INDEX_ENTRIES_MAX + 1))
    assert decode_index(encode_index(index, SEGMENT_BYTES), SEGMENT_BYTES) is None


@settings(max_examples=100)
@given(data=st.binary(max_size=100))
def test_no_bytes_raise(data: bytes) -> None:
    assert decode_index(data, SEGMENT_BYTES) is None


@pytest.mark.parametrize("time", [None, 0, 1_700_000_000_000, 2**63 - 1])
def test_the_highest_publish_time_comes_back(time: int | None) -> None:
    index = SegmentIndex(time)
    index.add(3, 0)
    decoded = decode_index(encode_index(index, SEGMENT_BYTES), SEGMENT_BYTES)
    assert decoded is not None
    assert decoded.highest_publish_time == time


def test_an_index_of_an_earlier_release_is_read_without_a_time() -> None:
    body = struct.pack("<4Q", 3, 450, 0, 65_600)
    head = struct.pack("<QI", SEGMENT_BYTES, 2)
    data = b"FBINDX01" + head + struct.pack("<I", crc32(body, crc32(head))) + body
    index = decode_index(data, SEGMENT_BYTES)
    assert index is not None
    assert entries(index) == [(3, 0), (450, 65_600)]
    assert index.highest_publish_time is None
    assert decode_index(data.replace(b"FBINDX01", b"FBINDX02"), SEGMENT_BYTES) is None
