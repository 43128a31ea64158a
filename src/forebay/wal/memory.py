"""Frames of a log in memory: queued for the writer, or synced and cached for readers.

A `FrameBatch` is one buffer of frames with consecutive offsets. The `Queue` holds batches that the
writer has not taken yet and that must not be dropped. The `FrameCache` holds synced batches, up to
a number of messages and of bytes. It drops the oldest first, a whole batch at a time.

Beware: none of this is thread-safe. The lock of the group commit guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forebay.format.layout import Buffer
from forebay.format.pure import RUN_PREFIX, new_run, run_count, run_frames
from forebay.limits import BATCH_MERGED_BYTES


class FrameBatch(NamedTuple):
    """Encoded frames with consecutive offsets in one buffer."""

    first_offset: int
    messages: int
    data: Buffer

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.messages


class Queue:
    """Frames that were appended and that the writer has not taken yet.

    `batches` are closed. `tail` is a buffer after them that grows by one frame with each append.
    The codec counts the frames in the tail, so that an append is one atomic step: a signal in the
    middle of it leaves a consistent queue. For the same reason every other change returns a new
    queue.
    """

    __slots__ = ("batches", "tail", "tail_first")

    def __init__(self, tail_first: int, batches: list[FrameBatch] | None = None) -> None:
        self.batches = batches or []
        self.tail = new_run()
        self.tail_first = tail_first

    @property
    def next_offset(self) -> int:
        frames: int = RUN_PREFIX.unpack_from(self.tail)[0]
        return self.tail_first + frames

    @property
    def tail_bytes(self) -> int:
        return len(self.tail) - RUN_PREFIX.size

    @property
    def closed_bytes(self) -> int:
        return sum(len(batch.data) for batch in self.batches)

    @property
    def total_bytes(self) -> int:
        return self.closed_bytes + self.tail_bytes

    def closed(self) -> Queue:
        """The same frames with an empty tail."""
        added = run_count(self.tail)
        if not added:
            return self
        batch = FrameBatch(self.tail_first, added, run_frames(self.tail))
        return Queue(batch.end_offset, [*self.batches, batch])

    def with_batch(self, data: Buffer, messages: int) -> Queue:
        """The same frames and `messages` more, in one buffer."""
        first = self.next_offset
        batch = FrameBatch(first, messages, data)
        return Queue(batch.end_offset, [*self.closed().batches, batch])


def merged(batches: Sequence[FrameBatch], bytes_max: int) -> list[FrameBatch]:
    """The same frames, small batches joined to larger ones: each batch has a price of its own.

    None that was joined has more than `bytes_max` bytes, nor more than BATCH_MERGED_BYTES.
    """
    most = min(bytes_max, BATCH_MERGED_BYTES)
    found: list[FrameBatch] = []
    parts: list[FrameBatch] = []
    size = 0
    for batch in batches:
        if parts and size + len(batch.data) > most:
            found.append(_joined(parts))
            parts, size = [], 0
        parts.append(batch)
        size += len(batch.data)
    return [*found, _joined(parts)] if parts else found


def _joined(parts: Sequence[FrameBatch]) -> FrameBatch:
    if len(parts) == 1:
        return parts[0]
    data = b"".join(part.data for part in parts)
    return FrameBatch(parts[0].first_offset, sum(part.messages for part in parts), data)


class FrameCache:
    """Synced batches, oldest first."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._batches: deque[FrameBatch] = deque()
        self._messages = 0
        self._bytes = 0

    @property
    def first_offset(self) -> int | None:
        """The oldest offset that `since` returns; None if nothing is cached.

        May be called without the lock.
        """
        try:
            # Batches are dropped whole, so the cache may hold more than it serves; this is exact.
            newest = self._batches[-1].end_offset
            return max(self._batches[0].first_offset, newest - self._messages_max)
        except IndexError:
            # The cache is empty, or became empty just now.
            return None

    def extend(self, batches: Iterable[FrameBatch]) -> None:
        for batch in batches:
            self._batches.append(batch)
            self._messages += batch.messages
            self._bytes += len(batch.data)
        held = self._batches
        while held and (
            self._bytes > self._bytes_max or self._messages - held[0].messages >= self._messages_max
        ):
            dropped = held.popleft()
            self._messages -= dropped.messages
            self._bytes -= len(dropped.data)

    def since(self, offset: int) -> list[FrameBatch] | None:
        """The cached batches from the one with `offset` on; None if `offset` is not cached."""
        first = self.first_offset
        if first is None or offset < first or offset >= self._batches[-1].end_offset:
            return None
        return batches_since(self._batches, offset)


def batches_since(batches: Sequence[FrameBatch], offset: int) -> list[FrameBatch]:
    """The batches of an ordered sequence that end after `offset`; searches from the newest."""
    found: list[FrameBatch] = []
    for batch in reversed(batches):
        if batch.end_offset <= offset:
            break
        found.append(batch)
    found.reverse()
    return found
