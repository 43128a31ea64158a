"""Makes a topic's chain of objects that are already in the object store. Restores use this.

A restore owns the topic while it runs. It marks the topic's record with a log id that no local log
has (`restoring`). While the mark is there, the chain may lack objects that are in the store, so the
topic must not be opened or swept. A restore that is interrupted continues where it stopped.

The chain grows at its end, or is made anew from an offset on. Then the descriptors that are there
are removed first, a batch at a time. What they say stays known: the objects are in the store, and
the record's tail is not moved back. So an interruption at any point loses nothing.

Beware: each batch is its own transaction. After an error, the batches that were already committed
stay in the chain.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.chain import Write, pointer, stored
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.ledgers import ledger_span
from forebay.catalog.records import (
    Life,
    State,
    TopicRecord,
    decode_record,
    encode_record,
    messages_between,
    skip_holes,
)
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import CommitRefused, DescriptorError, ForebayError
from forebay.format.descriptor import ObjectDescriptor, decode_outline, encode_descriptor
from forebay.format.names import TopicName
from forebay.limits import (
    CATALOG_OPERATIONS_MAX,
    CATALOG_PAGE,
    DESCRIPTOR_BYTES_MAX,
    MIB,
    OFFSET_MAX,
)

ADOPTED_MAX: Final = 24
"""Descriptors in one transaction, added or removed. Each takes three or four writes."""
_BATCH_BYTES_MAX: Final = 1 * MIB
_RESTORING: Final = "restore of "
_IMPORTING: Final = "restore of import"
_DELETING: Final = "restore of deletion"
_NEXT_KEY: Final = "\1"

Fill: TypeAlias = Callable[[TopicRecord, int, int], TopicRecord]
"""Returns the record with a hole from the first offset to before the second."""

assert 4 * ADOPTED_MAX + 4 <= CATALOG_OPERATIONS_MAX
assert DESCRIPTOR_BYTES_MAX < _BATCH_BYTES_MAX


def restoring(log_id: str | None) -> str:
    """Returns `log_id` with the mark of a running restore; a marked one is returned as it is."""
    return log_id if is_restoring(log_id) and log_id else _RESTORING + (log_id or "")


def is_restoring(log_id: str | None) -> bool:
    """Whether a restore of the topic has begun and not finished."""
    return log_id is not None and log_id.startswith(_RESTORING)


def restored(log_id: str | None) -> str | None:
    """Returns the log id without the mark of a restore."""
    return log_id.removeprefix(_RESTORING) or None if log_id and is_restoring(log_id) else log_id


def importing() -> str:
    """Returns the log id of a topic that is being imported. It has the mark of a restore too."""
    return _IMPORTING


def is_importing(log_id: str | None) -> bool:
    """Whether an import of the topic has begun and not finished."""
    return log_id == _IMPORTING


def deleting() -> str:
    """Returns the log id of a topic that is being deleted.

    It has the mark of a restore, so that releases that do not know deletions leave the topic alone.
    """
    return _DELETING


def unfinished(log_id: str | None) -> tuple[str, str]:
    """Returns what `is_restoring` found to be unfinished, and the command that finishes it."""
    if log_id == _DELETING:
        return "a deletion", "forebay topics delete"
    if is_importing(log_id):
        return "an import", "forebay import-danube"
    return "a restore", "forebay restore"


def rows(
    catalog: Catalog, topic: TopicName, start: int = 0
) -> Iterator[tuple[int, ObjectDescriptor | None]]:
    """Yields the topic's descriptors as they are, with the offsets in their keys, in this order.

    A damaged one is None. Unlike for `Catalog.get_object_descriptors`, the topic needs no record.
    The descriptors have no index.
    """
    for entry in _entries(catalog, topic, start, OFFSET_MAX):
        at = catalog.keys.descriptor_start(topic, entry.key)
        if at is not None:
            yield at, _outline(entry, at)


def _outline(entry: Entry, start: int) -> ObjectDescriptor | None:
    try:
        found = decode_outline(entry.value)
    except DescriptorError:
        return None
    return found if found.start_offset == start else None


def _entries(
    catalog: Catalog, topic: TopicName, start: int, end: int, limit: int = CATALOG_PAGE
) -> Iterator[Entry]:
    keys = catalog.keys
    at, stop = keys.descriptor(topic, start), keys.descriptor(topic, end)
    while page := catalog.kv.range(at, stop, limit=limit):
        yield from page
        at = page[-1].key + _NEXT_KEY


def adopt(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    descriptors: Iterable[ObjectDescriptor],
    *,
    start: int | None = None,
    replace_rows: bool = False,
    fill: Fill | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Adds the objects to the chain, which ends at `start`, and returns the number of batches.

    By default `start` is the record's tail. The objects must exist; this is not checked. With
    `replace_rows`, descriptors that begin after `start` are replaced. Raises CommitRefused if an
    object does not begin where the chain ends, unless `fill` records the offsets in between as a
    hole. Raises TopicFenced if the topic has a new epoch. After an error, also one that
    `descriptors` raised, the objects before the last complete batch have been added.
    """
    count = 0
    position = start
    for batch in _batches(descriptors):
        if replace_rows and position is not None:
            remove_rows(catalog, topic, epoch, position, batch[-1].next_offset)
        _adopt(catalog, topic, epoch, position, batch, fill, since_1970(clock).now_ms())
        position = batch[-1].next_offset
        count += 1
    return count


