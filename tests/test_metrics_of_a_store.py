"""Every metric of a store moves when the store does what the metric counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from forebay import metrics
from forebay.catalog.catalog import Change
from forebay.catalog.kv import ObservedKv
from forebay.catalog.sqlite import SqliteKv
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import CorruptFrame, CorruptLog, ServiceUnavailable, TopicFenced
from forebay.format.message import StreamMessage
from forebay.format.names import object_key, parse_topic
from forebay.objects.memory import MemoryBackend
from forebay.pulsar.managed_ledger import ManagedLedger, Position
from forebay.settings import CloudReaderSettings, RemoteRetentionSettings, SweeperSettings
from forebay.testing import FaultBackend, FaultKv, ObjectFault
from forebay.topic.factory import Background
from forebay.topic.store import Store, Topic
from forebay.upload.sweep import sweep
from forebay.upload.sweeper import Sweeper
from forebay.wal.pool import WriterPool
from support.disks import wait_until
from support.prometheus_text import Family, parse
from support.tiered_stores import TOPIC, Setup, fill, lease_of, offsets, resources_of, storage_of


class Scene:
    """A store whose objects and catalog can be made to fail, and damaged."""

    def __init__(self, data: Path) -> None:
        self.backend = FaultBackend(MemoryBackend())
        self.kv = FaultKv(SqliteKv(None))
        self.setup = Setup(data, backend=self.backend, kv=ObservedKv(self.kv, "sqlite"))

    def open(self, **changes: Any) -> None:
        settings = replace(self.setup.settings(), **changes)
        self.store = Store(
            settings, clock=self.setup.clock, catalog=self.setup.catalog, store=self.setup.objects
        )

    @property
    def topic(self) -> Topic:
        return self.store.topic(str(TOPIC))

    def damage_object(self) -> None:
        """Changes a byte of the first message; the etag changes with it."""
        descriptor = self.setup.descriptors()[0]
        key = object_key(TOPIC, descriptor.object_id)
        data = bytearray(self.backend.inner.get_range(key, 0, descriptor.size))
        data[30] ^= 0xFF
        self.backend.inner.put_object(key, bytes(data))

    def copy_object(self, source: str, target: str) -> None:
        """Copies the first object of a topic over the other's; the etag changes with it."""
        inner = self.backend.inner
        first, over = parse_topic(source), parse_topic(target)
        found = self.setup.descriptors(first)[0]
        data = inner.get_range(object_key(first, found.object_id), 0, found.size)
        name = self.setup.descriptors(over)[0].object_id
        inner.put_object(object_key(over, name), bytes(data))


def appends(scene: Scene) -> None:
    fill(scene.topic, 100)


def uploads(scene: Scene) -> None:
    fill(scene.topic, 100)
    scene.topic.upload()


def fails_to_upload(scene: Scene) -> None:
    fill(scene.topic, 100)
    scene.backend.inject(ObjectFault("complete"))
    with pytest.raises(ServiceUnavailable):
        scene.topic.upload()


def offloads_ledgers(scene: Scene) -> None:
    scene.topic.configure(format="pulsar")
    fill(scene.topic, 100)
    storage = storage_of(scene.store)
    ledger = ManagedLedger(storage)
    ledger.offload_prefix(Position(ledger.ledgers()[-1].ledger_id, 0))
    assert scene.setup.descriptors()


def finds_a_damaged_segment(scene: Scene) -> None:
    fill(scene.topic, 100)
    path = scene.topic.segments()[1].path
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptFrame):
        scene.topic.upload()


def deletes_segments(scene: Scene) -> None:
    uploads(scene)
    assert scene.topic.trim_local()


def keeps_segments(scene: Scene) -> None:
    uploads(scene)
    scene.damage_object()
    with pytest.raises(CorruptLog):
        scene.topic.trim_local()


