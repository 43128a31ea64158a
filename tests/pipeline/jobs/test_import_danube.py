"""Danube's topics in our store: every message once, at its offset, and nothing changed there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.etcd import EtcdKv
from forebay.catalog.kv import Put
from forebay.errors import LostOffsets, MissingData, ServiceUnavailable, UsageError
from forebay.format.names import parse_topic
from forebay.objects.store import connect
from forebay.pipeline.jobs import import_danube as job
from forebay.pipeline.jobs.import_danube import DanubeOrigin, ImportReport, ImportRow, import_danube
from forebay.pipeline.jobs.restore import restore
from forebay.pipeline.jobs.verify import verify
from forebay.settings import CloudSettings, MetadataSettings, StoreSettings
from forebay.topic.resources import close_executor_resources
from forebay.topic.store import Store
from forebay.upload.danube import SourceFile
from support.cli_runs import small_segments
from support.danube_files import (
    GOLDEN_A,
    GOLDEN_C,
    Danube,
    descriptor,
    descriptor_key,
    frames,
    message,
)
from support.etcd_server import EtcdServer
from support.inline_executor import InlineExecutor
from support.paths import TESTS
from support.s3_server import S3Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = "/default/orders"


@pytest.fixture
def source(tmp_path: Path) -> Danube:
    return Danube(tmp_path / "danube")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[StoreSettings]:
    yield small_segments(tmp_path / "data")
    close_executor_resources()


def origin_of(source: Danube) -> DanubeOrigin:
    bucket = CloudSettings(root=str(source.bucket)) if source.bucket.exists() else None
    return DanubeOrigin(bucket, source.wal if source.wal.exists() else None)


def imported(
    source: Danube, target: StoreSettings, origin: DanubeOrigin | None = None, **choices: Any
) -> ImportReport:
    """Imports, and checks that the source is as before."""
    before = source.state()
    options = {"runner": "threads", "apply": True, **choices}
    report = import_danube(target, origin or origin_of(source), **options)
    assert source.state() == before
    return report


def row_of(report: ImportReport) -> ImportRow:
    [row] = report.rows
    return row


def require_messages(target: StoreSettings, start: int, end: int, topic: str = ORDERS) -> None:
    """The topic holds Danube's messages, and its log continues after them."""
    with Store(target) as store:
        found = list(store.topic(topic).read(start=start))
        assert found == [message(offset, topic) for offset in range(start, end)]
        assert store.topic(topic).append(b"next", durability="synced") == end
        assert [each.offset for each in store.topic(topic).read(start=end)] == [end]


def raw_of(target: StoreSettings, topic: str = ORDERS) -> bytes:
    """The bytes of all objects of a topic, in the order of its chain."""
    with closing(Catalog(_kv(target))) as catalog:
        found = list(catalog.get_object_descriptors(parse_topic(topic)))
    with closing(connect(target.cloud, Path(target.data or ""))) as store:
        prefix = f"storage/topics{topic}/objects/"
        parts = [store.get_object(prefix + each.object_id, 10**8) for each in found]
    return b"".join(map(bytes, parts))


def _kv(target: StoreSettings) -> Any:
    from forebay.catalog.sqlite import SqliteKv

    return SqliteKv(Path(target.data or "") / "catalog.db")


# ---- every layout ----


def test_the_bucket_and_the_wal_of_v0_5_0_become_one_topic(
    source: Danube, target: StoreSettings
) -> None:
    """The WAL overlaps the objects, and its newest file is empty."""
    source.put(0, 30)
    source.put(30, 20)
    source.write(0, frames(range(20, 45)))
    source.write(1, frames(range(45, 70)))
    source.write(2, b"")
    plan = row_of(imported(source, target, apply=False))
    assert (plan.messages, plan.messages_found, plan.copies) == (70, 100, 30)
    assert (plan.objects, plan.wal_files, plan.new_messages, plan.new_objects) == (2, 3, 70, 1)
    assert plan.bytes == len(frames(range(70)))
    assert not Path(target.data or "").exists()
    assert row_of(imported(source, target)) == plan
    assert raw_of(target) == frames(range(70))
    require_messages(target, 0, 70)
    assert verify(target, runner="threads").ok


