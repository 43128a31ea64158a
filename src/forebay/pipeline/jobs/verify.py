"""`verify`: reads every byte of every committed object again, on Spark's executors.

The driver asks the catalog what there is, looks at the chains (I4) and at what no descriptor
names; executors read the objects and compare them with their descriptors and sidecars. Nothing is
changed but two things in the catalog: the watermark of what was read back, where the next object
was found right, and a note for each topic of what was read (`forebay.pipeline.jobs.verify_plan`).

An object may be replaced or retired while a run with an older plan goes on. That is no damage:
what the catalog names in its place is read instead.

What a caller gets wrong: a run that is killed has remembered what its finished waves read, and
nothing else. Reading twice is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.notes import Note, write_note
from forebay.catalog.records import TopicRecord, skip_lost
from forebay.errors import CommitRefused, ForebayError, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import TASK_BYTES, WAVE_TASKS_PER_SLOT
from forebay.logs import event
from forebay.pipeline.execute import Done, Progress, SparkExecutor, pack
from forebay.pipeline.jobs.verify_check import Checked, Item, check
from forebay.pipeline.jobs.verify_plan import (
    NOTE,
    Link,
    Read,
    Survey,
    choose_reads,
    encode_memory,
    remembered,
)
from forebay.pipeline.jobs.verify_report import BYTES, ERROR, OBJECTS, Ledger, VerifyReport
from forebay.pipeline.jobs.verify_report import NOTE as ASIDE
from forebay.pipeline.jobs.verify_survey import link_of, named_instead, still_named, survey_topic
from forebay.pipeline.location import site_settings
from forebay.pipeline.resources import open_resources
from forebay.pipeline.session import slots, spark_session
from forebay.read.verify import FaultKind
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, catalog_file
from forebay.upload.inventory import topics_in_store
from forebay.upload.sweep import sweep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_WAVE_OBJECTS_MAX: Final = 4096
_WAVE_INDEX_ENTRIES_MAX: Final = 300_000
"""Of the descriptors of one wave: about 40 MB on the driver."""
_REPLANS_MAX: Final = 3


def verify(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    incremental: bool = False,
    budget_bytes: int | None = None,
    orphans: bool = True,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Reads the objects of the topics, by default of all that the catalog knows.

    `incremental` reads what was committed or compacted since the last run; `budget_bytes` reads at
    most so much, the new first and then on from where the last run stopped. `orphans` also lists
    the store, for what no descriptor names. Nothing to read starts no Spark.
    """
    settings = site_settings(source)
    if budget_bytes is not None and budget_bytes <= 0:
        raise UsageError(f"the budget is {budget_bytes} bytes; it must be at least 1")
    missing = catalog_file(settings)
    if missing is not None and not missing.exists():
        raise UsageError(f"there is no catalog at {missing}: `forebay restore` makes one")
    bench = open_resources(settings)
    try:
        names = _topics(bench, topics)
        run = _Run(settings, bench, spark, progress)
        surveys = [survey for name in names if (survey := run.survey(name)) is not None]
        reads = choose_reads(surveys, incremental=incremental, budget_bytes=budget_bytes)
        if dry_run:
            for read in reads:
                run.ledger.good(read.topic, read.link.size, read.link.next_offset - read.link.start)
        else:
            run.read(reads)
        if orphans:
            grace = settings.uploader.sweep_grace_minutes
            named = names if topics is not None else None
            sweep(
                bench.catalog,
                bench.store,
                named,
                grace_minutes=grace,
                dry_run=True,
                progress=run.ledger.swept,
            )
        return run.ledger.report(dry_run=dry_run)
    finally:
        bench.close()


def _topics(bench: StoreResources, topics: Sequence[str] | None) -> list[TopicName]:
    if topics is None:
        return list(bench.catalog.topics())
    names = list(dict.fromkeys(parse_topic(name) for name in topics))
    unknown = [name for name in names if bench.catalog.record(name) is None]
    in_store = set(topics_in_store(bench.store)) if unknown else set()
    for name in unknown:
        if name not in in_store:
            raise UsageError(f"neither {bench.catalog.name} nor {bench.store.name} knows {name}")
    return names


# ---- on the driver ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Topic:
    """What a run knows of one topic."""

    survey: Survey
    record: TopicRecord
    note: Note | None
    done: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


