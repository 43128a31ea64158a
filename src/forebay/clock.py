"""`Clock`: time as an interface, so that tests can move it instead of sleeping.

`now_ms` is the wall clock, for the publish times of messages and for ages that outlast a process.

Beware: the wall clock may jump. Measure intervals with `monotonic`, whose zero has no meaning. A
time that another process recorded, or this one before a jump, may be in the future: never wait
until the clock gets there.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

from forebay.limits import CLOCK_HOLD_SECONDS, CLOCK_JUMP_SECONDS


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC. See `since_1970`."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC. See `since_1970`."""

    def monotonic(self) -> float:
        """Seconds that never go back; they advance while the machine sleeps, as leases expire."""


class SystemClock:
    """The clocks of this machine."""

    now_ns = staticmethod(time.time_ns)

    def now_ms(self) -> int:
        return max(time.time_ns(), 0) // 1_000_000

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


SYSTEM_CLOCK: Final = SystemClock()


class _Since1970:
    """A clock that stands at 1970-01-01 while `inner` shows an earlier time."""

    def __init__(self, inner: Clock) -> None:
        self._inner = inner
        self.monotonic = inner.monotonic

    def now_ns(self) -> int:
        return max(self._inner.now_ns(), 0)

    def now_ms(self) -> int:
        return max(self._inner.now_ms(), 0)


def since_1970(clock: Clock) -> Clock:
    """Returns a clock with no time before 1970, which no format of Forebay can hold.

    The machine's clock is returned as it is, so that an append pays nothing, unless it shows such a
    time now: Linux does not allow to set it there, but a library that fakes the time does.
    """
    if isinstance(clock, _Since1970) or (isinstance(clock, SystemClock) and clock.now_ns() >= 0):
        return clock
    return _Since1970(clock)


class JumpWatch:
    """Notices jumps of the time of day, by comparing it with the monotonic time. Thread-safe.

    What deletes data because of its age asks it first: after a jump it cannot be known which of the
    two times of day was wrong. A jump before this object was created is not noticed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._base = self._difference()
        self._hold_until = float("-inf")

    def look(self) -> float | None:
        """Returns by how many seconds the time of day has jumped since the last look.

        Returns None if it has not, or by less than CLOCK_JUMP_SECONDS.
        """
        with self._lock:
            difference = self._difference()
            jump = difference - self._base
            if abs(jump) < CLOCK_JUMP_SECONDS:
                return None
            self._base = difference
            self._hold_until = self._clock.monotonic() + CLOCK_HOLD_SECONDS
            return jump

    @property
    def steady(self) -> bool:
        """False for CLOCK_HOLD_SECONDS after a look that found a jump."""
        return self._clock.monotonic() >= self._hold_until

    def _difference(self) -> float:
        return self._clock.now_ms() / 1000 - self._clock.monotonic()
