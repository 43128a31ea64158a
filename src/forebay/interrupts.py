"""Locks and threads for code that an exception may leave between any two bytecodes.

Python raises KeyboardInterrupt, and what any other signal handler raises, in the main thread,
wherever it is. Three rules keep such an exception from losing a lock or a wake-up:

1. A thread that may be interrupted takes only locks that know their owner. Whoever catches an
   exception gives them up (`give_up`, `holding`). `with lock:` alone is not enough: Python 3.14 may
   raise after it has taken the lock and before the block begins, and a lock that is entered by
   Python code, such as that of a Condition, can be lost in every release.
2. A waiter is woken first and removed afterwards, and waking twice is harmless (`Latch`).
3. What must not stop half-way runs on another thread (`run_aside`). Signals do not reach it.

Beware: an exception that arrives while an earlier one is being handled is not covered, nor is one
that another thread raises with `PyThreadState_SetAsyncExc` in a thread started here.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_here: Final = threading.local()
_LOOK_SECONDS: Final = 0.05


def held(lock: threading.RLock) -> bool:
    """Whether the calling thread holds the lock."""
    owned: bool = lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001  # as Condition does
    return owned


def give_up(lock: threading.RLock) -> None:
    """Releases the lock if the calling thread holds it. It must not have taken it twice."""
    if held(lock):
        lock.release()


def holding(lock: threading.RLock, action: Callable[[], _Result]) -> _Result:
    """Runs `action` with the lock held. The lock is free afterwards, wherever this was left."""
    try:
        with lock:
            return action()
    except BaseException:
        give_up(lock)
        raise


class Latch:
    """One thread waits for it, and any thread opens it, once and for all."""

    __slots__ = ("_lock", "woken")

    def __init__(self) -> None:
        self.woken = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Opens it. The second call does nothing."""
        self.woken = True
        try:
            self._lock.release()
        except RuntimeError:
            return  # nobody has waited since the first call

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is open; returns False if `timeout` seconds passed first."""
        if self.woken:
            return True
        return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0))


def start_thread(run: Callable[[], None], name: str) -> None:
    """Starts a daemon thread, in one step that cannot be interrupted.

    `Thread.start` takes locks and waits for the new thread. An exception in the middle of that
    could keep the thread from ever running, so it is called on a thread that signals do not reach.
    Raises RuntimeError if there can be no more threads.
    """
    _thread.start_new_thread(_start, (run, name))


def _start(run: Callable[[], None], name: str) -> None:
    def marked() -> None:
        _here.own = True
        run()

    try:
        threading.Thread(target=marked, name=name, daemon=True).start()
    except RuntimeError:  # there can be no second thread, so this one has to do
        marked()


def run_aside(action: Callable[[], _Result]) -> _Result:
    """Runs `action` on a thread of its own; returns its result, or raises what it raised.

    An exception in the waiting caller ends the wait and not the action, which runs to its end. If
    no thread can be started, as at the exit of the interpreter from Python 3.12 on, the caller runs
    it. A thread of `start_thread` always runs it itself.
    """
    if getattr(_here, "own", False):
        return action()
    call = Call(action)
    try:
        start_thread(call.run, "forebay-aside")
    except RuntimeError:
        call.run()
    return call.result()


class Call(Generic[_Result]):
    """An action that runs at most once, on the first thread that takes it, and its result."""

    def __init__(self, action: Callable[[], _Result]) -> None:
        self._action = action
        self._begun = threading.Lock()
        self._done = Latch()
        self._values: list[_Result] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.woken

    def cancel(self) -> None:
        """Drops the action if it has not begun. Nobody may wait for its result."""
        self._begun.acquire(blocking=False)

    def run(self) -> None:
        """Runs the action here, unless another thread has begun it."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._values.append(self._action())
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            self._error = error
        finally:
            self._done.wake()

    def result(self) -> _Result:
        """Waits for the action; returns its result, or raises what it raised. For one thread."""
        self._done.wait()
        if self._error is None:
            return self._values[0]
        try:
            raise self._error
        finally:
            self._error = None  # it would refer to itself, through the frames of its traceback


