"""`DataDirectory`: the data directory of one server: its lock, its id, and the server's address.

The lock is a kernel lock on an open file, so it ends with the process, however that ends. Other
processes find the server by the address file (`forebay.client`); the file does not prove that the
server runs. The first server of a directory creates the id, which never changes. A client compares
it to notice when a server of another store has taken over the address.
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
from forebay.files.local import make_private_dirs, open_private
from forebay.format.names import SERVER_LOCK_FILE, STORE_ID_FILE

_ID_BYTES_MAX: Final = 64


class DataDirectory:
    """A data directory, created if needed and locked until `close`.

    The constructor raises LogLocked if another server has the lock, DiskError if the directory
    cannot be used, and FormatError if the id file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note: ServerInfo | None = None
        try:
            make_private_dirs(path)
            self._fd = open_private(path / SERVER_LOCK_FILE, os.O_RDWR | os.O_CREAT)
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
        """The process id that the lock file names."""
        return os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()

    def announce(self, note: ServerInfo) -> None:
        """Writes the address file, in place of one that an earlier server left."""
        path = server_file(self.path)
        draft = path.with_name(path.name + ".tmp")
        try:
            draft.unlink(missing_ok=True)
            # Only the owner may read it: reading it proves access to the directory.
            with open(draft, "xb", opener=open_private) as file:
                file.write(note.encode())
            draft.replace(path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._note = note

    def close(self) -> None:
        """Removes the address file if it is still this server's, and unlocks. Idempotent."""
        note, self._note = self._note, None
        if note is not None and read_server_info(self.path) == note:
            server_file(self.path).unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def store_id(path: Path) -> str:
    """Returns the id of the store in the directory; creates and syncs it if there is none.

    Only one process may call it at a time. FormatError if the file is not an id.
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
            f"{file} is not 32 hexadecimal digits: put back the file of this store, or remove it. "
            "The store then gets a new id, and running clients take it for another store"
        )
    return found


def _create_id(path: Path, file: Path) -> str:
    new = secrets.token_hex(16)
    draft = file.with_name(file.name + ".tmp")
    try:
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=open_private) as written:
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
