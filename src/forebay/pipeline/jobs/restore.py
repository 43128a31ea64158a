"""`restore`: rebuilds the catalog of many topics from the bucket alone.

Each topic is restored by `forebay.upload.restore`, in this process, which alone writes to the
catalog. What takes time is reading objects in full: those without a usable sidecar, and all of
them where they are to be verified. That is done by Spark's executors, for many objects of many
topics at once, before the restores ask for it. As long as sidecars tell everything, or there is
little to read, no Spark is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    FormatError,
    ServiceError,
    TopicFenced,
    TopicOwned,
    UsageError,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, parse_topic
from forebay.limits import MIB, TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.objects.backend import Backend
from forebay.pipeline.execute import Done, Progress, SparkExecutor, pack
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.location import site_settings
from forebay.pipeline.resources import executor_resources
from forebay.pipeline.session import slots, spark_session
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, catalog_file
from forebay.upload.inventory import (
    Candidate,
    Inventory,
    Reading,
    read_sidecar,
    read_whole,
    take_stock,
    topics_in_store,
)
from forebay.upload.restore import RestoreReport, restore_topic, to_be_described

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- Objects described before a restore asks for them: read in full, many at a time.
#
# A restore asks for one descriptor after the other. When one of them takes reading its object,
# the objects that will be asked for next are read with it: by executors if it is much, and else
# here.


INLINE_BYTES: Final = 64 * MIB
"""Less is read here sooner than Spark would start."""
_AHEAD_OBJECTS_MAX: Final = 2000
"""Descriptors that are held before a restore asks for them."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out of an object before it was asked for."""

    descriptor: ObjectDescriptor | None
    error: ForebayError | None = None
    reading: Reading = field(default_factory=Reading)


class DescribedAhead:
    """A `Describe`; of one thread."""

    def __init__(self, settings: StoreSettings, spark: SparkSession | None, *, whole: bool) -> None:
        self._settings = settings
        self._spark = spark
        self._whole = whole
        self._plan: list[Candidate] = []
        self._places: dict[str, int] = {}
        self._known: dict[str, _Known] = {}

    def expect(self, candidates: Iterator[Candidate]) -> None:
        """What will be asked for from now on, in this order; the rest is forgotten."""
        self._plan = list(candidates)
        self._places = {each.key: place for place, each in enumerate(self._plan)}
        self._known = {}

    def __call__(
        self, store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
    ) -> ObjectDescriptor:
        found = self._known.pop(candidate.key, None)
        if found is None and not whole:
            told = read_sidecar(store, candidate, reading)
            if told is not None:
                reading.sidecars += 1
                return told
        if found is None:
            self._read(store, candidate)
            found = self._known.pop(candidate.key)
        reading.add(found.reading)
        if found.descriptor is None:
            assert found.error is not None, "an object is described, or there is a reason"
            raise found.error
        return found.descriptor

    def _read(self, store: Backend, candidate: Candidate) -> None:
        """Reads the object in full, and with it what is due next."""
        due = self._due_after(store, candidate)
        batch = [candidate]
        size = candidate.size
        while self._spark is None and size < INLINE_BYTES and (one := next(due, None)) is not None:
            batch.append(one)
            size += one.size
        if self._spark is None and size < INLINE_BYTES:
            for one in batch:
                self._learn(one, _read_here(store, one))
            return
        if self._spark is None:
            self._spark = spark_session(self._settings.spark)
        spark = self._spark
        limit = slots(spark) * WAVE_TASKS_PER_SLOT * TASK_BYTES
        while size < limit and (one := next(due, None)) is not None:
            batch.append(one)
            size += one.size
        tasks = pack(batch, lambda one: one.size, TASK_BYTES, least=slots(spark))
        answers = SparkExecutor(spark).run(tasks, partial(_read_there, self._settings), "restore")
        for items, results in zip(tasks, answers, strict=True):
            for one, done in zip(items, results, strict=True):
                self._learn(one, done)

    def _due_after(self, store: Backend, candidate: Candidate) -> Iterator[Candidate]:
        """The next ones that must be read in full; of others the sidecars are kept."""
        place = self._places.get(candidate.key)
        if place is None:  # another attempt at a range that is damaged: nobody expected it
            return
        for one in islice(self._plan, place + 1, place + _AHEAD_OBJECTS_MAX):
            if one.key in self._known:
                continue
            if not self._whole:
                reading = Reading()
                told = read_sidecar(store, one, reading)
                if told is not None:
                    reading.sidecars += 1
                    self._known[one.key] = _Known(told, None, reading)
                    continue
            yield one

    def _learn(self, candidate: Candidate, done: Done[tuple[ObjectDescriptor, Reading]]) -> None:
        if done.result is None:
            self._known[candidate.key] = _Known(None, done.error)
        else:
            self._known[candidate.key] = _Known(done.result[0], None, done.result[1])


