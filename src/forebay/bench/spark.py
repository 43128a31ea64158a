"""`forebay bench spark`: the pipeline beside what the same Spark does without it, in one run.

- The batch source beside batches made in advance, and beside Parquet (`spark_scan`).
- Offload of many topics beside two processes with the same transfer function (`spark_offload`).
- `verify` beside a bare read of the same objects by the same executors.
- Planning over 100,000 descriptors, beside the time in which the source reads 1 GiB
  (`spark_plan`).

One session with unix sockets between Python and Java, `local[2]`; everything is warm, and files
are in the kernel's cache on both sides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.bench.measure import Measurement, Result, machine, rate_of, run_rounds, scratch
from forebay.bench.spark_memory import measure_memory
from forebay.bench.spark_offload import Backlog, pool_rate, spark_rate, write_backlog
from forebay.bench.spark_plan import measure_planning
from forebay.bench.spark_processes import ProcessExecutor
from forebay.bench.spark_scan import Table, measurements, write_table
from forebay.format.codec import COMPILED
from forebay.format.names import object_key
from forebay.limits import MIB, TASK_BYTES
from forebay.pipeline.execute import SparkExecutor, pack
from forebay.pipeline.jobs.verify import verify
from forebay.pipeline.location import job_settings
from forebay.pipeline.resources import executor_resources
from forebay.pipeline.session import spark_session
from forebay.settings import SparkSettings, StoreSettings
from forebay.topic.view import StoreView

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[2,4]"
SIZES: Final = (100, 1024)
TOPIC_BYTES: Final = 20_000_000
DESCRIPTORS: Final = 100_000
OFFLOAD_GOAL: Final = 0.75
VERIFY_GOAL: Final = 0.6
_READ_BYTES: Final = 4 * MIB


def run(
    directory: Path | None, *, rounds: int, mib: int, topics: int, memory: bool, progress: bool
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
        about = machine(folder, compiled=COMPILED)
    grown = {"spark_memory": measure_memory(directory, say)} if memory else {}
    return {
        **grown,
        "benchmark": "spark",
        "rounds": rounds,
        "machine": about,
        "seconds": time.perf_counter() - started,
        "results": [result.as_json() for result in results],
        "planning": planning,
    }


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
        table = write_table(spark, folder / f"scan-{size}", size, mib)
        say("warming up")
        results += run_rounds(measurements(spark, table), rounds, folder, say)
    reading = next(r for r in results if r.message_bytes == SIZES[-1])
    results += run_rounds([_verifying(spark, table)], rounds, folder, say)
    say(f"writing {topics} topics")
    backlog = write_backlog(folder / "backlog", topics, TOPIC_BYTES)
    pool = ProcessExecutor(2)
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


def _offloading(spark: SparkSession, backlog: Backlog, pool: ProcessExecutor) -> Measurement:
    return Measurement(
        "offload, commits included",
        1024,
        "MiB/s",
        partial(spark_rate, backlog, spark),
        "two processes, transfers alone",
        partial(pool_rate, backlog, pool),
        OFFLOAD_GOAL,
    )


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
