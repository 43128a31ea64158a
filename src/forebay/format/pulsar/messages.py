"""Messages out of Pulsar entries: batches, compression, chunks, and what cannot be decoded.

`decode_messages` returns the messages of one entry. An entry that holds a part of a message is a
`Chunk` instead; `ChunkAssembler` puts these together. Nothing is left out in silence: `kind` tells
what a message is.

    MESSAGE        a message of a producer
    TRANSACTIONAL  the same, sent in a transaction, which may have been aborted
    ENCRYPTED      the value is the payload as it is stored, maybe a compressed batch
    MARKER         written by the broker: the end of a transaction, or for replication
    INCOMPLETE     the value is a chunk of a message whose other chunks are not there

Beware: whether a transaction was aborted is in a marker after it, and that marker need not be in
the same ledger. Readers of Pulsar skip aborted messages; here they are only marked.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from forebay.errors import LedgerError
from forebay.format.layout import Buffer
from forebay.format.pulsar.compression import decompress
from forebay.format.pulsar.entry import MessageMetadata, ParsedEntry, decode_entry
from forebay.format.pulsar.protobuf import (
    Field,
    bytes_of,
    fields,
    message_of,
    number_of,
    signed_32,
    signed_64,
    text_of,
)
from forebay.limits import (
    PULSAR_BATCH_MESSAGES_MAX,
    PULSAR_CHUNKED_MESSAGES_MAX,
    PULSAR_CHUNKS_BYTES_MAX,
    PULSAR_CHUNKS_MAX,
    PULSAR_MESSAGE_BYTES_MAX,
)

_SINGLE: Final = "the metadata of a message in a batch"
_SIZE_BYTES: Final = 4

Properties = tuple[tuple[str, str], ...]


class Kind(StrEnum):
    """What a message is; see above."""

    MESSAGE = "message"
    TRANSACTIONAL = "transactional"
    ENCRYPTED = "encrypted"
    MARKER = "marker"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Message:
    """One message, with what its producer said about it."""

    entry_id: int
    batch_index: int
    """Its number in the batch; -1 if it was not sent in one."""
    batch_size: int
    """The messages of the batch; 0 if it was not sent in one."""
    kind: Kind
    value: Buffer | None
    key: bytes | None
    ordering_key: bytes | None
    publish_time: int
    event_time: int | None
    properties: Properties
    sequence_id: int
    producer_name: str
    schema_version: bytes | None
    index: int | None
    """The number of the message in its topic, if the broker was configured to count."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a message that was too large for one entry."""

    uuid: str
    number: int
    count: int
    total_bytes: int
    payload: bytes
    entry: ParsedEntry


def decode_messages(entry_id: int, data: Buffer) -> list[Message] | Chunk:
    """The messages of an entry, or the chunk that it is.

    Raises LedgerError if it is damaged, and UsageError if a package is missing.
    """
    return messages_of(entry_id, decode_entry(data))


def messages_of(entry_id: int, entry: ParsedEntry) -> list[Message] | Chunk:
    metadata = entry.metadata
    if metadata.marker_type is not None:
        return [_single(entry_id, entry, Kind.MARKER, entry.payload)]
    if metadata.encryption_keys:
        return [_single(entry_id, entry, Kind.ENCRYPTED, entry.payload)]
    if metadata.chunks is not None and metadata.chunks > 1:
        return _chunk(entry)
    payload = decompress(metadata.compression, entry.payload, metadata.uncompressed_size)
    if metadata.batch_messages is None:
        return [_single(entry_id, entry, _kind(metadata), payload)]
    return list(in_batch(entry_id, entry, payload))


def _kind(metadata: MessageMetadata) -> Kind:
    sent = metadata.txn_least_bits is not None or metadata.txn_most_bits is not None
    return Kind.TRANSACTIONAL if sent else Kind.MESSAGE


def _single(entry_id: int, entry: ParsedEntry, kind: Kind, value: Buffer) -> Message:
    """A message that is not in a batch, or an entry that cannot be decoded."""
    metadata = entry.metadata
    decoded = kind not in (Kind.ENCRYPTED, Kind.MARKER)
    key = None if metadata.null_partition_key else metadata.partition_key
    return Message(
        entry_id,
        -1,
        0,
        kind,
        None if decoded and metadata.null_value else value,
        _key(key, metadata.partition_key_b64),
        metadata.ordering_key,
        metadata.publish_time,
        metadata.event_time or None,
        metadata.properties,
        signed_64(metadata.sequence_id),
        metadata.producer_name,
        metadata.schema_version,
        None if entry.broker is None else entry.broker.index,
    )


