"""Messages: round trips, columns, limits, and many at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import MessageError, MessageTooLarge, UsageError
from forebay.format.frame import Scan, encode_frame, scan
from forebay.format.layout import Span, locate
from forebay.format.message import (
    StreamMessage,
    decode_attributes,
    decode_message,
    decode_messages,
    encode_message,
    message_columns,
)
from forebay.limits import ATTRIBUTES_MAX, MESSAGE_BYTES_MAX, OFFSET_MAX
from support.danube_messages import SAMPLE, Number, encoded, fixed, messages, varint

# ---- round trips ----


@settings(max_examples=200)
@given(message=messages(), offset=st.integers(0, OFFSET_MAX))
def test_a_message_comes_back_as_it_was_at_the_offset_it_was_stamped_with(
    message: StreamMessage, offset: int
) -> None:
    data = encode_message(message, offset)
    decoded = decode_message(data)
    assert decoded == replace(message, msg_id=replace(message.msg_id, topic_offset=offset))
    assert decoded.offset == offset
    assert data == encoded(decoded, fixed, 3)


@settings(max_examples=50)
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


# ---- columns ----


@settings(max_examples=60)
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
