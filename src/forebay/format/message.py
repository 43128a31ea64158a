"""Messages: the payloads of frames.

They are written as bincode 1.3.3 (fixed-width integers), with three later fields appended that the
oldest decoders ignore. They are read in any of the encodings that Danube used for `.dnb1` files;
`layout` tells these apart. The bytes are in `docs/formats/message.md`.

Beware: the offset inside an encoded message is only a copy. The frame's offset is the valid one,
so pass it to `decode_message`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from forebay.errors import MessageError, MessageTooLarge, UsageError
from forebay.format import codec
from forebay.format.frame import Scan
from forebay.format.layout import (
    _U32,
    _U64,
    FIXED,
    Buffer,
    Layout,
    Span,
    attribute_spans,
    locate,
)
from forebay.format.pure import encode_attributes
from forebay.limits import MESSAGE_BYTES_MAX

_HEAD: Final = struct.Struct("<QQ")
_REQUEST_BYTES: Final = 8
_NO_SCHEMA: Final = b"\0\0"
_PARTS_KNOWN_MAX: Final = 1024


@dataclass(slots=True)
class MessageId:
    """The producer of a message, its topic, and its offset there."""

    producer_id: int = 0
    topic_name: str = ""
    broker_addr: str = ""
    topic_offset: int = 0


@dataclass(slots=True)
class StreamMessage:
    """One message of a topic."""

    payload: bytes
    request_id: int = 0
    msg_id: MessageId = field(default_factory=MessageId)
    publish_time: int = 0
    """Milliseconds since 1970-01-01 UTC."""
    producer_name: str = ""
    subscription_name: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    schema_id: int | None = None
    schema_version: int | None = None
    routing_key: str | None = None

    @property
    def offset(self) -> int:
        """The number of the message in its topic."""
        return self.msg_id.topic_offset


def _text(value: str) -> bytes:
    raw = value.encode()
    return _U64.pack(len(raw)) + raw


def _option(value: bytes | None) -> bytes:
    return b"\0" if value is None else b"\1" + value


def encode_head(request_id: int, producer_id: int, topic_name: str, broker_addr: str) -> bytes:
    """The bytes before the offset, which are the same for all messages a topic's owner makes."""
    return _U64.pack(request_id) + _U64.pack(producer_id) + _text(topic_name) + _text(broker_addr)


def encode_middle(producer_name: str, subscription_name: str | None) -> bytes:
    """The bytes between the publish time and the attributes."""
    subscription = None if subscription_name is None else _text(subscription_name)
    return _text(producer_name) + _option(subscription)


def encode_message(message: StreamMessage, offset: int) -> bytes:
    """Encodes the message with `offset`, as the payload of a frame.

    Raises MessageTooLarge, and UsageError if a field cannot be encoded.
    """
    try:
        encoded = _encode(message, offset)
    except (struct.error, UnicodeEncodeError) as error:
        raise UsageError(f"a field of the message cannot be encoded: {error}") from error
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a message of {len(encoded)} bytes; at most {MESSAGE_BYTES_MAX}")
    # A topic name that starts with "/" guarantees that the decoder picks this encoding: see
    # `layout`. Otherwise it has to be tried.
    if not message.msg_id.topic_name.startswith("/") and not _reads_as_fixed(encoded):
        raise UsageError(
            "the message would be decoded as another encoding; set msg_id.topic_name to its topic"
        )
    return encoded


def _reads_as_fixed(encoded: bytes) -> bool:
    return locate(encoded, 0, len(encoded)).flavour == FIXED


def _encode(message: StreamMessage, offset: int) -> bytes:
    msg_id = message.msg_id
    schema_id = None if message.schema_id is None else _U64.pack(message.schema_id)
    version = None if message.schema_version is None else _U32.pack(message.schema_version)
    key = None if message.routing_key is None else _text(message.routing_key)
    return b"".join(
        (
            encode_head(
                message.request_id, msg_id.producer_id, msg_id.topic_name, msg_id.broker_addr
            ),
            _U64.pack(offset),
            _U64.pack(len(message.payload)),
            message.payload,
            _U64.pack(message.publish_time),
            encode_middle(message.producer_name, message.subscription_name),
            encode_attributes(message.attributes),
            _option(schema_id),
            _option(version),
            _option(key),
        )
    )


def decode_message(
    buffer: Buffer, position: int = 0, length: int | None = None, *, offset: int | None = None
) -> StreamMessage:
    """Decodes the message in `buffer[position:position + length]`; raises MessageError.

    It gets the frame's `offset` if given, otherwise the copy that it holds.
    """
    layout = locate(buffer, position, len(buffer) - position if length is None else length)
    return _message(buffer, layout, offset)


def _not_text(position: int, error: UnicodeDecodeError) -> MessageError:
    return MessageError(f"text at position {position} is not UTF-8: {error}")


