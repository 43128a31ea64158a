"""`ManualClock`: a clock that stands still until a test moves it.

>>> from forebay import Store, StoreSettings
>>> clock = ManualClock(now_ms=1_700_000_000_000)
>>> with Store(StoreSettings(data=None), clock=clock) as store:
...     topic = store.topic("orders")
...     _ = topic.append(b"one")
...     clock.advance(60)
...     _ = topic.append(b"two")
...     [message.publish_time for message in topic.read()]
[1700000000000, 1700000060000]

`advance` moves the time of day and the monotonic time together; `jump` moves the time of day alone,
as when somebody sets it. Both then call every subscriber, in the calling thread: components that
wait for a deadline subscribe, and look at the clock again when they are called. A subscriber must
not move the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.clock import Clock

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class ManualClock(Clock):
    """Starts at `now_ms` since 1970-01-01 UTC, and at monotonic time 0. Thread-safe."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start_ms = now_ms
        self._elapsed_ns = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def listeners(self) -> tuple[Callable[[], None], ...]:
        with self._lock:
            return tuple(self._listeners)

    def now_ns(self) -> int:
        with self._lock:
            return self._start_ms * _NS_PER_MS + self._elapsed_ns

    def now_ms(self) -> int:
        return self.now_ns() // _NS_PER_MS

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed_ns / _NS_PER_S

    def advance(self, seconds: float) -> None:
        """Moves both times forward, then calls the subscribers; ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back, asked to by {-seconds} s")
        with self._lock:
            self._elapsed_ns += round(seconds * _NS_PER_S)
        for listener in self.listeners:
            listener()

    def jump(self, seconds: float) -> None:
        """Moves the time of day alone, forward or back, then calls the subscribers."""
        with self._lock:
            self._start_ms += round(seconds * 1000)
        for listener in self.listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after each advance, in the order of subscription."""
        with self._lock:
            self._listeners.append(listener)
