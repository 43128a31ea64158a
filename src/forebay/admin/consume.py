"""`GET /v1/topics/{namespace}/{topic}/messages`: messages out, as lines, over all tiers.

The reader is the log's own: from objects through files and memory to the live end. It works on
pieces of frames; files and objects are read on a thread, one hop a piece, and a client that is
slow holds its own reader back and nobody else's. The threads are as many as there may be readers,
and nobody else's: an object store that hangs holds who reads from it.

A client that takes nothing for long is left. Where every place is taken, one that takes nothing for
some seconds is left for a new one.

What is known before the first message is a status; what happens later is a last line
`{"error": ...}`. So is the server's end, which says where to go on. While nothing comes, a blank
line now and then tells that the server lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from starlette.types import Message, Receive, Scope, Send

from forebay.admin.bodies import message_lines, plain_line
from forebay.admin.problems import ERRORS, facts_of, told_bug
from forebay.admin.queries import flag, number, one_of, parse_query, start_of
from forebay.admin.site import Site, topic_of
from forebay.admin.sources import Frames, OwnedTopic, Source, find_source
from forebay.admin.transfers import STALL_SECONDS_MAX
from forebay.errors import (
    ForebayError,
    LostOffsets,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.frame import Scan
from forebay.format.names import TopicName
from forebay.logs import event
from forebay.metrics import Counter, Gauge
from forebay.wal.watermarks import Visibility

_log: Final = logging.getLogger("forebay.admin")
BEAT_SECONDS: Final = 15.0
"""How long a stream may be silent."""
_STOP_SECONDS: Final = 1.0
"""What a slow client gets at the server's end to take what is on its way."""
_LEFT_SECONDS: Final = 10.0
"""What a client gets to take something while others wait for its place."""
_PARAMETERS: Final = ("start", "end", "limit", "follow", "visibility", "skip_lost")
_VISIBILITIES: Final[tuple[Visibility, ...]] = ("synced", "buffered")
STREAMS: Final = Gauge("forebay_http_streams", "Readers of messages over HTTP, now.")
_MESSAGES: Final = Counter("forebay_http_messages_read_total", "Messages given over HTTP.")
_BYTES: Final = Counter("forebay_http_bytes_read_total", "Bytes of the lines that they were in.")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for."""

    start: int | Literal["earliest", "latest"]
    end: int | None
    limit: int | None
    follow: bool
    visibility: Visibility
    skip_lost: bool


def wanted(raw_query: bytes) -> Wanted:
    query = parse_query(raw_query, _PARAMETERS)
    found = Wanted(
        start_of(query),
        number(query, "end"),
        number(query, "limit"),
        flag(query, "follow"),
        one_of(query, "visibility", _VISIBILITIES, "synced"),
        flag(query, "skip_lost"),
    )
    if found.end is not None and isinstance(found.start, int) and found.end < found.start:
        raise UsageError(f"end is {found.end}, before start, which is {found.start}")
    return found


@dataclass(frozen=True, slots=True)
class Pace:
    """What is asked of a server's streams and their clients, in seconds."""

    beat_seconds: float = BEAT_SECONDS
    stall_seconds: float = STALL_SECONDS_MAX
    """For a client to take something."""
    left_seconds: float = _LEFT_SECONDS
    """The same, while every place is taken."""


PACE: Final = Pace()


