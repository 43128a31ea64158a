"""Looking for frames in damaged data: none in the range is missed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.frame import encode_frame, frame_candidates, scan
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MIN, OFFSET_MAX
from support.frame_logs import PAYLOADS, header


def candidates(buffer: bytes, first: int = 0, last: int = OFFSET_MAX) -> list[int]:
    return list(frame_candidates(buffer, first, last))


def valid(buffer: bytes, first: int, last: int) -> list[int]:
    """Candidates that are whole, valid frames."""
    return [at for at in candidates(buffer, first, last) if len(scan(buffer, at))]


def test_a_later_frame_is_found_behind_damage_of_any_length() -> None:
    frame = encode_frame(300, PAYLOADS[1])
    noise = random.Random(5).randbytes(64)
    for gap in range(64):
        assert gap in valid(noise[:gap] + frame, 299, 310)
        assert gap in valid(bytes(gap) + frame, 299, 310)
        assert gap in valid(b"\xff" * gap + frame, 299, 310)


def test_runs_of_zeros_are_no_candidates() -> None:
    assert candidates(bytes(100_000)) == []
    assert candidates(bytes(100_000), 0, 5) == []


def test_an_offset_outside_the_range_is_no_candidate() -> None:
    frame = encode_frame(300, PAYLOADS[1])
    assert 0 in candidates(frame, 300, 300)
    assert 0 not in candidates(frame, 301, 400)
    assert 0 not in candidates(frame, 0, 299)
    assert 0 not in candidates(frame, 256, 299)


@pytest.mark.parametrize("length", [0, 9, FRAME_PAYLOAD_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_an_impossible_length_is_no_candidate(length: int) -> None:
    assert 0 not in candidates(header(5, length) + bytes(20), 0, 10)


@pytest.mark.parametrize("length", [10, 255, 2**16, FRAME_PAYLOAD_BYTES_MAX])
def test_a_possible_length_is_one_even_where_the_payload_is_not_there(length: int) -> None:
    assert 0 in candidates(header(5, length), 0, 10)


def test_a_header_that_is_not_all_there_is_no_candidate() -> None:
    assert candidates(header(5, 20)[:-1], 0, 10) == []


@settings(max_examples=150)
@given(
    before=st.binary(max_size=60),
    offset=st.integers(0, OFFSET_MAX),
    below=st.integers(0, 2**20),
    above=st.integers(0, 2**20),
    payload=st.binary(min_size=10, max_size=40),
)
def test_every_frame_in_the_range_is_a_candidate(
    before: bytes, offset: int, below: int, above: int, payload: bytes
) -> None:
    buffer = before + encode_frame(offset, payload)
    first, last = max(offset - below, 0), min(offset + above, OFFSET_MAX)
    found = candidates(buffer, first, last)
    assert len(before) in found
    assert found == [at for at in range(len(buffer) - 15) if _plausible(buffer, at, first, last)]


def _plausible(buffer: bytes, at: int, first: int, last: int) -> bool:
    offset = int.from_bytes(buffer[at : at + 8], "little")
    length = int.from_bytes(buffer[at + 8 : at + 12], "little")
    return first <= offset <= last and FRAME_PAYLOAD_BYTES_MIN <= length <= FRAME_PAYLOAD_BYTES_MAX
