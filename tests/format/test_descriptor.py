"""Descriptors: Danube's JSON, with every field checked when it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DescriptorError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.limits import (
    DESCRIPTOR_BYTES_MAX,
    LEDGER_FIELDS_MAX,
    LEDGER_TEXT_BYTES_MAX,
    OBJECT_INDEX_ENTRIES_MAX,
    OBJECT_KEY_BYTES_MAX,
    OFFSET_MAX,
)

DANUBES = (
    b'{"completed":true,"created_at":1700000000,"end_offset":5,"etag":null,'
    b'"object_id":"data-0-5.dnb1","offset_index":[[0,0]],"size":888,"start_offset":0}'
)
PLAIN = ObjectDescriptor("data-0-5.dnb1", 0, 5, 888, None, 1_700_000_000, offset_index=((0, 0),))

numbers = st.integers(0, OFFSET_MAX)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"),
    min_size=1,
    max_size=30,
).filter(lambda name: name not in {".", ".."})


@st.composite
def optional_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Any of the fields that descriptors of an earlier release do not have."""
    ledger = st.dictionaries(texts, numbers | texts, min_size=1, max_size=LEDGER_FIELDS_MAX)
    fields = {
        "content_hash": st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
        "highest_publish_time": numbers,
        "raw_size": numbers,
        "codec": st.sampled_from(["zstd", "a-1"]),
        "format": st.sampled_from(["dnb1", "pulsar"]),
        "ledger": ledger.map(lambda found: tuple(sorted(found.items()))),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    return {name: draw(fields[name]) for name in sorted(chosen)}


@st.composite
def descriptors(draw: st.DrawFn) -> ObjectDescriptor:
    start = draw(st.integers(0, OFFSET_MAX - 200))
    end = start + draw(st.integers(0, 100))
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 10**6)), max_size=10))
    index, size = [(start, 0)], draw(st.integers(1, 10**6))
    for step, width in steps:
        if index[-1][0] + step <= end:
            index.append((index[-1][0] + step, index[-1][1] + width))
    return ObjectDescriptor(
        draw(names),
        start,
        end,
        index[-1][1] + size,
        draw(st.none() | texts),
        draw(numbers),
        draw(st.booleans()),
        draw(st.sampled_from([None, (), tuple(index)])),
        **draw(optional_fields()),
    )


@settings(max_examples=200)
@given(descriptor=descriptors())
def test_a_descriptor_comes_back_as_it_was(descriptor: ObjectDescriptor) -> None:
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor


def test_danubes_bytes_are_read_and_written() -> None:
    assert decode_descriptor(DANUBES) == PLAIN
    assert encode_descriptor(PLAIN) == DANUBES


def test_without_an_index_there_is_no_field_for_it() -> None:
    data = encode_descriptor(replace(PLAIN, offset_index=None))
    assert b"offset_index" not in data
    assert decode_descriptor(data).offset_index is None
    assert decode_descriptor(changed(offset_index=None)).offset_index is None


def test_optional_fields_that_are_absent_stay_absent() -> None:
    """A descriptor of an earlier release keeps its bytes."""
    assert encode_descriptor(decode_descriptor(DANUBES)) == DANUBES
    optional = ("codec", "content_hash", "format", "highest_publish_time", "ledger", "raw_size")
    nothing = changed(**dict.fromkeys(optional))
    assert encode_descriptor(decode_descriptor(nothing)) == DANUBES


def test_the_order_of_fields_and_unknown_fields_do_not_matter() -> None:
    body = {"future": {"a": [1]}, **dict(reversed(json.loads(DANUBES).items()))}
    assert decode_descriptor(json.dumps(body, indent=1).encode()) == PLAIN


def test_the_etag_may_be_left_out() -> None:
    body = json.loads(DANUBES)
    del body["etag"]
    assert decode_descriptor(json.dumps(body).encode()) == PLAIN


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(DANUBES), **fields}).encode()


