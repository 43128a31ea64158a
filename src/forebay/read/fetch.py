"""Threads that all readers of objects share for their requests.

A thread runs a request and nothing else: what came back waits in its `Fetch` until the reader
takes it. How much one reader has under way is the reader's own bound; the pool bounds requests in
flight. Requests are served in the order in which they were asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from forebay.errors import LogClosed
from forebay.forks import disown_after_fork
from forebay.limits import FETCH_THREADS

_Answer = TypeVar("_Answer")

JOIN_SECONDS: Final = 1.0
"""How long `close` waits for all threads together; one in a slow request is left to end alone."""


class FetchCancelled(Exception):
    """Nobody wants the answer of this request any more."""


class Fetch(Generic[_Answer]):
    """One request. `result` belongs to one thread; `cancel` may come from any."""

    __slots__ = ("_answer", "_cancelled", "_error", "_finished", "_job")

    def __init__(self, job: Callable[[], _Answer]) -> None:
        self._job: Callable[[], _Answer] | None = job
        self._answer: _Answer | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._finished = threading.Event()

    @property
    def succeeded(self) -> bool:
        """Whether `result` would answer at once."""
        return self._finished.is_set() and self._error is None and not self._cancelled

    @property
    def failed(self) -> bool:
        """Whether `result` would raise at once."""
        return self._finished.is_set() and not self.succeeded

    def run(self) -> None:
        """Called once, by a thread of the pool."""
        job = self._job
        if job is None:
            return
        try:
            self._answer = job()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
            self._error = error
        self._job = None
        if self._cancelled:  # which came meanwhile, and could not drop what was not there
            self._answer = None
        self._finished.set()

    def cancel(self) -> None:
        """Wakes who waits; an answer that is there or on its way is dropped."""
        self._cancelled = True
        self._job = None
        self._answer = None
        self._finished.set()

    def result(self) -> _Answer:
        """Waits for the answer; raises what the request raised, or FetchCancelled."""
        self._finished.wait()
        answer = self._answer
        if self._cancelled:  # looked at after the answer, which a cancel takes away
            raise FetchCancelled
        if self._error is not None:
            raise self._error
        return answer  # type: ignore[return-value] # there is one, being neither of the others


class InPlace:
    """Runs each request where it is asked for: for what is a file of this machine anyway."""

    def submit(self, job: Callable[[], _Answer]) -> Fetch[_Answer]:
        fetch = Fetch(job)
        fetch.run()
        return fetch


class FetchPool:
    """Threads start as they are needed, up to `threads`, and end with `close`."""

    def __init__(self, threads: int = FETCH_THREADS) -> None:
        self._threads_max = threads
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[Fetch[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        disown_after_fork(self)

    def disown(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._threads.clear()
        self._waiting.clear()
        self._closed = True

    @property
    def thread_count(self) -> int:
        return len(self._threads)

    def submit(self, job: Callable[[], _Answer]) -> Fetch[_Answer]:
        """Has `job` run on one of the threads; LogClosed after `close`."""
        fetch: Fetch[_Answer] = Fetch(job)
        with self._changed:
            if self._closed:
                raise LogClosed("the pool of fetching threads is closed")
            self._waiting.append(fetch)  # type: ignore[arg-type] # only run and cancel are used
            self._provide_thread()
        return fetch

    def close(self) -> None:
        """Cancels what has not begun and ends the threads; waits no longer than JOIN_SECONDS."""
        with self._changed:
            self._closed = True
            for fetch in self._waiting:
                fetch.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        patience = JOIN_SECONDS / max(len(self._threads), 1)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(patience)

    def _provide_thread(self) -> None:
        if self._idle >= len(self._waiting):
            self._changed.notify()
            return
        if len(self._threads) < self._threads_max:
            name = f"forebay-fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: those that are there will do
                if not self._threads:
                    self._waiting.pop()
                    raise
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (fetch := self._next()) is not None:
            fetch.run()
            del fetch  # its answer is the reader's: an idle thread must not keep it alive

    def _next(self) -> Fetch[object] | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._idle -= 1
            return self._waiting.popleft()
