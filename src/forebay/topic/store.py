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

import atexit
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import UsageError
from forebay.files.disk import Disk
from forebay.format.layout import Buffer
from forebay.settings import StoreSettings
from forebay.topic.storage import WalStorage, WalStorageFactory
from forebay.wal.append import Durability
from forebay.wal.commit import Visibility
from forebay.wal.reader import AsyncLogReader, LogReader
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

Start: TypeAlias = int | Literal["earliest", "latest"]


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
        return self._wal.start_offset

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """Appends one message and answers its offset.

        `buffered` returns at once; `synced` returns when the message would survive a power loss.
        """
        return self._wal.append(payload, attributes, routing_key, durability)

    def append_many(
        self,
        payloads: Iterable[Buffer],
        attributes: Iterable[Mapping[str, str] | None] | None = None,
        routing_keys: Iterable[str | None] | None = None,
        durability: Durability = "buffered",
    ) -> range:
        """Appends messages with consecutive offsets, which are answered as a range."""
        return self._wal.append_many(payloads, attributes, routing_keys, durability)

    async def append_async(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: Durability = "buffered",
    ) -> int:
        """`append` for asyncio: never blocks the event loop on the disk."""
        return await self._wal.append_async(payload, attributes, routing_key, durability)

    def wait(self, offset: int, timeout: float | None = None) -> None:
        """Returns when the message at `offset` is synced; WaitTimeout after `timeout` seconds."""
        self._wal.wait(offset, timeout)

    async def wait_async(self, offset: int) -> None:
        """`wait` for asyncio."""
        await self._wal.wait_async(offset)

    def read(
        self,
        start: Start = "earliest",
        *,
        follow: bool = False,
        visibility: Visibility = "synced",
    ) -> LogReader:
        """Messages from `start` on: an offset, "earliest" or "latest".

        Ends after the last message that is appended now, or, with `follow`, waits for more. With
        `visibility="buffered"` messages are seen before they are synced, and can vanish in a
        crash after they were seen.
        """
        end = None if follow else self._wal.current_offset()
        return self._wal.tail_reader(self._start(start), end=end, visibility=visibility)

    def stream(
        self,
        start: Start = "earliest",
        *,
        follow: bool = True,
        visibility: Visibility = "synced",
    ) -> AsyncLogReader:
        """`read` for asyncio; it follows unless told otherwise."""
        end = None if follow else self._wal.current_offset()
        return self._wal.async_reader(self._start(start), end=end, visibility=visibility)

    def _start(self, start: Start) -> int | Literal["latest"]:
        if start == "earliest":
            return self._wal.start_offset
        if start == "latest":
            return start
        if type(start) is int and start >= 0:
            return start
        raise UsageError(f"start is {start!r}; it must be an offset, 'earliest' or 'latest'")

    def flush(self) -> None:
        """Returns when everything appended so far is synced."""
        self._storage.flush()

    def watermarks(self) -> Watermarks:
        return self._wal.watermarks()

    def segments(self) -> list[Segment]:
        """The local files, oldest first."""
        return self._wal.segments()

    def rotate(self) -> None:
        """Seals the active file; the next append begins a new one."""
        self._wal.rotate()

    def trim_local(self) -> list[Segment]:
        """One retention pass; answers the segments that it removed."""
        return self._storage.trim_local()


class Store:
    """All topics under one data directory. Thread-safe."""

    def __init__(
        self, settings: StoreSettings, *, disk: Disk | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._factory = WalStorageFactory(settings, disk=disk, clock=clock)
        atexit.register(self.close)

    def topic(self, name: str) -> Topic:
        """The topic, created on first use. `orders` means `/default/orders`."""
        return Topic(self._factory.for_topic(name))

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._factory.topics()

    def close(self) -> None:
        """Syncs and closes every topic. Idempotent; also done when the interpreter exits."""
        atexit.unregister(self.close)
        self._factory.close()

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
    """Opens the store in a directory (created where missing), or with settings; None is memory."""
    settings = source if isinstance(source, StoreSettings) else StoreSettings(data=source)
    data = None if settings.data is None else Path(settings.data)
    if data is not None and data.exists() and not data.is_dir():
        raise UsageError(f"{data} is not a directory: name the data directory")
    return Store(settings)
