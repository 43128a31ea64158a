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
