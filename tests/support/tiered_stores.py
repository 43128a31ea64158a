"""Stores with both tiers for the suites of upload, reading and topics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Kv
from forebay.catalog.sqlite import SqliteKv
from forebay.files.disk import Disk
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, parse_topic
from forebay.objects.backend import Backend
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import (
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import ManualClock
from forebay.topic.resources import StoreResources
from forebay.topic.storage import WalStorage
from forebay.topic.store import Store, Topic

TOPIC = parse_topic("/default/orders")


@dataclass
class Setup:
    """A catalog and objects that outlive the stores that are opened on them."""

    data: Path
    backend: Backend = field(default_factory=MemoryBackend)
    kv: Kv = field(default_factory=lambda: SqliteKv(None))
    clock: ManualClock = field(default_factory=ManualClock)
    wal: WalSettings = field(default_factory=lambda: WalSettings(rotate_max_bytes=4096))
    uploader: UploaderSettings = field(default_factory=lambda: UploaderSettings(enabled=False))
    deleter: DeleterSettings = field(
        default_factory=lambda: DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0)
    )
    remote: RemoteRetentionSettings = field(default_factory=RemoteRetentionSettings)

    def __post_init__(self) -> None:
        self.catalog = Catalog(self.kv, clock=self.clock)
        self.objects = CloudStore(self.backend)

    def settings(self) -> StoreSettings:
        return StoreSettings(
            data=self.data,
            wal=self.wal,
            uploader=self.uploader,
            deleter=self.deleter,
            remote_retention=self.remote,
        )

    def uploading(self, **changes: Any) -> None:
        """Changes settings of the uploader for the stores that are opened later."""
        self.uploader = replace(self.uploader, **changes)

    @contextmanager
    def store(self) -> Iterator[Store]:
        store = Store(self.settings(), clock=self.clock, catalog=self.catalog, store=self.objects)
        with store:
            yield store

    @contextmanager
    def topic(self, name: str = str(TOPIC)) -> Iterator[Topic]:
        with self.store() as store:
            yield store.topic(name)

    def descriptors(self, topic: TopicName = TOPIC) -> list[ObjectDescriptor]:
        return list(self.catalog.get_object_descriptors(topic))

    def listed(self) -> list[str]:
        return [meta.key for meta in self.objects.list("")]

    def ranges(self) -> list[tuple[int, int]]:
        return [(each.start_offset, each.next_offset) for each in self.descriptors()]


def payloads(first: int, count: int, size: int = 100) -> list[bytes]:
    return [(b"%010d" % offset).ljust(size, b".") for offset in range(first, first + count)]


def fill(topic: Topic, count: int, size: int = 100) -> None:
    """Appends messages whose payloads are their offsets, in batches that rotate the log."""
    first = topic.watermarks().appended
    for start in range(first, first + count, 10):
        some = min(10, first + count - start)
        topic.append_many(payloads(start, some, size), durability="synced")


def offsets(messages: Iterable[Any]) -> list[int]:
    """The offsets of messages whose payloads are right."""
    found = []
    for message in messages:
        assert int(message.payload[:10]) == message.offset
        found.append(message.offset)
    return found


def require_chain(setup: Setup, topic: TopicName = TOPIC) -> None:
    """The invariants of the chain: contiguous, no overlap, and every object is there."""
    record = setup.catalog.record(topic)
    assert record is not None
    expected = None
    for descriptor in setup.descriptors(topic):
        if expected is not None and descriptor.start_offset != expected:
            assert (expected, descriptor.start_offset) in record.lost
        expected = descriptor.next_offset
        key = f"storage/topics{topic}/objects/{descriptor.object_id}"
        assert setup.objects.head(key).size == descriptor.size
    assert (
        record.start_offset <= record.verified <= record.tail <= max(record.reserved, record.tail)
    )
    if expected is not None and not record.lost:
        assert record.tail == expected


def storage_of(store: Store, name: str = str(TOPIC)) -> WalStorage:
    """The storage behind a topic: what background work calls, and `Topic` does not offer."""
    return store._factory.for_topic(name)


def resources_of(store: Store) -> StoreResources:
    """What a store has opened. It is not public: a program has no use for it."""
    resources = store._factory.resources
    assert resources is not None
    return resources


def lease_of(store: Store) -> int:
    lease = resources_of(store).session.current
    assert lease is not None
    return lease


def store_on(disk: Disk, settings: StoreSettings | None = None) -> Store:
    """A store whose logs are on a disk that is not this machine's; the rest is in memory."""
    return Store(
        settings or StoreSettings(data=Path("/data")),
        disk=disk,
        catalog=Catalog(SqliteKv(None)),
        store=CloudStore(MemoryBackend()),
    )
