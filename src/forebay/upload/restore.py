"""`restore_topic`: rebuilds a topic's descriptors from the object store alone.

The names of the objects give their ranges of offsets. A sidecar gives the rest of the descriptor if
it agrees with the name and the listing. Otherwise the object is read, frame by frame, and its index
is built again. The restore owns the topic while it adds the objects to the chain, so nothing else
appends. A restore that is interrupted continues where it stopped.

The next offset (rule R4): without the old catalog, it is unknown how many offsets the last owner
assigned after the last object. So a block of `offsets_reserved`, which is what an owner reserves at
a time, stays reserved after the tail. The next owner, if it has another log, begins after that
block and records it as lost. `assume_nothing_lost` continues right after the last object instead.

Beware: a chain with a gap is refused. With `allow_gaps` the gaps are recorded as lost, and readers
report them. Damaged objects that were left out are then orphans: copy them elsewhere before a sweep
removes them, if anything in them is worth saving.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from forebay.catalog.adopt import adopt, is_restoring, restored, restoring
from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.job_state import ORIGIN_NAME
from forebay.catalog.kv import Put
from forebay.catalog.ownership import Ownership, Session, acquire
from forebay.catalog.records import TopicRecord
from forebay.errors import CommitRefused, CorruptLog, MissingData, ServiceError, TopicFenced
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, objects_prefix
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.objects.backend import Backend
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

_log: Final = logging.getLogger("forebay.upload")
_RANGES_SHOWN: Final = 20


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
    unknown: int = 0
    start_offset: int = 0
    tail: int = 0
    next_offset: int = 0
    """The next offset to be assigned, if the local log is gone."""
    assumed_in_vain: bool = False
    """`assume_nothing_lost` had no effect: offsets after the tail were already reserved, for
    example by an earlier restore."""

    @property
    def lost(self) -> Range | None:
        """The range that the next owner records as lost, if it has another log; else None."""
        return (self.tail, self.next_offset) if self.next_offset > self.tail else None


def restore_topic(
    catalog: Catalog,
    store: Backend,
    session: Session,
    topic: TopicName,
    *,
    dry_run: bool,
    verify: bool = False,
    allow_gaps: bool = False,
    assume_nothing_lost: bool = False,
    progress: Callable[[int, int], None] | None = None,
    stock: Inventory | None = None,
    describe: Describe = describe,
) -> RestoreReport:
    """Adopts the topic's objects and returns a report. With `dry_run` nothing is changed.

    `verify` reads every object completely and records them as verified; otherwise the uploader's
    next cycle does. `progress` gets the number of objects done and of all objects. `stock` is the
    listing, if the caller already has it. `describe` may return descriptors that were made before.

    Raises MissingData if there are no objects or there is a gap, CorruptLog if an object is damaged
    and no other holds its offsets, CommitRefused if the catalog names objects that are not in the
    store, and TopicOwned while a living process owns the topic. Objects that were adopted before an
    error stay adopted, and a second run continues after them.
    """
    run = _Restore(
        catalog, store, session, topic, verify, allow_gaps, assume_nothing_lost, describe
    )
    stock = stock if stock is not None else take_stock(store, topic)
    report = run(dry_run, stock, progress or (lambda _done, _all: None))
    report.assumed_in_vain = assume_nothing_lost and report.lost is not None
    return report


def to_be_described(
    catalog: Catalog, topic: TopicName, stock: Inventory, *, verify: bool
) -> Iterator[Candidate]:
    """Yields the objects that a restore would describe, in its order, if none is damaged."""
    record = catalog.record(topic)
    if record is not None and verify:
        for descriptor in catalog.get_object_descriptors(topic, record.verified):
            range_ = (descriptor.start_offset, descriptor.end_offset)
            for each in stock.ranges.get(range_, ()):
                if each.object_id == descriptor.object_id and range_[0] >= record.verified:
                    yield each
    begin = record.tail if record is not None else None
    for range_ in choose_chain(stock.ranges, begin, stock.end).ranges:
        yield stock.ranges[range_][0]


class _Restore:
    def __init__(
        self,
        catalog: Catalog,
        store: Backend,
        session: Session,
        topic: TopicName,
        verify: bool,
        allow_gaps: bool,
        assume_nothing_lost: bool,
        describe: Describe,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._session = session
        self._topic = topic
        self._verify = verify
        self._allow_gaps = allow_gaps
        self._block = 0 if assume_nothing_lost else session.settings.offsets_reserved
        self._report = RestoreReport(topic, dry_run=True)
        self._reading = Reading()
        self._used: set[str] = set()
        self._describe_one = describe
        self._progress: Callable[[int, int], None] = lambda _done, _all: None

    def __call__(
        self, dry_run: bool, stock: Inventory, progress: Callable[[int, int], None]
    ) -> RestoreReport:
        self._progress = progress
        report = self._report
        report.dry_run = dry_run
        report.objects_found, report.pending, report.unknown = (
            len(stock),
            stock.pending,
            stock.unknown,
        )
        before = self._catalog.record(self._topic)
        if before is None and not stock.ranges:
            raise MissingData(f"{self._store.name} has no objects of {self._topic}")
        self._check_known(before, stock)
        begin = before.tail if before is not None else None
        chain = choose_chain(stock.ranges, begin, stock.end)
        self._require_whole(chain)
        unfinished = before is None or is_restoring(before.log_id)
        report.start_offset = before.start_offset if before else chain.ranges[0][0]
        report.tail = begin if begin is not None else report.start_offset
        if not dry_run and (chain.ranges or unfinished):
            self._write(before, chain, stock)
        else:
            for descriptor in self._descriptors(chain, stock, report.tail):
                report.tail = descriptor.next_offset
            report.next_offset = self._next_offset(before, report.tail, stock)
        report.by_sidecar, report.read_whole = self._reading.sidecars, self._reading.whole
        report.bytes_read = self._reading.bytes
        report.superseded = [each.object_id for each in stock if each.object_id not in self._used]
        return report

    # -- what the catalog knows -----------------------------------------------------------------

    def _check_known(self, record: TopicRecord | None, stock: Inventory) -> None:
        """Raises CommitRefused if an object in the catalog is not in the store with its size."""
        if record is None:
            return
        for descriptor in self._catalog.get_object_descriptors(self._topic):
            range_ = (descriptor.start_offset, descriptor.end_offset)
            found = [
                each
                for each in stock.ranges.get(range_, ())
                if each.object_id == descriptor.object_id and each.size == descriptor.size
            ]
            if not found:
                raise CommitRefused(
                    f"{self._topic}: {descriptor.object_id} with {descriptor.size} bytes is in "
                    f"{self._catalog.name}, but not in {self._store.name}; a restore only adds to "
                    "the catalog; put the object back first, or run `forebay repair`"
                )
            self._report.known += 1
            self._used.add(descriptor.object_id)
            if self._verify and descriptor.start_offset >= record.verified:
                self._describe_one(self._store, found[0], self._reading, whole=True)

    def _next_offset(self, record: TopicRecord | None, tail: int, stock: Inventory) -> int:
        wanted = min(max(tail, stock.end) + self._block, OFFSET_MAX)
        if record is None or record.log_id == restoring(None):
            return wanted  # only a restore has reserved offsets so far
        if tail == record.tail and not is_restoring(record.log_id):
            return record.reserved  # nothing was added
        return max(record.reserved, wanted)

    # -- the objects ----------------------------------------------------------------------------

    def _require_whole(self, chain: Chain) -> None:
        self._report.gaps += chain.gaps
        if chain.gaps and not self._allow_gaps:
            raise MissingData(
                f"{self._topic}: no object in {self._store.name} holds the offsets "
                f"{_shown(chain.gaps)}; find their objects, or allow gaps to record them as lost"
            )

    def _descriptors(
        self, chain: Chain, stock: Inventory, position: int
    ) -> Iterator[ObjectDescriptor]:
        """Yields the chain's descriptors, oldest first. Chooses another chain around damage."""
        report = self._report
        at = 0
        while at < len(chain.ranges):
            range_ = chain.ranges[at]
            descriptor, damage = self._describe(stock.ranges[range_])
            if descriptor is None:
                event(_log, logging.ERROR, "damaged object", topic=self._topic, error=damage)
                del stock.ranges[range_]
                other = choose_chain(stock.ranges, position, stock.end)
                if any(gap not in report.gaps for gap in other.gaps) and not self._allow_gaps:
                    raise CorruptLog(
                        f"{self._topic}: no undamaged object holds the offsets "
                        f"{_shown(other.gaps)}; allow gaps to record them as lost"
                    ) from damage
                past = [gap for gap in report.gaps if gap[1] <= position]
                report.gaps = [*past, *other.gaps]
                chain, at = other, 0
                continue
            position = descriptor.next_offset
            at += 1
            report.adopted += 1
            report.messages += descriptor.count
            self._used.add(descriptor.object_id)
            yield descriptor
            self._progress(report.adopted, report.adopted + len(chain.ranges) - at)

    def _describe(
        self, candidates: list[Candidate]
    ) -> tuple[ObjectDescriptor | None, CorruptLog | None]:
        """Returns the descriptor of the first undamaged candidate, or the last one's error."""
        damage: CorruptLog | None = None
        for candidate in candidates:
            try:
                whole = self._verify
                return self._describe_one(self._store, candidate, self._reading, whole=whole), None
            except CorruptLog as error:
                damage = error
                self._report.damaged.append(candidate.object_id)
                self._used.add(candidate.object_id)
        return None, damage

    # -- writing --------------------------------------------------------------------------------

    def _write(self, before: TopicRecord | None, chain: Chain, stock: Inventory) -> None:
        """Adopts the chain as the topic's owner. The first transaction reserves the offsets."""
        first = self._report.start_offset
        seen = before.tail if before is not None else first

        def settle(record: TopicRecord | None) -> TopicRecord:
            if record is None:
                record = TopicRecord(start_offset=first, tail=first, verified=first)
            elif before is None or record.tail != seen:
                raise CommitRefused(
                    f"{self._topic}: the topic changed during the restore; restore again"
                )
            wanted = min(max(seen, stock.end) + self._block, OFFSET_MAX)
            log_id = restoring(record.log_id)
            return replace(record, log_id=log_id, reserved=max(record.reserved, wanted))

        ownership, record = acquire(self._session, self._topic, secrets.token_hex(16), settle)
        try:
            adopt(
                self._catalog,
                self._topic,
                record.epoch,
                self._descriptors(chain, stock, record.tail),
                allow_gaps=self._allow_gaps,
                clock=self._session.clock,
            )
            record = self._finish(ownership, stock)
            ownership.release(record.reserved)
        except BaseException:
            self._give_up(ownership)
            raise
        self._report.tail, self._report.next_offset = record.tail, record.reserved
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

    def _give_up(self, ownership: Ownership) -> None:
        """Releases the topic for the next attempt. Reserved offsets stay reserved."""
        with suppress(ServiceError, TopicFenced):
            record = self._catalog.record(self._topic)
            if record is not None:
                ownership.release(record.reserved)

    def _finish(self, ownership: Ownership, stock: Inventory) -> TopicRecord:
        origin = b"restore " + secrets.token_hex(8).encode()

        def change(record: TopicRecord) -> Change:
            return Change(
                replace(
                    record,
                    log_id=restored(record.log_id),
                    verified=record.tail if self._verify else record.verified,
                    reserved=self._next_offset(record, record.tail, stock),
                ),
                # The states of jobs may be out of date, so the jobs must start from the beginning.
                (Put(self._catalog.keys.job_state(self._topic, ORIGIN_NAME), origin),),
            )

        return self._catalog.update(self._topic, ownership.epoch, change)


def _shown(ranges: tuple[Range, ...]) -> str:
    """Returns the ranges as text, ends included."""
    text = ", ".join(f"{start} to {end - 1}" for start, end in ranges[:_RANGES_SHOWN])
    more = len(ranges) - _RANGES_SHOWN
    return f"{text} and {more} more ranges" if more > 0 else text
