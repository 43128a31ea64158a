"""The codec of ledgers in plain Python: the reference, and the fallback without `_native`.

`forebay.format.pulsar.codec` chooses between this module and the compiled twin, and property tests
hold the two equal. The functions return tuples of raw columns; `blocks` and `frames` give them
names.
"""

from __future__ import annotations

import operator
import struct
from array import array
from functools import cache
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from forebay.errors import LedgerError, MessageError
from forebay.format.layout import FIXED, Buffer, Layout, Span, attribute_spans, locate
from forebay.format.pulsar.protobuf import (
    bytes_of,
    fields,
    message_of,
    number_of,
    put_bytes,
    put_number,
    put_text,
    read_varint,
    varint,
)
from forebay.format.pure import HEADER as FRAME_HEADER
from forebay.limits import (
    FRAME_PAYLOAD_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MIN,
    LEDGER_ENTRY_BYTES_MAX,
    OFFSET_MAX,
)

ENTRY_HEADER: Final = struct.Struct(">iq")
"""The length of an entry and its id. Padding begins with a length that is negative."""

COMPLETE: Final = 0
TORN: Final = 1
PADDING: Final = 2
BAD_LENGTH: Final = 3
BAD_ID: Final = 4

GOOD: Final = 0
BAD_CHECKSUM: Final = 1
NO_FRAME: Final = 2

EXTENSION: Final = 16000
"""The field of the metadata that says what Pulsar has no field for."""

RawEntries: TypeAlias = tuple[memoryview, memoryview, int, int]
RawPacked: TypeAlias = tuple[int, int, memoryview, int]
RawFrames: TypeAlias = tuple[bytes, memoryview, memoryview, int, int]

_POLYNOMIAL: Final = 0x82F63B78


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return table


