"""Danube's encodings: each is recognised, and the oldest decoder reads what is written."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.format.frame import encode_frame, scan
from forebay.format.layout import FIXED, VARINT, locate
from forebay.format.message import (
    MessageId,
    StreamMessage,
    decode_message,
    decode_messages,
    encode_message,
)
from support.danube_messages import (
    ENCODINGS,
    SAMPLE,
    U64_MAX,
    Number,
    encoded,
    fixed,
    messages,
    varint,
    without,
)

# ---- the oldest decoder ----


def read_as_v0_5_0(data: bytes) -> StreamMessage:
    """Danube v0.5.0's fields in fixed width, from the front; whatever follows is ignored."""
    at = 0

    def u64() -> int:
        nonlocal at
        (value,) = struct.unpack_from("<Q", data, at)
        at += 8
        return int(value)

    def raw() -> bytes:
        nonlocal at
        size = u64()
        assert at + size <= len(data)
        at += size
        return data[at - size : at]

    def text() -> str:
        return raw().decode()

    def optional_text() -> str | None:
        nonlocal at
        at += 1
        assert data[at - 1] in {0, 1}
        return text() if data[at - 1] else None

    request_id = u64()
    msg_id = MessageId(u64(), text(), text(), u64())
    payload, publish_time, producer, subscription = raw(), u64(), text(), optional_text()
    attributes = {text(): text() for _ in range(u64())}
    return StreamMessage(
        payload, request_id, msg_id, publish_time, producer, subscription, attributes
    )


@settings(max_examples=150)
@given(message=messages())
def test_a_decoder_of_danube_v0_5_0_reads_what_is_written(message: StreamMessage) -> None:
    offset = message.offset
    assert read_as_v0_5_0(encode_message(message, offset)) == without(message, 0)


# ---- the encodings are told apart ----


@pytest.mark.parametrize(("number", "flavour", "appended"), ENCODINGS)
@settings(max_examples=120)
@given(
    message=messages(
        broker_addrs=st.from_regex(r"(http://)?[a-z]{4,12}:[0-9]{4}", fullmatch=True),
        producer_ids=st.integers(2**32, U64_MAX),
    )
)
def test_every_encoding_that_danube_wrote_is_recognised(
    number: Number, flavour: int, appended: int, message: StreamMessage
) -> None:
    data = encoded(message, number, appended)
    assert locate(data, 0, len(data)).flavour == flavour
    assert decode_message(data) == without(message, appended)


@pytest.mark.parametrize(("number", "flavour", "appended"), ENCODINGS)
@pytest.mark.parametrize("payload", [b"", b"\0", bytes(64), b"\xff" * 64, b"/" * 64])
@pytest.mark.parametrize("producer_id", [0, 1, 250, 251, U64_MAX])
def test_short_names_and_plain_payloads_are_recognised_too(
    number: Number, flavour: int, appended: int, payload: bytes, producer_id: int
) -> None:
    for addr in ("", "a:1", "[::1]:6650", "127.0.0.1:6650"):
        message = replace(SAMPLE, payload=payload, msg_id=MessageId(producer_id, "/a/b", addr, 0))
        data = encoded(message, number, appended)
        assert locate(data, 0, len(data)).flavour == flavour
        assert decode_message(data) == without(message, appended)


@settings(max_examples=200)
@given(message=messages(), inner=messages(), appended=st.sampled_from([0, 2, 3]))
def test_no_payload_changes_how_a_written_message_is_read(
    message: StreamMessage, inner: StreamMessage, appended: int
) -> None:
    crafted = replace(message, payload=encoded(inner, varint, appended), request_id=0)
    data = encode_message(crafted, 3)
    assert locate(data, 0, len(data)).flavour == FIXED
    assert decode_message(data).payload == crafted.payload


def disguised(topic_name: str) -> StreamMessage:
    """A message whose request id is the start of a varint message with the topic `/`."""
    request_id = int.from_bytes(bytes([2, 7, 1, 0x2F, 0, 0, 68 + len(topic_name), 0]), "little")
    return StreamMessage(b"secret", request_id, MessageId(topic_name=topic_name))


def test_a_message_that_would_be_read_as_another_encoding_is_refused() -> None:
    assert locate(encoded(disguised(""), fixed, 3), 0, 82).flavour == VARINT
    with pytest.raises(UsageError, match="topic_name"):
        encode_message(disguised(""), 0)


def test_a_rooted_topic_makes_the_same_message_safe() -> None:
    message = disguised("/default/t1")
    assert decode_message(encode_message(message, 0)) == message


def test_a_topic_that_is_not_rooted_is_written_where_nothing_is_ambiguous() -> None:
    for topic in ("", "t", "default/t"):
        message = StreamMessage(b"x", msg_id=MessageId(topic_name=topic))
        assert decode_message(encode_message(message, 0)) == message


def test_a_crafted_varint_message_with_short_names_shows_other_fields_and_nothing_worse() -> None:
    """What docs/formats/message.md admits: it needs a varint log, short names and intent."""
    end = "\0" * 25  # publish time, producer name, no subscription, no attributes
    inside = bytes(6) + fixed(4) + b"/x/y" + fixed(0) + fixed(0)
    payload = inside + fixed(15) + b"other"
    message = StreamMessage(payload, msg_id=MessageId(topic_name="/a/b"), routing_key="12" + end)
    data = encoded(message, varint, 3)
    log = encode_frame(0, data) + encode_frame(1, encode_message(SAMPLE, 1))
    first, second = decode_messages(scan(log))
    assert (first.offset, first.msg_id.topic_name, first.payload[:5]) == (0, "/x/y", b"other")
    assert second == replace(SAMPLE, msg_id=replace(SAMPLE.msg_id, topic_offset=1))
