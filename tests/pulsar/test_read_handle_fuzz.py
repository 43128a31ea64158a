"""Objects of ledgers with random damage: an error or the right entries, never a hang.

`FOREBAY_FUZZ_ITERATIONS` raises the count for a soak.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass
from typing import Final

import pytest

from forebay.errors import LedgerError, UsageError
from forebay.format.frame import encode_frame, scan
from forebay.format.message import StreamMessage, encode_message
from forebay.format.pulsar.entry import decode_entry
from forebay.format.pulsar.frames import EntryAssembler, FramePacker
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pulsar.offloader import LedgerOffloader, OffloadSettings
from forebay.pulsar.read_handle import ReadSettings
from support.ledgers import HeldLedger, messages

ITERATIONS: Final = int(os.environ.get("FOREBAY_FUZZ_ITERATIONS", "0"))
BOUNDED: Final = 600
VERSION: Final = {"s3managedledgeroffloaderformatversion": "1"}
UID: Final = "7f0e0000-0000-4000-8000-00000000002a"
BLOCK: Final = 1024


def damaged(whole: bytes, order: random.Random) -> bytes:
    """The bytes with some damage: flips, numbers that matter, moved pieces, and cuts."""
    raw = bytearray(whole)
    for _ in range(order.randint(1, 4)):
        if not raw:
            break
        at, length = order.randrange(len(raw)), order.randint(1, 40)
        kind = order.randrange(5)
        if kind == 0:
            raw[at] ^= 1 << order.randrange(8)
        elif kind == 1:
            number = order.choice([0, 1, -1, 127, 2**31 - 1, -(2**31), order.randrange(2**31)])
            raw[at : at + 4] = struct.pack(">i", number)
        elif kind == 2:
            raw[at : at + 8] = struct.pack(">q", order.choice([0, -1, 2**63 - 1, len(raw)]))
        elif kind == 3:
            raw[at : at + length] = raw[order.randrange(len(raw)) :][:length]
        else:
            del raw[at:]
    return bytes(raw)


@dataclass(frozen=True, slots=True)
class Seeded:
    """A ledger whose objects are damaged again and again."""

    store: CloudStore
    offloader: LedgerOffloader
    entries: list[bytes]
    data: bytes
    index: bytes


def seeded() -> Seeded:
    store, entries = CloudStore(MemoryBackend()), messages(40, 90)
    settings = OffloadSettings(block_bytes=BLOCK, reading=ReadSettings(read_bytes=300))
    offloader = LedgerOffloader(store, settings)
    offloader.offload(HeldLedger(entries), UID)
    objects = offloader.objects(7, UID)
    data, index = (
        bytes(store.get_range(key, 0, store.head(key).size))
        for key in (objects.data, objects.index)
    )
    return Seeded(store, offloader, entries, data, index)


def read_damaged(ledger: Seeded, order: random.Random) -> None:
    objects = ledger.offloader.objects(7, UID)
    data, index = ledger.data, ledger.index
    if order.randrange(3):
        data = (damaged(data, order) + data)[: len(data)]  # of the size that the index says
    else:
        index = damaged(index, order)
    ledger.store.put_object(objects.data, data, VERSION)
    ledger.store.put_object(objects.index, index, VERSION)
    first = order.randrange(len(ledger.entries))
    try:
        with ledger.offloader.read_offloaded(7, UID) as handle:
            last = min(handle.last_add_confirmed, order.randrange(first, first + 60))
            found = [(each.entry_id, bytes(each.data)) for each in handle.read(first, last)]
    except (LedgerError, UsageError):
        return
    assert [entry_id for entry_id, _ in found] == list(range(first, last + 1))
    for entry_id, entry in found:
        if entry != ledger.entries[entry_id]:  # the same id, with a valid checksum of its own
            decode_entry(entry)


def assemble_damaged(whole: bytes, frames: bytes, order: random.Random) -> None:
    raw = damaged(whole, order)
    assembler = EntryAssembler(0, 0, len(whole), 0, BLOCK)
    step, out = order.randint(1, 700), bytearray()
    for at in range(0, len(raw), step):
        for found in assembler.feed(raw[at : at + step]):
            out += found.raw
        assert assembler.pending <= len(raw)
        if assembler.corruption is not None:
            break
    assembler.require_end(30)
    assert frames.startswith(out)
    assert assembler.corruption is not None or out == frames


def run(count: int, seed: int) -> None:
    order, ledger = random.Random(seed), seeded()
    packer, whole = FramePacker(BLOCK), bytearray()
    frames = b"".join(
        encode_frame(at, encode_message(StreamMessage(bytes(at * 9), attributes={"k": "v"}), at))
        for at in range(30)
    )
    for block in packer.add(scan(frames)):
        whole += block
    whole += packer.finish()
    for _ in range(count):
        read_damaged(ledger, order)
        assemble_damaged(bytes(whole), frames, order)


def test_damaged_ledgers_give_errors_or_what_was_written() -> None:
    run(BOUNDED, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_damaged_ledgers_give_errors_or_what_was_written_for_long() -> None:
    run(max(ITERATIONS, 100_000), random.SystemRandom().randrange(2**32))
