"""Time as an interface, so that tests move it instead of sleeping.

`now_ms` is the wall clock that messages are stamped with. `monotonic` is for intervals only;
its zero means nothing.
"""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""

    def monotonic(self) -> float:
        """Seconds that never go back, and go on while the machine sleeps: leases end meanwhile."""


class SystemClock:
    """The machine's own clocks."""

    now_ns = staticmethod(time.time_ns)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK: Final = SystemClock()
