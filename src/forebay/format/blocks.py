"""Blocks: the layout of a compressed object, `data-<start>-<end>.dnb1.zst`.

An object is a sequence of blocks. Each has a 32-byte header and one zstd frame, which holds whole
message frames: up to 1 MiB of them, or one larger frame. Blocks are independent, so a reader starts
at any of them. The header is a skippable frame of the zstd format: `zstd -d` turns the object into
a `.dnb1` object. `BlockCutter` collects frames for blocks, `compress_block` encodes one, and
`BlockAssembler` decodes an object. None of them does I/O. The layout is in
`docs/formats/blocks.md`.

Beware: a header is checked against the limits before memory is allocated for its block. Nothing
else may decompress: a zstd frame alone may claim any size.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import zstandard

from forebay.format.descriptor import ZSTD, ObjectDescriptor
from forebay.format.frame import (
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    HEADER_BYTES,
    Corruption,
    FrameAssembler,
    FrameTooLarge,
    Scan,
    scan,
)
from forebay.format.layout import Buffer
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.resync import next_place_in_ledger
from forebay.format.resync import OffsetPosition, ReadAt, next_frame
from forebay.limits import BLOCK_BYTES, OFFSET_MAX

_HEADER: Final = struct.Struct("<IIQIIII")
BLOCK_HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = 0x184D2A5B
_MAGIC_BYTES: Final = struct.pack("<I", _MAGIC)
_SKIPPED_BYTES: Final = BLOCK_HEADER_BYTES - 8
_CHECKED: Final = BLOCK_HEADER_BYTES - 4


class BlockHeader(NamedTuple):
    first_offset: int
    messages: int
    raw_bytes: int
    """Bytes of the frames."""
    stored_bytes: int
    """Bytes of the zstd frame after the header."""

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.messages

    @property
    def size(self) -> int:
        """Bytes of the block with its header."""
        return BLOCK_HEADER_BYTES + self.stored_bytes


class StoredBlock(NamedTuple):
    """A block of an object that is not decompressed yet."""

    position: int
    header: BlockHeader
    data: memoryview


class BlockError(Exception):
    """Bytes that are not a block; the message says why."""


def encode_header(header: BlockHeader) -> bytes:
    data = _HEADER.pack(_MAGIC, _SKIPPED_BYTES, *header, 0)
    return data[:_CHECKED] + struct.pack("<I", crc32(data[:_CHECKED]))


def decode_header(data: Buffer) -> BlockHeader:
    """Decodes the header at the start of `data`. Raises BlockError if it breaks a rule."""
    view = memoryview(data)[:BLOCK_HEADER_BYTES]
    if len(view) < BLOCK_HEADER_BYTES:
        raise BlockError("the bytes end inside a block header")
    magic, skipped, *fields, check = _HEADER.unpack(view)
    if (magic, skipped) != (_MAGIC, _SKIPPED_BYTES) or crc32(view[:_CHECKED]) != check:
        raise BlockError("damaged block header")
    header = BlockHeader(*fields)
    most = BLOCK_BYTES if header.messages > 1 else FRAME_BYTES_MAX
    if not 0 < header.messages <= OFFSET_MAX + 1 - header.first_offset:
        raise BlockError("impossible offsets in a block header")
    if not header.messages * FRAME_BYTES_MIN <= header.raw_bytes <= most:
        raise BlockError("impossible block length")
    if not 0 < header.stored_bytes <= stored_bytes_max(header.raw_bytes):
        raise BlockError("impossible stored block length")
    return header


def stored_bytes_max(raw_bytes: int) -> int:
    """The most bytes that a zstd frame of so many bytes has, if they cannot be compressed."""
    return raw_bytes + (raw_bytes >> 8) + 64


# ---- writing ----

_IDLE_MAX: Final = 4
_idle_compressors: Final[dict[int, list[zstandard.ZstdCompressor]]] = {}
"""Compressors by level that no thread uses now."""


class RawBlock(NamedTuple):
    """Whole frames that make up one block."""

    first_offset: int
    messages: int
    frames: Buffer


def compress_block(block: RawBlock, level: int) -> bytes:
    """Returns the block with its header. Releases the GIL while it compresses. Thread-safe."""
    idle = _idle_compressors.setdefault(level, [])
    try:
        compressor = idle.pop()
    except IndexError:  # each has tables of a megabyte, and only one thread at a time may use it
        compressor = zstandard.ZstdCompressor(level=level)
    stored = compressor.compress(block.frames)
    if len(idle) < _IDLE_MAX:
        idle.append(compressor)
    header = BlockHeader(block.first_offset, block.messages, len(block.frames), len(stored))
    return encode_header(header) + stored


class BlockCutter:
    """Collects frames, and cuts them into blocks: as many as fit into BLOCK_BYTES, or one.

    The cuts depend only on the frames, not on how they were passed in.
    """

    __slots__ = ("_first", "_frames", "_messages")

    def __init__(self) -> None:
        self._first = 0
        self._messages = 0
        self._frames = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of frames that are in no block yet."""
        return len(self._frames)

    def add(self, frames: Scan) -> Iterator[RawBlock]:
        """Yields the blocks that the frames complete. Copies them."""
        at, view = 0, memoryview(frames.buffer)
        while at < len(frames):
            begin = frames.positions[at] - HEADER_BYTES
            room = BLOCK_BYTES - len(self._frames)
            stop = self._fitting(frames, at, begin + room)
            if stop == at:
                if self._messages:
                    yield self._cut()
                    continue
                stop = at + 1  # one frame that is larger than a block
            if not self._messages:
                self._first = frames.offsets[at]
            self._frames += view[begin : frames.positions[stop - 1] + frames.lengths[stop - 1]]
            self._messages += stop - at
            at = stop

    def rest(self) -> RawBlock | None:
        """Returns the frames that are in no block yet."""
        return self._cut() if self._messages else None

    def _cut(self) -> RawBlock:
        block = RawBlock(self._first, self._messages, self._frames)
        self._frames, self._messages = bytearray(), 0
        return block

    @staticmethod
    def _fitting(frames: Scan, at: int, limit: int) -> int:
        """The number of the first frame from `at` on that ends after `limit`."""
        stop = bisect_right(frames.positions, limit + HEADER_BYTES, at) - 1
        if stop < at:
            return at
        ends = frames.positions[stop] + frames.lengths[stop]
        return stop + 1 if ends <= limit else stop


