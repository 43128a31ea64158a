"""The frames of a log that are in memory: appended and not yet written, or synced and cached.

A `FrameBatch` is a number of consecutive frames in one buffer. The `Queue` holds those that the
writer has not taken yet, which cannot be dropped; the `FrameCache` holds synced ones, up to a
number of messages and of bytes, and drops the oldest first, a whole batch at a time.

None of this is thread-safe: the lock of the group commit guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forebay.format.layout import Buffer
from forebay.format.pure import RUN_PREFIX, new_run, run_count, run_frames


class FrameBatch(NamedTuple):
    first_offset: int
    messages: int
    data: Buffer

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.messages


class Queue:
    """Frames that are appended and not yet taken by the writer.

    `tail` is a buffer that grows by one call of the codec for each append; `batches` are the
    closed ones before it. The codec counts the frames itself, so an append is one atomic step: a
    signal that arrives in the middle of it leaves a queue that is right. For the same reason
    everything else that changes a queue makes a new one.
    """

    __slots__ = ("batches", "tail", "tail_first")

    def __init__(self, tail_first: int, batches: list[FrameBatch] | None = None) -> None:
        self.batches = batches or []
        self.tail = new_run()
        self.tail_first = tail_first

    @property
    def next_offset(self) -> int:
        return self.tail_first + run_count(self.tail)

    @property
    def tail_bytes(self) -> int:
        return len(self.tail) - RUN_PREFIX.size

    @property
    def closed_bytes(self) -> int:
        return sum(len(batch.data) for batch in self.batches)

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
        """The oldest offset that is still served; None when nothing is cached."""
        try:
            # A batch is dropped whole, so more may be held than is served; what is served is exact.
            newest = self._batches[-1].end_offset
            return max(self._batches[0].first_offset, newest - self._messages_max)
        except IndexError:
            # Nothing is there, or the last of it went this moment: some ask without the lock.
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
        """The batches that hold `offset` and all after it, or None when it is not served here."""
        first = self.first_offset
        if first is None or offset < first or offset >= self._batches[-1].end_offset:
            return None
        return batches_since(self._batches, offset)


def batches_since(batches: Sequence[FrameBatch], offset: int) -> list[FrameBatch]:
    """The batches of an ordered sequence that end after `offset`; looks from the newest back."""
    found: list[FrameBatch] = []
    for batch in reversed(batches):
        if batch.end_offset <= offset:
            break
        found.append(batch)
    found.reverse()
    return found
