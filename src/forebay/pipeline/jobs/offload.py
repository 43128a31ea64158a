"""`offload`: uploads everything that is synced, or everything that is due, as objects.

The driver plans all topics and records intents for the objects. Tasks upload them
(`upload.engine`), on Spark or on threads. The driver commits the objects of each topic in the order
of offsets, and stops at the first one that failed. All this happens in waves of bounded size; each
wave is committed before the next one is planned, so that an interrupted run loses little.

The driver does not own the topics. A commit compares the epoch and the tail of the plan with the
catalog, and is planned again if they have changed. Intents are renewed while a wave runs, so that
no sweep takes them for abandoned.

Beware: Spark starts only when there is something to upload.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from forebay.catalog.adopt import is_restoring, unfinished
from forebay.catalog.catalog import Catalog, Intent, fenced
from forebay.catalog.records import TopicRecord
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    DiskError,
    ForebayError,
    MissingData,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
    remedy,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import SegmentNames, TopicName, parse_topic
from forebay.logs import event
from forebay.objects.store import CloudStore
from forebay.pipeline.execute import Done, Executor, Progress, Runner, executor_for
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.resources import executor_resources
from forebay.topic.view import StoreView, TopicView
from forebay.upload import engine, metrics
from forebay.upload.engine import Renewal, Uploaded, UploadTask, set_aside
from forebay.upload.ledgers import remove_attempt
from forebay.upload.plan import PlannedObject, SegmentSource, TopicPlanner
from forebay.wal.segment import LogPosition, Segment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
A_LEDGER: Final = "a ledger"
"""In the row of a dry run, in place of a name: a ledger has none before it is begun."""
_REFUSALS_MAX: Final = 5
"""How often a run plans a topic again because somebody else has changed its chain."""
_MOVED: Final = (CommitRefused, TopicFenced, MissingData)
"""Errors that occur when somebody else has uploaded the same: the topic is planned again."""


def offload(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    spark: SparkSession | None = None,
    runner: Runner = "spark",
    force: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> OffloadReport:
    """Uploads the synced messages of the named topics, or of all topics.

    `force` uploads everything; without it, only what the topics' thresholds make due, and topics
    that roll are left to their owners. A dry run
    writes nothing and starts no Spark. `runner="threads"` uses threads of this process in place of
    Spark. UsageError for a named topic that does not exist; other errors of a topic are in the
    report.
    """
    settings = job_settings(source)
    executor = executor_for(runner, spark, settings.spark)
    with Offload(settings, executor, progress=progress) as run:
        return run.once(topics, force=force, dry_run=dry_run)


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One object that was committed, or would be, or the error that stopped a topic."""

    topic: str
    object_id: str | None
    start_offset: int | None
    end_offset: int | None
    messages: int
    bytes: int
    seconds: float
    error: str | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    dry_run: bool
    topics: int
    """The number of topics that were planned."""
    waves: int
    """The number of waves that were run."""
    rows: tuple[OffloadRow, ...]
    left_to_owners: int = 0
    """Topics that roll, which were left to their owners."""

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def objects(self) -> int:
        return sum(row.error is None for row in self.rows)

    @property
    def messages(self) -> int:
        return sum(row.messages for row in self.rows)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """The rows, one column for each of their fields."""
        return to_dataframe(spark, OffloadRow, self.rows)


# ---- one task ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadBackTask:
    """A committed object that was not read back yet, from a restore or an earlier release."""

    topic: TopicName
    descriptor: ObjectDescriptor

    @property
    def size(self) -> int:
        return self.descriptor.logical_size


Task: TypeAlias = UploadTask | ReadBackTask


def run_task(settings: StoreSettings, task: Task) -> Uploaded:
    """Runs in a task: uploads an object, or reads one back. Commits nothing."""
    resources = executor_resources(settings)
    ports = resources.upload_ports
    if isinstance(task, ReadBackTask):
        started = ports.clock.monotonic()
        found = engine.read_back_committed(ports, task.topic, task.descriptor)
        return Uploaded(found, ports.clock.monotonic() - started)
    try:
        if task.settings is not None:
            ports = replace(ports, settings=task.settings)
        disk = resources.segments_of(task.topic, task.log_id)
        source = SegmentSource(disk, SegmentNames(settings.wal.file_name))
        return engine.upload(ports, source, task)
    except OSError as error:
        if isinstance(error, ForebayError):
            raise
        raise ServiceUnavailable(f"{task.topic}: a segment cannot be read: {error}") from error


