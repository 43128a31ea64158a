"""`Disk`: what the log needs of a disk, and nothing else.

Only two calls make anything last: `AppendFile.sync` (the bytes of that file, as `fdatasync`) and
`Disk.sync_dir` (the names in that directory: created, renamed, removed). Everything else may be
forgotten by a power loss, and `forebay.testing.CrashDisk` forgets it.

Errors are `OSError` with an errno; a missing file is `FileNotFoundError`. Writes may be short, as
`write(2)` may: callers loop. Paths are absolute or relative to the process, as for `os`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forebay.format.layout import Buffer


class AppendFile(Protocol):
    """One open file that is written at its end. Not thread-safe: it has one writer."""

    def append(self, data: Buffer) -> int:
        """Writes some of `data` at the end of the file; returns how many bytes it took."""

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        """`append` of all parts, one after the other, in one call where that can be."""

    def write_at(self, data: Buffer, position: int) -> int:
        """Overwrites from `position`, which is at most the file's size; returns the bytes taken."""

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def sync(self) -> None:
        """Returns when all bytes written so far are on the device, or raises.

        After it raised, a second call may lie: the unwritten pages may count as clean by then.
        Only bytes that are written again are sure to be written.
        """

    def close(self) -> None:
        """Idempotent; says nothing about durability."""


class ReadFile(Protocol):
    """One open file for reading at positions; safe to use while another handle appends."""

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Fills `buffer` from `position` as far as the file goes; returns the bytes read.

        Fewer bytes than the buffer holds means that the file ended there.
        """

    def size(self) -> int: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def make_dirs(self, path: Path) -> None:
        """Creates `path` and its parents where missing, their names synced."""

    def list_dir(self, path: Path) -> list[str]:
        """Names in the directory, sorted; FileNotFoundError where there is none."""

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int: ...

    def modified(self, path: Path) -> float:
        """Seconds since 1970 of the last write."""

    def create(self, path: Path) -> AppendFile:
        """A new empty file; FileExistsError if there is one. Its name lasts after `sync_dir`."""

    def open_append(self, path: Path) -> AppendFile:
        """An existing file, to go on at its end."""

    def open_read(self, path: Path) -> ReadFile: ...

    def replace(self, source: Path, target: Path) -> None:
        """Atomic rename over whatever `target` is, within one directory."""

    def unlink(self, path: Path) -> None: ...

    def sync_dir(self, path: Path) -> None:
        """Returns when the names in the directory are on the device, or raises."""

    def open_locked(self, path: Path) -> AppendFile:
        """The file (created where missing), with its directory claimed until it is closed.

        BlockingIOError when somebody holds the claim, in this process or another. It ends with
        the process.
        """


def append_all(file: AppendFile, data: Buffer) -> None:
    """Appends every byte, however short the single writes are."""
    view = memoryview(data)
    while view:
        view = view[file.append(view) :]


def append_all_parts(file: AppendFile, parts: Sequence[Buffer]) -> None:
    """Appends every byte of every part, however short the single writes are."""
    taken = file.append_parts(parts)
    if taken == sum(map(len, parts)):
        return
    rest = _after([memoryview(part) for part in parts], taken)
    while rest:
        rest = _after(rest, file.append_parts(rest))


def _after(parts: list[memoryview], taken: int) -> list[memoryview]:
    """What is left of the parts once so many bytes of them are taken."""
    done = 0
    while done < len(parts) and taken >= len(parts[done]):
        taken -= len(parts[done])
        done += 1
    rest = parts[done:]
    if taken:
        rest[0] = rest[0][taken:]
    return rest


def write_all_at(file: AppendFile, data: Buffer, position: int) -> None:
    """Overwrites every byte, however short the single writes are."""
    view = memoryview(data)
    while view:
        taken = file.write_at(view, position)
        position += taken
        view = view[taken:]


def read_range(file: ReadFile, start: int, end: int) -> memoryview:
    """The bytes `start..end`; fewer if the file ends before."""
    buffer = memoryview(bytearray(max(end - start, 0)))
    return buffer[: file.read_into(buffer, start)]


def read_file(disk: Disk, path: Path, *, bytes_max: int) -> bytes:
    """A whole small file; ValueError when it is larger than `bytes_max`."""
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
    """Makes `path` hold exactly `data`: after a crash at any point it is the old or the new file.

    Temporary file, sync, rename, sync of the directory.
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
