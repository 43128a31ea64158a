"""Holds a group commit back for producers that are about to join it.

Producers that wait for each commit come back together when it is done. Whoever is first would
start the next commit alone, and the others would wait for the one after: two syncs for work that
fits into one. So a commit waits, at most as long as a sync takes, until as many producers wait as
took part in the last one. A lone producer is never held back.

Not thread-safe: the log's lock guards it, but for `hold`, which the writer calls without it.
"""

from __future__ import annotations

from forebay.limits import GATHER_SECONDS_MAX
from forebay.wal.waiters import ThreadWaiter


class Gather:
    def __init__(self) -> None:
        self.waiting = 0
        """Producers that wait for a sync now."""
        self._cohort = 0
        self._gate: ThreadWaiter | None = None
        self._sync_seconds = 0.0

    def arrived(self) -> None:
        """A producer began to wait."""
        self.waiting += 1
        if self._gate is not None and self.waiting >= self._cohort:
            self._gate.wake()
            self._gate = None

    def left(self, producers: int) -> None:
        """So many producers no longer wait, because of a commit or because they gave up."""
        # An interrupted producer may leave without having been counted.
        self.waiting = max(self.waiting - producers, 0)

    def committed(self, producers: int, seconds: float | None) -> bool:
        """A commit released so many producers, and as many may come again.

        It took so many seconds, None if there was nothing to write. True if it pays to stay and
        wait for them.
        """
        self.left(producers)
        self._cohort = producers + self.waiting
        if seconds is not None:
            self._sync_seconds += (seconds - self._sync_seconds) / 8
        return producers > 1

    def begin(self) -> ThreadWaiter | None:
        """A gate to `hold` before the commit, or None when nobody is missing."""
        if self._cohort > 1 and self.waiting < self._cohort:
            self._gate = ThreadWaiter()
        return self._gate

    def hold(self, gate: ThreadWaiter) -> None:
        gate.wait(min(self._sync_seconds, GATHER_SECONDS_MAX))

    def end(self) -> None:
        self._gate = None
