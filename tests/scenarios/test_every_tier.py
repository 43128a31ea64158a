"""A topic over segments and objects reads as one log: every offset once, in order.

On each kind of object store with each kind of catalog. Readers run while a producer appends,
objects are uploaded and segments are deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.limits import MIB
from forebay.settings import UploaderSettings
from forebay.topic.store import Topic
from forebay.wal.watermarks import Watermarks
from support.disks import wait_until
from support.tiers import (
    NAME,
    PATIENCE,
    PROMPT,
    Readers,
    TierSettings,
    check,
    descriptors,
    hand_over,
    make_tiers,
    produce,
    read_all,
    require_chain,
)

pytestmark = pytest.mark.timeout(300)

MESSAGES = 200_000
PLACES = [("memory", "sqlite"), ("fs", "sqlite"), ("s3", "etcd")]
MORE_PLACES = [("memory", "etcd"), ("fs", "etcd"), ("s3", "sqlite")]


@pytest.fixture(
    params=[*PLACES, *(pytest.param(each, marks=pytest.mark.soak) for each in MORE_PLACES)],
    ids="-".join,
)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> TierSettings:
    return make_tiers(request.param, tmp_path, request)


def start_readers(topic: Topic, middle: int) -> Readers:
    """From 0, inside an object, around the hand-over, and live."""
    readers = Readers(topic, MESSAGES)
    over = hand_over(topic)
    readers.start("first", 0)
    readers.start("middle of an object", middle)
    for start in (over - 1, over, over + 1):
        readers.start(f"hand-over {start - over:+}", start)
    readers.start("live", "latest")
    readers.start_async("stream", over - 10_000)
    readers.start_async("live stream", "latest")
    return readers


def test_readers_at_once_see_every_offset_once_in_order(anywhere: TierSettings) -> None:
    with anywhere.open() as store:
        topic = store.topic(NAME)
        produce(topic, 168_000)
        done = topic.upload()
        assert len(done) > 2
        assert len(topic.segments()) > 8
        topic.trim_local()
        produce(topic, 8_000)
        assert 168_000 > hand_over(topic) > done[1].next_offset
        readers = start_readers(topic, (done[1].start_offset + done[1].end_offset) // 2)
        for _ in range(3):
            produce(topic, 8_000)
            topic.upload()
            topic.trim_local()
        readers.join()
        require_chain(descriptors(store), 0, MESSAGES)
        assert topic.start_offset == 0
        assert topic.watermarks() == Watermarks(MESSAGES, MESSAGES, MESSAGES, MESSAGES)


def until(topic: Topic, reached: Callable[[], bool]) -> None:
    """Waits for the background work."""
    try:
        wait_until(reached, PATIENCE)
    except AssertionError as error:
        raise AssertionError(str(topic.watermarks())) from error


BACKGROUND = UploaderSettings(interval_seconds=0.02, max_object_bytes=4 * MIB, max_open_seconds=0.2)
TIDY = replace(PROMPT, check_interval_minutes=0.01)


def produce_in_the_background(tiers: TierSettings, uploader: UploaderSettings) -> None:
    """Nobody calls `upload` or `trim_local`, and readers run the whole time."""
    with tiers.open(uploader=uploader, deleter=TIDY) as store:
        topic = store.topic(NAME)
        live = Readers(topic, MESSAGES)
        live.start("live from the start", 0)
        produce(topic, 168_000)
        until(topic, lambda: hand_over(topic) > 150_000)
        readers = start_readers(topic, 90_000)
        for _ in range(4):
            produce(topic, 8_000)
        readers.join()
        live.join()
        until(topic, lambda: topic.watermarks().verified == MESSAGES)
        require_chain(descriptors(store), 0, MESSAGES)
        assert topic.start_offset == 0
        until(topic, lambda: len(topic.segments()) == 1)
        assert read_all(topic, 0, 1000) == 1000


def test_readers_see_every_offset_while_the_background_work_goes_on(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    produce_in_the_background(make_tiers(("s3", "etcd"), tmp_path, request), BACKGROUND)


def test_readers_see_every_offset_while_rolling_objects_are_written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rolling = replace(BACKGROUND, rolling=True)
    produce_in_the_background(make_tiers(("fs", "sqlite"), tmp_path, request), rolling)


# ---- a slow reader ----


@pytest.mark.parametrize("places", [("memory", "sqlite"), ("fs", "etcd"), ("s3", "sqlite")])
def test_a_slow_reader_in_the_cloud_goes_on_when_its_segments_are_deleted(
    places: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with make_tiers(places, tmp_path, request).open() as store:
        topic = store.topic(NAME)
        produce(topic, 30_000)
        topic.upload()
        topic.trim_local()
        reader = topic.read(0, end=90_000, follow=True)
        expected = 0
        for _ in range(4):
            over = hand_over(topic)
            for _ in range(100):
                check(next(reader), expected)
                expected += 1
            assert expected < over
            produce(topic, 15_000)
            topic.upload()
            assert topic.trim_local()
            assert hand_over(topic) > over
        for message in reader:
            check(message, expected)
            expected += 1
        assert expected == 90_000


def test_a_reader_whose_pinned_segment_stays_does_not_hold_back_the_rest_for_long(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with make_tiers(("fs", "sqlite"), tmp_path, request).open() as store:
        topic = store.topic(NAME)
        produce(topic, 60_000)
        reader = topic.read(0)
        check(next(reader), 0)
        topic.upload()
        assert topic.trim_local() == []
        for offset in range(1, 40_000):
            check(next(reader), offset)
        assert topic.trim_local()
        assert 20_000 < hand_over(topic) <= 40_000
        for offset in range(40_000, 60_000):
            check(next(reader), offset)
