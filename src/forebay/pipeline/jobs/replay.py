"""`replay`: appends a range of one topic to another topic, in order, each message once.

Tasks read pieces of the source and stage them, as the sink's tasks do. The driver appends the
staged rows. No payload passes through Spark. Keys, values and attributes are kept. Offsets and
publish times are new.

The range is replayed in batches of bounded size. The number of a batch is the offset where it ends,
so the sink's state in the target records how far the replay got, and an interrupted replay
continues there. A replay is identified by its source topic, its start and its sink id. A second run
with the same three appends only the messages after the end of the first run.

Beware: a run with another start is another replay. If the two ranges overlap, the messages in the
overlap are appended twice.
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

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import began_here, origin
from forebay.catalog.records import TopicRecord, messages_between
from forebay.errors import ForebayError, LostOffsets, UsageError
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
    require_apart,
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
from forebay.pipeline.source.scan import open_view, read_split
from forebay.read.holes import lost_error
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, executor_resources
from forebay.topic.view import TopicView

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Commit: TypeAlias = Callable[[SinkBatch, Sequence[Part]], Committed]
_PIECE_BYTES: Final = 32 * MIB
_COLUMNS: Final = ("key", "value", "headers")
_PLAIN: Final = "replay"
"""The default id of a replay."""


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A range of the source and its result."""

    start_offset: int
    end_offset: int
    """The offset after the last one."""
    appended: int
    """Messages appended. In a dry run, messages that would be appended."""
    known: int
    """Messages that an earlier run appended, and this one skipped."""
    bytes: int
    """The approximate number of bytes read."""
    error: str | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    dry_run: bool
    topic: str
    into: str
    sink_id: str
    """The id of the replay. A run with the same id, source and start continues it."""
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
    """The pieces that one task stages; `number` is the task's place in its batch."""

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
    """Appends the offsets `start..end` of `topic`, without `end`, to the topic `into`.

    `into` is created if it does not exist.

    Instead of an offset, a time in milliseconds since 1970 may be given: `start_time` selects the
    first message published at that time or later, and `end_time` stops before the first such
    message. Without an end, everything that is synced now is replayed. `again`, or another
    `sink_id`, starts a new replay, which appends everything again. `skip_lost` skips ranges that
    are recorded as lost or unknown; without it they raise LostOffsets. Accepted ones are skipped.

    Raises UsageError for arguments that contradict each other or do not fit the topic. If a batch
    fails, the run ends, the report has the error, and a second run continues at that batch.
    """
    settings = job_settings(source)
    name, target = parse_topic(topic), parse_topic(into)
    _check_call(name, target, start, start_time, end, end_time, sink_id, again)
    chosen = sink_id or (secrets.token_hex(8) if again else _PLAIN)
    sink = _sink(name, start, start_time, chosen)
    resources = executor_resources(settings)
    require_apart(resources.catalog, [str(target)])
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
    for first, last in ((start, end), (start_time, end_time)):
        if first is not None and last is not None and last < first:
            raise UsageError(f"{topic}: the end, {last}, is before the start, {first}")
    if sink_id is not None:
        check_sink_id(sink_id)
        if again:
            raise UsageError("give either a sink id or `again`: `again` makes a new id")


