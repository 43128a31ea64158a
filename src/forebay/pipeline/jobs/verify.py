"""`verify`: reads every byte of every committed object again, on Spark or on threads.

The driver asks the catalog what there is, looks at the chains (I4) and at what no descriptor
names; tasks read the objects and compare them with their descriptors and sidecars. Nothing is
changed but two things in the catalog: the watermark of what was read back, where the next object
was found right, and a job state for each topic of what was read (`verify_plan`).

An object may be replaced or retired while a run with an older plan goes on. That is no damage:
what the catalog names in its place is read instead.

What a caller gets wrong: a run that is killed has remembered what its finished waves read, and
nothing else. Reading twice is harmless.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.job_state import JobState, find_job_state, write_job_state
from forebay.catalog.records import TopicRecord, skip_lost
from forebay.errors import (
    CommitRefused,
    DescriptorError,
    ForebayError,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import TopicName, object_key, parse_topic, sidecar
from forebay.limits import CATALOG_PAGE, DESCRIPTOR_BYTES_MAX, OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.store import CloudStore
from forebay.pipeline.execute import Done, Progress, Runner, executor_for
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.verify_plan import (
    STATE_NAME,
    Flaw,
    Link,
    Read,
    ScrubState,
    Survey,
    chain_flaws,
    choose_reads,
    decode_state,
    encode_state,
    state_after,
)
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.read.verify import Examined, FaultKind, examine_object
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, executor_resources, open_existing
from forebay.upload.inventory import topics_in_store
from forebay.upload.sweep import Action, Kind, SweepItem, sweep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_WAVE_INDEX_ENTRIES_MAX: Final = 300_000
"""Of the descriptors of one wave: about 40 MB on the driver."""
_INDEX_ENTRIES_LEAST: Final = 73
"""As which a descriptor counts that has fewer, so that a wave has at most about 4,100 objects."""
_REPLANS_MAX: Final = 3
_LOOKS_MAX: Final = 3
"""At a chain that is not whole, before it is called so: it may be changing."""
ROWS_MAX: Final = 10_000
"""Findings that a report holds; the rest is counted, and logged."""

OBJECTS: Final = Counter("forebay_verify_objects_total", "Objects that were read back.", ["result"])
BYTES: Final = Counter("forebay_verify_bytes_total", "Bytes of objects that were read back.")
FINDINGS: Final = Counter(
    "forebay_verify_findings_total", "What verifying found wrong, by kind.", ["kind", "severity"]
)


def verify(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    incremental: bool = False,
    budget_bytes: int | None = None,
    orphans: bool = True,
    spark: SparkSession | None = None,
    runner: Runner = "spark",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Reads the objects of the topics, by default of all that the catalog knows.

    `incremental` reads what was committed or compacted since the last run; `budget_bytes` reads at
    most so much, the new first and then on from where the last run stopped. `orphans` also lists
    the store, for what no descriptor names. Nothing to read starts no Spark; `runner="threads"`
    reads with threads of this process instead.
    """
    settings = job_settings(source)
    if budget_bytes is not None and budget_bytes <= 0:
        raise UsageError(f"the budget is {budget_bytes} bytes; it must be at least 1")
    waves = Waves(
        executor_for(runner, spark, settings.spark),
        partial(check_object, settings),
        lambda item: item.descriptor.size,
        label="verify",
        progress=progress,
    )
    with closing(open_existing(settings)) as resources:
        names = _topics(resources, topics)
        run = _Verification(resources)
        surveys = [survey for name in names if (survey := run.survey(name)) is not None]
        reads = choose_reads(surveys, incremental=incremental, budget_bytes=budget_bytes)
        if dry_run:
            for topic, link in reads:
                run.findings.count_good(topic, link.size, link.next_offset - link.start)
        else:
            run.read(reads, waves)
        if orphans:
            sweep(
                resources.catalog,
                resources.store,
                names if topics is not None else None,
                grace_minutes=settings.uploader.sweep_grace_minutes,
                dry_run=True,
                progress=run.findings.add_swept,
            )
        return run.findings.report(dry_run=dry_run)


