"""Who waits for a watermark to reach an offset: threads and asyncio tasks alike.

Not thread-safe: the log's lock guards the heap. A waiter is woken once, by reaching its target or
by `wake_all`; what that means (reached, stopped, closed) it finds out itself.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Iterable
from itertools import count
from typing import Final, Protocol

from forebay.wal import metrics

NEVER: Final = 2**64
"""A target that no watermark reaches."""
NEVER_SINCE: Final = float("inf")


class Waiter(Protocol):
    @property
    def producer(self) -> bool:
        """Whether it waits for its own append, and is likely to append again once it is woken."""

    @property
    def since(self) -> float:
        """When it began to wait, by `time.monotonic`."""

    def wake(self) -> None:
        """Called from any thread, at most once."""


class ThreadWaiter:
    __slots__ = ("_lock", "producer", "since")

    def __init__(self, *, producer: bool = False) -> None:
        self.producer = producer
        self.since = time.monotonic()
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until woken; False when `timeout` seconds passed first."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0))


def wait_released(lock: threading.Lock, waiter: ThreadWaiter) -> None:
    """Waits with the lock released; whatever happens, the lock is held again when it ends.

    A `threading.Condition` would do, but for interrupts: one that hits it as it takes the lock
    back leaves it without, and its caller then releases a lock that another thread has. Here one
    call, completed in C, says whether the lock was taken.
    """
    taken: list[bool] = []
    interrupt: BaseException | None = None
    try:
        lock.release()
        waiter.wait()
    except BaseException as error:  # noqa: BLE001  # raised below, with the lock
        interrupt = error
    while not taken:
        try:
            taken.extend(map(lock.acquire, (True,)))
        except BaseException as error:  # noqa: BLE001  # as above
            interrupt = error
    if interrupt is not None:
        raise interrupt


class TaskWaiter:
    __slots__ = ("_loop", "future", "producer", "since")

    def __init__(self, *, producer: bool = False) -> None:
        self.producer = producer
        self.since = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            # The loop was closed, and with it whoever waited.
            return

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waiters:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._order = count()
        self.nearest = NEVER
        """The lowest target of all: a watermark below it wakes nobody."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, target: int, waiter: Waiter) -> None:
        heapq.heappush(self._heap, (target, next(self._order), waiter))
        self.nearest = self._heap[0][0]

    def discard(self, waiter: Waiter) -> bool:
        """For one that gave up; False if it was taken out already."""
        kept = [entry for entry in self._heap if entry[2] is not waiter]
        there = len(kept) < len(self._heap)
        if there:
            heapq.heapify(kept)
            self._heap = kept
            self.nearest = kept[0][0] if kept else NEVER
        return there

    def reached(self, watermark: int) -> list[Waiter]:
        """Takes out those whose target is at or below the watermark, for the caller to wake."""
        woken: list[Waiter] = []
        while self._heap and self._heap[0][0] <= watermark:
            woken.append(heapq.heappop(self._heap)[2])
        self.nearest = self._heap[0][0] if self._heap else NEVER
        return woken

    def take_all(self) -> list[Waiter]:
        return self.reached(NEVER)


def wake(waiters: Iterable[Waiter]) -> int:
    """Answers how many of them are producers; how long the first of those waited is counted."""
    producers, since = 0, NEVER_SINCE
    for waiter in waiters:
        waiter.wake()
        if waiter.producer:
            producers, since = producers + 1, min(since, waiter.since)
    if producers:
        metrics.append_seconds.observe(time.monotonic() - since)
    return producers
