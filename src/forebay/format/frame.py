"""Frames: `[u64 offset][u32 length][u32 crc][payload]`, little-endian, one after the other.

Two ways in: `scan` walks a whole buffer at once and returns columns; `FrameDecoder` is fed chunks
that are cut anywhere. Neither does I/O, and both tell a torn tail (the bytes end inside a frame)
from a corrupt frame (the bytes are there and wrong). The layout: `docs/formats/frame.md`. How to go
on behind a corrupt frame: `forebay.format.resync`.

What a caller gets wrong: the CRC covers the payload only, so the header's offset is checked by
nothing but its neighbours. Ask for `consecutive` wherever offsets must be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from forebay.errors import CorruptFrame
from forebay.format import codec, pure
from forebay.format.layout import Buffer
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, FRAME_PAYLOAD_BYTES_MIN

HEADER_BYTES: Final = pure.HEADER.size
FRAME_BYTES_MIN: Final = HEADER_BYTES + FRAME_PAYLOAD_BYTES_MIN
FRAME_BYTES_MAX: Final = HEADER_BYTES + FRAME_PAYLOAD_BYTES_MAX

encode_frame = pure.frame
"""One frame around an encoded message."""


class End(IntEnum):
    """How a scan ended."""

    COMPLETE = pure.COMPLETE
    """At the end of the buffer, which is the end of a frame."""
    TORN = pure.TORN
    """Inside a frame that is plausible as far as it goes."""
    BAD_LENGTH = pure.BAD_LENGTH
    BAD_OFFSET = pure.BAD_OFFSET
    BAD_CRC = pure.BAD_CRC

    @property
    def corrupt(self) -> bool:
        return self > End.TORN

    def describe(self) -> str:
        return {
            End.COMPLETE: "complete",
            End.TORN: "torn frame",
            End.BAD_LENGTH: "impossible frame length",
            End.BAD_OFFSET: "frame offset out of order",
            End.BAD_CRC: "frame checksum mismatch",
        }[self]


class Frame(NamedTuple):
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Scan:
    """The whole frames at the start of a buffer, as columns, and where and why they end."""

    buffer: Buffer
    offsets: memoryview
    positions: memoryview
    """Of the payloads, in the buffer."""
    lengths: memoryview
    safe_length: int
    """The position after the last whole frame: bytes from here on are not part of the columns."""
    end: End
    offset: int | None
    """The offset expected at `safe_length`, where one is known."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Frame]:
        view = memoryview(self.buffer)
        for offset, position, length in zip(
            self.offsets, self.positions, self.lengths, strict=True
        ):
            yield Frame(offset, view[position : position + length])

    def part(self, start: int, stop: int) -> Scan:
        """Some of the frames, as a scan that ends with them; there must be one at least."""
        if start == 0 and stop == len(self) and self.end is End.COMPLETE:
            return self
        return Scan(
            self.buffer,
            self.offsets[start:stop],
            self.positions[start:stop],
            self.lengths[start:stop],
            self.positions[stop - 1] + self.lengths[stop - 1],
            End.COMPLETE,
            self.offsets[stop - 1] + 1,
        )

    def raise_if_corrupt(self, file: str, base: int = 0) -> None:
        """CorruptFrame where the scan met one; `base` is the buffer's position in the file."""
        if self.end.corrupt:
            raise CorruptFrame(
                self.end.describe(),
                file=file,
                position=base + self.safe_length,
                offset=self.offset,
            )


def scan(
    buffer: Buffer, start: int = 0, *, expected: int | None = None, consecutive: bool = False
) -> Scan:
    """Walks the frames in `buffer[start:]`, checking length limits and CRCs.

    With `expected` the first frame must have that offset; with `consecutive` each frame's offset
    must follow the one before. Never raises for bad bytes: see `Scan.end`.
    """
    offsets, positions, lengths, safe_length, end, offset = codec.scan(
        buffer, start, -1 if expected is None else expected, consecutive
    )
    return Scan(buffer, offsets, positions, lengths, safe_length, End(end), offset)


