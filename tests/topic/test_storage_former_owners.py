"""Stores that no longer own a topic and have not noticed yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.catalog.records import TopicRecord
from forebay.errors import LogClosed, TopicFenced
from forebay.settings import WalSettings
from support.tiered_stores import TOPIC, Setup, fill, lease_of, offsets


@pytest.fixture(params=["dnb1", "pulsar"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data", wal=WalSettings(rotate_max_bytes=4096, cache_capacity=1))
    setup.uploading(format=request.param)
    return setup


def record_of(setup: Setup) -> TopicRecord:
    record = setup.catalog.record(TOPIC)
    assert record is not None
    return record


def test_an_owner_that_was_fenced_deletes_nothing(setup: Setup, tmp_path: Path) -> None:
    """The new owner records what was never uploaded as lost, but this one still has it."""
    elsewhere = replace(setup, data=tmp_path / "elsewhere")
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 300)
        setup.kv.revoke(lease_of(store))
        with elsewhere.topic() as other:
            other.append(b"goes on", durability="synced")
            assert record_of(setup).verified >= 300
            with pytest.raises(TopicFenced):
                topic.trim_local()
        assert topic.segments()[0].first_offset == 0
        assert all(segment.path.exists() for segment in topic.segments())
        with pytest.raises(TopicFenced):
            topic.append(b"too late", durability="synced")


def test_an_owner_that_was_fenced_does_not_take_what_is_lost_for_uploaded(
    setup: Setup, tmp_path: Path
) -> None:
    elsewhere = replace(setup, data=tmp_path / "elsewhere")
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 50)
        setup.kv.revoke(lease_of(store))
        with elsewhere.topic() as other:
            assert record_of(setup).lost_range(49)
            with pytest.raises(TopicFenced):
                topic.wait(49, durability="uploaded")
            assert topic.watermarks().uploaded == 0
            other.append(b"goes on", durability="uploaded")


def test_a_reader_of_a_closed_topic_raises_no_false_alarm(setup: Setup) -> None:
    """Its segments were deleted by the next owner of the directory: nothing is missing."""
    with setup.topic() as topic:
        fill(topic, 300)
        reader = topic.read(0, end=300)
        assert offsets(next(reader) for _ in range(5)) == list(range(5))
    with setup.topic() as again:
        again.upload()
        assert again.trim_local()
        with pytest.raises(LogClosed):
            list(reader)
        assert offsets(again.read(5)) == list(range(5, 300))
