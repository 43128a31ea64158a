"""A topic is deleted, and one of the same name goes on after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import began_here, is_of_deleted, origin, write_job_state
from forebay.catalog.kv import Kv, Put
from forebay.catalog.nonreliable import create_nonreliable, find_nonreliable
from forebay.catalog.ownership import Session
from forebay.catalog.records import Deletion, TopicRecord, encode_record
from forebay.catalog.sqlite import SqliteKv
from forebay.catalog.topic_settings import change_topic_settings
from forebay.errors import (
    DiskError,
    ForebayError,
    LogClosed,
    MissingData,
    ServiceUnavailable,
    TopicDeleted,
    TopicFenced,
    TopicKindConflict,
    TopicOwned,
    UnknownTopic,
)
from forebay.format.names import ObjectName, object_key, sidecar
from forebay.limits import LOG_DISTANCE
from forebay.objects.markers import list_markers, read_marker
from forebay.testing import CrashDisk, Fault, ObjectFault
from forebay.topic.store import open_store
from forebay.topic.view import StoreView
from forebay.upload.deletion import begin_deletion, finish_deletion
from forebay.upload.restore import RestoreChoices, RestoreReport, restore_topic
from forebay.upload.sweep import Action, Kind, SweepReport, sweep
from support.deletions import DIRECTORY, NAME, TOPIC, Place
from support.disks import in_thread, wait_until, waiting
from support.storages import factory_of, storage_of


@pytest.fixture
def at() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def swept(at: Place, grace_minutes: float = 0) -> list[tuple[Kind, str, Action]]:
    return said(sweep(at.catalog, at.cloud, grace_minutes=grace_minutes, dry_run=False))


def said(report: SweepReport) -> list[tuple[Kind, str, Action]]:
    return [(item.kind, item.key.rpartition("/")[2], item.action) for item in report.items]


def restored(at: Place, **choices: object) -> RestoreReport:
    session = Session(at.catalog, at.settings.metadata)
    with closing(session):
        return restore_topic(
            at.catalog,
            at.cloud,
            session,
            TOPIC,
            RestoreChoices(**choices),  # type: ignore[arg-type]
        )


def lose_catalog(at: Place) -> None:
    """Every row is gone, as after the loss of the catalog's file."""
    at.restart()
    at.close()
    at.kv = SqliteKv(None)
    at.store = at._start()


def copied(kv: Kv) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in kv.range("/", "0", limit=10_000) if not entry.lease}


# ---- nothing is left ----


def test_a_deletion_leaves_nothing_but_the_record_and_a_marker(at: Place) -> None:
    at.fill()
    done = at.store.delete(NAME)
    assert (done.topic, done.next_offset) == (NAME, at.used)
    assert done.objects > 1
    assert done.bytes > 0
    assert done.rows > 10
    assert done.files > 3
    at.assert_nothing_left()
    record = at.catalog.find(TOPIC)
    assert record is not None
    assert record.deletion is Deletion.DELETED
    (marker,) = list_markers(at.cloud, TOPIC)
    content = read_marker(at.cloud, marker)
    assert content is not None
    assert (content.deleted, content.begin) == (True, at.used)


def test_a_topic_that_is_created_again_goes_on_after_the_deleted_one(at: Place) -> None:
    for _ in range(3):
        at.fill()
        at.store.delete(NAME)
        at.assert_goes_on()
        at.restart()
        assert at.read() == at.messages
        at.store.delete(NAME)
        at.messages = {}


def test_buffered_messages_count_as_used_offsets(at: Place) -> None:
    topic = at.topic()
    offset = topic.append(b"never synced")
    assert at.store.delete(NAME).next_offset == offset + 1
    assert at.topic().append(b"new") == offset + 1


def test_a_topic_that_is_not_open_here_is_deleted(at: Place) -> None:
    at.fill()
    at.restart()
    assert at.store.delete(NAME).next_offset >= at.used
    at.assert_nothing_left()


