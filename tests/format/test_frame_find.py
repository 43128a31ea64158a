"""Looking for frames in damaged data: none in the range is missed, and the work is linear."""

from __future__ import annotations

import random
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format import pure
from forebay.format.frame import HEADER_BYTES, Found, encode_frame, find_frames, scan
from forebay.format.layout import Buffer
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MIN, OFFSET_MAX
from support.frame_logs import PAYLOADS, header

FAR = 2**40
"""A file that goes on long after the buffer."""


def find(
    buffer: bytes,
    first: int = 0,
    last: int = OFFSET_MAX,
    *,
    total: int | None = None,
    limit: int = 0,
) -> Found:
    size = len(buffer)
    return find_frames(buffer, size, total=total or size, first=first, last=last, limit=limit)


def positions(buffer: bytes, first: int = 0, last: int = OFFSET_MAX) -> list[int]:
    return [at for _, at in find(buffer, first, last).frames]


def test_a_later_frame_is_found_behind_damage_of_any_length() -> None:
    frame = encode_frame(300, PAYLOADS[1])
    noise = random.Random(5).randbytes(64)
    for gap in range(64):
        assert positions(noise[:gap] + frame, 299, 310) == [gap]
        assert positions(bytes(gap) + frame, 299, 310) == [gap]
        assert positions(b"\xff" * gap + frame, 299, 310) == [gap]


def test_runs_of_zeros_are_no_frames() -> None:
    assert find(bytes(100_000)) == Found([], 100_000 - HEADER_BYTES + 1)


def test_an_offset_outside_the_range_is_not_found() -> None:
    frame = encode_frame(300, PAYLOADS[1])
    assert positions(frame, 300, 300) == [0]
    assert positions(frame, 301, 400) == []
    assert positions(frame, 0, 299) == []
    assert positions(frame, 256, 299) == []
    assert positions(frame, 301, 299) == []


@pytest.mark.parametrize("length", [0, 9, FRAME_PAYLOAD_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_an_impossible_length_is_passed_over(length: int) -> None:
    assert find(header(5, length), 0, 10, total=FAR) == Found([], 1)


@pytest.mark.parametrize("length", [10, 255, 2**16, FRAME_PAYLOAD_BYTES_MAX])
def test_the_search_stops_at_a_possible_frame_that_the_buffer_cuts(length: int) -> None:
    before = bytes(7)
    assert find(before + header(5, length), 1, 10, total=FAR) == Found([], 7)
    ends = len(before) + HEADER_BYTES + length
    assert find(before + header(5, length), 1, 10, total=ends) == Found([], 7)
    assert find(before + header(5, length), 1, 10, total=ends - 1) == Found([], 8)


def test_a_header_that_is_not_all_there_is_not_tried() -> None:
    assert find(header(5, 20)[:-1], 0, 10, total=FAR) == Found([], 0)


def test_the_search_stops_after_as_many_frames_as_asked_for() -> None:
    frame = encode_frame(7, PAYLOADS[1])
    assert find(frame * 3, limit=1) == Found([(7, 0)], 1)
    assert find(frame * 3, limit=2).frames == [(7, 0), (7, len(frame))]
    assert len(find(frame * 3).frames) == 3


@pytest.mark.parametrize("size", [10, 255, 256, 257, 300, 511, 512, 513, 100_000, 2**18, 300_001])
def test_the_checksum_of_a_frame_of_any_size_is_right_wherever_it_begins(size: int) -> None:
    frame = encode_frame(9, random.Random(size).randbytes(size))
    for gap in (0, 1, 63, 64, 65, 1000):
        damaged = bytearray(b"\xff" * gap + frame)
        assert positions(bytes(damaged), 9, 9) == [gap]
        damaged[-1] ^= 0x10
        assert positions(bytes(damaged), 9, 9) == []


def test_frames_in_the_payloads_of_others_are_found_too() -> None:
    inner = encode_frame(6, bytes(range(100)) * 5)
    outer = encode_frame(5, b"before" + inner + b"after")
    assert find(outer).frames == [(5, 0), (6, HEADER_BYTES + 6)]


@settings(max_examples=150)
@given(
    before=st.binary(max_size=60),
    offset=st.integers(0, OFFSET_MAX),
    below=st.integers(0, 2**20),
    above=st.integers(0, 2**20),
    payload=st.binary(min_size=10, max_size=40),
)
def test_every_frame_in_the_range_is_found(
    before: bytes, offset: int, below: int, above: int, payload: bytes
) -> None:
    buffer = before + encode_frame(offset, payload)
    first, last = max(offset - below, 0), min(offset + above, OFFSET_MAX)
    found = positions(buffer, first, last)
    assert len(before) in found
    tried = [at for at in range(len(buffer) - 15) if _plausible(buffer, at, first, last)]
    assert found == [at for at in tried if len(scan(buffer, at))]


def _plausible(buffer: bytes, at: int, first: int, last: int) -> bool:
    offset = int.from_bytes(buffer[at : at + 8], "little")
    length = int.from_bytes(buffer[at + 8 : at + 12], "little")
    return first <= offset <= last and FRAME_PAYLOAD_BYTES_MIN <= length <= FRAME_PAYLOAD_BYTES_MAX


@pytest.mark.parametrize("numbers", [2**15, 2**16])
def test_numbers_that_look_like_headers_cost_a_few_checksummed_bytes_each(
    monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    """Each number is a plausible header, and half the buffer is what it claims to be its payload.

    Counted in `pure`: the compiled twin does the same steps.
    """
    hashed = 0

    def counting(data: Buffer, value: int = 0) -> int:
        nonlocal hashed
        hashed += len(data)
        return zlib.crc32(data, value)

    monkeypatch.setattr(pure, "crc32", counting)
    data = array("Q", [4 * numbers + at % 100 for at in range(numbers)]).tobytes()
    anything = False
    found, _, resume = pure.find_frames(data, len(data), len(data), 0, OFFSET_MAX, anything, 0)
    assert not len(found)
    assert resume == len(data) - HEADER_BYTES + 1
    tried = [at for at in range(resume) if _plausible(data, at, 0, OFFSET_MAX)]
    claimed = [int.from_bytes(data[at + 8 : at + 12], "little") for at in tried]
    assert sum(claimed) > numbers * len(data) // 4
    assert hashed <= len(data) + 256 * len(tried)
    assert hashed <= 64 * len(data)
