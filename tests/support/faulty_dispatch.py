"""Subscriptions over a disk and a catalog that fail on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import BrokerSettings, StoreSettings, UploaderSettings
from forebay.testing import CrashDisk, FaultDisk, FaultKv
from forebay.topic.store import Store
from support.dispatching import Dispatching


class FaultyDispatching(Dispatching):
    """`Dispatching` with the parts that fail."""

    def __init__(self, store: Store, disk: FaultDisk, kv: FaultKv) -> None:
        super().__init__(store)
        self.disk = disk
        self.kv = kv


@asynccontextmanager
async def faulty_dispatching(
    kv: FaultKv | None = None, **broker: object
) -> AsyncIterator[FaultyDispatching]:
    """A store on a disk in memory; pass `kv` to open the catalog of another one again."""
    disk, kv = FaultDisk(CrashDisk()), kv or FaultKv(SqliteKv(None))
    settings = StoreSettings(
        data="/data",
        uploader=UploaderSettings(enabled=False),
        broker=BrokerSettings(**{"subscription_start": "earliest", **broker}),  # type: ignore[arg-type]
    )
    store = Store(settings, disk=disk, catalog=Catalog(kv), store=CloudStore(MemoryBackend()))
    found = FaultyDispatching(store, disk, kv)
    try:
        await found.registry.load()
        yield found
    finally:
        disk.clear()
        kv.heal()
        await found.registry.close()
        await asyncio.to_thread(store.close)
