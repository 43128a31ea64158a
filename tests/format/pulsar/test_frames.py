"""Frames become entries that Pulsar's clients can read, and the same frames again."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MessageTooLarge
from forebay.format.frame import FrameTooLarge, Scan, encode_frame, scan
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.pulsar.blocks import EntryScanner
from forebay.format.pulsar.entry import MessageMetadata, ParsedEntry, decode_entry, encode_entry
from forebay.format.pulsar.frames import EntryAssembler, FramePacker, next_entry
from support.ledgers import packed

START: Final = 1000
texts = st.text(max_size=12)
messages = st.builds(
    StreamMessage,
    st.binary(max_size=400),
    st.integers(0, 2**64 - 1),
    st.builds(MessageId, st.integers(0, 2**64 - 1), st.just("/default/t"), texts),
    st.integers(0, 2**64 - 1),
    texts,
    st.none() | texts,
    st.dictionaries(texts, texts, max_size=3),
    st.none() | st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | texts,
)
payloads = messages | st.binary(min_size=10, max_size=300)


def frames_of(parts: list[StreamMessage | bytes], *, astray: bool = False) -> bytes:
    """Consecutive frames of messages, or of any bytes; `astray`: messages with another offset."""
    return b"".join(
        encode_frame(
            offset, part if isinstance(part, bytes) else encode_message(part, offset + astray)
        )
        for offset, part in enumerate(parts, START)
    )


def ledger_of(frames: bytes, block_bytes: int = 4096) -> tuple[bytes, FramePacker, list[int]]:
    """The data object of a ledger, and the positions of its entries."""
    packer, out, positions = FramePacker(block_bytes), bytearray(), list[int]()
    found = scan(frames, expected=START, consecutive=True)
    for at in range(0, len(found), 3):
        for block in packer.add(found.part(at, min(at + 3, len(found)))):
            out += block
        positions += packer.positions
    out += packer.finish()
    return bytes(out), packer, positions


def entries_of(data: bytes) -> list[ParsedEntry]:
    return [
        decode_entry(entry.data)
        for entries in EntryScanner(0, 0, len(data)).feed(data)
        for entry in entries
    ]


def assembled(
    data: bytes, step: int = 10**9, *, offset: int = START, position: int = 0
) -> tuple[bytes, EntryAssembler]:
    """The frames of a ledger from a position on, and who made them."""
    assembler = EntryAssembler(offset, position, len(data), START, 4096)
    at, out = assembler.position, bytearray()
    for cut in range(at, len(data), step):
        for frames in assembler.feed(data[cut : cut + step]):
            out += frames.raw
            again = scan(frames.buffer, expected=frames.offsets[0], consecutive=True)
            assert list(again) == list(frames)
            assert len(assembler.positions) == len(frames)
    return bytes(out), assembler


@given(st.lists(payloads, min_size=1, max_size=12), st.integers(1, 5000), st.booleans())
def test_frames_are_the_same_after_they_were_entries(
    parts: list[StreamMessage | bytes], step: int, astray: bool
) -> None:
    frames = frames_of(parts, astray=astray)
    data, packer, _ = ledger_of(frames)
    assert len(entries_of(data)) == len(parts)
    assert packer.packer.position == len(data)
    found, assembler = assembled(data, step)
    assembler.require_end(START + len(parts))
    assert assembler.corruption is None
    assert found == frames


EVERYTHING: Final = StreamMessage(
    b"payload",
    7,
    MessageId(9, "/default/t", "broker:6650"),
    1_700_000_000_000,
    "producer",
    "subscription",
    {"k": "v", "ü": ""},
    5,
    6,
    "key",
)


def test_an_entry_is_a_message_of_pulsar() -> None:
    data, _, _ = ledger_of(frames_of([EVERYTHING]))
    (entry,) = entries_of(data)
    found = entry.metadata
    assert found.extension is not None
    assert found == MessageMetadata(
        "producer",
        7,
        1_700_000_000_000,
        (("k", "v"), ("ü", "")),
        partition_key="key",
        extension=found.extension,
    )
    assert bytes(entry.payload) == b"payload"
    assert entry.checksum is not None


def test_what_forebay_writes_itself_costs_few_bytes() -> None:
    message = StreamMessage(bytes(1024), 1, MessageId(3, "/default/orders"), 1_700_000_000_000, "p")
    frames = frames_of([message])
    data, packer, _ = ledger_of(frames)
    assert packer.packer.entry_bytes - 1024 < 60
    assert len(data) - 128 < len(frames)


def test_bytes_that_are_no_message_are_the_payload() -> None:
    data, _, _ = ledger_of(frames_of([b"\xff" * 40]))
    (entry,) = entries_of(data)
    assert bytes(entry.payload) == b"\xff" * 40
    assert entry.metadata == MessageMetadata("", 0, 0, extension=b"\x02\x00")


def test_texts_that_are_not_utf_8_are_kept_and_not_shown() -> None:
    raw = encode_message(EVERYTHING, START).replace("ü".encode(), b"\xff\xfe")
    frames = encode_frame(START, raw)
    data, _, _ = ledger_of(frames)
    (entry,) = entries_of(data)
    assert (entry.metadata.producer_name, entry.metadata.properties) == ("", ())
    assert bytes(entry.payload) == b"payload"
    assert assembled(data)[0] == frames


MANY: Final = frames_of(
    [StreamMessage(bytes([n]) * (n * 37 % 900), n, publish_time=n) for n in range(60)]
)


def test_a_ledger_is_read_from_the_position_of_any_entry() -> None:
    data, packer, positions = ledger_of(MANY)
    found = scan(MANY)
    assert len(packer.packer.blocks) > 3
    for row, position in enumerate(positions):
        whole, assembler = assembled(data, 777, offset=START + row, position=position)
        assembler.require_end(START + 60)
        assert assembler.corruption is None
        assert whole == found.part(row, 60).raw


def test_a_ledger_is_read_from_any_block() -> None:
    data, packer, _ = ledger_of(MANY)
    for block in packer.packer.blocks:
        first = START + block.first_entry_id
        whole, _ = assembled(data, 500, offset=first, position=block.position)
        assert whole == scan(MANY).part(block.first_entry_id, 60).raw


def test_a_range_may_end_at_any_entry() -> None:
    data, _, positions = ledger_of(MANY)
    for row in range(1, 60):
        assembler = EntryAssembler(START, 0, len(data), START, 4096)
        got = sum(len(frames) for frames in assembler.feed(data[: positions[row]]))
        assembler.require_end(START + row)
        assert (assembler.corruption, got) == (None, row)


def test_entries_before_the_wanted_one_are_not_made_into_frames() -> None:
    data, _, _ = ledger_of(MANY)
    assembler = EntryAssembler(START, 0, len(data), START, 4096, wanted=START + 30)
    found = [frame.offset for frames in assembler.feed(data) for frame in frames]
    assert found == list(range(START + 30, START + 60))


def test_the_positions_are_those_of_the_entries() -> None:
    data, _, positions = ledger_of(MANY)
    assembler = EntryAssembler(START, 0, len(data), START, 4096)
    found: list[int] = []
    for at in range(0, len(data), 100):
        for _ in assembler.feed(data[at : at + 100]):
            found += assembler.positions
    assert found == positions


# ---- damage ----


def test_every_flipped_bit_is_noticed_or_harmless() -> None:
    frames = frames_of([StreamMessage(bytes([n]) * 60, n) for n in range(12)])
    data, _, _ = ledger_of(frames, 1024)
    assert len(data) > 1024
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        assembler = EntryAssembler(START, 0, len(data), START, 1024)
        found = b"".join(bytes(part.raw) for part in assembler.feed(bytes(flipped)))
        assembler.require_end(START + 12)
        assert frames.startswith(found)
        assert assembler.corruption is not None or found == frames


def test_every_cut_is_noticed() -> None:
    frames = frames_of([StreamMessage(bytes([n]) * 60, n) for n in range(12)])
    data, _, _ = ledger_of(frames, 1024)
    for size in range(len(data)):
        assembler = EntryAssembler(START, 0, len(data), START, 1024)
        found = b"".join(bytes(part.raw) for part in assembler.feed(data[:size]))
        assembler.require_end(START + 12)
        assert assembler.corruption is not None
        assert frames.startswith(found)


def test_damage_says_where_and_at_which_offset_it_is() -> None:
    data, _, positions = ledger_of(MANY)
    damaged = bytearray(data)
    damaged[positions[20] + 40] ^= 1
    found, assembler = assembled(bytes(damaged))
    assert found == scan(MANY).part(0, 20).raw
    assert assembler.corruption is not None
    reason, position, offset = assembler.corruption
    assert reason == "the checksum of an entry is wrong"
    assert (position, offset) == (positions[20], START + 20)
    assert (assembler.position, assembler.offset) == (position, offset)


def test_an_entry_of_another_writer_is_no_frame() -> None:
    data, _ = packed([encode_entry(MessageMetadata("p", 1, 2), b"payload")], 4096)
    assembler = EntryAssembler(START, 0, len(data), START, 4096)
    assert not list(assembler.feed(data))
    assert assembler.corruption is not None
    assert assembler.corruption.reason == "an entry was not made of a frame"


def test_reading_continues_after_a_damaged_entry_or_block() -> None:
    data, packer, positions = ledger_of(MANY)
    blocks = packer.packer.blocks

    def after(damaged: bytes, row: int, position: int) -> tuple[int, int] | None:
        return next_entry(
            START + row,
            position,
            len(data),
            START,
            4096,
            START + 59,
            lambda start, end: damaged[start:end],
        )

    first = blocks[1].first_entry_id
    assert after(data, 1, positions[1]) == (START + 2, positions[2])
    last_of_block = first - 1
    beyond = START + first, blocks[1].position
    assert after(data, last_of_block, positions[last_of_block]) == beyond
    torn = bytearray(data)
    torn[positions[1] : positions[1] + 12] = bytes(12)
    assert after(bytes(torn), 1, positions[1]) == beyond
    torn[blocks[1].position] ^= 1
    second = START + blocks[2].first_entry_id, blocks[2].position
    assert after(bytes(torn), 1, positions[1]) == second
    assert after(data, 59, positions[59]) is None


def test_a_message_that_fits_into_no_block_is_refused() -> None:
    packer = FramePacker(1024)
    frames = scan(frames_of([StreamMessage(bytes(10)), StreamMessage(bytes(1000))]))
    with pytest.raises(MessageTooLarge, match="entry 1 has"):
        list(packer.add(frames))


def test_an_entry_over_the_budget_of_a_reader_is_not_collected() -> None:
    data, _, _ = ledger_of(frames_of([StreamMessage(bytes(900_000))]), 1 << 20)
    assembler = EntryAssembler(START, 0, len(data), START, 1 << 20)
    assembler.bytes_max = 65536
    with pytest.raises(FrameTooLarge):
        list(assembler.feed(data[:1000]))


def test_a_scan_of_frames_has_at_most_a_megabyte() -> None:
    frames = frames_of([StreamMessage(bytes(100_000)) for _ in range(40)])
    data, _, _ = ledger_of(frames, 8 << 20)
    assembler = EntryAssembler(START, 0, len(data), START, 8 << 20)
    found: list[Scan] = list(assembler.feed(data))
    assert max(len(each.raw) for each in found) <= 1 << 20
    assert len(found) > 3
