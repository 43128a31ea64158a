"""Buffers for chunks of objects, used again once nobody looks at them.

A fresh buffer of megabytes costs a page fault for every 4 KiB of it, which is several times what
copying a chunk out of the kernel's cache costs. So a few are kept, and lent as read-only views. A
buffer is free when the pool alone refers to it: a view, and whatever is made of one without a
copy, keeps a reference. That is CPython's count, and true only under its lock; without the lock
every buffer is a fresh one.
"""

from __future__ import annotations

import sys
import threading
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


class BufferPool:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

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
