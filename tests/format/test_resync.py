"""The search for the next valid frame after damage, at every cut, window and place of damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, encode_frame, scan
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.resync import FrameExtent, FrameSearch, OffsetPosition, next_frame
from forebay.limits import OFFSET_MAX
from support.frame_logs import BOUNDS, FIRST, LOG, PAYLOADS, header

LAST = FIRST + len(PAYLOADS) - 1
HEAD_BYTES = 4096
"""How many bytes of a message the search reads to find the repeated offset."""


def message_frame(offset: int, payload: bytes = b"", repeated: int | None = None) -> bytes:
    message = StreamMessage(payload, msg_id=MessageId(1, "/default/t", "broker"))
    return encode_frame(offset, encode_message(message, offset if repeated is None else repeated))


class Bytes:
    """A source that refuses reads outside of it, and records the largest one and their sum."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest = 0
        self.total = 0

    def read(self, start: int, end: int) -> memoryview:
        assert 0 <= start <= end <= len(self.data), (start, end, len(self.data))
        self.largest = max(self.largest, end - start)
        self.total += end - start
        return memoryview(self.data)[start:end]

    def search(self, window_bytes: int = 2**20, *, messages_only: bool = False) -> FrameSearch:
        return FrameSearch(self.read, len(self.data), window_bytes, messages_only)


def every_frame(data: bytes, start: int, stop: int, first: int, last: int) -> list[OffsetPosition]:
    """What `between` must find, by trying each position."""
    found = []
    for at in range(start, max(stop - HEADER_BYTES + 1, start)):
        for frame in scan(data, at):
            if first <= frame.offset <= last:
                found.append((frame.offset, at))
            break
    return found


@pytest.mark.parametrize("window_bytes", [*range(1, 80), len(LOG) - 1, len(LOG), len(LOG) + 1])
def test_a_frame_that_a_window_cuts_is_found_whatever_the_window(window_bytes: int) -> None:
    source = Bytes(b"\xff" * 5 + LOG)
    found = list(source.search(window_bytes).between(0, len(source.data), 0, OFFSET_MAX))
    whole = [(FIRST + at, 5 + start) for at, start in enumerate(BOUNDS[:-1])]
    assert set(whole) <= set(found)
    assert found == every_frame(source.data, 0, len(source.data), 0, OFFSET_MAX)
    largest_frame = max(end - start for start, end in pairwise(BOUNDS))
    assert source.largest <= max(window_bytes, 4 * largest_frame, HEADER_BYTES)


@pytest.mark.parametrize("window_bytes", [16, 40, 1000])
def test_of_bytes_that_end_anywhere_only_whole_frames_are_found(window_bytes: int) -> None:
    for cut in range(len(LOG) + 1):
        source = Bytes(LOG[:cut])
        found = list(source.search(window_bytes).between(0, cut, 0, OFFSET_MAX))
        assert found == every_frame(LOG[:cut], 0, cut, 0, OFFSET_MAX)


@pytest.mark.parametrize("window_bytes", [16, 23, 64, 1000])
def test_after_damage_to_any_byte_the_search_goes_on_with_the_next_frame(window_bytes: int) -> None:
    for at in range(len(LOG)):
        frame = max(n for n, start in enumerate(BOUNDS) if start <= at)
        data = bytearray(LOG)
        data[at] ^= 0x40
        found = Bytes(bytes(data)).search(window_bytes).after(FIRST + frame, BOUNDS[frame], LAST)
        expected = None if FIRST + frame == LAST else (FIRST + frame + 1, BOUNDS[frame + 1])
        assert found == expected, at


@pytest.mark.parametrize("window_bytes", [16, 37, 1000])
def test_after_a_hole_of_any_length_the_first_whole_frame_behind_it_is_found(
    window_bytes: int,
) -> None:
    for cut in range(1, len(LOG)):
        found = Bytes(LOG[cut:]).search(window_bytes).after(FIRST, 0, LAST)
        behind = [
            (FIRST + n, start - cut) for n, start in enumerate(BOUNDS[:-1]) if start >= cut and n
        ]
        assert found == (behind[0] if behind else None), cut


