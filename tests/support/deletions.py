"""A store whose process can be killed at any call, with a topic that has one of everything.

A kill is what the catalog, the object store and the disk see of it: from one call on, none of this
process arrives. `Place.restart` is the next process on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Final, Literal

from forebay.catalog.catalog import Catalog
from forebay.catalog.cursors import write_cursor
from forebay.catalog.job_state import write_job_state
from forebay.catalog.kv import Compare, Kv, Put, Remove
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ForebayError, ServiceUnavailable, UnknownTopic
from forebay.format.cursor import Cursor
from forebay.format.names import (
    MarkerName,
    TopicName,
    after_prefix,
    object_key,
    objects_prefix,
    parse_marker,
    pending_object,
)
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import (
    CloudSettings,
    DeleterSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import CrashDisk, Fault, FaultBackend, FaultDisk, FaultKv
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from support.storages import factory_of, storage_of

TOPIC: Final = TopicName("default", "orders")
NAME: Final = str(TOPIC)
DATA: Final = Path("/data")
DIRECTORY: Final = DATA / "wal" / TOPIC.namespace / TOPIC.topic
Port = Literal["catalog", "store", "disk"]


class Death:
    """Counts the calls of a port, and comes at one of them: before it, or right after it."""

    def __init__(self) -> None:
        self.port: Port | None = None
        self.left = 0
        self.after = False
        self.struck = False

    def plan(self, port: Port, number: int, *, after: bool = False) -> None:
        self.port, self.left, self.after = port, number, after

    def call(self, port: Port, *, after: bool = False) -> None:
        if self.struck:
            raise ServiceUnavailable("the process is dead (a fault of the test)")
        if port == self.port and after == self.after:
            self.left -= 1
            if self.left == 0:
                self.struck = True
                raise ServiceUnavailable("the process was killed (a fault of the test)")


class MortalKv(FaultKv):
    """Dies before a call, or after a commit."""

    def __init__(self, inner: Kv, death: Death) -> None:
        super().__init__(inner, self._before)
        self._death = death

    def _before(self, operation: str) -> None:
        if operation != "revoke":  # a process that ends in order gives its lease back
            self._death.call("catalog")

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        done = super().commit(compares, writes)
        self._death.call("catalog", after=True)
        return done


class MortalDisk(FaultDisk):
    """Every call fails once the process is dead; a disk fault kills it."""

    def __init__(self, inner: CrashDisk, death: Death) -> None:
        super().__init__(inner)
        self.crashing = inner
        self._death = death

    def die_at(self, number: int) -> None:
        self.inject(Fault("any", EIO, skip=number - 1, times=None))

    def unlink(self, path: Path) -> None:
        self._require_alive()
        super().unlink(path)

    def remove_dir(self, path: Path) -> None:
        self._require_alive()
        super().remove_dir(path)

    def _require_alive(self) -> None:
        if self._death.struck:
            raise OSError(EIO, "the process is dead (a fault of the test)")


@dataclass
class Place:
    """One machine with its catalog and its object store, and a process on it."""

    kv: Kv = field(default_factory=lambda: SqliteKv(None))
    prefix: str = "/forebay"
    objects: MemoryBackend = field(default_factory=MemoryBackend)
    disk: CrashDisk = field(default_factory=CrashDisk)
    used: int = 0
    """One more than the highest offset that any append has returned."""
    messages: dict[int, bytes] = field(default_factory=dict)
    """The messages of the topic that is there now, as far as they were acknowledged."""
    attempted: set[bytes] = field(default_factory=set)
    """All messages that may be in this topic."""
    gone: set[bytes] = field(default_factory=set)
    """Messages of deleted topics: nobody must see them any more."""
    doomed: bool = False
    """Whether a deletion was begun, and nobody knows whether it took place."""

    def __post_init__(self) -> None:
        self.store = self._start()

    def _start(self) -> Store:
        self.death = Death()
        self.backend = FaultBackend(self.objects)
        self.backend.hook("any", lambda _key: self.death.call("store"))
        for operation in ("put", "complete", "copy", "delete"):
            self.backend.hook(
                operation, lambda _key: self.death.call("store", after=True), when="after"
            )
        self.local = MortalDisk(self.disk, self.death)
        self.catalog = Catalog(MortalKv(self.kv, self.death), self.prefix)
        self.cloud = CloudStore(self.backend)
        return Store(self.settings, disk=self.local, catalog=self.catalog, store=self.cloud)

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(
            DATA,
            wal=WalSettings(rotate_max_bytes=500),
            uploader=UploaderSettings(enabled=False, max_object_bytes=600),
            cloud=CloudSettings(backend="memory"),
            deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        )

    # -- processes ------------------------------------------------------------------------------

    def plan(self, port: Port, number: int, *, after: bool = False) -> None:
        """Kills the process at its n-th call of the port from now on."""
        if port == "disk":
            self.local.die_at(number)
            self.death.port = None
        else:
            self.death.plan(port, number, after=after)

    @property
    def killed(self) -> bool:
        if self.local.fired:
            self.death.struck = True
        return self.death.struck

    def restart(self, rng: random.Random | None = None) -> None:
        """The process is gone, and the next one starts. With `rng`, after a power loss."""
        self.death.struck = True
        with suppress(ForebayError, OSError):
            self.store.close()
        if rng is None:
            self.disk.kill()
        else:
            self.disk.crash(rng)
        self._expire()
        self.store = self._start()

    def _expire(self) -> None:
        """The lease of a dead process ends."""
        for entry in self.kv.range(self.prefix, after_prefix(self.prefix), limit=1000):
            if entry.lease is not None:
                self.kv.revoke(entry.lease)

    def close(self) -> None:
        self.store.close()

    # -- the topic ------------------------------------------------------------------------------

    def topic(self) -> Topic:
        return self.store.topic(NAME)

    def append(self, topic: Topic, count: int = 4) -> range:
        first = len(self.attempted) + len(self.gone)
        payloads = [b"%06d" % number + bytes(100) for number in range(first, first + count)]
        self.attempted.update(payloads)
        offsets = topic.append_many(payloads, durability="synced")
        assert offsets.start >= self.used, "an offset is used again"
        self.used = offsets.stop
        self.messages.update(zip(offsets, payloads, strict=True))
        return offsets

    def fill(self) -> Topic:
        """A topic with objects, segments, rows of every kind, and files of uploads that failed."""
        topic = self.topic()
        for _ in range(2):
            self.append(topic)
            topic.upload()
        self.append(topic)
        topic.configure(max_open_seconds="60s")
        storage_of(topic).ack_checkpoint(self.used - 1)
        storage = storage_of(topic)
        assert storage.epoch is not None
        write_cursor(self.catalog, TOPIC, storage.epoch, "consumer", Cursor(), 0)
        write_job_state(self.catalog, TOPIC, "sink/a", b"{}", expected=None)
        self.catalog.put_cursor(TOPIC, "old", 3)
        self.kv.commit([], [Put(self.catalog.keys.subscriptions(TOPIC) + "all", b"{}")])
        intent = self.catalog.intend(TOPIC, storage.epoch, pending_object(self.used - 1, "ab"))
        self.objects.put_object(object_key(TOPIC, intent.object_id), b"half")
        return topic

    def delete(self) -> None:
        self.doomed = True
        self.store.delete(NAME)
        self.forget()

    def forget(self) -> None:
        """The topic was deleted."""
        self.gone |= self.attempted
        self.messages, self.attempted, self.doomed = {}, set(), False

    def learn(self) -> None:
        """Finds out what a process left that was killed, and compares it with what is known."""
        if self.deleted:
            assert self.doomed or not self.messages
            self.forget()
            self.assert_hidden()
            return
        found = self.read()
        assert self.gone.isdisjoint(found.values()), "a message of a deleted topic"
        if self.doomed and not self.messages.items() <= found.items():
            assert found == {}, "a part of a deleted topic"
            self.forget()
        self.doomed = False
        assert self.messages.items() <= found.items(), "an acknowledged message is lost"
        assert self.attempted.issuperset(found.values())
        self.messages = found
        self.used = max([self.used, *(offset + 1 for offset in found)])

    def finish(self, how: int) -> None:
        """Finishes a deletion in one of the ways in which that happens."""
        ways: list[Callable[[], object]] = [
            self._delete_again,
            self.topic,
            self.store.finish_deletions,
        ]
        ways[how % len(ways)]()

    def _delete_again(self) -> None:
        with suppress(UnknownTopic):
            self.store.delete(NAME)

    # -- what is there --------------------------------------------------------------------------

    @property
    def deleted(self) -> bool:
        found = self.catalog.find(TOPIC)
        return found is not None and found.is_deleted

    def read(self) -> dict[int, bytes]:
        return {each.offset: bytes(each.payload) for each in self.topic().read()}

    def rows(self) -> list[str]:
        keys = self.catalog.keys
        prefixes = (keys.topic(TOPIC), keys.cursors(TOPIC), keys.subscriptions(TOPIC))
        found = [self.kv.range(each, after_prefix(each), limit=1000) for each in prefixes]
        return [entry.key for page in found for entry in page]

    def stored(self) -> list[str]:
        prefix = objects_prefix(TOPIC)
        return [meta.key.removeprefix(prefix) for meta in self.objects.list(prefix)]

    def files(self) -> list[str]:
        return self.disk.list_dir(DIRECTORY) if self.disk.exists(DIRECTORY) else []

    def assert_hidden(self) -> None:
        """Nobody sees the topic any more, however far its deletion is."""
        assert self.store.topics() == []
        assert list(self.catalog.topics()) == []
        assert self.catalog.record(TOPIC) is None
        resources = factory_of(self.store).resources
        assert resources is not None
        with StoreView(resources, disk=self.local) as view:
            assert view.topics() == []
            with suppress(UnknownTopic):
                view.topic(NAME)
                raise AssertionError("a view of a deleted topic")

    def assert_nothing_left(self) -> None:
        """Only the record and a marker are left."""
        record = self.catalog.find(TOPIC)
        assert record is not None
        assert record.is_deleted
        assert record.tail >= self.used
        assert self.rows() == [self.catalog.keys.record(TOPIC)]
        assert [parse_marker(each) for each in self.stored()] == [
            MarkerName(record.begin, record.begin_attempt)
        ]
        assert record.begin == record.tail
        assert not self.disk.exists(DIRECTORY)
        self.assert_hidden()

    def assert_goes_on(self) -> None:
        """The topic that is created again has no old message, and no old offset."""
        old = set(self.messages)
        self.forget()
        topic = self.topic()
        assert list(topic.read()) == []
        assert topic.cursors() == {}
        assert topic.start_offset >= self.used
        first = self.append(topic)
        topic.upload()
        self.append(topic)
        assert old.isdisjoint(self.messages)
        assert first.start not in old
        assert self.read() == self.messages
