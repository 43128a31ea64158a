"""`GET /v1/topics/{namespace}/{topic}/messages`: messages as lines of JSON, over all tiers.

    {"offset": 7, "publish_time": 1789000000000, "payload": "text", "attributes": {"k": "v"},
     "routing_key": null}

A stream reads through all tiers like any reader: objects, files, memory, and with `follow` the
messages that are appended later. Every stream has a thread for files and objects, so an object
store that hangs delays only the streams that read from it. A slow client delays only its own
stream. A client that reads nothing for a long time is dropped. While all streams are in use, a new
client replaces one that has read nothing for several seconds.

All streams share one byte budget (`forebay.admin.response`). A stream begins with small reads, and
doubles them and its read-ahead while its client reads fast and the budget has room. A stream whose
client does not read keeps only its offset, and how much of a large message it has sent.

An error before the first message sets the HTTP status. A later error is the last line,
`{"error": ...}`. A server that stops also ends the stream with such a line, which has the offset to
continue at. While there is nothing to send, a blank line every few seconds shows that the server is
alive.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, field
from starlette.requests import ClientDisconnect
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
from forebay.admin.response import (
    PATIENCE_SECONDS,
    PIECE_BYTES,
    Client,
    ClientStalled,
    ResponseMemory,
    Share,
    disconnected,
    report_drop,
)
from forebay.clock import SYSTEM_CLOCK
from forebay.config.quantities import MOMENT_FORMS, parse_moment
from forebay.errors import (
    ForebayError,
    LostOffsets,
    MissingData,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from forebay.format.frame import FrameTooLarge, Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.format.names import TopicName
from forebay.limits import KIB, READ_CHUNK_BYTES
from forebay.logs import event
from forebay.metrics import Counter, Gauge
from forebay.settings import CloudReaderSettings
from forebay.topic.store import Topic
from forebay.topic.view import TopicView
from forebay.wal.reader import LogReader
from forebay.wal.watermarks import Visibility

_log: Final = logging.getLogger("forebay.admin")
_STOP_SECONDS: Final = 1.0
"""How long a server that stops waits for a slow client to read the last lines."""
_LINES_BYTES: Final = 64 * KIB
"""Lines are sent together until they have this many bytes."""
_FAST_SECONDS: Final = 0.5
"""A client is fast if the stream waits less than this for it to read what one read has fetched."""
_SLOW_SECONDS: Final = 2.0
"""And slow above this: then the stream begins with small reads again."""
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
    patience_seconds: float = PATIENCE_SECONDS
    """How long a stream keeps what it has read for a client that does not read."""
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
    start_time: (
        Annotated[
            str,
            Meta(
                description="Starts at the first message that was published then or later: a date "
                "and time with a zone, a duration before now such as `10m`, or milliseconds since "
                "1970-01-01 UTC."
            ),
        ]
        | UnsetType
    ) = UNSET
    last: (
        Annotated[Offset, Meta(description="Starts this many messages before the end.")] | UnsetType
    ) = UNSET
    end: Annotated[Offset, Meta(description="The offset to stop before.")] | UnsetType = UNSET
    end_time: (
        Annotated[
            str,
            Meta(
                description="Stops before the first message that was published then or later. The "
                "forms are those of `start_time`."
            ),
        ]
        | UnsetType
    ) = UNSET
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
        starts = (found.start != "earliest", found.start_time is not UNSET, found.last is not UNSET)
        if sum(starts) > 1:
            raise UsageError("give only one of start, start_time and last")
        return found


def _moment(name: str, text: str | UnsetType) -> int | None:
    if text is UNSET:
        return None
    found = parse_moment(text, SYSTEM_CLOCK.now_ms())
    if found is None:
        raise UsageError(f"{name} is {text[:40]!r}; it must be {MOMENT_FORMS}")
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
        start_time, end_time = (
            _moment(name, text)
            for name, text in (("start_time", request.start_time), ("end_time", request.end_time))
        )
        name = topic_of(scope["path_params"])
        if self._used >= self._streams_max and not self._drop_stalled():
            raise ServiceUnavailable(
                f"{self._used} readers are connected (admin.streams_max): try again later"
            )
        self._used += 1
        STREAMS.add(1)
        try:
            source = await self._source(name, request)
            begin = await self._begin(source, request, start_time)
            client = Client(
                scope,
                send,
                self._context.response_memory,
                self._timeouts.stall_seconds,
                self._timeouts.patience_seconds,
            )
            stream = _Stream(source, request, client, self._turns(), begin, end_time)
            self._streams.add(stream)
            try:
                await self._run(stream, receive)
            finally:
                self._streams.discard(stream)
                client.close()
        finally:
            self._used -= 1
            STREAMS.add(-1)

    def _turns(self) -> _Turns:
        return _Turns(self._context.response_memory, self._context.settings.cloud_reader)

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
        if topic is not None and not topic.start_unsure:
            return OwnedTopic(topic, topic.start_known, self._threads)
        find = partial(find_source, self._context, name, self._threads, follow=request.follow)
        return await asyncio.get_running_loop().run_in_executor(self._threads, find)

    async def _begin(
        self, source: Source, request: ReadRequest, start_time: int | None
    ) -> int | None:
        """Returns the offset of a start that has to be looked up, on a thread; None for others."""
        if start_time is not None:
            find = partial(source.offset_at, start_time, request.visibility)
        elif request.last is not UNSET:
            find = partial(source.offset_of_last, request.last)
        else:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, find)

    async def _run(self, stream: _Stream, receive: Receive) -> None:
        """Runs until the stream ends, its client disconnects or is dropped, or the server stops."""
        gone = stream.client.gone = asyncio.create_task(disconnected(receive))
        main = asyncio.create_task(stream.run())
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


class _Turns:
    """How much one stream reads at a time, and its share of the budget for that."""

    def __init__(self, memory: ResponseMemory, settings: CloudReaderSettings) -> None:
        self._memory = memory
        self._share = Share(memory)
        self._first = memory.first_read_bytes
        self._most = (1 + settings.read_ahead_chunks) * settings.fetch_chunk_size
        self._bytes = self._first
        self._frame_bytes = 0
        """The largest frame of the last read, if it is larger than a first read."""

    async def begin(self, reader: FrameReader, position: int, waited_seconds: float) -> None:
        """Before a read: waits until the budget has room. The last one waited for its client."""
        grown = self._bytes > self._first
        if self._share.held and (
            waited_seconds > _SLOW_SECONDS
            or (self._memory.contended and grown)
            or self._memory.overdue
        ):
            self.give_back(reader, position)
        if not self._share.held:
            self._bytes = max(self._first, self._frame_bytes)
            await self._share.acquire(self._cost(self._bytes))
        elif waited_seconds < _FAST_SECONDS:
            more = min(2 * self._bytes, self._most)
            if more > self._bytes and self._share.extend(self._cost(more)):
                self._bytes = more
        reader.limit(self._bytes)

    def fits(self, frame_bytes: int) -> bool:
        """Whether the share is large enough to send a frame of this size; notes the size."""
        self._frame_bytes = frame_bytes if frame_bytes > self._first else 0
        return frame_bytes <= self._bytes and self._share.extend(self._cost(self._bytes))

    def give_back(self, reader: FrameReader, position: int) -> None:
        """Drops what was read from `position` on, and gives the share back."""
        reader.release(position)
        self.end()

    def end(self) -> None:
        self._share.give_back()

    def _cost(self, read_bytes: int) -> int:
        """What a read takes: chunks, one of them decoded, and a large message with its line."""
        found = read_bytes + min(read_bytes, READ_CHUNK_BYTES) + 2 * self._frame_bytes
        return min(found, self._memory.bytes_max)


class _Stream:
    """The response to one request."""

    def __init__(
        self,
        source: Source,
        request: ReadRequest,
        client: Client,
        turns: _Turns,
        begin: int | None = None,
        end_time: int | None = None,
    ) -> None:
        """`begin` is the offset to start at if the request says it in another way."""
        appended = source.end("buffered")
        self._end_time = end_time
        self._over = False
        """Whether a message at or after `end_time` was reached."""
        if begin is not None:
            self._position = begin
        elif request.start == "earliest":
            self._position = source.start
        else:
            self._position = appended if request.start == "latest" else request.start
        self._end = None if request.end is UNSET else request.end
        if not request.follow:
            self._end = appended if self._end is None else min(self._end, appended)
        self._left = None if request.limit is UNSET else request.limit
        self._sent = 0
        """How many bytes of the message at `_position` were sent; only large ones are cut."""
        self._source = source
        self._request = request
        self.client = client
        self._turns = turns
        self._main: asyncio.Task[None] | None = None
        self._reader: FrameReader | None = None
        self._stopped = False
        self._idle = False
        """Whether the stream waits for a message or for its turn, between two lines."""
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
        return self.client.stalled_seconds()

    def drop(self) -> None:
        """Ends the stream without an error line, because its client reads nothing."""
        self._report_drop()
        if self._main is not None:
            self._main.cancel()

    def _report_drop(self) -> None:
        report_drop(self._source.name, self._position)

    async def heartbeat(self, seconds: float) -> None:
        """Sends a blank line whenever nothing was sent for `seconds`. Runs until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._silent and self._idle and self.started and not self._sent:
                try:
                    await self.client.write(b"\n")
                except ClientStalled:
                    self.drop()
            self._silent = True

    async def run(self) -> None:
        self._main = asyncio.current_task()
        reader = self._open()
        try:
            # At the end of the topic the next message may come late, so the headers are sent first.
            # Otherwise a message is read before them, so that an error can set the status.
            if self._position >= self._source.end(self._request.visibility):
                await self._start()
            await self._send_messages(reader)
            await self._start()
            if self._stopped:
                raise ServiceUnavailable(  # noqa: TRY301  # sent as a line, like all errors
                    f"the server is stopping: continue with start={self._position} when it is back"
                )
            await self.client.end()
        except ClientDisconnect:
            pass
        except ClientStalled:
            self._report_drop()
        except ForebayError as error:
            if not self.started:
                raise
            ERRORS.add(1, type(error).__name__)
            await self._end_with(error_fields(error))
        except Exception as error:
            if not self.started:
                raise
            await self._end_with(log_bug(error, where=self._source.name))
        finally:
            self._turns.end()
            self._main = None  # the task refers to this stream

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await self.client.start(200, headers)

    async def _end_with(self, error: dict[str, Any]) -> None:
        """Ends the response with a line for the error."""
        if self._sent:
            # In the middle of a line no error can be sent. Without an end, the client knows.
            event(
                _log,
                logging.WARNING,
                "a response is cut off inside a large message",
                topic=self._source.name,
                offset=self._position,
                error=error,
            )
            return
        try:
            await self.client.write(json_line({"error": error}))
            await self.client.end()
        except ClientStalled:
            self._report_drop()

    def _open(self) -> FrameReader:
        end = self._end
        if self._left is not None:
            limit = self._position + self._left
            end = limit if end is None else min(end, limit)
        self._reader = self._source.read(self._position, end, self._request.visibility)
        return self._reader

    async def _send_messages(self, reader: FrameReader) -> None:
        """Sends everything that was requested, over lost ranges if they may be skipped."""
        while True:
            try:
                await self._send_range(reader)
            except LostOffsets as lost:
                if not self._request.skip_lost or self._sent:
                    raise
                end = lost.end if self._end is None else min(lost.end, self._end)
                await self._write(json_line(Lost((self._position, end))))
                self._position = end
            else:
                if not self._stopped:
                    self._require_same(reader.position)
                # The reader ends where the limit would, if no offset had been without a message.
                self._position = max(self._position, reader.position)
                if self._is_done():
                    return
            reader = self._open()

    def _require_same(self, offset: int) -> None:
        """Raises MissingData if a message is gone of which a part was sent: nothing may follow."""
        if self._sent and offset != self._position:
            raise MissingData(
                f"{self._source.name}: the message at offset {self._position} is gone, of which "
                f"{self._sent} bytes were sent"
            )

    def _is_done(self) -> bool:
        if self._stopped or self._over or not self._left:
            return True
        return self._end is not None and self._position >= self._end

    async def _send_range(self, reader: FrameReader) -> None:
        """Sends the messages of a reader, until its end or until the server stops."""
        client, turns = self.client, self._turns
        waited = 0.0
        try:
            while (frames := await self._read(reader, waited)) is not None:
                if not len(frames):  # a lenient reader skips damaged frames
                    continue
                self._require_same(frames.offsets[0])
                self._position = frames.offsets[0]
                if not turns.fits(max(frames.lengths)):
                    del frames
                    turns.give_back(reader, self._position)
                    continue
                before = client.waited_seconds
                messages = self._before_end(decode_messages(frames))
                del frames  # its buffer is free once the messages are decoded
                taken = await self._send_lines(messages)
                del messages
                waited = client.waited_seconds - before
                if self._stopped or (self._over and taken):
                    return
                if not taken:
                    turns.give_back(reader, self._position)
                    await client.drained()
        finally:
            reader.close()

    def _before_end(self, messages: Iterator[StreamMessage]) -> Iterator[StreamMessage]:
        """Yields the messages before the first one that is at or after `end_time`."""
        if self._end_time is None:
            return messages
        return self._until(messages, self._end_time)

    def _until(self, messages: Iterator[StreamMessage], end_time: int) -> Iterator[StreamMessage]:
        for message in messages:
            if message.publish_time >= end_time:
                self._over = True
                return
            yield message

    async def _read(self, reader: FrameReader, waited_seconds: float) -> Scan | None:
        """Returns the next frames when there are some and the budget has room; None at the end."""
        self._idle = True
        try:
            while not self._stopped:
                if not reader.is_ready():
                    self._turns.give_back(reader, reader.position)
                    await reader.wait()
                await self._turns.begin(reader, reader.position, waited_seconds)
                try:
                    return await reader.next_frames()
                except FrameTooLarge as large:
                    self._turns.fits(large.size)
                    self._turns.give_back(reader, reader.position)
            return None
        finally:
            self._idle = False

    async def _send_lines(self, messages: Iterator[StreamMessage]) -> bool:
        """Sends messages; returns False if the client did not read, before or after the last."""
        for lines, count in message_lines(messages):
            while self._sent < len(lines):
                piece = lines if count > 1 else lines[self._sent : self._sent + PIECE_BYTES]
                await self._write(piece)
                _BYTES.add(len(piece))
                self._sent += len(piece)
                # If the send did not have to wait, it has not yielded to other tasks.
                await asyncio.sleep(0)
                if self._sent < len(lines) and not await self.client.takes():
                    return False
            self._sent = 0
            self._position += count
            if self._left is not None:
                self._left -= count
            _MESSAGES.add(count)
            if not await self.client.takes():
                return False
            if self._stopped:
                return True
        return True

    async def _write(self, data: bytes) -> None:
        await self._start()
        self._silent = False
        await self.client.write(data)


