"""Readers of a log: in order and without gaps, from any offset, across files and memory.

A reader keeps an offset and no other state that could become stale. Before every chunk it asks the
log where that offset is: in memory, in a segment, in the past (`Past`), or not there yet. A slow
reader therefore falls back from memory to the files without losing anything. A fast one waits at
the end of the log, which makes the log commit at once.

Beware: without an end, iterating a reader waits for ever at the end of the log. `close`, from any
thread, ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Protocol, TypeAlias

from forebay.errors import CorruptFrame, ForebayError, UsageError
from forebay.files.disk import Disk
from forebay.format.content import first_at
from forebay.format.frame import Scan, scan
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import READ_CHUNK_BYTES
from forebay.wal import metrics
from forebay.wal.memory import FrameBatch
from forebay.wal.segment import ChunkReader, LogPosition, Segment, SegmentIndexes, require_complete
from forebay.wal.watermarks import TaskWaiter, ThreadWaiter, Visibility, Waiter


class Past(Protocol):
    """Reads messages that are no longer in the log, such as those in objects, for one reader."""

    def read(self, offset: int, end: int | None, bytes_max: int | None) -> Scan | None:
        """Returns at least one frame, the first at `offset`; None if the log has `offset` now.

        Holds at most `bytes_max` bytes of chunks, with those that are fetched ahead; None leaves it
        to the settings. Raises FrameTooLarge if one frame needs more. May wait for the network.
        """

    def close(self) -> None: ...


Plan: TypeAlias = list[FrameBatch] | Segment | Past | None
"""Where a reader's next offset is: memory, a segment or the past; None if it is not there yet."""


class ReadableLog(Protocol):
    """The part of a log that a reader uses."""

    def plan(self, reader: LogReader) -> Plan:
        """Returns where the reader's next offset is. Raises OffsetOutOfRange if it was deleted."""

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None:
        """The error to raise if the planned segment is no longer there, or None to plan again."""

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool:
        """Wakes `waiter` once the watermark reaches `target`; returns False if it already has."""

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool:
        """Removes a waiter that gave up; returns False if it was woken already."""


class Chunk(NamedTuple):
    """Frames fetched together; `next` is where the next ones begin if these are from a segment."""

    frames: Scan
    next: LogPosition | None = None


