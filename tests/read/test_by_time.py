"""Reading from a time on: the lowest offset that was published then or later, in any tier."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.format.message import MessageId, StreamMessage
from forebay.read.by_time import milliseconds
from forebay.settings import StoreSettings, UploaderSettings, WalSettings
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic, open_store
from forebay.topic.view import StoreView

BASE: Final = 1_700_000_000_000


def at(time_ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)


def append(topic: Topic, *times: int) -> None:
    """Appends a message for each publish time, which is after BASE."""
    for time in times:
        message = StreamMessage(
            request_id=0,
            msg_id=MessageId(0, topic.name, "", 0),
            payload=b"at %d" % time,
            publish_time=BASE + time,
            producer_name="",
        )
        topic._storage.append_message(message)
    topic.flush()


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(
        data=tmp_path / "data",
        wal=WalSettings(cache_capacity=3),
        uploader=UploaderSettings(enabled=False),
    )


@pytest.fixture
def store(settings: StoreSettings) -> Iterator[Store]:
    with open_store(settings) as store:
        yield store


def spread(topic: Topic, chunks: list[list[int]]) -> None:
    """Messages in objects, in a sealed segment, and in the active one."""
    third = max(len(chunks) // 3, 1)
    for chunk in chunks[:third]:
        append(topic, *chunk)
        topic.upload()
    topic.rotate()
    for chunk in chunks[third : 2 * third]:
        append(topic, *chunk)
        topic.rotate()
    for chunk in chunks[2 * third :]:
        append(topic, *chunk)


def first_at(times: list[int], time: int) -> int:
    return next((offset for offset, each in enumerate(times) if each >= time), len(times))


@pytest.mark.parametrize("seed", range(4))
def test_a_time_leads_to_the_lowest_offset_in_every_tier(
    store: Store, settings: StoreSettings, seed: int
) -> None:
    rng = random.Random(seed)
    topic = store.topic("orders")
    chunks = [
        [max(100 * part + rng.randrange(-80, 250), 0) for _ in range(rng.randrange(1, 9))]
        for part in range(9)
    ]
    spread(topic, chunks)
    times = [time for chunk in chunks for time in chunk]
    with StoreView(settings) as views:
        view = views.topic("orders")
        for time in (0, 1, *rng.sample(range(1200), 20), 5000):
            wanted = first_at(times, time)
            assert topic.offset_at(at(BASE + time)) == wanted, time
            assert view.offset_at_time(BASE + time) == wanted
            read = [each.offset for each in topic.read(at(BASE + time))]
            assert read == list(range(wanted, len(times)))


def test_objects_alone_are_searched_where_there_is_no_local_log(
    store: Store, settings: StoreSettings, tmp_path: Path
) -> None:
    topic = store.topic("orders")
    times = [5, 50, 20, 40, 90, 60, 91, 10]
    for time in times:
        append(topic, time, time - 1)
        topic.upload()
    flat = [each for time in times for each in (time, time - 1)]
    elsewhere = StoreSettings(
        data=tmp_path / "elsewhere", cloud=settings.cloud, metadata=settings.metadata
    )
    resources = store._factory.resources
    assert resources is not None
    with StoreView(
        StoreResources(elsewhere, catalog=resources.catalog, store=resources.store)
    ) as views:
        view = views.topic("orders")
        assert not view.has_local_log
        for time in range(95):
            assert view.offset_at_time(BASE + time) == first_at(flat, time)


def test_a_time_after_the_last_message_means_the_end(store: Store) -> None:
    topic = store.topic("orders")
    append(topic, 1, 2, 3)
    assert list(topic.read(at(BASE + 4))) == []
    assert topic.offset_at(at(BASE + 4)) == 3
    reader = topic.read(at(BASE + 4), follow=True)
    append(topic, 0)
    assert next(reader).offset == 3
    reader.close()


def test_a_reader_from_a_time_stops_before_its_end(store: Store) -> None:
    topic = store.topic("orders")
    append(topic, 1, 2, 3, 4)
    assert [each.offset for each in topic.read(at(BASE + 2), end=3)] == [1, 2]
    assert [each.offset for each in topic.read(at(BASE + 4), end=2)] == []


def test_a_stream_from_a_time_begins_at_the_same_message(store: Store) -> None:
    topic = store.topic("orders")
    append(topic, 1, 20)
    topic.upload()
    append(topic, 5, 30)

    async def read() -> list[int]:
        found = []
        async with topic.stream(at(BASE + 21), follow=False) as stream:
            async for message in stream:
                found.append(message.offset)
        return found

    assert asyncio.run(read()) == [3]


def test_a_topic_in_memory_is_read_from_a_time_too() -> None:
    with open_store(None) as store:
        topic = store.topic("orders")
        append(topic, 1, 9, 3)
        assert [each.offset for each in topic.read(at(BASE + 2))] == [1, 2]


def test_a_time_without_a_zone_is_refused_and_any_zone_is_taken(store: Store) -> None:
    topic = store.topic("orders")
    append(topic, 0, 1000)
    with pytest.raises(UsageError, match="no time zone"):
        topic.read(datetime(2026, 1, 1))  # noqa: DTZ001
    east = at(BASE + 1).astimezone(timezone(timedelta(hours=9)))
    assert topic.offset_at(east) == 1
    assert topic.offset_at(at(BASE) + timedelta(microseconds=1)) == 1, "times are rounded up"


@given(st.integers(0, 4 * 10**12))
def test_a_time_of_whole_milliseconds_is_not_rounded(time_ms: int) -> None:
    assert (
        milliseconds(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)) == time_ms
    )


def test_what_a_crash_left_in_the_newest_segment_is_searched_by_its_times(
    settings: StoreSettings,
) -> None:
    with open_store(settings) as store:
        append(store.topic("orders"), 5, 500, 7)
    with open_store(settings) as store:
        topic = store.topic("orders")
        (segment,) = topic.segments()
        assert segment.index is not None
        assert segment.index.highest_publish_time == BASE + 500
        assert topic.offset_at(at(BASE + 6)) == 1


def test_lost_offsets_are_passed_over_by_a_search(store: Store, settings: StoreSettings) -> None:
    topic = store.topic("orders")
    append(topic, 1, 2)
    topic.upload()
    append(topic, 3)
    store.close()
    shutil.rmtree(Path(str(settings.data)) / "wal")
    with open_store(settings) as again:
        topic = again.topic("orders")
        append(topic, 3, 4)
        start = topic.watermarks().synced - 2
        assert start > 2, "offsets were lost with the log"
        assert topic.offset_at(at(BASE + 3)) == start
