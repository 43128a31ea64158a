"""An independent encoder for each of Danube's encodings, and messages to encode."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeAlias

import pytest
from hypothesis import strategies as st

from forebay.format.layout import FIXED, VARINT
from forebay.format.message import MessageId, StreamMessage
from forebay.limits import OFFSET_MAX

Number: TypeAlias = Callable[[int], bytes]

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

# ---- an encoder of its own, for every encoding ----


def fixed(value: int) -> bytes:
    return struct.pack("<Q", value)


def varint(value: int) -> bytes:
    if value < 251:
        return bytes([value])
    if value < 2**16:
        return b"\xfb" + struct.pack("<H", value)
    if value < 2**32:
        return b"\xfc" + struct.pack("<I", value)
    return b"\xfd" + struct.pack("<Q", value)


def encoded(message: StreamMessage, number: Number, appended: int) -> bytes:
    """The message in one of Danube's encodings; fields that were not appended are left out."""

    def text(value: str) -> bytes:
        return number(len(value.encode())) + value.encode()

    def option(value: bytes | None) -> bytes:
        return b"\0" if value is None else b"\1" + value

    msg_id, subscription = message.msg_id, message.subscription_name
    parts = [number(message.request_id), number(msg_id.producer_id)]
    parts += [text(msg_id.topic_name), text(msg_id.broker_addr), number(msg_id.topic_offset)]
    parts += [number(len(message.payload)), message.payload, number(message.publish_time)]
    parts += [text(message.producer_name)]
    parts += [option(None if subscription is None else text(subscription))]
    parts += [number(len(message.attributes))]
    parts += [text(key) + text(value) for key, value in message.attributes.items()]
    if appended >= 2:
        version = message.schema_version
        u32 = (lambda value: struct.pack("<I", value)) if number is fixed else varint
        parts += [option(None if message.schema_id is None else number(message.schema_id))]
        parts += [option(None if version is None else u32(version))]
    if appended == 3:
        parts += [option(None if message.routing_key is None else text(message.routing_key))]
    return b"".join(parts)


def without(message: StreamMessage, appended: int) -> StreamMessage:
    """What a message says once its last fields were left out."""
    if appended < 2:
        message = replace(message, schema_id=None, schema_version=None)
    return message if appended == 3 else replace(message, routing_key=None)


ENCODINGS: Final = [
    pytest.param(number, flavour, appended, id=f"{number.__name__}-{appended}")
    for number, flavour in ((fixed, FIXED), (varint, VARINT))
    for appended in (0, 2, 3)
]

# ---- messages ----

numbers = st.one_of(st.integers(0, 300), st.integers(0, U64_MAX))
offsets = st.integers(0, OFFSET_MAX)
texts = st.text(max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyzäж0123456789_-", min_size=1, max_size=10)
topics = st.builds("/{}/{}".format, names, names)


@st.composite
def messages(
    draw: st.DrawFn,
    topic_names: st.SearchStrategy[str] = topics,
    broker_addrs: st.SearchStrategy[str] = texts,
    producer_ids: st.SearchStrategy[int] = numbers,
) -> StreamMessage:
    return StreamMessage(
        draw(st.binary(max_size=60)),
        draw(numbers),
        MessageId(draw(producer_ids), draw(topic_names), draw(broker_addrs), draw(offsets)),
        draw(numbers),
        draw(texts),
        draw(st.none() | texts),
        draw(st.dictionaries(texts, texts, max_size=3)),
        draw(st.none() | numbers),
        draw(st.none() | st.integers(0, U32_MAX)),
        draw(st.none() | texts),
    )


SAMPLE: Final = StreamMessage(
    b"hello",
    2,
    MessageId(7, "/default/t1", "127.0.0.1:6650", 5),
    1_700_000_000_000,
    "p1",
    "s",
    {"k": "v1", "ключ": "значение"},
    9,
    3,
    "rk",
)