@pytest.mark.parametrize("folder", ["objects", "segments"])
def test_objects_named_by_time_are_imported(
    source: Danube, target: StoreSettings, folder: str
) -> None:
    source.put(0, 10)
    source.put_later(10, 10, folder=folder)
    source.put_later(20, 5, folder=folder)
    source.put_later(20, 5, folder="segments")  # the same file, exported again
    row = row_of(imported(source, target))
    assert (row.messages, row.copies) == (25, 5 if folder == "objects" else 0)
    require_messages(target, 0, 25)


def test_the_wal_alone_is_enough_and_a_torn_frame_is_left_out(
    source: Danube, target: StoreSettings
) -> None:
    source.write(3, frames(range(40, 60)))
    source.write(4, frames(range(60, 64)) + frames([64])[:30])
    row = row_of(imported(source, target))
    assert (row.start_offset, row.next_offset, row.torn_bytes, row.error) == (40, 64, 30, None)
    require_messages(target, 40, 64)


def test_the_golden_messages_arrive_as_they_are(source: Danube, target: StoreSettings) -> None:
    for number, golden in enumerate((GOLDEN_A, GOLDEN_C)):
        source.object(f"/default/t{number}", "data-5-5.dnb1", golden)
    assert imported(source, target).ok
    with Store(target) as store:
        for number, golden in enumerate((GOLDEN_A, GOLDEN_C)):
            [found] = store.topic(f"t{number}").read(start=5)
            assert (found.payload, found.attributes) == (b"hello", {"k": "v1"})
            assert (found.offset, found.producer_name) == (5, "p1")
            assert raw_of(target, f"/default/t{number}") == golden


def test_frames_out_of_order_are_sorted(source: Danube, target: StoreSettings) -> None:
    source.write(0, frames([0, 2, 1, 3, 5, 4]))
    source.write(1, frames([7, 6, 8]))
    assert imported(source, target).ok
    assert raw_of(target) == frames(range(9))
    require_messages(target, 0, 9)


def test_topics_are_chosen_and_the_others_left_alone(source: Danube, target: StoreSettings) -> None:
    for name in ("a", "b", "c"):
        source.put(0, 5, f"/default/{name}")
    report = imported(source, target, topics=["b", "/default/c"])
    assert [row.topic for row in report.rows] == ["/default/b", "/default/c"]
    assert [row.topic for row in imported(source, target).rows if row.new_messages] == [
        "/default/a"
    ]
    with pytest.raises(UsageError, match="has no topic /default/none"):
        imported(source, target, topics=["none"])


# ---- descriptors in etcd ----


def test_descriptors_in_etcd_say_what_is_missing_and_which_copy_counts(
    source: Danube, target: StoreSettings, etcd: EtcdServer
) -> None:
    counted = source.put(0, 10)
    source.object(ORDERS, "data-0-3.dnb1", frames(range(4), text="an orphan "))
    later = source.put_later(10, 5)
    prefix = "/danube-import-test"
    values = {
        descriptor_key(prefix, ORDERS, 0): descriptor(0, 9, 1, counted.name),
        descriptor_key(prefix, ORDERS, 10, "segments"): descriptor(
            10, 14, 1, later.name, later=True
        ),
        descriptor_key(prefix, ORDERS, 15): descriptor(15, 19, 1, "data-15-19.dnb1"),
        f"{prefix}/storage/topics{ORDERS}/objects/cur": b'{"start":"00000000000000000015"}',
    }
    with closing(EtcdKv([etcd.endpoint], timeout_seconds=30)) as kv:
        kv.commit([], [Put(key, value) for key, value in values.items()])
        revision = kv.revision()
        metadata = MetadataSettings(backend="etcd", endpoints=[etcd.endpoint], prefix=prefix)
        origin = replace(origin_of(source), etcd=metadata)
        row = row_of(imported(source, target, origin))
        assert (row.undescribed, row.missing, row.gaps) == (1, ["data-15-19.dnb1"], [(15, 20)])
        assert [(each.start, each.end) for each in row.conflicts] == [(0, 4)]
        assert row.conflicts[0].kept.endswith("data-0-9.dnb1")
        assert "--allow-gaps" in str(row.error)
        assert "--allow-conflicts" in str(row.error)
        source.write(0, frames(range(12, 20)))
        origin = replace(origin, wal=source.wal)
        assert imported(source, target, origin, allow_conflicts=True).ok
        assert kv.revision() == revision
    require_messages(target, 0, 20)


