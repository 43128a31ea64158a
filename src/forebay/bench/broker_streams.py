"""The rows of `forebay bench broker` about streams: ProduceStream and FetchStream beside an echo.

The client is the same on both sides, a bare grpc.aio stream that sends and reads bytes, so only the
servers differ. The echo stream of `forebay.bench.bare_broker` sends back every request as it came:
the batches that ProduceStream gets. ProduceStream stores them, and answers with their offsets.
FetchStream sends the stored frames, which have more bytes than the batches, and is compared with
the same echo.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from forebay.bench.measure import Measurement, Timed, payload_of
from forebay.broker import streams_pb2 as pb
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX

GOAL: Final = 0.4
MESSAGE_BYTES: Final = 1024
BATCH_MESSAGES: Final = 256
_TOPIC: Final = "/default/streams"
_BESIDE: Final = "an echo stream of the same batches"
Run = Callable[[Coroutine[Any, Any, float]], float]


def stream_rows(
    durability: str, ours: str, bare: str, messages: int, run: Run
) -> list[Measurement]:
    """The rows for one pair of servers, given by their addresses."""
    batches = max(messages // BATCH_MESSAGES, 1)

    def timed(work: Callable[[], Coroutine[Any, Any, float]]) -> Timed:
        return lambda _: run(work())

    echo = timed(lambda: echoed_a_second(bare, batches))
    rows = [
        Measurement(
            f"ProduceStream, {durability}, {BATCH_MESSAGES} a batch",
            MESSAGE_BYTES,
            "messages/s",
            timed(lambda: produced_a_second(ours, batches)),
            _BESIDE,
            echo,
            GOAL,
        )
    ]
    if durability == "synced":
        fetch = timed(lambda: fetched_a_second(ours, batches))
        rows.append(
            Measurement("FetchStream", MESSAGE_BYTES, "messages/s", fetch, _BESIDE, echo, GOAL)
        )
    return rows


async def echoed_a_second(address: str, batches: int) -> float:
    return await _round_trips(address, "Echo", batches)


async def produced_a_second(address: str, batches: int) -> float:
    opened = pb.OpenProducer(topic=_TOPIC, producer_name="bench")
    opening = pb.ProduceRequest(open=opened).SerializeToString()
    return await _round_trips(address, "ProduceStream", batches, opening)


async def _round_trips(
    address: str, method: str, batches: int, opening: bytes | None = None
) -> float:
    """Sends batches, without waiting for answers, and reads as many answers."""
    payloads = [payload_of(MESSAGE_BYTES)] * BATCH_MESSAGES
    batch = pb.ProduceRequest(batch=pb.Batch(payloads=payloads)).SerializeToString()
    async with _channel(address) as channel:
        call: Any = channel.stream_stream(f"/forebay.Streams/{method}")()
        await call.write(opening or batch)  # opens the connection, too
        await call.read()

        async def send() -> None:
            for _ in range(batches):
                await call.write(batch)
            await call.done_writing()

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for _ in range(batches):
                assert isinstance(await call.read(), bytes), await call.details()
        return batches * BATCH_MESSAGES / (time.perf_counter() - began)


async def fetched_a_second(address: str, batches: int) -> float:
    """Reads what ProduceStream has stored, from the oldest message on."""
    wanted = batches * BATCH_MESSAGES
    opened = pb.OpenFetch(topic=_TOPIC, position="earliest", end_offset=wanted)
    async with _channel(address) as channel:
        call: Any = channel.stream_stream("/forebay.Streams/FetchStream")()
        await call.write(pb.FetchRequest(open=opened).SerializeToString())
        await call.read()
        began = time.perf_counter()
        while isinstance(await call.read(), bytes):
            pass
        return wanted / (time.perf_counter() - began)


def _channel(address: str) -> grpc.aio.Channel:
    limit = 2 * FRAME_PAYLOAD_BYTES_MAX
    return grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", limit)])
