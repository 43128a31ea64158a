"""Memory for chunks of objects: reused buffers, and large blocks that go back to the system.

A new buffer of megabytes costs a page fault for every 4 KiB, several times as much as copying a
chunk from the page cache. So `BufferPool` keeps a few buffers and hands out views of them. A buffer
is free again when only the pool refers to it, because every view, or anything made of one without a
copy, holds a reference. That relies on CPython's reference count under the GIL; without the GIL
every buffer is new.

`return_large_blocks` is for chunks that the client library allocates on many threads. Once glibc
has freed such a block, it raises its mmap threshold to up to 32 MiB and keeps blocks for each
thread, so that a process holds up to three times what it uses. Setting the threshold stops that. It
applies to the whole process, so a value from the environment is left alone.
`return_free_memory` returns free buffers and the smaller blocks too. `limit_arenas` is for a server
with many threads: glibc has up to eight arenas for each core, and each keeps blocks for itself.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from functools import cache
from typing import Any, Final

from forebay.limits import KIB, MIB

KEPT_MAX: Final = 8
"""Buffers in the pool: a few more than one reader holds."""
KEPT_BYTES_MIN: Final = 256 * KIB
"""Smaller buffers are not pooled."""
KEPT_BYTES_MAX: Final = 8 * MIB

_FREE: Final = 3
"""References to a free buffer: the list, the loop variable, and the argument of getrefcount."""
_COUNTED: Final = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_CHOSEN: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_ARENA_MAX: Final = -8
_ARENAS_CHOSEN: Final = ("MALLOC_ARENA_MAX",)

ARENAS: Final = 4
"""The arenas of a server. 64 readers that stall took 110 MiB with 4, and 200 MiB with 64."""
LARGE_BYTES: Final = 2 * MIB
"""The mmap threshold; larger than the blocks of appends and segment reads, which glibc may keep."""
KEPT_BYTES: Final = 4 * MIB
"""The trim threshold; setting the mmap threshold alone would lower it to 128 KiB."""


_pools: Final[weakref.WeakSet[BufferPool]] = weakref.WeakSet()


class BufferPool:
    """A few buffers that are reused. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []
        _pools.add(self)

    @property
    def kept(self) -> int:
        """Buffers that the pool holds, lent or free."""
        return len(self._buffers)

    def take(self, size: int) -> memoryview:
        """Returns a writable view of `size` bytes that is used by nobody else.

        The buffer returns to the pool when the last reference to it is gone.
        """
        if not _COUNTED or not KEPT_BYTES_MIN <= size <= KEPT_BYTES_MAX:
            return memoryview(bytearray(size))
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) >= size and sys.getrefcount(buffer) == _FREE:
                    return memoryview(buffer)[:size]
            fresh = bytearray(size)
            self._keep(fresh)
            return memoryview(fresh)

    def drop_free(self) -> None:
        """Drops the buffers that nobody uses."""
        with self._lock:
            for at in reversed(range(len(self._buffers))):
                buffer = self._buffers[at]
                if sys.getrefcount(buffer) == _FREE:
                    del self._buffers[at]

    def _keep(self, fresh: bytearray) -> None:
        """Adds a buffer to the pool; a full pool replaces a free buffer with it."""
        if len(self._buffers) < KEPT_MAX:
            self._buffers.append(fresh)
            return
        for at in range(len(self._buffers)):
            buffer = self._buffers[at]
            if sys.getrefcount(buffer) == _FREE:
                self._buffers[at] = fresh
                return


@cache
def return_large_blocks() -> bool:
    """Sets the thresholds; returns False if the libc is not glibc or the environment set one."""
    return _set_options(_CHOSEN, {_MMAP_THRESHOLD: LARGE_BYTES, _TRIM_THRESHOLD: KEPT_BYTES})


@cache
def limit_arenas() -> bool:
    """Limits the arenas, as `return_large_blocks`. Call it before threads are started."""
    return _set_options(_ARENAS_CHOSEN, {_ARENA_MAX: ARENAS})


def _set_options(chosen: tuple[str, ...], options: dict[int, int]) -> bool:
    if any(name in os.environ for name in chosen) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    import ctypes

    mallopt = _libc_function("mallopt")
    if mallopt is None:
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all(mallopt(option, number) for option, number in options.items())


def return_free_memory() -> bool:
    """Returns free buffers and blocks to the system; returns False if the libc is not glibc.

    Takes milliseconds, without the interpreter lock.
    """
    for pool in list(_pools):
        pool.drop_free()
    import ctypes

    trim = _libc_function("malloc_trim")
    if trim is None:
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return bool(trim(0))


def _libc_function(name: str) -> Any:
    """The function of the C library; None if it has no such function."""
    import ctypes

    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