# ---- reading ----


class ObjectDecoder(Protocol):
    """Decodes the frames of an object, compressed or not. Feed it the object's bytes in order."""

    offset: int
    """The offset of the next frame."""
    corruption: Corruption | None
    """Once this is set, nothing more is decoded."""

    @property
    def position(self) -> int:
        """The position in the object of the next frame, of its block, or of its entry."""

    @property
    def needed(self) -> int:
        """Bytes that the next frames need in memory, as far as they are known."""

    def feed(self, chunk: Buffer) -> Iterable[Scan]:
        """Yields the frames that the chunk completes. Take them all before the next chunk.

        A chunk of a compressed object may hold many times its size: take one at a time.
        """

    def require_end(self, next_offset: int | None) -> None: ...

    def fail(self, reason: str) -> None: ...


def object_decoder(
    descriptor: ObjectDescriptor, offset: int, position: int, wanted: int = 0
) -> ObjectDecoder:
    """Returns the decoder for the object's bytes from `position` on, where `offset` begins.

    Blocks with no message at or after `wanted` are not decompressed, and entries of a ledger before
    it are not made into frames.
    """
    if descriptor.codec == ZSTD:
        return BlockAssembler(offset, position, descriptor.size, wanted)
    if descriptor.is_ledger:
        return EntryAssembler(
            offset,
            position,
            descriptor.size,
            descriptor.start_offset,
            descriptor.block_bytes,
            wanted,
        )
    return FrameAssembler(offset, position, descriptor.size)


