"""Frames that are appended and not yet handed to the writer.

`tail` takes single frames, one list append each; `runs` are closed pieces before it. The next
offset is a matter of counting, so an append is one atomic step: a signal that arrives in the
middle of it leaves a queue that is right. For the same reason everything else that changes a
queue makes a new one.
"""

from __future__ import annotations

from forebay.wal.memory import Run, join_frames


class Queue:
    __slots__ = ("runs", "tail", "tail_first")

    def __init__(self, tail_first: int, runs: list[Run] | None = None) -> None:
        self.runs = runs or []
        self.tail: list[bytes] = []
        self.tail_first = tail_first

    @property
    def next_offset(self) -> int:
        return self.tail_first + len(self.tail)

    def closed(self) -> Queue:
        """The same frames with an empty tail."""
        if not self.tail:
            return self
        return Queue(self.next_offset, [*self.runs, *join_frames(self.tail_first, self.tail)])

    def with_run(self, data: bytes, count: int) -> Queue:
        """The same frames and `count` more, in one piece."""
        first = self.next_offset
        return Queue(first + count, [*self.closed().runs, Run(first, count, data)])
