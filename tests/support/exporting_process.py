"""Exports that die or race, in processes of their own. Arguments: a mode, and what it takes.

`steps DATA FOLDER FORMAT FIRST STEP`: without Spark, one export after the other, each into a table
of its own and killed before another of its changes to the file system; then it is finished. One
line for each, `killed N`; the last is `passed N`, when an export came to its end.

`race DATA FOLDER FORMAT`: three exports at once, without Spark, into one table.

`spark DATA TABLE FORMAT`: one export on Spark, which says `ready` when it begins.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import deltalake  # noqa: F401  # all imports before the first fork
import pyarrow as pa
import pyiceberg.catalog.sql
import pyiceberg.table
from pyarrow import parquet
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from forebay.pipeline.jobs.export.iceberg import arrow_schema
from forebay.pipeline.jobs.export.job import ExportRun, open_target, rejected_location
from forebay.pipeline.jobs.export.plan import Batch, Bounds
from forebay.pipeline.jobs.export.tables import Files, Staged, Task, collect
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView
from support.exported_tables import offsets

REJECTED_EACH: Final = 5
_OURS: Final = [StructField("offset", LongType()), StructField("timestamp", TimestampType())]
_CHANGES: Final = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


class PlainStager:
    """Writes what Spark would, by hand: every fifth record is rejected, each batch has a column
    more than the one before."""

    def stage(self, task: Task, place: Path, side: Path | None = None) -> Files:
        batch = task.batch
        column = StructField(f"c{batch.start}", StringType())
        schema = StructType([*_OURS, column])
        if task.main.schema is not None:
            known = arrow_schema(task.main.schema).names
            schema = StructType([*_OURS, *(StructField(name, StringType()) for name in known[2:])])
            schema = schema if column.name in known else schema.add(column)
        good = [at for at in range(batch.start, batch.end) if at % REJECTED_EACH]
        bad = [at for at in range(batch.start, batch.end) if at % REJECTED_EACH == 0]
        files = Files(write(place, good, schema, batch), schema.json())
        if task.unfinished is not None or not bad:
            return files
        assert side is not None
        reasons = StructType([*_OURS, StructField("reason", StringType())])
        return Files(
            files.good, files.schema, write(side, bad, reasons, batch), reasons.json(), "by hand"
        )


def write(directory: Path, found: list[int], schema: StructType, batch: Batch) -> Staged:
    directory.mkdir()
    arrow = arrow_schema(schema.json())
    texts = {name: pa.array(["x"] * len(found), pa.string()) for name in arrow.names[2:]}
    times = pa.array([at * 1_000_001 for at in found], pa.timestamp("us", tz="UTC"))
    table = pa.table({"offset": pa.array(found, pa.int64()), "timestamp": times, **texts})
    parquet.write_table(table, directory / "part-0.parquet")
    return collect(directory, batch.start, batch.end)


def export_by_hand(data: Path, table: Path, kind: str, rows: int) -> None:
    with StoreView(StoreSettings(data=data)) as store, store.topic("orders") as view:
        topic = str(view.topic)
        main = open_target(kind, table, topic, None)
        side = open_target(kind, rejected_location(table), topic, None)
        bounds = Bounds(rows, 1 << 40)
        stop = view.end_offset
        run = ExportRun(view, PlainStager(), kind, main, side, bounds, None, stop, allow_gaps=False)
        report = run.report(run.run(), dry_run=False)
        assert report.ok, report.rows[-1].error
        assert report.next_offset == stop


def require_exactly_once(table: Path, kind: Any, count: int) -> None:
    """Every offset is in one of the tables once, and no file is there that is in neither."""
    aside = rejected_location(table)
    assert offsets(kind, table) == [at for at in range(count) if at % REJECTED_EACH]
    assert offsets(kind, aside) == list(range(0, count, REJECTED_EACH))
    for location in (table, aside):
        target = open_target(kind, location, "/default/orders", None)
        assert target.staging.unsettled() == []
        for directory in (location / "data").glob("*"):
            assert target.table.references(directory), f"{directory} is left over"
        target.table.close()


def die_at(number: int, folder: Path) -> None:
    """Before the n-th change to the file system below the folder, or call of a catalog's code."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def look(what: str, arguments: tuple[Any, ...]) -> None:
        writes = what == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        if (what in _CHANGES or writes) and str(arguments[0]).startswith(str(folder)):
            count()

    def trace(frame: FrameType, what: str, _argument: object) -> None:
        if what == "call" and frame.f_code.co_filename == pyiceberg.catalog.sql.__file__:
            count()

    sys.addaudithook(look)
    sys.setprofile(trace)


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def steps(data: Path, folder: Path, kind: str, first: int, step: int) -> None:
    for number in itertools.count(first, step):
        table = folder / str(number) / "orders"
        table.parent.mkdir(parents=True)

        def dying(table: Path = table, number: int = number) -> None:
            die_at(number, table.parent)
            export_by_hand(data, table, kind, 5)

        def finishing(table: Path = table) -> None:
            export_by_hand(data, table, kind, 4)
            require_exactly_once(table, kind, 14)

        code = ended(in_child(dying))
        if code not in (0, -signal.SIGKILL):
            sys.exit(code)
        if ended(in_child(finishing)) != 0:
            sys.exit(f"not exactly once after a kill at {number}")
        sys.stdout.write(f"{'killed' if code else 'passed'} {number}\n")
        sys.stdout.flush()
        if code == 0:
            return


def race(data: Path, folder: Path, kind: str) -> None:
    table = folder / "orders"
    table.parent.mkdir(parents=True, exist_ok=True)
    children = [
        in_child(lambda rows=rows: export_by_hand(data, table, kind, rows))  # type: ignore[misc]
        for rows in (1, 2, 3)
    ]
    codes = [ended(child) for child in children]
    if any(codes) or ended(in_child(lambda: require_exactly_once(table, kind, 14))) != 0:
        sys.exit(f"the exporters ended with {codes}")


def on_spark(data: Path, table: Path, kind: Any) -> None:
    from forebay.pipeline.jobs.export.job import export
    from forebay.pipeline.session import spark_session
    from forebay.settings import SparkSettings

    spark = spark_session(SparkSettings("local[2,4]", {"spark.sql.shuffle.partitions": "2"}))
    spark.range(1).count()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    export(data, "orders", table, format=kind, value="json", max_batch_rows=7, spark=spark)
    sys.stdout.write("done\n")
    sys.stdout.flush()


def main() -> None:
    mode, data, place, kind, *numbers = sys.argv[1:]
    if mode == "steps":
        steps(Path(data), Path(place), kind, *map(int, numbers))
    elif mode == "race":
        race(Path(data), Path(place), kind)
    else:
        on_spark(Path(data), Path(place), kind)


if __name__ == "__main__":
    main()
