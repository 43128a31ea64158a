"""ProduceStream: a producer sends batches, and gets their offsets once they are stored.

Batches are pipelined: the next one is read and appended while the ones before are being synced.
Responses come in the order of the batches. What was received and is not acknowledged is limited
(STREAM_IN_FLIGHT_BYTES): beyond that, the next request is not read, and gRPC holds the client back.

A stream ends in one of these ways. Whatever was appended before is acknowledged first, if the log
still works.

| what happened | status |
|---|---|
| the client has closed its side | OK |
| a request is not valid | INVALID_ARGUMENT |
| an idempotent producer left out a number | FAILED_PRECONDITION |
| the topic enforces a schema, which a stream cannot name | FAILED_PRECONDITION |
| another stream of the same idempotent producer was opened | ABORTED |
| the log stopped, another process owns the topic, or the server stops | UNAVAILABLE |

Beware: an append is never cancelled half-way. The name of an idempotent producer is free for the
next stream only when the last append of this one has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.calls import Context
from forebay.broker.context import BrokerContext
from forebay.broker.known_producers import Producer
from forebay.broker.producers import MESSAGE_BYTES, MESSAGES
from forebay.broker.requests import parse_name, parse_topic_name
from forebay.broker.status import Refused
from forebay.dispatch.registry import stable_number
from forebay.errors import ForebayError, MessageTooLarge, UsageError
from forebay.format.names import TopicName
from forebay.limits import (
    ATTRIBUTES_MAX,
    STREAM_BATCH_BYTES_MAX,
    STREAM_BATCH_MESSAGES_MAX,
    STREAM_IN_FLIGHT_BYTES,
)
from forebay.topic.producers import Appended, IdempotentProducer
from forebay.topic.storage import WalStorage
from forebay.wal.log import ProducerParts

_BATCH_BYTES: Final = 512
"""What a batch counts in addition to its size, so that empty ones are limited too."""

Requests = AsyncIterator[tuple[int, pb.ProduceRequest]]
"""Requests with their size."""


class Columns(NamedTuple):
    """The messages of a batch."""

    payloads: list[bytes]
    attributes: list[dict[str, str]] | None
    keys: list[str | None] | None


class Appender(Protocol):
    """Appends the batches of one stream."""

    async def append(self, first_sequence: int, columns: Columns) -> Appended: ...


class PlainAppender:
    """For a producer that does not number its messages."""

    def __init__(self, storage: WalStorage, parts: ProducerParts) -> None:
        self._wal = storage.wal
        self._parts = parts

    async def append(self, first_sequence: int, columns: Columns) -> Appended:
        if first_sequence:
            raise UsageError("first_sequence is only for idempotent producers")
        offsets = await self._wal.append_many_async(*columns, producer=self._parts)
        return Appended(offsets, offsets.stop)


class NumberedAppender:
    """For an idempotent producer."""

    def __init__(self, producer: IdempotentProducer) -> None:
        self._producer = producer

    async def append(self, first_sequence: int, columns: Columns) -> Appended:
        return await self._producer.append(first_sequence, *columns)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch that was appended and is not acknowledged yet."""

    appended: Appended
    size: int
    messages: int
    payload_bytes: int


