"""Closing a store with many topics while the catalog is away.

All logs are synced before the catalog is asked for anything, and the topics are given up side by
side, under one deadline.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import deadline_of_request
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ForebayError, ServiceUnavailable, TopicFenced
from forebay.logs import fields_of
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import (
    CloudSettings,
    MetadataSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)
from forebay.testing import CrashDisk, ManualClock
from forebay.testing.kv import FaultKv
from forebay.topic.factory import side_by_side
from forebay.topic.store import Store, Topic
from support.etcd_server import EtcdServer
from support.proxy import FaultProxy, Faults

NAMES: Final = [f"/default/topic-{number}" for number in range(12)]
LAZY: Final = WalSettings(fsync_interval_ms=3_600_000)
"""Syncs nothing until it is told to."""
QUIET: Final = UploaderSettings(enabled=False)
NOT_REVOKED: Final = "lease not revoked: its topics become free when it expires"
LONG: Final = 1e9
"""A timeout in seconds that no test reaches."""


def fill(store: Store) -> list[Topic]:
    """Opens all topics, each with a message that is synced and one that is not.

    The first one reserves offsets, so that the second one does not need the catalog.
    """
    topics = [store.topic(name) for name in NAMES]
    for topic in topics:
        topic.append(b"first", durability="synced")
        topic.append(topic.name.encode())
        assert topic.watermarks().synced == 1
    return topics


def confirmed(topics: list[Topic]) -> list[str]:
    return [topic.name for topic in topics if topic.watermarks().synced == 2]


class Away:
    """A catalog that stops responding: each request to it takes a whole timeout of the clock."""

    def __init__(self, lease_seconds: float = 15) -> None:
        self.clock = ManualClock()
        self.kv = FaultKv(SqliteKv(None, boottime=self.clock.monotonic), self._before)
        self.disk = CrashDisk()
        self.settings = StoreSettings(
            data="/data",
            wal=LAZY,
            uploader=QUIET,
            metadata=MetadataSettings(timeout_seconds=5, lease_seconds=lease_seconds),
        )
        self.objects = CloudStore(MemoryBackend())
        self.away = False
        self.requests: Counter[str] = Counter()
        self.deadlines: dict[str, set[float]] = {}
        """By operation, when its requests would be given up."""

    def open(self) -> Store:
        catalog = Catalog(self.kv, "/forebay", self.clock)
        return Store(
            self.settings, disk=self.disk, clock=self.clock, catalog=catalog, store=self.objects
        )

    def _before(self, operation: str) -> None:
        self.requests[operation] += 1
        self.deadlines.setdefault(operation, set()).add(deadline_of_request(LONG))
        if self.away:
            self.clock.advance(self.settings.metadata.timeout_seconds)
            raise ServiceUnavailable("the catalog is away")

    def leave(self) -> None:
        self.away = True
        self.requests.clear()
        self.deadlines.clear()


def test_all_logs_are_synced_before_the_catalog_is_asked_for_anything() -> None:
    """The lease would end after the third time-out, and nothing be confirmed from then on."""
    place = Away()
    store = place.open()
    topics = fill(store)
    place.leave()
    store.close()
    assert confirmed(topics) == NAMES
    place.away = False
    place.clock.advance(60)  # the lease ends
    with place.open() as again:
        assert [len(list(again.topic(name).read())) for name in NAMES] == [2] * 12


def test_all_topics_are_given_up_under_one_deadline() -> None:
    place = Away()
    store = place.open()
    fill(store)
    place.leave()
    place.away = False
    store.close()
    assert place.requests["commit"] == len(NAMES)
    (release,) = place.deadlines["get"] | place.deadlines["commit"]
    (revoke,) = place.deadlines["revoke"]
    assert release < revoke < release + place.settings.metadata.timeout_seconds


def test_a_lease_that_ended_while_the_catalog_is_away_costs_one_deadline_for_all_topics() -> None:
    """The logs ask whether the topics are still theirs, and have no more time than the rest."""
    place = Away()
    store = place.open()
    topics = fill(store)
    place.leave()
    place.clock.advance(60)
    with pytest.raises(TopicFenced):
        store.close()
    assert confirmed(topics) == []
    assert all(map(math.isfinite, set().union(*place.deadlines.values())))
    assert len(place.deadlines["keep_alive"]) == 1


def test_what_could_not_be_given_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Away()
    store = place.open()
    fill(store)
    place.leave()
    with caplog.at_level(logging.WARNING, "forebay"):
        store.close()
    (line,) = [fields_of(record) for record in caplog.records]
    assert line[0] == NOT_REVOKED
    assert (line[1]["topics"], line[1]["seconds"]) == (12, 15)


def test_the_lease_is_ended_although_background_work_took_all_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic whose log has stopped is not given up: only the end of the lease frees it."""
    slow, released = threading.Event(), threading.Event()

    def before(operation: str) -> None:
        if operation == "get" and threading.current_thread().name.startswith("forebay-background"):
            slow.set()
            released.wait(60)

    settings = StoreSettings(
        tmp_path / "data",
        uploader=UploaderSettings(runner="spark", interval_seconds=0.05),
        metadata=MetadataSettings(timeout_seconds=0.2),
    )
    store = Store(settings, catalog=Catalog(FaultKv(SqliteKv(None), before)))
    store.topic("orders")
    assert slow.wait(60)
    # Longer than `metadata.timeout_seconds`, and shorter than what background work may take.
    timer = threading.Timer(1, released.set)
    timer.start()
    with caplog.at_level(logging.WARNING, "forebay"):
        store.close()
    timer.join()
    assert [fields_of(record) for record in caplog.records] == []


def test_tasks_run_on_the_calling_thread_if_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while the interpreter exits."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    side_by_side([lambda number=number: done.append(number) for number in range(40)])  # type: ignore[misc]
    assert done == list(range(40))


def test_every_task_is_tried_and_the_first_error_is_raised() -> None:
    done: list[int] = []

    def task(number: int) -> None:
        done.append(number)
        if number % 7 == 3:
            raise ForebayError(str(number))

    with pytest.raises(ForebayError, match=r"^3$"):
        side_by_side([lambda number=number: task(number) for number in range(40)])  # type: ignore[misc]
    assert sorted(done) == list(range(40))


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "fault",
    [Faults(black_hole=True), Faults(refuse=True, reset_rate=1, reset_after_bytes_max=1)],
    ids=["black hole", "refused"],
)
def test_a_store_closes_while_etcd_is_away_and_confirms_every_message(
    tmp_path: Path, etcd: EtcdServer, fault: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """One time-out after the other would take 24 seconds, and the lease ends after 12."""
    with FaultProxy(etcd.endpoint) as proxy:
        settings = StoreSettings(
            tmp_path / "data",
            wal=LAZY,
            uploader=QUIET,
            cloud=CloudSettings(backend="memory", root=tmp_path.name),
            metadata=MetadataSettings(
                backend="etcd",
                endpoints=[proxy.address],
                prefix=f"/{tmp_path.name}",
                timeout_seconds=2,
            ),
        )
        store = Store(settings)
        topics = fill(store)
        with proxy.faults(fault), caplog.at_level(logging.WARNING, "forebay"):
            store.close()
        assert confirmed(topics) == NAMES
        lines = [fields_of(record) for record in caplog.records]
        assert [fields["topics"] for text, fields in lines if text == NOT_REVOKED] == [12]
        with Store(settings) as again:
            assert [len(list(again.topic(name).read())) for name in NAMES] == [2] * 12