def _topics(resources: StoreResources, topics: Sequence[str] | None) -> list[TopicName]:
    catalog, store = resources.catalog, resources.store
    if topics is None:
        return list(catalog.topics())
    names = list(dict.fromkeys(parse_topic(name) for name in topics))
    unknown = [name for name in names if catalog.record(name) is None]
    in_store = set(topics_in_store(store)) if unknown else set()
    for name in unknown:
        if name not in in_store:
            raise UsageError(f"neither {catalog.name} nor {store.name} knows {name}")
    return names


# ---- what was found ---------------------------------------------------------------------------
#
#     severity   kinds
#     good       ok, planned
#     note       etag, and what a sweep keeps or removes in the normal course of things
#     warning    sidecar, orphan, pending, stray, unrestored: nothing is lost, but not as it should
#                be
#     error      missing, resized, corrupt, index, gap, overlap, record, descriptor, unnamed,
#                unreadable

GOOD: Final = "good"
NOTE: Final = "note"
WARNING: Final = "warning"
ERROR: Final = "error"

_SWEPT: Final = {
    Kind.ORPHAN: ("orphan", WARNING),
    Kind.PENDING: ("pending", WARNING),
    Kind.SIDECAR: ("stray", WARNING),
    Kind.REPLACED: ("replaced", NOTE),
    Kind.INTENT: ("intent", NOTE),
    Kind.DELETING: ("deleting", NOTE),
    Kind.UNKNOWN: ("unknown", NOTE),
    Kind.MISSING: ("missing", ERROR),
    Kind.RESIZED: ("resized", ERROR),
    Kind.UNNAMED: ("unnamed", ERROR),
    Kind.UNRESTORED: ("unrestored", WARNING),
    Kind.TOPIC: ("unreadable", ERROR),
}
"""What a sweep would remove, or reports as wrong; what it keeps is a note."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    topic: str
    object_id: str | None
    kind: str
    severity: str
    position: int | None
    """In the object."""
    offset: int | None
    detail: str
    objects: int
    bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Of one run; after a dry run `objects` and `bytes` are what would be read.

    It holds a bounded number of findings and counts the rest. Notes do not make it bad.
    """

    dry_run: bool
    topics: int
    objects: int
    bytes: int
    messages: int
    errors: int
    warnings: int
    notes: int
    rows: tuple[VerifyRow, ...]
    rows_left_out: int

    @property
    def ok(self) -> bool:
        return not self.errors and not self.warnings

    @property
    def findings(self) -> tuple[VerifyRow, ...]:
        return tuple(row for row in self.rows if row.severity != GOOD)

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"ok": self.ok, **asdict(self)}

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, VerifyRow, self.rows)


