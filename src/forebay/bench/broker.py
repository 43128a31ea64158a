"""`forebay bench broker`: Danube's client on `forebay serve`, and on a bare grpc.aio service.

The unmodified `danube-client` is the client of both, in this process; the servers run in processes
of their own, one of each kind that acknowledges synced messages and one that acknowledges buffered
ones. The bare service (`forebay.bench.bare_broker`) decodes and answers, nothing more; for synced
messages it writes and syncs every payload on a thread.

Sends are measured with 1, 8 and 64 of them in flight. Consuming is one message after the other,
each acknowledged before the next is taken, from a topic that has them all. The delay of deliveries
is measured at 1,000 messages a second, from before the send to after the receipt: one clock. A
ratio of delays is the bare service's over ours, so that more is better, as with rates.

Streams are measured below their Python client: batches of 256 messages of 1 KiB, 8 of them without
an answer, beside a stream of the bare service that returns the same bytes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc

from forebay.bench.bare_broker import MODULE
from forebay.bench.measure import (
    Measurement,
    Timed,
    payload_of,
    progress_line,
    result_of,
    run_rounds,
    scratch,
    server_process,
)
from forebay.broker import streams_pb2
from forebay.broker.connection import Connection
from forebay.errors import UsageError

if TYPE_CHECKING:
    from danube.client import DanubeClient
    from danube.consumer import Consumer
    from danube.producer import Producer

GOAL: Final = 0.6
IN_FLIGHT: Final = (1, 8, 64)
MESSAGE_BYTES: Final = 1024
RATE: Final = 1000
STREAM_GOAL: Final = 0.4
BATCH: Final = 256
_BATCHES_IN_FLIGHT: Final = 8
_STREAMED: Final = "/default/streamed"
_ECHO: Final = "a stream that returns the same bytes"
DURABILITIES: Final = ("synced", "buffered")
_BESIDE: Final = {
    "synced": "a bare service, write + fdatasync on a thread",
    "buffered": "a bare service",
}
_STAMP_BYTES: Final = 8
_PATIENCE_SECONDS: Final = 60.0

_T = TypeVar("_T")
_Stream: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]


def require_client() -> None:
    """Raises UsageError if Danube's client is not installed."""
    if importlib.util.find_spec("danube") is None:
        raise UsageError("this benchmark needs Danube's client: pip install 'danube-client>=0.5'")


