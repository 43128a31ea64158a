"""A store whose subscriptions run in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from forebay.dispatch.feed import Delivery
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.registry import Registry
from forebay.dispatch.subscription import Consumer, Subscription
from forebay.format.names import parse_topic
from forebay.settings import BrokerSettings, StoreSettings, UploaderSettings
from forebay.topic.store import Store

TOPIC = parse_topic("orders")


class Dispatching:
    """A registry over a store, and consumers that take messages."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.registry = Registry(store, store.settings.broker)

    async def consumer(
        self,
        name: str = "c1",
        *,
        subscription: str = "s1",
        kind: SubscriptionType = SubscriptionType.SHARED,
        filters: tuple[str, ...] = (),
    ) -> TestConsumer:
        number = await self.registry.subscribe(TOPIC, subscription, kind, name, filters)
        return await self.connected(number)

    async def connected(self, number: int) -> TestConsumer:
        found, consumer = await self.registry.connect(number, payload_of)
        assert isinstance(found, Subscription)
        return TestConsumer(found, consumer)


class TestConsumer:
    __test__ = False

    def __init__(self, subscription: Subscription, consumer: Consumer) -> None:
        self.subscription = subscription
        self.consumer = consumer
        self._left: list[bytes] = []

    async def take(self, count: int) -> list[bytes]:
        """The next messages, however they are cut into batches."""
        async with asyncio.timeout(20):
            while len(self._left) < count:
                self._left += await self.consumer.take()
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    async def idle(self) -> bool:
        """Whether nothing more is delivered for now."""
        await settled(self.subscription)
        return not self._left and not self.consumer._queue

    def leave(self) -> None:
        self.subscription.leave(self.consumer)


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until the condition holds; TimeoutError after a while."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # a condition of any kind
            await asyncio.sleep(0.001)


async def settled(subscription: Subscription) -> None:
    """Lets the subscription's task do all that it can do now."""
    await eventually(lambda: not subscription._woken.is_set() and not subscription.feed._reading)
    for _ in range(20):
        await asyncio.sleep(0)


def payload_of(delivery: Delivery) -> bytes:
    return delivery.message.payload


@asynccontextmanager
async def dispatching(path: Path, **broker: object) -> AsyncIterator[Dispatching]:
    """Opens the store in `path`; what it has acknowledged is in the catalog when it is closed."""
    settings = StoreSettings(
        data=path / "data",
        uploader=UploaderSettings(enabled=False),
        broker=BrokerSettings(**broker),  # type: ignore[arg-type]
    )
    store = await asyncio.to_thread(Store, settings)
    found = Dispatching(store)
    try:
        await found.registry.load()
        yield found
    finally:
        await found.registry.close()
        await asyncio.to_thread(store.close)
