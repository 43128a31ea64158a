"""`sweep`: finds objects that no descriptor names, and removes them after a grace time.

It merges two sorted streams of names: the rows of keys in the catalog, and the listing of the
store. It then compares the committed objects with the descriptors, which finds missing objects too.
For this the names of one topic's committed objects are in memory.

Nothing is deleted before a compare-and-set has changed its row to `deleting`. From then on its
writer cannot commit it, the compaction that replaced it cannot be undone, and a new owner chooses
another name, however long the delete request takes. A sweep that finishes another process's
deletion first changes the row's token, and leaves the row as `gone`, because the other process's
delete request may still arrive.

An object is removed only if its messages are not needed, or are in committed objects that exist.
The catalog may be an older copy, whose rows say nothing about newer objects. So objects after the
tail are kept whatever their rows say.

Begin markers have no rows. The newest ones are kept, and those that tell where a log began or
where a topic was deleted.

Of a deleted topic, a sweep finishes the deletion, and removes what was written late: objects that
a stalled executor put after the deletion are found when they are older than the grace time.

Beware: the objects of a topic that is not in the catalog are not garbage. They are reported, and
kept for `restore`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from forebay.catalog.adopt import is_restoring
from forebay.catalog.catalog import Catalog
from forebay.catalog.records import (
    Deletion,
    Life,
    Range,
    State,
    TopicRecord,
    outside_holes,
)
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import (
    CommitRefused,
    FormatError,
    ObjectMissing,
    ServiceError,
    ServiceUnavailable,
)
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.names import (
    STAGING_PREFIX,
    MarkerName,
    ObjectName,
    TopicName,
    is_compressed,
    is_finished,
    is_ledger,
    object_files,
    object_key,
    objects_prefix,
    parse_object,
    parse_pending,
    sidecar,
)
from forebay.logs import event
from forebay.metrics import Counter
from forebay.objects.backend import Backend, ObjectMeta
from forebay.objects.markers import StoredMarker, in_order, read_marker
from forebay.upload.deletion import DeletedTopic, belongs_before, finish_deletion
from forebay.upload.inventory import Stored, span_of, topics_in_store, walk

# -- the decision -------------------------------------------------------------------------------
#
# The verdict on one name, by its row, its object and the topic's record:
#
# row            object       verdict
# committed      any          counts; later compared with its descriptor
# none           exists       orphan, unless a descriptor names it
# none, gone     sidecar only stray sidecar
# gone           exists       orphan of a late writer; the name is never used again
# intended       any          orphan or pending; kept while its writer may still commit it
# replaced       any          kept for readers with an old plan, and to undo the compaction
# deleting       any          a sweep or a retention run died here; finish the deletion
#
# An object is removed only if it is also older than the grace time, and if every offset in its name
# is before the start of the topic, in a hole, or in a committed object that exists. The verdict may
# be out of date when it is carried out, so the row is compared again before anything is deleted.


_log: Final = logging.getLogger("forebay.upload")


class Kind(StrEnum):
    ORPHAN = "orphan object"
    PENDING = "pending object"
    REPLACED = "replaced object"
    INTENT = "intent without an object"
    DELETING = "unfinished deletion"
    SIDECAR = "stray sidecar"
    UNKNOWN = "unknown file"
    MISSING = "missing object"
    """A descriptor names it, so messages are lost. A sweep never repairs this."""
    RESIZED = "object of another size than its descriptor says"
    UNNAMED = "committed object that no descriptor names"
    NEWER = "object newer than the catalog"
    """It is after the tail and has no row: the catalog is an older copy. It may be the only one."""
    MARKER = "superseded begin marker"
    DELETED = "object of a deleted topic"
    UNFINISHED = "topic whose deletion was not finished"
    ROWS = "rows of a deleted topic"
    UNRESTORED = "objects of a topic unknown to the catalog"
    TOPIC = "topic that could not be swept"


ALARMS: Final = frozenset({Kind.MISSING, Kind.RESIZED, Kind.UNNAMED, Kind.NEWER, Kind.TOPIC})
"""The kinds that an operator must look at. Anything that failed is another."""

NAMED_BY_NONE: Final = "no descriptor names it"
TOO_YOUNG: Final = "it is younger than the grace time"
_UNREADABLE: Final = (
    "its index object does not say which messages it holds: put the right one back, or delete both"
)
"""Of a ledger without a row: an older catalog has none of newer ledgers, whatever their index."""


class Chain(Protocol):
    """The committed objects. It is asked only if the row alone does not decide."""

    def span(self, stored: Stored, life: Life | None) -> Range | None:
        """Returns the offsets of a finished object. Those of a ledger may be in its index object.

        None for others, and for a ledger whose index object is missing, because it was never
        complete, or does not say them.
        """

    def names(self, object_id: str) -> bool:
        """Whether a descriptor names this object."""

    def joins(self, name: ObjectName) -> bool:
        """Whether the range is that of objects in the chain, as a compaction's would be.

        That is several adjacent ones, or one that is compressed and was not before, or the reverse.
        """

    def holds(self, ranges: list[Range]) -> bool:
        """Whether committed objects that exist hold all offsets of the ranges."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that apply to all names of one topic."""

    record: TopicRecord
    owned: bool
    """Whether a living process owns the topic."""
    now_ms: int
    grace_ms: float


