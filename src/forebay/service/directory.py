"""A data directory as one server has it: locked, and with a note that says where the server is.

The lock is the kernel's, on an open file, so that it ends with the process however that ends. The
note (`forebay.remote`) is for others to find the server with, and proves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from forebay.errors import DiskError, LogLocked, remedy
from forebay.format.names import SERVER_LOCK_FILE
from forebay.remote import ServerNote, read_note, server_file

_MODE: Final = 0o600
"""The note is for its owner: whoever reads it is taken for somebody who sees the directory."""


class DataDirectory:
    """Taken when it is made: LogLocked if another server has it, DiskError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note: ServerNote | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                path / SERVER_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE
            )
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            holder = self._holder()
            os.close(self._fd)
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                raise LogLocked(_taken(path, holder)) from error
            raise _unusable(path, error) from error

    def _holder(self) -> str:
        """The process that has the lock, as it wrote it there."""
        return os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()

    def announce(self, note: ServerNote) -> None:
        """Writes the note; what was there is of a server that is gone."""
        path = server_file(self.path)
        draft = path.with_name(path.name + ".tmp")
        try:
            draft.unlink(missing_ok=True)
            with open(  # with an opener, so that it is nobody else's from the start
                draft, "xb", opener=lambda name, flags: os.open(name, flags, _MODE)
            ) as file:
                file.write(note.encode())
            draft.replace(path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._note = note

    def close(self) -> None:
        """Removes the note, if it is still ours, and ends the lock. Idempotent."""
        note, self._note = self._note, None
        if note is not None and read_note(self.path) == note:
            server_file(self.path).unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _taken(path: Path, holder: str) -> str:
    note = read_note(path)
    process = f"process {holder}" if holder else "another process"
    where = f" at {note.url}" if note is not None and str(note.pid) == holder else ""
    return (
        f"{path} is served by {process}{where}: use that server, stop it, or choose another "
        "directory with --data"
    )


def _unusable(path: Path, error: OSError) -> DiskError:
    text = (
        f"{path} cannot be used: {error.strerror}; {remedy(error)}, or choose another with --data"
    )
    return DiskError(error.errno, text)