def _key(key: str | None, encoded: bool) -> bytes | None:
    if key is None or not encoded:
        return None if key is None else key.encode()
    try:
        return base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError) as error:
        raise LedgerError(f"the key of a message is not Base64: {error}") from error


# ---- batches ----


@dataclass(slots=True)
class _Single:
    """The metadata of one message in a batch: Pulsar's SingleMessageMetadata."""

    properties: list[tuple[str, str]]
    key: str | None = None
    payload_bytes: int | None = None
    compacted_out: bool = False
    event_time: int | None = None
    key_encoded: bool = False
    ordering_key: bytes | None = None
    sequence_id: int | None = None
    null_value: bool | None = None
    null_key: bool | None = None


def in_batch(entry_id: int, entry: ParsedEntry, payload: Buffer) -> Iterator[Message]:
    """The messages of a batch with this payload, decompressed.

    Those that a compaction took out are left out, and count for the batch index. A batch that says
    which of its messages are left has only these.
    """
    metadata = entry.metadata
    count = metadata.batch_messages or 0
    if not 0 <= count <= PULSAR_BATCH_MESSAGES_MAX:
        raise LedgerError(f"a batch of {count} messages")
    numbers: Sequence[int] = metadata.compacted_batch_indexes or range(count)
    if len(numbers) > count:
        raise LedgerError(f"a batch of {count} messages of which {len(numbers)} are left")
    view, at = memoryview(payload), 0
    for number in numbers:
        single, at = _read_single(view, at)
        size = single.payload_bytes or 0
        if not 0 <= size <= len(view) - at:
            raise LedgerError(f"message {number} of a batch ends after the batch")
        value = view[at : at + size]
        at += size
        if not single.compacted_out:
            yield _of_batch(entry_id, number, entry, single, value)
    if at != len(view):
        raise LedgerError(f"{len(view) - at} bytes are left after the last message of a batch")


def _read_single(view: memoryview, at: int) -> tuple[_Single, int]:
    """The metadata at `at`, and the position after it."""
    start = at + _SIZE_BYTES
    end = start + int.from_bytes(view[at:start], "big")
    if end > len(view):
        raise LedgerError(f"{_SINGLE} ends after the batch")
    found = _Single([])
    for field in fields(view, start, end, _SINGLE):
        _take(found, view, field)
    if found.payload_bytes is None:
        raise LedgerError(f"{_SINGLE} lacks the size of the payload")
    return found, end


def _take(found: _Single, view: memoryview, field: Field) -> None:
    match field.number:
        case 1:
            found.properties.append(_property(view, field))
        case 2:
            found.key = text_of(view, field, _SINGLE)
        case 3:
            found.payload_bytes = signed_32(number_of(field, _SINGLE))
        case 4:
            found.compacted_out = bool(number_of(field, _SINGLE))
        case 5:
            found.event_time = number_of(field, _SINGLE)
        case 6:
            found.key_encoded = bool(number_of(field, _SINGLE))
        case 7:
            found.ordering_key = bytes_of(view, field, _SINGLE)
        case 8:
            found.sequence_id = number_of(field, _SINGLE)
        case 9:
            found.null_value = bool(number_of(field, _SINGLE))
        case 10:
            found.null_key = bool(number_of(field, _SINGLE))


def _property(view: memoryview, field: Field) -> tuple[str, str]:
    name = value = ""
    for part in fields(view, *message_of(field, _SINGLE), _SINGLE):
        if part.number == 1:
            name = text_of(view, part, _SINGLE)
        elif part.number == 2:
            value = text_of(view, part, _SINGLE)
    return name, value


def _of_batch(
    entry_id: int, number: int, entry: ParsedEntry, single: _Single, value: Buffer
) -> Message:
    metadata = entry.metadata
    null_value = metadata.null_value if single.null_value is None else single.null_value
    null_key = metadata.null_partition_key if single.null_key is None else single.null_key
    event_time = metadata.event_time if single.event_time is None else single.event_time
    count = metadata.batch_messages or 0
    index = None if entry.broker is None else entry.broker.index  # of the last message
    return Message(
        entry_id,
        number,
        count,
        _kind(metadata),
        None if null_value else value,
        _key(None if null_key else single.key, single.key_encoded),
        single.ordering_key,
        metadata.publish_time,
        event_time or None,
        tuple(single.properties),
        signed_64(metadata.sequence_id if single.sequence_id is None else single.sequence_id),
        metadata.producer_name,
        metadata.schema_version,
        None if index is None else index - (count - 1 - number),
    )


# ---- chunks ----


