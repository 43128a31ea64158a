"""Scanning frames and locating messages: both twins of the codec return and raise the same."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import pure
from forebay.format.frame import encode_frame
from forebay.format.layout import FIXED, VARINT, Buffer
from forebay.format.message import MessageId, StreamMessage, encode_message
from support.codec_twins import (
    ANY_ORDER,
    CONSECUTIVE,
    U64_MAX,
    buffer_types,
    damage,
    expectations,
    fixed,
    logs,
    messages,
    same,
    same_columns_of,
)


@given(log=logs(), kind=buffer_types, expected=expectations, consecutive=st.booleans())
def test_valid_frames_scan_the_same(
    log: bytes, kind: Callable[[bytes], Buffer], expected: int, consecutive: bool
) -> None:
    same("scan", kind(log), 0, expected, consecutive)
    same("scan", kind(log), 0, -1, consecutive)
    if log:
        first = pure.HEADER.unpack_from(log)[0]
        same("scan", kind(log), 0, first, consecutive)
    same_columns_of(kind(log))


@given(log=logs(), kind=buffer_types, start=st.integers(-2, 200), consecutive=st.booleans())
def test_any_start_scans_the_same(
    log: bytes, kind: Callable[[bytes], Buffer], start: int, consecutive: bool
) -> None:
    same("scan", kind(log), start, -1, consecutive)


@given(log=logs(st.binary(min_size=10, max_size=30)), consecutive=st.booleans())
def test_a_log_torn_at_every_byte_scans_the_same(log: bytes, consecutive: bool) -> None:
    for cut in range(len(log) + 1):
        result = same("scan", log[:cut], 0, -1, consecutive)
        assert isinstance(result, tuple)


@given(message=messages(), kind=buffer_types)
def test_a_message_torn_at_every_byte_is_located_the_same(
    message: bytes, kind: Callable[[bytes], Buffer]
) -> None:
    for cut in range(len(message) + 1):
        positions, lengths = array("Q", [0]), array("I", [cut])
        same("columns", kind(message), memoryview(positions), memoryview(lengths))
        same("columns", kind(message[:cut]), memoryview(positions), memoryview(lengths))


@given(data=st.data(), kind=buffer_types, expected=expectations, consecutive=st.booleans())
def test_damaged_frames_scan_the_same(
    data: st.DataObject, kind: Callable[[bytes], Buffer], expected: int, consecutive: bool
) -> None:
    buffer = kind(data.draw(damage(data.draw(logs()))))
    same("scan", buffer, 0, expected, consecutive)
    same("scan", buffer, 0, -1, consecutive)
    same_columns_of(buffer)


@given(data=st.data(), kind=buffer_types)
def test_damaged_messages_are_located_the_same(
    data: st.DataObject, kind: Callable[[bytes], Buffer]
) -> None:
    damaged = data.draw(damage(data.draw(messages())))
    one = memoryview(array("Q", [0])), memoryview(array("I", [len(damaged)]))
    same("columns", kind(damaged), *one)
    same_columns_of(kind(encode_frame(1, damaged)))


@given(
    noise=st.binary(max_size=200) | st.lists(st.sampled_from([0, 1, 2, 250, 251, 252])).map(bytes)
)
def test_noise_is_located_the_same(noise: bytes) -> None:
    same("columns", noise, array("Q", [0]), array("I", [len(noise)]))


@given(
    log=logs(),
    positions=st.lists(st.integers(0, 150) | st.integers(0, U64_MAX), max_size=4),
    lengths=st.lists(st.integers(0, 150) | st.integers(0, 2**32 - 1), max_size=4),
    kind=buffer_types,
)
def test_any_positions_and_lengths_are_located_or_refused_the_same(
    log: bytes, positions: list[int], lengths: list[int], kind: Callable[[bytes], Buffer]
) -> None:
    same("columns", kind(log), memoryview(array("Q", positions)), memoryview(array("I", lengths)))


@given(positions=st.binary(max_size=20), lengths=st.binary(max_size=12))
def test_columns_of_partial_items_are_refused_the_same(positions: bytes, lengths: bytes) -> None:
    same("columns", bytes(40), positions, lengths)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [([0, 0], [5]), ([0], []), ([11], [0]), ([5], [6]), ([U64_MAX], [1]), ([0], [2**32 - 1])],
)
def test_rows_outside_the_buffer_or_of_unequal_count_are_a_value_error(
    positions: list[int], lengths: list[int]
) -> None:
    assert same("columns", bytes(10), array("Q", positions), array("I", lengths)) is ValueError


@pytest.mark.parametrize(
    ("fixed_topic", "varint_topic", "flavour"),
    [(b"x", b"y", FIXED), (b"/", b"/", FIXED), (b"/", b"y", FIXED), (b"x", b"/", VARINT)],
)
def test_a_message_that_reads_both_ways_goes_to_the_rooted_topic(
    fixed_topic: bytes, varint_topic: bytes, flavour: int
) -> None:
    # The payload holds the end of the varint reading, whose routing key takes the fixed one's end:
    # time, producer name, subscription, attributes.
    payload = bytes(9) + b"\1\x19"
    end = fixed(0) + fixed(0) + b"\0" + fixed(0)
    start = fixed(0) + fixed(1) + fixed_topic + fixed(0) + fixed(0) + fixed(len(payload))
    # The first eight bytes are the fixed reading's request id; the varint reading's topic begins
    # in them and takes all up to the payload.
    ids = b"\0\0" + b"\xfb" + struct.pack("<H", 3 + len(start)) + varint_topic + b"zz"
    message = ids + start + payload + end
    rows = array("Q", [0]), array("I", [len(message)])
    result = same("columns", message, *rows)
    assert isinstance(result, tuple)
    assert result[-2:] == (bytes([flavour]), -1)


@pytest.mark.parametrize(("version", "bad"), [(2**32 - 1, -1), (2**32, 0)])
def test_a_schema_version_over_32_bits_is_no_message(version: int, bad: int) -> None:
    message = bytes(10) + b"\0\1" + struct.pack("<BQ", 253, version)
    result = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(result, tuple)
    assert result[-1] == bad


@pytest.mark.parametrize(("mark", "width"), [(250, 0), (251, 2), (252, 4), (253, 8)])
def test_a_varint_has_the_width_of_its_mark(mark: int, width: int) -> None:
    message = bytes([mark]) + bytes(width + 9)
    result = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(result, tuple)
    assert result[-1] == -1


@pytest.mark.parametrize("mark", [254, 255])
@pytest.mark.parametrize("width", [0, 1, 2, 4, 8, 16])
def test_a_varint_over_64_bits_is_no_message(mark: int, width: int) -> None:
    message = bytes([mark]) + bytes(width + 9)
    result = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(result, tuple)
    assert result[-1] == 0


@pytest.mark.parametrize("at", [8, 10, 11, 12])
@pytest.mark.parametrize("tag", [0, 1, 2, 255])
def test_a_tag_is_zero_or_one(at: int, tag: int) -> None:
    message = bytearray(13)  # varint, all fields absent or empty
    message[at : at + 1] = [tag, 0] if tag == 1 else [tag]
    result = same("columns", message, array("Q", [0]), array("I", [len(message)]))
    assert isinstance(result, tuple)
    assert result[-1] == (-1 if tag <= 1 else 0)


def test_buffers_that_are_large_enough_to_be_read_unlocked_give_the_same() -> None:
    message = encode_message(StreamMessage(b"x" * 100, msg_id=MessageId(1, "/default/t")), 0)
    log = b"".join(encode_frame(offset, message) for offset in range(3000))
    for whole in (log, log[:-1], log[:-50] + bytes(50)):
        _, positions, lengths, *_ = pure.scan(whole, 0, 0, CONSECUTIVE)
        same("scan", whole, 0, 0, CONSECUTIVE)
        same("columns", whole, positions, lengths)
        same("columns", whole, positions, memoryview(array("I", [*lengths[:-1], 9])))


@pytest.mark.parametrize("start", [-1, 11, 2**63, 2**64, -(2**64)])
def test_a_start_outside_the_buffer_is_a_value_error(start: int) -> None:
    assert same("scan", bytes(10), start, -1, ANY_ORDER) is ValueError


def test_what_is_no_contiguous_buffer_is_refused_the_same() -> None:
    assert same("scan", memoryview(bytes(40))[::2], 0, -1, ANY_ORDER) is BufferError
    assert same("scan", "text", 0, -1, ANY_ORDER) is TypeError
    assert same("scan", bytes(40), 0.5, -1, ANY_ORDER) is TypeError
    assert same("columns", memoryview(bytes(40))[::2], b"", b"") is BufferError
    assert same("scan", bytes(40), 0, 2**64, ANY_ORDER) is ValueError


def test_a_memoryview_of_wider_items_is_read_as_its_bytes() -> None:
    log = encode_frame(3, bytes(16))
    wide = memoryview(log).cast("Q")
    assert same("scan", wide, 0, 3, CONSECUTIVE) == same("scan", log, 0, 3, CONSECUTIVE)
    assert same("encode_one", b"", b"", 0, wide, 0, None, None) == same(
        "encode_one", b"", b"", 0, log, 0, None, None
    )