def _sink(topic: TopicName, start: int | None, start_time: int | None, sink_id: str) -> str:
    """The id of the sink: the same for every run with the same source, start and `sink_id`.

    The sink's state in the target is an offset of the source, and counts from the start. It is
    meaningless for another source or start, so both are part of the id.
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
        first = view.offset_at_time(start_time, resources)
    if end_time is not None:
        last = view.offset_at_time(end_time, resources)
    found = resolve_range(view, first, last, fail_on_data_loss=not skip_lost)
    if last not in (LATEST, found.end) and not skip_lost:
        raise UsageError(f"{view.topic}: the end, {last}, is before the start, {first}")
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
        """The rows of a dry run: one for messages that were replayed before, one for the rest."""
        self._require_all_of_the_begun(wanted, state)
        known, rest = _left(wanted, state)
        rows = [_row(known, known=self._messages(known))] if known.start < known.end else []
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
        """Yields one row for each batch; stops after the first batch that fails."""
        self._require_all_of_the_begun(wanted, state)
        known, rest = _left(wanted, state)
        if known.start < known.end:
            yield _row(known, known=self._messages(known))
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
        source = str(self._view.topic)
        with target_owner(
            self._resources, self._into, self._sink, state, "replay", source
        ) as commit:
            for batch, pieces in self._batches(rest, begun, waves.bytes_max()):
                try:
                    row = self._batch(batch, _tasks(pieces, executor.slots()), commit, waves)
                except ForebayError as error:
                    yield _row(batch, error=str(error))
                    return
                yield row

    def _require_all_of_the_begun(self, wanted: OffsetRange, state: SinkState | None) -> None:
        """Raises UsageError if the range ends inside a batch that an earlier run began."""
        if state is not None and not state.done and state.batch > wanted.end:
            raise UsageError(
                f"an earlier replay of {wanted.topic} to offset {state.batch} did not finish, and "
                f"this one ends at {wanted.end}: choose {state.batch} or later as the end"
            )

    def _batches(
        self, rest: OffsetRange, begun: int | None, bytes_max: int
    ) -> Iterator[tuple[OffsetRange, list[Piece]]]:
        """Yields the range in batches. The first one completes the batch that ends at `begun`."""
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

    def _messages(self, known: OffsetRange) -> int:
        """How many messages the range can have: offsets in holes have none."""
        return messages_between(self._view.record or TopicRecord(), known.start, known.end)

    def _pieces(self, wanted: OffsetRange) -> list[Piece]:
        self._view.refresh()
        try:
            return plan_topic(
                self._view,
                wanted.start,
                wanted.end,
                split_bytes=_PIECE_BYTES,
                fail_on_data_loss=not self._skip_lost,
            )
        except LostOffsets as lost:
            record, hole = self._view.record or TopicRecord(), (lost.start, lost.end)
            skip = "skip it with --skip-lost"
            raise lost_error(self._view.topic, record, hole, skip) from lost

    def _batch(
        self,
        batch: OffsetRange,
        tasks: Sequence[ReplayTask],
        commit: Commit,
        waves: Waves[ReplayTask, Part],
    ) -> ReplayRow:
        done = [each for _task, each in waves.run(tasks)]
        parts = [each.result for each in done if each.result is not None]
        errors = [each.error for each in done if each.error is not None]
        if errors:
            discard(self._resources.store, parts)
            raise errors[0]
        # The replay numbers its batches by offsets: the same number is the same batch.
        number = SinkBatch(self._sink, batch.end, named=True, query=self._sink)
        committed = commit(number, parts)
        size = sum(task.size for task in tasks)
        return _row(batch, appended=committed.appended, known=committed.known, size=size)


@contextmanager
def target_owner(
    resources: StoreResources,
    into: TopicName,
    sink: str,
    state: SinkState | None,
    what: str,
    source: str,
) -> Iterator[Commit]:
    """Yields a function that commits batches of the sink to the topic `into`.

    It commits through the server if one runs. Otherwise this process owns the topic until the block
    ends. Raises UsageError if the topic was restored, so that `state` may be outdated. `what` is
    the job, and `source` what it copies, in errors.
    """
    server = serving(resources.settings)
    if server is not None:
        _require_remembered(resources.catalog, None, into, sink, state, what, source)
        yield partial(commit_through, server)
        return
    with LocalTopicWriter(resources.settings) as writer:
        _require_remembered(resources.catalog, writer, into, sink, state, what, source)
        yield partial(commit_batch, writer, resources.catalog, resources.store)


def _require_remembered(
    catalog: Catalog,
    writer: TopicWriter | None,
    into: TopicName,
    sink: str,
    state: SinkState | None,
    what: str,
    source: str,
) -> None:
    if writer is not None:
        writer.end(into)
    elif catalog.record(into) is None:
        return  # the target does not exist yet
    came_from = origin(catalog, into)
    if began_here(came_from) or (state is not None and state.origin == came_from):
        return
    if writer is None:
        raise UsageError(
            f"{into} was restored, so a job of the kind {what} must search its messages for those "
            "of earlier runs: stop the server, and run it without one"
        )
    last = writer.last(into, sink, 0 if state is None else state.offset)
    if last is not None and (state is None or state.done or last.batch != state.batch):
        raise UsageError(
            f"{into} was restored after a {what} of {source} appended to it, and it is unknown how "
            f"far that {what} got: compare the two, then {what} the rest in another way, or "
            "everything again into another topic or with another sink id"
        )


def _left(wanted: OffsetRange, state: SinkState | None) -> tuple[OffsetRange, OffsetRange]:
    """The part of the range that was replayed before, and the rest."""
    reached = None if state is None else state.batch if state.done else state.previous
    at = min(max(wanted.start, reached or 0), wanted.end)
    return OffsetRange(wanted.topic, wanted.start, at), OffsetRange(wanted.topic, at, wanted.end)


def _tasks(pieces: Sequence[Piece], slots: int) -> list[ReplayTask]:
    """Groups adjacent pieces into tasks, in the order of their offsets."""
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
    """Runs in a task: stages the messages of its pieces.

    Each attempt writes a separate file. The files of failed attempts are deleted after a time.
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
