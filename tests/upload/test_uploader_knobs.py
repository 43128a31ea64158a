"""Settings that bound or describe objects: caps, batches, indexes, metadata, log lines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.format.names import object_key
from forebay.limits import GIB, MIB, OBJECT_BYTES_MAX, OBJECT_PARTS_MAX
from forebay.logs import fields_of
from forebay.objects.memory import MemoryBackend
from forebay.settings import UploaderSettings
from forebay.topic.store import Store, Topic
from forebay.upload import metrics
from support.disks import wait_until
from support.storages import storage_of
from support.tiered_stores import TOPIC, Setup, fill

DAY: Final = 24 * 3600.0


@pytest.fixture(params=[False, True], ids=["ahead", "rolling"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data")
    setup.uploading(rolling=request.param)
    return setup


def cycle(topic: Topic) -> bool:
    return storage_of(topic).upload_due()


def events(caplog: pytest.LogCaptureFixture, text: str) -> list[dict[str, Any]]:
    """The fields of the lines with this text."""
    found = [fields_of(record) for record in caplog.records]
    return [fields for said, fields in found if said == text]


# ---- no cap but the store's own ----


@pytest.mark.parametrize(
    ("given", "chunk", "most"),
    [
        (None, 8 * MIB, OBJECT_PARTS_MAX * 8 * MIB),
        (1 * GIB, 8 * MIB, 1 * GIB),
        (1024 * GIB, 8 * MIB, OBJECT_PARTS_MAX * 8 * MIB),
        (None, 1 * GIB, OBJECT_BYTES_MAX),
    ],
)
def test_no_object_has_more_parts_or_bytes_than_a_store_takes(
    given: int | None, chunk: int, most: int
) -> None:
    settings = UploaderSettings(max_object_bytes=given, stream_chunk_size=chunk)
    assert settings.object_bytes_max == most


def test_without_a_cap_a_cycle_makes_one_object_of_everything(setup: Setup) -> None:
    setup.uploading(max_object_bytes=None, max_open_seconds=0)
    with setup.topic() as topic:
        fill(topic, 500)
        cycle(topic)
        cycle(topic)
    assert setup.ranges() == [(0, 500)]


def test_without_a_time_limit_messages_wait_until_an_object_is_full(setup: Setup) -> None:
    setup.uploading(max_open_seconds=None, max_object_messages=100)
    with setup.topic() as topic:
        fill(topic, 90)
        setup.clock.advance(30 * DAY)
        cycle(topic)
        assert topic.watermarks().uploaded == 0
        fill(topic, 20)
        cycle(topic)
        assert topic.watermarks().uploaded == 100
        topic.upload()
        assert topic.watermarks().uploaded == 110


# ---- batches ----


def test_a_cycle_uploads_a_batch_and_says_that_there_is_more(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(max_object_bytes=3000, max_batch_bytes=7000)
    with setup.topic() as topic:
        fill(topic, 100)
        assert cycle(topic)
        first = setup.descriptors()
        assert len(first) == 2
        assert sum(each.size for each in first) <= 7000
        while cycle(topic):
            pass
        assert sum(each.size for each in setup.descriptors()) > 14_000
        assert not cycle(topic)


def test_a_batch_bounds_an_object_too_and_a_large_message_still_goes(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(max_batch_bytes=2000, max_open_seconds=0)
    with setup.topic() as topic:
        topic.append(b"x" * 9000, durability="synced")
        fill_after(topic, 40)
        while cycle(topic):
            pass
        assert topic.watermarks().uploaded == 41
    sizes = [each.size for each in setup.descriptors()]
    assert sizes[0] > 9000
    assert all(size <= 2000 for size in sizes[1:])


def fill_after(topic: Topic, count: int) -> None:
    topic.append_many([b"y" * 100] * count, durability="synced")


def test_a_rolling_object_grows_by_a_batch_in_each_cycle(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True, max_batch_bytes=2000, max_open_seconds=60)
    with setup.topic() as topic:
        fill(topic, 50)
        turns = 1
        while cycle(topic):
            turns += 1
        assert turns > 3
        assert setup.ranges() == [], "it is open"
        setup.clock.advance(60)
        cycle(topic)
    assert setup.ranges() == [(0, 50)]


def test_what_a_batch_left_is_uploaded_without_waiting_for_the_interval(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(enabled=True, interval_seconds=DAY, max_object_bytes=2000, max_batch_bytes=2000)
    before = metrics.cycles.value("done")
    with Store(
        setup.settings(), clock=setup.clock, catalog=setup.catalog, store=setup.objects
    ) as store:
        topic = store.topic(str(TOPIC))
        wait_until(lambda: metrics.cycles.value("idle") > 0)
        setup.clock.subscribe(store._factory._background_pool.recheck)
        fill(topic, 100)
        setup.clock.advance(DAY + 1)
        wait_until(lambda: topic.watermarks().uploaded >= 90)
    assert metrics.cycles.value("done") >= before + 5


# ---- the index ----


def test_the_index_has_the_intervals_of_the_settings(setup: Setup) -> None:
    setup.uploading(index_every_messages=100)
    with setup.topic() as topic:
        fill(topic, 350)
        [by_count] = topic.upload()
        fill(topic, 300)
    setup.uploading(index_every_messages=10**6, index_every_bytes=10_000)
    with setup.topic() as topic:
        [by_size] = topic.upload()
    assert [offset for offset, _ in by_count.offset_index or ()] == [0, 100, 200, 300]
    positions = [position for _, position in by_size.offset_index or ()]
    assert len(positions) == 1 + by_size.size // 10_100
    key = object_key(TOPIC, by_size.object_id)
    data = bytes(setup.objects.get_object(key, 10**6))
    for offset, position in by_size.offset_index or ():
        assert int.from_bytes(data[position : position + 8], "little") == offset


# ---- metadata of objects ----


def test_an_object_tells_its_topic_format_and_range(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    with setup.topic("/default/größe") as topic:
        fill(topic, 10)
        topic.upload()
    [key] = [key for key in setup.listed() if key.endswith(".dnb1")]
    assert dict(setup.objects.head(key).metadata) == {
        "topic": "/default/gr%C3%B6%C3%9Fe",
        "format": "dnb1",
        "start_offset": "0",
        "end_offset": "9",
        "messages": "10",
    }


def test_a_rolling_object_tells_what_is_known_when_it_is_opened(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True)
    with setup.topic() as topic:
        fill(topic, 10)
        topic.upload()
    [key] = [key for key in setup.listed() if key.endswith(".dnb1")]
    assert dict(setup.objects.head(key).metadata) == {
        "topic": "/default/orders",
        "format": "dnb1",
        "start_offset": "0",
    }


# ---- log lines ----


def test_the_start_of_an_object_is_logged_with_its_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(tmp_path)
    with setup.topic() as topic, caplog.at_level(logging.INFO, "forebay.upload"):
        fill(topic, 100)
        segments = len(topic.segments())
        [done] = topic.upload()
    assert events(caplog, "object started") == [
        {
            "topic": TOPIC,
            "object": done.object_id,
            "start": 0,
            "end": 99,
            "bytes": done.size,
            "segments": segments,
            "closed_by": "forced",
        }
    ]
    [committed] = events(caplog, "object committed")
    assert committed.pop("seconds") >= 0
    assert committed == {
        "topic": TOPIC,
        "object": done.object_id,
        "bytes": done.size,
        "raw_bytes": done.size,
        "messages": 100,
        "chunks": segments,
        "closed_by": "forced",
    }


def test_a_rolling_object_logs_its_start_when_it_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(tmp_path)
    setup.uploading(rolling=True, max_object_bytes=10**6)
    with setup.topic() as topic, caplog.at_level(logging.INFO, "forebay.upload"):
        fill(topic, 20)
        cycle(topic)
        [started] = events(caplog, "object started")
        assert started.pop("object").startswith("data-0-pending-")
        assert started == {"topic": TOPIC, "start": 0, "bytes_max": 10**6}
        assert events(caplog, "object committed") == []


@pytest.mark.parametrize(
    ("changes", "wait", "closed_by"),
    [
        ({"max_object_bytes": 3000}, 0, "bytes"),
        ({"max_object_messages": 10}, 0, "messages"),
        ({"max_open_seconds": 60}, 61, "age"),
    ],
)
def test_a_commit_says_which_threshold_closed_the_object(
    setup: Setup,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    wait: float,
    closed_by: str,
) -> None:
    setup.uploading(**changes)
    with setup.topic() as topic, caplog.at_level(logging.INFO, "forebay.upload"):
        fill(topic, 30)
        cycle(topic)
        setup.clock.advance(wait)
        cycle(topic)
        assert {each["closed_by"] for each in events(caplog, "object committed")} == {closed_by}


def test_an_idle_rolling_object_and_a_batch_say_so_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(tmp_path, backend=MemoryBackend())
    setup.uploading(rolling=True, max_idle_seconds=5)
    with setup.topic() as topic, caplog.at_level(logging.INFO, "forebay.upload"):
        fill(topic, 30)
        cycle(topic)
        setup.clock.advance(5)
        cycle(topic)
    setup.uploading(rolling=False, max_batch_bytes=2000)
    with setup.topic() as topic, caplog.at_level(logging.INFO, "forebay.upload"):
        fill(topic, 30)
        cycle(topic)
    assert [each["closed_by"] for each in events(caplog, "object committed")] == ["idle", "batch"]
