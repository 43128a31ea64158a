"""The Python client: `forebay.connect` and, for asyncio, `forebay.connect_async`.

    with forebay.connect("127.0.0.1:6650") as client:
        with client.producer("orders", name="shop-1", idempotent=True) as producer:
            offset = producer.send(b"...", attributes={"k": "v"})
        for message in client.read("orders"): ...
        with client.consumer("orders", subscription="billing") as consumer:
            for message in consumer:
                consumer.ack(message)

Both have the same methods; those of asyncio are awaited. The client for threads runs an event loop
on a thread of its own, and all its methods may be called by any thread.

A connection that is lost is made again, with growing waits, for `timeout` seconds. An idempotent
producer then repeats what was not answered, and the server knows its numbers: nothing is stored
twice and nothing is lost. Another producer raises MaybeStored for these messages. A reader goes on
at its offset, and a consumer gets again what it has not acknowledged.

Beware: `send` waits for the answer of each message, `submit` does not. Use `submit` or `send_many`
for high rates.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import uvloop

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
TIMEOUT: Final = 60.0


def connect(
    address: str,
    *,
    token: str | None = None,
    tls: bool = False,
    ca_file: str | Path | None = None,
    timeout: float = TIMEOUT,
) -> Client:
    """Returns a client of the server at `host:port`. It connects when it is used.

    `tls` checks the server's certificate with the system's CA certificates, `ca_file` with those in
    the file. `timeout` is how long calls try to reach a server that does not respond, in seconds.
    """
    return Client(address, token=token, tls=tls, ca_file=ca_file, timeout=timeout)


def connect_async(
    address: str,
    *,
    token: str | None = None,
    tls: bool = False,
    ca_file: str | Path | None = None,
    timeout: float = TIMEOUT,
) -> AsyncClient:
    """`connect` for asyncio. Call it in the event loop that uses it."""
    connection = Connection(address, token=token, tls=tls, ca_file=ca_file)
    return AsyncClient(connection, timeout)


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
        chunk = _single(payload, attributes, routing_key, _future(), direct=True)
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
        await self._add(_single(payload, attributes, routing_key, future, direct=False))
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
        for chunk in _chunks(list(payloads), attributes, routing_keys, _future):
            await self._add(chunk)
            futures.append(chunk.future)
        results: list[Sequence[Offset]] = await asyncio.gather(*futures)
        return [offset for each in results for offset in each]

    async def _add(self, chunk: Chunk) -> None:
        while self._waiting > self._options.in_flight_bytes and self.core.failure is None:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise _closed()
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


def _closed() -> LogClosed:
    return LogClosed("the producer is closed; open another one")


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _single(
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


def _chunks(
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

    async def next_frames(self) -> Scan | None:
        """Returns the next frames, at least one; None at the end. Do not mix it with iteration."""
        if self._stream is None:
            self._stream = await self._opened()
        return await self._stream.next_frames()

    async def _opened(self) -> FrameStream:
        options = self._options
        if options.end is None and not self._follow:
            newest = FrameStream(self._connection, _at_latest(options))
            try:
                end = await newest.open()
            finally:
                newest.close()
            options = _with_end(options, end)
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


def _at_latest(options: ReadOptions) -> ReadOptions:
    return ReadOptions(options.topic, "latest", timeout=options.timeout)


def _with_end(options: ReadOptions, end: int) -> ReadOptions:
    return ReadOptions(options.topic, options.start, end, options.max_bytes, options.timeout)


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


# -- for threads ------------------------------------------------------------------------------


class _Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="forebay-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs it in the loop, and returns its result. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


class _SyncContext:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Client(_SyncContext):
    """`AsyncClient` for threads. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None,
        tls: bool,
        ca_file: str | Path | None,
        timeout: float,
    ) -> None:
        self._loop = _Loop()

        async def made() -> AsyncClient:
            return connect_async(address, token=token, tls=tls, ca_file=ca_file, timeout=timeout)

        try:
            self._client = self._loop.call(made())
        except BaseException:
            self._loop.stop()
            raise
        self._closed = False

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        idempotent: bool = False,
        durability: AnyDurability = None,
    ) -> Producer:
        """See `AsyncClient.producer`."""
        options = self._client.producer_options(topic, name, idempotent, durability)
        producer = Producer(self._loop, options)
        producer.core = self._loop.call(self._client.open_core(options, producer.settled))
        return producer

    def read(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = False,
        max_bytes: int = 0,
    ) -> Reader:
        """See `AsyncClient.read`."""
        found = self._client.read(topic, start, end=end, follow=follow, max_bytes=max_bytes)
        return Reader(self._loop, found)

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        type: str = "exclusive",  # noqa: A002  # the word for it
        name: str | None = None,
        key_filters: Iterable[str] = (),
    ) -> Consumer:
        """See `AsyncClient.consumer`."""
        found = self._loop.call(
            self._client.consumer(
                topic, subscription, type=type, name=name, key_filters=key_filters
            )
        )
        return Consumer(self._loop, found)

    def close(self) -> None:
        """Closes everything that was opened with this client. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._client.close())
        finally:
            self._loop.stop()


class Producer(_SyncContext):
    """`AsyncProducer` for threads. Thread-safe; messages of one thread stay in order."""

    def __init__(self, loop: _Loop, options: ProducerOptions) -> None:
        self.core: ProducerCore
        self._loop = loop
        self._options = options
        self._changed = threading.Condition()
        self._waiting = 0
        self._woken = False
        """Whether the loop was told of messages, and has not looked yet."""
        self._closed = False

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def last_sequence(self) -> int:
        """See `AsyncProducer.last_sequence`."""
        return self.core.last_sequence

    def send(
        self, payload: Buffer, *, attributes: Attributes = None, routing_key: str | None = None
    ) -> Offset:
        """Sends a message, waits until it is stored, and returns its offset."""
        future: Future[Offset] = _thread_future()
        self._add(_single(payload, attributes, routing_key, future, direct=True))
        return future.result()

    def submit(
        self, payload: Buffer, *, attributes: Attributes = None, routing_key: str | None = None
    ) -> Future[Offset]:
        """See `AsyncProducer.submit`."""
        future: Future[Offset] = _thread_future()
        self._add(_single(payload, attributes, routing_key, future, direct=False))
        return future

    def send_many(
        self,
        payloads: Iterable[Buffer],
        *,
        attributes: Sequence[Attributes] | None = None,
        routing_keys: Sequence[str | None] | None = None,
    ) -> list[Offset]:
        """See `AsyncProducer.send_many`."""
        futures = []
        for chunk in _chunks(list(payloads), attributes, routing_keys, _thread_future):
            self._add(chunk)
            futures.append(chunk.future)
        return [offset for each in futures for offset in each.result()]

    def _add(self, chunk: Chunk) -> None:
        with self._changed:
            while self._waiting > self._options.in_flight_bytes and self.core.failure is None:
                self._changed.wait()
            if self._closed:
                raise _closed()
            if self.core.failure is not None:
                raise self.core.failure
            self._waiting += chunk.size
            self.core.pending.append(chunk)
            wake, self._woken = not self._woken, True
        if wake:
            self._loop.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._woken = False
        self.core.more.set()
        self.core.fail_pending()

    def settled(self, size: int) -> None:
        with self._changed:
            self._waiting -= size
            self._changed.notify_all()

    def flush(self) -> None:
        """See `AsyncProducer.flush`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
        self.core.raise_unreported()

    def close(self) -> None:
        """See `AsyncProducer.close`."""
        with self._changed:
            self._closed = True
        self._loop.call(self.core.close())
        self.core.raise_unreported()


