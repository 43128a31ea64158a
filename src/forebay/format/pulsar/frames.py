"""Frames as entries of a ledger, and the same frames again.

An entry is a message that any client of Pulsar can read: payload, producer, publish time and
attributes are in Pulsar's own fields, unbatched, uncompressed, with a checksum. What Pulsar has no
field for is in one extension field, which other readers skip. The frame is built again from the
entry byte for byte, so a hash over frames holds for a ledger too. The mapping is in
`docs/formats/pulsar-entry.md`.

`FramePacker` packs frames into the blocks of a ledger, and `EntryAssembler` is fed the bytes of a
ledger and returns frames. Neither does I/O.

Beware: the offset of an entry is that of the ledger's first message plus its id. The entry itself
does not say it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from typing import Final

from forebay.errors import LedgerError
from forebay.format.frame import Corruption, End, FrameTooLarge, Scan
from forebay.format.layout import Buffer
from forebay.format.pulsar import codec, pure
from forebay.format.pulsar.blocks import (
    BLOCK_HEADER_BYTES,
    ENTRY_HEADER_BYTES,
    Entries,
    EntryPacker,
    EntryScanner,
    decode_block_header,
    require_fitting,
)
from forebay.format.resync import OffsetPosition, ReadAt
from forebay.limits import MIB

_FRAMES_BYTES: Final = 1 * MIB
"""The most bytes of frames that are built at once, unless a single one is larger."""

_FAULTS: Final = {
    pure.BAD_CHECKSUM: "the checksum of an entry is wrong",
    pure.NO_FRAME: "an entry was not made of a frame",
}


class FramePacker:
    """Packs frames with consecutive offsets as entries into blocks of one size.

    A block that `add` yields or `finish` returns is valid until the next one. It holds one block.
    """

    __slots__ = ("packer", "positions")

    def __init__(self, block_bytes: int) -> None:
        self.packer = EntryPacker(block_bytes)
        """Knows the blocks and the sizes so far."""
        self.positions = array("Q")
        """Where the entries of the frames that were added last are in the object."""

    def add(self, frames: Scan) -> Iterator[memoryview]:
        """Yields the blocks that are full. Take them all before the next frames.

        Raises MessageTooLarge if a message fits into no block.
        """
        packer, row = self.packer, 0
        self.positions = array("Q")
        while row < len(frames):
            before, base = row, packer.position
            row, used, places, needed = codec.pack_frames(
                frames.buffer,
                frames.positions,
                frames.lengths,
                row,
                frames.offsets[row],
                packer.entry_id,
                packer.buffer,
                packer.used,
            )
            self.positions.extend(base + place for place in places)
            packer.packed(row - before, used)
            if needed:
                require_fitting(needed, packer.block_bytes, packer.entry_id)
                yield packer.cut()

    def finish(self) -> memoryview:
        """Returns the last block, which has no padding; raises UsageError without a frame."""
        return self.packer.finish()


class EntryAssembler:
    """Builds the frames of a ledger of `size` bytes, from the entry of `offset` at `position` on.

    `start` is the offset of the ledger's first message. All blocks but the last have `block_bytes`,
    so a position that is a multiple of it is that of a block header, and any other that of an
    entry's header. Feed it the object's bytes in order, cut anywhere.

    Each scan has its own buffer of at most a megabyte, or one larger frame. Between feeds it holds
    less than one entry.
    """

    __slots__ = ("_scanner", "_start", "_wanted", "bytes_max", "corruption", "offset", "positions")

    def __init__(
        self,
        offset: int,
        position: int,
        size: int,
        start: int,
        block_bytes: int,
        wanted: int = 0,
    ) -> None:
        """Entries of messages before `wanted` are not made into frames."""
        self.offset = offset
        """The offset of the next frame."""
        self.corruption: Corruption | None = None
        """Once this is set, nothing more is decoded."""
        self.positions = array("Q")
        """Where the entries of the scan that was yielded last are in the object."""
        self.bytes_max: int | None = None
        """`feed` raises FrameTooLarge for an entry that needs more; it cannot be continued then."""
        block = position // block_bytes
        inside = position % block_bytes != 0
        end = min((block + 1) * block_bytes, size) if inside else None
        self._scanner = EntryScanner(offset - start, position, size, end)
        self._start = start
        self._wanted = wanted

    @property
    def position(self) -> int:
        """The position in the object of what comes next: an entry, padding or a block header."""
        return self._scanner.position if self.corruption is None else self.corruption.position

    @property
    def pending(self) -> int:
        """Bytes held of an entry or a header that is not complete yet."""
        return self._scanner.pending

    @property
    def needed(self) -> int:
        """Bytes that the entry that is being completed and its frame need in memory."""
        return 2 * self._scanner.needed

    def feed(self, chunk: Buffer) -> Iterator[Scan]:
        """Yields the frames of the entries that the chunk completes, in order.

        Take them all before the next chunk. Does not raise for damage: check `corruption`.
        """
        if self.corruption is not None:
            return
        for entries in self._scanner.feed(chunk):
            whole = yield from self._frames(entries)
            del entries
            if not whole:
                return
        damage = self._scanner.damage
        if damage is not None:
            self.corruption = Corruption(
                damage.reason, damage.position, self._start + damage.entry_id
            )
        elif self.bytes_max is not None and self.needed > self.bytes_max:
            raise FrameTooLarge(self.needed)

    def _frames(self, entries: Entries) -> Generator[Scan, None, bool]:
        """Yields the frames of the entries up to one that is damaged; returns if there is none."""
        first = self._start + entries.first_entry_id
        row = min(max(self._wanted - first, 0), len(entries))
        self.offset = first + row
        while row < len(entries):
            before = row
            frames, positions, lengths, row, fault = codec.unpack_frames(
                entries.buffer,
                entries.positions,
                entries.lengths,
                row,
                first + row,
                _FRAMES_BYTES,
            )
            if row > before:
                places = entries.positions[before:row]
                base = entries.base - ENTRY_HEADER_BYTES
                self.positions = array("Q", [base + place for place in places])
                self.offset = first + row
                offsets = memoryview(array("Q", range(first + before, first + row)))
                yield Scan(
                    frames, offsets, positions, lengths, len(frames), End.COMPLETE, self.offset
                )
            if fault:
                at = entries.base + entries.positions[row] - ENTRY_HEADER_BYTES
                self.corruption = Corruption(_FAULTS[fault], at, first + row)
                return False
        return True

    def require_end(self, next_offset: int | None) -> None:
        """Sets `corruption` unless the bytes end with the entry before `next_offset`."""
        if self.corruption is not None:
            return
        if self._scanner.pending:
            self.fail("the bytes end inside an entry")
        elif next_offset is not None and self.offset != next_offset:
            self.fail(f"the next entry should have offset {next_offset}")

    def fail(self, reason: str) -> None:
        """Records that the object cannot be read further from here."""
        self.corruption = Corruption(reason, self.position, self.offset)


def next_entry(
    offset: int,
    position: int,
    size: int,
    start: int,
    block_bytes: int,
    last: int,
    read: ReadAt,
) -> OffsetPosition | None:
    """Returns offset and position of an entry at which to continue after damage, or None.

    `offset` was expected at `position`, in a ledger of `size` bytes whose messages are
    `start..last`. Tries the entry after the damaged one, by its length, and then each block after.
    An entry is known by its header alone: its data may be damaged too.
    """
    entry_id = offset - start
    block_end = min((position // block_bytes + 1) * block_bytes, size)
    if position + ENTRY_HEADER_BYTES <= block_end and position % block_bytes:
        length, found = pure.ENTRY_HEADER.unpack(read(position, position + ENTRY_HEADER_BYTES))
        at = position + ENTRY_HEADER_BYTES + length
        if found == entry_id and length >= 0 and at + ENTRY_HEADER_BYTES <= block_end:
            length, found = pure.ENTRY_HEADER.unpack(read(at, at + ENTRY_HEADER_BYTES))
            if found == entry_id + 1 and length >= 0:
                return offset + 1, at
    for at in range(block_end, size - BLOCK_HEADER_BYTES, block_bytes):
        try:
            header = decode_block_header(read(at, at + BLOCK_HEADER_BYTES))
        except LedgerError:
            continue
        if entry_id < header.first_entry_id <= last - start:
            return start + header.first_entry_id, at
    return None
