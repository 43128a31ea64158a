"""`commit_batch`: appends the staged rows of one batch through the owner of the topics, once.

Every message that a sink appends carries the attribute `forebay.sink`:

    <sink id>/<batch>/<partition>/<row>/<query>.<rows>

The last part says which query numbered the batch, and which rows it has, as short hashes. A sink
without a name does not have it, and neither have messages of earlier releases. Rows are appended in
the order of (batch, partition, row), so the last message of a sink shows what was appended. To find
it without reading the whole topic, the catalog keeps a `SinkState` for each sink and topic, as a
job state. The log decides. A state that may be older than the log (after a restore) only says from
which offset on to search it.

The steps, and what a crash leaves after each of them:

1. The topics are opened, and their states read. Nothing has changed.
2. A manifest names the staged files. A state for each topic records that the batch has begun, and
   where the topic ended.
3. Rows are appended. A crash leaves a prefix of the batch in the topics, which readers see. The
   next run of the same batch continues after it, with the files that the manifest names, even if
   that run has staged other files.
4. Everything is synced, and the states record that the batch is complete.
5. The staged files are deleted.

Which query it is: a batch that the same query repeats is known, whatever rows it computes now. A
batch of any other writer is known only if it has exactly the rows of the one with its number, and
refused otherwise (`decide`). No row is taken for known because of a number alone.

Beware: two commits of one sink must not run at the same time; see `TopicWriter`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import (
    JobState,
    began_here,
    find_job_state,
    is_of_deleted,
    origin,
    write_job_state,
)
from forebay.errors import DescriptorError, FormatError, UsageError
from forebay.format.names import TopicName, parse_topic, write_of_staged
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.store import CloudStore
from forebay.pipeline.sink.staging import (
    Part,
    Rows,
    discard,
    joined_checksum,
    read_manifest,
    staged_rows,
    write_manifest,
)
from forebay.upload.sweep import sweep_staging

_log: Final = logging.getLogger("forebay.pipeline")
_SWEEP_BATCHES: Final = 100
"""A streaming query looks for abandoned staged files once in this many batches."""
ROWS: Final = Counter(
    "forebay_sink_rows_total",
    "Rows of committed batches: appended, or known if they had been appended before.",
    ["outcome"],
)

MARK: Final = "forebay.sink"
_SINK_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_RUN: Final = re.compile(r"(?P<query>[0-9a-f]{8}|-)\.(?P<rows>[0-9a-f]{8}|-)")
_UNKNOWN: Final = "-"


# ---- what a sink has appended


class Position(NamedTuple):
    """The row that a message came from. In a topic, positions of a sink only increase."""

    batch: int
    partition: int
    row: int
    """The number of the row in its partition, counted over all topics."""
    run: Run | None = None
    """Which query and rows; None in a mark of an earlier release."""


class Run(NamedTuple):
    """Which query a batch is of, and which rows it has: short hashes, or `-` if unknown."""

    query: str
    rows: str

    def __str__(self) -> str:
        return f"{self.query}.{self.rows}"


NO_BATCH: Final = -1
"""In place of the number of a sink's last batch, if it has none."""


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """One batch of one sink."""

    sink_id: str
    number: int
    named: bool
    """False if the id is random. Then no row can be there already, and the batch never repeats."""
    streaming: bool = False
    query: str | None = None
    """The id of whoever numbers the batches, so that a second batch of the same number is the same
    batch: a streaming query, as its checkpoint knows it, or a replay. None if users number them."""
    after: int | None = None
    """The last batch of the sink when this one was planned, NO_BATCH if there was none. Another run
    may have appended some of the rows since. None if the rows do not depend on it."""

    def __str__(self) -> str:
        return f"batch {self.number} of the sink {self.sink_id!r}"


