"""`GET /v1/topics/{namespace}/{topic}/messages`: messages as lines of JSON, over all tiers.

    {"offset": 7, "publish_time": 1789000000000, "payload": "text", "attributes": {"k": "v"},
     "routing_key": null}

A stream reads through all tiers like any reader: objects, files, memory, and with `follow` the
messages that are appended later. Every stream has a thread for files and objects, so an object
store that hangs delays only the streams that read from it. A slow client delays only its own
stream. A client that reads nothing for a long time is dropped. While all streams are in use, a new
client replaces one that has read nothing for several seconds.

An error before the first message sets the HTTP status. A later error is the last line,
`{"error": ...}`. A server that stops also ends the stream with such a line, which has the offset to
continue at. While there is nothing to send, a blank line every few seconds shows that the server is
alive.
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
"""How long a server that stops waits for a slow client to read the last lines."""
_CHUNK_BYTES: Final = 64 * KIB
STREAMS: Final = Gauge("forebay_http_streams", "Open message streams over HTTP.")
_MESSAGES: Final = Counter(
    "forebay_http_messages_read_total", "Messages sent to readers over HTTP."
)
_BYTES: Final = Counter(
    "forebay_http_bytes_read_total", "Bytes of message lines sent to readers over HTTP."
)


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    heartbeat_seconds: float = 15.0
    """The time without a line after which a blank line is sent."""
    stall_seconds: float = LONG_STALL_SECONDS
    """How long a client may read nothing before it is dropped."""
    contended_stall_seconds: float = 10.0
    """How long it may do so while all streams are in use and a new client arrives."""


TIMEOUTS: Final = StreamTimeouts()


# ---- records ----------------------------------------------------------------------------------


class ReadRequest(Struct, frozen=True):
    """The query of a request."""

    start: Annotated[
        Offset | Literal["earliest", "latest"],
        Meta(description="The offset to start at, or an end of the topic."),
    ] = "earliest"
    end: Annotated[Offset, Meta(description="The offset to stop before.")] | UnsetType = UNSET
    limit: Annotated[Offset, Meta(description="The maximum number of messages.")] | UnsetType = (
        UNSET
    )
    follow: Annotated[
        bool, Meta(description="Waits for more messages at the end of the topic.")
    ] = False
    visibility: Annotated[
        Visibility, Meta(description="`buffered` includes messages that a crash may lose.")
    ] = "synced"
    skip_lost: Annotated[
        bool, Meta(description="Reports lost and unknown offsets in a line, and continues.")
    ] = False

    @classmethod
    def parse(cls, raw_query: bytes) -> ReadRequest:
        found = read_query(raw_query, cls)
        if found.end is not UNSET and isinstance(found.start, int) and found.end < found.start:
            raise UsageError(f"end ({found.end}) is before start ({found.start})")
        return found


class Message(Record, frozen=True):
    """A message of a topic. It has `payload` or `payload_base64`, never both."""

    extra_schema: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]
    }
    offset: Count
    publish_time: Annotated[Count, Meta(description="Milliseconds since 1970-01-01 UTC.")]
    payload: Annotated[str, Meta(description="The payload, if it is UTF-8.")] | UnsetType = UNSET
    payload_base64: (
        Annotated[str, Meta(description="The payload, if it is not UTF-8.")] | UnsetType
    ) = UNSET
    attributes: dict[str, str] = field(default_factory=dict)
    routing_key: str | None = None


class Lost(Record, frozen=True):
    """Offsets that are lost or unknown and were skipped."""

    lost: OffsetRange


CONSUME: Final = Operation(
    "consume",
    "messages",
    "Reads messages from all tiers, one per line. With `follow`, waits for future messages.",
    {
        200: Reply(
            "Lines.",
            Lines(
                "MessageLine",
                "A message, a lost range or an error. An error is the last line.",
                [Message, Lost, Error],
            ),
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
        """The number of streams, including requests whose topic is being opened."""
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
        """Drops the client that has read nothing for the longest time, if any is over the limit."""
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
        """Runs until the stream ends, its client disconnects or is dropped, or the server stops."""
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
        """Ends the stream with a line that has the offset to continue at: the server stops."""
        self._stopped = True
        if self._reader is not None:
            self._reader.close()

    def stalled_seconds(self) -> float:
        """How long the client has not read the bytes that are being sent to it."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    def drop(self) -> None:
        """Ends the stream without an error line, because its client reads nothing."""
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
        """Sends a blank line whenever nothing was sent for `seconds`. Runs until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._silent and self._heartbeats:
                await self._write(b"\n")
            self._silent = True

    async def run(self) -> None:
        self._main = asyncio.current_task()
        lines = self._lines(self._open())
        try:
            # At the end of the topic the next message may come late, so the headers are sent first.
            at_end = self._position >= self._source.end(self._request.visibility)
            # Otherwise read a message before the headers, so that an error can set the status.
            first = b"" if at_end else await anext(lines, b"")
            await self._start()
            await self._send_lines(first, lines)
        finally:
            await lines.aclose()

    async def _start(self) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        # uvicorn sends the headers only with the first part of the body.
        await self._write(b"")
        self._heartbeats = True

    async def _send_lines(self, first: bytes, lines: AsyncGenerator[bytes, None]) -> None:
        try:
            if first:
                await self._write(first)
            async for chunk in lines:
                await self._write(chunk)
            if self._stopped:
                raise ServiceUnavailable(  # noqa: TRY301  # sent as a line, like all errors
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
        """Sends one ASGI message. Drops the client if it does not read within the time limit."""
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
                # The reader ends where the limit would, if no offset had been without a message.
                self._position = max(self._position, reader.position)
                if self._is_done():
                    return
                reader = self._open()

    def _is_done(self) -> bool:
        if self._stopped or not self._left:
            return True
        return self._end is not None and self._position >= self._end

    async def _messages(self, reader: FrameReader) -> AsyncGenerator[bytes, None]:
        try:
            while (frames := await self._next(reader)) is not None:
                if len(frames):  # a lenient reader skips damaged frames
                    self._position = frames.offsets[0]
                for chunk, count in message_lines(frames):
                    yield chunk
                    self._position += count
                    if self._left is not None:
                        self._left -= count
                    _MESSAGES.add(count)
                    _BYTES.add(len(chunk))
                    # If the send did not have to wait, it has not yielded to other tasks.
                    await asyncio.sleep(0)
                    if self._stopped:
                        return
        finally:
            reader.close()

    async def _next(self, reader: FrameReader) -> Scan | None:
        return None if self._stopped else await reader.next_frames()


# ---- lines ------------------------------------------------------------------------------------


def message_lines(frames: Scan) -> Iterator[tuple[bytes, int]]:
    """Yields (lines, number of messages) in chunks of bounded size."""
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
    """Encodes a `Message` as a line of JSON.

    It uses orjson, which needs 9 µs for a payload of 64 KiB; msgspec needs 26 µs. orjson escapes
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
    @property
    def position(self) -> int:
        """The offset of the next message."""

    async def next_frames(self) -> Scan | None:
        """The next frames, valid until the next call; None at the end."""

    def close(self) -> None:
        """Ends the reader, even while `next_frames` waits."""


