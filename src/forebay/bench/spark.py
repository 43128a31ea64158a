"""`forebay bench spark`: compares the pipeline with what the same Spark does without it.

- `spark.read.format("forebay")`, compared with batches made in advance (`CeilingSource`: Spark
  processes batches, but nothing has to be read), and with Parquet. Three quarters of the rows are
  in objects, the rest in segments. The aggregate reads every column of every row, and is checked.
- `verify`, compared with a bare read of the same objects by the same executors.
- `offload` of many topics, compared with two processes that run the same transfer function. These
  get tasks that are already planned and announced. Spark's time is that of the whole job: planning,
  intents, transfer, reading back, commits. Each round begins with the same catalog.
- Planning over 100,000 objects (`spark_planning`), compared with the time to read 1 GiB.

One session with unix sockets between Python and Java, `local[2]`; everything is warm, and files
are in the kernel's cache on both sides.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import forebay
from forebay.bench.measure import Measurement, Result, rate_of, result_of, run_rounds, scratch
from forebay.bench.spark_planning import measure_planning
from forebay.format.names import object_key
from forebay.limits import MIB, TASK_BYTES
from forebay.pipeline import offload, spark_session, verify
from forebay.pipeline.execute import Done, Progress, SparkExecutor, pack
from forebay.pipeline.jobs.offload import Offload, run_task
from forebay.pipeline.location import job_settings
from forebay.settings import SparkSettings, StoreSettings, UploaderSettings
from forebay.topic.resources import executor_resources
from forebay.topic.view import StoreView
from forebay.upload import engine

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

MASTER: Final = "local[2,4]"
SIZES: Final = (100, 1024)
SCAN_GOALS: Final = {100: (0.65, None), 1024: (0.75, 0.65)}
"""Of the ceiling and of Parquet, by the size of a message."""
TOPIC_BYTES: Final = 20_000_000
DESCRIPTORS: Final = 100_000
OFFLOAD_GOAL: Final = 0.75
VERIFY_GOAL: Final = 0.6
_OBJECT_BYTES: Final = 256 * MIB
_BATCH_BYTES: Final = 2 * MIB
_READ_BYTES: Final = 4 * MIB
_CATALOG: Final = ("catalog.db", "catalog.db-wal", "catalog.db-shm")
_MESSAGE: Final = b"m" * 1024


def run(
    directory: Path | None, *, rounds: int, mib: int, topics: int, progress: bool
) -> dict[str, Any]:
    started = time.perf_counter()
    say: Callable[[str], None] = (
        (lambda text: print(text, file=sys.stderr)) if progress else (lambda _text: None)
    )
    with scratch(directory) as folder:
        options = {"spark.local.dir": str(folder / "spark"), "spark.driver.memory": "2g"}
        say("starting Spark")
        spark = spark_session(SparkSettings(MASTER, options), app_name="forebay bench")
        try:
            results, planning = _measure(spark, folder, rounds, mib, topics, say)
        finally:
            spark.stop()
    return result_of(
        "spark",
        rounds,
        directory,
        seconds=time.perf_counter() - started,
        results=[result.as_json() for result in results],
        planning=planning,
    )


def _measure(
    spark: SparkSession,
    folder: Path,
    rounds: int,
    mib: int,
    topics: int,
    say: Callable[[str], None],
) -> tuple[list[Result], dict[str, Any]]:
    results: list[Result] = []
    for size in SIZES:
        say(f"writing {mib} MiB in messages of {size} B")
        table = _write_table(spark, folder / f"scan-{size}", size, mib)
        say("warming up")
        results += run_rounds(_scans(spark, table), rounds, folder, say)
    reading = next(r for r in results if r.message_bytes == SIZES[-1])
    results += run_rounds([_verifying(spark, table)], rounds, folder, say)
    say(f"writing {topics} topics")
    backlog = _write_backlog(folder / "backlog", topics, TOPIC_BYTES)
    pool = PoolExecutor(2)
    try:
        pair = _offloading(spark, backlog, pool)
        pair.ours(folder)
        pair.limit(folder)
        results += run_rounds([pair], rounds, folder, say)
    finally:
        pool.close()
    say(f"planning over {DESCRIPTORS} descriptors")
    planning = measure_planning(folder, DESCRIPTORS)
    planning["seconds_to_read_1_gib"] = 1024 / reading.rate
    return results, planning


# ---- the batch source ----


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


def _write_table(spark: SparkSession, folder: Path, message_bytes: int, mib: int) -> Table:
    data, name = folder / "data", f"m{message_bytes}"
    uploader = UploaderSettings(enabled=False, max_object_bytes=_OBJECT_BYTES)
    settings = StoreSettings(data=data, uploader=uploader)
    rows = mib * MIB // message_bytes
    noise = random.randbytes(16 * MIB)
    with forebay.open(settings) as store:
        topic = store.topic(name)
        for first, last in ((0, rows * 3 // 4), (rows * 3 // 4, rows)):
            for at in range(first, last, 5000):
                topic.append_many(_messages(noise, message_bytes, min(5000, last - at)))
            topic.flush()
            if first == 0:
                assert offload(settings, [name], spark=spark).ok
    parquet = folder / f"parquet-{message_bytes}"
    table = Table(data, name, parquet, message_bytes, rows, 0)
    ours = _forebay(spark, table)
    ours.write.option("compression", "none").parquet(str(parquet))
    return replace(table, splits=ours.rdd.getNumPartitions())


def _messages(noise: bytes, size: int, count: int) -> list[bytes]:
    """Different ones, which do not compress: Parquet stores a repeated value once."""
    places = random.choices(range(len(noise) - size), k=count)
    return [noise[at : at + size] for at in places]


def _scans(spark: SparkSession, table: Table) -> list[Measurement]:
    """In pairs, so that contender and limit are next to each other in every round."""
    spark.dataSource.register(CeilingSource)
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(TASK_BYTES))
    ceiling, parquet = SCAN_GOALS.get(table.message_bytes, (None, None))

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
            "spark.read", size, "MiB/s", ours, "batches made in advance", made_in_advance, ceiling
        ),
        Measurement("spark.read", size, "MiB/s", ours, "Parquet", files, parquet),
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


class CeilingSource(DataSource):
    """The fastest that a Python source can be: batches made in advance, yielded again and again.

    Its columns are those that the benchmark reads. Options: `rows`, `messageBytes`, `splits`.
    """

    @classmethod
    def name(cls) -> str:
        return "forebay-ceiling"

    def schema(self) -> str:
        return "offset bigint, value binary"

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return _CeilingReader(self.options)


class _Rows(InputPartition):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class _CeilingReader(DataSourceReader):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._rows = int(options["rows"])
        self._bytes = int(options["messageBytes"])
        self._splits = int(options["splits"])

    def partitions(self) -> Sequence[InputPartition]:
        each, rest = divmod(self._rows, self._splits)
        return [_Rows(each + (number < rest)) for number in range(self._splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Rows)
        rows = partition.rows
        size = max(_BATCH_BYTES // self._bytes, 1)
        batch = _batch(size, self._bytes)
        while rows >= size:
            yield batch
            rows -= size
        if rows:
            yield batch.slice(0, rows)


_made: Final[dict[tuple[int, int], pa.RecordBatch]] = {}


def _batch(rows: int, message_bytes: int) -> pa.RecordBatch:
    """The same one for every partition of this worker."""
    key = (rows, message_bytes)
    if key not in _made:
        offsets = pa.array(range(rows), pa.int64())
        values = pa.array([b"x" * message_bytes] * rows, pa.binary())
        _made[key] = pa.RecordBatch.from_arrays([offsets, values], ["offset", "value"])
    return _made[key]


# ---- verify ----


def _verifying(spark: SparkSession, table: Table) -> Measurement:
    settings = job_settings(StoreSettings(data=table.data))
    with StoreView(settings) as view:
        topic = view.topic(table.topic)
        objects = [(object_key(topic.topic, d.object_id), d.size) for d in topic.objects()]
    size = sum(each for _, each in objects) / MIB
    tasks = pack(objects, lambda each: each[1], TASK_BYTES, least=2)

    def ours(_path: Path) -> float:
        def work() -> None:
            assert verify(settings, [table.topic], spark=spark).ok

        return rate_of(size, work)

    def bare(_path: Path) -> float:
        read = partial(_read_object, settings)
        return rate_of(size, lambda: SparkExecutor(spark).run(tasks, read, "bare read"))

    ours(table.data)
    bare(table.data)
    return Measurement(
        "verify",
        table.message_bytes,
        "MiB/s",
        ours,
        "a bare read in the same tasks",
        bare,
        VERIFY_GOAL,
    )


def _read_object(settings: StoreSettings, stored: tuple[str, int]) -> int:
    """On an executor: the bytes of an object, and nothing made of them."""
    key, size = stored
    store = executor_resources(settings).store
    return sum(
        len(store.get_range(key, at, min(at + _READ_BYTES, size)))
        for at in range(0, size, _READ_BYTES)
    )


# ---- offload ----


def _offloading(spark: SparkSession, backlog: Backlog, pool: PoolExecutor) -> Measurement:
    return Measurement(
        "offload, commits included",
        1024,
        "MiB/s",
        partial(_spark_rate, backlog, spark),
        "two processes, transfers alone",
        partial(_pool_rate, backlog, pool),
        OFFLOAD_GOAL,
    )


@dataclass(frozen=True, slots=True)
class Backlog:
    """Topics with messages that are synced and not uploaded."""

    settings: StoreSettings
    size: int

    @property
    def _data(self) -> Path:
        return Path(self.settings.data or "")

    def reset(self) -> None:
        """Nothing is uploaded."""
        shutil.rmtree(self._data / "objects", ignore_errors=True)
        for name in _CATALOG:
            (self._data / name).unlink(missing_ok=True)
            saved = self._data / "saved" / name
            if saved.exists():
                shutil.copy(saved, self._data / name)


def _write_backlog(path: Path, topics: int, topic_bytes: int) -> Backlog:
    settings = job_settings(StoreSettings(data=path, uploader=UploaderSettings(enabled=False)))
    with forebay.open(settings) as store:
        for number in range(topics):
            topic = store.topic(f"t{number}")
            left = topic_bytes // (len(_MESSAGE) + 100)
            while left:
                count = min(left, 5000)
                topic.append_many([_MESSAGE] * count)
                left -= count
            topic.flush()
        size = sum(
            segment.size
            for number in range(topics)
            for segment in store.topic(f"t{number}").segments()
        )
    (path / "saved").mkdir()
    for name in _CATALOG:
        if (path / name).exists():
            shutil.copy(path / name, path / "saved" / name)
    return Backlog(settings, size)


def _spark_rate(backlog: Backlog, spark: SparkSession, _path: Path) -> float:
    """MiB a second of the whole job."""
    backlog.reset()

    def work() -> None:
        report = offload(backlog.settings, spark=spark)
        assert report.ok, report.rows
        assert report.bytes == backlog.size

    return rate_of(backlog.size / MIB, work)


def _pool_rate(backlog: Backlog, pool: PoolExecutor, _path: Path) -> float:
    """MiB a second of the transfers alone."""
    backlog.reset()
    with Offload(backlog.settings, pool) as run:
        uploads: list[engine.UploadTask] = []
        for name in run.store.topics():
            plan = run.planner(run.store.topic(name).topic).plan(None, force=True)
            assert plan is not None
            uploads += [
                engine.intend(run.catalog(), plan.topic, plan.epoch, planned, store=run.objects())
                for planned in plan.objects
            ]
        tasks = pack(uploads, lambda each: each.size, TASK_BYTES, least=pool.slots())
        work = partial(run_task, backlog.settings)

        def transfer() -> None:
            done = pool.run(tasks, work, "bench")
            assert all(each.error is None for task in done for each in task)

        return rate_of(backlog.size / MIB, transfer)


def _run_task(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[Done[_Result]]:
    return [Done(work(item), None) for item in items]


class PoolExecutor:
    """A pool of processes in place of Spark's executors.

    They are spawned: clients of stores do not survive a fork.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context)

    def slots(self) -> int:
        return self._processes

    def run(
        self,
        tasks: Sequence[Sequence[_Item]],
        work: Callable[[_Item], _Result],
        label: str,  # noqa: ARG002
        progress: Progress | None = None,  # noqa: ARG002
    ) -> list[list[Done[_Result]]]:
        return list(self._pool.map(partial(_run_task, work), tasks))

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        self._pool.shutdown()