@dataclass(frozen=True, slots=True)
class SinkState:
    """What the catalog records about the last batch of a sink in a topic."""

    batch: int
    done: bool
    offset: int
    """Messages of this batch are at or after it; if it is done, those of the next batch are."""
    rows: int
    """Rows of the batch for this topic."""
    shape: str
    """A hash of the number of rows in each partition (`shape_of`)."""
    write: str
    """The id of the write whose staged files are appended."""
    origin: str | None
    """The origin of the topic when this state was written; it changes with a restore."""
    previous: int | None = None
    """The last batch that was complete before this one."""
    digest: int | None = None
    """The sum of the checksums of the batch's values, over all topics."""
    checksum: int | None = None
    """The checksum of the batch's rows, over all topics; None if an earlier release wrote it."""
    query: str | None = None
    """The query of the batch (`SinkBatch.query`); None if there is none, or it is unknown."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the parts of a batch hold, over all topics."""

    digest: int
    checksum: int | None


class Action(Enum):
    APPEND = "append"
    """Nothing of the batch was appended, unless a search of the log finds some of it."""
    RESUME = "resume"
    """An earlier run of the batch began to append and did not finish."""
    KNOWN = "known"
    """All rows of the batch were appended before."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a batch in one topic."""

    action: Action
    look_from: int | None = None
    """The offset from which to search the log for messages of the sink; None for no search."""
    refused: str | None = None
    """For RESUME: why the rows of this run are refused once the batch is complete."""


def check_sink_id(sink_id: str) -> str:
    if _SINK_ID.fullmatch(sink_id) is None:
        raise UsageError(
            f"the sinkId {sink_id!r} is not valid: it must have 1 to 128 letters, digits, '.', "
            "'_', ':' and '-', and begin with a letter or digit"
        )
    return sink_id


def mark_prefix(sink_id: str, batch: int, partition: int) -> str:
    """The beginning of the marks of a partition's rows; the row's number and the run follow."""
    return f"{sink_id}/{batch}/{partition}/"


def run_of(batch: SinkBatch, parts: Sequence[Part]) -> Run:
    """The end of the marks of a batch: equal for the same query, and for the same partitions."""
    checksum = joined_checksum(parts)
    rows = json.dumps([checksum, [(part.partition, part.rows) for part in parts]])
    return Run(
        _UNKNOWN if batch.query is None else _short_hash(batch.query),
        _UNKNOWN if checksum is None else _short_hash(rows),
    )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def parse_mark(text: str | None, sink_id: str) -> Position | None:
    """The position in a mark; None if the mark is not one of this sink."""
    if text is None or not text.startswith(sink_id):
        return None
    parts = text.removeprefix(sink_id).split("/")
    if len(parts) not in (4, 5) or parts[0]:
        return None
    if not all(_NUMBER.fullmatch(each) for each in parts[1:4]):
        return None
    run = _RUN.fullmatch(parts[4]) if len(parts) > 4 else None
    if len(parts) > 4 and run is None:
        return None
    found = None if run is None else Run(run["query"], run["rows"])
    return Position(int(parts[1]), int(parts[2]), int(parts[3]), found)


