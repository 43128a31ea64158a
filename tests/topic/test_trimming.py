"""Segments and the objects that hold their messages: another topic's object is no replacement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.kv import Put
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import DescriptorError, ForeignObject, ServiceUnavailable
from forebay.format.cursor import Cursor
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, object_key, parse_topic, subscription_cursor
from forebay.format.subscription import SubscriptionRow
from forebay.settings import RemoteRetentionSettings
from forebay.testing.kv import FaultKv
from forebay.topic.store import Store
from forebay.topic.trimming import UNREAD_REMOVED
from support.tiered_stores import TOPIC, Setup, fill, offsets, resources_of, storage_of

OTHERS = parse_topic("/default/others")
"""As long as the name of TOPIC, so that objects of the same range have the same size."""


@pytest.fixture(params=["dnb1", "pulsar"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data")
    setup.uploading(max_object_bytes=20_000)
    with setup.store() as store:
        for name in (TOPIC, OTHERS):
            topic = store.topic(str(name))
            fill(topic, 300)
            topic.upload()
    setup.uploading(format=request.param)
    return setup


def key_of(descriptor: ObjectDescriptor, topic: TopicName = TOPIC) -> str:
    return object_key(topic, descriptor.object_id)


def put_foreign(setup: Setup) -> ObjectDescriptor:
    """Puts the first object of the other topic into the place of this one's."""
    mine, foreign = setup.descriptors()[0], setup.descriptors(OTHERS)[0]
    assert (mine.object_id, mine.size) == (foreign.object_id, foreign.size)
    setup.objects.put_object(key_of(mine), setup.objects.get_object(key_of(foreign, OTHERS), 10**6))
    return mine


def forget_hashes(setup: Setup) -> None:
    """Makes the descriptors those of an earlier release."""
    for each in setup.descriptors():
        old = replace(each, content_hash=None, highest_publish_time=None)
        assert setup.catalog.replace_descriptor(TOPIC, each, old)


def test_another_topics_object_of_the_same_range_and_size_is_not_read_back(setup: Setup) -> None:
    mine = put_foreign(setup)
    with setup.store() as store, pytest.raises(ForeignObject) as raised:
        resources_of(store).read_back(TOPIC, mine)
    assert str(mine.content_hash) in str(raised.value)
    assert "forebay repair" in str(raised.value)


@pytest.mark.parametrize("hashed", [True, False], ids=["hash", "no hash"])
def test_a_segment_stays_if_its_object_is_another_topics(setup: Setup, hashed: bool) -> None:
    if not hashed:
        forget_hashes(setup)
    put_foreign(setup)
    with setup.topic() as topic:
        before = topic.segments()
        with pytest.raises(ForeignObject, match=r"data-0-"):
            topic.trim_local()
        assert topic.segments() == before
        assert offsets(topic.read(0)) == list(range(300))


def test_another_topics_object_is_not_read_in_place_of_this_ones(setup: Setup) -> None:
    with setup.topic() as topic:
        assert topic.trim_local()
        assert topic.segments()[0].first_offset > 0
    mine = put_foreign(setup)
    with setup.topic() as topic:
        for start in (0, 5, mine.end_offset):
            with pytest.raises(ForeignObject, match=mine.object_id):
                next(topic.read(start))
        later = mine.next_offset
        assert offsets(topic.read(later)) == list(range(later, 300))


def test_a_copy_of_an_object_is_as_good_whether_its_descriptor_has_a_hash_or_not(
    setup: Setup,
) -> None:
    first, *rest = setup.descriptors()
    setup.catalog.replace_descriptor(TOPIC, first, replace(first, content_hash=None))
    for each in (first, *rest):
        setup.objects.put_object(key_of(each), setup.objects.get_object(key_of(each), 10**6))
    with setup.topic() as topic:
        assert topic.trim_local()
        assert offsets(topic.read(0)) == list(range(300))


