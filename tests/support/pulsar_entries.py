"""Entries of Pulsar of every kind, as its producers and brokers make them.

    entry(b"value", key="k")                       one message
    batch([single(b"a"), single(b"b")], "LZ4")     a batch, compressed
    chunks(b"x" * 100, 40, uuid="p-1")             one message in several entries

The compressors are those that Pulsar's clients use. ZLIB streams are flushed and never finished.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import cramjam
import zstandard

from forebay.format.pulsar.entry import (
    BrokerEntryMetadata,
    Compression,
    EncryptionKey,
    MessageMetadata,
    encode_entry,
    encode_pair,
)
from forebay.format.pulsar.protobuf import put_bytes, put_number, put_text

PRODUCER: Final = "standalone-1-0"
TIME: Final = 1_700_000_000_000


def compress(name: str, data: bytes) -> bytes:
    match name:
        case "LZ4":
            return bytes(cramjam.lz4.compress_block(data, store_size=False))
        case "ZLIB":
            stream = zlib.compressobj()
            return stream.compress(data) + stream.flush(zlib.Z_SYNC_FLUSH)
        case "ZSTD":
            return zstandard.ZstdCompressor().compress(data)
        case "SNAPPY":
            return bytes(cramjam.snappy.compress_raw(data))
    assert name == "NONE", name
    return data


def metadata(**fields: Any) -> MessageMetadata:
    """Metadata with the required fields. `key` is short for `partition_key`."""
    if "key" in fields:
        fields["partition_key"] = fields.pop("key")
    given: dict[str, Any] = {"producer_name": PRODUCER, "sequence_id": 0, "publish_time": TIME}
    return MessageMetadata(**{**given, **fields})


def entry(
    value: bytes,
    *,
    compression: str = "NONE",
    index: int | None = None,
    checksum: bool = True,
    **fields: Any,
) -> bytes:
    """One message that is not in a batch."""
    if compression != "NONE":
        fields |= {"compression": Compression[compression], "uncompressed_size": len(value)}
    broker = None if index is None else BrokerEntryMetadata(TIME + 1, index)
    payload = compress(compression, value)
    return encode_entry(metadata(**fields), payload, broker, checksum=checksum)


@dataclass(frozen=True)
class Single:
    """A message of a batch: SingleMessageMetadata and payload."""

    value: bytes
    properties: Sequence[tuple[str, str]] = ()
    key: str | None = None
    key_b64: bool = False
    ordering_key: bytes | None = None
    event_time: int | None = None
    sequence_id: int | None = None
    compacted_out: bool = False
    null_value: bool | None = None
    null_key: bool | None = None

    def encoded(self) -> bytes:
        parts = [put_bytes(1, encode_pair(*pair)) for pair in self.properties]
        if self.key is not None:
            parts.append(put_text(2, self.key))
        parts.append(put_number(3, len(self.value)))
        numbers = (
            (4, self.compacted_out or None),
            (5, self.event_time),
            (6, self.key_b64 or None),
        )
        parts += [put_number(number, int(value)) for number, value in numbers if value is not None]
        if self.ordering_key is not None:
            parts.append(put_bytes(7, self.ordering_key))
        last = ((8, self.sequence_id), (9, self.null_value), (10, self.null_key))
        parts += [put_number(number, int(value)) for number, value in last if value is not None]
        head = b"".join(parts)
        return len(head).to_bytes(4, "big") + head + self.value


def single(value: bytes, **fields: Any) -> Single:
    return Single(value, **fields)


def batch(messages: Sequence[Single], compression: str = "NONE", **fields: Any) -> bytes:
    payload = b"".join(message.encoded() for message in messages)
    fields.setdefault("batch_messages", len(messages))
    return entry(payload, compression=compression, **fields)


def chunks(
    value: bytes, chunk_bytes: int, uuid: str, compression: str = "NONE", **fields: Any
) -> list[bytes]:
    """The entries of one message in chunks. It is compressed first, as by Pulsar's clients."""
    stored = compress(compression, value)
    parts = [stored[at : at + chunk_bytes] for at in range(0, len(stored), chunk_bytes)]
    common = metadata(
        uuid=uuid,
        chunks=len(parts),
        total_chunk_bytes=len(stored),
        compression=Compression[compression],
        uncompressed_size=len(value) if compression != "NONE" else 0,
        **fields,
    )
    return [encode_entry(replace(common, chunk_id=at), part) for at, part in enumerate(parts)]


def encrypted(payload: bytes, **fields: Any) -> bytes:
    return entry(
        payload,
        encryption_keys=(EncryptionKey("rsa", b"sealed"),),
        encryption_algorithm="AES/GCM",
        encryption_parameter=b"nonce",
        **fields,
    )


def marker(kind: int = 21) -> bytes:
    """A marker of the broker: 21 is the commit of a transaction."""
    return entry(b"", producer_name="", marker_type=kind, txn_least_bits=1, txn_most_bits=2)
