"""The plain codec and its compiled twin: same limits, same runs, and no reference is kept."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MessageTooLarge
from forebay.format import pure
from forebay.format.frame import encode_frame
from forebay.limits import (
    ATTRIBUTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MIN,
    MESSAGE_BYTES_MAX,
    OFFSET_MAX,
)
from support.codec_twins import (
    CONSECUTIVE,
    HEADER_BYTES,
    U64_MAX,
    ForeignMapping,
    native,
    outcome,
    same,
)

# ---- limits ----


@pytest.mark.parametrize(
    ("length", "end"),
    [
        (FRAME_PAYLOAD_BYTES_MIN - 1, pure.BAD_LENGTH),
        (FRAME_PAYLOAD_BYTES_MIN, pure.TORN),
        (FRAME_PAYLOAD_BYTES_MAX, pure.TORN),
        (FRAME_PAYLOAD_BYTES_MAX + 1, pure.BAD_LENGTH),
    ],
)
def test_the_limits_of_a_frame_are_the_same(length: int, end: int) -> None:
    result = same("scan", pure.HEADER.pack(5, length, 0), 0, -1, CONSECUTIVE)
    assert result == (b"", b"", b"", 0, end, 5)


@pytest.mark.parametrize(
    ("offset", "end"), [(OFFSET_MAX, pure.COMPLETE), (OFFSET_MAX + 1, pure.BAD_OFFSET)]
)
def test_the_limit_of_offsets_is_the_same(offset: int, end: int) -> None:
    result = same("scan", encode_frame(offset, bytes(10)), 0, -1, CONSECUTIVE)
    assert isinstance(result, tuple)
    assert result[-2:] == (end, OFFSET_MAX + 1)


@pytest.mark.parametrize("count", [16, 17, ATTRIBUTES_MAX, ATTRIBUTES_MAX + 1])
@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_the_limit_of_attributes_is_the_same(count: int, kind: Callable[[Any], Any]) -> None:
    attributes = kind({f"ключ {number}": str(number) for number in range(count)})
    result = same("encode_one", b"", b"", 0, b"", 0, attributes, None)
    assert (result is MessageTooLarge) == (count > ATTRIBUTES_MAX)
    twice = same(
        "encode_many", b"", b"", 0, [b"", b""], 0, 0, [attributes, {"a": "b"}], None, 9**9, None
    )
    assert (twice is MessageTooLarge) == (count > ATTRIBUTES_MAX)


def test_the_limit_of_a_message_is_the_same() -> None:
    around = len(native.encode_one(b"h", b"m", 0, b"", 0, None, None)) - HEADER_BYTES
    largest = bytes(MESSAGE_BYTES_MAX - around)
    assert isinstance(same("encode_one", b"h", b"m", 0, largest, 0, None, None), bytes)
    assert same("encode_one", b"h", b"m", 0, largest + b"\0", 0, None, None) is MessageTooLarge


# ---- arguments that change while they are read ----


@pytest.mark.parametrize("twin", [pure, native])
def test_a_list_emptied_in_mid_batch_ends_the_batch(twin: Any) -> None:
    payloads = [b"%d" % number * 200 for number in range(5)]
    attributes = [None, None, ForeignMapping([("a", "b")], payloads.clear), None, None]
    frames, index = twin.encode_many(b"h", b"m", 0, payloads, 0, 0, attributes, None, 9**9, None)
    assert index == 3
    assert len(pure.scan(frames, 0, 0, CONSECUTIVE)[0]) == 3


@pytest.mark.parametrize("twin", [pure, native])
def test_a_payload_cannot_be_resized_while_it_is_encoded(twin: Any) -> None:
    payload = bytearray(100)
    attributes = ForeignMapping([("a", "b")], payload.clear)
    with pytest.raises(BufferError):
        twin.encode_one(b"h", b"m", 0, payload, 0, attributes, None)
    with pytest.raises(BufferError):
        twin.encode_many(b"h", b"m", 0, [payload], 0, 0, [attributes], None, 9**9, None)
    payload.clear()


def test_attributes_replaced_in_mid_batch_are_read_as_they_are_then() -> None:
    def outcome_of(twin: Any) -> Any:
        later = {"a": "b"}
        first = ForeignMapping([("x", "y")], lambda: later.update(a="long" * 500, c="d"))
        return twin.encode_many(b"", b"", 0, [b"", b""], 0, 0, [first, later], None, 9**9, None)

    assert outcome_of(native) == outcome_of(pure)


# ---- what the twin keeps ----


def test_the_compiled_twin_keeps_no_reference() -> None:
    payload, key, buffer = bytes(300), "key" * 9, bytearray(encode_frame(0, bytes(40)))
    pairs = {"a" * 9: "b" * 9}
    calls: list[tuple[Callable[..., Any], tuple[object, ...]]] = [
        (native.encode_one, (b"", b"", 0, payload, 0, pairs, key)),
        (native.encode_one, (b"", b"", 0, payload, 0, MappingProxyType(pairs), 5)),
        (
            native.encode_many,
            (b"", b"", 0, [payload] * 3, 0, 0, [pairs] * 3, (key,) * 3, 700, None),
        ),
        (native.encode_many, (b"", b"", 0, [payload, "no"], 0, 0, None, None, 700, None)),
        (native.encode_many, (bytes(9), b"", 0, [payload] * 3, 0, 0, None, None, 700, 2**64 - 2)),
        (native.scan, (buffer, 0, -1, CONSECUTIVE)),
        (native.columns, (buffer, array("Q", [16]), array("I", [40]))),
        (native.columns, (buffer, array("Q", [16]), array("I", [90]))),
        (native.survey, (buffer, array("Q", [16]), array("I", [40]), b"/default/t")),
        (native.survey, (buffer, array("Q", [16]), array("I", [90]), b"/default/t")),
    ]
    watched = [payload, key, pairs, buffer, *pairs, *pairs.values(), MessageTooLarge]
    before = [sys.getrefcount(thing) for thing in watched]
    for function, args in calls * 50:
        outcome(function, *args)
    assert [sys.getrefcount(thing) for thing in watched] == before
    buffer.clear()


@pytest.mark.parametrize("name", ["scan", "columns", "survey", "append_one", "encode_many"])
def test_a_wrong_count_of_arguments_is_a_type_error(name: str) -> None:
    assert same(name) is TypeError
    assert same(name, *range(12)) is TypeError


@given(st.binary(max_size=1200))
def test_checksums_are_those_of_zlib(raw: bytes) -> None:
    frame = native.encode_one(raw, b"", 0, b"", 0, None, None)
    assert pure.HEADER.unpack_from(frame)[2] == crc32(frame[HEADER_BYTES:])


# ---- runs that grow ----


def test_a_run_grows_alike_in_both_twins() -> None:
    runs = pure.new_run(), pure.new_run()
    for number in range(300):
        args = (7, b"head", b"middle", bytes(number), number, {"k": str(number)}, None)
        offsets = pure.append_one(runs[0], *args), native.append_one(runs[1], *args)
        assert offsets == (7 + number, 7 + number)
    assert runs[0] == runs[1]
    assert pure.run_count(runs[1]) == 300
    assert list(pure.scan(pure.run_frames(runs[1]), 0, 7, CONSECUTIVE)[0]) == list(range(7, 307))


@pytest.mark.parametrize("twin", [pure, native])
def test_bytes_behind_the_count_do_not_exist(twin: Any) -> None:
    run, clean = pure.new_run(), pure.new_run()
    for target in (run, clean):
        twin.append_one(target, 0, b"h", b"m", b"first", 0, None, None)
    run += b"what an interrupted append left"
    assert bytes(pure.run_frames(run)) == bytes(pure.run_frames(clean))
    for target in (run, clean):
        assert twin.append_one(target, 0, b"h", b"m", b"second", 0, None, None) == 1
    assert run == clean


@pytest.mark.parametrize(
    "run",
    [
        b"",
        bytearray(),
        bytearray(15),
        bytearray(16),
        bytearray(pure.RUN_PREFIX.pack(0, 17)),
        bytearray(pure.RUN_PREFIX.pack(OFFSET_MAX, 16)),
        bytearray(pure.RUN_PREFIX.pack(U64_MAX, 16)),
    ],
)
def test_what_is_no_run_is_refused_alike(run: Any) -> None:
    result = same("append_one", run, 1, b"h", b"m", b"payload", 0, None, None)
    assert result in (TypeError, ValueError)


@pytest.mark.parametrize("twin", [pure, native])
def test_a_refused_message_leaves_the_run_as_it_was(twin: Any) -> None:
    run = pure.new_run()
    twin.append_one(run, 0, b"h", b"m", b"first", 0, None, None)
    before = bytes(run)
    for bad in ({"payload": "text"}, {"time": -1}, {"key": 5}, {"attributes": {"a": 5}}):
        parts: dict[str, Any] = {"payload": b"", "time": 0, "attributes": None, "key": None} | bad
        with pytest.raises((TypeError, ValueError)):
            twin.append_one(run, 0, b"h", b"m", *parts.values())
        assert bytes(run) == before
    view = memoryview(run)
    with pytest.raises(BufferError):
        twin.append_one(run, 0, b"h", b"m", b"second", 0, None, None)
    view.release()
    assert bytes(run) == before


@pytest.mark.parametrize("twin", [pure, native])
def test_a_run_that_changes_under_an_append_is_refused(twin: Any) -> None:
    run = pure.new_run()
    meddler = ForeignMapping(
        [("a", "b")], lambda: pure.append_one(run, 0, b"h", b"m", b"other", 0, None, None)
    )
    with pytest.raises(ValueError, match="changed"):
        twin.append_one(run, 0, b"h", b"m", b"payload", 0, meddler, None)
    assert pure.run_count(run) == 1