class Findings:
    """Collects findings as they come; logs and counts each at once."""

    def __init__(self) -> None:
        self._rows: list[VerifyRow] = []
        self._good: dict[str, list[int]] = {}
        self._kept: dict[tuple[str, str, str], list[int]] = {}
        self._severities: Tally[str] = Tally()
        self._damaged: set[tuple[str, str]] = set()
        self.left_out = 0

    def count_good(self, topic: TopicName, size: int, messages: int) -> None:
        total = self._good.setdefault(str(topic), [0, 0, 0])
        for at, amount in enumerate((1, size, messages)):
            total[at] += amount

    def add_topic(self, topic: TopicName) -> None:
        """So that one without objects has a row too."""
        self._good.setdefault(str(topic), [0, 0, 0])

    def add(
        self,
        topic: TopicName,
        kind: str,
        severity: str,
        detail: str,
        *,
        object_id: str | None = None,
        position: int | None = None,
        offset: int | None = None,
        size: int = 0,
        messages: int = 0,
    ) -> None:
        if severity == ERROR and object_id is not None:
            self._damaged.add((str(topic), object_id))
        row = VerifyRow(
            str(topic),
            object_id,
            kind,
            severity,
            position,
            offset,
            detail,
            int(object_id is not None),
            size,
            messages,
        )
        self._append(row)
        if severity == NOTE:
            return
        event(
            _log,
            logging.ERROR if severity == ERROR else logging.WARNING,
            f"verify: {kind}",
            topic=row.topic,
            object=object_id,
            position=position,
            offset=offset,
            detail=detail,
        )

    def add_swept(self, item: SweepItem) -> None:
        """What a dry sweep found; what reading has found already is not added again."""
        kind, severity = _SWEPT[item.kind]
        name = item.key.rpartition("/")[2]
        if kind in ("missing", "resized") and (str(item.topic), name) in self._damaged:
            return
        if item.action is Action.KEPT and severity == WARNING and kind != "unrestored":
            severity = NOTE
        if severity == NOTE:
            total = self._kept.setdefault((str(item.topic), kind, item.reason), [0, 0])
            total[0] += 1
            total[1] += item.bytes
            return
        remedy = "; `forebay sweep` removes it" if item.action is Action.WOULD_REMOVE else ""
        self.add(
            item.topic,
            kind,
            severity,
            item.reason + remedy,
            object_id=name or None,
            size=item.bytes,
        )

    def report(self, *, dry_run: bool) -> VerifyReport:
        for (topic, kind, reason), (count, size) in self._kept.items():
            self._append(VerifyRow(topic, None, kind, NOTE, None, None, reason, count, size, 0))
        kind = "planned" if dry_run else "ok"
        said = "would be read" if dry_run else "read and found right"
        totals = tuple(
            VerifyRow(topic, None, kind, GOOD, None, None, f"{count} objects {said}", *total)
            for topic, total in sorted(self._good.items())
            for count in total[:1]
        )
        return VerifyReport(
            dry_run=dry_run,
            topics=len(totals),
            objects=sum(row.objects for row in totals),
            bytes=sum(row.bytes for row in totals),
            messages=sum(row.messages for row in totals),
            errors=self._severities[ERROR],
            warnings=self._severities[WARNING],
            notes=self._severities[NOTE],
            rows=(*totals, *sorted(self._rows, key=_by_weight)),
            rows_left_out=self.left_out,
        )

    def _append(self, row: VerifyRow) -> None:
        self._severities[row.severity] += 1
        FINDINGS.add(1, row.kind, row.severity)
        if len(self._rows) < ROWS_MAX:
            self._rows.append(row)
        else:
            self.left_out += 1


def _by_weight(row: VerifyRow) -> tuple[int, str, int, str]:
    weight = (ERROR, WARNING, NOTE).index(row.severity)
    return weight, row.topic, -1 if row.offset is None else row.offset, row.object_id or ""


# ---- a topic's chain as the catalog has it, looked at until it stands still -------------------


def _survey(catalog: Catalog, topic: TopicName) -> tuple[Survey, JobState | None] | None:
    """The chain, its flaws, and what was remembered of it; None if the catalog has no record."""
    record = catalog.record(topic)
    if record is None:
        return None
    survey = _look(catalog, topic, record)
    flaws = set(survey.flaws)
    for _ in range(_LOOKS_MAX - 1):
        if not flaws:
            break
        survey = _look(catalog, topic, catalog.record(topic) or record)
        flaws &= set(survey.flaws)
    job_state = find_job_state(catalog, topic, STATE_NAME)
    state = ScrubState() if job_state is None else _decoded(topic, job_state)
    return replace(survey, flaws=tuple(sorted(flaws)), state=state), job_state


def _still_named(catalog: Catalog, topic: TopicName, link: Link) -> ObjectDescriptor | None:
    """The descriptor of the object, if the catalog names it still."""
    entry = catalog.kv.get(catalog.keys.descriptor(topic, link.start))
    if entry is None:
        return None
    try:
        found = decode_descriptor(entry.value)
    except DescriptorError:  # a flaw, which the next survey finds
        return None
    return found if found.object_id == link.object_id else None


def _named_instead(catalog: Catalog, topic: TopicName, gone: Collection[Link]) -> list[Link]:
    """What the catalog names by now for the offsets of objects that it named before."""
    before = sorted(gone)
    found = []
    for link in _links(catalog, topic, []):
        at = bisect_left(before, (link.next_offset,))  # those that begin before its end
        if at and before[at - 1].next_offset > link.start:
            found.append(link)
    return found