def reads_over_both_tiers(scene: Scene) -> None:
    deletes_segments(scene)
    assert offsets(scene.topic.read(0)) == list(range(100))


def reads_damage(scene: Scene) -> None:
    deletes_segments(scene)
    scene.damage_object()
    with pytest.raises(CorruptFrame):
        list(scene.topic.read(0))


def reads_around_damage(scene: Scene) -> None:
    deletes_segments(scene)
    scene.damage_object()
    scene.store.close()
    scene.open(cloud_reader=CloudReaderSettings(lenient=True))
    assert offsets(scene.topic.read(0))[-1] == 99


def reads_over_accepted_offsets(scene: Scene) -> None:
    uploads(scene)
    fill(scene.topic, 10)
    scene.store.close()
    shutil.rmtree(scene.setup.data / "wal")
    scene.open()
    assert scene.topic.accept_loss().accepted
    assert offsets(scene.topic.read(0))[-1] == 99


def finds_a_wrong_index(scene: Scene) -> None:
    fill(scene.topic, 3000)
    scene.topic.upload()
    assert scene.topic.trim_local()
    catalog = scene.setup.catalog
    [*_, said] = scene.setup.descriptors()
    assert said.offset_index
    first, second, *rest = said.offset_index
    wrong = replace(said, offset_index=(first, (second[0], second[1] + 3), *rest))
    assert catalog.replace_descriptor(TOPIC, said, wrong)
    assert offsets(scene.topic.read(1500, end=1501)) == [1500]
    catalog.update(TOPIC, None, lambda record: Change(replace(record, verified=0)))
    scene.topic.upload()


def reads_a_copy_of_an_object(scene: Scene) -> None:
    deletes_segments(scene)
    scene.copy_object(str(TOPIC), str(TOPIC))
    assert offsets(scene.topic.read(0)) == list(range(100))


def finds_the_object_of_another_topic(scene: Scene) -> None:
    uploads(scene)
    other = scene.store.topic("others")
    fill(other, 100)
    other.upload()
    scene.copy_object("/default/others", str(TOPIC))
    with pytest.raises(CorruptLog):
        scene.topic.trim_local()


def gives_up_objects(scene: Scene) -> None:
    scene.store.close()
    scene.open(remote_retention=RemoteRetentionSettings(size_mb=0))
    uploads(scene)
    uploads(scene)  # the newest object stays
    assert storage_of(scene.store).trim_remote()


def sweeps(scene: Scene) -> None:
    uploads(scene)
    uploads(scene)
    scene.backend.put_object(object_key(TOPIC, "data-100-110.dnb1"), b"an orphan")
    scene.backend.delete_object(object_key(TOPIC, scene.setup.descriptors()[0].object_id))
    report = sweep(scene.setup.catalog, scene.setup.objects, grace_minutes=0, dry_run=False)
    assert report.errors


def sweeps_in_the_background(scene: Scene) -> None:
    uploads(scene)
    setup, pool = scene.setup, WriterPool(1)
    sweeper = Sweeper(setup.catalog, setup.objects, SweeperSettings(), pool, setup.clock)
    assert sweeper.run_if_due() is not None
    pool.close()


def loses_its_lease(scene: Scene) -> None:
    appends(scene)
    scene.kv.revoke(lease_of(scene.store))
    with pytest.raises(TopicFenced):
        resources_of(scene.store).session.renew()


def cannot_reach_its_catalog(scene: Scene) -> None:
    scene.kv.fail("grant")
    with pytest.raises(ServiceUnavailable):
        appends(scene)


def fails_in_the_background(scene: Scene) -> None:
    pool = WriterPool(1)
    storage = storage_of(scene.store)
    failed = False

    def chore(_: object) -> None:
        nonlocal failed
        failed = True
        raise ServiceUnavailable("planned")

    Background(pool, SYSTEM_CLOCK).every(3600, storage, chore, first=0)
    wait_until(lambda: failed)
    pool.close()


