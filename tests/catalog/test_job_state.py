"""The state that jobs keep of a topic, on every catalog, and what it must not disturb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from catalog_worlds import TOPIC, World
from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import (
    ANYTHING,
    ORIGIN_HERE,
    find_job_state,
    job_states,
    origin,
    read_job_state,
    remove_job_state,
    write_job_state,
)
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import CommitRefused, ServiceUnavailable, UsageError
from forebay.format.names import CatalogKeys, TopicName
from forebay.limits import CATALOG_PAGE, JOB_STATE_BYTES_MAX, JOB_STATE_NAME_BYTES_MAX
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.upload.restore import restore_topic
from forebay.upload.sweep import sweep
from kv_grounds import GROUNDS, Ground, etcd_ground
from tiered_stores import Site, fill


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    yield ground
    ground.kv.close()


@pytest.fixture
def world(ground: Ground) -> World:
    return World(ground)


def test_a_job_state_is_read_as_it_was_written(world: World) -> None:
    assert read_job_state(world.catalog, TOPIC, "sink/daily") is None
    write_job_state(world.catalog, TOPIC, "sink/daily", b"one", expected=None)
    assert read_job_state(world.catalog, TOPIC, "sink/daily") == b"one"
    write_job_state(world.catalog, TOPIC, "sink/daily", b"two", expected=b"one")
    write_job_state(world.catalog, TOPIC, "sink/daily", b"three", expected=ANYTHING)
    assert read_job_state(world.catalog, TOPIC, "sink/daily") == b"three"
    remove_job_state(world.catalog, TOPIC, "sink/daily")
    remove_job_state(world.catalog, TOPIC, "sink/daily")
    assert find_job_state(world.catalog, TOPIC, "sink/daily") is None


def test_a_job_state_that_somebody_else_changed_is_not_written(world: World) -> None:
    seen = write_job_state(world.catalog, TOPIC, "n", b"one", expected=None)
    with pytest.raises(CommitRefused, match="changed by another process"):
        write_job_state(world.catalog, TOPIC, "n", b"mine", expected=None)
    write_job_state(world.catalog, TOPIC, "n", b"theirs", expected=seen)
    with pytest.raises(CommitRefused):
        write_job_state(world.catalog, TOPIC, "n", b"mine", expected=seen)
    with pytest.raises(CommitRefused):
        write_job_state(world.catalog, TOPIC, "n", b"mine", expected=b"one")
    assert read_job_state(world.catalog, TOPIC, "n") == b"theirs"


def test_a_job_state_that_came_and_went_is_another_one(world: World) -> None:
    seen = write_job_state(world.catalog, TOPIC, "n", b"one", expected=None)
    remove_job_state(world.catalog, TOPIC, "n")
    write_job_state(world.catalog, TOPIC, "n", b"one", expected=None)
    with pytest.raises(CommitRefused):
        write_job_state(world.catalog, TOPIC, "n", b"two", expected=seen)


def test_a_write_whose_answer_was_lost_can_be_asked_for_again(world: World) -> None:
    world.lose_answers()
    with pytest.raises(ServiceUnavailable):
        write_job_state(world.catalog, TOPIC, "n", b"one", expected=None)
    write_job_state(world.catalog, TOPIC, "n", b"one", expected=None)
    assert read_job_state(world.catalog, TOPIC, "n") == b"one"


def test_job_states_are_listed_by_prefix_over_many_pages(world: World) -> None:
    names = [f"sink/{number:04d}" for number in range(CATALOG_PAGE + 5)]
    for name in [*names, "sinks", "verify/a", "sin"]:
        write_job_state(world.catalog, TOPIC, name, name.encode(), expected=None)
    write_job_state(world.catalog, TopicName("default", "orders-2"), "sink/x", b"", expected=None)
    assert [note.name for note in job_states(world.catalog, TOPIC, "sink/")] == names
    assert len(list(job_states(world.catalog, TOPIC))) == len(names) + 3


@pytest.mark.parametrize("name", ["a/b", "größe 注文", "100%", "a//b", "../record", "x" * 256])
def test_any_text_is_a_name_below_the_topics_job_states(world: World, name: str) -> None:
    write_job_state(world.catalog, TOPIC, name, b"value", expected=None)
    assert [note.name for note in job_states(world.catalog, TOPIC, name[:3])] == [name]
    key = world.catalog.keys.job_state(TOPIC, name)
    assert key.startswith(world.catalog.keys.topic(TOPIC) + "notes/")


def test_a_name_or_value_that_is_too_large_is_refused(world: World) -> None:
    for name in ("", "x" * (JOB_STATE_NAME_BYTES_MAX + 1), "\ud800"):
        with pytest.raises(UsageError, match="name of a job state"):
            write_job_state(world.catalog, TOPIC, name, b"", expected=None)
    with pytest.raises(UsageError, match="at most"):
        write_job_state(world.catalog, TOPIC, "n", bytes(JOB_STATE_BYTES_MAX + 1), expected=None)


def test_job_states_make_no_topic_and_hide_none(world: World) -> None:
    write_job_state(world.catalog, TopicName("default", "aaa"), "n", b"", expected=None)
    world.create(TOPIC)
    world.add(0, 9)
    write_job_state(world.catalog, TOPIC, "n", b"", expected=None)
    assert list(world.catalog.topics()) == [TOPIC]
    assert world.chain() == [(0, 9)]
    assert [object_id for object_id, _ in world.catalog.lives(TOPIC)] == ["data-0-9.dnb1"]


def test_keys_of_other_things_are_no_job_states() -> None:
    keys = CatalogKeys("/forebay")
    assert keys.job_state_name(TOPIC, keys.record(TOPIC)) is None
    assert keys.job_state_name(TopicName("default", "o"), keys.job_state(TOPIC, "n")) is None


# ---- what the topics of a store say of themselves ----


def test_a_topic_made_here_has_begun_here_and_stays_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for _ in range(2):
        with site.topic() as topic:
            fill(topic, 20)
            topic.upload()
            assert origin(site.catalog, TOPIC) == ORIGIN_HERE
    write_job_state(site.catalog, TOPIC, "sink/x", b"1", expected=None)
    assert sweep(site.catalog, site.objects, grace_minutes=0, dry_run=False).errors == 0
    assert read_job_state(site.catalog, TOPIC, "sink/x") == b"1"


def test_a_topic_that_was_restored_has_not_begun_here(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.topic() as topic:
        fill(topic, 20)
        topic.upload()
    new = Catalog(SqliteKv(None), clock=site.clock)
    resources = StoreResources(site.settings(), site.clock, catalog=new, store=site.objects)
    try:
        restore_topic(new, site.objects, resources.session, TOPIC, dry_run=False)
    finally:
        resources.close()
    assert str(origin(new, TOPIC)).startswith("restore ")
    with Store(site.settings(), clock=site.clock, catalog=new, store=site.objects) as store:
        store.topic(str(TOPIC)).append(b"more")
    assert str(origin(new, TOPIC)).startswith("restore ")


def test_a_log_that_outlived_its_catalog_has_not_begun_in_the_new_one(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("orders").append(b"one")
    site = Site(tmp_path)
    with site.topic() as topic:
        assert topic.watermarks().synced == 1
    assert origin(site.catalog, TOPIC) is None
