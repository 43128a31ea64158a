"""Ledgers of Pulsar for tests: a real one that a broker wrote, and small ones made here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from forebay.format.pulsar.blocks import Entry, EntryPacker
from forebay.format.pulsar.entry import MessageMetadata, encode_entry
from forebay.format.pulsar.ledger_metadata import LedgerMetadata
from support.paths import SUPPORT

REAL_DATA: Final = (SUPPORT / "pulsar" / "ledger-1").read_bytes()
REAL_INDEX: Final = (SUPPORT / "pulsar" / "ledger-1-index").read_bytes()
"""Both objects of ledger 1 of a Pulsar standalone; it has one entry, "hello-reader-1"."""


def packed(entries: Iterable[bytes], block_bytes: int) -> tuple[bytes, EntryPacker]:
    """A data object with these entries, and the packer that made it."""
    packer, out = EntryPacker(block_bytes), bytearray()
    for entry in entries:
        if not packer.fits(len(entry)):
            out += packer.cut()
        packer.add(entry)
    out += packer.finish()
    return bytes(out), packer


class HeldLedger:
    """A ledger in memory, as a broker would have it before it is offloaded."""

    def __init__(
        self,
        entries: Sequence[bytes],
        ledger_id: int = 7,
        *,
        closed: bool = True,
        promised: int | None = None,
    ) -> None:
        self._entries = entries
        self.ledger_id = ledger_id
        self.closed = closed
        self.last_add_confirmed = (len(entries) if promised is None else promised) - 1
        self.length = sum(map(len, entries))
        self.metadata = LedgerMetadata(
            self.length, self.last_add_confirmed, custom=(("application", b"pulsar"),)
        )

    def read(self, first: int, last: int) -> Iterator[Entry]:
        for entry_id, data in enumerate(self._entries[first : last + 1], first):
            yield Entry(entry_id, memoryview(data))

    def close(self) -> None:
        """Nothing to do."""


def messages(count: int, size: int = 60) -> list[bytes]:
    """Entries of Pulsar, each with one message of `size` bytes."""
    return [
        encode_entry(MessageMetadata("p", number, 1_700_000_000_000), bytes([number % 251]) * size)
        for number in range(count)
    ]
