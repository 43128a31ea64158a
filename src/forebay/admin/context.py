"""`ServerContext`: what all handlers of one server share.

One is made for each server process, before the application (`app.build_app`). The service that runs
the server changes `unready`, `jobs` and `stopping`; handlers only read them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.admin.page.schemas import PageSchemas
from forebay.admin.page.subscriptions import PageSubscriptions
from forebay.admin.page.watch import Watch
from forebay.admin.response import ResponseMemory
from forebay.dispatch.gauges import SubscriptionGauges
from forebay.dispatch.registry import Registry
from forebay.format.names import TopicName
from forebay.schemas.guard import SchemaGuard
from forebay.schemas.registry import SchemaRegistry
from forebay.settings import StoreSettings
from forebay.topic.store import Store, Topic

if TYPE_CHECKING:
    from forebay.admin.jobs import Jobs


@dataclass(slots=True)
class ServerContext:
    store: Store
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    """The id of this run of the server."""
    store_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """The id of the store, the same in every run; a random one for a store in memory."""
    started: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    """The same moment by the clock that does not jump."""
    url: str = ""
    """Where the server listens, once it is bound."""
    unready: str | None = None
    """Why the server is not ready yet, or no longer; None when it is ready."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop: streams end."""
    jobs: Jobs | None = None
    """The queue of jobs on Spark; None for a server without Spark."""
    broker: str | None = None
    """The URL of the gRPC server; None for a server without a broker."""
    registry: Registry = field(init=False)
    """The subscriptions, which the broker delivers, if there is one."""
    guard: SchemaGuard = field(init=False)
    """What the process knows of the schemas of topics."""
    gauges: SubscriptionGauges = field(init=False)
    page_subscriptions: PageSubscriptions = field(init=False)
    page_schemas: PageSchemas = field(init=False)
    watch: Watch = field(init=False)
    """What the page shows besides the present state: history, log events, the store probe."""
    response_memory: ResponseMemory = field(init=False)
    """What all responses that are sent in chunks may hold together."""

    def __post_init__(self) -> None:
        self.registry = Registry(self.store, self.settings.broker)
        self.guard = SchemaGuard(SchemaRegistry(self.store.catalog))
        self.gauges = SubscriptionGauges(self.store, self.registry)
        self.page_schemas = PageSchemas(self.guard.registry, stored=self.store.catalog is not None)
        self.page_subscriptions = PageSubscriptions(self.store, self.registry)
        self.watch = Watch(self.store)
        self.response_memory = ResponseMemory(self.settings.admin)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around the life of the server, in its event loop."""
        loop = asyncio.get_running_loop()

        def deleted(topic: TopicName) -> None:
            asyncio.run_coroutine_threadsafe(self.registry.forget(topic), loop)

        self.store.on_deleted.append(deleted)
        try:
            async with self.watch.running():
                yield
        finally:
            self.store.on_deleted.remove(deleted)

    @property
    def up_seconds(self) -> float:
        """How long the server has been running."""
        return round(time.monotonic() - self.began, 3)

    @property
    def settings(self) -> StoreSettings:
        return self.store.settings

    def topic(self, name: TopicName) -> Topic:
        """The open topic; created if it does not exist. May wait for a disk."""
        return self.store.topic(str(name))