# ---- what is not perfect ----


def test_damage_is_an_error_until_it_is_left_out(source: Danube, target: StoreSettings) -> None:
    path = source.put(0, 20)
    data = bytearray(path.read_bytes())
    at = len(frames(range(7))) + 30
    data[at] ^= 1
    path.write_bytes(data)
    row = row_of(imported(source, target))
    assert [each.offset for each in row.damage] == [7]
    assert "--skip-damage" in str(row.error)
    assert "--allow-gaps" in str(row.error)
    assert not imported(source, target, skip_damage=True).ok
    source.write(0, frames(range(5, 10)))  # the WAL has the message
    assert row_of(imported(source, target)).gaps == []
    assert imported(source, target, skip_damage=True).ok
    require_messages(target, 0, 20)


def test_gaps_are_an_error_until_they_are_recorded_as_lost(
    source: Danube, target: StoreSettings
) -> None:
    source.put(3, 5)
    source.put(10, 5)
    source.write(0, frames(range(20, 25)))
    row = row_of(imported(source, target))
    assert row.gaps == [(8, 10), (15, 20)]
    assert "the offsets 8 to 9, 15 to 19;" in str(row.error)
    assert row_of(imported(source, target, allow_gaps=True)).new_messages == 15
    with Store(target) as store:
        topic = store.topic(ORDERS)
        reader = iter(topic.read(start=3))
        assert [next(reader).offset for _ in range(5)] == [3, 4, 5, 6, 7]
        with pytest.raises(LostOffsets):
            next(reader)
        assert [each.offset for each in topic.read(start=20)] == [20, 21, 22, 23, 24]
        assert topic.append(b"next", durability="synced") == 25


def test_two_messages_of_one_offset_are_a_conflict(source: Danube, target: StoreSettings) -> None:
    """Danube assigned offsets again after a restart: only one message of each can be kept."""
    source.write(0, frames(range(10)) + frames(range(4), text="again "))
    row = row_of(imported(source, target))
    assert [(each.start, each.end) for each in row.conflicts] == [(0, 4)]
    assert "hold different messages of the offsets 0 to 3" in str(row.error)
    assert imported(source, target, allow_conflicts=True).ok
    require_messages(target, 0, 10)


# ---- again ----


def test_an_import_that_is_repeated_adds_only_what_is_new(
    source: Danube, target: StoreSettings
) -> None:
    source.put(0, 10)
    assert imported(source, target).ok
    again = row_of(imported(source, target))
    assert (again.present, again.new_messages, again.error) == (10, 0, None)
    source.write(0, frames(range(5, 15)))
    more = row_of(imported(source, target))
    assert (more.present, more.new_messages, more.error) == (10, 5, None)
    assert raw_of(target) == frames(range(15))
    require_messages(target, 0, 15)
    assert "has messages of its own" in str(row_of(imported(source, target)).error)


def test_a_wal_file_that_overlaps_many_objects_is_searched_once(
    source: Danube, target: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 50, 5):
        source.put(first, 5)
    source.write(0, frames(range(2, 60)))
    executor = InlineExecutor()
    monkeypatch.setattr(job, "executor_for", lambda *_: executor)
    assert row_of(imported(source, target)).copies == 48
    searched = [item.file.kind for item in executor.items if isinstance(item, job._Measure)]
    assert searched.count("wal") == 2  # once to compare its parts, once for what it gives
    require_messages(target, 0, 60)


