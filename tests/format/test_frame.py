"""The batch scanner and the incremental decoder: the same frames, however the bytes are cut.

A torn tail and each kind of corruption are different results, with position and offset.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import CorruptFrame
from forebay.format.frame import (
    HEADER_BYTES,
    End,
    FrameDecoder,
    Scan,
    encode_frame,
    frame_bytes,
    scan,
)
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MIN, OFFSET_MAX
from support.frame_logs import BOUNDS, FIRST, LOG, PAYLOADS, fed, frames_of, header

# ---- whole logs and torn ones ----


def test_a_whole_log_is_complete_and_all_its_frames_are_columns() -> None:
    found = scan(LOG, expected=FIRST, consecutive=True)
    assert frames_of(found) == [(FIRST + n, payload) for n, payload in enumerate(PAYLOADS)]
    assert list(found.positions) == [bound + HEADER_BYTES for bound in BOUNDS[:-1]]
    assert list(found.lengths) == [len(payload) for payload in PAYLOADS]
    assert (found.safe_length, found.end, found.offset) == (len(LOG), End.COMPLETE, FIRST + 5)
    found.raise_if_corrupt("wal.log")


@pytest.mark.parametrize("consecutive", [True, False])
def test_a_log_cut_at_any_byte_is_torn_there_and_keeps_its_whole_frames(consecutive: bool) -> None:
    for cut in range(len(LOG) + 1):
        found = scan(LOG[:cut], consecutive=consecutive)
        whole = sum(bound <= cut for bound in BOUNDS[1:])
        assert len(found) == whole
        assert found.safe_length == BOUNDS[whole]
        assert found.end is (End.COMPLETE if cut in BOUNDS else End.TORN)
        found.raise_if_corrupt("wal.log")
        if cut - BOUNDS[whole] >= HEADER_BYTES:
            assert found.offset == FIRST + whole
        else:
            assert found.offset == (FIRST + whole if consecutive and whole else None)


def test_a_scan_starts_where_it_is_told() -> None:
    for number, bound in enumerate(BOUNDS[:-1]):
        found = scan(LOG, bound, expected=FIRST + number, consecutive=True)
        assert list(found.offsets) == list(range(FIRST + number, FIRST + len(PAYLOADS)))
        assert found.safe_length == len(LOG)


def test_an_empty_buffer_is_complete() -> None:
    assert scan(b"").end is End.COMPLETE
    assert scan(b"").offset is None
    assert scan(b"", expected=4).offset == 4


def test_any_kind_of_buffer_is_scanned() -> None:
    for buffer in (LOG, bytearray(LOG), memoryview(LOG)):
        assert frames_of(scan(buffer)) == frames_of(scan(LOG))


def test_the_size_of_a_frame_is_known_from_its_whole_header() -> None:
    assert frame_bytes(LOG, 0) == BOUNDS[1]
    assert frame_bytes(LOG, BOUNDS[1]) == BOUNDS[2] - BOUNDS[1]
    assert frame_bytes(LOG[: HEADER_BYTES - 1], 0) is None


# ---- the decoder ----


@pytest.mark.parametrize("consecutive", [True, False])
def test_the_decoder_gives_the_same_frames_however_the_bytes_are_cut(consecutive: bool) -> None:
    for cut in range(len(LOG) + 1):
        part = LOG[:cut]
        want = scan(part, consecutive=consecutive)
        for chunks in (
            [part],
            [part[at : at + 1] for at in range(len(part))],
            [part[: cut // 2], part[cut // 2 :]],
        ):
            decoder = FrameDecoder(consecutive=consecutive)
            frames, last = fed(decoder, chunks)
            assert frames == frames_of(want)
            assert (last.end, last.offset) == (want.end, want.offset)
            assert decoder.position == want.safe_length
            assert decoder.pending == cut - want.safe_length


@settings(max_examples=150)
@given(
    payloads=st.lists(st.binary(min_size=10, max_size=80), max_size=6),
    first=st.integers(0, OFFSET_MAX - 10),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    keep=st.integers(0, 600),
)
def test_random_chunks_give_what_one_scan_gives(
    payloads: list[bytes], first: int, cuts: list[int], keep: int
) -> None:
    log = b"".join(encode_frame(first + n, payload) for n, payload in enumerate(payloads))[:keep]
    edges = sorted({0, len(log), *(min(cut, len(log)) for cut in cuts)})
    chunks = [log[start:end] for start, end in pairwise(edges)]
    decoder = FrameDecoder(expected=first, consecutive=True)
    frames, last = fed(decoder, chunks)
    want = scan(log, expected=first, consecutive=True)
    assert frames == frames_of(want)
    assert (last.end, last.offset, decoder.position) == (want.end, want.offset, want.safe_length)


def test_frames_stay_as_they_were_after_the_next_feed() -> None:
    decoder = FrameDecoder()
    first = decoder.feed(LOG[: BOUNDS[2]])
    decoder.feed(LOG[BOUNDS[2] :])
    assert frames_of(first) == [(FIRST, PAYLOADS[0]), (FIRST + 1, PAYLOADS[1])]


def test_an_empty_feed_changes_nothing() -> None:
    decoder = FrameDecoder(expected=FIRST)
    assert decoder.feed(b"").end is End.COMPLETE
    decoder.feed(LOG[:20])
    assert decoder.feed(b"").end is End.TORN
    assert decoder.pending == 20


def test_between_feeds_the_decoder_holds_less_than_one_frame() -> None:
    frame_max = max(end - start for start, end in pairwise(BOUNDS))
    for seed in range(20):
        chooser = random.Random(seed)
        decoder = FrameDecoder(consecutive=True)
        at = 0
        while at < len(LOG):
            size = chooser.randrange(1, 200)
            decoder.feed(LOG[at : at + size])
            at += size
            assert decoder.pending < frame_max
        assert decoder.pending == 0


# ---- corruption ----

BEFORE: Final = LOG[: BOUNDS[2]]
POSITION: Final = BOUNDS[2]
EXPECTED: Final = FIRST + 2
GOOD: Final = encode_frame(EXPECTED, PAYLOADS[2])

CORRUPT: Final = [
    pytest.param(GOOD[:-1] + b"\x01", End.BAD_CRC, id="payload changed"),
    pytest.param(GOOD[:12] + bytes(4) + GOOD[16:], End.BAD_CRC, id="crc changed"),
    pytest.param(bytes(HEADER_BYTES), End.BAD_LENGTH, id="zeros"),
    pytest.param(bytes(5000), End.BAD_LENGTH, id="many zeros"),
    pytest.param(header(EXPECTED, 0), End.BAD_LENGTH, id="length 0"),
    pytest.param(header(EXPECTED, FRAME_PAYLOAD_BYTES_MIN - 1), End.BAD_LENGTH, id="too short"),
    pytest.param(header(EXPECTED, FRAME_PAYLOAD_BYTES_MAX + 1), End.BAD_LENGTH, id="too long"),
    pytest.param(header(EXPECTED, 2**32 - 1), End.BAD_LENGTH, id="length all ones"),
    pytest.param(encode_frame(EXPECTED + 1, PAYLOADS[2]), End.BAD_OFFSET, id="offset jumps"),
    pytest.param(encode_frame(EXPECTED - 1, PAYLOADS[2]), End.BAD_OFFSET, id="offset repeats"),
    pytest.param(encode_frame(0, PAYLOADS[2]), End.BAD_OFFSET, id="offset goes back"),
    pytest.param(encode_frame(2**63, PAYLOADS[2]), End.BAD_OFFSET, id="offset over the limit"),
    pytest.param(header(EXPECTED + 1, 1000), End.BAD_OFFSET, id="jump, payload not all there"),
]


@pytest.mark.parametrize(("damage", "end"), CORRUPT)
@pytest.mark.parametrize("after", [b"", GOOD + LOG], ids=["at the end", "in the middle"])
def test_a_corrupt_frame_is_reported_with_its_position_and_offset(
    damage: bytes, end: End, after: bytes
) -> None:
    found = scan(BEFORE + damage + after, expected=FIRST, consecutive=True)
    assert list(found.offsets) == [FIRST, FIRST + 1]
    assert (found.safe_length, found.end, found.offset) == (POSITION, end, EXPECTED)
    assert found.end.corrupt
    with pytest.raises(CorruptFrame) as raised:
        found.raise_if_corrupt("wal.3.log", base=1000)
    assert raised.value.file == "wal.3.log"
    assert raised.value.position == 1000 + POSITION
    assert raised.value.offset == EXPECTED
    assert str(raised.value) == (
        f"wal.3.log: {end.describe()} at position {1000 + POSITION} (offset {EXPECTED}); see what "
        "can be put right with `forebay repair`"
    )


@pytest.mark.parametrize(("damage", "end"), CORRUPT)
def test_the_decoder_stays_at_a_corrupt_frame_and_keeps_nothing_of_what_follows(
    damage: bytes, end: End
) -> None:
    decoder = FrameDecoder(expected=FIRST, consecutive=True)
    frames, last = fed(decoder, [(BEFORE + damage)[at : at + 1] for at in range(9999)])
    assert [offset for offset, _ in frames] == [FIRST, FIRST + 1]
    assert (last.end, last.offset, decoder.position) == (end, EXPECTED, POSITION)
    for _ in range(50):
        again = decoder.feed(LOG * 10)
        assert (again.end, again.offset, len(again)) == (end, EXPECTED, 0)
        assert decoder.position == POSITION
        assert decoder.pending == 0
        with pytest.raises(CorruptFrame, match=f"position {POSITION} "):
            again.raise_if_corrupt("wal.log", base=decoder.position)


@pytest.mark.parametrize(("damage", "end"), CORRUPT)
def test_a_corrupt_frame_cut_short_is_torn_until_its_bytes_say_otherwise(
    damage: bytes, end: End
) -> None:
    ends = [
        scan(BEFORE + damage[:cut], expected=FIRST, consecutive=True).end
        for cut in range(1, len(damage) + 1)
    ]
    known = ends.index(end)
    assert ends[:known] == [End.TORN] * known
    assert ends[known:] == [end] * (len(ends) - known)


def test_a_length_at_either_limit_is_plausible() -> None:
    assert scan(encode_frame(1, bytes(FRAME_PAYLOAD_BYTES_MIN))).end is End.COMPLETE
    assert scan(header(1, FRAME_PAYLOAD_BYTES_MAX)).end is End.TORN


def test_the_highest_offset_is_a_frame_and_nothing_follows_it() -> None:
    last = encode_frame(OFFSET_MAX, PAYLOADS[0])
    assert list(scan(last, expected=OFFSET_MAX, consecutive=True).offsets) == [OFFSET_MAX]
    found = scan(last + encode_frame(0, PAYLOADS[0]), consecutive=True)
    assert (len(found), found.end, found.offset) == (1, End.BAD_OFFSET, OFFSET_MAX + 1)


def test_every_single_bit_of_damage_in_a_log_is_noticed() -> None:
    whole = scan(LOG, expected=FIRST, consecutive=True)
    for at in range(len(LOG)):
        for bit in range(8):
            damaged = bytearray(LOG)
            damaged[at] ^= 1 << bit
            found = scan(damaged, expected=FIRST, consecutive=True)
            assert found.end is not End.COMPLETE
            assert found.safe_length == max(bound for bound in BOUNDS if bound <= at)
            assert frames_of(found) == frames_of(whole)[: len(found)]


# ---- expected and consecutive ----


def test_expected_binds_the_first_frame_alone() -> None:
    log = encode_frame(4, PAYLOADS[0]) + encode_frame(2, PAYLOADS[1])
    assert list(scan(log, expected=4).offsets) == [4, 2]
    assert scan(log, expected=4).offset is None
    assert scan(log, expected=3).end is End.BAD_OFFSET
    assert scan(log, expected=3).offset == 3


def test_consecutive_without_expected_takes_any_first_offset() -> None:
    log = encode_frame(4, PAYLOADS[0]) + encode_frame(6, PAYLOADS[1])
    found = scan(log, consecutive=True)
    assert (list(found.offsets), found.end, found.offset) == ([4], End.BAD_OFFSET, 5)


def test_neither_takes_any_order() -> None:
    log = b"".join(encode_frame(offset, PAYLOADS[0]) for offset in (5, 5, 0, OFFSET_MAX, 3))
    assert list(scan(log).offsets) == [5, 5, 0, OFFSET_MAX, 3]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_decoder_has_the_same_meaning_of_expected_and_consecutive(step: int) -> None:
    log = encode_frame(4, PAYLOADS[0]) + encode_frame(2, PAYLOADS[1]) + encode_frame(3, PAYLOADS[0])

    def decode(expected: int | None, *, consecutive: bool) -> tuple[list[int], End, int | None]:
        decoder = FrameDecoder(expected=expected, consecutive=consecutive)
        frames, last = fed(decoder, [log[at : at + step] for at in range(0, len(log), step)])
        return [offset for offset, _ in frames], last.end, last.offset

    for expected in (None, 3, 4):
        for consecutive in (True, False):
            found = scan(log, expected=expected, consecutive=consecutive)
            want = (list(found.offsets), found.end, found.offset)
            assert decode(expected, consecutive=consecutive) == want


# ---- anything at all ----


@settings(max_examples=200)
@given(data=st.binary(max_size=200), expected=st.none() | st.integers(0, OFFSET_MAX))
def test_no_bytes_make_the_scanner_or_the_decoder_raise(data: bytes, expected: int | None) -> None:
    makers: list[Callable[[], Scan]] = [
        lambda: scan(data, expected=expected, consecutive=True),
        lambda: FrameDecoder(expected=expected, consecutive=True).feed(data),
    ]
    first, second = (make() for make in makers)
    assert (first.end, first.safe_length, first.offset) == (
        second.end,
        second.safe_length,
        second.offset,
    )
