"""`FetchPool`: the threads that all readers of a store share for their requests.

`submit` returns a `FetchFuture`, which one thread waits for. Closing the pool, or cancelling the
future, makes it raise FetchCancelled instead.

Beware: a request that runs cannot be interrupted. Its thread ends when the store has responded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from forebay.errors import LogClosed
from forebay.forks import disown_after_fork
from forebay.interrupts import Latch, WorkerThreads
from forebay.limits import FETCH_THREADS

_Result = TypeVar("_Result")

JOIN_SECONDS: Final = 1.0
"""How long closing a pool waits for its threads. A thread in a slow request ends later."""


class FetchPool:
    """Threads that all streams of a store share for their requests. Thread-safe.

    Threads are started as needed, at most `threads`, and end with `close`. Requests run in the
    order in which they were submitted. The pool limits how many run at once; each stream limits how
    many of its own it submits.
    """

    def __init__(self, threads: int = FETCH_THREADS) -> None:
        self._threads_max = threads
        self._closed = False
        self._workers = self._new_workers()
        disown_after_fork(self)

    def _new_workers(self) -> WorkerThreads[FetchFuture[object]]:
        return WorkerThreads(self._threads_max, "fetch", self._work)

    def disown(self) -> None:
        """Closes the pool in a forked child, which does not have the parent's threads."""
        self._workers = self._new_workers()
        self._closed = True

    @property
    def thread_count(self) -> int:
        return self._workers.started

    @property
    def idle_count(self) -> int:
        """Threads that wait for a request."""
        return self._workers.idle

    def submit(self, job: Callable[[], _Result]) -> FetchFuture[_Result]:
        """Runs `job` on one of the threads. Raises LogClosed after `close`."""
        fetch: FetchFuture[_Result] = FetchFuture(job)
        if not self._closed:
            self._workers.put(fetch)  # type: ignore[arg-type] # only run and cancel are used
        if self._closed:  # perhaps just now, and nobody takes what was put
            fetch.cancel()
            raise LogClosed("the pool of fetching threads is closed")
        return fetch

    def close(self) -> None:
        """Cancels requests that have not begun, and ends the threads. Waits up to JOIN_SECONDS."""
        self._closed = True
        while (fetch := self._workers.get_nowait()) is not None:
            fetch.cancel()
        self._workers.close(FetchFuture(lambda: None))
        self._workers.join(JOIN_SECONDS)

    def _work(self) -> None:
        while not self._closed:
            fetch = self._workers.get()
            if fetch is not None:
                fetch.run()
            del fetch  # an idle thread must not keep the result alive


class FetchFuture(Generic[_Result]):
    """The result of one request. One thread calls `result`; any thread may call `cancel`."""

    __slots__ = ("_cancelled", "_error", "_finished", "_job", "_value")

    def __init__(self, job: Callable[[], _Result]) -> None:
        self._job: Callable[[], _Result] | None = job
        self._value: _Result | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._finished = Latch()

    @property
    def succeeded(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._finished.woken and self._error is None and not self._cancelled

    @property
    def failed(self) -> bool:
        """Whether `result` would raise without waiting."""
        return self._finished.woken and not self.succeeded

    def run(self) -> None:
        """Runs the request. Called once."""
        job = self._job
        if job is None:
            return
        try:
            self._value = job()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self._job = None
        if self._cancelled:  # while the job ran, so `cancel` could not drop the value
            self._value = None
        self._finished.wake()

    def cancel(self) -> None:
        """Drops the result, and makes `result` raise FetchCancelled, also in a waiting thread."""
        self._cancelled = True
        self._job = None
        self._value = None
        self._finished.wake()

    def result(self) -> _Result:
        """Waits for the result. Raises what the request raised, or FetchCancelled."""
        self._finished.wait()
        value = self._value
        if self._cancelled:  # checked after reading the value, because `cancel` drops it
            raise FetchCancelled
        if self._error is not None:
            raise self._error
        return value  # type: ignore[return-value] # not cancelled and no error: there is a value


class FetchCancelled(Exception):
    """The request was cancelled."""
