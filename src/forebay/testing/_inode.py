"""The bytes of one file of a `CrashDisk`: as they are read, and as the device has them.

`content` is what reads answer. Of it the device has the first `_device_size` bytes, except for

    changes   made since the last sync: overwritten ranges and truncations, each with what it took
              away, so that it can be undone; appended bytes need no entry, they lie past the end
    lost      ranges whose sync failed: clean to the operating system, never on the device

so that a sync of a file that was only appended to moves one number. An inode has no lock of its
own; the disk's is held around every call.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from forebay.files.disk import Buffer


class _Patch(NamedTuple):
    """What the device holds at a range where `content` says something else."""

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
    """Where a write stopped: each end is as likely as everything between them."""
    return rng.choice((start, end, rng.randint(start, end)) if torn else (start, end))
