"""A topic over both tiers: reading across the hand-over, deletion, and what survives."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.catalog import Change
from forebay.catalog.ownership import Session
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import (
    CorruptLog,
    LostOffsets,
    MissingData,
    OffsetOutOfRange,
    TopicOwned,
    UsageError,
)
from forebay.files.local import LocalDisk
from forebay.format.names import object_key
from forebay.settings import (
    DeleterSettings,
    MetadataSettings,
    RemoteRetentionSettings,
    StoreSettings,
)
from forebay.topic.opening import TopicClaim
from forebay.topic.storage import StartPosition
from forebay.topic.store import Store
from forebay.upload.restore import RestoreChoices, restore_topic
from forebay.wal.identity import LocalLog
from support.tiered_stores import TOPIC, Setup, fill, offsets, payloads, require_chain, storage_of


@pytest.fixture(params=["dnb1", "pulsar"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data")
    setup.uploading(max_object_bytes=20_000)
    setup.uploading(format=request.param)
    return setup


def test_a_reader_goes_from_objects_to_segments_to_memory(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        assert topic.trim_local()
        fill(topic, 50)
        local = topic.segments()[0].first_offset
        assert local > 0
        for start in (0, 1, 150, local - 1, local, local + 1, 349, 350):
            assert offsets(topic.read(start)) == list(range(start, 350))
        assert offsets(topic.read(100, end=200)) == list(range(100, 200))
        assert topic.start_offset == 0


def test_a_live_reader_from_the_past_reaches_the_present(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 200)
        topic.upload()
        topic.trim_local()
        reader = topic.read(0, follow=True)
        found = offsets(next(reader) for _ in range(150))
        fill(topic, 100)
        found += offsets(next(reader) for _ in range(150))
        assert found == list(range(300))


def test_a_slow_reader_goes_on_when_its_segment_is_deleted(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 200)
        reader = topic.read(0, follow=True)
        found = offsets(next(reader) for _ in range(3))
        topic.upload()
        setup.clock.advance(10_000)
        assert topic.trim_local()
        fill(topic, 200)
        topic.upload()
        setup.clock.advance(10_000)
        assert topic.trim_local()
        found += offsets(next(reader) for _ in range(397))
        assert found == list(range(400))


async def test_a_stream_crosses_the_tiers_too(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 200)
        await asyncio.to_thread(topic.upload)
        topic.trim_local()
        fill(topic, 20)
        found = [message.offset async for message in topic.stream(0, follow=False)]
        assert found == list(range(220))


def test_an_append_that_waits_for_its_upload_is_in_an_object(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 5)
        assert topic.append(payloads(5, 1)[0], durability="uploaded") == 5
        assert setup.ranges()[-1][1] == 6
        assert topic.append_many(payloads(6, 4), durability="uploaded") == range(6, 10)
        topic.append(payloads(10, 1)[0])
        topic.wait(10, durability="uploaded")
        assert topic.watermarks().uploaded == 11


# ---- deletion ----


def test_a_segment_stays_until_its_object_is_read_back(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        record = setup.catalog.record(TOPIC)
        assert record is not None
        before = topic.segments()
        _set_record(setup, verified=0)
        assert topic.trim_local() == []
        _set_record(setup, verified=record.verified)
        assert topic.trim_local() == before[:-1]


def _set_record(setup: Setup, **changes: int) -> None:
    setup.catalog.update(TOPIC, None, lambda record: Change(replace(record, **changes)))  # type: ignore[arg-type]


def test_a_segment_stays_for_the_deletion_lag(setup: Setup) -> None:
    setup.deleter = DeleterSettings(retention_size_mb=0, deletion_lag_minutes=240)
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        assert topic.trim_local() == []
        setup.clock.advance(239 * 60)
        assert topic.trim_local() == []
        setup.clock.advance(61)
        assert topic.trim_local()


def test_a_segment_stays_when_its_object_has_gone(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        first = setup.descriptors()[0]
        setup.objects.delete_object(object_key(TOPIC, first.object_id))
        with pytest.raises(MissingData, match=first.object_id):
            topic.trim_local()
        assert topic.segments()[0].first_offset == 0
        assert offsets(topic.read(0)) == list(range(300))


def test_segments_before_a_damaged_object_go_all_the_same(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        middle = setup.descriptors()[1]
        setup.objects.delete_object(object_key(TOPIC, middle.object_id))
        with pytest.raises(MissingData, match=middle.object_id):
            topic.trim_local()
        left = topic.segments()[0]
        assert 0 < left.first_offset <= middle.start_offset < left.end_offset
        assert offsets(topic.read(0)) == list(range(300))


def test_a_segment_stays_when_its_object_was_replaced_by_something_else(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        first = setup.descriptors()[0]
        key = object_key(TOPIC, first.object_id)
        setup.objects.put_object(key, bytes(first.size))
        with pytest.raises(CorruptLog):
            topic.trim_local()
        assert topic.segments()[0].first_offset == 0


def test_an_object_that_was_copied_elsewhere_and_back_is_read_and_accepted(
    setup: Setup,
) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        for descriptor in setup.descriptors():
            key = object_key(TOPIC, descriptor.object_id)
            same = bytes(setup.objects.get_object(key, 10**6))
            setup.objects.delete_object(key)
            setup.objects.put_object(key, same)
        assert topic.trim_local()


def test_remote_retention_by_size_leaves_the_newest_objects(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(size_mb=0.03)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 300)
        topic.upload()
        before = setup.descriptors()
        gone = storage_of(store).trim_remote()
        kept = setup.descriptors()
        assert [*gone, *kept] == before
        assert sum(each.size for each in kept) <= 0.03 * 1024 * 1024
        start = kept[0].start_offset
        assert topic.start_offset == start
        topic.trim_local()
        assert offsets(topic.read("earliest")) == list(range(start, 300))
        with pytest.raises(OffsetOutOfRange) as caught:
            topic.read(start - 1)
        assert caught.value.start == start
    names = [each.object_id for each in gone]
    assert not [key for key in setup.listed() if key.split("/")[-1].removesuffix(".json") in names]
    with setup.topic() as topic:
        assert topic.start_offset == start
    require_chain(setup)


def test_remote_retention_by_time(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(time_minutes=60)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        topic.upload()
        setup.clock.advance(3000)
        fill(topic, 100)
        topic.upload()
        setup.clock.advance(601)
        storage_of(store).trim_remote()
        assert topic.start_offset == 100


def test_a_segment_below_the_remote_start_may_go_without_an_object(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(size_mb=0)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 300)
        topic.upload()
        storage_of(store).trim_remote()
        (newest,) = setup.descriptors()
        assert newest.next_offset == 300, "it tells how far offsets were assigned"
        assert topic.trim_local()
        assert topic.append(payloads(300, 1)[0], durability="synced") == 300


# ---- taking over (R4) ----


def test_a_log_that_is_lost_leaves_a_hole_that_is_said(setup: Setup, tmp_path: Path) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        fill(topic, 30)
    elsewhere = replace(setup, data=tmp_path / "elsewhere")
    with elsewhere.topic() as topic:
        begin = topic.watermarks().appended
        assert begin >= 130
        topic.append(b"%010d" % begin, durability="synced")
        assert offsets(topic.read(0, end=100)) == list(range(100))
        with pytest.raises(LostOffsets) as caught:
            offsets(topic.read(0))
        assert (caught.value.start, caught.value.end) == (100, begin)
        assert offsets(topic.read(caught.value.end)) == [begin]
        topic.upload()
        require_chain(elsewhere)


def test_a_hole_at_the_very_start_is_said_too(
    setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
    with replace(setup, data=tmp_path / "elsewhere").topic() as topic:
        assert topic.append(b"%010d" % 10, durability="synced") == 10
        with pytest.raises(LostOffsets) as caught:
            offsets(topic.read("earliest"))
        assert (caught.value.start, caught.value.end) == (0, 10)
        assert offsets(topic.read(10)) == [10]
    assert "offsets are lost" in caplog.text
    assert "first=0 last=9" in caplog.text


def test_a_topic_that_is_all_uploaded_moves_without_a_hole(setup: Setup, tmp_path: Path) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
    with replace(setup, data=tmp_path / "elsewhere").topic() as topic:
        assert topic.watermarks().appended == 100
        fill(topic, 10)
        assert offsets(topic.read(0)) == list(range(110))


def test_a_log_that_comes_back_is_set_aside(setup: Setup, tmp_path: Path) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
    with replace(setup, data=tmp_path / "elsewhere").topic() as topic:
        fill(topic, 10)
        topic.upload()
    with setup.topic() as topic:
        assert topic.watermarks().appended == 110
        assert offsets(topic.read(0)) == list(range(110))
    assert list((setup.data / "wal/default/orders").glob("aside-*-wal.log"))


def test_a_topic_has_one_owner(setup: Setup, tmp_path: Path) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        other = Session(setup.catalog, MetadataSettings(), setup.clock)
        claim = TopicClaim(other, setup.objects, TOPIC, LocalDisk(), tmp_path, wait_seconds=0)
        with pytest.raises(TopicOwned):
            claim.acquire(LocalLog("0" * 32, 0, 0))
        other.close()
        topic.append(b"still ours", durability="synced")


def test_objects_that_the_catalog_does_not_know_are_not_written_over(
    setup: Setup, tmp_path: Path
) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    forgetful = Setup(tmp_path / "new", backend=setup.backend)
    with (
        forgetful.store() as store,
        pytest.raises(MissingData, match="forebay restore"),
    ):
        store.topic(str(TOPIC))


def test_an_older_copy_of_the_catalog_hands_out_no_offset_again(tmp_path: Path) -> None:
    file, copy = tmp_path / "catalog.db", tmp_path / "copy.db"
    setup = Setup(tmp_path / "data", kv=SqliteKv(file))
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    with closing(sqlite3.connect(file)) as now, closing(sqlite3.connect(copy)) as then:
        now.backup(then)
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    setup.kv.close()
    older = Setup(tmp_path / "elsewhere", kv=SqliteKv(copy), backend=setup.backend)
    with older.store() as store:
        with pytest.raises(MissingData, match="forebay restore"):
            store.topic(str(TOPIC))
        session = Session(older.catalog, MetadataSettings(), older.clock)
        restore_topic(older.catalog, older.objects, session, TOPIC, RestoreChoices())
        session.close()
        assert offsets(store.topic(str(TOPIC)).read(0, end=20)) == list(range(20))
    older.kv.close()


def test_a_store_in_memory_has_no_objects() -> None:
    with Store(StoreSettings(data=None)) as store:
        topic = store.topic("t")
        topic.append(b"x")
        with pytest.raises(UsageError):
            topic.upload()
        assert topic.watermarks().uploaded == 0


def test_the_seeds_api_reads_across_the_tiers(setup: Setup) -> None:
    with setup.store() as store:
        storage = storage_of(store)
        topic = store.topic(str(TOPIC))
        fill(topic, 200)
        topic.upload()
        topic.trim_local()
        reader = storage.create_reader(StartPosition.offset(0))
        assert offsets(next(reader) for _ in range(200)) == list(range(200))
        reader.close()
