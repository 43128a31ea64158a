"""Small files beside the segments that record how far a log has got.

`CheckpointStore` replaces the checkpoints of the log and of its uploader atomically, and keeps
them in memory. `Publisher` overwrites the synced position in `wal.synced` after every group commit,
for processes that only read. It also holds the lock on the directory; readers do not need the lock.

Beware: a checkpoint that is missing and one that is unusable are both None. An unusable one is
logged and renamed. Neither is an error, because recovery rebuilds it from the segments.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final, TypeVar

from forebay.errors import CheckpointError, DiskError, LogLocked
from forebay.files.disk import (
    AppendFile,
    Disk,
    append_all,
    read_file,
    replace_file,
    write_all_at,
)
from forebay.format.checkpoint import (
    RECORD_BYTES,
    Published,
    UploaderCheckpoint,
    WalCheckpoint,
    decode_checkpoint,
    decode_published,
    encode_checkpoint,
    encode_published,
)
from forebay.format.names import CHECKPOINT_FILE, PUBLISHED_FILE, UPLOADER_CHECKPOINT_FILE
from forebay.limits import CHECKPOINT_BYTES_MAX
from forebay.logs import event

_log: Final = logging.getLogger("forebay.wal")
_Kind = TypeVar("_Kind", WalCheckpoint, UploaderCheckpoint)


class CheckpointStore:
    """The two checkpoints of one topic. Update each from one thread at a time.

    `publisher` holds the lock on the directory. Nothing is written if another directory has taken
    its place: a checkpoint of this log would damage the log there.
    """

    def __init__(self, disk: Disk, directory: Path, publisher: Publisher) -> None:
        self._disk = disk
        self._publisher = publisher
        self._wal_path = directory / CHECKPOINT_FILE
        self._uploader_path = directory / UPLOADER_CHECKPOINT_FILE
        self._wal = self._load(self._wal_path, WalCheckpoint)
        self._uploader = self._load(self._uploader_path, UploaderCheckpoint)

    def get_wal(self) -> WalCheckpoint | None:
        return self._wal

    def get_uploader(self) -> UploaderCheckpoint | None:
        return self._uploader

    def update_wal(self, checkpoint: WalCheckpoint) -> None:
        """Returns once the checkpoint would survive a power loss."""
        self._publisher.require_in_place()
        replace_file(self._disk, self._wal_path, encode_checkpoint(checkpoint))
        self._wal = checkpoint

    def update_uploader(self, checkpoint: UploaderCheckpoint) -> None:
        """Returns once the checkpoint would survive a power loss."""
        self._publisher.require_in_place()
        replace_file(self._disk, self._uploader_path, encode_checkpoint(checkpoint))
        self._uploader = checkpoint

    def _load(self, path: Path, kind: type[_Kind]) -> _Kind | None:
        if not self._disk.exists(path):
            return None
        try:
            data = read_file(self._disk, path, bytes_max=CHECKPOINT_BYTES_MAX)
            return decode_checkpoint(data, kind)
        except (CheckpointError, ValueError) as error:
            kept = path.with_name(path.name + ".unusable")
            text = "an unusable checkpoint was renamed; it is rebuilt from the segments"
            event(_log, logging.WARNING, text, file=path, kept=kept.name, error=error)
            self._disk.replace(path, kept)
            return None


def read_published(disk: Disk, directory: Path) -> Published | None:
    """The position that the owner last published; None if it is missing or damaged.

    It is also None if the owner is overwriting it just now: read it again.
    """
    try:
        return decode_published(read_file(disk, directory / PUBLISHED_FILE, bytes_max=4096))
    except (FileNotFoundError, ValueError):
        return None


class Publisher:
    """Publishes the synced position, and holds the lock on the directory until `close`.

    Raises LogLocked if another process, or another handle of this one, has the lock.
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._pid = os.getpid()
        self._directory = directory
        try:
            self._file: AppendFile = disk.open_locked(directory / PUBLISHED_FILE)
        except BlockingIOError as error:
            raise LogLocked(_who_holds(directory, read_published(disk, directory))) from error

    def publish(self, *, seq: int, position: int, next_offset: int, start_offset: int) -> None:
        """Overwrites the published position, without syncing it."""
        data = encode_published(Published(seq, position, next_offset, start_offset, self._pid))
        if self._file.size() < RECORD_BYTES:
            self._file.truncate(0)
            append_all(self._file, data)
        else:
            write_all_at(self._file, data, 0)

    def withdraw(self) -> None:
        """Removes the published position, durably, until the next `publish`."""
        self._file.truncate(0)
        self._file.sync()

    def require_in_place(self) -> None:
        """Raises DiskError if the directory is no longer where it was locked."""
        if not self._file.in_place():
            raise out_of_place(str(self._directory))

    def close(self) -> None:
        self._file.close()


def out_of_place(what: str) -> DiskError:
    """The error for a file or a directory that was taken away from under the open log."""
    return DiskError(
        errno.ESTALE,
        f"{what} was removed, moved or replaced while the log was open, so nothing more is "
        "written; put back what was moved, then open the log again; messages that only deleted "
        "files held are lost, and a restart of the process without these files records the loss",
    )


def _who_holds(directory: Path, holder: Published | None) -> str:
    if holder is not None and holder.pid == os.getpid():
        return (
            f"{directory} is in use by process {holder.pid}, which is this process: "
            "use the store that is open, or close it first"
        )
    who = "another process" if holder is None else f"process {holder.pid}"
    return (
        f"{directory} is in use by {who}: a topic has one owner at a time; close it there, "
        "or read it from here with `forebay consume` or forebay.wal.view.LogView"
    )
