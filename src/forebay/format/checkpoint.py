"""Checkpoints: how far the log and the uploader had got when they last recorded it.

There are three formats:

- `wal.ckpt` and `uploader.ckpt`: a 16-byte header (magic, version, kind, body length, CRC-32 over
  the rest) and a JSON body (`docs/formats/checkpoint.md`). `forebay inspect` prints them.
- `wal.synced`, the published position: one record of 48 bytes, overwritten in place after every
  group commit (`docs/formats/published.md`). It is not synced: it is written after the frames are
  durable, so an old record is behind, but never wrong. A reader that meets a half-written record,
  which fails its CRC, reads again.
- Danube's checkpoints, which are read for inspection and never written. They are bincode of either
  flavour without magic or checksum; a decoding is accepted if it consumes every byte.

Beware: if a checkpoint disagrees with the frames in the segments, the frames are right. It is
normal that a checkpoint is behind them. A checkpoint that is ahead means that acknowledged data is
lost. Danube's checkpoints are not reliable: they are not synced, and may name segments that do not
exist or have other offsets.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar
from zlib import crc32

from forebay.errors import CheckpointError
from forebay.format.layout import (
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
from forebay.limits import OFFSET_MAX

_HEADER: Final = struct.Struct("<4sHHI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FBCK"
VERSION: Final = 1
_POSITION: Final = struct.Struct("<8sQQQQI")
_POSITION_MAGIC: Final = b"FBSYNC01"
RECORD_BYTES: Final = _POSITION.size + _CRC.size


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment in a checkpoint; `end_offset` is None while the segment is active."""

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
    active_start_offset: int | None = None
    """First offset of the object that is being written across cycles; the next fields are its."""
    active_bytes_written: int = 0
    active_msgs_written: int = 0
    index_entries_in_progress: tuple[tuple[int, int], ...] = ()
    opened_at_unix: int = 0
    last_activity_unix: int = 0


class Published(NamedTuple):
    """All bytes of older segments, and of segment `seq` up to `position`, are synced."""

    seq: int
    position: int
    next_offset: int
    """One more than the last synced offset."""
    start_offset: int
    pid: int


_KINDS: Final[dict[int, type[WalCheckpoint | UploaderCheckpoint]]] = {
    1: WalCheckpoint,
    2: UploaderCheckpoint,
}
_Kind = TypeVar("_Kind", WalCheckpoint, UploaderCheckpoint)
_Danube = TypeVar("_Danube")


def encode_checkpoint(checkpoint: WalCheckpoint | UploaderCheckpoint) -> bytes:
    kind = next(number for number, cls in _KINDS.items() if isinstance(checkpoint, cls))
    body = json.dumps(asdict(checkpoint), separators=(",", ":"), sort_keys=True).encode()
    head = _HEADER.pack(_MAGIC, VERSION, kind, len(body))
    return head + _CRC.pack(crc32(body, crc32(head))) + body


def decode_checkpoint(data: bytes, kind: type[_Kind]) -> _Kind:
    """Decodes a checkpoint of one kind; raises CheckpointError, which says what is wrong."""
    found = decode_any_checkpoint(data)
    if not isinstance(found, kind):
        raise CheckpointError(f"a {type(found).__name__} where a {kind.__name__} should be")
    return found