DOES: Final[dict[Callable[[Scene], None], tuple[str, ...]]] = {
    appends: (
        "wal_append",
        "wal_append_bytes",
        "wal_append_latency_seconds",
        "wal_fsync_latency_seconds",
        "wal_rotation",
    ),
    uploads: (
        "uploader_cycles",
        "uploader_cycle_duration_seconds",
        "uploader_objects_created",
        "uploader_bytes_uploaded",
        "uploader_logical_bytes_uploaded",
        "uploader_bytes_per_object",
        "uploader_msgs_per_object",
        "uploader_objects_verified",
        "store_requests",
        "store_request_seconds",
        "store_bytes",
        "catalog_seconds",
        "catalog_descriptor_write",
        "uploader_stream_chunk_bytes",
    ),
    fails_to_upload: ("uploader_cycles", "uploader_failures", "errors"),
    finds_a_damaged_segment: ("uploader_corrupt_frames", "uploader_failures"),
    deletes_segments: ("wal_delete",),
    keeps_segments: ("wal_delete_refused",),
    reads_over_both_tiers: (
        "wal_reader_create",
        "wal_reader_messages",
        "wal_reader_bytes",
        "cloud_reader_range_requests",
        "cloud_reader_query_duration_seconds",
        "cloud_reader_bytes_fetched",
        "cloud_reader_bytes_used",
        "cloud_reader_objects_read",
        "handoff_cloud_to_wal",
    ),
    offloads_ledgers: ("pulsar_offloads",),
    reads_damage: ("cloud_reader_errors",),
    reads_around_damage: ("reader_skipped_messages",),
    reads_over_accepted_offsets: ("reader_accepted_jumps",),
    finds_a_wrong_index: ("reader_wrong_indexes", "uploader_descriptors_corrected"),
    reads_a_copy_of_an_object: ("reader_other_etags",),
    finds_the_object_of_another_topic: ("reader_foreign_names",),
    gives_up_objects: ("remote_objects_deleted",),
    sweeps: ("sweep_removed", "sweep_errors"),
    sweeps_in_the_background: ("sweeps", "sweep_duration_seconds"),
    loses_its_lease: ("lease_lost",),
    cannot_reach_its_catalog: ("catalog_errors",),
    fails_in_the_background: ("background_failures",),
}


ELSEWHERE: Final = (
    *("compact_", "export_", "pipeline_", "replay_", "sink_", "verify_"),
    *("broker_", "build_", "http_", "job", "schema_", "start_", "spark_", "driver_"),
    "subscription",
)
"""Metrics of jobs and of servers, if they were imported; their own suites look at them."""
NOW: Final = {
    "topic_offset",
    "topic_upload_lag_messages",
    "topic_upload_lag_seconds",
    "topics_open",
    "topics_not_shown",
    "wal_cache_size",
    "uploader_memory_usage_bytes",
}
"""Gauges: they have no value once the store is closed."""


def page() -> dict[str, Family]:
    """The metrics of the library by name, without the common prefix and suffix."""
    found = {
        name.removeprefix("forebay_").removesuffix("_total"): family
        for name, family in parse(metrics.render()).items()
        if name.startswith("forebay_")
    }
    return {name: found[name] for name in found if not name.startswith(ELSEWHERE)}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("step", DOES, ids=lambda step: step.__name__)
def test_a_store_counts_what_it_does(scene: Scene, step: Callable[[Scene], None]) -> None:
    before = page()
    scene.open()
    step(scene)
    scene.store.close()
    after = page()
    for name in DOES[step]:
        assert after[name].total > before[name].total, name


def test_every_metric_is_moved_by_one_of_these() -> None:
    assert {name for names in DOES.values() for name in names} == set(page()) - NOW