def test_what_does_not_exist_cannot_be_deleted(at: Place) -> None:
    with pytest.raises(UnknownTopic):
        at.store.delete(NAME)
    at.fill()
    at.store.delete(NAME)
    with pytest.raises(UnknownTopic):
        at.store.delete(NAME)
    at.assert_nothing_left()


def test_a_log_that_the_catalog_does_not_know_is_deleted_after_its_last_offset(at: Place) -> None:
    topic = at.topic()
    at.append(topic)
    lose_catalog(at)
    for marker in list_markers(at.cloud, TOPIC):
        at.cloud.delete_object(marker.meta.key)
    assert at.store.delete(NAME).next_offset == at.used
    at.assert_nothing_left()
    at.assert_goes_on()


def test_other_topics_are_left_alone(at: Place) -> None:
    others = ["/default/orders-2", "/default/order", "/other/orders", "/default/orders-part-0"]
    for name in others:
        topic = at.store.topic(name)
        topic.append(b"stays", durability="uploaded")
        topic.append(b"too", durability="synced")
    at.fill()
    at.store.delete(NAME)
    at.assert_goes_on()
    at.restart()
    for name in others:
        assert [each.payload for each in at.store.topic(name).read()] == [b"stays", b"too"]


def test_a_topic_in_memory_is_deleted_too() -> None:
    with open_store(None) as store:
        topic = store.topic(NAME)
        topic.append(b"old")
        store.delete(NAME)
        assert store.topics() == []
        with pytest.raises(TopicDeleted):
            topic.append(b"old")
        with pytest.raises(UnknownTopic):
            store.delete(NAME)
        again = store.topic(NAME)
        assert again.append(b"new") == 1
        assert [each.payload for each in again.read(visibility="buffered")] == [b"new"]


# ---- those who use it ----


def test_producers_and_readers_of_a_deleted_topic_get_a_clear_error(at: Place) -> None:
    topic = at.fill()
    local = topic.read(at.used - 1, follow=True)
    next(local)
    calls: list[Callable[[], object]] = [
        lambda: topic.append(b"late"),
        lambda: topic.append(b"late", durability="synced"),
        lambda: topic.append_many([b"late"]),
        lambda: next(local),
        lambda: list(topic.read(0)),
        lambda: list(topic.read(at.used - 1)),
        topic.upload,
        topic.trim_local,
        topic.flush,
        topic.rotate,
        lambda: topic.configure(max_open_seconds="5s"),
    ]
    topic.append(b"queued")
    at.store.delete(NAME)
    for call in calls:
        with pytest.raises((TopicDeleted, UnknownTopic)):
            call()
    at.assert_nothing_left()


def test_a_reader_of_objects_gets_a_clear_error(at: Place) -> None:
    topic = at.fill()
    topic.upload()
    topic.rotate()
    topic.trim_local()
    reader = topic.read(0)
    assert next(reader).offset == 0
    at.store.delete(NAME)
    with pytest.raises(TopicDeleted):
        list(reader)


def test_a_reader_that_waits_at_the_end_is_woken(at: Place) -> None:
    topic = at.fill()
    reader = topic.read("latest", follow=True)
    waits = in_thread(lambda: next(reader))
    wait_until(lambda: waiting(storage_of(topic).wal) > 0)
    at.store.delete(NAME)
    with pytest.raises(TopicDeleted):
        waits.result(30)


def test_an_upload_that_runs_during_the_deletion_leaves_nothing_that_counts(at: Place) -> None:
    topic = at.fill()
    at.append(topic)
    begun, go = threading.Event(), threading.Event()

    def hold(key: str) -> None:
        if "data-" in key and not begun.is_set():
            begun.set()
            go.wait(30)

    at.backend.hook("put", hold)
    upload = in_thread(topic.upload)
    assert begun.wait(30)
    deletion = in_thread(lambda: at.store.delete(NAME))
    wait_until(lambda: storage_of(topic).wal.ended)
    go.set()
    with pytest.raises(TopicDeleted):
        upload.result(30)
    deletion.result(30)
    at.assert_hidden()
    swept(at)
    at.assert_nothing_left()
    at.assert_goes_on()