class WorkerThreads(Generic[_Item]):
    """Threads that take items from one queue: started when needed, at most `threads_max`.

    `put` and `close` may be called, and interrupted, on any thread. Each thread runs `work`, which
    calls `get` and returns once the queue was closed.
    """

    def __init__(self, threads_max: int, name: str, work: Callable[[], None]) -> None:
        self._threads_max = threads_max
        self._name = name
        self._work = work
        self._items: SimpleQueue[_Item] = SimpleQueue()
        self._last: _Item | None = None
        """Set once the queue is closed."""
        self._running: list[Latch] = []
        # Taken only on the threads started here.
        self._lock = threading.Lock()
        self._alive = 0
        self.started = 0
        self.idle = 0
        """Threads that wait for an item."""

    def put(self, item: _Item) -> None:
        """Adds an item, and starts a thread for it if all are busy.

        Raises RuntimeError if there is no thread and none can be started.
        """
        try:
            self._items.put(item)
            self.provide()
        except BaseException:
            self.provide()
            raise

    def get(self, timeout: float | None = None) -> _Item | None:
        """Waits for the next item; returns None after `timeout` seconds. For the threads here."""
        with self._lock:
            self.idle += 1
        try:
            return self._items.get(timeout=timeout)
        except Empty:
            return None
        finally:
            with self._lock:
                self.idle -= 1
            # Until now this thread counted as idle, also for items that it did not take.
            self.provide()

    def get_nowait(self) -> _Item | None:
        """Takes an item if there is one. For any thread."""
        try:
            return self._items.get_nowait()
        except Empty:
            return None

    @property
    def empty(self) -> bool:
        return self._items.empty()

    def provide(self, idle: int = 0) -> None:
        """Starts a thread if there are more items than idle threads, or fewer than `idle` of those.

        Raises RuntimeError if there is no thread and none can be started.
        """
        if self._last is not None or not self._wanted(idle):
            return
        ended = Latch()
        launched: list[int] = []
        try:
            self._running.append(ended)
            # In a single call that runs in C: it is known below whether the thread was started.
            launched.extend(map(_thread.start_new_thread, (self._add,), ((idle, ended),)))
        except BaseException as error:
            if not launched:
                ended.wake()
            if not isinstance(error, RuntimeError) or not self.started:
                raise

    def _wanted(self, idle: int) -> bool:
        missing = self.idle < max(self._items.qsize(), idle)
        return missing and self.started < self._threads_max

    def _add(self, idle: int, ended: Latch) -> None:
        """Starts one more thread, unless it is no longer needed. Runs on a thread of its own."""

        def run() -> None:
            _here.ended = ended
            try:
                self._work()
            finally:
                self._end(ended)

        with self._lock:
            number = self.started
            needed = self._wanted(idle)
            self.started += needed
            self._alive += needed
        if needed:
            _start(run, f"forebay-{self._name}-{number}")
        else:
            self._running.remove(ended)
            ended.wake()

    def close(self, last: _Item) -> None:
        """Starts no more threads, and puts `last` after the items, for each thread in turn."""
        self._last = last
        self._items.put(last)

    def _end(self, ended: Latch) -> None:
        with self._lock:
            self._alive -= 1
            others = self._alive
        if others and self._last is not None:
            self._items.put(self._last)
        ended.wake()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the threads have ended, except the calling one, at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for ended in self._running.copy():
            if ended is getattr(_here, "ended", None):
                continue
            # Several threads may wait here, and the latch wakes one: the others look again.
            while not ended.woken and (deadline is None or time.monotonic() < deadline):
                left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                ended.wait(min(left, _LOOK_SECONDS))