def _string(buffer: Buffer, span: Span) -> str:
    try:
        return str(buffer[span.position : span.position + span.length], "utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(span.position, error) from error


def _optional(buffer: Buffer, span: Span | None) -> str | None:
    return None if span is None else _string(buffer, span)


def _message(buffer: Buffer, layout: Layout, offset: int | None) -> StreamMessage:
    at, length = layout.payload
    return StreamMessage(
        bytes(buffer[at : at + length]),
        layout.request_id,
        MessageId(
            layout.producer_id,
            _string(buffer, layout.topic_name),
            _string(buffer, layout.broker_addr),
            layout.topic_offset if offset is None else offset,
        ),
        layout.publish_time,
        _string(buffer, layout.producer_name),
        _optional(buffer, layout.subscription_name),
        decode_attributes(buffer, layout.attributes, layout.attribute_count, layout.flavour),
        layout.schema_id,
        layout.schema_version,
        _optional(buffer, layout.routing_key),
    )


def decode_attributes(buffer: Buffer, pairs: Span, count: int, flavour: int) -> dict[str, str]:
    """The attributes of one message, from the spans that the columns or the layout give."""
    if not count:
        return {}
    texts = [_string(buffer, span) for span in attribute_spans(buffer, pairs, count, flavour)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def decode_messages(frames: Scan) -> Iterator[StreamMessage]:
    """Yields the messages of scanned frames, with the offsets of the frames.

    Gives what `decode_message` gives for each frame, but much faster: the codec locates all fields
    at once, and the parts that a producer repeats in every message are decoded once. Raises
    MessageError at the first frame that cannot be decoded.
    """
    times, at, size, key_at, key_size, pairs_at, pairs_size, pairs, flavours, bad = codec.columns(
        frames.buffer, frames.positions, frames.lengths
    )
    data = bytes(frames.buffer)
    offsets, positions, lengths = frames.offsets, frames.positions, frames.lengths
    del frames  # a caller that has dropped it too holds the bytes once, not twice
    heads: dict[bytes, tuple[int, str, str]] = {}
    middles: dict[bytes, tuple[str, str | None]] = {}
    for row, (offset, position, length) in enumerate(zip(offsets, positions, lengths, strict=True)):
        tail_at = pairs_at[row] + pairs_size[row] if row != bad else 0
        tail = data[tail_at : position + length]
        if row == bad or flavours[row] != FIXED or not tail.startswith(_NO_SCHEMA):
            # The uncommon cases: another encoding, a schema, or damage.
            yield decode_message(data, position, length, offset=offset)
            if row == bad:
                return
            continue
        payload_at, payload_end = at[row], at[row] + size[row]
        try:
            # Not with the request's number, which may be another one in every message.
            named = data[position + _REQUEST_BYTES : payload_at - 16]
            head = _cached(heads, named, _decode_head)
            middle = _cached(middles, data[payload_end + 8 : pairs_at[row] - 8], _decode_middle)
            message = StreamMessage(
                data[payload_at:payload_end],
                _U64.unpack_from(data, position)[0],
                MessageId(head[0], head[1], head[2], offset),
                times[row],
                middle[0],
                middle[1],
                decode_attributes(data, Span(pairs_at[row], pairs_size[row]), pairs[row], FIXED)
                if pairs[row]
                else {},
                None,
                None,
                None
                if key_size[row] < 0
                else str(data[key_at[row] : key_at[row] + key_size[row]], "utf-8"),
            )
        except UnicodeDecodeError as error:
            raise _not_text(position, error) from error
        yield message


_Part = TypeVar("_Part")


def _cached(known: dict[bytes, _Part], raw: bytes, decode: Callable[[bytes], _Part]) -> _Part:
    part = known.get(raw)
    if part is None:
        if len(known) >= _PARTS_KNOWN_MAX:
            known.clear()
        part = known[raw] = decode(raw)
    return part


def _decode_head(raw: bytes) -> tuple[int, str, str]:
    """Decodes what `encode_head` made, after the request's number: producer, topic and broker."""
    producer_id, length = _HEAD.unpack_from(raw)
    end = _HEAD.size + length
    return (
        producer_id,
        str(raw[_HEAD.size : end], "utf-8"),
        str(raw[end + 8 :], "utf-8"),
    )


def _decode_middle(raw: bytes) -> tuple[str, str | None]:
    """Decodes what `encode_middle` made: producer name and subscription."""
    end = 8 + int(_U64.unpack_from(raw)[0])
    subscription = str(raw[end + 9 :], "utf-8") if raw[end] else None
    return str(raw[8:end], "utf-8"), subscription


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Positions of the parts of many messages in one buffer, without a Python object for each.

    Positions and lengths are signed 64-bit. A message without a routing key has key length -1.
    """

    publish_times: memoryview
    payload_positions: memoryview
    payload_lengths: memoryview
    key_positions: memoryview
    key_lengths: memoryview
    attribute_positions: memoryview
    attribute_lengths: memoryview
    attribute_counts: memoryview
    flavours: memoryview

    def __len__(self) -> int:
        return len(self.publish_times)


def message_columns(frames: Scan) -> MessageColumns:
    """The columns of scanned frames; raises MessageError at the first that is not a message."""
    *raw, bad = codec.columns(frames.buffer, frames.positions, frames.lengths)
    if bad >= 0:
        raise MessageError(
            f"frame at position {frames.positions[bad]} (offset {frames.offsets[bad]}) "
            "does not hold a message in a known encoding"
        )
    return MessageColumns(*raw)


def topic_names(frames: Scan, columns: MessageColumns) -> list[str]:
    """The topic name in each message; equal names are decoded once."""
    data = bytes(frames.buffer)
    if any(flavour != FIXED for flavour in columns.flavours):
        return [message.msg_id.topic_name for message in decode_messages(frames)]
    # The offset and the payload's length are between the head and the payload.
    heads = [
        data[position + _REQUEST_BYTES : payload_at - 16]
        for position, payload_at in zip(frames.positions, columns.payload_positions, strict=True)
    ]
    names = {head: _decode_head(head)[1] for head in set(heads)}
    return [names[head] for head in heads]
