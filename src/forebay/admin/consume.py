"""`GET /v1/topics/{namespace}/{topic}/messages`: messages as lines of JSON, over all tiers.

    {"offset": 7, "publish_time": 1789000000000, "payload": "text", "attributes": {"k": "v"},
     "routing_key": null}

The reader is the log's own: from objects through files and memory to the live end. Files and
objects are read on threads, as many as there may be streams and used by nothing else, so that an
object store that hangs delays only those who read from it. A slow client delays its own reader
alone. A client that reads nothing for long is dropped; while all streams are in use, one that reads
nothing for some seconds is dropped for a new one.

An error before the first message is a status; a later one is the last line, `{"error": ...}`. So is
the server's end, with the offset to continue at. While there is nothing to send, a blank line every
few seconds shows that the server is alive.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from forebay.admin.context import ServerContext
from forebay.admin.errors import ERRORS, Error, error_fields, log_bug
from forebay.admin.operations import Lines, Operation, Reply
from forebay.admin.records import (
    LINES,
    Count,
    Offset,
    OffsetRange,
    Record,
    json_line,
)
from forebay.admin.request import LONG_STALL_SECONDS, read_query, topic_of
from forebay.errors import ForebayError, LostOffsets, ServiceUnavailable, UnknownTopic, UsageError
from forebay.format.frame import Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.format.names import TopicName
from forebay.limits import KIB
from forebay.logs import event
from forebay.metrics import Counter, Gauge
from forebay.topic.store import Topic
from forebay.topic.view import TopicView
from forebay.wal.reader import LogReader
from forebay.wal.watermarks import Visibility

_log: Final = logging.getLogger("forebay.admin")
_STOP_SECONDS: Final = 1.0
"""For a slow client, when the server stops, to read what is on its way."""
_CHUNK_BYTES: Final = 64 * KIB
STREAMS: Final = Gauge("forebay_http_streams", "Readers of messages over HTTP, now.")
_MESSAGES: Final = Counter("forebay_http_messages_read_total", "Messages given over HTTP.")
_BYTES: Final = Counter("forebay_http_bytes_read_total", "Bytes of the lines that they were in.")


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    heartbeat_seconds: float = 15.0
    """How long a stream may be silent."""
    stall_seconds: float = LONG_STALL_SECONDS
    """For a client to read something."""
    contended_stall_seconds: float = 10.0
    """The same, while all streams are in use."""


TIMEOUTS: Final = StreamTimeouts()


# ---- records ----------------------------------------------------------------------------------


class ReadRequest(Struct, frozen=True):
    """The query of a request."""

    start: Annotated[
        Offset | Literal["earliest", "latest"],
        Meta(description="The first offset, or an end of the topic."),
    ] = "earliest"
    end: Annotated[Offset, Meta(description="The offset to stop before.")] | UnsetType = UNSET
    limit: Annotated[Offset, Meta(description="How many messages, at most.")] | UnsetType = UNSET
    follow: Annotated[bool, Meta(description="Waits for more at the end of the topic.")] = False
    visibility: Annotated[
        Visibility, Meta(description="`buffered` includes messages that a crash may lose.")
    ] = "synced"
    skip_lost: Annotated[
        bool, Meta(description="Reports lost offsets in a line, and continues after them.")
    ] = False

    @classmethod
    def parse(cls, raw_query: bytes) -> ReadRequest:
        found = read_query(raw_query, cls)
        if found.end is not UNSET and isinstance(found.start, int) and found.end < found.start:
            raise UsageError(f"end is {found.end}, before start, which is {found.start}")
        return found


class Message(Record, frozen=True):
    """A message of a topic. It has one of the two payloads."""

    extra_schema: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]
    }
    offset: Count
    publish_time: Annotated[Count, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    payload: Annotated[str, Meta(description="If it is UTF-8.")] | UnsetType = UNSET
    payload_base64: Annotated[str, Meta(description="If it is not.")] | UnsetType = UNSET
    attributes: dict[str, str] = field(default_factory=dict)
    routing_key: str | None = None


class Lost(Record, frozen=True):
    """Offsets that are lost and were skipped."""

    lost: OffsetRange


CONSUME: Final = Operation(
    "consume",
    "messages",
    "Reads messages over all tiers, one on each line; with `follow`, future ones too.",
    {
        200: Reply(
            "Lines.",
            Lines("MessageLine", "A line. An error is the last one.", [Message, Lost, Error]),
            LINES,
        )
    },
    errors=(400, 404, 409, 410, 416, 502, 504, 507),
    query=ReadRequest,
)

# ---- streams ----------------------------------------------------------------------------------


class ConsumeHandler:
    def __init__(self, context: ServerContext, *, timeouts: StreamTimeouts = TIMEOUTS) -> None:
        self._context = context
        self._streams_max = context.settings.admin.streams_max
        self._used = 0
        """Streams, and requests whose topic is being opened."""
        self._streams: set[_Stream] = set()
        self._timeouts = timeouts
        self._threads = ThreadPoolExecutor(self._streams_max, thread_name_prefix="reader")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ReadRequest.parse(scope["query_string"])
        name = topic_of(scope["path_params"])
        if self._used >= self._streams_max and not self._drop_stalled():
            raise ServiceUnavailable(
                f"{self._used} readers are connected (admin.streams_max): try again later"
            )
        self._used += 1
        STREAMS.add(1)
        try:
            source = await self._source(name, request)
            stream = _Stream(source, request, send, self._timeouts.stall_seconds)
            self._streams.add(stream)
            try:
                await self._run(stream, receive)
            finally:
                self._streams.discard(stream)
        finally:
            self._used -= 1
            STREAMS.add(-1)

    def _drop_stalled(self) -> bool:
        """Drops the client that has read nothing for the longest time, if that is long enough."""
        stalled = max(self._streams, key=_Stream.stalled_seconds, default=None)
        if stalled is None or stalled.stalled_seconds() < self._timeouts.contended_stall_seconds:
            return False
        self._streams.discard(stalled)
        stalled.drop()
        return True

    async def _source(self, name: TopicName, request: ReadRequest) -> Source:
        topic = self._context.store.opened(str(name))
        if topic is not None:
            return OwnedTopic(topic, self._threads)
        find = partial(find_source, self._context, name, self._threads, follow=request.follow)
        return await asyncio.get_running_loop().run_in_executor(self._threads, find)

    async def _run(self, stream: _Stream, receive: Receive) -> None:
        """Until the stream ends, its client goes or is dropped, or the server stops."""
        main = asyncio.create_task(stream.run())
        gone = asyncio.create_task(_disconnected(receive))
        stop = asyncio.create_task(self._context.stopping.wait())
        tasks: list[asyncio.Task[Any]] = [main, gone, stop]
        if stream.follows:
            tasks.append(asyncio.create_task(stream.heartbeat(self._timeouts.heartbeat_seconds)))
        try:
            await asyncio.wait({main, gone, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and not gone.done():
                stream.stop()
                await asyncio.wait(
                    {main, gone}, timeout=_STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            client_gone = gone.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not main.cancelled():
            main.result()
        elif not client_gone and not stream.started:
            raise ServiceUnavailable("the server is stopping: try again when it is back")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """The response to one request."""

    def __init__(
        self, source: Source, request: ReadRequest, send: Send, stall_seconds: float
    ) -> None:
        appended = source.end("buffered")
        if request.start == "earliest":
            self._position = source.start
        else:
            self._position = appended if request.start == "latest" else request.start
        self._end = None if request.end is UNSET else request.end
        if not request.follow:
            self._end = appended if self._end is None else min(self._end, appended)
        self._left = None if request.limit is UNSET else request.limit
        self._source = source
        self._request = request
        self._asgi_send = send
        self._stall_seconds = stall_seconds
        self._sending_since: float | None = None
        self._main: asyncio.Task[None] | None = None
        self._reader: FrameReader | None = None
        self._stopped = False
        self._heartbeats = False
        self.started = False
        self._silent = True

    @property
    def follows(self) -> bool:
        return self._request.follow

    def stop(self) -> None:
        """The server stops: the stream ends with a line that says where to go on."""
        self._stopped = True
        if self._reader is not None:
            self._reader.close()

    def stalled_seconds(self) -> float:
        """For how long its client has read nothing of what is sent to it."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    def drop(self) -> None:
        """Ends it in the middle: its client reads nothing, not even an error."""
        event(
            _log,
            logging.INFO,
            "a client that reads nothing is dropped",
            topic=self._source.name,
            offset=self._position,
            seconds=round(self.stalled_seconds()),
        )
        if self._main is not None:
            self._main.cancel()

    async def heartbeat(self, seconds: float) -> None:
        """Sends a blank line whenever nothing was sent for so long; until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._silent and self._heartbeats:
                await self._write(b"\n")
            self._silent = True

    async def run(self) -> None:
        self._main = asyncio.current_task()
        lines = self._lines(self._open())
        try:
            # At the end of the topic the first message may take long: the head is sent before.
            at_end = self._position >= self._source.end(self._request.visibility)
            # Otherwise the first message comes first, so that its error is a status, not a line.
            first = b"" if at_end else await anext(lines, b"")
            await self._start()
            await self._send_lines(first, lines)
        finally:
            await lines.aclose()

    async def _start(self) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        # uvicorn sends the head only with the first part of the body.
        await self._write(b"")
        self._heartbeats = True

    async def _send_lines(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> None:
        try:
            if first:
                await self._write(first)
            async for chunk in lines:
                await self._write(chunk)
            if self._stopped:
                raise ServiceUnavailable(  # noqa: TRY301  # a line, as all other errors
                    f"the server is stopping: continue with start={self._position} when it is back"
                )
        except ForebayError as error:
            ERRORS.add(1, type(error).__name__)
            await self._write(json_line({"error": error_fields(error)}))
        except Exception as error:  # noqa: BLE001  # a bug: logged, and a line for the client
            await self._write(json_line({"error": log_bug(error, where=self._source.name)}))
        self._heartbeats = False
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, message: AsgiMessage) -> None:
        """Waits for a slow client, for a limited time."""
        self._sending_since = time.monotonic()
        timeout = asyncio.get_running_loop().call_later(self._stall_seconds, self.drop)
        try:
            await self._asgi_send(message)
        finally:
            timeout.cancel()
            self._sending_since = None

    def _open(self) -> FrameReader:
        end = self._end
        if self._left is not None:
            limit = self._position + self._left
            end = limit if end is None else min(end, limit)
        self._reader = self._source.read(self._position, end, self._request.visibility)
        return self._reader

    async def _lines(self, reader: FrameReader) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async for chunk in self._messages(reader):
                    yield chunk
            except LostOffsets as lost:
                if not self._request.skip_lost:
                    raise
                end = lost.end if self._end is None else min(lost.end, self._end)
                yield json_line(Lost((self._position, end)))
                self._position = end
                reader = self._open()
            else:
                return

    async def _messages(self, reader: FrameReader) -> AsyncGenerator[bytes, None]:
        try:
            while (frames := await self._next(reader)) is not None:
                if len(frames):  # a lenient reader steps over damage
                    self._position = frames.offsets[0]
                for chunk, count in message_lines(frames):
                    yield chunk
                    self._position += count
                    if self._left is not None:
                        self._left -= count
                    _MESSAGES.add(count)
                    _BYTES.add(len(chunk))
                    # A send that need not wait does not yield to other tasks.
                    await asyncio.sleep(0)
                    if self._stopped:
                        return
        finally:
            reader.close()

    async def _next(self, reader: FrameReader) -> Scan | None:
        return None if self._stopped else await reader.next_frames()


# ---- lines ------------------------------------------------------------------------------------


def message_lines(frames: Scan) -> Iterator[tuple[bytes, int]]:
    """The messages as lines, in chunks of bounded size, each with the number of its messages."""
    lines: list[bytes] = []
    size = 0
    for message in decode_messages(frames):
        line = _message_line(message)
        lines.append(line)
        size += len(line)
        if size >= _CHUNK_BYTES:
            yield b"".join(lines), len(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines), len(lines)


def _message_line(message: StreamMessage) -> bytes:
    """A `Message` in JSON.

    By orjson: with a payload of 64 KiB it takes 9 µs where msgspec takes 26 µs, because it escapes
    strings with vector instructions.
    """
    fields: dict[str, Any] = {
        "offset": message.msg_id.topic_offset,
        "publish_time": message.publish_time,
    }
    try:
        fields["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        fields["payload_base64"] = base64.b64encode(message.payload).decode()
    fields["attributes"] = message.attributes
    fields["routing_key"] = message.routing_key
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


# ---- where a stream reads from ----------------------------------------------------------------


class FrameReader(Protocol):
    async def next_frames(self) -> Scan | None:
        """The next frames, valid until the next call; None at the end."""

    def close(self) -> None:
        """Ends it, also while it waits."""


class Source(Protocol):
    """A topic to read: as its owner has it (`OwnedTopic`), or as others see it (`ViewedTopic`)."""

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int:
        """The oldest offset."""

    def end(self, visibility: Visibility) -> int:
        """The offset after the newest message that is visible so."""

    def read(self, start: int, end: int | None, visibility: Visibility) -> FrameReader:
        """OffsetOutOfRange if the start is not in the log."""


class OwnedTopic:
    """A topic that is open here. It has the live end, which a stream that follows needs."""

    def __init__(self, topic: Topic, threads: Executor) -> None:
        """`threads` read what is not in memory."""
        self._topic = topic
        self._threads = threads
        self.name = topic.name

    @property
    def start(self) -> int:
        return self._topic.start_offset

    def end(self, visibility: Visibility) -> int:
        marks = self._topic.watermarks()
        return marks.appended if visibility == "buffered" else marks.synced

    def read(self, start: int, end: int | None, visibility: Visibility) -> FrameReader:
        return self._topic.stream(start, end=end, visibility=visibility, threads=self._threads)


class ViewedTopic:
    """A view opens and changes nothing: for a topic that is not open here, or cannot be opened,
    because the disk is full, say."""

    def __init__(self, view: TopicView, threads: Executor) -> None:
        self._view = view
        self._threads = threads
        self.name = str(view.topic)
        self.start = view.start_offset

    def end(self, visibility: Visibility) -> int:  # noqa: ARG002  # a view sees what is synced
        return self._view.end_offset

    def read(
        self,
        start: int,
        end: int | None,
        visibility: Visibility,  # noqa: ARG002
    ) -> FrameReader:
        return _ViewReader(self._view.reader(start, end), self._threads)


class _ViewReader:
    """A view's reader whose every call runs on a thread."""

    def __init__(self, reader: LogReader, threads: Executor) -> None:
        self._reader = reader
        self._threads = threads
        self._frames = reader.frames()

    async def next_frames(self) -> Scan | None:
        read = partial(next, self._frames, None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def close(self) -> None:
        self._reader.close()


def find_source(
    context: ServerContext, name: TopicName, threads: Executor, *, follow: bool
) -> Source:
    """UnknownTopic if the topic does not exist; it is not created. May wait for a disk."""
    if context.settings.data is None:
        if str(name) not in context.store.topics():
            raise UnknownTopic(f"there is no topic {name}")
        return OwnedTopic(context.topic(name), threads)
    # The view uses the store's own connections: it need not be closed.
    view = context.store.view().topic(str(name))
    return OwnedTopic(context.topic(name), threads) if follow else ViewedTopic(view, threads)
