"""One entry of a ledger, as a Pulsar broker stores it: metadata and payload of a message.

    [0x0e02][u32 size][BrokerEntryMetadata]        only if the broker adds it
    [0x0e01][u32 CRC-32C]                          only if the client adds it: all modern ones do
    [u32 size][MessageMetadata][payload]

All numbers are big-endian. The checksum is over everything after it. The layout is in
`docs/formats/pulsar-entry.md`. An entry may be one message,
a batch, a chunk of a larger message, or a marker of the broker: `forebay.format.pulsar.messages`
tells them apart.

Beware: the payload is as it was sent, perhaps compressed or encrypted. And with several values of a
field the last one counts, as always in protobuf.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

from forebay.errors import LedgerError
from forebay.format.layout import Buffer
from forebay.format.pulsar import pure
from forebay.format.pulsar.codec import crc32c
from forebay.format.pulsar.protobuf import (
    Field,
    bytes_of,
    fields,
    message_of,
    number_of,
    put_bytes,
    put_number,
    put_text,
    read_varint,
    signed_32,
    signed_64,
    text_of,
)
from forebay.limits import ATTRIBUTES_MAX

_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_BROKER_MAGIC: Final = 0x0E02
_CHECKED_MAGIC: Final = 0x0E01

EXTENSION: Final = pure.EXTENSION
"""The number of the field in which Forebay keeps what Pulsar has no field for: see `frames`."""


class Compression(IntEnum):
    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


@dataclass(frozen=True, slots=True)
class BrokerEntryMetadata:
    broker_timestamp: int | None = None
    index: int | None = None
    """The number of the message in its topic; of a batch, that of its last message."""


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    name: str
    value: bytes
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class MessageMetadata:
    """The metadata of an entry. What it does not have is None or empty."""

    producer_name: str
    sequence_id: int
    publish_time: int
    """In milliseconds."""
    properties: tuple[tuple[str, str], ...] = ()
    replicated_from: str | None = None
    partition_key: str | None = None
    replicate_to: tuple[str, ...] = ()
    compression: int = Compression.NONE
    """A number that is not in `Compression` is of a codec that is not known here."""
    uncompressed_size: int = 0
    batch_messages: int | None = None
    """The entry is a batch if this is not None, even of one message."""
    event_time: int = 0
    """0 if it is not set."""
    encryption_keys: tuple[EncryptionKey, ...] = ()
    encryption_algorithm: str | None = None
    encryption_parameter: bytes | None = None
    schema_version: bytes | None = None
    partition_key_b64: bool = False
    ordering_key: bytes | None = None
    deliver_at_time: int | None = None
    marker_type: int | None = None
    txn_least_bits: int | None = None
    txn_most_bits: int | None = None
    highest_sequence_id: int = 0
    null_value: bool = False
    uuid: str | None = None
    chunks: int | None = None
    """The number of chunks that the whole message has."""
    total_chunk_bytes: int | None = None
    chunk_id: int | None = None
    null_partition_key: bool = False
    compacted_batch_indexes: tuple[int, ...] = ()
    schema_id: bytes | None = None
    entry_hash_min: int | None = None
    entry_hash_max: int | None = None
    extension: bytes | None = None
    """Forebay's own field, if the entry was made of a frame."""


class ParsedEntry(NamedTuple):
    """The parts of an entry."""

    broker: BrokerEntryMetadata | None
    checksum: int | None
    """Its CRC-32C, which was compared; None if it has none."""
    metadata: MessageMetadata
    payload: memoryview


class EntryParts(NamedTuple):
    """Where the parts of an entry are in its bytes; pairs of start and end."""

    broker: tuple[int, int] | None
    checksum: int | None
    checked: int
    """Where the bytes begin that the checksum is over."""
    metadata: tuple[int, int]
    payload: int


def locate_parts(data: Buffer) -> EntryParts:
    """Finds the parts of an entry; raises LedgerError if it ends before one of them does."""
    at, broker, checksum = 0, None, None
    if _starts_with(data, at, _BROKER_MAGIC):
        start = at + _U16.size + _U32.size
        at = start + _u32(data, at + _U16.size)
        if at > len(data):
            raise LedgerError("the entry ends inside its broker entry metadata")
        broker = start, at
    if _starts_with(data, at, _CHECKED_MAGIC):
        checksum = _u32(data, at + _U16.size)
        at += _U16.size + _U32.size
    checked, start = at, at + _U32.size
    end = start + _u32(data, at)
    if end > len(data):
        raise LedgerError(
            f"the entry has {len(data)} bytes, and its metadata would end at {end}: it is cut off "
            "or damaged"
        )
    return EntryParts(broker, checksum, checked, (start, end), end)


