"""`compact`: merges small objects of a topic into large ones, and can compress old history.

`undo_compaction` reverts it.

The driver plans and commits, and tasks read and write:

1. The driver records an intent for the key of the new object.
2. A task writes the object, reads it back, and compares it with the small ones.
3. One transaction replaces the small objects by the new one (the swap).

The small objects are kept for `storage.sweeper.grace_minutes`, so that readers with an old plan can
finish, and the swap can be undone. If an owner, retention or another compaction has changed the
objects in the meantime, nothing is swapped, and the group is planned again. A kill loses at most
one wave: its objects have no descriptor, and the next run writes them again or a sweep removes
them.

Beware: no space is freed at once. Both copies exist until a sweep after the grace time.
"""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from forebay.catalog.adopt import is_restoring, unfinished
from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.records import TopicRecord
from forebay.catalog.swap import (
    OBJECTS_PER_SWAP_MAX,
    SWAP_BYTES_MAX,
    Kept,
    encode_kept,
    replaced_descriptors,
    swap,
    swap_back,
)
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    ForebayError,
    MissingData,
    TopicFenced,
    UsageError,
)
from forebay.format.content import ContentHash
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.names import ObjectName, TopicName, object_key, parse_object, parse_topic
from forebay.limits import GIB, OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.pipeline.execute import Done, Executor, Progress, SparkExecutor
from forebay.pipeline.jobs.report import to_dataframe
from forebay.pipeline.jobs.waves import Waves
from forebay.pipeline.location import job_settings
from forebay.read.object_stream import ObjectStream
from forebay.read.verify import examine_object, looks_same, other_content
from forebay.settings import StoreSettings
from forebay.topic.configure import effective_settings
from forebay.topic.resources import StoreResources, executor_resources, open_existing
from forebay.upload.engine import (
    NewObject,
    ObjectBuilder,
    Renewal,
    describe,
    new_index,
    put_sidecar,
    set_aside,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log: Final = logging.getLogger("forebay.pipeline")
_TARGET_BYTES: Final = 1 * GIB
"""The target where `max_object_bytes` is null. That of the stores would rewrite whole histories."""
_GROUPS_PER_ROUND: Final = 512
"""The most groups to plan at a time: their descriptors are in the driver's memory."""
_GROUPS_PER_WAVE: Final = 128
_REPLANS_MAX: Final = 20
"""How often a run plans a topic again because somebody else has changed its objects."""

OBJECTS: Final = Counter(
    "forebay_compact_objects_total",
    "Objects that compactions wrote, by outcome.",
    ["outcome"],
)
REPLACED: Final = Counter(
    "forebay_compact_replaced_total", "Objects that compactions replaced by larger ones."
)
BYTES: Final = Counter("forebay_compact_bytes_total", "Bytes that compactions rewrote.")


def compact(
    source: str | Path | StoreSettings,
    topics: Sequence[str] | None = None,
    *,
    target_bytes: int | None = None,
    max_bytes: int | None = None,
    compression: Literal["none", "zstd"] | None = None,
    spark: SparkSession | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> CompactReport:
    """Compacts the topics, by default all, until no two small objects are neighbours.

    `target_bytes` is the largest size of a new object before compression, by default
    `max_object_bytes` of the topic. New objects are compressed as `compression` of the topic says.
    With `compression` they are compressed so, and every object that is not is rewritten, small or
    not.
    `max_bytes` limits how much this run rewrites. A dry run plans one round only. `executor` runs
    the tasks in place of Spark. Spark is not started if there is nothing to do.

    UsageError for a topic that the catalog does not know, and for a target that no store takes.
    Other errors are in the report.
    """
    settings = job_settings(source)
    uploader = settings.uploader
    if compression not in (None, "none", "zstd"):
        raise UsageError(f"the compression is {compression!r}; it must be 'none' or 'zstd'")
    if target_bytes is not None and target_bytes > uploader.stored_bytes_max:
        raise UsageError(
            f"the target is {target_bytes} bytes; with parts of {uploader.stream_chunk_size} bytes "
            f"(stream_chunk_size) an object has at most {uploader.stored_bytes_max}"
        )
    if target_bytes is not None:
        Bounds(target_bytes)  # UsageError now, and not for each topic
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"the budget is {max_bytes} bytes; it must be at least 1")
    with closing(open_existing(settings)) as resources:
        names = _known_topics(resources.catalog, topics)
        run = _Compaction(resources, names, target_bytes, max_bytes, compression)
        if dry_run:
            return run.dry_run_report()
        waves = Waves(
            executor or SparkExecutor(spark, settings.spark),
            partial(rewrite, settings),
            lambda job: job.group.size,
            label="compact",
            progress=progress,
        )
        return run.until_done(waves)


def undo_compaction(
    source: str | Path | StoreSettings,
    topic: str,
    object_id: str | None = None,
    *,
    dry_run: bool = False,
) -> CompactReport:
    """Undoes the compaction that made `object_id`, or all of the topic's, the newest first.

    This is possible until a sweep begins to delete one of the small objects. After that it is an
    error in the report, and nothing changes. No data is moved, so no Spark is needed.
    """
    with closing(open_existing(job_settings(source))) as resources:
        catalog = resources.catalog
        [name] = _known_topics(catalog, [topic])
        rows: list[CompactRow] = []
        tried: set[str] = set()
        if object_id is not None:
            rows.append(_undo(resources, name, _named(catalog, name, object_id), dry_run))
        else:
            while wanted := [
                each for each in _compacted(catalog, name) if each.object_id not in tried
            ]:
                tried.update(each.object_id for each in wanted)
                rows += [_undo(resources, name, each, dry_run) for each in wanted]
    return CompactReport(tuple(rows), dry_run)


def _known_topics(catalog: Catalog, topics: Sequence[str] | None) -> list[TopicName]:
    """Raises UsageError for a topic that is not in the catalog."""
    if topics is None:
        return list(catalog.topics())
    names = list(dict.fromkeys(parse_topic(name) for name in topics))
    for name in names:
        if catalog.record(name) is None:
            raise UsageError(f"{catalog.name} does not know the topic {name}")
    return names


# ---- what a run did ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompactRow:
    """One swap, or why it was not made. For an undo, one swap that was undone."""

    topic: str
    object_id: str | None
    """The large object; None if the topic could not be compacted at all."""
    replaced: int
    """The number of small objects."""
    start_offset: int
    end_offset: int
    """The offset of the last message."""
    messages: int
    bytes: int
    """Of the frames, before compression."""
    sha256_before: str | None
    """The hash of all frames as read from the small objects; None if nothing was read."""
    sha256_after: str | None
    """The hash of all frames as read back from the large object."""
    error: str | None
    stored_before: int = 0
    """Bytes of the small objects in the store."""
    stored_after: int | None = None
    """Bytes of the large object in the store; None if it was not written."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    rows: tuple[CompactRow, ...]
    """One for each swap, in the order of the commits. A later round may replace the objects of an
    earlier one."""
    dry_run: bool
    rounds: int = 0
    refused: int = 0
    """Swaps that were planned again because somebody else had changed the objects."""
    left_groups: int = 0
    """Groups for which the budget was too small."""
    left_bytes: int = 0
    """The bytes of these groups."""
    left_ledgers: int = 0
    """Ledgers of Pulsar in the topics. They are never merged: a broker knows them by their ids."""

    @property
    def ok(self) -> bool:
        return all(row.error is None for row in self.rows)

    @property
    def errors(self) -> int:
        return sum(row.error is not None for row in self.rows)

    @property
    def objects(self) -> int:
        """Swaps that were made, or in a dry run would be made."""
        return len(self.rows) - self.errors

    @property
    def replaced(self) -> int:
        return sum(row.replaced for row in self.rows if row.error is None)

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.error is None)

    @property
    def stored_before(self) -> int:
        return sum(row.stored_before for row in self.rows if row.error is None)

    @property
    def stored_after(self) -> int:
        return sum(row.stored_after or 0 for row in self.rows if row.error is None)

    def dataframe(self, spark: SparkSession) -> DataFrame:
        return to_dataframe(spark, CompactRow, self.rows)

    def facts(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "dry_run": self.dry_run,
            "ok": self.ok,
            "rounds": self.rounds,
            "refused": self.refused,
            "objects": self.objects,
            "replaced": self.replaced,
            "bytes": self.bytes,
            "stored_before": self.stored_before,
            "stored_after": self.stored_after,
            "left_groups": self.left_groups,
            "left_bytes": self.left_bytes,
            "left_ledgers": self.left_ledgers,
            "rows": [asdict(row) for row in self.rows],
        }


# ---- the plan: which objects become one, a pure decision --------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a new object."""

    target_bytes: int
    messages_max: int | None = None
    objects_max: int = OBJECTS_PER_SWAP_MAX
    """The most objects of one group."""
    kept_bytes_max: int = SWAP_BYTES_MAX
    """The most bytes of the descriptors that the swap of one group keeps."""

    def __post_init__(self) -> None:
        if self.target_bytes < 1:
            raise UsageError(f"the target is {self.target_bytes} bytes; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring objects that become one."""

    topic: TopicName
    epoch: int
    """The epoch of the topic when the group was planned."""
    objects: tuple[ObjectDescriptor, ...]
    compressed: bool = False
    """Whether the new object is compressed."""

    @property
    def name(self) -> ObjectName:
        first, last = self.objects[0], self.objects[-1]
        return ObjectName(first.start_offset, last.end_offset, compressed=self.compressed)

    @property
    def size(self) -> int:
        """Bytes of the frames, before compression."""
        return sum(each.logical_size for each in self.objects)

    @property
    def stored(self) -> int:
        return sum(each.size for each in self.objects)

    @property
    def messages(self) -> int:
        return self.name.end - self.name.start + 1


class _Neighbours:
    """Collects neighbours for a group, within the bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.objects: list[ObjectDescriptor] = []
        self._size = self._messages = self._kept = 0

    def takes(self, each: ObjectDescriptor) -> bool:
        bounds = self._bounds
        if not self.objects:
            return True
        messages = self._messages + each.count
        return (
            each.start_offset == self.objects[-1].next_offset
            and len(self.objects) < bounds.objects_max
            and self._size + each.logical_size <= bounds.target_bytes
            and (bounds.messages_max is None or messages <= bounds.messages_max)
            and self._kept + _kept_bytes(each) <= bounds.kept_bytes_max
        )

    def add(self, each: ObjectDescriptor) -> None:
        self.objects.append(each)
        self._size += each.logical_size
        self._messages += each.count
        self._kept += _kept_bytes(each)


def plan_groups(
    topic: TopicName,
    record: TopicRecord,
    descriptors: Iterable[ObjectDescriptor],
    bounds: Bounds,
    leave: Collection[str] = (),
    *,
    compressed: bool = False,
    recode: bool = False,
) -> Iterator[Group]:
    """Yields the groups of one round, the oldest first, without the objects named in `leave`.

    A group is a run of small neighbours that together do not exceed the target. It has at most as
    many objects as one transaction can swap, so thousands of objects take several rounds, each of
    which merges the objects of the one before. Objects that were not read back yet, that have half
    the target or more, or whose names do not give their range are left alone. No group includes a
    hole. New objects are compressed if `compressed` is set. With `recode`, an object that is not
    as the new ones are is a group by itself, if it joins no other.
    """
    run = _Neighbours(bounds)

    def found() -> Iterator[Group]:
        objects = tuple(run.objects)
        if len(objects) > 1 or (objects and recode and _is_compressed(objects[0]) != compressed):
            yield Group(topic, record.epoch, objects, compressed)

    for each in descriptors:
        fits = each.object_id not in leave and _is_movable(each, record)
        small = 2 * each.logical_size < bounds.target_bytes
        if fits and small and run.takes(each):
            run.add(each)
            continue
        yield from found()
        run = _Neighbours(bounds)
        if fits:
            run.add(each)
        if not small:
            yield from found()
            run = _Neighbours(bounds)
    yield from found()


def _is_movable(each: ObjectDescriptor, record: TopicRecord) -> bool:
    name = parse_object(each.object_id)
    return (
        each.completed
        and each.unknown_form is None
        and each.next_offset <= record.verified
        and name is not None
        and (name.start, name.end) == (each.start_offset, each.end_offset)
    )


def _is_compressed(each: ObjectDescriptor) -> bool:
    return each.codec is not None


def _kept_bytes(each: ObjectDescriptor) -> int:
    """An upper bound: the name of the new object is at most twice as long as this one's."""
    return len(encode_kept(Kept(2 * each.object_id, each)))


# ---- on the driver ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Compaction:
    """One run, on the driver."""

    resources: StoreResources
    topics: list[TopicName]
    target_bytes: int | None
    """None: what the settings of each topic say."""
    budget: int | None
    compression: Literal["none", "zstd"] | None = None
    """What every object is to be; None: as the settings say, and only for new objects."""
    rows: list[CompactRow] = field(default_factory=list)
    rounds: int = 0
    left_groups: int = 0
    """Groups for which the budget was too small in the last round."""
    left_bytes: int = 0
    refused: Tally[TopicName] = field(default_factory=Tally)
    """Groups that somebody else changed before they were committed."""
    ledgers: Tally[TopicName] = field(default_factory=Tally)
    _failed: dict[TopicName, set[str]] = field(default_factory=dict)
    """Objects that this run does not try again."""
    _given_up: set[TopicName] = field(default_factory=set)

    def dry_run_report(self) -> CompactReport:
        """The report of a dry run: what the first round would do."""
        for group in self._round():
            self.rows.append(_row(group, str(group.name)))
        return self._report(dry_run=True)

    def until_done(self, waves: Waves[Rewrite, Rewritten]) -> CompactReport:
        """Runs rounds until there is nothing to do.

        It ends because each round leaves fewer objects, fewer groups to try, or fewer retries.
        """
        while groups := self._round():
            self.rounds += 1
            for wave in waves.cut(self._intended(groups), weight_max=_GROUPS_PER_WAVE):
                intents = [(job.group.topic, job.intent) for job in wave]
                grace_minutes = self.resources.settings.sweeper.grace_minutes
                with Renewal(self.resources.catalog, intents, grace_minutes):
                    for job, done in waves.run(wave):
                        self._settle(job, done)
        return self._report(dry_run=False)

    def _report(self, *, dry_run: bool) -> CompactReport:
        return CompactReport(
            tuple(self.rows),
            dry_run,
            self.rounds,
            self.refused.total(),
            self.left_groups,
            self.left_bytes,
            self.ledgers.total(),
        )

    # -- planning -------------------------------------------------------------------------------

    def _round(self) -> list[Group]:
        """The next groups, within the budget."""
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

    def _counting(
        self, topic: TopicName, descriptors: Iterable[ObjectDescriptor]
    ) -> Iterator[ObjectDescriptor]:
        """Yields the descriptors, and counts the ledgers, which are left alone."""
        self.ledgers[topic] = 0
        for each in descriptors:
            self.ledgers[topic] += each.is_ledger
            yield each

    def _groups(self, topic: TopicName) -> Iterator[Group]:
        record = self.resources.catalog.record(topic)
        if record is None:
            raise CommitRefused(f"{topic}: {self.resources.catalog.name} no longer has the topic")
        if is_restoring(record.log_id):
            begun, command = unfinished(record.log_id)
            raise CommitRefused(
                f"{topic}: {begun} is running or was interrupted: run `{command} {topic}` to its "
                "end first"
            )
        descriptors = self.resources.catalog.get_object_descriptors(topic)
        leave = self._failed.get(topic, set())
        resources, target = self.resources, self.target_bytes
        uploader = effective_settings(resources.catalog, topic, resources.settings).uploader
        if target is None and uploader.max_object_bytes is None:
            target = _TARGET_BYTES
        return plan_groups(
            topic,
            record,
            self._counting(topic, descriptors),
            Bounds(
                uploader.object_bytes_max if target is None else target,
                uploader.max_object_messages,
            ),
            leave,
            compressed=(self.compression or uploader.compression) != "none",
            recode=self.compression is not None,
        )

    # -- one wave -------------------------------------------------------------------------------

    def _intended(self, groups: Iterable[Group]) -> Iterator[Rewrite]:
        """Records an intent for each group, and yields what the tasks are to write."""
        for group in groups:
            try:
                intent = self.resources.catalog.intend(group.topic, group.epoch, group.name)
            except (CommitRefused, TopicFenced) as error:
                self._refuse(group, None, error, None)
            except ForebayError as error:
                self._fail(group, None, error, None)
            else:
                yield Rewrite(group, intent)

    def _settle(self, job: Rewrite, done: Done[Rewritten]) -> None:
        group, made = job.group, done.result
        object_id = job.intent.object_id
        try:
            if made is None:
                self._require_same(group)
                raise done.error or AssertionError("neither a result nor an error")
            BYTES.add(made.descriptor.size)
            self._require_proof(group, made)
            swap(
                self.resources.catalog,
                group.topic,
                job.intent,
                made.descriptor,
                group.objects,
                clock=self.resources.clock,
            )
        except CommitRefused as error:
            self._refuse(group, object_id, error, made)
            return
        except ForebayError as error:
            catalog, store = self.resources.catalog, self.resources.store
            set_aside(catalog, store, group.topic, job.intent, error)
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
            raw_bytes=made.descriptor.logical_size,
            sha256=made.after.sha256,
        )

    def _require_same(self, group: Group) -> None:
        """Raises CommitRefused if the catalog no longer has the objects of the group.

        An object that was deleted meanwhile cannot be read, and nothing is wrong.
        """
        name = group.name
        chain = self.resources.catalog.get_object_descriptors_range(
            group.topic, name.start, name.end + 1
        )
        if chain != list(group.objects):
            raise CommitRefused(f"{group.topic}: somebody else has changed the objects of {name}")

    def _require_proof(self, group: Group, made: Rewritten) -> None:
        """Raises CorruptLog if the new object differs from the small ones.

        The task has compared them too. The commit does not rely on that.
        """
        said = (group.name.start, group.name.end + 1, group.messages, group.size)
        proof = made.after
        read = (proof.start_offset, proof.next_offset, proof.messages, proof.size)
        if made.before != made.after or read != said:
            raise CorruptLog(
                f"{group.topic}: {made.descriptor.object_id} was read back, and differs from the "
                "objects that it should replace; they are unchanged"
            )

    def _refuse(
        self, group: Group, object_id: str | None, error: ForebayError, made: Rewritten | None
    ) -> None:
        """Counts a group that somebody else has changed; the next round plans it again."""
        self.refused[group.topic] += 1
        if self.refused[group.topic] > _REPLANS_MAX:
            self._fail(group, object_id, error, made)
            return
        OBJECTS.add(1, "refused")
        event(_log, logging.INFO, "a compaction is planned again", topic=group.topic, error=error)

    def _fail(
        self, group: Group, object_id: str | None, error: ForebayError, made: Rewritten | None
    ) -> None:
        OBJECTS.add(1, "failed")
        event(_log, logging.ERROR, "a compaction failed", topic=group.topic, error=error)
        self.rows.append(_row(group, object_id, made, str(error)))
        failed = self._failed.setdefault(group.topic, set())
        failed.update(each.object_id for each in group.objects)


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
        group.stored,
        made.descriptor.size if made is not None else None,
    )


