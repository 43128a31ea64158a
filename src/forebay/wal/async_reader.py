"""A reader for asyncio, around the one for threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from types import TracebackType

from forebay.errors import UsageError
from forebay.format.frame import Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.wal.reader import LogReader, Past, Piece, ReadableLog
from forebay.wal.segment import Segment
from forebay.wal.waiters import TaskWaiter


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