class LogReader:
    """Iterate it for messages, or call `frames()` for whole chunks of frames.

    Not thread-safe, except `close`. After an error the reader is still at its last message, and the
    next call tries again.
    """

    def __init__(
        self,
        log: ReadableLog,
        disk: Disk,
        indexes: SegmentIndexes,
        start: int,
        *,
        end: int | None,
        visibility: Visibility,
    ) -> None:
        self._log = log
        self._disk = disk
        self._indexes = indexes
        self._end = end
        self._chunks: ChunkReader | None = None
        self._messages: Iterator[StreamMessage] = iter(())
        self._fetched = start
        self._next: LogPosition | None = None
        self._waiter: Waiter | None = None
        self._closed = False
        self.visibility: Visibility = visibility
        self.position = start
        """The offset of the next message."""
        self.pinned: int | None = None
        """The segment that retention must not remove; set by the log."""
        self.moved_at = 0.0
        self.past: Past | None = None
        """Reads messages that are no longer in the log. Set by the log, closed by the reader."""
        self._bytes_max: int | None = None

    def __iter__(self) -> LogReader:
        return self

    def __next__(self) -> StreamMessage:
        try:
            while not self._closed:
                for message in self._messages:
                    self.position = message.msg_id.topic_offset + 1
                    return message
                frames = self._next_frames()
                if frames is None:
                    break
                self._messages = decode_messages(frames)
        except BaseException:
            self.rewind()
            raise
        raise StopIteration

    def find_time(self, time_ms: int, until: int) -> bool:
        """Moves to the first message before `until` that was published at `time_ms` or later.

        Returns False if there is none; the reader is then at `until` or after it. What was read
        with the message is kept for iterating.
        """
        self.rewind()
        try:
            while self._fetched < until and (frames := self._next_frames()) is not None:
                at = first_at(frames, time_ms)
                if at is not None and frames.offsets[at] < until:
                    self.position = frames.offsets[at]
                    self._messages = decode_messages(frames.part(at, len(frames)))
                    return True
                self.position = self._fetched
        except BaseException:
            self.rewind()
            raise
        return False

    def rewind(self) -> None:
        """Drops messages that were fetched but not returned yet.

        Called after an error or an interrupt, so that the next call raises the same error or
        returns the message that was due. It never skips one.
        """
        self._messages = iter(())
        self._next = None
        self._fetched = self.position

    def limit(self, bytes_max: int | None) -> None:
        """Limits the bytes that the reader holds: its chunk, and those that are fetched ahead.

        A larger frame raises FrameTooLarge. None, the default, sets the usual sizes.
        """
        if bytes_max != self._bytes_max:
            self._bytes_max = bytes_max
            self._chunks = None

    def release(self, position: int) -> None:
        """Drops everything in memory. The reader continues at `position` when it is called next."""
        self.position = position
        self.rewind()
        self._chunks = None
        self.leave_past()

    @property
    def end(self) -> int | None:
        """The offset that the reader stops before; None if it follows the log."""
        return self._end

    def leave_past(self) -> None:
        """Closes `past`, once the next offset is in the log again or the reader is done."""
        past, self.past = self.past, None
        if past is not None:
            past.close()

    def frames(self) -> Generator[Scan]:
        """Yields scanned frames, a chunk at a time; each is valid until the next is fetched."""
        self.rewind()
        while (frames := self._next_frames()) is not None:
            self.position = self._fetched
            held = [frames]
            del frames
            yield held.pop()  # so that only the caller refers to the chunk

    def close(self) -> None:
        """Ends the iteration, even if it is waiting in another thread."""
        self._closed = True
        self.pinned = None
        past = self.past
        if past is not None:
            past.close()
        waiter = self._waiter
        if waiter is not None:
            waiter.wake()
            self._log.delist(waiter, self.visibility)

    def __enter__(self) -> LogReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def finished(self) -> bool:
        return self._closed or (self._end is not None and self._fetched >= self._end)

    @property
    def wanted(self) -> int:
        """The next offset to fetch."""
        return self._fetched

    def _next_frames(self) -> Scan | None:
        while not self.finished:
            plan = self._log.plan(self)
            if plan is not None:
                chunk = self.fetch(plan, self.buffer(plan))
                if chunk is not None:
                    return self.accept(chunk)
                continue
            waiter = ThreadWaiter()
            woken = False
            try:
                woken = not self.begin_wait(waiter) or waiter.wait()
            finally:
                # `close` wakes before it removes, and may have been interrupted in between.
                self.end_wait(waiter, woken=woken and not self._closed)
        self.pinned = None
        self.leave_past()
        return None

    def begin_wait(self, waiter: Waiter) -> bool:
        """Wakes `waiter` when the next message is there or the reader is closed.

        Returns False if either is already the case. Call `end_wait` in any case.
        """
        self._waiter = waiter
        self._chunks = None  # a buffer is a megabyte, and many readers may wait for a long time
        if not self._log.enlist(self._fetched + 1, waiter, self.visibility):
            return False
        if self._closed:
            self._log.delist(waiter, self.visibility)
        return not self._closed

    def end_wait(self, waiter: Waiter, *, woken: bool) -> None:
        self._waiter = None
        if not woken:
            self._log.delist(waiter, self.visibility)

    def buffer(self, plan: Plan) -> ChunkReader | None:
        """The buffer to read a segment with; only one fetch at a time may use it.

        None if the plan names no segment.
        """
        if not isinstance(plan, Segment):
            return None
        if self._chunks is None:
            size = READ_CHUNK_BYTES if self._bytes_max is None else self._bytes_max
            self._chunks = ChunkReader(min(size, READ_CHUNK_BYTES), self._bytes_max)
        return self._chunks

    def fetch(
        self, plan: list[FrameBatch] | Segment | Past, chunks: ChunkReader | None
    ) -> Chunk | None:
        """Fetches frames from where `plan` says; does not change the reader's position.

        Returns None if they are no longer there: then ask the log for a new plan.
        """
        if isinstance(plan, list):
            return Chunk(self._from_memory(plan))
        if not isinstance(plan, Segment):
            frames = plan.read(self._fetched, self._end, self._bytes_max)
            return None if frames is None else Chunk(frames)
        assert chunks is not None, "a segment is read into a buffer"
        try:
            return self._from_segment(plan, chunks)
        except FileNotFoundError as error:
            failure = self._log.gone(self, plan)
            if failure is not None:
                raise failure from error
            return None

    def accept(self, chunk: Chunk) -> Scan:
        """Advances the reader past the chunk; returns its frames that the reader wanted."""
        self._next = chunk.next
        frames, first = chunk.frames, chunk.frames.offsets[0]
        start = self._fetched - first
        stop = len(frames) if self._end is None else min(len(frames), self._end - first)
        if start or stop < len(frames):
            frames = replace(
                frames,
                offsets=frames.offsets[start:stop],
                positions=frames.positions[start:stop],
                lengths=frames.lengths[start:stop],
            )
        self._fetched += len(frames)
        metrics.fetched(frames)
        return frames

    def _from_memory(self, batches: list[FrameBatch]) -> Scan:
        parts: list[Buffer] = []
        size = 0
        most = READ_CHUNK_BYTES
        if self._bytes_max is not None:
            most = min(self._bytes_max, most)
        for batch in batches:
            if parts and size + len(batch.data) > most:
                break
            parts.append(batch.data)
            size += len(batch.data)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        found = scan(data, expected=batches[0].first_offset, consecutive=True)
        require_complete(found, "memory", 0)
        return found

    def _from_segment(self, segment: Segment, chunks: ChunkReader) -> Chunk:
        known = self._next
        if known is not None and known.seq == segment.seq and known.offset == self._fetched:
            offset, position = known.offset, known.position
        else:
            offset, position = self._indexes.seek(segment, self._fetched)
        with closing(self._disk.open_read(segment.path)) as file:
            while True:
                found = chunks.read(file, position, segment.size, offset)
                if not len(found):
                    require_complete(found, segment.path, position)
                    raise CorruptFrame(
                        "the segment ends before its last message",
                        file=str(segment.path),
                        position=position,
                        offset=offset,
                    )
                position += found.safe_length
                offset += len(found)
                if offset > self._fetched:
                    return Chunk(found, LogPosition(segment.seq, position, offset))

    def abandon_buffer(self) -> None:
        """Leaves the buffer to a fetch that still runs in a thread after its task was cancelled."""
        self._chunks = None
        self.leave_past()


