"""FetchStream: frames of a topic as they are stored, from objects, segments and memory.

The first response says where the stream begins. Each further one has whole frames with consecutive
offsets, at most `max_bytes` of them if a single frame is not larger, and the next offset. At the
end of the topic the stream waits for new messages, unless it has an `end_offset`.

Frames are not decoded here. Their checksums are compared as they are read, and the client compares
them again.

A client that does not read holds back only its own stream, which then keeps one response and its
position, and reads again what it had read ahead.

With a subscription, the frames are those that the subscription delivers to this consumer, whose
offsets need not follow each other, and the requests after the first acknowledge.

Offsets that are recorded as lost end the stream of a plain reader with DATA_LOSS, and the details
name the range: the client decides whether to go on after it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any, Final

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.calls import Context
from forebay.broker.context import BrokerContext
from forebay.broker.requests import parse_name, parse_topic_name
from forebay.broker.status import Refused
from forebay.dispatch.feed import Delivery
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.subscription import Consumer
from forebay.errors import UnknownSubscription, UnknownTopic, UsageError
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.format.names import TopicName
from forebay.limits import (
    OFFSET_MAX,
    STREAM_BATCH_MESSAGES_MAX,
    STREAM_FETCH_BYTES,
    STREAM_FETCH_BYTES_MAX,
)
from forebay.topic.storage import StartPosition, WalStorage
from forebay.wal.reader import AsyncLogReader

Requests = AsyncIterator[tuple[int, pb.FetchRequest]]
_STALLED_SECONDS: Final = 0.5
"""A response that takes this long to be sent makes the stream drop what it has read ahead."""
_FRAMES_TAG: Final = b"\x0a"
_NEXT_TAG: Final = b"\x10"


class FetchStreams:
    """All streams of readers. Call it in the event loop of the server."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def serve(self, opened: pb.FetchRequest, requests: Requests, call: Context) -> None:
        """Serves one stream to its end; raises the error that it ends with."""
        request = opened.open
        topic = parse_topic_name(request.topic)
        if request.max_bytes > STREAM_FETCH_BYTES_MAX:
            raise UsageError(
                f"max_bytes is {request.max_bytes}; it must be at most {STREAM_FETCH_BYTES_MAX}"
            )
        if request.WhichOneof("start") == "subscription":
            await self._serve_subscription(topic, request, requests, call)
            return
        storage = await self._context.topics.reliable(topic, create=False)
        start = await self._start(storage, request)
        end = request.end_offset if request.HasField("end_offset") else None
        if end is not None and end > OFFSET_MAX:
            raise UsageError(f"end_offset is {end}; it must be at most {OFFSET_MAX}")
        reader = storage.create_stream(StartPosition.offset(start), end=end)
        await call.write(pb.FetchResponse(next_offset=start).SerializeToString())
        bytes_max = request.max_bytes or STREAM_FETCH_BYTES
        try:
            await self._until_stopped(_pump(reader, bytes_max, call))
        finally:
            reader.close()

    async def _start(self, storage: WalStorage, request: pb.OpenFetch) -> int:
        """The first offset, as the request names it."""
        kind = request.WhichOneof("start")
        if kind == "offset":
            return int(request.offset)
        if kind == "time_ms":
            return await asyncio.to_thread(_offset_at, storage, request.time_ms)
        if kind == "position" and request.position == "earliest":
            return await asyncio.to_thread(lambda: storage.start_offset)
        if kind == "position" and request.position == "latest":
            return storage.wal.current_offset()
        raise UsageError("start must be an offset, a time, 'earliest' or 'latest'")

    async def _until_stopped(self, *works: Coroutine[Any, Any, None]) -> None:
        """Runs these until one of them ends, or the server stops."""
        stopping = asyncio.create_task(self._context.gate.stopping.wait())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            stopped = stopping.done()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.wait({stopping, *tasks})
        for task in tasks:
            if not task.cancelled():
                task.result()
        if stopped:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    # -- subscriptions --------------------------------------------------------------------------

    async def _serve_subscription(
        self, topic: TopicName, request: pb.OpenFetch, requests: Requests, call: Context
    ) -> None:
        if request.HasField("end_offset"):
            raise UsageError("end_offset is not for subscriptions, which have no end")
        start, registry = request.subscription, self._context.registry
        name = parse_name("the name of a subscription", start.name)
        consumer_name = parse_name("consumer_name", start.consumer_name)
        try:
            kind = SubscriptionType(start.type)
        except ValueError:
            raise UsageError(f"there is no subscription type {start.type}") from None
        reliable = await self._context.topics.delivery(topic)
        if not reliable:
            what = "is not stored: use Danube's protocol" if reliable is False else "does not exist"
            raise UnknownTopic(f"the topic {topic} {what}")
        filters = tuple(start.key_filters)
        number = await registry.subscribe(topic, name, kind, consumer_name, filters)
        subscription, consumer = await registry.connect(number, _frame)
        try:
            await call.write(pb.FetchResponse().SerializeToString())
            bytes_max = request.max_bytes or STREAM_FETCH_BYTES
            await self._until_stopped(
                _deliver(consumer, bytes_max, call),
                self._answer(topic, name, requests),
                _until_cut(consumer),
            )
        finally:
            subscription.leave(consumer)

    async def _answer(self, topic: TopicName, name: str, requests: Requests) -> None:
        """Records what the client acknowledges, until it closes its side."""
        async for _, request in requests:
            if request.WhichOneof("request") != "acknowledge":
                raise UsageError("a request after the first one must acknowledge")
            answer = request.acknowledge
            _require_few(answer)
            subscription = await self._context.registry.find(topic, name)
            for each in answer.acks:
                subscription.ack(*_range(each))
            delay = answer.nack_delay_ms if answer.HasField("nack_delay_ms") else None
            for each in answer.nacks:
                for offset in range(*_range(each)):
                    subscription.nack(offset, delay)


