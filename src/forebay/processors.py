"""Threads that compress and decompress, shared by everything in this process.

Compression releases the interpreter lock, so another processor can do it while the caller does
something else. There are as many threads as processors, at most four, and they are started when
they are first needed. Work is short and waits for nothing, so it cannot block other work.

Beware: a caller that needs a result must not wait behind the work of others. Use `Ahead.result`,
which does work that has not begun on the caller's own thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

_Result = TypeVar("_Result")

THREADS_MAX: Final = 4
_lock: Final = threading.Lock()
_pools: Final[dict[int, ThreadPoolExecutor]] = {}
"""The threads of this process. Those of a parent process do not exist after a fork."""


class Ahead(Generic[_Result]):
    """Work that may run on another thread before its result is wanted. One thread uses it."""

    __slots__ = ("_future", "_work")

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        try:
            self._future: Future[_Result] | None = _pool().submit(work)
        except RuntimeError:  # the interpreter is about to exit, and starts no more work
            self._future = None

    @property
    def done(self) -> bool:
        return self._future is not None and self._future.done()

    def result(self) -> _Result:
        """Returns what the work returned, or raises what it raised. Does it here if need be."""
        if self._future is None or self._future.cancel():
            return self._work()
        return self._future.result()

    def cancel(self) -> None:
        """Drops work that has not begun."""
        if self._future is not None:
            self._future.cancel()


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    with _lock:
        if process not in _pools:
            threads = min(os.cpu_count() or 1, THREADS_MAX)
            _pools[process] = ThreadPoolExecutor(threads, thread_name_prefix="compress")
        return _pools[process]
