"""Messages: what a frame carries.

Written as bincode 1.3.3 (fixed-width integers) with the three later fields appended, which the
oldest decoders ignore. Read in any of the encodings that share the `.dnb1` name; see `layout` for
how they are told apart and `docs/formats/message.md` for the bytes.

What a caller gets wrong: the offset inside the encoded message is a copy. The frame's offset is
the truth, and `decode_message` takes it as an argument for that reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from forebay.errors import MessageError, MessageTooLarge
from forebay.format import codec
from forebay.format.frame import Scan
from forebay.format.layout import Buffer, Layout, Span, attribute_spans, locate
from forebay.format.pure import encode_attributes
from forebay.limits import MESSAGE_BYTES_MAX

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(slots=True)
class MessageId:
    """Who produced a message, and where it is."""

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
    """Everything before the offset: the same for all messages that a topic's owner makes."""
    return _U64.pack(request_id) + _U64.pack(producer_id) + _text(topic_name) + _text(broker_addr)


def encode_middle(producer_name: str, subscription_name: str | None) -> bytes:
    """Everything between the publish time and the attributes."""
    subscription = None if subscription_name is None else _text(subscription_name)
    return _text(producer_name) + _option(subscription)


def encode_message(message: StreamMessage, offset: int) -> bytes:
    """The payload of the message's frame, stamped with `offset`."""
    msg_id = message.msg_id
    schema_id = None if message.schema_id is None else _U64.pack(message.schema_id)
    version = None if message.schema_version is None else _U32.pack(message.schema_version)
    key = None if message.routing_key is None else _text(message.routing_key)
    encoded = b"".join(
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
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a message of {len(encoded)} bytes; at most {MESSAGE_BYTES_MAX}")
    return encoded


def decode_message(
    buffer: Buffer, position: int = 0, length: int | None = None, *, offset: int | None = None
) -> StreamMessage:
    """The message in `buffer[position:position + length]`, at the frame's `offset` if given."""
    layout = locate(buffer, position, len(buffer) - position if length is None else length)
    try:
        return _message(buffer, layout, offset)
    except UnicodeDecodeError as error:
        raise MessageError(f"message at position {position}: text is not UTF-8: {error}") from error


def _string(buffer: Buffer, span: Span) -> str:
    return str(buffer[span.position : span.position + span.length], "utf-8")


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
    """The attributes of one message, from the columns or the layout that located them."""
    if not count:
        return {}
    texts = [_string(buffer, span) for span in attribute_spans(buffer, pairs, count, flavour)]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def decode_messages(frames: Scan) -> Iterator[StreamMessage]:
    """The messages of scanned frames, each at its frame's offset."""
    buffer = frames.buffer
    for offset, position, length in zip(
        frames.offsets, frames.positions, frames.lengths, strict=True
    ):
        yield decode_message(buffer, position, length, offset=offset)


@dataclass(frozen=True, slots=True)
class MessageColumns:
    """Where the parts of many messages lie in one buffer: no Python object for any of them.

    Positions and lengths are signed 64-bit; a message without a routing key has length -1 there.
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
    """The columns of scanned frames; MessageError names the first frame that is no message."""
    *raw, bad = codec.columns(frames.buffer, frames.positions, frames.lengths)
    if bad >= 0:
        raise MessageError(
            f"frame at position {frames.positions[bad]} (offset {frames.offsets[bad]}) "
            "holds no known message encoding"
        )
    return MessageColumns(*raw)
