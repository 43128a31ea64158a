"""The sparse index of an object while it is written: an entry every so often, never too many.

An entry after every 1,000 messages or 1 MiB, whichever comes first. When there are too many,
every second one goes and both intervals double, so the index of any object fits its descriptor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from forebay.format.descriptor import Index
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.limits import OBJECT_INDEX_BYTES, OBJECT_INDEX_ENTRIES_MAX, OBJECT_INDEX_MESSAGES


class ObjectIndex:
    __slots__ = ("_bytes", "_messages", "_next_offset", "_next_position", "entries")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self.entries: list[tuple[int, int]] = list(entries)
        self._messages = OBJECT_INDEX_MESSAGES
        self._bytes = OBJECT_INDEX_BYTES
        self._expect()

    def add(self, frames: Scan, position: int) -> None:
        """Notes scanned frames that lie in the object from `position` on, in order."""
        if not len(frames):
            return
        first = frames.offsets[0]
        start = frames.positions[0] - HEADER_BYTES
        at = 0
        while True:
            # The next entry is the first frame that is due by count or by bytes.
            by_bytes = self._next_position - position + start + HEADER_BYTES
            at = max(
                at,
                min(
                    max(self._next_offset - first, 0),
                    bisect_left(frames.positions, max(by_bytes, 0)),
                ),
            )
            if at >= len(frames):
                return
            self._append(first + at, position + frames.positions[at] - HEADER_BYTES - start)
            at += 1

    def frozen(self) -> Index:
        return tuple(self.entries)

    def _append(self, offset: int, position: int) -> None:
        self.entries.append((offset, position))
        if len(self.entries) > OBJECT_INDEX_ENTRIES_MAX:
            del self.entries[1::2]
            self._messages *= 2
            self._bytes *= 2
        self._expect()

    def _expect(self) -> None:
        offset, position = self.entries[-1] if self.entries else (0, 0)
        self._next_offset = offset + self._messages if self.entries else 0
        self._next_position = position + self._bytes if self.entries else 0
