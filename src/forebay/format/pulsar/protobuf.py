"""The wire format of protobuf: fields out of bytes, and bytes out of fields.

Pulsar and BookKeeper keep their metadata in it. `fields` yields the fields of one message in their
order, without copying; the functions with a verb encode one field each. It knows no schemas:
who decodes a message picks the numbers that it knows and skips the others.

Beware: a varint is unsigned here. Negative numbers of the types int32 and int64 are encoded as ten
bytes of two's complement: `signed_32` and `signed_64` turn them back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.errors import LedgerError
from forebay.format.layout import Buffer
from forebay.limits import PROTOBUF_FIELDS_MAX

VARINT: Final = 0
FIXED_64: Final = 1
BYTES: Final = 2
FIXED_32: Final = 5

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_U64_MAX: Final = 2**64 - 1
_VARINT_BYTES_MAX: Final = 10
_NUMBER_MAX: Final = 2**29 - 1


class Field(NamedTuple):
    """One field of a message: its number, its wire type, and its value."""

    number: int
    wire: int
    value: int
    """The number; of a field of bytes, their position in the buffer."""
    length: int = 0
    """The length of a field of bytes."""


def fields(
    buffer: Buffer, start: int, end: int, what: str, most: int = PROTOBUF_FIELDS_MAX
) -> Iterator[Field]:
    """Yields the fields of the message in `buffer[start:end]`; raises LedgerError.

    `what` names the message in errors. Groups, which nobody writes any more, are refused.
    """
    at, left = start, most
    while at < end:
        if not left:
            raise LedgerError(f"{what} has more than {most} fields")
        left -= 1
        tag, at = read_varint(buffer, at, end, what)
        number, wire = tag >> 3, tag & 7
        if not 0 < number <= _NUMBER_MAX:
            raise LedgerError(f"{what} has a field with the impossible number {number}")
        if wire == VARINT:
            value, at = read_varint(buffer, at, end, what)
            yield Field(number, wire, value)
        elif wire == BYTES:
            length, at = read_varint(buffer, at, end, what)
            if length > end - at:
                raise _cut_off(what)
            yield Field(number, wire, at, length)
            at += length
        elif wire in (FIXED_32, FIXED_64):
            layout = _U32 if wire == FIXED_32 else _U64
            if layout.size > end - at:
                raise _cut_off(what)
            yield Field(number, wire, layout.unpack_from(buffer, at)[0])
            at += layout.size
        else:
            raise LedgerError(f"{what} has a field of the unknown wire type {wire}")


def read_varint(buffer: Buffer, at: int, end: int, what: str) -> tuple[int, int]:
    """Reads a number of 64 bits; returns it and the position after it."""
    value = shift = 0
    for position in range(at, min(at + _VARINT_BYTES_MAX, end)):
        byte = buffer[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _U64_MAX:
                break
            return value, position + 1
        shift += 7
    if end - at < _VARINT_BYTES_MAX:
        raise _cut_off(what)
    raise LedgerError(f"{what} has a number of more than 64 bits")


def _cut_off(what: str) -> LedgerError:
    return LedgerError(f"{what} ends inside a field")


def number_of(field: Field, what: str) -> int:
    """The value of a field that has to be a number; raises LedgerError."""
    if field.wire == BYTES:
        raise LedgerError(f"field {field.number} of {what} is not a number")
    return field.value


def bytes_of(buffer: Buffer, field: Field, what: str) -> bytes:
    """The value of a field that has to be bytes; raises LedgerError."""
    if field.wire != BYTES:
        raise LedgerError(f"field {field.number} of {what} is not bytes")
    return bytes(buffer[field.value : field.value + field.length])


def text_of(buffer: Buffer, field: Field, what: str) -> str:
    """The value of a field that has to be UTF-8; raises LedgerError."""
    try:
        return bytes_of(buffer, field, what).decode()
    except UnicodeDecodeError as error:
        raise LedgerError(f"field {field.number} of {what} is not UTF-8: {error}") from error


def message_of(field: Field, what: str) -> tuple[int, int]:
    """Start and end of a field that has to be a message; raises LedgerError."""
    if field.wire != BYTES:
        raise LedgerError(f"field {field.number} of {what} is not a message")
    return field.value, field.value + field.length


def signed_32(value: int) -> int:
    """The int32 in a varint, which keeps its low 32 bits."""
    low = value & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def signed_64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# ---- writing ----


def varint(value: int) -> bytes:
    """Encodes a number of 64 bits; a negative one as two's complement."""
    rest = value & _U64_MAX
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def put_number(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def put_bytes(number: int, value: Buffer) -> bytes:
    """A field of bytes, or of a message that is encoded."""
    return varint(number << 3 | BYTES) + varint(len(value)) + bytes(value)


def put_text(number: int, value: str) -> bytes:
    return put_bytes(number, value.encode())
