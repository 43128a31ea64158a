"""Locates the fields of an encoded message, in any of Danube's encodings.

There are two flavours of integers, bincode 1 (fixed width) and bincode 2 (varint), each with none,
two or three of the later fields appended. The bytes do not name the flavour, so both are tried: a
message is of a flavour if decoding it that way consumes exactly all bytes. If both do, it is fixed,
unless only the varint decoding has a topic name that starts with "/". `docs/formats/message.md`
explains why that is safe. The functions for single integers, strings and options also decode
Danube's checkpoints.

Beware: only the structure is checked here. Strings are byte ranges that may not be valid UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from forebay.errors import MessageError

Buffer: TypeAlias = bytes | bytearray | memoryview
Reader: TypeAlias = Callable[[Buffer, int, int], tuple[int, int]]
"""(buffer, position, end) -> (number, position after it); raises MalformedError."""

FIXED: Final = 1
VARINT: Final = 2
_SLASH: Final = 0x2F
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_VARINTS: Final = {251: _U16, 252: _U32, 253: _U64}


class Span(NamedTuple):
    """A byte range of the buffer."""

    position: int
    length: int


class MalformedError(Exception):
    """The bytes are not of this flavour; they may be of the other."""


class Layout(NamedTuple):
    """The plain values of one message, and the ranges of its strings."""

    flavour: int
    request_id: int
    producer_id: int
    topic_name: Span
    broker_addr: Span
    topic_offset: int
    payload: Span
    publish_time: int
    producer_name: Span
    subscription_name: Span | None
    attributes: Span
    """The key and value pairs, without their count."""
    attribute_count: int
    schema_id: int | None
    schema_version: int | None
    routing_key: Span | None
    later: int = 0
    """Which of the later fields there are: 0 for none, 1 for the schema, 2 for the key as well."""


def locate(buffer: Buffer, position: int, length: int) -> Layout:
    """Locates the fields of the message in `buffer[position:position + length]`.

    Raises MessageError if it is of neither flavour.
    """
    end = position + length
    fixed = _try(buffer, position, end, FIXED)
    if fixed is not None and _rooted(buffer, fixed):
        return fixed
    varint = _try(buffer, position, end, VARINT)
    if varint is not None and (fixed is None or _rooted(buffer, varint)):
        return varint
    if fixed is not None:
        return fixed
    raise MessageError(f"{length} bytes at position {position} are not a known message encoding")


def message_head(
    buffer: Buffer, position: int, end: int, flavour: int
) -> tuple[int | None, Span | None]:
    """The offset and the payload of a message of which the bytes before `end` are there.

    Each is None if they are not of this flavour up to there. The payload may end after `end`.
    """
    u64, _ = readers(flavour)
    offset = None
    try:
        _, at = u64(buffer, position, end)
        _, at = u64(buffer, at, end)
        _, at = span(buffer, at, end, u64)
        _, at = span(buffer, at, end, u64)
        offset, at = u64(buffer, at, end)
        length, at = u64(buffer, at, end)
    except MalformedError:
        return offset, None
    return offset, Span(at, length)


def repeats_offset(buffer: Buffer, position: int, end: int, offset: int) -> bool:
    """Whether the message seems to have this offset, in either flavour."""
    return any(
        message_head(buffer, position, end, flavour)[0] == offset for flavour in (FIXED, VARINT)
    )


def attribute_spans(buffer: Buffer, pairs: Span, count: int, flavour: int) -> list[Span]:
    """The spans of an attributes block that `locate` found: key, value, key, value …"""
    u64, _ = readers(flavour)
    at, end = pairs.position, pairs.position + pairs.length
    spans: list[Span] = []
    for _ in range(2 * count):
        found, at = span(buffer, at, end, u64)
        spans.append(found)
    return spans


def _try(buffer: Buffer, position: int, end: int, flavour: int) -> Layout | None:
    try:
        return _read(buffer, position, end, flavour)
    except MalformedError:
        return None


def _rooted(buffer: Buffer, layout: Layout) -> bool:
    return layout.topic_name.length > 0 and buffer[layout.topic_name.position] == _SLASH


def _read(buffer: Buffer, at: int, end: int, flavour: int) -> Layout:
    u64, u32 = readers(flavour)
    request_id, at = u64(buffer, at, end)
    producer_id, at = u64(buffer, at, end)
    topic_name, at = span(buffer, at, end, u64)
    broker_addr, at = span(buffer, at, end, u64)
    topic_offset, at = u64(buffer, at, end)
    payload, at = span(buffer, at, end, u64)
    publish_time, at = u64(buffer, at, end)
    producer_name, at = span(buffer, at, end, u64)
    subscription_name, at = option_span(buffer, at, end, u64)
    attributes, attribute_count, at = _attributes(buffer, at, end, u64)
    schema_id = schema_version = routing_key = None
    later = 0
    if at < end:
        later = 1
        schema_id, at = option(buffer, at, end, u64)
        schema_version, at = option(buffer, at, end, u32)
        if at < end:
            later = 2
            routing_key, at = option_span(buffer, at, end, u64)
    if at != end:
        raise MalformedError
    return Layout(
        flavour,
        request_id,
        producer_id,
        topic_name,
        broker_addr,
        topic_offset,
        payload,
        publish_time,
        producer_name,
        subscription_name,
        attributes,
        attribute_count,
        schema_id,
        schema_version,
        routing_key,
        later,
    )


def _attributes(buffer: Buffer, at: int, end: int, u64: Reader) -> tuple[Span, int, int]:
    count, at = u64(buffer, at, end)
    if count > end - at:
        raise MalformedError
    first = at
    for _ in range(2 * count):
        _, at = span(buffer, at, end, u64)
    return Span(first, at - first), count, at


def readers(flavour: int) -> tuple[Reader, Reader]:
    """The functions that read a u64 and a u32 of that flavour."""
    return (fixed_u64, fixed_u32) if flavour == FIXED else (varint, varint_u32)


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
