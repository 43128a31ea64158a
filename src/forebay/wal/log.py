"""`Wal`: the write-ahead log of one topic.

An append gets its offset, is encoded and queued, and returns; `commit` writes and syncs the queue
in groups. Frames reach the file in offset order whatever the number of producers, because offset
and place in the queue are given under one lock.

What a caller gets wrong: a `buffered` append that returned is in memory only. `wait` or `flush`
is what makes it last.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import LogStopped, OffsetOutOfRange, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.codec import append_one, encode_many
from forebay.format.frame import encode_frame, scan
from forebay.format.layout import Buffer
from forebay.format.message import (
    StreamMessage,
    decode_messages,
    encode_head,
    encode_message,
    encode_middle,
)
from forebay.format.names import SegmentNames, parse_topic
from forebay.format.pure import add_frame
from forebay.limits import ENCODE_BYTES_MAX, READER_PIN_SECONDS_MAX
from forebay.settings import WalSettings
from forebay.wal.commit import REFUSE, GroupCommit, Visibility
from forebay.wal.indexes import SegmentIndexes
from forebay.wal.journal import open_journal
from forebay.wal.memory import Run, newest_since
from forebay.wal.pool import WriterPool
from forebay.wal.reader import AsyncLogReader, LogReader, Plan
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment

Durability: TypeAlias = Literal["buffered", "synced"]
_DURABILITIES: Final = frozenset({"buffered", "synced"})


class Wal(GroupCommit):
    """One topic's log. Thread-safe; one instance at a time for each directory."""

    def __init__(
        self,
        settings: WalSettings,
        topic: str = "/default/topic",
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        pool: WriterPool | None = None,
    ) -> None:
        name = str(parse_topic(topic))
        self._disk = disk or LocalDisk()
        journal = open_journal(self._disk, settings, clock)
        self._own_pool = pool is None
        super().__init__(name, settings, clock, journal, pool or WriterPool(1, clock))
        self._now_ms = clock.now_ms
        self._head = encode_head(0, 0, name, "")
        self._middle = encode_middle("", None)
        self._indexes = SegmentIndexes(self._disk, SegmentNames(settings.file_name))
        self._readers: weakref.WeakSet[LogReader] = weakref.WeakSet()

    # -- appending ------------------------------------------------------------------------------

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """Appends one message and answers its offset; `synced` returns when it would survive."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        lock = self._lock
        lock.acquire()  # half the price of `with`, and this is the hot path
        try:
            if self._queued_bytes >= self._queued_max:
                self._wait_for_room()
            queue = self._queue
            tail = queue.tail
            offset: int = append_one(
                tail,
                queue.tail_first,
                self._head,
                self._middle,
                payload,
                self._now_ms(),
                attributes,
                routing_key,
            )
            if durability == "synced":
                waiter = self._join_commit(offset + 1)
            elif len(tail) >= self._notice_bytes:
                self._notice()
        finally:
            lock.release()
        if durability == "synced":
            self._await_commit(waiter, offset + 1, None)
        return offset

    def append_message(self, message: StreamMessage, durability: Durability = "buffered") -> int:
        """Appends a message with all its fields as they are, but for the offset."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        with self._lock:
            if self._queued_bytes >= self._queued_max:
                self._wait_for_room()
            offset = self._queue.next_offset
            add_frame(self._queue.tail, encode_frame(offset, encode_message(message, offset)))
            self._notice()
        if durability == "synced":
            self.await_synced(offset + 1)
        return offset

    def append_many(
        self,
        payloads: Sequence[Buffer],
        attributes: Sequence[Mapping[str, str] | None] | None = None,
        routing_keys: Sequence[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """Appends messages with consecutive offsets; other appends wait meanwhile.

        A batch larger than the queue's bound is taken in pieces, as the writer makes room.
        """
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        for name, column in (("attributes", attributes), ("routing_keys", routing_keys)):
            if column is not None and len(column) != len(payloads):
                raise UsageError(f"{len(payloads)} payloads, but {len(column)} {name}")
        with self._lock:
            self._wait_for_room()
            self._exclusive, self._queued_max = True, REFUSE
            try:
                offsets = self._enqueue_many(payloads, attributes, routing_keys)
            finally:
                self._exclusive = False
                if not self._closed and self._error is None:
                    self._queued_max = self.settings.queue_max_bytes
                self._room.notify_all()
        if durability == "synced" and offsets:
            self.await_synced(offsets.stop)
        return offsets

    def _enqueue_many(
        self,
        payloads: Sequence[Buffer],
        attributes: Sequence[Mapping[str, str] | None] | None,
        routing_keys: Sequence[str | None] | None,
    ) -> range:
        first = self._queue.next_offset
        index = 0
        while index < len(payloads):
            while self._queued_bytes >= self.settings.queue_max_bytes:
                self._schedule()
                self._room.wait()
                self._require_open()
            data, after = encode_many(
                self._head,
                self._middle,
                first + index,
                payloads,
                index,
                self._now_ms(),
                attributes,
                routing_keys,
                min(ENCODE_BYTES_MAX, self.settings.rotate_max_bytes or ENCODE_BYTES_MAX),
            )
            self._queue = self._queue.with_run(data, after - index)
            self._queued_bytes += len(data)
            index = after
            self._notice()
        return range(first, first + index)

    async def append_async(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """`append` for asyncio: neither a full queue nor a sync blocks the event loop."""
        if durability not in _DURABILITIES:
            raise _unknown_durability(durability)
        while self._queued_bytes >= self.settings.queue_max_bytes:
            await self.await_watermark(self._synced + 1, "synced")
        offset = self.append(payload, attributes, routing_key)
        if durability == "synced":
            await self.wait_async(offset)
        return offset

    def wait(self, offset: int, timeout: float | None = None) -> None:
        """Returns when the message at `offset` would survive a crash."""
        self._require_appended(offset)
        self.await_synced(offset + 1, timeout)

    async def wait_async(self, offset: int) -> None:
        """`wait` for asyncio; cancelling it changes nothing about the message."""
        self._require_appended(offset)
        await self.await_watermark(offset + 1, "synced", producer=True)

    def flush(self, timeout: float | None = None) -> None:
        """Returns when everything appended so far is synced."""
        self.await_synced(self.current_offset(), timeout)

    def _require_appended(self, offset: int) -> None:
        end = self.current_offset()
        if not 0 <= offset < end:
            raise self._out_of_range(offset, f"it was never appended; the next one is {end}")

    def _out_of_range(self, offset: int, why: str) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"{self.topic}: offset {offset} is not in the log: {why}",
            start=self.start_offset,
            end=self.current_offset(),
        )

    # -- files ----------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        if self.settings.dir is None:
            first = self._cache.first
            return self._synced if first is None else first
        return self._journal.start_offset

    def segments(self) -> list[Segment]:
        """The files of the log, oldest first, as far as they are synced."""
        return list(self._journal.segments)

    def rotate(self) -> None:
        """Seals the active segment; the next append begins a new one."""
        self.flush()
        with self._files:
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
            if self._closed:
                return
            self._closed = True
            self._queued_max = REFUSE
            self._room.notify_all()
        with self._files:
            if self._error is None:
                self._commit()
            with self._lock:
                self._end()
            self._journal.close(clean=self._error is None)
        if self._own_pool:
            self._pool.close()
        with self._lock:
            if self._queue.next_offset > self._synced:
                self._require_open()

    def abandon(self) -> None:
        """Releases a stopped log's directory, so that it can be opened anew."""
        try:
            self.shutdown()
        except LogStopped:
            # Those who waited were told when it stopped.
            return

    # -- reading --------------------------------------------------------------------------------

    def tail_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
    ) -> LogReader:
        """A reader from an offset on; it waits at the end of the log unless it is given an `end`.

        `visibility="buffered"` sees messages before they are synced: they can vanish in a crash.
        """
        if visibility not in self._waiters:
            raise UsageError(f"visibility is {visibility!r}; it must be 'synced' or 'buffered'")
        next_offset = self.current_offset()
        start = next_offset if from_offset == "latest" else from_offset
        if start > next_offset:
            raise self._out_of_range(start, f"the next one is {next_offset}")
        if start < self.start_offset:
            raise self._out_of_range(start, f"the oldest one here is {self.start_offset}")
        reader = LogReader(self, self._disk, self._indexes, start, end=end, visibility=visibility)
        with self._lock:
            self._readers.add(reader)
        return reader

    def async_reader(
        self,
        from_offset: int | Literal["latest"],
        *,
        end: int | None = None,
        visibility: Visibility = "synced",
    ) -> AsyncLogReader:
        """`tail_reader` for asyncio."""
        return AsyncLogReader(self, self.tail_reader(from_offset, end=end, visibility=visibility))

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

    def plan(self, reader: LogReader) -> Plan:
        """Where the reader's next offset is now."""
        offset = reader.wanted
        with self._lock:
            buffered = reader.visibility == "buffered"
            if offset >= (self._queue.next_offset if buffered else self._synced):
                return None
            reader.pinned = None
            runs = self._cache.since(offset)
            if runs is None and offset >= self._synced:
                self._flight, self._queue = self._flight.closed(), self._queue.closed()
                runs = newest_since([*self._flight.runs, *self._queue.runs], offset)
            if runs:
                return runs
            segment = self._journal.segments.find(offset)
            if segment is None:
                raise self._out_of_range(offset, f"the oldest one here is {self.start_offset}")
            reader.pinned = segment.seq
            reader.moved_at = self._clock.monotonic()
            return segment


def _unknown_durability(durability: object) -> UsageError:
    return UsageError(f"durability is {durability!r}; it must be 'buffered' or 'synced'")
