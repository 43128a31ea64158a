"""History: what the last minutes were like, by the watermarks and by the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.admin.page.history import History, TopicTrace, bytes_after
from forebay.admin.page.topic_states import TopicStates
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from forebay.wal.segment import Segment
from support.disks import wait_until
from support.served import served


@dataclass
class Hand:
    """A clock that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = StoreSettings(tmp_path, uploader=UploaderSettings(enabled=False))
    with Store(settings) as opened:
        yield opened


def test_rates_are_of_the_time_since_the_row_before(store: Store) -> None:
    hand = Hand()
    history = History(store, TopicStates(store), clock=hand)
    topic = store.topic("orders")
    history.sample()
    assert history.since() == []
    topic.append_many([b"x" * 100] * 50, durability="synced")
    hand.now += 2
    history.sample()
    (row,) = history.since()
    assert row.at == 1002.0
    assert row.appended == 25
    assert row.appended_bytes > 25 * 100
    assert (row.uploaded, row.lag) == (0, 50)


def test_uploads_are_told_by_watermarks_and_objects_whoever_did_them(store: Store) -> None:
    hand = Hand()
    history = History(store, TopicStates(store), clock=hand)
    topic = store.topic("orders")
    history.sample()
    topic.append_many([b"x" * 100] * 50, durability="synced")
    hand.now += 2
    history.sample()
    hand.now += 10
    history.sample()
    assert history.since()[-1].lag_seconds == 10
    assert history.since()[-1].lag_bytes == topic.segments()[0].size
    (stored,) = topic.upload()
    hand.now += 2
    history.sample()
    row = history.since()[-1]
    assert row.uploaded == 25
    assert row.uploaded_bytes == stored.size / 2
    assert row.time_to_cloud == 12
    assert (row.lag, row.lag_bytes, row.lag_seconds) == (0, 0, 0)
    assert row.store_up >= stored.size / 2
    assert row.requests > 0
    hand.now += 2
    history.sample()
    assert history.since()[-1].time_to_cloud is None


def test_reads_are_counted_whichever_tier_they_come_from(store: Store) -> None:
    hand = Hand()
    history = History(store, TopicStates(store), clock=hand)
    topic = store.topic("orders")
    topic.append_many([b"x" * 100] * 50, durability="synced")
    history.sample()
    assert len(list(topic.read(10))) == 40
    hand.now += 2
    history.sample()
    (row,) = history.since()
    assert row.read == 20
    assert row.read_bytes > 20 * 100


def test_the_ring_is_bounded_and_tells_what_is_new(store: Store) -> None:
    hand = Hand()
    history = History(store, TopicStates(store), clock=hand, samples_max=5)
    for _ in range(20):
        hand.now += 2
        history.sample()
    assert len(history.since()) == 5
    assert [row[0] for row in history.rows(1036.0)] == [1038.0, 1040.0]


def test_a_clock_that_was_put_back_adds_no_row(store: Store) -> None:
    hand = Hand()
    history = History(store, TopicStates(store), clock=hand)
    history.sample()
    hand.now -= 100
    history.sample()
    assert history.since() == []


def test_a_trace_knows_since_when_the_oldest_message_waits() -> None:
    trace = TopicTrace()
    trace.record(0, 10, 0)
    trace.record(2, 30, 0)
    trace.record(4, 30, 0)
    assert trace.waiting_since() == 0
    trace.record(6, 40, 20)
    assert trace.waiting_since() == 2
    trace.record(8, 40, 40)
    assert trace.waiting_since() is None
    assert trace.rates() == (30 / 8, 5.0)


def test_a_trace_stays_small() -> None:
    trace = TopicTrace()
    for second in range(10_000):
        trace.record(second, second + 1, 0)
    assert trace.waiting_since() == 0
    # What it keeps shows nowhere else, and a server has one for each topic.
    assert len(trace._synced) <= 256
    assert len(trace._recent) <= 32


def test_bytes_after_an_offset_take_a_share_of_the_segment_that_holds_it() -> None:
    segments = [
        Segment(0, Path("a"), 0, 10, 1000, 0, 0),
        Segment(1, Path("b"), 10, 20, 500, 0, 0),
    ]
    assert bytes_after(segments, 0) == 1500
    assert bytes_after(segments, 5) == 1000
    assert bytes_after(segments, 20) == 0


def test_a_server_samples_by_itself(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        wait_until(lambda: bool(server.context.watch.history.since()))
