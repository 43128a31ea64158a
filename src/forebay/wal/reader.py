"""Readers of a log: ordered, without gaps, from any offset, through files, memory and the live end.

A reader holds an offset and nothing else that could grow old. Before every piece it asks the log
anew where that offset is: in memory, in a segment, or not there yet. A slow reader therefore
falls back from memory to the files and loses nothing, and a fast one waits at the end, which has
the log commit at once what it waits for.

What a caller gets wrong: iterating a reader with no end waits for ever at the end of the log.
`close` from any thread ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from forebay.errors import CorruptFrame, ForebayError, UsageError
from forebay.files.disk import Disk
from forebay.format.frame import End, Scan, scan
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import READ_CHUNK_BYTES
from forebay.wal import metrics
from forebay.wal.cache import Run
from forebay.wal.segment import ChunkReader, Segment, SegmentIndexes, require_complete
from forebay.wal.waiters import TaskWaiter, ThreadWaiter, Waiter

if TYPE_CHECKING:
    from forebay.wal.commit import Visibility


class Past(Protocol):
    """Where messages are that are no longer in the log: what a reader of it holds."""

    def read(self, offset: int, end: int | None) -> Scan | None:
        """Frames from exactly `offset` on, at least one; None if the log has them by now.

        May take as long as a network does.
        """

    def close(self) -> None: ...


Plan: TypeAlias = list[Run] | Segment | Past | None
"""Where a reader's next offset is; None if it is not there yet."""


class ReadableLog(Protocol):
    """What a reader asks of its log."""

    def plan(self, reader: LogReader) -> Plan: ...

    def gone(self, reader: LogReader, segment: Segment) -> ForebayError | None:
        """What to raise when the planned segment is no longer there; None: plan again."""

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility) -> bool: ...

    def delist(self, waiter: Waiter, visibility: Visibility) -> bool: ...


class Place(NamedTuple):
    """Where in which segment the frames after a fetched piece are."""

    seq: int
    offset: int
    position: int


class Piece(NamedTuple):
    """Frames that were fetched, and where the next ones are if they came from a segment."""

    frames: Scan
    next_place: Place | None = None


class LogReader:
    """Iterate it for messages, or `frames()` for whole pieces. Not thread-safe, but for `close`."""

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
        self._place: Place | None = None
        self._waiter: Waiter | None = None
        self._closed = False
        self.visibility: Visibility = visibility
        self.position = start
        """The offset of the next message."""
        self.pinned: int | None = None
        """The segment that retention must leave alone; the log sets it."""
        self.moved_at = 0.0
        self.past: Past | None = None
        """What reads from before the log; the log sets it, and the reader closes it."""

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

    def rewind(self) -> None:
        """Forgets what was fetched and not yet handed out.

        After an error or an interrupt the reader is where its last message left it: who goes on
        gets the same error again, or the message that was due, and never the one behind it.
        """
        self._messages = iter(())
        self._place = None
        self._fetched = self.position

    @property
    def end(self) -> int | None:
        """Where the reader ends, if it does."""
        return self._end

    def leave_past(self) -> None:
        """For when the next offset is in the log again, or the reader is done."""
        past, self.past = self.past, None
        if past is not None:
            past.close()

    def frames(self) -> Iterator[Scan]:
        """Scanned frames, a piece at a time; each is valid until the next is asked for."""
        self.rewind()
        while (frames := self._next_frames()) is not None:
            self.position = self._fetched
            yield frames
            del frames  # else its buffer stays while the next one is fetched

    def close(self) -> None:
        """Ends the iteration, even one that waits in another thread."""
        self._closed = True
        self.pinned = None
        past = self.past
        if past is not None:
            past.close()
        waiter = self._waiter
        if waiter is not None and self._log.delist(waiter, self.visibility):
            waiter.wake()

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
                piece = self.fetch(plan, self.buffer())
                if piece is not None:
                    return self.accept(piece)
                continue
            waiter = ThreadWaiter()
            if self.begin_wait(waiter):
                woken = False
                try:
                    woken = waiter.wait()
                finally:
                    self.end_wait(waiter, woken=woken)
        self.pinned = None
        self.leave_past()
        return None

    def begin_wait(self, waiter: Waiter) -> bool:
        """Has `waiter` woken when the next message is there or the reader is closed.

        False if there is nothing to wait for.
        """
        self._waiter = waiter
        self._chunks = None  # many readers may wait for long, and a buffer is a megabyte
        try:
            waits = self._log.enlist(self._fetched + 1, waiter, self.visibility)
        except BaseException:
            self.end_wait(waiter, woken=False)
            raise
        if waits and not self._closed:
            return True
        self.end_wait(waiter, woken=not waits)
        return False

    def end_wait(self, waiter: Waiter, *, woken: bool) -> None:
        self._waiter = None
        if not woken:
            self._log.delist(waiter, self.visibility)

    def buffer(self) -> ChunkReader:
        """What to read segments with; one fetch at a time may use it."""
        if self._chunks is None:
            self._chunks = ChunkReader()
        return self._chunks

    def fetch(self, plan: list[Run] | Segment | Past, chunks: ChunkReader) -> Piece | None:
        """Gets frames from where the log says they are; changes nothing about the reader.

        None if they are no longer there, and the log knows where they are now.
        """
        if isinstance(plan, list):
            return Piece(self._from_memory(plan))
        if not isinstance(plan, Segment):
            frames = plan.read(self._fetched, self._end)
            return None if frames is None else Piece(frames)
        try:
            return self._from_segment(plan, chunks)
        except FileNotFoundError as error:
            failure = self._log.gone(self, plan)
            if failure is not None:
                raise failure from error
            return None

    def accept(self, piece: Piece) -> Scan:
        """Makes fetched frames the current ones."""
        self._place = piece.next_place
        frames = _until(_since(piece.frames, self._fetched), self._end)
        self._fetched += len(frames)
        metrics.fetched(frames)
        return frames

    def _from_memory(self, runs: list[Run]) -> Scan:
        parts: list[Buffer] = []
        size = 0
        for run in runs:
            parts.append(run.data)
            size += len(run.data)
            if size >= READ_CHUNK_BYTES:
                break
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        found = scan(data, expected=runs[0].first, consecutive=True)
        if found.end is not End.COMPLETE:
            raise CorruptFrame(
                found.end.describe(),
                file="memory",
                position=found.safe_length,
                offset=found.offset,
            )
        return found

    def _from_segment(self, segment: Segment, chunks: ChunkReader) -> Piece:
        place = self._place
        if place is not None and place.seq == segment.seq and place.offset == self._fetched:
            offset, position = place.offset, place.position
        else:
            offset, position = self._indexes.seek(segment, self._fetched)
        file = self._disk.open_read(segment.path)
        try:
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
                    return Piece(found, Place(segment.seq, offset, position))
        finally:
            file.close()

    def abandon_buffer(self) -> None:
        """For a fetch that goes on in another thread though nobody wants its result any more."""
        self._chunks = None
        self.leave_past()