WRONG: list[tuple[str, Any]] = [
    ("object_id", ""),
    ("object_id", "."),
    ("object_id", ".."),
    ("object_id", "a/b"),
    ("object_id", "a\\b"),
    ("object_id", "a\0b"),
    ("object_id", "a\nb"),
    ("object_id", "\ud800"),
    ("object_id", "x" * (OBJECT_KEY_BYTES_MAX + 1)),
    ("object_id", None),
    ("object_id", 7),
    ("object_id", ["data-0-5.dnb1"]),
    ("etag", 7),
    ("etag", "\udfff"),
    ("completed", 1),
    ("completed", None),
    ("start_offset", 6),
    ("start_offset", -1),
    ("start_offset", 0.0),
    ("start_offset", False),
    ("start_offset", "0"),
    ("end_offset", OFFSET_MAX + 1),
    ("end_offset", None),
    ("size", -1),
    ("size", 1e3),
    ("size", float("nan")),
    ("created_at", 1.5),
    ("content_hash", ""),
    ("content_hash", "0" * 64),
    ("content_hash", "sha256:" + "0" * 63),
    ("content_hash", "sha256:" + "0" * 64 + "\n"),
    ("content_hash", "sha256:" + "A" * 64),
    ("content_hash", 7),
    ("highest_publish_time", -1),
    ("highest_publish_time", 1.5),
    ("raw_size", OFFSET_MAX + 1),
    ("raw_size", "1"),
    ("codec", ""),
    ("codec", "z" * 33),
    ("codec", "Zstd"),
    ("format", "a b"),
    ("format", 1),
    ("ledger", {}),
    ("ledger", []),
    ("ledger", {"id": -1}),
    ("ledger", {"id": True}),
    ("ledger", {"id": None}),
    ("ledger", {"id": [1]}),
    ("ledger", {"id": "\ud800"}),
    ("ledger", {"id": "x" * (LEDGER_TEXT_BYTES_MAX + 1)}),
    ("ledger", {"x" * (LEDGER_TEXT_BYTES_MAX + 1): 1}),
    ("ledger", dict.fromkeys(map(str, range(LEDGER_FIELDS_MAX + 1)), 1)),
    ("offset_index", {}),
    ("offset_index", [[0]]),
    ("offset_index", [[0, 0, 0]]),
    ("offset_index", [0, 0]),
    ("offset_index", ["00"]),
    ("offset_index", [[False, 0]]),
    ("offset_index", [[0, False]]),
    ("offset_index", [[0, 0.0]]),
    ("offset_index", [[1, 0]]),
    ("offset_index", [[0, 1]]),
    ("offset_index", [[-1, 0]]),
    ("offset_index", [[0, 0], [0, 9]]),
    ("offset_index", [[0, 0], [1, 0]]),
    ("offset_index", [[0, 0], [3, 90], [2, 99]]),
    ("offset_index", [[0, 0], [6, 90]]),
    ("offset_index", [[0, 0], [5, 888]]),
    ("offset_index", [[0, 0], [10**30, 10**30]]),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_a_field_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(DescriptorError):
        decode_descriptor(changed(**{name: value}))


@pytest.mark.parametrize(
    "name", ["completed", "created_at", "end_offset", "object_id", "size", "start_offset"]
)
def test_a_field_that_is_missing_is_refused(name: str) -> None:
    body = json.loads(DANUBES)
    del body[name]
    with pytest.raises(DescriptorError):
        decode_descriptor(json.dumps(body).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"\x80abc",
        DANUBES[:-1],
        DANUBES + b"x",
        b"[" * 100_000,
        b'{"size":' + b"9" * 5000 + b"}",
        changed(offset_index="X").replace(b'"X"', b"[" * 900 + b"]" * 900),
        changed(object_id="X").replace(b'"X"', b"[" * 900 + b"]" * 900),
        changed(etag="x" * DESCRIPTOR_BYTES_MAX),
    ],
    ids=range(13),
)
def test_what_is_no_descriptor_is_refused(data: bytes) -> None:
    with pytest.raises(DescriptorError):
        decode_descriptor(data)


_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_nested = st.lists(_plain, max_size=3) | st.dictionaries(st.text(max_size=5), _plain, max_size=3)
json_values = _plain | _nested | st.lists(_nested, max_size=3)


@settings(max_examples=300)
@given(
    fields=st.dictionaries(st.sampled_from(sorted(json.loads(DANUBES))), json_values, max_size=3)
)
def test_hostile_json_is_read_or_refused_and_nothing_else(fields: dict[str, Any]) -> None:
    try:
        descriptor = decode_descriptor(changed(**fields))
    except DescriptorError:
        return
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor


@settings(max_examples=200)
@given(at=st.integers(0, len(DANUBES) - 1), byte=st.integers(0, 255))
def test_a_damaged_byte_is_read_or_refused_and_nothing_else(at: int, byte: int) -> None:
    data = bytearray(DANUBES)
    data[at] = byte
    try:
        descriptor = decode_descriptor(bytes(data))
    except DescriptorError:
        return
    assert decode_descriptor(encode_descriptor(descriptor)) == descriptor


def test_the_largest_index_fits() -> None:
    start = OFFSET_MAX - OBJECT_INDEX_ENTRIES_MAX
    index = [(start, 0)]
    index += [
        (start + n, OFFSET_MAX - 1 - OBJECT_INDEX_ENTRIES_MAX + n)
        for n in range(1, OBJECT_INDEX_ENTRIES_MAX)
    ]
    largest = ObjectDescriptor(
        "d" * OBJECT_KEY_BYTES_MAX,
        start,
        OFFSET_MAX,
        OFFSET_MAX,
        "e" * 1024,
        OFFSET_MAX,
        offset_index=tuple(index),
        content_hash="sha256:" + "f" * 64,
        highest_publish_time=OFFSET_MAX,
        raw_size=OFFSET_MAX,
        codec="z" * 32,
        format="z" * 32,
        ledger=tuple(
            (f"{number:02}" + "\1" * (LEDGER_TEXT_BYTES_MAX - 2), "\1" * LEDGER_TEXT_BYTES_MAX)
            for number in range(LEDGER_FIELDS_MAX)
        ),
    )
    assert decode_descriptor(encode_descriptor(largest)) == largest


def test_a_descriptor_that_could_not_be_read_back_is_not_written() -> None:
    with pytest.raises(DescriptorError):
        encode_descriptor(replace(PLAIN, etag="x" * DESCRIPTOR_BYTES_MAX))


# ---- finding offsets ----


@settings(max_examples=200)
@given(descriptor=descriptors())
def test_seek_and_position_after_answer_the_nearest_entries(descriptor: ObjectDescriptor) -> None:
    index = descriptor.offset_index or ((descriptor.start_offset, 0),)
    for offset in range(descriptor.start_offset, descriptor.next_offset):
        assert descriptor.seek(offset) == max(entry for entry in index if entry[0] <= offset)
        later = [position for entry, position in index if entry > offset]
        assert descriptor.position_after(offset) == min(later, default=descriptor.size)


def test_an_offset_below_the_object_seeks_its_start() -> None:
    descriptor = replace(PLAIN, start_offset=3, offset_index=((3, 0), (4, 90)))
    assert descriptor.seek(0) == (3, 0)
    assert descriptor.position_after(0) == 0


def test_counts_include_the_last_offset() -> None:
    assert (PLAIN.count, PLAIN.next_offset) == (6, 6)