def remove_rows(catalog: Catalog, topic: TopicName, epoch: int, start: int, end: int) -> None:
    """Removes the descriptors that begin in `start..end`.

    Their objects have no row afterwards, so a sweep takes them for orphans.
    """

    def change(record: TopicRecord) -> Change:
        return _removed(catalog, topic, record, page)

    while page := list(islice(_entries(catalog, topic, start, end, ADOPTED_MAX), ADOPTED_MAX)):
        catalog.update(topic, epoch, change)


def _removed(catalog: Catalog, topic: TopicName, record: TopicRecord, page: list[Entry]) -> Change:
    keys = catalog.keys
    known: list[ObjectDescriptor] = []
    writes: list[Write] = []
    compares = [Compare(entry.key, entry.revision) for entry in page]
    for entry in page:
        at = keys.descriptor_start(topic, entry.key)
        outline = None if at is None else _outline(entry, at)
        if outline is None:  # damaged: its size is unknown, so the objects are counted again
            writes += [Remove(entry.key), Remove(keys.totals(topic))]
            continue
        known.append(outline)
        life = catalog.kv.get(keys.life(topic, outline.object_id))
        if life is not None and decode_record(life.value, Life, life.key).state is State.COMMITTED:
            writes.append(Remove(life.key))
            compares.append(Compare(life.key, life.revision))
    damaged = len(known) < len(page)
    for each in catalog.chain(topic).changed([], known, in_order=False):
        if not (damaged and each.key == keys.totals(topic)):
            writes.append(each)
    # The record is written unchanged: a process that read it before must read again.
    writes.append(Put(keys.record(topic), encode_record(record)))
    return Change(record, tuple(dict.fromkeys(writes)), tuple(compares))


def _batches(descriptors: Iterable[ObjectDescriptor]) -> Iterator[list[ObjectDescriptor]]:
    """Groups the descriptors. If the iterable raises, the last group is yielded first.

    Finding those descriptors may have taken hours, so they are not thrown away.
    """
    batch: list[ObjectDescriptor] = []
    size = 0
    try:
        for descriptor in descriptors:
            length = len(encode_descriptor(stored(descriptor)))
            if batch and (len(batch) >= ADOPTED_MAX or size + length > _BATCH_BYTES_MAX):
                yield batch
                batch, size = [], 0
            batch.append(descriptor)
            size += length
    except ForebayError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _adopt(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    start: int | None,
    batch: list[ObjectDescriptor],
    fill: Fill | None,
    now_ms: int,
) -> None:
    keys = catalog.keys
    row = Life(State.COMMITTED, epoch, secrets.token_hex(8), now_ms)
    lost_the_race = False

    def change(record: TopicRecord) -> Change:
        """The first attempt assumes that no key has a row yet, which is nearly always true."""
        nonlocal lost_the_race
        writes: list[Write] = catalog.chain(topic).changed(batch, in_order=False)
        compares: list[Compare] = []
        position = record.tail if start is None else start
        for descriptor in batch:
            record = extended(record, topic, position, descriptor, fill)
            position = descriptor.next_offset
            life = keys.life(topic, descriptor.object_id)
            entry = catalog.kv.get(life) if lost_the_race else None
            writes.append(Put(life, encode_record(replace(row, span=ledger_span(descriptor)))))
            if entry and decode_record(entry.value, Life, life).state is State.REPLACED:
                at = descriptor.start_offset
                writes.append(Remove(keys.replaced_descriptor(topic, at, descriptor.object_id)))
            compares += [
                Compare(keys.descriptor(topic, descriptor.start_offset), ABSENT),
                Compare(life, entry.revision if entry is not None else ABSENT),
            ]
        writes.append(Put(keys.current(topic), pointer(batch[-1].start_offset)))
        lost_the_race = True
        return Change(record, tuple(writes), tuple(compares))

    catalog.update(topic, epoch, change)


def extended(
    record: TopicRecord,
    topic: TopicName,
    position: int,
    descriptor: ObjectDescriptor,
    fill: Fill | None,
) -> TopicRecord:
    """Returns the record of a chain that ended at `position`, with the object added."""
    start = descriptor.start_offset
    missing = messages_between(record, position, start)
    if start < position or (missing and fill is None):
        raise CommitRefused(
            f"{topic}: {descriptor.object_id} does not begin where the chain ends, "
            f"at offset {position}"
        )
    if missing and fill is not None:
        record = fill(record, position, start)
    record = record.without_holes(start, descriptor.next_offset)
    return replace(record, tail=max(record.tail, skip_holes(record, descriptor.next_offset)))
