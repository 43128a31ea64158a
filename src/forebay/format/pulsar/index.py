"""The index object of an offloaded ledger: where the blocks of the data object begin.

It has a header of 32 bytes, what BookKeeper knows about the ledger (`LedgerMetadata`), and 20 bytes
for each block: the first entry, the number of the part, counted from 1, and the position of the
block's header. All numbers are big-endian. The layout is in `docs/formats/pulsar-ledger.md`.

An index object is written last. If it is there, its data object is complete.

Beware: nothing in it is protected by a checksum. `decode_index` refuses whatever contradicts
itself, but a position that is wrong shows only when the block is read.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forebay.errors import LedgerError
from forebay.format.layout import Buffer
from forebay.format.pulsar.blocks import BLOCK_HEADER_BYTES, IndexedBlock
from forebay.format.pulsar.ledger_metadata import (
    LedgerMetadata,
    decode_ledger_metadata,
    encode_ledger_metadata,
)
from forebay.limits import (
    LEDGER_BLOCKS_MAX,
    LEDGER_INDEX_BYTES_MAX,
    LEDGER_METADATA_BYTES_MAX,
    OFFSET_MAX,
)

_HEAD: Final = struct.Struct(">IIQQII")
_BLOCK: Final = struct.Struct(">QIQ")
_MAGIC: Final = 0xDE47DE47
_STREAMING_MAGIC: Final = 0x3D1FB0BC
INDEX_HEAD_BYTES: Final = _HEAD.size


@dataclass(frozen=True, slots=True)
class LedgerIndex:
    """A decoded index object."""

    data_bytes: int
    """The size of the data object."""
    metadata: LedgerMetadata
    blocks: tuple[IndexedBlock, ...]
    """At least one; first entries and positions ascend."""
    header_bytes: int = BLOCK_HEADER_BYTES
    """The size of the header of each block."""

    @property
    def last_entry_id(self) -> int:
        """The id of the last entry; -1 if the ledger is empty or does not say."""
        last = self.metadata.last_entry_id
        return -1 if last is None else last

    def block_at(self, entry_id: int) -> int:
        """The number, from 0, of the block that has the entry; LedgerError if none can."""
        if not 0 <= entry_id <= self.last_entry_id:
            raise LedgerError(f"entry {entry_id} is not in 0..{self.last_entry_id}")
        return bisect_right(self.blocks, entry_id, key=_first_entry_id) - 1

    def block_end(self, number: int) -> int:
        """The position after the block."""
        following = number + 1
        return self.blocks[following].position if following < len(self.blocks) else self.data_bytes

    def next_entry_id(self, number: int) -> int:
        """The id of the first entry after the block."""
        following = number + 1
        if following < len(self.blocks):
            return self.blocks[following].first_entry_id
        return self.last_entry_id + 1

    def block_of_position(self, position: int) -> int:
        """The number of the block that contains the byte at `position`."""
        if not 0 <= position < self.data_bytes:
            raise LedgerError(f"position {position} is not in an object of {self.data_bytes} bytes")
        return bisect_right(self.blocks, position, key=_position) - 1


def _first_entry_id(block: IndexedBlock) -> int:
    return block.first_entry_id


def _position(block: IndexedBlock) -> int:
    return block.position


def encode_index(index: LedgerIndex) -> bytes:
    """Encodes the index object, as `decode_index` reads it; raises LedgerError if it would not."""
    metadata = encode_ledger_metadata(index.metadata)
    blocks = b"".join(_BLOCK.pack(*block) for block in index.blocks)
    size = INDEX_HEAD_BYTES + len(metadata) + len(blocks)
    head = _HEAD.pack(
        _MAGIC, size, index.data_bytes, index.header_bytes, len(index.blocks), len(metadata)
    )
    encoded = head + metadata + blocks
    decode_index(encoded)
    return encoded


def decode_index(data: Buffer) -> LedgerIndex:
    """Decodes an index object; raises LedgerError that says what is wrong with it."""
    if len(data) > LEDGER_INDEX_BYTES_MAX:
        raise LedgerError(
            f"the index has {len(data)} bytes; at most {LEDGER_INDEX_BYTES_MAX} are allowed"
        )
    if len(data) < INDEX_HEAD_BYTES:
        raise LedgerError(f"the index ends inside its header, after {len(data)} bytes")
    magic, size, data_bytes, header_bytes, count, metadata_bytes = _HEAD.unpack_from(data)
    _check_head(magic, data_bytes, header_bytes, count)
    if metadata_bytes > LEDGER_METADATA_BYTES_MAX:
        raise LedgerError(f"the index says that the ledger has {metadata_bytes} bytes of metadata")
    blocks_at = INDEX_HEAD_BYTES + metadata_bytes
    wanted = blocks_at + count * _BLOCK.size
    if wanted != len(data) or size != len(data):
        raise LedgerError(
            f"the index has {len(data)} bytes, but by its header {size}, and with {count} blocks "
            f"{wanted}: it is cut off or damaged"
        )
    metadata = decode_ledger_metadata(memoryview(data)[INDEX_HEAD_BYTES:blocks_at])
    read = [IndexedBlock(*_BLOCK.unpack_from(data, at)) for at in range(blocks_at, wanted, 20)]
    blocks = _checked(read, data_bytes, header_bytes)
    return LedgerIndex(data_bytes, metadata, blocks, header_bytes)


def _check_head(magic: int, data_bytes: int, header_bytes: int, count: int) -> None:
    if magic == _STREAMING_MAGIC:
        raise LedgerError(
            "the index is of Pulsar's streaming offload (version 2), which cannot be read"
        )
    if magic != _MAGIC:
        raise LedgerError(f"not an index object: it begins with {magic:08x}, not {_MAGIC:08x}")
    if header_bytes != BLOCK_HEADER_BYTES:
        raise LedgerError(
            f"the index says that a block's header has {header_bytes} bytes, "
            f"not {BLOCK_HEADER_BYTES}"
        )
    if not 0 < count <= LEDGER_BLOCKS_MAX:
        raise LedgerError(
            f"the index says that it has {count} blocks: not in 1..{LEDGER_BLOCKS_MAX}"
        )
    if not BLOCK_HEADER_BYTES < data_bytes <= OFFSET_MAX:
        raise LedgerError(f"the index says that the data object has {data_bytes} bytes")


def _checked(
    blocks: Sequence[IndexedBlock], data_bytes: int, header_bytes: int
) -> tuple[IndexedBlock, ...]:
    """The blocks, if they can be those of a data object. Of two with one entry id the first counts.

    The last one may begin where the object ends: Pulsar lists a block without entries if an entry
    did not fit into an empty one, and such a ledger is readable up to there.
    """
    first = blocks[0]
    if first.first_entry_id != 0 or first.position != 0:
        raise LedgerError(
            f"the first block in the index begins with entry {first.first_entry_id} at position "
            f"{first.position}, not with entry 0 at 0"
        )
    kept = [first]
    for block in blocks[1:]:
        last = kept[-1]
        if block.first_entry_id == last.first_entry_id:
            continue
        if block.first_entry_id < last.first_entry_id or block.first_entry_id > OFFSET_MAX:
            raise LedgerError(
                f"the index has entry {block.first_entry_id} after {last.first_entry_id}: "
                "out of order"
            )
        if not last.position + header_bytes <= block.position <= data_bytes:
            raise LedgerError(
                f"the block of entry {block.first_entry_id} cannot begin at position "
                f"{block.position}: the one before begins at {last.position}, and the object has "
                f"{data_bytes} bytes"
            )
        kept.append(block)
    return tuple(kept)
