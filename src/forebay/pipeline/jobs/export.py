"""`export`: a topic to a table of Parquet, Delta or Iceberg, each message exactly once.

The table itself says how far it has got. A run goes on from there to the end of what is synced,
in batches of bounded size: Spark writes the files of a batch beside the table, and the driver
commits them together with the offsets that they hold. A run that is killed leaves committed
batches and nothing else that a reader sees; the next one goes on.

With JSON values there are two tables. Rejected records are committed first, together with the
columns by which they were judged; if the exporter dies before the other commit, the next one
finishes that batch by the same columns. So a record is in one of the tables, and once.

What a caller gets wrong: `start` is for a table that is not there yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from forebay.errors import UsageError
from forebay.format.names import parse_topic
from forebay.limits import GIB
from forebay.pipeline.jobs.export_plan import Bounds
from forebay.pipeline.jobs.export_report import ExportReport
from forebay.pipeline.jobs.export_run import Run, Target
from forebay.pipeline.jobs.export_tables import ExportTable, Staging
from forebay.pipeline.jobs.export_write import SparkStager
from forebay.pipeline.site import site_settings
from forebay.pipeline.spread import Progress
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Format = Literal["parquet", "delta", "iceberg"]
Values = Literal["raw", "json"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
BATCH_ROWS: Final = 10_000_000
BATCH_BYTES: Final = 1 * GIB


def export(
    source: str | Path | StoreSettings,
    topic: str,
    table: str | Path,
    *,
    format: Format = "parquet",  # noqa: A002  # what Spark calls it
    catalog: str | Mapping[str, str] | None = None,
    value: Values = "raw",
    start: int | None = None,
    end: int | None = None,
    max_batch_rows: int = BATCH_ROWS,
    max_batch_bytes: int = BATCH_BYTES,
    allow_gaps: bool = False,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Brings the table up to the topic's synced end as it is now, or to `end`.

    `catalog` is for Iceberg: a URI, or properties of pyiceberg's; by default a SQLite file beside
    the table. Offsets that are gone end the run with an error in its report, after what comes
    before them was committed; with `allow_gaps` it goes on behind them.
    """
    settings = site_settings(source)
    name = str(parse_topic(topic))
    if value not in ("raw", "json"):
        raise UsageError(f"value is {value!r}; it must be 'raw' or 'json'")
    if max_batch_rows < 1 or max_batch_bytes < 1:
        raise UsageError("a batch holds at least one row and one byte")
    if start is not None and start < 0:
        raise UsageError(f"start is {start}; offsets begin at 0")
    if end is not None and end < 0:
        raise UsageError(f"end is {end}; offsets begin at 0")
    location = table_location(table)
    main = open_target(format, location, name, catalog)
    side = None
    if value == "json":
        side = open_target(format, rejected_location(location), name, catalog)
    with ExitStack() as stack:
        for target in filter(None, (main, side)):
            stack.callback(target.table.close)
        view = stack.enter_context(StoreView(settings)).topic(name)
        if start is not None and start > view.end_offset:
            raise UsageError(
                f"start is {start}, and {name} is synced up to offset {view.end_offset}: begin "
                "there or before"
            )
        stop = view.end_offset if end is None else min(end, view.end_offset)
        bounds = Bounds(max_batch_rows, max_batch_bytes)
        stager = SparkStager(settings, view, spark)
        run = Run(view, stager, format, main, side, bounds, start, stop, allow_gaps)
        rows = run.rehearse() if dry_run else run.perform(progress)
        return run.report(rows, dry_run=dry_run)


def table_location(table: str | Path) -> Path:
    """The table's directory; UsageError for a place that Spark cannot write to."""
    # One slash: a Path has made it of two.
    match = _URL.match(str(table))
    if match is not None and match["scheme"] != "file":
        raise UsageError(
            f"{table} is not a directory: the file systems of object stores are not in Spark's "
            "Python package; export to a directory, which may be a mounted bucket's"
        )
    return Path(str(table) if match is None else f"/{match['rest']}").absolute()


def rejected_location(location: Path) -> Path:
    return location.with_name(f"{location.name}_rejected")


def open_target(
    kind: str, location: Path, topic: str, catalog: str | Mapping[str, str] | None
) -> Target:
    """The table of a format, whether it is there already or not."""
    if catalog is not None and kind != "iceberg":
        raise UsageError(f"a catalog is for Iceberg's tables; this one is {kind}")
    table: ExportTable
    if kind == "parquet":
        from forebay.pipeline.jobs.export_parquet import ParquetTable

        table = ParquetTable(location, topic)
    elif kind == "delta":
        from forebay.pipeline.jobs.export_delta import DeltaExport

        table = DeltaExport(location, topic)
    elif kind == "iceberg":
        from forebay.pipeline.jobs.export_iceberg import IcebergExport

        table = IcebergExport(location, topic, catalog)
    else:
        raise UsageError(f"format is {kind!r}; it must be 'parquet', 'delta' or 'iceberg'")
    return Target(table, Staging(location))
