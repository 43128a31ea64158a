"""`LocalDisk`: the disk of this machine, with about one system call for each method.

Files keep track of their end instead of using `O_APPEND`, because on Linux a `pwrite` with
`O_APPEND` appends whatever position it is given. Two handles that append to one file therefore
overwrite each other; `open_locked` keeps a directory to one writer. Its lock is an `flock` on the
directory. It belongs to the open handle, not to the process, so a second handle of the same process
conflicts too.

Files and directories are private to their user (0600 and 0700), whatever the umask is, because they
hold messages. `open_private` and `make_private_dirs` are for those that other modules create.

Beware: a handle must not be closed while another thread is inside one of its calls, because the
descriptor's number may be reused for another file meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from forebay.format.layout import Buffer

_CLOSED = -1  # reads and writes fail with EBADF; os.fdatasync raises ValueError
_FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_PARTS_MAX = 1024  # IOV_MAX


def open_private(path: Path | str, flags: int) -> int:
    """Opens a file; one that it creates is private to its user, whatever the umask is.

    An existing file keeps its mode.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
    if os.fstat(fd).st_mode & _FILE_MODE != _FILE_MODE:  # the umask took the user's own rights
        os.fchmod(fd, _FILE_MODE)
    return fd


def make_private_dirs(path: Path) -> None:
    """Creates a directory and its missing parents, private to their user, whatever the umask is.

    Existing directories keep their modes. Raises FileExistsError if `path` is a file.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_private_dirs(path.parent)
    try:
        path.mkdir(_FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        if path.stat().st_mode & _FOLDER_MODE != _FOLDER_MODE:
            path.chmod(_FOLDER_MODE)  # the umask took the user's own rights


class LocalAppendFile:
    __slots__ = ("_device", "_end", "_fd", "_inode", "_path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = os.fspath(path)
        opened = os.fstat(fd)
        self._end = opened.st_size
        self._device, self._inode = opened.st_dev, opened.st_ino

    def append(self, data: Buffer) -> int:
        taken = os.pwrite(self._fd, data, self._end)
        self._end += taken
        return taken

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        taken = os.pwritev(self._fd, parts[:_PARTS_MAX], self._end)
        self._end += taken
        return taken

    def write_at(self, data: Buffer, position: int) -> int:
        if position > self._end:
            raise OSError(errno.EINVAL, f"write at {position} past the end at {self._end}")
        taken = os.pwrite(self._fd, data, position)
        self._end = max(self._end, position + taken)
        return taken

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._end = size

    def size(self) -> int:
        return self._end

    def sync(self) -> None:
        if self._fd == _CLOSED:
            raise OSError(errno.EBADF, "sync of a closed file")
        os.fdatasync(self._fd)

    def in_place(self) -> bool:
        # The number of an inode is not used again while the file is open.
        return _leads_to(self._path, self._device, self._inode)

    def close(self) -> None:
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


class LocalLockedFile(LocalAppendFile):
    """A file with a lock on its directory, released when the process that opened it closes it.

    A forked child shares the lock and must not release it.
    """

    __slots__ = ("_directory", "_lock_fd", "_locked", "_pid")

    def __init__(self, fd: int, lock_fd: int, path: Path) -> None:
        super().__init__(fd, path)
        self._directory = os.fspath(path.parent)
        self._lock_fd = lock_fd
        self._locked = os.fstat(lock_fd)
        self._pid = os.getpid()

    def in_place(self) -> bool:
        locked = self._locked
        return _leads_to(self._directory, locked.st_dev, locked.st_ino)

    def close(self) -> None:
        lock_fd, self._lock_fd = self._lock_fd, _CLOSED
        try:
            if lock_fd != _CLOSED:
                if os.getpid() == self._pid:
                    fcntl.flock(lock_fd, fcntl.LOCK_UN)
                os.close(lock_fd)
        finally:
            super().close()


def _leads_to(path: str, device: int, inode: int) -> bool:
    try:
        found = os.stat(path)  # noqa: PTH116  # a Path takes twice as long, and this is the hot path
    except (FileNotFoundError, NotADirectoryError):
        return False
    return found.st_ino == inode and found.st_dev == device


class LocalReadFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_into(self, buffer: memoryview, position: int) -> int:
        filled = os.preadv(self._fd, (buffer,), position)
        while 0 < filled < len(buffer):
            taken = os.preadv(self._fd, (buffer[filled:],), position + filled)
            if taken == 0:
                break
            filled += taken
        return filled

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


class LocalDisk:
    __slots__ = ()

    def make_dirs(self, path: Path) -> None:
        if not path.is_dir():
            self.make_dirs(path.parent)
            make_private_dirs(path)
            self.sync_dir(path.parent)
        elif not path.is_mount():
            self._sync_existing_name(path)

    def _sync_existing_name(self, path: Path) -> None:
        """Syncs a name that a process may have created and not synced before it was killed."""
        try:
            self.sync_dir(path.parent)
        except PermissionError:
            return  # a process with these rights cannot have created the name

    def list_dir(self, path: Path) -> list[str]:
        return sorted(entry.name for entry in path.iterdir())

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def modified(self, path: Path) -> float:
        return path.stat().st_mtime

    def create(self, path: Path) -> LocalAppendFile:
        return LocalAppendFile(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), path)

    def open_append(self, path: Path) -> LocalAppendFile:
        return LocalAppendFile(os.open(path, os.O_WRONLY | os.O_CLOEXEC), path)

    def open_read(self, path: Path) -> LocalReadFile:
        # O_NONBLOCK matters only for pipes: opening one would wait for a writer.
        return LocalReadFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))

    def replace(self, source: Path, target: Path) -> None:
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "rename across directories", str(source), None, str(target))
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_dir(self, path: Path) -> None:
        path.rmdir()

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open_locked(self, path: Path) -> LocalLockedFile:
        # The directory is locked, not the file. The file could be removed or replaced while it is
        # locked, and a process that locked the new file would be a second owner.
        lock_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fd = _CLOSED
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fd = open_private(path, os.O_WRONLY | os.O_CREAT)
            return LocalLockedFile(fd, lock_fd, path)
        except BaseException:
            os.close(lock_fd)
            if fd != _CLOSED:
                os.close(fd)
            raise