class Verdict(NamedTuple):
    kind: Kind
    age_ms: int
    remove: bool
    reason: str


def judge(life: Life | None, stored: Stored, situation: Situation, chain: Chain) -> Verdict | None:
    """Decides about one name; None for objects that count, and for rows that are `gone`."""
    verdict = _judge(life, stored, situation, chain)
    if verdict is None or stored.object is None:
        return verdict
    span = chain.span(stored, life)
    if span is None:
        unknown = life is None and stored.index is not None
        return verdict._replace(remove=False, reason=_UNREADABLE) if unknown else verdict
    if span[1] > situation.record.tail:
        return _after_tail(verdict, life)
    needed = [(max(span[0], situation.record.start_offset), span[1])]
    given_up = situation.record
    if life is None or life.state is not State.GONE:  # a restore found a gone one damaged
        given_up = TopicRecord(accepted=given_up.accepted)
    needed = outside_holes(given_up, [each for each in needed if each[0] < each[1]])
    if verdict.remove and needed and not chain.holds(needed):
        return verdict._replace(remove=False, reason="no other object holds its messages")
    return verdict


def _after_tail(verdict: Verdict, life: Life | None) -> Verdict:
    if life is None:
        reason = "the catalog is an older copy: run `forebay restore`"
        return verdict._replace(kind=Kind.NEWER, remove=False, reason=reason)
    if not verdict.remove:
        return verdict
    return verdict._replace(remove=False, reason="its messages may be in no other object yet")


def _judge(life: Life | None, stored: Stored, situation: Situation, chain: Chain) -> Verdict | None:
    state = life.state if life is not None else None
    if life is None or state is State.GONE:
        return _without_row(stored, situation, chain)
    if state is State.COMMITTED:
        return None
    age_ms = situation.now_ms - life.updated_ms
    if state is State.REPLACED:
        return _aged(Kind.REPLACED, age_ms, situation, "a compaction replaced it")
    if state is State.DELETING:
        return _aged(Kind.DELETING, age_ms, situation, "its deletion was not finished")
    return _intended(life, stored, situation, chain)


def _without_row(stored: Stored, situation: Situation, chain: Chain) -> Verdict | None:
    meta = stored.object or stored.index or stored.sidecar
    if meta is None or (stored.object is not None and chain.names(stored.object_id)):
        return None
    age_ms = situation.now_ms - meta.modified_ms
    if stored.object is None:
        return _aged(Kind.SIDECAR, age_ms, situation, "its object does not exist")
    return _aged(_object_kind(stored), age_ms, situation, NAMED_BY_NONE)


def _intended(life: Life, stored: Stored, situation: Situation, chain: Chain) -> Verdict:
    """Age alone does not decide: a writer may stall for longer than any grace time."""
    since_ms = life.updated_ms
    kind = Kind.INTENT
    if stored.object is not None:
        kind = _object_kind(stored)
        since_ms = max(since_ms, stored.object.modified_ms)
    verdict = _aged(kind, situation.now_ms - since_ms, situation, NAMED_BY_NONE)
    if not verdict.remove or not situation.owned or life.epoch < situation.record.epoch:
        return verdict
    name = parse_object(stored.object_id)
    start = life.span[0] if life.span is not None else parse_pending(stored.object_id)
    start = name.start if name is not None else start
    if start is None or start >= situation.record.tail:
        return verdict._replace(remove=False, reason="the topic's owner may still commit it")
    if name is not None and chain.joins(name):
        return verdict._replace(remove=False, reason="a compaction may still commit it")
    return verdict


