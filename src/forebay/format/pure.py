"""The frame codec in plain Python: the reference, and the fallback if `_native` was not built.

`forebay.format.codec` chooses between this module and `_native`. Property tests check that both
return the same results and raise the same errors on valid, torn and damaged input. The functions
return tuples of raw columns, because that is the interface of `_native`; `forebay.format.frame`
gives them names.

No other Python module parses the frame header.
"""

from __future__ import annotations

import operator
import re
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias
from zlib import crc32

from forebay.errors import MessageError, MessageTooLarge
from forebay.format.layout import Buffer, locate, repeats_offset
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

RawFound: TypeAlias = tuple[memoryview, memoryview, int]
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


def find_frames(
    buffer: Buffer, stop: int, total: int, first: int, last: int, messages_only: bool, limit: int
) -> RawFound:
    """Tries every position before `stop` as the start of a frame with an offset `first..last`.

    With `messages_only` the message must repeat the offset. Returns the offsets and the payload
    positions of the whole valid frames, which may overlap, and where it stopped: at the last header
    that fits before `stop`, after the frame that reached `limit` (0 for no limit), or at a
    plausible header whose frame ends after the buffer and not after `total`, the end of the file
    counted from the start of the buffer. Raises ValueError if a number is out of range.

    The work is linear in the buffer, whatever lengths the headers claim: the CRC of a frame is
    computed from two CRCs of prefixes of the buffer.
    """
    offsets, positions = array("Q"), array("Q")
    with _view(buffer) as view:
        size = len(view)
        stop = _checked(stop, size)
        total = _checked(total, OFFSET_MAX)
        first, last = _checked(first, OFFSET_MAX), _checked(last, OFFSET_MAX)
        limit = _checked(limit, OFFSET_MAX)
        if total < size:
            raise ValueError("the file is smaller than the buffer")
        resume = max(0, min(stop, size - HEADER.size + 1))
        with _Prefixes(view) as prefixes:
            for at, offset, length, crc in _plausible_headers(view, stop, first, last):
                position = at + HEADER.size
                end = position + length
                if end > total:
                    continue
                if end > size:
                    resume = at
                    break
                if messages_only and not repeats_offset(view, position, end, offset):
                    continue
                if prefixes.crc_between(position, end) != crc:
                    continue
                offsets.append(offset)
                positions.append(position)
                if len(offsets) == limit:
                    resume = at + 1
                    break
    return memoryview(offsets), memoryview(positions), resume


def _plausible_headers(
    view: memoryview, stop: int, first: int, last: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields position, offset, length and CRC of each possible header that begins before `stop`."""
    if first > last:
        return
    # The offsets in the range share their high bytes; the length is neither 0 nor over the limit.
    free = ((first ^ last).bit_length() + 7) // 8
    shared = re.escape(last.to_bytes(8, "little")[free:])
    top = re.escape(bytes([FRAME_PAYLOAD_BYTES_MAX >> 24]))
    wanted = re.compile(
        b"(?=[\\s\\S]{%d}%s(?!\\0{4})[\\s\\S]{3}[\\0-%s][\\s\\S]{4})" % (free, shared, top)
    )
    for match in wanted.finditer(view, 0, min(stop + HEADER.size - 1, len(view))):
        offset, length, crc = HEADER.unpack_from(view, match.start())
        if first <= offset <= last and FRAME_PAYLOAD_BYTES_MIN <= length <= FRAME_PAYLOAD_BYTES_MAX:
            yield match.start(), offset, length, crc


class _Prefixes:
    """CRCs of the prefixes of a buffer, one for every 64 bytes, computed as far as they are used.

    crc(AB) is crc(A) · x^(8 · len(B)) + crc(B), as polynomials over GF(2) modulo that of the CRC.
    So the CRC of a range follows from those of the two prefixes that end at its ends.
    """

    _STEP: Final = 64
    _DIRECT_BYTES_MAX: Final = 256

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._known = array("I", [0])

    def __enter__(self) -> _Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self._view = memoryview(b"")  # the caller is about to release it

    def crc_between(self, start: int, end: int) -> int:
        if end - start <= self._DIRECT_BYTES_MAX:
            return crc32(self._view[start:end])
        return self._crc_before(end) ^ _shifted(self._crc_before(start), end - start)

    def _crc_before(self, end: int) -> int:
        known, step = self._known, self._STEP
        for at in range((len(known) - 1) * step, end - step + 1, step):
            known.append(crc32(self._view[at : at + step], known[-1]))
        block = end // step
        return crc32(self._view[block * step : end], known[block])


_POLYNOMIAL: Final = 0xEDB88320
_POWER_BITS: Final = 9


def _product(left: int, right: int) -> int:
    """The product of two polynomials modulo that of the CRC; x^0 is the highest bit."""
    product = 0
    while left:
        if left & 0x8000_0000:
            product ^= right
        left = left << 1 & 0xFFFF_FFFF
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@cache
def _powers(digit: int) -> list[int]:
    """x^(8 · n · 512^digit) for each n below 512."""
    step = 1 << 23  # x^8
    if digit:
        before = _powers(digit - 1)
        step = _product(before[-1], before[1])
    powers = [1 << 31]
    for _ in range((1 << _POWER_BITS) - 1):
        powers.append(_product(powers[-1], step))
    return powers


def _shifted(crc: int, count: int) -> int:
    """`crc` · x^(8 · count)."""
    digit = 0
    while count:
        low = count & ((1 << _POWER_BITS) - 1)
        if low:
            crc = _product(_powers(digit)[low], crc)
        count >>= _POWER_BITS
        digit += 1
    return crc


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
    request_id: int | None,
) -> tuple[bytes, int]:
    """Encodes `payloads[index:]`, the first with `offset`, up to `bytes_max` but at least one.

    Without a `request_id`, all messages have that of the head. Otherwise the first has it, and each
    further one a number higher by one; the first 8 bytes of the head do not count then.

    Returns the frames and the index of the first payload that is left. Raises as `encode_one` does.
    """
    index = _checked(index, len(payloads))
    offset, publish_time = _checked(offset, OFFSET_MAX), _checked(publish_time, _U64_MAX)
    if request_id is not None:
        request_id = _checked(request_id, _U64_MAX)
        if len(_view(head)) < _U64.size:
            raise ValueError("the head has no room for a request id")
    parts: list[bytes] = []
    size = 0
    while index < len(payloads):
        if request_id is not None:
            if request_id > _U64_MAX:
                raise ValueError("no request id is left")
            head = _U64.pack(request_id) + bytes(head)[_U64.size :]
            request_id += 1
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