def test_the_errors_say_that_the_topic_was_deleted_by_another_process(at: Place) -> None:
    topic = at.fill()
    other = Place(kv=at.kv, objects=at.objects)
    try:
        begin_deletion(other.catalog, other.cloud, TOPIC, ended=lambda _owner: True)
        for call in (
            topic.upload,
            topic.trim_local,
            lambda: topic.append(b"a", durability="synced"),
        ):
            with pytest.raises(TopicFenced):
                call()
        with pytest.raises(TopicDeleted):
            storage_of(topic).cursors.flush(everything=True)
        finish_deletion(other.catalog, other.cloud, TOPIC)
        assert other.store.topic(NAME).append(b"new", durability="synced") >= at.used
        with pytest.raises(TopicFenced):
            topic.append(b"b", durability="synced")
    finally:
        other.close()


# ---- other processes ----


def test_a_topic_that_another_process_owns_is_not_deleted(at: Place) -> None:
    topic = at.fill()
    other = Place(kv=at.kv, objects=at.objects)
    try:
        with pytest.raises(TopicOwned):
            other.store.delete(NAME)
    finally:
        other.close()
    at.append(topic)
    assert at.read() == at.messages


def test_another_machine_removes_its_old_log_when_the_topic_was_deleted(at: Place) -> None:
    """The log of the machine `at`: the topic was deleted on another one."""
    at.fill()
    at.restart()
    other = Place(kv=at.kv, objects=at.objects)
    other.store.delete(NAME)
    other.close()
    assert at.files() != []
    at.assert_hidden()
    assert at.store.finish_deletions() == [NAME]
    at.assert_nothing_left()


def test_an_old_log_on_another_machine_is_never_continued(at: Place) -> None:
    at.fill()
    at.restart()
    other = Place(kv=at.kv, objects=at.objects, used=at.used)
    other.store.delete(NAME)
    at.assert_goes_on()
    at.restart()
    other.used = at.used
    other.store.delete(NAME)
    other.assert_goes_on()
    other.topic().upload()
    other.close()
    assert at.files() != []
    assert {each.offset: each.payload for each in at.topic().read()} == other.messages


def test_a_view_of_another_process_ends_with_the_topic(at: Place) -> None:
    at.fill()
    resources = factory_of(at.store).resources
    assert resources is not None
    with StoreView(resources, disk=at.disk) as view:
        topic = view.topic(NAME)
        at.store.delete(NAME)
        with pytest.raises(UnknownTopic):
            topic.refresh()
        with pytest.raises((TopicDeleted, ForebayError)):
            list(topic.reader(0))


# ---- late writes ----


def test_a_late_commit_of_the_old_owner_is_refused(at: Place) -> None:
    topic = at.fill()
    epoch = storage_of(topic).epoch
    assert epoch is not None
    descriptor = next(at.catalog.get_object_descriptors(TOPIC))
    intent = at.catalog.intend(TOPIC, epoch, ObjectName(8, 11))
    late = replace(descriptor, object_id=intent.object_id, start_offset=8, end_offset=11)
    at.store.delete(NAME)
    with pytest.raises(TopicDeleted):
        at.catalog.put_object_descriptor(TOPIC, intent, late)
    with pytest.raises(TopicDeleted):
        at.catalog.intend(TOPIC, epoch, ObjectName(8, 11))
    assert not at.catalog.renew(TOPIC, intent)
    at.topic()
    with pytest.raises(TopicFenced):
        at.catalog.put_object_descriptor(TOPIC, intent, late)


