"""The public interface: `forebay.open` returns a `Store`, which opens `Topic`s.

    store = forebay.open("data/")
    topic = store.topic("/default/orders")
    offset = topic.append(b"...", durability="synced")
    for message in topic.read(start=0): ...
    store.close()

Beware: `append` is buffered by default, and a crash loses messages that were not synced. Closing
the store syncs everything: use the store as a context manager.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from forebay.catalog.catalog import Catalog
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.config import settings_from
from forebay.config.topics import TopicSetting
from forebay.errors import OffsetOutOfRange, UnknownSubscription, UsageError
from forebay.files.disk import Disk
from forebay.format.cursor import Cursor
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, parse_topic
from forebay.interrupts import run_aside
from forebay.objects.store import CloudStore
from forebay.read.by_time import milliseconds
from forebay.settings import StoreSettings
from forebay.topic.accept import AcceptedLoss
from forebay.topic.factory import WalStorageFactory
from forebay.topic.partitions import CreatedTopic
from forebay.topic.storage import StartPosition, WalStorage
from forebay.topic.subscriptions import Subscription
from forebay.topic.view import StoreView
from forebay.upload.deletion import DeletedTopic
from forebay.wal.log import Durability
from forebay.wal.reader import AsyncLogReader, LogReader
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Visibility, Waiter, Watermarks

Start: TypeAlias = int | datetime | Literal["earliest", "latest"]
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
    def ended(self) -> bool:
        """Whether an error or `close` ended the log: get the topic from the store again."""
        return self._wal.ended

    @property
    def synced_offset(self) -> int:
        """The offset before which every message is synced."""
        return self._wal.synced_offset

    def visible_offset(self, visibility: Visibility) -> int:
        """The offset before which readers of this visibility see every message."""
        return self._wal.synced_offset if visibility == "synced" else self._wal.current_offset()

    def enlist(self, target: int, waiter: Waiter, visibility: Visibility = "synced") -> bool:
        """Wakes `waiter` once every offset before `target` is visible, or the log has ended.

        Returns False if they are already. Raises LogStopped, TopicFenced or LogClosed if the log
        has ended before.
        """
        return self._wal.enlist(target, waiter, visibility)

    def delist(self, waiter: Waiter, visibility: Visibility = "synced") -> None:
        """Removes a waiter that gave up."""
        self._wal.delist(waiter, visibility)

    @property
    def start_offset(self) -> int:
        """The oldest offset that can be read. May ask the catalog."""
        return self._storage.start_offset

    @property
    def start_known(self) -> int:
        """`start_offset` as far as it is known here: never asks the catalog."""
        return self._storage.start_known

    @property
    def start_unsure(self) -> bool:
        """Whether `start_offset` has to ask the catalog: remote retention runs, or has failed."""
        return self._storage.start_unsure

    def append(
        self,
        payload: Buffer,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        durability: AnyDurability = "buffered",
    ) -> int:
        """Appends one message and returns its offset.

        `buffered` returns immediately. `synced` returns when the message survives a power loss.
        `uploaded` uploads the message, and returns when it is in a committed object. Raises
        LogStopped after a disk error, and TopicFenced if another process took over the topic: after
        both, get the topic from the store again.
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
        """Appends messages with consecutive offsets, and returns their offsets.

        `attributes` and `routing_keys` have one item for each payload. See `append`.
        """
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
        """`append` for asyncio. It never blocks the event loop on the disk."""
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
        """`append_many` for asyncio. It never blocks the event loop on the disk."""
        return await self._wal.append_many_async(payloads, attributes, routing_keys, durability)

    def wait(
        self,
        offset: int,
        timeout: float | None = None,
        *,
        durability: Literal["synced", "uploaded"] = "synced",
    ) -> None:
        """Waits until the message at `offset` is synced. With `uploaded`, then uploads it.

        Raises WaitTimeout if it is not synced after `timeout` seconds. The timeout does not limit
        the upload.
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
        """Returns a reader that begins at `start`: an offset, a time, "earliest" or "latest".

        With a time, it begins at the first message that was published then or later, or at the end
        if there is none; a time without a time zone raises UsageError. The reader stops before the
        offset `end`. Without an `end`, it stops after the newest message at the time of this call,
        or with `follow` waits for more. With `visibility="buffered"` it returns messages before
        they are synced; a crash can lose messages that were read this way. Raises OffsetOutOfRange
        if `start` is not in the topic.
        """
        stop = self._end(end, follow=follow)
        if isinstance(start, datetime):
            time_ms = milliseconds(start)
            return self._storage.reader_at_time(time_ms, end=stop, visibility=visibility)
        return self._storage.create_reader(self._start(start), end=stop, visibility=visibility)

    def offset_of_last(self, count: int) -> int:
        """Returns the offset of the first of the last `count` messages, buffered ones included."""
        return self._storage.offset_of_last(count, self._wal.current_offset())

    def offset_at(self, time: datetime) -> int:
        """Returns the first offset that was published at this time or later.

        Returns the offset of the next append if there is none. It includes messages that are not
        synced yet.
        """
        return self.offset_at_ms(milliseconds(time), "buffered")

    def offset_at_ms(self, time_ms: int, visibility: Visibility = "synced") -> int:
        """`offset_at` for milliseconds since 1970."""
        with self._storage.reader_at_time(time_ms, visibility=visibility) as reader:
            return reader.position

    def stream(
        self,
        start: Start = "earliest",
        *,
        end: int | None = None,
        follow: bool = True,
        visibility: Visibility = "synced",
        threads: Executor | None = None,
    ) -> AsyncLogReader:
        """`read` for asyncio. It follows by default.

        `threads` reads files and objects. It defaults to the event loop's default executor. A time
        is looked up there, before the first message.
        """
        stop = self._end(end, follow=follow)
        if isinstance(start, datetime):
            return self._storage.stream_at_time(
                milliseconds(start), end=stop, visibility=visibility, threads=threads
            )
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
        raise UsageError(
            f"start is {start!r}; it must be an offset, a datetime, 'earliest' or 'latest'"
        )

    def flush(self) -> None:
        """Waits until everything appended so far is synced."""
        self._storage.flush()

    def watermarks(self) -> Watermarks:
        """Returns the offset up to which messages are appended, synced, uploaded and verified."""
        return self._storage.watermarks()

    def cursors(self) -> dict[str, Cursor]:
        """Returns what consumers have acknowledged, by the name of the cursor."""
        return run_aside(self._storage.cursors.all)

    def subscriptions(self) -> list[Subscription]:
        """Returns the subscriptions, with their cursors and lags. Reads the catalog."""
        return self._storage.described_subscriptions()

    def seek(self, subscription: str, start: Start) -> int:
        """Moves a subscription to an offset, a time, "earliest" or "latest"; returns the offset.

        Everything before it counts as acknowledged, and nothing after it, whatever was before. It
        may move back. A time is that of the first message that was published then or later, as in
        `read`. The catalog has it when this returns. Raises UnknownSubscription, and
        OffsetOutOfRange if the offset is not in the topic, nor the next one.
        """
        position = self.position_of(start)
        self._storage.reset_cursor(subscription, Cursor(position))
        return position

    def position_of(self, start: Start) -> int:
        """Returns the offset of a start, that of the next append for "latest".

        Raises OffsetOutOfRange if it is not in the topic, nor the next one. May read files and
        objects.
        """
        if isinstance(start, datetime):
            return self.offset_at_ms(milliseconds(start))
        found, oldest = self._start(start), self.start_offset
        self._storage.require_start(found, oldest)
        end = self._wal.current_offset()
        if found.value == "latest":
            return end
        if found.value > end:
            raise OffsetOutOfRange(
                f"{self.name}: offset {found.value} is not in the topic: its oldest is {oldest}, "
                f"its next {end}",
                start=oldest,
                end=end,
            )
        return found.value

    def delete_subscription(self, name: str) -> None:
        """Deletes a subscription with its cursor; raises UnknownSubscription if it is not there."""
        if not self._storage.delete_subscription(name):
            raise UnknownSubscription(f"{self.name} has no subscription {name[:300]!r}")

    def upload(self) -> list[ObjectDescriptor]:
        """Uploads everything appended so far, and returns the new objects."""
        return self._storage.upload()

    def accept_loss(self, start: int | None = None, end: int | None = None) -> AcceptedLoss:
        """Accepts offsets that have no messages, and returns their ranges.

        These are offsets that the catalog records as lost or as unknown, from `start` to before
        `end`, by default all of them. A reader raises LostOffsets there; it jumps over them once
        they are accepted. This cannot be undone.
        """
        return self._storage.accept_loss(start, end)

    def configure(
        self,
        values: Mapping[str, object] | None = None,
        *,
        unset: Iterable[str] = (),
        **more: object,
    ) -> list[TopicSetting]:
        """Changes settings that the topic has of its own, and returns all that are in effect.

            topic.configure(max_object_bytes="64MiB", rolling=True, retention_size_mb=None)
            topic.configure({"max_open_seconds": "60s"}, unset=["rolling"])

        Keys and values are those of the configuration file; None is null. A key in `unset` gets the
        store's setting again. They are kept in the catalog, and are in effect at once. Raises
        InvalidSetting, and changes nothing, if a key or a value is wrong.
        """
        return self._storage.configure({**(values or {}), **more}, unset)

    def settings(self) -> list[TopicSetting]:
        """Returns the settings that a topic can have of its own: their values, and their sources.

        Reads the catalog.
        """
        return self._storage.topic_settings()

    @property
    def in_effect(self) -> StoreSettings | None:
        """The settings that this process uses for the topic now; None for a store in memory."""
        return self._storage.settings

    def segments(self) -> list[Segment]:
        """Returns the local files, oldest first."""
        return self._wal.segments()

    def in_memory(self) -> range:
        """Returns the offsets of the messages that are in memory: the newest ones."""
        return self._wal.in_memory()

    def rotate(self) -> None:
        """Seals the active file. The next append begins a new one."""
        self._wal.rotate()

    def trim_local(self) -> list[Segment]:
        """Runs one retention pass and returns the deleted segments."""
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
        """Returns the topic, and creates it if it does not exist. `orders` means `/default/orders`.

        A topic that was deleted is created again, and begins after its last offset.

        Raises TopicOwned if another process owns it, and InvalidTopicName for an invalid name.
        """
        return Topic(self._factory.for_topic(name))

    def storage(self, name: str) -> WalStorage:
        """`topic` for servers in this process: the topic's storage."""
        return self._factory.for_topic(name)

    @property
    def catalog(self) -> Catalog | None:
        """The catalog of the store; None for a store in memory."""
        resources = self._factory.resources
        return None if resources is None else resources.catalog

    def exists(self, name: str) -> bool:
        """Whether the topic is open here, or in the catalog, which it asks. Creates nothing."""
        topic = parse_topic(name)
        if self._factory.opened(name) is not None:
            return True
        catalog = self.catalog
        return catalog is not None and run_aside(lambda: catalog.record(topic)) is not None

    def create(self, name: str, *, partitions: int | None = None) -> CreatedTopic:
        """Creates a topic, or with `partitions` so many partitions `<name>-part-<number>`.

        What exists already is left as it is, so more partitions can be added later. Raises
        TopicConflict if the topic exists without partitions and is to have some, or the other way
        round, and if it has more partitions already.
        """
        return self._factory.create(name, partitions)

    def partitions(self, name: str) -> list[str]:
        """Returns the names of the topic's partitions, ordered by their numbers."""
        return self._factory.partitions(name)

    def seal_for_ledgers(self, names: Sequence[str] = ()) -> None:
        """Begins new segments in the topics that are uploaded as ledgers, by default in all.

        Ledgers hold sealed segments, so an upload by another process then takes everything that was
        appended. Only topics that are open here; one whose log or catalog fails is left as it is.
        """
        self._factory.seal_for_ledgers({str(parse_topic(name)) for name in names})

    def delete_partitions(self, name: str) -> list[DeletedTopic]:
        """Deletes all partitions of a topic; see `delete`. UnknownTopic if it has none."""
        return self._factory.delete_partitions(name)

    def delete(self, name: str) -> DeletedTopic:
        """Deletes the topic: its messages, its objects, its cursors and its settings.

        This cannot be undone. Readers and producers of it in this process get TopicDeleted. A topic
        of the same name that is created later begins after the last offset of this one. Raises
        UnknownTopic, TopicOwned if another process owns the topic, and ServiceError if the catalog
        or the object store is away. After an error, call it again: a deletion that has begun is
        finished, by this call, by whoever creates the topic again, or by the next sweep.
        """
        return self._factory.delete(name)

    @property
    def on_deleted(self) -> list[Callable[[TopicName], None]]:
        """Functions that are called when this process has deleted a topic, on its thread."""
        return self._factory.on_deleted

    def finish_deletions(self) -> list[str]:
        """Finishes deletions that were interrupted, and returns the names of the topics."""
        return self._factory.finish_deletions()

    def opened(self, name: str) -> Topic | None:
        """Returns the topic if this store has it open, else None. Opens and creates nothing."""
        storage = self._factory.opened(name)
        return None if storage is None else Topic(storage)

    def topics(self) -> list[str]:
        """Returns the names of all topics, sorted."""
        return self._factory.topics()

    @property
    def settings(self) -> StoreSettings:
        return self._factory.settings

    def view(self) -> StoreView:
        """Returns a read-only view of the store, with the same connections. Close it after use."""
        if self._factory.resources is None:
            raise UsageError("a store in memory has no view; read its topics directly")
        return StoreView(self._factory.resources)

    def close(self) -> None:
        """Syncs and closes every topic. Idempotent. Called when the interpreter exits.

        An interrupt ends the wait and not the closing: call it again to wait for the rest. Raises
        UsageError if a signal handler calls it in the middle of a call on a topic.
        """
        self._factory.require_outside()
        try:
            run_aside(self._factory.close)
        finally:
            if self._factory.closed:  # if it was interrupted, it runs again at exit
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
    """Opens a store: a directory (created if missing), a YAML file, or settings.

    None opens a store in memory, which uploads nothing.
    """
    return Store(settings_from(source))
