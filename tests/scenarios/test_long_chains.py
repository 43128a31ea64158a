"""What an operation reads from the catalog does not grow with the number of objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from forebay import Catalog, CloudStore, Store, StoreSettings
from forebay.bench.catalog import MESSAGES, TOPIC, descriptor_of, frames_of, write_chain
from forebay.catalog.sqlite import SqliteKv
from forebay.format.names import object_key
from forebay.objects.memory import MemoryBackend
from forebay.settings import UploaderSettings
from forebay.topic.describe import describe
from forebay.topic.resources import StoreResources
from forebay.topic.view import StoreView, TopicView
from support.counting_kv import CountingKv, Reads

FEW: Final = 300
MANY: Final = 3000
PLANNED: Final = 20


class LongTopic:
    """A topic of many objects, of which only the middle one and the last one exist."""

    def __init__(self, folder: Path, objects: int) -> None:
        self.kv = CountingKv(SqliteKv(None))
        self.catalog = Catalog(self.kv)
        self.store = CloudStore(MemoryBackend())
        self.folder = folder / str(objects)
        self.settings = StoreSettings(data=self.folder, uploader=UploaderSettings(enabled=False))
        self.middle = objects // 2 * MESSAGES
        real = []
        for number in (objects // 2, objects - 1):
            frames = frames_of(number)
            real.append(descriptor_of(number, frames))
            self.store.put_object(object_key(TOPIC, real[-1].object_id), b"".join(frames))
        write_chain(self.catalog, objects, real)
        self._owned(lambda _: None)  # begins the log

    def _owned(self, work: Callable[[Store], None]) -> Reads:
        with Store(self.settings, catalog=self.catalog, store=self.store) as store:
            before = self.kv.reads
            work(store)
            return self.kv.since(before)

    def opening(self) -> Reads:
        return self._owned(lambda store: (store.topic(str(TOPIC)), None)[1])

    def upload(self) -> Reads:
        def work(store: Store) -> None:
            store.topic(str(TOPIC)).append(b"one more", durability="synced")
            assert len(store.topic(str(TOPIC)).upload()) == 1

        return self._owned(work)

    def _viewed(self, work: Callable[[TopicView], None]) -> Reads:
        elsewhere = StoreSettings(data=self.folder / "elsewhere")  # where there is no local log
        resources = StoreResources(elsewhere, catalog=self.catalog, store=self.store)
        with StoreView(resources) as view:
            topic = view.topic(str(TOPIC))
            before = self.kv.reads
            work(topic)
            return self.kv.since(before)

    def read(self) -> Reads:
        def work(topic: TopicView) -> None:
            at = self.middle + 7
            with topic.reader(at, at + 1) as reader:
                assert [each.offset for each in reader] == [at]

        return self._viewed(work)

    def describe(self) -> Reads:
        def work(topic: TopicView) -> None:
            assert len(describe(topic).objects) == 100

        return self._viewed(work)

    def plan(self) -> Reads:
        from forebay.pipeline.source.plan import plan_topic

        def work(topic: TopicView) -> None:
            end = self.middle + PLANNED * MESSAGES
            assert len(plan_topic(topic, self.middle, end)) == PLANNED

        return self._viewed(work)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[LongTopic, LongTopic]:
    folder = tmp_path_factory.mktemp("chains")
    return LongTopic(folder, FEW), LongTopic(folder, MANY)


@pytest.mark.parametrize("operation", ["opening", "upload", "read", "describe", "plan"])
def test_ten_times_as_many_objects_take_as_many_reads(
    both: tuple[LongTopic, LongTopic], operation: str
) -> None:
    few, many = (getattr(topic, operation)() for topic in both)
    assert few.requests == many.requests
    assert few.entries == many.entries
    assert many.bytes <= 1.2 * few.bytes
    assert many.walked <= 1.2 * few.walked + 10
