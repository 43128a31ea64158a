"""The streaming source over real stores, asked as Spark asks it, without Spark."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from forebay.errors import LostOffsets, OffsetOutOfRange, UsageError
from forebay.settings import MetadataSettings
from forebay.topic.store import Store, Topic
from support.cli_runs import done
from support.holed_topics import END, HELD, accept, leave_a_wide_hole
from support.scan_stores import append, fill_both_tiers, settings_of
from support.stream_runs import Rows, StreamRun, lose_the_start, require_exact

ORDERS = "/default/orders"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(settings_of(tmp_path)) as store:
        yield store


def joined(batches: list[Rows]) -> Rows:
    return [row for rows in batches for row in rows]


# -- where it begins ------------------------------------------------------------------------------


def test_a_stream_begins_at_the_end_unless_told_otherwise(store: Store, tmp_path: Path) -> None:
    topic = store.topic("orders")
    append(topic, 5)
    with StreamRun(tmp_path, subscribe="orders") as run:
        assert run.checkpoint == {ORDERS: {"0": 5}}
        assert run.batch() is None
        append(topic, 3)
        require_exact(run.batch() or [], {ORDERS: range(5, 8)})
    for starting, first in (("earliest", 0), ('{"orders": {"0": 6}}', 6)):
        with StreamRun(tmp_path, subscribe="orders", startingOffsets=starting) as run:
            require_exact(joined(run.drain()), {ORDERS: range(first, 8)})


def test_a_stream_begins_at_a_time(store: Store, tmp_path: Path) -> None:
    topic = store.topic("orders")
    append(topic, 5)
    [message] = list(topic.read(start=4))
    with StreamRun(tmp_path, subscribe="orders", startingTimestamp="0") as run:
        assert run.checkpoint == {ORDERS: {"0": 0}}
    later = str(message.publish_time + 60_000)
    with StreamRun(tmp_path, subscribe="orders", startingTimestamp=later) as run:
        assert run.checkpoint == {ORDERS: {"0": 5}}


def test_a_topic_that_is_named_and_not_there_is_refused(store: Store, tmp_path: Path) -> None:
    store.topic("orders").append(b"x", durability="synced")
    with pytest.raises(UsageError, match="order"):
        StreamRun(tmp_path, subscribe="order")
    with StreamRun(tmp_path, subscribePattern="nothing-.*") as run:
        assert run.checkpoint == {}
        assert run.batch() is None


@pytest.mark.parametrize("option", ["subscribe", "subscribePattern"])
def test_a_topic_that_would_be_the_same_partition_ends_the_stream_when_it_appears(
    store: Store, tmp_path: Path, option: str
) -> None:
    given: dict[str, Any] = {option: "orders", "startingOffsets": "earliest"}
    store.topic("orders").append(b"x", durability="synced")
    with StreamRun(tmp_path, **given) as run:
        assert len(run.batch() or []) == 1
        store.topic("orders-part-1").append(b"y", durability="synced")
        run.drain()
        store.topic("orders-part-0").append(b"z", durability="synced")
        with pytest.raises(UsageError, match="orders-part-0 are both partition 0"):
            run.batch()
    with pytest.raises(UsageError, match="orders-part-0 are both partition 0"):
        StreamRun(tmp_path, **given)


# -- what it reads --------------------------------------------------------------------------------


def test_both_tiers_and_partitions_are_read_once_and_in_whole(store: Store, tmp_path: Path) -> None:
    for name in ("orders", "clicks-part-0", "clicks-part-1"):
        fill_both_tiers(store.topic(name))
    with StreamRun(tmp_path, subscribe="orders,clicks", startingOffsets="earliest") as run:
        rows = run.batch(ReadAllAvailable())
        assert rows is not None
        assert run.batch() is None
    named = [
        ("/default/clicks-part-0" if topic == "/default/clicks" else topic, offset, value)
        for topic, offset, value in rows
    ]
    every = (ORDERS, "/default/clicks-part-0", "/default/clicks-part-1")
    require_exact(named, dict.fromkeys(every, range(120)))


def test_only_what_is_synced_is_read(store: Store, tmp_path: Path) -> None:
    topic = store.topic("orders")
    append(topic, 5)
    topic.append(b"in memory alone", durability="buffered")
    with StreamRun(tmp_path, subscribe="orders", startingOffsets="earliest") as run:
        run.drain()
        assert run.checkpoint == {ORDERS: {"0": 5}}
        topic.flush()
        [(_, offset, value)] = run.batch() or []
        assert (offset, value) == (5, b"in memory alone")


def test_what_was_planned_from_segments_is_read_again_from_objects(
    store: Store, tmp_path: Path
) -> None:
    topic = store.topic("orders")
    append(topic, 40)
    topic.rotate()
    append(topic, 10)
    with StreamRun(tmp_path, subscribe="orders", startingOffsets="earliest") as run:
        start = run.checkpoint
        planned = run.reader.latestOffset(start, ReadAllAvailable())
        first = run.read(start, planned)
        old = run.reader.partitions(start, planned)
        topic.rotate()
        topic.upload()
        topic.trim_local()
        assert not any((tmp_path / "wal/default/orders").glob("wal.log"))
        late = [row for part in old for batch in run.reader.read(part) for row in batch.to_pylist()]
        assert len(late) == 50
    with StreamRun(tmp_path, start, subscribe="orders") as again:
        assert sorted(again.read(start, planned)) == sorted(first)
    require_exact(first, {ORDERS: range(50)})


def test_many_small_topics_share_few_tasks(store: Store, tmp_path: Path) -> None:
    for number in range(20):
        append(store.topic(f"t{number}"), 5)
    for least, count in (("1", 1), ("3", 3)):
        with StreamRun(
            tmp_path, subscribePattern=".*", startingOffsets="earliest", minPartitions=least
        ) as run:
            end = run.reader.latestOffset(run.checkpoint, ReadAllAvailable())
            assert len(run.reader.partitions(run.checkpoint, end)) == count
            assert len(run.read(run.checkpoint, end)) == 100
            assert run.reader.partitions(end, end) == []


def work_on(topics: list[Topic], steps: int) -> None:
    """Appends, and what moves messages from one place to the other, in no order."""
    chance = random.Random(steps)
    for _ in range(steps):
        topic = chance.choice(topics)
        append(topic, chance.randrange(1, 40))
        for move in (topic.rotate, topic.upload, topic.trim_local):
            if chance.random() < 0.25:
                move()


def test_a_stream_beside_writers_uploads_and_retention_misses_nothing(
    store: Store, tmp_path: Path
) -> None:
    topics = [store.topic(name) for name in ("a", "b", "c")]
    for topic in topics:
        append(topic, 1)
    rows: Rows = []
    with (
        ThreadPoolExecutor(1) as pool,
        StreamRun(
            tmp_path, subscribePattern=".*", startingOffsets="earliest", maxBytesPerTrigger="16KiB"
        ) as run,
    ):
        work = pool.submit(work_on, topics, 60)
        while not work.done():
            rows += run.batch() or []
        work.result()
        rows += joined(run.drain())
    require_exact(rows, {topic.name: range(topic.watermarks().synced) for topic in topics})


# -- limits ---------------------------------------------------------------------------------------


def test_batches_have_as_many_messages_as_allowed(store: Store, tmp_path: Path) -> None:
    sizes = {"a": 70, "b": 20, "c": 1}
    for name, count in sizes.items():
        append(store.topic(name), count)
    with StreamRun(
        tmp_path, subscribePattern=".*", startingOffsets="earliest", maxOffsetsPerTrigger="13"
    ) as run:
        batches = run.drain()
    assert [len(rows) for rows in batches] == [13] * 7
    assert {topic for topic, _, _ in batches[0]} == {f"/default/{name}" for name in sizes}
    require_exact(
        joined(batches), {f"/default/{name}": range(count) for name, count in sizes.items()}
    )


@pytest.mark.parametrize("tier", ["object", "sealed", "active"])
def test_batches_have_about_as_many_bytes_as_allowed(
    store: Store, tmp_path: Path, tier: str
) -> None:
    topic = store.topic("orders")
    for _ in range(40):
        append(topic, 100, size=200)
    for _ in range(40):
        append(topic, 10, size=2000)
    if tier != "active":
        topic.rotate()
        append(topic, 1)
    if tier == "object":
        topic.upload()
        topic.trim_local()
    allowed = 200_000
    with StreamRun(
        tmp_path,
        subscribe="orders",
        startingOffsets="earliest",
        maxBytesPerTrigger=str(allowed),
    ) as run:
        batches = run.drain()
    sizes = [sum(len(value) + 16 for _, _, value in rows) for rows in batches]
    require_exact(joined(batches), {ORDERS: range(topic.watermarks().synced)})
    if tier == "active":  # no index is there yet: the mean of the segment serves
        assert len(batches) >= 8
    else:
        assert max(sizes) <= 1.2 * allowed
        assert len(batches) <= 14


def test_a_message_larger_than_the_limit_comes_alone(store: Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        append(store.topic(name), 3, size=5000)
    with StreamRun(
        tmp_path, subscribePattern=".*", startingOffsets="earliest", maxBytesPerTrigger="100"
    ) as run:
        batches = run.drain()
    assert [len(rows) for rows in batches] == [1] * 6
    assert {topic for rows in batches[:2] for topic, _, _ in rows} == {"/default/a", "/default/b"}


def test_with_both_limits_each_counts(store: Store, tmp_path: Path) -> None:
    topic = store.topic("orders")
    append(topic, 100, size=10)
    append(topic, 100, size=1000)
    topic.rotate()
    topic.upload()
    with StreamRun(
        tmp_path,
        subscribe="orders",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="50",
        maxBytesPerTrigger="20KiB",
    ) as run:
        batches = run.drain()
    assert max(len(rows) for rows in batches) <= 50
    assert len(batches) > 4
    require_exact(joined(batches), {ORDERS: range(200)})


def test_a_limit_that_spark_did_not_get_from_here_is_refused(store: Store, tmp_path: Path) -> None:
    append(store.topic("orders"), 3)
    with StreamRun(tmp_path, subscribe="orders", startingOffsets="earliest") as run:
        with pytest.raises(UsageError, match="ReadMaxFiles"):
            run.batch(ReadMaxFiles(1))
        assert len(run.batch(ReadMaxBytes(1)) or []) == 1


# -- what there is now ----------------------------------------------------------------------------


def test_available_now_ends_at_what_there_was_when_it_began(store: Store, tmp_path: Path) -> None:
    topic = store.topic("orders")
    append(topic, 20)
    with StreamRun(
        tmp_path,
        now=True,
        subscribePattern=".*",
        startingOffsets="earliest",
        maxOffsetsPerTrigger="6",
    ) as run:
        first = run.batch() or []
        append(topic, 5)
        append(store.topic("later"), 5)
        rows = first + joined(run.drain())
        checkpoint = run.checkpoint
    require_exact(rows, {ORDERS: range(20)})
    with StreamRun(tmp_path, checkpoint, now=True, subscribePattern=".*") as run:
        rows = joined(run.drain())
    require_exact(rows, {ORDERS: range(20, 25), "/default/later": range(5)})


# -- topics come and go ---------------------------------------------------------------------------


def test_a_new_topic_of_a_pattern_is_read_from_its_beginning(store: Store, tmp_path: Path) -> None:
    append(store.topic("orders-eu"), 4)
    with StreamRun(tmp_path, subscribePattern="orders-.*") as run:
        assert run.batch() is None
        append(store.topic("orders-us"), 7)
        append(store.topic("clicks"), 7)
        rows = joined(run.drain())
        require_exact(rows, {"/default/orders-us": range(7)})
        replayed = run.read({"/default/orders-eu": {"0": 4}}, run.checkpoint)
        assert replayed == []  # its first offset is in the checkpoint before any of its messages


def test_messages_that_retention_took_are_an_error_or_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(settings_of(tmp_path)) as store:
        fill_both_tiers(store.topic("orders"))
    with StreamRun(tmp_path, subscribe="orders", startingOffsets="earliest") as run:
        checkpoint = run.checkpoint
        end = run.reader.latestOffset(checkpoint, ReadAllAvailable())
    lose_the_start(tmp_path)
    with StreamRun(tmp_path, checkpoint, subscribe="orders") as run:
        with pytest.raises(
            OffsetOutOfRange, match=r"/default/orders: retention has deleted offsets 0 to \d+"
        ):
            run.batch()
        with pytest.raises(OffsetOutOfRange, match="failOnDataLoss=false"):
            run.read(checkpoint, end)
    with (
        caplog.at_level(logging.WARNING, "forebay.pipeline"),
        StreamRun(tmp_path, checkpoint, subscribe="orders", failOnDataLoss="false") as run,
    ):
        rows = joined(run.drain())
    first = min(offset for _, offset, _ in rows)
    assert first > 0
    require_exact(rows, {ORDERS: range(first, 120)})
    assert "loss" in caplog.text


def test_a_topic_that_vanished_is_an_error_or_a_warning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Store(settings_of(tmp_path / name)) as store:
            append(store.topic("orders"), 5)
            if name == "a":
                append(store.topic("clicks"), 5)
    place = tmp_path / "place"
    shutil.copytree(tmp_path / "a", place)
    with StreamRun(place, subscribePattern=".*", startingOffsets="earliest") as run:
        run.drain()
        checkpoint = run.checkpoint
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "b", place)
    with (
        StreamRun(place, checkpoint, subscribePattern=".*") as run,
        pytest.raises(OffsetOutOfRange, match=r"/default/clicks is gone.* at offset 5"),
    ):
        run.batch()
    with StreamRun(place, checkpoint, subscribePattern=".*", failOnDataLoss="false") as run:
        assert run.batch() == []
        assert run.checkpoint == {ORDERS: {"0": 5}}


def test_the_newest_offsets_are_reported_for_the_lag(store: Store, tmp_path: Path) -> None:
    append(store.topic("orders"), 9)
    with StreamRun(
        tmp_path, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="2"
    ) as run:
        run.batch()
        assert run.checkpoint == {ORDERS: {"0": 2}}
        assert run.reader.reportLatestOffset() == {ORDERS: {"0": 9}}


# -- offsets without messages ---------------------------------------------------------------------

READABLE = {ORDERS: [*range(HELD), *range(END, END + HELD)]}


def require_both_sides(batches: list[Rows]) -> None:
    assert {ORDERS: sorted(offset for _, offset, _ in joined(batches))} == READABLE


@pytest.mark.parametrize("limit", ["maxOffsetsPerTrigger", "maxBytesPerTrigger"])
def test_an_accepted_hole_costs_no_batch(tmp_path: Path, limit: str) -> None:
    leave_a_wide_hole(tmp_path)
    accept(tmp_path)
    options: dict[str, Any] = {"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "750"}
    options = {"subscribe": "orders", "startingOffsets": "earliest", limit: options[limit]}
    with StreamRun(tmp_path, **options) as run:
        batches = run.drain()
    require_both_sides(batches)
    assert all(batches), "no batch is empty"
    assert len(batches) <= 10


def test_a_hole_that_may_be_skipped_costs_one_batch_at_most(tmp_path: Path) -> None:
    leave_a_wide_hole(tmp_path)
    options: dict[str, Any] = {
        "subscribe": "orders",
        "failOnDataLoss": "false",
        "maxOffsetsPerTrigger": "5",
    }
    with StreamRun(tmp_path, startingOffsets="earliest", **options) as run:
        batches = run.drain()
        require_both_sides(batches)
        assert len(batches) == 4
    inside = f'{{"orders": {{"0": {HELD + 3}}}}}'
    with StreamRun(tmp_path, startingOffsets=inside, **options) as run:
        assert run.checkpoint == {ORDERS: {"0": END}}, "it begins after the hole"
        assert len(run.drain()) == 2


def test_a_hole_that_was_not_accepted_stops_a_stream_until_it_is(tmp_path: Path) -> None:
    leave_a_wide_hole(tmp_path)
    options: dict[str, Any] = {"subscribe": "orders", "maxOffsetsPerTrigger": "5"}
    with StreamRun(tmp_path, startingOffsets="earliest", **options) as run:
        batches = [run.batch() or [], run.batch() or []]
        assert [offset for _, offset, _ in joined(batches)] == list(range(HELD))
        command = f"{HELD} to {END - 1} .*forebay accept-loss {ORDERS}.*failOnDataLoss=false"
        with pytest.raises(LostOffsets, match=command):
            run.batch()
        accept(tmp_path)
        batches += run.drain()
    require_both_sides(batches)
    assert len(batches) == 4


def restore_with_a_lost_log(data: Path) -> None:
    """10 uploaded messages, from which a lost catalog is rebuilt, and 10 new ones."""
    settings = settings_of(data, metadata=MetadataSettings())
    with Store(settings) as store:
        append(store.topic(ORDERS), HELD)
        store.topic(ORDERS).upload()
    shutil.rmtree(data / "wal")
    for file in data.glob("catalog.db*"):
        file.unlink()
    done("restore", ORDERS, "--data", data, "--runner", "threads")
    with Store(settings) as store:
        append(store.topic(ORDERS), HELD)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_restored_topic_is_streamed_without_empty_batches(tmp_path: Path, accepted: bool) -> None:
    restore_with_a_lost_log(tmp_path)
    options: dict[str, Any] = {"subscribe": "orders", "maxOffsetsPerTrigger": "100"}
    if accepted:
        accept(tmp_path)
    else:
        options["failOnDataLoss"] = "false"
    with StreamRun(tmp_path, startingOffsets="earliest", **options) as run:
        batches = [run.batch(), run.batch()]
        assert batches[-1] is None, "one batch has everything"
    assert len(batches[0] or []) == 2 * HELD
