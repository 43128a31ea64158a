"""`compact`: many small objects of a topic become large ones, on Spark.

The driver plans and commits, executors read and write. Before the first byte is written its key
is intended; when the executor has read the new object back, and it holds exactly what the old ones
held, one transaction puts it into their place. The old ones stay for `sweep_grace_minutes`:
readers with an old plan finish, and `undo_compaction` can take the swap back. Where somebody else
was faster (an owner, retention, another compaction) nothing is changed, and it is planned anew.

Work is committed wave by wave. A kill at any moment loses at most one wave, as objects that no
descriptor names, which the next run writes again under the same names, or a sweep removes.

What a caller gets wrong: nothing gets smaller at once. Both copies are stored until a sweep after
the grace time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from forebay.catalog.adopt import is_restoring
from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.swap import swap
from forebay.errors import CommitRefused, CorruptLog, ForebayError, TopicFenced, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.logs import event
from forebay.pipeline.execute import Done, Progress, SparkExecutor, pack
from forebay.pipeline.jobs.compact_plan import Bounds, Group, plan_groups
from forebay.pipeline.jobs.compact_report import BYTES, OBJECTS, REPLACED, CompactReport, CompactRow
from forebay.pipeline.jobs.compact_task import Rewrite, Rewritten, rewrite
from forebay.pipeline.location import site_settings
from forebay.pipeline.resources import open_resources
from forebay.pipeline.session import slots, spark_session
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, catalog_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_GROUPS_PER_ROUND: Final = 512
"""Planned at a time: their descriptors are in the driver's memory."""
_GROUPS_PER_WAVE: Final = 128
_REPLANS_MAX: Final = 20
"""Of one topic in one run: somebody else was faster so often."""


class Runner(Protocol):
    """Runs the work, as `spread` does on a session."""

    def __call__(
        self,
        tasks: Sequence[Sequence[Rewrite]],
        work: Callable[[Rewrite], Rewritten],
        *,
        label: str,
        progress: Progress | None,
    ) -> list[list[Done[Rewritten]]]: ...


def compact(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    target_bytes: int | None = None,
    max_bytes: int | None = None,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    runner: Runner | None = None,
) -> CompactReport:
    """Compacts the topics, by default all, until no small objects are beside each other.

    `target_bytes`: how large an object may become, by default `uploader.max_object_bytes`.
    `max_bytes`: how much this run may rewrite; the rest is for the next one. A dry run plans one
    round. Nothing to do starts no Spark. `runner` runs the work in the place of Spark.
    """
    settings = site_settings(source)
    uploader = settings.uploader
    target = uploader.max_object_bytes if target_bytes is None else target_bytes
    bounds = Bounds(target, uploader.max_object_messages)
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"the budget is {max_bytes} bytes; it must be at least 1")
    bench = open_site(settings)
    try:
        names = known_topics(bench.catalog, topics)
        run = _Compaction(bench, names, bounds, max_bytes, progress)
        if dry_run:
            return run.foreseen()
        return run.until_done(_Hands(settings, spark, runner))
    finally:
        bench.close()


def open_site(settings: StoreSettings) -> StoreResources:
    """UsageError where there is no catalog yet: none is made."""
    missing = catalog_file(settings)
    if missing is not None and not missing.exists():
        raise UsageError(f"there is no catalog at {missing}: there is nothing to compact")
    return open_resources(settings)


def known_topics(catalog: Catalog, topics: Sequence[str] | None) -> list[TopicName]:
    """UsageError for a topic that the catalog does not know."""
    if topics is None:
        return list(catalog.topics())
    names = list(dict.fromkeys(parse_topic(name) for name in topics))
    for name in names:
        if catalog.record(name) is None:
            raise UsageError(f"{catalog.name} does not know the topic {name}")
    return names


