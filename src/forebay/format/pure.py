"""The frame codec in plain Python: the reference, and the fallback if `_native` was not built.

`forebay.format.codec` chooses between this module and `_native`. Property tests check that both
return the same results and raise the same errors on valid, torn and damaged input. The functions
return tuples of raw columns, because that is the interface of `_native`; `forebay.format.frame`
gives them names.

No other Python module parses the frame header.
"""

from __future__ import annotations

import operator
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias
from zlib import crc32

from forebay.errors import MessageError, MessageTooLarge
from forebay.format.layout import Buffer, locate
from forebay.limits import (
    ATTRIBUTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MIN,
    MESSAGE_BYTES_MAX,
    OFFSET_MAX,
)

HEADER: Final = struct.Struct("<QII")
"""offset, payload length, CRC-32 of the payload."""

RUN_PREFIX: Final = struct.Struct("<QQ")
"""Number of frames, and length in bytes with this prefix, of a run: see `new_run`."""

COMPLETE: Final = 0
TORN: Final = 1
BAD_LENGTH: Final = 2
BAD_OFFSET: Final = 3
BAD_CRC: Final = 4

GATHER_BYTES_MAX: Final = 2**31 - 1
"""The largest gathered column: Arrow's plain binary arrays have signed 32-bit offsets."""

RawScan: TypeAlias = tuple[memoryview, memoryview, memoryview, int, int, int | None]
RawColumns: TypeAlias = tuple[
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    int,
]
Attributes: TypeAlias = Mapping[str, str] | None

_U64: Final = struct.Struct("<Q")
_NO_ATTRIBUTES: Final = _U64.pack(0)
_NO_SCHEMA: Final = b"\0\0"
_NO_KEY: Final = b"\0"
_U64_MAX: Final = 2**64 - 1


def _checked(value: int, limit: int) -> int:
    number = operator.index(value)
    if not 0 <= number <= limit:
        raise ValueError(f"{number} is not in 0..{limit}")
    return number


