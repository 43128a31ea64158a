"""A catalog and an object store in memory, and objects: for the suites of sweep and restore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Final

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.catalog.sqlite import SqliteKv
from forebay.format.content import ContentHash
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.frame import encode_frame, scan
from forebay.format.index import ObjectIndex
from forebay.format.layout import Buffer
from forebay.format.names import ObjectName, TopicName, object_key, sidecar
from forebay.objects.backend import ObjectMeta
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import MetadataSettings
from forebay.testing.clock import ManualClock
from forebay.testing.kv import FaultKv
from forebay.upload.restore import RestoreChoices, RestoreReport, restore_topic
from forebay.wal.identity import LocalLog

TOPIC: Final = TopicName("default", "orders")
PATIENCE: Final = 60.0
"""Seconds to wait for what must happen."""
BLOCK: Final = 1000
"""Offsets that are reserved at a time."""
GRACE_MINUTES: Final = 60.0


class HookedBackend(MemoryBackend):
    """Objects in memory; `before` gets each request's operation and key, and may wait or raise."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.before: Callable[[str, str], None] = lambda _operation, _key: None
        self.bytes_read = 0

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        self.before("list", prefix)
        return super().list(prefix, after=after)

    def delete_object(self, key: str) -> None:
        self.before("delete", key)
        super().delete_object(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        self.before("get_range", key)
        self.bytes_read += end - start
        return super().get_range(key, start, end, etag=etag)


class Stall:
    """Holds the first matching request up until it is released."""

    def __init__(self, operation: str, key: str) -> None:
        self._wanted = (operation, key)
        self.reached = threading.Event()
        self._released = threading.Event()

    def __call__(self, operation: str, key: str) -> None:
        if (operation, key) == self._wanted and not self.reached.is_set():
            self.reached.set()
            assert self._released.wait(PATIENCE)

    def release(self) -> None:
        self._released.set()


@contextmanager
def running(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Another thread does the work; leaving waits for it, and raises what it raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def frames(start: int, count: int, size: int = 20) -> bytes:
    """Frames whose bytes are determined by their offsets, as those of a log are."""
    payloads = ((b"%010d" % offset).ljust(size, b".") for offset in range(start, start + count))
    return b"".join(encode_frame(start + at, one) for at, one in enumerate(payloads))


class Reservoir:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.backend = HookedBackend(self.clock)
        self.store = CloudStore(self.backend)
        self.sessions: list[Session] = []
        self.lose_catalog()

    def lose_catalog(self) -> None:
        """A new, empty one."""
        self.close()
        self.kv = FaultKv(SqliteKv(None))
        self.catalog = Catalog(self.kv, clock=self.clock)

    def session(self) -> Session:
        """Another process, as far as the catalog can tell."""
        settings = MetadataSettings(offsets_reserved=BLOCK)
        self.sessions.append(Session(self.catalog, settings, self.clock))
        return self.sessions[-1]

    def own(self, session: Session | None = None, topic: TopicName = TOPIC) -> Ownership:
        """A new owner of the topic; earlier ones are fenced, their leases having ended."""
        if session is None:
            self.end_sessions()
            session = self.session()

        def settle(record: TopicRecord | None) -> TopicRecord:
            return record or TopicRecord(log_id="log")

        return acquire(session, topic, "lock", settle)[0]

    def end_sessions(self) -> None:
        for session in self.sessions:
            session.close()
        self.sessions.clear()

    def close(self) -> None:
        self.end_sessions()
        if hasattr(self, "kv"):
            self.kv.close()

    def grow_old(self) -> None:
        self.clock.advance(GRACE_MINUTES * 60)

    # ---- objects ----

    def write(
        self, object_id: str, data: bytes, *, with_sidecar: bool = True, topic: TopicName = TOPIC
    ) -> ObjectDescriptor:
        """An object of these frames, and its sidecar; no descriptor."""
        meta = self.store.put_object(object_key(topic, object_id), data)
        found = scan(data)
        index = ObjectIndex()
        index.add(found, 0)
        content = ContentHash()
        content.add(data)
        descriptor = ObjectDescriptor(
            object_id,
            found.offsets[0],
            found.offsets[-1],
            len(data),
            meta.etag,
            self.clock.now_ms() // 1000,
            offset_index=index.frozen(),
            content_hash=content.value,
        )
        if with_sidecar:
            self.store.put_object(
                object_key(topic, sidecar(object_id)), encode_descriptor(descriptor)
            )
        return descriptor

    def intend(self, owner: Ownership, start: int, end: int) -> Intent:
        return self.catalog.intend(owner.topic, owner.epoch, ObjectName(start, end))

    def finish(self, owner: Ownership, intent: Intent, start: int, end: int) -> ObjectDescriptor:
        """Writes an intended object and commits it."""
        data = frames(start, end - start + 1)
        descriptor = self.write(intent.object_id, data, topic=owner.topic)
        self.catalog.put_object_descriptor(owner.topic, intent, descriptor)
        return descriptor

    def upload(self, owner: Ownership, start: int, end: int) -> ObjectDescriptor:
        return self.finish(owner, self.intend(owner, start, end), start, end)

    def fill(self, owner: Ownership, *bounds: int) -> list[ObjectDescriptor]:
        """Objects between each two neighbours of `bounds`."""
        return [self.upload(owner, start, after - 1) for start, after in pairwise(bounds)]

    # ---- what there is ----

    def names(self) -> list[str]:
        """The names of all stored keys of the topic."""
        prefix = object_key(TOPIC, "")
        return [meta.key.removeprefix(prefix) for meta in self.store.list(prefix)]

    def listing(self) -> list[tuple[str, int, str | None]]:
        return [(meta.key, meta.size, meta.etag) for meta in self.store.list("")]

    def entries(self) -> list[tuple[str, bytes, int]]:
        found = self.kv.inner.range("/", "0", limit=10_000)
        return [(each.key, each.value, each.revision) for each in found]

    def chain(self) -> list[str]:
        return [each.object_id for each in self.catalog.get_object_descriptors(TOPIC)]

    def require_chain_whole(self) -> None:
        """Every descriptor's object is there, and they follow each other (I3, I4)."""
        record = self.catalog.record(TOPIC)
        position: int | None = None
        for each in self.catalog.get_object_descriptors(TOPIC):
            assert position in {None, each.start_offset}
            assert self.store.head(object_key(TOPIC, each.object_id)).size == each.size
            assert record is not None
            position = skip_holes(record, each.next_offset)
        assert record is None or position in {None, record.tail}


def with_ids(names: Sequence[str]) -> list[str]:
    """The names of objects and of their sidecars, as a listing has them."""
    return sorted([*names, *(sidecar(name) for name in names)])


def plain(record: TopicRecord | None) -> TopicRecord:
    """The record without its epoch."""
    assert record is not None
    return replace(record, epoch=0)


def restored(
    at: Reservoir,
    *,
    dry_run: bool = False,
    verify: bool = False,
    allow_gaps: bool = False,
    assume_nothing_lost: bool = False,
    next_offset: int | None = None,
    accept_loss: bool = False,
    local: LocalLog | None = None,
) -> RestoreReport:
    session = at.session()
    choices = RestoreChoices(
        dry_run, verify, allow_gaps, assume_nothing_lost, next_offset, accept_loss
    )
    try:
        return restore_topic(at.catalog, at.store, session, TOPIC, choices, local=local)
    finally:
        session.close()


def lay(at: Reservoir, *bounds: int, sidecars: bool = True) -> None:
    """Objects between each two of `bounds`, and nothing in the catalog."""
    for start, after in pairwise(bounds):
        name = f"data-{start}-{after - 1}.dnb1"
        at.write(name, frames(start, after - start), with_sidecar=sidecars)


def record_of(at: Reservoir) -> TopicRecord:
    record = at.catalog.record(TOPIC)
    assert record is not None
    return record
