"""FetchStream: frames of a topic as they are stored, from objects, segments and memory.

The first response says where the stream begins. Each further one has whole frames with consecutive
offsets, at most `max_bytes` of them if a single frame is not larger, and the next offset. At the
end of the topic the stream waits for new messages, unless it has an `end_offset`.

Frames are not decoded here. Their checksums are compared as they are read, and the client compares
them again.

A client that does not read holds back only its own stream, which then keeps one response and its
position, and reads again what it had read ahead.

Offsets that are recorded as lost end the stream with DATA_LOSS, and the details name the range: the
client decides whether to go on after it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Generator
from typing import Final

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.calls import Context
from forebay.broker.context import BrokerContext
from forebay.broker.requests import parse_topic_name
from forebay.broker.status import Refused
from forebay.errors import UsageError
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.limits import OFFSET_MAX, STREAM_FETCH_BYTES, STREAM_FETCH_BYTES_MAX
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

    async def serve(self, opened: pb.FetchRequest, _requests: Requests, call: Context) -> None:
        """Serves one stream to its end; raises the error that it ends with."""
        request = opened.open
        topic = parse_topic_name(request.topic)
        if request.max_bytes > STREAM_FETCH_BYTES_MAX:
            raise UsageError(
                f"max_bytes is {request.max_bytes}; it must be at most {STREAM_FETCH_BYTES_MAX}"
            )
        if request.WhichOneof("start") == "subscription":
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "subscriptions are not streamed yet")
        storage = await self._context.topics.reliable(topic, create=False)
        start = await self._start(storage, request)
        end = request.end_offset if request.HasField("end_offset") else None
        if end is not None and end > OFFSET_MAX:
            raise UsageError(f"end_offset is {end}; it must be at most {OFFSET_MAX}")
        reader = storage.create_stream(StartPosition.offset(start), end=end)
        await call.write(pb.FetchResponse(next_offset=start).SerializeToString())
        await self._pump_until_stopped(reader, request.max_bytes or STREAM_FETCH_BYTES, call)

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

    async def _pump_until_stopped(
        self, reader: AsyncLogReader, bytes_max: int, call: Context
    ) -> None:
        stopping = asyncio.create_task(self._context.gate.stopping.wait())
        pumping = asyncio.create_task(_pump(reader, bytes_max, call))
        try:
            await asyncio.wait({stopping, pumping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            pumping.cancel()
            await asyncio.wait({stopping, pumping})
            reader.close()
        if pumping.cancelled():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        pumping.result()


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