def _view(buffer: Buffer) -> memoryview:
    """A view of single bytes: the `len` of a memoryview counts items, which may be larger."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("the buffer is not contiguous")
    return view.cast("B")


def scan(buffer: Buffer, start: int, expected: int, consecutive: bool) -> RawScan:
    """Scans the frames from `start`; `expected` is the first frame's offset, or -1 for any.

    Returns offsets, payload positions, payload lengths, the position after the last whole frame,
    how the scan ended, and the offset expected there, if known. Raises ValueError if `start` is
    outside the buffer.
    """
    offsets, positions, lengths = array("Q"), array("Q"), array("I")
    unpack, header_bytes = HEADER.unpack_from, HEADER.size
    with _view(buffer) as view:
        size = len(view)
        at = _checked(start, size)
        expected = _checked(expected, _U64_MAX) if operator.index(expected) >= 0 else -1
        end, ended_at = COMPLETE, None if expected < 0 else expected
        while at < size:
            if size - at < header_bytes:
                end = TORN
                break
            offset, length, crc = unpack(view, at)
            ended_at = offset if expected < 0 else expected
            if not FRAME_PAYLOAD_BYTES_MIN <= length <= FRAME_PAYLOAD_BYTES_MAX:
                end = BAD_LENGTH
                break
            if offset > OFFSET_MAX or (expected >= 0 and offset != expected):
                end = BAD_OFFSET
                break
            position = at + header_bytes
            if length > size - position:
                end = TORN
                break
            if crc32(view[position : position + length]) != crc:
                end = BAD_CRC
                break
            offsets.append(offset)
            positions.append(position)
            lengths.append(length)
            at = position + length
            expected = offset + 1 if consecutive else -1
            ended_at = expected if consecutive else None
    return memoryview(offsets), memoryview(positions), memoryview(lengths), at, end, ended_at


def columns(buffer: Buffer, positions: memoryview, lengths: memoryview) -> RawColumns:
    """Locates the fields of many messages.

    Returns publish times, position and length of payload, routing key and attributes, the count of
    attributes, the flavour, and the index of the first undecodable message or -1.

    A message without a routing key has key position 0 and length -1. The columns stop before the
    undecodable message. Raises ValueError if the numbers of positions and lengths differ, or if a
    message is not inside the buffer.
    """
    data, places, sizes = _view(buffer), _view(positions), _view(lengths)
    if places.nbytes % 8 or sizes.nbytes % 4 or places.nbytes // 8 != sizes.nbytes // 4:
        raise ValueError(
            f"{places.nbytes} bytes of positions and {sizes.nbytes} of lengths do not match"
        )
    times, flavours = array("Q"), array("B")
    payload_at, payload_len, key_at, key_len, pairs_at, pairs_len, pairs = (
        array("q") for _ in range(7)
    )
    bad = -1
    for index, (position, length) in enumerate(zip(places.cast("Q"), sizes.cast("I"), strict=True)):
        if position + length > len(data):
            raise ValueError(f"message {index} is not inside the buffer of {len(data)} bytes")
        try:
            layout = locate(data, position, length)
        except MessageError:
            bad = index
            break
        times.append(layout.publish_time)
        payload_at.append(layout.payload.position)
        payload_len.append(layout.payload.length)
        key = layout.routing_key or (0, -1)
        key_at.append(key[0])
        key_len.append(key[1])
        pairs_at.append(layout.attributes.position)
        pairs_len.append(layout.attributes.length)
        pairs.append(layout.attribute_count)
        flavours.append(layout.flavour)
    return (
        memoryview(times),
        memoryview(payload_at),
        memoryview(payload_len),
        memoryview(key_at),
        memoryview(key_len),
        memoryview(pairs_at),
        memoryview(pairs_len),
        memoryview(pairs),
        memoryview(flavours),
        bad,
    )


def survey(
    buffer: Buffer, positions: Buffer, lengths: Buffer, topic: Buffer
) -> tuple[int, int, int]:
    """Looks at many messages without copying anything of them.

    Returns the highest publish time, the index of the first undecodable message or -1, and the
    index of the first one whose topic name is not `topic` or -1. An empty topic name counts as
    `topic`. Messages after the undecodable one are not looked at. Raises ValueError as `columns`
    does.
    """
    data, places, sizes, name = _view(buffer), _view(positions), _view(lengths), _view(topic)
    if places.nbytes % 8 or sizes.nbytes % 4 or places.nbytes // 8 != sizes.nbytes // 4:
        raise ValueError(
            f"{places.nbytes} bytes of positions and {sizes.nbytes} of lengths do not match"
        )
    highest, bad, foreign = 0, -1, -1
    for index, (position, length) in enumerate(zip(places.cast("Q"), sizes.cast("I"), strict=True)):
        if position + length > len(data):
            raise ValueError(f"message {index} is not inside the buffer of {len(data)} bytes")
        try:
            layout = locate(data, position, length)
        except MessageError:
            bad = index
            break
        highest = max(highest, layout.publish_time)
        at, size = layout.topic_name
        if foreign < 0 and size and data[at : at + size] != name:
            foreign = index
    return highest, bad, foreign


def gather(buffer: Buffer, positions: Buffer, lengths: Buffer) -> tuple[bytes, bytes, bytes | None]:
    """Copies the spans into one buffer, in the layout of an Arrow binary array.

    `positions` and `lengths` are signed 64-bit; a negative length is a null. Returns the offsets
    (where each span begins and the last one ends, 32-bit little-endian), the data, and the validity
    bitmap (one bit for each row that is not null, lowest bit first), which is None without nulls.
    Raises ValueError if the numbers of positions and lengths differ or a span is not inside the
    buffer, and OverflowError if the data is larger than GATHER_BYTES_MAX.
    """
    data, places, sizes = _view(buffer), _view(positions), _view(lengths)
    if places.nbytes % 8 or sizes.nbytes != places.nbytes:
        raise ValueError(
            f"{places.nbytes} bytes of positions and {sizes.nbytes} of lengths do not match"
        )
    rows = places.nbytes // 8
    offsets, validity, nulls = array("I", [0]), bytearray((rows + 7) // 8), 0
    spans: list[memoryview] = []
    total = 0
    for row, (position, length) in enumerate(zip(places.cast("q"), sizes.cast("q"), strict=True)):
        if length < 0:
            nulls += 1
        elif position < 0 or position + length > len(data):
            raise ValueError(f"span {row} is not inside the buffer of {len(data)} bytes")
        else:
            total += length
            if total > GATHER_BYTES_MAX:
                raise OverflowError(f"the first {row + 1} spans are over {GATHER_BYTES_MAX} bytes")
            spans.append(data[position : position + length])
            validity[row // 8] |= 1 << row % 8
        offsets.append(total)
    if sys.byteorder == "big":
        offsets.byteswap()
    return offsets.tobytes(), b"".join(spans), bytes(validity) if nulls else None


def _text(value: str) -> bytes:
    raw = str.encode(value)  # unlike value.encode(), raises TypeError for anything but a str
    return _U64.pack(len(raw)) + raw


def encode_attributes(attributes: Attributes) -> bytes:
    """The number of pairs and the pairs, in the mapping's own order. Raises MessageTooLarge."""
    if not attributes:
        return _NO_ATTRIBUTES
    pairs = tuple(attributes.items())
    if len(pairs) > ATTRIBUTES_MAX:
        raise MessageTooLarge(f"{len(pairs)} attributes; at most {ATTRIBUTES_MAX}")
    parts = [_U64.pack(len(pairs))]
    for key, value in pairs:
        parts += (_text(key), _text(value))
    return b"".join(parts)