class Consume:
    """The handler, for one server."""

    def __init__(self, site: Site, *, pace: Pace = PACE) -> None:
        self._site = site
        self._streams_max = site.settings.admin.streams_max
        self._taken = 0
        self._streams: set[_Stream] = set()
        self._pace = pace
        self._threads = ThreadPoolExecutor(self._streams_max, thread_name_prefix="reader")

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = wanted(scope["query_string"])
        name = topic_of(scope["path_params"])
        if self._taken >= self._streams_max and not self._leave_one():
            raise ServiceUnavailable(
                f"{self._taken} readers are connected (admin.streams_max): come back later"
            )
        self._taken += 1
        STREAMS.add(1)
        try:
            source = await self._source(name, asked)
            stream = _Stream(source, asked, send, self._pace.stall_seconds)
            self._streams.add(stream)
            try:
                await self._watched(stream, receive)
            finally:
                self._streams.discard(stream)
        finally:
            self._taken -= 1
            STREAMS.add(-1)

    def _leave_one(self) -> bool:
        """Leaves the client that has taken nothing for the longest time, if it is long enough."""
        stalled = max(self._streams, key=_Stream.stalled_seconds, default=None)
        if stalled is None or stalled.stalled_seconds() < self._pace.left_seconds:
            return False
        self._streams.discard(stalled)
        stalled.leave()
        return True

    async def _source(self, name: TopicName, asked: Wanted) -> Source:
        topic = self._site.store.opened(str(name))
        if topic is not None:
            return OwnedTopic(topic, self._threads)
        find = partial(find_source, self._site, name, self._threads, follow=asked.follow)
        return await asyncio.get_running_loop().run_in_executor(self._threads, find)

    async def _watched(self, stream: _Stream, receive: Receive) -> None:
        """Runs the stream until it ends, the client goes or is left, or the server stops."""
        main = asyncio.create_task(stream.run())
        gone = asyncio.create_task(_disconnected(receive))
        stop = asyncio.create_task(self._site.stopping.wait())
        tasks: list[asyncio.Task[Any]] = [main, gone, stop]
        if stream.follows:
            tasks.append(asyncio.create_task(stream.beat(self._pace.beat_seconds)))
        try:
            await asyncio.wait({main, gone, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and not gone.done():
                stream.stop()
                await asyncio.wait(
                    {main, gone}, timeout=_STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            left = gone.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not main.cancelled():
            main.result()
        elif not left and not stream.started:
            raise ServiceUnavailable("the server stops: ask again once it is there again")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """The answer to one request."""

    def __init__(self, source: Source, asked: Wanted, send: Send, stall_seconds: float) -> None:
        appended = source.end("buffered")
        if asked.start == "earliest":
            self._position = source.start
        else:
            self._position = appended if asked.start == "latest" else asked.start
        self._end = asked.end
        if not asked.follow:
            self._end = appended if asked.end is None else min(asked.end, appended)
        self._left = asked.limit
        self._source = source
        self._asked = asked
        self._asgi_send = send
        self._stall_seconds = stall_seconds
        self._sending_since: float | None = None
        self._main: asyncio.Task[None] | None = None
        self._reader: Frames | None = None
        self._stopped = False
        self._beats = False
        self.started = False
        self._silent = True

    @property
    def follows(self) -> bool:
        return self._asked.follow

    def stop(self) -> None:
        """The server stops: the stream says where to go on, and ends."""
        self._stopped = True
        if self._reader is not None:
            self._reader.close()

    def stalled_seconds(self) -> float:
        """For how long its client has taken nothing of what is there for it."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    def leave(self) -> None:
        """Ends it in the middle: its client takes nothing, not even an error."""
        event(
            _log,
            logging.INFO,
            "a reader that takes nothing is left",
            topic=self._source.name,
            offset=self._position,
            seconds=round(self.stalled_seconds()),
        )
        if self._main is not None:
            self._main.cancel()

    async def beat(self, seconds: float) -> None:
        """Breaks the silence, for as long as it is cancelled by nobody."""
        while True:
            await asyncio.sleep(seconds)
            if self._silent and self._beats:
                await self._write(b"\n")
            self._silent = True

    async def run(self) -> None:
        self._main = asyncio.current_task()
        lines = self._lines(self._open())
        try:
            # What is wrong from the beginning is a status, not a line.
            first = b"" if self._is_at_the_end() else await anext(lines, b"")
            await self._start()
            await self._tell(first, lines)
        finally:
            await lines.aclose()

    def _is_at_the_end(self) -> bool:
        """Whether the first message may be long in coming: its client is answered before."""
        return self._position >= self._source.end(self._asked.visibility)

    async def _start(self) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        # Without a body uvicorn keeps the head to itself.
        await self._write(b"")
        self._beats = True

    async def _tell(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> None:
        try:
            if first:
                await self._write(first)
            async for chunk in lines:
                await self._write(chunk)
            if self._stopped:
                raise ServiceUnavailable(  # noqa: TRY301  # told as all others are
                    f"the server stops: go on with start={self._position} once it is there again"
                )
        except ForebayError as error:
            ERRORS.add(1, type(error).__name__)
            await self._write(plain_line({"error": facts_of(error)}))
        except Exception as error:  # noqa: BLE001  # a bug: in the log, and told to the client
            await self._write(plain_line({"error": told_bug(error, where=self._source.name)}))
        self._beats = False
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, message: Message) -> None:
        """Waits for a client that is slow, and not for ever."""
        self._sending_since = time.monotonic()
        patience = asyncio.get_running_loop().call_later(self._stall_seconds, self.leave)
        try:
            await self._asgi_send(message)
        finally:
            patience.cancel()
            self._sending_since = None

    def _open(self) -> Frames:
        end = self._end
        if self._left is not None:
            limit = self._position + self._left
            end = limit if end is None else min(end, limit)
        self._reader = self._source.read(self._position, end, self._asked.visibility)
        return self._reader

    async def _lines(self, reader: Frames) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async for chunk in self._messages(reader):
                    yield chunk
            except LostOffsets as lost:
                if not self._asked.skip_lost:
                    raise
                end = lost.end if self._end is None else min(lost.end, self._end)
                yield plain_line({"lost": [self._position, end]})
                self._position = end
                reader = self._open()
            else:
                return

    async def _messages(self, reader: Frames) -> AsyncGenerator[bytes, None]:
        try:
            while (frames := await self._next(reader)) is not None:
                for chunk, count in message_lines(frames):
                    yield chunk
                    self._position += count
                    if self._left is not None:
                        self._left -= count
                    _MESSAGES.add(count)
                    _BYTES.add(len(chunk))
                    # A send that need not wait gives nobody else a turn.
                    await asyncio.sleep(0)
                    if self._stopped:
                        return
        finally:
            reader.close()

    async def _next(self, reader: Frames) -> Scan | None:
        return None if self._stopped else await reader.next_frames()
