"""Which log a directory holds, and whether this process may append to it.

A log has an id, created with its directory. The catalog records the id of the log that has a
topic's newest messages. A directory can hold another log, because another machine continued without
it, or because it is an older copy that ends before the objects do. Such a log is set aside: its
files are renamed so that no log uses them, and nothing is deleted.

The id is stored twice, the second time with a checksum. If the two differ, one is damaged. The log
is then not opened, because it might be set aside by mistake; `forebay repair` finds the right one.

Each opening draws a nonce. It is written beside the log before it is put into the catalog, and
confirmed afterwards. So the log has the catalog's nonce after a crash at any point, and an older
copy of the log does not (rule R11).

Beware: a copy that is made while the log is open has the same nonce. If it is put back after a
crash, it can be told from the log only by what the catalog and the object store have seen since.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from forebay.errors import CorruptLog
from forebay.files.disk import Disk, read_file, replace_file
from forebay.format.names import (
    CHECKPOINT_FILE,
    LOG_ID_COPY_FILE,
    LOG_ID_FILE,
    NONCE_FILE,
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
    nonces: frozenset[str] = frozenset()
    """The nonces of its last opening, and of one that was intended and may have happened."""

    @property
    def empty(self) -> bool:
        return self.start_offset == self.next_offset


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The log to append to: the local one, or a new one that begins at `next_offset`."""

    log_id: str
    next_offset: int


class WriteGuard(Protocol):
    """The right to write, which the log checks before and after every commit.

    Both methods raise TopicFenced or ServiceError if the process may no longer write. The log then
    stops without acknowledging the commit.
    """

    def admit(self, end_offset: int) -> None:
        """Called before frames up to `end_offset` are written."""

    def confirm(self) -> None:
        """Called after frames were synced and before they are acknowledged."""


class Claim(Protocol):
    """How a log acquires the right to write; a log without a catalog is `Unclaimed`."""

    def acquire(self, local: LocalLog) -> LogIdentity:
        """Called once the directory is locked and recovered.

        Returns the log to append to. Raises TopicOwned if another process owns the topic.
        """

    @property
    def ownership(self) -> WriteGuard:
        """The right that `acquire` got."""


class Unclaimed:
    """For a log without a catalog: always allows writing."""

    def acquire(self, local: LocalLog) -> LogIdentity:
        return LogIdentity(local.log_id, local.next_offset)

    @property
    def ownership(self) -> WriteGuard:
        return self

    def admit(self, end_offset: int) -> None: ...

    def confirm(self) -> None: ...


def new_log_id() -> str:
    return secrets.token_hex(16)


def new_nonce() -> str:
    return secrets.token_hex(16)


def read_nonces(disk: Disk, directory: Path) -> frozenset[str]:
    """The nonces in a log's directory: of the last opening, and of the one that was intended.

    A missing or damaged file has none: the log is then not known to be the newest copy.
    """
    try:
        data = read_file(disk, directory / NONCE_FILE, bytes_max=512)
    except (FileNotFoundError, ValueError):
        return frozenset()
    found = data.decode("ascii", "replace").split()
    nonces = [each for each in found[:-1] if _ID.fullmatch(each)]
    return frozenset(nonces) if data == _encode_nonces(nonces) else frozenset()


def write_nonces(disk: Disk, directory: Path, *nonces: str) -> None:
    """Writes the nonces durably: the current one, then the intended one if there is one."""
    replace_file(disk, directory / NONCE_FILE, _encode_nonces(nonces))


def _encode_nonces(nonces: Sequence[str]) -> bytes:
    text = " ".join(nonces)
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


def read_log_id(disk: Disk, directory: Path) -> str | None:
    """The id of the log in a directory; None if it has none yet. Raises CorruptLog if damaged."""
    path = directory / LOG_ID_FILE
    if not disk.exists(path):
        return None
    try:
        text = read_file(disk, path, bytes_max=64).decode("ascii").strip()
    except ValueError:
        text = ""
    if not _ID.fullmatch(text):
        raise CorruptLog(
            f"{path} does not hold the id of a log; restore the file, or run `forebay repair` (do "
            "not delete it: a log without an id is taken for another one and set aside)"
        )
    return text


def read_id_copy(disk: Disk, directory: Path) -> str | None:
    """The second copy of the id; None if it is missing or damaged."""
    try:
        data = read_file(disk, directory / LOG_ID_COPY_FILE, bytes_max=64)
    except (FileNotFoundError, ValueError):
        return None
    text = data[:32].decode("ascii", "replace")
    return text if _ID.fullmatch(text) and data == _encode_copy(text) else None


def _encode_copy(log_id: str) -> bytes:
    return f"{log_id} {zlib.crc32(log_id.encode()):08x}\n".encode()


def write_log_id(disk: Disk, directory: Path, log_id: str) -> None:
    """Writes both files durably, the copy last.

    A copy with another id is removed first, so that after a crash at any point the two agree or the
    copy is missing.
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
        what = "is missing, unlike" if log_id is None else "differs from"
        raise CorruptLog(
            f"{directory / LOG_ID_FILE} {what} its copy {LOG_ID_COPY_FILE}; run `forebay repair` "
            "(do not delete either: a log without an id is taken for another one and set aside)"
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
    """Acquires the claim and returns the log to append to.

    If that is not the recovered log, sets the recovered one aside and returns an empty log.
    """
    log_id = _read_agreed(disk, directory)
    if log_id is None:
        log_id = new_log_id()
        write_log_id(disk, directory, log_id)
    nonces = read_nonces(disk, directory)
    local = LocalLog(log_id, recovered.start_offset, recovered.next_offset, nonces)
    identity = claim.acquire(local)
    if identity.log_id == log_id:
        _write_copy(disk, directory, log_id)
        return recovered
    if recovered.segments.start_offset is not None:
        set_aside(disk, directory, names, publisher, log_id)
    write_log_id(disk, directory, identity.log_id)
    return Recovered(SegmentSet(), identity.next_offset, identity.next_offset)


def set_aside(
    disk: Disk, directory: Path, names: SegmentNames, publisher: Publisher, log_id: str
) -> None:
    """Renames the files of the log: checkpoints and indexes first, then segments, oldest first.

    The directory is synced after each segment. After a crash in between, the remaining files are a
    log with the same id that begins later, and the next open sets that aside too.
    """
    publisher.withdraw()
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
    """The new name, in the same directory, of the file `name` of a log that is set aside.

    A segment's new name still parses as a segment's name, with another stem. `copy` is a number to
    try if the name is taken.
    """
    stem = aside_directory(log_id)
    return f"{stem}-{copy}-{name}" if copy else f"{stem}-{name}"


def _rename(disk: Disk, directory: Path, name: str, log_id: str, taken: set[str]) -> None:
    if name in taken:
        names = (set_aside_name(log_id, name, copy) for copy in itertools.count())
        target = next(each for each in names if each not in taken)
        disk.replace(directory / name, directory / target)
        taken.add(target)
