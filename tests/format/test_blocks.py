"""Blocks of compressed objects: cut anywhere, damaged anywhere, and hostile."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from zlib import crc32

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.blocks import (
    BLOCK_HEADER_BYTES,
    BlockAssembler,
    BlockCutter,
    BlockError,
    BlockHeader,
    RawBlock,
    blocks_of,
    compress_block,
    decode_header,
    decompress,
    encode_header,
    next_block,
    stored_bytes_max,
)
from forebay.format.descriptor import ZSTD, ObjectDescriptor
from forebay.format.frame import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    FrameTooLarge,
    encode_frame,
    scan,
)
from forebay.limits import BLOCK_BYTES, MIB, OFFSET_MAX
from support.frame_logs import Frames, frames_of

FIRST = 7


def raw_block(first: int, payloads: list[bytes]) -> RawBlock:
    frames = b"".join(encode_frame(first + at, one) for at, one in enumerate(payloads))
    return RawBlock(first, len(payloads), frames)


PAYLOADS = [
    [b"0123456789", b"a" * 300],
    [bytes(10)],
    [b"\xff" * 40, b"ends-here!", bytes(range(64))],
]
BLOCKS: list[bytes] = []
STARTS = [FIRST]
for _payloads in PAYLOADS:
    BLOCKS.append(compress_block(raw_block(STARTS[-1], _payloads), 3))
    STARTS.append(STARTS[-1] + len(_payloads))
OBJECT = b"".join(BLOCKS)
BOUNDS = [0]
for _block in BLOCKS:
    BOUNDS.append(BOUNDS[-1] + len(_block))
EXPECTED = [
    (first + at, one)
    for first, payloads in zip(STARTS, PAYLOADS, strict=False)
    for at, one in enumerate(payloads)
]
DESCRIPTOR = ObjectDescriptor(
    "data-7-12.dnb1.zst", FIRST, STARTS[-1] - 1, len(OBJECT), None, 0, codec=ZSTD
)


def assembled(
    chunks: list[bytes], size: int = len(OBJECT), *, wanted: int = 0
) -> tuple[Frames, BlockAssembler]:
    blocks = BlockAssembler(FIRST, 0, size, wanted)
    found: Frames = []
    for chunk in chunks:
        for frames in blocks.feed(chunk):
            found += frames_of(frames)
    return found, blocks


def cut(data: bytes, *at: int) -> list[bytes]:
    return [data[start:end] for start, end in pairwise([0, *at, len(data)])]


# ---- the layout ----


def test_a_compressed_object_is_a_plain_zstd_file() -> None:
    plain = b"".join(encode_frame(offset, payload) for offset, payload in EXPECTED)
    reader = zstandard.ZstdDecompressor().stream_reader(OBJECT, read_across_frames=True)
    assert reader.read() == plain


def test_data_that_does_not_compress_stays_within_the_limit() -> None:
    payload = random.Random(1).randbytes(BLOCK_BYTES - 16)
    data = compress_block(raw_block(0, [payload]), 3)
    header = decode_header(data)
    assert header.raw_bytes == BLOCK_BYTES < header.stored_bytes
    assert header.stored_bytes <= stored_bytes_max(BLOCK_BYTES)
    assert decompress(header, data[BLOCK_HEADER_BYTES:])[16:] == payload


# ---- cutting frames into blocks ----


def scanned(sizes: list[int], first: int = FIRST) -> bytes:
    return b"".join(encode_frame(first + at, bytes(size)) for at, size in enumerate(sizes))


def blocks_from(data: bytes, cuts: list[int]) -> list[RawBlock]:
    """Passes the frames in pieces that end at the frames with these numbers."""
    cutter = BlockCutter()
    found: list[RawBlock] = []
    whole = scan(data)
    for start, end in pairwise(sorted({0, *cuts, len(whole)})):
        found += cutter.add(whole.part(start, end))
    rest = cutter.rest()
    return found if rest is None else [*found, rest]


@given(
    st.lists(st.sampled_from([10, 1000, 300_000, BLOCK_BYTES - 16, BLOCK_BYTES]), max_size=12),
    st.lists(st.integers(0, 12)),
)
def test_blocks_hold_whole_frames_up_to_the_limit_wherever_pieces_end(
    sizes: list[int], cuts: list[int]
) -> None:
    data = scanned(sizes)
    found = blocks_from(data, [each for each in cuts if each <= len(sizes)])
    assert b"".join(bytes(each.frames) for each in found) == data
    assert found == blocks_from(data, [])
    at = FIRST
    for number, each in enumerate(found):
        assert (each.first_offset, len(scan(each.frames))) == (at, each.messages)
        assert len(each.frames) <= BLOCK_BYTES or each.messages == 1
        at += each.messages
        if number + 1 < len(found):  # the next frame did not fit
            following = 16 + sizes[at - FIRST]
            assert len(each.frames) + following > BLOCK_BYTES


# ---- every cut ----


def test_frames_come_out_at_every_pair_of_cuts() -> None:
    for first in range(len(OBJECT) + 1):
        for second in range(first, len(OBJECT) + 1, 29):
            found, blocks = assembled(cut(OBJECT, first, second))
            assert found == EXPECTED
            assert (blocks.position, blocks.offset, blocks.pending) == (
                len(OBJECT), STARTS[-1], 0,
            )  # fmt: skip
            blocks.require_end(STARTS[-1])
            assert blocks.corruption is None


def test_blocks_without_wanted_messages_are_not_decompressed() -> None:
    damaged = bytearray(OBJECT)
    damaged[BOUNDS[1] - 1] ^= 0xFF
    found, blocks = assembled([bytes(damaged)], wanted=STARTS[1])
    assert found == EXPECTED[len(PAYLOADS[0]) :]
    assert blocks.corruption is None


def test_an_object_that_ends_early_is_damaged() -> None:
    for end in range(len(OBJECT)):
        found, blocks = assembled([OBJECT[:end]], size=len(OBJECT))
        blocks.require_end(STARTS[-1])
        assert blocks.corruption is not None
        whole = sum(bound <= end for bound in BOUNDS[1:])
        assert blocks.corruption.position == BOUNDS[whole]
        assert blocks.corruption.offset == STARTS[whole]
        assert found == EXPECTED[: STARTS[whole] - FIRST]


def test_every_damaged_byte_is_found_in_its_block_or_harmless() -> None:
    for at in range(len(OBJECT)):
        damaged = bytearray(OBJECT)
        damaged[at] ^= 0x55
        found, blocks = assembled([bytes(damaged)])
        blocks.require_end(STARTS[-1])
        number = sum(bound <= at for bound in BOUNDS) - 1
        if at - BOUNDS[number] < BLOCK_HEADER_BYTES:
            assert blocks.corruption is not None
        if blocks.corruption is None:
            assert found == EXPECTED, "a bit that zstd does not use"
        else:
            assert blocks.corruption.position == BOUNDS[number]
            assert found == EXPECTED[: len(found)]
            assert STARTS[number] <= blocks.corruption.offset < STARTS[number + 1]


# ---- hostile blocks ----


def forged(header: BlockHeader, data: bytes) -> bytes:
    return encode_header(header) + data


def test_a_header_with_another_checksum_is_refused() -> None:
    data = bytearray(BLOCKS[0][:BLOCK_HEADER_BYTES])
    data[8] ^= 1
    with pytest.raises(BlockError, match="damaged block header"):
        decode_header(data)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (BlockHeader(0, 0, 100, 10), "impossible offsets"),
        (BlockHeader(OFFSET_MAX, 2, 100, 10), "impossible offsets"),
        (BlockHeader(0, 2, BLOCK_BYTES + 1, 10), "impossible block length"),
        (BlockHeader(0, 1, FRAME_BYTES_MAX + 1, 10), "impossible block length"),
        (BlockHeader(0, 2**32 - 1, BLOCK_BYTES, 10), "impossible block length"),
        (BlockHeader(0, 2, 2 * FRAME_BYTES_MIN - 1, 10), "impossible block length"),
        (BlockHeader(0, 1, 100, 0), "impossible stored block length"),
        (BlockHeader(0, 1, 100, stored_bytes_max(100) + 1), "impossible stored block length"),
    ],
)
def test_impossible_lengths_are_refused_before_anything_is_allocated(
    header: BlockHeader, reason: str
) -> None:
    blocks = BlockAssembler(header.first_offset, 0, 2**40)
    with pytest.raises(BlockError, match=reason):
        decode_header(encode_header(header))
    assert list(blocks.feed(encode_header(header))) == []
    assert blocks.corruption is not None
    assert blocks.pending == 0


def test_a_decompression_bomb_is_refused_with_little_memory() -> None:
    raw = 512 * MIB
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=raw)
    bomb = b"".join(compressor.compress(bytes(4 * MIB)) for _ in range(raw // (4 * MIB)))
    bomb += compressor.flush()
    claimed = BlockHeader(FIRST, 1, 40 * MIB, len(bomb))
    data = forged(claimed, bomb)
    blocks = BlockAssembler(FIRST, 0, len(data))
    tracemalloc.start()
    try:
        assert list(blocks.feed(data)) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert blocks.corruption is not None
    assert "another size" in blocks.corruption.reason
    assert peak < MIB


def frame_of_unknown_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"no zstd frame at all, but of the right length", "", id="junk"),
        pytest.param(frame_of_unknown_size(scanned([30])), "another size", id="no size"),
        pytest.param(zstandard.compress(scanned([31])), "another size", id="longer"),
        pytest.param(zstandard.compress(scanned([29])), "another size", id="shorter"),
        pytest.param(zstandard.compress(scanned([30])) + b"!", "", id="junk after it"),
        pytest.param(zstandard.compress(scanned([30]))[:-1], "", id="truncated"),
        pytest.param(2 * zstandard.compress(scanned([30])), "", id="two frames"),
        pytest.param(zstandard.compress(bytes(46)), "impossible frame length", id="zeros"),
        pytest.param(zstandard.compress(scanned([30], FIRST + 1)), "offset", id="other offset"),
        pytest.param(zstandard.compress(scanned([60])[:46]), "do not fill", id="torn"),
    ],
)
def test_data_that_is_not_what_its_header_says_is_damage(data: bytes, reason: str) -> None:
    header = BlockHeader(FIRST, 1, 46, len(data))
    blocks = BlockAssembler(FIRST, 0, 1000)
    assert [frames_of(each) for each in blocks.feed(forged(header, data))] == []
    assert blocks.corruption is not None
    assert (blocks.corruption.position, blocks.corruption.offset) == (0, FIRST)
    assert reason in blocks.corruption.reason


def test_frames_before_a_damaged_one_in_a_block_are_read() -> None:
    frames = bytearray(scanned([10, 10, 10]))
    frames[-1] ^= 1
    data = compress_block(RawBlock(FIRST, 3, bytes(frames)), 3)
    blocks = BlockAssembler(FIRST, 100, 100 + len(data))
    [found] = blocks.feed(data)
    assert list(found.offsets) == [FIRST, FIRST + 1]
    assert blocks.corruption is not None
    assert (blocks.corruption.position, blocks.corruption.offset) == (100, FIRST + 2)


def test_a_block_with_more_frames_than_its_header_says_is_damage_after_those() -> None:
    stored = zstandard.compress(scanned([10, 10, 10]))
    header = BlockHeader(FIRST, 2, 78, len(stored))
    blocks = BlockAssembler(FIRST, 0, 1000)
    [found] = blocks.feed(forged(header, stored))
    assert list(found.offsets) == [FIRST, FIRST + 1]
    assert blocks.corruption is not None
    assert (blocks.corruption.position, blocks.corruption.offset) == (0, FIRST + 2)


def test_a_block_that_is_too_large_for_the_reader_is_not_decompressed() -> None:
    blocks = BlockAssembler(FIRST, 0, len(OBJECT))
    blocks.bytes_max = 100
    with pytest.raises(FrameTooLarge) as caught:
        list(blocks.feed(OBJECT))
    header = decode_header(OBJECT)
    assert caught.value.size == header.raw_bytes + header.stored_bytes


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_give_frames_or_damage(data: bytes, at: int) -> None:
    mixed = OBJECT[:at] + data + OBJECT[at:]
    found, blocks = assembled([mixed], size=len(mixed))
    blocks.require_end(STARTS[-1])
    assert found == EXPECTED[: len(found)]
    assert blocks.corruption is not None or found == EXPECTED


@given(st.binary(min_size=24, max_size=24), st.binary(max_size=100))
def test_any_header_with_a_right_checksum_gives_damage_or_frames(
    fields: bytes, data: bytes
) -> None:
    head = struct.pack("<II", 0x184D2A5B, 24) + fields[:20]
    blocks = BlockAssembler(FIRST, 0, 2**40)
    for frames in blocks.feed(head + struct.pack("<I", crc32(head)) + data):
        assert len(frames)
    assert blocks.pending <= FRAME_BYTES_MAX


# ---- finding blocks after damage ----


def test_the_next_block_is_found_by_the_length_of_a_damaged_one() -> None:
    seen: list[tuple[int, int]] = []

    def reading(start: int, end: int) -> bytes:
        seen.append((start, end))
        return OBJECT[start:end]

    assert next_block(DESCRIPTOR, FIRST, 0, reading, 4096) == (STARTS[1], BOUNDS[1])
    assert next_block(DESCRIPTOR, FIRST + 1, 0, reading, 4096) == (STARTS[1], BOUNDS[1])
    assert {end - start for start, end in seen} == {BLOCK_HEADER_BYTES}


@pytest.mark.parametrize("window", [1, 40, 64, 4096])
def test_the_next_block_is_found_after_a_damaged_header(window: int) -> None:
    damaged = bytearray(OBJECT)
    damaged[BOUNDS[1] + 9] ^= 1
    found = next_block(
        DESCRIPTOR, STARTS[1], BOUNDS[1], lambda start, end: damaged[start:end], window
    )
    assert found == (STARTS[2], BOUNDS[2])
    last = BOUNDS[2]
    assert next_block(DESCRIPTOR, STARTS[2], last, lambda a, b: OBJECT[a:b], window) is None


def test_the_blocks_of_a_damaged_object_are_those_with_a_valid_header() -> None:
    damaged = bytearray(OBJECT)
    damaged[BOUNDS[1] + 3] ^= 1
    found = list(blocks_of(DESCRIPTOR, lambda start, end: damaged[start:end], 64))
    assert [(at, header.first_offset) for at, header in found] == [
        (BOUNDS[0], STARTS[0]),
        (BOUNDS[2], STARTS[2]),
    ]
    cut_off = replace(DESCRIPTOR, size=BOUNDS[1] + 5)
    assert [at for at, _ in blocks_of(cut_off, lambda a, b: OBJECT[a:b], 64)] == [0]
