"""`Disk`: the interface between the log and the local disk.

Errors are `OSError` with an errno; a missing file is `FileNotFoundError`. Writes may be short, like
`write(2)`, so use `append_all`. Relative paths are relative to the working directory
of the process.

Beware: only two calls make anything durable. `AppendFile.sync` does so for the bytes of one file
(`fdatasync`), and `Disk.sync_dir` for the names in one directory: created, renamed or removed.
Anything else may be lost in a power failure, and `forebay.testing.CrashDisk` loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forebay.format.layout import Buffer


class AppendFile(Protocol):
    """An open file to append to. Not thread-safe: a file has one writer."""

    def append(self, data: Buffer) -> int:
        """Writes some or all of `data` at the end of the file; returns how many bytes."""

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        """`append` for several buffers, in one system call if possible."""

    def write_at(self, data: Buffer, position: int) -> int:
        """Writes some or all of `data` at `position`; returns how many bytes.

        `position` must not be beyond the end of the file.
        """

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def sync(self) -> None:
        """Returns once all bytes written so far are on the device, or raises.

        After an error a second call may succeed although bytes were lost, because the kernel may
        have marked the pages as clean. Write the bytes again before you sync again.
        """

    def in_place(self) -> bool:
        """Whether the path with which the file was opened still leads to this file.

        False once the file or a directory above it was removed, moved or replaced. Writes and
        syncs succeed all the same, and nobody finds the bytes afterwards. For a file of
        `open_locked` it says this of the locked directory instead.
        """

    def close(self) -> None:
        """Closes the file without syncing it. Idempotent."""


class ReadFile(Protocol):
    """An open file to read from, which may be appended to meanwhile."""

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Fills `buffer` from `position`; returns how many bytes it read.

        Fewer bytes than fit into the buffer mean that the file ends there.
        """

    def size(self) -> int: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def make_dirs(self, path: Path) -> None:
        """Creates `path` and its missing parents, and makes their names durable."""

    def list_dir(self, path: Path) -> list[str]:
        """The names in the directory, sorted; FileNotFoundError if there is no directory."""

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int: ...

    def modified(self, path: Path) -> float:
        """When the file was last written, in seconds since 1970-01-01 UTC."""

    def create(self, path: Path) -> AppendFile:
        """Creates an empty file; FileExistsError if `path` exists. `sync_dir` makes it durable."""

    def open_append(self, path: Path) -> AppendFile:
        """Opens an existing file to append to."""

    def open_read(self, path: Path) -> ReadFile: ...

    def replace(self, source: Path, target: Path) -> None:
        """Renames a file atomically, replacing `target`; both must be in one directory."""

    def unlink(self, path: Path) -> None: ...

    def remove_dir(self, path: Path) -> None:
        """Removes an empty directory; OSError if it is not empty. `sync_dir` makes it durable."""

    def sync_dir(self, path: Path) -> None:
        """Returns once the names in the directory are on the device, or raises."""

    def open_locked(self, path: Path) -> AppendFile:
        """Locks the directory of `path` and opens the file, which is created if missing.

        Raises BlockingIOError if the directory is locked, by this process or another. The lock is
        released when the file is closed or the process ends.
        """


def append_all(file: AppendFile, data: Buffer) -> None:
    """Appends all of `data`, in as many writes as it takes."""
    view = memoryview(data)
    while view:
        view = view[file.append(view) :]


def append_all_parts(file: AppendFile, parts: Sequence[Buffer]) -> None:
    """Appends all of every part, in as many writes as it takes."""
    taken = file.append_parts(parts)
    if taken == sum(map(len, parts)):
        return
    rest = _after([memoryview(part) for part in parts], taken)
    while rest:
        rest = _after(rest, file.append_parts(rest))


def _after(parts: list[memoryview], taken: int) -> list[memoryview]:
    """The parts without their first `taken` bytes."""
    done = 0
    while done < len(parts) and taken >= len(parts[done]):
        taken -= len(parts[done])
        done += 1
    rest = parts[done:]
    if taken:
        rest[0] = rest[0][taken:]
    return rest


def write_all_at(file: AppendFile, data: Buffer, position: int) -> None:
    """Writes all of `data` at `position`, in as many writes as it takes."""
    view = memoryview(data)
    while view:
        taken = file.write_at(view, position)
        position += taken
        view = view[taken:]


def read_range(file: ReadFile, start: int, end: int) -> memoryview:
    """The bytes `start..end`; fewer if the file ends before `end`."""
    buffer = memoryview(bytearray(max(end - start, 0)))
    return buffer[: file.read_into(buffer, start)]


def read_file(disk: Disk, path: Path, *, bytes_max: int) -> bytes:
    """Reads a whole small file; raises ValueError if it is larger than `bytes_max`."""
    file = disk.open_read(path)
    try:
        size = file.size()
        if size > bytes_max:
            raise ValueError(f"{path}: {size} bytes, expected at most {bytes_max}")
        buffer = bytearray(size)
        taken = file.read_into(memoryview(buffer), 0)
        return bytes(buffer[:taken])
    finally:
        file.close()


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replaces the contents of `path` with `data`, atomically and durably.

    After a crash at any point `path` is the old or the new file: `data` is written to a temporary
    file and synced, the file is renamed, and the directory is synced.
    """
    temporary = path.with_name(path.name + ".tmp")
    if disk.exists(temporary):
        disk.unlink(temporary)
    file = disk.create(temporary)
    try:
        append_all(file, data)
        file.sync()
    finally:
        file.close()
    disk.replace(temporary, path)
    disk.sync_dir(path.parent)