def test_readers_begin_at_the_new_start_after_a_retention_whose_response_was_lost(
    tmp_path: Path,
) -> None:
    kv = FaultKv(SqliteKv(None))
    setup = Setup(tmp_path, kv=kv, remote=RemoteRetentionSettings(size_mb=0))
    setup.uploading(max_object_bytes=3000)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        topic.upload()
        kv.fail("commit", applied=True, times=50)
        with pytest.raises(ServiceUnavailable):
            storage_of(store).trim_remote()
        kv.heal()
        record = setup.catalog.record(TOPIC)
        assert record is not None
        assert record.start_offset > 0
        assert offsets(topic.read()) == list(range(record.start_offset, 100))


# ---- subscriptions that have not read what retention deletes ----


def subscribe(store: Store, name: str, position: int, *ranges: tuple[int, int]) -> None:
    storage_of(store).create_subscription(SubscriptionRow(name, 1), Cursor(position, ranges))


@pytest.fixture
def unread(setup: Setup) -> Iterator[tuple[Setup, Store]]:
    """A topic with several objects, of which retention would leave the last one."""
    setup.remote = RemoteRetentionSettings(size_mb=0)
    assert len(setup.descriptors()) > 2
    with setup.store() as store:
        yield setup, store


def test_a_deletion_of_unread_messages_is_logged_and_counted(
    unread: tuple[Setup, Store], caplog: pytest.LogCaptureFixture
) -> None:
    setup, store = unread
    kept = setup.descriptors()[-1].start_offset
    subscribe(store, "slow", 10, (20, 25))
    subscribe(store, "stopped", 0)
    subscribe(store, "done", 300)
    before = UNREAD_REMOVED.value()
    storage_of(store).trim_remote()
    assert len(setup.descriptors()) == 1
    lines = [each.message for each in caplog.records if "had not acknowledged" in each.message]
    assert len(lines) == 2, "one for each subscription"
    (slow,) = (each for each in lines if "slow" in each)
    assert f"messages={kept - 15}" in slow
    assert UNREAD_REMOVED.value() - before == kept - 15 + kept
    assert storage_of(store).trim_remote() == []
    assert len([each for each in caplog.records if "had not" in each.message]) == 2


def test_objects_with_unread_messages_stay_if_they_are_to_be_kept(
    unread: tuple[Setup, Store],
) -> None:
    setup, store = unread
    first, second, *_ = setup.descriptors()
    topic = store.topic(str(TOPIC))
    topic.configure(remote_retention_keep_unread=True)
    storage = storage_of(store)
    before = UNREAD_REMOVED.value()
    subscribe(store, "slow", first.end_offset)
    subscribe(store, "done", 300)
    assert storage.trim_remote() == [], "its last message is not acknowledged"
    storage.put_cursor("slow", Cursor(second.start_offset + 3))
    assert storage.trim_remote() == [], "the catalog does not have it yet"
    storage.flush_cursors()
    assert [each.object_id for each in storage.trim_remote()] == [first.object_id]
    assert setup.descriptors()[0] == second
    topic.delete_subscription("slow")
    assert storage.trim_remote()
    assert len(setup.descriptors()) == 1
    assert UNREAD_REMOVED.value() == before


def test_local_retention_does_not_wait_for_subscriptions(unread: tuple[Setup, Store]) -> None:
    _, store = unread
    topic = store.topic(str(TOPIC))
    topic.configure(remote_retention_keep_unread=True)
    subscribe(store, "slow", 0)
    assert topic.trim_local()
    assert offsets(topic.read(0)) == list(range(300))


def test_a_damaged_cursor_stops_retention_only_if_unread_messages_are_kept(
    unread: tuple[Setup, Store],
) -> None:
    setup, store = unread
    subscribe(store, "slow", 0)
    key = setup.catalog.keys.cursor_row(TOPIC, subscription_cursor("slow"))
    setup.kv.commit([], [Put(key, b"damaged")])
    topic = store.topic(str(TOPIC))
    topic.configure(remote_retention_keep_unread=True)
    with pytest.raises(DescriptorError, match="cursors/sub%2Fslow"):
        storage_of(store).trim_remote()
    topic.configure(unset=["remote_retention_keep_unread"])
    assert storage_of(store).trim_remote()