def shape_of(parts: Sequence[Part], staged: Collection[str]) -> str:
    """A hash that is equal for two writes whose partitions have equally many rows for the topic.

    `staged` are the names that the parts have for it.
    """
    rows = [(part.partition, sum(part.topics.get(name, 0) for name in staged)) for part in parts]
    text = json.dumps([each for each in sorted(rows) if each[1]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decide(
    topic: TopicName,
    batch: SinkBatch,
    state: SinkState | None,
    origin: str | None,
    rows: int,
    content: Content,
) -> Decision:
    """What to do with the batch, of which `rows` rows go to the topic.

    | the note has      | the same query                  | anybody else                           |
    |-------------------|---------------------------------|----------------------------------------|
    | an earlier batch  | append                          | append, but refuse another query       |
    | this batch        | known, or resume it             | known or resume it if the rows are the |
    |                   |                                 | same, else refuse                      |
    | a later batch     | refuse                          | refuse                                 |

    The query is the same only if both are known; it is another one only if both are known, too.
    If a batch says after which one it was planned, and the note has another one, then it is refused
    too, unless the note has this batch with the same rows.
    UsageError for a batch that is refused. A begun batch of users' own numbers is completed with
    its first rows before it is refused (`Decision.refused`).
    """
    if not batch.named:
        return Decision(Action.APPEND)
    moved = batch.after not in (None, NO_BATCH if state is None else state.batch)
    if moved and (state is None or state.batch < batch.number):
        raise planned_before(topic, batch)
    if state is None:
        return Decision(Action.APPEND, None if began_here(origin) else 0)
    if state.batch > batch.number:
        raise below(topic, batch, state.batch)
    known = batch.query is not None and state.query is not None
    own, foreign = known and batch.query == state.query, known and batch.query != state.query
    if state.batch < batch.number:
        if foreign:
            raise another_query(topic, batch, state.batch)
        trusted = state.origin == origin and state.done
        return Decision(Action.APPEND, None if trusted else state.offset)
    why = None if own and not moved else _difference(topic, batch, state, rows, content)
    if why is not None and foreign:
        raise another_query(topic, batch, state.batch)
    if state.done and why is not None:
        raise UsageError(why)
    return Decision(Action.KNOWN) if state.done else Decision(Action.RESUME, state.offset, why)


def _difference(
    topic: TopicName, batch: SinkBatch, state: SinkState, rows: int, content: Content
) -> str | None:
    """The error text if the rows are not those of the batch that the state describes."""
    if state.checksum is not None and content.checksum is not None:
        same = state.checksum == content.checksum
    else:  # an earlier release wrote the note, or staged the rows
        same = state.digest in (None, content.digest)
    if same and state.rows == rows:
        return None
    stands = "is complete with" if state.done else "was begun with"
    differ = (
        f"{rows} other rows, by value, key, headers, topic or order"
        if rows == state.rows
        else f"{state.rows} rows, but this one has {rows}"
    )
    return (
        f"{topic}: {batch} {stands} {differ}: they are not the same rows, and were not appended. "
        f"Give the new rows another sinkId{_or_batch(batch)}"
    )


def _or_batch(batch: SinkBatch) -> str:
    return (
        ", or continue the query that wrote it with its own checkpoint"
        if batch.streaming
        else " or batchId"
    )


def another_query(topic: TopicName, batch: SinkBatch, reached: int) -> UsageError:
    """The error for a batch of a sink whose last batch is of another query."""
    return UsageError(
        f"{topic}: the sinkId {batch.sink_id!r} belongs to another query, with another checkpoint, "
        f"which wrote batch {reached}. Batch {batch.number} of this query does not repeat it, and "
        "was not appended. Give this query another sinkId, or continue the other one with its "
        "checkpoint"
    )


def planned_before(topic: TopicName, batch: SinkBatch) -> UsageError:
    """The error for a batch that another run of the same job has overtaken."""
    return UsageError(
        f"{topic}: {batch} was planned before another run appended to the topic, or before the "
        "topic was deleted: it may have the same rows, and was not appended. Do not run the same "
        "job twice at a time, and run it again now"
    )


def below(topic: TopicName, batch: SinkBatch, reached: int) -> UsageError:
    """The error for a batch whose number is lower than that of the sink's last one."""
    there = f"{topic}: the sink {batch.sink_id!r} is at batch {reached}"
    if batch.streaming:
        return UsageError(
            f"{there}, but this query is at batch {batch.number}: it has a new checkpoint, or an "
            "old copy of one. Continue with the newest checkpoint, or use another sinkId"
        )
    return UsageError(
        f"{there}, but this is batch {batch.number}: batches of one sink must ascend. "
        "If these rows were never appended, use another sinkId"
    )


def resolve_zeros(catalog: Catalog, parts: Sequence[Part]) -> dict[str, str]:
    """The staged names of partitions 0 that are topics without partitions, with those topics.

    A row with the topic `orders` and the partition 0 goes to `orders-part-0` or to `orders`, which
    would be the same partition for readers. The one that exists decides. If neither exists, any
    other partition of `orders`, in the store or in the batch, makes it a partitioned topic. So a
    batch that is committed again gives the same names, and no topic gets both.
    """
    names = {name for part in parts for name in part.topics}
    named = {name for part in parts for name in part.topics if name not in part.zeros}
    found: dict[str, str] = {}
    for name in sorted(names - named):
        zero = parse_topic(name)
        plain = parse_topic(zero.base)
        if catalog.record(zero) is not None:
            continue
        exists = str(plain) in named or catalog.record(plain) is not None
        if exists or not _has_partitions(catalog, plain, names - {name}):
            found[name] = str(plain)
    return found


def _has_partitions(catalog: Catalog, plain: TopicName, names: Iterable[str]) -> bool:
    stored = catalog.topics(f"{plain.namespace}/{plain.topic}-part-")
    topics = (*map(parse_topic, names), *stored)
    return any(each.is_partition and each.base == str(plain) for each in topics)


def require_apart(catalog: Catalog, names: Iterable[str]) -> None:
    """Raises UsageError if another topic is the same partition as one of these.

    Readers could not tell the messages of the two apart.
    """
    wanted = set(names)
    for name in sorted(wanted):
        twin = parse_topic(name).twin
        if twin is not None and (str(twin) in wanted or catalog.record(twin) is not None):
            plain = min(name, str(twin), key=len)
            raise UsageError(
                f"{name} and {twin} are both partition 0 of {plain}: in Spark, their messages "
                f"would have the same topic, partition and offset. Nothing was appended. Write to "
                f"{twin}, if the other one is empty or unused, or to a topic of another name"
            )


def encode_state(state: SinkState) -> bytes:
    return json.dumps(asdict(state), separators=(",", ":"), sort_keys=True).encode()


def decode_state(data: bytes, what: str) -> SinkState:
    """Decodes a state. Fields that a later release added are ignored."""
    try:
        body = json.loads(data)
        state = SinkState(**{name: body[name] for name in _STATE_FIELDS if name in body})
    except (ValueError, TypeError) as error:
        raise DescriptorError(f"{what} is not the state of a sink: {error}") from error
    if not all(_is_offset(each) for each in (state.batch, state.offset, state.rows)):
        raise DescriptorError(f"{what} is not the state of a sink: a number is out of range")
    return state


_STATE_FIELDS: Final = frozenset(field.name for field in fields(SinkState))


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value <= OFFSET_MAX


# ---- one batch


class TopicWriter(Protocol):
    """Appends to topics that this process owns. Not thread-safe."""

    def end(self, topic: TopicName) -> int:
        """The topic's next offset; everything before it is synced. Creates the topic if needed.

        After the first call, and until the writer is closed, no other process appends to the topic,
        and nobody but this writer appends messages of the sink.
        """

    def start(self, topic: TopicName) -> int:
        """The oldest offset that can be read."""

    def last(self, topic: TopicName, sink_id: str, start: int) -> Position | None:
        """The position of the sink's last message at or after the offset `start`, if any."""

    def append(
        self,
        topic: TopicName,
        payloads: Sequence[bytes | memoryview],
        attributes: Sequence[dict[str, str]],
        keys: Sequence[str | None],
    ) -> None:
        """Appends the messages in this order; `flush` makes them durable."""

    def flush(self) -> None:
        """Returns when everything appended through this writer is synced."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit."""

    appended: int
    """Rows that were appended."""
    known: int
    """Rows that were there already."""


@dataclass(slots=True)
class _Target:
    """One topic of a batch."""

    name: TopicName
    staged: Collection[str]
    """Its names in the staged rows."""
    rows: int
    job_state: JobState | None
    before: SinkState | None
    origin: str | None
    decision: Decision
    last: Position | None = None
    """The last row of the batch that was appended before."""


def commit_batch(
    writer: TopicWriter,
    catalog: Catalog,
    store: CloudStore,
    batch: SinkBatch,
    parts: Sequence[Part],
) -> Committed:
    """Appends the rows that are not in the topics yet, and syncs them.

    UsageError if rows would be skipped that were never appended. After any other error, commit the
    same batch again.
    """
    return _Commit(writer, catalog, store, batch)(parts)


def sweep_if_due(store: CloudStore, batch: SinkBatch) -> None:
    """Deletes abandoned staged files; in a streaming query only once in some batches."""
    if batch.streaming and batch.number % _SWEEP_BATCHES:
        return
    sweep_staging(store)


def state_name(sink_id: str) -> str:
    return f"sink/{sink_id}"


def read_sink_state(catalog: Catalog, topic: TopicName, sink_id: str) -> SinkState | None:
    """The state of the sink in the topic, if the catalog has one; DescriptorError if damaged."""
    job_state = find_job_state(catalog, topic, state_name(sink_id))
    return (
        None if job_state is None else decode_state(job_state.value, f"{topic}: {job_state.name}")
    )


class _Commit:
    def __init__(
        self, writer: TopicWriter, catalog: Catalog, store: CloudStore, batch: SinkBatch
    ) -> None:
        self._writer = writer
        self._catalog = catalog
        self._store = store
        self._batch = batch
        self._run = Run(_UNKNOWN, _UNKNOWN)
        self._renamed: dict[str, str] = {}
        """Staged names of topics that have another name (`resolve_zeros`)."""

    def __call__(self, parts: Sequence[Part]) -> Committed:
        parts = _in_order(parts)
        if not parts:
            return Committed(0, 0)
        targets = self._targets(parts)
        refused = [each.decision.refused for each in targets.values() if each.decision.refused]
        first = self._first_attempt(targets, parts)
        if refused and first is None:
            raise UsageError(refused[0])
        chosen = parts if first is None else first
        if first is not None:
            targets = self._targets(first)
        self._run = run_of(self._batch, chosen)
        for target in targets.values():
            self._look(target, chosen)
        total = sum(target.rows for target in targets.values())
        wanted = {
            name: target
            for name, target in targets.items()
            if target.decision.action is not Action.KNOWN
        }
        appended = 0
        if wanted:
            _require_staged(self._store, chosen)
            appended = self._append_all(wanted, chosen)
        self._take_over(targets.values())
        discard(self._store, chosen)
        if first is not None:
            discard(self._store, parts)
        self._log_result(targets, appended, total - appended)
        if refused:
            raise UsageError(f"{refused[0]}. The batch itself is complete now")
        return Committed(appended, total - appended)

    # -- what was appended before ---------------------------------------------------------------

    def _targets(self, parts: Sequence[Part]) -> dict[str, _Target]:
        """Takes ownership of all topics of the batch, and returns them."""
        self._renamed = resolve_zeros(self._catalog, parts)
        staged: dict[str, set[str]] = {}
        for name in (name for part in parts for name in part.topics):
            staged.setdefault(self._renamed.get(name, name), set()).add(name)
        require_apart(self._catalog, staged)
        return {
            name: self._target(parse_topic(name), names, parts) for name, names in staged.items()
        }

    def _target(self, topic: TopicName, staged: Collection[str], parts: Sequence[Part]) -> _Target:
        rows = sum(part.topics.get(name, 0) for part in parts for name in staged)
        self._writer.end(topic)  # owns it: nobody else changes the topic or its state from now on
        job_state, before, came_from = None, None, None
        if self._batch.named:
            name = state_name(self._batch.sink_id)
            job_state = find_job_state(self._catalog, topic, name)
            before = (
                None if job_state is None else decode_state(job_state.value, f"{topic}: {name}")
            )
            came_from = origin(self._catalog, topic)
            if before is not None and is_of_deleted(before.origin, came_from):
                before = None
        decision = decide(topic, self._batch, before, came_from, rows, content_of(parts))
        return _Target(topic, staged, rows, job_state, before, came_from, decision)

    def _first_attempt(
        self, targets: dict[str, _Target], parts: Sequence[Part]
    ) -> list[Part] | None:
        """The files with which an earlier run began this batch, if they still exist.

        A query that runs again may partition its rows differently, or compute other rows. A batch
        must be finished with the files with which it was begun.
        """
        own = {write_of_staged(part.key) for part in parts if part.key is not None}
        for target in targets.values():
            before = target.before
            if target.decision.action is Action.RESUME and before and before.write not in own:
                found = read_manifest(self._store, before.write)
                if found is not None:
                    return _in_order(found)
        return None

    def _look(self, target: _Target, parts: Sequence[Part]) -> None:
        """Searches the log where the state does not say enough."""
        decision, before, batch = target.decision, target.before, self._batch
        if decision.action is Action.RESUME and before is not None:
            self._require_same_shape(target, before, parts)
        if before is not None and before.batch < batch.number and not before.done:
            self._warn_incomplete(target.name, before)
        if decision.look_from is None:
            return
        found = self._writer.last(target.name, batch.sink_id, decision.look_from)
        if found is None and decision.action is Action.RESUME:
            self._require_kept(target.name, decision.look_from)
        if found is not None and found.batch > batch.number:
            raise below(target.name, batch, found.batch)
        if found is not None and decision.action is Action.APPEND:
            self._require_same_run(target.name, found)
        if found is not None and found.batch == batch.number:
            target.last = found

    def _require_same_run(self, topic: TopicName, found: Position) -> None:
        """Raises UsageError if the log's last row of the sink is of another query or other rows."""
        run, batch = found.run, self._batch
        if run is None or (found.batch == batch.number and run.rows == self._run.rows):
            return
        if _UNKNOWN not in (run.query, self._run.query) and run.query != self._run.query:
            raise another_query(topic, batch, found.batch)
        if found.batch == batch.number and _UNKNOWN not in (run.rows, self._run.rows):
            raise UsageError(
                f"{topic}: the log has rows of {batch}, which a restore brought back, and this run "
                "has other rows or other partitions: it is unknown which of them were appended. "
                "Look at the end of the topic, and give the rest another sinkId"
                f"{_or_batch(batch)}"
            )

    def _warn_incomplete(self, topic: TopicName, before: SinkState) -> None:
        event(
            _log,
            logging.WARNING,
            "an earlier batch of the sink was never completed; a part of it is in the topic",
            topic=topic,
            sink=self._batch.sink_id,
            batch=before.batch,
            rows=before.rows,
            offset=before.offset,
        )

    def _require_kept(self, topic: TopicName, begun: int) -> None:
        """Raises UsageError if retention may have deleted rows of the interrupted batch."""
        start = self._writer.start(topic)
        if begun < start:
            raise UsageError(
                f"{topic}: retention has deleted the offsets {begun} to {start - 1}, where the "
                f"sink {self._batch.sink_id!r} began to append batch {self._batch.number}: it is "
                "unknown which rows were appended. To append all of them, use another sinkId"
            )

    def _require_same_shape(
        self, target: _Target, before: SinkState, parts: Sequence[Part]
    ) -> None:
        if before.shape != shape_of(parts, target.staged):
            raise UsageError(
                f"{target.name}: batch {before.batch} of the sink {self._batch.sink_id!r} was "
                f"begun with {before.rows} rows, whose staged files are gone, and this run has "
                f"other partitions: it is unknown which of its {target.rows} rows were appended. "
                f"Look at offset {before.offset} and after it, and use another sinkId for the rest"
            )

    # -- appending ------------------------------------------------------------------------------

    def _append_all(self, targets: dict[str, _Target], parts: Sequence[Part]) -> int:
        if self._batch.named:
            self._begin(targets.values(), parts)
        appended = 0
        for part in parts:
            first = 0
            for rows in staged_rows(self._store, part):
                appended += self._append(targets, part.partition, first, rows)
                first += len(rows.payloads)
        self._writer.flush()
        if self._batch.named:
            self._end(targets.values())
        return appended

    def _begin(self, targets: Iterable[_Target], parts: Sequence[Part]) -> None:
        write = next(write_of_staged(part.key) for part in parts if part.key is not None)
        write_manifest(self._store, write, parts)
        for target in targets:
            resumed = target.before if target.decision.action is Action.RESUME else None
            if resumed is not None:
                offset = resumed.offset
            elif target.last is not None:  # only the log has it, no state
                offset = target.decision.look_from or 0
            else:
                offset = self._writer.end(target.name)
            self._save(
                target,
                SinkState(
                    batch=self._batch.number,
                    done=False,
                    offset=offset,
                    rows=target.rows,
                    shape=shape_of(parts, target.staged),
                    write=write,
                    origin=target.origin,
                    previous=_previous(target.before, self._batch.number),
                    digest=content_of(parts).digest,
                    checksum=content_of(parts).checksum,
                    query=self._batch.query,
                ),
            )

    def _end(self, targets: Iterable[_Target]) -> None:
        for target in targets:
            assert target.before is not None
            done = replace(target.before, done=True, offset=self._writer.end(target.name))
            self._save(target, done)

    def _take_over(self, targets: Iterable[_Target]) -> None:
        """Notes the query of this run where it repeated the last batch of another one.

        It has proved that it has the same rows, and may go on with the next batch.
        """
        for target in targets:
            before, query = target.before, self._batch.query
            known = target.decision.action is Action.KNOWN and before is not None
            if known and before is not None and query not in (None, before.query):
                self._save(target, replace(before, query=query))

    def _save(self, target: _Target, state: SinkState) -> None:
        name = state_name(self._batch.sink_id)
        target.job_state = write_job_state(
            self._catalog, target.name, name, encode_state(state), expected=target.job_state
        )
        target.before = state

    def _append(self, targets: dict[str, _Target], partition: int, first: int, rows: Rows) -> int:
        """Appends the rows that are not there yet, topic by topic, in order; returns how many."""
        begin = {
            name: max(_first_row(target.last, partition) - first, 0)
            for name, target in targets.items()
        }
        names = rows.topics
        if self._renamed:
            names = [self._renamed.get(name, name) for name in names]
        chosen: dict[str, list[int]] = {name: [] for name in set(names) & begin.keys()}
        for at, name in enumerate(names):
            if name in chosen and at >= begin[name]:
                chosen[name].append(at)
        prefix = mark_prefix(self._batch.sink_id, self._batch.number, partition)
        suffix = f"/{self._run}" if self._batch.named else ""
        attributes, keys = rows.attributes, rows.keys
        for name, places in chosen.items():
            if not places:
                continue
            self._writer.append(
                targets[name].name,
                [rows.payloads[at] for at in places],
                # The sink's mark replaces one that rows have from another topic.
                [{MARK: f"{prefix}{first + at}{suffix}"} for at in places]
                if attributes is None
                else [
                    {**(attributes[at] or {}), MARK: f"{prefix}{first + at}{suffix}"}
                    for at in places
                ],
                [None] * len(places) if keys is None else [keys[at] for at in places],
            )
        return sum(map(len, chosen.values()))

    def _log_result(self, targets: dict[str, _Target], appended: int, known: int) -> None:
        ROWS.add(appended, "appended")
        ROWS.add(known, "known")
        event(
            _log,
            logging.WARNING if known else logging.INFO,
            "some rows of the batch had been appended before" if known else "batch appended",
            sink=self._batch.sink_id,
            batch=self._batch.number,
            topics=len(targets),
            appended=appended,
            known=known,
        )


def _require_staged(store: CloudStore, parts: Sequence[Part]) -> None:
    """Raises if a staged file is missing: a batch that is begun without it could not continue."""
    for part in parts:
        if part.key is None:
            continue
        size = store.head(part.key).size
        if size != part.bytes:
            raise FormatError(f"{store.name}: {part.key} has {size} bytes, not {part.bytes}")


def _first_row(last: Position | None, partition: int) -> int:
    """The first row of the partition to append, if `last` is the last row that was appended."""
    if last is None or partition > last.partition:
        return 0
    return OFFSET_MAX if partition < last.partition else last.row + 1


def content_of(parts: Sequence[Part]) -> Content:
    """What the parts hold, which does not depend on where they are cut."""
    return Content(sum(part.digest for part in parts), joined_checksum(parts))


def _previous(before: SinkState | None, batch: int) -> int | None:
    if before is None:
        return None
    return before.batch if before.done and before.batch < batch else before.previous


def _in_order(parts: Sequence[Part]) -> list[Part]:
    return sorted((part for part in parts if part.rows), key=lambda part: part.partition)
