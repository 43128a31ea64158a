"""Background work of a store: when it uploads and deletes, and how closing ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.ownership import Session, acquire
from forebay.catalog.records import TopicRecord
from forebay.errors import TopicFenced
from forebay.format.names import parse_topic
from forebay.limits import FOLLOW_SECONDS
from forebay.objects.memory import MemoryBackend
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings
from forebay.testing import FaultBackend, ObjectFault
from forebay.topic.configure import configure_topic
from forebay.topic.factory import FAILURES
from forebay.topic.store import Store
from forebay.upload import metrics
from forebay.wal.pool import WriterPool
from support.disks import PATIENCE_SECONDS, in_thread, wait_until
from support.tiered_stores import TOPIC, Setup, fill, lease_of, payloads

INTERVAL: Final = 300
ENABLED: Final = UploaderSettings(
    enabled=True, interval_seconds=INTERVAL, max_open_seconds=INTERVAL - 1, concurrent_topics=1
)
CHECK_SECONDS: Final = 5 * 60
LATE: Final = 0.001


def background_pool(setup: Setup, store: Store) -> WriterPool:
    """The pool of the work behind the topics, which follows the setup's clock from now on.

    A pool waits in real time. Only a test has to wake it when a clock was moved by hand.
    """
    pool = store._factory._background_pool
    if pool.recheck not in setup.clock.listeners:
        setup.clock.subscribe(pool.recheck)
    return pool


def background_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("forebay-background")}


def pass_time(setup: Setup, store: Store, seconds: float) -> None:
    """Returns once the one thread has run all that was due then."""
    pool = background_pool(setup, store)
    setup.clock.advance(seconds)
    for _ in range(2):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(PATIENCE_SECONDS)


def cycles() -> float:
    return sum(metrics.cycles.value(outcome) for outcome in ("done", "idle", "failed"))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path, backend=FaultBackend(MemoryBackend()), uploader=ENABLED)


def faults(setup: Setup) -> FaultBackend:
    assert isinstance(setup.backend, FaultBackend)
    return setup.backend


def test_the_first_upload_comes_when_the_topic_is_opened_and_then_at_each_interval(
    setup: Setup,
) -> None:
    before = cycles()
    with setup.store() as store:
        store.topic(str(TOPIC))
        wait_until(lambda: cycles() == before + 1)
        pass_time(setup, store, INTERVAL - LATE)
        assert cycles() == before + 1
        for turn in (2, 3):
            pass_time(setup, store, INTERVAL)
            assert cycles() == before + turn


def test_what_was_left_behind_is_uploaded_as_soon_as_the_topic_is_opened_again(
    setup: Setup,
) -> None:
    setup.uploader = replace(ENABLED, enabled=False)
    with setup.topic() as topic:
        fill(topic, 20)
    setup.clock.advance(INTERVAL)
    setup.uploader = ENABLED
    with setup.topic() as topic:
        wait_until(lambda: topic.watermarks().verified == 20)


def test_every_topic_is_uploaded_in_its_turn(setup: Setup) -> None:
    with setup.store() as store:
        topics = [store.topic(f"topic-{number}") for number in range(5)]
        for topic in topics:
            fill(topic, 10)
        pass_time(setup, store, INTERVAL)
        assert [topic.watermarks().verified for topic in topics] == [10] * 5


@pytest.mark.parametrize("uploader", [{"enabled": False}, {"runner": "spark"}], ids=str)
def test_a_store_that_is_not_to_upload_still_deletes(
    setup: Setup, uploader: dict[str, str]
) -> None:
    setup.uploading(**uploader)
    before = cycles()
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        pass_time(setup, store, 2 * CHECK_SECONDS)
        assert cycles() == before
        assert topic.watermarks().uploaded == 0
        topic.upload()
        pass_time(setup, store, CHECK_SECONDS)
        assert topic.segments()[0].first_offset > 0


def test_topics_that_roll_are_uploaded_here_and_the_others_left_to_spark(setup: Setup) -> None:
    setup.uploading(runner="spark", max_idle_seconds=INTERVAL / 2)
    with setup.store() as store:
        rolls, other = store.topic("rolls"), store.topic("other")
        rolls.configure(rolling=True)
        for topic in (rolls, other):
            fill(topic, 10)
        pass_time(setup, store, INTERVAL)
        pass_time(setup, store, INTERVAL)
        assert (rolls.watermarks().uploaded, other.watermarks().uploaded) == (10, 0)
        other.configure(rolling=True)
        rolls.configure(rolling=False)
        for topic in (rolls, other):
            fill(topic, 10)
        pass_time(setup, store, INTERVAL)
        pass_time(setup, store, INTERVAL)
        assert (rolls.watermarks().uploaded, other.watermarks().uploaded) == (10, 20)


def test_settings_of_another_process_come_with_the_next_look_at_the_catalog(setup: Setup) -> None:
    setup.uploading(runner="spark", max_idle_seconds=INTERVAL / 2)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 10)
        configure_topic(setup.catalog, TOPIC, setup.settings(), {"rolling": True})
        pass_time(setup, store, FOLLOW_SECONDS)
        assert topic.in_effect is not None
        assert topic.in_effect.uploader.rolling
        pass_time(setup, store, INTERVAL)
        pass_time(setup, store, INTERVAL)
        assert topic.watermarks().uploaded == 10


def test_segments_go_at_each_check_and_not_before(setup: Setup) -> None:
    setup.uploading(enabled=False)
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 100)
        topic.upload()
        pass_time(setup, store, CHECK_SECONDS - LATE)
        assert topic.segments()[0].first_offset == 0
        pass_time(setup, store, LATE)
        assert topic.segments()[0].first_offset > 0


def test_a_store_in_memory_has_no_work_behind_it() -> None:
    before = background_threads()
    with Store(StoreSettings(data=None)) as store:
        store.topic(str(TOPIC)).append(b"x", durability="synced")
        assert background_threads() <= before


def test_an_upload_that_failed_is_tried_again_at_the_next_interval(setup: Setup) -> None:
    before = FAILURES.value("ServiceUnavailable")
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 20)
        faults(setup).inject(ObjectFault("complete"))
        pass_time(setup, store, INTERVAL)
        assert topic.watermarks().uploaded == 0
        assert FAILURES.value("ServiceUnavailable") == before + 1
        pass_time(setup, store, INTERVAL)
        assert topic.watermarks().verified == 20


def test_a_bug_in_an_upload_does_not_end_the_uploads(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    before = FAILURES.value("AssertionError")
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 20)
        faults(setup).inject(ObjectFault("complete", error=AssertionError))
        pass_time(setup, store, INTERVAL)
        assert FAILURES.value("AssertionError") == before + 1
        assert "Traceback" in caplog.text
        pass_time(setup, store, INTERVAL)
        assert topic.watermarks().verified == 20


def test_a_topic_that_was_taken_over_is_left_alone_from_then_on(setup: Setup) -> None:
    with setup.store() as store:
        topic = store.topic(str(TOPIC))
        fill(topic, 20)
        pass_time(setup, store, INTERVAL)
        fill(topic, 20)
        other = take_over(setup, store)
        pass_time(setup, store, INTERVAL)
        with pytest.raises(TopicFenced):
            topic.append(b"x", durability="synced")
        before = cycles()
        pass_time(setup, store, 2 * INTERVAL)
        assert cycles() == before
        assert topic.watermarks().uploaded == 20
        other.close()


def take_over(setup: Setup, store: Store) -> Session:
    """Another process takes the topic, after the lease of this one ended."""
    setup.kv.revoke(lease_of(store))
    other = Session(setup.catalog, MetadataSettings(), setup.clock)

    def settle(record: TopicRecord | None) -> TopicRecord:
        assert record is not None
        return record

    acquire(other, TOPIC, "elsewhere", settle)
    return other


def test_closing_ends_the_work_and_its_threads(setup: Setup) -> None:
    others = background_threads()
    with setup.store() as store:
        for number in range(3):
            store.topic(f"topic-{number}")
        pass_time(setup, store, INTERVAL)
        assert background_threads() - others
    before = cycles()
    setup.clock.advance(10 * INTERVAL)
    assert cycles() == before
    wait_until(lambda: background_threads() <= others)


@pytest.mark.timeout(300)
def test_closing_waits_once_for_all_uploads_that_hang(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take 80 seconds to wait for each."""
    topics, others = 40, background_threads()
    monkeypatch.setattr("forebay.topic.factory.CLOSE_SECONDS_MAX", 2.0)
    setup.uploading(concurrent_topics=topics)
    hanging, release = Hanging(), threading.Event()
    faults(setup).hook("complete", hanging.until(release))
    store = Store(setup.settings(), clock=setup.clock, catalog=setup.catalog, store=setup.objects)
    names = [f"topic-{number}" for number in range(topics)]
    for name in names:
        fill(store.topic(name), 1)
    background_pool(setup, store)
    setup.clock.advance(INTERVAL)
    wait_until(lambda: hanging.count == topics)
    in_thread(store.close).result(PATIENCE_SECONDS)
    release.set()
    wait_until(lambda: background_threads() <= others)
    require_reopened(setup, names)


class Hanging:
    """Counts the uploads that hang."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def until(self, release: threading.Event) -> Callable[[str], None]:
        def hang(_: str) -> None:
            with self._lock:
                self.count += 1
            assert release.wait(3 * PATIENCE_SECONDS)  # longer than closing the store may take

        return hang


def require_reopened(setup: Setup, names: list[str]) -> None:
    """Every topic is free, and holds one object, whether it was committed late or is now."""
    faults(setup).clear()
    with setup.store() as store:
        for name in names:
            topic = store.topic(name)
            topic.upload()
            assert topic.watermarks().verified == 1
            assert [one.payload for one in topic.read()] == payloads(0, 1)
            assert len(setup.descriptors(parse_topic(name))) == 1
