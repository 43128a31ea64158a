"""`Offsets`: a sorted set of offsets that is mostly emptied from its lowest one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final

_GONE_MIN: Final = 64
"""The list is cut when this many offsets at its start, and half of it, are gone."""


class Offsets:
    """A list and the index of its lowest offset: to remove that one moves nothing."""

    __slots__ = ("_list", "_start")

    def __init__(self) -> None:
        self._list: list[int] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._list) - self._start

    def __iter__(self) -> Iterator[int]:
        """Ascending; the set must not change meanwhile."""
        return islice(self._list, self._start, None)

    @property
    def first(self) -> int | None:
        return self._list[self._start] if self._start < len(self._list) else None

    def add(self, offset: int) -> None:
        """Adds an offset that is not in the set."""
        if not self._list or offset > self._list[-1]:
            self._list.append(offset)
        else:
            self._list.insert(bisect_left(self._list, offset, self._start), offset)

    def discard(self, offset: int) -> None:
        at = bisect_left(self._list, offset, self._start)
        if at >= len(self._list) or self._list[at] != offset:
            return
        if at > self._start:
            del self._list[at]
            return
        self._start += 1
        if self._start == len(self._list):
            self.clear()
        elif self._start > _GONE_MIN and 2 * self._start > len(self._list):
            del self._list[: self._start]
            self._start = 0

    def clear(self) -> None:
        self._list.clear()
        self._start = 0