def _read_there(settings: StoreSettings, candidate: Candidate) -> tuple[ObjectDescriptor, Reading]:
    reading = Reading()
    return read_whole(executor_resources(settings).store, candidate, reading), reading


def _read_here(store: Backend, candidate: Candidate) -> Done[tuple[ObjectDescriptor, Reading]]:
    reading = Reading()
    try:
        return Done((read_whole(store, candidate, reading), reading), None)
    except ForebayError as error:
        return Done(None, error)


# ---- restore


_WAVE_OBJECTS: Final = 20_000
_WAVE_TOPICS_MAX: Final = 256
"""Topics whose listings are held at a time."""
_EXPECTED: Final = (CorruptLog, CommitRefused, FormatError, ServiceError, TopicFenced, TopicOwned)


@dataclass(frozen=True, slots=True)
class RestoreChoices:
    """What restores do; see `restore_topic`."""

    dry_run: bool = False
    verify: bool = False
    allow_gaps: bool = False
    assume_nothing_lost: bool = False


@dataclass(frozen=True, slots=True)
class RestoredTopic:
    """What became of one topic: a report, or why there is none."""

    topic: TopicName
    report: RestoreReport | None
    error: ForebayError | None = None

    @property
    def ok(self) -> bool:
        return self.report is not None and not self.report.damaged


@dataclass(frozen=True, slots=True)
class RestoreRow:
    topic: str
    objects_found: int
    known: int
    adopted: int
    messages: int
    by_sidecar: int
    read_whole: int
    bytes_read: int
    gaps: int
    superseded: int
    damaged: int
    start_offset: int
    tail: int
    next_offset: int
    error: str | None


@dataclass(frozen=True, slots=True)
class RestoreJobReport:
    dry_run: bool
    rows: tuple[RestoreRow, ...]

    @property
    def ok(self) -> bool:
        return not any(row.error or row.damaged for row in self.rows)

    @property
    def adopted(self) -> int:
        return sum(row.adopted for row in self.rows)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, RestoreRow, self.rows)