class Source(Protocol):
    """A topic to read: owned by this process (`OwnedTopic`) or not (`ViewedTopic`)."""

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int:
        """The oldest offset."""

    def end(self, visibility: Visibility) -> int:
        """The offset after the newest message with this visibility."""

    def read(self, start: int, end: int | None, visibility: Visibility) -> FrameReader:
        """Opens a reader. Raises OffsetOutOfRange if `start` is not in the topic."""


class OwnedTopic:
    """A topic that this process has open. Only such a topic can be followed."""

    def __init__(self, topic: Topic, threads: Executor) -> None:
        """`threads` reads messages that are not in memory."""
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
    """A topic that is not open here, or cannot be opened, for example because the disk is full.

    Reading through a view does not open the log, and changes nothing.
    """

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
    """A reader of a view. Every read runs on a thread."""

    def __init__(self, reader: LogReader, threads: Executor) -> None:
        self._reader = reader
        self._threads = threads
        self._frames = reader.frames()

    @property
    def position(self) -> int:
        return self._reader.position

    async def next_frames(self) -> Scan | None:
        read = partial(next, self._frames, None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def close(self) -> None:
        self._reader.close()


def find_source(
    context: ServerContext, name: TopicName, threads: Executor, *, follow: bool
) -> Source:
    """Returns the source of a topic. Blocks on the disk.

    Raises UnknownTopic if the topic does not exist; never creates it.
    """
    if context.settings.data is None:
        if str(name) not in context.store.topics():
            raise UnknownTopic(f"there is no topic {name}")
        return OwnedTopic(context.topic(name), threads)
    # The view uses the connections of the store, so it need not be closed.
    view = context.store.view().topic(str(name))
    return OwnedTopic(context.topic(name), threads) if follow else ViewedTopic(view, threads)
