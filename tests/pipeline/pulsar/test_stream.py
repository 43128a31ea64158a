"""`spark.readStream.format("pulsar-offload")`: ledgers that appear in a bucket are new data."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from forebay.errors import MissingData, UsageError
from forebay.pipeline.pulsar.options import pulsar_options
from forebay.pipeline.pulsar.stream import PulsarStreamReader
from support import pulsar_entries as pulsar
from support.pulsar_buckets import TOPIC, at, put_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE = 400


class Run:
    """One run of a query without Spark: asks the source what Spark asks, in the same order."""

    def __init__(
        self,
        path: Path,
        checkpoint: dict[str, Any] | None = None,
        *,
        now: bool = False,
        **options: str,
    ) -> None:
        given = {"path": str(path), "columns": "value,__kind", **options}
        self.reader = PulsarStreamReader(pulsar_options(given, streaming=True))
        if now:
            self.reader.prepareForTriggerAvailableNow()
        self.checkpoint = self.reader.initialOffset() if checkpoint is None else checkpoint

    def batch(self, limit: ReadLimit | None = None) -> list[bytes] | None:
        """The values of the next batch; None if there is nothing new."""
        wanted = limit or self.reader.getDefaultReadLimit()
        after = json.loads(json.dumps(self.reader.latestOffset(self.checkpoint, wanted)))
        if after == self.checkpoint:
            return None
        before, self.checkpoint = self.checkpoint, after
        return self.read(before, after)

    def read(self, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
        planned = pickle.dumps(self.reader.partitions(start, end))
        return [
            row["value"] if row["__kind"] == "message" else b"?" + row["value"]
            for partition in pickle.loads(planned)
            for batch in self.reader.read(partition)
            for row in batch.to_pylist()
        ]

    def drain(self) -> list[list[bytes]]:
        found = []
        while (rows := self.batch()) is not None:
            found.append(rows)
        self.reader.stop()
        return found


def entries_of(ledger_id: int, count: int = 3) -> list[bytes]:
    return [pulsar.entry(b"%d-%d" % (ledger_id, number)) for number in range(count)]


def values_of(*ledger_ids: int) -> list[bytes]:
    return [b"%d-%d" % (each, number) for each in ledger_ids for number in range(3)]


def test_ledgers_are_read_once_in_whatever_order_they_appear(tmp_path: Path) -> None:
    order = list(range(1, 30))
    random.Random(5).shuffle(order)
    found: list[bytes] = []
    with closing(at(tmp_path)) as store:
        checkpoint: dict[str, Any] | None = None
        for at_once in (order[:1], order[1:4], [], order[4:20], order[20:]):
            for ledger_id in at_once:
                put_ledger(store, ledger_id, entries_of(ledger_id))
            run = Run(tmp_path, checkpoint)
            found += [value for batch in run.drain() for value in batch]
            checkpoint = run.checkpoint
    assert Counter(found) == Counter(values_of(*order))
    assert checkpoint == {TOPIC: "1-29"}


def test_a_batch_that_is_run_again_reads_the_same_ledgers(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        for ledger_id in (3, 5, 9):
            put_ledger(store, ledger_id, entries_of(ledger_id))
        first = Run(tmp_path, maxLedgersPerTrigger="2")
        start = first.checkpoint
        found = first.batch()
        assert found == values_of(3, 5)
        put_ledger(store, 4, entries_of(4))
        again = Run(tmp_path, start, maxLedgersPerTrigger="2")
        assert again.read(start, first.checkpoint) == found
        again.checkpoint = first.checkpoint
        assert again.drain() == [values_of(4, 9)]


def test_batches_are_limited_by_ledgers_and_by_bytes(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        for ledger_id in range(5):
            put_ledger(store, ledger_id, entries_of(ledger_id))
    sizes = [len(rows) for rows in Run(tmp_path, maxLedgersPerTrigger="2").drain()]
    assert sizes == [6, 6, 3]
    sizes = [len(rows) for rows in Run(tmp_path, maxBytesPerTrigger="1").drain()]
    assert sizes == [3] * 5
    both = Run(tmp_path, maxBytesPerTrigger="1KiB", maxLedgersPerTrigger="4")
    assert [len(rows) for rows in both.drain()] == [9, 6]
    with pytest.raises(UsageError, match="does not support the limit"):
        Run(tmp_path).batch(ReadMaxRows(3))


def test_available_now_ends_with_what_was_there_at_the_start(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        put_ledger(store, 7, entries_of(7))
        run = Run(tmp_path, now=True)
        put_ledger(store, 6, entries_of(6))
        assert run.drain() == [values_of(7)]
        assert Run(tmp_path, run.checkpoint, now=True).drain() == [values_of(6)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (1, 3, 2)])
def test_a_message_in_chunks_comes_once_when_its_last_ledger_has_come(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    data = pulsar.chunks(b"abcdef", 2, "p-1")
    checkpoint: dict[str, Any] | None = None
    batches: list[list[bytes]] = []
    with closing(at(tmp_path)) as store:
        for ledger_id in order:
            put_ledger(store, ledger_id, [data[ledger_id - 1]])
            run = Run(tmp_path, checkpoint)
            batches += run.drain()
            checkpoint = run.checkpoint
    chunks = [b"?ab", b"?cd", b"?ef"]
    assert batches == [[chunks[order[0] - 1]], [chunks[order[1] - 1]], [b"abcdef"]]


def test_ledgers_that_are_gone_are_an_error_or_are_left_out(tmp_path: Path) -> None:
    with closing(at(tmp_path)) as store:
        keys = {each: put_ledger(store, each, entries_of(each)) for each in (1, 2)}
        run = Run(tmp_path)
        start = run.checkpoint
        assert run.batch() == values_of(1, 2)
        for ending in ("", "-index"):
            store.delete_object(keys[1] + ending)
        with pytest.raises(MissingData, match=f"the ledgers 1 of {TOPIC} were deleted"):
            Run(tmp_path, start).read(start, run.checkpoint)
        lenient = Run(tmp_path, start, failOnDataLoss="false")
        assert lenient.read(start, run.checkpoint) == values_of(2)


def collected(spark: SparkSession, folder: Path) -> list[bytes]:
    rows = spark.read.parquet(str(folder / "rows")).collect()
    return sorted(bytes(row["value"]) for row in rows)


def run_query(spark: SparkSession, bucket: Path, folder: Path, *, fail_at: int = -1) -> None:
    """Reads what is there; a batch with the number `fail_at` fails after it was written."""

    def write(frame: DataFrame, batch: int) -> None:
        frame.write.mode("overwrite").parquet(str(folder / "rows" / f"batch={batch}"))
        if batch == fail_at:
            raise RuntimeError("as if the driver had been killed")

    query = (
        spark.readStream.format("pulsar-offload")
        .options(columns="value", maxLedgersPerTrigger="2")
        .load(str(bucket))
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE)


def test_a_query_that_fails_goes_on_without_a_loss_and_without_a_copy(
    spark: SparkSession, tmp_path: Path
) -> None:
    bucket, folder = tmp_path / "bucket", tmp_path / "query"
    with closing(at(bucket)) as store:
        for ledger_id in (10, 12, 30):
            put_ledger(store, ledger_id, entries_of(ledger_id))
        with pytest.raises(Exception, match="as if the driver had been killed"):
            run_query(spark, bucket, folder, fail_at=0)
        put_ledger(store, 11, entries_of(11))
        run_query(spark, bucket, folder)
        put_ledger(store, 5, entries_of(5))
        run_query(spark, bucket, folder)
    assert collected(spark, folder) == sorted(values_of(5, 10, 11, 12, 30))
