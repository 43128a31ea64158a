"""`CrashDisk`: a disk in memory that loses, at a power loss, what was never synced.

>>> from contextlib import suppress
>>> from forebay import Catalog, CloudStore, Store, StoreSettings
>>> from forebay.catalog.sqlite import SqliteKv
>>> from forebay.errors import LogStopped
>>> from forebay.objects.memory import MemoryBackend
>>> disk, catalog, objects = CrashDisk(), Catalog(SqliteKv(None)), CloudStore(MemoryBackend())
>>> def open_store():
...     return Store(StoreSettings(data="/data"), disk=disk, catalog=catalog, store=objects)
>>> store = open_store()
>>> _ = store.topic("orders").append(b"kept", durability="synced")
>>> _ = store.topic("orders").append(b"lost")
>>> disk.crash()
>>> with suppress(LogStopped):
...     store.close()  # writes nothing any more; it gives the topics up in the catalog
>>> with open_store() as store:
...     [message.payload for message in store.topic("orders").read()]
[b'kept']

Bytes and names each have a live state, which reads return, and a durable one. `AppendFile.sync`
makes the bytes of that file durable, `sync_dir` the names of that directory. A file that was synced
in a directory that was not is lost with its name. After `crash` (power loss) and `kill` (kill -9)
the old handles raise EBADF, the locks are free, and the same disk serves the next start. Relative
paths start at the root.

Beware: without a `random.Random`, `crash` leaves exactly the durable state. Real disks also keep a
part of what was not synced, so pass one, and repeat the test with other seeds.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from errno import (
    EBADF,
    EEXIST,
    EINVAL,
    EISDIR,
    ENOENT,
    ENOTDIR,
    ENOTEMPTY,
    EWOULDBLOCK,
    EXDEV,
)
from pathlib import Path
from typing import NamedTuple, TypeAlias

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.format.layout import Buffer


class _Patch(NamedTuple):
    """A range in which the bytes on the device differ from `content`."""

    start: int
    old: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.old)

    def within(self, start: int, end: int) -> list[_Patch]:
        """The part of it inside the range, if any."""
        low, high = max(self.start, start), min(self.end, end)
        if low >= high:
            return []
        return [_Patch(low, self.old[low - self.start : high - self.start])]


class _Cut(NamedTuple):
    """A truncation to `size`, the bytes it cut off, and what the device's size was before."""

    size: int
    old: bytes
    device_size: int


