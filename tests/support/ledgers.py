"""Ledgers of Pulsar for tests: a real one that a broker wrote, and small ones made here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from forebay.format.pulsar.blocks import EntryPacker
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
