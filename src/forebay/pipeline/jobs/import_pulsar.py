"""`import_pulsar`: the topics in a bucket of Pulsar's become topics of a store.

The messages of a Pulsar topic are appended in their order: by ledger, entry and batch index. Tasks
read ledgers as the Spark source does (`pipeline.pulsar`), and stage their messages as a sink's
tasks do; the driver appends them through the owner of the topic. No payload passes through Spark.

A topic is imported in batches of whole ledgers. The number of a batch is the id of its last ledger
plus 1, so the sink's state in the target records how far the import got. A second run continues
there, and appends the messages of ledgers that were offloaded since. A note in the catalog has the
ledgers that were imported. One that appears later, with a lower number, is not imported: its
messages would be in the wrong place, and the report names it.

What is not simply a message is counted, and needs a decision where it could matter:

    transactional   keep (they may have been aborted), or leave out
    encrypted       keep (the payload as it is stored), or leave out
    large           over Forebay's limit for a message: leave out
    damaged         leave out
    marker          always left out
    incomplete      chunks without the others: left out, and imported once the others are there

Beware: offsets and publish times are new. The message id and the publish time of Pulsar are
attributes. A message that a producer sent twice, because it lost its connection, is there twice.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.catalog.job_state import JobState, find_job_state, write_job_state
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    InvalidTopicName,
    MissingData,
    UsageError,
)
from forebay.format.names import TopicName, parse_topic, staged_file
from forebay.format.pulsar.messages import Kind
from forebay.format.pulsar.topic import PulsarTopic
from forebay.limits import ATTRIBUTES_MAX, JOB_STATE_BYTES_MAX, KIB, MESSAGE_BYTES_MAX, MIB
from forebay.objects.store import connect
from forebay.pipeline.execute import Executor, Progress, Runner, ThreadExecutor, executor_for
from forebay.pipeline.jobs.replay import Commit, target_owner
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.restore import INLINE_BYTES, job_resources
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.pipeline.pulsar.bucket import Bucket, Ledger
from forebay.pipeline.pulsar.options import PulsarOptions
from forebay.pipeline.pulsar.plan import Neighbour, Split, splits
from forebay.pipeline.pulsar.seen import decode_seen, encode_seen
from forebay.pipeline.sink.commit import (
    MARK,
    NO_BATCH,
    SinkBatch,
    SinkState,
    read_sink_state,
    require_apart,
)
from forebay.pipeline.sink.staging import Part, discard, stage
from forebay.settings import CloudSettings, StoreSettings
from forebay.topic.resources import StoreResources, executor_resources

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_TASK_BYTES: Final = 32 * MIB
_BATCH_BYTES_MAX: Final = 1024 * MIB
"""The most bytes of ledgers in one batch, unless one ledger is larger: what a kill repeats."""
_COLUMNS: Final = (
    "value",
    "__key",
    "__messageProperties",
    "__publishTime",
    "__eventTime",
    "__ledgerId",
    "__entryId",
    "__batchIndex",
    "__orderingKey",
    "__schemaVersion",
    "__kind",
)
_PUBLIC: Final = "public"
_LARGE: Final = "large"
_DAMAGED: Final = "damaged"
_ATTRIBUTES_ADDED: Final = 16
_ATTRIBUTES_BYTES: Final = 8 * KIB
"""Room for the attributes that an import adds, and for the rest of a message."""

KEPT: Final = (Kind.TRANSACTIONAL.value, Kind.ENCRYPTED.value)
"""What an operator may decide to keep."""
LEFT_OUT: Final = (*KEPT, _LARGE, _DAMAGED)
"""What an operator may decide to leave out. Without a decision, it stops the topic."""
NOT_MESSAGES: Final = (Kind.MARKER.value, Kind.INCOMPLETE.value)
"""What is always left out, and counted."""


@dataclass(frozen=True, slots=True)
class PulsarImportChoices:
    """What an import does with what is not simply a message."""

    keep: frozenset[str] = frozenset()
    leave_out: frozenset[str] = frozenset()

    def check(self) -> None:
        for name, given, known in (
            ("keep", self.keep, KEPT),
            ("leave_out", self.leave_out, LEFT_OUT),
        ):
            wrong = sorted(given - set(known))
            if wrong:
                raise UsageError(f"{name} cannot be {wrong[0]!r}: it is one of {', '.join(known)}")
        both = sorted(self.keep & self.leave_out)
        if both:
            raise UsageError(f"{both[0]} messages cannot be both kept and left out")

    def undecided(self, counts: Counter[str]) -> list[str]:
        """The kinds that were found, and nobody decided about."""
        decided = self.keep | self.leave_out
        return [kind for kind in LEFT_OUT if counts[kind] and kind not in decided]


@dataclass(slots=True)
class PulsarImportRow:
    """What an import found of one topic, and what it did. Without `apply`: what it would do."""

    topic: str
    into: str | None
    ledgers: int = 0
    """Ledgers in the bucket."""
    known: int = 0
    """Ledgers that an earlier run imported."""
    bytes: int = 0
    """Of the data objects of the other ones."""
    messages: int = 0
    """Messages that were appended."""
    repeated: int = 0
    """Messages of this run's ledgers that an earlier run had appended."""
    transactional: int = 0
    encrypted: int = 0
    large: int = 0
    damaged: int = 0
    marker: int = 0
    incomplete: int = 0
    late: list[int] = field(default_factory=list)
    """Ledgers that appeared after later ones were imported. They are not imported."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PulsarImportSummary:
    """A row of the DataFrame: lists are counted."""

    topic: str
    into: str | None
    ledgers: int
    known: int
    bytes: int
    messages: int
    repeated: int
    transactional: int
    encrypted: int
    large: int
    damaged: int
    marker: int
    incomplete: int
    late: int
    error: str | None


@dataclass(frozen=True, slots=True)
class PulsarImportReport:
    applied: bool
    rows: tuple[PulsarImportRow, ...]

    @property
    def ok(self) -> bool:
        return not any(row.error or row.late for row in self.rows)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        names = [each.name for each in fields(PulsarImportSummary)]
        rows = [
            PulsarImportSummary(*(_counted(getattr(row, name)) for name in names))
            for row in self.rows
        ]
        return to_dataframe(spark, PulsarImportSummary, rows)


def _counted(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


def import_pulsar(
    target: str | Path | StoreSettings,
    bucket: CloudSettings,
    topics: Sequence[str] = (),
    *,
    pattern: str | None = None,
    into: str | None = None,
    apply: bool = False,
    keep: Iterable[str] = (),
    leave_out: Iterable[str] = (),
    spark: SparkSession | None = None,
    runner: Runner = "spark",
    progress: Progress | None = None,
) -> PulsarImportReport:
    """Imports the ledgers in `bucket` of the named topics, or of all, into the store `target`.

    Without `apply`, reads everything, changes nothing, and reports what an import would do. `into`
    names the target of a single topic; otherwise `public/default/orders` becomes `/default/orders`.
    The error of a topic is in its row, and does not stop the others. Spark is not started for less
    than `INLINE_BYTES`, unless a session is given. UsageError for arguments that cannot be right.
    """
    choices = PulsarImportChoices(frozenset(keep), frozenset(leave_out))
    choices.check()
    settings = job_settings(target)
    options = PulsarOptions(bucket, tuple(topics), pattern, columns=_COLUMNS)
    with closing(connect(bucket)) as store:
        _require_other(store.name, settings)
        found = Bucket(store, fail_on_data_loss=_DAMAGED not in choices.leave_out)
        there = found.look()
        options.require_topics(dict.fromkeys(ledger.topic for ledger in there))
        ledgers = [ledger for ledger in there if options.matches(ledger.topic)]
        executor = executor_for(runner, spark, settings.spark)
        size = sum(ledger.size for ledger in ledgers)
        if runner == "spark" and spark is None and size < INLINE_BYTES:
            executor = ThreadExecutor()
        by_topic: dict[PulsarTopic, list[Ledger]] = {}
        for ledger in ledgers:
            by_topic.setdefault(ledger.topic, []).append(ledger)
        targets = _targets(by_topic, into)
        with job_resources(settings, dry_run=not apply) as resources:
            run = _Run(resources, found, options, choices, executor, progress)
            rows = [_imported(run, targets[topic], each, apply) for topic, each in by_topic.items()]
    return PulsarImportReport(apply, tuple(rows))


def _require_other(name: str, settings: StoreSettings) -> None:
    with closing(connect(settings.cloud, Path(settings.data or ""))) as own:
        if own.name == name:
            raise UsageError(
                f"{name} is the bucket and the target: choose another store for the target, "
                "because an import changes nothing in its source"
            )


def _targets(topics: Iterable[PulsarTopic], into: str | None) -> dict[PulsarTopic, TopicName | str]:
    """The topic of the store for each of Pulsar's, or why there is none."""
    names = list(topics)
    if into is not None:
        if len(names) != 1:
            raise UsageError(f"one target was named for {len(names)} topics: name one topic")
        return {names[0]: parse_topic(into)}
    found: dict[PulsarTopic, TopicName | str] = {}
    taken: dict[TopicName, PulsarTopic] = {}
    for topic in names:
        try:
            target = target_of(topic)
        except InvalidTopicName as error:
            found[topic] = f"{error}: name this topic alone, and its target with --into"
            continue
        other = taken.setdefault(target, topic)
        found[topic] = target if other == topic else f"{other} would become {target} too"
    return found