class _Hands:
    """Spark, once there is something to do, or whoever was given instead."""

    def __init__(
        self, settings: StoreSettings, spark: SparkSession | None, runner: Runner | None
    ) -> None:
        self._settings = settings
        self._spark = spark
        self._runner = runner

    @property
    def slots(self) -> int:
        return 1 if self._runner is not None else slots(self._session())

    def run(
        self, tasks: Sequence[Sequence[Rewrite]], progress: Progress | None
    ) -> list[list[Done[Rewritten]]]:
        work = partial(rewrite, self._settings)
        if self._runner is not None:
            return self._runner(tasks, work, label="compact", progress=progress)
        return SparkExecutor(self._session()).run(tasks, work, "compact", progress)

    def _session(self) -> SparkSession:
        if self._spark is None:
            self._spark = spark_session(self._settings.spark)
        return self._spark


class _Job(NamedTuple):
    group: Group
    intent: Intent


@dataclass(slots=True)
class _Compaction:
    """One run, on the driver."""

    bench: StoreResources
    topics: list[TopicName]
    bounds: Bounds
    budget: int | None
    progress: Progress | None
    rows: list[CompactRow] = field(default_factory=list)
    rounds: int = 0
    left_groups: int = 0
    """For which the budget was not enough, as of the last round."""
    left_bytes: int = 0
    refused: Counter[TopicName] = field(default_factory=Counter)
    """Groups that changed before they were committed."""
    _failed: dict[TopicName, set[str]] = field(default_factory=dict)
    """Objects that this run leaves alone from now on."""
    _given_up: set[TopicName] = field(default_factory=set)
    _tasks_done: int = 0

    def foreseen(self) -> CompactReport:
        """What the first round would do."""
        for group in self._round():
            self.rows.append(_row(group, str(group.name)))
        return self._report(dry_run=True)

    def until_done(self, hands: _Hands) -> CompactReport:
        """Round after round: each leaves fewer objects, fewer to try, or fewer tries."""
        while groups := self._round():
            self.rounds += 1
            for wave in _waves(groups, hands.slots):
                self._wave(wave, hands)
        return self._report(dry_run=False)

    def _report(self, *, dry_run: bool) -> CompactReport:
        return CompactReport(
            tuple(self.rows),
            dry_run,
            self.rounds,
            self.refused.total(),
            self.left_groups,
            self.left_bytes,
        )

    # -- planning -------------------------------------------------------------------------------

    def _round(self) -> list[Group]:
        """What to do next, as far as the budget goes."""
        self.left_groups = self.left_bytes = 0
        found: list[Group] = []
        for topic in self.topics:
            if topic in self._given_up:
                continue
            try:
                for group in self._groups(topic):
                    if self._affords(group):
                        found.append(group)
                    if len(found) >= _GROUPS_PER_ROUND:
                        return found
            except ForebayError as error:
                self._given_up.add(topic)
                self.rows.append(_row_of_topic(topic, str(error)))
        return found

    def _affords(self, group: Group) -> bool:
        if self.budget is None:
            return True
        if group.size > self.budget:
            self.left_groups += 1
            self.left_bytes += group.size
            return False
        self.budget -= group.size
        return True

    def _groups(self, topic: TopicName) -> Iterator[Group]:
        record = self.bench.catalog.record(topic)
        if record is None:
            raise CommitRefused(f"{topic}: {self.bench.catalog.name} has lost the topic")
        if is_restoring(record.log_id):
            raise CommitRefused(f"{topic}: a restore is under way, or was interrupted")
        descriptors = self.bench.catalog.all_descriptors(topic)
        leave = self._failed.get(topic, set())
        return plan_groups(topic, record, descriptors, self.bounds, leave)

    # -- one wave -------------------------------------------------------------------------------

    def _wave(self, groups: Sequence[Group], hands: _Hands) -> None:
        jobs = [job for group in groups if (job := self._intended(group)) is not None]
        tasks = pack(jobs, lambda job: job.group.size, TASK_BYTES, least=hands.slots)
        work = [
            [Rewrite(job.group.topic, job.intent.object_id, job.group.objects) for job in task]
            for task in tasks
        ]
        answers = hands.run(work, self._shown())
        self._tasks_done += len(tasks)
        for task, results in zip(tasks, answers, strict=True):
            for job, done in zip(task, results, strict=True):
                self._settle(job, done)

    def _shown(self) -> Progress | None:
        told, before = self.progress, self._tasks_done
        if told is None:
            return None
        return lambda done, total: told(before + done, before + total)

    def _intended(self, group: Group) -> _Job | None:
        try:
            intent = self.bench.catalog.intend(group.topic, group.epoch, group.name)
        except (CommitRefused, TopicFenced) as error:
            self._refuse(group, None, error, None)
            return None
        except ForebayError as error:
            self._fail(group, None, error, None)
            return None
        return _Job(group, intent)

    def _settle(self, job: _Job, done: Done[Rewritten]) -> None:
        group, made = job.group, done.result
        object_id = job.intent.object_id
        try:
            if made is None:
                self._require_same(group)
                raise done.error or AssertionError("neither a result nor an error")
            BYTES.add(made.descriptor.size)
            self._require_proof(group, made)
            swap(
                self.bench.catalog,
                group.topic,
                job.intent,
                made.descriptor,
                group.objects,
                clock=self.bench.clock,
            )
        except CommitRefused as error:
            self._refuse(group, object_id, error, made)
            return
        except ForebayError as error:
            self._fail(group, object_id, error, made)
            return
        OBJECTS.add(1, "swapped")
        REPLACED.add(len(group.objects))
        self.rows.append(_row(group, object_id, made))
        event(
            _log,
            logging.INFO,
            "objects compacted",
            topic=group.topic,
            object=object_id,
            replaced=len(group.objects),
            bytes=made.descriptor.size,
            sha256=made.after.sha256,
        )

    def _require_same(self, group: Group) -> None:
        """What could not be read may have been given up meanwhile: then nothing is wrong."""
        name = group.name
        chain = self.bench.catalog.descriptors(group.topic, name.start, name.end + 1)
        if chain != list(group.objects):
            raise CommitRefused(f"{group.topic}: the objects of {name} changed meanwhile")

    def _require_proof(self, group: Group, made: Rewritten) -> None:
        """What the executor compared, once more: the commit relies on nothing else."""
        said = (group.name.start, group.name.end + 1, group.messages, group.size)
        proof = made.after
        read = (proof.start_offset, proof.next_offset, proof.messages, proof.size)
        if made.before != made.after or read != said:
            raise CorruptLog(f"{group.topic}: {made.descriptor.object_id} was not read back alike")

    def _refuse(
        self, group: Group, object_id: str | None, error: ForebayError, made: Rewritten | None
    ) -> None:
        """Somebody else was faster: the next round plans anew."""
        self.refused[group.topic] += 1
        if self.refused[group.topic] > _REPLANS_MAX:
            self._fail(group, object_id, error, made)
            return
        OBJECTS.add(1, "refused")
        event(_log, logging.INFO, "a compaction is planned anew", topic=group.topic, error=error)

    def _fail(
        self, group: Group, object_id: str | None, error: ForebayError, made: Rewritten | None
    ) -> None:
        OBJECTS.add(1, "failed")
        event(_log, logging.ERROR, "a compaction failed", topic=group.topic, error=error)
        self.rows.append(_row(group, object_id, made, str(error)))
        failed = self._failed.setdefault(group.topic, set())
        failed.update(each.object_id for each in group.objects)


def _waves(groups: Sequence[Group], width: int) -> Iterator[list[Group]]:
    """Pieces that are committed before the next one begins; each keeps all slots busy."""
    bytes_max = width * WAVE_TASKS_PER_SLOT * TASK_BYTES
    wave: list[Group] = []
    size = 0
    for group in groups:
        wave.append(group)
        size += group.size
        if size >= bytes_max or len(wave) >= _GROUPS_PER_WAVE:
            yield wave
            wave, size = [], 0
    if wave:
        yield wave


def _row(
    group: Group, object_id: str | None, made: Rewritten | None = None, error: str | None = None
) -> CompactRow:
    return CompactRow(
        str(group.topic),
        object_id,
        len(group.objects),
        group.name.start,
        group.name.end,
        group.messages,
        group.size,
        made.before.sha256 if made is not None else None,
        made.after.sha256 if made is not None else None,
        error,
    )


def _row_of_topic(topic: TopicName, error: str) -> CompactRow:
    return CompactRow(str(topic), None, 0, 0, 0, 0, 0, None, None, error)
