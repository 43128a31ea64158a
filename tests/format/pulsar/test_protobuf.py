"""The wire format of protobuf: its limits, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.format.pulsar.protobuf import (
    Field,
    fields,
    put_bytes,
    put_number,
    put_text,
    read_varint,
    signed_32,
    signed_64,
    text_of,
    varint,
)
from forebay.limits import PROTOBUF_FIELDS_MAX


def decoded(data: bytes) -> list[Field]:
    return list(fields(data, 0, len(data), "it"))


@given(st.integers(-(2**63), 2**64 - 1))
def test_numbers_are_read_back(value: int) -> None:
    encoded = varint(value)
    assert read_varint(encoded, 0, len(encoded), "it") == (value % 2**64, len(encoded))
    assert signed_64(value % 2**64) == (value if value < 2**63 else value - 2**64)


@pytest.mark.parametrize("value", [-1, -(2**31), 0, 2**31 - 1])
def test_a_negative_number_of_32_bits_is_ten_bytes(value: int) -> None:
    (field,) = decoded(put_number(1, value))
    assert signed_32(field.value) == value
    assert len(varint(value)) == (10 if value < 0 else len(varint(value)))


def test_fields_come_in_their_order_and_are_not_copied() -> None:
    data = put_text(1, "a") + put_number(1, 5) + put_bytes(2, b"")
    assert decoded(data) == [Field(1, 2, 2, 1), Field(1, 0, 5), Field(2, 2, 7, 0)]
    assert text_of(data, Field(1, 2, 2, 1), "it") == "a"


def test_fixed_numbers_are_read() -> None:
    data = b"\x09" + bytes([1] + [0] * 7) + b"\x15" + bytes([2, 0, 0, 0])
    assert decoded(data) == [Field(1, 1, 1), Field(2, 5, 2)]


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"\x08", "inside a field"),
        (b"\x0a\x05abc", "inside a field"),
        (b"\x09\0\0\0", "inside a field"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x08" + b"\xff" * 11, "more than 64 bits"),
        (b"\x0b", "wire type 3"),
        (b"\x00\x01", "impossible number 0"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "inside a field"),
    ],
)
def test_what_breaks_a_rule_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(LedgerError, match=wrong):
        decoded(data)


def test_the_number_of_fields_is_limited() -> None:
    with pytest.raises(LedgerError, match="more than"):
        decoded(b"\x08\x01" * (PROTOBUF_FIELDS_MAX + 1))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_give_fields_or_an_error(data: bytes) -> None:
    try:
        found = decoded(data)
    except LedgerError:
        return
    assert all(field.length <= len(data) for field in found)


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(LedgerError, match="not UTF-8"):
        text_of(b"\xff", Field(1, 2, 0, 1), "it")