def _thread_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a message that was sent cannot be called back
    return future


class Reader(_SyncContext):
    """`AsyncReader` for threads; one thread at a time may iterate it."""

    def __init__(self, loop: _Loop, reader: AsyncReader) -> None:
        self._loop = loop
        self._reader = reader
        self._ahead: Future[Scan | None] | None = None
        self._messages: Iterator[StreamMessage] = iter(())
        self._closed = False

    def next_frames(self) -> Scan | None:
        """See `AsyncReader.next_frames`. The next ones are fetched meanwhile."""
        if self._closed:
            return None
        ahead = self._ahead or self._fetch()
        self._ahead = None
        try:
            found = ahead.result()
        except BaseException:
            ahead.cancel()
            raise
        self._ahead = None if found is None else self._fetch()
        return found

    def _fetch(self) -> Future[Scan | None]:
        return asyncio.run_coroutine_threadsafe(self._reader.next_frames(), self._loop.loop)

    def frames(self) -> Iterator[Scan]:
        """Yields scanned frames, some at a time, undecoded."""
        while (found := self.next_frames()) is not None:
            yield found

    def __iter__(self) -> Iterator[StreamMessage]:
        return self

    def __next__(self) -> StreamMessage:
        while True:
            for message in self._messages:
                return message
            frames = self.next_frames()
            if frames is None:
                raise StopIteration
            self._messages = decode_messages(frames)

    def close(self) -> None:
        """Ends the reader. Idempotent."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.cancel()
        self._loop.call(self._reader.close())


class Consumer(_SyncContext):
    """`AsyncConsumer` for threads; one thread at a time may iterate it."""

    def __init__(self, loop: _Loop, consumer: AsyncConsumer) -> None:
        self._loop = loop
        self._consumer = consumer

    def __iter__(self) -> Iterator[StreamMessage]:
        return self

    def __next__(self) -> StreamMessage:
        return self._loop.call(self._consumer.__anext__())

    def ack(self, *messages: StreamMessage | int) -> None:
        """See `AsyncConsumer.ack`."""
        self._loop.loop.call_soon_threadsafe(self._consumer.ack, *messages)

    def nack(self, message: StreamMessage | int, *, delay_ms: int | None = None) -> None:
        """See `AsyncConsumer.nack`."""
        nack = partial(self._consumer.nack, message, delay_ms=delay_ms)
        self._loop.loop.call_soon_threadsafe(nack)

    def close(self) -> None:
        """See `AsyncConsumer.close`."""
        self._loop.call(self._consumer.close())
