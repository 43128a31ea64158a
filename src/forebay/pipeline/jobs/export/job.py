"""`export`: a topic to a table of Parquet, Delta or Iceberg, each message exactly once.

A topic with partitions is one table, which holds them all. The table records which offsets it has
of each partition, and a run exports one after the other.

The table records which offsets it has. A run continues from there to the synced end of the topic,
in batches of bounded size: Spark writes the files of a batch beside the table, and the driver
commits them together with their offsets. Readers see only committed batches, so a run that is
killed does no harm, and the next run continues.

With JSON values there are two tables. Rejected records are committed first, with the columns by
which they were rejected. If the exporter dies before it commits the other table, the next run
finishes the batch with the same columns. So each record is in exactly one table, once.

Beware: `start` is for a new table only. And a refused commit is not an error: another exporter was
faster, and the run plans again from where the table ends now.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from forebay.catalog.records import TopicRecord, messages_between
from forebay.errors import CommitRefused, CorruptLog, ForebayError, MissingData, UsageError
from forebay.format.names import parse_topic
from forebay.limits import GIB
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.execute import Progress
from forebay.pipeline.jobs.export.plan import (
    Batch,
    Bounds,
    SizedRange,
    TopicOffsets,
    next_batch,
    only_gone,
)
from forebay.pipeline.jobs.export.tables import (
    Commit,
    ExportTable,
    Files,
    ParquetTable,
    Staging,
    TableState,
    Task,
    part_of,
)
from forebay.pipeline.jobs.export.write import SparkStager
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.location import job_settings
from forebay.pipeline.source.options import require_apart
from forebay.pipeline.source.plan import outlines
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView, TopicView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log: Final = logging.getLogger("forebay.pipeline")

Format = Literal["parquet", "delta", "iceberg"]
Values = Literal["raw", "json"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
BATCH_ROWS: Final = 10_000_000
BATCH_BYTES: Final = 1 * GIB
_STUCK_MAX: Final = 3
"""The most refused commits in a row after which the table still ends where it did."""
ROWS: Final = Counter("forebay_export_rows_total", "Records committed to tables.", ["format"])
REJECTED: Final = Counter(
    "forebay_export_rejected_total", "Records committed to tables of rejected records.", ["format"]
)
COMMITS: Final = Counter("forebay_export_commits_total", "Batches committed.", ["format"])


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One batch that was committed, or would be, or the error that ended the run."""

    topic: str
    table: str
    start_offset: int | None
    end_offset: int | None
    """The offset after the last one."""
    records: int
    """Records committed to the table."""
    rejected: int
    """Records committed to the table of rejected records."""
    skipped: int
    """Offsets directly before the batch that were skipped because they are gone."""
    files: int
    bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ExportReport:
    topic: str
    table: str
    rejected_table: str | None
    """The table of rejected records; None without JSON values."""
    format: str
    dry_run: bool
    next_offset: int | None
    """Where the next export continues; None if there is nothing yet, or several partitions."""
    next_offsets: Mapping[str, int | None]
    """The same for the topic, or for each of its partitions, by their full names."""
    lost_races: int
    """Batches that another exporter committed first."""
    rows: tuple[ExportRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def records(self) -> int:
        return sum(row.records for row in self.rows)

    @property
    def rejected(self) -> int:
        return sum(row.rejected for row in self.rows)

    @property
    def skipped(self) -> int:
        return sum(row.skipped for row in self.rows)

    @property
    def commits(self) -> int:
        return sum(row.error is None for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, ExportRow, self.rows)


def export(
    source: str | Path | StoreSettings,
    topic: str,
    table: str | Path,
    *,
    format: Format = "parquet",  # noqa: A002  # what Spark calls it
    catalog: str | Mapping[str, str] | None = None,
    value: Values = "raw",
    keep_value: bool = True,
    start: int | None = None,
    end: int | None = None,
    max_batch_rows: int = BATCH_ROWS,
    max_batch_bytes: int = BATCH_BYTES,
    allow_gaps: bool = False,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Appends the messages of the topic that the table does not have, up to `end`.

    A topic is exported with all its partitions, unless the name is that of a partition. `start` and
    `end` are for a single log. Without `end`, this is the synced end of the topic when the call
    starts. With JSON values, the column `value` has the text of each message, unless `keep_value`
    is False. `catalog` is for Iceberg: a URI or properties for pyiceberg, by default a SQLite file
    beside the table. If the next offsets are gone, the run ends with an error in its report, after
    everything before them was committed; with `allow_gaps` they are skipped.

    UsageError if the arguments, the table and the topic do not fit each other.
    """
    settings = job_settings(source)
    name = str(parse_topic(topic))
    if value not in ("raw", "json"):
        raise UsageError(f"value is {value!r}; it must be 'raw' or 'json'")
    if value == "raw" and not keep_value:
        raise UsageError("keep_value=False is for JSON values only: a raw table has nothing else")
    if max_batch_rows < 1 or max_batch_bytes < 1:
        raise UsageError("max_batch_rows and max_batch_bytes must be at least 1")
    if start is not None and start < 0:
        raise UsageError(f"start is {start}; offsets begin at 0")
    if end is not None and end < 0:
        raise UsageError(f"end is {end}; offsets begin at 0")
    if start is not None and end is not None and end < start:
        raise UsageError(f"{name}: the end, {end}, is before the start, {start}")
    location = table_location(table)
    bounds = Bounds(max_batch_rows, max_batch_bytes)
    with StoreView(settings) as store:

        @contextmanager
        def opened(log: str) -> Iterator[ExportRun]:
            with ExitStack() as stack:
                main = open_target(format, location, name, catalog, log)
                stack.callback(main.table.close)
                side = None
                if value == "json":
                    side = open_target(format, rejected_location(location), name, catalog, log)
                    stack.callback(side.table.close)
                view = store.topic(log)
                stop = _stop(view, start, end)
                stager = SparkStager(settings, view, spark, keep_value=keep_value)
                yield ExportRun(view, stager, format, main, side, bounds, start, stop, allow_gaps)

        logs = _logs(store, name, start, end)
        return _joined(name, list(_reports(logs, opened, progress, dry_run=dry_run)))


def _reports(
    logs: Sequence[str],
    opened: Callable[[str], AbstractContextManager[ExportRun]],
    progress: Progress | None,
    *,
    dry_run: bool,
) -> Iterator[ExportReport]:
    """Exports the partitions of a topic, one after the other.

    First it finishes the batches whose rejected records are committed. Those were chosen by the
    types of columns that the batch was about to add: a batch of another partition must not add them
    with other types before. For the same reason, a partition that leaves such a batch is the last.
    """
    several = len(logs) > 1 and not dry_run
    for log in logs if several else ():
        with opened(log) as run:
            if run.is_unfinished():
                yield run.report(run.run(progress, only_unfinished=True), dry_run=False)
                if run.is_unfinished():
                    return
    for log in logs:
        with opened(log) as run:
            rows = run.planned_rows() if dry_run else run.run(progress)
            yield run.report(rows, dry_run=dry_run)
            if several and run.is_unfinished():
                return


def _logs(store: StoreView, name: str, start: int | None, end: int | None) -> list[str]:
    """The full names of the topic and its partitions that exist; the name itself if none does."""
    there = [parse_topic(each) for each in store.topics()]
    found = require_apart([each for each in there if name in (str(each), each.base)])
    if len(found) > 1 and (start is not None or end is not None):
        raise UsageError(
            f"{name} has {len(found)} partitions, and an offset is one of a single partition: "
            f"leave out start and end, or export a partition by its name, such as {found[-1]}"
        )
    return sorted(map(str, found)) or [name]


def _stop(view: TopicView, start: int | None, end: int | None) -> int:
    if start is not None and start > view.end_offset:
        raise UsageError(
            f"start is {start}, but the next offset of {view.topic} is {view.end_offset}: choose "
            "that or an earlier one"
        )
    return view.end_offset if end is None else min(end, view.end_offset)


def _joined(topic: str, reports: Sequence[ExportReport]) -> ExportReport:
    """One report of the exports of a topic's partitions, in this order."""
    if len(reports) == 1:
        return reports[0]
    return replace(
        reports[0],
        topic=topic,
        next_offset=None,
        next_offsets={each.topic: each.next_offset for each in reports},  # the newest of each
        lost_races=sum(each.lost_races for each in reports),
        rows=tuple(row for each in reports for row in each.rows),
    )


def table_location(table: str | Path) -> Path:
    """The table's directory; UsageError for a URL that Spark cannot write to."""
    # One slash is enough: a Path turns `//` into `/`.
    match = _URL.match(str(table))
    if match is not None and match["scheme"] != "file":
        raise UsageError(
            f"{table} is not a directory: Spark's Python package cannot write to object stores. "
            "Export to a directory, which may be a mounted bucket"
        )
    return Path(str(table) if match is None else f"/{match['rest']}").absolute()


def rejected_location(location: Path) -> Path:
    return location.with_name(f"{location.name}_rejected")


def open_target(
    kind: str,
    location: Path,
    topic: str,
    catalog: str | Mapping[str, str] | None,
    log: str | None = None,
) -> Target:
    """The table of a topic at a location, which need not exist; UsageError for an unknown format.

    `log` is the partition whose position is needed, by default the topic itself.
    """
    if catalog is not None and kind != "iceberg":
        raise UsageError(f"a catalog is for the format iceberg only; the format is {kind}")
    table: ExportTable
    if kind == "parquet":
        table = ParquetTable(location, topic, log)
    elif kind == "delta":
        from forebay.pipeline.jobs.export.delta import DeltaExport

        table = DeltaExport(location, topic, log)
    elif kind == "iceberg":
        from forebay.pipeline.jobs.export.iceberg import IcebergExport

        table = IcebergExport(location, topic, catalog, log)
    else:
        raise UsageError(f"format is {kind!r}; it must be 'parquet', 'delta' or 'iceberg'")
    return Target(table, Staging(location, part_of(topic, log)))


def _is_ahead(side: TableState, main: TableState) -> bool:
    """Whether the table of rejected records has a batch that the main table does not have."""
    return side.next is not None and side.next > (main.next or 0)


@dataclass(frozen=True, slots=True)
class Target:
    """A table, and the place where its files are prepared."""

    table: ExportTable
    staging: Staging


class Stager(Protocol):
    """Writes the files of a batch. `SparkStager` implements it."""

    def stage(self, task: Task, place: Path, side: Path | None = None) -> Files:
        """Writes the batch's records below `place`, and rejected ones below `side`.

        Both are directories that do not exist yet. The rejected records of an unfinished batch are
        not written again.
        """
        ...


class ExportRun:
    """One export, up to the offset `stop`. Refreshes the view as it goes."""

    def __init__(
        self,
        view: TopicView,
        stager: Stager,
        kind: str,
        main: Target,
        side: Target | None,
        bounds: Bounds,
        start: int | None,
        stop: int,
        allow_gaps: bool,
    ) -> None:
        self._view = view
        self._stager = stager
        self._kind = kind
        self._main = main
        self._side = side
        self._bounds = bounds
        self._start = start
        self._stop = stop
        self._allow_gaps = allow_gaps
        self._races = 0
        self._reached: int | None = None
        self._topic = str(view.topic)

    # ---- planning

    def states(self) -> tuple[TableState, TableState]:
        side = TableState() if self._side is None else self._side.table.state()
        main = self._main.table.state()
        if main.schema is not None:
            types = {each["name"]: each["type"] for each in json.loads(main.schema)["fields"]}
            raw = types.get("value") == "binary"  # a table of JSON has it as text
            if raw == (self._side is not None):
                made = "raw" if raw else "JSON"
                raise UsageError(
                    f"{self._main.table.location} was created with {made} values: use the same "
                    "kind of values, or choose another table"
                )
        if main.next is not None and self._start is not None and self._start > main.next:
            raise UsageError(
                f"{self._main.table.location} ends at offset {main.next}: to start at "
                f"{self._start} would leave a gap; leave out the start"
            )
        return main, side

    def plan(self, main: TableState, side: TableState) -> Task | None:
        self._view.refresh()
        view = self._view
        record = view.record or TopicRecord()
        offsets = TopicOffsets(self._topic, view.start_offset, view.end_offset, record)
        after = main.next
        if after is None:
            after = offsets.start if self._start is None else self._start
        if self._side is not None and _is_ahead(side, main):
            last = self._unfinished(self._side, offsets, after, main, side)
            return Task(Batch(after, last.start, last.end), main, side, last)
        batch_or_none = next_batch(
            offsets,
            after,
            self._sizes(after),
            self._bounds,
            end=self._stop,
            allow_gaps=self._allow_gaps,
        )
        return None if batch_or_none is None else Task(batch_or_none, main, side)

    def _unfinished(
        self, target: Target, offsets: TopicOffsets, after: int, main: TableState, side: TableState
    ) -> Commit:
        """The last batch of the rejected table, which the main table does not have yet.

        UsageError if it does not begin where the main table ends, as finishing it would leave a
        gap.
        """
        last = target.table.last()
        if last is None or last.end != side.next:
            raise MissingData(
                f"{self._main.table.location}: rejected records are committed up to offset "
                f"{side.next}, but the commit metadata of that batch is gone"
            )
        if not only_gone(offsets, after, last.start):
            here, there = self._main.table.location, target.table.location
            if main.next is None:
                stands = "does not exist"
                advice = f"restore it, remove {there}, or export with start={last.start}"
            else:
                stands = f"ends at offset {main.next}"
                advice = (
                    f"restore one of them, or remove {there}, with the records that were rejected "
                    f"before offset {main.next}"
                )
            raise UsageError(
                f"{there} ends at offset {side.next}, its last batch begins at {last.start}, and "
                f"{here} {stands}: they do not fit together, and to continue would leave out or "
                f"repeat messages; {advice}"
            )
        return last

    def _sizes(self, start: int) -> Iterator[SizedRange]:
        resources = self._view.store.resources()
        at = start
        if resources is not None and self._view.record is not None:
            tail = self._view.record.tail
            found = outlines(resources.catalog, self._view.topic, at, tail, 1 << 62)
            for each in found:
                yield SizedRange(each.start_offset, each.next_offset, each.logical_size)
                at = each.next_offset
        for segment in self._view.segments():
            if segment.end_offset > at and segment.count:
                yield SizedRange(segment.first_offset, segment.end_offset, segment.size)

    def planned_rows(self) -> Iterator[ExportRow]:
        """Yields the rows of a dry run: the batches as they would be committed now."""
        main, side = self.states()
        self._reached = main.next
        try:
            while (task := self.plan(main, side)) is not None:
                yield self._row(task.batch, task.batch.count, 0, None)
                self._reached = task.batch.end
                main = replace(main, next=self._reached)
        except UsageError:
            raise
        except ForebayError as error:
            yield self._failed(error)

    # ---- exporting

    def is_unfinished(self) -> bool:
        """Whether the rejected records of a batch are committed, and the others are not."""
        main, side = self.states()
        return _is_ahead(side, main)

    def run(
        self, progress: Progress | None = None, *, only_unfinished: bool = False
    ) -> Iterator[ExportRow]:
        """Exports batch after batch, and yields a row for each when it is committed.

        With `only_unfinished` it ends when no batch is unfinished. An error of a batch is in the
        last row. UsageError is raised.
        """
        first: int | None = None
        stuck = 0
        while True:
            main, side = self.states()
            self._reached = main.next
            if only_unfinished and not _is_ahead(side, main):
                break
            try:
                task = self.plan(main, side)
                if task is None:
                    break
                first = task.batch.after if first is None else first
                yield self._export(task)
            except CommitRefused as error:
                self._races += 1
                event(_log, logging.INFO, "export batch refused", topic=self._topic, reason=error)
                stuck = stuck + 1 if self.states() == (main, side) else 0
                if stuck >= _STUCK_MAX:
                    yield self._failed(error)
                    break
                continue
            except UsageError:
                raise
            except ForebayError as error:
                yield self._failed(error)
                break
            stuck = 0
            if progress is not None:
                record = self._view.record or TopicRecord()
                end = task.batch.end
                total = messages_between(record, first, max(self._stop, end))
                progress(messages_between(record, first, end), total)
        self._sweep()

    def _export(self, task: Task) -> ExportRow:
        files = self._stage(task)
        try:
            self._commit(task, files)
        except BaseException:  # no table has the files in the staging directories
            self._discard(files)
            raise
        self._reached = task.batch.end
        rejected = 0 if files.rejected is None else files.rejected.rows
        ROWS.add(files.good.rows, self._kind)
        REJECTED.add(rejected, self._kind)
        COMMITS.add(1, self._kind)
        event(
            _log,
            logging.INFO,
            "export batch committed",
            topic=self._topic,
            table=self._main.table.location,
            start=task.batch.start,
            end=task.batch.end,
            records=files.good.rows,
            rejected=rejected,
        )
        return self._row(task.batch, files.good.rows, rejected, files)

    def _stage(self, task: Task) -> Files:
        """Writes the files of the batch; CommitRefused if another exporter was faster."""
        after = task.batch.after
        places = [target.staging.fresh(after) for target in (self._main, self._side) if target]
        try:
            files = self._stager.stage(task, *places)
            self._require_whole(task, files)
        except BaseException as error:
            for place in places:
                self._main.staging.abandon(place)
            ours = isinstance(error, ForebayError | OSError)
            if ours and self._main.table.state().next != task.main.next:
                raise CommitRefused("another exporter has committed the batch") from error
            raise
        return files

    def _require_whole(self, task: Task, files: Files) -> None:
        rows = files.good.rows + (0 if files.rejected is None else files.rejected.rows)
        if task.unfinished is not None:
            rows += task.unfinished.rows
        if rows != task.batch.count:
            raise CorruptLog(
                f"{self._topic}: Spark wrote {rows} records for offsets {task.batch.start} to "
                f"{task.batch.end - 1}, which are {task.batch.count}; nothing was committed"
            )

    def _commit(self, task: Task, files: Files) -> None:
        batch, topic = task.batch, self._topic
        with self._main.staging.locked():
            if self._side is not None and self._side.table.state().next != task.side.next:
                raise CommitRefused("another exporter has committed rejected records")
            now = self._main.table.state()
            if now.next != task.main.next:
                raise CommitRefused("another exporter has committed the batch")
            if now.schema != task.main.schema:
                raise CommitRefused("another exporter has added columns")
            if self._side is not None and files.rejected is not None:
                rejected = Commit(
                    topic,
                    batch.start,
                    batch.end,
                    files.rejected.rows,
                    files.rejected_schema,
                    files.judged_by,
                )
                self._side.table.commit(files.rejected, task.side.next, rejected)
            good = Commit(topic, batch.start, batch.end, files.good.rows, files.schema)
            self._main.table.commit(files.good, task.main.next, good)

    def _discard(self, files: Files) -> None:
        self._main.staging.discard(files.good.directory)
        if self._side is not None and files.rejected is not None:
            self._side.staging.discard(files.rejected.directory)

    def _sweep(self) -> None:
        """Removes the files that dead exporters left behind, even if nothing was exported."""
        for target in (self._main, self._side):
            if target is None:
                continue
            if target.staging.unsettled():
                with self._main.staging.locked():
                    target.staging.settle(target.table)
            if self._reached is not None:
                target.staging.sweep(self._reached, time.time())

    # ---- reporting

    def _row(self, batch: Batch, records: int, rejected: int, files: Files | None) -> ExportRow:
        staged = [] if files is None else [files.good, *filter(None, [files.rejected])]
        return ExportRow(
            self._topic,
            str(self._main.table.location),
            batch.start,
            batch.end,
            records,
            rejected,
            batch.start - batch.after,
            sum(len(each.files) for each in staged),
            sum(each.size for each in staged),
            None,
        )

    def _failed(self, error: ForebayError) -> ExportRow:
        event(_log, logging.ERROR, "export stopped", topic=self._topic, error=error)
        location = str(self._main.table.location)
        return ExportRow(self._topic, location, self._reached, None, 0, 0, 0, 0, 0, str(error))

    def report(self, rows: Iterable[ExportRow], *, dry_run: bool) -> ExportReport:
        made = tuple(rows)
        side = None if self._side is None else str(self._side.table.location)
        return ExportReport(
            self._topic,
            str(self._main.table.location),
            side,
            self._kind,
            dry_run,
            self._reached,
            {self._topic: self._reached},
            self._races,
            made,
        )
