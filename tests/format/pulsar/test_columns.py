"""Entries as columns: both twins, and both against the decoder of single entries."""

from __future__ import annotations

import random
from array import array
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import codec
from forebay.format.pulsar.columns import (
    PLAIN,
    TRANSACTIONAL,
    EntryColumns,
    entry_columns,
    pure_entry_columns,
)
from forebay.format.pulsar.entry import MessageMetadata
from forebay.format.pulsar.messages import Kind, Message, decode_messages
from support import pulsar_entries as pulsar

TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER: Final = st.integers(0, 2**63 - 1)


@st.composite
def entries(draw: st.DrawFn) -> bytes:
    """Entries of all kinds, most of them plain."""
    value = draw(st.binary(max_size=40))
    fields: dict[str, Any] = {
        "sequence_id": draw(st.integers(0, 2**64 - 1)),
        "publish_time": draw(NUMBER),
        "event_time": draw(st.sampled_from([0, 1, 2**62])),
        "properties": tuple(draw(st.lists(st.tuples(TEXT, TEXT), max_size=3))),
        "partition_key": draw(st.none() | TEXT),
        "ordering_key": draw(st.none() | st.binary(max_size=5)),
        "schema_version": draw(st.none() | st.binary(max_size=8)),
        "null_value": draw(st.booleans()),
        "null_partition_key": draw(st.booleans()),
        "index": draw(st.none() | NUMBER),
        "checksum": draw(st.booleans()),
        "producer_name": draw(TEXT),
    }
    kind = draw(
        st.sampled_from(["plain"] * 5 + ["txn", "batch", "zlib", "marker", "sealed", "b64"])
    )
    if kind == "txn":
        fields |= {"txn_least_bits": draw(NUMBER), "txn_most_bits": 3}
    elif kind == "batch":
        return pulsar.batch([pulsar.single(value)], **fields)
    elif kind == "zlib":
        return pulsar.entry(value, compression="ZLIB", **fields)
    elif kind == "marker":
        return pulsar.marker()
    elif kind == "sealed":
        return pulsar.encrypted(value)
    elif kind == "b64":
        fields |= {"partition_key": "aGk=", "partition_key_b64": True}
    return pulsar.entry(value, **fields)


def laid_out(data: list[bytes]) -> tuple[bytes, memoryview, memoryview]:
    positions, lengths, at = array("Q"), array("I"), 3
    for each in data:
        positions.append(at)
        lengths.append(len(each))
        at += len(each)
    return b"???" + b"".join(data), memoryview(positions), memoryview(lengths)


def spans(found: EntryColumns, buffer: bytes, row: int, name: str) -> bytes | None:
    position = getattr(found, f"{name}_positions")[row]
    length = getattr(found, f"{name}_lengths")[row]
    return None if length < 0 else buffer[position : position + length]


def of_row(found: EntryColumns, buffer: bytes, row: int) -> Message:
    before = sum(found.property_counts[:row])
    pairs = []
    for number in range(before, before + found.property_counts[row]):
        at, size, value_at, value_size = found.properties[4 * number : 4 * number + 4]
        name = buffer[at : at + size].decode()
        pairs.append((name, buffer[value_at : value_at + value_size].decode()))
    producer = spans(found, buffer, row, "producer")
    assert producer is not None
    return Message(
        row,
        -1,
        0,
        Kind.TRANSACTIONAL if found.flags[row] & TRANSACTIONAL else Kind.MESSAGE,
        spans(found, buffer, row, "payload"),
        spans(found, buffer, row, "key"),
        spans(found, buffer, row, "ordering"),
        found.publish_times[row],
        found.event_times[row] or None,
        tuple(pairs),
        found.sequence_ids[row],
        producer.decode(),
        spans(found, buffer, row, "schema"),
        None if found.indexes[row] < 0 else found.indexes[row],
    )


@given(st.lists(entries(), max_size=6))
def test_a_plain_row_says_what_the_decoder_of_entries_says(data: list[bytes]) -> None:
    buffer, positions, lengths = laid_out(data)
    found = entry_columns(buffer, positions, lengths)
    for row, each in enumerate(data):
        decoded = decode_messages(row, each)
        assert isinstance(decoded, list)
        if found.flags[row] & PLAIN:
            assert decoded == [of_row(found, buffer, row)]
        else:
            assert not any(column[row] for column in found[:-1])


def damaged(source: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(source.randrange(1, 4)):
        raw[source.randrange(len(raw))] = source.randrange(256)
    return bytes(raw[: source.choice([len(raw), source.randrange(len(raw) + 1)])])


@given(st.lists(entries(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_both_twins_say_the_same_of_whole_and_of_damaged_entries(
    data: list[bytes], source: random.Random
) -> None:
    compiled = getattr(codec.compiled, "entry_columns", None)
    if compiled is None:
        pytest.skip("the compiled twin of the codec was not built")
    for given_entries in (data, [damaged(source, each) for each in data]):
        arguments = laid_out(given_entries)
        assert compiled(*arguments) == pure_entry_columns(*arguments)


def test_damage_without_a_checksum_is_never_a_wrong_row_that_python_reads_otherwise() -> None:
    source = random.Random(7)
    for _ in range(2000):
        whole = pulsar.entry(
            b"value", key="key", properties=(("a", "b"),), checksum=False, index=4, event_time=9
        )
        data = damaged(source, whole)
        buffer, positions, lengths = laid_out([data])
        found = entry_columns(buffer, positions, lengths)
        if found.flags[0]:
            assert decode_messages(0, data) == [of_row(found, buffer, 0)]


@pytest.mark.parametrize("function", [entry_columns, pure_entry_columns])
def test_entries_that_are_not_in_the_buffer_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="not inside the buffer of 4 bytes"):
        function(b"1234", memoryview(array("Q", [2])), memoryview(array("I", [3])))
    with pytest.raises(ValueError, match="do not match"):
        function(b"1234", memoryview(array("Q", [2])), memoryview(array("I", [])))


def test_every_field_of_a_plain_entry_has_its_column() -> None:
    metadata = pulsar.metadata()
    assert isinstance(metadata, MessageMetadata)
    buffer, positions, lengths = laid_out([pulsar.entry(b"v", key="k", index=17)])
    found = entry_columns(buffer, positions, lengths)
    assert list(found.flags) == [PLAIN]
    assert (spans(found, buffer, 0, "payload"), spans(found, buffer, 0, "key")) == (b"v", b"k")
    assert spans(found, buffer, 0, "schema") is None
    assert list(found.indexes) == [17]