@pytest.mark.parametrize("created", [False, True], ids=["deleted", "created again"])
def test_a_late_object_is_removed_after_the_grace_time_and_never_read(
    at: Place, created: bool
) -> None:
    at.fill()
    at.store.delete(NAME)
    if created:
        at.assert_goes_on()
    before = at.stored()
    for name in ("data-0-3.dnb1", "data-4-pending-ab.dnb1"):
        at.objects.put_object(object_key(TOPIC, name), b"late")
    at.objects.put_object(object_key(TOPIC, sidecar("data-0-3.dnb1")), b"{}")
    assert {action for _, _, action in swept(at, 60)} == {Action.KEPT}
    assert {action for _, _, action in swept(at)} == {Action.REMOVED}
    assert at.stored() == before
    if created:
        assert at.read() == at.messages


def test_rows_that_are_written_late_go_with_the_next_sweep_and_with_the_next_topic(
    at: Place,
) -> None:
    at.fill()
    at.store.delete(NAME)
    write_job_state(at.catalog, TOPIC, "sink/a", b"{}", expected=None)
    assert swept(at) == [(Kind.ROWS, "", Action.REMOVED)]
    at.assert_nothing_left()
    write_job_state(at.catalog, TOPIC, "sink/a", b"{}", expected=None)
    at.catalog.put_cursor(TOPIC, "old", 3)
    at.topic()
    assert [key for key in at.rows() if "sink" in key or key.endswith("cursor")] == []


def test_the_settings_of_a_deleted_topic_cannot_be_changed(at: Place) -> None:
    at.fill()

    def change(before: dict[str, object]) -> dict[str, object]:
        if not at.deleted:
            at.store.delete(NAME)
        return {**before, "rolling": True}

    with pytest.raises(UnknownTopic):
        change_topic_settings(at.catalog, TOPIC, change)
    at.assert_nothing_left()


def test_the_state_of_a_job_from_before_a_deletion_is_told_from_a_later_one(at: Place) -> None:
    at.topic()
    first = origin(at.catalog, TOPIC)
    at.store.delete(NAME)
    at.topic()
    second = origin(at.catalog, TOPIC)
    at.store.delete(NAME)
    at.topic()
    third = origin(at.catalog, TOPIC)
    assert len({first, second, third}) == 3
    assert all(began_here(each) for each in (first, second, third))
    assert is_of_deleted(first, second)
    assert is_of_deleted(second, third)
    assert not is_of_deleted(third, third)
    assert not is_of_deleted(first, first)


# ---- interrupted ----


def test_a_half_deleted_topic_cannot_be_taken_and_is_finished_by_a_sweep(at: Place) -> None:
    at.fill()
    at.restart()
    begin_deletion(at.catalog, at.cloud, TOPIC)
    at.assert_hidden()
    with pytest.raises(TopicDeleted):
        at.catalog.update(TOPIC, None, lambda record: pytest.fail(f"{record} was changed"))
    assert (Kind.UNFINISHED, "", Action.REMOVED) in swept(at)
    at.store.finish_deletions()  # the local log
    at.assert_nothing_left()
    at.assert_goes_on()


def test_two_processes_may_finish_the_same_deletion(at: Place) -> None:
    at.fill()
    at.restart()
    other = Place(kv=at.kv, objects=at.objects)
    try:
        begin_deletion(at.catalog, at.cloud, TOPIC)

        def join(_key: str) -> None:
            finish_deletion(other.catalog, other.cloud, TOPIC)

        at.backend.hook("delete", join)
        assert at.store.delete(NAME).next_offset >= at.used
        at.assert_nothing_left()
    finally:
        other.close()


def test_a_deletion_that_stalls_removes_nothing_of_the_topic_that_follows(at: Place) -> None:
    """Another process finishes the deletion, and creates the topic again, while this one waits."""
    at.fill()
    at.restart()
    other = Place(kv=at.kv, objects=at.objects, used=at.used)
    done = threading.Event()

    def overtake(key: str) -> None:
        if "data-" in key and not done.is_set():
            done.set()
            finish_deletion(other.catalog, other.cloud, TOPIC)
            other.assert_goes_on()

    at.backend.hook("delete", overtake)
    at.store.delete(NAME)
    assert done.is_set()
    other.restart()
    assert other.read() == other.messages
    swept(other)
    assert other.read() == other.messages
    other.close()


