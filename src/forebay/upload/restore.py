"""`restore_topic`: rebuilds a topic's chain, and how far offsets may be in use, from the store.

The names of the objects give their ranges of offsets. A sidecar gives the rest of the descriptor if
it agrees with the name and the listing. Otherwise the object is read, frame by frame, and its index
is built again. The restore owns the topic while it changes the chain, so nothing else appends. A
restore that is interrupted continues where it stopped.

A catalog that knows the topic is brought up to date. Descriptors whose objects are in the store are
kept as far as they follow each other. From the first offset on where they do not, the chain is made
anew. Objects after the tail are added. If the store shows that the catalog is an older copy, the
record takes the log and the nonce of the newest begin marker.

The next offset (rule R9): after the last object or begin marker, at M, a log may have assigned up
to `limits.LOG_DISTANCE` offsets. So the next log begins at M + LOG_DISTANCE, unless the newest log
is still there. `assume_nothing_lost` and `next_offset` say otherwise.

A topic that was deleted stays deleted, even if only a marker in the store shows the deletion.
Objects before that marker are not adopted, and if a topic of the name was created since, its chain
begins after them.

Beware: offsets that no object holds are refused. With `allow_gaps` they are recorded as lost, or as
unknown if a log began right after them. Damaged objects that were left out keep their names: their
keys are marked as gone, and a sweep removes them after the grace time. Copy them elsewhere before,
if anything in them is worth saving.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.catalog.adopt import (
    adopt,
    extended,
    is_importing,
    is_restoring,
    remove_rows,
    restored,
    restoring,
    rows,
)
from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.chain import Write, pointer
from forebay.catalog.job_state import ORIGIN_NAME
from forebay.catalog.kv import ABSENT, Compare, Put, Remove
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import (
    Deletion,
    Life,
    State,
    TopicRecord,
    decode_record,
    encode_record,
    may_become,
    outside_holes,
    skip_holes,
)
from forebay.errors import (
    CommitRefused,
    CorruptLog,
    DescriptorError,
    MissingData,
    ServiceError,
    TopicFenced,
    UsageError,
)
from forebay.format.danube import segments_prefix
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import MarkerName, TopicName, objects_prefix, parse_ledger
from forebay.limits import LOG_DISTANCE, OFFSET_MAX
from forebay.logs import event
from forebay.objects.backend import Backend
from forebay.objects.markers import read_marker
from forebay.upload.deletion import adopt_deletion, deleted_record, finish_deletion
from forebay.upload.inventory import (
    Candidate,
    Chain,
    Describe,
    Inventory,
    Range,
    Reading,
    choose_chain,
    describe,
    take_stock,
)
from forebay.wal.identity import LocalLog

_log: Final = logging.getLogger("forebay.upload")
_RANGES_SHOWN: Final = 20
_CONDEMNED: Final = frozenset({State.DELETING, State.GONE})


@dataclass(slots=True)
class RestoreReport:
    """The findings and actions of a restore. After a dry run, the actions it would take."""

    topic: TopicName
    dry_run: bool
    objects_found: int = 0
    known: int = 0
    """Objects that were already in the catalog."""
    adopted: int = 0
    messages: int = 0
    """Messages in the adopted objects."""
    by_sidecar: int = 0
    read_whole: int = 0
    bytes_read: int = 0
    gaps: list[Range] = field(default_factory=list)
    """Ranges of offsets, ends not included, that no object holds."""
    superseded: list[str] = field(default_factory=list)
    """Objects that the chain does not need, because others hold the same messages."""
    damaged: list[str] = field(default_factory=list)
    pending: int = 0
    unknown_files: int = 0
    markers: int = 0
    removed: int = 0
    """Descriptors of objects that are not in the store, or not in the chain any more."""
    older: str | None = None
    """Why the catalog is an older copy; None if nothing shows that."""
    start_offset: int = 0
    tail: int = 0
    assigned: int = 0
    """Offsets before this one were assigned for certain."""
    next_offset: int = 0
    """The next offset to be assigned, if the local log is gone."""
    assumed_in_vain: bool = False
    """`assume_nothing_lost` had no effect: offsets after the tail were already reserved, for
    example by an earlier restore."""
    accepted: bool = False
    """The operator accepted all that is lost or unknown."""
    deleted: bool = False
    """The topic was deleted, and stays so: what was left of it was removed."""
    dead: int = 0
    """Objects of a deleted topic of this name, which are not adopted."""

    @property
    def lost(self) -> Range | None:
        """The range that is lost if the newest log does not come back; else None."""
        return (self.tail, self.assigned) if self.assigned > self.tail else None

    @property
    def unknown(self) -> Range | None:
        """The range that may never have been used, if the newest log does not come back."""
        first = max(self.tail, self.assigned)
        return (first, self.next_offset) if self.next_offset > first else None


@dataclass(frozen=True, slots=True)
class RestoreChoices:
    """The operator's choices."""

    dry_run: bool = False
    """Change nothing."""
    verify: bool = False
    """Read every object completely and record them as verified; else the uploader does it later."""
    allow_gaps: bool = False
    """Record offsets that no object holds as lost or unknown."""
    assume_nothing_lost: bool = False
    """No offset after the last object or begin marker was assigned."""
    next_offset: int | None = None
    """The next offset, if the newest log is gone."""
    accept_loss: bool = False
    """Readers are to jump over everything that is lost or unknown."""