def restore(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    everything: bool = False,
    verify: bool = False,
    allow_gaps: bool = False,
    assume_nothing_lost: bool = False,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RestoreJobReport:
    """Restores the topics, or with `everything` all that have objects.

    What goes wrong with one topic is in its row and stops no other. `progress` gets how many
    topics of how many are done. Without `spark` a session is made when one is needed.
    """
    choices = RestoreChoices(dry_run, verify, allow_gaps, assume_nothing_lost)
    rows: list[RestoreRow] = []
    with restoring(source, topics, choices, everything=everything, spark=spark) as run:
        for done in run.topics():
            rows.append(_row(done))
            if progress is not None:
                progress(len(rows), len(run.names))
    return RestoreJobReport(dry_run, tuple(rows))


@contextmanager
def restoring(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None,
    choices: RestoreChoices,
    *,
    everything: bool,
    spark: SparkSession | None = None,
) -> Iterator[RestoreRun]:
    """A restore that is told topic by topic."""
    settings = site_settings(source)
    if bool(topics) == everything:
        raise UsageError("name the topics to restore, or ask for everything, and not both")
    names = [parse_topic(name) for name in topics or ()]
    _require_objects(settings)
    with _open_tiers(settings, dry_run=choices.dry_run) as tiers:
        if everything:
            names = list(topics_in_store(tiers.store))
        yield RestoreRun(tiers, names, choices, spark)


def _require_objects(settings: StoreSettings) -> None:
    """So that a wrong directory is told, and none is made."""
    if settings.cloud.backend == "fs":
        root = Path(settings.cloud.root or Path(settings.data or "") / "objects")
        if not root.is_dir():
            raise UsageError(f"there are no objects: {root} is not a directory")


@contextmanager
def _open_tiers(settings: StoreSettings, *, dry_run: bool) -> Iterator[StoreResources]:
    """The catalog and the objects. For a dry run a catalog that is not there is an empty one."""
    path = catalog_file(settings)
    absent = dry_run and path is not None and not path.exists()
    with (
        closing(Catalog(SqliteKv(None))) if absent else nullcontext() as catalog,
        closing(StoreResources(settings, SYSTEM_CLOCK, catalog=catalog)) as tiers,
    ):
        yield tiers


class RestoreRun:
    def __init__(
        self,
        tiers: StoreResources,
        names: list[TopicName],
        choices: RestoreChoices,
        spark: SparkSession | None,
    ) -> None:
        self.names = names
        self._tiers = tiers
        self._choices = choices
        self._ahead = DescribedAhead(tiers.settings, spark, whole=choices.verify)

    def topics(
        self,
        shown: Callable[[TopicName], AbstractContextManager[Progress | None]] | None = None,
    ) -> Iterator[RestoredTopic]:
        """Restores them one by one; `shown` makes a progress for each, in objects."""
        names = iter(self.names)
        while wave := self._wave(names):
            self._ahead.expect(self._candidates(wave))
            for topic, stock in wave:
                if isinstance(stock, ForebayError):
                    yield RestoredTopic(topic, None, stock)
                    continue
                with shown(topic) if shown is not None else nullcontext() as progress:
                    done = self._one(topic, stock, progress)
                yield done

    def _wave(self, names: Iterator[TopicName]) -> list[tuple[TopicName, Inventory | ForebayError]]:
        """The next topics, and what the bucket holds of them."""
        wave: list[tuple[TopicName, Inventory | ForebayError]] = []
        count = 0
        for topic in islice(names, _WAVE_TOPICS_MAX):
            try:
                stock = take_stock(self._tiers.store, topic)
            except ServiceError as error:
                wave.append((topic, error))
                continue
            wave.append((topic, stock))
            count += len(stock)
            if count >= _WAVE_OBJECTS:
                break
        return wave

    def _candidates(
        self, wave: list[tuple[TopicName, Inventory | ForebayError]]
    ) -> Iterator[Candidate]:
        for topic, stock in wave:
            if isinstance(stock, Inventory):
                yield from to_be_described(
                    self._tiers.catalog, topic, stock, verify=self._choices.verify
                )

    def _one(self, topic: TopicName, stock: Inventory, progress: Progress | None) -> RestoredTopic:
        choices, tiers = self._choices, self._tiers
        run = partial(
            restore_topic,
            tiers.catalog,
            tiers.store,
            tiers.session,
            topic,
            dry_run=choices.dry_run,
            verify=choices.verify,
            allow_gaps=choices.allow_gaps,
            assume_nothing_lost=choices.assume_nothing_lost,
            progress=progress,
            describe=self._ahead,
        )
        try:
            try:
                report = run(stock=stock)
            except CommitRefused:  # the listing is some time old: perhaps it is only that
                report = run()
        except _EXPECTED as error:
            return RestoredTopic(topic, None, error)
        return RestoredTopic(topic, report)


def _row(done: RestoredTopic) -> RestoreRow:
    report = done.report or RestoreReport(done.topic, dry_run=False)
    return RestoreRow(
        topic=str(done.topic),
        objects_found=report.objects_found,
        known=report.known,
        adopted=report.adopted,
        messages=report.messages,
        by_sidecar=report.by_sidecar,
        read_whole=report.read_whole,
        bytes_read=report.bytes_read,
        gaps=len(report.gaps),
        superseded=len(report.superseded),
        damaged=len(report.damaged),
        start_offset=report.start_offset,
        tail=report.tail,
        next_offset=report.next_offset,
        error=None if done.error is None else str(done.error),
    )
