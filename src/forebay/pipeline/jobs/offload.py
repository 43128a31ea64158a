"""`offload`: everything that is synced, or everything that is due, into objects, on Spark.

The driver plans all topics, executors transfer raw frames, and the driver commits: for each topic
in the order of its offsets, and no further than everything before it was transferred. It goes in
waves of bounded size, and each is committed before the next is planned, so that an interrupted
run has lost little. It owns no topic: a commit compares the epoch and the tail that the plan
was made with, and one that is refused is planned again.

What a caller gets wrong: with nothing to do no Spark job is started, and no session either, unless
one was given.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.catalog.catalog import Catalog, Intent, fenced
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    DiskError,
    ForebayError,
    MissingData,
    TopicFenced,
    remedy,
)
from forebay.format.names import ObjectName, TopicName, parse_topic
from forebay.logs import event
from forebay.pipeline.execute import Done, Executor, Progress, Runner, executor_for
from forebay.pipeline.jobs.offload_plan import TopicPlan, TopicPlanner
from forebay.pipeline.jobs.offload_report import OffloadReport, OffloadRow, failed, made, would_be
from forebay.pipeline.jobs.offload_task import Errand, Inspection, Shipment, Shipped, run_errand
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView
from forebay.upload import metrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_REFUSALS_MAX: Final = 5
"""Of one topic in one run, each because somebody else moved its chain."""
_MOVED: Final = (CommitRefused, TopicFenced, MissingData)
"""What it looks like when somebody else uploaded the same: to be planned again."""


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
    """Uploads what is synced, of all topics or of those named; what goes wrong is in the report.

    `force` takes everything, whatever the thresholds; without it only what is due by the
    configuration. A dry run writes nothing and starts no Spark. `runner="threads"` uploads with
    threads of this process, without Spark.
    """
    settings = job_settings(source)
    executor = executor_for(runner, spark, settings.spark)
    with Offload(settings, executor, progress=progress) as run:
        return run.once(topics, force=force, dry_run=dry_run)


class Offload:
    """The driver: one run after the other, over the same store."""

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
        self._waves = self._new_waves()
        self._clock = clock
        self._planners: dict[TopicName, TopicPlanner] = {}

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def once(
        self, topics: Sequence[str] | None = None, *, force: bool, dry_run: bool = False
    ) -> OffloadReport:
        """One run; LogClosed and interrupts aside it raises for nothing that one topic does."""
        started = self._clock.monotonic()
        names = [parse_topic(name) for name in (topics or self.store.topics())]
        if topics:
            for name in names:
                self.planner(name)  # UsageError for a topic that is not there
        self._waves = self._new_waves()
        run = _Run(self, names, force=force, dry_run=dry_run)
        try:
            report = run()
        except _NoExecutor as none:
            raise none.reason from None
        if not dry_run:
            outcome = "failed" if not report.ok else "done" if report.rows else "idle"
            metrics.cycles.add(1, outcome)
            metrics.cycle_seconds.observe(self._clock.monotonic() - started)
        return report

    def planner(self, topic: TopicName) -> TopicPlanner:
        known = self._planners.get(topic)
        if known is None:
            view = self.store.topic(str(topic))
            known = TopicPlanner(view, self.store.settings.uploader, self._clock)
            self._planners[topic] = known
        return known

    def catalog(self) -> Catalog:
        tiers = self.store.tiers()
        assert tiers is not None, "a topic that was planned is in the catalog"
        return tiers.catalog

    def _new_waves(self) -> Waves[Errand, Shipped]:
        return Waves(
            self._executor,
            partial(run_errand, self.store.settings),
            lambda each: each.size,
            label="forebay offload",
            progress=self._progress,
        )

    def ship(self, errands: Sequence[Errand]) -> Iterable[tuple[Errand, Done[Shipped]]]:
        return self._waves.run(errands)

    def wave_bytes(self) -> int:
        return self._waves.bytes_max()


class _NoExecutor(Exception):
    """Nobody to do the work."""

    def __init__(self, reason: ForebayError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Run:
    """One run over some topics."""

    def __init__(
        self, offload: Offload, topics: Sequence[TopicName], *, force: bool, dry_run: bool
    ) -> None:
        self._offload = offload
        self._todo = dict.fromkeys(topics)
        self._topics = len(self._todo)
        self._force = force
        self._dry_run = dry_run
        self._rows: list[OffloadRow] = []
        self._waves = 0
        self._wave_bytes: int | None = None
        self._moved = False
        self._refusals: dict[TopicName, int] = {}
        self._damage: dict[TopicName, CorruptFrame] = {}
        """Frames that stop a topic; what is before them is uploaded first."""
        self._log_ids: dict[TopicName, str | None] = {}
        self._unsound: set[TopicName] = set()
        """Topics with a committed object that is not right: their uploads go on all the same."""

    def __call__(self) -> OffloadReport:
        while self._todo:
            if self._moved:  # by somebody who uploads the same: not both again at the same moment
                self._moved = False
                tries = max(self._refusals.values())
                time.sleep(random.uniform(0, 0.2 * tries))  # noqa: S311  # no secret
            wave = self._plan_wave()
            if not wave:
                continue  # what is left was put off, a bounded number of times
            if self._dry_run:
                for plan in wave:
                    self._rows += [made(plan.topic, would_be(each)) for each in plan.objects]
            else:
                self._waves += 1
                self._carry_out(wave)
        return OffloadReport(self._dry_run, self._topics, self._waves, tuple(self._rows))

    # -- planning -------------------------------------------------------------------------------

    def _plan_wave(self) -> list[TopicPlan]:
        """What is due now, of as many topics as make a wave; each topic once in a dry run."""
        wave: list[TopicPlan] = []
        taken = 0
        for topic in list(self._todo):
            try:
                plan = self._plan(topic, taken)
            except FileNotFoundError as error:  # retention was faster: uploaded, and trimmed
                self._finish(topic)
                self._stopped(topic, MissingData(f"{topic}: {error}"))
                continue
            except MissingData as error:  # the record was read before an upload, the log behind it
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
                if topic in self._damage:  # the very next frame: there is nothing before it
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
            inspect=not self._dry_run and topic not in self._unsound,
            damage=self._damage.get(topic),
        )
        if self._dry_run:
            return plan(None)
        if self._wave_bytes is None:
            # How much makes a wave only Spark knows, which is not begun for nothing.
            if plan(1) is None:
                return None
            try:
                self._wave_bytes = self._offload.wave_bytes()
            except ForebayError as error:  # of Spark, and of no topic
                raise _NoExecutor(error) from error
        return plan(self._wave_bytes - taken)

    def _finish(self, topic: TopicName) -> None:
        """Nothing more is due of the topic in this run."""
        self._todo.pop(topic, None)

    def _fail(self, topic: TopicName, error: ForebayError) -> None:
        self._finish(topic)
        self._note(topic, error)

    def _note(self, topic: TopicName, error: ForebayError) -> None:
        self._rows.append(failed(topic, error))
        metrics.failures.add(1, type(error).__name__)
        event(_log, logging.ERROR, "offload failed", topic=topic, error=error)

    # -- carrying out ---------------------------------------------------------------------------

    def _carry_out(self, wave: Sequence[TopicPlan]) -> None:
        errands: list[Errand] = []
        for plan in wave:
            self._log_ids[plan.topic] = plan.log_id
            errands += [Inspection(plan.topic, each) for each in plan.unverified]
            errands += self._intended(plan)
        done = {id(errand): result for errand, result in self._offload.ship(errands)}
        by_topic: dict[TopicName, list[Errand]] = {}
        for errand in errands:
            by_topic.setdefault(errand.topic, []).append(errand)
        for topic, own in by_topic.items():
            self._settle(topic, [(errand, done[id(errand)]) for errand in own])

    def _intended(self, plan: TopicPlan) -> list[Shipment]:
        """Announces the objects; what cannot be announced is not made."""
        shipments: list[Shipment] = []
        try:
            for planned in plan.objects:
                name = ObjectName(planned.start_offset, planned.next_offset - 1)
                intent = self._offload.catalog().intend(plan.topic, plan.epoch, name)
                shipments.append(Shipment(plan.topic, intent, planned, plan.log_id))
        except ForebayError as error:
            self._stopped(plan.topic, error)
        return shipments

    def _settle(self, topic: TopicName, results: list[tuple[Errand, Done[Shipped]]]) -> None:
        """Commits what was made, in order, as far as nothing before it failed."""
        for errand, done in results:
            if isinstance(errand, Inspection):
                self._settle_inspection(errand, done)
                continue
            if done.result is None:
                assert done.error is not None
                self._stopped(topic, done.error)
                return
            try:
                self._commit(errand, done.result)
            except ForebayError as error:
                self._stopped(topic, error)
                return
        if topic in self._damage:
            self._fail(topic, self._damage.pop(topic))

    def _settle_inspection(self, errand: Inspection, done: Done[Shipped]) -> None:
        metrics.verified.add(1, "good" if done.error is None else "failed")
        try:
            if done.error is not None:
                raise done.error
            self._offload.catalog().mark_verified(errand.topic, errand.descriptor)
        except ForebayError as error:
            self._unsound.add(errand.topic)
            self._note(errand.topic, error)

    def _commit(self, shipment: Shipment, shipped: Shipped) -> None:
        topic, descriptor = shipment.topic, shipped.descriptor
        catalog = self._offload.catalog()
        try:
            catalog.commit(topic, shipment.intent, descriptor)
        except TopicFenced:
            catalog.commit(topic, self._intended_anew(shipment), descriptor)
        self._offload.planner(topic).committed(shipment.planned)
        self._rows.append(made(topic, descriptor, shipped.seconds))
        metrics.objects_created.add()
        metrics.bytes_uploaded.add(descriptor.size)
        metrics.bytes_per_object.observe(descriptor.size)
        metrics.msgs_per_object.observe(descriptor.count)
        metrics.verified.add(1, "good")
        event(
            _log,
            logging.INFO,
            "object committed",
            topic=topic,
            object=descriptor.object_id,
            bytes=descriptor.size,
            messages=descriptor.count,
            seconds=shipped.seconds,
        )
        catalog.mark_verified(topic, descriptor)

    def _intended_anew(self, shipment: Shipment) -> Intent:
        """The same object for the next owner, if that one goes on with the same log.

        A sink owns its topic for a moment with each batch: without this nothing that takes longer
        than a batch could ever be committed. TopicFenced if anything else is otherwise.
        """
        topic, catalog = shipment.topic, self._offload.catalog()
        record = catalog.record(topic)
        if (
            record is None
            or record.log_id != self._log_ids[topic]
            or record.tail != shipment.planned.start_offset
        ):
            raise fenced(topic, shipment.intent.epoch, record.epoch if record else 0)
        name = ObjectName(shipment.planned.start_offset, shipment.planned.next_offset - 1)
        intent = catalog.intend(topic, record.epoch, name)
        if intent.object_id != shipment.intent.object_id:
            catalog.withdraw(topic, intent.object_id, intent.token)
            raise fenced(topic, shipment.intent.epoch, record.epoch)
        return intent

    def _stopped(self, topic: TopicName, error: ForebayError) -> None:
        """One object was not made or not committed: plan again, or give the topic up."""
        local = isinstance(error, CorruptFrame) and Path(error.file).is_absolute()
        if isinstance(error, CorruptFrame) and local and topic not in self._damage:
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