def target_of(topic: PulsarTopic) -> TopicName:
    """The topic of a store that a topic of Pulsar becomes; InvalidTopicName if it has none.

    Partitions stay partitions: `orders-partition-3` becomes `orders-part-3`.
    """
    namespace = topic.namespace.removeprefix(f"{_PUBLIC}/").replace("/", "_")
    name = topic.name
    if topic.partition >= 0:
        name = f"{topic.base.name}-part-{topic.partition}"
    return parse_topic(f"/{namespace}/{name}")


# ---- tasks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """What one task reads; `number` is the task's place in its batch."""

    batch: str
    number: int
    split: Split

    @property
    def size(self) -> int:
        return self.split.size


@dataclass(frozen=True, slots=True)
class _Read:
    """What a task found."""

    messages: int
    counts: Counter[str]
    """Of what is not simply a message."""
    damage: str | None
    """The first damage; the rest of the data was read."""
    part: Part | None
    """The staged messages; None if the task only counted."""


def _read_task(
    settings: StoreSettings,
    options: PulsarOptions,
    choices: PulsarImportChoices,
    into: str | None,
    task: _Task,
) -> _Read:
    """Reads the blocks of a task, and stages their messages for the topic `into`, if any."""
    from forebay.pipeline.pulsar.scan import read_split
    from forebay.pipeline.sink.columns import checked_rows

    counts: Counter[str] = Counter()
    damages: list[str] = []

    def damaged(error: CorruptLog) -> None:
        counts[_DAMAGED] += 1
        damages[:] = damages or [str(error)]

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in read_split(options, task.split, damaged):
            yield _messages(batch, choices, counts)

    part: Part | None = None
    if into is None:
        messages = sum(batch.num_rows for batch in rows())
    else:
        part = stage(
            executor_resources(settings).store,
            staged_file(task.batch, task.number, secrets.randbits(48)),
            task.number,
            checked_rows(rows(), task.number, into),
            chunk_bytes=settings.uploader.stream_chunk_size,
        )
        messages = part.rows
    return _Read(messages, counts, damages[0] if damages else None, part)