def _chunk(entry: ParsedEntry) -> Chunk:
    metadata = entry.metadata
    uuid, count = metadata.uuid, metadata.chunks or 0
    number, total = metadata.chunk_id, metadata.total_chunk_bytes
    if not uuid or number is None or total is None:
        raise LedgerError("a chunk lacks its uuid, its number, or the size of the message")
    if not 0 <= number < count <= PULSAR_CHUNKS_MAX:
        raise LedgerError(f"a chunk with the number {number} of {count}")
    if not 0 <= total <= PULSAR_MESSAGE_BYTES_MAX:
        raise LedgerError(
            f"a message of {total} bytes in chunks; at most {PULSAR_MESSAGE_BYTES_MAX} are allowed"
        )
    return Chunk(uuid, number, count, total, bytes(entry.payload), entry)


def incomplete(entry_id: int, chunk: Chunk) -> Message:
    """The message that stands for a chunk, if others of the message are missing."""
    return _single(entry_id, chunk.entry, Kind.INCOMPLETE, chunk.payload)


class ChunkPlace(NamedTuple):
    """Where a chunk is. Places are ordered as the entries of a topic."""

    ledger_id: int
    entry_id: int


class ChunkedMessage(NamedTuple):
    """A message that was put together from chunks."""

    places: tuple[ChunkPlace, ...]
    """Of its chunks, in their order."""
    message: Message
    """With the entry id of the last chunk."""


@dataclass(slots=True)
class _Pending:
    chunks: list[tuple[ChunkPlace, Chunk]]
    size: int = 0


class ChunkAssembler:
    """Puts messages together from chunks, which are added in the order of the topic.

    The first chunk of a message begins it again, because a producer sends all chunks again after it
    lost its connection. A chunk that is there already is ignored. A chunk whose predecessor is
    missing makes the message incomplete. `dropped` has the chunks that no message can use any more,
    for the caller to take. It holds a limited number of bytes: over that, the oldest message is
    given up.
    """

    def __init__(self, bytes_max: int = PULSAR_CHUNKS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._pending: dict[str, _Pending] = {}
        self._size = 0
        self.dropped: list[tuple[ChunkPlace, Chunk]] = []

    def add(self, place: ChunkPlace, chunk: Chunk) -> ChunkedMessage | None:
        """Adds a chunk; returns the message if it is complete now.

        Raises LedgerError if the chunks together are not the message that they say.
        """
        known = self._pending.get(chunk.uuid)
        if chunk.number == 0:
            self._drop(chunk.uuid)
            known = self._pending[chunk.uuid] = _Pending([])
        elif known is None or chunk.number > len(known.chunks):
            self._drop(chunk.uuid)
            self.dropped.append((place, chunk))
            return None
        elif chunk.number < len(known.chunks):
            return None
        known.chunks.append((place, chunk))
        known.size += len(chunk.payload)
        self._size += len(chunk.payload)
        if known.size > chunk.total_bytes or chunk.count != known.chunks[0][1].count:
            self._drop(chunk.uuid)
            return None
        if len(known.chunks) == chunk.count:
            self._forget(chunk.uuid)
            return _assembled(known)
        self._limit()
        return None

    def finish(self) -> list[tuple[ChunkPlace, Chunk]]:
        """The chunks of messages that are not complete, and all that were dropped, in order."""
        for uuid in list(self._pending):
            self._drop(uuid)
        left, self.dropped = sorted(self.dropped, key=lambda each: each[0]), []
        return left

    def take_dropped(self, uuid: str) -> list[tuple[ChunkPlace, Chunk]]:
        """The chunks of one message that were dropped, in order; they are not in `dropped` then."""
        taken = [each for each in self.dropped if each[1].uuid == uuid]
        self.dropped = [each for each in self.dropped if each[1].uuid != uuid]
        return sorted(taken, key=lambda each: each[0])

    def _limit(self) -> None:
        while self._size > self._bytes_max or len(self._pending) > PULSAR_CHUNKED_MESSAGES_MAX:
            self._drop(next(iter(self._pending)))

    def _drop(self, uuid: str) -> None:
        known = self._pending.get(uuid)
        if known is not None:
            self.dropped += known.chunks
            self._forget(uuid)

    def _forget(self, uuid: str) -> None:
        self._size -= self._pending.pop(uuid).size


def _assembled(pending: _Pending) -> ChunkedMessage | None:
    """Decompresses the message; its metadata are those of the last chunk, as in Pulsar."""
    place, last = pending.chunks[-1]
    stored = b"".join(chunk.payload for _, chunk in pending.chunks)
    if len(stored) != last.total_bytes:
        raise LedgerError(
            f"the chunks of {last.uuid} have {len(stored)} bytes, not {last.total_bytes}"
        )
    metadata = last.entry.metadata
    value = decompress(metadata.compression, stored, metadata.uncompressed_size)
    message = _single(place.entry_id, last.entry, _kind(metadata), value)
    return ChunkedMessage(tuple(each for each, _ in pending.chunks), message)
