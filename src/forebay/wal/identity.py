"""Which log a directory holds, who may write it, and what becomes of one that is not the topic's.

A log has an id, made with its directory. The catalog remembers the id of the log that a topic's
newest messages are in. A directory that comes back after another machine went on without it, or
an older copy of one that ends before the objects do, is set aside whole: its files get names that
are no log's, nothing is deleted, and nothing of it is appended to.

The id is kept twice, the second time with a checksum. Where the two disagree one is damaged: the
log is not opened, as it would be set aside for nothing, and `forebay repair` finds which it is.

What a caller gets wrong: an older copy that ends behind the objects has the right id, and nothing
distinguishes it from the log after a crash. Never put back a copy of a directory that was written
to since.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from forebay.errors import CorruptLog
from forebay.files.disk import Disk, read_file, replace_file
from forebay.format.names import (
    CHECKPOINT_FILE,
    LOG_ID_COPY_FILE,
    LOG_ID_FILE,
    UPLOADER_CHECKPOINT_FILE,
    SegmentNames,
    aside_directory,
)
from forebay.logs import event
from forebay.wal.checkpoints import Publisher
from forebay.wal.recovery import Recovered
from forebay.wal.segment import SegmentSet

_log: Final = logging.getLogger("forebay.wal")
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LocalLog:
    """What recovery found in a directory."""

    log_id: str
    start_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Which log is written from now on: the local one, or a new one from `next_offset` on."""

    log_id: str
    next_offset: int


class WriteGuard(Protocol):
    """The right to write, as the log checks it around every commit (rule R5).

    Raises TopicFenced or ServiceError where the log must not be written, or not be acknowledged.
    """

    def admit(self, end_offset: int) -> None:
        """Before frames up to `end_offset` are written."""

    def confirm(self) -> None:
        """After frames were synced, and before they are acknowledged."""


class Claim(Protocol):
    """How the log gets the right to write (rule R4); a log that stands alone is `Unclaimed`."""

    def acquire(self, local: LocalLog) -> LogIdentity:
        """Once the directory is locked and recovered; TopicOwned where another process has it."""

    @property
    def ownership(self) -> WriteGuard:
        """What was acquired."""


class Unclaimed:
    """For a log that stands alone: everything is allowed."""

    def acquire(self, local: LocalLog) -> LogIdentity:
        return LogIdentity(local.log_id, local.next_offset)

    @property
    def ownership(self) -> WriteGuard:
        return self

    def admit(self, end_offset: int) -> None: ...

    def confirm(self) -> None: ...


def new_log_id() -> str:
    return secrets.token_hex(16)


def read_log_id(disk: Disk, directory: Path) -> str | None:
    """The id of the log in a directory; None if it has none yet."""
    path = directory / LOG_ID_FILE
    if not disk.exists(path):
        return None
    try:
        text = read_file(disk, path, bytes_max=64).decode("ascii").strip()
    except ValueError:
        text = ""
    if not _ID.fullmatch(text):
        raise CorruptLog(
            f"{path}: it is no id of a log; put the file back (without it, the log is taken for "
            "another one and set aside)"
        )
    return text


def read_id_copy(disk: Disk, directory: Path) -> str | None:
    """The id as its copy has it; None if there is none, or none that is whole."""
    try:
        data = read_file(disk, directory / LOG_ID_COPY_FILE, bytes_max=64)
    except (FileNotFoundError, ValueError):
        return None
    text = data[:32].decode("ascii", "replace")
    return text if _ID.fullmatch(text) and data == _encode_copy(text) else None


def _encode_copy(log_id: str) -> bytes:
    return f"{log_id} {zlib.crc32(log_id.encode()):08x}\n".encode()


def write_log_id(disk: Disk, directory: Path, log_id: str) -> None:
    """Both files, the copy never before what it is a copy of.

    A copy of another id is removed first: after a crash anywhere the two agree, or the copy is
    missing.
    """
    copy = directory / LOG_ID_COPY_FILE
    if disk.exists(copy) and read_id_copy(disk, directory) != log_id:
        disk.unlink(copy)
        disk.sync_dir(directory)
    replace_file(disk, directory / LOG_ID_FILE, log_id.encode())
    _write_copy(disk, directory, log_id)


def _write_copy(disk: Disk, directory: Path, log_id: str) -> None:
    if read_id_copy(disk, directory) != log_id:
        replace_file(disk, directory / LOG_ID_COPY_FILE, _encode_copy(log_id))


def _read_agreed(disk: Disk, directory: Path) -> str | None:
    log_id, copy = read_log_id(disk, directory), read_id_copy(disk, directory)
    if copy is not None and copy != log_id:
        what = "it is missing" if log_id is None else "it does not say the same"
        raise CorruptLog(
            f"{directory / LOG_ID_FILE}: {what}, and its copy {LOG_ID_COPY_FILE} is there: run "
            "`forebay repair` (without both, the log is taken for another one and set aside)"
        )
    return log_id


def resolve_identity(
    disk: Disk,
    directory: Path,
    names: SegmentNames,
    publisher: Publisher,
    recovered: Recovered,
    claim: Claim,
) -> Recovered:
    """Acquires the claim, and sets the recovered log aside if the claim names another one."""
    log_id = _read_agreed(disk, directory)
    if log_id is None:
        log_id = new_log_id()
        write_log_id(disk, directory, log_id)
    local = LocalLog(log_id, recovered.start_offset, recovered.next_offset)
    identity = claim.acquire(local)
    if identity.log_id == log_id:
        _write_copy(disk, directory, log_id)
        return recovered
    if recovered.segments.start_offset is not None:
        publisher.withdraw()
        _set_aside(disk, directory, names, log_id)
    write_log_id(disk, directory, identity.log_id)
    return Recovered(SegmentSet(), identity.next_offset, identity.next_offset)


def _set_aside(disk: Disk, directory: Path, names: SegmentNames, log_id: str) -> None:
    """Renames the log: checkpoints and indexes first, then the segments, oldest first.

    Each name is synced before the next. After a crash in between what is left is a log that begins
    later, with the same id: the next open renames that too.
    """
    taken = set(disk.list_dir(directory))
    segments = sorted((seq, name) for name in taken if (seq := names.parse(name)) is not None)
    indexes = [names.index(seq) for seq, _ in segments]
    for name in (CHECKPOINT_FILE, UPLOADER_CHECKPOINT_FILE, *indexes):
        _rename(disk, directory, name, log_id, taken)
    disk.sync_dir(directory)
    for _, name in segments:
        _rename(disk, directory, name, log_id, taken)
        disk.sync_dir(directory)
    event(_log, logging.WARNING, "a log was set aside", directory=directory, log_id=log_id)


def set_aside_name(log_id: str, name: str, copy: int = 0) -> str:
    """What the file `name` of a log is called once the log is set aside, in the same directory.

    Of a segment it is a segment's name again, with another stem. `copy` is a number for where the
    name is taken.
    """
    stem = aside_directory(log_id)
    return f"{stem}-{copy}-{name}" if copy else f"{stem}-{name}"


def _rename(disk: Disk, directory: Path, name: str, log_id: str, taken: set[str]) -> None:
    if name in taken:
        names = (set_aside_name(log_id, name, copy) for copy in itertools.count())
        target = next(each for each in names if each not in taken)
        disk.replace(directory / name, directory / target)
        taken.add(target)
