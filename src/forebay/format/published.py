"""The published position: how far a log is synced, for readers in other processes (rule R7).

One record of 48 bytes at the start of `wal.synced`, overwritten in place after every group
commit: magic, segment, position in it, next offset, start offset, writer's process, CRC-32.
Nobody syncs this file, and nobody needs to: what it says was true before it was written, so an
old record is behind, never wrong. A reader that meets a half-written one (the CRC tells) reads
again. The layout: `docs/formats/published.md`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

_LAYOUT: Final = struct.Struct("<8sQQQQI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FBSYNC01"
RECORD_BYTES: Final = _LAYOUT.size + _CRC.size


class Published(NamedTuple):
    """All bytes of older segments, and of segment `seq` up to `position`, are synced."""

    seq: int
    position: int
    next_offset: int
    """One more than the last synced offset."""
    start_offset: int
    pid: int


def encode_published(record: Published) -> bytes:
    raw = _LAYOUT.pack(_MAGIC, *record)
    return raw + _CRC.pack(crc32(raw))


def decode_published(data: bytes) -> Published | None:
    """The record at the start of `data`, or None where it is missing, half-written or damaged."""
    if len(data) < RECORD_BYTES:
        return None
    raw = data[: _LAYOUT.size]
    if _CRC.unpack_from(data, _LAYOUT.size)[0] != crc32(raw):
        return None
    magic, *record = _LAYOUT.unpack(raw)
    return Published(*record) if magic == _MAGIC else None
