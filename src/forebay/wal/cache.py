"""The part of a log that is in memory: runs of frames, newest last.

A run is a piece of consecutive frames in one buffer. Frames that are not synced yet are
queued here and cannot be dropped; synced ones are cached, up to a number of messages and of
bytes, and dropped oldest first, a run at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forebay.format.layout import Buffer


class Run(NamedTuple):
    first: int
    messages: int
    data: Buffer

    @property
    def end(self) -> int:
        return self.first + self.messages


class RunCache:
    """Synced runs, oldest first. Not thread-safe: the log's lock guards it."""

    def __init__(self, capacity: int, bytes_max: int) -> None:
        self._capacity = capacity
        self._bytes_max = bytes_max
        self._runs: deque[Run] = deque()
        self._count = 0
        self._bytes = 0

    @property
    def first(self) -> int | None:
        """The oldest offset that is still served; None when nothing is cached."""
        try:
            # A run is dropped whole, so more may be held than is served; what is served is exact.
            return max(self._runs[0].first, self._runs[-1].end - self._capacity)
        except IndexError:
            # Nothing is there, or the last of it went this moment: some ask without the lock.
            return None

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def extend(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._runs.append(run)
            self._count += run.messages
            self._bytes += len(run.data)
        self._evict()

    def _evict(self) -> None:
        runs = self._runs
        while runs and (
            self._bytes > self._bytes_max or self._count - runs[0].messages >= self._capacity
        ):
            run = runs.popleft()
            self._count -= run.messages
            self._bytes -= len(run.data)

    def since(self, offset: int) -> list[Run] | None:
        """The runs that hold `offset` and all after it, or None when it is not served here."""
        first = self.first
        if first is None or offset < first or offset >= self._runs[-1].end:
            return None
        return newest_since(self._runs, offset)


def newest_since(runs: Sequence[Run], offset: int) -> list[Run]:
    """The runs of an ordered sequence that end after `offset`; looks from the newest back."""
    found: list[Run] = []
    for run in reversed(runs):
        if run.end <= offset:
            break
        found.append(run)
    found.reverse()
    return found
