"""`LedgerOffloader`: copies a ledger into the object store, and removes it from there.

As Pulsar's interface of the same name: `offload`, `read_offloaded` and `delete_offloaded`, with a
ledger and the UUID of one attempt. The data object is written in parts, which are its blocks. The
index object is written last, so a ledger with an index is complete. If a step fails, what it left
is deleted, and the error is raised. Both objects have the user metadata that a broker demands.

Memory: the block that is being filled, a megabyte of entries, and the blocks that the writer has
not sent yet (`parts` + 1).

Beware: the UUID of an attempt is used once. `offload` raises ObjectExists, and changes nothing, if
there is an object of that name. After a process died there may be a data object without an index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.errors import (
    CorruptLog,
    ForebayError,
    InvalidSetting,
    ObjectExists,
    ServiceError,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.format.names import ledger_metadata, ledger_name
from forebay.format.pulsar.blocks import EntryPacker
from forebay.format.pulsar.index import LedgerIndex, encode_index
from forebay.limits import LEDGER_BLOCK_BYTES_MAX, LEDGER_BLOCK_BYTES_MIN, MIB, PART_BYTES_MIN
from forebay.logs import event
from forebay.objects.store import CloudStore
from forebay.pulsar.read_handle import (
    LedgerObjects,
    OffloadedReadHandle,
    ReadHandle,
    ReadSettings,
    open_ledger,
)
from forebay.read.fetch_pool import FetchPool

_log: Final = logging.getLogger("forebay.pulsar")

_BATCH_ENTRIES: Final = 1000
_BATCH_BYTES: Final = 1 * MIB
"""Entries that are held until they are copied into a block."""

_OF_THIS_MACHINE: Final = ("file://", "memory://")
"""Stores that take parts of any size."""


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """How ledgers are written and read."""

    block_bytes: int = 64 * MIB
    parts: int = 1
    """Blocks that are sent at the same time."""
    reading: ReadSettings = field(default_factory=ReadSettings)

    def __post_init__(self) -> None:
        if not LEDGER_BLOCK_BYTES_MIN <= self.block_bytes <= LEDGER_BLOCK_BYTES_MAX:
            raise InvalidSetting(
                f"block_bytes is {self.block_bytes}; it must be in "
                f"{LEDGER_BLOCK_BYTES_MIN}..{LEDGER_BLOCK_BYTES_MAX}"
            )
        if self.parts < 1:
            raise InvalidSetting(f"parts is {self.parts}; it must be at least 1")


class LedgerOffloader:
    """Offloads ledgers to a store, below a prefix. Thread-safe.

    With a pool, readers fetch ahead on its threads.
    """

    def __init__(
        self,
        store: CloudStore,
        settings: OffloadSettings | None = None,
        *,
        prefix: str = "",
        pool: FetchPool | None = None,
    ) -> None:
        self.settings = settings or OffloadSettings()
        self._store = store
        self._prefix = prefix
        self._pool = pool
        block_bytes = self.settings.block_bytes
        if block_bytes < PART_BYTES_MIN and not store.name.startswith(_OF_THIS_MACHINE):
            raise InvalidSetting(
                f"block_bytes is {block_bytes}; for {store.name} it must be at least "
                f"{PART_BYTES_MIN}, because blocks are the parts of an upload"
            )

    def objects(self, ledger_id: int, uid: str) -> LedgerObjects:
        """The keys of the objects of one attempt to offload a ledger; raises UsageError."""
        name = ledger_name(uid, ledger_id)
        return LedgerObjects(
            ledger_id, self._prefix + name.data_name, self._prefix + name.index_name
        )

    def offload(
        self, ledger: ReadHandle, uid: str, extra_metadata: Mapping[str, str] | None = None
    ) -> LedgerIndex:
        """Copies a closed ledger into the store; returns its index.

        `extra_metadata` become user metadata of both objects, such as `ManagedLedgerName`. Raises
        UsageError for a ledger that is empty or open, MessageTooLarge if an entry fits into no
        block, CorruptLog if the handle does not return the entries that it says it has, and
        ServiceError. Nothing is left in the store then, or a warning says what.
        """
        if not ledger.closed or ledger.last_add_confirmed < 0:
            raise UsageError(
                f"ledger {ledger.ledger_id} is empty or open, and cannot be offloaded: "
                "close it first"
            )
        objects = self.objects(ledger.ledger_id, uid)
        extra = extra_metadata or {}
        packer = self._write_data(ledger, objects, ledger_metadata(extra, is_index=False))
        metadata = replace(
            ledger.metadata,
            length=packer.entry_bytes,
            last_entry_id=packer.entry_id - 1,
        )
        index = LedgerIndex(packer.position, metadata, tuple(packer.blocks))
        try:
            encoded = encode_index(index)
            self._store.put_object(
                objects.index, encoded, ledger_metadata(extra, is_index=True), create=True
            )
        except ForebayError as error:
            self._clean_up(objects, error)
            raise
        event(
            _log,
            logging.INFO,
            "ledger offloaded",
            ledger=ledger.ledger_id,
            object=objects.data,
            entries=packer.entry_id,
            bytes=packer.position,
            blocks=len(packer.blocks),
        )
        return index

    def _write_data(
        self, ledger: ReadHandle, objects: LedgerObjects, metadata: Mapping[str, str]
    ) -> EntryPacker:
        """Writes the data object. After an error there is none, unless the store lost a response.

        Then nobody has its index, and it is deleted here.
        """
        packer = EntryPacker(self.settings.block_bytes)
        try:
            with self._store.open_streaming_writer(
                objects.data,
                chunk_bytes=max(self.settings.block_bytes, PART_BYTES_MIN),
                concurrent_parts=self.settings.parts,
                metadata=metadata,
                create=True,
            ) as writer:
                for entries in _in_order(ledger):
                    for block in packer.add_all(entries):
                        writer.write(block)
                writer.write(packer.finish())
                meta = writer.close()
        except ObjectExists:
            raise  # it belongs to another attempt
        except ServiceError as error:
            self._clean_up(objects, error)
            raise
        if meta.size != packer.position:
            damaged = CorruptLog(
                f"{self._store.name}: {objects.data} has {meta.size} bytes, but {packer.position} "
                "were written"
            )
            self._clean_up(objects, damaged)
            raise damaged
        return packer

    def _clean_up(self, objects: LedgerObjects, error: ForebayError) -> None:
        """Deletes what a failed attempt has left. An index never stays without its data."""
        try:
            for key in (objects.index, objects.data):
                self._store.delete_object(key)
        except ServiceError as failed:
            event(
                _log,
                logging.WARNING,
                "what a failed offload left is not removed: delete it again",
                ledger=objects.ledger_id,
                object=objects.data,
                error=error,
                failed=failed,
            )

    def read_offloaded(self, ledger_id: int, uid: str) -> OffloadedReadHandle:
        """Opens an offloaded ledger: see `open_ledger`."""
        objects = self.objects(ledger_id, uid)
        return open_ledger(self._store, objects, self._pool, self.settings.reading)

    def delete_offloaded(self, ledger_id: int, uid: str) -> None:
        """Deletes both objects; succeeds if there are none. The index goes first."""
        objects = self.objects(ledger_id, uid)
        for key in (objects.index, objects.data):
            self._store.delete_object(key)


def _in_order(ledger: ReadHandle) -> Iterator[list[Buffer]]:
    """Yields the data of all entries, a batch at a time; raises CorruptLog if one is missing."""
    batch: list[Buffer] = []
    expected = size = 0
    for entry_id, data in ledger.read(0, ledger.last_add_confirmed):
        if entry_id != expected:
            raise CorruptLog(
                f"ledger {ledger.ledger_id} returned entry {entry_id} where {expected} was expected"
            )
        expected += 1
        batch.append(data)
        size += len(data)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ENTRIES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
    if expected != ledger.last_add_confirmed + 1:
        raise CorruptLog(
            f"ledger {ledger.ledger_id} returned {expected} entries, but says that it has "
            f"{ledger.last_add_confirmed + 1}"
        )