def restore_topic(
    catalog: Catalog,
    store: Backend,
    session: Session,
    topic: TopicName,
    choices: RestoreChoices,
    *,
    local: LocalLog | None = None,
    progress: Callable[[int, int], None] | None = None,
    stock: Inventory | None = None,
    describe: Describe = describe,
) -> RestoreReport:
    """Rebuilds the topic's chain and returns a report.

    `local` is the log in the topic's directory, if there is one. `progress` gets the number of
    objects done and of all objects. `stock` is the listing, if the caller already has it.
    `describe` may return descriptors that were made before.

    Raises MissingData if there are no objects or no object holds some offsets, CorruptLog if an
    object is damaged and no other holds its offsets, CommitRefused if that is an object in the
    catalog, UsageError for a next offset that cannot be right or for objects of a later Danube, and
    TopicOwned while a living process owns the topic. Objects that were adopted before an error stay
    adopted, and a second run continues after them.
    """
    stock = stock if stock is not None else take_stock(store, topic)
    if not choices.dry_run:
        _finish_deleted(catalog, store, topic, stock)
    record = _recorded(catalog, topic, stock)
    if record is not None and record.is_deleted and not stock.continued:
        return _left_deleted(topic, record, stock, choices)
    run = _Restore(catalog, store, session, topic, stock, choices, local, describe, record)
    return run(progress or (lambda _done, _all: None))


def _finish_deleted(catalog: Catalog, store: Backend, topic: TopicName, stock: Inventory) -> None:
    """Finishes a deletion that the catalog or a marker in the store shows."""
    record = catalog.find(topic)
    if stock.deletion is not None and _is_unknown(stock.deletion, record):
        record = adopt_deletion(catalog, topic, stock.deletion, stock.deletion_epoch)
    if record is not None and record.deletion is Deletion.DELETING:
        finish_deletion(catalog, store, topic)


def _recorded(catalog: Catalog, topic: TopicName, stock: Inventory) -> TopicRecord | None:
    """Returns the topic's record, as it is once a deletion that the store shows is finished."""
    record = catalog.find(topic)
    if stock.deletion is None or not _is_unknown(stock.deletion, record):
        return record
    base = record or TopicRecord()
    epoch = max(base.epoch, stock.deletion_epoch)
    return deleted_record(base, stock.deletion.offset, epoch)


def _is_unknown(deletion: MarkerName, record: TopicRecord | None) -> bool:
    """Whether the record does not know of the deletion. A later topic begins after it."""
    return record is None or (not record.is_deleted and record.start_offset < deletion.offset)


def _left_deleted(
    topic: TopicName, record: TopicRecord, stock: Inventory, choices: RestoreChoices
) -> RestoreReport:
    at = record.tail
    return RestoreReport(
        topic,
        choices.dry_run,
        objects_found=stock.dead,
        markers=len(stock.markers),
        start_offset=at,
        tail=at,
        assigned=at,
        next_offset=at,
        deleted=True,
        dead=stock.dead,
    )


def to_be_described(
    catalog: Catalog, topic: TopicName, stock: Inventory, *, verify: bool
) -> Iterator[Candidate]:
    """Yields the objects that a restore would describe, in its order, if none is damaged."""
    record = _recorded(catalog, topic, stock)
    if record is not None and record.is_deleted and not stock.continued:
        return
    known = _survey(catalog, topic, stock, record)
    if verify:
        yield from known.objects
    for range_ in known.choose(stock)[1].ranges:
        first = known.usable.get(range_, stock.ranges[range_])[0]
        if verify or first.object_id not in known.rows:
            yield first