def test_frames_in_a_damaged_payload_are_passed_over_where_its_length_leads_to_the_next() -> None:
    inner = encode_frame(6, b"not the real one")
    outer = bytearray(encode_frame(5, inner + b"more"))
    outer[-1] ^= 1
    real = encode_frame(6, b"the real message")
    data = bytes(outer) + real
    assert Bytes(data).search().after(5, 0, 6) == (6, len(outer))
    outer[9] ^= 0x40  # now its length leads nowhere, and the payload is searched too
    assert Bytes(bytes(outer) + real).search().after(5, 0, 6) == (6, HEADER_BYTES)


def test_an_index_bounds_the_offsets_that_count_before_each_of_its_entries() -> None:
    late = encode_frame(30, b"a copy of a later one")
    frames = [bytearray(encode_frame(offset, late)) for offset in (5, 6)]
    for frame in frames:
        frame[8:12] = bytes(4)
    data = bytes(frames[0] + frames[1]) + encode_frame(7, b"ten bytes!")
    index = ((5, 0), (7, 2 * len(frames[0])))
    assert Bytes(data).search().after(5, 0, 40) == (30, HEADER_BYTES)
    assert Bytes(data).search().after(5, 0, 40, index) == index[1]
    descriptor = ObjectDescriptor("data", 5, 40, len(data), None, 0, offset_index=index)
    assert next_frame(descriptor, 5, 0, Bytes(data).read, 64) == index[1]


def test_a_damaged_entry_of_the_index_is_passed_over_too() -> None:
    data = bytearray(LOG)
    index = [(FIRST + n, start) for n, start in enumerate(BOUNDS[:-1])]
    for start in BOUNDS[1:4]:
        data[start + 8 : start + 12] = b"\xff" * 4
    for window_bytes in range(16, 60):
        search = Bytes(bytes(data)).search(window_bytes)
        assert search.after(FIRST + 1, BOUNDS[1], LAST, index) == (FIRST + 4, BOUNDS[4])


def test_offsets_beyond_the_last_one_are_not_found() -> None:
    search = Bytes(LOG).search()
    assert search.after(FIRST, 0, FIRST) is None
    assert search.after(FIRST + 1, 0, FIRST + 1) is None
    assert search.after(FIRST - 1, 0, LAST) == (FIRST, 0)
    assert search.after(LAST, len(LOG), LAST + 10) is None


def test_zeros_are_no_frames() -> None:
    """Rule R1: sixteen zero bytes would be a valid empty frame."""
    assert Bytes(bytes(5000)).search(100).after(0, 0, OFFSET_MAX) is None


# ---- recovery's search: messages that repeat the frame's offset


@pytest.mark.parametrize("payload_bytes", [0, 100, HEAD_BYTES, 3 * HEAD_BYTES])
def test_a_message_is_found_wherever_a_window_or_the_file_cuts_it(payload_bytes: int) -> None:
    frame = message_frame(9, bytes(payload_bytes))
    for gap in range(0, 70, 3 if payload_bytes < HEAD_BYTES else 11):  # small windows take long
        source = Bytes(b"\xff" * gap + frame)
        for window_bytes in (16, 40, 5000):
            search = source.search(window_bytes, messages_only=True)
            assert list(search.between(0, len(source.data), 0, 20)) == [(9, gap)]
    for cut in {*range(1, 60), len(frame) - 1}:
        torn = Bytes(frame[:-cut])
        assert not list(torn.search(64, messages_only=True).between(0, len(torn.data), 0, 20))


def test_a_frame_that_holds_no_message_of_its_offset_is_left_out() -> None:
    data = LOG + message_frame(12, repeated=13) + message_frame(14)
    found = list(Bytes(data).search(messages_only=True).between(0, len(data), 0, 100))
    assert [offset for offset, _ in found] == [14]


