"""`BrokerContext`: what all services of one gRPC server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from typing import Final

from forebay.broker.calls import Gate
from forebay.broker.known_producers import KnownProducers
from forebay.broker.topics import Topics
from forebay.dispatch.registry import Registry
from forebay.format.names import TopicName
from forebay.schemas.guard import SchemaGuard
from forebay.schemas.registry import SchemaRegistry
from forebay.settings import BrokerSettings
from forebay.topic.store import Store

_DRAIN_SECONDS: Final = 1.0
_DRAIN_POLL_SECONDS: Final = 0.02


@dataclass(slots=True)
class BrokerContext:
    store: Store
    address: str
    """Where clients connect to, such as `127.0.0.1:6650`."""
    shared: InitVar[Registry | None] = None
    """The subscriptions of the process, if it has them already."""
    shared_guard: InitVar[SchemaGuard | None] = None
    """What the process knows of the schemas of topics, if it has it already."""
    gate: Gate = field(init=False)
    registry: Registry = field(init=False)
    topics: Topics = field(init=False)
    guard: SchemaGuard = field(init=False)
    producers: KnownProducers = field(default_factory=KnownProducers)

    def __post_init__(self, shared: Registry | None, shared_guard: SchemaGuard | None) -> None:
        self.gate = Gate(self.settings.token)
        self.registry = shared or Registry(self.store, self.settings)
        self.topics = Topics(self.store, self.settings, self.registry.fanouts)
        self.guard = shared_guard or SchemaGuard(SchemaRegistry(self.store.catalog))

    @property
    def schemas(self) -> SchemaRegistry:
        return self.guard.registry

    @property
    def scheme(self) -> str:
        return "http" if self.settings.cert_file is None else "https"

    @property
    def settings(self) -> BrokerSettings:
        return self.store.settings.broker

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads what is known of consumers; ends all subscriptions afterwards."""
        loading = asyncio.create_task(self.registry.load())
        loop = asyncio.get_running_loop()

        def deleted(topic: TopicName) -> None:
            asyncio.run_coroutine_threadsafe(self._forget(topic), loop)

        self.store.on_deleted.append(deleted)
        try:
            yield
        finally:
            self.store.on_deleted.remove(deleted)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self.registry.close()

    async def _forget(self, topic: TopicName) -> None:
        """Ends the streams of a topic that was deleted."""
        self.topics.forget(topic)
        await self.registry.forget(topic)

    async def drain(self) -> None:
        """Refuses producers and delivers nothing more; waits a moment for acknowledgements."""
        self.registry.stop_delivering()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self.registry.outstanding and time.monotonic() < deadline:  # noqa: ASYNC110  # once
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        self.gate.stopping.set()
        self.registry.end_streams()
