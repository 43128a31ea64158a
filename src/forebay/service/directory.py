"""`DataDirectory`: the data directory of one server: locked, with an id, and the server's address.

The lock is the kernel's, on an open file, so that it ends with the process however that ends. The
note with the address (`forebay.client`) is how others find the server, and proves nothing. The id
is created by the first server of the directory, and stays: by it a client tells this store from
another one whose server took over the address.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path
from typing import Final

from forebay.client.address import ServerInfo, is_id, read_server_info, server_file
from forebay.errors import DiskError, FormatError, LogLocked, remedy
from forebay.format.names import SERVER_LOCK_FILE, STORE_ID_FILE

_MODE: Final = 0o600
"""The note is for its owner only: reading it proves access to the directory."""
_ID_MODE: Final = 0o644
"""The id is no secret: `/healthz` returns it to everybody."""
_ID_BYTES_MAX: Final = 64


class DataDirectory:
    """Locked when it is made.

    LogLocked if another server has it, DiskError if it cannot be used, FormatError if its id is
    damaged: it is unknown then which store it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note: ServerInfo | None = None
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
                raise LogLocked(_locked_by(path, holder)) from error
            raise _unusable(path, error) from error
        try:
            self.store_id = store_id(path)
        except BaseException:
            os.close(self._fd)
            raise

    def _holder(self) -> str:
        """The id of the process that has the lock, as written in the lock file."""
        return os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()

    def announce(self, note: ServerInfo) -> None:
        """Writes the note; one that is there belongs to a server that is gone."""
        path = server_file(self.path)
        draft = path.with_name(path.name + ".tmp")
        try:
            draft.unlink(missing_ok=True)
            with open(  # with an opener, so that the mode is right from the start
                draft, "xb", opener=lambda name, flags: os.open(name, flags, _MODE)
            ) as file:
                file.write(note.encode())
            draft.replace(path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._note = note

    def close(self) -> None:
        """Removes the note, if it is still ours, and releases the lock. Idempotent."""
        note, self._note = self._note, None
        if note is not None and read_server_info(self.path) == note:
            server_file(self.path).unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def store_id(path: Path) -> str:
    """The id of the store in the directory, created if there is none.

    For one caller at a time. The id is synced before it is returned: a client that knows it finds
    it again after a crash.
    """
    file = path / STORE_ID_FILE
    try:
        found = file.read_bytes()[:_ID_BYTES_MAX].decode("ascii", "replace").strip()
    except FileNotFoundError:
        return _create_id(path, file)
    except OSError as error:
        raise _unusable(path, error) from error
    if not is_id(found):
        raise FormatError(
            f"{file} is not 32 hexadecimal digits: put back the file of this store, or remove it, "
            "which gives the store a new id; clients that run now then take it for another one"
        )
    return found


def _create_id(path: Path, file: Path) -> str:
    new = secrets.token_hex(16)
    draft = file.with_name(file.name + ".tmp")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as written:
            os.fchmod(written.fileno(), _ID_MODE)
            written.write(new.encode() + b"\n")
            written.flush()
            os.fsync(written.fileno())
        draft.replace(file)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise _unusable(path, error) from error
    return new


def _locked_by(path: Path, holder: str) -> str:
    note = read_server_info(path)
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
