"""`Feed`: the reads of one topic, shared by all its subscriptions.

A subscription asks for the chunk of messages at an offset. Chunks that were read lately are kept,
within a limit of bytes, so that subscriptions at the same place read a range once, from whatever
tier it is in. A message is decoded when the first subscription needs it, and its encoding for
clients is made once.

At the end of the log nobody polls: the log wakes the feed, and the feed wakes the subscriptions
that asked for it.

A feed with `visibility="buffered"` also reads messages that are not synced yet. A crash can take
them back, and others get their offsets.

Beware: a feed belongs to one event loop. A log that has ended, after an error of the disk, has a
successor in the store, which recovers it: whoever reads next gets the topic from there again. The
end that was known is no proof that there is nothing to read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from forebay.errors import LogClosed, LogStopped, TopicFenced
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import FEED_BYTES_MAX, FEED_CHUNKS_MAX, FEED_READERS_MAX
from forebay.topic.store import Topic
from forebay.wal.reader import AsyncLogReader
from forebay.wal.watermarks import CallWaiter, Visibility

_log: Final = logging.getLogger("forebay.dispatch")
_RETRY_SECONDS: Final = 1.0
_ENDED: Final = (LogStopped, LogClosed, TopicFenced)


class Delivery:
    """One message on its way to consumers."""

    __slots__ = ("_frames", "_row", "message", "offset", "wire")

    def __init__(self, message: StreamMessage, frames: Scan, row: int) -> None:
        self.message = message
        self.offset = message.msg_id.topic_offset
        self.wire: bytes | None = None
        """The message as clients get it, once somebody has encoded it."""
        self._frames = frames
        self._row = row

    @property
    def size(self) -> int:
        return self._frames.lengths[self._row] + HEADER_BYTES

    @property
    def frame(self) -> memoryview:
        """The whole frame, as it is stored."""
        position = self._frames.positions[self._row]
        end = position + self._frames.lengths[self._row]
        return memoryview(self._frames.buffer)[position - HEADER_BYTES : end]


class Chunk:
    """Consecutive messages, decoded one after the other as they are needed."""

    def __init__(self, frames: Scan) -> None:
        # A copy, because the reader uses its buffer again.
        data = bytes(memoryview(frames.buffer)[: frames.positions[-1] + frames.lengths[-1]])
        self._frames = frames.over(data)
        self.first = int(frames.offsets[0])
        self.end = self.first + len(frames)
        self.size = len(data)
        self._known: list[Delivery] = []
        self._decoder: Iterator[StreamMessage] = decode_messages(self._frames)

    def __contains__(self, offset: int) -> bool:
        return self.first <= offset < self.end

    def __getitem__(self, offset: int) -> Delivery:
        """The message at an offset of this chunk; MessageError if it cannot be decoded."""
        row = offset - self.first
        while len(self._known) <= row:
            at = len(self._known)
            try:
                message = next(self._decoder)
            except BaseException:
                # Or the next call would find an exhausted iterator instead of the same error.
                self._decoder = decode_messages(self._frames.part(at, len(self._frames)))
                raise
            self._known.append(Delivery(message, self._frames, at))
        return self._known[row]

    def published_ms(self, offset: int) -> int | None:
        """When the message at an offset of this chunk was published, if it was decoded before."""
        row = offset - self.first
        return self._known[row].message.publish_time if row < len(self._known) else None


class ChunkCache:
    """The chunks that the feeds of all topics keep, within one limit of bytes."""

    def __init__(self, bytes_max: int = FEED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[Chunk, Feed] = OrderedDict()
        """Those used last are at the end."""

    def add(self, chunk: Chunk, feed: Feed) -> None:
        self._kept[chunk] = feed
        self._bytes += chunk.size
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._kept[oldest].drop(oldest)

    def used(self, chunk: Chunk) -> None:
        self._kept.move_to_end(chunk)

    def remove(self, chunk: Chunk) -> None:
        if self._kept.pop(chunk, None) is not None:
            self._bytes -= chunk.size


class Feed:
    """Reads one topic for all its subscriptions, in one event loop."""

    def __init__(
        self,
        topic: Topic,
        reopen: Callable[[], Awaitable[Topic]],
        cache: ChunkCache,
        visibility: Visibility = "synced",
    ) -> None:
        self.topic = topic
        self._reopen = reopen
        self._cache = cache
        self._visibility = visibility
        self._chunks: list[Chunk] = []
        self._kept_end = 0
        """No chunk had an offset from here on."""
        self._reading: dict[int, asyncio.Task[Chunk | None]] = {}
        self._readers: deque[AsyncLogReader] = deque()
        self._waiting: dict[Callable[[], None], int] = {}
        self._watch: tuple[Topic, CallWaiter] | None = None
        """What is woken when the log has more, and the topic that wakes it."""
        self._opening = asyncio.Lock()

    async def read(self, offset: int) -> Chunk | None:
        """Returns the messages from `offset` on, or None if there is none yet.

        The chunk begins after `offset` if there are only accepted holes before it. Raises
        OffsetOutOfRange, LostOffsets, and what reading raises.
        """
        if offset >= self._end and not self.topic.ended:
            return None
        found = self.read_now(offset)
        if found is not None:
            return found
        task = self._reading.get(offset)
        if task is None:
            task = asyncio.create_task(self._fetch(offset))
            self._reading[offset] = task
            task.add_done_callback(lambda done: self._fetched(offset, done))
        return await asyncio.shield(task)

    @property
    def _end(self) -> int:
        """The offset before which there are messages to read."""
        return self.topic.visible_offset(self._visibility)

    def read_now(self, offset: int) -> Chunk | None:
        """Returns the messages from `offset` on if they are in memory, or None. It never waits."""
        if offset >= self._end or self.topic.ended:
            return None
        found = self._kept(offset)
        if found is not None or offset in self._reading:
            return found
        if offset < self.topic.in_memory().start:
            return None
        reader = self._reader(offset)
        try:
            frames = reader.frames_in_memory()
        except BaseException:
            reader.close()
            raise
        self._keep_reader(reader)
        return None if frames is None else self._keep(Chunk(frames))

    def _fetched(self, offset: int, task: asyncio.Task[Chunk | None]) -> None:
        del self._reading[offset]
        if not task.cancelled():
            task.exception()  # those who still wait get it; there may be nobody

    def _kept(self, offset: int) -> Chunk | None:
        if offset >= self._kept_end:
            return None
        for chunk in reversed(self._chunks):
            if offset in chunk:
                self._cache.used(chunk)
                return chunk
        return None

    def published_ms(self, offset: int) -> int | None:
        """When a message was published, if it was read not long ago. For any thread."""
        for chunk in reversed(self._chunks):
            if offset in chunk:
                return chunk.published_ms(offset)
        return None

    async def _fetch(self, offset: int) -> Chunk | None:
        if self.topic.ended:
            await self._open_again()
        try:
            return await self._fetch_once(offset)
        except _ENDED:
            await self._open_again()
            return await self._fetch_once(offset)

    async def _fetch_once(self, offset: int) -> Chunk | None:
        if offset >= self._end:
            return None
        reader = self._reader(offset)
        try:
            frames = await reader.next_frames()
        except BaseException:
            reader.close()
            raise
        self._keep_reader(reader)
        return None if frames is None else self._keep(Chunk(frames))

    def _reader(self, offset: int) -> AsyncLogReader:
        """A reader that continues here, or a new one; the caller has it alone."""
        for reader in self._readers:
            if reader.position == offset:
                self._readers.remove(reader)
                return reader
        return self.topic.stream(offset, visibility=self._visibility)

    def _keep_reader(self, reader: AsyncLogReader) -> None:
        self._readers.append(reader)
        if len(self._readers) > FEED_READERS_MAX:
            self._readers.popleft().close()

    def _keep(self, chunk: Chunk) -> Chunk:
        if len(self._chunks) >= FEED_CHUNKS_MAX:
            self.drop(self._chunks[0])
        self._chunks.append(chunk)
        self._kept_end = max(self._kept_end, chunk.end)
        self._cache.add(chunk, self)
        return chunk

    def drop(self, chunk: Chunk) -> None:
        self._chunks.remove(chunk)
        self._cache.remove(chunk)

    def forget(self) -> None:
        """Drops what was read: nobody needs it for now."""
        self._kept_end = 0
        for chunk in self._chunks.copy():
            self.drop(chunk)
        while self._readers:
            self._readers.pop().close()

    # -- the end of the log ---------------------------------------------------------------------

    def wake_beyond(self, offset: int, wake: Callable[[], None]) -> None:
        """Calls `wake` once there is a message at `offset` or later, or the log has ended."""
        if offset < self._end:
            # It came after the caller looked.
            asyncio.get_running_loop().call_soon(wake)
            return
        self._waiting[wake] = offset
        if self._watch is None:
            self._watch_end()

    def wake_no_more(self, wake: Callable[[], None]) -> None:
        self._waiting.pop(wake, None)
        if not self._waiting:
            self._watch_no_more()

    def _watch_end(self) -> None:
        waiter = CallWaiter(lambda: self._end_moved(waiter))
        self._watch = self.topic, waiter
        try:
            enlisted = self.topic.enlist(self._end + 1, waiter, self._visibility)
        except _ENDED:
            enlisted = False  # those who wake up read, and open the log again
        if not enlisted:
            waiter.wake()

    def _watch_no_more(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            topic, waiter = watch
            topic.delist(waiter, self._visibility)

    def _end_moved(self, waiter: CallWaiter) -> None:
        if self._watch is None or self._watch[1] is not waiter:
            return  # it gave up, and was woken nevertheless
        topic, self._watch = self._watch[0], None
        self._wake(None if topic.ended else topic.visible_offset(self._visibility))
        if self._waiting and self._watch is None:
            self._watch_end()

    def _wake(self, end: int | None) -> None:
        ready = [wake for wake, offset in self._waiting.items() if end is None or offset < end]
        for wake in ready:
            del self._waiting[wake]
            wake()

    async def _open_again(self) -> None:
        """Gets the topic from the store again if its log has ended, once for all who ask."""
        async with self._opening:
            if self.topic.ended:
                self.forget()
                self.topic = await self._reopen()

    async def close(self) -> None:
        self._waiting.clear()
        self._watch_no_more()
        tasks = [*self._reading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.forget()