# ---- what header and message say about a frame, valid or not


@pytest.mark.parametrize("payload_bytes", [0, 5, 3 * HEAD_BYTES])
def test_the_extent_of_a_frame_needs_only_its_head(payload_bytes: int) -> None:
    payload = random.Random(payload_bytes).randbytes(payload_bytes)
    frame = message_frame(9, payload)
    start = HEADER_BYTES + 8 + 8 + (8 + 10) + (8 + 6) + 8 + 8  # ids, topic, broker, two numbers
    assert frame[start:].startswith(payload)
    expected = FrameExtent(7 + start, 7 + start + payload_bytes, 7 + len(frame))
    for cut in {start, start + payload_bytes // 2, len(frame)}:
        source = Bytes(bytes(7) + frame[:cut])
        assert source.search().extent(9, 7) == expected
        assert source.search().extent(8, 7) is None
        assert source.search().extent(9, 6) is None
    for cut in range(start):
        assert Bytes(frame[:cut]).search().extent(9, 0) is None


def test_a_frame_whose_header_and_message_disagree_has_no_extent() -> None:
    assert Bytes(message_frame(9, repeated=8)).search().extent(9, 0) is None
    frame = bytearray(message_frame(9, b"x" * 200))
    frame[8:12] = (150).to_bytes(4, "little")  # shorter than its payload
    assert Bytes(bytes(frame)).search().extent(9, 0) is None
    frame[8:12] = (2**30).to_bytes(4, "little")  # over the limit
    assert Bytes(bytes(frame)).search().extent(9, 0) is None


# ---- the work


def claims(count: int, claimed: Callable[[int], int]) -> bytes:
    """Headers of consecutive offsets that claim these lengths, with no valid frame."""
    return b"".join(header(5 + at, claimed(at)) for at in range(count))


@pytest.mark.parametrize("window_bytes", [64, 4096, 2**20])
@pytest.mark.parametrize(
    "claimed",
    [lambda at: 10 + at, lambda at: 10 + 31 * at % 2**16, lambda at: 2**16 - at, lambda _: 2**17],
)
def test_headers_that_claim_much_make_the_search_read_each_byte_a_few_times(
    window_bytes: int, claimed: Callable[[int], int]
) -> None:
    source = Bytes(claims(2**14, claimed))
    assert not list(source.search(window_bytes).between(0, len(source.data), 0, OFFSET_MAX))
    assert source.total <= 6 * len(source.data)
    assert source.search(window_bytes).after(5, 0, OFFSET_MAX) is None


# ---- at random


@st.composite
def damaged_logs(draw: st.DrawFn) -> bytes:
    """Frames with noise between, some of them in payloads of others or cut."""
    pieces = draw(
        st.lists(
            st.one_of(
                st.binary(max_size=30),
                st.builds(
                    encode_frame,
                    st.integers(0, 40),
                    st.one_of(
                        st.binary(min_size=10, max_size=40),
                        st.builds(encode_frame, st.integers(0, 40), st.binary(min_size=10)),
                    ),
                ),
                st.builds(header, st.integers(0, 40), st.integers(0, 60)),
            ),
            max_size=8,
        )
    )
    data = b"".join(pieces)
    start = draw(st.integers(0, len(data)))
    return data[start:]


@settings(max_examples=200)
@given(
    data=damaged_logs(),
    window_bytes=st.integers(1, 120),
    first=st.integers(0, 40),
    count=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_a_search_finds_what_trying_each_position_finds(
    data: bytes, window_bytes: int, first: int, count: int, seed: int
) -> None:
    dice = random.Random(seed)
    start = dice.randint(0, len(data))
    stop = dice.randint(start, len(data))
    search = Bytes(data).search(window_bytes)
    found = list(search.between(start, stop, first, first + count))
    assert found == every_frame(data, start, stop, first, first + count)
