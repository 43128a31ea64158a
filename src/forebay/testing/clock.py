"""A clock that stands still until a test moves it.

Both of its times move together by `advance`, which then calls every subscriber in the thread that
advanced: a component that waits for a deadline subscribes and looks at the clock again when it is
called. A subscriber must not advance the clock itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.clock import Clock

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


class ManualClock(Clock):
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
        if seconds < 0:
            raise ValueError(f"a clock never goes back, asked to by {-seconds} s")
        with self._lock:
            self._elapsed_ns += round(seconds * _NS_PER_S)
        for listener in self.listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after each advance, in the order of subscription."""
        with self._lock:
            self._listeners.append(listener)
