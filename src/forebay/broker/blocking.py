"""`Client`: producers, readers and consumers for threads. See `forebay.broker.client`.

It runs an event loop on a thread of its own, in which the classes for asyncio do the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from forebay.broker.async_client import (
    AnyDurability,
    AsyncClient,
    AsyncConsumer,
    AsyncReader,
    Attributes,
    Offset,
    chunks_of,
    closed_error,
    single_chunk,
)
from forebay.broker.connection import Connection
from forebay.broker.producing import Chunk, ProducerCore, ProducerOptions
from forebay.broker.reading import Start
from forebay.format.frame import Scan
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, decode_messages

_Result = TypeVar("_Result")


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

    def __init__(self, connect: Callable[[], Connection], timeout: float) -> None:
        """`connect` makes the connection; it is called in the event loop of the client."""
        self._loop = _Loop()

        async def made() -> AsyncClient:
            return AsyncClient(connect(), timeout)

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
        self._add(single_chunk(payload, attributes, routing_key, future, direct=True))
        return future.result()

    def submit(
        self, payload: Buffer, *, attributes: Attributes = None, routing_key: str | None = None
    ) -> Future[Offset]:
        """See `AsyncProducer.submit`."""
        future: Future[Offset] = _thread_future()
        self._add(single_chunk(payload, attributes, routing_key, future, direct=False))
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
        for chunk in chunks_of(list(payloads), attributes, routing_keys, _thread_future):
            self._add(chunk)
            futures.append(chunk.future)
        return [offset for each in futures for offset in each.result()]

    def _add(self, chunk: Chunk) -> None:
        with self._changed:
            while self._waiting > self._options.in_flight_bytes and self.core.failure is None:
                self._changed.wait()
            if self._closed:
                raise closed_error()
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

    def open(self) -> int:
        """See `AsyncReader.open`."""
        return self._loop.call(self._reader.open())

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