def _row_of_topic(topic: TopicName, error: str) -> CompactRow:
    return CompactRow(str(topic), None, 0, 0, 0, 0, 0, None, None, error)


def _named(catalog: Catalog, topic: TopicName, object_id: str) -> ObjectDescriptor:
    for each in catalog.get_object_descriptors(topic):
        if each.object_id == object_id:
            return each
    raise UsageError(f"{topic}: {object_id!r} is not among its objects")


def _compacted(catalog: Catalog, topic: TopicName) -> Iterator[ObjectDescriptor]:
    """Yields the objects that replaced others, as long as some of these still exist."""
    by = {kept.by for kept in replaced_descriptors(catalog, topic, 0, OFFSET_MAX)}
    if by:
        yield from (each for each in catalog.get_object_descriptors(topic) if each.object_id in by)


def _undo(
    resources: StoreResources, topic: TopicName, compacted: ObjectDescriptor, dry_run: bool
) -> CompactRow:
    start, end = compacted.start_offset, compacted.next_offset
    kept = [
        each.descriptor
        for each in replaced_descriptors(resources.catalog, topic, start, end)
        if each.by == compacted.object_id
    ]
    error: str | None = None
    try:
        for each in kept:
            looks_same(resources.store, topic, each)
        if sum(each.count for each in kept) != compacted.count:
            left = "some objects that it replaced are deleted" if kept else "it replaced no others"
            raise CommitRefused(f"{topic}: {compacted.object_id} cannot be undone: {left}")
        if not dry_run:
            swap_back(resources.catalog, topic, compacted.object_id, clock=resources.clock)
            OBJECTS.add(1, "undone")
            event(
                _log,
                logging.INFO,
                "compaction undone",
                topic=topic,
                object=compacted.object_id,
                objects=len(kept),
            )
    except ForebayError as refused:
        error = str(refused)
    return CompactRow(
        str(topic),
        compacted.object_id,
        len(kept),
        compacted.start_offset,
        compacted.end_offset,
        compacted.count,
        compacted.logical_size,
        None,
        None,
        error,
        compacted.size,
        sum(each.size for each in kept),
    )


