"""Index objects: a real one, round trips, and everything that is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.format.pulsar.blocks import IndexedBlock
from forebay.format.pulsar.index import LedgerIndex, decode_index, encode_index
from forebay.format.pulsar.ledger_metadata import DigestType, Ensemble, LedgerMetadata, LedgerState
from support.ledgers import REAL_INDEX

METADATA = LedgerMetadata(300, 29, custom=(("k", b"\xff\0"), ("k2", b"")))
BLOCKS = (IndexedBlock(0, 1, 0), IndexedBlock(10, 2, 1024), IndexedBlock(25, 3, 2048))
INDEX = LedgerIndex(2500, METADATA, BLOCKS)


def test_a_real_index_is_read_and_written_again_byte_for_byte() -> None:
    index = decode_index(REAL_INDEX)
    assert encode_index(index) == REAL_INDEX
    assert (index.data_bytes, index.header_bytes, index.last_entry_id) == (205, 128, 0)
    assert index.blocks == (IndexedBlock(0, 1, 0),)
    found = index.metadata
    assert found == LedgerMetadata(
        65,
        0,
        LedgerState.CLOSED,
        1,
        1,
        1,
        DigestType.CRC32C,
        found.created_ms,
        (Ensemble(("127.0.0.1:3181",), 0),),
        found.custom,
    )
    assert found.managed_ledger == "public/default/persistent/read-test"
    assert dict(found.custom)["application"] == b"pulsar"


def test_a_block_is_found_by_its_entries_and_by_its_bytes() -> None:
    assert [INDEX.block_at(entry) for entry in (0, 9, 10, 24, 25, 29)] == [0, 0, 1, 1, 2, 2]
    at = (0, 1023, 1024, 2047, 2048, 2499)
    assert [INDEX.block_of_position(each) for each in at] == [0, 0, 1, 1, 2, 2]
    assert [INDEX.block_end(number) for number in range(3)] == [1024, 2048, 2500]
    assert [INDEX.next_entry_id(number) for number in range(3)] == [10, 25, 30]


@pytest.mark.parametrize("entry", [-1, 30, 2**63])
def test_an_entry_that_the_ledger_does_not_have_is_refused(entry: int) -> None:
    with pytest.raises(LedgerError, match=r"not in 0\.\.29"):
        INDEX.block_at(entry)


positive = st.integers(0, 2**40)
metadatas = st.builds(
    LedgerMetadata,
    positive,
    st.none() | st.integers(-1, 2**40),
    st.sampled_from([None, *LedgerState]),
    st.integers(-5, 5),
    st.integers(0, 5),
    st.none() | st.integers(0, 5),
    st.sampled_from([None, *DigestType]),
    st.none() | st.integers(-1, 2**50),
    st.lists(
        st.builds(Ensemble, st.lists(st.text(max_size=9), max_size=3).map(tuple), positive),
        max_size=3,
    ).map(tuple),
    st.lists(st.tuples(st.text(max_size=9), st.binary(max_size=9)), max_size=4).map(tuple),
)


@st.composite
def indexes(draw: st.DrawFn) -> LedgerIndex:
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(128, 2000)), max_size=5))
    blocks = [IndexedBlock(0, 1, 0)]
    for part, (entries, size) in enumerate(steps, 2):
        last = blocks[-1]
        blocks.append(IndexedBlock(last.first_entry_id + entries, part, last.position + size))
    size = max(blocks[-1].position + draw(st.integers(0, 500)), 129)
    return LedgerIndex(size, draw(metadatas), tuple(blocks))


@given(indexes())
def test_what_is_encoded_is_decoded_again(index: LedgerIndex) -> None:
    assert decode_index(encode_index(index)) == index


def test_every_cut_is_refused() -> None:
    whole = encode_index(INDEX)
    for size in range(len(whole)):
        with pytest.raises(LedgerError):
            decode_index(whole[:size])
    with pytest.raises(LedgerError, match="cut off or damaged"):
        decode_index(whole + b"\0")


def test_a_flipped_bit_gives_an_index_that_does_not_contradict_itself_or_an_error() -> None:
    whole = encode_index(INDEX)
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            try:
                index = decode_index(bytes(flipped))
            except LedgerError:
                continue
            assert index.blocks[0] == IndexedBlock(0, index.blocks[0].part, 0)
            assert list(index.blocks) == sorted(index.blocks)
            assert all(block.position <= index.data_bytes for block in index.blocks)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        (replace(INDEX, blocks=()), "0 blocks"),
        (replace(INDEX, blocks=(IndexedBlock(1, 1, 0),)), "begins with entry 1"),
        (replace(INDEX, blocks=(*BLOCKS, IndexedBlock(5, 4, 2300))), "out of order"),
        (replace(INDEX, blocks=(*BLOCKS, IndexedBlock(27, 4, 2100))), "cannot begin"),
        (replace(INDEX, data_bytes=2047), "cannot begin"),
        (replace(INDEX, header_bytes=64), "64 bytes"),
        (replace(INDEX, data_bytes=128), "128 bytes"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(changed: LedgerIndex, wrong: str) -> None:
    with pytest.raises(LedgerError, match=wrong):
        encode_index(changed)


@pytest.mark.parametrize(("magic", "wrong"), [(0x3D1FB0BC, "version 2"), (1, "not an index")])
def test_another_kind_of_object_is_refused(magic: int, wrong: str) -> None:
    with pytest.raises(LedgerError, match=wrong):
        decode_index(struct.pack(">I", magic) + REAL_INDEX[4:])


def test_of_two_blocks_with_one_entry_the_first_counts() -> None:
    doubled = replace(INDEX, blocks=(*BLOCKS, BLOCKS[-1]._replace(part=9)))
    assert decode_index(encode_index(doubled)).blocks == BLOCKS


def test_a_last_block_without_bytes_is_a_ledger_that_its_writer_cut_off() -> None:
    """Pulsar writes such an index if an entry does not fit into a block."""
    blocks = (*BLOCKS, IndexedBlock(27, 4, 2500))
    index = decode_index(encode_index(replace(INDEX, blocks=blocks)))
    assert index.block_at(26) == 2
    assert index.block_end(2) == 2500
