"""Replaces adjacent objects with one that holds the same messages, and undoes it: for compactions.

A swap is one transaction: the chain has the small objects or the large one, never a gap or an
overlap (I4). It compares the topic's record, every descriptor and every key row that it changes. So
it is refused if remote retention, a sweep, another compaction or a new owner changed any of them
first. It also writes the record unchanged: a process that read the record before must read again.

Replaced objects stay readable for a grace time. Their descriptors are kept below `replaced/` until
a sweep begins to delete the objects. Until then the swap can be undone. The layout:
`docs/formats/catalog.md`.

Beware: after CommitRefused, do not delete the object that was written. By now the same name may
belong to another process. Leave the object to the sweep.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from forebay.catalog.catalog import Catalog, Change, Intent, until_known
from forebay.catalog.chain import Write, pointer
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.ledgers import ledger_span
from forebay.catalog.records import (
    Life,
    State,
    TopicRecord,
    decode_json,
    decode_record,
    encode_record,
    may_become,
)
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import CommitRefused, DescriptorError, UsageError
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.names import TopicName, parse_object
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_PAGE, MIB

OBJECTS_PER_SWAP_MAX: Final = 28
"""Each takes four writes: descriptor, end row, its key's row, and the descriptor that is kept."""
SWAP_BYTES_MAX: Final = 1 * MIB
"""The limit of the descriptors that one swap keeps, without keys and the new descriptor."""
_NEXT_KEY: Final = "\1"

_OTHER_WRITES: Final = 4
"""The row of the new object's key, `cur`, the totals and the record."""

assert 4 * OBJECTS_PER_SWAP_MAX + _OTHER_WRITES <= CATALOG_OPERATIONS_MAX


@dataclass(frozen=True, slots=True)
class Kept:
    """The descriptor of a replaced object, and the id of the object that replaced it."""

    by: str
    descriptor: ObjectDescriptor


def encode_kept(kept: Kept) -> bytes:
    by = json.dumps(kept.by, ensure_ascii=False).encode()
    return b'{"by":%s,"descriptor":%s}' % (by, encode_descriptor(kept.descriptor))


def decode_kept(data: bytes, what: str) -> Kept:
    """Decodes what `encode_kept` returned. `what` names it in the DescriptorError."""
    match decode_json(data, what):
        case {"by": str() as by, "descriptor": dict() as body, **rest} if not rest:
            try:
                return Kept(by, decode_descriptor(json.dumps(body).encode()))
            except DescriptorError as error:
                raise DescriptorError(f"{what}: {error}") from error
    raise DescriptorError(f"{what}: its fields are not ['by', 'descriptor']")


def replaced_descriptors(
    catalog: Catalog, topic: TopicName, start: int, end: int
) -> Iterator[Kept]:
    """Yields the kept descriptors of replaced objects that begin in `start..end`, by offset."""
    at, stop = catalog.keys.replaced(topic, start), catalog.keys.replaced(topic, end)
    while page := catalog.kv.range(at, stop, limit=CATALOG_PAGE):
        for entry in page:
            yield decode_kept(entry.value, f"{catalog.name}: {entry.key}")
        at = page[-1].key + _NEXT_KEY


