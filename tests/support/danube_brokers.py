"""A broker for tests, in this process and its event loop, and Danube's own client of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from danube import (
    Consumer,
    DanubeClient,
    DanubeClientBuilder,
    DispatchStrategy,
    Producer,
    SubType,
)

from forebay.broker.calls import CALLS
from forebay.broker.context import BrokerContext
from forebay.topic.store import Store
from support import brokers

PATIENCE: Final = 60.0
"""Seconds that anything may take on a busy machine before it counts as hung."""
RELIABLE: Final = DispatchStrategy.RELIABLE
NON_RELIABLE: Final = DispatchStrategy.NON_RELIABLE
_LOOK_SECONDS: Final = 0.01


async def within(awaited: Awaitable[Any], seconds: float = PATIENCE) -> Any:
    async with asyncio.timeout(seconds):  # wait_for of Python 3.11 can lose a cancellation
        return await awaited


async def until(ready: Callable[[], object], what: str) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(_LOOK_SECONDS)


class Inbox:
    """A consumer that receives, and the messages it got, in their order."""

    def __init__(self, consumer: Consumer, queue: asyncio.Queue[Any]) -> None:
        self.consumer = consumer
        self._queue = queue

    @property
    def waiting(self) -> int:
        """Messages that have arrived and were not taken."""
        return self._queue.qsize()

    async def take(self, seconds: float = PATIENCE) -> Any:
        """The next message, not acknowledged."""
        return await within(self._queue.get(), seconds)

    async def take_many(self, count: int) -> list[Any]:
        return [await self.take() for _ in range(count)]

    async def ack(self, *messages: Any) -> None:
        for message in messages:
            await within(self.consumer.ack(message))

    async def read(self, count: int) -> list[bytes]:
        """The payloads of the next messages, each acknowledged before the next is taken."""
        found = []
        for _ in range(count):
            message = await self.take()
            await self.ack(message)
            found.append(bytes(message.payload))
        return found

    async def is_quiet(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes in this time."""
        try:
            await within(self._queue.get(), seconds)
        except TimeoutError:
            return True
        return False


@dataclass(slots=True)
class DanubeUser:
    """Clients of one broker. Each has its own connections, which end with it."""

    url: str
    _clients: list[DanubeClient] = field(default_factory=list)
    _parts: list[Producer | Consumer] = field(default_factory=list)

    async def client(self) -> DanubeClient:
        made = await DanubeClientBuilder().service_url(self.url).build()
        self._clients.append(made)
        return made

    async def producer(
        self,
        topic: str,
        name: str = "p1",
        *,
        reliable: bool = True,
        partitions: int = 0,
        client: DanubeClient | None = None,
    ) -> Producer:
        builder = (client or await self.client()).new_producer()
        builder = builder.with_topic(topic).with_name(name).with_partitions(partitions)
        made = builder.with_dispatch_strategy(RELIABLE if reliable else NON_RELIABLE).build()
        self._parts.append(made)
        await within(made.create())
        return made

    async def consumer(
        self,
        topic: str,
        name: str = "c1",
        kind: SubType = SubType.EXCLUSIVE,
        *,
        subscription: str = "s1",
        filters: list[str] | None = None,
        client: DanubeClient | None = None,
    ) -> Consumer:
        """A consumer that has subscribed, and does not receive yet."""
        builder = (client or await self.client()).new_consumer().with_topic(topic)
        builder = builder.with_consumer_name(name).with_subscription(subscription)
        made = builder.with_subscription_type(kind).with_key_filters(filters or []).build()
        self._parts.append(made)
        await within(made.subscribe())
        return made

    async def inbox(
        self, topic: str, name: str = "c1", kind: SubType = SubType.EXCLUSIVE, **more: Any
    ) -> Inbox:
        """A consumer that receives."""
        made = await self.consumer(topic, name, kind, **more)
        return Inbox(made, await made.receive())

    async def close(self) -> None:
        for part in self._parts:
            await part.close()
        for client in self._clients:
            await end_connections(client)


async def end_connections(client: DanubeClient) -> None:
    """Danube's client has no method for it: a program ends them by ending."""
    for connection in client.connection_manager._connections.values():
        await connection.channel.close()


@dataclass(slots=True)
class DanubeBroker:
    """A broker in this event loop."""

    store: Store
    context: BrokerContext
    address: str
    user: DanubeUser
    channel: grpc.aio.Channel

    async def call(self, method: str, request: bytes) -> bytes:
        """One call of a method such as `danube.Discovery/TopicLookup`, of raw bytes."""
        call: Any = self.channel.unary_unary(f"/{method}")
        answer: bytes = await call(request, timeout=PATIENCE)
        return answer

    async def refused(self, method: str, request: bytes) -> grpc.StatusCode:
        """The status of a call that must fail."""
        try:
            await self.call(method, request)
        except grpc.aio.AioRpcError as error:
            return error.code()
        raise AssertionError(f"{method} succeeded")

    def stream(self, consumer_id: int) -> Any:
        """A stream of messages, as raw bytes."""
        request = b"\x08\x01\x10" + _varint(consumer_id)
        call: Any = self.channel.unary_stream("/danube.ConsumerService/ReceiveMessages")
        return call(request)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def calls_of(method: str) -> int:
    """How many calls of a method have begun in this process."""
    return int(CALLS.value(method))


@asynccontextmanager
async def running_broker(data: Path, **settings: Any) -> AsyncIterator[DanubeBroker]:
    """A broker on a free port of the loopback; `settings` are those of BrokerSettings."""
    async with brokers.running_broker(data, **settings) as running:
        here = settings["listen"] if "url" in settings else running.address
        user = DanubeUser(f"http://{here}")
        try:
            async with grpc.aio.insecure_channel(here) as channel:
                yield DanubeBroker(running.store, running.context, running.address, user, channel)
        finally:
            await user.close()  # first, or consumers would try for ever