def _require_few(answer: pb.Acknowledge) -> None:
    """One request must not keep the event loop busy for long."""
    nacked = sum(max(each.end - each.start, 1) for each in answer.nacks)
    if len(answer.acks) > STREAM_BATCH_MESSAGES_MAX or nacked > STREAM_BATCH_MESSAGES_MAX:
        raise UsageError(
            f"a request acknowledges or nacks over {STREAM_BATCH_MESSAGES_MAX} messages: send "
            "several"
        )


def _range(found: pb.OffsetRange) -> tuple[int, int]:
    if not found.start < found.end <= OFFSET_MAX:
        raise UsageError(f"{found.start} to {found.end} is not a range of offsets")
    if found.end - found.start > STREAM_BATCH_MESSAGES_MAX:
        raise UsageError(f"a range of more than {STREAM_BATCH_MESSAGES_MAX} offsets")
    return found.start, found.end


def _frame(delivery: Delivery) -> bytes:
    return bytes(delivery.frame)


async def _until_cut(consumer: Consumer) -> None:
    await consumer.cut.wait()
    raise Refused(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the consumer did not read, and others need the room: open the stream again",
    )


async def _deliver(consumer: Consumer, bytes_max: int, call: Context) -> None:
    """Sends the messages of a subscription, several in a response, until it ends."""
    while frames := await consumer.take():
        waiting: list[bytes] = []
        size = 0
        for frame in frames:
            if waiting and size + len(frame) > bytes_max:
                await call.write(encode_response(memoryview(b"".join(waiting)), 0))
                waiting, size = [], 0
            waiting.append(frame)
            size += len(frame)
        await call.write(encode_response(memoryview(b"".join(waiting)), 0))
    raise UnknownSubscription("the subscription was deleted")


def _offset_at(storage: WalStorage, time_ms: int) -> int:
    with storage.reader_at_time(time_ms) as reader:
        return reader.position


async def _pump(reader: AsyncLogReader, bytes_max: int, call: Context) -> None:
    """Sends frames to the end of the reader."""
    while (frames := await reader.next_frames()) is not None:
        responses = _responses(frames, bytes_max)
        del frames
        while (found := next(responses, None)) is not None:
            response, after = found
            writing = asyncio.ensure_future(call.write(response))
            del response, found
            done, _ = await asyncio.wait({writing}, timeout=_STALLED_SECONDS)
            if not done:
                responses.close()
                reader.release(after)
            await writing


def _responses(frames: Scan, bytes_max: int) -> Generator[tuple[bytes, int]]:
    """Yields encoded responses, each with its next offset."""
    view, positions, lengths = memoryview(frames.buffer), frames.positions, frames.lengths
    row = 0
    while row < len(frames):
        begin = positions[row] - HEADER_BYTES
        # The row after the last frame that ends within the limit, and at least one.
        stop = bisect_right(
            range(len(frames)),
            begin + bytes_max,
            lo=row + 1,
            key=lambda at: positions[at] + lengths[at],
        )
        end = positions[stop - 1] + lengths[stop - 1]
        after = frames.offsets[stop - 1] + 1
        yield encode_response(view[begin:end], after), after
        row = stop


def encode_response(frames: memoryview, next_offset: int) -> bytes:
    """A FetchResponse, with one copy of the frames: protobuf makes three."""
    return b"".join((_FRAMES_TAG, _varint(len(frames)), frames, _NEXT_TAG, _varint(next_offset)))


def _varint(number: int) -> bytes:
    """A number as protobuf encodes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
