"""Watermarks: how far a log has got, stage by stage, and the waiters for each stage.

A waiter is a thread or an asyncio task. It is woken because a watermark reached its target or
because the log ended. The waiter itself must check which of the two it was. It is woken before it
is removed: an exception in between wakes it twice, and the other order would lose it.

Beware: `Waiters` is not thread-safe. The lock of the group commit guards it.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, Literal, Protocol, TypeAlias

from forebay.interrupts import Latch
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
        """Called from any thread. The second call does nothing."""


class ThreadWaiter(Latch):
    __slots__ = ("producer", "since")

    def __init__(self, *, producer: bool = False) -> None:
        super().__init__()
        self.producer = producer
        self.since = time.monotonic()


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

    def call_soon(self, call: Callable[[], None]) -> None:
        """Calls a function in the waiter's event loop; in its thread alone."""
        self._loop.call_soon(call)

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class CallWaiter:
    """Calls a function in the event loop that made it."""

    __slots__ = ("_call", "_loop", "_thread", "producer", "since")

    def __init__(self, call: Callable[[], None]) -> None:
        self.producer = False
        self.since = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._call = call

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._call)
            else:
                self._loop.call_soon_threadsafe(self._call)


class Waiters:
    """The waiters of one watermark, in the order of their targets.

    A waiter that gave up stays in the heap until it comes to the top or half of the heap is like
    it: so giving up costs little, however many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._waiting: set[Waiter] = set()
        self._order = count()
        self.nearest = _NEVER
        """The lowest target; a watermark below it wakes nobody."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def producers(self) -> int:
        return sum(waiter.producer for waiter in self._waiting)

    def add(self, target: int, waiter: Waiter) -> None:
        heapq.heappush(self._heap, (target, next(self._order), waiter))
        self._waiting.add(waiter)
        self.nearest = self._heap[0][0]

    def discard(self, waiter: Waiter) -> bool:
        """Removes a waiter that gave up; returns False if it is not there any more."""
        if waiter not in self._waiting:
            return False
        self._waiting.discard(waiter)
        if len(self._heap) > 2 * len(self._waiting) + 8:
            kept = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(kept)
            self._heap = kept
        self.wake_reached(-1)  # nobody, but it drops those at the top that gave up
        return True

    def wake_reached(self, watermark: int) -> int:
        """Wakes and removes those whose target is reached; returns how many are producers.

        Records the longest wait of those. Call it again if it was interrupted.
        """
        producers, since = 0, inf
        heap, waiting = self._heap, self._waiting
        while heap:
            target, _, waiter = heap[0]
            if waiter in waiting:
                if target > watermark:
                    break
                waiter.wake()
                if waiter.producer:
                    producers, since = producers + 1, min(since, waiter.since)
                waiting.discard(waiter)
            heapq.heappop(heap)
        self.nearest = heap[0][0] if heap else _NEVER
        if producers:
            metrics.append_seconds.observe(time.monotonic() - since)
        return producers

    def wake_all(self) -> None:
        self.wake_reached(_NEVER)