def _link_of(descriptor: ObjectDescriptor, revision: int = 0) -> Link:
    return Link(
        descriptor.start_offset,
        descriptor.next_offset,
        descriptor.size,
        descriptor.object_id,
        revision,
    )


def _look(catalog: Catalog, topic: TopicName, record: TopicRecord) -> Survey:
    # Before the descriptors: what is written meanwhile counts as new the next time.
    revision = catalog.kv.revision()
    flaws: list[Flaw] = []
    links = tuple(_links(catalog, topic, flaws))
    flaws += chain_flaws(record, links)
    return Survey(topic, record, links, revision, tuple(flaws))


def _links(catalog: Catalog, topic: TopicName, flaws: list[Flaw]) -> Iterator[Link]:
    """Every descriptor, a page at a time; overlaps too, which readers never see."""
    keys = catalog.keys
    at, end = keys.descriptor(topic, 0), keys.descriptor(topic, OFFSET_MAX)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            start = keys.descriptor_start(topic, entry.key)
            try:
                descriptor = decode_descriptor(entry.value)
            except DescriptorError as error:
                flaws.append(Flaw("descriptor", start or 0, 0, f"{entry.key}: {error}"))
                continue
            if descriptor.start_offset == start:
                yield _link_of(descriptor, entry.revision)
            else:
                detail = f"{entry.key} holds offset {descriptor.start_offset}"
                flaws.append(Flaw("descriptor", start or 0, 0, detail))
        at = page[-1].key + "\1"


def _decoded(topic: TopicName, job_state: JobState) -> ScrubState:
    try:
        return decode_state(job_state.value, f"{topic}: the note {STATE_NAME!r}")
    except DescriptorError as error:
        event(_log, logging.WARNING, "memory forgotten", topic=topic, error=error)
        return ScrubState()


# ---- on the driver ----------------------------------------------------------------------------


@dataclass(slots=True)
class _TopicState:
    """What a run knows of one topic."""

    survey: Survey
    record: TopicRecord
    job_state: JobState | None
    done: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


