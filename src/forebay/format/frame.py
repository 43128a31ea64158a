"""Frames: `[u64 offset][u32 length][u32 crc][payload]`, little-endian, one after another.

`scan` decodes a whole buffer at once and returns columns. `FrameDecoder` and `FrameAssembler` are
fed chunks that are cut anywhere. None of them does I/O. All tell a torn tail (the bytes end inside
a frame) from a corrupt frame (the bytes are there and wrong). The layout is in
`docs/formats/frame.md`. `forebay.format.resync` finds the next frame after a corrupt one.

Beware: the CRC does not cover the header, so a wrong offset can be detected only by comparison
with the neighbouring frames. Pass `consecutive=True` wherever offsets must be consecutive.
"""

from __future__ import annotations

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
"""(offset, payload) -> the frame."""


class End(IntEnum):
    """How a scan ended."""

    COMPLETE = pure.COMPLETE
    """The buffer ends with a whole frame, or is empty."""
    TORN = pure.TORN
    """The buffer ends inside a frame, and nothing of that frame is wrong."""
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
    """The whole frames at the start of a buffer, as columns, and where and how they end."""

    buffer: Buffer
    offsets: memoryview
    positions: memoryview
    """Positions of the payloads in the buffer."""
    lengths: memoryview
    """Lengths of the payloads."""
    safe_length: int
    """The position in the buffer after the last whole frame."""
    end: End
    offset: int | None
    """The offset expected at `safe_length`, if known."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Frame]:
        view = memoryview(self.buffer)
        for offset, position, length in zip(
            self.offsets, self.positions, self.lengths, strict=True
        ):
            yield Frame(offset, view[position : position + length])

    @property
    def raw(self) -> memoryview:
        """The bytes of all frames, with their headers; at least one frame."""
        return memoryview(self.buffer)[self.positions[0] - HEADER_BYTES : self.safe_length]

    def part(self, start: int, stop: int) -> Scan:
        """The frames `start:stop` as a scan that ends COMPLETE; at least one frame."""
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

    def over(self, buffer: Buffer) -> Scan:
        """The same frames in another buffer, at the same positions."""
        return Scan(
            buffer,
            self.offsets,
            self.positions,
            self.lengths,
            self.safe_length,
            self.end,
            self.offset,
        )

    def raise_if_corrupt(self, file: str, base: int = 0) -> None:
        """Raises CorruptFrame if the scan ended at a corrupt frame.

        `base` is the buffer's position in the file.
        """
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
    """Scans the frames in `buffer[start:]`, checking length limits and CRCs.

    With `expected` the first frame must have that offset. With `consecutive` each offset must
    follow the one before. Does not raise for damaged bytes: check `Scan.end`.
    """
    offsets, positions, lengths, safe_length, end, offset = codec.scan(
        buffer, start, -1 if expected is None else expected, consecutive
    )
    return Scan(buffer, offsets, positions, lengths, safe_length, End(end), offset)


def frame_bytes(buffer: Buffer, at: int) -> int | None:
    """The size of the frame at `at` according to its header; None if the header is incomplete."""
    if len(buffer) - at < HEADER_BYTES:
        return None
    return HEADER_BYTES + int(pure.HEADER.unpack_from(buffer, at)[1])


class Found(NamedTuple):
    """What `find_frames` found."""

    frames: list[tuple[int, int]]
    """Offset and position, in the buffer, of each frame."""
    resume: int
    """The position of the first header that was not tried."""


def find_frames(
    buffer: Buffer,
    stop: int,
    *,
    total: int,
    first: int,
    last: int,
    messages_only: bool = False,
    limit: int = 0,
) -> Found:
    """Finds the valid frames with offsets `first..last` that begin before `stop`, in damaged data.

    Frames have no marker, so every byte position is tried, and the frames found may overlap. With
    `messages_only` only frames whose message repeats the frame's offset are found. The search ends
    early after `limit` frames (0: no limit), and at a plausible header whose frame ends after
    the buffer and not after `total`, the end of the file counted from the start of the buffer.
    """
    offsets, positions, resume = codec.find_frames(
        buffer, stop, total, first, last, messages_only, limit
    )
    starts = (position - HEADER_BYTES for position in positions)
    return Found(list(zip(offsets, starts, strict=True)), resume)


class FrameTooLarge(Exception):
    """A frame has more bytes than a reader may hold. The reader can try again with more."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a frame has {size} bytes")
        self.size = size