def _starts_with(data: Buffer, at: int, magic: int) -> bool:
    return len(data) - at >= _U16.size and _U16.unpack_from(data, at)[0] == magic


def _u32(data: Buffer, at: int) -> int:
    if len(data) - at < _U32.size:
        raise LedgerError(f"the entry ends inside its head, after {len(data)} bytes")
    return int(_U32.unpack_from(data, at)[0])


def decode_entry(data: Buffer, *, verify: bool = True) -> ParsedEntry:
    """Decodes an entry; raises LedgerError, also if its checksum is wrong, unless not `verify`."""
    view = memoryview(data)
    parts = locate_parts(view)
    if verify and parts.checksum is not None:
        found = crc32c(view[parts.checked :])
        if found != parts.checksum:
            raise LedgerError(
                f"the entry has the checksum {found:08x}, and should have {parts.checksum:08x}"
            )
    broker = None if parts.broker is None else decode_broker_metadata(view, *parts.broker)
    metadata = decode_message_metadata(view, *parts.metadata)
    return ParsedEntry(broker, parts.checksum, metadata, view[parts.payload :])


def encode_entry(
    metadata: MessageMetadata,
    payload: Buffer,
    broker: BrokerEntryMetadata | None = None,
    *,
    checksum: bool = True,
) -> bytes:
    """Encodes an entry as a broker stores it."""
    encoded = encode_message_metadata(metadata)
    checked = b"".join((_U32.pack(len(encoded)), encoded, payload))
    head = b""
    if broker is not None:
        raw = encode_broker_metadata(broker)
        head = _U16.pack(_BROKER_MAGIC) + _U32.pack(len(raw)) + raw
    if checksum:
        head += _U16.pack(_CHECKED_MAGIC) + _U32.pack(crc32c(checked))
    return head + checked


# ---- broker entry metadata ----

_BROKER_WHAT: Final = "the broker entry metadata"


def decode_broker_metadata(data: Buffer, start: int, end: int) -> BrokerEntryMetadata:
    found = BrokerEntryMetadata()
    for field in fields(data, start, end, _BROKER_WHAT):
        if field.number == 1:
            found = replace(found, broker_timestamp=number_of(field, _BROKER_WHAT))
        elif field.number == 2:
            found = replace(found, index=number_of(field, _BROKER_WHAT))
    return found


def encode_broker_metadata(broker: BrokerEntryMetadata) -> bytes:
    numbers = ((1, broker.broker_timestamp), (2, broker.index))
    return b"".join(put_number(number, value) for number, value in numbers if value is not None)


# ---- message metadata ----

_WHAT: Final = "the metadata of the message"

_TEXTS: Final = {
    1: "producer_name",
    5: "replicated_from",
    6: "partition_key",
    14: "encryption_algorithm",
    26: "uuid",
}
_BYTES: Final = {
    15: "encryption_parameter",
    16: "schema_version",
    18: "ordering_key",
    32: "schema_id",
    EXTENSION: "extension",
}
_UNSIGNED: Final = {
    2: "sequence_id",
    3: "publish_time",
    8: "compression",
    9: "uncompressed_size",
    12: "event_time",
    22: "txn_least_bits",
    23: "txn_most_bits",
    24: "highest_sequence_id",
}
_SIGNED_32: Final = {
    11: "batch_messages",
    20: "marker_type",
    27: "chunks",
    28: "total_chunk_bytes",
    29: "chunk_id",
    33: "entry_hash_min",
    34: "entry_hash_max",
}
_FLAGS: Final = {17: "partition_key_b64", 25: "null_value", 30: "null_partition_key"}
_DELIVER_AT_TIME: Final = 19
_U32_FIELDS: Final = {9}
_NAMES: Final = _TEXTS | _BYTES | _UNSIGNED | _SIGNED_32 | _FLAGS | {19: "deliver_at_time"}
_REQUIRED: Final = (1, 2, 3)


