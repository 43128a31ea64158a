"""One run of an export: plan a batch, write it, commit it, and again until the end.

What a caller gets wrong: a refused commit is no error. Somebody else was faster, and the next plan
starts from what the table says then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    MissingData,
    UsageError,
)
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.execute import Progress
from forebay.pipeline.jobs.export.plan import Batch, Bounds, Extent, Span, next_batch, only_gone
from forebay.pipeline.jobs.export.tables import (
    Commit,
    ExportTable,
    Staged,
    Staging,
    TableState,
)
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.source.plan import outlines
from forebay.topic.view import TopicView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- What a run of `export` committed, row by row.


ROWS: Final = Counter("forebay_export_rows_total", "Records committed to tables.", ["format"])
REJECTED: Final = Counter(
    "forebay_export_rejected_total", "Records committed to tables of rejected ones.", ["format"]
)
COMMITS: Final = Counter("forebay_export_commits_total", "Batches committed.", ["format"])


@dataclass(frozen=True, slots=True)
class ExportRow:
    """One batch that was committed, or would be, or why there are no more."""

    topic: str
    table: str
    start_offset: int | None
    end_offset: int | None
    """One more than the last."""
    records: int
    """In the table."""
    rejected: int
    """In the table of rejected records."""
    skipped: int
    """Offsets right before the batch that are gone."""
    files: int
    bytes: int
    error: str | None


@dataclass(frozen=True, slots=True)
class ExportReport:
    topic: str
    table: str
    rejected_table: str | None
    """Where there may be one."""
    format: str
    dry_run: bool
    next_offset: int | None
    """Where the next export goes on."""
    lost_races: int
    """Batches that somebody else committed first."""
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


# ---- export_run


_log: Final = logging.getLogger("forebay.pipeline")

_STUCK_MAX: Final = 3
"""Refused commits after which the table had not moved: somebody else's changes are in the way."""


@dataclass(frozen=True, slots=True)
class Target:
    """A table, and where its files are prepared."""

    table: ExportTable
    staging: Staging


@dataclass(frozen=True, slots=True)
class Task:
    """A batch with what the tables were like when it was planned."""

    batch: Batch
    main: TableState
    side: TableState
    unfinished: Commit | None = None
    """The batch's rejected records are committed already, and this is what they said."""


@dataclass(frozen=True, slots=True)
class Files:
    """What is on its way into the tables."""

    good: Staged
    schema: str
    rejected: Staged | None = None
    rejected_schema: str = ""
    judged_by: str | None = None


class Stager(Protocol):
    """What writes the files of a batch."""

    def stage(self, task: Task, place: Path, side: Path | None = None) -> Files:
        """The batch's records in files below `place`, rejected ones below `side`: directories
        that are not there yet. Those of an unfinished batch are not written again."""
        ...


