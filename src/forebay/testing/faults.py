"""`FaultDisk`: any disk, with calls that fail as a test plans them.

>>> import errno
>>> from forebay import Catalog, CloudStore, Store, StoreSettings
>>> from forebay.catalog.sqlite import SqliteKv
>>> from forebay.errors import LogStopped
>>> from forebay.objects.memory import MemoryBackend
>>> from forebay.testing import CrashDisk
>>> disk = FaultDisk(CrashDisk())
>>> catalog, objects = Catalog(SqliteKv(None)), CloudStore(MemoryBackend())
>>> store = Store(StoreSettings(data="/data"), disk=disk, catalog=catalog, store=objects)
>>> topic = store.topic("orders")
>>> disk.inject(Fault("sync", errno.EIO, path="wal.log"))
>>> try:
...     topic.append(b"one", durability="synced")
... except LogStopped:
...     print("unknown: read the topic back")
unknown: read the topic back
>>> [message.payload for message in store.topic("orders").read()]
[b'one']
>>> store.close()

A `Fault` says which calls fail, with which errno, after how many that pass, and how often. All
other calls go to the disk inside. A disk can also be full (`space`), or write only a part at a
time (`short_writes`), which no caller may notice.

A fault on "sync" over a `CrashDisk` drops the unsynced pages, as Linux does: the next sync
succeeds, and those bytes are lost at the next crash all the same. A fault on "any" drops nothing.
With `times=None` it is a machine that stops, and with `skip=n` as well it stops after n calls.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from forebay.files.disk import AppendFile, Disk, ReadFile
from forebay.format.layout import Buffer
from forebay.testing.crash import CrashAppendFile, os_error

Operation: TypeAlias = Literal[
    "any",
    "append",
    "create",
    "exists",
    "in_place",
    "list_dir",
    "make_dirs",
    "modified",
    "open_append",
    "open_locked",
    "open_read",
    "read_into",
    "remove_dir",
    "replace",
    "size",
    "sync",
    "sync_dir",
    "truncate",
    "unlink",
    "write_at",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One way for calls to fail.

    `path` is a part of the path's text or a predicate; for "replace" either path may match.
    `skip` matching calls pass first, then `times` of them fail (None: all). With `partial`, each
    failure is of two calls: one that takes at most so many bytes, and the next, which raises.
    """

    operation: Operation
    errno: int
    path: str | Callable[[Path], bool] | None = None
    skip: int = 0
    times: int | None = 1
    partial: int | None = None

    def __post_init__(self) -> None:
        if self.operation not in get_args(Operation):
            raise ValueError(f"no such operation: {self.operation!r}")
        if self.partial is None:
            return
        if self.operation not in ("append", "write_at") or self.partial < 1:
            raise ValueError("partial is for append and write_at, and takes at least one byte")

    def matches(self, operation: Operation, paths: tuple[Path, ...]) -> bool:
        if self.operation not in ("any", operation):
            return False
        if self.path is None:
            return True
        if isinstance(self.path, str):
            return any(self.path in str(path) for path in paths)
        return any(self.path(path) for path in paths)


class _Planned:
    """A fault, and how many of its calls are left."""

    __slots__ = ("_left", "_partly_done", "_skip", "fault")

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._skip = fault.skip
        self._left = fault.times
        self._partly_done = False

    def strikes(self) -> bool:
        """Counts one matching call, and says whether the fault changes it."""
        if self._skip:
            self._skip -= 1
            return False
        return self._left != 0

    def bytes_before_error(self) -> int | None:
        """For a call that was struck: how much it may take, or None when it raises."""
        if self.fault.partial is not None and not self._partly_done:
            self._partly_done = True
            return self.fault.partial
        self._partly_done = False
        if self._left is not None:
            self._left -= 1
        return None


class _Script:
    """What the disk and its files share: the plan, the space left, the random numbers."""

    def __init__(self, short_writes: random.Random | None) -> None:
        self._lock = threading.Lock()
        self._short_writes = short_writes
        self._planned: list[_Planned] = []
        self.fired = 0
        self.space: int | None = None

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._planned.append(_Planned(fault))

    def clear(self) -> None:
        with self._lock:
            self._planned.clear()

    def strike(self, operation: Operation, *paths: Path) -> Fault | None:
        """The fault that fails this call, if any."""
        with self._lock:
            fault, _ = self._strike(operation, paths)
            return fault

    def enter(self, operation: Operation, *paths: Path) -> None:
        fault = self.strike(operation, *paths)
        if fault is not None:
            raise os_error(fault.errno, paths[0])

    def enter_write(self, operation: Operation, path: Path, size: int) -> int:
        """How many of `size` bytes this call may take."""
        with self._lock:
            fault, partial = self._strike(operation, (path,))
            if fault is not None:
                raise os_error(fault.errno, path)
            allowed = size if partial is None else min(size, partial)
            if self._short_writes is not None and allowed:
                allowed = self._short_writes.randint(1, allowed)
            return allowed

    def reserve(self, size: int) -> int:
        """Takes up to `size` bytes of the space left."""
        with self._lock:
            if self.space is None:
                return size
            granted = min(size, self.space)
            self.space -= granted
            return granted

    def give_back(self, size: int) -> None:
        with self._lock:
            if self.space is not None:
                self.space += size

    def _strike(
        self, operation: Operation, paths: tuple[Path, ...]
    ) -> tuple[Fault | None, int | None]:
        for planned in self._planned:
            if planned.fault.matches(operation, paths) and planned.strikes():
                partial = planned.bytes_before_error()
                if partial is not None:
                    return None, partial
                self.fired += 1
                return planned.fault, None
        return None, None


