"""Compactions of a topic that is in use: its owner appends, uploads and trims, readers read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from forebay.format.names import TopicName
from forebay.pipeline.jobs.compact import compact
from forebay.settings import (
    DeleterSettings,
    MetadataSettings,
    RemoteRetentionSettings,
    StoreSettings,
    UploaderSettings,
)
from forebay.topic.resources import StoreResources
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from forebay.upload.sweep import sweep
from support.compactions import RunsHere, here

TOPIC: Final = TopicName("default", "orders")
UPLOADS: Final = 40
TARGET: Final = 4000


@pytest.fixture(params=["sqlite", "etcd"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSettings:
    metadata = MetadataSettings()
    if request.param == "etcd":
        endpoint = request.getfixturevalue("etcd").endpoint
        metadata = MetadataSettings("etcd", endpoints=[endpoint], prefix=f"/live-{time.time_ns()}")
    return StoreSettings(
        data=tmp_path / "data",
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
        metadata=metadata,
    )


class Others:
    """Threads that do one thing again and again, until the block ends."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        self.failures: list[BaseException] = []

    def _run(self, work: Callable[[], object]) -> None:
        try:
            while not self._stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block
            self.failures.append(error)

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


class Watching:
    """Somebody else's look at the same store."""

    def __init__(self, settings: StoreSettings) -> None:
        from forebay.clock import SYSTEM_CLOCK

        self._settings = settings
        self.resources = StoreResources(settings, SYSTEM_CLOCK)
        self.compacted = 0
        self.refused = 0

    def compact(self) -> None:
        report = compact(self._settings, target_bytes=TARGET, executor=RunsHere(here))
        self.compacted += report.objects
        self.refused += report.refused
        assert report.ok, report.rows

    def sweep(self) -> None:
        catalog, store = self.resources.catalog, self.resources.store
        report = sweep(catalog, store, [TOPIC], grace_minutes=0, dry_run=False)
        assert report.errors == 0, report.items

    def read(self) -> None:
        with StoreView(self._settings) as view:
            topic = view.topic("orders")
            with topic.reader(topic.start_offset) as reader:
                found = [each.payload for each in reader]
        numbers = [int(each) for each in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


def test_the_owner_goes_on_and_readers_see_every_message_once(settings: StoreSettings) -> None:
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many([b"0", b"1"], durability="synced")
        topic.upload()
        watching = Watching(settings)
        count = 2
        with Others(watching.compact, watching.read):
            for _ in range(UPLOADS):
                topic.append_many([b"%d" % (count + at) for at in range(5)], durability="synced")
                count += 5
                topic.upload()
                topic.rotate()
                topic.trim_local()
        watching.compact()
        assert watching.compacted > 0
        assert [int(each.payload) for each in topic.read(0)] == list(range(count))
        require_chain(watching, 0, count)
        watching.resources.close()


def test_remote_retention_and_sweeps_go_on(settings: StoreSettings) -> None:
    """The oldest objects are given up while they are compacted, and swept without a grace time."""
    from dataclasses import replace

    small = RemoteRetentionSettings(size_mb=8000 / 1024 / 1024)
    with Store(replace(settings, remote_retention=small)) as store:
        topic = store.topic("orders")
        topic.append_many([b"0", b"1"], durability="synced")
        topic.upload()
        watching = Watching(settings)
        count = 2
        with Others(watching.compact, watching.sweep):
            for _ in range(UPLOADS):
                topic.append_many([b"%d" % (count + at) for at in range(5)], durability="synced")
                count += 5
                topic.upload()
                topic.rotate()
                topic._storage.trim_remote()  # a server does it now and then
        assert watching.compacted > 0
        watching.sweep()
        record = watching.resources.catalog.record(TOPIC)
        assert record is not None
        assert record.start_offset > 0
        require_chain(watching, record.start_offset, count)
        start = record.start_offset
        assert [int(each.payload) for each in topic.read(start)] == list(range(start, count))
        watching.resources.close()


def require_chain(watching: Watching, start: int, end: int) -> None:
    chain = list(watching.resources.catalog.get_object_descriptors(TOPIC))
    assert (chain[0].start_offset, chain[-1].next_offset) == (start, end)
    assert all(one.next_offset == then.start_offset for one, then in pairwise(chain))
    for each in chain:
        watching.resources.read_back(TOPIC, each)