def frame_bytes(buffer: Buffer, at: int) -> int | None:
    """The size that the header at `at` claims for its frame, or None if it is not all there."""
    if len(buffer) - at < HEADER_BYTES:
        return None
    return HEADER_BYTES + int(pure.HEADER.unpack_from(buffer, at)[1])


def frame_candidates(buffer: Buffer, first: int, last: int) -> Iterator[int]:
    """Positions where a plausible header with an offset in `first..last` starts.

    For damaged data: frames carry no marker, so every byte position is looked at. Whether the
    frame is valid is for the caller to find out, as it may reach beyond the buffer.
    """
    # The offsets in the range share their high bytes; the length is neither 0 nor over the limit.
    free = ((first ^ last).bit_length() + 7) // 8
    shared = re.escape(last.to_bytes(8, "little")[free:])
    top = re.escape(bytes([FRAME_PAYLOAD_BYTES_MAX >> 24]))
    wanted = b"(?=[\\s\\S]{%d}%s(?!\\0{4})[\\s\\S]{3}[\\0-%s][\\s\\S]{4})" % (free, shared, top)
    for match in re.finditer(wanted, buffer):
        offset, length, _ = pure.HEADER.unpack_from(buffer, match.start())
        if first <= offset <= last and FRAME_PAYLOAD_BYTES_MIN <= length <= FRAME_PAYLOAD_BYTES_MAX:
            yield match.start()


class FrameDecoder:
    """Frames from a stream of chunks that are cut anywhere.

    Feed it, use the scan it returns before feeding it again, and look at `pending` at the end:
    bytes left over there are a torn frame. It holds less than one frame between feeds.
    """

    __slots__ = (
        "_carry",
        "_consecutive",
        "_corrupt",
        "_expected",
        "_needed",
        "_offset",
        "position",
    )

    def __init__(self, *, expected: int | None = None, consecutive: bool = False) -> None:
        self._carry = bytearray()
        self._needed = HEADER_BYTES
        self._expected = self._offset = expected
        self._consecutive = consecutive
        self._corrupt: Scan | None = None
        self.position = 0
        """Of the first byte not yet decoded, counted from the first byte ever fed."""

    @property
    def pending(self) -> int:
        """Bytes fed that are not yet part of a whole frame; none are kept after a corrupt one."""
        return len(self._carry)

    def feed(self, chunk: Buffer) -> Scan:
        """The frames that `chunk` completes; a corrupt one raises nothing: see `Scan.end`.

        `Scan.end` is TORN while a frame is incomplete, which is normal in mid-stream. After a
        corrupt frame the decoder stays where it is, and every further feed returns the same end.
        """
        if self._corrupt is not None:
            return self._corrupt
        self._carry += chunk
        if len(self._carry) < self._needed:
            return self._nothing(End.TORN if self._carry else End.COMPLETE)
        result = scan(bytes(self._carry), expected=self._expected, consecutive=self._consecutive)
        del self._carry[: result.safe_length]
        self.position += result.safe_length
        self._offset = result.offset
        if self._consecutive:
            self._expected = result.offset
        elif len(result):
            self._expected = None
        if result.end.corrupt:
            self._corrupt = self._nothing(result.end)
            self._carry.clear()
        else:
            self._needed = frame_bytes(self._carry, 0) or HEADER_BYTES
        return result

    def _nothing(self, end: End) -> Scan:
        """A scan without a frame."""
        empty = memoryview(b"")
        return Scan(b"", empty, empty, empty, 0, end, self._offset)


class Corruption(NamedTuple):
    """Why an object cannot be read on, and where."""

    reason: str
    position: int
    offset: int