# ---- planning one topic -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The next objects of a topic, in order."""

    topic: TopicName
    epoch: int
    """The epoch of the topic, which the commits compare."""
    log_id: str | None
    """The log that the objects are made from. A new owner of the same log does not change it."""
    objects: tuple[PlannedObject, ...]
    unverified: tuple[ObjectDescriptor, ...]
    """Committed objects that were not read back."""
    complete: bool
    """Whether the plan has everything that is due now."""
    settings: UploaderSettings
    """Those of the topic, as they were when it was planned."""

    @property
    def size(self) -> int:
        made = sum(each.size for each in self.objects)
        return made + sum(each.size for each in self.unverified)


class ViewPlanner:
    """Plans the uploads of one topic that another process may own. Used for many plans.

    It sees the segments up to the position that the owner published. It plans several objects at
    once, which end at segment ends where possible, so that tasks can upload them in parallel. Each
    plan reads the topic's settings. A topic that rolls is left to its owner, if it has one.
    """

    def __init__(self, view: TopicView, clock: Clock) -> None:
        self.view = view
        self.topic = view.topic
        self._clock = clock
        self._source = self._of_one_log()
        self._log_id: str | None = None
        self._tail: LogPosition | None = None
        self.left_to_owner = False
        """Whether the last plan was none because the topic rolls."""

    def _of_one_log(self) -> SegmentSource:
        names = SegmentNames(self.view.store.settings.wal.file_name)
        return SegmentSource(self.view.store.disk, names)

    def plan(
        self,
        bytes_max: int | None,
        *,
        force: bool,
        read_back: bool = True,
        damage: CorruptFrame | None = None,
    ) -> TopicPlan | None:
        """The objects that are due, up to about `bytes_max`; None if nothing is due.

        `force` plans everything that is synced, whatever the thresholds and although the topic
        rolls: the owner then gives up the object that it has open. `read_back` adds committed
        objects that are not verified. `damage` is a frame that cannot be read: only what is before
        it is planned.

        UsageError if the catalog does not know the topic, CommitRefused during a restore.
        """
        self.view.refresh()
        record = self._record()
        settings = self.view.settings().uploader
        self.left_to_owner = (
            not force and settings.enabled and settings.rolling and self.view.owner() is not None
        )
        if self.left_to_owner:
            return None
        if record.log_id != self._log_id:  # positions and indexes are those of another log
            self._source = self._of_one_log()
            self._log_id, self._tail = record.log_id, None
        room = sys.maxsize if bytes_max is None else bytes_max
        objects: list[PlannedObject] = []
        unverified: list[ObjectDescriptor] = []
        complete = True
        for planned in self._due(record, settings, force=force or damage is not None):
            if room <= 0:
                complete = False
                break
            damaged = damage is not None and planned.holds(damage)
            sound = planned.before(damage) if damage is not None and damaged else planned
            if sound is not None:
                objects.append(sound)
                room -= sound.size
            if damaged:
                break
        for descriptor in self._unverified(record) if read_back else ():
            if room <= 0:
                complete = False
                break
            unverified.append(descriptor)
            room -= descriptor.size
        if not unverified and not objects:
            return None
        return TopicPlan(
            self.topic,
            record.epoch,
            record.log_id,
            tuple(objects),
            tuple(unverified),
            complete,
            settings,
        )

    def committed(self, planned: PlannedObject) -> None:
        """Records where the chain ends now, so that the next plan need not search for it."""
        self._tail = planned.end

    def _record(self) -> TopicRecord:
        record = self.view.record
        if record is None:
            raise UsageError(
                f"{self.topic}: the catalog does not know the topic; open it once with its store"
            )
        if is_restoring(record.log_id):
            begun, command = unfinished(record.log_id)
            raise CommitRefused(
                f"{self.topic}: {begun} is running or was interrupted: run `{command} "
                f"{self.topic}` to its end first"
            )
        return record

    def _due(
        self, record: TopicRecord, settings: UploaderSettings, *, force: bool
    ) -> Iterator[PlannedObject]:
        planner = TopicPlanner(
            self.topic, self._source, settings, self._clock, whole_segments=True, owned=False
        )
        return planner.due(
            self.view.segments(),
            record.tail,
            self._tail,
            force=force,
            waiting_since=self._waiting_since,
        )

    def _waiting_since(self, segment: Segment, start: LogPosition) -> Iterator[int]:
        """Yields when the oldest message was published, and when the last object was created."""
        yield self._source.publish_time(segment, start) or 0
        resources, record = self.view.store.resources(), self.view.record
        if resources is not None and record is not None and record.tail > 0:
            for last in resources.catalog.get_object_descriptors_range(
                self.topic, record.tail - 1, record.tail, 1
            ):
                yield last.created_at * 1000

    def _unverified(self, record: TopicRecord) -> Iterator[ObjectDescriptor]:
        resources = self.view.store.resources()
        if record.verified < record.tail and resources is not None:
            for descriptor in resources.catalog.get_object_descriptors(self.topic, record.verified):
                if descriptor.next_offset > record.verified:
                    yield descriptor


