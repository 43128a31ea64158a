"""One log over both tiers, with damage in the objects that its readers are to skip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.format.names import object_key
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudReaderSettings
from forebay.topic.store import Store, Topic
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
