"""Stores over every kind of object store and catalog, and readers that check what they read.

A `TierSettings` is what stays when a store is closed: the directory, the objects, the catalog.
Every payload says its offset, so that a reader notices a message that is out of place.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.message import StreamMessage
from forebay.format.names import parse_topic
from forebay.limits import KIB, MIB
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.topic.store import Start, Store, Topic
from forebay.wal.reader import AsyncLogReader
from support.storages import factory_of

NAME: Final = "/default/scenario"
BATCH: Final = 2_000
PATIENCE: Final = 100.0

QUIET: Final = UploaderSettings(enabled=False, max_object_bytes=6 * MIB)
"""Uploads when it is told to."""
PROMPT: Final = DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0)
"""Everything that objects hold may go, but for the last segment."""
SMALL_SEGMENTS: Final = WalSettings(rotate_max_bytes=1536 * KIB)


@functools.cache
def payload(offset: int) -> bytes:
    """Of the message at that offset: 40 to 79 bytes."""
    return b"%08d" % offset + bytes([offset % 251]) * (32 + offset % 40)


@dataclass
class TierSettings:
    data: Path
    cloud: CloudSettings
    metadata: MetadataSettings

    def settings(self, **parts: Any) -> StoreSettings:
        chosen = {"wal": SMALL_SEGMENTS, "uploader": QUIET, "deleter": PROMPT, **parts}
        return StoreSettings(self.data, cloud=self.cloud, metadata=self.metadata, **chosen)

    def open(self, **parts: Any) -> Store:
        return Store(self.settings(**parts))


def make_tiers(
    places: tuple[str, str], folder: Path, request: pytest.FixtureRequest
) -> TierSettings:
    """Objects in `memory`, `fs` or `s3`; the catalog in `sqlite` or `etcd`.

    Both are outside of the data directory, so that a test can lose that.
    """
    objects, catalog = places
    return TierSettings(
        folder / "data", _cloud(objects, folder, request), _metadata(catalog, folder, request)
    )


def _cloud(objects: str, folder: Path, request: pytest.FixtureRequest) -> CloudSettings:
    if objects == "memory":
        return CloudSettings(backend="memory", root=secrets.token_hex(8))
    if objects == "fs":
        return CloudSettings(backend="fs", root=str(folder / "objects"))
    found: CloudSettings = request.getfixturevalue("s3").settings()
    return found


def _metadata(catalog: str, folder: Path, request: pytest.FixtureRequest) -> MetadataSettings:
    if catalog == "sqlite":
        return MetadataSettings(path=folder / "catalog.db", timeout_seconds=PATIENCE)
    server = request.getfixturevalue("etcd")
    return MetadataSettings(
        backend="etcd",
        endpoints=[server.endpoint],
        prefix=f"/{secrets.token_hex(8)}",
        timeout_seconds=PATIENCE,
    )


def produce(topic: Topic, count: int) -> None:
    """So many messages more, in batches."""
    first = topic.watermarks().appended
    for start in range(first, first + count, BATCH):
        wanted = range(start, min(start + BATCH, first + count))
        assert topic.append_many(map(payload, wanted)) == wanted


def catalog_of(store: Store) -> Catalog:
    resources = factory_of(store).resources
    assert resources is not None
    return resources.catalog


def end_lease(metadata: MetadataSettings, name: str) -> None:
    """Ends the lease of the topic's owner, a process that was killed: nobody has to wait for it."""
    with closing(connect_kv(metadata, None)) as kv:
        owner = kv.get(Catalog(kv, metadata.prefix or "/forebay").keys.owner(parse_topic(name)))
        assert owner is not None
        assert owner.lease is not None
        kv.revoke(owner.lease)


def descriptors(store: Store, name: str = NAME) -> list[ObjectDescriptor]:
    return list(catalog_of(store).get_object_descriptors(parse_topic(name)))


def require_chain(found: Iterable[ObjectDescriptor], start: int, end: int) -> None:
    """The objects hold every offset of the range once."""
    for descriptor in found:
        assert descriptor.start_offset == start
        start = descriptor.next_offset
    assert start == end


def hand_over(topic: Topic) -> int:
    """The first offset that is in a segment."""
    segments = topic.segments()
    return segments[0].first_offset if segments else 0


def read_all(topic: Topic, start: int, end: int | None = None) -> int:
    """Reads and checks; returns how many messages there were."""
    expected = start
    for message in topic.read(start, end=end):
        check(message, expected)
        expected += 1
    assert end is None or expected == end
    return expected - start


def check(message: StreamMessage, offset: int) -> None:
    assert message.offset == offset
    assert message.payload == payload(offset)


@dataclass
class Readers:
    """Threads that read from different places to the same end, each checking every message."""

    topic: Topic
    end: int
    _threads: list[threading.Thread] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, start: Start) -> None:
        """It is planned when this returns: what is appended from then on, it sees."""
        reader = self.topic.read(start, end=self.end, follow=True)
        first = reader.position

        def read() -> None:
            with reader:
                for number, message in enumerate(reader):
                    check(message, first + number)
                    self.counts[name] = number + 1

        self._run(name, self.end - first, read)

    def start_async(self, name: str, start: Start) -> None:
        reader = self.topic.stream(start, end=self.end)
        first = reader.position

        def read() -> None:
            asyncio.run(self._stream(name, first, reader))

        self._run(name, self.end - first, read)

    async def _stream(self, name: str, first: int, reader: AsyncLogReader) -> None:
        expected = first
        async for message in reader:
            check(message, expected)
            expected += 1
            self.counts[name] = expected - first

    def _run(self, name: str, count: int, read: Callable[[], None]) -> None:
        def checked() -> None:
            try:
                read()
                assert self.counts[name] == count
            except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
                self._errors.append(error)

        self.counts[name] = 0
        thread = threading.Thread(target=checked, name=f"reader-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Raises what any of them raised."""
        for thread in self._threads:
            thread.join(PATIENCE)
        if self._errors:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._threads), self.counts