# ---- the driver -------------------------------------------------------------------------------


class Offload:
    """The driver: runs offloads, one after the other, on the same store. Not thread-safe."""

    def __init__(
        self,
        settings: StoreSettings,
        executor: Executor,
        clock: Clock = SYSTEM_CLOCK,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.store = StoreView(settings, clock=clock)
        self._executor = executor
        self._progress = progress
        self._clock = self.store.clock
        self._planners: dict[TopicName, ViewPlanner] = {}

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def once(
        self, topics: Sequence[str] | None = None, *, force: bool, dry_run: bool = False
    ) -> OffloadReport:
        """Runs one offload; see `offload`. Raises if Spark does not start."""
        started = self._clock.monotonic()
        names = [parse_topic(name) for name in (topics or self.store.topics())]
        if topics:
            for name in names:
                self.planner(name)  # UsageError for a topic that is not there
        waves: Waves[Task, Uploaded] = Waves(
            self._executor,
            partial(run_task, self.store.settings),
            lambda task: task.size,
            label="forebay offload",
            progress=self._progress,
        )
        run = _Run(self, waves, names, force=force, dry_run=dry_run)
        try:
            report = run()
        except _NoExecutor as none:
            raise none.reason from None
        if not dry_run:
            outcome = "failed" if not report.ok else "done" if report.rows else "idle"
            metrics.cycles.add(1, outcome)
            metrics.cycle_seconds.observe(self._clock.monotonic() - started)
        return report

    def planner(self, topic: TopicName) -> ViewPlanner:
        known = self._planners.get(topic)
        if known is None:
            view = self.store.topic(str(topic))
            known = ViewPlanner(view, self._clock)
            self._planners[topic] = known
        return known

    def catalog(self) -> Catalog:
        resources = self.store.resources()
        assert resources is not None, "a topic that was planned is in the catalog"
        return resources.catalog

    def objects(self) -> CloudStore:
        resources = self.store.resources()
        assert resources is not None, "a topic that was planned is in the catalog"
        return resources.store

    def correct(self, topic: TopicName, said: ObjectDescriptor, found: ObjectDescriptor) -> None:
        """Gives an object that was read back the descriptor that it should have."""
        resources = self.store.resources()
        assert resources is not None, "a topic that was planned is in the catalog"
        sidecars = resources.settings.uploader.sidecars
        engine.correct(resources.catalog, resources.store, topic, said, found, sidecars=sidecars)


class _NoExecutor(Exception):
    """Spark does not start. This ends the run, and is not the error of a topic."""

    def __init__(self, reason: ForebayError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Run:
    """One run over some topics."""

    def __init__(
        self,
        offload: Offload,
        waves: Waves[Task, Uploaded],
        topics: Sequence[TopicName],
        *,
        force: bool,
        dry_run: bool,
    ) -> None:
        self._offload = offload
        self._waves = waves
        self._todo = dict.fromkeys(topics)
        self._topics = len(self._todo)
        self._force = force
        self._dry_run = dry_run
        self._rows: list[OffloadRow] = []
        self._left = 0
        self._waves_run = 0
        self._wave_bytes: int | None = None
        self._moved = False
        self._refusals: dict[TopicName, int] = {}
        self._damage: dict[TopicName, CorruptFrame] = {}
        """For each topic, the damaged frame at which it stops. Messages before it are uploaded."""
        self._unsound: set[TopicName] = set()
        """Topics with a committed object that failed its read-back; their uploads continue."""

    def __call__(self) -> OffloadReport:
        while self._todo:
            if self._moved:  # somebody else uploads the same: a random delay ends the race
                self._moved = False
                tries = max(self._refusals.values())
                time.sleep(random.uniform(0, 0.2 * tries))  # noqa: S311  # no secret
            wave = self._plan_wave()
            if not wave:
                continue  # the rest is to be planned again, a bounded number of times
            if self._dry_run:
                for plan in wave:
                    self._rows += [_planned_row(plan.topic, each) for each in plan.objects]
            else:
                self._waves_run += 1
                self._run_wave(wave)
        rows = tuple(self._rows)
        return OffloadReport(self._dry_run, self._topics, self._waves_run, rows, self._left)

    # -- planning -------------------------------------------------------------------------------

    def _plan_wave(self) -> list[TopicPlan]:
        """The plans of as many topics as make a wave. In a dry run, each topic is planned once."""
        wave: list[TopicPlan] = []
        taken = 0
        for topic in list(self._todo):
            try:
                plan = self._plan(topic, taken)
            except FileNotFoundError as error:  # a segment was uploaded, and retention deleted it
                self._finish(topic)
                self._stopped(topic, MissingData(f"{topic}: {error}"))
                continue
            except MissingData as error:  # uploaded and deleted after the record was read
                self._finish(topic)
                self._stopped(topic, error)
                continue
            except OSError as error:
                self._fail(topic, DiskError(error.errno, f"{topic}: {error}; {remedy(error)}"))
                continue
            except ForebayError as error:
                self._fail(topic, error)
                continue
            if plan is None or plan.complete or self._dry_run:
                self._finish(topic)
            if plan is None:
                self._left += self._offload.planner(topic).left_to_owner
                if topic in self._damage:  # nothing is left before the damaged frame
                    self._fail(topic, self._damage.pop(topic))
                continue
            wave.append(plan)
            taken += plan.size
            if self._wave_bytes is not None and taken >= self._wave_bytes:
                break
        return wave

    def _plan(self, topic: TopicName, taken: int) -> TopicPlan | None:
        plan = partial(
            self._offload.planner(topic).plan,
            force=self._force,
            read_back=not self._dry_run and topic not in self._unsound,
            damage=self._damage.get(topic),
        )
        if self._dry_run:
            return plan(None)
        if self._wave_bytes is None:
            # The size of a wave depends on Spark. Do not start it unless something is due.
            if plan(1) is None:
                return None
            try:
                self._wave_bytes = self._waves.bytes_max()
            except ForebayError as error:  # an error of Spark, not of the topic
                raise _NoExecutor(error) from error
        return plan(self._wave_bytes - taken)

    def _finish(self, topic: TopicName) -> None:
        """Removes the topic from this run."""
        self._todo.pop(topic, None)

    def _fail(self, topic: TopicName, error: ForebayError) -> None:
        self._finish(topic)
        self._note(topic, error)

    def _note(self, topic: TopicName, error: ForebayError) -> None:
        self._rows.append(_failed_row(topic, error))
        metrics.failures.add(1, type(error).__name__)
        event(_log, logging.ERROR, "offload failed", topic=topic, error=error)

    # -- carrying out ---------------------------------------------------------------------------

    def _run_wave(self, wave: Sequence[TopicPlan]) -> None:
        tasks: list[Task] = []
        for plan in wave:
            tasks += [ReadBackTask(plan.topic, each) for each in plan.unverified]
            tasks += self._intended(plan)
        catalog, sweeper = self._offload.catalog(), self._offload.store.settings.sweeper
        intents = [(task.topic, task.intent) for task in tasks if isinstance(task, UploadTask)]
        with Renewal(catalog, intents, sweeper.grace_minutes):
            by_topic: dict[TopicName, list[tuple[Task, Done[Uploaded]]]] = {}
            for task, done in self._waves.run(tasks):
                by_topic.setdefault(task.topic, []).append((task, done))
            for topic, results in by_topic.items():
                self._settle(topic, results)

    def _intended(self, plan: TopicPlan) -> list[UploadTask]:
        """Records intents for the objects, up to the first one that is refused."""
        tasks: list[UploadTask] = []
        catalog, store = self._offload.catalog(), self._offload.objects()
        try:
            for planned in plan.objects:
                task = engine.take_over(catalog, plan.topic, plan.epoch, planned)
                task = task or engine.intend(
                    catalog, plan.topic, plan.epoch, planned, plan.log_id, store=store
                )
                tasks.append(replace(task, settings=plan.settings, log_id=plan.log_id))
        except ForebayError as error:
            self._stopped(plan.topic, error)
        return tasks

    def _settle(self, topic: TopicName, results: list[tuple[Task, Done[Uploaded]]]) -> None:
        """Commits the uploaded objects in order, up to the first one that failed."""
        for number, (task, done) in enumerate(results):
            if isinstance(task, ReadBackTask):
                self._settle_read_back(task, done)
                continue
            try:
                if done.result is None:
                    assert done.error is not None
                    raise done.error
                self._commit(task, done.result)
            except ForebayError as error:
                self._set_aside(task, error, written=done.result is not None)
                self._keep_written(results[number + 1 :])
                self._stopped(topic, error, task.planned)
                return
        if topic in self._damage:
            self._fail(topic, self._damage.pop(topic))

    def _keep_written(self, results: list[tuple[Task, Done[Uploaded]]]) -> None:
        """Records which ledgers after one that failed were written: they need no second upload."""
        catalog = self._offload.catalog()
        for task, done in results:
            if isinstance(task, ReadBackTask) or not task.planned.ledger:
                continue
            try:
                if done.result is None:
                    assert done.error is not None
                    raise done.error
                catalog.ledgers(task.topic).written(done.result.descriptor)
            except ForebayError as error:
                self._set_aside(task, error)

    def _set_aside(self, task: UploadTask, error: ForebayError, *, written: bool = False) -> None:
        catalog, store = self._offload.catalog(), self._offload.objects()
        if task.planned.ledger:
            # After an outage during the commit, nobody knows whether it was made.
            if not (written and isinstance(error, ServiceUnavailable)):
                remove_attempt(catalog, store, task.topic, task.intent.object_id)
        elif not task.planned.holds(error):
            set_aside(catalog, store, task.topic, task.intent, error)

    def _settle_read_back(self, task: ReadBackTask, done: Done[Uploaded]) -> None:
        try:
            if done.error is not None:
                raise done.error
            assert done.result is not None
            found = done.result.descriptor
            if found != task.descriptor:
                self._offload.correct(task.topic, task.descriptor, found)
            self._offload.catalog().mark_verified(task.topic, task.descriptor)
        except ForebayError as error:
            self._unsound.add(task.topic)
            self._note(task.topic, error)

    def _commit(self, task: UploadTask, uploaded: Uploaded) -> None:
        catalog = self._offload.catalog()
        try:
            engine.commit(catalog, task.topic, task.intent, uploaded)
        except TopicFenced:
            engine.commit(catalog, task.topic, self._intended_again(task), uploaded)
        self._offload.planner(task.topic).committed(task.planned)
        self._rows.append(_row(task.topic, uploaded))

    def _intended_again(self, task: UploadTask) -> Intent:
        """A new intent for the same object under the current epoch, if the log is the same.

        A sink becomes the owner of its topic for each batch. Without this, an upload that takes
        longer than the time between two batches could never be committed. TopicFenced if the log,
        the tail or the name of the object has changed.
        """
        topic, catalog = task.topic, self._offload.catalog()
        record = catalog.find(topic)
        if (
            record is None
            or record.is_deleted
            or record.log_id != task.log_id
            or record.tail != task.planned.start_offset
        ):
            raise fenced(topic, task.intent.epoch, record)
        name = task.intent.object_id if task.planned.ledger else task.planned.name
        intent = catalog.intend(topic, record.epoch, name)
        if intent.object_id != task.intent.object_id:
            catalog.withdraw(topic, intent.object_id, intent.token)
            raise fenced(topic, task.intent.epoch, record.epoch)
        return intent

    def _stopped(
        self, topic: TopicName, error: ForebayError, planned: PlannedObject | None = None
    ) -> None:
        """Handles an object that was not uploaded or not committed: plans again, or fails."""
        damaged = planned is not None and planned.holds(error)
        if isinstance(error, CorruptFrame) and damaged and topic not in self._damage:
            metrics.corrupt_frames.add()
            self._damage[topic] = error
            self._todo[topic] = None
            return
        self._refusals[topic] = self._refusals.get(topic, 0) + 1
        if isinstance(error, _MOVED) and self._refusals[topic] <= _REFUSALS_MAX:
            event(_log, logging.INFO, "planned again", topic=topic, error=error)
            self._todo[topic] = None
            self._moved = True
            return
        self._fail(topic, error)


# ---- rows of the report -----------------------------------------------------------------------


def _row(topic: TopicName, uploaded: Uploaded) -> OffloadRow:
    made = uploaded.descriptor
    return OffloadRow(
        str(topic),
        made.object_id,
        made.start_offset,
        made.end_offset,
        made.count,
        made.size,
        uploaded.seconds,
        None,
    )


def _planned_row(topic: TopicName, planned: PlannedObject) -> OffloadRow:
    name = planned.name
    shown = A_LEDGER if planned.ledger else str(name)
    count = planned.next_offset - planned.start_offset
    return OffloadRow(str(topic), shown, name.start, name.end, count, planned.size, 0.0, None)


def _failed_row(topic: TopicName, error: ForebayError) -> OffloadRow:
    return OffloadRow(str(topic), None, None, None, 0, 0, 0.0, str(error))
