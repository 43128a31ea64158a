"""The batch source beside the ceiling of Spark's Python sources, and beside Parquet.

The same rows, columns (`offset`, `value`), splits and aggregate for all three, in one warm
session. Three quarters of the rows are in objects, the rest in segments. The aggregate reads
every column of every row, and its result is compared with what was written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import forebay
from forebay.bench.measure import Measurement, rate_of
from forebay.bench.spark_ceiling import CeilingSource
from forebay.limits import MIB, TASK_BYTES
from forebay.pipeline.execute import SparkExecutor
from forebay.pipeline.jobs.offload import Offload
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings, UploaderSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OBJECT_BYTES: Final = 256 * MIB
GOALS: Final = {100: (0.65, None), 1024: (0.75, 0.65)}
"""Of the ceiling and of Parquet, by the size of a message."""


@dataclass(frozen=True, slots=True)
class Table:
    """One topic, and the same rows as Parquet files."""

    data: Path
    topic: str
    parquet: Path
    message_bytes: int
    rows: int
    splits: int

    @property
    def size(self) -> float:
        """Of the payloads, in MiB."""
        return self.rows * self.message_bytes / MIB


def write_table(spark: SparkSession, folder: Path, message_bytes: int, mib: int) -> Table:
    data, name = folder / "data", f"m{message_bytes}"
    uploader = UploaderSettings(enabled=False, max_object_bytes=_OBJECT_BYTES)
    settings = job_settings(StoreSettings(data=data, uploader=uploader))
    rows = mib * MIB // message_bytes
    noise = random.randbytes(16 * MIB)
    with forebay.open(settings) as store:
        topic = store.topic(name)
        for first, last in ((0, rows * 3 // 4), (rows * 3 // 4, rows)):
            for at in range(first, last, 5000):
                topic.append_many(_messages(noise, message_bytes, min(5000, last - at)))
            topic.flush()
            if first == 0:
                with Offload(settings, SparkExecutor(spark)) as run:
                    assert run.once([name], force=True).ok
    parquet = folder / f"parquet-{message_bytes}"
    table = Table(data, name, parquet, message_bytes, rows, 0)
    ours = _forebay(spark, table)
    ours.write.option("compression", "none").parquet(str(parquet))
    return Table(data, name, parquet, message_bytes, rows, ours.rdd.getNumPartitions())


def _messages(noise: bytes, size: int, count: int) -> list[bytes]:
    """Each another one, and none that compresses: Parquet would store a repeated one once."""
    places = random.choices(range(len(noise) - size), k=count)
    return [noise[at : at + size] for at in places]


def measurements(spark: SparkSession, table: Table) -> list[Measurement]:
    """In pairs, so that contender and limit are next to each other in every round."""
    spark.dataSource.register(CeilingSource)
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(TASK_BYTES))
    ceiling, parquet = GOALS.get(table.message_bytes, (None, None))

    def ours(_path: Path) -> float:
        return _rate(_forebay(spark, table), table, offsets=True)

    def made_in_advance(_path: Path) -> float:
        return _rate(_ceiling(spark, table), table, offsets=False)

    def files(_path: Path) -> float:
        return _rate(spark.read.parquet(str(table.parquet)), table, offsets=True)

    for warm_up in (ours, made_in_advance, files):
        warm_up(table.data)
    size = table.message_bytes
    return [
        Measurement(
            "batch source", size, "MiB/s", ours, "batches made in advance", made_in_advance, ceiling
        ),
        Measurement("batch source", size, "MiB/s", ours, "Parquet", files, parquet),
    ]


def _forebay(spark: SparkSession, table: Table) -> DataFrame:
    return (
        spark.read.format("forebay")
        .option("path", str(table.data))
        .option("subscribe", table.topic)
        .option("columns", "offset,value")
        .load()
    )


def _ceiling(spark: SparkSession, table: Table) -> DataFrame:
    return (
        spark.read.format(CeilingSource.name())
        .option("rows", table.rows)
        .option("messageBytes", table.message_bytes)
        .option("splits", table.splits)
        .load()
    )


def _rate(frame: DataFrame, table: Table, *, offsets: bool) -> float:
    """MiB of payloads a second through the aggregate."""

    def work() -> None:
        query = frame.selectExpr("count(*) n", "sum(length(value)) b", "sum(offset) o")
        found = query.first()
        assert found is not None
        assert (found["n"], found["b"]) == (table.rows, table.rows * table.message_bytes)
        if offsets:
            assert found["o"] == table.rows * (table.rows - 1) // 2

    return rate_of(table.size, work)