class Run:
    """One export. The view moves; the end is the one of its beginning."""

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

    # -- planning -------------------------------------------------------------------------------

    def states(self) -> tuple[TableState, TableState]:
        side = TableState() if self._side is None else self._side.table.state()
        main = self._main.table.state()
        if main.schema is not None:
            names = {each["name"] for each in json.loads(main.schema)["fields"]}
            if ("value" in names) == (self._side is not None):
                made = "raw" if "value" in names else "JSON"
                raise UsageError(
                    f"{self._main.table.location} was made with {made} values: go on with the "
                    "same, or choose another table"
                )
        if main.next is not None and self._start is not None and self._start > main.next:
            raise UsageError(
                f"{self._main.table.location} ends at offset {main.next}: starting at "
                f"{self._start} would leave out what is between"
            )
        return main, side

    def plan(self, main: TableState, side: TableState) -> Task | None:
        self._view.refresh()
        view = self._view
        lost = () if view.record is None else view.record.lost
        span = Span(self._topic, view.start_offset, view.end_offset, lost)
        after = main.next
        if after is None:
            after = span.start if self._start is None else self._start
        if self._side is not None and side.next is not None and side.next > (main.next or 0):
            last = self._unfinished(self._side, span, after, main, side)
            return Task(Batch(after, last.start, last.end), main, side, last)
        batch_or_none = next_batch(
            span,
            after,
            self._extents(after),
            self._bounds,
            end=self._stop,
            allow_gaps=self._allow_gaps,
        )
        return None if batch_or_none is None else Task(batch_or_none, main, side)

    def _unfinished(
        self, target: Target, span: Span, after: int, main: TableState, side: TableState
    ) -> Commit:
        """The batch whose rejected records alone are committed; UsageError if it does not begin
        where the table goes on, as finishing it would leave out what is between."""
        last = target.table.last()
        if last is None or last.end != side.next:
            raise MissingData(
                f"{self._main.table.location}: rejected records are committed up to offset "
                f"{side.next}, and the note of that batch is gone"
            )
        if not only_gone(span, after, last.start):
            here, there = self._main.table.location, target.table.location
            if main.next is None:
                stands = "is not there"
                advice = f"restore it, remove {there}, or begin with start={last.start}"
            else:
                stands = f"ends at offset {main.next}"
                advice = (
                    f"restore one of them, or remove {there}, and with it what was rejected "
                    f"before offset {main.next}"
                )
            raise UsageError(
                f"{there} ends at offset {side.next}, its last batch begins at {last.start}, and "
                f"{here} {stands}: they do not belong together, and going on would leave out or "
                f"repeat messages; {advice}"
            )
        return last

    def _extents(self, start: int) -> Iterator[Extent]:
        tiers = self._view.store.tiers()
        at = start
        if tiers is not None and self._view.record is not None:
            tail = self._view.record.tail
            found = outlines(tiers.catalog, self._view.topic, at, tail, 1 << 62)
            for each in found:
                yield Extent(each.start_offset, each.next_offset, each.size)
                at = each.next_offset
        for segment in self._view.segments():
            if segment.end_offset > at and segment.count:
                yield Extent(segment.first_offset, segment.end_offset, segment.size)

    def rehearse(self) -> Iterator[ExportRow]:
        """The batches as they are now; nothing is written."""
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

    # -- performing -------------------------------------------------------------------------------

    def perform(self, progress: Progress | None = None) -> Iterator[ExportRow]:
        """Batch after batch, each committed when its row is there."""
        first: int | None = None
        stuck = 0
        while True:
            main, side = self.states()
            self._reached = main.next
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
                progress(task.batch.end - first, max(self._stop, task.batch.end) - first)
        self._sweep()

    def _export(self, task: Task) -> ExportRow:
        files = self._stage(task)
        try:
            self._commit(task, files)
        except BaseException:  # what is in the staging directories is in no table
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
        """The files of the batch; CommitRefused if they are of no use any more."""
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
                raise CommitRefused("somebody else exported the batch meanwhile") from error
            raise
        return files

    def _require_whole(self, task: Task, files: Files) -> None:
        rows = files.good.rows + (0 if files.rejected is None else files.rejected.rows)
        if task.unfinished is not None:
            rows += task.unfinished.rows
        if rows != task.batch.count:
            raise CorruptLog(
                f"{self._topic}: {rows} records were written for offsets {task.batch.start} "
                f"to {task.batch.end - 1}; nothing was committed"
            )

    def _commit(self, task: Task, files: Files) -> None:
        batch, topic = task.batch, self._topic
        with self._main.staging.locked():
            if self._side is not None and self._side.table.state().next != task.side.next:
                raise CommitRefused("somebody else committed rejected records meanwhile")
            if self._main.table.state().next != task.main.next:
                raise CommitRefused("somebody else exported the batch meanwhile")
            if self._side is not None and files.rejected is not None:
                note = Commit(
                    topic,
                    batch.start,
                    batch.end,
                    files.rejected.rows,
                    files.rejected_schema,
                    files.judged_by,
                )
                self._side.table.commit(files.rejected, task.side.next, note)
            note = Commit(topic, batch.start, batch.end, files.good.rows, files.schema)
            self._main.table.commit(files.good, task.main.next, note)

    def _discard(self, files: Files) -> None:
        self._main.staging.discard(files.good.directory)
        if self._side is not None and files.rejected is not None:
            self._side.staging.discard(files.rejected.directory)

    def _sweep(self) -> None:
        """Removes what exporters that died left behind, also when there was nothing to export."""
        for target in (self._main, self._side):
            if target is None:
                continue
            if target.staging.unsettled():
                with self._main.staging.locked():
                    target.staging.settle(target.table)
            if self._reached is not None:
                target.staging.sweep(self._reached, time.time())

    # -- telling ----------------------------------------------------------------------------------

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
            self._races,
            made,
        )
