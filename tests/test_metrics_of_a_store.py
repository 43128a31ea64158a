"""Every metric there is moves when a store does what the metric counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from disks import wait_until
from forebay import metrics
from forebay.catalog.observed import ObservedKv
from forebay.catalog.sqlite import SqliteKv
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import CorruptFrame, CorruptLog, ServiceUnavailable, TopicFenced
from forebay.format.names import object_key
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudReaderSettings, RemoteRetentionSettings
from forebay.testing import FaultBackend, FaultKv, ObjectFault
from forebay.topic.background import Background
from forebay.topic.store import Store, Topic
from forebay.topic.tiers import Tiers
from forebay.upload.sweep import sweep
from forebay.wal.pool import WriterPool
from prometheus_text import Family, parse
from tiered_stores import TOPIC, Site, fill, offsets


class World:
    """A topic with one object and more segments than one, and what it takes to harm it."""

    def __init__(self, data: Path) -> None:
        self.backend = FaultBackend(MemoryBackend())
        self.kv = FaultKv(SqliteKv(None))
        self.site = Site(data, backend=self.backend, kv=ObservedKv(self.kv, "sqlite"))

    def open(self, **changes: object) -> None:
        settings = self.site.settings()
        for name, value in changes.items():
            object.__setattr__(settings, name, value)
        self.store = Store(
            settings, clock=self.site.clock, catalog=self.site.catalog, store=self.site.objects
        )

    @property
    def topic(self) -> Topic:
        return self.store.topic(str(TOPIC))

    @property
    def tiers(self) -> Tiers:
        tiers = self.store._factory.tiers
        assert tiers is not None
        return tiers

    def damage_object(self) -> None:
        """Another byte in the first message, which the etag tells."""
        descriptor = self.site.descriptors()[0]
        key = object_key(TOPIC, descriptor.object_id)
        data = bytearray(self.backend.inner.get_range(key, 0, descriptor.size))
        data[30] ^= 0xFF
        self.backend.inner.put(key, bytes(data))


def appends(world: World) -> None:
    fill(world.topic, 100)


def uploads(world: World) -> None:
    fill(world.topic, 100)
    world.topic.upload()


def fails_to_upload(world: World) -> None:
    fill(world.topic, 100)
    world.backend.inject(ObjectFault("complete"))
    with pytest.raises(ServiceUnavailable):
        world.topic.upload()


def finds_a_damaged_segment(world: World) -> None:
    fill(world.topic, 100)
    path = world.topic.segments()[1].path
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptFrame):
        world.topic.upload()


def deletes_segments(world: World) -> None:
    uploads(world)
    assert world.topic.trim_local()


def keeps_segments(world: World) -> None:
    uploads(world)
    world.damage_object()
    with pytest.raises(CorruptLog):
        world.topic.trim_local()


def reads_over_both_tiers(world: World) -> None:
    deletes_segments(world)
    assert offsets(world.topic.read(0)) == list(range(100))


def reads_damage(world: World) -> None:
    deletes_segments(world)
    world.damage_object()
    with pytest.raises(CorruptFrame):
        list(world.topic.read(0))


def reads_around_damage(world: World) -> None:
    deletes_segments(world)
    world.damage_object()
    world.store.close()
    world.open(cloud_reader=CloudReaderSettings(lenient=True))
    assert offsets(world.topic.read(0))[-1] == 99


def gives_up_objects(world: World) -> None:
    world.store.close()
    world.open(remote_retention=RemoteRetentionSettings(size_mb=0))
    uploads(world)
    assert world.store._factory.for_topic(str(TOPIC)).trim_remote()


def sweeps(world: World) -> None:
    uploads(world)
    world.backend.put(object_key(TOPIC, "data-500-600.dnb1"), b"an orphan")
    world.backend.delete(object_key(TOPIC, world.site.descriptors()[0].object_id))
    report = sweep(world.site.catalog, world.site.objects, grace_minutes=0, dry_run=False)
    assert report.errors


def loses_its_lease(world: World) -> None:
    appends(world)
    lease = world.tiers.session.current
    assert lease is not None
    world.kv.revoke(lease)
    with pytest.raises(TopicFenced):
        world.tiers.session.renew()


def cannot_reach_its_catalog(world: World) -> None:
    world.kv.fail("grant")
    with pytest.raises(ServiceUnavailable):
        appends(world)


def fails_in_the_background(world: World) -> None:
    pool = WriterPool(1)
    storage = world.store._factory.for_topic(str(TOPIC))
    failed = False

    def chore(_: object) -> None:
        nonlocal failed
        failed = True
        raise ServiceUnavailable("planned")

    Background(pool, SYSTEM_CLOCK).every(3600, storage, chore, first=0)
    wait_until(lambda: failed)
    pool.close()


DOES: Final[dict[Callable[[World], None], tuple[str, ...]]] = {
    appends: ("wal_append", "wal_append_bytes", "wal_fsync_latency_seconds", "wal_rotation"),
    uploads: (
        "uploader_cycles",
        "uploader_cycle_duration_seconds",
        "uploader_objects_created",
        "uploader_bytes_uploaded",
        "uploader_bytes_per_object",
        "uploader_msgs_per_object",
        "uploader_objects_verified",
        "store_requests",
        "store_request_seconds",
        "store_bytes",
        "catalog_seconds",
    ),
    fails_to_upload: ("uploader_cycles", "uploader_failures"),
    finds_a_damaged_segment: ("uploader_corrupt_frames", "uploader_failures"),
    deletes_segments: ("wal_delete",),
    keeps_segments: ("wal_delete_refused",),
    reads_over_both_tiers: (
        "wal_reader_create",
        "cloud_reader_range_requests",
        "cloud_reader_bytes_fetched",
        "cloud_reader_bytes_used",
        "cloud_reader_objects_read",
        "handoff_cloud_to_wal",
    ),
    reads_damage: ("cloud_reader_errors",),
    reads_around_damage: ("reader_skipped_messages",),
    gives_up_objects: ("remote_objects_deleted",),
    sweeps: ("sweep_removed", "sweep_errors"),
    loses_its_lease: ("lease_lost",),
    cannot_reach_its_catalog: ("catalog_errors",),
    fails_in_the_background: ("background_failures",),
}


OF_JOBS: Final = ("compact_", "export_", "pipeline_", "replay_", "sink_", "verify_")
"""Metrics that jobs count, if they were imported; their own suites look at them."""


def page() -> dict[str, Family]:
    """The metrics of the library, without what their names have in common."""
    found = {
        name.removeprefix("forebay_").removesuffix("_total"): family
        for name, family in parse(metrics.render()).items()
        if name.startswith("forebay_")
    }
    return {name: found[name] for name in found if not name.startswith(OF_JOBS)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("step", DOES, ids=lambda step: step.__name__)
def test_a_store_counts_what_it_does(world: World, step: Callable[[World], None]) -> None:
    before = page()
    world.open()
    step(world)
    world.store.close()
    after = page()
    for name in DOES[step]:
        assert after[name].total > before[name].total, name


def test_every_metric_is_moved_by_one_of_these() -> None:
    assert {name for names in DOES.values() for name in names} == set(page())


def test_the_numbers_are_those_of_the_work(world: World) -> None:
    before = page()
    world.open()
    deletes_segments(world)
    assert offsets(world.topic.read(0)) == list(range(100))
    segments = len(world.topic.segments())
    after = page()
    world.store.close()

    def moved(name: str) -> float:
        return after[name].total - before[name].total

    objects = world.site.descriptors()
    size = sum(each.size for each in objects)
    assert moved("wal_append") == 100
    assert moved("wal_append_bytes") == moved("uploader_bytes_uploaded") == size
    assert moved("wal_fsync_latency_seconds") == 10
    assert moved("wal_delete") == moved("wal_rotation") - segments + 1
    assert moved("uploader_objects_created") == len(objects) == 1
    assert moved("uploader_objects_verified") == 1
    sizes = [page["uploader_bytes_per_object"].samples["_sum", ()] for page in (before, after)]
    assert sizes[1] - sizes[0] == size
    assert moved("uploader_cycles") == moved("uploader_cycle_duration_seconds") == 1
    assert moved("wal_reader_create") == moved("handoff_cloud_to_wal") == 1
    assert moved("cloud_reader_bytes_used") <= moved("cloud_reader_bytes_fetched")
    assert moved("uploader_failures") == moved("cloud_reader_errors") == 0
