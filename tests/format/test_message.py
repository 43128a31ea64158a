"""Messages: round trips, the four encodings told apart, old decoders, damage and limits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.errors import MessageError, MessageTooLarge, UsageError
from forebay.format.frame import Scan, encode_frame, scan
from forebay.format.layout import FIXED, VARINT, Span, locate
from forebay.format.message import (
    MessageId,
    StreamMessage,
    decode_attributes,
    decode_message,
    decode_messages,
    encode_message,
    message_columns,
)
from forebay.limits import ATTRIBUTES_MAX, MESSAGE_BYTES_MAX, OFFSET_MAX

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

# ---- round trips ----


@settings(max_examples=200, deadline=None)
@given(message=messages(), offset=st.integers(0, OFFSET_MAX))
def test_a_message_comes_back_as_it_was_at_the_offset_it_was_stamped_with(
    message: StreamMessage, offset: int
) -> None:
    data = encode_message(message, offset)
    decoded = decode_message(data)
    assert decoded == replace(message, msg_id=replace(message.msg_id, topic_offset=offset))
    assert decoded.offset == offset
    assert data == encoded(decoded, fixed, 3)


@settings(max_examples=50, deadline=None)
@given(message=messages(), before=st.binary(max_size=20), after=st.binary(max_size=20))
def test_a_message_is_read_anywhere_in_any_kind_of_buffer(
    message: StreamMessage, before: bytes, after: bytes
) -> None:
    data = encode_message(message, 1)
    whole = before + data + after
    for buffer in (whole, bytearray(whole), memoryview(whole)):
        assert decode_message(buffer, len(before), len(data)) == decode_message(data)


def test_the_frames_offset_wins_over_the_one_inside_the_message() -> None:
    data = encode_message(SAMPLE, 5)
    assert decode_message(data, offset=77).offset == 77
    assert decode_message(data, offset=0).offset == 0


def test_the_messages_of_scanned_frames_have_the_frames_offsets() -> None:
    log = encode_frame(40, encode_message(SAMPLE, 5)) + encode_frame(41, encode_message(SAMPLE, 5))
    assert [message.offset for message in decode_messages(scan(log))] == [40, 41]


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


@settings(max_examples=150, deadline=None)
@given(message=messages())
def test_a_decoder_of_danube_v0_5_0_reads_what_is_written(message: StreamMessage) -> None:
    offset = message.offset
    assert read_as_v0_5_0(encode_message(message, offset)) == without(message, 0)


# ---- the encodings are told apart ----


@pytest.mark.parametrize(("number", "flavour", "appended"), ENCODINGS)
@settings(max_examples=120, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    with pytest.raises(UsageError, match="give it its topic's name"):
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


# ---- truncation and damage ----


def test_a_truncated_message_is_refused_or_is_a_whole_older_one() -> None:
    data = encode_message(SAMPLE, 5)
    older = {len(encoded(SAMPLE, fixed, appended)): appended for appended in (0, 2, 3)}
    for cut in range(len(data) + 1):
        if cut in older:
            assert decode_message(data[:cut]) == without(SAMPLE, older[cut])
        else:
            with pytest.raises(MessageError):
                decode_message(data[:cut])


def test_a_truncated_varint_message_is_refused_or_is_a_whole_older_one() -> None:
    data = encoded(SAMPLE, varint, 3)
    older = {len(encoded(SAMPLE, varint, appended)): appended for appended in (0, 2, 3)}
    for cut in range(len(data) + 1):
        if cut in older:
            assert decode_message(data[:cut]) == without(SAMPLE, older[cut])
        else:
            with pytest.raises(MessageError):
                decode_message(data[:cut])


@pytest.mark.parametrize("number", [fixed, varint])
def test_bytes_behind_a_message_make_it_none(number: Number) -> None:
    with pytest.raises(MessageError):
        decode_message(encoded(SAMPLE, number, 3) + b"\0")


def decodes_or_message_error(data: bytes) -> None:
    with suppress(MessageError):
        decode_message(data)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
@example(b"")
@example(bytes(10))
@example(b"\xff" * 100)
@example(b"\0" * 9 + b"\xfd" + b"\xff" * 8)
def test_no_bytes_raise_anything_but_message_error(data: bytes) -> None:
    decodes_or_message_error(data)


@settings(max_examples=200, deadline=None)
@given(
    message=messages(),
    number=st.sampled_from([fixed, varint]),
    appended=st.sampled_from([0, 2, 3]),
    damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 400),
)
def test_no_damage_raises_anything_but_message_error(
    message: StreamMessage,
    number: Number,
    appended: int,
    damage: list[tuple[int, int]],
    cut: int,
) -> None:
    data = bytearray(encoded(message, number, appended))
    for at, value in damage:
        data[at % len(data)] = value
    decodes_or_message_error(bytes(data))
    decodes_or_message_error(bytes(data[:cut]))


@pytest.mark.parametrize("number", [fixed, varint])
def test_every_single_byte_of_damage_raises_nothing_but_message_error(number: Number) -> None:
    data = encoded(SAMPLE, number, 3)
    for at in range(len(data)):
        for value in (0, 1, 2, 0x2F, 0x7F, 0x80, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF):
            decodes_or_message_error(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("number", [fixed, varint])
def test_a_count_of_attributes_that_cannot_be_is_refused_at_once(number: Number) -> None:
    bare = replace(SAMPLE, attributes={})
    front = encoded(bare, number, 0).removesuffix(number(0))
    for count in (1, 1000, 2**20, 2**32, U64_MAX):
        with pytest.raises(MessageError):
            decode_message(front + number(count) + bytes(64))


@pytest.mark.parametrize("tag", [2, 3, 0x7F, 0xFF])
def test_an_option_is_absent_or_present_and_nothing_else(tag: int) -> None:
    whole = encoded(replace(SAMPLE, routing_key=None), fixed, 3)
    with pytest.raises(MessageError):
        decode_message(whole[:-1] + bytes([tag]))


def test_a_varint_schema_version_over_u32_is_refused() -> None:
    front = encoded(SAMPLE, varint, 0)
    assert decode_message(front + b"\0\1" + varint(U32_MAX)).schema_version == U32_MAX
    with pytest.raises(MessageError):
        decode_message(front + b"\0\1" + varint(U32_MAX + 1))


@pytest.mark.parametrize("number", [fixed, varint])
@pytest.mark.parametrize("text", ["/default/t1", "127.0.0.1:6650", "p1", "k", "v1", "rk"])
def test_text_that_is_not_utf_8_is_a_message_error(number: Number, text: str) -> None:
    broken = b"\xff" * (len(text) - 1)
    data = encoded(SAMPLE, number, 3)
    keep = text[:1].encode()  # the slash of the topic decides how the bytes are read
    damaged = data.replace(text.encode(), keep + broken if broken else b"\xff")
    assert damaged != data
    with pytest.raises(MessageError, match="UTF-8"):
        decode_message(damaged)


def test_attributes_from_the_columns_that_are_not_utf_8_are_a_message_error() -> None:
    data = encoded(replace(SAMPLE, attributes={"k": "v1"}), fixed, 3).replace(b"v1", b"\xff\xff")
    columns = message_columns(scan(encode_frame(0, data)))
    pairs = Span(columns.attribute_positions[0] - 16, columns.attribute_lengths[0])
    with pytest.raises(MessageError, match="UTF-8"):
        decode_attributes(data, pairs, columns.attribute_counts[0], columns.flavours[0])


# ---- columns ----


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(
        st.tuples(messages(), st.sampled_from([fixed, varint]), st.sampled_from([0, 2, 3])),
        max_size=5,
    )
)
def test_the_columns_say_what_the_decoded_messages_say(
    batch: list[tuple[StreamMessage, Number, int]],
) -> None:
    log = b"".join(
        encode_frame(offset, encoded(message, number, appended))
        for offset, (message, number, appended) in enumerate(batch)
    )
    frames = scan(log)
    columns = message_columns(frames)
    assert len(columns) == len(frames) == len(batch)
    for row, message in enumerate(decode_messages(frames)):
        at, length = columns.payload_positions[row], columns.payload_lengths[row]
        assert log[at : at + length] == message.payload
        assert columns.publish_times[row] == message.publish_time
        at, length = columns.key_positions[row], columns.key_lengths[row]
        key = None if length == -1 else log[at : at + length].decode()
        assert key == message.routing_key
        pairs = Span(columns.attribute_positions[row], columns.attribute_lengths[row])
        count, flavour = columns.attribute_counts[row], columns.flavours[row]
        assert decode_attributes(log, pairs, count, flavour) == message.attributes
        assert flavour == locate(log, frames.positions[row], frames.lengths[row]).flavour


def test_the_columns_name_the_first_frame_that_holds_no_message() -> None:
    log = encode_frame(8, encode_message(SAMPLE, 8)) + encode_frame(9, b"\xff" * 20)
    with pytest.raises(MessageError, match=r"offset 9\b"):
        message_columns(scan(log))


def test_the_columns_of_no_frames_are_empty() -> None:
    assert len(message_columns(scan(b""))) == 0


# ---- limits ----


def test_a_message_of_exactly_the_limit_is_written_and_one_byte_more_is_refused() -> None:
    overhead = len(encode_message(replace(SAMPLE, payload=b""), 0))
    payload = bytes(MESSAGE_BYTES_MAX - overhead)
    assert len(encode_message(replace(SAMPLE, payload=payload), 0)) == MESSAGE_BYTES_MAX
    with pytest.raises(MessageTooLarge, match=str(MESSAGE_BYTES_MAX)):
        encode_message(replace(SAMPLE, payload=payload + b"x"), 0)


def test_as_many_attributes_as_the_limit_are_written_and_one_more_is_refused() -> None:
    many = {str(number): "" for number in range(ATTRIBUTES_MAX)}
    data = encode_message(replace(SAMPLE, attributes=many), 0)
    assert decode_message(data).attributes == many
    with pytest.raises(MessageTooLarge, match=str(ATTRIBUTES_MAX)):
        encode_message(replace(SAMPLE, attributes=many | {"more": ""}), 0)


@pytest.mark.parametrize("number", [fixed, varint])
def test_more_attributes_than_are_written_are_read(number: Number) -> None:
    many = {str(key): "" for key in range(ATTRIBUTES_MAX + 1)}
    message = replace(SAMPLE, attributes=many)
    assert decode_message(encoded(message, number, 3)) == message


@pytest.mark.parametrize(
    "message",
    [
        replace(SAMPLE, request_id=-1),
        replace(SAMPLE, request_id=2**64),
        replace(SAMPLE, publish_time=2**64),
        replace(SAMPLE, schema_id=-1),
        replace(SAMPLE, schema_version=2**32),
        replace(SAMPLE, producer_name="\ud800"),
        replace(SAMPLE, attributes={"\udfff": ""}),
    ],
)
def test_a_value_that_its_field_does_not_hold_is_refused(message: StreamMessage) -> None:
    with pytest.raises(UsageError):
        encode_message(message, 0)


# ---- many at once ----


def one_by_one(frames: Scan) -> list[StreamMessage]:
    return [
        decode_message(frames.buffer, position, length, offset=offset)
        for offset, position, length in zip(
            frames.offsets, frames.positions, frames.lengths, strict=True
        )
    ]


@given(
    found=st.lists(messages(), max_size=8),
    number=st.sampled_from([fixed, varint]),
    appended=st.lists(st.sampled_from([0, 2, 3]), min_size=8, max_size=8),
    repeat=st.integers(1, 3),
)
def test_messages_decoded_together_are_those_decoded_one_by_one(
    found: list[StreamMessage], number: Number, appended: list[int], repeat: int
) -> None:
    payloads = [encoded(*parts) for parts in zip(found, [number] * 8, appended, strict=False)]
    log = b"".join(encode_frame(at, one) for at, one in enumerate(payloads * repeat))
    frames = scan(log)
    assert len(frames) == len(payloads) * repeat
    assert list(decode_messages(frames)) == one_by_one(frames)


@given(message=messages(), position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_damage_is_told_alike_for_many_and_for_one(
    message: StreamMessage, position: int, byte: int
) -> None:
    whole = encode_message(message, 0)
    at = position % len(whole)
    damaged = whole[:at] + bytes([byte]) + whole[at + 1 :]
    frames = scan(encode_frame(0, whole) + encode_frame(1, damaged))
    together = decode_messages(frames)
    assert next(together) == decode_message(whole, offset=0)
    try:
        alone = decode_message(damaged, offset=1)
    except MessageError:
        with pytest.raises(MessageError):
            next(together)
    else:
        assert list(together) == [alone]
