"""Settings of a topic's own: what they change in a running owner, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.catalog.kv import Entry, Put
from forebay.catalog.topic_settings import change_namespace_policies, change_topic_settings
from forebay.config.offload_policies import DELETION_LAG, THRESHOLD_BYTES
from forebay.errors import DescriptorError, InvalidSetting, ServiceUnavailable, UsageError
from forebay.settings import DeleterSettings, RemoteRetentionSettings
from forebay.testing.kv import FaultKv
from forebay.topic.configure import configure_topic, effective_settings
from forebay.topic.describe import describe
from forebay.topic.store import Store, Topic
from support.storages import storage_of, uploader_checkpoint
from support.tiered_stores import TOPIC, Setup, fill, require_chain


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def elsewhere(setup: Setup, **values: object) -> None:
    """Another process changes the settings: only the catalog has them."""
    configure_topic(setup.catalog, TOPIC, setup.settings(), values)


def cycle(topic: Topic) -> None:
    storage_of(topic).upload_due()


def sources(settings: Any) -> Mapping[str, tuple[Any, str]]:
    return {each.key: (each.value, each.source) for each in settings}


def test_settings_survive_a_restart_and_say_where_they_come_from(setup: Setup) -> None:
    with setup.topic() as topic:
        made = sources(topic.configure(max_object_bytes="2KiB", max_idle_seconds="1m"))
        assert made["max_object_bytes"] == (2048, "topic")
        assert made["rotate_max_bytes"] == (4096, "configuration")
        assert made["max_open_seconds"] == (600, "default")
    with setup.topic() as topic:
        assert sources(topic.settings()) == made
        topic.configure({"rolling": True}, unset=["max_object_bytes"])
        assert sources(topic.settings())["max_object_bytes"] == (2**30, "default")
        assert sources(topic.settings())["rolling"] == (True, "topic")


def test_other_topics_keep_the_settings_of_the_store(setup: Setup) -> None:
    with setup.store() as store:
        store.topic(str(TOPIC)).configure(max_object_messages=7)
        other = store.topic("other")
        assert sources(other.settings())["max_object_messages"] == (None, "default")
        fill(other, 20)
        assert len(other.upload()) == 1


def test_a_wrong_value_changes_nothing(setup: Setup) -> None:
    with setup.topic() as topic:
        with pytest.raises(InvalidSetting, match="did you mean max_object_bytes"):
            topic.configure(rolling=True, max_objects_bytes=1)
        with pytest.raises(InvalidSetting, match="max_open_seconds is -1"):
            topic.configure(rolling=True, max_open_seconds=-1)
        assert sources(topic.settings())["rolling"] == (False, "default")


def test_a_store_in_memory_has_no_settings_of_a_topic() -> None:
    with forebay.open(None) as store, pytest.raises(UsageError, match="store in memory"):
        store.topic("orders").configure(rolling=True)


def test_upload_limits_count_from_the_next_cycle_on(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 40)
        cycle(topic)
        assert setup.ranges() == []
        elsewhere(setup, max_object_messages=16)
        cycle(topic)
        assert setup.ranges() == [(0, 16), (16, 32)]
        topic.configure(max_open_seconds=0)
        cycle(topic)
        assert setup.ranges() == [(0, 16), (16, 32), (32, 40)]
    require_chain(setup)


def test_a_topic_begins_and_ends_to_roll(setup: Setup) -> None:
    setup.uploading(max_open_seconds=1000)
    with setup.topic() as topic:
        topic.configure(rolling=True, max_idle_seconds=60)
        fill(topic, 10)
        cycle(topic)
        assert uploader_checkpoint(topic).active_msgs_written == 10
        setup.clock.advance(61)
        cycle(topic)
        assert setup.ranges() == [(0, 10)]
        fill(topic, 10)
        cycle(topic)
        topic.configure(rolling=False, max_open_seconds=0)
        cycle(topic)
        assert setup.ranges() == [(0, 10), (10, 20)]
        assert not [key for key in setup.listed() if "pending" in key]
    require_chain(setup)


def test_segments_are_rotated_by_the_topics_own_limits(setup: Setup) -> None:
    with setup.topic() as topic:
        topic.configure(rotate_max_bytes=None)
        fill(topic, 100)
        assert len(topic.segments()) == 1
        topic.configure(rotate_max_bytes=1000)
        fill(topic, 100)
        assert len(topic.segments()) > 10
    with setup.topic() as topic:
        before = len(topic.segments())
        fill(topic, 50)
        assert len(topic.segments()) > before + 3, "as soon as it is open again"


@pytest.mark.parametrize("at_once", [True, False])
def test_local_retention_is_the_topics_own(setup: Setup, at_once: bool) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        if at_once:
            topic.configure(retention_size_mb=None, retention_time_minutes=None)
        else:
            elsewhere(setup, retention_size_mb=None, retention_time_minutes=None)
        assert topic.trim_local() == []
        topic.configure(unset=["retention_size_mb"])
        assert topic.trim_local() != []


def test_the_deletion_lag_is_the_topics_own(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        topic.configure(deletion_lag_minutes=10)
        assert topic.trim_local() == []
        setup.clock.advance(601)
        assert topic.trim_local() != []


def test_the_namespaces_policies_apply_to_what_a_topic_has_no_value_for(setup: Setup) -> None:
    with setup.topic() as topic:
        change_namespace_policies(
            setup.catalog, TOPIC.namespace, lambda _: {DELETION_LAG: 600_000, THRESHOLD_BYTES: 5}
        )
        fill(topic, 100)
        topic.upload()
        cycle(topic)
        found = sources(topic.settings())
        assert found["deletion_lag_minutes"] == (10, "namespace")
        assert found["offload_threshold_bytes"] == (5, "namespace")
        assert topic.trim_local() == []
        setup.clock.advance(601)
        assert topic.trim_local() != []
        topic.configure(deletion_lag_minutes=60)
        assert sources(topic.settings())["deletion_lag_minutes"] == (60, "topic")


def test_a_deletion_lag_without_an_end_keeps_every_segment(setup: Setup) -> None:
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        topic.configure(deletion_lag_minutes=None)
        fill(topic, 100)
        topic.upload()
        setup.clock.advance(10 * 365 * 24 * 3600)
        assert topic.trim_local() == []
        with store.view() as view:
            kept = [each.kept_because for each in describe(view.topic(str(TOPIC))).segments]
        assert "its objects are younger than the deletion lag" in kept


def test_policies_that_this_release_does_not_accept_stop_uploads_and_are_named(
    setup: Setup,
) -> None:
    with setup.store() as store:
        fill(store.topic(str(TOPIC)), 10)
        change_namespace_policies(setup.catalog, TOPIC.namespace, lambda _: {THRESHOLD_BYTES: "x"})
        with pytest.raises(DescriptorError, match="offload policies of the namespace default"):
            effective_settings(setup.catalog, TOPIC, setup.settings())
        with store.view() as view:
            problems = describe(view.topic(str(TOPIC))).problems
        assert "Set them again" in problems[0]


def test_remote_retention_is_the_topics_own(setup: Setup) -> None:
    setup.remote = RemoteRetentionSettings(size_mb=0)
    setup.uploading(max_object_messages=10)
    with setup.topic() as topic:
        fill(topic, 50)
        topic.upload()
        elsewhere(setup, remote_retention_size_mb=None)
        storage_of(topic).trim_remote()
        assert len(setup.ranges()) == 5
        topic.configure(unset=["remote_retention_size_mb"])
        storage_of(topic).trim_remote()
        assert setup.ranges() == [(40, 50)], "the newest one stays"


class WithoutSettings(FaultKv):
    """A catalog that can lose its rows with settings."""

    away = False

    def get(self, key: str) -> Entry | None:
        if self.away and key.endswith("/settings"):
            raise ServiceUnavailable("the settings are away")
        return super().get(key)


def test_nothing_is_deleted_while_the_settings_cannot_be_read(setup: Setup) -> None:
    faults = WithoutSettings(setup.kv)
    setup = Setup(setup.data, kv=faults)
    with setup.topic() as topic:
        fill(topic, 100)
        topic.upload()
        elsewhere(setup, retention_size_mb=None, retention_time_minutes=None)
        faults.away = True
        with pytest.raises(ServiceUnavailable):
            topic.trim_local()
        faults.away = False
        assert topic.trim_local() == []
        assert topic.segments()[0].first_offset == 0


def test_a_value_that_is_not_accepted_stops_uploads_and_trims_and_no_append(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        change_topic_settings(setup.catalog, TOPIC, lambda _: {"max_object_bytes": "unbounded"})
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 10)
        for work in (topic.upload, topic.trim_local, lambda: cycle(topic)):
            with pytest.raises(DescriptorError, match="`forebay topics configure /default/orders`"):
                work()
        with store.view() as view:
            found = describe(view.topic(str(TOPIC)))
        assert "its setting max_object_bytes is 'unbounded'" in found.problems[0]
        topic.configure(unset=["max_object_bytes"])
        assert len(topic.upload()) == 1


def test_settings_of_a_later_release_do_no_harm_and_are_kept(setup: Setup) -> None:
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        key = setup.catalog.keys.settings(TOPIC)
        setup.kv.commit([], [Put(key, b'{"layout":"avro","max_object_messages":5}')])
        fill(topic, 10)
        assert len(topic.upload()) == 2
        topic.configure(rolling=False)
        entry = setup.kv.get(key)
        assert entry is not None
        assert entry.value == b'{"layout":"avro","max_object_messages":5,"rolling":false}'
        with store.view() as view:
            last = describe(view.topic(str(TOPIC))).settings[-1]
        assert (last.key, last.value, last.known) == ("layout", "avro", False)


@pytest.mark.parametrize(
    ("store", "own", "expected"),
    [
        ({"enabled": False}, {"rolling": True}, None),
        ({"runner": "inline"}, {}, "owner"),
        ({"runner": "spark"}, {}, "spark"),
        ({"runner": "spark"}, {"rolling": True}, "owner"),
        ({"runner": "spark", "rolling": True}, {}, "owner"),
        ({"runner": "spark", "rolling": True}, {"rolling": False}, "spark"),
    ],
)
def test_a_description_says_what_uploads_the_topic(
    setup: Setup, store: dict[str, Any], own: dict[str, Any], expected: str | None
) -> None:
    setup.uploading(**{"enabled": True, **store})
    with setup.store() as opened:
        topic = opened.topic(str(TOPIC))
        topic.configure(own)
        with opened.view() as view:
            assert describe(view.topic(str(TOPIC))).uploaded_by == expected
        assert storage_of(topic).uploads_itself == (expected == "owner")


def test_segments_that_the_topic_keeps_are_described_so(setup: Setup) -> None:
    setup.deleter = DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        topic.upload()

        def kept(store: Store) -> bool:
            with store.view() as view:
                return not describe(view.topic(str(TOPIC))).segments[0].deletable

        assert not kept(store)
        topic.configure(retention_size_mb=None)
        assert kept(store)
