"""The newest segment after a crash: what of it is valid, and how it becomes durable again.

Torn is not corrupt (rule R2). A damaged end is a torn tail only if nothing says that it was ever
synced: it starts at or after the last known synced position, and no valid frame comes after it.
Then it is copied aside and cut. Anything else raises CorruptFrame, and the file stays as it is.

What remains is made durable before it counts. Bytes after the synced position are written again,
because after a failed sync the kernel may take unwritten pages for clean; and if the last owner
noted such a failure, all of it goes to a new file (rule R3).
"""

from __future__ import annotations

import errno
import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.errors import CorruptFrame
from forebay.files.disk import AppendFile, Disk, ReadFile, append_all, write_all_at
from forebay.format.bincode import FIXED, VARINT, MalformedError, readers, span
from forebay.format.frame import HEADER_BYTES, End, Scan, frame_bytes, frame_candidates, scan
from forebay.format.names import aside
from forebay.format.pure import HEADER
from forebay.format.segment_index import SegmentIndex
from forebay.limits import FRAME_PAYLOAD_BYTES_MIN, KIB, MIB, OFFSET_MAX, READ_CHUNK_BYTES
from forebay.logs import event
from forebay.wal.chunks import ChunkReader, scan_segment

_log: Final = logging.getLogger("forebay.wal")
_HASHED_BYTES_MIN: Final = 64 * MIB
_HEAD_BYTES: Final = 4 * KIB
"""More than the header, the numbers, the topic and the broker of any message take."""
_FRAME_BYTES_MIN: Final = HEADER_BYTES + FRAME_PAYLOAD_BYTES_MIN


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest segment: what of it is valid. It is whole and durable once it was repaired."""

    first_offset: int | None
    """None if it holds no frame."""
    count: int
    size: int
    torn_bytes: int
    """What is behind the valid part."""
    index: SegmentIndex


def survey_newest(
    disk: Disk, path: Path, *, expected: int | None, synced: int, known: int
) -> Newest:
    """Scans the segment and changes nothing; CorruptFrame where it is worse than torn.

    Everything before position `synced` was durable once, and so was everything before offset
    `known`.
    """
    file = disk.open_read(path)
    try:
        size = file.size()
        newest, last = _survey(file, size, expected)
        if last is not None and last.end is not End.COMPLETE:
            _require_torn(file, path, newest, last, size=size, synced=synced, known=known)
        return newest
    finally:
        file.close()


def repair_newest(
    disk: Disk, path: Path, newest: Newest, *, synced: int, sync_failed: bool
) -> None:
    """Cuts what is torn, and makes the rest durable before it counts."""
    file = disk.open_read(path)
    try:
        if newest.torn_bytes:
            _keep_aside(disk, file, path, newest.size, newest.size + newest.torn_bytes)
        if sync_failed:
            _rewrite(disk, file, path, newest.size)
    finally:
        file.close()
    if not sync_failed and (newest.torn_bytes or newest.size != synced):
        _resync(disk, path, newest.size, min(synced, newest.size))


def _survey(file: ReadFile, size: int, expected: int | None) -> tuple[Newest, Scan | None]:
    index = SegmentIndex()
    valid = count = 0
    last: Scan | None = None
    for position, found in scan_segment(file, ChunkReader(), size, expected, index):
        valid = position + found.safe_length
        count += len(found)
        last = found
    first = index.offsets[0] if len(index) else None
    return Newest(first, count, valid, size - valid, index), last


def _require_torn(
    file: ReadFile, path: Path, newest: Newest, last: Scan, *, size: int, synced: int, known: int
) -> None:
    what = last.end.describe()
    if newest.size < synced:
        reason = f"{what} below the synced position {synced}"
    elif last.offset is not None and last.offset < known:
        reason = f"{what} below the synced offset {known}"
    elif last.end is End.BAD_OFFSET and _valid_frame_at(file, newest.size, size):
        # A write that was cut short does not leave a whole frame.
        reason = what
    elif _valid_frame_follows(file, newest.size + 1, size, last.offset):
        reason = f"{what}, and valid frames follow"
    else:
        return
    raise CorruptFrame(reason, file=str(path), position=newest.size, offset=last.offset)


def _valid_frame_follows(file: ReadFile, start: int, size: int, expected: int | None) -> bool:
    """Whether any byte position from `start` on begins a valid frame of a later offset."""
    first = expected or 0
    last = OFFSET_MAX if expected is None else expected + (size - start) // _FRAME_BYTES_MIN + 1
    buffer = memoryview(bytearray(READ_CHUNK_BYTES))
    budget = 8 * (size - start) + _HASHED_BYTES_MIN
    position = start
    while size - position >= _FRAME_BYTES_MIN:
        taken = file.read_into(buffer, position)
        for at in frame_candidates(buffer[:taken], first, last):
            head = buffer[at : min(at + _HEAD_BYTES, taken)]
            if len(head) < _HEAD_BYTES:
                head = _read_head(file, position + at)
            length = _message_length(head, size - position - at)
            if length is None:
                continue
            budget -= length
            # What cannot be told in reasonable time is not cut either.
            if budget < 0 or _valid_frame_at(file, position + at, size):
                return True
        position += max(taken - HEADER_BYTES + 1, 1)
    return False


def _read_head(file: ReadFile, position: int) -> memoryview:
    head = memoryview(bytearray(_HEAD_BYTES))
    return head[: file.read_into(head, position)]


def _message_length(head: memoryview, available: int) -> int | None:
    """The length of the message in a frame that starts so; None if it does not look like one.

    A message carries a copy of its frame's offset after topic and broker. Looking for it spares
    hashing megabytes for each plausible header in a payload full of numbers.
    """
    offset, length, _ = HEADER.unpack_from(head)
    if length > available - HEADER_BYTES:
        return None
    end = min(len(head), HEADER_BYTES + length)
    carried = (_carried_offset(head, end, flavour) for flavour in (FIXED, VARINT))
    return int(length) if offset in carried else None


def _carried_offset(frame: memoryview, end: int, flavour: int) -> int | None:
    u64, _ = readers(flavour)
    try:
        _, at = u64(frame, HEADER_BYTES, end)
        _, at = u64(frame, at, end)
        _, at = span(frame, at, end, u64)
        _, at = span(frame, at, end, u64)
        return u64(frame, at, end)[0]
    except MalformedError:
        return None


def _valid_frame_at(file: ReadFile, position: int, size: int) -> bool:
    header = bytearray(HEADER_BYTES)
    file.read_into(memoryview(header), position)
    length = frame_bytes(header, 0)
    if length is None or length > size - position:
        return False
    whole = bytearray(length)
    file.read_into(memoryview(whole), position)
    return len(scan(whole)) == 1


def _some(taken: int) -> int:
    if not taken:
        raise OSError(errno.EIO, "the file shrank while it was read")
    return taken


def _copy(source: ReadFile, start: int, end: int, target: AppendFile) -> None:
    buffer = memoryview(bytearray(min(READ_CHUNK_BYTES, max(end - start, 1))))
    while start < end:
        taken = _some(source.read_into(buffer[: end - start], start))
        append_all(target, buffer[:taken])
        start += taken


def _copy_to_new(disk: Disk, source: ReadFile, start: int, end: int, path: Path) -> None:
    """A new file with those bytes, synced; the caller syncs the directory."""
    target = disk.create(path)
    try:
        _copy(source, start, end, target)
        target.sync()
    finally:
        target.close()


def _keep_aside(disk: Disk, file: ReadFile, path: Path, start: int, end: int) -> None:
    kept = path.with_name(aside(path.name, "torn", start))
    attempt = 0
    while disk.exists(kept):
        attempt += 1
        kept = path.with_name(aside(path.name, f"{attempt}.torn", start))
    try:
        _copy_to_new(disk, file, start, end, kept)
    except OSError:
        # On a full disk every attempt to open the log would leave one more piece.
        if disk.exists(kept):
            disk.unlink(kept)
        raise
    disk.sync_dir(path.parent)
    event(
        _log,
        logging.WARNING,
        "a torn tail was cut",
        file=path,
        bytes=end - start,
        position=start,
        kept=kept.name,
    )


def _rewrite(disk: Disk, file: ReadFile, path: Path, size: int) -> None:
    """Puts a synced copy of the first `size` bytes in the place of the segment."""
    temporary = path.with_name(path.name + ".tmp")
    if disk.exists(temporary):
        disk.unlink(temporary)
    _copy_to_new(disk, file, 0, size, temporary)
    disk.replace(temporary, path)
    disk.sync_dir(path.parent)
    text = "a segment was rewritten after a failed sync"
    event(_log, logging.WARNING, text, file=path, bytes=size)


def _resync(disk: Disk, path: Path, size: int, synced: int) -> None:
    """Cuts the segment to `size`, and writes what comes after `synced` again before syncing it."""
    with closing(disk.open_read(path)) as source, closing(disk.open_append(path)) as target:
        if target.size() > size:
            target.truncate(size)
        buffer = memoryview(bytearray(READ_CHUNK_BYTES))
        position = synced
        while position < size:
            taken = _some(source.read_into(buffer[: size - position], position))
            write_all_at(target, buffer[:taken], position)
            position += taken
        target.sync()