def _since(frames: Scan, offset: int) -> Scan:
    skip = offset - frames.offsets[0]
    return _slice(frames, skip, len(frames)) if skip else frames


def _until(frames: Scan, end: int | None) -> Scan:
    if end is None or frames.offsets[-1] < end:
        return frames
    return _slice(frames, 0, end - frames.offsets[0])


def _slice(frames: Scan, start: int, stop: int) -> Scan:
    return replace(
        frames,
        offsets=frames.offsets[start:stop],
        positions=frames.positions[start:stop],
        lengths=frames.lengths[start:stop],
    )


# ---- A reader for asyncio, around the one for threads.


class AsyncLogReader:
    """A reader for asyncio: files are read on a thread, everything else on the event loop."""

    def __init__(
        self, log: ReadableLog, reader: LogReader, threads: Executor | None = None
    ) -> None:
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
            raise UsageError("the stream is waiting already: one task at a time may ask for more")
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
        """The next messages as a piece of frames; None at the end.

        A piece is valid until the next one is asked for. One task at a time; who iterates for
        messages does not ask for pieces.
        """
        try:
            frames = None if self._reader.closed else await self._next_frames()
        except BaseException:
            self._reader.rewind()
            raise
        self._reader.position = self._reader.wanted
        return frames

    def close(self) -> None:
        """Ends the iteration, even one that waits in another task."""
        self._reader.close()

    async def aclose(self) -> None:
        """Ends the iteration, even one that waits in another task."""
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
        while not reader.finished:
            plan = self._log.plan(reader)
            if plan is None:
                await self._wait()
                continue
            if isinstance(plan, list):
                piece = reader.fetch(plan, reader.buffer())
            else:
                piece = await self._fetch_on_thread(plan)
            if piece is not None:
                return reader.accept(piece)
        reader.pinned = None
        reader.leave_past()
        return None

    async def _wait(self) -> None:
        waiter = TaskWaiter()
        if not self._reader.begin_wait(waiter):
            return
        woken = True
        try:
            await waiter.future
        except GeneratorExit:
            # Collected, not cancelled, and perhaps by a thread that holds the log's lock: take no
            # lock here. The waiter stays until its message comes; waking it then does nothing.
            raise
        except BaseException:
            woken = False
            raise
        finally:
            self._reader.end_wait(waiter, woken=woken)

    async def _fetch_on_thread(self, plan: Segment | Past) -> Piece | None:
        # The thread gets its buffer from here: if this is cancelled it goes on reading into it.
        chunks = self._reader.buffer()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._reader.fetch, plan, chunks
            )
        except asyncio.CancelledError:
            self._reader.abandon_buffer()
            raise