def run(
    directory: Path | None, *, rounds: int, messages: int, seconds: float, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    require_client()
    started = time.time()
    say = progress_line(progress=progress)
    with scratch(directory) as home, _clients(home) as clients:
        results = run_rounds(_rows(clients, messages), rounds, directory, say)
        say(f"delays at {RATE} messages a second")
        delays = _all_delays(clients, rounds, seconds)
    say("")
    return result_of(
        "broker",
        rounds,
        directory,
        messages=messages,
        results=[result.as_json() for result in results],
        delays=delays,
        seconds=time.time() - started,
    )


def _rows(clients: dict[str, Pair], messages: int) -> list[Measurement]:
    rows = []
    for durability, pair in clients.items():
        beside = _BESIDE[durability]
        for count in IN_FLIGHT:
            amount = max(messages * min(count, 8) // 8, count)
            rows.append(
                Measurement(
                    f"send, {durability}, {count} in flight",
                    MESSAGE_BYTES,
                    "messages/s",
                    pair.ours.sends(count, amount),
                    beside,
                    pair.bare.sends(count, amount),
                    GOAL,
                )
            )
        rows.extend(_stream_rows(durability, pair, messages))
        few = max(messages // 4, 1)
        rows.append(
            Measurement(
                f"consume with ack, {durability}",
                MESSAGE_BYTES,
                "messages/s",
                pair.ours.consumes(few),
                beside,
                pair.bare.consumes(few),
                GOAL,
            )
        )
    return rows


def _stream_rows(durability: str, pair: Pair, messages: int) -> list[Measurement]:
    batches = max(messages // 8, 1)
    echo = pair.bare.produces(batches)
    return [
        Measurement(name, MESSAGE_BYTES, "messages/s", ours, _ECHO, echo, STREAM_GOAL)
        for name, ours in (
            (f"ProduceStream, {durability}", pair.ours.produces(batches)),
            (f"FetchStream, {durability}", pair.ours.fetches(batches)),
        )
    ]


# ---- the client ----


@dataclass(slots=True)
class Client:
    """Danube's client of one server, in an event loop that all measurements share."""

    address: str
    runner: asyncio.Runner
    numbers: Iterator[int] = field(default_factory=itertools.count)
    _client: DanubeClient | None = None

    def sends(self, in_flight: int, messages: int) -> Timed:
        return lambda _: self._run(self._sends_a_second(in_flight, messages))

    def consumes(self, messages: int) -> Timed:
        return lambda _: self._run(self._consumed_a_second(messages))

    def produces(self, batches: int) -> Timed:
        return lambda _: self._run(self._produced_a_second(batches))

    def fetches(self, batches: int) -> Timed:
        return lambda _: self._run(self._fetched_a_second(batches))

    def delays(self, seconds: float, rate: int) -> list[float]:
        """How long each message took, in seconds; sorted."""
        return self._run(self._delays(max(int(seconds * rate), 1), rate))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(asyncio.wait_for(work, _PATIENCE_SECONDS))

    # -- what is measured

    async def _sends_a_second(self, in_flight: int, messages: int) -> float:
        producer = await self._producer("/default/sends")
        try:
            await send_all(producer, in_flight, in_flight)  # opens the connection
            began = time.perf_counter()
            await send_all(producer, in_flight, messages)
            return messages / (time.perf_counter() - began)
        finally:
            await producer.close()

    async def _consumed_a_second(self, messages: int) -> float:
        producer = await self._producer("/default/consumed")
        consumer = await self._consumer("/default/consumed")
        try:
            await send_all(producer, 64, messages + 1)
            queue = await consumer.receive()
            await consumer.ack(await queue.get())  # opens the stream
            began = time.perf_counter()
            for _ in range(messages):
                await consumer.ack(await queue.get())
            return messages / (time.perf_counter() - began)
        finally:
            await producer.close()
            await consumer.close()

    async def _delays(self, messages: int, rate: int) -> list[float]:
        producer = await self._producer("/default/delayed")
        consumer = await self._consumer("/default/delayed")
        try:
            queue = await consumer.receive()
            async with asyncio.TaskGroup() as group:
                taking = group.create_task(_take_stamped(consumer, queue, messages))
                await _send_paced(producer, messages, rate)
            return sorted(taking.result())
        finally:
            await producer.close()
            await consumer.close()

    async def _produced_a_second(self, batches: int) -> float:
        async with _produce_stream(self.address) as call:
            await exchange(call, 1)
            began = time.perf_counter()
            await exchange(call, batches)
            return batches * BATCH / (time.perf_counter() - began)

    async def _fetched_a_second(self, batches: int) -> float:
        async with _produce_stream(self.address) as call:
            end = streams_pb2.ProduceResponse.FromString(await exchange(call, batches)).end_offset
        start = end - batches * BATCH
        opened = streams_pb2.OpenFetch(topic=_STREAMED, offset=start, end_offset=end)
        async with _stream(self.address, "FetchStream") as call:
            await call.write(streams_pb2.FetchRequest(open=opened).SerializeToString())
            await call.read()
            began = time.perf_counter()
            while start < end:
                response: Any = await call.read()
                start = streams_pb2.FetchResponse.FromString(response).next_offset
            return batches * BATCH / (time.perf_counter() - began)

    # -- producers and consumers

    async def _connected(self) -> DanubeClient:
        from danube import DanubeClientBuilder

        if self._client is None:
            self._client = await DanubeClientBuilder().service_url(f"http://{self.address}").build()
        return self._client

    async def _producer(self, topic: str) -> Producer:
        from danube import DispatchStrategy

        client = await self._connected()
        builder = client.new_producer().with_topic(topic).with_name("bench")
        producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
        await producer.create()
        return producer

    async def _consumer(self, topic: str) -> Consumer:
        """A consumer of a new subscription, which starts at the end of the topic."""
        from danube import SubType

        client = await self._connected()
        builder = client.new_consumer().with_topic(topic).with_consumer_name("bench")
        builder = builder.with_subscription(f"bench-{next(self.numbers)}")
        consumer = builder.with_subscription_type(SubType.EXCLUSIVE).build()
        await consumer.subscribe()
        return consumer


@asynccontextmanager
async def _stream(address: str, method: str) -> AsyncIterator[_Stream]:
    connection = Connection(address)
    try:
        yield connection.stream(method)
    finally:
        await connection.close()


@asynccontextmanager
async def _produce_stream(address: str) -> AsyncIterator[_Stream]:
    """A stream that was opened: by the bare service too, which returns the request."""
    opened = streams_pb2.OpenProducer(topic=_STREAMED, producer_name="bench")
    async with _stream(address, "ProduceStream") as call:
        await call.write(streams_pb2.ProduceRequest(open=opened).SerializeToString())
        await call.read()
        yield call


async def exchange(call: _Stream, batches: int) -> Any:
    """Sends so many batches, reads as many responses, and returns the last one."""
    batch = streams_pb2.Batch(payloads=[payload_of(MESSAGE_BYTES)] * BATCH)
    request = streams_pb2.ProduceRequest(batch=batch).SerializeToString()
    room = asyncio.Semaphore(_BATCHES_IN_FLIGHT)

    async def write() -> None:
        for _ in range(batches):
            await room.acquire()
            await call.write(request)

    response: Any = None
    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        for _ in range(batches):
            response = await call.read()
            room.release()
    return response


async def send_all(producer: Producer, in_flight: int, messages: int) -> None:
    """Sends so many messages, with so many of them unanswered at a time."""
    payload = payload_of(MESSAGE_BYTES)
    left = iter(range(messages))

    async def send() -> None:
        for _ in left:
            await producer.send(payload)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(send())


async def _send_paced(producer: Producer, messages: int, rate: int) -> None:
    """Sends messages at fixed times, however long the answers take."""
    rest = payload_of(MESSAGE_BYTES - _STAMP_BYTES)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(messages):
            pause = begin + number / rate - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            stamp = time.perf_counter_ns().to_bytes(_STAMP_BYTES, "little")
            group.create_task(producer.send(stamp + rest))


async def _take_stamped(
    consumer: Consumer, queue: asyncio.Queue[Any], messages: int
) -> list[float]:
    delays = []
    async with asyncio.TaskGroup() as group:
        for _ in range(messages):
            message = await queue.get()
            sent = int.from_bytes(message.payload[:_STAMP_BYTES], "little")
            delays.append((time.perf_counter_ns() - sent) / 1e9)
            group.create_task(consumer.ack(message))
    return delays


def _all_delays(clients: dict[str, Pair], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Our delays and those of the bare service, in turns."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(rounds):
        for durability, pair in clients.items():
            for side, client in (("ours", pair.ours), ("bare", pair.bare)):
                delays = client.delays(seconds, RATE)
                found.setdefault((durability, side), []).append(delays)

    def part(durability: str, side: str, share: float) -> float:
        rounds = found[durability, side]
        return 1000 * statistics.median(each[int(share * (len(each) - 1))] for each in rounds)

    return [
        {
            "name": f"p{share * 100:.0f}, {durability}",
            "rate": RATE,
            "ms": (ours := part(durability, "ours", share)),
            "bare_ms": (bare := part(durability, "bare", share)),
            "ratio": bare / ours,
            "goal": GOAL,
        }
        for durability in clients
        for share in (0.5, 0.99)
    ]


# ---- the servers ----


@dataclass(frozen=True, slots=True)
class Pair:
    """Clients of the two servers that are compared."""

    ours: Client
    bare: Client


@contextmanager
def _clients(home: Path) -> Iterator[dict[str, Pair]]:
    """Starts all servers; yields their clients by durability."""
    with ExitStack() as stack:
        started: dict[str, tuple[str, str]] = {}
        for durability in DURABILITIES:
            ours = stack.enter_context(our_broker(home / f"data-{durability}", durability))
            bare = stack.enter_context(bare_broker(home / f"bare-{durability}", durability))
            started[durability] = ours, bare
        runner = stack.enter_context(asyncio.Runner())
        yield {
            durability: Pair(Client(ours, runner), Client(bare, runner))
            for durability, (ours, bare) in started.items()
        }


@contextmanager
def our_broker(data: Path, durability: str) -> Iterator[str]:
    """`forebay serve` that acknowledges at that stage; yields the broker's address."""
    config = data.with_suffix(".yml")
    config.write_text(f"data: {data.name}\nbroker: {{ack: {durability}}}\n")
    options = ["--config", str(config), "--listen", "127.0.0.1:0", "--broker", "127.0.0.1:0"]
    with server_process("forebay", "--log-level", "warning", "serve", *options, "--json") as said:
        yield said["broker"]


@contextmanager
def bare_broker(file: Path, durability: str) -> Iterator[str]:
    with server_process(MODULE, durability, str(file)) as said:
        yield said["broker"]
