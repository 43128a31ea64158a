"""Watermarks: how far a log has got, stage by stage, and the waiters for each stage.

A waiter is a thread or an asyncio task. It is woken once, because a watermark reached its target or
because the log ended. The waiter itself must check which of the two it was.

Beware: `Waiters` is not thread-safe. The lock of the group commit guards it.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal, Protocol, TypeAlias

from forebay.wal import metrics

Visibility: TypeAlias = Literal["synced", "buffered"]
"""Which messages a reader gets: only synced ones, or all that were appended."""

_NEVER: Final = 2**64
"""A target that no watermark reaches."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The next offset of each stage; every message before it has passed that stage."""

    appended: int
    synced: int
    uploaded: int = 0
    verified: int = 0


class Waiter(Protocol):
    @property
    def producer(self) -> bool:
        """Whether it waits for its own append, and will probably append again once woken."""

    @property
    def since(self) -> float:
        """When it began to wait, by `time.monotonic`."""

    def wake(self) -> None:
        """Called at most once, from any thread."""


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
        """Blocks until woken; returns False if `timeout` seconds passed first."""
        return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0))


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
            # The loop is closed, so the task that waited is gone.
            return

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Waiters:
    """The waiters of one watermark, in the order of their targets."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._order = count()
        self.nearest = _NEVER
        """The lowest target; a watermark below it wakes nobody."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, target: int, waiter: Waiter) -> None:
        heapq.heappush(self._heap, (target, next(self._order), waiter))
        self.nearest = self._heap[0][0]

    def discard(self, waiter: Waiter) -> bool:
        """Removes a waiter that gave up; returns False if it is not there any more."""
        kept = [entry for entry in self._heap if entry[2] is not waiter]
        there = len(kept) < len(self._heap)
        if there:
            heapq.heapify(kept)
            self._heap = kept
            self.nearest = kept[0][0] if kept else _NEVER
        return there

    def reached(self, watermark: int) -> list[Waiter]:
        """Removes and returns the waiters whose target is reached; the caller wakes them."""
        woken: list[Waiter] = []
        while self._heap and self._heap[0][0] <= watermark:
            woken.append(heapq.heappop(self._heap)[2])
        self.nearest = self._heap[0][0] if self._heap else _NEVER
        return woken

    def take_all(self) -> list[Waiter]:
        return self.reached(_NEVER)


def wake(waiters: Iterable[Waiter]) -> int:
    """Wakes all; returns how many are producers, and records the longest wait of those."""
    producers, since = 0, float("inf")
    for waiter in waiters:
        waiter.wake()
        if waiter.producer:
            producers, since = producers + 1, min(since, waiter.since)
    if producers:
        metrics.append_seconds.observe(time.monotonic() - since)
    return producers


def wait_unlocked(lock: threading.Lock, waiter: ThreadWaiter) -> None:
    """Releases the lock, waits, and takes the lock again, even if it raises.

    `threading.Condition` does not guarantee that. If an interrupt arrives while it takes the lock
    again, it returns without the lock, and the caller then releases a lock that another thread
    holds. Here a single call that runs in C both takes the lock and records that it did.
    """
    taken: list[bool] = []
    interrupt: BaseException | None = None
    try:
        lock.release()
        waiter.wait()
    except BaseException as error:  # noqa: BLE001  # raised below, with the lock held
        interrupt = error
    while not taken:
        try:
            taken.extend(map(lock.acquire, (True,)))
        except BaseException as error:  # noqa: BLE001  # as above
            interrupt = error
    if interrupt is not None:
        raise interrupt
