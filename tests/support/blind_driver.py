"""A driver of Spark that does what it is told: several jobs on one session, with one JVM.

As a program: takes one JSON object a line, and answers each with one. As a module: starts it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.settings import SparkSettings
from support.paths import TESTS
from support.spark_cluster import LocalCluster, end_session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PATIENCE: Final = 400.0
FILLER: Final = "." * 500


class BlindDriver:
    """The driver's process, with its JVM in a session of its own."""

    def __init__(self, cluster: LocalCluster, folder: Path, token: str = "") -> None:
        self._errors = folder / "driver.err"
        settings = cluster.settings()
        options = json.dumps(dict(settings.options))
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, settings.master, options],
                env={
                    **cluster.environment(),
                    "PYTHONPATH": str(TESTS),
                    "FOREBAY_TOKEN": token,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def begin(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    @property
    def has_answered(self) -> bool:
        """Whether there is an answer that nobody took yet."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def wait_until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.005)

    def answer(self) -> Any:
        """Of what was begun; fails with the driver's own words."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._said()
        told = json.loads(line)
        assert "error" not in told, told["error"]
        return told["answer"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.answer()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        end_session(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def seen(path: str, _number: int) -> tuple[int, list[str]]:
    """On an executor: its worker, and what it finds there."""
    return os.getsid(0), [each.name for each in Path(path).iterdir()]


def look(spark: SparkSession, path: str) -> Any:
    from forebay.pipeline.execute import SparkExecutor

    done = SparkExecutor(spark).run([[number] for number in range(8)], partial(seen, path), "look")
    return [each.result for task in done for each in task]


def offload(spark: SparkSession, path: str) -> Any:
    from forebay.pipeline import offload as run

    report = run(path, spark=spark)
    return {"ok": report.ok, "messages": report.messages, "text": str(report.rows)[:2000]}


def compact(spark: SparkSession, path: str, target: int) -> bool:
    from forebay.pipeline import compact as run

    return run(path, spark=spark, target_bytes=target).ok


def scan(spark: SparkSession, path: str, mark: str) -> Any:
    """The sums over all topics `t…`; the file `mark` is there when a task has begun."""
    reader = spark.read.format("forebay").option("path", path).option("splitBytes", "1MiB")
    rows = (
        reader.option("subscribePattern", "/default/t.*").option("columns", "offset,value").load()
    )
    return sums(rows, "offset", mark)


def scan_ledgers(spark: SparkSession, path: str, mark: str) -> Any:
    """`scan` of the ledgers below a directory, without the catalog."""
    reader = spark.read.format("pulsar-offload").option("splitBytes", "1MiB")
    return sums(reader.option("columns", "value,__entryId").load(path), "__entryId", mark)


def sums(rows: DataFrame, number: str, mark: str) -> Any:
    def marked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            Path(mark).touch()
            yield batch

    found = (
        rows.mapInArrow(marked, rows.schema)
        .selectExpr("count(*) n", f"sum({number}) s", "sum(length(value)) b", "sum(crc32(value)) c")
        .first()
    )
    assert found is not None
    return found.asDict()


def write(
    spark: SparkSession, options: dict[str, str], count: int, partitions: int, topics: int
) -> None:
    """Rows with their numbers, those of one topic in ascending order."""
    rows = spark.range(0, count, 1, partitions).selectExpr(
        f"concat(cast(id as string), ' {FILLER}') as value",
        f"concat('/default/w', cast(id % {topics} as string)) as topic",
    )
    rows.write.format("forebay").mode("append").options(**options).save()


def stream(spark: SparkSession, source: str, checkpoint: str, options: dict[str, str]) -> None:
    """Whatever lines the files of a directory hold, in one run."""
    lines = spark.readStream.text(source)
    query = (
        lines.writeStream.format("forebay")
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(int(PATIENCE)):
        raise TimeoutError("the query does not end")


def main(settings: SparkSettings) -> None:
    from forebay.pipeline import spark_session

    spark = spark_session(settings)
    doing: dict[str, Callable[..., Any]] = {
        "look": look,
        "offload": offload,
        "compact": compact,
        "scan": scan,
        "scan_ledgers": scan_ledgers,
        "write": write,
        "stream": stream,
    }
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = {"answer": doing[told.pop("do")](spark, **told)}
        except Exception as error:  # noqa: BLE001  # told to the test, which fails
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(SparkSettings(sys.argv[1], json.loads(sys.argv[2])))