# ---- lines ------------------------------------------------------------------------------------


def message_lines(messages: Iterator[StreamMessage]) -> Iterator[tuple[bytes, int]]:
    """Yields (lines, number of messages). Only a single line has more than 2 * _LINES_BYTES."""
    lines: list[bytes] = []
    size = 0
    for message in messages:
        line = _message_line(message)
        if lines and len(line) > _LINES_BYTES:
            yield b"".join(lines), len(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line)
        del line
        if size >= _LINES_BYTES:
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

    def is_ready(self) -> bool:
        """Whether the next message, or the end, is there."""

    async def wait(self) -> None:
        """Waits for the next message or `close`. Holds no memory meanwhile."""

    async def next_frames(self) -> Scan | None:
        """The next frames, valid until the next call; None at the end.

        Raises FrameTooLarge if a frame does not fit into the limit.
        """

    def limit(self, bytes_max: int) -> None:
        """Limits the bytes that the reader holds, from the next read on."""

    def release(self, position: int) -> None:
        """Drops everything in memory. The reader continues at `position`."""

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

    def offset_at(self, time_ms: int, visibility: Visibility) -> int:
        """The first offset at that time or later; the end if there is none. Blocks."""

    def offset_of_last(self, count: int) -> int:
        """The offset of the first of the last `count` messages. Blocks."""

    def read(self, start: int, end: int | None, visibility: Visibility) -> FrameReader:
        """Opens a reader. Raises OffsetOutOfRange if `start` is not in the topic."""


