"""Frames from chunks that are cut anywhere; only a frame that is cut is copied."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forebay.format.frame import HEADER_BYTES, FrameAssembler
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX
from support.frame_logs import BOUNDS, FIRST, LOG, PAYLOADS, Frames, frames_of, header


def assembled(chunks: list[bytes], size: int = len(LOG)) -> tuple[Frames, FrameAssembler]:
    frames = FrameAssembler(FIRST, 0, size)
    found: Frames = []
    for chunk in chunks:
        for scan in frames.feed(chunk):
            found += frames_of(scan)
    return found, frames


EXPECTED = [(FIRST + at, one) for at, one in enumerate(PAYLOADS)]


def cut(data: bytes, *at: int) -> list[bytes]:
    bounds = [0, *at, len(data)]
    return [data[start:end] for start, end in pairwise(bounds)]


def test_frames_come_out_at_every_pair_of_cuts() -> None:
    for first in range(len(LOG) + 1):
        for second in range(first, len(LOG) + 1, 7):
            found, frames = assembled(cut(LOG, first, second))
            assert found == EXPECTED
            assert (frames.position, frames.offset, frames.pending) == (len(LOG), FIRST + 5, 0)
            frames.require_end(FIRST + 5)
            assert frames.corruption is None


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 100])
def test_frames_larger_than_a_chunk_come_out(size: int) -> None:
    chunks = [LOG[at : at + size] for at in range(0, len(LOG), size)]
    assert assembled(chunks)[0] == EXPECTED


def test_frames_inside_a_chunk_are_not_copied() -> None:
    frames = FrameAssembler(FIRST, 0, len(LOG))
    first, second = memoryview(LOG)[: BOUNDS[3] + 20], memoryview(LOG)[BOUNDS[3] + 20 :]
    (inside,) = frames.feed(first)
    assert inside.buffer is first
    straddling, rest = frames.feed(second)
    assert len(straddling) == 1
    assert len(straddling.buffer) == BOUNDS[4] - BOUNDS[3]
    assert rest.buffer is second


def test_what_is_carried_is_never_larger_than_its_frame() -> None:
    frames = FrameAssembler(FIRST, 0, len(LOG))
    for at in range(len(LOG)):
        frames.feed(LOG[at : at + 1])
        assert frames.pending < HEADER_BYTES + 300


DAMAGES = [
    pytest.param(2, 0, b"\xee", "offset out of order", id="offset"),
    pytest.param(2, 11, b"\xff", "impossible frame length", id="length too large"),
    pytest.param(2, 8, b"\0\0\0\0", "impossible frame length", id="length zero"),
    pytest.param(2, 12, b"\xee", "checksum mismatch", id="checksum"),
    pytest.param(2, 20, b"\xee", "checksum mismatch", id="payload"),
    pytest.param(4, 9, b"\x01", "ends inside a frame", id="length beyond the object"),
]


@pytest.mark.parametrize(("frame", "at", "new", "reason"), DAMAGES)
def test_damage_is_found_at_its_frame_wherever_the_cut_is(
    frame: int, at: int, new: bytes, reason: str
) -> None:
    damaged = bytearray(LOG)
    start = BOUNDS[frame] + at
    damaged[start : start + len(new)] = new
    for where in range(len(LOG) + 1):
        found, frames = assembled(cut(bytes(damaged), where))
        frames.require_end(FIRST + 5)
        assert found == EXPECTED[:frame]
        assert frames.corruption is not None
        assert (
            reason in frames.corruption.reason or "end inside a frame" in frames.corruption.reason
        )
        assert frames.corruption[1:] == (BOUNDS[frame], FIRST + frame)


def test_nothing_is_decoded_after_damage() -> None:
    damaged = bytearray(LOG)
    damaged[BOUNDS[1] + 12] ^= 1
    found, frames = assembled([bytes(damaged)])
    assert found == EXPECTED[:1]
    assert frames.pending == 0


def test_a_huge_length_reserves_no_memory_beyond_the_object() -> None:
    frames = FrameAssembler(FIRST, 0, 1000)
    assert frames.feed(header(FIRST, FRAME_PAYLOAD_BYTES_MAX)) == []
    assert frames.corruption is not None
    assert frames.corruption.reason == "the object ends inside a frame"


def test_an_end_inside_a_frame_and_a_wrong_count_are_damage() -> None:
    _, torn = assembled([LOG[:-1]])
    torn.require_end(FIRST + 5)
    assert torn.corruption is not None
    assert torn.corruption[1:] == (BOUNDS[4], FIRST + 4)
    _, few = assembled([LOG])
    few.require_end(FIRST + 6)
    assert few.corruption is not None
    assert few.corruption[1:] == (len(LOG), FIRST + 5)
    _, unknown = assembled([LOG])
    unknown.require_end(None)
    assert unknown.corruption is None
