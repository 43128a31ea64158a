"""`verify`: reads every byte of every committed object, on Spark or on threads.

The driver reads the descriptors, checks the chains (I4), and looks for objects that no descriptor
names. Tasks read the objects and compare them with their descriptors and sidecars. A run changes
two things, both in the catalog: the watermark `verified`, if the next object was found correct, and
a job state for each topic that records what was read (`verify_plan`).

An object may be replaced or deleted after a run was planned. That is not damage: the run reads the
object that the catalog names in its place.

Beware: a run that is killed keeps only the progress of its finished waves. The next run reads the
rest again, which is harmless.
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
from forebay.catalog.chain import stored
from forebay.catalog.job_state import JobState, find_job_state, write_job_state
from forebay.catalog.records import TopicRecord, skip_holes
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
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, like
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
from forebay.upload.engine import correct
from forebay.upload.inventory import topics_in_store
from forebay.upload.sweep import Action, Kind, SweepItem, sweep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_WAVE_INDEX_ENTRIES_MAX: Final = 300_000
"""The most index entries in the descriptors of one wave: about 40 MB on the driver."""
_INDEX_ENTRIES_LEAST: Final = 73
"""A descriptor with fewer entries counts as this many: a wave has at most about 4,100 objects."""
_REPLANS_MAX: Final = 3
_LOOKS_MAX: Final = 3
"""How often a chain is read before a flaw is reported: it may just be changing."""
ROWS_MAX: Final = 10_000
"""The most findings in a report. The rest is counted and logged."""

OBJECTS: Final = Counter("forebay_verify_objects_total", "Objects that were read back.", ["result"])
BYTES: Final = Counter("forebay_verify_bytes_total", "Bytes of objects that were read back.")
FINDINGS: Final = Counter(
    "forebay_verify_findings_total", "Findings of verify, by kind.", ["kind", "severity"]
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
    """Reads and checks the objects of the topics, by default of all that the catalog knows.

    `incremental` reads only objects committed or compacted since the last run. `budget_bytes`
    limits how much is read: new objects first, then on from where the last run stopped. `orphans`
    also lists the object store, to find objects that no descriptor names. `runner="threads"` uses
    threads of this process in place of Spark. Spark is not started if there is nothing to read.

    UsageError for a topic that neither the catalog nor the store knows. Damage is in the report.
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
                grace_minutes=settings.sweeper.grace_minutes,
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
#     note       etag, an index that was corrected, and what a sweep keeps or removes in normal
#                operation
#     warning    sidecar, orphan, pending, stray, unrestored: not as it should be, but no data is
#                lost
#     error      missing, resized, corrupt, content, index, gap, overlap, record, descriptor,
#                unnamed, newer, unreadable

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
    Kind.NEWER: ("newer", ERROR),
    Kind.MARKER: ("marker", NOTE),
    Kind.UNRESTORED: ("unrestored", WARNING),
    Kind.TOPIC: ("unreadable", ERROR),
}
"""The kind and severity of what a sweep finds. Objects that it would keep become notes."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    topic: str
    object_id: str | None
    kind: str
    severity: str
    position: int | None
    """The position in the object."""
    offset: int | None
    detail: str
    objects: int
    bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of one run. In a dry run, `objects`, `bytes` and `messages` would be read.

    `rows` has at most ROWS_MAX findings; the counts include the rest. Notes do not affect `ok`.
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
        """The report for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, VerifyRow, self.rows)


class Findings:
    """Collects findings, and logs and counts each of them at once."""

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
        """Gives the topic a row in the report, even if it has no objects."""
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
        """Adds a finding of a dry sweep, unless reading has found the same."""
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
        said = "would be read" if dry_run else "read and found correct"
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


# ---- a topic's chain in the catalog; read again while it has flaws, as it may be changing -------


def _survey(catalog: Catalog, topic: TopicName) -> tuple[Survey, JobState | None] | None:
    """The chain, its flaws, and the recorded state; None if the catalog has no record."""
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
    """The descriptor of the object, or None if the catalog no longer names it."""
    entry = catalog.kv.get(catalog.keys.descriptor(topic, link.start))
    if entry is None:
        return None
    try:
        found = decode_descriptor(entry.value)
    except DescriptorError:  # the next survey reports it as a flaw
        return None
    return found if found.object_id == link.object_id else None