def _messages(
    batch: pa.RecordBatch, choices: PulsarImportChoices, counts: Counter[str]
) -> pa.RecordBatch:
    """The rows of a scan as rows for a sink, without those that are left out."""
    import pyarrow as pa

    columns = {name: batch.column(at) for at, name in enumerate(batch.schema.names)}
    for name in ("__publishTime", "__eventTime"):
        columns[name] = columns[name].cast(pa.int64())
    names = list(columns)
    values: list[bytes] = []
    keys: list[str | None] = []
    headers: list[list[tuple[str, str]]] = []
    for row in zip(*(column.to_pylist() for column in columns.values()), strict=True):
        message = dict(zip(names, row, strict=True))
        if not _is_kept(message, choices, counts):
            continue
        key, attributes = _attributes(message)
        values.append(message["value"] or b"")
        keys.append(key)
        headers.append([(name, value) for name, value in attributes.items()])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    made = [pa.array(values, pa.binary()), pa.array(keys, pa.string()), pa.array(headers, kind)]
    return pa.RecordBatch.from_arrays(made, ["value", "key", "headers"])


def _is_kept(message: dict[str, Any], choices: PulsarImportChoices, counts: Counter[str]) -> bool:
    kind = message["__kind"]
    if kind != Kind.MESSAGE.value:
        counts[kind] += 1
        if kind not in choices.keep:
            return False
    properties = message["__messageProperties"] or ()
    size = len(message["value"] or b"") + len(message["__key"] or b"")
    size += sum(4 * (len(name) + len(value)) + 16 for name, value in properties)
    limit = MESSAGE_BYTES_MAX - _ATTRIBUTES_BYTES
    if size > limit or len(properties) > ATTRIBUTES_MAX - _ATTRIBUTES_ADDED:
        counts[_LARGE] += 1
        return False
    return True


