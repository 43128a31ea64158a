"""Memory for chunks of objects: buffers that are used again, and blocks that go back when freed.

A fresh buffer of megabytes costs a page fault for every 4 KiB of it, which is several times what
copying a chunk out of the kernel's cache costs. So `BufferPool` keeps a few, and lends them as
read-only views. A buffer is free when the pool alone refers to it: a view, and whatever is made of
one without a copy, keeps a reference. That is CPython's count, and true only under its lock;
without the lock every buffer is a fresh one.

`return_large_blocks` is for chunks that the client allocates, on many threads. glibc keeps such
blocks for each thread once it has seen one freed: it raises its threshold for separate mappings up
to 32 MiB, and a process then holds up to three times what is in use. A threshold that is set stays
where it is. It is the whole process's, so one that was chosen by the environment is left alone.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import Final

from forebay.limits import KIB, MIB

KEPT_MAX: Final = 8
"""Buffers that are kept: a little more than one reader holds."""
KEPT_BYTES_MIN: Final = 256 * KIB
"""Smaller ones are not worth it."""
KEPT_BYTES_MAX: Final = 8 * MIB

_FREE: Final = 3
"""References to a buffer that nobody looks at: the list's, the loop's name, the count's own."""
_COUNTED: Final = bool(getattr(sys, "_is_gil_enabled", lambda: True)())

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_CHOSEN: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

LARGE_BYTES: Final = 2 * MIB
"""Above what appending and reading segments use, which is faster without fresh pages."""
KEPT_BYTES: Final = 4 * MIB
"""Free memory at the end of a heap that is kept; setting the other would lower it to 128 KiB."""


class BufferPool:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    @property
    def kept(self) -> int:
        """Buffers that the pool holds, lent or free."""
        return len(self._buffers)

    def take(self, size: int) -> memoryview:
        """A writable view of `size` bytes that nobody else has."""
        if not _COUNTED or not KEPT_BYTES_MIN <= size <= KEPT_BYTES_MAX:
            return memoryview(bytearray(size))
        with self._lock:
            for buffer in self._buffers:
                if len(buffer) >= size and sys.getrefcount(buffer) == _FREE:
                    return memoryview(buffer)[:size]
            fresh = bytearray(size)
            self._keep(fresh)
            return memoryview(fresh)

    def _keep(self, fresh: bytearray) -> None:
        """In place of one that is free and too small, if there is no room."""
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
    """Sets the threshold; False where the C library is another, or the environment chose one."""
    if any(name in os.environ for name in _CHOSEN) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