class AsyncLogReader:
    """A reader for asyncio; files are read on a thread, so that the event loop never blocks.

    One task at a time may iterate it. `close` may be called while it waits.
    """

    def __init__(
        self,
        log: ReadableLog,
        reader: LogReader,
        threads: Executor | None = None,
        locate: Callable[[], int] | None = None,
    ) -> None:
        """`locate` returns the offset to start at; it is called on a thread, before any read."""
        self._locate = locate
        self._log = log
        self._threads = threads
        self._reader = reader
        self._busy = False
        self._messages: Iterator[StreamMessage] = iter(())

    @property
    def position(self) -> int:
        """The offset of the next message."""
        return self._reader.position

    def __aiter__(self) -> AsyncLogReader:
        return self

    async def __anext__(self) -> StreamMessage:
        if self._busy:
            raise UsageError("only one task at a time may read a stream, and another is reading it")
        self._busy = True
        try:
            while not self._reader.closed:
                for message in self._messages:
                    self._reader.position = message.msg_id.topic_offset + 1
                    return message
                frames = await self._next_frames()
                if frames is None:
                    break
                self._messages = decode_messages(frames)
        except BaseException:
            self._messages = iter(())
            self._reader.rewind()
            raise
        finally:
            self._busy = False
        raise StopAsyncIteration

    async def next_frames(self) -> Scan | None:
        """Returns the next chunk of frames, or None at the end.

        A chunk is valid until the next call. One task at a time; do not mix this with iteration.
        """
        try:
            frames = None if self._reader.closed else await self._next_frames()
        except BaseException:
            self._reader.rewind()
            raise
        self._reader.position = self._reader.wanted
        return frames

    def frames_in_memory(self) -> Scan | None:
        """`next_frames`, if these are in memory now; None otherwise. It never waits."""
        reader = self._reader
        if self._locate is not None or reader.finished:
            return None
        try:
            plan = self._log.plan(reader)
            chunk = reader.fetch(plan, None) if isinstance(plan, list) else None
            frames = None if chunk is None else reader.accept(chunk)
        except BaseException:
            reader.rewind()
            raise
        reader.position = reader.wanted
        return frames

    def is_ready(self) -> bool:
        """Whether `next_frames` need not wait for a message to be appended."""
        return self._reader.finished or self._log.plan(self._reader) is not None

    async def wait(self) -> None:
        """Waits until the next message is there or the reader is closed. Holds no frames."""
        while not self.is_ready():
            await self._wait()

    def limit(self, bytes_max: int | None) -> None:
        """See `LogReader.limit`. Not while another task reads."""
        self._reader.limit(bytes_max)

    def release(self, position: int) -> None:
        """See `LogReader.release`. Not while another task reads."""
        self._messages = iter(())
        self._reader.release(position)

    def close(self) -> None:
        """Ends the iteration, even if another task is waiting in it."""
        self._reader.close()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self._reader.close()

    async def __aenter__(self) -> AsyncLogReader:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _next_frames(self) -> Scan | None:
        reader = self._reader
        if self._locate is not None:
            loop = asyncio.get_running_loop()
            reader.release(await loop.run_in_executor(self._threads, self._locate))
            self._locate = None
        while not reader.finished:
            plan = self._log.plan(reader)
            if plan is None:
                await self._wait()
                continue
            if isinstance(plan, list):
                chunk = reader.fetch(plan, None)
            else:
                chunk = await self._fetch_on_thread(plan)
            if chunk is not None:
                return reader.accept(chunk)
        reader.pinned = None
        reader.leave_past()
        return None

    async def _wait(self) -> None:
        waiter = TaskWaiter()
        woken = True
        try:
            if self._reader.begin_wait(waiter):
                await waiter.future
        except GeneratorExit:
            # The coroutine is being garbage-collected, perhaps on a thread that holds the log's
            # lock: take no lock here. The waiter stays until its message comes; waking it then
            # does nothing.
            raise
        except BaseException:
            woken = False
            raise
        finally:
            self._reader.end_wait(waiter, woken=woken)

    async def _fetch_on_thread(self, plan: Segment | Past) -> Chunk | None:
        # If this task is cancelled, the thread still reads into the buffer.
        chunks = self._reader.buffer(plan)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._reader.fetch, plan, chunks
            )
        except asyncio.CancelledError:
            self._reader.abandon_buffer()
            raise