class Inode:
    """The bytes of one file: as they are read, and as the device has them.

    Reads return `content`. Of it the device has the first `_device_size` bytes, except for

    changes   made since the last sync: overwritten ranges and truncations, each with what it took
              away, so that it can be undone; appended bytes need no entry, they lie past the end
    lost      ranges whose sync failed: clean to the operating system, never on the device

    so that a sync of a file that was only appended to moves one number. The disk's lock is held
    around every call.
    """

    __slots__ = ("_changes", "_device_size", "_lost", "content", "locked_at_boot", "modified_ms")

    def __init__(self, now_ms: int) -> None:
        self.content = bytearray()
        self.modified_ms = now_ms
        self.locked_at_boot: int | None = None
        self._device_size = 0
        self._changes: list[_Patch | _Cut] = []
        self._lost: list[_Patch] = []

    def append(self, data: Buffer) -> None:
        self.content += data

    def write(self, data: Buffer, position: int) -> None:
        end = position + len(data)
        overwritten_end = min(end, self._device_size)
        if position < overwritten_end:
            old = self._on_device(position, overwritten_end)
            self._changes.append(_Patch(position, old))
        self._no_longer_lost(position, end)
        self.content[position:end] = data

    def truncate(self, size: int) -> None:
        end = len(self.content)
        if size >= end:
            self.content += bytes(size - end)
            return
        self._changes.append(_Cut(size, self._on_device(size, end), self._device_size))
        self._no_longer_lost(size, end)
        del self.content[size:]
        self._device_size = min(self._device_size, size)

    def sync(self) -> None:
        self._changes.clear()
        self._device_size = self._reachable_size()

    def lose_unsynced(self) -> None:
        # Truncations stay: they are the file system's journal, the data is what failed.
        for change in reversed(self._changes):
            if isinstance(change, _Patch):
                self._lose(change.within(0, self._device_size))
        size = len(self.content)
        self._lose(_Patch(self._device_size, bytes(size - self._device_size)).within(0, size))
        self._changes.clear()

    def crash(self, rng: random.Random | None, *, torn: bool) -> None:
        reachable = self._reachable_size()
        for patch in self._lost:
            self._put_back(patch)
        if rng is None or rng.random() < 0.5:
            del self.content[reachable:]
        self._lost.clear()
        self._undo_changes(rng, torn=torn)
        self._changes.clear()
        self._cut_tail(rng, torn=torn)
        self._device_size = len(self.content)

    def _on_device(self, start: int, end: int) -> bytes:
        """The range as a crash would show it, if everything not lost were written back first."""
        image = self.content[start:end]
        for lost in self._lost:
            for patch in lost.within(start, end):
                image[patch.start - start : patch.end - start] = patch.old
        return bytes(image)

    def _reachable_size(self) -> int:
        """The size the device has after a sync now: lost bytes at the very end do not extend it."""
        size = len(self.content)
        for patch in sorted(self._lost, reverse=True):
            if patch.end < size:
                break
            size = max(patch.start, self._device_size)
        return size

    def _lose(self, patches: list[_Patch]) -> None:
        for patch in patches:
            self._no_longer_lost(patch.start, patch.end)
            self._lost.append(patch)

    def _no_longer_lost(self, start: int, end: int) -> None:
        """Lost no more: the range is dirty again, or no longer a part of the file."""
        if self._lost:
            self._lost = [
                piece
                for patch in self._lost
                for piece in patch.within(0, start) + patch.within(end, patch.end)
            ]

    def _put_back(self, patch: _Patch) -> None:
        self.content[patch.start : patch.end] = patch.old

    def _undo_changes(self, rng: random.Random | None, *, torn: bool) -> None:
        """Backwards: truncations are forgotten from the newest on, overwrites independently."""
        cuts = sum(isinstance(change, _Cut) for change in self._changes)
        forgotten = cuts if rng is None else rng.randint(0, cuts)
        limit = self._device_size
        for change in reversed(self._changes):
            if isinstance(change, _Patch):
                for patch in change.within(0, limit):
                    self._undo_overwrite(patch, rng, torn=torn)
            elif forgotten:
                forgotten -= 1
                self._undo_cut(change)
                limit = self._device_size

    def _undo_cut(self, cut: _Cut) -> None:
        self.content += bytes(max(0, cut.size - len(self.content)))
        self.content[cut.size :] = cut.old
        self._device_size = cut.device_size

    def _undo_overwrite(self, patch: _Patch, rng: random.Random | None, *, torn: bool) -> None:
        start, end = patch.start, patch.end
        if rng is not None:
            middle = _boundary(rng, start, end, torn=torn)
            start, end = rng.choice(((start, middle), (middle, end)))
        for undone in patch.within(start, end):
            self._put_back(undone)

    def _cut_tail(self, rng: random.Random | None, *, torn: bool) -> None:
        """Decides how much of what lies past the device's size got there after all."""
        data_end, end = self._device_size, len(self.content)
        if rng is not None:
            data_end = _boundary(rng, data_end, end, torn=torn)
        size = data_end
        if rng is not None and torn and rng.random() < 0.5:
            size = rng.randint(data_end, end)  # the size was extended, the data was not written
        self.content[data_end:] = bytes(size - data_end)


def _boundary(rng: random.Random, start: int, end: int, *, torn: bool) -> int:
    """A random position at which a write stopped: the start, the end, or anywhere between."""
    return rng.choice((start, end, rng.randint(start, end)) if torn else (start, end))


class _Directory:
    """Names, and the changes to them that no `sync_dir` has seen.

    A change maps each name it touches to what the name now is, None when it is gone; a rename is
    one change of two names, and so survives as a whole or not at all.
    """

    __slots__ = ("_changes", "_durable", "modified_ms", "names")

    def __init__(self, now_ms: int) -> None:
        self.names: dict[str, _Node] = {}
        self._durable: dict[str, _Node] = {}
        self._changes: list[dict[str, _Node | None]] = []
        self.modified_ms = now_ms

    def change(self, change: dict[str, _Node | None], now_ms: int) -> None:
        _apply(change, self.names)
        self._changes.append(change)
        self.modified_ms = now_ms

    def sync(self) -> None:
        for change in self._changes:
            _apply(change, self._durable)
        self._changes.clear()

    def crash(self, rng: random.Random | None, *, torn: bool) -> None:
        # File systems keep the order of changes to one name: what builds on a lost one is lost.
        lost: set[str] = set()
        for change in self._changes:
            if rng is not None and lost.isdisjoint(change) and rng.random() < 0.5:
                _apply(change, self._durable)
            else:
                lost.update(change)
        self._changes.clear()
        self.names = dict(self._durable)
        for node in self.names.values():
            node.crash(rng, torn=torn)