def _object_kind(stored: Stored) -> Kind:
    if is_ledger(stored.object_id):
        return Kind.PENDING if stored.index is None else Kind.ORPHAN
    return Kind.PENDING if parse_object(stored.object_id) is None else Kind.ORPHAN


def _aged(kind: Kind, age_ms: int, situation: Situation, reason: str) -> Verdict:
    age_ms = max(age_ms, 0)  # a time in the future counts as now: a clock was wrong
    old = age_ms >= situation.grace_ms
    return Verdict(kind, age_ms, old, reason if old else TOO_YOUNG)


# -- carrying it out ----------------------------------------------------------------------------

REMOVED: Final = Counter(
    "forebay_sweep_removed_total", "Keys that sweeps removed, by kind.", ["kind"]
)
ERRORS: Final = Counter(
    "forebay_sweep_errors_total",
    "Keys that sweeps failed to remove or found missing or inconsistent, by kind.",
    ["kind"],
)
ITEMS_MAX: Final = 10_000
"""The limit of a report's items. The rest is only counted, and passed to `progress`."""

STAGED_HOURS: Final = 7 * 24
"""Staged rows that are older are abandoned: no job uses them any more."""

_ERRORS_LOGGED_MAX: Final = 100
"""The errors of one sweep that are logged; all of them are counted and reported."""
_MARKERS_KEPT: Final = 2
_ATTEMPT_MS: Final = 24 * 3_600_000
"""No task writes for so long."""
_EXPECTED: Final = (ServiceError, FormatError, CommitRefused)


class Action(StrEnum):
    REMOVED = "removed"
    WOULD_REMOVE = "would be removed"
    KEPT = "kept"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SweepItem:
    topic: TopicName
    kind: Kind
    key: str
    bytes: int
    age_ms: int | None
    action: Action
    reason: str


@dataclass(slots=True)
class SweepReport:
    dry_run: bool
    topics: int = 0
    committed: int = 0
    committed_bytes: int = 0
    items: list[SweepItem] = field(default_factory=list)
    counts: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    bytes: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    errors: int = 0
    """The number of items that failed, or that are missing or inconsistent."""

    @property
    def items_left_out(self) -> int:
        return sum(self.counts.values()) - len(self.items)

    def add(self, item: SweepItem) -> None:
        self.counts[item.action] += 1
        self.bytes[item.action] += item.bytes
        if len(self.items) < ITEMS_MAX:
            self.items.append(item)
        if item.action is Action.FAILED or item.kind in ALARMS:
            self.errors += 1


def sweep(
    catalog: Catalog,
    store: Backend,
    topics: Iterable[TopicName] | None = None,
    *,
    grace_minutes: float,
    dry_run: bool,
    clock: Clock = SYSTEM_CLOCK,
    progress: Callable[[SweepItem], None] | None = None,
    check: Callable[[], None] = lambda: None,
    through_outages: bool = True,
) -> SweepReport:
    """Sweeps the topics once; by default all topics in the catalog or the store.

    Errors of one key or one topic are in the report, and the sweep goes on; without
    `through_outages` it raises ServiceUnavailable instead. `progress` gets every item. `check` is
    called for every name, and may raise to end the sweep.
    """
    report = SweepReport(dry_run)

    def tell(item: SweepItem) -> None:
        report.add(item)
        if item.action is Action.FAILED or item.kind in ALARMS:
            ERRORS.add(1, item.kind)
            if report.errors <= _ERRORS_LOGGED_MAX:
                _log_item(logging.ERROR, item.kind, item)
        elif item.action is Action.REMOVED:
            REMOVED.add(1, item.kind)
            _log_item(logging.INFO, "swept", item)
        if progress is not None:
            progress(item)

    for topic in topics if topics is not None else _all_topics(catalog, store):
        report.topics += 1
        swept = _TopicSweep(catalog, store, topic, grace_minutes * 60_000, dry_run, clock)
        swept.check, swept.through_outages = check, through_outages
        try:
            swept.run(report, tell)
        except _EXPECTED as error:
            swept.give_up_in_outage(error)
            key = objects_prefix(topic)
            tell(SweepItem(topic, Kind.TOPIC, key, 0, None, Action.FAILED, str(error)))
    return report


