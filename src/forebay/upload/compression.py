"""`BlockWriter`: compresses the frames of an object while it is written.

Frames are cut into blocks (`forebay.format.blocks`). Other threads (`forebay.processors`) compress
them side by side, while the caller reads, checks and hashes the next frames. The blocks are written
in order, by the caller's thread.

Memory: the block being collected, and at most IN_FLIGHT_BYTES in blocks that are being compressed,
or one larger block. Nothing is in flight after `drain`, so a rolling writer keeps at most one block
between cycles.

Beware: the positions of blocks are known only when they are written. The index of the object is
complete after `flush`, not before.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final, Protocol

from forebay.format.blocks import BlockCutter, RawBlock, compress_block
from forebay.format.frame import Scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.limits import BLOCK_BYTES
from forebay.processors import Ahead

IN_FLIGHT_BYTES: Final = 4 * BLOCK_BYTES


class FrameWriter(Protocol):
    """Where the bytes of an object go."""

    def write(self, data: Buffer) -> None: ...


class BlockWriter:
    """Compresses frames and writes them to a writer. Not thread-safe."""

    def __init__(self, writer: FrameWriter, index: ObjectIndex, level: int) -> None:
        self._writer = writer
        self._index = index
        self._level = level
        self._cutter = BlockCutter()
        self._compressing: deque[tuple[RawBlock, Ahead[bytes]]] = deque()
        self.in_flight = 0
        """Bytes of frames in blocks that are being compressed."""
        self.stored = 0
        """Bytes written so far."""

    def add(self, frames: Scan) -> None:
        """Takes a copy of the frames. Writes what is compressed, and waits if too much is not."""
        for block in self._cutter.add(frames):
            self._start(block)

    def flush(self) -> None:
        """Writes all frames. The next ones begin a new block."""
        rest = self._cutter.rest()
        if rest is not None and not self._compressing:
            self._write(rest, compress_block(rest, self._level))  # one thread is enough
        elif rest is not None:
            self._start(rest)
        self.drain()

    def drain(self) -> None:
        """Writes all complete blocks. Frames that do not fill a block stay in memory."""
        while self._compressing:
            self._finish_first()

    def _start(self, block: RawBlock) -> None:
        size = len(block.frames)
        while self._compressing and (
            self.in_flight + size > IN_FLIGHT_BYTES or self._compressing[0][1].done
        ):
            self._finish_first()
        self.in_flight += size
        ahead = Ahead(partial(compress_block, block, self._level))
        self._compressing.append((block, ahead))

    def _finish_first(self) -> None:
        block, ahead = self._compressing.popleft()
        self.in_flight -= len(block.frames)
        self._write(block, ahead.result())

    def _write(self, block: RawBlock, data: Buffer) -> None:
        self._index.add_block(block.first_offset, block.messages, len(block.frames), self.stored)
        self._writer.write(data)
        self.stored += len(data)