class _Verification:
    """One run."""

    def __init__(self, resources: StoreResources) -> None:
        self._catalog: Catalog = resources.catalog
        self._began_ms = resources.clock.now_ms()
        self._topics: dict[TopicName, _TopicState] = {}
        self.findings = Findings()

    def survey(self, topic: TopicName) -> Survey | None:
        """None for a topic that only the store knows."""
        found = _survey(self._catalog, topic)
        if found is None:
            return None
        survey, job_state = found
        self._topics[topic] = _TopicState(survey, survey.record, job_state)
        self.findings.add_topic(topic)
        for flaw in survey.flaws:
            self.findings.add(
                topic, flaw.kind, ERROR, flaw.detail, offset=flaw.offset, messages=flaw.messages
            )
        return survey

    # -- reading --------------------------------------------------------------------------------

    def read(self, reads: list[Read], waves: Waves[CommittedObject, Checked]) -> None:
        for _ in range(_REPLANS_MAX):
            stale: list[Read] = []
            items = self._described(reads, stale)
            for wave in waves.cut(items, _index_entries, _WAVE_INDEX_ENTRIES_MAX):
                good = [item for item, done in waves.run(wave) if self._settle(item, done, stale)]
                good.sort(key=lambda item: item.descriptor.start_offset)
                for item in good:
                    self._mark(item)
                self._remember({item.topic for item in wave})
            if not stale:
                break
            reads = self._replanned(stale)
        self._remember(self._topics)

    def _described(self, reads: Iterable[Read], stale: list[Read]) -> Iterator[CommittedObject]:
        """The objects with their descriptors as they are now; those that have none are stale."""
        for read in reads:
            descriptor = _still_named(self._catalog, *read)
            if descriptor is None:
                stale.append(read)
            else:
                yield CommittedObject(read.topic, descriptor)

    def _settle(self, item: CommittedObject, done: Done[Checked], stale: list[Read]) -> bool:
        """Adds what became of the object; returns whether all its bytes are right."""
        topic, descriptor = item.topic, item.descriptor
        state = self._topics[topic]
        if done.result is None:
            self._unreadable(item, done.error)
            return False
        examined = done.result.examined
        fault = examined.fault
        if fault is not None and fault.kind is FaultKind.MISSING:
            read = Read(topic, _link_of(descriptor))
            if _still_named(self._catalog, *read) is None:
                stale.append(read)
                return False
        BYTES.add(examined.bytes)
        OBJECTS.add(1, "good" if fault is None else "damaged")
        state.done.add(descriptor.object_id)
        if fault is not None:
            state.damaged.add(descriptor.object_id)
            self.findings.add(
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
        self.findings.count_good(topic, examined.bytes, examined.messages)
        about = partial(
            self.findings.add, topic, object_id=descriptor.object_id, size=descriptor.size
        )
        if not examined.same_etag:
            detail = "it has another etag than its descriptor says, and its bytes are right"
            about("etag", NOTE, detail)
        if done.result.sidecar is not None:
            severity, detail = done.result.sidecar
            about("sidecar", severity, detail)
        return True

    def _unreadable(self, item: CommittedObject, error: ForebayError | None) -> None:
        OBJECTS.add(1, "unreadable")
        self.findings.add(
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
            for link in _named_instead(self._catalog, topic, links)
            if link.object_id not in self._topics[topic].done
        ]

    # -- what is kept ---------------------------------------------------------------------------

    def _mark(self, item: CommittedObject) -> None:
        """Moves the watermark of what was read back, if this object is the next one."""
        state = self._topics[item.topic]
        at = skip_lost(state.record, state.record.verified)
        if item.descriptor.start_offset <= at < item.descriptor.next_offset:
            state.record = self._catalog.mark_verified(item.topic, item.descriptor)

    def _remember(self, topics: Iterable[TopicName]) -> None:
        for topic in topics:
            state = self._topics[topic]
            reached = state_after(state.survey, state.done, state.damaged, self._began_ms)
            if reached == state.survey.state:
                continue
            value = encode_state(reached)
            try:
                state.job_state = write_job_state(
                    self._catalog, topic, STATE_NAME, value, expected=state.job_state
                )
            except CommitRefused as error:  # another run: what it remembers is true as well
                event(_log, logging.INFO, "not remembered", topic=topic, error=error)


# ---- what a task does -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommittedObject:
    topic: TopicName
    descriptor: ObjectDescriptor


def _index_entries(item: CommittedObject) -> int:
    return max(len(item.descriptor.offset_index or ()), _INDEX_ENTRIES_LEAST)


@dataclass(frozen=True, slots=True)
class Checked:
    examined: Examined
    sidecar: tuple[str, str] | None
    """Severity and words, if something is wrong with the sidecar."""


def check_object(settings: StoreSettings, item: CommittedObject) -> Checked:
    """Reads all of one object, and its sidecar; ServiceError if the store is unavailable."""
    resources = executor_resources(settings)
    examined = examine_object(
        resources.store, resources.pool, settings.cloud_reader, item.topic, item.descriptor
    )
    beside = None
    if settings.uploader.sidecars and examined.fault is None:
        beside = _check_sidecar(resources.store, item)
    return Checked(examined, beside)


def _check_sidecar(store: CloudStore, item: CommittedObject) -> tuple[str, str] | None:
    key = object_key(item.topic, sidecar(item.descriptor.object_id))
    try:
        found = decode_descriptor(bytes(store.get_object(key, DESCRIPTOR_BYTES_MAX)))
    except ObjectMissing:
        return WARNING, "it has no sidecar: a restore from the bucket alone would read it in full"
    except DescriptorError as error:
        return WARNING, f"its sidecar is no descriptor: {error}"
    except (ServiceUnavailable, ServiceRefused):
        raise
    except ServiceError as error:
        return WARNING, f"its sidecar cannot be read: {error}"
    said = item.descriptor
    if found == said:
        return None
    if replace(found, etag=said.etag, created_at=said.created_at) == said:
        return NOTE, "its sidecar has another etag or time than its descriptor"
    return WARNING, "its sidecar says something else than its descriptor"