class _Run:
    def __init__(
        self,
        settings: StoreSettings,
        bench: StoreResources,
        spark: SparkSession | None,
        progress: Progress | None,
    ) -> None:
        self._settings = settings
        self._catalog: Catalog = bench.catalog
        self._spark = spark
        self._progress = progress
        self._tasks_done = 0
        self._began_ms = bench.clock.now_ms()
        self._topics: dict[TopicName, _Topic] = {}
        self.ledger = Ledger()

    def survey(self, topic: TopicName) -> Survey | None:
        """None for a topic that only the store knows."""
        found = survey_topic(self._catalog, topic)
        if found is None:
            return None
        survey, note = found
        self._topics[topic] = _Topic(survey, survey.record, note)
        self.ledger.topic(topic)
        for flaw in survey.flaws:
            self.ledger.find(
                topic, flaw.kind, ERROR, flaw.detail, offset=flaw.offset, messages=flaw.messages
            )
        return survey

    # -- reading --------------------------------------------------------------------------------

    def read(self, reads: list[Read]) -> None:
        for _ in range(_REPLANS_MAX):
            stale: list[Read] = []
            for wave in self._waves(reads, stale):
                self._read_wave(wave, stale)
                self._remember({item.topic for item in wave})
            if not stale:
                break
            reads = self._replanned(stale)
        self._remember(self._topics)

    def _waves(self, reads: Iterable[Read], stale: list[Read]) -> Iterator[list[Item]]:
        """Pieces of the plan, with descriptors as they are now."""
        wave: list[Item] = []
        size = entries = 0
        bytes_max: int | None = None
        for read in reads:
            descriptor = still_named(self._catalog, *read)
            if descriptor is None:
                stale.append(read)
                continue
            if bytes_max is None:
                bytes_max = slots(self._session()) * WAVE_TASKS_PER_SLOT * TASK_BYTES
            wave.append(Item(read.topic, descriptor))
            size += descriptor.size
            entries += len(descriptor.offset_index or ())
            full = size >= bytes_max or entries >= _WAVE_INDEX_ENTRIES_MAX
            if full or len(wave) >= _WAVE_OBJECTS_MAX:
                yield wave
                wave, size, entries = [], 0, 0
        if wave:
            yield wave

    def _session(self) -> SparkSession:
        if self._spark is None:
            self._spark = spark_session(self._settings.spark)
        return self._spark

    def _read_wave(self, wave: list[Item], stale: list[Read]) -> None:
        spark = self._session()
        tasks = pack(wave, lambda item: item.descriptor.size, TASK_BYTES, least=slots(spark))
        work = partial(check, self._settings)
        answers = SparkExecutor(spark).run(tasks, work, "verify", self._shown())
        self._tasks_done += len(tasks)
        good: list[Item] = []
        for items, results in zip(tasks, answers, strict=True):
            for item, done in zip(items, results, strict=True):
                if self._settle(item, done, stale):
                    good.append(item)
        good.sort(key=lambda item: item.descriptor.start_offset)
        for item in good:
            self._mark(item)

    def _shown(self) -> Progress | None:
        told, before = self._progress, self._tasks_done
        if told is None:
            return None
        return lambda done, total: told(before + done, before + total)

    def _settle(self, item: Item, done: Done[Checked], stale: list[Read]) -> bool:
        """Notes what became of the object; whether all its bytes are right."""
        topic, descriptor = item.topic, item.descriptor
        state = self._topics[topic]
        if done.result is None:
            self._unreadable(item, done.error)
            return False
        examined = done.result.examined
        fault = examined.fault
        if fault is not None and fault.kind is FaultKind.MISSING:
            read = Read(topic, link_of(descriptor))
            if still_named(self._catalog, *read) is None:
                stale.append(read)
                return False
        BYTES.add(examined.bytes)
        OBJECTS.add(1, "good" if fault is None else "damaged")
        state.done.add(descriptor.object_id)
        if fault is not None:
            state.damaged.add(descriptor.object_id)
            self.ledger.find(
                topic,
                str(fault.kind),
                ERROR,
                str(fault.error),
                object_id=descriptor.object_id,
                position=fault.position,
                offset=fault.offset,
                size=descriptor.size,
                messages=descriptor.count,
            )
            return False
        self.ledger.good(topic, examined.bytes, examined.messages)
        about = partial(
            self.ledger.find, topic, object_id=descriptor.object_id, size=descriptor.size
        )
        if not examined.same_etag:
            detail = "it has another etag than its descriptor says, and its bytes are right"
            about("etag", ASIDE, detail)
        if done.result.sidecar is not None:
            severity, detail = done.result.sidecar
            about("sidecar", severity, detail)
        return True

    def _unreadable(self, item: Item, error: ForebayError | None) -> None:
        OBJECTS.add(1, "unreadable")
        self.ledger.find(
            item.topic,
            "unreadable",
            ERROR,
            f"it could not be read: {error}",
            object_id=item.descriptor.object_id,
            offset=item.descriptor.start_offset,
            size=item.descriptor.size,
        )

    def _replanned(self, stale: list[Read]) -> list[Read]:
        """What to read in place of objects that are named no more."""
        gone: dict[TopicName, list[Link]] = {}
        for topic, link in stale:
            gone.setdefault(topic, []).append(link)
        return [
            Read(topic, link)
            for topic, links in gone.items()
            for link in named_instead(self._catalog, topic, links)
            if link.object_id not in self._topics[topic].done
        ]

    # -- what is kept ---------------------------------------------------------------------------

    def _mark(self, item: Item) -> None:
        """Moves the watermark of what was read back, if this object is the next one."""
        state = self._topics[item.topic]
        at = skip_lost(state.record, state.record.verified)
        if item.descriptor.start_offset <= at < item.descriptor.next_offset:
            state.record = self._catalog.mark_verified(item.topic, item.descriptor)

    def _remember(self, topics: Iterable[TopicName]) -> None:
        for topic in topics:
            state = self._topics[topic]
            memory = remembered(state.survey, state.done, state.damaged, self._began_ms)
            if memory == state.survey.memory:
                continue
            value = encode_memory(memory)
            try:
                state.note = write_note(self._catalog, topic, NOTE, value, expected=state.note)
            except CommitRefused as error:  # another run: what it remembers is true as well
                event(_log, logging.INFO, "not remembered", topic=topic, error=error)