class BlockAssembler:
    """Decodes a compressed object of `size` bytes, from the block at `position` on.

    Each scan that `feed` yields is one block. A block inside a chunk is not copied. Between feeds
    it holds less than one block, and while a scan is yielded one decompressed block.
    """

    __slots__ = (
        "_carry",
        "_filled",
        "_header",
        "_size",
        "_wanted",
        "block_position",
        "bytes_max",
        "corruption",
        "offset",
        "position",
    )

    def __init__(self, offset: int, position: int, size: int, wanted: int = 0) -> None:
        self.offset = offset
        self.position = position
        self.corruption: Corruption | None = None
        self.block_position = position
        """The position of the block that was yielded last."""
        self.bytes_max: int | None = None
        """`feed` raises FrameTooLarge for a block that needs more; it cannot be continued then."""
        self._size = size
        self._wanted = wanted
        self._header: BlockHeader | None = None
        self._carry = bytearray()
        self._filled = 0

    @property
    def pending(self) -> int:
        """Bytes held of a block, or of its header, that is not complete yet."""
        return self._filled

    @property
    def needed(self) -> int:
        header = self._header
        return 0 if header is None else header.raw_bytes + header.stored_bytes

    def feed(self, chunk: Buffer) -> Iterator[Scan]:
        for block in self.blocks(chunk):
            try:
                found = self.accept(block, decompress(block.header, block.data))
            except BlockError as error:
                self.refuse(block, error)
                return
            if found is not None:
                yield found
                del found

    def blocks(self, chunk: Buffer) -> Iterator[StoredBlock]:
        """Yields the blocks that the chunk completes, whose headers are valid.

        Pass each to `accept` with its frames, or to `refuse`, in order. A caller may decompress
        several at the same time.
        """
        view, at = memoryview(chunk), 0
        while self.corruption is None and at < len(view):
            header = self._header
            wanted = BLOCK_HEADER_BYTES if header is None else header.stored_bytes
            if not self._filled and len(view) - at >= wanted:
                piece = view[at : at + wanted]
                at += wanted
            else:
                at += self._keep(view[at:], wanted)
                if self._filled < wanted:
                    return
                piece = memoryview(self._carry)
                self._drop()
            if header is None:
                self._begin(piece)
                if self.bytes_max is not None and self.needed > self.bytes_max:
                    raise FrameTooLarge(self.needed)
                continue
            block = StoredBlock(self.position, header, piece)
            self.position += header.size
            self.offset = header.next_offset
            self._header = None
            if header.next_offset > self._wanted:
                yield block
            del block, piece

    def accept(self, block: StoredBlock, frames: bytes) -> Scan | None:
        """Returns the frames of the block, or those before the first damaged one."""
        header = block.header
        self.block_position = block.position
        found = scan(frames, expected=header.first_offset, consecutive=True)
        if len(found) > header.messages:
            found = found.part(0, header.messages)
        if len(found) != header.messages or found.safe_length != len(frames):
            reason = found.end.describe() if found.end.corrupt else "the frames do not fill it"
            self._fail_at(block, f"damaged block: {reason}", len(found))
        return found if len(found) else None

    def refuse(self, block: StoredBlock, error: BlockError) -> None:
        """Records that the block cannot be decompressed."""
        self._fail_at(block, str(error), 0)

    def _fail_at(self, block: StoredBlock, reason: str, messages: int) -> None:
        """Records damage in a block. The blocks after it do not count any more."""
        self.position = block.position
        self.offset = block.header.first_offset + messages
        self.fail(reason)

    def require_end(self, next_offset: int | None) -> None:
        """Sets `corruption` unless the bytes end with the block before `next_offset`."""
        if self.corruption is not None:
            return
        if self._filled or self._header is not None:
            self.fail("the bytes end inside a block")
        elif next_offset is not None and self.offset != next_offset:
            self.fail(f"the next block should begin with offset {next_offset}")

    def fail(self, reason: str) -> None:
        """Records that the object cannot be read further from here."""
        self.corruption = Corruption(reason, self.position, self.offset)
        self._header = None
        self._drop()

    def _begin(self, data: memoryview) -> None:
        """Checks the header before anything is allocated for its block."""
        try:
            header = decode_header(data)
        except BlockError as error:
            self.fail(str(error))
            return
        if header.first_offset != self.offset:
            self.fail(f"the block begins with offset {header.first_offset}, out of order")
        elif self.position + header.size > self._size:
            self.fail("the object ends inside a block")
        else:
            self._header = header

    def _keep(self, piece: memoryview, wanted: int) -> int:
        """Keeps the start of a block or header that continues in the next chunk."""
        if not self._filled:
            self._carry = bytearray(wanted)
        taken = min(wanted - self._filled, len(piece))
        self._carry[self._filled : self._filled + taken] = piece[:taken]
        self._filled += taken
        return taken

    def _drop(self) -> None:
        self._carry = bytearray()
        self._filled = 0


