"""Frames that are appended and not yet handed to the writer.

`tail` is a run that grows, one codec call for each append; `runs` are closed pieces before it.
The codec counts the frames itself, so an append is one atomic step: a signal that arrives in the
middle of it leaves a queue that is right. For the same reason everything else that changes a
queue makes a new one.
"""

from __future__ import annotations

from forebay.format.layout import Buffer
from forebay.format.pure import RUN_PREFIX, new_run, run_count, run_frames
from forebay.wal.cache import Run


class Queue:
    __slots__ = ("runs", "tail", "tail_first")

    def __init__(self, tail_first: int, runs: list[Run] | None = None) -> None:
        self.runs = runs or []
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
        return sum(len(run.data) for run in self.runs)

    def closed(self) -> Queue:
        """The same frames with an empty tail."""
        added = run_count(self.tail)
        if not added:
            return self
        run = Run(self.tail_first, added, run_frames(self.tail))
        return Queue(run.end, [*self.runs, run])

    def with_run(self, data: Buffer, count: int) -> Queue:
        """The same frames and `count` more, in one piece."""
        first = self.next_offset
        return Queue(first + count, [*self.closed().runs, Run(first, count, data)])
