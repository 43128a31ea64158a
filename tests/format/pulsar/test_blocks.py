"""Data objects: the vectors of Pulsar's writer, a real broker's object, every cut, every damage."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError, MessageTooLarge, UsageError
from forebay.format.pulsar import pure
from forebay.format.pulsar.blocks import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    EntryPacker,
    EntryScanner,
    LedgerDamage,
    block_size,
    decode_block_header,
    encode_block_header,
    padding,
)
from forebay.format.pulsar.entry import MessageMetadata, decode_entry, encode_entry
from forebay.format.pulsar.index import LedgerIndex, encode_index
from forebay.format.pulsar.ledger_metadata import LedgerMetadata
from support.ledgers import REAL_DATA, REAL_INDEX, packed

# ---- vectors ----


def test_a_block_header_has_the_bytes_of_the_vector() -> None:
    encoded = encode_block_header(BlockHeader(1048576, 3333))
    digest = "7a4f6a5d1579fb82cf197fd02eb2da7cfa25903c98ee861b8f02fc9820c97873"
    assert sha256(encoded).hexdigest() == digest
    assert decode_block_header(encoded) == BlockHeader(1048576, 3333)


@pytest.mark.parametrize(
    ("block_bytes", "last", "entries", "digest"),
    [
        (3153, 160, 151, "13004c3717774460ed3b210003c06b6ca37ae2fb1265491cfd7a594b8fbefd80"),
        (2148, 120, 101, "4ef7f6f8dc83b20755264e24bec2d489f1930e5c24c62f5989300a27b64aba50"),
    ],
)
def test_the_first_block_has_the_bytes_of_the_vector(
    block_bytes: int, last: int, entries: int, digest: str
) -> None:
    data, packer = packed([b"\x0b" * 8] * (last + 1), block_bytes)
    assert sha256(data[:block_bytes]).hexdigest() == digest
    assert packer.blocks[1].first_entry_id == entries
    assert packer.blocks[1].position == block_bytes


def test_a_real_object_is_read_and_written_again_byte_for_byte() -> None:
    scanner = EntryScanner(0, 0, len(REAL_DATA))
    found = [bytes(entry.data) for entries in scanner.feed(REAL_DATA) for entry in entries]
    scanner.require_end(1)
    assert scanner.damage is None
    assert [len(entry) for entry in found] == [65]
    assert packed(found, 1 << 20)[0] == REAL_DATA


# ---- round trips ----

entries_strategy = st.lists(st.binary(max_size=300), min_size=1, max_size=30)


def scanned(data: bytes, cuts: list[int], *, entry_id: int = 0) -> tuple[list[bytes], EntryScanner]:
    """The entries of an object that is fed in pieces."""
    scanner = EntryScanner(entry_id, 0, len(data))
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    found: list[bytes] = []
    for start, end in pairwise(edges):
        for entries in scanner.feed(data[start:end]):
            view = memoryview(entries.buffer)
            for entry, position in zip(entries, entries.positions, strict=True):
                at = entries.base + position
                assert (
                    data[at : at + len(entry.data)]
                    == entry.data
                    == view[position:][: len(entry.data)]
                )
                assert entry.entry_id == len(found)
                found.append(bytes(entry.data))
    return found, scanner


@given(entries_strategy, st.integers(1024, 1200), st.lists(st.integers(0, 10**6), max_size=8))
def test_what_is_packed_is_scanned_again_however_it_is_cut(
    entries: list[bytes], block_bytes: int, cuts: list[int]
) -> None:
    data, packer = packed(entries, block_bytes)
    found, scanner = scanned(data, cuts)
    scanner.require_end(len(entries))
    assert scanner.damage is None
    assert found == entries
    assert packer.entry_bytes == sum(map(len, entries))


def test_an_object_may_be_fed_byte_by_byte() -> None:
    entries = [bytes([number]) * (number * 7 % 300) for number in range(40)]
    data, _ = packed(entries, 1031)
    found, scanner = scanned(data, list(range(len(data))))
    assert (found, scanner.damage) == (entries, None)


@given(entries_strategy, st.integers(1024, 1200))
def test_all_blocks_but_the_last_have_one_size_and_the_last_has_no_padding(
    entries: list[bytes], block_bytes: int
) -> None:
    data, packer = packed(entries, block_bytes)
    left, rest = len(entries), packer.entry_bytes
    for number, block in enumerate(packer.blocks):
        assert block.position == number * block_bytes
        header = decode_block_header(data[block.position :])
        assert header.first_entry_id == block.first_entry_id
        assert header.block_bytes == block_size(block_bytes, left, rest)
        stop = [each.first_entry_id for each in packer.blocks[number + 1 :]] + [len(entries)]
        left -= stop[0] - block.first_entry_id
        rest -= sum(map(len, entries[block.first_entry_id : stop[0]]))
    assert packer.position == len(data)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 5, 11, 12])
def test_padding_of_every_length_is_told_from_an_entry(left: int) -> None:
    first = b"x" * (1024 - BLOCK_HEADER_BYTES - 12 - left)
    data, _ = packed([first, b"next"], 1024)
    assert data[1024 - left : 1024] == padding(left) == (b"\xfe\xdc\xde\xad" * 3)[:left]
    assert scanned(data, list(range(len(data))))[0] == [first, b"next"]


@given(entries_strategy, st.data())
def test_a_scan_may_begin_at_any_entry(entries: list[bytes], data: st.DataObject) -> None:
    whole, packer = packed(entries, 1024)
    places = []
    for found in EntryScanner(0, 0, len(whole)).feed(whole):
        places += [found.base + position - 12 for position in found.positions]
    entry_id = data.draw(st.integers(0, len(entries) - 1))
    block = max(block.position for block in packer.blocks if block.position <= places[entry_id])
    end = min(block + 1024, len(whole))
    scanner = EntryScanner(entry_id, places[entry_id], len(whole), end)
    read = [bytes(e.data) for found in scanner.feed(whole[places[entry_id] :]) for e in found]
    scanner.require_end(len(entries))
    assert (read, scanner.damage) == (entries[entry_id:], None)


@given(entries_strategy, st.integers(1024, 1200), st.integers(1, 7))
def test_entries_may_be_added_one_by_one_or_many_at_once(
    entries: list[bytes], block_bytes: int, step: int
) -> None:
    packer, out = EntryPacker(block_bytes), bytearray()
    for at in range(0, len(entries), step):
        for block in packer.add_all(list(entries[at : at + step])):
            out += block
    out += packer.finish()
    assert (bytes(out), packer.blocks) == (
        packed(entries, block_bytes)[0],
        packed(entries, block_bytes)[1].blocks,
    )


# ---- limits ----


def test_an_entry_that_does_not_fit_into_an_empty_block_is_refused() -> None:
    packer = EntryPacker(1024)
    assert packer.fits(1024 - 128 - 12)
    with pytest.raises(MessageTooLarge, match="choose larger blocks"):
        packer.fits(1024 - 128 - 12 + 1)
    with pytest.raises(MessageTooLarge, match="entry 1 has 885 bytes"):
        list(packer.add_all([b"", bytes(1024 - 128 - 12 + 1)]))


def test_an_entry_is_not_added_to_a_block_that_is_full() -> None:
    packer = EntryPacker(1024)
    packer.add(bytes(800))
    with pytest.raises(UsageError, match="cut it first"):
        packer.add(bytes(100))


@pytest.mark.parametrize("size", [0, 1023, 2**31])
def test_a_block_has_a_size_that_pulsar_can_read(size: int) -> None:
    with pytest.raises(UsageError, match="a block cannot have"):
        EntryPacker(size)


def test_a_ledger_without_entries_is_refused() -> None:
    with pytest.raises(UsageError, match="without entries"):
        EntryPacker(1024).finish()


def test_empty_entries_are_entries() -> None:
    data, _ = packed([b"", b"", b""], 1024)
    assert len(data) == 128 + 36
    assert scanned(data, [])[0] == [b"", b"", b""]


# ---- damage ----


SMALL: Final = [bytes([65 + number]) * 150 for number in range(9)]


def outcome(data: bytes) -> tuple[list[bytes], LedgerDamage | None]:
    found, scanner = scanned(data, [])
    scanner.require_end(len(SMALL))
    return found, scanner.damage


def test_every_cut_of_an_object_is_noticed() -> None:
    whole, _ = packed(SMALL, 1024)
    for size in range(len(whole)):
        scanner = EntryScanner(0, 0, len(whole))
        found = [bytes(e.data) for entries in scanner.feed(whole[:size]) for e in entries]
        scanner.require_end(len(SMALL))
        assert scanner.damage is not None
        assert found == SMALL[: len(found)]


def test_every_flipped_bit_of_a_header_or_of_padding_is_noticed_or_harmless() -> None:
    """A length that grows into padding of the same phase is noticed by the entry's checksum."""
    wanted = [encode_entry(MessageMetadata("p", at, 1), bytes(150)) for at in range(9)]
    whole, _ = packed(wanted, 1024)
    inside = set()
    for entries in EntryScanner(0, 0, len(whole)).feed(whole):
        for position, length in zip(entries.positions, entries.lengths, strict=True):
            inside |= set(range(entries.base + position, entries.base + position + length))
    for at in set(range(len(whole))) - inside:
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            found, damage = outcome(bytes(flipped))
            assert found[:-1] == wanted[: max(len(found) - 1, 0)] or damage is None
            for entry in set(found) - set(wanted):
                with pytest.raises(LedgerError):
                    decode_entry(entry)
            assert damage is not None or len(found) == len(wanted)