def decode_message_metadata(data: Buffer, start: int, end: int) -> MessageMetadata:
    """Decodes the metadata in `data[start:end]`; raises LedgerError. Skips unknown fields."""
    values: dict[str, object] = {}
    properties: list[tuple[str, str]] = []
    replicate_to: list[str] = []
    keys: list[EncryptionKey] = []
    indexes: list[int] = []
    for field in fields(data, start, end, _WHAT):
        number = field.number
        if number == 4:
            properties.append(_pair(data, field))
        elif number == 7:
            replicate_to.append(text_of(data, field, _WHAT))
        elif number == 13:
            keys.append(_encryption_key(data, field))
        elif number == 31:
            indexes += _int32s(data, field)
        elif number in _NAMES:
            values[_NAMES[number]] = _value(data, field)
    for number in _REQUIRED:
        if _NAMES[number] not in values:
            raise LedgerError(f"{_WHAT} lacks its field {number}, {_NAMES[number]}")
    return MessageMetadata(
        properties=tuple(properties),
        replicate_to=tuple(replicate_to),
        encryption_keys=tuple(keys),
        compacted_batch_indexes=tuple(indexes),
        **values,  # type: ignore[arg-type]  # the tables give each name a value of its type
    )


def _value(data: Buffer, field: Field) -> str | bytes | int | bool:
    number = field.number
    if number in _TEXTS:
        return text_of(data, field, _WHAT)
    if number in _BYTES:
        return bytes_of(data, field, _WHAT)
    value = number_of(field, _WHAT)
    if number in _FLAGS:
        return value != 0
    if number in _SIGNED_32:
        return signed_32(value)
    if number == _DELIVER_AT_TIME:
        return signed_64(value)
    return value & 0xFFFFFFFF if number in _U32_FIELDS else value


def _int32s(data: Buffer, field: Field) -> list[int]:
    """The numbers of a repeated field, packed or one by one."""
    if field.wire != 2:
        return [signed_32(field.value)]
    found, at, end = [], field.value, field.value + field.length
    while at < end:
        value, at = read_varint(data, at, end, _WHAT)
        found.append(signed_32(value))
    return found


def _pair(data: Buffer, field: Field) -> tuple[str, str]:
    start, end = message_of(field, _WHAT)
    key = value = ""
    for part in fields(data, start, end, "a property"):
        if part.number == 1:
            key = text_of(data, part, "a property")
        elif part.number == 2:
            value = text_of(data, part, "a property")
    return key, value


def _encryption_key(data: Buffer, field: Field) -> EncryptionKey:
    start, end = message_of(field, _WHAT)
    name, value = "", b""
    pairs: list[tuple[str, str]] = []
    for part in fields(data, start, end, "an encryption key"):
        if part.number == 1:
            name = text_of(data, part, "an encryption key")
        elif part.number == 2:
            value = bytes_of(data, part, "an encryption key")
        elif part.number == 3:
            if len(pairs) == ATTRIBUTES_MAX:
                raise LedgerError(f"an encryption key has more than {ATTRIBUTES_MAX} metadata")
            pairs.append(_pair(data, part))
    return EncryptionKey(name, value, tuple(pairs))


def encode_message_metadata(metadata: MessageMetadata) -> bytes:
    """Encodes the metadata, fields in the order of their numbers. Unset ones are left out."""
    default = _DEFAULTS
    parts: dict[int, bytes] = {}
    for number, name in _NAMES.items():
        value = getattr(metadata, name)
        if number not in _REQUIRED and value == getattr(default, name):
            continue
        if number in _TEXTS:
            parts[number] = put_text(number, value)
        elif number in _BYTES:
            parts[number] = put_bytes(number, value)
        else:
            parts[number] = put_number(number, int(value))
    pairs = (put_bytes(4, encode_pair(key, value)) for key, value in metadata.properties)
    parts[4] = b"".join(pairs)
    parts[7] = b"".join(put_text(7, cluster) for cluster in metadata.replicate_to)
    parts[13] = b"".join(put_bytes(13, _encoded_key(key)) for key in metadata.encryption_keys)
    parts[31] = b"".join(put_number(31, index) for index in metadata.compacted_batch_indexes)
    return b"".join(part for _, part in sorted(parts.items()))


_DEFAULTS: Final = MessageMetadata("", 0, 0)


def encode_pair(key: str, value: str) -> bytes:
    return put_text(1, key) + put_text(2, value)


def _encoded_key(key: EncryptionKey) -> bytes:
    pairs = b"".join(put_bytes(3, encode_pair(*pair)) for pair in key.metadata)
    return put_text(1, key.name) + put_bytes(2, key.value) + pairs