class FrameAssembler:
    """The frames of one object from (`offset`, `position`) on; nothing lies beyond `size`.

    Fed the object's chunks in order, cut anywhere. Frames inside a chunk are scanned in the
    chunk's own buffer, which a scan keeps alive; a frame that straddles a cut is copied into a
    buffer of its own, which is never larger than that frame. Pure: it fetches nothing.
    """

    __slots__ = ("_carry", "_filled", "_size", "corruption", "offset", "position")

    def __init__(self, offset: int, position: int, size: int) -> None:
        self.offset = offset
        """Of the next frame."""
        self.position = position
        """Of the next frame, in the object."""
        self.corruption: Corruption | None = None
        """Once it is set, nothing more is decoded."""
        self._size = size
        self._carry = bytearray()
        self._filled = 0

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not yet whole."""
        return self._filled

    def feed(self, chunk: Buffer) -> list[Scan]:
        """The frames that the chunk completes, in order: at most two scans, none empty."""
        found: list[Scan] = []
        at = 0
        if self._filled:
            at = self._fill(chunk)
            if self.corruption is not None or self._filled < len(self._carry) or not at:
                return found
            straddling = self._carry
            self._drop()
            found += self._accept(scan(straddling, expected=self.offset, consecutive=True), 0)
        if self.corruption is None and at < len(chunk):
            inside = scan(chunk, at, expected=self.offset, consecutive=True)
            found += self._accept(inside, at)
            if inside.end is End.TORN:
                self._begin(memoryview(chunk)[inside.safe_length :])
        return found

    def require_end(self, next_offset: int | None) -> None:
        """Sets `corruption` unless the bytes ended with a frame, the one before `next_offset`."""
        if self.corruption is not None:
            return
        if self._filled:
            self.fail("the bytes end inside a frame")
        elif next_offset is not None and self.offset != next_offset:
            self.fail(f"the next frame should have offset {next_offset}")

    def _accept(self, found: Scan, at: int) -> list[Scan]:
        """Moves on behind the scanned frames; `at` is where the scan began."""
        self.position += found.safe_length - at
        self.offset += len(found)
        if found.end.corrupt:
            self.fail(found.end.describe())
        return [found] if len(found) else []

    def _begin(self, head: memoryview) -> None:
        """Carries the start of a frame that goes on in the next chunk."""
        self._carry = bytearray(max(len(head), HEADER_BYTES))
        self._carry[: len(head)] = head
        self._filled = len(head)
        self._expect()

    def _expect(self) -> None:
        """Once the header is there: makes room for the frame, if there can be such a frame."""
        if self._filled < HEADER_BYTES:
            return
        size = frame_bytes(self._carry, 0) or 0
        if self.position + size > self._size:
            self.fail("the object ends inside a frame")
            return
        whole = bytearray(size)
        whole[: self._filled] = memoryview(self._carry)[: self._filled]
        self._carry = whole

    def _fill(self, chunk: Buffer) -> int:
        """Adds to the carried frame; returns how much of the chunk it took."""
        at = 0
        view = memoryview(chunk)
        if self._filled < HEADER_BYTES:
            at = self._take(view, 0, HEADER_BYTES)
            if self._filled < HEADER_BYTES:
                return at
            header = scan(self._carry, expected=self.offset, consecutive=True)
            if header.end.corrupt:
                self.fail(header.end.describe())
                return at
            self._expect()
            if self.corruption is not None:
                return at
        return self._take(view, at, len(self._carry))

    def _take(self, view: memoryview, at: int, wanted: int) -> int:
        stop = min(at + wanted - self._filled, len(view))
        self._carry[self._filled : self._filled + stop - at] = view[at:stop]
        self._filled += stop - at
        return stop

    def fail(self, reason: str) -> None:
        """The object cannot be read on from here."""
        self.corruption = Corruption(reason, self.position, self.offset)
        self._drop()

    def _drop(self) -> None:
        self._carry = bytearray()
        self._filled = 0
