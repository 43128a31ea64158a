"""A store whose clock jumps, or shows a time before 1970."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import pytest

from forebay.logs import fields_of
from forebay.metrics import render
from forebay.settings import DeleterSettings, RemoteRetentionSettings
from forebay.testing import ManualClock
from forebay.topic.describe import describe, explain
from forebay.upload.sweep import sweep
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup, fill, offsets

TEN_YEARS: Final = 10 * 365 * 86_400.0
BEFORE_1970: Final = -365 * 86_400_000


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "data")


@pytest.mark.parametrize("rolling", [False, True], ids=["whole", "rolling"])
async def test_a_store_works_with_a_clock_before_1970(tmp_path: Path, rolling: bool) -> None:
    """Every message is published in 1970, and nothing raises an error of Python's."""
    setup = Setup(tmp_path, clock=ManualClock(now_ms=BEFORE_1970))
    setup.uploading(rolling=rolling)
    setup.remote = RemoteRetentionSettings(time_minutes=1)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        topic.append(b"%010d" % 100)
        await topic.append_async(b"%010d" % 101)
        await topic.append_many_async([b"%010d" % 102])
        topic.rotate()
        fill(topic, 7)
        assert len(topic.upload()) == 1
        storage_of(topic).trim_due()
        storage_of(topic).upload_due()
        with store.view() as view:
            assert describe(view.topic(str(TOPIC))).objects
            assert explain(view.topic(str(TOPIC)), 0).uploaded
        assert "forebay_topic_offset" in render()
        assert {message.publish_time for message in topic.read(0)} == {0}
    sweep(setup.catalog, setup.objects, grace_minutes=0, dry_run=False, clock=setup.clock)
    with setup.topic() as topic:
        assert offsets(topic.read(0)) == list(range(110))
    (descriptor,) = setup.descriptors()
    assert descriptor.created_at == 0


def test_a_rolling_object_ends_in_time_although_the_clock_jumped(setup: Setup) -> None:
    setup.uploading(rolling=True, max_open_seconds=1000, max_idle_seconds=60)
    with setup.topic() as topic:
        fill(topic, 10)
        storage_of(topic).upload_due()
        setup.clock.jump(TEN_YEARS)
        fill(topic, 10)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 0, "no time has passed"
        setup.clock.jump(-TEN_YEARS)
        setup.clock.advance(61)
        storage_of(topic).upload_due()
        assert topic.watermarks().uploaded == 20


def test_objects_and_segments_of_the_future_are_deleted_after_the_lag(setup: Setup) -> None:
    """They were written while the clock was wrong; the local disk must not fill for ten years."""
    setup.deleter = DeleterSettings(
        retention_size_mb=None, retention_time_minutes=30, deletion_lag_minutes=60
    )
    setup.clock.jump(TEN_YEARS)
    with setup.topic() as topic:
        fill(topic, 300)
        topic.upload()
        setup.clock.jump(-TEN_YEARS)
        assert topic.trim_local() == []
        setup.clock.advance(59 * 60)
        assert topic.trim_local() == []
        setup.clock.advance(60)
        assert topic.trim_local()
        assert offsets(topic.read(0)) == list(range(300))


def test_after_a_jump_of_the_clock_no_object_is_deleted_by_its_age_for_a_day(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    setup.remote = RemoteRetentionSettings(time_minutes=60)
    with setup.store() as store:
        topics = [store.topic(name) for name in (str(TOPIC), "/default/others")]
        for topic in topics:
            fill(topic, 100)
            topic.upload()
            fill(topic, 100)
            topic.upload()
        setup.clock.jump(TEN_YEARS)
        with caplog.at_level(logging.WARNING, "forebay"):
            assert [storage_of(topic).trim_remote() for topic in topics] == [[], []]
        (line,) = [fields_of(record) for record in caplog.records]
        assert line[0].startswith("the clock jumped")
        assert line[1] == {"jump_seconds": round(TEN_YEARS)}
        setup.clock.jump(-TEN_YEARS)
        assert storage_of(topics[0]).trim_remote() == []
        setup.clock.advance(86_400)
        assert len(storage_of(topics[0]).trim_remote()) == 1, "it is older than an hour by now"


def test_the_seconds_that_a_message_waits_for_its_upload_do_not_jump(setup: Setup) -> None:
    with setup.topic() as topic:
        fill(topic, 10)
        setup.clock.advance(5)
        assert waited() == 5.0
        setup.clock.jump(-TEN_YEARS)
        setup.clock.advance(5)
        assert waited() == 10.0


def waited() -> float:
    (line,) = [
        line
        for line in render().splitlines()
        if line.startswith("forebay_topic_upload_lag_seconds{") and str(TOPIC) in line
    ]
    return float(line.split()[-1])