class FrameDecoder:
    """Decodes frames from a stream of chunks that are cut anywhere.

    Use the scan that `feed` returns before the next `feed`. If `pending` is not 0 at the end of the
    stream, it ends with a torn frame. Between feeds it holds less than one frame.
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
        """Position in the stream of the first byte that is not decoded yet."""

    @property
    def pending(self) -> int:
        """Bytes fed that are not yet part of a whole frame; 0 after a corrupt frame."""
        return len(self._carry)

    def feed(self, chunk: Buffer) -> Scan:
        """Returns the frames that `chunk` completes. Does not raise for damage: check `Scan.end`.

        TORN is normal in the middle of a stream: the rest of the frame is in the next chunk. After
        a corrupt frame the decoder stays there, and every further feed returns the same end.
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
    """Why and where an object cannot be read further."""

    reason: str
    position: int
    offset: int


class FrameAssembler:
    """Decodes the frames of an object of `size` bytes, from the frame `offset` at `position` on.

    Feed it the object's chunks in order, cut anywhere. Frames inside a chunk are not copied: the
    scan refers to the chunk's buffer and keeps it alive. A frame that crosses from one chunk into
    the next is copied into its own buffer. Does no I/O.
    """

    __slots__ = ("_carry", "_filled", "_size", "corruption", "offset", "position")

    def __init__(self, offset: int, position: int, size: int) -> None:
        self.offset = offset
        """The offset of the next frame."""
        self.position = position
        """The position of the next frame in the object."""
        self.corruption: Corruption | None = None
        """Once this is set, nothing more is decoded."""
        self._size = size
        self._carry = bytearray()
        self._filled = 0

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not complete yet."""
        return self._filled

    @property
    def needed(self) -> int:
        """The bytes of that frame when it is complete; 0 if there is none or they are unknown."""
        return 0 if self._filled < HEADER_BYTES else len(self._carry)

    def feed(self, chunk: Buffer) -> list[Scan]:
        """Returns the frames that the chunk completes, in order: at most two scans, none empty.

        Does not raise for damage: check `corruption`.
        """
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
        """Sets `corruption` unless the bytes end with the frame before `next_offset`."""
        if self.corruption is not None:
            return
        if self._filled:
            self.fail("the bytes end inside a frame")
        elif next_offset is not None and self.offset != next_offset:
            self.fail(f"the next frame should have offset {next_offset}")

    def _accept(self, found: Scan, at: int) -> list[Scan]:
        """Advances past the scanned frames; `at` is where the scan began in its buffer."""
        self.position += found.safe_length - at
        self.offset += len(found)
        if found.end.corrupt:
            self.fail(found.end.describe())
        return [found] if len(found) else []

    def _begin(self, head: memoryview) -> None:
        """Keeps the start of a frame that continues in the next chunk."""
        self._carry = bytearray(max(len(head), HEADER_BYTES))
        self._carry[: len(head)] = head
        self._filled = len(head)
        self._expect()

    def _expect(self) -> None:
        """Once the header is complete, allocates the frame, unless it would exceed the object."""
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
        """Adds bytes of the chunk to the frame being kept; returns how many it took."""
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
        """Records that the object cannot be read further from here."""
        self.corruption = Corruption(reason, self.position, self.offset)
        self._drop()

    def _drop(self) -> None:
        self._carry = bytearray()
        self._filled = 0
