"""Staged files: rows wait there whole or not at all, and only rows that can be appended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from forebay.errors import FormatError, MessageTooLarge, UsageError
from forebay.format.names import STAGING_PREFIX, staged_file, topic_of_key, write_of_staged
from forebay.limits import ATTRIBUTES_MAX, MESSAGE_BYTES_MAX, MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.columns import check_columns, staged_batches
from forebay.pipeline.sink.staging import (
    Part,
    discard,
    has_manifest,
    read_manifest,
    stage,
    staged_rows,
    sweep_staging,
    write_manifest,
)
from forebay.testing import ManualClock

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture
def store() -> CloudStore:
    return CloudStore(MemoryBackend())


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(columns)


def rows(store: CloudStore, part: Part) -> list[dict[str, Any]]:
    return [row for piece in staged_rows(store, part) for row in piece.to_pylist()]


def staged(
    store: CloudStore, *batches: pa.RecordBatch, topic: str | None = "/default/orders"
) -> Part:
    checked = staged_batches(iter(batches), 3, topic)
    return stage(store, staged_file("w", 3, 17), 3, checked, chunk_bytes=5 * MIB)


def refused(*batches: pa.RecordBatch, topic: str | None = "/default/orders") -> str:
    with pytest.raises(UsageError) as caught:
        list(staged_batches(iter(batches), 3, topic))
    return str(caught.value)


# ---- files ----


def test_rows_come_back_as_they_were_staged(store: CloudStore) -> None:
    headers = pa.array([[("a", b"1"), ("b", "ü".encode())], [], None], HEADERS)
    part = staged(
        store,
        batch(value=pa.array([b"\xff", b"", b"three"]), key=pa.array([b"k", None, b""])),
        batch(value=pa.array(["text"] * 3), headers=headers),
    )
    assert part.key == "staging/w/3-17.arrow"
    assert topic_of_key(part.key) is None
    assert (part.rows, part.topics) == (6, {"/default/orders": 6})
    assert part.bytes == store.head(part.key).size
    found = rows(store, part)
    assert [row["value"] for row in found] == [b"\xff", b"", b"three", *([b"text"] * 3)]
    assert [row["key"] for row in found] == ["k", None, "", None, None, None]
    assert found[3]["headers"] == [{"key": "a", "value": "1"}, {"key": "b", "value": "ü"}]
    assert [row["headers"] for row in found[4:]] == [[], None]


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
            staged_file("w", 0, 0),
            0,
            staged_batches(failing(), 0, "t"),
            chunk_bytes=5 * MIB,
        )
    assert list(store.list("")) == []


def test_large_batches_are_read_back_in_bounded_pieces(store: CloudStore) -> None:
    payloads = [bytes([number]) * MIB for number in range(20)]
    part = staged(store, batch(value=pa.array(payloads)))
    pieces = list(staged_rows(store, part))
    assert max(piece.nbytes for piece in pieces) <= 5 * MIB
    assert [row["value"] for piece in pieces for row in piece.to_pylist()] == payloads


def test_a_file_that_is_no_staged_one_is_said(store: CloudStore) -> None:
    store.put("staging/w/0-0.arrow", b"something else")
    with pytest.raises(FormatError, match=r"staging/w/0-0\.arrow"):
        rows(store, Part(0, "staging/w/0-0.arrow", 1, 14))


def test_a_manifest_counts_while_all_its_files_are_there(store: CloudStore) -> None:
    part = staged(store, batch(value=pa.array([b"one"])))
    parts = [part, Part(4, None, 0, 0)]
    assert part.key is not None
    assert read_manifest(store, write_of_staged(part.key)) is None
    write_manifest(store, "w", parts)
    assert has_manifest(store, "w")
    assert read_manifest(store, "w") == parts
    store.delete(part.key)
    assert read_manifest(store, "w") is None
    discard(store, parts)
    discard(store, parts)
    assert list(store.list("")) == []


def test_only_old_files_are_swept(store: CloudStore) -> None:
    part = staged(store, batch(value=pa.array([b"one"])))
    write_manifest(store, "w", [part])
    store.put("storage/topics/default/orders/objects/data-0-9.dnb1", b"not ours")
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
    assert text.startswith("row 7 of partition 3 has no value")


def test_a_key_that_is_not_text_is_named() -> None:
    text = refused(batch(value=pa.array([b"x"] * 3), key=pa.array([b"k", None, b"\xff"])))
    assert text == "row 2 of partition 3 has a key that is not UTF-8 text"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([("a", b"\xff")], "header 'a' that is not UTF-8"),
        ([("a", b"1"), ("b", b"1"), ("a", b"2")], "two headers of one name"),
        ([("a", None)], "header without a key or a value"),
        ([(None, b"1")], "header without a key or a value"),
        ([None], "header without a key or a value"),
        ([(str(at), b"") for at in range(ATTRIBUTES_MAX)], "headers; at most 1023"),
    ],
)
def test_headers_that_are_no_attributes_are_named(headers: list[Any], why: str) -> None:
    text = refused(batch(value=pa.array([b"x"] * 2), headers=pa.array([None, headers], HEADERS)))
    assert text.startswith("row 1 of partition 3 has ")
    assert why in text


def test_a_message_that_would_be_too_large_is_refused_before_it_is_staged() -> None:
    with pytest.raises(MessageTooLarge, match="row 0 of partition 3 is too large"):
        list(staged_batches(iter([batch(value=pa.array([bytes(MESSAGE_BYTES_MAX)]))]), 3, "t"))


def test_topics_are_names_as_everywhere(store: CloudStore) -> None:
    values, topics = pa.array([b"x"] * 3), pa.array(["orders", "/a/b", "/default/orders"])
    part = staged(store, batch(value=values, topic=topics), topic=None)
    assert part.topics == {"/default/orders": 2, "/a/b": 1}
    assert "row 1 of partition 3 has no topic" in refused(
        batch(value=values, topic=pa.array(["a", None, "b"])), topic=None
    )
    assert "row 2 of partition 3 has no good topic: 'a.b'" in refused(
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
        ({"value": LongType()}, "'value' is bigint; the sink takes binary or string"),
        ({"value": BinaryType(), "key": LongType()}, "'key' is bigint"),
        ({"value": BinaryType(), "offset": LongType()}, "no use for the columns 'offset'"),
        ({"value": BinaryType(), "partition": IntegerType()}, "'orders-part-2'"),
        ({"value": BinaryType(), "headers": StringType()}, "array<struct<key:string,value"),
        ({"value": BinaryType(), "topic": BinaryType()}, "'topic' is binary"),
        ({"value": BinaryType()}, "the option 'topic', or a column 'topic'"),
    ],
)
def test_columns_that_cannot_be_messages_are_refused(columns: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_columns(schema(**columns), None)
    assert why in str(caught.value)
