"""Danube's own checkpoint files, read for inspection and migration; they are never written.

Plain bincode of either flavour with no magic and no checksum, so a reading counts only when it
consumes every byte.

What a caller gets wrong: these files are not to be trusted. Danube writes them without syncing,
names segments that hold other offsets than it says, and forgets what retention removed; a log is
rebuilt from its frames instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import CheckpointError
from forebay.format.bincode import (
    FIXED,
    VARINT,
    Buffer,
    MalformedError,
    Reader,
    Span,
    option,
    option_span,
    readers,
    span,
)


@dataclass(frozen=True, slots=True)
class DanubeRotatedFile:
    seq: int
    path: str
    first_offset: int


@dataclass(frozen=True, slots=True)
class DanubeWalCheckpoint:
    start_offset: int
    last_offset: int
    file_seq: int
    file_path: str
    rotated_files: tuple[DanubeRotatedFile, ...]
    active_file_name: str | None
    last_rotation_at: int | None
    active_file_first_offset: int | None


@dataclass(frozen=True, slots=True)
class DanubeUploaderCheckpoint:
    last_committed_offset: int
    last_read_file_seq: int
    last_read_byte_position: int
    last_object_id: str | None
    updated_at: int


def _text(data: Buffer, found: Span | None) -> str:
    if found is None:
        return ""
    return str(data[found.position : found.position + found.length], "utf-8")


def _rotated(data: bytes, at: int, u64: Reader) -> tuple[tuple[DanubeRotatedFile, ...], int]:
    end = len(data)
    count, at = u64(data, at, end)
    if count > end - at:
        raise MalformedError
    files = []
    for _ in range(count):
        seq, at = u64(data, at, end)
        path, at = span(data, at, end, u64)
        first_offset, at = u64(data, at, end)
        files.append(DanubeRotatedFile(seq, _text(data, path), first_offset))
    return tuple(files), at


def _read_wal(data: bytes, flavour: int) -> DanubeWalCheckpoint:
    u64, _ = readers(flavour)
    end = len(data)
    start_offset, at = u64(data, 0, end)
    last_offset, at = u64(data, at, end)
    file_seq, at = u64(data, at, end)
    file_path, at = span(data, at, end, u64)
    rotated_files, at = _rotated(data, at, u64)
    active_name, at = option_span(data, at, end, u64)
    last_rotation_at, at = option(data, at, end, u64)
    active_first, at = option(data, at, end, u64)
    if at != end:
        raise MalformedError
    return DanubeWalCheckpoint(
        start_offset,
        last_offset,
        file_seq,
        _text(data, file_path),
        rotated_files,
        None if active_name is None else _text(data, active_name),
        last_rotation_at,
        active_first,
    )


def _read_uploader(data: bytes, flavour: int) -> DanubeUploaderCheckpoint:
    u64, _ = readers(flavour)
    end = len(data)
    committed, at = u64(data, 0, end)
    seq, at = u64(data, at, end)
    position, at = u64(data, at, end)
    object_id, at = option_span(data, at, end, u64)
    updated_at, at = u64(data, at, end)
    if at != end:
        raise MalformedError
    name = None if object_id is None else _text(data, object_id)
    return DanubeUploaderCheckpoint(committed, seq, position, name, updated_at)


def decode_danube_wal_checkpoint(data: bytes) -> DanubeWalCheckpoint:
    """Danube's `wal.ckpt`, of any version, or CheckpointError."""
    for flavour in (FIXED, VARINT):
        try:
            return _read_wal(data, flavour)
        except (MalformedError, UnicodeDecodeError):
            continue
    raise CheckpointError(f"{len(data)} bytes are no Danube wal.ckpt")


def decode_danube_uploader_checkpoint(data: bytes) -> DanubeUploaderCheckpoint:
    """Danube's `uploader.ckpt`, of any version, or CheckpointError."""
    for flavour in (FIXED, VARINT):
        try:
            return _read_uploader(data, flavour)
        except (MalformedError, UnicodeDecodeError):
            continue
    raise CheckpointError(f"{len(data)} bytes are no Danube uploader.ckpt")
