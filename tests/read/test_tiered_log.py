"""One log over both tiers, with damage in the objects that its readers are to skip."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.format.blocks import object_decoder
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import object_key
from forebay.format.pulsar.frames import EntryAssembler
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudReaderSettings
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from support.tiered_stores import TOPIC, Setup, fill, offsets

MESSAGES = 400


@pytest.fixture(params=["dnb1", "pulsar"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    setup = Setup(tmp_path / "data", backend=MemoryBackend())
    setup.uploading(max_object_bytes=20_000)
    setup.uploading(format=request.param)
    return setup


@pytest.fixture
def topic(setup: Setup) -> Iterator[Topic]:
    """Its oldest messages are in objects alone, and its readers are lenient."""
    settings = replace(setup.settings(), cloud_reader=CloudReaderSettings(lenient=True))
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        topic = store.topic(str(TOPIC))
        fill(topic, MESSAGES)
        topic.upload()
        assert topic.trim_local()
        yield topic


def damage(setup: Setup, first: int, count: int) -> None:
    """Overwrites these messages in the object that holds the first one, as far as it goes."""
    (held,) = setup.catalog.get_object_descriptors_range(TOPIC, first, first + 1, 1)
    key = object_key(TOPIC, held.object_id)
    data = bytearray(setup.backend.get_range(key, 0, held.size))
    places = [*places_in(held, data), held.size]
    at = places[first - held.start_offset]
    end = places[min(first - held.start_offset + count, held.count)]
    data[at:end] = b"\xee" * (end - at)
    setup.backend.put_object(key, bytes(data))


def places_in(held: ObjectDescriptor, data: bytearray) -> list[int]:
    """Where the messages of an object begin, which all have one size if they are frames."""
    if not held.is_ledger:
        return list(range(0, held.size, held.size // held.count))
    entries = object_decoder(held, held.start_offset, 0)
    assert isinstance(entries, EntryAssembler)
    return [at for _ in entries.feed(bytes(data)) for at in entries.positions]


def without(first: int, end: int) -> list[int]:
    return [offset for offset in range(MESSAGES) if not first <= offset < end]


@pytest.mark.parametrize(("first", "count"), [(0, 1), (100, 1), (100, 3), (287, 2), (300, 80)])
def test_a_lenient_reader_skips_what_is_damaged_and_nothing_else(
    setup: Setup, topic: Topic, first: int, count: int
) -> None:
    (held,) = setup.catalog.get_object_descriptors_range(TOPIC, first, first + 1, 1)
    damage(setup, first, count)
    expected = without(first, min(first + count, held.next_offset))
    assert offsets(topic.read(0)) == expected
    read = topic.read(0)
    assert [offset for frames in read.frames() for offset in frames.offsets] == expected

    async def streamed() -> list[int]:
        return [message.offset async for message in topic.stream(0, follow=False)]

    assert asyncio.run(streamed()) == expected


def test_a_lenient_reader_goes_over_to_the_log_when_the_rest_of_the_objects_is_damaged(
    setup: Setup, topic: Topic
) -> None:
    local = topic.segments()[0].first_offset
    (held,) = setup.catalog.get_object_descriptors_range(TOPIC, local - 1, local, 1)
    assert held.start_offset < local - 10
    damage(setup, local - 10, MESSAGES)
    assert offsets(topic.read(0)) == without(local - 10, local)
    assert offsets(topic.read(0, end=local - 5)) == list(range(local - 10))


def all_frames(topic: Topic, end: int | None = None) -> list[list[int]]:
    return [list(frames.offsets) for frames in topic.read(0, end=end).frames()]


def test_a_lenient_reader_ends_where_the_last_messages_that_it_wanted_are_damaged(
    setup: Setup, topic: Topic
) -> None:
    local = topic.segments()[0].first_offset
    damage(setup, local - 10, MESSAGES)
    assert offsets(topic.read(0, end=local)) == list(range(local - 10))
    chunks = all_frames(topic, end=local)
    assert [] not in chunks
    assert [offset for chunk in chunks for offset in chunk] == list(range(local - 10))


def test_a_lenient_reader_ends_where_the_log_is_empty_and_the_last_messages_are_damaged(
    setup: Setup, topic: Topic
) -> None:
    topic.upload()
    last = setup.descriptors()[-1]
    damage(setup, last.next_offset - 5, MESSAGES)
    expected = list(range(MESSAGES - 5))
    settings = replace(setup.settings(), data=setup.data / "elsewhere")
    settings = replace(settings, cloud_reader=CloudReaderSettings(lenient=True))
    resources = StoreResources(settings, setup.clock, catalog=setup.catalog, store=setup.objects)
    with closing(resources), StoreView(resources, clock=setup.clock) as view:
        assert offsets(view.topic(str(TOPIC)).reader(0)) == expected


async def test_a_lenient_stream_ends_on_a_topic_whose_log_was_lost(setup: Setup) -> None:
    settings = replace(setup.settings(), cloud_reader=CloudReaderSettings(lenient=True))
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        fill(store.topic(str(TOPIC)), MESSAGES)
        store.topic(str(TOPIC)).upload()
    shutil.rmtree(setup.data / "wal")
    damage(setup, MESSAGES - 5, MESSAGES)
    with Store(settings, clock=setup.clock, catalog=setup.catalog, store=setup.objects) as store:
        topic = store.topic(str(TOPIC))
        expected = list(range(MESSAGES - 5))
        async with asyncio.timeout(60):
            found = [message.offset async for message in topic.stream(0, follow=False)]
        assert found == expected
        assert [offset for chunk in all_frames(topic) for offset in chunk] == expected
