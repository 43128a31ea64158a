"""`spark.readStream.format("forebay")` in real queries."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from forebay.pipeline.source.stream_offsets import stream_lag
from forebay.topic.store import Store
from support.driver_processes import DriverProcess
from support.holed_topics import END, HELD, accept, leave_a_wide_hole
from support.paths import SUPPORT
from support.scan_stores import append, fill_both_tiers, settings_of
from support.stream_runs import lose_the_start, require_exact
from support.stream_sinks import batches_in, rows_in, to_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PATIENCE = 400.0
ORDERS = "/default/orders"


@contextmanager
def started(
    spark: SparkSession, store: Path, folder: Path, *, now: bool = True, **options: str
) -> Iterator[StreamingQuery]:
    """A query that writes files; it is over when the block is."""
    reader = spark.readStream.format("forebay").options(startingOffsets="earliest")
    writer = (
        reader.options(**options)
        .load(str(store))
        .writeStream.foreachBatch(to_files(folder / "results"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )
    trigger: dict[str, Any] = {"availableNow": True} if now else {"processingTime": "0 seconds"}
    query = writer.trigger(**trigger).start()
    try:
        yield query
        if now:
            assert query.awaitTermination(int(PATIENCE))
    finally:
        query.stop()


def wait_until(query: StreamingQuery, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline, query.lastProgress
        time.sleep(0.05)


def has_rows(folder: Path, count: int) -> bool:
    return len(rows_in(folder)) >= count


def said(driver: DriverProcess, line: str) -> bool:
    return line in driver.lines


def test_all_there_is_comes_once_in_limited_batches_and_a_restart_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "query"
    with Store(settings_of(data)) as store:
        for name in ("orders", "returns"):
            fill_both_tiers(store.topic(name))
        names = "orders,returns"
        with started(spark, data, folder, maxOffsetsPerTrigger="100", subscribe=names) as query:
            pass
        assert [len(rows) for rows in batches_in(folder / "results")] == [100, 100, 40]
        assert [each["numInputRows"] for each in query.recentProgress][:3] == [100, 100, 40]
        append(store.topic("orders"), 25)
        with started(spark, data, folder, maxBytesPerTrigger="2KiB", subscribe=names) as query:
            pass
    assert len(batches_in(folder / "results")) > 4
    require_exact(rows_in(folder / "results"), {ORDERS: range(145), "/default/returns": range(120)})
    assert query.lastProgress is not None
    assert stream_lag(query.lastProgress) == {ORDERS: 0, "/default/returns": 0}


def test_an_accepted_hole_is_crossed_without_an_empty_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "query"
    leave_a_wide_hole(data)
    accept(data)
    with started(spark, data, folder, maxOffsetsPerTrigger="5", subscribe="orders") as query:
        pass
    assert [len(rows) for rows in batches_in(folder / "results")] == [5, 5, 5, 5]
    assert sorted(offset for _, offset, _ in rows_in(folder / "results")) == [
        *range(HELD),
        *range(END, END + HELD),
    ]
    first = query.recentProgress[0]
    assert stream_lag(first, data) == {ORDERS: 15}, "offsets without messages are no lag"
    assert stream_lag(first)[ORDERS] > END - HELD


def test_a_query_runs_while_topics_grow_move_and_appear(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "query"
    results = folder / "results"
    with Store(settings_of(data)) as store:
        orders = store.topic("orders-1")
        append(orders, 10)
        with started(spark, data, folder, now=False, subscribePattern="orders-.*") as query:
            for step in range(6):
                append(orders, 50)
                orders.rotate()
                orders.upload()
                append(orders, 5)
                orders.trim_local()
                if step == 2:
                    append(store.topic("orders-2"), 30)
                if step % 2:
                    wait_until(query, partial(has_rows, results, orders.watermarks().synced))
            whole = {"/default/orders-1": range(340), "/default/orders-2": range(30)}
            wait_until(query, partial(has_rows, results, 370))
            append(orders, 7)
            wait_until(query, partial(has_rows, results, 377))
    require_exact(rows_in(results), {**whole, "/default/orders-1": range(347)})


def test_lost_messages_stop_a_query_that_must_not_lose_any(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, folder = tmp_path / "data", tmp_path / "query"
    with Store(settings_of(data)) as store:
        append(store.topic("orders"), 10)
        with started(spark, data, folder, subscribe="orders"):
            pass
        fill_both_tiers(store.topic("orders"))
    lose_the_start(data)
    with (
        pytest.raises(
            StreamingQueryException,
            match=r"/default/orders: retention has deleted offsets 10 to \d+",
        ),
        started(spark, data, folder, subscribe="orders"),
    ):
        pass
    with started(spark, data, folder, subscribe="orders", failOnDataLoss="false"):
        pass
    found = rows_in(folder / "results")
    first = min(offset for _, offset, _ in found[10:])
    require_exact(found[:10], {ORDERS: range(10)})
    require_exact(found[10:], {ORDERS: range(first, 130)})


LATE = str(random.randint(5, 8))


@pytest.mark.spark
@pytest.mark.kill
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rows", "moments"),
    [
        (60, [("written", "1")]),
        pytest.param(
            25, [("writing", "2"), ("written", "4"), ("any", LATE)], marks=pytest.mark.soak
        ),
    ],
    ids=["once", "three times"],
)
def test_a_killed_driver_loses_nothing_and_doubles_nothing(
    tmp_path: Path, rows: int, moments: list[tuple[str, str]]
) -> None:
    data, folder = tmp_path / "data", tmp_path / "query"
    with Store(settings_of(data)) as store:
        for name in ("orders", "returns"):
            fill_both_tiers(store.topic(name))
    program: list[str | Path] = [SUPPORT / "stream_driver.py", data, folder, str(rows)]
    for moment in moments:
        with DriverProcess([*program, *moment]) as driver:
            line = " ".join(moment).replace("any", "written")
            driver.wait_until(partial(said, driver, line), line)
            driver.kill()
    with DriverProcess([*program, "never", "0"]) as driver:
        driver.finish()
    found = batches_in(folder / "results")
    assert len(found) == -(-240 // rows)
    require_exact(rows_in(folder / "results"), {ORDERS: range(120), "/default/returns": range(120)})
