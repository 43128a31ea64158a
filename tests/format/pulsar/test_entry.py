"""Entries: a real one, every field of the metadata, checksums, and damage."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.format.pulsar.codec import crc32c
from forebay.format.pulsar.entry import (
    BrokerEntryMetadata,
    Compression,
    EncryptionKey,
    MessageMetadata,
    decode_entry,
    decode_message_metadata,
    encode_entry,
    encode_message_metadata,
)
from support.ledgers import REAL_DATA

REAL = REAL_DATA[140:]


def test_a_real_entry_is_decoded() -> None:
    found = decode_entry(REAL)
    assert found.checksum == 0x2F8EFFBC
    assert found.metadata == MessageMetadata(
        "standalone-9-0", 0, 1632298359277, schema_version=b"", batch_messages=1
    )
    assert bytes(found.payload).endswith(b"hello-reader-1")
    assert found.broker is None


def test_the_checksum_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


EVERY_FIELD = MessageMetadata(
    "p",
    2**64 - 1,
    3,
    (("a", "b"), ("a", "c"), ("", "")),
    "cluster",
    "key",
    ("c1", "c2"),
    Compression.ZSTD,
    9,
    0,
    11,
    (EncryptionKey("k", b"\xff", (("x", "y"),)), EncryptionKey("k2", b"")),
    "algorithm",
    b"\0",
    b"\0\0\0\0\0\0\0\x01",
    partition_key_b64=True,
    ordering_key=b"order",
    deliver_at_time=-5,
    marker_type=21,
    txn_least_bits=2**64 - 1,
    txn_most_bits=0,
    highest_sequence_id=7,
    null_value=True,
    uuid="uuid",
    chunks=3,
    total_chunk_bytes=100,
    chunk_id=0,
    null_partition_key=True,
    compacted_batch_indexes=(0, 5, -1),
    schema_id=b"schema",
    entry_hash_min=-2,
    entry_hash_max=2,
    extension=b"extension",
)


def test_every_field_of_the_metadata_is_kept() -> None:
    encoded = encode_message_metadata(EVERY_FIELD)
    assert decode_message_metadata(encoded, 0, len(encoded)) == EVERY_FIELD


texts = st.text(max_size=8)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
pairs = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)
some_metadata = st.builds(
    MessageMetadata,
    texts,
    u64,
    u64,
    pairs,
    partition_key=st.none() | texts,
    batch_messages=st.none() | i32,
    event_time=u64,
    deliver_at_time=st.none() | st.integers(-(2**63), 2**63 - 1),
    chunk_id=st.none() | i32,
    extension=st.none() | st.binary(max_size=9),
)
brokers = st.none() | st.builds(BrokerEntryMetadata, st.none() | u64, st.none() | u64)


@given(some_metadata, st.binary(max_size=50), brokers, st.booleans())
def test_what_is_encoded_is_decoded_again(
    metadata: MessageMetadata, payload: bytes, broker: BrokerEntryMetadata | None, checksum: bool
) -> None:
    found = decode_entry(encode_entry(metadata, payload, broker, checksum=checksum))
    assert (found.metadata, bytes(found.payload), found.broker) == (metadata, payload, broker)
    assert (found.checksum is not None) == checksum


@pytest.mark.parametrize("broker", [None, BrokerEntryMetadata(1, 2)])
def test_every_flipped_bit_after_the_checksum_is_noticed(
    broker: BrokerEntryMetadata | None,
) -> None:
    """Also after broker entry metadata, where Pulsar's own clients do not look."""
    whole = encode_entry(MessageMetadata("p", 1, 2), b"payload", broker)
    start = whole.index(b"\x0e\x01") + 6
    for at in range(start, len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        with pytest.raises(LedgerError):
            decode_entry(bytes(flipped))


def test_every_cut_of_an_entry_without_a_checksum_gives_an_error_or_less_payload() -> None:
    metadata = MessageMetadata("p", 1, 2)
    whole = encode_entry(metadata, b"payload", BrokerEntryMetadata(1, 2), checksum=False)
    for size in range(len(whole)):
        try:
            found = decode_entry(whole[:size])
        except LedgerError:
            continue
        assert found.metadata == metadata
        assert b"payload".startswith(bytes(found.payload))


def test_a_wrong_checksum_may_be_left_unchecked() -> None:
    broken = REAL[:-1] + b"?"
    with pytest.raises(LedgerError, match="has the checksum"):
        decode_entry(broken)
    assert bytes(decode_entry(broken, verify=False).payload).endswith(b"hello-reader-?")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_an_entry_or_an_error(data: bytes) -> None:
    with suppress(LedgerError):
        decode_entry(data)


@given(st.binary(max_size=200))
def test_arbitrary_metadata_give_values_or_an_error(data: bytes) -> None:
    required = encode_message_metadata(MessageMetadata("p", 1, 2))
    raw = required + data
    with suppress(LedgerError):
        decode_message_metadata(raw, 0, len(raw))


def test_metadata_without_a_required_field_is_refused() -> None:
    encoded = encode_message_metadata(MessageMetadata("p", 1, 2))
    with pytest.raises(LedgerError, match="producer_name"):
        decode_message_metadata(encoded, 3, len(encoded))


def test_a_batch_of_one_is_a_batch() -> None:
    single = MessageMetadata("p", 1, 2)
    encoded = encode_message_metadata(replace(single, batch_messages=1))
    assert encoded != encode_message_metadata(single)
    assert decode_message_metadata(encoded, 0, len(encoded)).batch_messages == 1