def test_a_topic_with_other_messages_is_refused(source: Danube, target: StoreSettings) -> None:
    source.put(0, 10)
    other = Danube(source.path.parent / "other")
    other.object(ORDERS, "data-0-9.dnb1", frames(range(10), text="other "))
    assert imported(other, target).ok
    assert "does not hold the messages" in str(row_of(imported(source, target)).error)
    fresh = small_segments(source.path.parent / "fresh")
    with Store(fresh) as store:
        store.topic(ORDERS).append(b"mine", durability="synced")
    assert "has messages of its own" in str(row_of(imported(source, fresh)).error)
    with Store(fresh) as store:
        assert [each.payload for each in store.topic(ORDERS).read(start=0)] == [b"mine"]


def test_an_import_that_fails_in_the_middle_continues(
    source: Danube, target: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(target, uploader=replace(target.uploader, max_object_bytes=2000))
    for first in range(0, 60, 10):
        source.put(first, 10)
    executor = InlineExecutor()
    executor.twice = True
    monkeypatch.setattr(job, "executor_for", lambda *_: executor)

    def fail(item: object) -> None:
        if isinstance(item, job._Transfer) and item.upload.planned.start_offset == 30:
            raise ServiceUnavailable("the store is away")

    executor.before = fail
    row = row_of(imported(source, target))
    assert "the store is away" in str(row.error)
    with Store(target) as store, pytest.raises(MissingData, match="run `forebay import-danube`"):
        store.topic(ORDERS)
    [refused] = restore(target, [ORDERS], runner="threads").rows
    assert "an import of the topic is not finished" in str(refused.error)
    executor.before = lambda _item: None
    row = row_of(imported(source, target))
    assert (row.present, row.new_messages, row.error) == (30, 30, None)
    assert raw_of(target) == frames(range(60))
    require_messages(target, 0, 60)


@pytest.mark.kill
def test_an_import_that_is_killed_continues(source: Danube, target: StoreSettings) -> None:
    for first in range(0, 40, 10):
        source.put(first, 10)
    program = f"""
import os, sys
sys.path[:0] = [{str(TESTS)!r}]
from dataclasses import replace
from pathlib import Path
from forebay.catalog.catalog import Catalog
from forebay.pipeline import DanubeOrigin, import_danube
from forebay.settings import CloudSettings
from support.cli_runs import small_segments
target = small_segments(Path({str(target.data)!r}))
target = replace(target, uploader=replace(target.uploader, max_object_bytes=2000),
                 metadata=replace(target.metadata, lease_seconds=1, lease_margin_seconds=0.2))
commit = Catalog.put_object_descriptor
def die(self, topic, intent, descriptor, **more):
    commit(self, topic, intent, descriptor, **more)
    if descriptor.start_offset == 10:
        os._exit(9)
Catalog.put_object_descriptor = die
import_danube(target, DanubeOrigin(CloudSettings(root={str(source.bucket)!r})), apply=True,
              runner="threads")
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == 9
    row = row_of(imported(source, target))
    assert (row.present, row.new_messages, row.error) == (20, 20, None)
    assert raw_of(target) == frames(range(40))
    require_messages(target, 0, 40)


def test_a_source_that_does_not_respond_fails_its_topic_alone(
    source: Danube, target: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("away", "here"):
        source.put(0, 5, f"/default/{name}")
    executor = InlineExecutor()
    monkeypatch.setattr(job, "executor_for", lambda *_: executor)

    def fail(item: object) -> None:
        if isinstance(item, SourceFile) and item.topic.topic == "away":
            raise ServiceUnavailable("the bucket is away")

    executor.before = fail
    report = imported(source, target)
    assert [row.error for row in report.rows] == ["the bucket is away", None]
    require_messages(target, 0, 5, "/default/here")


@pytest.mark.parametrize("seed", [0, 1, 32, 63, 77, 89])
def test_any_files_give_every_message_that_is_whole_somewhere(
    source: Danube, target: StoreSettings, seed: int
) -> None:
    """Objects and WAL files that overlap, out of order, with damage: against a plain model."""
    chance = Random(seed)
    target = replace(target, uploader=replace(target.uploader, max_object_bytes=3000))
    whole: set[tuple[int, int]] = set()
    for number in range(chance.randint(2, 6)):
        first, count = chance.randrange(60), chance.randint(1, 30)
        offsets = list(range(first, first + count))
        for at in range(chance.randint(0, 3) if count > 1 else 0):
            offsets[at % (count - 1) : at % (count - 1) + 2] = offsets[at % (count - 1) :][1::-1]
        parts = [frames([offset], later=bool(number % 2)) for offset in offsets]
        if chance.random() < 0.5:
            bad = chance.randrange(count)
            flipped = chance.randrange(len(parts[bad]))
            parts[bad] = bytes(
                byte ^ (1 if at == flipped else 0) for at, byte in enumerate(parts[bad])
            )
            del offsets[bad]
        whole |= {(offset, number % 2) for offset in offsets}
        data = b"".join(parts)
        if chance.random() < 0.5:
            source.object(ORDERS, f"data-{first}-{1_700_000_000 + number}.dnb1", data)
        else:
            source.write(number, data)
    assert imported(source, target, skip_damage=True, allow_gaps=True, allow_conflicts=True).ok
    held = sorted({offset for offset, _ in whole})
    with Store(target) as store:
        topic = store.topic(ORDERS)
        topic.accept_loss()
        assert list(topic.read(start=held[0])) == [message(offset) for offset in held]
        assert topic.append(b"next", durability="synced") == held[-1] + 1
    assert verify(target, runner="threads").ok


# ---- elsewhere ----


def test_a_bucket_on_s3_is_imported_on_spark(
    spark: SparkSession, s3: S3Server, source: Danube, target: StoreSettings
) -> None:
    cloud = s3.settings()
    with closing(connect(cloud)) as bucket:
        for first in (0, 1000):
            data = frames(range(first, first + 1000))
            bucket.put_object(
                f"storage/topics{ORDERS}/objects/data-{first}-{first + 999}.dnb1", data
            )
        before = [(each.key, each.etag) for each in bucket.list("")]
        source.write(0, frames(range(1900, 2100)))
        origin = DanubeOrigin(cloud, source.wal)
        report = imported(source, target, origin, runner="spark", spark=spark)
        assert [(each.key, each.etag) for each in bucket.list("")] == before
    assert (report.ok, report.messages, report.bytes) == (True, 2100, len(frames(range(2100))))
    assert report.dataframe(spark).where("copies = 100 and error is null").count() == 1
    require_messages(target, 0, 2100)


def test_source_and_target_must_differ(source: Danube, target: StoreSettings) -> None:
    source.put(0, 3)
    same = replace(target, cloud=CloudSettings(root=str(source.bucket)))
    with pytest.raises(UsageError, match="Danube's bucket and the target"):
        imported(source, same)
    with pytest.raises(UsageError, match="nothing to import"):
        import_danube(target, DanubeOrigin())
    with pytest.raises(UsageError, match="not a directory"):
        import_danube(target, DanubeOrigin(CloudSettings(root=str(source.path / "none"))))
    with pytest.raises(UsageError, match="not a directory of Danube's WAL"):
        import_danube(target, DanubeOrigin(None, source.path / "none"))


def test_the_report_is_plain_data(source: Danube, target: StoreSettings) -> None:
    from dataclasses import asdict

    source.put(0, 3)
    assert json.loads(json.dumps(asdict(imported(source, target))))["rows"][0]["messages"] == 3