# ---- what a task does -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One object to write: the objects to merge, and the intent that allows to write it."""

    group: Group
    intent: Intent


@dataclass(frozen=True, slots=True)
class Proof:
    """A summary of what was read from some objects."""

    start_offset: int
    next_offset: int
    messages: int
    size: int
    content_hash: str
    """The hash of all frames with their headers, in the order of offsets."""
    highest_publish_time: int | None

    @property
    def sha256(self) -> str:
        return self.content_hash.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A complete object under its final key that is not committed yet."""

    descriptor: ObjectDescriptor
    before: Proof
    after: Proof


def rewrite(settings: StoreSettings, job: Rewrite) -> Rewritten:
    """Runs in a task: writes the object and reads it back. CorruptLog if anything differs.

    Raw frames are streamed, not decoded. Checks every checksum, that offsets are consecutive, and
    that each object begins, ends and is as long as its descriptor says, and has its hash. The
    new object is read back in the same way, and must have the same count, first and last offset,
    size and hash of its frames, and the index that was made for it. Nothing is committed here. A
    repeated task finds the same frames under its name.

    The new object gets the creation time of the newest one in it, so that remote retention by age
    does not keep it longer.
    """
    resources = executor_resources(settings)
    for each in job.group.objects:
        looks_same(resources.store, job.group.topic, each)
    with NewObject(
        resources.store, job.group.topic, job.intent.object_id, settings.uploader
    ) as made:
        builder = ObjectBuilder(made, made.level, new_index(resources.settings.uploader))
        before = _read(resources, job.group.topic, job.group.objects, builder)
        done = builder.finish(made)
    created_at = max(each.created_at for each in job.group.objects)
    name = job.intent.object_id
    start, following = before.start_offset, before.next_offset
    descriptor = describe(name, start, following, done, created_at * 1000)
    after = _read_back(resources, job.group.topic, descriptor)
    if after != before:
        raise CorruptLog(
            f"{resources.store.name}: {done.meta.key} was read back as {after}, but {before} was "
            "written; nothing was committed"
        )
    if settings.uploader.sidecars:
        put_sidecar(resources.store, job.group.topic, descriptor)
    return Rewritten(descriptor, before, after)


class _Chain:
    """A source of descriptors that has only the given ones."""

    def __init__(self, topic: TopicName, objects: tuple[ObjectDescriptor, ...]) -> None:
        self._topic = topic
        self._objects = objects

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        found = (
            each
            for each in self._objects
            if each.end_offset >= start and (end is None or each.start_offset < end)
        )
        return [each for each, _ in zip(found, range(limit), strict=False)]

    def missing(self, offset: int) -> ForebayError:
        return MissingData(f"{self._topic}: offset {offset} is in none of the objects to compact")


def _read(
    resources: StoreResources,
    topic: TopicName,
    objects: tuple[ObjectDescriptor, ...],
    builder: ObjectBuilder,
) -> Proof:
    """Reads all frames of the objects, and adds them to the builder. Memory is bounded.

    Raises ForeignObject if the content of an object does not have the hash of its descriptor.
    """
    reading = replace(resources.settings.cloud_reader, lenient=False)
    start, end = objects[0].start_offset, objects[-1].next_offset
    sources = _SourceHashes(resources.store.name, topic, objects)
    source = _Chain(topic, objects)
    with ObjectStream(
        topic, resources.store, source, resources.pool, reading, start, end
    ) as stream:
        while (frames := stream.next()) is not None:
            sources.add(frames)
            builder.add(frames)
            del frames  # frees their chunk before the next one is fetched
        following = stream.offset
    messages, size = builder.messages, builder.size
    said = (end, end - start, sum(each.logical_size for each in objects))
    if (following, messages, size) != said:
        raise CorruptLog(
            f"{topic}: the objects from {objects[0].object_id} to {objects[-1].object_id} hold "
            f"{messages} messages in {size} bytes up to offset {following}, but their descriptors "
            f"say {said[1]} in {said[2]} up to {end}"
        )
    times = builder.survey.highest_publish_time
    return Proof(start, following, messages, size, builder.content.value, times)


def _read_back(resources: StoreResources, topic: TopicName, descriptor: ObjectDescriptor) -> Proof:
    """Reads the new object whole. Raises CorruptLog if it is not what its descriptor says."""
    reader = resources.settings.cloud_reader
    seen = examine_object(resources.store, resources.pool, reader, topic, descriptor)
    if seen.fault is not None:
        raise seen.fault.error
    return Proof(
        descriptor.start_offset,
        descriptor.next_offset,
        seen.messages,
        seen.raw_bytes,
        str(seen.content_hash),
        seen.highest_publish_time,
    )


class _SourceHashes:
    """Compares the hash of each object as its frames pass. Frames never span two objects."""

    def __init__(self, store: str, topic: TopicName, objects: tuple[ObjectDescriptor, ...]) -> None:
        self._store = store
        self._topic = topic
        self._left = list(reversed(objects))
        self._content = ContentHash()

    def add(self, frames: Scan) -> None:
        source = self._left[-1]
        self._content.add(frames.raw)
        if frames.offsets[-1] < source.end_offset:
            return
        self._left.pop()
        said, found, self._content = source.content_hash, self._content.value, ContentHash()
        if said not in (None, found):
            key = object_key(self._topic, source.object_id)
            raise other_content(self._store, key, str(said), found)
