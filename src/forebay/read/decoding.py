"""`decoded`: the frames in a chunk of an object; blocks are decompressed ahead of their use.

While the caller uses the frames of one block, other threads decompress the next AHEAD ones. Frames
of objects that are not compressed are returned as they are.

Beware: it decompresses only as many blocks ahead as AHEAD says, however many are in the chunk. Each
has up to 1 MiB, or one larger frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Final

from forebay.format.blocks import (
    BlockAssembler,
    BlockError,
    ObjectDecoder,
    StoredBlock,
    decompress,
)
from forebay.format.frame import Scan
from forebay.format.layout import Buffer
from forebay.limits import BLOCK_BYTES, KIB
from forebay.processors import Ahead

AHEAD: Final = 2
_AHEAD_BYTES_MIN: Final = 64 * KIB
"""Passing a smaller block to another thread takes longer than decompressing it."""


def decoded(decoder: ObjectDecoder, chunk: Buffer, *, ahead: bool) -> Iterator[Scan]:
    """Yields what `decoder.feed(chunk)` yields. Without `ahead` only when it is wanted."""
    if ahead and isinstance(decoder, BlockAssembler):
        return _decoded_ahead(decoder, chunk)
    return iter(decoder.feed(chunk))


def _decoded_ahead(decoder: BlockAssembler, chunk: Buffer) -> Iterator[Scan]:
    blocks = decoder.blocks(chunk)
    waiting: deque[tuple[StoredBlock, Ahead[bytes] | None]] = deque()
    try:
        while True:
            while len(waiting) <= AHEAD and (block := next(blocks, None)) is not None:
                waiting.append((block, _started(block) if waiting else None))
            if not waiting:
                return
            block, begun = waiting.popleft()
            try:
                frames = decompress(block.header, block.data) if begun is None else begun.result()
            except BlockError as error:
                decoder.refuse(block, error)
                return
            found = decoder.accept(block, frames)
            # Damage that `blocks` has found in a header is after the blocks that wait.
            damaged = decoder.corruption is not None and decoder.position == block.position
            del frames, block, begun
            if found is not None:
                yield found
                del found
            if damaged:
                return
    finally:
        for _, begun in waiting:
            if begun is not None:
                begun.cancel()


def _started(block: StoredBlock) -> Ahead[bytes] | None:
    """Begins to decompress the block, unless it is very small or a frame larger than a block."""
    if _AHEAD_BYTES_MIN <= block.header.raw_bytes <= BLOCK_BYTES:
        return Ahead(partial(decompress, block.header, block.data))
    return None
