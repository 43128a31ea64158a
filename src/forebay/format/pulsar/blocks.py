"""The data object of an offloaded ledger: blocks of entries.

A block has a header of 128 bytes, then entries, each with a length and its id, then padding. All
blocks but the last have the same size, and the last one has exactly the size of its entries. An
entry is never cut: what does not fit begins the next block. All numbers are big-endian. The layout
is in `docs/formats/pulsar-ledger.md`.

`EntryPacker` makes the blocks of an object and remembers where they begin. `EntryScanner` is fed
the bytes of one and returns the entries. Neither does I/O.

Beware: entries have no checksum here, and padding is told from an entry by its sign bit. A scanner
demands consecutive ids, and its caller has to compare the last one. A length that is wrong shows
only at the entry after it, or not at all before padding: verify the checksums of entries.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Final, NamedTuple

from forebay.errors import LedgerError, MessageTooLarge, UsageError
from forebay.format.layout import Buffer
from forebay.format.pulsar import codec, pure
from forebay.limits import (
    LEDGER_BLOCK_BYTES_MAX,
    LEDGER_BLOCK_BYTES_MIN,
    LEDGER_BLOCKS_MAX,
    LEDGER_ENTRY_BYTES_MAX,
    OFFSET_MAX,
)

_HEADER: Final = struct.Struct(">IQQQ")
_MAGIC: Final = 0xFBDBABCB
_STREAMING_MAGIC: Final = 0x26A66D32
BLOCK_HEADER_BYTES: Final = 128
ENTRY_HEADER_BYTES: Final = pure.ENTRY_HEADER.size
_PADDING: Final = bytes.fromhex("fedcdead")


class BlockHeader(NamedTuple):
    block_bytes: int
    """The size of the block with its header and its padding."""
    first_entry_id: int


class IndexedBlock(NamedTuple):
    """One block: its first entry, its number as a part, and the position of its header."""

    first_entry_id: int
    part: int
    position: int


def encode_block_header(header: BlockHeader) -> bytes:
    packed = _HEADER.pack(_MAGIC, BLOCK_HEADER_BYTES, header.block_bytes, header.first_entry_id)
    return packed + bytes(BLOCK_HEADER_BYTES - len(packed))


def decode_block_header(data: Buffer) -> BlockHeader:
    """Decodes the header at the start of `data`; raises LedgerError."""
    if len(data) < BLOCK_HEADER_BYTES:
        raise LedgerError("the bytes end inside a block header")
    magic, header_bytes, block_bytes, first = _HEADER.unpack_from(data)
    if magic == _STREAMING_MAGIC:
        raise LedgerError("a block of Pulsar's streaming offload (version 2), which cannot be read")
    if magic != _MAGIC:
        raise LedgerError(f"no block header: it begins with {magic:08x}, not {_MAGIC:08x}")
    if header_bytes != BLOCK_HEADER_BYTES:
        raise LedgerError(f"a block header of {header_bytes} bytes, not {BLOCK_HEADER_BYTES}")
    if not BLOCK_HEADER_BYTES <= block_bytes <= LEDGER_BLOCK_BYTES_MAX:
        raise LedgerError(f"a block of {block_bytes} bytes")
    if first > OFFSET_MAX:
        raise LedgerError(f"a block with the impossible first entry {first}")
    return BlockHeader(block_bytes, first)


def padding(size: int) -> bytes:
    """The bytes that fill a block after its entries."""
    return (_PADDING * (size // len(_PADDING) + 1))[:size]


def block_size(block_bytes: int, entries: int, entry_bytes: int) -> int:
    """The size of the next block, if so many entries with so many bytes of data are left."""
    return min(block_bytes, BLOCK_HEADER_BYTES + entries * ENTRY_HEADER_BYTES + entry_bytes)


# ---- writing ----


class EntryPacker:
    """Packs entries into blocks, and keeps the map of the blocks for the index object.

    It holds one block. What `add_all`, `cut` and `finish` return is a view of it, and valid until
    the next call. `buffer` and `used` are for those who write entries there themselves and say so
    with `packed`.
    """

    __slots__ = ("block_bytes", "blocks", "buffer", "entry_bytes", "entry_id", "position", "used")

    def __init__(self, block_bytes: int) -> None:
        if not LEDGER_BLOCK_BYTES_MIN <= block_bytes <= LEDGER_BLOCK_BYTES_MAX:
            raise UsageError(
                f"a block cannot have {block_bytes} bytes: not in "
                f"{LEDGER_BLOCK_BYTES_MIN}..{LEDGER_BLOCK_BYTES_MAX}"
            )
        self.block_bytes = block_bytes
        self.blocks: list[IndexedBlock] = []
        """The blocks that have an entry, the current one too."""
        self.buffer = bytearray(block_bytes)  # not touched before entries are written to it
        self.used = BLOCK_HEADER_BYTES
        """The bytes of the current block so far."""
        self.position = 0
        """The position of the current block in the object."""
        self.entry_id = 0
        """The id of the next entry."""
        self.entry_bytes = 0
        """The bytes of all entries, without their headers."""

    @property
    def size(self) -> int:
        """The size that the object would have if it were finished now."""
        return self.position + (self.used if self.used > BLOCK_HEADER_BYTES else 0)

    def fits(self, size: int) -> bool:
        """Whether an entry of that size goes into the current block; if not, `cut` first.

        Raises MessageTooLarge if it fits into no block.
        """
        require_fitting(size, self.block_bytes, self.entry_id)
        return self.used + ENTRY_HEADER_BYTES + size <= self.block_bytes

    def add(self, data: Buffer) -> None:
        """Adds an entry that fits."""
        at = self.used + ENTRY_HEADER_BYTES
        if at + len(data) > self.block_bytes:
            raise UsageError(f"entry {self.entry_id} does not fit into the block: cut it first")
        pure.ENTRY_HEADER.pack_into(self.buffer, self.used, len(data), self.entry_id)
        self.buffer[at : at + len(data)] = data
        self.packed(1, at + len(data))

    def add_all(self, entries: list[Buffer]) -> Iterator[memoryview]:
        """Adds entries; yields the blocks that are full. Take them all before the next call.

        Raises MessageTooLarge if one fits into no block.
        """
        index = 0
        while index < len(entries):
            before = index
            index, used, needed = codec.pack_entries(
                entries, index, self.entry_id, self.buffer, self.used
            )
            self.packed(index - before, used)
            if index < len(entries):
                require_fitting(needed, self.block_bytes, self.entry_id)
                yield self.cut()

    def packed(self, entries: int, used: int) -> None:
        """Says that so many entries were written to the buffer, up to the position `used`."""
        if not entries:
            return
        if self.used == BLOCK_HEADER_BYTES:
            if len(self.blocks) >= LEDGER_BLOCKS_MAX:
                raise LedgerError(
                    f"the ledger has more than {LEDGER_BLOCKS_MAX} blocks; choose larger blocks"
                )
            part = len(self.blocks) + 1
            self.blocks.append(IndexedBlock(self.entry_id, part, self.position))
        self.entry_bytes += used - self.used - entries * ENTRY_HEADER_BYTES
        self.entry_id += entries
        self.used = used

    def cut(self) -> memoryview:
        """Fills the current block with padding, returns it, and begins the next one."""
        self.buffer[self.used :] = padding(self.block_bytes - self.used)
        return self._close(self.block_bytes)

    def finish(self) -> memoryview:
        """Returns the last block, which has no padding; raises UsageError without an entry."""
        if not self.blocks:
            raise UsageError("a ledger without entries cannot be stored")
        return self._close(self.used)

    def _close(self, size: int) -> memoryview:
        first = self.blocks[-1].first_entry_id
        self.buffer[:BLOCK_HEADER_BYTES] = encode_block_header(BlockHeader(size, first))
        self.position += size
        self.used = BLOCK_HEADER_BYTES
        return memoryview(self.buffer)[:size]


def require_fitting(size: int, block_bytes: int, entry_id: int) -> None:
    """Raises MessageTooLarge unless an entry of `size` bytes fits into an empty block."""
    room = min(block_bytes - BLOCK_HEADER_BYTES - ENTRY_HEADER_BYTES, LEDGER_ENTRY_BYTES_MAX)
    if size > room:
        raise MessageTooLarge(
            f"entry {entry_id} has {size} bytes, and a block of {block_bytes} bytes holds one of "
            f"at most {room}; choose larger blocks"
        )


# ---- reading ----


class Entry(NamedTuple):
    entry_id: int
    data: memoryview


_made: Final[Callable[[tuple[int, memoryview]], Entry]] = partial(tuple.__new__, Entry)
"""An Entry without a call of Python code, of which there would be one for each."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Whole entries in a buffer, as columns. Their ids are consecutive."""

    buffer: Buffer
    first_entry_id: int
    positions: memoryview
    """u64 positions of the data in the buffer; its header is before it."""
    lengths: memoryview
    """u32 lengths of the data."""
    base: int
    """The position of the buffer in the object."""

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Entry]:
        view = memoryview(self.buffer)
        spans = map(slice, self.positions, map(add, self.positions, self.lengths))
        ids = range(self.first_entry_id, self.first_entry_id + len(self))
        return map(_made, zip(ids, map(view.__getitem__, spans), strict=True))

    def part(self, start: int, stop: int) -> Entries:
        """The entries `start..stop` of these, `stop` not included."""
        if start == 0 and stop == len(self):
            return self
        return Entries(
            self.buffer,
            self.first_entry_id + start,
            self.positions[start:stop],
            self.lengths[start:stop],
            self.base,
        )


