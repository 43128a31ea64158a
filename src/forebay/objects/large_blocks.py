"""Large blocks of memory go back to the system when they are freed.

Chunks of objects are megabytes, allocated and freed by many threads, the client's own included.
glibc keeps such blocks for each thread once it has seen one freed: it raises its threshold for
separate mappings up to 32 MiB. What a process then holds grows with the threads it has used, up
to three times what is in use. A threshold that is set stays where it is.

It is the whole process's. Somebody who has chosen another by the environment keeps it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

from forebay.limits import MIB

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_CHOSEN: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

LARGE_BYTES: Final = 2 * MIB
"""Above what appending and reading segments use, which is faster without fresh pages."""
KEPT_BYTES: Final = 4 * MIB
"""Free memory at the end of a heap that is kept; setting the other would lower it to 128 KiB."""


@cache
def return_large_blocks() -> bool:
    """Whether it is so from now on: not where the C library is another, or was told otherwise."""
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
