"""Threads that compress and decompress, shared by everything in this process.

Compression releases the interpreter lock, so another processor can do it while the caller does
something else. There are as many threads as processors, at most four, and they are started when
they are first needed. Work is short and waits for nothing, so it cannot block other work.

Beware: a caller that needs a result must not wait behind the work of others. Use `Ahead.result`,
which does work that has not begun on the caller's own thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from forebay.interrupts import Call, WorkerThreads

_Result = TypeVar("_Result")

THREADS_MAX: Final = 4


class Ahead(Generic[_Result]):
    """Work that may run on another thread before its result is wanted. One thread uses it."""

    __slots__ = ("_call",)

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._call = Call(work)
        try:
            _threads().put(self._call.run)
        except RuntimeError:  # there can be no more threads: `result` does it
            return

    @property
    def done(self) -> bool:
        return self._call.done

    def result(self) -> _Result:
        """Returns what the work returned, or raises what it raised. Does it here if need be."""
        self._call.run()
        return self._call.result()

    def cancel(self) -> None:
        """Drops work that has not begun."""
        self._call.cancel()


_workers: Final[dict[int, WorkerThreads[Callable[[], None]]]] = {}
"""The threads of this process. Those of a parent process do not exist after a fork."""


def _threads() -> WorkerThreads[Callable[[], None]]:
    process = os.getpid()
    found = _workers.get(process)
    if found is None:
        most = min(os.cpu_count() or 1, THREADS_MAX)
        # It starts no thread before it gets work, so a second one made meanwhile costs nothing.
        found = _workers.setdefault(process, WorkerThreads(most, "compress", _work))
    return found


def _work() -> None:
    threads = _threads()
    while True:
        run = threads.get()
        if run is not None:
            run()
        del run  # an idle thread must not keep the result alive