def swap(
    catalog: Catalog,
    topic: TopicName,
    intent: Intent,
    descriptor: ObjectDescriptor,
    replaced: Sequence[ObjectDescriptor],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> TopicRecord:
    """Replaces the objects in `replaced` with the one that was made of them; returns the record.

    All of them must have been read back. A swap that was already made succeeds again. Raises
    CommitRefused if anything changed since the plan: one of the objects, the topic's epoch, or the
    intent. Raises UsageError if the objects do not cover exactly the offsets of the new one.
    """
    _require_same_range(intent, descriptor, replaced)
    state = _Swapping(catalog, topic, intent, descriptor, tuple(replaced), since_1970(clock))
    return until_known(lambda: catalog.update(topic, None, state.change))


def swap_back(
    catalog: Catalog, topic: TopicName, object_id: str, *, clock: Clock = SYSTEM_CLOCK
) -> list[ObjectDescriptor]:
    """Undoes a swap: puts the objects that `object_id` replaced back, and returns them.

    Raises CommitRefused if `object_id` is not in the chain, or if one of the replaced objects is
    being deleted or is gone.
    """
    name = parse_object(object_id)
    if name is None:
        raise UsageError(f"{object_id!r} is not the name of an object")
    state = _SwappingBack(catalog, topic, object_id, (name.start, name.end + 1), clock)
    until_known(lambda: catalog.update(topic, None, state.change))
    return state.restored


def _require_same_range(
    intent: Intent, descriptor: ObjectDescriptor, replaced: Sequence[ObjectDescriptor]
) -> None:
    if not 1 <= len(replaced) <= OBJECTS_PER_SWAP_MAX:
        raise UsageError(
            f"a swap of {len(replaced)} objects; it must be 1 to {OBJECTS_PER_SWAP_MAX}"
        )
    if any(each.object_id == descriptor.object_id for each in replaced):
        raise UsageError(f"{descriptor.object_id} cannot replace itself")
    ends = (replaced[0].start_offset, replaced[-1].end_offset)
    whole = all(one.next_offset == then.start_offset for one, then in pairwise(replaced))
    if not whole or ends != (descriptor.start_offset, descriptor.end_offset):
        raise UsageError(
            f"{descriptor.object_id} does not have exactly the offsets of the objects to replace"
        )
    if intent.object_id != descriptor.object_id:
        raise UsageError(f"{descriptor.object_id}: the intent is for {intent.object_id}")


class _Rows:
    """Collects the writes of a transaction, and the comparisons for every row that it read."""

    def __init__(self, catalog: Catalog, topic: TopicName) -> None:
        self._catalog = catalog
        self._topic = topic
        self.compares: list[Compare] = []
        self.writes: list[Write] = []

    def life(self, object_id: str) -> Life | None:
        key = self._catalog.keys.life(self._topic, object_id)
        entry = self._catalog.kv.get(key)
        self.compares.append(Compare(key, entry.revision if entry else ABSENT))
        return None if entry is None else decode_record(entry.value, Life, key)

    def move(self, object_id: str, life: Life | None, after: Life) -> None:
        """Writes the new state of a key; CommitRefused if `may_become` does not allow it."""
        before = life.state if life is not None else None
        if not may_become(before, after.state):
            raise CommitRefused(f"{self._topic}: {object_id} is {before}; plan again")
        key = self._catalog.keys.life(self._topic, object_id)
        self.writes.append(Put(key, encode_record(after)))

    def chain(self, entries: Sequence[Entry]) -> None:
        self.compares += [Compare(entry.key, entry.revision) for entry in entries]

    def point(self, before: ObjectDescriptor, after: ObjectDescriptor) -> None:
        """Moves the pointer to the newest object from `before` to `after`, if it is at `before`."""
        if self._catalog.get_current_pointer(self._topic) == before.start_offset:
            key = self._catalog.keys.current(self._topic)
            self.writes.append(Put(key, pointer(after.start_offset)))

    def changed(self, record: TopicRecord) -> Change:
        key = self._catalog.keys.record(self._topic)
        self.writes.append(Put(key, encode_record(record)))
        return Change(record, tuple(self.writes), tuple(self.compares))


@dataclass(slots=True)
class _Swapping:
    catalog: Catalog
    topic: TopicName
    intent: Intent
    descriptor: ObjectDescriptor
    replaced: tuple[ObjectDescriptor, ...]
    clock: Clock

    def change(self, record: TopicRecord) -> Change:
        rows = _Rows(self.catalog, self.topic)
        new, now_ms = self.descriptor, self.clock.now_ms()
        life = rows.life(new.object_id)
        own = life is not None and life.token == self.intent.token
        if own and life is not None and life.state is State.COMMITTED:
            return Change(record)  # already committed
        if record.epoch != self.intent.epoch:
            raise CommitRefused(
                f"{self.topic}: the topic has a new owner (its epoch is {record.epoch}, and was "
                f"{self.intent.epoch}); plan again"
            )
        if not own or life is None or life.state is not State.INTENDED:
            raise CommitRefused(
                f"{self.topic}: the intent of {new.object_id} was revoked; plan again"
            )
        if new.next_offset > record.verified:
            raise CommitRefused(
                f"{self.topic}: {new.object_id} ends after offset {record.verified}, "
                "up to which objects were read back"
            )
        rows.move(new.object_id, life, replace(life, state=State.COMMITTED, updated_ms=now_ms))
        rows.chain(self._entries())
        rows.writes += self.catalog.chain(self.topic).changed([new], self.replaced)
        for old in self.replaced:
            self._replace(rows, old, record.epoch, now_ms)
        rows.point(self.replaced[-1], new)
        return rows.changed(record)

    def _entries(self) -> list[Entry]:
        """Reads the entries to replace. Raises CommitRefused if they differ from the plan."""
        keys = self.catalog.keys
        entries = self.catalog.kv.range(
            keys.descriptor(self.topic, self.descriptor.start_offset),
            keys.descriptor(self.topic, self.descriptor.next_offset),
            limit=len(self.replaced) + 1,
        )
        if [decode_descriptor(entry.value) for entry in entries] != list(self.replaced):
            raise CommitRefused(
                f"{self.topic}: the objects to replace with {self.descriptor.object_id} "
                "have changed; plan again"
            )
        return entries

    def _replace(self, rows: _Rows, old: ObjectDescriptor, epoch: int, now_ms: int) -> None:
        keys = self.catalog.keys
        life = rows.life(old.object_id)
        token, span = secrets.token_hex(8), ledger_span(old)
        row = life or Life(State.REPLACED, epoch, token, now_ms, span)
        rows.move(old.object_id, life, replace(row, state=State.REPLACED, updated_ms=now_ms))
        key = keys.replaced_descriptor(self.topic, old.start_offset, old.object_id)
        rows.writes.append(Put(key, encode_kept(Kept(self.descriptor.object_id, old))))


class _SwappingBack:
    def __init__(
        self,
        catalog: Catalog,
        topic: TopicName,
        object_id: str,
        offsets: tuple[int, int],
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._topic = topic
        self._object_id = object_id
        self._offsets = offsets
        self._clock = since_1970(clock)
        self._token = secrets.token_hex(8)
        self.restored: list[ObjectDescriptor] = []

    def change(self, record: TopicRecord) -> Change:
        rows = _Rows(self._catalog, self._topic)
        now_ms = self._clock.now_ms()
        life = rows.life(self._object_id)
        if life is not None and (life.state, life.token) == (State.REPLACED, self._token):
            return Change(record)  # already committed
        entry = self._named()
        compacted = decode_descriptor(entry.value)
        self.restored = self._kept()
        row = Life(State.REPLACED, record.epoch, self._token, now_ms)
        rows.move(self._object_id, life, row)
        rows.chain([entry])
        # Earlier releases replaced more objects at once than four writes each leave room for. An
        # object without an end row is found by a search.
        room = CATALOG_OPERATIONS_MAX - 3 * len(self.restored) - _OTHER_WRITES
        chain = self._catalog.chain(self._topic)
        rows.writes += chain.changed(self.restored, [compacted], ends_max=max(room, 1))
        for old in self.restored:
            self._put_back(rows, old, record.epoch, now_ms)
        rows.point(compacted, self.restored[-1])
        return rows.changed(record)

    def _named(self) -> Entry:
        key = self._catalog.keys.descriptor(self._topic, self._offsets[0])
        entry = self._catalog.kv.get(key)
        if entry is None or decode_descriptor(entry.value).object_id != self._object_id:
            raise CommitRefused(f"{self._topic}: {self._object_id} is not in the topic's chain")
        return entry

    def _kept(self) -> list[ObjectDescriptor]:
        start, end = self._offsets
        found = replaced_descriptors(self._catalog, self._topic, start, end)
        kept = [each.descriptor for each in found if each.by == self._object_id]
        borders = [start, *(each.next_offset for each in kept)]
        if not kept or borders != [*(each.start_offset for each in kept), end]:
            raise CommitRefused(
                f"{self._topic}: {self._object_id} cannot be undone: "
                + ("some" if kept else "none")
                + " of the objects that it replaced are left"
            )
        return kept

    def _put_back(self, rows: _Rows, old: ObjectDescriptor, epoch: int, now_ms: int) -> None:
        life = rows.life(old.object_id)
        if life is None or life.state is not State.REPLACED:
            state = life.state if life is not None else "gone"
            raise CommitRefused(
                f"{self._topic}: {self._object_id} cannot be undone: {old.object_id} is {state}"
            )
        back = replace(life, state=State.COMMITTED, epoch=epoch, updated_ms=now_ms)
        rows.move(old.object_id, life, back)
        keys = self._catalog.keys
        key = keys.replaced_descriptor(self._topic, old.start_offset, old.object_id)
        rows.writes.append(Remove(key))
