"""The state that jobs keep of a topic, on every catalog, and what it must not disturb."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
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
from forebay.upload.restore import RestoreChoices, restore_topic
from forebay.upload.sweep import sweep
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend
from support.tiered_stores import Setup as TieredSetup
from support.tiered_stores import fill


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    return Setup(backend)


def test_a_job_state_is_read_as_it_was_written(setup: Setup) -> None:
    assert read_job_state(setup.catalog, TOPIC, "sink/daily") is None
    write_job_state(setup.catalog, TOPIC, "sink/daily", b"one", expected=None)
    assert read_job_state(setup.catalog, TOPIC, "sink/daily") == b"one"
    write_job_state(setup.catalog, TOPIC, "sink/daily", b"two", expected=b"one")
    write_job_state(setup.catalog, TOPIC, "sink/daily", b"three", expected=ANYTHING)
    assert read_job_state(setup.catalog, TOPIC, "sink/daily") == b"three"
    remove_job_state(setup.catalog, TOPIC, "sink/daily")
    remove_job_state(setup.catalog, TOPIC, "sink/daily")
    assert find_job_state(setup.catalog, TOPIC, "sink/daily") is None


def test_a_job_state_that_somebody_else_changed_is_not_written(setup: Setup) -> None:
    seen = write_job_state(setup.catalog, TOPIC, "n", b"one", expected=None)
    with pytest.raises(CommitRefused, match="changed by another process"):
        write_job_state(setup.catalog, TOPIC, "n", b"mine", expected=None)
    write_job_state(setup.catalog, TOPIC, "n", b"theirs", expected=seen)
    with pytest.raises(CommitRefused):
        write_job_state(setup.catalog, TOPIC, "n", b"mine", expected=seen)
    with pytest.raises(CommitRefused):
        write_job_state(setup.catalog, TOPIC, "n", b"mine", expected=b"one")
    assert read_job_state(setup.catalog, TOPIC, "n") == b"theirs"


def test_a_job_state_that_came_and_went_is_another_one(setup: Setup) -> None:
    seen = write_job_state(setup.catalog, TOPIC, "n", b"one", expected=None)
    remove_job_state(setup.catalog, TOPIC, "n")
    write_job_state(setup.catalog, TOPIC, "n", b"one", expected=None)
    with pytest.raises(CommitRefused):
        write_job_state(setup.catalog, TOPIC, "n", b"two", expected=seen)


def test_a_write_whose_answer_was_lost_can_be_asked_for_again(setup: Setup) -> None:
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        write_job_state(setup.catalog, TOPIC, "n", b"one", expected=None)
    write_job_state(setup.catalog, TOPIC, "n", b"one", expected=None)
    assert read_job_state(setup.catalog, TOPIC, "n") == b"one"


def test_job_states_are_listed_by_prefix_over_many_pages(setup: Setup) -> None:
    names = [f"sink/{number:04d}" for number in range(CATALOG_PAGE + 5)]
    for name in [*names, "sinks", "verify/a", "sin"]:
        write_job_state(setup.catalog, TOPIC, name, name.encode(), expected=None)
    write_job_state(setup.catalog, TopicName("default", "orders-2"), "sink/x", b"", expected=None)
    assert [note.name for note in job_states(setup.catalog, TOPIC, "sink/")] == names
    assert len(list(job_states(setup.catalog, TOPIC))) == len(names) + 3


@pytest.mark.parametrize("name", ["a/b", "größe 注文", "100%", "a//b", "../record", "x" * 256])
def test_any_text_is_a_name_below_the_topics_job_states(setup: Setup, name: str) -> None:
    write_job_state(setup.catalog, TOPIC, name, b"value", expected=None)
    assert [note.name for note in job_states(setup.catalog, TOPIC, name[:3])] == [name]
    key = setup.catalog.keys.job_state(TOPIC, name)
    assert key.startswith(setup.catalog.keys.topic(TOPIC) + "notes/")


def test_a_name_or_value_that_is_too_large_is_refused(setup: Setup) -> None:
    for name in ("", "x" * (JOB_STATE_NAME_BYTES_MAX + 1), "\ud800"):
        with pytest.raises(UsageError, match="name of a job state"):
            write_job_state(setup.catalog, TOPIC, name, b"", expected=None)
    with pytest.raises(UsageError, match="at most"):
        write_job_state(setup.catalog, TOPIC, "n", bytes(JOB_STATE_BYTES_MAX + 1), expected=None)


def test_job_states_make_no_topic_and_hide_none(setup: Setup) -> None:
    write_job_state(setup.catalog, TopicName("default", "aaa"), "n", b"", expected=None)
    setup.create(TOPIC)
    setup.add(0, 9)
    write_job_state(setup.catalog, TOPIC, "n", b"", expected=None)
    assert list(setup.catalog.topics()) == [TOPIC]
    assert setup.chain() == [(0, 9)]
    assert [object_id for object_id, _ in setup.catalog.lives(TOPIC)] == ["data-0-9.dnb1"]


def test_keys_of_other_things_are_no_job_states() -> None:
    keys = CatalogKeys("/forebay")
    assert keys.job_state_name(TOPIC, keys.record(TOPIC)) is None
    assert keys.job_state_name(TopicName("default", "o"), keys.job_state(TOPIC, "n")) is None


# ---- what the topics of a store say of themselves ----


def test_a_topic_made_here_has_begun_here_and_stays_so(tmp_path: Path) -> None:
    tiered = TieredSetup(tmp_path)
    for _ in range(2):
        with tiered.topic() as topic:
            fill(topic, 20)
            topic.upload()
            assert origin(tiered.catalog, TOPIC) == ORIGIN_HERE
    write_job_state(tiered.catalog, TOPIC, "sink/x", b"1", expected=None)
    assert sweep(tiered.catalog, tiered.objects, grace_minutes=0, dry_run=False).errors == 0
    assert read_job_state(tiered.catalog, TOPIC, "sink/x") == b"1"


def test_a_topic_that_was_restored_has_not_begun_here(tmp_path: Path) -> None:
    tiered = TieredSetup(tmp_path)
    with tiered.topic() as topic:
        fill(topic, 20)
        topic.upload()
    new = Catalog(SqliteKv(None), clock=tiered.clock)
    resources = StoreResources(tiered.settings(), tiered.clock, catalog=new, store=tiered.objects)
    try:
        restore_topic(new, tiered.objects, resources.session, TOPIC, RestoreChoices())
    finally:
        resources.close()
    assert str(origin(new, TOPIC)).startswith("restore ")
    with Store(tiered.settings(), clock=tiered.clock, catalog=new, store=tiered.objects) as store:
        store.topic(str(TOPIC)).append(b"more")
    assert str(origin(new, TOPIC)).startswith("restore ")


def test_a_log_that_outlived_its_catalog_has_not_begun_in_the_new_one(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("orders").append(b"one")
    tiered = TieredSetup(tmp_path)
    with tiered.topic() as topic:
        assert topic.watermarks().synced == 1
    assert origin(tiered.catalog, TOPIC) is None
