"""`restore`: rebuilds the catalog of many topics from their objects.

This process restores one topic after the other (`forebay.upload.restore`), and only it writes to
the catalog. The slow part is reading objects in full: those without a usable sidecar, or all of
them with `verify`. Tasks do that ahead of time, for many objects of many topics at once. Spark is
not started if the sidecars are complete, or if there is little to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
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
from forebay.limits import MIB
from forebay.objects.backend import Backend
from forebay.pipeline.execute import Done, Progress, Runner, ThreadExecutor, executor_for
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, catalog_file, executor_resources
from forebay.upload.inventory import (
    Candidate,
    Inventory,
    Reading,
    read_sidecar,
    read_whole,
    take_stock,
    topics_in_store,
)
from forebay.upload.restore import (
    RestoreChoices,
    RestoreReport,
    restore_topic,
    to_be_described,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

INLINE_BYTES: Final = 64 * MIB
"""This process reads less than that faster than Spark could start."""
_AHEAD_OBJECTS_MAX: Final = 2000
"""The most descriptors to hold before a restore asks for them."""
_WAVE_OBJECTS: Final = 20_000
_WAVE_TOPICS_MAX: Final = 256
"""The most topics whose listings are held at a time."""
_EXPECTED: Final = (
    CorruptLog,
    CommitRefused,
    FormatError,
    ServiceError,
    TopicFenced,
    TopicOwned,
    UsageError,
)


@dataclass(frozen=True, slots=True)
class RestoredTopic:
    """The report of one topic, or the error why there is none."""

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
    older: str | None
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
    next_offset: int | None = None,
    accept_loss: bool = False,
    spark: SparkSession | None = None,
    runner: Runner = "spark",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RestoreJobReport:
    """Restores the topics, or with `everything` all topics that have objects.

    The error of a topic is in its row, and does not stop the others. `progress` is called with the
    number of topics that are done, and of all. Without `spark`, a session is started if needed.
    `runner="threads"` uses threads of this process in place of Spark. The other options are those
    of `RestoreChoices`; `next_offset` needs exactly one topic.
    """
    choices = RestoreChoices(
        dry_run, verify, allow_gaps, assume_nothing_lost, next_offset, accept_loss
    )
    rows: list[RestoreRow] = []
    with open_restore(
        source, topics, choices, everything=everything, spark=spark, runner=runner
    ) as run:
        for done in run.topics():
            rows.append(_row(done))
            if progress is not None:
                progress(len(rows), len(run.names))
    return RestoreJobReport(dry_run, tuple(rows))


@contextmanager
def open_restore(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None,
    choices: RestoreChoices,
    *,
    everything: bool,
    spark: SparkSession | None = None,
    runner: Runner = "spark",
) -> Iterator[RestoreRun]:
    """Opens a restore, which restores topics one by one as `RestoreRun.topics` is iterated."""
    settings = job_settings(source)
    waves = Waves(
        executor_for(runner, spark, settings.spark),
        partial(_describe_in_task, settings),
        _size,
        label="restore",
    )
    starts_spark = runner == "spark" and spark is None
    prefetch = _Prefetch(
        waves, whole=choices.verify, inline_bytes=INLINE_BYTES if starts_spark else 0
    )
    if bool(topics) == everything:
        raise UsageError("give either the topics to restore or everything=True, not both")
    if choices.next_offset is not None and len(topics or ()) != 1:
        raise UsageError("a next offset is that of one topic: give exactly one to restore")
    if choices.next_offset is not None and choices.assume_nothing_lost:
        raise UsageError("give either the next offset or the assumption that nothing is lost")
    names = [parse_topic(name) for name in topics or ()]
    _require_objects(settings)
    with job_resources(settings, dry_run=choices.dry_run) as resources:
        if everything:
            names = list(topics_in_store(resources.store, with_danube=True))
        yield RestoreRun(resources, names, choices, prefetch)


def _require_objects(settings: StoreSettings) -> None:
    """Raises UsageError if the directory of the objects does not exist. Creates nothing."""
    if settings.cloud.backend == "fs":
        root = Path(settings.cloud.root or Path(settings.data or "") / "objects")
        if not root.is_dir():
            raise UsageError(f"there are no objects: {root} is not a directory")


@contextmanager
def job_resources(settings: StoreSettings, *, dry_run: bool) -> Iterator[StoreResources]:
    """The catalog and the objects. A dry run uses an empty catalog if there is none."""
    path = catalog_file(settings)
    absent = dry_run and path is not None and not path.exists()
    with (
        closing(Catalog(SqliteKv(None))) if absent else nullcontext() as catalog,
        closing(StoreResources(settings, catalog=catalog)) as resources,
    ):
        yield resources


class RestoreRun:
    def __init__(
        self,
        resources: StoreResources,
        names: list[TopicName],
        choices: RestoreChoices,
        prefetch: _Prefetch,
    ) -> None:
        self.names = names
        self._resources = resources
        self._choices = choices
        self._prefetch = prefetch

    def topics(
        self,
        shown: Callable[[TopicName], AbstractContextManager[Progress | None]] | None = None,
    ) -> Iterator[RestoredTopic]:
        """Restores the topics one by one, and yields their results, which may be errors.

        `shown` returns a context manager for a topic, with a `Progress` that counts objects.
        """
        names = iter(self.names)
        while wave := self._wave(names):
            self._prefetch.expect(self._candidates(wave))
            for topic, stock in wave:
                if isinstance(stock, ForebayError):
                    yield RestoredTopic(topic, None, stock)
                    continue
                with shown(topic) if shown is not None else nullcontext() as progress:
                    done = self._one(topic, stock, progress)
                yield done

    def _wave(self, names: Iterator[TopicName]) -> list[tuple[TopicName, Inventory | ForebayError]]:
        """The next topics, each with the objects that the store has, or with an error."""
        wave: list[tuple[TopicName, Inventory | ForebayError]] = []
        count = 0
        for topic in islice(names, _WAVE_TOPICS_MAX):
            try:
                stock = take_stock(self._resources.store, topic)
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
                    self._resources.catalog, topic, stock, verify=self._choices.verify
                )

    def _one(self, topic: TopicName, stock: Inventory, progress: Progress | None) -> RestoredTopic:
        choices, resources = self._choices, self._resources
        run = partial(
            restore_topic,
            resources.catalog,
            resources.store,
            resources.session,
            topic,
            choices,
            local=resources.local_log(topic),
            progress=progress,
            describe=self._prefetch,
        )
        try:
            try:
                report = run(stock=stock)
            except CommitRefused:  # perhaps only because the listing is old: list again
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
        older=report.older,
        error=None if done.error is None else str(done.error),
    )


# ---- objects described before a restore asks for them -----------------------------------------


@dataclass(frozen=True, slots=True)
class _Described:
    """The descriptor of an object that was read ahead, or the error why there is none."""

    descriptor: ObjectDescriptor | None
    error: ForebayError | None = None
    reading: Reading = field(default_factory=Reading)


class _Prefetch:
    """A `Describe` that reads ahead. Not thread-safe.

    A restore asks for one descriptor after the other. When it asks for one whose object must be
    read in full, the next such objects are read as well, in parallel.
    """

    def __init__(
        self,
        waves: Waves[Candidate, tuple[ObjectDescriptor, Reading]],
        *,
        whole: bool,
        inline_bytes: int,
    ) -> None:
        """Less than `inline_bytes` is read by this process; 0 means always by the executor."""
        self._waves = waves
        self._whole = whole
        self._inline_bytes = inline_bytes
        self._plan: list[Candidate] = []
        self._places: dict[str, int] = {}
        self._known: dict[str, _Described] = {}

    def expect(self, candidates: Iterator[Candidate]) -> None:
        """Sets the objects that will be requested next, in this order. Drops those already read."""
        self._plan = list(candidates)
        self._places = {each.key: place for place, each in enumerate(self._plan)}
        self._known = {}

    def __call__(
        self, store: Backend, candidate: Candidate, reading: Reading, *, whole: bool
    ) -> ObjectDescriptor:
        found = self._known.pop(candidate.key, None)
        if found is None and not whole:
            descriptor = read_sidecar(store, candidate, reading)
            if descriptor is not None:
                reading.sidecars += 1
                return descriptor
        if found is None:
            self._read(store, candidate)
            found = self._known.pop(candidate.key)
        reading.add(found.reading)
        if found.descriptor is None:
            assert found.error is not None, "an object is described, or there is a reason"
            raise found.error
        return found.descriptor

    def _read(self, store: Backend, candidate: Candidate) -> None:
        """Reads the object in full, and the next ones with it."""
        due = chain([candidate], self._due_after(store, candidate))
        if self._inline_bytes:
            batch: list[Candidate] = []
            size = 0
            while size < self._inline_bytes and (one := next(due, None)) is not None:
                batch.append(one)
                size += one.size
            if size < self._inline_bytes:
                here = Waves(ThreadExecutor(), partial(_describe, store), _size, label="restore")
                self._keep(here.run(batch))
                return
            self._inline_bytes = 0
            due = chain(batch, due)
        self._keep(self._waves.run(next(self._waves.cut(due))))

    def _due_after(self, store: Backend, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the next objects that must be read in full; keeps the sidecars of others."""
        place = self._places.get(candidate.key)
        if place is None:  # an object that was not expected: another copy of a damaged range
            return
        for one in islice(self._plan, place + 1, place + _AHEAD_OBJECTS_MAX):
            if one.key in self._known:
                continue
            if not self._whole:
                reading = Reading()
                descriptor = read_sidecar(store, one, reading)
                if descriptor is not None:
                    reading.sidecars += 1
                    self._known[one.key] = _Described(descriptor, None, reading)
                    continue
            yield one

    def _keep(
        self, read: Iterable[tuple[Candidate, Done[tuple[ObjectDescriptor, Reading]]]]
    ) -> None:
        for candidate, done in read:
            if done.result is None:
                self._known[candidate.key] = _Described(None, done.error)
            else:
                self._known[candidate.key] = _Described(done.result[0], None, done.result[1])


_size: Final[Callable[[Candidate], int]] = attrgetter("size")


def _describe(store: Backend, candidate: Candidate) -> tuple[ObjectDescriptor, Reading]:
    reading = Reading()
    return read_whole(store, candidate, reading), reading


def _describe_in_task(
    settings: StoreSettings, candidate: Candidate
) -> tuple[ObjectDescriptor, Reading]:
    return _describe(executor_resources(settings).store, candidate)