class LedgerDamage(NamedTuple):
    """Why and where a data object cannot be read further."""

    reason: str
    position: int
    entry_id: int


class EntryScanner:
    """Finds the entries of a data object of `size` bytes, from the entry `entry_id` on.

    `position` is that of a block header, or, with `block_end`, that of an entry's header inside a
    block that ends there. Feed it the object's bytes from there on, cut anywhere. Entries inside a
    chunk are not copied. Between feeds it holds less than one entry. Does no I/O.
    """

    __slots__ = (
        "_carry",
        "_size",
        "_skip",
        "_wanted",
        "block_end",
        "damage",
        "entry_id",
        "position",
    )

    def __init__(
        self, entry_id: int, position: int, size: int, block_end: int | None = None
    ) -> None:
        self.entry_id = entry_id
        """The id of the next entry."""
        self.position = position
        """The position of what comes next: an entry, a block header, or padding."""
        self.block_end = position if block_end is None else block_end
        """Where the current block ends; `position` if a block header comes next."""
        self.damage: LedgerDamage | None = None
        """Once this is set, nothing more is found."""
        self._size = size
        self._carry = bytearray()
        self._wanted = 0
        self._skip = 0

    @property
    def pending(self) -> int:
        """Bytes held of a header or an entry that is not complete yet."""
        return len(self._carry)

    @property
    def needed(self) -> int:
        """The bytes of the entry that is being completed, with its header; 0 if unknown."""
        return self._wanted if len(self._carry) >= ENTRY_HEADER_BYTES else 0

    def feed(self, chunk: Buffer) -> Iterator[Entries]:
        """Yields the entries that the chunk completes. Does not raise for damage: check `damage`.

        Take them all before the next chunk.
        """
        at, size = 0, len(chunk)
        while at < size and self.damage is None:
            if self._skip:
                at += self._skipped(size - at)
            elif self._carry:
                piece = memoryview(chunk)[at : at + self._wanted - len(self._carry)]
                self._carry += piece
                at += len(piece)
                if len(self._carry) == self._wanted:
                    whole, self._carry = self._carry, bytearray()
                    done = yield from self._scan(whole, 0)
                    self._skipped(len(whole) - done)  # what is left is padding
            else:
                at = yield from self._scan(chunk, at)

    def require_end(self, next_entry_id: int | None = None) -> None:
        """Sets `damage` unless the bytes end with a block, and with the entry before this one."""
        if self.damage is not None:
            return
        if self._carry or self._skip or self.position != self.block_end:
            self.fail("the bytes end inside a block")
        elif next_entry_id is not None and self.entry_id != next_entry_id:
            self.fail(f"the next entry should be {next_entry_id}")

    def fail(self, reason: str) -> None:
        """Records that the object cannot be read further from here."""
        self.damage = LedgerDamage(reason, self.position, self.entry_id)
        self._carry = bytearray()

    def _skipped(self, available: int) -> int:
        taken = min(self._skip, available)
        self._skip -= taken
        self.position += taken
        return taken

    def _scan(self, buffer: Buffer, at: int) -> Generator[Entries, None, int]:
        """Yields the whole entries from `at` on; returns where the next scan begins."""
        if self.position == self.block_end:
            return self._block_header(buffer, at)
        left = self.block_end - self.position
        positions, lengths, stop, end = codec.scan_entries(buffer, at, left, self.entry_id)
        found = Entries(buffer, self.entry_id, positions, lengths, self.position - at)
        self.position += stop - at
        self.entry_id += len(found)
        if len(found):
            yield found
        del found
        return self._ended(buffer, stop, end)

    def _block_header(self, buffer: Buffer, at: int) -> int:
        if len(buffer) - at < BLOCK_HEADER_BYTES:
            return self._hold(buffer, at, BLOCK_HEADER_BYTES)
        try:
            header = decode_block_header(memoryview(buffer)[at : at + BLOCK_HEADER_BYTES])
        except LedgerError as error:
            self.fail(str(error))
            return at
        end = self.position + header.block_bytes
        if header.first_entry_id != self.entry_id:
            self.fail(f"a block begins with entry {header.first_entry_id}: out of order")
        elif end > self._size:
            self.fail(f"a block ends at {end}, after the object's {self._size} bytes")
        else:
            self.position += BLOCK_HEADER_BYTES
            self.block_end = end
        return at + BLOCK_HEADER_BYTES

    def _ended(self, buffer: Buffer, at: int, end: int) -> int:
        """Goes on after the last whole entry of a scan; returns where."""
        left = self.block_end - self.position
        if end == pure.TORN:
            wanted = min(ENTRY_HEADER_BYTES, left)
            if len(buffer) - at >= ENTRY_HEADER_BYTES:
                wanted += pure.ENTRY_HEADER.unpack_from(buffer, at)[0]
            return self._hold(buffer, at, wanted)
        if end == pure.PADDING:
            known = min(len(_PADDING), left)
            if len(buffer) - at < known:
                return self._hold(buffer, at, known)
            if buffer[at : at + known] == _PADDING[:known]:
                self._skip = left
            else:
                self.fail("an entry has a negative length, and it is no padding")
        elif end == pure.BAD_LENGTH:
            self.fail("an entry ends after its block, or is larger than any entry may be")
        elif end == pure.BAD_ID:
            self.fail("an entry has another id than the expected one")
        return at

    def _hold(self, buffer: Buffer, at: int, wanted: int) -> int:
        """Keeps the start of something that continues in the next chunk."""
        self._carry = bytearray(memoryview(buffer)[at:])
        self._wanted = wanted
        return len(buffer)