# -- what the catalog knows ---------------------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """What the catalog knows of a topic, compared with the listing."""

    record: TopicRecord | None
    states: dict[str, State]
    """The rows of the topic's keys."""
    usable: dict[Range, list[Candidate]]
    """The objects in the store, without those that are being deleted."""
    rows: dict[str, int] = field(default_factory=dict)
    """The objects with a descriptor that are in the store, and where they begin."""
    end: int = 0
    """One more than the highest offset in any descriptor."""
    last_kept: int | None = None
    """Where the last descriptor begins that is kept without a change."""
    objects: list[Candidate] = field(default_factory=list)
    """The objects of kept descriptors."""
    kept: int = 0
    first: int = 0
    """Where the chain begins."""
    begin: int = 0
    """Where the kept part of the chain ends."""
    broken: bool = False
    """Whether the chain must be made anew from `begin` on: there are offsets without an object."""
    lacking: list[ObjectDescriptor] = field(default_factory=list)
    """The descriptors whose objects are not in the store."""

    @property
    def fresh(self) -> bool:
        """Whether no owner has used the catalog for this topic, but at most another restore."""
        return self.record is None or self.record.log_id == restoring(None)

    def until(self, stock: Inventory) -> int:
        """Returns one more than the highest offset that an object or a descriptor ever held."""
        return max(stock.end, self.end, self.record.tail if self.record is not None else 0)

    def missing(self, chain: Chain) -> list[Range]:
        """Returns the gaps of the chain that are not recorded as holes yet."""
        return outside_holes(self.record or TopicRecord(), chain.gaps)

    def choose(self, stock: Inventory, position: int | None = None) -> tuple[int, Chain]:
        """Returns the chain from `position` or `begin` on, and where it begins.

        Objects that are being deleted are used only if no others hold their offsets: then the rows
        that say so are of an older copy of the catalog. The whole chain is chosen anew if a part of
        it cannot be replaced otherwise, as after a compaction.
        """
        found = self._choose(stock, self.begin if position is None else position)
        if position is None and self.broken and self.missing(found):
            whole = self._choose(stock, self.first)
            if _count(self.missing(whole)) < _count(self.missing(found)):
                return self.first, whole
        return (self.begin if position is None else position), found

    def _choose(self, stock: Inventory, position: int) -> Chain:
        until = self.until(stock)
        found = choose_chain(self.usable, position, until)
        if self.missing(found):
            other = choose_chain(stock.ranges, position, until)
            if _count(self.missing(other)) < _count(self.missing(found)):
                return other
        return found


