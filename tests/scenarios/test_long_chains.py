"""What an operation reads from the catalog does not grow with the number of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from forebay import Catalog, CloudStore, Store, StoreSettings
from forebay.bench.catalog import MESSAGES, TOPIC, descriptor_of, frames_of, write_chain
from forebay.catalog.records import TopicRecord
from forebay.catalog.sqlite import SqliteKv
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import encode_frame
from forebay.format.layout import Buffer
from forebay.format.message import StreamMessage, encode_message
from forebay.format.names import object_key
from forebay.objects.backend import ObjectMeta
from forebay.objects.memory import MemoryBackend
from forebay.settings import UploaderSettings
from forebay.topic.describe import describe
from forebay.topic.resources import StoreResources
from forebay.topic.view import StoreView, TopicView
from support import counting_kv
from support.counting_kv import CountingKv, Reads
from support.kv_stores import requested_backend

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


# ---- by time ----

BEGAN: Final = 1_700_000_000_000
MINUTE: Final = 60_000
WANTED: Final = 7
"""The message of an object that a test looks for: the first one of its minute."""


class CountingBackend(MemoryBackend):
    """Counts the requests that read."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        self.requests += 1
        return super().get_range(key, start, end, etag=etag)

    def head(self, key: str) -> ObjectMeta:
        self.requests += 1
        return super().head(key)


class TimedTopic:
    """A topic of many objects, each with the messages of one minute. Only one of them exists."""

    def __init__(self, folder: Path, kv: CountingKv, prefix: str) -> None:
        objects = 10_000
        self.folder = folder
        self.kv = kv
        self.catalog = Catalog(kv, prefix)
        self.backend = CountingBackend()
        self.store = CloudStore(self.backend)
        self.number = objects * 2 // 3
        frames = b"".join(self._frame(self.number, at) for at in range(MESSAGES))
        made = [self._object(number, len(frames)) for number in range(objects)]
        self.store.put_object(object_key(TOPIC, made[self.number].object_id), frames)
        tail = objects * MESSAGES
        record = TopicRecord(epoch=1, tail=tail, verified=tail, reserved=tail)
        counting_kv.write_chain(kv, prefix, TOPIC, made, record)

    def _frame(self, number: int, at: int) -> bytes:
        offset = number * MESSAGES + at
        # The first messages of an object were published a minute late: times do not ascend.
        time = BEGAN + MINUTE * (number - (at < WANTED)) + at
        message = StreamMessage(b"payload", publish_time=time)
        return encode_frame(offset, encode_message(message, offset))

    def _object(self, number: int, size: int) -> ObjectDescriptor:
        start = number * MESSAGES
        highest = BEGAN + MINUTE * number + MESSAGES - 1
        name = f"data-{start}-{start + MESSAGES - 1}.dnb1"
        return ObjectDescriptor(
            name,
            start,
            start + MESSAGES - 1,
            size,
            None,
            BEGAN // 1000,
            highest_publish_time=highest,
        )

    @property
    def wanted(self) -> int:
        return self.number * MESSAGES + WANTED

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(0, UTC) + timedelta(
            milliseconds=BEGAN + MINUTE * self.number - MINUTE // 2
        )

    def requests(self) -> int:
        return self.kv.reads.requests + self.backend.requests


@pytest.fixture(params=["sqlite", "etcd"])
def timed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TimedTopic]:
    backend = requested_backend(request, tmp_path)
    yield TimedTopic(tmp_path, CountingKv(backend.kv), backend.prefix)
    backend.kv.close()


def test_reading_by_time_takes_at_most_five_requests_before_the_first_message(
    timed: TimedTopic,
) -> None:
    elsewhere = StoreSettings(data=timed.folder / "elsewhere")
    resources = StoreResources(elsewhere, catalog=timed.catalog, store=timed.store)
    with StoreView(resources) as view:
        before = timed.requests()
        topic = view.topic(str(TOPIC))
        with topic.reader_at_time(int(timed.time.timestamp() * 1000)) as reader:
            assert next(reader).offset == timed.wanted
        assert timed.requests() - before <= 5


def test_the_owner_reads_by_time_with_at_most_five_requests(timed: TimedTopic) -> None:
    settings = StoreSettings(
        data=timed.folder / "data", uploader=replace(UploaderSettings(), enabled=False)
    )
    with Store(settings, catalog=timed.catalog, store=timed.store) as store:
        topic = store.topic(str(TOPIC))
        before = timed.requests()
        reader = topic.read(timed.time)
        assert next(reader).offset == timed.wanted
        assert timed.requests() - before <= 5
        reader.close()