def test_damage_says_where_it_is() -> None:
    whole = bytearray(packed(SMALL, 1024)[0])
    whole[128 + 162 + 11] ^= 1  # the id of the second entry
    _, damage = outcome(bytes(whole))
    assert damage == LedgerDamage("an entry has another id than the expected one", 128 + 162, 1)


def test_a_huge_length_needs_no_memory() -> None:
    scanner = EntryScanner(0, 0, 2**40)
    header = encode_block_header(BlockHeader(2**31 - 1, 0))
    assert not list(scanner.feed(header + pure.ENTRY_HEADER.pack(2**31 - 200, 0)))
    assert scanner.damage is not None
    assert scanner.pending == 0


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (bytes(128), "no block header"),
        (bytes(127), "inside a block header"),
        (bytes.fromhex("26a66d32") + bytes(124), "streaming offload"),
        (bytes.fromhex("fbdbabcb 0000000000000081") + bytes(116), "129 bytes"),
        (encode_block_header(BlockHeader(127, 0)), "a block of 127 bytes"),
        (encode_block_header(BlockHeader(2**31, 0)), "a block of"),
        (encode_block_header(BlockHeader(200, 2**63)), "impossible first entry"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(LedgerError, match=wrong):
        decode_block_header(data)


def test_the_blocks_of_a_packer_make_an_index() -> None:
    data, packer = packed(SMALL, 1024)
    metadata = LedgerMetadata(packer.entry_bytes, len(SMALL) - 1)
    assert encode_index(LedgerIndex(len(data), metadata, tuple(packer.blocks)))
    assert len(REAL_INDEX) == 207