def crc32c(data: Buffer) -> int:
    """The CRC-32C (Castagnoli) of the bytes."""
    table, register = _table(), 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        register = register >> 8 ^ table[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


def scan_entries(buffer: Buffer, start: int, left: int, entry_id: int) -> RawEntries:
    """Scans the entries of one block from `start`, of which `left` bytes remain; the first is
    `entry_id`.

    Returns the positions and lengths of their data, the position after the last whole entry, and
    how the scan ended: COMPLETE at the end of the buffer or of the block, TORN inside an entry that
    ends after the buffer. Raises ValueError if `start` is outside the buffer, or a number is
    negative.
    """
    positions, lengths = array("Q"), array("I")
    view = memoryview(buffer).cast("B")
    at, end = _checked(start, len(view)), COMPLETE
    stop, entry_id = at + _checked(left, OFFSET_MAX), _checked(entry_id, OFFSET_MAX)
    available = min(stop, len(view))
    while at < available:
        room = available - at
        if stop - at < 4:
            end = PADDING
            break
        if room < 4:
            end = TORN
            break
        (length,) = _LENGTH.unpack_from(view, at)
        if length < 0:
            end = PADDING
            break
        if length > LEDGER_ENTRY_BYTES_MAX or length > stop - at - ENTRY_HEADER.size:
            end = BAD_LENGTH
            break
        if room < ENTRY_HEADER.size:
            end = TORN
            break
        if ENTRY_HEADER.unpack_from(view, at)[1] != entry_id:
            end = BAD_ID
            break
        if length > room - ENTRY_HEADER.size:
            end = TORN
            break
        positions.append(at + ENTRY_HEADER.size)
        lengths.append(length)
        at += ENTRY_HEADER.size + length
        entry_id += 1
    return memoryview(positions), memoryview(lengths), at, end


_LENGTH: Final = struct.Struct(">i")


def _checked(value: int, limit: int) -> int:
    number = operator.index(value)
    if not 0 <= number <= limit:
        raise ValueError(f"{number} is not in 0..{limit}")
    return number


class _Rows:
    """The spans of rows in a buffer, from one row on."""

    def __init__(self, buffer: Buffer, positions: Buffer, lengths: Buffer, row: int) -> None:
        self.view = memoryview(buffer).cast("B")
        places, sizes = memoryview(positions).cast("B"), memoryview(lengths).cast("B")
        if places.nbytes % 8 or sizes.nbytes % 4 or places.nbytes // 8 != sizes.nbytes // 4:
            raise ValueError(
                f"{places.nbytes} bytes of positions and {sizes.nbytes} of lengths do not match"
            )
        self._positions, self._lengths = places.cast("Q"), sizes.cast("I")
        self.first = _checked(row, len(self._positions))

    def __len__(self) -> int:
        return len(self._positions)

    def consecutive(self, first: int) -> int:
        """The number of the first row, if those of all further rows are possible too."""
        return _checked(first, OFFSET_MAX - (len(self) - self.first))

    def span(self, row: int) -> Span:
        position, length = self._positions[row], self._lengths[row]
        if position + length > len(self.view):
            raise ValueError(f"row {row} is not inside the buffer of {len(self.view)} bytes")
        return Span(position, length)


def check_entries(buffer: Buffer, positions: Buffer, lengths: Buffer, row: int) -> int:
    """Returns the first row from `row` on that is damaged, or the number of rows.

    An entry is damaged if its checksum is wrong, or if it cannot be a message. Messages of old
    clients have no checksum. Raises ValueError if a row is not inside the buffer.
    """
    rows = _Rows(buffer, positions, lengths, row)
    for number in range(rows.first, len(rows)):
        span = rows.span(number)
        if not _is_whole(rows.view[span.position : span.position + span.length]):
            return number
    return len(rows)


_METADATA_BYTES_MIN: Final = 6
"""The required fields."""


def _is_whole(entry: memoryview) -> bool:
    """Whether an entry can be a message, and has the checksum that it says."""
    if len(entry) >= 6 and bytes(entry[:2]) == _BROKER_MAGIC:
        broker = _U32.unpack_from(entry, 2)[0]
        if broker > len(entry) - 6:
            return False
        entry = entry[6 + broker :]
    if len(entry) >= 6 and bytes(entry[:2]) == _CHECKED_MAGIC:
        if crc32c(entry[6:]) != _U32.unpack_from(entry, 2)[0]:
            return False
        entry = entry[6:]
    if len(entry) < 4:
        return False
    return bool(_METADATA_BYTES_MIN <= _U32.unpack_from(entry)[0] <= len(entry) - 4)


def pack_entries(
    entries: list[Buffer], index: int, entry_id: int, block: bytearray | memoryview, at: int
) -> tuple[int, int, int]:
    """Copies `entries[index:]` to `block[at:]`, each with its header, until one does not fit.

    The first is `entry_id`. Returns the index of the first that is left, the position after the
    last one, and the size of the one that did not fit, or 0. Raises ValueError if a number is out
    of range.
    """
    if not isinstance(entries, list):
        raise TypeError("the entries are no list")
    index = _checked(index, len(entries))
    entry_id = _checked(entry_id, OFFSET_MAX - len(entries))
    at = _checked(at, len(block))
    for number in range(index, len(entries)):
        data = memoryview(entries[number]).cast("B")
        if len(data) > min(len(block) - at - ENTRY_HEADER.size, LEDGER_ENTRY_BYTES_MAX):
            return number, at, len(data)
        ENTRY_HEADER.pack_into(block, at, len(data), entry_id)
        at += ENTRY_HEADER.size
        block[at : at + len(data)] = data
        at += len(data)
        entry_id += 1
    return len(entries), at, 0


# ---- frames to entries ----


def pack_frames(
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    row: int,
    offset: int,
    entry_id: int,
    block: bytearray | memoryview,
    at: int,
) -> RawPacked:
    """Writes the messages of frames as entries to `block[at:]`, until one does not fit.

    The frame of `row` has `offset`, and becomes the entry `entry_id`. Returns the first row that is
    left, the position after the last entry, the positions of the headers of the entries, and the
    size of the data that did not fit, or 0. Raises ValueError if a row is not inside the buffer, or
    a number is out of range.
    """
    rows = _Rows(buffer, positions, lengths, row)
    offset, entry_id = rows.consecutive(offset), rows.consecutive(entry_id)
    at = _checked(at, len(block))
    places = array("Q")
    for number in range(rows.first, len(rows)):
        data = _entry_of(rows.view, rows.span(number), offset)
        room = len(block) - at - ENTRY_HEADER.size
        if len(data) > min(room, LEDGER_ENTRY_BYTES_MAX):
            return number, at, memoryview(places), len(data)
        places.append(at)
        ENTRY_HEADER.pack_into(block, at, len(data), entry_id)
        at += ENTRY_HEADER.size
        block[at : at + len(data)] = data
        at += len(data)
        offset += 1
        entry_id += 1
    return len(rows), at, memoryview(places), 0


def _entry_of(view: memoryview, message: Span, offset: int) -> bytes:
    """The entry of the message of a frame."""
    try:
        layout = locate(view, *message)
    except MessageError:
        metadata = put_text(1, "") + put_number(2, 0) + put_number(3, 0)
        extension, payload = bytes([_VERBATIM, 0]), message
    else:
        texts = _texts_of(view, layout)
        metadata = _metadata(layout, texts)
        rebuilt = texts is not None and layout.flavour == FIXED and layout.topic_offset == offset
        extension = _parts(view, layout) if rebuilt else _verbatim(view, message, layout.payload)
        payload = layout.payload
    metadata += put_bytes(EXTENSION, extension)
    checked = b"".join((_U32.pack(len(metadata)), metadata, _cut(view, payload)))
    return _CHECKED_MAGIC + _U32.pack(crc32c(checked)) + checked


class _Texts(NamedTuple):
    """The texts of a message for which Pulsar has fields too."""

    producer_name: bytes
    pairs: list[bytes]
    key: bytes | None


def _cut(view: memoryview, span: Span) -> bytes:
    return bytes(view[span.position : span.position + span.length])


def _texts_of(view: memoryview, layout: Layout) -> _Texts | None:
    """None if a text is not UTF-8: Pulsar has no place for it."""
    spans = attribute_spans(view, layout.attributes, layout.attribute_count, layout.flavour)
    pairs = [_cut(view, span) for span in spans]
    producer_name = _cut(view, layout.producer_name)
    key = None if layout.routing_key is None else _cut(view, layout.routing_key)
    try:
        for text in (producer_name, key or b"", *pairs):
            text.decode()
    except UnicodeDecodeError:
        return None
    return _Texts(producer_name, pairs, key)


def _metadata(layout: Layout, texts: _Texts | None) -> bytes:
    parts = [
        put_bytes(1, b"" if texts is None else texts.producer_name),
        put_number(2, layout.request_id),
        put_number(3, layout.publish_time),
    ]
    if texts is not None:
        pairs = iter(texts.pairs)
        for key, value in zip(pairs, pairs, strict=True):
            parts.append(put_bytes(4, put_bytes(1, key) + put_bytes(2, value)))
        if texts.key is not None:
            parts.append(put_bytes(6, texts.key))
    return b"".join(parts)


_U32: Final = struct.Struct(">I")
_CHECKED_MAGIC: Final = b"\x0e\x01"
_BROKER_MAGIC: Final = b"\x0e\x02"
_PARTS: Final = 1
_VERBATIM: Final = 2
_HAS_SUBSCRIPTION: Final = 1
_HAS_SCHEMA_ID: Final = 2
_HAS_SCHEMA_VERSION: Final = 4
_NO_LATER: Final = 0
_SCHEMA: Final = 1
_SCHEMA_AND_KEY: Final = 2


def _parts(view: memoryview, layout: Layout) -> bytes:
    """The extension of a message that can be built again from its parts."""
    subscription = layout.subscription_name
    flags = _HAS_SUBSCRIPTION if subscription is not None else 0
    flags |= _HAS_SCHEMA_ID if layout.schema_id is not None else 0
    flags |= _HAS_SCHEMA_VERSION if layout.schema_version is not None else 0
    flags |= layout.later << 3
    parts = [bytes([_PARTS, flags]), varint(layout.producer_id)]
    for span in (layout.topic_name, layout.broker_addr, subscription):
        if span is not None:
            parts += (varint(span.length), _cut(view, span))
    if layout.schema_id is not None:
        parts.append(varint(layout.schema_id))
    if layout.schema_version is not None:
        parts.append(varint(layout.schema_version))
    return b"".join(parts)


def _verbatim(view: memoryview, message: Span, payload: Span) -> bytes:
    """The extension of a message that is kept as it is, but for its payload."""
    prefix = _cut(view, Span(message.position, payload.position - message.position))
    after = payload.position + payload.length
    suffix = _cut(view, Span(after, message.position + message.length - after))
    return b"".join((bytes([_VERBATIM]), varint(len(prefix)), prefix, suffix))


# ---- entries to frames ----


class _NoFrameError(Exception):
    """The entry was not made of a frame."""


class _BadChecksumError(Exception):
    pass


def unpack_frames(
    buffer: Buffer, positions: Buffer, lengths: Buffer, row: int, offset: int, bytes_max: int
) -> RawFrames:
    """Builds the frames of the entries again, up to `bytes_max` bytes but at least one.

    The entry of `row` becomes the frame `offset`. Returns the frames, the positions and lengths of
    their messages, the first row that is left, and what is wrong with that one, if anything. Raises
    ValueError if a row is not inside the buffer, or a number is out of range.
    """
    rows = _Rows(buffer, positions, lengths, row)
    offset = rows.consecutive(offset)
    bytes_max = _checked(bytes_max, OFFSET_MAX)
    out, places, sizes, fault, number = bytearray(), array("Q"), array("I"), GOOD, rows.first
    for number in range(rows.first, len(rows) + 1):
        if number == len(rows):
            break
        try:
            message = _message_of(rows.view, rows.span(number), offset)
        except _BadChecksumError:
            fault = BAD_CHECKSUM
            break
        except (_NoFrameError, LedgerError):
            fault = NO_FRAME
            break
        if out and len(out) + FRAME_HEADER.size + len(message) > bytes_max:
            break
        out += FRAME_HEADER.pack(offset, len(message), crc32(message))
        places.append(len(out))
        sizes.append(len(message))
        out += message
        offset += 1
    return bytes(out), memoryview(places), memoryview(sizes), number, fault


class _Read(NamedTuple):
    """What the metadata of an entry say."""

    sequence_id: int
    publish_time: int
    producer_name: bytes
    pairs: list[bytes]
    key: bytes | None
    extension: bytes


def _message_of(view: memoryview, span: Span, offset: int) -> bytes:
    """The message of the frame that an entry was made of."""
    entry = view[span.position : span.position + span.length]
    if len(entry) < 10 or bytes(entry[:2]) != _CHECKED_MAGIC:
        raise _NoFrameError
    if crc32c(entry[6:]) != _U32.unpack_from(entry, 2)[0]:
        raise _BadChecksumError
    end = 10 + _U32.unpack_from(entry, 6)[0]
    if end > len(entry):
        raise _NoFrameError
    message = _rebuilt(_read_metadata(entry, end), bytes(entry[end:]), offset)
    if not FRAME_PAYLOAD_BYTES_MIN <= len(message) <= FRAME_PAYLOAD_BYTES_MAX:
        raise _NoFrameError
    return message


def _read_metadata(entry: memoryview, end: int) -> _Read:
    texts: dict[int, bytes] = {}
    numbers: dict[int, int] = {}
    pairs: list[bytes] = []
    for field in fields(entry, 10, end, "it", OFFSET_MAX):
        if field.number in (1, 6, EXTENSION):
            texts[field.number] = bytes_of(entry, field, "it")
        elif field.number in (2, 3):
            numbers[field.number] = number_of(field, "it")
        elif field.number == 4:
            pairs += _read_pair(entry, *message_of(field, "it"))
    if 1 not in texts or EXTENSION not in texts or len(numbers) != 2:
        raise _NoFrameError
    return _Read(numbers[2], numbers[3], texts[1], pairs, texts.get(6), texts[EXTENSION])


def _read_pair(entry: memoryview, start: int, end: int) -> tuple[bytes, bytes]:
    found = {1: b"", 2: b""}
    for field in fields(entry, start, end, "it", OFFSET_MAX):
        if field.number in found:
            found[field.number] = bytes_of(entry, field, "it")
    return found[1], found[2]


def _rebuilt(read: _Read, payload: bytes, offset: int) -> bytes:
    extension, kind = read.extension, read.extension[:1]
    if kind == bytes([_VERBATIM]):
        prefix, at = _read_bytes(extension, 1)
        return prefix + payload + extension[at:]
    if kind != bytes([_PARTS]) or len(extension) < 2:
        raise _NoFrameError
    flags, at = extension[1], 2
    later = flags >> 3
    if later > _SCHEMA_AND_KEY or (read.key is not None and later != _SCHEMA_AND_KEY):
        raise _NoFrameError
    if later == _NO_LATER and flags & (_HAS_SCHEMA_ID | _HAS_SCHEMA_VERSION):
        raise _NoFrameError
    producer_id, at = read_varint(extension, at, len(extension), "it")
    topic, at = _read_bytes(extension, at)
    broker, at = _read_bytes(extension, at)
    subscription, schema = b"\0", b""
    if flags & _HAS_SUBSCRIPTION:
        name, at = _read_bytes(extension, at)
        subscription = b"\1" + _text(name)
    if later:
        schema, at = _rebuilt_schema(extension, at, flags)
    if at != len(extension):
        raise _NoFrameError
    if later == _SCHEMA_AND_KEY:
        schema += b"\0" if read.key is None else b"\1" + _text(read.key)
    return b"".join(
        (
            _U64.pack(read.sequence_id),
            _U64.pack(producer_id),
            _text(topic),
            _text(broker),
            _U64.pack(offset),
            _text(payload),
            _U64.pack(read.publish_time),
            _text(read.producer_name),
            subscription,
            _U64.pack(len(read.pairs) // 2),
            *map(_text, read.pairs),
            schema,
        )
    )


def _rebuilt_schema(extension: bytes, at: int, flags: int) -> tuple[bytes, int]:
    schema_id = schema_version = b"\0"
    if flags & _HAS_SCHEMA_ID:
        number, at = read_varint(extension, at, len(extension), "it")
        schema_id = b"\1" + _U64.pack(number)
    if flags & _HAS_SCHEMA_VERSION:
        number, at = read_varint(extension, at, len(extension), "it")
        if number > 0xFFFFFFFF:
            raise _NoFrameError
        schema_version = b"\1" + _LITTLE_U32.pack(number)
    return schema_id + schema_version, at


def _read_bytes(extension: bytes, at: int) -> tuple[bytes, int]:
    length, at = read_varint(extension, at, len(extension), "it")
    if length > len(extension) - at:
        raise _NoFrameError
    return extension[at : at + length], at + length


def _text(raw: bytes) -> bytes:
    return _U64.pack(len(raw)) + raw


_U64: Final = struct.Struct("<Q")
_LITTLE_U32: Final = struct.Struct("<I")
