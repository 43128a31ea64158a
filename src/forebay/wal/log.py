"""`Wal`: the write-ahead log of one topic.

An append gets its offset, is encoded and queued, and returns; `commit` writes and syncs the queue
in groups. Frames reach the file in offset order whatever the number of producers, because offset
and place in the queue are given under one lock.

What a caller gets wrong: a `buffered` append that returned is in memory only. `wait` or `flush`
is what makes it last.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Executor
from contextlib import suppress
from typing import Literal

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import (
    ForebayError,
    LogClosed,
    LogStopped,
    MissingData,
    TopicFenced,
    UsageError,
)
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.frame import scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.format.names import SegmentNames, parse_topic
from forebay.limits import READER_PIN_SECONDS_MAX
from forebay.settings import WalSettings
from forebay.wal import metrics
from forebay.wal.append import Appender
from forebay.wal.cache import Run, newest_since
from forebay.wal.checkpoints import CheckpointStore
from forebay.wal.claim import Claim, Unclaimed
from forebay.wal.commit import REFUSE, Visibility
from forebay.wal.journal import open_journal
from forebay.wal.pool import WriterPool
from forebay.wal.reader import AsyncLogReader, LogReader, Plan, ReadableLog
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment, SegmentIndexes


class Wal(Appender):
    """One topic's log. Thread-safe; one instance at a time for each directory."""

    def __init__(
        self,
        settings: WalSettings,
        topic: str = "/default/topic",
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        pool: WriterPool | None = None,
        known_offset: int = 0,
        claim: Claim | None = None,
    ) -> None:
        name = str(parse_topic(topic))
        self._disk = disk or LocalDisk()
        claim = claim or Unclaimed()
        journal = open_journal(self._disk, settings, clock, claim, known_offset)
        self._own_pool = pool is None
        try:
            super().__init__(name, settings, clock, journal, pool or WriterPool(1, clock), claim)
        except BaseException:
            journal.close(clean=False)
            raise
        self._indexes = SegmentIndexes(self._disk, SegmentNames(settings.file_name))
        self._readers: weakref.WeakSet[LogReader] = weakref.WeakSet()

    # -- files ----------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """The files of the log, oldest first, as far as they are synced."""
        return list(self._journal.segments)

    @property
    def names(self) -> SegmentNames:
        return SegmentNames(self.settings.file_name)

    @property
    def disk(self) -> Disk:
        return self._disk

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The topic's checkpoints; None for a log in memory."""
        return self._journal.checkpoints

    def rotate(self) -> None:
        """Seals the active segment; the next append begins a new one."""
        self.flush()
        with self._files:
            with self._lock:
                self._require_open()
            self._guarded_rotate()
        with self._lock:
            self._require_open()

    def retain(self, deleter: Deleter, committed_offset: int) -> list[Segment]:
        """Removes the segments that the deleter chooses below `committed_offset`."""
        with self._files:
            with self._lock:
                self._require_open()
                chosen = deleter.choose(
                    [segment for segment in self._journal.segments if segment.count],
                    committed_offset=committed_offset,
                    pinned=self._pinned(),
                    now_ms=self._clock.now_ms(),
                )
                if not chosen:
                    return []
                self._journal.forget(chosen, chosen[-1].end_offset)
            try:
                self._journal.remove(chosen)
            except BaseException as error:
                self._stop(error)
                raise
        return chosen

    def _pinned(self) -> set[int]:
        oldest = self._clock.monotonic() - READER_PIN_SECONDS_MAX
        return {
            reader.pinned
            for reader in self._readers
            if reader.pinned is not None and reader.moved_at >= oldest
        }

    def shutdown(self) -> None:
        """Syncs what is queued, leaves a checkpoint, and releases the directory. Idempotent."""
        with self._lock:
            self._closed = True
            self._queued_max = REFUSE
            self._let_in()
        try:
            with self._files:
                self._release()
        finally:
            if self._own_pool and not self._forked:
                self._pool.close()
        with self._lock:
            if self._queue.next_offset > self._synced and not self._forked:
                self._require_open()

    def _release(self) -> None:
        """Once, whoever comes first; an interrupted one can be finished by the next."""
        if self._released:
            return
        if self._error is None:
            self._commit()
        with self._lock:
            self._end()
        self._released = True
        self._journal.close(clean=self._error is None)

    @property
    def released(self) -> bool:
        """Whether a shutdown came to its end: nothing of this log is written any more."""
        return self._released

    def abandon(self) -> None:
        """Releases a stopped log's directory, so that it can be opened anew."""
        with suppress(LogStopped, TopicFenced):  # those who waited were told when it stopped
            self.shutdown()

    # -- reading --------------------------------------------------------------------------------

    def tail_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        through: ReadableLog | None = None,
    ) -> LogReader:
        """A reader from an offset on; it waits at the end of the log unless it is given an `end`.

        `visibility="buffered"` sees messages before they are synced: they can vanish in a crash.
        `through` is a larger log that this one is the end of: the reader asks that instead.
        """
        if visibility not in self._waiters:
            raise UsageError(f"visibility is {visibility!r}; it must be 'synced' or 'buffered'")
        next_offset = self.current_offset()
        start = next_offset if from_offset == "latest" else from_offset
        if start > next_offset:
            raise self._out_of_range(start, f"the next one is {next_offset}")
        if through is None and start < self.start_offset:
            raise self._out_of_range(start, f"the oldest one here is {self.start_offset}")
        log = through or self
        reader = LogReader(log, self._disk, self._indexes, start, end=end, visibility=visibility)
        with self._lock:
            self._readers.add(reader)
        metrics.readers.add()
        return reader

    def async_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
        through: ReadableLog | None = None,
        threads: Executor | None = None,
    ) -> AsyncLogReader:
        """`tail_reader` for asyncio; `threads` read files, the event loop's own without them."""
        reader = self.tail_reader(from_offset, end=end, visibility=visibility, through=through)
        return AsyncLogReader(through or self, reader, threads)

    def read_cached_since(self, after_offset: int) -> tuple[list[tuple[int, StreamMessage]], int]:
        """Synced messages after `after_offset` that are in memory, and the next synced offset.

        The list starts at the first cached message; older ones are in the files.
        """
        with self._lock:
            synced, first = self._synced, self._cache.first
            start = max(after_offset + 1, 0 if first is None else first)
            runs = self._cache.since(start) or []
        messages = [
            (message.offset, message)
            for run in runs
            for message in decode_messages(scan(run.data, expected=run.first, consecutive=True))
            if message.offset >= start
        ]
        return messages, synced

    def cached_runs(self) -> list[Run]:
        """The synced frames that are in memory, as they are on disk."""
        with self._lock:
            first = self._cache.first
            return [] if first is None else self._cache.since(first) or []

    def in_memory(self) -> range:
        """The offsets that are in memory: cached ones, and those that are not synced yet."""
        with self._lock:
            first = self._cache.first
            return range(self._synced if first is None else first, self._queue.next_offset)

    def plan(self, reader: LogReader) -> Plan:
        """Where the reader's next offset is now."""
        offset = reader.wanted
        with self._lock:
            reader.pinned = None
            buffered = reader.visibility == "buffered"
            if offset >= (self._queue.next_offset if buffered else self._synced):
                return None
            runs = self._cache.since(offset)
            if runs is None and offset >= self._synced:
                self._close_tail()
                if self._commit_due():
                    self._schedule()
                self._flight = self._flight.closed()
                runs = newest_since([*self._flight.runs, *self._queue.runs], offset)
            if runs:
                return runs
            segment = self._journal.segments.find(offset)
            if segment is None:
                raise self._out_of_range(offset, f"the oldest one here is {self.start_offset}")
            reader.pinned = segment.seq
            reader.moved_at = self._clock.monotonic()
            return segment

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError:
        if reader.wanted < self.start_offset:
            return self._out_of_range(reader.wanted, f"the oldest one here is {self.start_offset}")
        if self.ended:  # whoever has the directory now may have removed it, or set it aside
            return LogClosed(f"{self.topic}: the log ended here, and {segment.path} went since")
        return MissingData(f"{segment.path} is missing, with offsets from {segment.first_offset}")
