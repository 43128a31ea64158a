"""Ledgers of Pulsar as objects of a topic: how frames become one, and how a failed one is removed.

`LedgerWriter` is to a ledger what `BlockWriter` is to a compressed object. It encodes each frame as
an entry, packs the entries into blocks of one size, and fills the object's index. `ledger_index`
makes the index object, which is written after the data object: while it exists, that is complete.

An attempt has names of its own, so what it left can be removed as soon as nobody can commit it:
`remove_attempt` first makes sure of that in the catalog. A sweep would remove it later.

Beware: an entry is never cut. A message that fits into no block raises MessageTooLarge, and the
ledger has to be written again with larger blocks.
"""

from __future__ import annotations

import logging
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import State
from forebay.errors import ForebayError
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_files, object_key, sidecar
from forebay.format.pulsar.blocks import IndexedBlock
from forebay.format.pulsar.frames import FramePacker
from forebay.logs import event
from forebay.objects.backend import Backend
from forebay.upload.compression import FrameWriter

_log: Final = logging.getLogger("forebay.upload")
_STEP: Final = 64
"""Entries between two places at which the index may get an entry."""


class LedgerWriter:
    """Encodes frames as entries, and writes blocks of them to a writer. Not thread-safe."""

    def __init__(self, writer: FrameWriter, index: ObjectIndex, block_bytes: int) -> None:
        self._writer = writer
        self._index = index
        self._packer = FramePacker(block_bytes)
        self.block_bytes = block_bytes
        self.stored = 0
        """Bytes written so far."""

    @property
    def blocks(self) -> list[IndexedBlock]:
        return self._packer.packer.blocks

    @property
    def entry_bytes(self) -> int:
        return self._packer.packer.entry_bytes

    def add(self, frames: Scan) -> None:
        """Takes a copy of the frames. Raises MessageTooLarge if one of them fits into no block."""
        if not len(frames):
            return
        for block in self._packer.add(frames):
            self._write(block)
        places = self._packer.positions
        for at in range(0, len(frames), _STEP):
            stop = min(at + _STEP, len(frames))
            begin = frames.positions[at] - HEADER_BYTES
            size = frames.positions[stop - 1] + frames.lengths[stop - 1] - begin
            position = places[at] if self._index.entries else 0
            self._index.add_block(frames.offsets[at], stop - at, size, position)

    def flush(self) -> None:
        """Writes the last block. Call it once, after all frames."""
        self._write(self._packer.finish())

    def drain(self) -> None:
        """Nothing to do: complete blocks were written."""

    def _write(self, block: Buffer) -> None:
        self._writer.write(block)
        self.stored += len(block)


def remove_attempt(
    catalog: Catalog, store: Backend, topic: TopicName, object_id: str, *, certain: bool = False
) -> bool:
    """Removes what an attempt left that was not committed; returns whether nothing is left of it.

    From the first step on nobody can commit it. Does nothing to one that was committed. `certain`
    says that its writer does not run any more. Raises nothing if a service fails: a sweep removes
    the rest.
    """
    try:
        life = catalog.life(topic, object_id)
        if life is None or life.state is State.GONE:
            return True
        if life.state not in (State.INTENDED, State.DELETING):
            return False
        token = catalog.condemn(topic, object_id, life)
        if token is None:
            return False
        for name in (sidecar(object_id), *object_files(object_id)):
            store.delete_object(object_key(topic, name))
        # The name is never used again. But if a task may still be writing, its row has to stay:
        # without it, what the task leaves would look like a ledger that the catalog has lost.
        certain = certain and life.state is not State.DELETING
        catalog.bury(topic, object_id, token, certain=certain)
    except ForebayError as error:
        event(
            _log,
            logging.WARNING,
            "what an upload left is not removed yet: a sweep does that",
            topic=topic,
            object=object_id,
            error=error,
        )
        return False
    event(_log, logging.INFO, "failed upload removed", topic=topic, object=object_id)
    return True
