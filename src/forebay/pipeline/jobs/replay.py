"""`replay`: a range of one topic into another, in the same order, once.

Tasks read pieces of the source and stage them, as the sink's tasks do; the driver appends what
they staged. No payload passes through Spark. Keys, values and attributes are kept; offsets and
times of publishing are the target's own.

The range goes in batches of bounded size, each numbered by the offset where it ends, so that the
sink's state in the target says how far the replay has got. Interrupted, it goes on there. It is
known by the source and the start as they were given: a second run from the same start adds what
lies behind the end of the first one, and nothing else.

What a caller gets wrong: another start is another replay, and appends again what both have in
common.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from forebay.catalog.job_state import ORIGIN_HERE, origin
from forebay.errors import ForebayError, UsageError
from forebay.format.names import TopicName, parse_topic, staged_file
from forebay.limits import MIB, TASK_BYTES
from forebay.pipeline.execute import Executor, Progress, SparkExecutor
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.pipeline.sink.commit import (
    Committed,
    SinkBatch,
    SinkState,
    TopicWriter,
    check_sink_id,
    commit_batch,
    read_sink_state,
)
from forebay.pipeline.sink.owner import LocalTopicWriter, commit_through, serving
from forebay.pipeline.sink.staging import Part, discard, stage
from forebay.pipeline.source.plan import (
    EARLIEST,
    LATEST,
    OffsetRange,
    Piece,
    Split,
    plan_topic,
    resolve_range,
)
from forebay.pipeline.source.scan import offset_at_time, open_view, read_split
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, executor_resources
from forebay.topic.view import TopicView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_Commit: TypeAlias = Callable[[SinkBatch, Sequence[Part]], Committed]
_PIECE_BYTES: Final = 32 * MIB
_COLUMNS: Final = ("key", "value", "headers")
_PLAIN: Final = "replay"
"""The id of a replay that was given none."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A range of the source, the end not included, and what became of it."""

    start_offset: int
    end_offset: int
    appended: int
    """Messages; of a dry run, those that would be."""
    known: int
    """Messages that were there from an earlier run."""
    bytes: int
    """About how many were read."""
    error: str | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    dry_run: bool
    topic: str
    into: str
    sink_id: str
    """Which replay of this range it is: given again, a run goes on with this one."""
    start_offset: int
    end_offset: int
    rows: tuple[ReplayRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def appended(self) -> int:
        return sum(row.appended for row in self.rows)

    @property
    def known(self) -> int:
        return sum(row.known for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, ReplayRow, self.rows)


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """What one task stages, of one batch; its number is its place there."""

    batch: str
    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def replay(
    source: str | Path | StoreSettings,
    topic: str,
    into: str,
    *,
    start: int | None = None,
    end: int | None = None,
    start_time: int | None = None,
    end_time: int | None = None,
    sink_id: str | None = None,
    again: bool = False,
    skip_lost: bool = False,
    spark: SparkSession | None = None,
    executor: Executor | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ReplayReport:
    """Appends `start..end` of `topic`, the end not included, to `into`, which is made if needed.

    Times are milliseconds since 1970, and count instead of offsets: from the first message of
    `start_time` or later to the first of `end_time` or later. Without an end it is what is synced
    now. `again` makes it another replay, which adds everything again; so does another `sink_id`.
    `skip_lost` steps over ranges that are recorded as lost, which are an error else.

    UsageError for a call that cannot be right. What goes wrong with a batch is in the report, and
    a second run goes on there.
    """
    settings = job_settings(source)
    name, target = parse_topic(topic), parse_topic(into)
    _check_call(name, target, start, start_time, end, end_time, sink_id, again)
    chosen = sink_id or (secrets.token_hex(8) if again else _PLAIN)
    sink = _sink(name, start, start_time, chosen)
    resources = executor_resources(settings)
    with open_view(settings) as store:
        view = store.topic(str(name))
        wanted = _range(resources, view, start, start_time, end, end_time, skip_lost)
        state = read_sink_state(resources.catalog, target, sink)
        run = _Replay(resources, view, target, sink, skip_lost)
        if dry_run:
            rows = run.plan(wanted, state)
        else:
            executor = executor or SparkExecutor(spark, settings.spark)
            rows = tuple(run.run(wanted, state, executor, progress))
    return ReplayReport(
        dry_run, str(name), str(target), chosen, wanted.start, wanted.end, tuple(rows)
    )


def _check_call(
    topic: TopicName,
    into: TopicName,
    start: int | None,
    start_time: int | None,
    end: int | None,
    end_time: int | None,
    sink_id: str | None,
    again: bool,
) -> None:
    if topic == into:
        raise UsageError(f"{topic} cannot be replayed into itself: name another topic")
    for what, offset, time in (("start", start, start_time), ("end", end, end_time)):
        if offset is not None and time is not None:
            raise UsageError(f"the {what} is given as an offset and as a time: choose one of them")
        for given in (offset, time):
            if given is not None and given < 0:
                raise UsageError(f"the {what} is {given}: it must not be negative")
    if sink_id is not None:
        check_sink_id(sink_id)
        if again:
            raise UsageError("a sink id says which replay it is: leave it out to replay again")


def _sink(topic: TopicName, start: int | None, start_time: int | None, sink_id: str) -> str:
    """The same for every run from the same start, as it was given, whatever its end.

    What the target remembers of it are offsets of the source, counted from that start: for another
    source or start they mean nothing, so these are a part of the name.
    """
    text = json.dumps([str(topic), start, start_time, sink_id])
    return f"replay-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _range(
    resources: StoreResources,
    view: TopicView,
    start: int | None,
    start_time: int | None,
    end: int | None,
    end_time: int | None,
    skip_lost: bool,
) -> OffsetRange:
    first, last = EARLIEST if start is None else start, LATEST if end is None else end
    if start_time is not None:
        first = offset_at_time(resources, view, start_time)
    if end_time is not None:
        last = offset_at_time(resources, view, end_time)
    found = resolve_range(view, first, last, fail_on_data_loss=not skip_lost)
    if last not in (LATEST, found.end) and not skip_lost:
        raise UsageError(f"{view.topic}: the range ends at {last}, before it starts at {first}")
    return found


class _Replay:
    """One run, on the driver."""

    def __init__(
        self,
        resources: StoreResources,
        view: TopicView,
        into: TopicName,
        sink: str,
        skip_lost: bool,
    ) -> None:
        self._resources = resources
        self._settings = resources.settings
        self._view = view
        self._into = into
        self._sink = sink
        self._skip_lost = skip_lost

    def plan(self, wanted: OffsetRange, state: SinkState | None) -> tuple[ReplayRow, ...]:
        """What would be done: one row for what is there, one for what is to come."""
        self._require_all_of_the_begun(wanted, state)
        known, rest = _left(wanted, state)
        rows = [_row(known, known=known.end - known.start)] if known.start < known.end else []
        pieces = self._pieces(rest)
        if pieces:
            size, count = (
                sum(piece.size for piece in pieces),
                sum(piece.messages for piece in pieces),
            )
            rows.append(_row(rest, appended=count, size=size))
        return tuple(rows)

    def run(
        self,
        wanted: OffsetRange,
        state: SinkState | None,
        executor: Executor,
        progress: Progress | None,
    ) -> Iterator[ReplayRow]:
        """One row for each batch; the first that fails is the last."""
        self._require_all_of_the_begun(wanted, state)
        known, rest = _left(wanted, state)
        if known.start < known.end:
            yield _row(known, known=known.end - known.start)
        if rest.start >= rest.end:
            return
        begun = None if state is None or state.done else state.batch
        waves: Waves[ReplayTask, Part] = Waves(
            executor,
            partial(stage_task, self._settings, str(self._into)),
            lambda task: task.size,
            label=f"replay {wanted.topic}",
            progress=progress,
        )
        with self._owner(state) as commit:
            for batch, pieces in self._batches(rest, begun, waves.bytes_max()):
                try:
                    row = self._batch(batch, _tasks(pieces, executor.slots()), commit, waves)
                except ForebayError as error:
                    yield _row(batch, error=str(error))
                    return
                yield row

    @contextmanager
    def _owner(self, state: SinkState | None) -> Iterator[_Commit]:
        """Who appends: the server that owns the target, or this process for the time being."""
        server = serving(self._settings)
        if server is not None:
            self._require_remembered(None, state)
            yield partial(commit_through, server)
            return
        with LocalTopicWriter(self._settings) as writer:
            self._require_remembered(writer, state)
            yield partial(commit_batch, writer, self._resources.catalog, self._resources.store)

    def _require_all_of_the_begun(self, wanted: OffsetRange, state: SinkState | None) -> None:
        """A batch that was begun goes to its end, or nobody knows what of it is there."""
        if state is not None and not state.done and state.batch > wanted.end:
            raise UsageError(
                f"a replay of {wanted.topic} to offset {state.batch} was begun and did not end; "
                f"this one ends before, at {wanted.end}: let it end at {state.batch} or later"
            )

    def _require_remembered(self, writer: TopicWriter | None, state: SinkState | None) -> None:
        """The state says how far the replay has got, unless the target was restored since."""
        catalog = self._resources.catalog
        if writer is not None:
            writer.end(self._into)
        elif catalog.record(self._into) is None:
            return  # nothing can be there
        came_from = origin(catalog, self._into)
        if came_from == ORIGIN_HERE or (state is not None and state.origin == came_from):
            return
        if writer is None:
            raise UsageError(
                f"{self._into} was rebuilt, and its messages have to be looked through before a "
                "replay adds to them: stop the server, and run the replay without it"
            )
        last = writer.last(self._into, self._sink, 0 if state is None else state.offset)
        if last is not None and (state is None or state.done or last.batch != state.batch):
            raise UsageError(
                f"{self._into} was rebuilt since a replay of {self._view.topic} appended to it, "
                "and nobody remembers how far it got: compare the two, then replay the rest from "
                "the offset that follows, or everything once more with another sink id"
            )

    def _batches(
        self, rest: OffsetRange, begun: int | None, bytes_max: int
    ) -> Iterator[tuple[OffsetRange, list[Piece]]]:
        """The range in batches; the first one ends where the one that was begun did."""
        if begun is not None and rest.start < begun <= rest.end:
            first = OffsetRange(rest.topic, rest.start, begun)
            yield first, self._pieces(first)
            rest = OffsetRange(rest.topic, begun, rest.end)
        batch: list[Piece] = []
        size, start = 0, rest.start
        for piece in self._pieces(rest):
            if batch and size + piece.size > bytes_max:
                yield OffsetRange(rest.topic, start, batch[-1].next), batch
                batch, size, start = [], 0, batch[-1].next
            batch.append(piece)
            size += piece.size
        if batch:
            yield OffsetRange(rest.topic, start, rest.end), batch

    def _pieces(self, wanted: OffsetRange) -> list[Piece]:
        self._view.refresh()
        return plan_topic(
            self._view,
            wanted.start,
            wanted.end,
            split_bytes=_PIECE_BYTES,
            fail_on_data_loss=not self._skip_lost,
        )

    def _batch(
        self,
        batch: OffsetRange,
        tasks: Sequence[ReplayTask],
        commit: _Commit,
        waves: Waves[ReplayTask, Part],
    ) -> ReplayRow:
        done = [each for _task, each in waves.run(tasks)]
        parts = [each.result for each in done if each.result is not None]
        errors = [each.error for each in done if each.error is not None]
        if errors:
            discard(self._resources.store, parts)
            raise errors[0]
        committed = commit(SinkBatch(self._sink, batch.end, named=True), parts)
        size = sum(task.size for task in tasks)
        return _row(batch, appended=committed.appended, known=committed.known, size=size)


def _left(wanted: OffsetRange, state: SinkState | None) -> tuple[OffsetRange, OffsetRange]:
    """What of the range was replayed before, and what is left."""
    reached = None if state is None else state.batch if state.done else state.previous
    at = min(max(wanted.start, reached or 0), wanted.end)
    return OffsetRange(wanted.topic, wanted.start, at), OffsetRange(wanted.topic, at, wanted.end)


def _tasks(pieces: Sequence[Piece], slots: int) -> list[ReplayTask]:
    """Neighbours together, in the order of their offsets."""
    total = sum(piece.size for piece in pieces)
    target = min(TASK_BYTES, max(-(-total // slots), 1))
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or size + piece.size > target:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.size
    batch = secrets.token_hex(8)
    return [ReplayTask(batch, number, tuple(group)) for number, group in enumerate(groups)]


def stage_task(settings: StoreSettings, into: str, task: ReplayTask) -> Part:
    """In a task: the messages of its pieces, staged for the driver.

    Each attempt has a file of its own; those of attempts that were lost are swept by age.
    """
    from forebay.pipeline.sink.columns import checked_rows

    rows = read_split(settings, Split(task.pieces), _COLUMNS)
    key = staged_file(task.batch, task.number, secrets.randbits(48))
    return stage(
        executor_resources(settings).store,
        key,
        task.number,
        checked_rows(rows, task.number, into),
        chunk_bytes=settings.uploader.stream_chunk_size,
    )


def _row(
    batch: OffsetRange,
    *,
    appended: int = 0,
    known: int = 0,
    size: int = 0,
    error: str | None = None,
) -> ReplayRow:
    return ReplayRow(batch.start, batch.end, appended, known, size, error)
