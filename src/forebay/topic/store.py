"""The public face: `forebay.open` gives a `Store`, which gives `Topic`s.

    store = forebay.open("data/")
    topic = store.topic("/default/orders")
    offset = topic.append(b"...", durability="synced")
    for message in topic.read(start=0): ...
    store.close()

What a caller gets wrong: `append` is buffered unless told otherwise. Close the store, or use it
as a context manager, and nothing appended is lost; a crash before that loses what was not synced.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from forebay.catalog.catalog import Catalog
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.config import settings_from
from forebay.errors import UsageError
from forebay.files.disk import Disk
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.layout import Buffer
from forebay.objects.store import CloudStore
from forebay.settings import StoreSettings
from forebay.topic.factory import WalStorageFactory
from forebay.topic.storage import StartPosition, WalStorage
from forebay.topic.view import StoreView
from forebay.wal.log import Durability
from forebay.wal.reader import AsyncLogReader, LogReader
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Visibility, Watermarks

Start: TypeAlias = int | Literal["earliest", "latest"]
AnyDurability: TypeAlias = Durability | Literal["uploaded"]


class Topic:
    """One append-only log of messages. Thread-safe."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        self._wal = storage.wal

    @property
    def name(self) -> str:
        return self._wal.topic

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._storage.start_offset

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: AnyDurability = "buffered",
    ) -> int:
        """Appends one message and returns its offset.

        `buffered` returns at once; `synced` returns when the message would survive a power loss;
        `uploaded` when it is in a committed object, which it sees to.
        """
        if durability != "uploaded":
            return self._wal.append(payload, attributes, routing_key, durability)
        offset = self._wal.append(payload, attributes, routing_key)
        self._storage.wait_uploaded(offset + 1)
        return offset

    def append_many(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: AnyDurability = "buffered",
    ) -> range:
        """Appends messages with consecutive offsets, which are returned as a range."""
        if durability != "uploaded":
            return self._wal.append_many(payloads, attributes, routing_keys, durability)
        offsets = self._wal.append_many(payloads, attributes, routing_keys)
        self._storage.wait_uploaded(offsets.stop)
        return offsets

    async def append_async(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: AnyDurability = "buffered",
    ) -> int:
        """`append` for asyncio: never blocks the event loop on the disk."""
        if durability != "uploaded":
            return await self._wal.append_async(payload, attributes, routing_key, durability)
        offset = await self._wal.append_async(payload, attributes, routing_key)
        await asyncio.to_thread(self._storage.wait_uploaded, offset + 1)
        return offset

    async def append_many_async(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """`append_many` for asyncio: never blocks the event loop on the disk."""
        return await self._wal.append_many_async(payloads, attributes, routing_keys, durability)

    def wait(
        self,
        offset: int,
        timeout: float | None = None,
        *,
        durability: Literal["synced", "uploaded"] = "synced",
    ) -> None:
        """Returns when the message at `offset` is synced, or uploaded, which it sees to.

        WaitTimeout if it is not synced after `timeout` seconds; an upload takes what it takes.
        """
        self._wal.wait(offset, timeout)
        if durability == "uploaded":
            self._storage.wait_uploaded(offset + 1)

    async def wait_async(self, offset: int) -> None:
        """`wait` for asyncio."""
        await self._wal.wait_async(offset)

    def read(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = False,
        visibility: Visibility = "synced",
    ) -> LogReader:
        """Messages from `start` on: an offset, "earliest" or "latest".

        Ends before the offset `end`, else after the last message that is appended now, or, with
        `follow`, waits for more. With `visibility="buffered"` messages are seen before they are
        synced, and can vanish in a crash after they were seen.
        """
        stop = self._end(end, follow=follow)
        return self._storage.create_reader(self._start(start), end=stop, visibility=visibility)

    def stream(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = True,
        visibility: Visibility = "synced",
        threads: Executor | None = None,
    ) -> AsyncLogReader:
        """`read` for asyncio; it follows unless told otherwise.

        `threads` read files and objects; without them, the event loop's own do.
        """
        stop = self._end(end, follow=follow)
        return self._storage.create_stream(
            self._start(start), end=stop, visibility=visibility, threads=threads
        )

    def _end(self, end: int | None, *, follow: bool) -> int | None:
        return self._wal.current_offset() if end is None and not follow else end

    def _start(self, start: Start) -> StartPosition:
        if start == "earliest":
            return StartPosition.offset(self._storage.start_offset)
        if start == "latest":
            return StartPosition.latest()
        if type(start) is int and start >= 0:
            return StartPosition.offset(start)
        raise UsageError(f"start is {start!r}; it must be an offset, 'earliest' or 'latest'")

    def flush(self) -> None:
        """Returns when everything appended so far is synced."""
        self._storage.flush()

    def watermarks(self) -> Watermarks:
        """The next offset of each stage: appended, synced, uploaded, verified."""
        return self._storage.watermarks()

    def upload(self) -> list[ObjectDescriptor]:
        """Uploads everything appended so far, whatever the thresholds; returns the new objects."""
        return self._storage.upload()

    def segments(self) -> list[Segment]:
        """The local files, oldest first."""
        return self._wal.segments()

    def in_memory(self) -> range:
        """The offsets that this process holds in memory, the newest ones."""
        return self._wal.in_memory()

    def rotate(self) -> None:
        """Seals the active file; the next append begins a new one."""
        self._wal.rotate()

    def trim_local(self) -> list[Segment]:
        """One retention pass; returns the segments that it removed."""
        return self._storage.trim_local()


class Store:
    """All topics under one data directory. Thread-safe."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        catalog: Catalog | None = None,
        store: CloudStore | None = None,
    ) -> None:
        self._factory = WalStorageFactory(
            settings, disk=disk, clock=clock, catalog=catalog, store=store
        )
        atexit.register(self.close)

    def topic(self, name: str) -> Topic:
        """The topic, created on first use. `orders` means `/default/orders`."""
        return Topic(self._factory.for_topic(name))

    def opened(self, name: str) -> Topic | None:
        """The topic if this store has it open; nothing is opened or made."""
        storage = self._factory.opened(name)
        return None if storage is None else Topic(storage)

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._factory.topics()

    @property
    def settings(self) -> StoreSettings:
        return self._factory.settings

    def view(self) -> StoreView:
        """The store as others see it, through the same connections; close it after use."""
        if self._factory.resources is None:
            raise UsageError("a store in memory has no objects, and nobody else sees it")
        return StoreView(self._factory.resources)

    def close(self) -> None:
        """Syncs and closes every topic. Idempotent; also done when the interpreter exits."""
        try:
            self._factory.close()
        finally:
            if self._factory.closed:  # else it was interrupted: the exit is the next chance
                atexit.unregister(self.close)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_store(source: str | Path | StoreSettings | None) -> Store:
    """Opens a store: a directory (created where missing), a YAML file, or settings.

    None is a store in memory, without objects.
    """
    return Store(settings_from(source))
