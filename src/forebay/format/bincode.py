"""The two integer encodings of bincode, read from a buffer with bounds.

bincode 1 writes integers in fixed width, bincode 2 as varints (one byte below 251, else a marker
byte 251, 252 or 253 and a u16, u32 or u64). Strings and byte vectors are a length and the bytes,
an option is one tag byte. Every reader takes `(buffer, at, end)` and answers the value and the
position behind it; it raises `MalformedError` rather than look past `end`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

FIXED: Final = 1
VARINT: Final = 2

_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_VARINTS: Final = {251: _U16, 252: _U32, 253: _U64}


class Span(NamedTuple):
    """A byte range of the buffer."""

    position: int
    length: int


class MalformedError(Exception):
    """This reading does not fit; another one may."""


Reader: TypeAlias = Callable[[Buffer, int, int], tuple[int, int]]


def fixed_u64(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    if end - at < 8:
        raise MalformedError
    return _U64.unpack_from(buffer, at)[0], at + 8


def fixed_u32(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    if end - at < 4:
        raise MalformedError
    return _U32.unpack_from(buffer, at)[0], at + 4


def varint(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise MalformedError
    first = buffer[at]
    at += 1
    if first < 251:
        return first, at
    layout = _VARINTS.get(first)
    if layout is None or end - at < layout.size:
        raise MalformedError
    return layout.unpack_from(buffer, at)[0], at + layout.size


def varint_u32(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    value, at = varint(buffer, at, end)
    if value > 0xFFFFFFFF:
        raise MalformedError
    return value, at


def span(buffer: Buffer, at: int, end: int, u64: Reader) -> tuple[Span, int]:
    length, at = u64(buffer, at, end)
    if length > end - at:
        raise MalformedError
    return Span(at, length), at + length


def tag(buffer: Buffer, at: int, end: int) -> tuple[bool, int]:
    if at >= end or buffer[at] > 1:
        raise MalformedError
    return buffer[at] == 1, at + 1


def option(buffer: Buffer, at: int, end: int, read: Reader) -> tuple[int | None, int]:
    present, at = tag(buffer, at, end)
    return read(buffer, at, end) if present else (None, at)


def option_span(buffer: Buffer, at: int, end: int, u64: Reader) -> tuple[Span | None, int]:
    present, at = tag(buffer, at, end)
    return span(buffer, at, end, u64) if present else (None, at)


def readers(flavour: int) -> tuple[Reader, Reader]:
    """How that flavour reads a u64 and a u32."""
    return (fixed_u64, fixed_u32) if flavour == FIXED else (varint, varint_u32)