def _count(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _survey(
    catalog: Catalog, topic: TopicName, stock: Inventory, record: TopicRecord | None
) -> _Known:
    """Compares the descriptors with the listing. Objects of another size are left out of both."""
    states = {object_id: life.state for object_id, life in catalog.lives(topic)}
    known = _Known(record, states, {})
    expected = record.start_offset if record is not None else None
    broken: int | None = None
    first: int | None = None
    for start, row in rows(catalog, topic, expected or 0):
        first = start if first is None else first
        expected = start if expected is None else expected
        at = skip_holes(record, expected) if record is not None else expected
        known.end = max(known.end, start + 1 if row is None else row.next_offset)
        found = None if row is None else _listed(stock, row)
        if row is not None and found is not None:
            known.rows[row.object_id] = start
        if broken is None and found is not None and row is not None and start == at:
            expected = row.next_offset
            known.kept += 1
            known.last_kept = start
            known.objects.append(found)
        elif broken is None:
            broken = min(at, start)
        if found is None and row is not None:
            known.lacking.append(row)
    _use(known, stock)
    starts = [each[0] for each in known.usable or stock.ranges]
    offered = min(starts) if starts else None
    if record is not None:
        known.first = record.start_offset
        reached = skip_holes(record, expected if expected is not None else record.start_offset)
        if broken is None and reached < record.tail:
            broken = reached
        known.begin = broken if broken is not None else max(record.tail, reached)
    else:
        candidates = [each for each in (first, offered) if each is not None]
        marked = [each.name.offset for each in stock.markers]
        known.first = min(candidates or marked or [0])
        if first is not None and known.first < first:
            broken, known.kept, known.objects, known.last_kept = known.first, 0, [], None
        known.begin = broken if broken is not None else max(expected or 0, known.first)
    known.broken = broken is not None
    return known


def _listed(stock: Inventory, row: ObjectDescriptor) -> Candidate | None:
    """Returns the object of the descriptor. One of another size is damaged: it is removed."""
    same = stock.ranges.get((row.start_offset, row.end_offset), [])
    for each in same:
        if each.object_id == row.object_id:
            if each.size == row.size:
                return each
            stock.discard(each)
            return None
    return None


def _use(known: _Known, stock: Inventory) -> None:
    for range_, same in stock.ranges.items():
        usable = [each for each in same if known.states.get(each.object_id) not in _CONDEMNED]
        if usable:
            known.usable[range_] = usable


# -- the restore --------------------------------------------------------------------------------


class _Restore:
    def __init__(
        self,
        catalog: Catalog,
        store: Backend,
        session: Session,
        topic: TopicName,
        stock: Inventory,
        choices: RestoreChoices,
        local: LocalLog | None,
        describe: Describe,
        record: TopicRecord | None,
    ) -> None:
        self._record = record
        self._catalog = catalog
        self._store = store
        self._session = session
        self._topic = topic
        self._stock = stock
        self._choices = choices
        self._describe_one = describe
        self._report = RestoreReport(topic, choices.dry_run)
        self._reading = Reading()
        self._used: set[str] = set()
        self._damaged: list[Candidate] = []
        self._progress: Callable[[int, int], None] = lambda _done, _all: None
        self._ledgers = 0
        """The highest id of a ledger in the store."""
        self._refuse_danube()
        if not len(stock) and not stock.markers and record is None:
            raise MissingData(f"{store.name} has no objects of {topic}")
        report = self._report
        report.objects_found, report.pending = len(stock), stock.pending
        report.unknown_files, report.markers = stock.unknown, len(stock.markers)
        report.dead = stock.dead
        self._marker = read_marker(store, stock.markers[-1]) if stock.markers else None
        self._found_local = local
        self._compare()

    def _refuse_danube(self) -> None:
        """Raises UsageError if the names of the objects do not say which offsets they hold.

        A restore would take such objects for damaged, and their messages for lost.
        """
        found, record = self._stock.named_by_time, self._record
        if found is None and record is None:
            other = next(iter(self._store.list(segments_prefix(self._topic))), None)
            found = None if other is None else other.key
        if found is not None:
            raise UsageError(
                f"{self._topic}: {found} in {self._store.name} is an object of Danube v0.6.2 or "
                "later, and its name does not say which offsets it holds; nothing was changed: use "
                "`forebay import-danube`, which reads them into another store"
            )
        if record is not None and is_importing(record.log_id):
            raise UsageError(
                f"{self._topic}: an import of the topic is not finished: run "
                "`forebay import-danube` again"
            )

    def _compare(self) -> None:
        """Compares the catalog with the store, and chooses the chain."""
        stock, report = self._stock, self._report
        self._known = known = _survey(self._catalog, self._topic, stock, self._record)
        local = self._found_local
        if known.record is None and not known.rows and not stock.ranges and self._marker:
            # Only markers are left: the topic begins where its newest log does.
            begin = self._marker.begin
            if local is not None and self._is_newest(local):
                begin = min(begin, local.start_offset)
            known.first = known.begin = min(known.first, begin)
        for each in stock.discarded[len(self._damaged) :]:
            report.damaged.append(each.object_id)
            self._used.add(each.object_id)
            self._damaged.append(each)
        self._begin, self._chain = self._known.choose(stock)
        self._position = self._begin
        """Where the chain ends, as far as it was made."""
        report.older = self._older()
        self._local = local if local is not None and self._is_newest(local) else None

    def __call__(self, progress: Callable[[int, int], None]) -> RestoreReport:
        self._progress = progress
        self._read_kept()
        report, known = self._report, self._known
        self._count_kept()
        report.gaps += self._require_whole(self._chain)
        before = known.record
        report.start_offset = before.start_offset if before is not None else known.first
        if not self._choices.dry_run and self._changes():
            after = self._write()
        else:
            record = self._begun(before)
            for descriptor in self._descriptors():
                record = extended(
                    record, self._topic, self._position, descriptor, self._fill_or_none
                )
                self._position = descriptor.next_offset
            after = self._finished(self._ended(record))
        report.tail, report.assigned, report.next_offset = (
            after.tail,
            after.assigned,
            after.reserved,
        )
        highest = max(self._stock.highest, after.tail, after.assigned)
        report.assumed_in_vain = self._choices.assume_nothing_lost and after.reserved > highest
        report.accepted = self._choices.accept_loss
        report.by_sidecar, report.read_whole = self._reading.sidecars, self._reading.whole
        report.bytes_read = self._reading.bytes
        report.superseded = [
            each.object_id for each in self._stock if each.object_id not in self._used
        ]
        return report

    # -- what the store and the catalog show ----------------------------------------------------

    def _older(self) -> str | None:
        """Returns why the catalog is an older copy, or None if nothing shows that."""
        record, stock = self._known.record, self._stock
        if record is None or self._known.fresh:
            return None
        if stock.markers and self._marker is None:
            newest = stock.markers[-1].name
            if newest > (record.begin, record.begin_attempt):
                return f"it does not know the begin marker {newest}, which is damaged"
        marker = self._marker
        if marker and marker.epoch > record.marked and marker.nonce != record.nonce:
            return f"the log was opened since, as {stock.markers[-1].name} shows"
        for range_ in self._chain.ranges:
            found = self._candidates(range_)[0].object_id
            if found not in self._known.rows and self._known.states.get(found) is None:
                return f"it has never known {found}"
        return None

    def _identity(self, record: TopicRecord | None) -> tuple[str | None, str | None]:
        """Returns the id and the nonce of the newest log, as far as they are known."""
        marker, newest = self._marker, self._stock.markers
        if record is None or self._known.fresh:
            return (marker.log_id, marker.nonce) if marker is not None else (None, None)
        if marker is not None and marker.epoch > record.marked:
            return marker.log_id, marker.nonce
        if newest and marker is None and newest[-1].name > (record.begin, record.begin_attempt):
            return None, None
        return restored(record.log_id), record.nonce

    def _is_newest(self, local: LocalLog) -> bool:
        log_id, nonce = self._identity(self._known.record)
        return nonce in local.nonces if nonce is not None else log_id in (None, local.log_id)

    def _changes(self) -> bool:
        """Whether there is anything to write."""
        record, choices = self._known.record, self._choices
        if record is None or is_restoring(record.log_id):
            return True
        if self._known.broken or self._chain.ranges or self._report.older is not None:
            return True
        after = self._finished(self._ended(record))
        marked = (after.begin, after.begin_attempt) != (record.begin, record.begin_attempt)
        return after != record and (
            marked
            or choices.next_offset is not None
            or choices.accept_loss
            or after.tail != record.tail
        )

    def _read_kept(self) -> None:
        """With `verify`, reads the objects of descriptors that would be kept.

        If gaps are allowed, a damaged one is left out. Its descriptor is then replaced.
        """
        damaged: list[Candidate] = []
        for each in self._known.objects if self._choices.verify else ():
            try:
                self._describe_one(self._store, each, self._reading, whole=True)
            except CorruptLog as error:
                if not self._choices.allow_gaps:
                    raise
                event(_log, logging.ERROR, "damaged object", topic=self._topic, error=error)
                damaged.append(each)
        for each in damaged:
            self._stock.discard(each)
        if damaged:
            self._compare()

    def _count_kept(self) -> None:
        if self._begin < self._known.begin:  # the whole chain is made anew
            self._known.kept, self._known.last_kept, self._known.objects = 0, None, []
        self._report.known += self._known.kept
        self._used |= {each for each, at in self._known.rows.items() if at < self._begin}

    # -- offsets that no object holds -----------------------------------------------------------

    def _require_whole(self, chain: Chain) -> list[Range]:
        """Returns the offsets that no object holds and that the local log does not hold either.

        Raises MissingData or CommitRefused if there are any, unless gaps are allowed.
        """
        gaps = self._gaps(chain)
        missing = self._known.missing(chain)
        self._refuse_lacking(
            each
            for each in self._known.lacking
            if any(start <= each.start_offset < end for start, end in missing)
        )
        local = self._local
        end = gaps[-1][1] if gaps else self._end_of(chain)
        if local is not None and local.start_offset > end:
            gaps = [*gaps, (end, local.start_offset)]
        if gaps and not self._choices.allow_gaps:
            where = " and no local log" if local is not None else ""
            raise MissingData(
                f"{self._topic}: no object in {self._store.name}{where} holds the offsets "
                f"{shown(gaps)}; find their objects, or record them as lost with "
                "`forebay restore --allow-gaps`"
            )
        return gaps

    def _end_of(self, chain: Chain) -> int:
        """Returns where the chain ends, holes included."""
        end = chain.ranges[-1][1] + 1 if chain.ranges else self._begin
        record = self._known.record
        return end if record is None else skip_holes(record, end)

    def _gaps(self, chain: Chain) -> list[Range]:
        """Returns the gaps of the chain, without what the local log holds of the last one."""
        gaps = self._known.missing(chain)
        local = self._local
        if gaps and local is not None and gaps[-1][0] >= self._end_of(chain):
            start, end = gaps[-1]
            if local.next_offset >= end and local.start_offset < end:
                held = local.start_offset
                return [*gaps[:-1], (start, held)] if start < held else gaps[:-1]
        return gaps

    def _refuse_lacking(self, lacking: Iterable[ObjectDescriptor]) -> None:
        """Raises CommitRefused if an object is to be written again or put back."""
        local, found = self._local, list(lacking)
        held = [
            each
            for each in found
            if local is not None
            and local.start_offset <= each.start_offset
            and local.next_offset > each.end_offset
        ]
        if not found or (self._choices.allow_gaps and not held):
            return
        first = (held or found)[0]
        remedy = (
            f"the local log holds its messages: run `forebay repair {self._topic} --apply`, which "
            "writes it again"
            if held
            else "put the object back, or record its offsets as lost with "
            "`forebay restore --allow-gaps`"
        )
        raise CommitRefused(
            f"{self._topic}: {first.object_id} with {first.size} bytes is in "
            f"{self._catalog.name}, but not in {self._store.name}, and no other object holds all "
            f"of its messages; {remedy}"
        )

    @property
    def _fill_or_none(self) -> Callable[[TopicRecord, int, int], TopicRecord] | None:
        return self._fill if self._choices.allow_gaps else None

    def _fill(self, record: TopicRecord, start: int, end: int) -> TopicRecord:
        """Records a hole: as unknown if a log began at its end, for what is not known as used."""
        if self._log_began_at(end):
            certain = min(max(start, record.assigned), end)
            return record.with_lost(start, certain).with_unknown(certain, end)
        return record.with_lost(start, end)

    def _log_began_at(self, offset: int) -> bool:
        if self._local is not None and self._local.start_offset == offset:
            return True
        if self._marker is not None and self._marker.begin == offset:
            return True
        for each in self._stock.markers:
            if each.name.offset == offset:
                marker = read_marker(self._store, each)
                return marker is not None and marker.begin == offset
        return False

    # -- the record -----------------------------------------------------------------------------

    def _begun(self, record: TopicRecord | None) -> TopicRecord:
        """Returns the record with which the restore begins. It reserves the offsets."""
        known = self._known
        if record is None:
            record = TopicRecord(start_offset=known.first, tail=known.first, verified=known.first)
        fresh = known.fresh
        log_id, nonce = (None, None) if fresh else self._identity(record)
        marker = self._marker
        return replace(
            record,
            log_id=restoring(log_id),
            nonce=nonce,
            deletion=None,
            epoch=max(record.epoch, marker.epoch if marker is not None else 0),
            tail=max(record.tail, self._begin),
            verified=min(record.verified, self._begin),
            assigned=max(record.assigned, record.tail),
            reserved=max(record.reserved, self._reserved(record)),
        )

    def _ended(self, record: TopicRecord) -> TopicRecord:
        """Returns the record with the hole at the end, up to the objects or the log that is left.

        Only if gaps are allowed. A damaged last object is such a hole.
        """
        at = skip_holes(record, self._position)
        until = self._known.until(self._stock)
        local, marker = self._local, self._marker
        if not self._choices.allow_gaps:
            return replace(record, tail=max(record.tail, at))
        if local is not None and at < local.start_offset < until <= local.next_offset:
            # The log uploads the rest again: only here the tail moves back.
            record = self._fill(record, at, local.start_offset)
            tail = skip_holes(record, local.start_offset)
            return replace(record, tail=tail, verified=min(record.verified, tail))
        if local is None or not (local.start_offset <= at and local.next_offset >= until):
            if at < until:
                record = self._fill(record, at, until)
                at = until
            begin = marker.begin if local is None and marker is not None else at
            if local is not None:
                begin = local.start_offset
            if begin > at:
                record = self._fill(record, at, begin)
            at = max(at, begin)
        return replace(record, tail=max(record.tail, skip_holes(record, at)))

    def _finished(self, record: TopicRecord) -> TopicRecord:
        """Returns the record as the restore leaves it."""
        known, choices, marker = self._known, self._choices, self._marker
        log_id, nonce = restored(record.log_id), record.nonce
        if known.fresh:
            log_id, nonce = self._identity(None)
        assigned = max(record.assigned, record.tail, self._stock.end)
        newest = self._stock.markers[-1].name if self._stock.markers else None
        if marker is not None and newest is not None and marker.begin <= record.tail:
            assigned = max(assigned, newest.offset)
        record = replace(
            record,
            log_id=log_id,
            nonce=nonce,
            assigned=assigned,
            verified=record.tail if choices.verify else skip_holes(record, record.verified),
        )
        if newest is not None and newest > (record.begin, record.begin_attempt):
            record = replace(record, begin=newest.offset, begin_attempt=newest.attempt)
        if marker is not None:
            record = replace(record, marked=max(record.marked, marker.epoch))
        reserved = self._reserved(record)
        if choices.next_offset is None and not known.fresh:
            reserved = max(record.reserved, reserved)
        record = replace(record, reserved=max(reserved, record.tail))
        if choices.accept_loss:
            record = replace(record.with_accepted(), accept=record.reserved > record.tail)
        return record

    def _reserved(self, record: TopicRecord) -> int:
        """Returns the offset after all that may be in use, by the store and the operator."""
        choices = self._choices
        highest = max(self._stock.highest, record.tail, record.assigned, self._begin)
        limit = min(highest + LOG_DISTANCE, OFFSET_MAX)
        wanted = choices.next_offset
        if wanted is not None:
            if not highest <= wanted <= max(limit, record.reserved):
                raise UsageError(
                    f"{self._topic}: the next offset cannot be {wanted}: offsets before {highest} "
                    "are in objects, in the catalog or before a begin marker, and no log can have "
                    f"reached {limit}; choose one in between"
                )
            return wanted
        current = self._report.older is None and not self._known.fresh
        return highest if choices.assume_nothing_lost or current else limit

    # -- the objects ----------------------------------------------------------------------------

    def _candidates(self, range_: Range) -> list[Candidate]:
        """Returns the objects of the range: those in the catalog first, condemned ones last."""
        known = self._known
        return sorted(
            self._stock.ranges[range_],
            key=lambda each: (
                each.object_id not in known.rows,
                known.states.get(each.object_id) in _CONDEMNED,
            ),
        )

    def _descriptors(self) -> Iterator[ObjectDescriptor]:
        """Yields the chain's descriptors, oldest first. Chooses another chain around damage."""
        report, stock, chain = self._report, self._stock, self._chain
        position, at, done = self._begin, 0, 0
        while at < len(chain.ranges):
            range_ = chain.ranges[at]
            descriptor, damage = self._describe(self._candidates(range_))
            if descriptor is None:
                event(_log, logging.ERROR, "damaged object", topic=self._topic, error=damage)
                del stock.ranges[range_]
                self._known.usable.pop(range_, None)
                _, other = self._known.choose(stock, position)
                gaps = self._gaps(other)
                if any(gap not in report.gaps for gap in gaps) and not self._choices.allow_gaps:
                    raise CorruptLog(
                        f"{self._topic}: no undamaged object holds the offsets {shown(gaps)}; "
                        "record them as lost with `forebay restore --allow-gaps`"
                    ) from damage
                past = [gap for gap in report.gaps if gap[1] <= position]
                report.gaps = [*past, *gaps]
                chain, at = other, 0
                continue
            position = descriptor.next_offset
            at += 1
            done += 1
            if descriptor.object_id in self._known.rows:
                report.known += 1
            else:
                report.adopted += 1
                report.messages += descriptor.count
            self._used.add(descriptor.object_id)
            yield descriptor
            self._progress(done, done + len(chain.ranges) - at)

    def _describe(
        self, candidates: list[Candidate]
    ) -> tuple[ObjectDescriptor | None, CorruptLog | None]:
        """Returns the descriptor of the first undamaged candidate, or the last one's error."""
        damage: CorruptLog | None = None
        whole = self._choices.verify
        for candidate in candidates:
            if not whole and (known := self._known_descriptor(candidate)) is not None:
                return known, None
            try:
                return self._describe_one(self._store, candidate, self._reading, whole=whole), None
            except CorruptLog as error:
                damage = error
                self._report.damaged.append(candidate.object_id)
                self._damaged.append(candidate)
                self._used.add(candidate.object_id)
        return None, damage

    def _known_descriptor(self, candidate: Candidate) -> ObjectDescriptor | None:
        """Returns the object's descriptor in the catalog, if it has one that can be read."""
        start = self._known.rows.get(candidate.object_id)
        if start is None:
            return None
        entry = self._catalog.kv.get(self._catalog.keys.descriptor(self._topic, start))
        if entry is None:
            return None
        try:
            found = decode_descriptor(entry.value)
        except DescriptorError:
            return None
        name, size = candidate.object_id, candidate.size
        if (found.object_id, found.size, found.completed) != (name, size, True):
            return None
        return found if found.offset_index else None

    # -- writing --------------------------------------------------------------------------------

    def _write(self) -> TopicRecord:
        """Makes the chain as the topic's owner. The first transaction reserves the offsets."""
        before = self._known.record
        seen = None if before is None else (before.tail, before.start_offset)

        def settle(record: TopicRecord | None) -> TopicRecord:
            changed = (None if record is None else (record.tail, record.start_offset)) != seen
            deleted = record is not None and record.is_deleted
            if changed or deleted != (before is not None and before.is_deleted):
                raise CommitRefused(
                    f"{self._topic}: the topic changed during the restore; restore again"
                )
            return self._begun(record)

        ownership, record = acquire(self._session, self._topic, secrets.token_hex(16), settle)
        try:
            self._adopt(record.epoch)
            record = self._finish(ownership)
            self._mark_damaged()
            ownership.release(record.assigned, record.reserved)
        except BaseException:
            self._give_up(ownership)
            raise
        event(
            _log,
            logging.INFO,
            "topic restored",
            topic=self._topic,
            objects=self._report.adopted,
            prefix=objects_prefix(self._topic),
            tail=record.tail,
            next_offset=record.reserved,
        )
        return record

    def _adopt(self, epoch: int) -> None:
        catalog, topic = self._catalog, self._topic
        for each in self._stock:  # also those that are not adopted: their ids are taken
            if (ledger := parse_ledger(each.object_id)) is not None:
                self._ledgers = max(self._ledgers, ledger.ledger_id)
        if self._ledgers:
            catalog.ledgers(topic).continue_after(self._ledgers)
        stale = self._known.end > self._begin
        last: int | None = None

        def told() -> Iterator[ObjectDescriptor]:
            nonlocal last
            for descriptor in self._descriptors():
                last = descriptor.start_offset
                self._position = descriptor.next_offset
                yield descriptor

        before = len(self._known.rows)
        adopt(
            catalog,
            topic,
            epoch,
            told(),
            start=self._begin,
            replace_rows=stale,
            fill=self._fill_or_none,
            clock=self._session.clock,
        )
        record = catalog.update(topic, epoch, lambda record: Change(self._ended(record)))
        if stale:
            remove_rows(catalog, topic, epoch, self._position, OFFSET_MAX)
            self._report.removed = before - self._report.known
        if stale and last is None:
            self._point(record)

    def _point(self, record: TopicRecord) -> None:
        """Moves the pointer to the newest object back, after the objects after it were removed."""
        key, start = self._catalog.keys.current(self._topic), self._known.last_kept
        write: Write = Remove(key) if start is None else Put(key, pointer(start))
        self._catalog.update(self._topic, record.epoch, lambda now: Change(now, (write,)))

    def _mark_damaged(self) -> None:
        """Marks the keys of damaged objects as gone, so that no upload uses their names."""
        epoch, now_ms = 0, self._session.clock.now_ms()
        for each in self._damaged:
            key = self._catalog.keys.life(self._topic, each.object_id)
            entry = self._catalog.kv.get(key)
            life = None if entry is None else decode_record(entry.value, Life, key)
            if may_become(life.state if life is not None else None, State.GONE):
                span = None
                if each.ledger is not None:
                    span = (each.name.start, each.name.end + 1)
                row = Life(State.GONE, epoch, secrets.token_hex(8), now_ms, span)
                revision = entry.revision if entry is not None else ABSENT
                self._catalog.kv.commit([Compare(key, revision)], [Put(key, encode_record(row))])

    def _give_up(self, ownership: Ownership) -> None:
        """Releases the topic for the next attempt. Reserved offsets stay reserved."""
        with suppress(ServiceError, TopicFenced):
            record = self._catalog.record(self._topic)
            if record is not None:
                ownership.release(record.assigned, record.reserved)

    def _finish(self, ownership: Ownership) -> TopicRecord:
        origin = b"restore " + secrets.token_hex(8).encode()

        def change(record: TopicRecord) -> Change:
            return Change(
                self._finished(record),
                # The states of jobs may be out of date, so the jobs must start from the beginning.
                (Put(self._catalog.keys.job_state(self._topic, ORIGIN_NAME), origin),),
            )

        return self._catalog.update(self._topic, ownership.epoch, change)


def shown(ranges: Sequence[Range]) -> str:
    """Returns the ranges as text, ends included."""
    text = ", ".join(f"{start} to {end - 1}" for start, end in ranges[:_RANGES_SHOWN])
    more = len(ranges) - _RANGES_SHOWN
    return f"{text} and {more} more ranges" if more > 0 else text
