"""Checkpoints: where the log, and later the uploader, had got to when they last said so.

A 16-byte header (magic, version, kind, body length, CRC-32 over the rest) and a JSON body, so
that a person can read one with `forebay inspect`. The layout: `docs/formats/checkpoint.md`.

What a caller gets wrong: a checkpoint is a memory, not the truth. Where it disagrees with the
frames in the segments, it is either behind them, which is normal, or ahead, which means that
acknowledged data is gone.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar
from zlib import crc32

from forebay.errors import CheckpointError
from forebay.limits import OFFSET_MAX

_HEADER: Final = struct.Struct("<4sHHI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FBCK"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment as a checkpoint remembers it; `end_offset` is None while it is active."""

    seq: int
    first_offset: int
    end_offset: int | None


@dataclass(frozen=True, slots=True)
class WalCheckpoint:
    start_offset: int
    """The oldest offset that is still in a local segment."""
    next_offset: int
    """One more than the last synced offset at the time of writing."""
    segments: tuple[SegmentEntry, ...]
    rotated_at_ms: int | None = None

    @property
    def last_offset(self) -> int | None:
        return self.next_offset - 1 if self.next_offset else None


@dataclass(frozen=True, slots=True)
class UploaderCheckpoint:
    last_committed_offset: int | None
    last_read_file_seq: int
    last_read_byte_position: int
    last_object_id: str | None
    updated_at: int
    """Seconds since 1970-01-01 UTC."""


_KINDS: Final[dict[int, type[WalCheckpoint | UploaderCheckpoint]]] = {
    1: WalCheckpoint,
    2: UploaderCheckpoint,
}
_Kind = TypeVar("_Kind", WalCheckpoint, UploaderCheckpoint)


def encode_checkpoint(checkpoint: WalCheckpoint | UploaderCheckpoint) -> bytes:
    kind = next(number for number, cls in _KINDS.items() if isinstance(checkpoint, cls))
    body = json.dumps(asdict(checkpoint), separators=(",", ":"), sort_keys=True).encode()
    head = _HEADER.pack(_MAGIC, VERSION, kind, len(body))
    return head + _CRC.pack(crc32(body, crc32(head))) + body


def is_checkpoint(data: bytes) -> bool:
    """Whether these bytes claim to be one of ours (Danube's have no magic)."""
    return data[: len(_MAGIC)] == _MAGIC


def decode_checkpoint(data: bytes, kind: type[_Kind]) -> _Kind:
    """The checkpoint in `data`, or CheckpointError that says what is wrong with it."""
    found = decode_any_checkpoint(data)
    if not isinstance(found, kind):
        raise CheckpointError(f"a {type(found).__name__} where a {kind.__name__} should be")
    return found


def decode_any_checkpoint(data: bytes) -> WalCheckpoint | UploaderCheckpoint:
    """Like `decode_checkpoint`, whichever kind it is."""
    start = _HEADER.size + _CRC.size
    if not is_checkpoint(data):
        raise CheckpointError("no checkpoint: it does not start with 'FBCK'")
    if len(data) < start:
        raise CheckpointError(f"truncated checkpoint: {len(data)} bytes")
    _, version, number, length = _HEADER.unpack_from(data)
    if version != VERSION:
        raise CheckpointError(f"checkpoint version {version}; this release reads {VERSION}")
    body = data[start:]
    check = crc32(body, crc32(data[: _HEADER.size]))
    if len(body) != length or check != _CRC.unpack_from(data, _HEADER.size)[0]:
        raise CheckpointError("checkpoint checksum or length mismatch")
    if number not in _KINDS:
        raise CheckpointError(f"unknown kind of checkpoint: {number}")
    try:
        return _parse(_KINDS[number], json.loads(body))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"checkpoint body: {error}") from error


def _parse(
    kind: type[WalCheckpoint | UploaderCheckpoint], body: dict[str, Any]
) -> WalCheckpoint | UploaderCheckpoint:
    if kind is UploaderCheckpoint:
        return UploaderCheckpoint(**body)
    entries = tuple(SegmentEntry(**entry) for entry in body.pop("segments"))
    checkpoint = WalCheckpoint(segments=entries, **body)
    if not 0 <= checkpoint.start_offset <= checkpoint.next_offset <= OFFSET_MAX:
        raise ValueError("offsets out of range")
    return checkpoint