def encode_tail(attributes: Attributes, routing_key: str | None) -> bytes:
    """The bytes after the subscription name of a message without a schema."""
    pairs = encode_attributes(attributes)
    return pairs + _NO_SCHEMA + (_NO_KEY if routing_key is None else b"\1" + _text(routing_key))


def frame(offset: int, payload: bytes) -> bytes:
    """The frame of an encoded message."""
    return HEADER.pack(offset, len(payload), crc32(payload)) + payload


def encode_one(
    head: bytes,
    middle: bytes,
    offset: int,
    payload: Buffer,
    publish_time: int,
    attributes: Attributes,
    routing_key: str | None,
) -> bytes:
    """Encodes one message as a frame.

    `head` are its bytes before the offset, `middle` those between publish time and attributes.
    Raises MessageTooLarge, and ValueError if the offset or the publish time is out of range.
    """
    offset, publish_time = _checked(offset, OFFSET_MAX), _checked(publish_time, _U64_MAX)
    if type(payload) is not bytes:
        payload = _view(payload)
    message = b"".join(
        (
            head,
            _U64.pack(offset),
            _U64.pack(len(payload)),
            payload,
            _U64.pack(publish_time),
            middle,
            encode_tail(attributes, routing_key),
        )
    )
    if len(message) > MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a message of {len(message)} bytes; at most {MESSAGE_BYTES_MAX}")
    return frame(offset, message)


def new_run() -> bytearray:
    """An empty run for `append_one`: the number of frames, the length in bytes, then the frames.

    Both numbers are set in one step after a frame was added. So an append that a signal interrupts
    leaves a consistent run: bytes past the length are ignored.
    """
    return bytearray(RUN_PREFIX.pack(0, RUN_PREFIX.size))


def append_one(
    run: bytearray,
    first_offset: int,
    head: bytes,
    middle: bytes,
    payload: Buffer,
    publish_time: int,
    attributes: Attributes,
    routing_key: str | None,
) -> int:
    """Adds a frame to a run whose first frame has `first_offset`; returns the new frame's offset.

    Raises as `encode_one` does, and leaves the run as it was.
    """
    added = run_count(run)
    first_offset = _checked(first_offset, OFFSET_MAX)
    if added > OFFSET_MAX - first_offset:
        raise ValueError("no offset is left")
    offset = first_offset + added
    encoded = encode_one(head, middle, offset, payload, publish_time, attributes, routing_key)
    if run_count(run) != added:
        raise ValueError("the run changed while a frame was encoded")
    add_frame(run, encoded)
    return offset


def run_count(run: bytearray) -> int:
    """The number of frames in the run."""
    if not isinstance(run, bytearray):
        raise TypeError(f"a run is a bytearray, not {type(run)}")
    if len(run) >= RUN_PREFIX.size:
        frames, size = RUN_PREFIX.unpack_from(run)
        if RUN_PREFIX.size <= size <= len(run):
            return int(frames)
    raise ValueError("the bytearray is no run of frames")


def add_frame(run: bytearray, encoded: bytes) -> None:
    """Adds one encoded frame to the run."""
    frames, size = RUN_PREFIX.unpack_from(run)
    if size != len(run):
        del run[size:]
    run += encoded
    RUN_PREFIX.pack_into(run, 0, frames + 1, len(run))


def run_frames(run: bytearray) -> memoryview:
    """A view of the frames of the run; the run cannot grow while the view exists."""
    return memoryview(run)[RUN_PREFIX.size : RUN_PREFIX.unpack_from(run)[1]]


def encode_many(
    head: bytes,
    middle: bytes,
    offset: int,
    payloads: Sequence[Buffer],
    index: int,
    publish_time: int,
    attributes: Sequence[Attributes] | None,
    routing_keys: Sequence[str | None] | None,
    bytes_max: int,
) -> tuple[bytes, int]:
    """Encodes `payloads[index:]`, the first with `offset`, up to `bytes_max` but at least one.

    Returns the frames and the index of the first payload that is left. Raises as `encode_one` does.
    """
    index = _checked(index, len(payloads))
    offset, publish_time = _checked(offset, OFFSET_MAX), _checked(publish_time, _U64_MAX)
    parts: list[bytes] = []
    size = 0
    while index < len(payloads):
        one = encode_one(
            head,
            middle,
            offset,
            payloads[index],
            publish_time,
            attributes[index] if attributes is not None else None,
            routing_keys[index] if routing_keys is not None else None,
        )
        if parts and size + len(one) > bytes_max:
            break
        parts.append(one)
        size += len(one)
        offset += 1
        index += 1
    return b"".join(parts), index
