"""A topic read by a process that does not own it, over both tiers and without changing anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import LostOffsets, MissingData, OffsetOutOfRange, UsageError
from forebay.files.local import LocalDisk
from forebay.limits import MIB
from forebay.settings import (
    DeleterSettings,
    RemoteRetentionSettings,
    StoreSettings,
    WalSettings,
)
from forebay.topic.describe import describe, explain
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.topic.view import StoreView, TopicView
from forebay.wal.log import Wal
from forebay.wal.retention import Deleter
from support.tiered_stores import TOPIC, Setup, fill, offsets, storage_of


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "data")


@contextmanager
def viewing(setup: Setup) -> Iterator[StoreView]:
    """A view of the setup's store, as another process would have it."""
    resources = StoreResources(
        setup.settings(), setup.clock, catalog=setup.catalog, store=setup.objects
    )
    try:
        with StoreView(resources, clock=setup.clock) as view:
            yield view
    finally:
        resources.close()


def tree(path: Path) -> dict[str, int]:
    """Every file below `path`, with its size, but for SQLite's temporary ones."""
    return {
        str(each.relative_to(path)): each.stat().st_size
        for each in sorted(path.rglob("*"))
        if each.is_file() and not each.name.endswith(("-wal", "-shm"))
    }


def everything(view: TopicView) -> list[int]:
    with view.reader(view.start_offset) as reader:
        return offsets(reader)


def test_objects_and_local_files_are_one_log(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 300)
        topic.upload()
        fill(topic, 100)
        assert topic.trim_local()
        view = store.topic("orders")
        assert view.segments()[0].first_offset > 0
        assert (view.start_offset, view.end_offset) == (0, 400)
        assert everything(view) == list(range(400))
        with view.reader(150, 390) as reader:
            assert offsets(reader) == list(range(150, 390))


def test_a_view_of_a_real_directory_takes_nothing_and_makes_nothing(tmp_path: Path) -> None:
    settings = Setup(tmp_path / "data").settings()
    setup = Setup(tmp_path / "data")
    with setup.topic() as topic:
        fill(topic, 50)
    assert not (setup.data / "catalog.db").exists(), "the setup's catalog is in memory"
    before = tree(setup.data)
    with StoreView(settings) as store:
        assert store.topics() == ["/default/orders"]
        assert everything(store.topic("orders")) == list(range(50))
        with pytest.raises(UsageError, match="/default/absent"):
            store.topic("absent")
    assert tree(setup.data) == before
    with StoreView(StoreSettings(data=tmp_path / "nowhere")) as store:
        assert store.topics() == []
    assert not (tmp_path / "nowhere").exists()


def test_a_view_takes_neither_the_lease_nor_the_epoch(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 50)
        topic.upload()
        record, owner = setup.catalog.record(TOPIC), setup.catalog.owner(TOPIC)
        assert everything(store.topic("orders")) == list(range(50))
        assert setup.catalog.record(TOPIC) == record
        assert setup.catalog.owner(TOPIC) == owner
        fill(topic, 1)


def test_a_reader_goes_on_in_objects_when_its_segments_are_deleted(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 300)
        topic.upload()
        view = store.topic("orders")
        with view.reader(0) as reader:
            found = offsets([next(reader)])
            gone = topic.trim_local()
            assert len(gone) > 3
            assert not gone[0].path.exists()
            assert found + offsets(reader) == list(range(300))


class TrimmedWhileListed(LocalDisk):
    """A disk on which retention runs just before a directory is listed."""

    def __init__(self, trim: Callable[[], object]) -> None:
        self.trim: Callable[[], object] | None = trim

    def list_dir(self, path: Path) -> list[str]:
        trim, self.trim = self.trim, None
        if trim is not None:
            trim()
        return super().list_dir(path)


