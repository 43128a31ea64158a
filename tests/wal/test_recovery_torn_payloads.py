"""Torn tails whose bytes look like frames: cut unless a later message is proven."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

import pytest

from forebay.errors import CorruptFrame
from forebay.format.frame import encode_frame
from forebay.format.message import MessageId, StreamMessage, encode_message
from support.closed_logs import expect_unchanged, fill, forget_memories, frame_starts
from support.disks import LogDirectory, WatchedDisk, in_memory, payloads, texts

NEXT = 5
"""The offset after the messages that `fill` appends."""


def message(offset: int, payload: bytes, attributes: dict[str, str] | None = None) -> bytes:
    whole = StreamMessage(
        payload, msg_id=MessageId(1, "/default/topic", "broker"), attributes=attributes or {}
    )
    return encode_frame(offset, encode_message(whole, offset))


def copied_frames(count: int = 4, first: int = NEXT + 1) -> bytes:
    """Frames of the offsets that would come next, as in a message that holds a copy of a log."""
    return b"".join(message(first + at, b"copied %d" % at) for at in range(count))


def open_with_tail(tail: bytes) -> tuple[LogDirectory, WatchedDisk]:
    """A log of five messages, synced and remembered, and bytes that a crash left behind them."""
    directory = in_memory()
    fill(directory)
    published = directory.read("wal.synced")
    directory.write("wal.log", directory.read("wal.log") + tail)
    directory.write("wal.synced", published)
    disk = WatchedDisk(directory.disk)
    directory.disk = disk
    return directory, disk


def expect_cut(tail: bytes) -> int:
    """The tail is cut and kept aside; returns how many bytes opening the log read."""
    directory, disk = open_with_tail(tail)
    wal = directory.open()
    read = disk.bytes_read
    assert payloads(wal) == texts(0, NEXT)
    assert wal.append(b"next", durability="synced") == NEXT
    wal.shutdown()
    kept = [name for name in directory.names() if name.endswith(".torn")]
    assert [directory.read(name) for name in kept] == [tail]
    return read


# ---- frames inside the payload of a torn frame


def test_frames_in_the_payload_of_a_torn_message_are_no_evidence_wherever_it_is_cut() -> None:
    whole = message(NEXT, copied_frames())
    for cut in range(1, len(whole)):
        expect_cut(whole[:cut])


def test_frames_in_the_payloads_of_several_damaged_messages_are_no_evidence() -> None:
    batch = [bytearray(message(NEXT + at, copied_frames(2, NEXT + at + 1))) for at in range(3)]
    for frame in batch[:2]:
        frame[-1] ^= 1
    expect_cut(b"".join(batch)[:-10])


def test_a_message_torn_in_its_attributes_is_cut_though_its_payload_holds_frames() -> None:
    whole = message(NEXT, copied_frames(), {"key": "v" * 40})
    expect_cut(whole[:-20])


@pytest.mark.parametrize("place", ["payload", "attributes"])
def test_damage_to_any_byte_before_a_valid_frame_is_never_cut(place: str) -> None:
    """With every memory lost, only the frames tell; messages hold copies of frames themselves."""
    inside = copied_frames(1, 2)
    attributes = {"key": "value" * 10} if place == "attributes" else None
    log = [message(at, inside if at == 1 else b"message", attributes) for at in range(4)]
    start, end = len(log[0]), len(log[0]) + len(log[1])
    for at in range(start, end):
        for bit in (0x01, 0x80):
            directory = in_memory()
            fill(directory)
            data = bytearray(b"".join(log))
            data[at] ^= bit
            directory.write("wal.log", bytes(data))
            forget_memories(directory)
            before = directory.contents()
            with pytest.raises(CorruptFrame) as caught:
                directory.open()
            assert caught.value.position == start, at
            expect_unchanged(directory, before)


@pytest.mark.parametrize("more", [1, 100, 2**16, 2**24])
def test_a_length_that_grew_over_the_next_frames_does_not_hide_them(more: int) -> None:
    directory = in_memory()
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    start = frame_starts(directory)[1]
    length = struct.unpack_from("<I", data, start + 8)[0]
    struct.pack_into("<I", data, start + 8, length + more)
    directory.write("wal.log", bytes(data))
    forget_memories(directory)
    with pytest.raises(CorruptFrame, match="valid frames follow"):
        directory.open()


@pytest.mark.parametrize("byte", range(8))
def test_a_first_frame_with_a_damaged_offset_does_not_decide_which_offsets_count(byte: int) -> None:
    """Nothing else tells the first offset here, so frames of any offset are evidence."""
    directory = in_memory()
    fill(directory)
    data = bytearray(directory.read("wal.log"))
    data[byte] ^= 0x80
    data[20] ^= 1
    directory.write("wal.log", bytes(data))
    forget_memories(directory)
    before = directory.contents()
    with pytest.raises(CorruptFrame):
        directory.open()
    expect_unchanged(directory, before)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_a_log_of_one_repeated_byte_and_no_memory_is_a_torn_tail(byte: int) -> None:
    directory = in_memory()
    fill(directory)
    directory.write("wal.log", bytes([byte]) * 1000)
    forget_memories(directory)
    assert directory.open().append(b"first", durability="synced") == 0


# ---- numbers that look like headers


def small_numbers(size: int) -> bytes:
    """An array of 64-bit numbers: each is a plausible header that claims kilobytes."""
    return array("Q", [NEXT + at % 5000 for at in range(size // 8)]).tobytes()


def long_claims(size: int) -> bytes:
    """Headers of the next offsets, each of which claims about half of what follows."""
    heads = (
        struct.pack("<QII", NEXT + 1 + at, max((size - 16 * at) // 2, 10), at)
        for at in range(size // 16)
    )
    return b"".join(heads)


def message_heads(size: int) -> bytes:
    """Headers and messages that repeat the offset, each claiming about half of what follows."""
    parts, left, at = [], size, 0
    while left > 0:
        head = message(NEXT + 1 + at, b"")[16:80]
        parts.append(struct.pack("<QII", NEXT + 1 + at, max(left // 2, 64), at) + head)
        left -= len(parts[-1])
        at += 1
    return b"".join(parts)[:size]


TAILS = [small_numbers, long_claims, message_heads]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("size", [2**16, 2**21])
def test_a_torn_message_of_numbers_like_headers_is_cut_without_a_search_of_its_payload(
    tail: Callable[[int], bytes], size: int
) -> None:
    torn = message(NEXT, tail(size))[:-30]
    read = expect_cut(torn)
    assert read <= 3 * len(torn) + 2**16  # the scan, the copy aside, and heads


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("size", [2**16, 2**21, 2**23])
def test_numbers_like_headers_whose_frame_is_lost_are_cut_in_linear_work(
    tail: Callable[[int], bytes], size: int
) -> None:
    """The first page of the write was lost. So it is searched, and it holds no valid frame."""
    torn = bytes(4096) + tail(size)
    read = expect_cut(torn)
    assert read <= 8 * len(torn) + 2**16