class FaultAppendFile:
    __slots__ = ("_inner", "_path", "_script")

    def __init__(self, inner: AppendFile, path: Path, script: _Script) -> None:
        self._inner = inner
        self._path = path
        self._script = script

    def append(self, data: Buffer) -> int:
        allowed = self._script.enter_write("append", self._path, len(data))
        return self._write(data, allowed, 0, self._inner.append)

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        return self.append(b"".join(parts))

    def write_at(self, data: Buffer, position: int) -> int:
        allowed = self._script.enter_write("write_at", self._path, len(data))
        overwritten = max(0, min(allowed, self._inner.size() - position))
        return self._write(
            data, allowed, overwritten, lambda part: self._inner.write_at(part, position)
        )

    def _write(
        self, data: Buffer, allowed: int, overwritten: int, put: Callable[[Buffer], int]
    ) -> int:
        """Writes `allowed` bytes, of which all but `overwritten` need space."""
        reserved = self._script.reserve(allowed - overwritten)
        if allowed and overwritten + reserved == 0:
            raise os_error(ENOSPC, self._path)
        taken = 0
        try:
            with memoryview(data) as view, view[: overwritten + reserved] as part:
                taken = put(part)
        finally:
            self._script.give_back(reserved - max(0, taken - overwritten))
        return taken

    def truncate(self, size: int) -> None:
        self._script.enter("truncate", self._path)
        size_before = self._inner.size()
        self._inner.truncate(size)
        self._script.give_back(max(0, size_before - size))

    def size(self) -> int:
        return self._inner.size()

    def sync(self) -> None:
        fault = self._script.strike("sync", self._path)
        if fault is None:
            self._inner.sync()
            return
        if fault.operation == "sync" and isinstance(self._inner, CrashAppendFile):
            self._inner.lose_unsynced()
        raise os_error(fault.errno, self._path)

    def in_place(self) -> bool:
        self._script.enter("in_place", self._path)
        return self._inner.in_place()

    def close(self) -> None:
        self._inner.close()


class FaultReadFile:
    __slots__ = ("_inner", "_path", "_script")

    def __init__(self, inner: ReadFile, path: Path, script: _Script) -> None:
        self._inner = inner
        self._path = path
        self._script = script

    def read_into(self, buffer: memoryview, position: int) -> int:
        self._script.enter("read_into", self._path)
        return self._inner.read_into(buffer, position)

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()


class FaultDisk:
    """A `Disk` in front of `inner`. With `short_writes`, each write takes a random part."""

    def __init__(self, inner: Disk, *, short_writes: random.Random | None = None) -> None:
        self.inner = inner
        self._script = _Script(short_writes)

    def inject(self, fault: Fault) -> None:
        """Adds to the plan; of several faults that match a call, the first injected strikes."""
        self._script.add(fault)

    def clear(self) -> None:
        """Forgets the plan. The count of what fired and the space left stay."""
        self._script.clear()

    @property
    def fired(self) -> int:
        """How many calls a fault has made to raise."""
        return self._script.fired

    @property
    def space(self) -> int | None:
        """Bytes left, None for no limit; truncating and unlinking give theirs back."""
        return self._script.space

    @space.setter
    def space(self, size: int | None) -> None:
        self._script.space = size

    def make_dirs(self, path: Path) -> None:
        self._script.enter("make_dirs", path)
        self.inner.make_dirs(path)

    def list_dir(self, path: Path) -> list[str]:
        self._script.enter("list_dir", path)
        return self.inner.list_dir(path)

    def exists(self, path: Path) -> bool:
        self._script.enter("exists", path)
        return self.inner.exists(path)

    def size(self, path: Path) -> int:
        self._script.enter("size", path)
        return self.inner.size(path)

    def modified(self, path: Path) -> float:
        self._script.enter("modified", path)
        return self.inner.modified(path)

    def create(self, path: Path) -> FaultAppendFile:
        self._script.enter("create", path)
        return FaultAppendFile(self.inner.create(path), path, self._script)

    def open_append(self, path: Path) -> FaultAppendFile:
        self._script.enter("open_append", path)
        return FaultAppendFile(self.inner.open_append(path), path, self._script)

    def open_read(self, path: Path) -> FaultReadFile:
        self._script.enter("open_read", path)
        return FaultReadFile(self.inner.open_read(path), path, self._script)

    def replace(self, source: Path, target: Path) -> None:
        self._script.enter("replace", source, target)
        freed = self._file_size(target)
        self.inner.replace(source, target)
        if source != target:
            self._script.give_back(freed)

    def unlink(self, path: Path) -> None:
        self._script.enter("unlink", path)
        freed = self._file_size(path)
        self.inner.unlink(path)
        self._script.give_back(freed)

    def remove_dir(self, path: Path) -> None:
        self._script.enter("remove_dir", path)
        self.inner.remove_dir(path)

    def sync_dir(self, path: Path) -> None:
        self._script.enter("sync_dir", path)
        self.inner.sync_dir(path)

    def open_locked(self, path: Path) -> FaultAppendFile:
        self._script.enter("open_locked", path)
        return FaultAppendFile(self.inner.open_locked(path), path, self._script)

    def _file_size(self, path: Path) -> int:
        if self._script.space is None or not self.inner.exists(path):
            return 0
        return self.inner.size(path)