class ProduceStreams:
    """All streams of producers. Call it in the event loop of the server."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._idempotent: dict[tuple[TopicName, str], ProduceStream] = {}

    async def serve(self, opened: pb.ProduceRequest, requests: Requests, call: Context) -> None:
        """Serves one stream to its end; raises the error that it ends with."""
        request = opened.open
        topic = parse_topic_name(request.topic)
        name = parse_name("producer_name", request.producer_name)
        durability = self._durability(request.durability)
        number = stable_number(str(topic), name)
        self._context.producers.add(Producer(number, name, topic, reliable=True))
        storage = await self._context.topics.reliable(topic, create=True)
        await asyncio.to_thread(self._context.guard.require_free, topic)
        stream = ProduceStream(topic, storage, durability, self._context, call)
        if request.idempotent:
            await self._serve_idempotent(topic, name, stream, requests)
            return
        parts = storage.wal.producer(number, name, self._context.address)
        await call.write(pb.ProduceResponse().SerializeToString())
        await stream.run(PlainAppender(storage, parts), requests)

    def _durability(self, wanted: str) -> str:
        if wanted not in ("", "buffered", "synced"):
            raise UsageError(f"durability is {wanted[:100]!r}; it must be 'buffered' or 'synced'")
        return wanted or self._context.settings.ack

    async def _serve_idempotent(
        self, topic: TopicName, name: str, stream: ProduceStream, requests: Requests
    ) -> None:
        key = (topic, name)
        while (before := self._idempotent.get(key)) is not None:
            before.end(
                Refused(
                    grpc.StatusCode.ABORTED,
                    f"{topic}: another stream of the idempotent producer {name!r} was opened",
                ),
                at_once=True,
            )
            await before.ended.wait()
        self._idempotent[key] = stream
        try:
            await self._connected(name, stream, requests)
        finally:
            del self._idempotent[key]
            stream.ended.set()

    async def _connected(self, name: str, stream: ProduceStream, requests: Requests) -> None:
        producers = stream.storage.producers
        connecting = asyncio.create_task(asyncio.to_thread(producers.connect, name))
        try:
            producer = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            await asyncio.wait({connecting})
            if connecting.exception() is None:
                connecting.result().disconnect()
            raise
        try:
            response = pb.ProduceResponse(last_sequence=producer.last_sequence)
            await stream.call.write(response.SerializeToString())
            await stream.run(NumberedAppender(producer), requests)
        finally:
            producer.disconnect()


class ProduceStream:
    """One stream that was opened."""

    def __init__(
        self,
        topic: TopicName,
        storage: WalStorage,
        durability: str,
        context: BrokerContext,
        call: Context,
    ) -> None:
        self._topic = topic
        self.storage = storage
        self.call = call
        self.ended = asyncio.Event()
        """Set when nothing of this stream is being appended any more."""
        self._durability = durability
        self._message_bytes_max = context.settings.message_bytes_max
        self._stopping = context.gate.stopping
        self._guard = context.guard
        self._sent: asyncio.Queue[_Sent | None] = asyncio.Queue()
        self._in_flight = 0
        self._room = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._acknowledging: asyncio.Task[None] | None = None
        self._in_read = False
        self._closing = False
        self._reason: ForebayError | None = None

    def end(self, reason: ForebayError, *, at_once: bool = False) -> None:
        """Ends the stream with this error: after what was received, or `at_once`.

        At once means that nothing more is acknowledged, because the client may not read it.
        """
        self._reason = self._reason or reason
        if at_once and self._acknowledging is not None:
            self._acknowledging.cancel()
        self._stop_reading()

    def _stop_reading(self) -> None:
        """Ends the reading task, but not in the middle of an append."""
        self._closing = True
        self._room.set()
        if self._in_read and self._reading is not None:
            self._reading.cancel()

    async def run(self, appender: Appender, requests: Requests) -> None:
        """Appends and acknowledges until the stream ends. Raises the error that it ends with."""
        self._reading = asyncio.create_task(self._read(appender, requests))
        self._acknowledging = asyncio.create_task(self._acknowledge())
        stopping = asyncio.create_task(self._end_when_stopping())
        try:
            await asyncio.wait({self._acknowledging})
        finally:
            stopping.cancel()
            self._acknowledging.cancel()
            self._stop_reading()
            await _all_ended(self._reading, self._acknowledging, stopping)
        if self._reason is not None:
            raise self._reason
        self._acknowledging.result()
        self._reading.result()

    async def _end_when_stopping(self) -> None:
        await self._stopping.wait()
        self.end(Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping"))

    async def _read(self, appender: Appender, requests: Requests) -> None:
        """Appends every batch, in order; returns when there are no more."""
        try:
            while not self._closing and (received := await self._next(requests)) is not None:
                size, request = received
                del received
                await self._append(appender, size, request)
                del request
                while self._in_flight > STREAM_IN_FLIGHT_BYTES and not self._closing:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._sent.put_nowait(None)

    async def _next(self, requests: Requests) -> tuple[int, pb.ProduceRequest] | None:
        self._in_read = True
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if not self._closing:
                raise
            return None
        finally:
            self._in_read = False

    async def _append(self, appender: Appender, size: int, request: pb.ProduceRequest) -> None:
        if request.WhichOneof("request") != "batch":
            raise UsageError("a request after the first one must have a batch")
        if size > STREAM_BATCH_BYTES_MAX:
            raise MessageTooLarge(
                f"a request of {size} bytes; at most {STREAM_BATCH_BYTES_MAX} are allowed: send "
                "smaller batches"
            )
        columns = self._columns(request.batch)
        if self._guard.is_free(self._topic) is not True:
            await asyncio.to_thread(self._guard.require_free, self._topic)
        appended = await appender.append(request.batch.first_sequence, columns)
        payload_bytes = sum(map(len, columns.payloads))
        size += _BATCH_BYTES
        self._in_flight += size
        self._sent.put_nowait(_Sent(appended, size, len(columns.payloads), payload_bytes))

    def _columns(self, batch: pb.Batch) -> Columns:
        payloads = list(batch.payloads)
        count = len(payloads)
        if not 0 < count <= STREAM_BATCH_MESSAGES_MAX:
            raise UsageError(
                f"a batch of {count} messages; 1 to {STREAM_BATCH_MESSAGES_MAX} are allowed"
            )
        for name, column in (("attributes", batch.attributes), ("keys", batch.keys)):
            if column and len(column) != count:
                raise UsageError(f"{count} payloads, but {len(column)} {name}")
        largest = max(map(len, payloads))
        if largest > self._message_bytes_max:
            raise MessageTooLarge(
                f"a message of {largest} bytes; at most {self._message_bytes_max} are allowed "
                "(broker.message_bytes_max)"
            )
        attributes = [dict(each.values) for each in batch.attributes] or None
        if attributes and max(map(len, attributes)) > ATTRIBUTES_MAX:
            raise MessageTooLarge(f"a message has more than {ATTRIBUTES_MAX} attributes")
        keys = [each.value if each.HasField("value") else None for each in batch.keys] or None
        return Columns(payloads, attributes, keys)

    async def _acknowledge(self) -> None:
        """Responds to every batch, in order, once it is stored as it should be."""
        wal = self.storage.wal
        while (sent := await self._sent.get()) is not None:
            if self._durability == "synced":
                await wal.await_synced_async(sent.appended.end)
            elif self._durability == "uploaded":
                await asyncio.to_thread(self.storage.wait_uploaded, sent.appended.end)
            offsets = sent.appended.offsets
            response = pb.ProduceResponse(first_offset=offsets.start, end_offset=offsets.stop)
            await self.call.write(response.SerializeToString())
            self._in_flight -= sent.size
            self._room.set()
            MESSAGES.add(sent.messages)
            MESSAGE_BYTES.add(sent.payload_bytes)


async def _all_ended(*tasks: asyncio.Task[None]) -> None:
    """Waits until all have ended, however often the caller is cancelled meanwhile."""
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # whoever raises one of them, the others are known
    if cancelled:
        raise asyncio.CancelledError
