"""The bytes in `docs/formats/` are what the code reads and writes, and so are Danube's vectors.

The vectors come from the real bincode, serde and crc32fast crates. What has no vector is put
together here by hand, field by field, and never with the encoder that is under test.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Final
from zlib import crc32

import pytest

from forebay.catalog.records import (
    Deletion,
    Life,
    Owner,
    State,
    TopicRecord,
    decode_record,
    encode_record,
)
from forebay.catalog.swap import Kept, decode_kept, encode_kept
from forebay.format.blocks import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    decode_header,
    decompress,
    encode_header,
)
from forebay.format.checkpoint import (
    DanubeRotatedFile,
    DanubeUploaderCheckpoint,
    DanubeWalCheckpoint,
    Published,
    SegmentEntry,
    UploaderCheckpoint,
    WalCheckpoint,
    decode_any_checkpoint,
    decode_checkpoint,
    decode_danube_uploader_checkpoint,
    decode_danube_wal_checkpoint,
    decode_published,
    encode_checkpoint,
    encode_published,
)
from forebay.format.content import ContentHash
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.frame import HEADER_BYTES, End, FrameDecoder, encode_frame, scan
from forebay.format.index import SegmentIndex, decode_index, encode_index
from forebay.format.layout import FIXED, VARINT, locate
from forebay.format.marker import BeginMarker, decode_marker, encode_marker
from forebay.format.message import MessageId, StreamMessage, decode_message, encode_message
from forebay.format.names import TopicName, parse_topic, staged_file
from forebay.format.producers import (
    KnownProducer,
    ProducersRow,
    decode_producers_row,
    encode_producers_row,
    idempotent_id,
)
from forebay.format.pulsar.blocks import EntryScanner
from forebay.format.pulsar.entry import decode_entry
from forebay.format.pulsar.frames import EntryAssembler, FramePacker
from forebay.format.pulsar.index import decode_index as decode_ledger_index
from forebay.format.pulsar.index import encode_index as encode_ledger_index
from forebay.format.schema import (
    SubjectRow,
    TopicSchemaRow,
    VersionRow,
    decode_subject,
    decode_topic_schema,
    decode_version,
    encode_subject,
    encode_topic_schema,
    encode_version,
)
from forebay.limits import MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.staging import Rows, stage, staged_rows
from support.hexdumps import block
from support.ledgers import REAL_DATA, REAL_INDEX, packed

# ---- messages ----


def golden(
    payload: bytes = b"hello",
    subscription: str | None = "",
    attributes: dict[str, str] | None = None,
    routing_key: str | None = None,
    schema_id: int | None = None,
    schema_version: int | None = None,
) -> StreamMessage:
    """The message of all vectors, with the given fields changed."""
    return StreamMessage(
        payload,
        request_id=2,
        msg_id=MessageId(7, "/default/t1", "127.0.0.1:6650", 5),
        publish_time=1_700_000_000_000,
        producer_name="p1",
        subscription_name=subscription,
        attributes={"k": "v1"} if attributes is None else attributes,
        schema_id=schema_id,
        schema_version=schema_version,
        routing_key=routing_key,
    )


VECTOR_A: Final = bytes.fromhex(
    """
    0500000000000000 84000000 d1d4be3c
    0200000000000000
    0700000000000000
    0b00000000000000 2f64656661756c742f7431
    0e00000000000000 3132372e302e302e313a36363530
    0500000000000000
    0500000000000000 68656c6c6f
    0068e5cf8b010000
    0200000000000000 7031
    01 0000000000000000
    0100000000000000
    0100000000000000 6b 0200000000000000 7631
    """
)
VECTOR_B: Final = bytes.fromhex(
    "050000000000000064000000d061dd08020000000000000007000000000000000b000000000000002f64656661756c"
    "742f74310e000000000000003132372e302e302e313a36363530050000000000000000000000000000000068e5cf8b"
    "01000002000000000000007031000000000000000000"
)
VECTOR_C: Final = bytes.fromhex(
    """
    0500000000000000 3e000000 488ccf28
    02 07 0b2f64656661756c742f7431 0e3132372e302e302e313a36363530 05 0568656c6c6f
    fd0068e5cf8b010000 027031 01 00 01 016b 027631 00 00 01 02726b
    """
)


def message_of(frame: bytes) -> StreamMessage:
    """The message of a buffer that is exactly one valid frame."""
    found = scan(frame)
    assert (found.end, len(found), found.safe_length) == (End.COMPLETE, 1, len(frame))
    return decode_message(frame, found.positions[0], found.lengths[0], offset=found.offsets[0])


def flavour_of(message: bytes) -> int:
    return locate(message, 0, len(message)).flavour


@pytest.mark.parametrize(
    ("vector", "flavour", "expected"),
    [
        pytest.param(VECTOR_A, FIXED, golden(), id="A"),
        pytest.param(VECTOR_B, FIXED, golden(b"", None, {}), id="B"),
        pytest.param(VECTOR_C, VARINT, golden(routing_key="rk"), id="C"),
    ],
)
def test_danubes_vectors_are_one_valid_frame_with_the_known_message(
    vector: bytes, flavour: int, expected: StreamMessage
) -> None:
    assert message_of(vector) == expected
    assert flavour_of(vector[HEADER_BYTES:]) == flavour
    assert encode_frame(5, vector[HEADER_BYTES:]) == vector


@pytest.mark.parametrize(
    ("vector", "message"),
    [(VECTOR_A, golden()), (VECTOR_B, golden(b"", None, {}))],
    ids=["A", "B"],
)
def test_what_is_written_is_danubes_first_encoding_and_three_absent_fields(
    vector: bytes, message: StreamMessage
) -> None:
    assert encode_message(message, 5) == vector[HEADER_BYTES:] + b"\0\0\0"


FIXED_BEFORE_SCHEMA: Final = VECTOR_A[HEADER_BYTES:]
VARINT_BEFORE_SCHEMA: Final = VECTOR_C[HEADER_BYTES:-6]


@pytest.mark.parametrize(
    ("message", "flavour", "expected"),
    [
        pytest.param(
            FIXED_BEFORE_SCHEMA + bytes.fromhex("01 0900000000000000 01 03000000"),
            FIXED,
            golden(schema_id=9, schema_version=3),
            id="fixed with two appended",
        ),
        pytest.param(
            FIXED_BEFORE_SCHEMA + bytes.fromhex("00 00"), FIXED, golden(), id="fixed, two absent"
        ),
        pytest.param(
            FIXED_BEFORE_SCHEMA
            + bytes.fromhex("01 0900000000000000 01 03000000 01 0200000000000000 726b"),
            FIXED,
            golden(routing_key="rk", schema_id=9, schema_version=3),
            id="fixed with three appended",
        ),
        pytest.param(VARINT_BEFORE_SCHEMA, VARINT, golden(), id="varint with none appended"),
        pytest.param(
            VARINT_BEFORE_SCHEMA + bytes.fromhex("01 09 01 03"),
            VARINT,
            golden(schema_id=9, schema_version=3),
            id="varint with two appended",
        ),
        pytest.param(
            VARINT_BEFORE_SCHEMA + bytes.fromhex("00 00"), VARINT, golden(), id="varint, two absent"
        ),
        pytest.param(
            VARINT_BEFORE_SCHEMA
            + bytes.fromhex("01 fd0000000001000000 01 fcffffffff 01 02 726b"),
            VARINT,
            golden(routing_key="rk", schema_id=2**32, schema_version=2**32 - 1),
            id="varint with three appended",
        ),
    ],
)  # fmt: skip
def test_encodings_without_a_vector_are_read_as_put_together_by_hand(
    message: bytes, flavour: int, expected: StreamMessage
) -> None:
    assert decode_message(message) == expected
    assert flavour_of(message) == flavour


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("00", 0),
        ("fa", 250),
        ("fbfb00", 251),
        ("fc00000100", 65536),
        ("fd0000000001000000", 2**32),
    ],
)
def test_varints_are_read_at_each_width(raw: str, value: int) -> None:
    message = bytes.fromhex(raw) + VECTOR_C[HEADER_BYTES + 1 :]
    assert decode_message(message).request_id == value


def test_the_checksum_is_zlibs() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(VECTOR_A[HEADER_BYTES:]) == 0x3CBED4D1


# ---- the documents ----


def test_the_frame_document_shows_vector_a() -> None:
    frame = block("frame.md", 0)
    assert frame == VECTOR_A
    decoder = FrameDecoder(expected=5, consecutive=True)
    ((offset, payload),) = decoder.feed(frame)
    assert (offset, bytes(payload), decoder.pending) == (5, VECTOR_A[16:], 0)


def test_the_message_document_shows_what_is_written() -> None:
    message = block("message.md", 0)
    assert len(message) == 145
    assert encode_message(golden(routing_key="rk"), 5) == message
    assert decode_message(message) == golden(routing_key="rk")


def test_the_message_document_shows_vector_b() -> None:
    message = block("message.md", 1)
    assert message == VECTOR_B[HEADER_BYTES:]
    assert len(message) == 100
    assert decode_message(message) == golden(b"", None, {})


def test_the_message_document_shows_vector_c() -> None:
    message = block("message.md", 2)
    assert message == VECTOR_C[HEADER_BYTES:]
    assert len(message) == 62
    assert decode_message(message) == golden(routing_key="rk")


def test_the_checkpoint_document_shows_a_checkpoint_of_the_log() -> None:
    data = block("checkpoint.md", 0)
    checkpoint = WalCheckpoint(
        start_offset=3,
        next_offset=9,
        segments=(SegmentEntry(1, 3, 6), SegmentEntry(2, 6, None)),
        rotated_at_ms=1_700_000_000_000,
    )
    assert decode_checkpoint(data, WalCheckpoint) == checkpoint
    assert encode_checkpoint(checkpoint) == data


def test_the_checkpoint_document_shows_a_checkpoint_of_the_uploader() -> None:
    data = block("checkpoint.md", 1)
    checkpoint = UploaderCheckpoint(
        last_committed_offset=5,
        last_read_file_seq=1,
        last_read_byte_position=464,
        last_object_id="data-0-5.dnb1",
        updated_at=1_700_000_000,
        active_start_offset=6,
        active_bytes_written=146,
        active_msgs_written=1,
        index_entries_in_progress=((6, 0),),
        opened_at_unix=1_700_000_000,
        last_activity_unix=1_700_000_001,
    )
    assert decode_any_checkpoint(data) == checkpoint
    assert encode_checkpoint(checkpoint) == data


def test_the_published_document_shows_a_record() -> None:
    data = block("published.md", 0)
    record = Published(seq=2, position=464, next_offset=9, start_offset=3, pid=4242)
    assert len(data) == 48
    assert decode_published(data) == record
    assert encode_published(record) == data


def test_the_marker_document_shows_a_marker() -> None:
    data = block("marker.md", 0)
    marker = BeginMarker(
        "0c1d6f2a9b8e4753a1b2c3d4e5f60718", "5e0c3f1b7a9d48262f4e6d8c0b1a3957", 7, 500
    )
    assert decode_marker(data, "the document") == marker
    assert encode_marker(marker) == data


def test_the_marker_document_shows_the_marker_of_a_deletion() -> None:
    data = block("marker.md", 1)
    nonce = "7d1f0a93c5e24b68a0f3d29b71c8e546"
    marker = BeginMarker(nonce, nonce, 8, 2600, deleted=True)
    assert decode_marker(data, "the document") == marker
    assert encode_marker(marker) == data


def test_the_segment_index_document_shows_an_index() -> None:
    data = block("segment-index.md", 0)
    index = SegmentIndex(1_700_000_000_000)
    index.add(3, 0)
    index.add(450, 65_600)
    assert encode_index(index, 100_000) == data
    decoded = decode_index(data, 100_000)
    assert decoded is not None
    assert (list(decoded.offsets), list(decoded.positions)) == ([3, 450], [0, 65_600])


def test_the_staged_rows_document_shows_two_rows() -> None:
    data = block("staged-rows.md", 0)
    store, key = CloudStore(MemoryBackend()), staged_file("00112233445566aa", 0, 0)
    topics = ["/default/orders", "/default/returns"]
    rows = Rows(topics, [b"one", b"two"], [None, {"k": "v"}], ["a", None])
    part = stage(store, key, 0, [rows], chunk_bytes=5 * MIB)
    assert bytes(store.get_object(key, MIB)) == data
    assert (part.bytes, part.rows, part.topics) == (len(data), 2, dict.fromkeys(topics, 1))
    assert part.digest == crc32(b"one") + crc32(b"two")
    assert list(staged_rows(store, part)) == [replace(rows, attributes=[{}, {"k": "v"}])]
    message = encode_message(
        StreamMessage(b"one", msg_id=MessageId(topic_name=topics[0]), routing_key="a"), 0
    )
    assert data.startswith(encode_frame(0, message))


def test_the_descriptor_document_shows_a_descriptor() -> None:
    data = block("descriptor.md", 0)
    descriptor = ObjectDescriptor(
        object_id="data-500-2499.dnb1",
        start_offset=500,
        end_offset=2499,
        size=2000 * 146,
        etag='"9a"',
        created_at=1_700_000_000,
        offset_index=((500, 0), (1500, 1000 * 146)),
    )
    assert decode_descriptor(data) == descriptor
    assert encode_descriptor(descriptor) == data


def test_the_descriptor_document_shows_one_with_every_field() -> None:
    data = block("descriptor.md", 1)
    frames = block("frame.md", 0)
    content = ContentHash()
    content.add(frames)
    found = decode_descriptor(data)
    assert found.content_hash == content.value
    assert None not in [getattr(found, field.name) for field in fields(found)]
    assert encode_descriptor(found) == data


def test_the_catalog_document_shows_the_record_of_a_topic() -> None:
    data = block("catalog.md", 0)
    record = TopicRecord(
        epoch=7,
        log_id="0c1d6f2a9b8e4753a1b2c3d4e5f60718",
        start_offset=0,
        tail=2500,
        verified=2400,
        reserved=1_000_000,
        lost=((300, 500),),
        nonce="5e0c3f1b7a9d48262f4e6d8c0b1a3957",
        assigned=2600,
        begin=2500,
        marked=7,
    )
    assert decode_record(data, TopicRecord, "the document") == record
    assert encode_record(record) == data


def test_the_catalog_document_shows_the_life_of_a_key() -> None:
    data = block("catalog.md", 1)
    life = Life(State.COMMITTED, epoch=7, token="9f86d081884c7d65", updated_ms=1_700_000_000_000)
    assert decode_record(data, Life, "the document") == life
    assert encode_record(life) == data


def test_the_catalog_document_shows_an_owner() -> None:
    data = block("catalog.md", 2)
    owner = Owner(
        epoch=7,
        name="host:4242:1a2b3c4d",
        lock="b5f0c3f2-8f4e-4c1a-9a63-0d9f8b7a6c5e:2049:131073",
        since_ms=1_700_000_000_000,
    )
    assert decode_record(data, Owner, "the document") == owner
    assert encode_record(owner) == data


def test_the_catalog_document_shows_a_replaced_descriptor() -> None:
    data = block("catalog.md", 3)
    small = ObjectDescriptor(
        "data-0-99.dnb1", 0, 99, 5200, None, 1_700_000_000, offset_index=((0, 0),)
    )
    kept = Kept("data-0-2499.dnb1", small)
    assert decode_kept(data, "the document") == kept
    assert encode_kept(kept) == data


def test_the_catalog_document_shows_the_note_of_idempotent_producers() -> None:
    data = block("catalog.md", 4)
    known = KnownProducer(idempotent_id("/default/t", "meter"), 42, 1199)
    row = ProducersRow(1200, (known,), origin="here", epoch=7)
    assert decode_producers_row(data, "the document") == row
    assert encode_producers_row(row) == data


def test_the_catalog_document_shows_what_is_left_of_a_deleted_topic() -> None:
    data = block("catalog.md", 5)
    record = TopicRecord(
        epoch=8,
        start_offset=2600,
        tail=2600,
        verified=2600,
        reserved=2600,
        assigned=2600,
        begin=2600,
        marked=8,
        deletion=Deletion.DELETED,
    )
    assert decode_record(data, TopicRecord, "the document") == record
    assert encode_record(record) == data


def test_the_catalog_document_shows_a_schema_and_the_topic_that_has_it() -> None:
    fingerprint = hashlib.sha256(b'avro\0"long"').hexdigest()
    data = block("catalog.md", 6)
    subject = SubjectRow("orders", 1, "backward", 3, ((2, fingerprint),))
    assert decode_subject(data, "the document") == subject
    assert encode_subject(subject) == data
    data = block("catalog.md", 7)
    version = VersionRow(
        "orders", 2, "avro", b'"long"', fingerprint, "", 1_700_000_000_000, "ann", ("eu",)
    )
    assert decode_version(data, "the document") == version
    assert encode_version(version) == data
    data = block("catalog.md", 8)
    row = TopicSchemaRow("orders", "enforce", payload=True)
    assert decode_topic_schema(data, "the document") == row
    assert encode_topic_schema(row) == data


def test_the_names_document_shows_a_topics_bytes() -> None:
    name = block("names.md", 0).decode()
    assert parse_topic(name) == TopicName("default", "größe")
    assert str(parse_topic("größe")).encode() == block("names.md", 0)


# ---- Danube's checkpoints ----

DANUBE_WAL_FIXED: Final = bytes.fromhex(
    "00000000000000000500000000000000010000000000000017000000000000002f772f64656661756c742f74312f77"
    "616c2e312e6c6f670100000000000000000000000000000015000000000000002f772f64656661756c742f74312f77"
    "616c2e6c6f67000000000000000001090000000000000077616c2e312e6c6f6700010300000000000000"
)
DANUBE_WAL_VARINT: Final = bytes.fromhex(
    "000501172f772f64656661756c742f74312f77616c2e312e6c6f670100152f772f64656661756c742f74312f77616c"
    "2e6c6f6700010977616c2e312e6c6f67000103"
)
DANUBE_UPLOADER_FIXED: Final = bytes.fromhex(
    "05000000000000000100000000000000d001000000000000010d00000000000000646174612d302d352e646e623100"
    "f1536500000000"
)
DANUBE_UPLOADER_VARINT: Final = bytes.fromhex(
    """
    05 01 fbd001 01 0d 646174612d302d352e646e6231 fc00f15365
    """
)

DANUBE_WAL: Final = DanubeWalCheckpoint(
    start_offset=0,
    last_offset=5,
    file_seq=1,
    file_path="/w/default/t1/wal.1.log",
    rotated_files=(DanubeRotatedFile(0, "/w/default/t1/wal.log", 0),),
    active_file_name="wal.1.log",
    last_rotation_at=None,
    active_file_first_offset=3,
)
DANUBE_UPLOADER: Final = DanubeUploaderCheckpoint(5, 1, 464, "data-0-5.dnb1", 1_700_000_000)


def test_danubes_checkpoint_of_the_log_is_read_in_both_flavours() -> None:
    assert block("checkpoint.md", 2) == DANUBE_WAL_FIXED
    assert block("checkpoint.md", 3) == DANUBE_WAL_VARINT
    assert decode_danube_wal_checkpoint(DANUBE_WAL_FIXED) == DANUBE_WAL
    assert decode_danube_wal_checkpoint(DANUBE_WAL_VARINT) == DANUBE_WAL


def test_danubes_default_checkpoint_is_43_zeros() -> None:
    empty = DanubeWalCheckpoint(0, 0, 0, "", (), None, None, None)
    assert decode_danube_wal_checkpoint(bytes(43)) == empty
    assert decode_danube_wal_checkpoint(bytes(8)) == empty


def test_danubes_checkpoint_of_the_uploader_is_read_in_both_flavours() -> None:
    assert block("checkpoint.md", 4) == DANUBE_UPLOADER_FIXED
    assert decode_danube_uploader_checkpoint(DANUBE_UPLOADER_FIXED) == DANUBE_UPLOADER
    assert decode_danube_uploader_checkpoint(DANUBE_UPLOADER_VARINT) == DANUBE_UPLOADER


# ---- compressed objects ----


def test_a_block_of_a_compressed_object() -> None:
    data = block("blocks.md", 0)
    header = decode_header(data)
    assert header == BlockHeader(42, 2, 54, 47)
    assert encode_header(header) == data[:BLOCK_HEADER_BYTES]
    assert len(data) == header.size
    frames = decompress(header, data[BLOCK_HEADER_BYTES:])
    assert frames == encode_frame(42, b"hello hello") + encode_frame(43, b"hello again")


def test_the_ledger_document_shows_the_data_object_of_a_broker() -> None:
    data = block("pulsar-ledger.md", 0)
    assert data == REAL_DATA
    (entries,) = EntryScanner(0, 0, len(data)).feed(data)
    assert [bytes(entry.data) for entry in entries] == [data[140:]]
    assert packed([data[140:]], MIB)[0] == data


def test_the_ledger_document_shows_the_index_object_of_a_broker() -> None:
    data = block("pulsar-ledger.md", 1)
    assert data == REAL_INDEX
    assert encode_ledger_index(decode_ledger_index(data)) == data


def entry_of_frame(frame: bytes) -> bytes:
    """The entry of a frame, with its header; checks that the frame comes back."""
    packer, offset = FramePacker(MIB), int.from_bytes(frame[:8], "little")
    assert list(packer.add(scan(frame))) == []
    data = bytes(packer.finish())
    (found,) = EntryAssembler(offset, 0, len(data), offset, MIB).feed(data)
    assert bytes(found.raw) == frame
    return data[128:]


def test_the_entry_document_shows_the_frame_of_another_document() -> None:
    data = block("pulsar-entry.md", 0)
    assert entry_of_frame(block("frame.md", 0)) == data
    assert decode_entry(data[12:]).metadata.producer_name == "p1"


def test_the_entry_document_shows_bytes_that_are_no_message() -> None:
    data = block("pulsar-entry.md", 1)
    assert entry_of_frame(encode_frame(5, b"\xffnot a message")) == data