def decode_any_checkpoint(data: bytes) -> WalCheckpoint | UploaderCheckpoint:
    """Decodes a checkpoint of either kind; raises CheckpointError."""
    start = _HEADER.size + _CRC.size
    if not is_checkpoint(data):
        raise CheckpointError(f"not a checkpoint: it does not start with 'FBCK'{_foreign(data)}")
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
        return _parse(_KINDS[number], json.loads(str(body, "utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint body: {error}") from error


def is_checkpoint(data: bytes) -> bool:
    """Whether the bytes start with the magic of our checkpoints; Danube's have none."""
    return data[: len(_MAGIC)] == _MAGIC


def encode_published(record: Published) -> bytes:
    raw = _POSITION.pack(_POSITION_MAGIC, *record)
    return raw + _CRC.pack(crc32(raw))


def decode_published(data: bytes) -> Published | None:
    """The record at the start of `data`; None if it is missing, half-written or damaged."""
    if len(data) < RECORD_BYTES:
        return None
    raw = data[: _POSITION.size]
    if _CRC.unpack_from(data, _POSITION.size)[0] != crc32(raw):
        return None
    magic, *record = _POSITION.unpack(raw)
    return Published(*record) if magic == _POSITION_MAGIC else None


def _parse(
    kind: type[WalCheckpoint | UploaderCheckpoint], body: object
) -> WalCheckpoint | UploaderCheckpoint:
    found = _fields(body, kind)
    return _parse_uploader(found) if kind is UploaderCheckpoint else _parse_wal(found)


def _parse_wal(body: dict[str, Any]) -> WalCheckpoint:
    if type(body["segments"]) is not list:
        raise ValueError("segments is not a list")
    checkpoint = WalCheckpoint(
        _number(body, "start_offset"),
        _number(body, "next_offset"),
        tuple(_parse_segment(entry) for entry in body["segments"]),
        _optional_number(body, "rotated_at_ms"),
    )
    if checkpoint.start_offset > checkpoint.next_offset:
        raise ValueError("start_offset is beyond next_offset")
    _require_order(checkpoint)
    return checkpoint


def _parse_segment(entry: object) -> SegmentEntry:
    body = _fields(entry, SegmentEntry)
    return SegmentEntry(
        _number(body, "seq"), _number(body, "first_offset"), _optional_number(body, "end_offset")
    )


def _require_order(checkpoint: WalCheckpoint) -> None:
    """Raises ValueError unless segments are in order and disjoint, and only the last is active."""
    seq, offset = -1, 0
    for entry in checkpoint.segments:
        end = checkpoint.next_offset if entry.end_offset is None else entry.end_offset
        if entry.seq <= seq or not offset <= entry.first_offset <= end <= checkpoint.next_offset:
            raise ValueError(f"segment {entry.seq} is out of order")
        seq, offset = entry.seq, end
    if any(entry.end_offset is None for entry in checkpoint.segments[:-1]):
        raise ValueError("a segment before the last is active")


def _parse_uploader(body: dict[str, Any]) -> UploaderCheckpoint:
    object_id = body["last_object_id"]
    if object_id is not None and not isinstance(object_id, str):
        raise ValueError("last_object_id is not a string")
    return UploaderCheckpoint(
        _optional_number(body, "last_committed_offset"),
        _number(body, "last_read_file_seq"),
        _number(body, "last_read_byte_position"),
        object_id,
        _number(body, "updated_at"),
        _optional_number(body, "active_start_offset"),
        _number(body, "active_bytes_written"),
        _number(body, "active_msgs_written"),
        _parse_index(body["index_entries_in_progress"]),
        _number(body, "opened_at_unix"),
        _number(body, "last_activity_unix"),
    )


def _parse_index(value: object) -> tuple[tuple[int, int], ...]:
    if type(value) is not list:
        raise ValueError("index_entries_in_progress is not a list")
    return tuple(_parse_entry(each) for each in value)


def _parse_entry(value: object) -> tuple[int, int]:
    match value:
        case [offset, position] if _is_number(offset) and _is_number(position):
            return offset, position
        case _:
            raise ValueError(f"{value!r} in index_entries_in_progress is not [offset, position]")


def _fields(value: object, kind: type[Any]) -> dict[str, Any]:
    """Returns `value` if it is a JSON object with exactly the fields of `kind`."""
    wanted = {field.name for field in fields(kind)}
    if not isinstance(value, dict) or value.keys() != wanted:
        raise ValueError(f"its fields are not those of a {kind.__name__}")
    return value


def _number(body: dict[str, Any], name: str) -> int:
    value = body[name]
    if not _is_number(value):
        raise ValueError(f"{name} is not a whole number in 0..{OFFSET_MAX}")
    return value


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= OFFSET_MAX


def _optional_number(body: dict[str, Any], name: str) -> int | None:
    return None if body[name] is None else _number(body, name)


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


def decode_danube_wal_checkpoint(data: bytes) -> DanubeWalCheckpoint:
    """Decodes Danube's `wal.ckpt` of any version; raises CheckpointError."""
    return _read_danube(data, _read_wal, "wal.ckpt")


def decode_danube_uploader_checkpoint(data: bytes) -> DanubeUploaderCheckpoint:
    """Decodes Danube's `uploader.ckpt` of any version; raises CheckpointError."""
    return _read_danube(data, _read_uploader, "uploader.ckpt")


def _read_danube(data: bytes, read: Callable[[bytes, int], _Danube], name: str) -> _Danube:
    for flavour in (FIXED, VARINT):
        try:
            return read(data, flavour)
        except (MalformedError, UnicodeDecodeError):
            continue
    raise CheckpointError(f"{len(data)} bytes that are not a {name} of Danube")


def _foreign(data: bytes) -> str:
    """A hint for a user who brought Danube's directory here; otherwise empty."""
    for name, decode in (
        ("wal.ckpt", decode_danube_wal_checkpoint),
        ("uploader.ckpt", decode_danube_uploader_checkpoint),
    ):
        try:
            decode(data)
        except CheckpointError:
            continue
        return f"; it looks like Danube's {name}, which is not used"
    return ""


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


def _text(data: Buffer, found: Span) -> str:
    return str(data[found.position : found.position + found.length], "utf-8")
