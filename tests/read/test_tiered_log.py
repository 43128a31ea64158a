"""One log over both tiers, with damage in the objects that its readers are to skip."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.format.names import object_key
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudReaderSettings
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from tiered_stores import TOPIC, Site, fill, offsets

MESSAGES = 400


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path / "data", backend=MemoryBackend())
    site.uploading(max_object_bytes=20_000)
    return site


@pytest.fixture
def topic(site: Site) -> Iterator[Topic]:
    """Its oldest messages are in objects alone, and its readers are lenient."""
    settings = replace(site.settings(), cloud_reader=CloudReaderSettings(lenient=True))
    with Store(settings, clock=site.clock, catalog=site.catalog, store=site.objects) as store:
        topic = store.topic(str(TOPIC))
        fill(topic, MESSAGES)
        topic.upload()
        assert topic.trim_local()
        yield topic


def damage(site: Site, first: int, count: int) -> None:
    """Overwrites these messages in the object that holds the first one, as far as it goes."""
    (held,) = site.catalog.get_object_descriptors_range(TOPIC, first, first + 1, 1)
    key = object_key(TOPIC, held.object_id)
    data = bytearray(site.backend.get_range(key, 0, held.size))
    frame = held.size // (held.next_offset - held.start_offset)
    at = (first - held.start_offset) * frame
    size = min(count * frame, held.size - at)
    data[at : at + size] = b"\xee" * size
    site.backend.put_object(key, bytes(data))


def without(first: int, end: int) -> list[int]:
    return [offset for offset in range(MESSAGES) if not first <= offset < end]


@pytest.mark.parametrize(("first", "count"), [(0, 1), (100, 1), (100, 3), (287, 2), (300, 80)])
def test_a_lenient_reader_skips_what_is_damaged_and_nothing_else(
    site: Site, topic: Topic, first: int, count: int
) -> None:
    (held,) = site.catalog.get_object_descriptors_range(TOPIC, first, first + 1, 1)
    damage(site, first, count)
    expected = without(first, min(first + count, held.next_offset))
    assert offsets(topic.read(0)) == expected
    read = topic.read(0)
    assert [offset for frames in read.frames() for offset in frames.offsets] == expected

    async def streamed() -> list[int]:
        return [message.offset async for message in topic.stream(0, follow=False)]

    assert asyncio.run(streamed()) == expected


def test_a_lenient_reader_goes_over_to_the_log_when_the_rest_of_the_objects_is_damaged(
    site: Site, topic: Topic
) -> None:
    local = topic.segments()[0].first_offset
    (held,) = site.catalog.get_object_descriptors_range(TOPIC, local - 1, local, 1)
    assert held.start_offset < local - 10
    damage(site, local - 10, MESSAGES)
    assert offsets(topic.read(0)) == without(local - 10, local)
    assert offsets(topic.read(0, end=local - 5)) == list(range(local - 10))


def all_frames(topic: Topic, end: int | None = None) -> list[list[int]]:
    return [list(frames.offsets) for frames in topic.read(0, end=end).frames()]


def test_a_lenient_reader_ends_where_the_last_messages_that_it_wanted_are_damaged(
    site: Site, topic: Topic
) -> None:
    local = topic.segments()[0].first_offset
    damage(site, local - 10, MESSAGES)
    assert offsets(topic.read(0, end=local)) == list(range(local - 10))
    chunks = all_frames(topic, end=local)
    assert [] not in chunks
    assert [offset for chunk in chunks for offset in chunk] == list(range(local - 10))


def test_a_lenient_reader_ends_where_the_log_is_empty_and_the_last_messages_are_damaged(
    site: Site, topic: Topic
) -> None:
    topic.upload()
    last = site.descriptors()[-1]
    damage(site, last.next_offset - 5, MESSAGES)
    expected = list(range(MESSAGES - 5))
    settings = replace(site.settings(), data=site.data / "elsewhere")
    settings = replace(settings, cloud_reader=CloudReaderSettings(lenient=True))
    resources = StoreResources(settings, site.clock, catalog=site.catalog, store=site.objects)
    with closing(resources), StoreView(resources, clock=site.clock) as view:
        assert offsets(view.topic(str(TOPIC)).reader(0)) == expected


async def test_a_lenient_stream_ends_on_a_topic_whose_log_was_lost(site: Site) -> None:
    settings = replace(site.settings(), cloud_reader=CloudReaderSettings(lenient=True))
    with Store(settings, clock=site.clock, catalog=site.catalog, store=site.objects) as store:
        fill(store.topic(str(TOPIC)), MESSAGES)
        store.topic(str(TOPIC)).upload()
    shutil.rmtree(site.data / "wal")
    damage(site, MESSAGES - 5, MESSAGES)
    with Store(settings, clock=site.clock, catalog=site.catalog, store=site.objects) as store:
        topic = store.topic(str(TOPIC))
        expected = list(range(MESSAGES - 5))
        async with asyncio.timeout(30):
            found = [message.offset async for message in topic.stream(0, follow=False)]
        assert found == expected
        assert [offset for chunk in all_frames(topic) for offset in chunk] == expected