def test_the_numbers_are_those_of_the_work(scene: Scene) -> None:
    before = page()
    scene.open()
    deletes_segments(scene)
    assert offsets(scene.topic.read(0)) == list(range(100))
    segments = len(scene.topic.segments())
    after = page()
    scene.store.close()

    def moved(name: str) -> float:
        return after[name].total - before[name].total

    objects = scene.setup.descriptors()
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


# ---- what open topics are asked ---------------------------------------------------------------


def told(name: str) -> dict[tuple[str, ...], float]:
    """A gauge's values by label, for the topic alone."""
    family = page()[name]
    return {
        tuple(value for _, value in labels): number
        for (_, labels), number in family.samples.items()
        if not labels or labels[0] == ("topic", str(TOPIC))
    }


def test_an_open_topic_tells_how_far_it_is(scene: Scene) -> None:
    scene.open()
    fill(scene.topic, 20)
    scene.topic.upload()
    fill(scene.topic, 10)
    name = str(TOPIC)
    offsets = {stage: number for (_, stage), number in told("topic_offset").items()}
    assert offsets == {"start": 0, "appended": 30, "synced": 30, "uploaded": 20, "verified": 20}
    assert told("topic_upload_lag_messages") == {(name,): 10}
    scene.topic.upload()
    assert told("topic_upload_lag_messages") == {(name,): 0}
    assert told("topic_upload_lag_seconds") == {(name,): 0}
    scene.store.close()
    assert told("topic_offset") == {}


def test_an_open_topic_tells_how_long_its_oldest_message_waits(scene: Scene) -> None:
    scene.open()
    fill(scene.topic, 10)
    scene.setup.clock.advance(60)
    assert told("topic_upload_lag_seconds") == {(str(TOPIC),): 60}
    fill(scene.topic, 10)
    scene.setup.clock.advance(5)
    assert told("topic_upload_lag_seconds") == {(str(TOPIC),): 65}
    scene.topic.upload()
    fill(scene.topic, 1)
    scene.setup.clock.advance(2)
    assert told("topic_upload_lag_seconds") == {(str(TOPIC),): 2}
    scene.store.close()


def test_a_message_that_was_published_long_ago_has_waited_since_it_came(scene: Scene) -> None:
    scene.open()
    storage = storage_of(scene.store)
    storage.append_message(StreamMessage(b"x", publish_time=1), durability="synced")
    scene.setup.clock.advance(3)
    assert told("topic_upload_lag_seconds") == {(str(TOPIC),): 3}
    scene.store.close()


def test_topics_over_the_bound_are_counted_and_not_shown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("topics_not_shown", "topics_open", "wal_cache_size")
    before = [told(name)[()] for name in names]
    monkeypatch.setattr("forebay.topic.metrics.TOPICS_MAX", 2)
    scene.open()
    for number in range(5):
        scene.store.topic(f"bounded-{number}").append(b"x")
    shown = {
        topic
        for _, ((_, topic),) in page()["topic_upload_lag_messages"].samples
        if "bounded" in topic
    }
    assert shown == {"/default/bounded-0", "/default/bounded-1"}
    after = [told(name)[()] for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 5, 5]
    scene.store.close()


def test_writers_hold_nothing_once_they_have_ended(scene: Scene) -> None:
    scene.open()
    uploads(scene)
    fails_to_upload(scene)
    scene.store.close()
    assert told("uploader_memory_usage_bytes") == {(): 0}


def test_a_writer_holds_no_more_than_its_parts(scene: Scene) -> None:
    before = told("uploader_memory_usage_bytes")[()]
    with scene.setup.objects.open_streaming_writer(
        "key", chunk_bytes=10, concurrent_parts=2
    ) as writer:
        writer.write(b"x" * 25)
        assert told("uploader_memory_usage_bytes")[()] - before == 25
        writer.write(b"x" * 25)
        assert told("uploader_memory_usage_bytes")[()] - before == 30
        writer.close()
    assert told("uploader_memory_usage_bytes")[()] == before