def _attributes(message: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The routing key, and the attributes: the properties, and what Pulsar says besides."""
    found = {
        f"pulsar.{name}" if name == MARK else name: value
        for name, value in message["__messageProperties"] or ()
    }
    place = (message["__ledgerId"], message["__entryId"], message["__batchIndex"])
    found["pulsar.message-id"] = ":".join(map(str, place))
    numbers = (
        ("pulsar.publish-time", message["__publishTime"], 1000),
        ("pulsar.event-time", message["__eventTime"], 1000),
        ("pulsar.schema-version", message["__schemaVersion"], 1),
    )
    found |= {name: str(number // unit) for name, number, unit in numbers if number is not None}
    if message["__orderingKey"] is not None:
        found["pulsar.ordering-key"] = base64.b64encode(message["__orderingKey"]).decode()
    if message["value"] is None:
        found["pulsar.null-value"] = "true"
    if message["__kind"] != Kind.MESSAGE.value:
        found["pulsar.kind"] = message["__kind"]
    key = message["__key"]
    try:
        return None if key is None else key.decode(), found
    except UnicodeDecodeError:
        found["pulsar.key"] = base64.b64encode(key).decode()
        return None, found


# ---- one topic --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """What the topics of one run share, on the driver."""

    resources: StoreResources
    bucket: Bucket
    options: PulsarOptions
    choices: PulsarImportChoices
    executor: Executor
    progress: Progress | None


def _imported(
    run: _Run, target: TopicName | str, ledgers: list[Ledger], apply: bool
) -> PulsarImportRow:
    """Imports the ledgers of one topic, sorted by their numbers; returns what became of them."""
    topic = ledgers[0].topic
    if isinstance(target, str):
        return PulsarImportRow(str(topic), None, len(ledgers), error=f"{topic}: {target}")
    row = PulsarImportRow(str(topic), str(target), len(ledgers))
    try:
        _TopicImport(run, topic, target, ledgers, row)(apply=apply)
    except ForebayError as error:
        row.error = str(error)
    return row


class _TopicImport:
    def __init__(
        self,
        run: _Run,
        topic: PulsarTopic,
        target: TopicName,
        ledgers: list[Ledger],
        row: PulsarImportRow,
    ) -> None:
        self._run = run
        self._topic = topic
        self._target = target
        self._ledgers = ledgers
        self._row = row
        self._sink = _sink(topic)
        self._catalog = run.resources.catalog
        self._after = NO_BATCH
        """The last batch that was appended."""
        self._note: JobState | None = None
        """The note as this run has read it or written it."""
        work = partial(_read_task, run.resources.settings, run.options, run.choices, str(target))
        self._staging = self._waves(work)
        self._counting = self._waves(
            partial(_read_task, run.resources.settings, run.options, run.choices, None)
        )

    def _waves(self, work: Callable[[_Task], _Read]) -> Waves[_Task, _Read]:
        label = f"import {self._topic}"
        return Waves(
            self._run.executor,
            work,
            lambda task: task.size,
            label=label,
            progress=self._run.progress,
        )

    def __call__(self, *, apply: bool) -> None:
        state = read_sink_state(self._catalog, self._target, self._sink)
        self._after = NO_BATCH if state is None else state.batch
        self._note = find_job_state(self._catalog, self._target, _note(self._sink))
        begun, rest = self._left(state)
        batches = [begun] if begun else []
        batches += _batches(rest, min(self._staging.bytes_max(), _BATCH_BYTES_MAX))
        self._row.bytes = sum(ledger.size for batch in batches for ledger in batch)
        if not batches:
            return
        if not apply:
            for batch in batches:
                self._count(batch)
            return
        require_apart(self._catalog, [str(self._target)])
        with target_owner(
            self._run.resources, self._target, self._sink, state, "import", str(self._topic)
        ) as commit:
            for batch in batches:
                self._batch(batch, commit)

    # -- where it is ----------------------------------------------------------------------------

    def _left(self, state: SinkState | None) -> tuple[list[Ledger], list[Ledger]]:
        """The ledgers of the batch that an earlier run began and did not finish, and the others."""
        reached = 0 if state is None else state.batch if state.done else state.previous or 0
        begun = reached if state is None or state.done else state.batch
        noted = self._noted()
        self._row.known = sum(
            each.ledger_id < reached and each.ledger_id in noted for each in self._ledgers
        )
        self._row.late = [
            each.ledger_id
            for each in self._ledgers
            if each.ledger_id < begun and each.ledger_id not in noted
        ]
        first = [
            each
            for each in self._ledgers
            if reached <= each.ledger_id < begun and each.ledger_id in noted
        ]
        gone = {each for each in noted if reached <= each < begun}
        gone -= {each.ledger_id for each in first}
        if gone:
            raise MissingData(
                f"{self._topic}: the import of ledger {min(gone)} was begun, and it is not in the "
                "bucket any more: put it back, and import again"
            )
        return first, [each for each in self._ledgers if each.ledger_id >= begun]

    def _noted(self) -> frozenset[int]:
        """The ledgers that were imported, and those of the batch after them."""
        if self._note is None or not self._note.value:
            return frozenset()
        document = json.loads(zlib.decompress(self._note.value))
        return decode_seen(document).get(str(self._topic), frozenset())

    def _remember(self, batch: Sequence[Ledger]) -> None:
        """Notes the ledgers of a batch, before it is begun; CommitRefused if another run did."""
        noted = self._noted() | {each.ledger_id for each in batch}
        value = zlib.compress(json.dumps(encode_seen({str(self._topic): noted})).encode())
        if len(value) > JOB_STATE_BYTES_MAX:
            raise UsageError(
                f"{self._topic}: the catalog has no room for the numbers of {len(noted)} ledgers: "
                "import the rest into another topic, from a bucket without the first ones"
            )
        name = _note(self._sink)
        self._note = write_job_state(self._catalog, self._target, name, value, expected=self._note)

    def _forget(self, before: JobState | None) -> None:
        """Takes back the note of a batch that was refused: its ledgers are not imported."""
        name = _note(self._sink)
        value = b"" if before is None else before.value
        with suppress(CommitRefused):  # another run notes what it imports
            self._note = write_job_state(
                self._catalog, self._target, name, value, expected=self._note
            )

    # -- one batch ------------------------------------------------------------------------------

    def _count(self, batch: Sequence[Ledger]) -> None:
        for read in self._read(batch, self._counting):
            self._add(read)
            self._row.messages += read.messages
        self._require_decided()

    def _batch(self, batch: Sequence[Ledger], commit: Commit) -> None:
        found = self._read(batch, self._staging)
        parts = [read.part for read in found if read.part is not None]
        try:
            for read in found:
                self._add(read)
            self._require_decided()
        except ForebayError:
            discard(self._run.resources.store, parts)
            raise
        before = self._note
        try:
            self._remember(batch)
        except ForebayError:
            discard(self._run.resources.store, parts)
            raise
        last, sink = batch[-1].ledger_id + 1, self._sink
        number = SinkBatch(sink, last, named=True, query=sink, after=self._after)
        try:
            committed = commit(number, parts)
        except UsageError:
            self._forget(before)
            raise
        if committed.appended + committed.known:
            self._after = last
        self._row.messages += committed.appended
        self._row.repeated += committed.known

    def _read(self, batch: Sequence[Ledger], waves: Waves[_Task, _Read]) -> list[_Read]:
        """Reads a batch. Chunks may be in any ledger: all are imported, now or another time."""
        name = secrets.token_hex(8)
        planned = splits(self._run.bucket, batch, self._ledgers, _TASK_BYTES)
        tasks = [
            _Task(name, number, replace(split, around=_all_read(split)))
            for number, split in enumerate(planned)
        ]
        done = [each for _, each in waves.run(tasks)]
        found = [each.result for each in done if each.result is not None]
        errors = [each.error for each in done if each.error is not None]
        if errors:
            parts = [read.part for read in found if read.part is not None]
            discard(self._run.resources.store, parts)
            raise errors[0]
        return found

    def _add(self, read: _Read) -> None:
        for kind, count in read.counts.items():
            setattr(self._row, kind, getattr(self._row, kind) + count)
        if read.damage is not None and _DAMAGED not in self._run.choices.leave_out:
            raise CorruptLog(f"{read.damage}; or leave it out with --leave-out damaged")

    def _require_decided(self) -> None:
        counts = Counter({kind: getattr(self._row, kind) for kind in LEFT_OUT})
        undecided = self._run.choices.undecided(counts)
        if undecided:
            kind = undecided[0]
            keep = f"keep them with --keep {kind}, or " if kind in KEPT else ""
            raise UsageError(
                f"{self._topic}: {counts[kind]} messages are {kind}, and an import does not decide "
                f"about these: {keep}leave them out with --leave-out {kind}"
            )


def _all_read(split: Split) -> tuple[Neighbour, ...]:
    return tuple(replace(each, read=True) for each in split.around)


def _sink(topic: PulsarTopic) -> str:
    """The id of the sink: the same for every import of the topic, wherever its bucket is."""
    return f"import-pulsar-{hashlib.sha256(str(topic).encode()).hexdigest()[:24]}"


def _note(sink: str) -> str:
    return f"note/{sink}"


def _batches(ledgers: Sequence[Ledger], bytes_max: int) -> list[list[Ledger]]:
    """The ledgers in batches of about `bytes_max` at most, in their order."""
    batches: list[list[Ledger]] = []
    size = 0
    for ledger in ledgers:
        if not batches or size + ledger.size > bytes_max:
            batches.append([])
            size = 0
        batches[-1].append(ledger)
        size += ledger.size
    return batches