@pytest.mark.parametrize("service", ["store", "catalog"])
def test_nothing_happens_while_a_service_is_away(at: Place, service: str) -> None:
    topic = at.fill()
    if service == "store":
        at.backend.inject(ObjectFault("any", times=None))
    else:
        at.catalog.kv.fail_reads(1000)  # type: ignore[attr-defined]
    with pytest.raises(ServiceUnavailable):
        at.store.delete(NAME)
    at.backend.clear()
    at.catalog.kv.heal()  # type: ignore[attr-defined]
    at.append(topic)
    assert at.read() == at.messages
    at.store.delete(NAME)


def test_a_topic_whose_deletion_failed_before_it_began_goes_on_when_it_is_opened_again(
    at: Place,
) -> None:
    topic = at.fill()
    at.catalog.kv.fail("commit")  # type: ignore[attr-defined]
    with pytest.raises(ServiceUnavailable):
        at.store.delete(NAME)
    with pytest.raises(TopicDeleted, match="if the deletion failed"):
        topic.append(b"late")
    at.append(at.topic())
    assert at.read() == at.messages


def test_a_disk_that_fails_is_named_and_the_deletion_goes_on_later(at: Place) -> None:
    at.fill()
    at.local.inject(Fault("unlink", 5, path="wal.1.log"))
    with pytest.raises(DiskError, match="delete the topic again"):
        at.store.delete(NAME)
    at.assert_hidden()
    at.store.delete(NAME)
    at.assert_nothing_left()


# ---- without the catalog ----


def test_a_deleted_topic_stays_deleted_when_the_catalog_is_lost(at: Place) -> None:
    at.fill()
    at.store.delete(NAME)
    at.objects.put_object(object_key(TOPIC, "data-0-3.dnb1"), b"late")
    lose_catalog(at)
    with pytest.raises(MissingData, match="forebay restore"):
        at.topic()
    report = restored(at)
    assert (report.deleted, report.adopted, report.next_offset) == (True, 0, at.used)
    at.store.finish_deletions()  # the directory that the opening made
    at.assert_nothing_left()
    at.assert_goes_on()


def test_a_deletion_that_was_interrupted_is_finished_when_the_catalog_is_lost(at: Place) -> None:
    at.fill()
    at.backend.inject(ObjectFault("delete", key="data-", times=None))
    with pytest.raises(ServiceUnavailable):
        at.store.delete(NAME)
    lose_catalog(at)
    assert restored(at, dry_run=True).deleted
    assert at.rows() == []
    assert restored(at).deleted
    at.assert_nothing_left()
    at.assert_goes_on()


@pytest.mark.parametrize("late", [False, True])
def test_only_the_later_topic_comes_back_when_the_catalog_is_lost(at: Place, late: bool) -> None:
    at.fill()
    at.store.delete(NAME)
    begin = at.used
    at.assert_goes_on()
    at.topic().upload()
    if late:
        at.objects.put_object(object_key(TOPIC, "data-0-3.dnb1"), b"late")
    lose_catalog(at)
    at.disk = CrashDisk()
    at.restart()
    report = restored(at, dry_run=True)
    assert (report.start_offset, report.dead) == (begin, int(late))
    report = restored(at)
    assert (report.start_offset, report.tail, report.deleted) == (begin, at.used, False)
    record = at.catalog.record(TOPIC)
    assert record is not None
    assert record.reserved >= at.used + LOG_DISTANCE
    topic = at.topic()
    end = at.used
    assert {each.offset: each.payload for each in topic.read(begin, end=end)} == at.messages


