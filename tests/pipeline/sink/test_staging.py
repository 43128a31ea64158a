"""Staged files: rows wait there whole or not at all, and only rows that can be appended."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from forebay.errors import FormatError, MessageTooLarge, UsageError
from forebay.format.layout import Buffer
from forebay.format.names import STAGING_PREFIX, staged_file, topic_of_key, write_of_staged
from forebay.limits import ATTRIBUTES_MAX, KIB, MESSAGE_BYTES_MAX, MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.columns import check_columns, checked_rows
from forebay.pipeline.sink.staging import (
    Part,
    Rows,
    discard,
    has_manifest,
    joined_checksum,
    read_manifest,
    stage,
    staged_rows,
    write_manifest,
)
from forebay.testing import ManualClock
from forebay.upload.sweep import sweep_staging

WRITE = "00112233445566aa"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def store() -> CloudStore:
    return CloudStore(MemoryBackend())


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def rows(store: CloudStore, part: Part) -> list[tuple[str, bytes, dict[str, str], str | None]]:
    """Topic, payload, attributes and key of each."""
    return [
        (topic, bytes(payload), dict(attributes or {}), key)
        for piece in staged_rows(store, part)
        for topic, payload, attributes, key in zip(
            piece.topics,
            piece.payloads,
            piece.attributes or [None] * len(piece.topics),
            piece.keys or [None] * len(piece.topics),
            strict=True,
        )
    ]


def staged(
    store: CloudStore, *batches: pa.RecordBatch, topic: str | None = "/default/orders"
) -> Part:
    checked = checked_rows(iter(batches), 3, topic)
    return stage(store, staged_file(WRITE, 3, 17), 3, checked, chunk_bytes=5 * MIB)


def refused(*batches: pa.RecordBatch, topic: str | None = "/default/orders") -> str:
    with pytest.raises(UsageError) as caught:
        list(checked_rows(iter(batches), 3, topic))
    return str(caught.value)


# ---- files ----


def test_rows_come_back_as_they_were_staged(store: CloudStore) -> None:
    headers = pa.array([[("a", b"1"), ("b", "ü".encode())], [], None], HEADERS)
    part = staged(
        store,
        batch(value=pa.array([b"\xff", b"", b"three"]), key=pa.array([b"k", None, b""])),
        batch(value=pa.array(["text"] * 3), headers=headers),
    )
    assert part.key == f"staging/{WRITE}/3-17.frames"
    assert topic_of_key(part.key) is None
    assert (part.rows, part.topics) == (6, {"/default/orders": 6})
    assert part.bytes == store.head(part.key).size
    found = rows(store, part)
    topics, payloads, attributes, keys = zip(*found, strict=True)
    assert set(topics) == {"/default/orders"}
    assert payloads == (b"\xff", b"", b"three", *([b"text"] * 3))
    assert keys == ("k", None, "", None, None, None)
    assert attributes == ({}, {}, {}, {"a": "1", "b": "ü"}, {}, {})


def test_the_checksum_of_rows_is_that_of_the_document(store: CloudStore) -> None:
    """docs/formats/staged-rows.md"""
    headers = pa.array([None, [("a", b"1"), ("b", "ü".encode())]], HEADERS)
    part = staged(
        store, batch(value=pa.array([b"x", b"y"]), key=pa.array([b"k", None]), headers=headers)
    )
    first = crc32(b"x/default/orders\x01k")
    second = crc32(b'y/default/orders[["a", "1"], ["b", "\\u00fc"]]')
    p = 2**61 - 1
    b = 0x1D3C5A7B9E2F4681 % p
    assert part.checksum == ((first + 1) * b + second + 1) % p
    one, other = (
        stage(store, staged_file(WRITE, at, 1), at, [rows], chunk_bytes=5 * MIB)
        for at, rows in enumerate(
            [
                Rows(["/default/orders"], [b"x"], None, ["k"]),
                Rows(["/default/orders"], [b"y"], [{"a": "1", "b": "ü"}]),
            ]
        )
    )
    assert joined_checksum([one, other]) == part.checksum
    assert joined_checksum([other, one]) != part.checksum


def test_a_partition_without_rows_has_no_file(store: CloudStore) -> None:
    part = staged(store, batch(value=pa.array([], pa.binary())))
    assert part == Part(3, None, 0, 0)
    assert rows(store, part) == []
    assert list(store.list("")) == []


def test_a_task_that_fails_leaves_no_file(store: CloudStore) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield batch(value=pa.array([bytes(6 * MIB)]))
        raise RuntimeError("the task ends here")

    with pytest.raises(RuntimeError, match="ends here"):
        stage(
            store,
            staged_file(WRITE, 0, 0),
            0,
            checked_rows(failing(), 0, "t"),
            chunk_bytes=5 * MIB,
        )
    assert list(store.list("")) == []


def test_large_batches_are_read_back_in_bounded_pieces(store: CloudStore) -> None:
    payloads = [bytes([number]) * MIB for number in range(20)]
    part = staged(store, batch(value=pa.array(payloads)))
    pieces = list(staged_rows(store, part))
    assert max(sum(map(len, piece.payloads)) for piece in pieces) <= 5 * MIB
    assert [payload for piece in pieces for payload in piece.payloads] == payloads


def test_a_row_longer_than_a_read_comes_back_whole(store: CloudStore) -> None:
    payloads = [b"small", bytes(range(256)) * (40 * KIB), b"", b"after"]
    part = staged(store, batch(value=pa.array(payloads)))
    assert [row[1] for row in rows(store, part)] == payloads


def test_a_file_that_is_no_staged_one_is_said(store: CloudStore) -> None:
    store.put_object("staging/w/0-0.frames", b"something else than frames")
    with pytest.raises(FormatError, match=r"staging/w/0-0\.frames"):
        rows(store, Part(0, "staging/w/0-0.frames", 1, 26))


@pytest.mark.parametrize("cut", [1, 15, 16, 40])
def test_a_file_that_ends_too_early_is_refused(store: CloudStore, cut: int) -> None:
    part = staged(store, batch(value=pa.array([b"one", b"two"])))
    assert part.key is not None
    whole = bytes(store.get_object(part.key, MIB))
    store.delete_object(part.key)
    store.put_object(part.key, whole[:-cut])
    with pytest.raises(FormatError, match="1 rows of 2"):
        rows(store, replace(part, bytes=part.bytes - cut))
    with pytest.raises(FormatError, match="1 rows of 1"):
        rows(store, replace(part, bytes=part.bytes - cut, rows=1))


@pytest.mark.parametrize("at", [0, 12, 30, -1])
def test_a_flipped_byte_anywhere_is_found(store: CloudStore, at: int) -> None:
    part = staged(store, batch(value=pa.array([b"one", b"two"])))
    assert part.key is not None
    damaged = bytearray(store.get_object(part.key, MIB))
    damaged[at] ^= 1
    store.delete_object(part.key)
    store.put_object(part.key, bytes(damaged))
    with pytest.raises(FormatError, match=part.key):
        rows(store, part)


def test_rows_that_an_earlier_release_staged_are_refused_while_they_are_there(
    store: CloudStore,
) -> None:
    key = "staging/0123456789abcdef/0-0.arrow"
    store.put_object(key, b"an Arrow stream, as earlier releases staged it")
    write_manifest(store, "0123456789abcdef", [Part(0, key, 1, 46, {"/default/orders": 1})])
    with pytest.raises(UsageError, match="another release"):
        read_manifest(store, "0123456789abcdef")
    store.delete_object(key)
    assert read_manifest(store, "0123456789abcdef") is None


@pytest.mark.parametrize("before", [0, 1], ids=["first", "across-two-reads"])
def test_a_length_that_no_frame_can_have_is_damage_and_is_not_waited_for(
    store: CloudStore, before: int
) -> None:
    first = staged(store, batch(value=pa.array([b"x" * (4 * MIB - 200)] * before)))
    body = bytearray() if first.key is None else bytearray(store.get_object(first.key, 8 * MIB))
    body += struct.pack("<QII", before, 0xFFFFFFF0, 0) + bytes(16 * MIB)
    key = "staging/0123456789abcdef/0-1.frames"
    store.put_object(key, bytes(body))
    reads: list[int] = []
    backend = store.get_range

    def counted(key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        reads.append(start)
        return backend(key, start, end, etag=etag)

    store.get_range = counted  # type: ignore[method-assign]
    with pytest.raises(FormatError, match=key):
        rows(store, Part(0, key, before + 1, len(body), {"/default/orders": before + 1}))
    assert len(reads) <= before + 1


def test_a_manifest_counts_while_all_its_files_are_there(store: CloudStore) -> None:
    part = staged(store, batch(value=pa.array([b"one"])))
    parts = [part, Part(4, None, 0, 0)]
    assert part.key is not None
    assert read_manifest(store, write_of_staged(part.key)) is None
    write_manifest(store, WRITE, parts)
    assert has_manifest(store, WRITE)
    assert read_manifest(store, WRITE) == parts
    store.delete_object(part.key)
    assert read_manifest(store, WRITE) is None
    discard(store, parts)
    discard(store, parts)
    assert list(store.list("")) == []


def test_only_old_files_are_swept(store: CloudStore) -> None:
    part = staged(store, batch(value=pa.array([b"one"])))
    write_manifest(store, WRITE, [part])
    store.put_object("storage/topics/default/orders/objects/data-0-9.dnb1", b"not ours")
    modified = max(meta.modified_ms for meta in store.list(""))
    clock = ManualClock()
    clock.advance(modified / 1000 - clock.now_ms() / 1000 + 7 * 24 * 3600 - 60)
    assert sweep_staging(store, clock=clock) == 0
    clock.advance(120)
    assert sweep_staging(store, clock=clock) == 2
    assert list(store.list(STAGING_PREFIX)) == []
    assert len(list(store.list(""))) == 1


# ---- rows that cannot be appended ----


def test_a_row_without_a_value_is_named() -> None:
    good = batch(value=pa.array([b"x"] * 5))
    text = refused(good, batch(value=pa.array([b"x", b"y", None])))
    assert text.startswith("row 7 of partition 3 has a null value")


def test_a_key_that_is_not_text_is_named() -> None:
    text = refused(batch(value=pa.array([b"x"] * 3), key=pa.array([b"k", None, b"\xff"])))
    assert text == "row 2 of partition 3 has a key that is not UTF-8 text"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([("a", b"\xff")], "header 'a' that is not UTF-8"),
        ([("a", b"1"), ("b", b"1"), ("a", b"2")], "two headers with the same name"),
        ([("a", None)], "header without a key or a value"),
        ([(None, b"1")], "header without a key or a value"),
        ([None], "header without a key or a value"),
        ([(str(at), b"") for at in range(ATTRIBUTES_MAX)], "headers; the limit is 1023"),
    ],
)
def test_headers_that_are_no_attributes_are_named(headers: list[Any], why: str) -> None:
    text = refused(batch(value=pa.array([b"x"] * 2), headers=pa.array([None, headers], HEADERS)))
    assert text.startswith("row 1 of partition 3 has ")
    assert why in text


def test_a_message_that_would_be_too_large_is_refused_before_it_is_staged() -> None:
    with pytest.raises(MessageTooLarge, match="row 0 of partition 3"):
        list(checked_rows(iter([batch(value=pa.array([bytes(MESSAGE_BYTES_MAX)]))]), 3, "t"))


def test_topics_are_names_as_everywhere(store: CloudStore) -> None:
    values, topics = pa.array([b"x"] * 3), pa.array(["orders", "/a/b", "/default/orders"])
    part = staged(store, batch(value=values, topic=topics), topic=None)
    assert part.topics == {"/default/orders": 2, "/a/b": 1}
    assert "row 1 of partition 3 has no topic" in refused(
        batch(value=values, topic=pa.array(["a", None, "b"])), topic=None
    )
    assert "row 2 of partition 3 has an invalid topic: 'a.b'" in refused(
        batch(value=values, topic=pa.array(["a", "b", "a.b"])), topic=None
    )
    option = staged(store, batch(value=values, topic=topics), topic="/x/y")
    assert option.topics == {"/x/y": 3}


# ---- columns ----


def schema(**types: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


def header_type(value: Any) -> ArrayType:
    return ArrayType(schema(key=StringType(), value=value))


def test_the_columns_of_the_source_are_taken() -> None:
    everything = schema(
        key=BinaryType(), value=BinaryType(), topic=StringType(), headers=header_type(BinaryType())
    )
    check_columns(everything, None)
    check_columns(schema(value=StringType(), headers=header_type(StringType())), "orders")


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"key": BinaryType()}, "needs a column 'value'"),
        ({"value": LongType()}, "'value' is bigint; the sink accepts binary or string"),
        ({"value": BinaryType(), "key": LongType()}, "'key' is bigint"),
        ({"value": BinaryType(), "offset": LongType()}, "does not know the columns 'offset'"),
        ({"value": BinaryType(), "partition": LongType()}, "'partition' is bigint; the sink acc"),
        ({"value": BinaryType(), "headers": StringType()}, "array<struct<key:string,value"),
        ({"value": BinaryType(), "topic": BinaryType()}, "'topic' is binary"),
        ({"value": BinaryType()}, "the option 'topic' or a column 'topic'"),
    ],
)
def test_columns_that_cannot_be_messages_are_refused(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_columns(schema(**columns), None)
    assert why in str(caught.value)


def test_rows_with_a_partition_name_their_partition(store: CloudStore) -> None:
    numbers = pa.array([0, 3, None, 0], pa.int32())
    topics = pa.array(["orders", "orders", "clicks", "clicks-part-0"])
    part = staged(
        store, batch(value=pa.array(["x"] * 4), topic=topics, partition=numbers), topic=None
    )
    assert dict(part.topics) == {
        "/default/orders-part-0": 1,
        "/default/orders-part-3": 1,
        "/default/clicks": 1,
        "/default/clicks-part-0": 1,
    }
    assert part.zeros == ["/default/orders-part-0"], "the other one is named by its row"


def test_a_partition_that_cannot_be_is_refused_with_its_row() -> None:
    for number, why in ((-1, "not in 0..999999999"), (1_000_000_000, "not in 0..999999999")):
        numbers = pa.array([0, number], pa.int32())
        rows = batch(value=pa.array(["x", "y"]), partition=numbers)
        assert refused(rows) == f"row 1 of partition 3 has a partition that is {why}"
    rows = batch(value=pa.array(["x", "y"]), partition=pa.array([2, 1], pa.int32()))
    text = refused(rows, topic="/default/orders-part-2")
    assert text == (
        "row 1 of partition 3 has the topic '/default/orders-part-2' and the partition 1"
    )
