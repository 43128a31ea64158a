"""A million messages in twenty topics, over every tier, read by Spark: each one once.

Then the same while producers append, and while offload and compaction move what is read.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import pytest

import forebay
from forebay.pipeline import offload
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.topic.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPICS: Final = [f"/default/t{number}" for number in range(20)]
MESSAGES: Final = 50_000
"""In each topic; a quarter more comes while Spark reads."""
BATCH: Final = 2500


def payload(topic: str, offset: int) -> bytes:
    return b"%s %d" % (topic.encode(), offset)


def settings_of(data: Path) -> StoreSettings:
    return StoreSettings(
        data=data,
        wal=WalSettings(rotate_max_bytes=1_000_000),
        uploader=UploaderSettings(enabled=False, max_object_bytes=2_000_000),
        deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
    )


def append(store: Store, start: int, stop: int) -> None:
    for at in range(start, stop, BATCH):
        for name in TOPICS:
            topic = store.topic(name)
            topic.append_many([payload(name, n) for n in range(at, min(at + BATCH, stop))])
    for name in TOPICS:
        store.topic(name).flush()


@pytest.fixture(scope="module")
def stored(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Path]]:
    """Half in objects, some of it in objects alone; the rest in sealed and active segments."""
    data = tmp_path_factory.mktemp("million") / "data"
    settings = settings_of(data)
    with forebay.open(settings) as store:
        append(store, 0, MESSAGES // 2)
        assert offload(settings, spark=spark).ok
        for name in TOPICS[::2]:
            assert store.topic(name).trim_local()
        append(store, MESSAGES // 2, MESSAGES)
        assert all(len(store.topic(name).segments()) > 1 for name in TOPICS)
        yield store, data


def table(spark: SparkSession, data: Path) -> DataFrame:
    reader = spark.read.format("forebay").option("path", str(data))
    return reader.option("subscribePattern", "t[0-9]+").option("splitBytes", "4MiB").load()


AGGREGATE: Final = (
    "count(*) as n",
    "sum(offset) as offsets",
    "sum(crc32(value)) as hash",
    "max(offset) as last",
    "sum(int(cast(value as string) != concat(topic, ' ', offset))) as wrong",
)


def by_topic(frame: DataFrame) -> dict[str, dict[str, int]]:
    from pyspark.sql import functions as f

    found = frame.groupBy("topic").agg(*[f.expr(each) for each in AGGREGATE]).collect()
    return {row["topic"]: {k: v for k, v in row.asDict().items() if k != "topic"} for row in found}


@functools.cache
def hashes(topic: str) -> list[int]:
    """At each count: the sum over that many messages."""
    found = (crc32(payload(topic, offset)) for offset in range(MESSAGES + MESSAGES // 4))
    return list(itertools.accumulate(found, initial=0))


def expected(topic: str, count: int) -> dict[str, int]:
    return {
        "n": count,
        "offsets": count * (count - 1) // 2,
        "hash": hashes(topic)[count],
        "last": count - 1,
        "wrong": 0,
    }


def stream(spark: SparkSession, data: Path, checkpoint: Path, seen: dict[int, Any]) -> Any:
    """A query that keeps the sums of each batch; a batch that comes again replaces itself."""
    reader = spark.readStream.format("forebay").option("path", str(data))
    rows = (
        reader.option("subscribePattern", "t[0-9]+")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "400000")
        .load()
    )

    def keep(batch: DataFrame, number: int) -> None:
        seen[number] = by_topic(batch)

    writer = rows.writeStream.foreachBatch(keep)
    return writer.option("checkpointLocation", str(checkpoint))


def added_up(seen: dict[int, dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for batch in seen.values():
        for topic, sums in batch.items():
            have = total.setdefault(topic, dict.fromkeys(sums, 0))
            for name, value in sums.items():
                have[name] = max(have[name], value) if name == "last" else have[name] + value
    return total


def test_a_million_messages_are_read_exactly(
    spark: SparkSession, stored: tuple[Store, Path], tmp_path: Path
) -> None:
    _, data = stored
    wanted = {topic: expected(topic, MESSAGES) for topic in TOPICS}
    assert by_topic(table(spark, data)) == wanted
    seen: dict[int, Any] = {}
    query = stream(spark, data, tmp_path / "checkpoint", seen).trigger(availableNow=True).start()
    query.awaitTermination()
    assert len(seen) > 1, "the limit makes several batches"
    assert added_up(seen) == wanted


def test_they_are_read_exactly_while_everything_moves(
    spark: SparkSession, stored: tuple[Store, Path], tmp_path: Path
) -> None:
    from forebay.pipeline import compact

    store, data = stored
    settings = settings_of(data)
    more = MESSAGES + MESSAGES // 4
    seen: dict[int, Any] = {}
    failures: list[BaseException] = []
    appended = threading.Event()

    def produce() -> None:
        append(store, MESSAGES, more)
        appended.set()

    def move() -> None:
        while not appended.is_set():
            assert offload(settings, spark=spark).ok
            assert compact(settings, spark=spark, target_bytes=20_000_000).ok
            for name in TOPICS:
                store.topic(name).trim_local()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised again below
                failures.append(error)
                appended.set()

        return run

    threads = [threading.Thread(target=guarded(work)) for work in (produce, move)]
    query = stream(spark, data, tmp_path / "checkpoint", seen).start()
    for thread in threads:
        thread.start()
    while True:
        last_round = appended.is_set()
        for topic, sums in by_topic(table(spark, data)).items():
            count = sums["n"]
            assert MESSAGES <= count <= more
            assert sums == expected(topic, count)
        if last_round:
            break
    for thread in threads:
        thread.join()
    assert failures == []
    query.processAllAvailable()
    query.stop()
    wanted = {topic: expected(topic, more) for topic in TOPICS}
    assert added_up(seen) == wanted
    assert offload(settings, spark=spark).ok
    assert by_topic(table(spark, data)) == wanted