@pytest.mark.parametrize("created", [False, True], ids=["deleted", "created again"])
def test_a_copy_of_the_catalog_from_before_the_deletion_brings_nothing_back(
    at: Place, created: bool
) -> None:
    at.fill()
    at.restart()
    copy = copied(at.kv)
    at.topic()
    at.store.delete(NAME)
    begin = at.used
    if created:
        at.assert_goes_on()
        at.topic().upload()
    lose_catalog(at)
    for key, value in copy.items():
        at.kv.commit([], [Put(key, value)])
    at.disk = CrashDisk()
    at.restart()
    with pytest.raises(MissingData, match="forebay restore"):
        at.topic()
    report = restored(at)
    assert (report.deleted, report.start_offset) == (not created, begin)
    if created:
        found = at.topic().read(begin, end=at.used)
        assert {each.offset: each.payload for each in found} == at.messages
    else:
        at.store.finish_deletions()  # the directory that the opening made
        at.assert_nothing_left()
        at.assert_goes_on()


def test_an_older_catalog_deletes_after_every_offset_that_a_log_can_have_used(at: Place) -> None:
    at.fill()
    at.restart()
    copy = copied(at.kv)
    at.append(at.topic())
    at.topic().upload()
    lose_catalog(at)
    for key, value in copy.items():
        at.kv.commit([], [Put(key, value)])
    assert at.store.delete(NAME).next_offset >= at.used + LOG_DISTANCE
    at.assert_nothing_left()
    at.assert_goes_on()


def test_sweeps_keep_the_marker_of_the_deletion(at: Place) -> None:
    at.fill()
    at.store.delete(NAME)
    begin = at.used
    at.assert_goes_on()
    for _ in range(4):
        at.restart()
        at.append(at.topic())
        swept(at)
    found = [read_marker(at.cloud, each) for each in list_markers(at.cloud, TOPIC)]
    assert [each.begin for each in found if each is not None and each.deleted] == [begin]


# ---- releases that do not know deletions ----


def test_a_topic_that_an_earlier_release_created_again_is_not_deleted() -> None:
    record = TopicRecord(tail=5, start_offset=5, deletion=Deletion.DELETED)
    assert record.is_deleted
    assert not replace(record, log_id="ab").is_deleted, "it keeps fields that it does not know"
    assert b"deletion" not in encode_record(TopicRecord())


def test_a_store_that_was_closed_deletes_nothing(at: Place) -> None:
    at.fill()
    at.store.close()
    with pytest.raises(LogClosed):
        at.store.delete(NAME)
    at.restart()
    assert at.read() == at.messages


def test_the_directory_is_gone_on_a_real_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with open_store(tmp_path) as store:
        topic = store.topic(NAME)
        topic.append(b"old", durability="uploaded")
        assert store.delete(NAME).files > 0
        assert not (tmp_path / "wal" / "default" / "orders").exists()
        assert store.topic(NAME).append(b"new", durability="synced") == 1
    assert DIRECTORY.name == "orders"
    with open_store(tmp_path) as store:
        assert [each.payload for each in store.topic(NAME).read()] == [b"new"]


def test_the_catalog_of_a_deleted_topic_is_listed_only_on_request(at: Place) -> None:
    at.fill()
    at.store.delete(NAME)
    catalog: Catalog = at.catalog
    assert list(catalog.topics()) == []
    assert list(catalog.topics(deleted=True)) == [TOPIC]


# ---- topics that are not stored ----


def test_a_topic_that_is_not_stored_may_follow_a_deleted_one_and_is_deleted_too(at: Place) -> None:
    at.fill()
    with pytest.raises(TopicKindConflict):
        create_nonreliable(at.catalog, TOPIC, 1)
    at.store.delete(NAME)
    create_nonreliable(at.catalog, TOPIC, 1)
    with pytest.raises(TopicKindConflict):
        at.topic()
    row = at.catalog.keys.subscriptions(TOPIC) + "all"
    at.kv.commit([], [Put(row, b"{}")])
    swept(at)
    assert row in at.rows(), "it belongs to the other topic"
    assert at.store.delete(NAME).objects == 0
    assert find_nonreliable(at.catalog, TOPIC) is None
    at.assert_nothing_left()
    at.assert_goes_on()


def test_whoever_asked_is_told_of_a_deletion(at: Place) -> None:
    told: list[object] = []
    at.store.on_deleted.append(told.append)
    at.fill()
    at.store.delete(NAME)
    assert told == [TOPIC]