def decompress(header: BlockHeader, stored: Buffer) -> bytes:
    """Returns the frames of a block. Allocates what the checked header says, and no more.

    Raises BlockError if `stored` is anything else than one zstd frame of that many bytes.
    """
    try:
        if zstandard.frame_content_size(stored) != header.raw_bytes:
            raise BlockError("the compressed data has another size than the block header says")
        return decompress_frame(stored, header.raw_bytes)
    except (ValueError, zstandard.ZstdError) as error:
        raise BlockError(f"the block cannot be decompressed: {error}") from error


def decompress_frame(stored: Buffer, raw_bytes: int) -> bytes:
    """Returns the `raw_bytes` bytes of one zstd frame, and allocates no more.

    Raises ValueError if `stored` is anything else than one frame of that many bytes.
    """
    try:
        # A frame need not say its size. If it does, the library allocates that, whatever it is.
        if zstandard.frame_content_size(stored) not in (-1, raw_bytes):
            raise ValueError("the compressed data has another size than its header says")
        raw = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=max(raw_bytes, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(raw) != raw_bytes:
        raise ValueError("the compressed data has another size than its header says")
    return raw


def next_place(
    descriptor: ObjectDescriptor, offset: int, position: int, read: ReadAt, window_bytes: int
) -> OffsetPosition | None:
    """Returns first offset and position where an object can be read on after damage, or None.

    `offset` was expected at `position`. That is a frame, a block of a compressed object, or an
    entry of a ledger.
    """
    if descriptor.codec == ZSTD:
        return next_block(descriptor, offset, position, read, window_bytes)
    if not descriptor.is_ledger:
        return next_frame(descriptor, offset, position, read, window_bytes)
    return next_place_in_ledger(
        (descriptor.start_offset, descriptor.next_offset),
        descriptor.size,
        descriptor.block_bytes,
        descriptor.offset_index or (),
        (offset, position),
        read,
        window_bytes,
    )


def next_block(
    descriptor: ObjectDescriptor, offset: int, position: int, read: ReadAt, window_bytes: int
) -> OffsetPosition | None:
    """Returns first offset and position of the next block after damage at `position`, or None.

    `offset` was expected there. Tries the position after the damaged block, by its header, and
    then every byte. A block is known by its header alone: its data may be damaged too.
    """
    last, size = descriptor.end_offset, descriptor.size
    at = position
    damaged = _header_at(read, position, size)
    if damaged is not None and damaged.first_offset <= offset < damaged.next_offset:
        at += damaged.size
        following = _header_at(read, at, size)
        if following is not None and following.first_offset == damaged.next_offset <= last:
            return following.first_offset, at
        at = position
    at += 1
    while at + BLOCK_HEADER_BYTES <= size:
        window = bytes(read(at, min(at + max(window_bytes, 2 * BLOCK_HEADER_BYTES), size)))
        hit = window.find(_MAGIC_BYTES)
        while 0 <= hit <= len(window) - BLOCK_HEADER_BYTES:
            header = _header(window[hit : hit + BLOCK_HEADER_BYTES])
            if header is not None and offset < header.first_offset <= last:
                return header.first_offset, at + hit
            hit = window.find(_MAGIC_BYTES, hit + 1)
        if len(window) < BLOCK_HEADER_BYTES:
            return None
        at += len(window) - BLOCK_HEADER_BYTES + 1
    return None


def blocks_of(
    descriptor: ObjectDescriptor, read: ReadAt, window_bytes: int
) -> Iterator[tuple[int, BlockHeader]]:
    """Yields position and header of the blocks of an object, also of a damaged one.

    Their offsets ascend. Blocks whose headers are damaged are left out. Reads only headers, unless
    it has to search for one.
    """
    at, offset = 0, descriptor.start_offset
    while at < descriptor.size:
        header = _header_at(read, at, descriptor.size)
        if header is None or not offset <= header.first_offset <= descriptor.end_offset:
            found = next_block(descriptor, offset, at, read, window_bytes)
            if found is None:
                return
            at = found[1]
            header = _header_at(read, at, descriptor.size)
            assert header is not None, "the search has just read it"
        yield at, header
        at += header.size
        offset = header.next_offset


def _header_at(read: ReadAt, position: int, size: int) -> BlockHeader | None:
    if position + BLOCK_HEADER_BYTES > size:
        return None
    return _header(read(position, position + BLOCK_HEADER_BYTES))


def _header(data: Buffer) -> BlockHeader | None:
    try:
        return decode_header(data)
    except BlockError:
        return None