def _named_instead(catalog: Catalog, topic: TopicName, gone: Collection[Link]) -> list[Link]:
    """The objects that the catalog names now for the offsets of objects that are gone."""
    before = sorted(gone)
    found = []
    for link in _links(catalog, topic, []):
        at = bisect_left(before, (link.next_offset,))  # of `before`, how many begin before its end
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
    # Read the revision first: a descriptor that is written after it counts as new the next time.
    revision = catalog.kv.revision()
    flaws: list[Flaw] = []
    links = tuple(_links(catalog, topic, flaws))
    flaws += chain_flaws(record, links)
    return Survey(topic, record, links, revision, tuple(flaws))


def _links(catalog: Catalog, topic: TopicName, flaws: list[Flaw]) -> Iterator[Link]:
    """Yields all descriptors, even overlapping ones, which readers skip; damaged go to `flaws`."""
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
        return decode_state(job_state.value, f"{topic}: the job state {STATE_NAME!r}")
    except DescriptorError as error:
        event(_log, logging.WARNING, "verify starts over with the topic", topic=topic, error=error)
        return ScrubState()


# ---- on the driver ----------------------------------------------------------------------------


@dataclass(slots=True)
class _TopicState:
    """The progress of a run in one topic."""

    survey: Survey
    record: TopicRecord
    job_state: JobState | None
    done: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


class _Verification:
    """One run of the job."""

    def __init__(self, resources: StoreResources) -> None:
        self._resources = resources
        self._catalog: Catalog = resources.catalog
        self._began_ms = resources.clock.now_ms()
        self._topics: dict[TopicName, _TopicState] = {}
        self.findings = Findings()

    def survey(self, topic: TopicName) -> Survey | None:
        """Reads the chain of the topic and adds its flaws; None if the catalog has no record."""
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
        """Yields the objects with their current descriptors; adds those without one to `stale`."""
        for read in reads:
            descriptor = _still_named(self._catalog, *read)
            if descriptor is None:
                stale.append(read)
            else:
                yield CommittedObject(read.topic, descriptor)

    def _settle(self, item: CommittedObject, done: Done[Checked], stale: list[Read]) -> bool:
        """Adds the findings for the object; returns whether all its bytes are correct."""
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
        state.done.add(descriptor.object_id)
        found = examined.found
        if found is not None and self._correct(item, found) and fault is not None:
            detail = f"its index was wrong, and is corrected: {fault.error}"
            self.findings.add(
                topic,
                str(fault.kind),
                NOTE,
                detail,
                object_id=descriptor.object_id,
                position=fault.position,
                offset=fault.offset,
            )
            fault = None
        OBJECTS.add(1, "good" if fault is None else "damaged")
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
            detail = "its etag is not the one in its descriptor, but its bytes are correct"
            about("etag", NOTE, detail)
        if done.result.sidecar is not None:
            severity, detail = done.result.sidecar
            about("sidecar", severity, detail)
        return True

    def _correct(self, item: CommittedObject, found: ObjectDescriptor) -> bool:
        """Gives the object the descriptor that it should have: the right index, hash and etag."""
        resources = self._resources
        sidecars = resources.settings.uploader.sidecars
        return correct(
            self._catalog, resources.store, item.topic, item.descriptor, found, sidecars=sidecars
        )

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
        """The objects to read in place of those that the catalog no longer names."""
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
        """Moves the watermark `verified`, if this object is the next one."""
        state = self._topics[item.topic]
        at = skip_holes(state.record, state.record.verified)
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
            except CommitRefused as error:  # another run has recorded its progress, which is fine
                event(_log, logging.INFO, "progress not recorded", topic=topic, error=error)


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
    """Severity and detail, if something is wrong with the sidecar."""


def check_object(settings: StoreSettings, item: CommittedObject) -> Checked:
    """Runs in a task: reads an object and its sidecar. ServiceError if the store is unavailable."""
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
        return WARNING, "it has no sidecar: a restore from the bucket would read it in full"
    except DescriptorError as error:
        return WARNING, f"its sidecar is not a descriptor: {error}"
    except (ServiceUnavailable, ServiceRefused):
        raise
    except ServiceError as error:
        return WARNING, f"its sidecar cannot be read: {error}"
    said = item.descriptor
    if said in (found, stored(found)):
        return None
    same = like(found, said)
    if said in (same, stored(same)):
        if found.content_hash != said.content_hash:
            return NOTE, "its sidecar is of an earlier release, which wrote no content hash"
        return NOTE, "its sidecar and its descriptor differ in the etag or the time"
    return WARNING, "its sidecar and its descriptor differ"