def _log_item(level: int, text: str, item: SweepItem) -> None:
    event(_log, level, text, topic=item.topic, key=item.key, kind=item.kind, reason=item.reason)


def _all_topics(catalog: Catalog, store: Backend) -> Iterator[TopicName]:
    yield from catalog.topics(deleted=True)
    for topic in topics_in_store(store):
        if catalog.find(topic) is None:
            yield topic


class _TopicSweep:
    """The sweep of one topic."""

    def __init__(
        self,
        catalog: Catalog,
        store: Backend,
        topic: TopicName,
        grace_ms: float,
        dry_run: bool,
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._topic = topic
        self._grace_ms = grace_ms
        self._dry_run = dry_run
        self._clock = clock
        self._counting: dict[str, int | None] = {}
        """The committed objects, with their listed sizes; None if an object is not listed."""
        self._existing: dict[str, int | None] = {}
        """The sizes of committed objects that were looked at; None if an object is missing."""
        self._spans: dict[str, Range | None] = {}
        """The offsets of ledgers that were asked for."""
        self._chained: set[str] | None = None
        self.check: Callable[[], None] = lambda: None
        self.through_outages = True

    def give_up_in_outage(self, error: Exception) -> None:
        """Raises the error if it ends the whole sweep: every further request would fail too."""
        if isinstance(error, ServiceUnavailable) and not self.through_outages:
            raise error

    def run(self, report: SweepReport, tell: Callable[[SweepItem], None]) -> None:
        record = self._catalog.find(self._topic)
        if record is not None and record.is_deleted:
            for late in self._sweep_deleted(record):
                tell(late)
            return
        if record is None or is_restoring(record.log_id):
            self._leave_alone(record, tell)
            return
        situation = Situation(
            record,
            self._catalog.owner(self._topic) is not None,
            self._clock.now_ms(),
            self._grace_ms,
        )
        markers: list[StoredMarker] = []
        for life, found in self._names():
            self.check()
            if isinstance(found, StoredMarker):
                markers.append(found)
                continue
            if isinstance(found, ObjectMeta):
                age_ms = situation.now_ms - found.modified_ms
                reason = "its name is not an object's"
                tell(self._item(Kind.UNKNOWN, found.key, found.size, age_ms, Action.KEPT, reason))
                continue
            item = self._settle(life, found, situation)
            if item is not None:
                tell(item)
        for item in self._compare_descriptors(report):
            tell(item)
        for item in self._superseded(in_order(markers), situation):
            tell(item)

    def _leave_alone(self, record: TopicRecord | None, tell: Callable[[SweepItem], None]) -> None:
        sizes = [meta.size for meta in self._store.list(objects_prefix(self._topic))]
        if not sizes:
            return
        why = (
            "unknown to the catalog: restore first"
            if record is None
            else "a restore is running or was interrupted: restore again first"
        )
        reason = f"{why} ({len(sizes)} keys)"
        key = objects_prefix(self._topic)
        tell(self._item(Kind.UNRESTORED, key, sum(sizes), None, Action.KEPT, reason))

    # -- deleted topics -------------------------------------------------------------------------

    def _sweep_deleted(self, record: TopicRecord) -> Iterator[SweepItem]:
        """Finishes a deletion, and removes what was written late by those who used the topic."""
        key, now_ms = objects_prefix(self._topic), self._clock.now_ms()
        if record.deletion is Deletion.DELETING:
            action, reason = Action.WOULD_REMOVE, "it was interrupted"
            if not self._dry_run:
                finish_deletion(self._catalog, self._store, self._topic, self.check)
                action = Action.REMOVED
            yield self._item(Kind.UNFINISHED, key, 0, None, action, reason)
            return
        left = DeletedTopic(str(self._topic), record.tail)
        if not self._dry_run:
            left = finish_deletion(self._catalog, self._store, self._topic, self.check) or left
        if left.rows:
            reason = f"{left.rows} rows were written after the deletion"
            yield self._item(Kind.ROWS, key, 0, None, Action.REMOVED, reason)
        kept = MarkerName(record.begin, record.begin_attempt)
        for found in walk(self._store, self._topic):
            self.check()
            item = self._settle_late(found, record, kept, now_ms)
            if item is not None:
                yield item

    def _settle_late(
        self,
        found: Stored | StoredMarker | ObjectMeta,
        record: TopicRecord,
        kept: MarkerName,
        now_ms: int,
    ) -> SweepItem | None:
        metas = _metas(found)
        age_ms = max(now_ms - max(each.modified_ms for each in metas), 0)
        size, key = sum(each.size for each in metas), metas[0].key
        if isinstance(found, ObjectMeta):
            reason = "its name is not an object's"
            return self._item(Kind.UNKNOWN, key, size, age_ms, Action.KEPT, reason)
        if isinstance(found, StoredMarker):
            if found.name == kept:
                return None
            content = None if found.name < kept else read_marker(self._store, found)
            late = content is not None and content.epoch <= record.epoch
            kind, ours = Kind.MARKER, found.name < kept or late
        else:
            kind = Kind.DELETED
            ours = belongs_before(self._store, found, record.tail)
            if not ours and is_ledger(found.object_id):
                ours = self.span(found, None) is None  # it was never complete
        if not ours:
            reason = "the catalog is an older copy: run `forebay restore`"
            return self._item(Kind.NEWER, key, size, age_ms, Action.KEPT, reason)
        if age_ms < self._grace_ms:
            return self._item(kind, key, size, age_ms, Action.KEPT, TOO_YOUNG)
        action, reason = Action.WOULD_REMOVE, "the topic was deleted"
        if not self._dry_run:
            try:
                for each in metas:
                    self._store.delete_object(each.key)
                action = Action.REMOVED
            except ServiceError as error:
                self.give_up_in_outage(error)
                action, reason = Action.FAILED, str(error)
        return self._item(kind, key, size, age_ms, action, reason)

    # -- rows and listing, merged ---------------------------------------------------------------

    def _names(self) -> Iterator[tuple[Life | None, Stored | StoredMarker | ObjectMeta]]:
        """Yields every name that has a row or is in the listing, with both."""
        rows = iter(self._catalog.lives(self._topic))
        row = next(rows, None)
        for found in walk(self._store, self._topic):
            if isinstance(found, StoredMarker | ObjectMeta):
                yield None, found
                continue
            while row is not None and row[0] < found.object_id:
                yield row[1], Stored(row[0], None, None)
                row = next(rows, None)
            if row is not None and row[0] == found.object_id:
                yield row[1], found
                row = next(rows, None)
            else:
                yield None, found
        while row is not None:
            yield row[1], Stored(row[0], None, None)
            row = next(rows, None)

    def _settle(self, life: Life | None, stored: Stored, situation: Situation) -> SweepItem | None:
        size = sum(meta.size for meta in stored.files)
        key = object_key(self._topic, stored.object_id)
        if stored.object is None and stored.files:
            key = stored.files[0].key
        kind, age_ms = Kind.ORPHAN, None
        if life is not None and not stored.files:
            self._forget_attempt(life, stored.object_id, situation)
        try:
            verdict = judge(life, stored, situation, self)
            if verdict is not None and verdict.kind is Kind.NEWER:
                life, verdict = self._judge_again(stored, situation)
            if verdict is None:
                self._count(life, stored)
                return None
            kind, age_ms = verdict.kind, verdict.age_ms
            action, reason = self._carry_out(verdict, life, stored)
        except _EXPECTED as error:
            self.give_up_in_outage(error)
            action, reason = Action.FAILED, str(error)
        return self._item(kind, key, size, age_ms, action, reason)

    def _forget_attempt(self, life: Life, object_id: str, situation: Situation) -> None:
        """Removes the row of a ledger's attempt that is gone: no other attempt has its name."""
        gone = life.state is State.GONE and is_ledger(object_id)
        old = situation.now_ms - life.updated_ms >= max(situation.grace_ms, _ATTEMPT_MS)
        if gone and old and not self._dry_run:
            self._catalog.forget_gone(self._topic, object_id, life)

    def _judge_again(
        self, stored: Stored, situation: Situation
    ) -> tuple[Life | None, Verdict | None]:
        """Judges an object that may have been written after its row and the record were read.

        Its row is older than the object, so it is there now unless the catalog is an older copy.
        """
        life = self._catalog.life(self._topic, stored.object_id)
        record = self._catalog.find(self._topic) or situation.record
        verdict = judge(life, stored, replace(situation, record=record), self)
        if verdict is not None and verdict.kind is Kind.NEWER:
            try:
                self._store.head(object_key(self._topic, stored.object_id))
            except ObjectMissing:
                return life, None
        return life, verdict

    def _count(self, life: Life | None, stored: Stored) -> None:
        if life is None or life.state is State.COMMITTED:
            self._counting[stored.object_id] = stored.object.size if stored.object else None

    def _carry_out(self, verdict: Verdict, life: Life | None, stored: Stored) -> tuple[Action, str]:
        if not verdict.remove:
            return Action.KEPT, verdict.reason
        if self._dry_run:
            return Action.WOULD_REMOVE, verdict.reason
        object_id = stored.object_id
        gone = life is not None and life.state is State.GONE
        span = self.span(stored, life) if life is None and stored.files else None
        token = None if gone else self._catalog.condemn(self._topic, object_id, life, span)
        if token is None and not gone:
            return Action.KEPT, "it changed meanwhile"
        if stored.sidecar is not None or is_finished(object_id):
            self._store.delete_object(object_key(self._topic, sidecar(object_id)))
        for name in object_files(object_id):
            self._store.delete_object(object_key(self._topic, name))
        if token is not None:
            own = life is None or life.state is not State.DELETING
            self._catalog.bury(self._topic, object_id, token, certain=own)
        return Action.REMOVED, verdict.reason

    # -- the protocol `Chain` -------------------------------------------------------------------

    def span(self, stored: Stored, life: Life | None) -> Range | None:
        if stored.object_id not in self._spans:
            self._spans[stored.object_id] = span_of(self._store, stored, life)
        return self._spans[stored.object_id]

    def names(self, object_id: str) -> bool:
        if is_ledger(object_id):
            return object_id in self._ledgers()
        name = parse_object(object_id)
        return name is not None and self._named(name.start, object_id) is not None

    def _ledgers(self) -> set[str]:
        """Returns the ledgers of the chain, whose names do not say where they are in it."""
        if self._chained is None:
            chain = self._catalog.get_object_descriptors(self._topic, decoder=decode_outline)
            self._chained = {each.object_id for each in chain if each.is_ledger}
        return self._chained

    def joins(self, name: ObjectName) -> bool:
        first = self._catalog.get_object_descriptors_range(
            self._topic, name.start, name.start + 1, 1
        )
        last = self._catalog.get_object_descriptors_range(self._topic, name.end, name.end + 1, 1)
        return (
            bool(first and last)
            and first[0].start_offset == name.start
            and last[0].end_offset == name.end
            and (first != last or is_compressed(first[0].object_id) != name.compressed)
        )

    def holds(self, ranges: list[Range]) -> bool:
        for start, end in ranges:
            position = start
            while position < end:
                page = self._catalog.get_object_descriptors_range(self._topic, position, end)
                for each in page:
                    if each.start_offset > position or not self._exists(each):
                        return False
                    position = each.next_offset
                if not page:
                    return False
        return True

    def _exists(self, descriptor: ObjectDescriptor) -> bool:
        object_id = descriptor.object_id
        if object_id not in self._existing:
            try:
                size: int | None = self._store.head(object_key(self._topic, object_id)).size
            except ObjectMissing:
                size = None
            self._existing[object_id] = size
        return self._existing[object_id] == descriptor.size

    def _named(self, start: int, object_id: str) -> ObjectDescriptor | None:
        found = self._catalog.get_object_descriptors_range(self._topic, start, start + 1, 1)
        return found[0] if found and found[0].object_id == object_id else None

    # -- begin markers --------------------------------------------------------------------------

    def _superseded(self, markers: list[StoredMarker], situation: Situation) -> Iterator[SweepItem]:
        """Removes old markers. Keeps the two newest, the first of the newest log, and all that are
        at the end of a hole: with them a restore knows that a log began there."""
        old = [
            each
            for each in markers[:-_MARKERS_KEPT]
            if situation.now_ms - each.meta.modified_ms >= self._grace_ms
        ]
        newest = read_marker(self._store, markers[-1]) if old else None
        if newest is None:
            return
        needed = {newest.begin, *(end for _, end in situation.record.holes)}
        deletion = self._last_deletion(old)
        for each in old:
            if each.name == deletion:
                continue
            if each.name.offset in needed:
                needed.discard(each.name.offset)  # the first one at this offset is enough
                continue
            meta, reason = each.meta, "the log was opened again since"
            action = Action.WOULD_REMOVE
            if not self._dry_run:
                try:
                    self._store.delete_object(meta.key)
                    action = Action.REMOVED
                except ServiceError as error:
                    self.give_up_in_outage(error)
                    action, reason = Action.FAILED, str(error)
            age_ms = situation.now_ms - meta.modified_ms
            yield self._item(Kind.MARKER, meta.key, meta.size, age_ms, action, reason)

    def _last_deletion(self, markers: list[StoredMarker]) -> MarkerName | None:
        """Returns the marker of the last deletion of a topic of this name, which is kept: with it
        a restore knows which objects in the store do not count."""
        for each in reversed(markers):
            content = read_marker(self._store, each)
            if content is not None and content.deleted:
                return each.name
        return None

    # -- descriptors without objects ------------------------------------------------------------

    def _compare_descriptors(self, report: SweepReport) -> Iterator[SweepItem]:
        """Checks each alarm a second time before reporting it: the chain may have changed."""
        for descriptor in self._catalog.get_object_descriptors(self._topic):
            self.check()
            size = self._counting.pop(descriptor.object_id, None)
            if size != descriptor.size:
                item = self._alarm(descriptor)
                if item is not None:
                    yield item
                    continue
            report.committed += 1
            report.committed_bytes += descriptor.size
        for object_id, size in self._counting.items():
            life = self._catalog.life(self._topic, object_id)
            if life is not None and life.state is State.COMMITTED and not self.names(object_id):
                key = object_key(self._topic, object_id)
                reason = "the catalog contradicts itself; nothing was changed"
                yield self._item(Kind.UNNAMED, key, size or 0, None, Action.KEPT, reason)

    def _alarm(self, descriptor: ObjectDescriptor) -> SweepItem | None:
        key = object_key(self._topic, descriptor.object_id)
        age_ms = self._clock.now_ms() - descriptor.created_at * 1000
        try:
            size = self._store.head(key).size
        except ObjectMissing:
            if self._named(descriptor.start_offset, descriptor.object_id) is None:
                return None
            reason = f"offsets {descriptor.start_offset} to {descriptor.end_offset} are lost"
            return self._item(Kind.MISSING, key, descriptor.size, age_ms, Action.KEPT, reason)
        except ServiceError as error:
            self.give_up_in_outage(error)
            return self._item(Kind.MISSING, key, 0, age_ms, Action.FAILED, str(error))
        if size == descriptor.size:
            return None
        reason = f"it has {size} bytes, but its descriptor says {descriptor.size}"
        return self._item(Kind.RESIZED, key, size, age_ms, Action.KEPT, reason)

    def _item(
        self, kind: Kind, key: str, size: int, age_ms: int | None, action: Action, reason: str
    ) -> SweepItem:
        return SweepItem(self._topic, kind, key, size, age_ms, action, reason)


# -- staged rows --------------------------------------------------------------------------------


def _metas(found: Stored | StoredMarker | ObjectMeta) -> list[ObjectMeta]:
    """The files of one name, in the order to delete them in."""
    if isinstance(found, ObjectMeta):
        return [found]
    if isinstance(found, StoredMarker):
        return [found.meta]
    return found.files


def sweep_staging(
    store: Backend,
    *,
    age_hours: float = STAGED_HOURS,
    clock: Clock = SYSTEM_CLOCK,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Deletes files of staged rows that are older than `age_hours`; returns how many.

    They are left by writes from Spark that were abandoned. `check` is called for every file, and
    may raise to end the sweep.
    """
    oldest_ms = clock.now_ms() - int(age_hours * 3_600_000)
    found = [meta.key for meta in store.list(STAGING_PREFIX) if meta.modified_ms < oldest_ms]
    # Manifests first: the files that a manifest names must exist.
    for key in sorted(found, key=lambda key: not key.endswith("manifest.json")):
        check()
        store.delete_object(key)
        REMOVED.add(1, "staged rows")
    if found:
        event(_log, logging.WARNING, "abandoned staged files deleted", files=len(found))
    return len(found)
