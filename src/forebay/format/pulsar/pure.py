"""The codec of ledgers in plain Python: the reference, and the fallback without `_native`.

`forebay.format.pulsar.codec` chooses between this module and the compiled twin, and property tests
hold the two equal. The functions return tuples of raw columns; `blocks` and `frames` give them
names.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from typing import Final, TypeAlias

from forebay.format.layout import Buffer
from forebay.limits import LEDGER_ENTRY_BYTES_MAX

ENTRY_HEADER: Final = struct.Struct(">iq")
"""The length of an entry and its id. Padding begins with a length that is negative."""

COMPLETE: Final = 0
TORN: Final = 1
PADDING: Final = 2
BAD_LENGTH: Final = 3
BAD_ID: Final = 4

RawEntries: TypeAlias = tuple[memoryview, memoryview, int, int]

_POLYNOMIAL: Final = 0x82F63B78


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
        table.append(register)
    return table


def crc32c(data: Buffer) -> int:
    """The CRC-32C (Castagnoli) of the bytes."""
    table, register = _table(), 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        register = register >> 8 ^ table[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


def scan_entries(buffer: Buffer, start: int, left: int, entry_id: int) -> RawEntries:
    """Scans the entries of one block from `start`, of which `left` bytes remain; the first is
    `entry_id`.

    Returns the positions and lengths of their data, the position after the last whole entry, and
    how the scan ended: COMPLETE at the end of the buffer or of the block, TORN inside an entry that
    ends after the buffer. Raises ValueError if `start` is outside the buffer, or a number is
    negative.
    """
    positions, lengths = array("Q"), array("I")
    view = memoryview(buffer).cast("B")
    if not 0 <= start <= len(view) or left < 0 or entry_id < 0:
        raise ValueError("a number is out of range")
    stop, at, end = start + left, start, COMPLETE
    available = min(stop, len(view))
    while at < stop:
        room = available - at
        if not room and at < stop:
            break
        if stop - at < 4:
            end = PADDING
            break
        if room < 4:
            end = TORN
            break
        (length,) = _LENGTH.unpack_from(view, at)
        if length < 0:
            end = PADDING
            break
        if length > LEDGER_ENTRY_BYTES_MAX or length > stop - at - ENTRY_HEADER.size:
            end = BAD_LENGTH
            break
        if room < ENTRY_HEADER.size:
            end = TORN
            break
        if ENTRY_HEADER.unpack_from(view, at)[1] != entry_id:
            end = BAD_ID
            break
        if length > room - ENTRY_HEADER.size:
            end = TORN
            break
        positions.append(at + ENTRY_HEADER.size)
        lengths.append(length)
        at += ENTRY_HEADER.size + length
        entry_id += 1
    return memoryview(positions), memoryview(lengths), at, end


_LENGTH: Final = struct.Struct(">i")
