"""The lock on a topic's directory, and the synced position published to other processes.

Whoever owns the topic holds the lock and overwrites the record in `wal.synced` after every
group commit. A process that only reads needs no lock.
"""

from __future__ import annotations

import os
from pathlib import Path

from forebay.errors import LogLocked
from forebay.files.disk import (
    AppendFile,
    Disk,
    append_all,
    read_file,
    write_all_at,
)
from forebay.format.checkpoint import (
    RECORD_BYTES,
    Published,
    decode_published,
    encode_published,
)
from forebay.format.names import PUBLISHED_FILE


def read_published(disk: Disk, directory: Path) -> Published | None:
    """What the owner last published, or None where there is nothing whole to read."""
    try:
        return decode_published(read_file(disk, directory / PUBLISHED_FILE, bytes_max=4096))
    except (FileNotFoundError, ValueError):
        return None


class Publisher:
    """Holds the lock from construction to `close`."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._file = self._claim(disk, directory)
        self._pid = os.getpid()

    @staticmethod
    def _claim(disk: Disk, directory: Path) -> AppendFile:
        try:
            return disk.open_locked(directory / PUBLISHED_FILE)
        except BlockingIOError as error:
            raise LogLocked(_who_holds(directory, read_published(disk, directory))) from error

    def publish(self, *, seq: int, position: int, next_offset: int, start_offset: int) -> None:
        data = encode_published(Published(seq, position, next_offset, start_offset, self._pid))
        if self._file.size() < RECORD_BYTES:
            self._file.truncate(0)
            append_all(self._file, data)
        else:
            write_all_at(self._file, data, 0)

    def withdraw(self) -> None:
        """Publishes nothing, until the next `publish`."""
        self._file.truncate(0)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _who_holds(directory: Path, holder: Published | None) -> str:
    if holder is not None and holder.pid == os.getpid():
        return (
            f"{directory} is in use by process {holder.pid}, which is this one: "
            "use the store that is open, or close it first"
        )
    who = "another process" if holder is None else f"process {holder.pid}"
    return (
        f"{directory} is in use by {who}: a topic has one owner at a time; close it there, "
        "or read it from here with `forebay consume` or forebay.wal.view.LogView"
    )
