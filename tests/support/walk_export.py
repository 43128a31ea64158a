"""Exports and scans of a walk that need no JVM: the code that runs in Spark's driver and tasks.

Planning, reading and committing are those of the jobs. Only the files of a batch are written by
this process instead of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from forebay.errors import ForebayError
from forebay.pipeline.jobs.export.iceberg import arrow_schema
from forebay.pipeline.jobs.export.job import ExportRun, open_target
from forebay.pipeline.jobs.export.plan import Bounds
from forebay.pipeline.jobs.export.tables import Files, Task, collect
from forebay.pipeline.jobs.export.write import raw_columns
from forebay.pipeline.source.plan import plan_topic, splits
from forebay.pipeline.source.scan import read_split
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView, TopicView

_READ: Final = ("offset", "timestamp", "value")
_ROWS_MAX: Final = 200
"""Rows of one batch, so that an export has several."""


class Stager:
    """Writes the files that Spark would."""

    def __init__(self, settings: StoreSettings, view: TopicView) -> None:
        self._settings = settings
        self._view = view

    def stage(self, task: Task, place: Path, side: Path | None = None) -> Files:
        batch = task.batch
        schema = raw_columns()
        wanted = arrow_schema(schema.json())
        found = pa.Table.from_batches(
            list(scanned(self._settings, self._view, batch.start, batch.end))
        )
        columns = {
            field.name: found[field.name].cast(field.type)
            if field.name in _READ
            else pa.nulls(len(found), field.type)
            for field in wanted
        }
        place.mkdir()
        parquet.write_table(pa.table(columns, schema=wanted), place / "part-0.parquet")
        return Files(collect(place, batch.start, batch.end), schema.json())


def scanned(
    settings: StoreSettings, view: TopicView, start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """The rows of a scan, as tasks of Spark read them."""
    for split in splits(plan_topic(view, start, end), least=2):
        yield from read_split(settings, split, _READ)


def export(settings: StoreSettings, name: str, table: Path) -> int | None:
    """Returns the offset at which the table ends. Raises the error that ended the export."""
    with StoreView(settings) as store, store.topic(name) as view:
        main = open_target("parquet", table, str(view.topic), None)
        bounds = Bounds(_ROWS_MAX, 1 << 40)
        stager = Stager(settings, view)
        stop = view.end_offset
        run = ExportRun(view, stager, "parquet", main, None, bounds, None, stop, allow_gaps=True)
        report = run.report(run.run(), dry_run=False)
        if not report.ok:
            raise ForebayError(str(report.rows[-1].error))
        return report.next_offset


def rows_of(table: Path, known: dict[Path, list[tuple[int, bytes]]]) -> list[tuple[int, bytes]]:
    """Offset and value of every row that is committed, in the order of offsets.

    `known` has what was read before: files of a table do not change.
    """
    for path in table.glob("**/part-*.parquet"):
        hidden = any(part.startswith((".", "_")) for part in path.relative_to(table).parts)
        if path not in known and not hidden:
            read = parquet.ParquetFile(path).read(columns=["offset", "value"])
            known[path] = list(
                zip(read["offset"].to_pylist(), read["value"].to_pylist(), strict=True)
            )
    return sorted(row for rows in known.values() for row in rows)