_Node: TypeAlias = Inode | _Directory


def _apply(change: dict[str, _Node | None], names: dict[str, _Node]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def os_error(code: int, path: Path) -> OSError:
    """Makes the OSError that the operating system would raise."""
    return OSError(code, os.strerror(code), str(path))


class _Machine:
    """What a disk shares with its handles: lock, clock, boot number and root directory."""

    __slots__ = ("boot", "clock", "lock", "root")

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.Lock()
        self.clock = clock
        self.boot = 0
        self.root = _Directory(clock.now_ms())

    def node(self, path: Path) -> _Node:
        node: _Node = self.root
        for name in _names(path):
            if isinstance(node, Inode):
                raise os_error(ENOTDIR, path)
            if name not in node.names:
                raise os_error(ENOENT, path)
            node = node.names[name]
        return node

    def leads_to(self, path: Path, node: _Node) -> bool:
        try:
            return self.node(path) is node
        except (FileNotFoundError, NotADirectoryError):
            return False


class _Handle:
    __slots__ = ("_boot", "_inode", "_machine", "_path")

    def __init__(self, machine: _Machine, inode: Inode, path: Path) -> None:
        self._machine = machine
        self._path = path
        self._boot: int | None = machine.boot
        self._inode = inode

    def _live(self) -> Inode:
        if self._boot != self._machine.boot:
            raise os_error(EBADF, self._path)
        return self._inode

    def size(self) -> int:
        with self._machine.lock:
            return len(self._live().content)

    def close(self) -> None:
        with self._machine.lock:
            self._boot = None


class CrashAppendFile(_Handle):
    __slots__ = ("_locked",)

    def __init__(
        self, machine: _Machine, inode: Inode, path: Path, locked: _Directory | None = None
    ) -> None:
        super().__init__(machine, inode, path)
        self._locked = locked
        """The directory whose lock it holds."""

    def append(self, data: Buffer) -> int:
        with self._machine.lock:
            inode = self._live()
            inode.append(data)
            inode.modified_ms = self._machine.clock.now_ms()
        return len(data)

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        return self.append(b"".join(parts))

    def write_at(self, data: Buffer, position: int) -> int:
        with self._machine.lock:
            inode = self._live()
            if not 0 <= position <= len(inode.content):
                raise os_error(EINVAL, self._path)
            inode.write(data, position)
            inode.modified_ms = self._machine.clock.now_ms()
        return len(data)

    def truncate(self, size: int) -> None:
        with self._machine.lock:
            inode = self._live()
            if size < 0:
                raise os_error(EINVAL, self._path)
            inode.truncate(size)
            inode.modified_ms = self._machine.clock.now_ms()

    def sync(self) -> None:
        with self._machine.lock:
            self._live().sync()

    def in_place(self) -> bool:
        with self._machine.lock:
            inode = self._live()
            if self._locked is not None:
                return self._machine.leads_to(self._path.parent, self._locked)
            return self._machine.leads_to(self._path, inode)

    def lose_unsynced(self) -> None:
        """What Linux does when fdatasync fails: the pages are clean now, and not on the device.

        Reads still return the bytes and a later sync succeeds; a crash loses them all the same,
        unless they were written once more in between.
        """
        with self._machine.lock:
            self._live().lose_unsynced()

    def close(self) -> None:
        with self._machine.lock:
            if self._locked is not None and self._boot == self._machine.boot:
                self._inode.locked_at_boot = None
            self._boot = None


class CrashReadFile(_Handle):
    __slots__ = ()

    def read_into(self, buffer: memoryview, position: int) -> int:
        with self._machine.lock:
            content = self._live().content
            if position < 0:
                raise os_error(EINVAL, self._path)
            taken = max(0, min(len(buffer), len(content) - position))
            with memoryview(content) as view:
                buffer[:taken] = view[position : position + taken]
        return taken


class CrashDisk:
    """A `Disk` in memory. Thread-safe. `clock` gives the modification times."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._machine = _Machine(clock)

    def crash(self, rng: random.Random | None = None, *, torn: bool = True) -> None:
        """A power loss: what was not durable is lost, or partly lost as `rng` decides.

        With an `rng` every unsynced name, overwrite, truncation and appended suffix survives or
        not; with `torn` bytes may also survive in part, or as zeros where only the size did.
        """
        with self._machine.lock:
            self._machine.boot += 1
            self._machine.root.crash(rng, torn=torn)

    def kill(self) -> None:
        """The process ends and the machine does not: everything written can still be read."""
        with self._machine.lock:
            self._machine.boot += 1

    def make_dirs(self, path: Path) -> None:
        with self._machine.lock:
            above, directory = self._machine.root, self._machine.root
            for name in _names(path):
                node = directory.names.get(name)
                if node is None:
                    # The first that existed may itself have a name that nobody synced.
                    above.sync()
                    node = _Directory(self._machine.clock.now_ms())
                    directory.change({name: node}, node.modified_ms)
                    directory.sync()
                elif isinstance(node, Inode):
                    raise os_error(EEXIST, path)
                above, directory = directory, node
            above.sync()

    def list_dir(self, path: Path) -> list[str]:
        with self._machine.lock:
            return sorted(self._directory(path).names)

    def exists(self, path: Path) -> bool:
        with self._machine.lock:
            try:
                self._machine.node(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def size(self, path: Path) -> int:
        with self._machine.lock:
            return len(self._inode(path).content)

    def modified(self, path: Path) -> float:
        with self._machine.lock:
            return self._machine.node(path).modified_ms / 1000

    def create(self, path: Path) -> CrashAppendFile:
        with self._machine.lock:
            if path.name in self._directory(path.parent).names:
                raise os_error(EEXIST, path)
            return CrashAppendFile(self._machine, self._new_inode(path), path)

    def open_append(self, path: Path) -> CrashAppendFile:
        with self._machine.lock:
            return CrashAppendFile(self._machine, self._inode(path), path)

    def open_read(self, path: Path) -> CrashReadFile:
        with self._machine.lock:
            return CrashReadFile(self._machine, self._inode(path), path)

    def replace(self, source: Path, target: Path) -> None:
        with self._machine.lock:
            if source.parent != target.parent:
                raise os_error(EXDEV, source)
            moved = self._machine.node(source)
            directory = self._directory(source.parent)
            _check_replaceable(moved, directory.names.get(target.name, moved), target)
            if source.name != target.name:
                change = {source.name: None, target.name: moved}
                directory.change(change, self._machine.clock.now_ms())

    def unlink(self, path: Path) -> None:
        with self._machine.lock:
            self._inode(path)
            change: dict[str, _Node | None] = {path.name: None}
            self._directory(path.parent).change(change, self._machine.clock.now_ms())

    def remove_dir(self, path: Path) -> None:
        with self._machine.lock:
            if self._directory(path).names:
                raise os_error(ENOTEMPTY, path)
            change: dict[str, _Node | None] = {path.name: None}
            self._directory(path.parent).change(change, self._machine.clock.now_ms())

    def sync_dir(self, path: Path) -> None:
        with self._machine.lock:
            self._directory(path).sync()

    def open_locked(self, path: Path) -> CrashAppendFile:
        with self._machine.lock:
            missing = path.name not in self._directory(path.parent).names
            inode = self._new_inode(path) if missing else self._inode(path)
            if inode.locked_at_boot == self._machine.boot:
                raise os_error(EWOULDBLOCK, path)
            inode.locked_at_boot = self._machine.boot
            return CrashAppendFile(self._machine, inode, path, self._directory(path.parent))

    def _new_inode(self, path: Path) -> Inode:
        now_ms = self._machine.clock.now_ms()
        inode = Inode(now_ms)
        self._directory(path.parent).change({path.name: inode}, now_ms)
        return inode

    def _directory(self, path: Path) -> _Directory:
        node = self._machine.node(path)
        if isinstance(node, Inode):
            raise os_error(ENOTDIR, path)
        return node

    def _inode(self, path: Path) -> Inode:
        node = self._machine.node(path)
        if isinstance(node, _Directory):
            raise os_error(EISDIR, path)
        return node


def _names(path: Path) -> list[str]:
    return [name for name in path.parts if name != path.anchor]


def _check_replaceable(moved: _Node, replaced: _Node, target: Path) -> None:
    """What rename(2) refuses: to put a file over a directory or the reverse, or over a full one."""
    if isinstance(replaced, Inode):
        if isinstance(moved, _Directory):
            raise os_error(ENOTDIR, target)
    elif isinstance(moved, Inode):
        raise os_error(EISDIR, target)
    elif moved is not replaced and replaced.names:
        raise os_error(ENOTEMPTY, target)