def test_retention_while_the_view_is_made_costs_nothing(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        resources = StoreResources(
            setup.settings(), setup.clock, catalog=setup.catalog, store=setup.objects
        )
        disk = TrimmedWhileListed(topic.trim_local)
        with StoreView(resources, disk=disk) as store:
            view = store.topic("orders")
            assert disk.trim is None
            assert everything(view) == list(range(300))
        resources.close()


def test_a_trimmed_log_without_objects_says_what_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "data" / "wal" / "default" / "orders"
    wal = Wal(WalSettings(dir=directory, rotate_max_bytes=1000), "/default/orders")
    for _ in range(30):
        wal.append(bytes(100), durability="synced")
    with TopicView(StoreSettings(data=tmp_path / "data"), "orders") as view:
        reader = view.reader(0)
        next(reader)
        wal.retain(Deleter(DeleterSettings(retention_size_mb=0)), 30)
        with pytest.raises(OffsetOutOfRange) as caught:
            list(reader)
        assert caught.value.start == wal.start_offset > 0
        view.refresh()
        assert view.start_offset == wal.start_offset
    wal.shutdown()


def test_without_a_local_log_the_view_ends_with_the_objects(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        fill(topic, 20)
    shutil.rmtree(setup.data / "wal")
    with viewing(setup) as store:
        assert store.topics() == ["/default/orders"]
        view = store.topic("orders")
        assert not view.has_local_log
        assert (view.start_offset, view.end_offset) == (0, 100)
        assert everything(view) == list(range(100))
        with pytest.raises(OffsetOutOfRange):
            view.reader(101)
    assert not (setup.data / "wal").exists()


def test_lost_offsets_are_told_and_the_reader_goes_on_behind_them(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        fill(topic, 20)
    shutil.rmtree(setup.data / "wal")
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 30)
        view = store.topic("orders")
        reader = view.reader(90)
        assert [next(reader).offset for _ in range(10)] == list(range(90, 100))
        with pytest.raises(LostOffsets) as caught:
            next(reader)
        assert (caught.value.start, caught.value.end) == (100, 120)
        with view.reader(caught.value.end) as rest:
            assert offsets(rest) == list(range(120, 150))


def test_a_view_stands_still_until_it_is_refreshed(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 20)
        view = store.topic("orders")
        fill(topic, 20)
        assert view.end_offset == 20
        assert everything(view) == list(range(20))
        view.refresh()
        assert everything(view) == list(range(40))


def test_a_catalog_that_comes_later_is_taken_up(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = StoreSettings(data=data, wal=WalSettings(rotate_max_bytes=1000))
    wal = Wal(WalSettings(dir=data / "wal" / "default" / "orders"), "/default/orders")
    wal.append(b"0000000000", durability="synced")
    wal.shutdown()
    with StoreView(settings) as viewed:
        view = viewed.topic("orders")
        assert view.objects() == []
        with Store(settings) as store:
            store.topic("orders").upload()
            view.refresh()
            assert len(view.objects()) == 1
            assert everything(view) == [0]


def test_the_log_of_a_former_owner_is_not_read(tmp_path: Path) -> None:
    here = Setup(tmp_path / "here")
    there = Setup(tmp_path / "there", backend=here.backend, kv=here.kv, clock=here.clock)
    with here.topic() as topic:
        fill(topic, 50)
        topic.upload()
    with there.topic() as topic, viewing(here) as store:
        fill(topic, 50)
        view = store.topic("orders")
        assert not view.has_local_log
        assert everything(view) == list(range(50))
        topic.upload()
        view.refresh()
        assert everything(view) == list(range(100))


def test_an_older_copy_of_the_log_is_not_read(setup: Setup) -> None:
    log, copy = setup.data / "wal", setup.data / "copy"
    with setup.topic() as topic:
        fill(topic, 50)
    shutil.copytree(log, copy)
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
    shutil.rmtree(log)
    copy.rename(log)
    with viewing(setup) as store:
        view = store.topic("orders")
        assert (view.has_local_log, view.end_offset) == (False, 100)
        assert everything(view) == list(range(100))


def test_segments_without_a_published_position_are_not_passed_over(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        fill(topic, 50)
    (setup.data / "wal" / "default" / "orders" / "wal.synced").unlink()
    with viewing(setup) as store, pytest.raises(MissingData, match="default/orders"):
        store.topic("orders")


def test_an_empty_directory_is_no_log(setup: Setup) -> None:
    (setup.data / "wal" / "default" / "empty").mkdir(parents=True)
    with viewing(setup) as store:
        with pytest.raises(UsageError, match="/default/empty"):
            store.topic("empty")
        with pytest.raises(UsageError, match="a topic is /namespace/topic"):
            store.topic("a/b")
    with pytest.raises(UsageError, match="in memory"):
        StoreView(StoreSettings(data=None))


# ---- describe and explain ---------------------------------------------------------------------


def test_a_topic_is_described_over_both_tiers(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 300)
        topic.upload()
        fill(topic, 100)
        facts = describe(store.topic("orders"))
        assert (facts.start_offset, facts.synced, facts.uploaded) == (0, 400, 300)
        assert facts.verified == 300
        assert facts.owner is not None
        assert facts.problems == []
        assert [(each.start_offset, each.next_offset) for each in facts.objects] == [(0, 300)]
        assert all(each.verified for each in facts.objects)
        assert facts.segments[-1].kept_because == "it holds the newest message"
        said = [each.file for each in facts.segments if each.deletable]
        gone = topic.trim_local()
        assert gone
        assert said == [str(segment.path) for segment in gone], "what is said is what is done"


def test_what_keeps_a_segment_is_said(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 100)

        def reasons() -> set[str | None]:
            return {each.kept_because for each in describe(store.topic("orders")).segments[:-1]}

        assert reasons() == {"not all of it is in verified objects"}
        topic.upload()
        assert reasons() == {None}
    setup.deleter = replace(setup.deleter, deletion_lag_minutes=60)
    with viewing(setup) as store:
        assert reasons() == {"its objects are younger than the deletion lag"}
        setup.clock.advance(3600)
        assert reasons() == {None}
    setup.deleter = replace(setup.deleter, retention_size_mb=1, retention_time_minutes=None)
    with viewing(setup) as store:
        assert reasons() == {"it is not old enough, and the log is not too large"}


def test_an_offset_is_found_in_every_tier_that_holds_it(setup: Setup) -> None:
    with setup.topic() as topic, viewing(setup) as store:
        fill(topic, 3000, size=50)
        topic.upload()
        view = store.topic("orders")
        facts = explain(view, 2500)
        assert (facts.state, facts.uploaded, facts.verified) == ("stored", True, True)
        segment, stored = facts.places
        raw = Path(segment.name).read_bytes()
        at = segment.position
        assert raw[at : at + 8] == (2500).to_bytes(8, "little")
        assert b"0000002500" in raw[at : at + segment.frame_bytes]
        frame = bytes(
            setup.objects.get_range(
                stored.name, stored.position, stored.position + stored.frame_bytes
            )
        )
        assert frame == raw[at : at + segment.frame_bytes]
        assert explain(view, 3000).state == "not yet synced"
        topic.trim_local()
        view.refresh()
        assert [place.tier for place in explain(view, 0).places] == ["object"]


def test_an_offset_that_remote_retention_removed_is_said_to_be(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(size_mb=0)
    with setup.store() as store, viewing(setup) as viewed:
        topic = store.topic("orders")
        for _ in range(3):
            fill(topic, 100)
            topic.upload()
        assert topic.trim_local()
        assert storage_of(store).trim_remote()
        view = viewed.topic("orders")
        assert view.start_offset == 200
        removed = explain(view, 5)
        assert (removed.state, removed.go_on_at) == ("removed", view.start_offset)
        assert removed.problems == []
        assert everything(view) == list(range(view.start_offset, 300))


def test_an_offset_that_is_nowhere_is_a_problem(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        (uploaded,) = topic.upload()
        fill(topic, 20)
    shutil.rmtree(setup.data / "wal")
    with viewing(setup) as store:
        view = store.topic("orders")
        assert explain(view, 110).state == "not yet uploaded"
        key = f"storage/topics/default/orders/objects/{uploaded.object_id}"
        kept = bytes(setup.objects.get_object(key, MIB))
        setup.objects.delete_object(key)
        found = explain(view, 5)
        assert found.places == []
        assert len(found.problems) == 1
        setup.objects.put_object(key, kept)
    with setup.topic(), viewing(setup) as store:
        lost = explain(store.topic("orders"), 110)
        assert (lost.state, lost.go_on_at) == ("lost", 120)
