"""`Clock`: time as an interface, so that tests can move it instead of sleeping.

`now_ms` is the wall clock, for the publish times of messages.

Beware: the wall clock may jump. Measure intervals with `monotonic`, whose zero has no meaning.
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
        """Seconds that never go back; they advance while the machine sleeps, as leases expire."""


class SystemClock:
    """The clocks of this machine."""

    now_ns = staticmethod(time.time_ns)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK: Final = SystemClock()
