"""`AsyncClient`: producers, readers and consumers for asyncio. See `forebay.broker.client`.

Beware: everything belongs to the event loop in which the client was made.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from forebay.broker.connection import Connection
from forebay.broker.consuming import ConsumerOptions, SubscriptionStream
from forebay.broker.producing import Chunk, ProducerCore, ProducerOptions, chunk_bytes, split
from forebay.broker.reading import FrameStream, ReadOptions, Start
from forebay.errors import LogClosed, UsageError
from forebay.format.frame import Scan
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, decode_messages
from forebay.format.names import parse_topic

_Result = TypeVar("_Result")
Attributes = Mapping[str, str] | None
Offset = int | None
"""The offset of a message. None only if an idempotent producer repeated the message after a lost
answer, and the server no longer knows where it is."""
AnyDurability = Literal["buffered", "synced"] | None


class _Context:
    """What is used as `async with`."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncClient(_Context):
    """A connection to one server, for one event loop."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._open: set[ProducerCore | AsyncReader | AsyncConsumer] = set()

    async def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        idempotent: bool = False,
        durability: AnyDurability = None,
    ) -> AsyncProducer:
        """Opens a producer. The topic is created if it does not exist and the server allows it.

        An idempotent producer needs a `name` that no other process uses at the same time; `send`
        numbers its messages. `durability` says when messages are acknowledged; None leaves it to
        the server.
        """
        options = self.producer_options(topic, name, idempotent, durability)
        producer = AsyncProducer(options)
        producer.core = await self.open_core(options, producer.settled)
        return producer

    def producer_options(
        self, topic: str, name: str | None, idempotent: bool, durability: AnyDurability
    ) -> ProducerOptions:
        if idempotent and not name:
            raise UsageError("an idempotent producer needs a name, the same after every restart")
        if durability not in (None, "buffered", "synced"):
            raise UsageError(f"durability is {durability!r}; it must be 'buffered' or 'synced'")
        return ProducerOptions(
            str(parse_topic(topic)), name or _made_name(), idempotent, durability, self._timeout
        )

    async def open_core(
        self, options: ProducerOptions, settled: Callable[[int], None]
    ) -> ProducerCore:
        """Opens a producer, and waits until the server has accepted it."""
        core = ProducerCore(self._connection, options, settled)
        self._open.add(core)
        core.task.add_done_callback(lambda _: self._open.discard(core))
        try:
            await core.opened.wait()
        except BaseException:
            await core.abandon()
            raise
        if core.failure is not None:
            raise core.failure
        return core

    def read(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = False,
        max_bytes: int = 0,
    ) -> AsyncReader:
        """Returns a reader that begins at `start`: an offset, a time, "earliest" or "latest".

        It stops before the offset `end`. Without an `end`, it stops after the newest message at the
        time of its first read, or with `follow` waits for more. `max_bytes` limits the frames that
        the server sends at a time.
        """
        options = ReadOptions(str(parse_topic(topic)), start, end, max_bytes, self._timeout)
        reader = AsyncReader(self._connection, options, follow=follow)
        self._open.add(reader)
        return reader

    async def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        type: str = "exclusive",  # noqa: A002  # the word for it
        name: str | None = None,
        key_filters: Iterable[str] = (),
    ) -> AsyncConsumer:
        """Opens a consumer; the subscription is created if it does not exist.

        `type` is "exclusive", "shared", "failover" or "key_shared".
        """
        options = ConsumerOptions(
            str(parse_topic(topic)),
            subscription,
            name or _made_name(),
            type,
            tuple(key_filters),
            self._timeout,
        )
        consumer = AsyncConsumer(SubscriptionStream(self._connection, options))
        await consumer.open()
        self._open.add(consumer)
        return consumer

    async def close(self) -> None:
        """Closes all producers, readers and consumers, and the connection."""
        try:
            while self._open:
                await self._open.pop().close()
        finally:
            await self._connection.close()


def _made_name() -> str:
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


class AsyncProducer(_Context):
    """Sends messages to one topic, in order. For the tasks of one event loop."""

    def __init__(self, options: ProducerOptions) -> None:
        self.core: ProducerCore
        self._waiting = 0
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._options = options
        self._closed = False

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def last_sequence(self) -> int:
        """The number of the last message that the server has acknowledged, of all runs.

        0 if there is none, and always 0 for a producer that is not idempotent.
        """
        return self.core.last_sequence

    async def send(
        self, payload: Buffer, *, attributes: Attributes = None, routing_key: str | None = None
    ) -> Offset:
        """Sends a message, waits until it is stored, and returns its offset."""
        chunk = single_chunk(payload, attributes, routing_key, _future(), direct=True)
        await self._add(chunk)
        offset: Offset = await chunk.future
        return offset

    async def submit(
        self, payload: Buffer, *, attributes: Attributes = None, routing_key: str | None = None
    ) -> asyncio.Future[Offset]:
        """Sends a message, and returns a future of its offset.

        Waits only if too much is on its way. The future raises MaybeStored after a lost answer,
        unless the producer is idempotent. `flush` and `close` raise what a future has raised.
        """
        future = _future()
        await self._add(single_chunk(payload, attributes, routing_key, future, direct=False))
        return future

    async def send_many(
        self,
        payloads: Iterable[Buffer],
        *,
        attributes: Sequence[Attributes] | None = None,
        routing_keys: Sequence[str | None] | None = None,
    ) -> list[Offset]:
        """Sends messages, waits until all are stored, and returns their offsets.

        `attributes` and `routing_keys` have one item for each payload.
        """
        futures = []
        for chunk in chunks_of(list(payloads), attributes, routing_keys, _future):
            await self._add(chunk)
            futures.append(chunk.future)
        results: list[Sequence[Offset]] = await asyncio.gather(*futures)
        return [offset for each in results for offset in each]

    async def _add(self, chunk: Chunk) -> None:
        while self._waiting > self._options.in_flight_bytes and self.core.failure is None:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise closed_error()
        if self.core.failure is not None:
            raise self.core.failure
        self._waiting += chunk.size
        self._idle.clear()
        self.core.pending.append(chunk)
        self.core.more.set()

    def settled(self, size: int) -> None:
        self._waiting -= size
        self._room.set()
        if not self._waiting:
            self._idle.set()

    async def flush(self) -> None:
        """Waits until everything sent so far has got its result.

        Raises the first error of a message of `submit` since the last flush.
        """
        await self._idle.wait()
        self.core.raise_unreported()

    async def close(self) -> None:
        """Waits until everything is stored, and closes the producer. Raises as `flush` does."""
        self._closed = True
        await self.core.close()
        self.core.raise_unreported()


def closed_error() -> LogClosed:
    return LogClosed("the producer is closed; open another one")


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def single_chunk(
    payload: Buffer,
    attributes: Attributes,
    key: str | None,
    future: Any,
    *,
    direct: bool,
) -> Chunk:
    columns = ([payload], _column(attributes), _column(key))
    split(*columns)
    size = chunk_bytes(*columns)
    return Chunk(*columns, future, single=True, direct=direct, size=size)


def _column(value: _Result | None) -> list[_Result | None] | None:
    return None if value is None else [value]


def chunks_of(
    payloads: list[Buffer],
    attributes: Sequence[Attributes] | None,
    keys: Sequence[str | None] | None,
    future: Any,
) -> Iterator[Chunk]:
    if not payloads:
        return
    for part in split(payloads, attributes, keys):
        columns = (
            payloads[part],
            None if attributes is None else attributes[part],
            None if keys is None else keys[part],
        )
        size = chunk_bytes(*columns)
        yield Chunk(*columns, future(), single=False, direct=True, size=size)


class AsyncReader(_Context):
    """Iterate it for messages, or call `frames` for the frames as they are stored."""

    def __init__(self, connection: Connection, options: ReadOptions, *, follow: bool) -> None:
        self._connection = connection
        self._options = options
        self._follow = follow
        self._stream: FrameStream | None = None
        self._messages: Iterator[StreamMessage] = iter(())

    async def open(self) -> int:
        """Opens the reader, which the first read does otherwise; returns the next offset."""
        if self._stream is None:
            self._stream = await self._opened()
        return await self._stream.open()

    async def next_frames(self) -> Scan | None:
        """Returns the next frames, at least one; None at the end. Do not mix it with iteration."""
        if self._stream is None:
            self._stream = await self._opened()
        return await self._stream.next_frames()

    async def _opened(self) -> FrameStream:
        options = self._options
        if options.end is None and not self._follow:
            newest = FrameStream(self._connection, replace(options, start="latest", end=None))
            try:
                end = await newest.open()
            finally:
                newest.close()
            options = replace(options, end=end)
        return FrameStream(self._connection, options)

    async def frames(self) -> AsyncIterator[Scan]:
        """Yields scanned frames, some at a time, undecoded."""
        while (found := await self.next_frames()) is not None:
            yield found

    def __aiter__(self) -> AsyncIterator[StreamMessage]:
        return self

    async def __anext__(self) -> StreamMessage:
        while True:
            for message in self._messages:
                return message
            frames = await self.next_frames()
            if frames is None:
                raise StopAsyncIteration
            self._messages = decode_messages(frames)

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class AsyncConsumer(_Context):
    """A consumer of a subscription. Iterate it for messages, and acknowledge each."""

    def __init__(self, stream: SubscriptionStream) -> None:
        self._stream = stream
        self._messages: Iterator[StreamMessage] = iter(())

    async def open(self) -> None:
        await self._stream.open()

    def __aiter__(self) -> AsyncIterator[StreamMessage]:
        return self

    async def __anext__(self) -> StreamMessage:
        while True:
            for message in self._messages:
                return message
            self._messages = iter(await self._stream.next_messages())

    def ack(self, *messages: StreamMessage | int) -> None:
        """Acknowledges messages, or their offsets: they are not delivered again."""
        self._stream.ack([_offset(each) for each in messages])

    def nack(self, message: StreamMessage | int, *, delay_ms: int | None = None) -> None:
        """Asks for the message again, after a delay; None leaves the delay to the server."""
        self._stream.nack(_offset(message), delay_ms)

    async def close(self) -> None:
        """Sends what was acknowledged, and ends the consumer; the subscription stays."""
        await self._stream.close()


def _offset(message: StreamMessage | int) -> int:
    return message if isinstance(message, int) else message.offset