class OwnedTopic:
    """A topic that this process has open. Only such a topic can be followed."""

    def __init__(self, topic: Topic, start: int, threads: Executor) -> None:
        """`threads` reads messages that are not in memory."""
        self._topic = topic
        self._threads = threads
        self.name = topic.name
        self.start = start

    def end(self, visibility: Visibility) -> int:
        marks = self._topic.watermarks()
        return marks.appended if visibility == "buffered" else marks.synced

    def offset_at(self, time_ms: int, visibility: Visibility) -> int:
        return self._topic.offset_at_ms(time_ms, visibility)

    def offset_of_last(self, count: int) -> int:
        return self._topic.offset_of_last(count)

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

    def offset_at(self, time_ms: int, visibility: Visibility) -> int:  # noqa: ARG002
        return self._view.offset_at_time(time_ms)

    def offset_of_last(self, count: int) -> int:
        return self._view.offset_of_last(count)

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

    def is_ready(self) -> bool:
        return True

    async def wait(self) -> None:
        """A view does not wait for messages."""

    async def next_frames(self) -> Scan | None:
        read = partial(next, self._frames, None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def limit(self, bytes_max: int) -> None:
        self._reader.limit(bytes_max)

    def release(self, position: int) -> None:
        self._frames.close()  # it refers to the last frames
        self._reader.release(position)
        self._frames = self._reader.frames()

    def close(self) -> None:
        self._reader.close()


def find_source(
    context: ServerContext, name: TopicName, threads: Executor, *, follow: bool
) -> Source:
    """Returns the source of a topic. Blocks on the disk and on the catalog.

    Raises UnknownTopic if the topic does not exist; never creates it.
    """
    if context.settings.data is None:
        if str(name) not in context.store.topics():
            raise UnknownTopic(f"there is no topic {name}")
        return _owned(context.topic(name), threads)
    topic = context.store.opened(str(name))
    if topic is not None:
        return _owned(topic, threads)
    # The view uses the connections of the store, so it need not be closed.
    view = context.store.view().topic(str(name))
    return _owned(context.topic(name), threads) if follow else ViewedTopic(view, threads)


def _owned(topic: Topic, threads: Executor) -> OwnedTopic:
    return OwnedTopic(topic, topic.start_offset, threads)
