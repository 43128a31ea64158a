"""Damaged messages: truncation and damage raise nothing but MessageError."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import MessageError
from forebay.format.frame import encode_frame, scan
from forebay.format.layout import Span
from forebay.format.message import (
    StreamMessage,
    decode_attributes,
    decode_message,
    encode_message,
    message_columns,
)
from support.danube_messages import (
    SAMPLE,
    U32_MAX,
    U64_MAX,
    Number,
    encoded,
    fixed,
    messages,
    varint,
    without,
)


def test_a_truncated_message_is_refused_or_is_a_whole_older_one() -> None:
    data = encode_message(SAMPLE, 5)
    older = {len(encoded(SAMPLE, fixed, appended)): appended for appended in (0, 2, 3)}
    for cut in range(len(data) + 1):
        if cut in older:
            assert decode_message(data[:cut]) == without(SAMPLE, older[cut])
        else:
            with pytest.raises(MessageError):
                decode_message(data[:cut])


def test_a_truncated_varint_message_is_refused_or_is_a_whole_older_one() -> None:
    data = encoded(SAMPLE, varint, 3)
    older = {len(encoded(SAMPLE, varint, appended)): appended for appended in (0, 2, 3)}
    for cut in range(len(data) + 1):
        if cut in older:
            assert decode_message(data[:cut]) == without(SAMPLE, older[cut])
        else:
            with pytest.raises(MessageError):
                decode_message(data[:cut])


@pytest.mark.parametrize("number", [fixed, varint])
def test_bytes_behind_a_message_make_it_none(number: Number) -> None:
    with pytest.raises(MessageError):
        decode_message(encoded(SAMPLE, number, 3) + b"\0")


def decodes_or_message_error(data: bytes) -> None:
    with suppress(MessageError):
        decode_message(data)


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
@example(b"")
@example(bytes(10))
@example(b"\xff" * 100)
@example(b"\0" * 9 + b"\xfd" + b"\xff" * 8)
def test_no_bytes_raise_anything_but_message_error(data: bytes) -> None:
    decodes_or_message_error(data)


@settings(max_examples=200)
@given(
    message=messages(),
    number=st.sampled_from([fixed, varint]),
    appended=st.sampled_from([0, 2, 3]),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 400),
)
def test_no_damage_raises_anything_but_message_error(
    message: StreamMessage,
    number: Number,
    appended: int,
    damage: list[tuple[int, int]],
    cut: int,
) -> None:
    data = bytearray(encoded(message, number, appended))
    for at, value in damage:
        data[at % len(data)] = value
    decodes_or_message_error(bytes(data))
    decodes_or_message_error(bytes(data[:cut]))


@pytest.mark.parametrize("number", [fixed, varint])
def test_every_single_byte_of_damage_raises_nothing_but_message_error(number: Number) -> None:
    data = encoded(SAMPLE, number, 3)
    for at in range(len(data)):
        for value in (0, 1, 2, 0x2F, 0x7F, 0x80, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF):
            decodes_or_message_error(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("number", [fixed, varint])
def test_a_count_of_attributes_that_cannot_be_is_refused_at_once(number: Number) -> None:
    bare = replace(SAMPLE, attributes={})
    front = encoded(bare, number, 0).removesuffix(number(0))
    for count in (1, 1000, 2**20, 2**32, U64_MAX):
        with pytest.raises(MessageError):
            decode_message(front + number(count) + bytes(64))


@pytest.mark.parametrize("tag", [2, 3, 0x7F, 0xFF])
def test_an_option_is_absent_or_present_and_nothing_else(tag: int) -> None:
    whole = encoded(replace(SAMPLE, routing_key=None), fixed, 3)
    with pytest.raises(MessageError):
        decode_message(whole[:-1] + bytes([tag]))


def test_a_varint_schema_version_over_u32_is_refused() -> None:
    front = encoded(SAMPLE, varint, 0)
    assert decode_message(front + b"\0\1" + varint(U32_MAX)).schema_version == U32_MAX
    with pytest.raises(MessageError):
        decode_message(front + b"\0\1" + varint(U32_MAX + 1))


@pytest.mark.parametrize("number", [fixed, varint])
@pytest.mark.parametrize("text", ["/default/t1", "127.0.0.1:6650", "p1", "k", "v1", "rk"])
def test_text_that_is_not_utf_8_is_a_message_error(number: Number, text: str) -> None:
    broken = b"\xff" * (len(text) - 1)
    data = encoded(SAMPLE, number, 3)
    keep = text[:1].encode()  # the slash of the topic decides how the bytes are read
    damaged = data.replace(text.encode(), keep + broken if broken else b"\xff")
    assert damaged != data
    with pytest.raises(MessageError, match="UTF-8"):
        decode_message(damaged)


def test_attributes_from_the_columns_that_are_not_utf_8_are_a_message_error() -> None:
    data = encoded(replace(SAMPLE, attributes={"k": "v1"}), fixed, 3).replace(b"v1", b"\xff\xff")
    columns = message_columns(scan(encode_frame(0, data)))
    pairs = Span(columns.attribute_positions[0] - 16, columns.attribute_lengths[0])
    with pytest.raises(MessageError, match="UTF-8"):
        decode_attributes(data, pairs, columns.attribute_counts[0], columns.flavours[0])
