"""A gRPC server of the test's own: in its event loop, or as a process that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.broker.context import BrokerContext
from forebay.broker.server import BrokerServer
from forebay.settings import BrokerSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store


class RunningBroker:
    """A server in this event loop."""

    def __init__(self, store: Store, server: BrokerServer, address: str) -> None:
        self.store = store
        self.address = address
        self.context = BrokerContext(store, address)
        self._server = server
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(self.context))
        while not self._server.started:
            await asyncio.wait({self._serving}, timeout=0.01)
            if self._serving.done():
                self._serving.result()

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.stop()
            await self._serving
            self._serving = None


def broker_settings(data: Path | None, **broker: Any) -> StoreSettings:
    listen = broker.pop("listen", "127.0.0.1:0")
    wal = broker.pop("wal", WalSettings(dir=None))
    return StoreSettings(
        data=data,
        wal=wal,
        broker=BrokerSettings(listen=listen, **broker),
        uploader=UploaderSettings(enabled=False),
    )


@asynccontextmanager
async def running_broker(data: Path, **broker: Any) -> AsyncIterator[RunningBroker]:
    """Serves a store in `data` until the block ends."""
    settings = broker_settings(data, **broker)
    server = BrokerServer(settings.broker)
    address = server.bind()
    if settings.broker.listen.endswith(":0"):
        settings = replace(settings, broker=replace(settings.broker, listen=address))
    store = await asyncio.to_thread(Store, settings)
    running = RunningBroker(store, server, address)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
        server.close()
        await asyncio.to_thread(store.close)
