"""Adds objects that exist already to a topic's chain, many at a time: for restores.

A restore is a topic's owner while it runs, and its mark is in the record: a log id that no log
has. While the mark is there the chain may lack objects that are in the bucket, so nobody may open
the topic, nor sweep it. Interrupted, it goes on where it stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change, Write, pointer
from forebay.catalog.kv import ABSENT, Compare, Put
from forebay.catalog.records import (
    Life,
    State,
    TopicRecord,
    decode_record,
    encode_record,
    may_become,
    skip_lost,
)
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import CommitRefused, ForebayError
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.names import TopicName
from forebay.limits import CATALOG_OPERATIONS_MAX, DESCRIPTOR_BYTES_MAX, MIB

ADOPTED_MAX: Final = 30
"""Descriptors in one transaction; each takes two writes and two comparisons."""
_BATCH_BYTES_MAX: Final = 1 * MIB
_RESTORING: Final = "restore of "

assert 2 * ADOPTED_MAX + 2 <= CATALOG_OPERATIONS_MAX
assert DESCRIPTOR_BYTES_MAX < _BATCH_BYTES_MAX


def restoring(log_id: str | None) -> str:
    """The log id of a topic whose restore is under way, `log_id` being that of its log."""
    return log_id if is_restoring(log_id) and log_id else _RESTORING + (log_id or "")


def is_restoring(log_id: str | None) -> bool:
    """Whether a restore of the topic began and has not ended."""
    return log_id is not None and log_id.startswith(_RESTORING)


def restored(log_id: str | None) -> str | None:
    """The log id without the mark."""
    return log_id.removeprefix(_RESTORING) or None if log_id and is_restoring(log_id) else log_id


def adopt(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    descriptors: Iterable[ObjectDescriptor],
    *,
    allow_gaps: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Adds the objects to the end of the chain; returns how many transactions that took.

    The caller knows that they are there. CommitRefused if one does not begin where the chain
    ends; with `allow_gaps` what is between is recorded as lost. TopicFenced if the topic has
    another epoch by now. After an error, one of the iterable's too, the objects up to the record's
    tail are adopted.
    """
    count = 0
    for batch in _batches(descriptors):
        _adopt(catalog, topic, epoch, batch, allow_gaps, clock.now_ms())
        count += 1
    return count


_Encoded = tuple[ObjectDescriptor, bytes]


def _batches(descriptors: Iterable[ObjectDescriptor]) -> Iterator[list[_Encoded]]:
    """What was found before an error is worth having: reading it may have taken hours."""
    batch: list[_Encoded] = []
    size = 0
    try:
        for descriptor in descriptors:
            data = encode_descriptor(descriptor)
            if batch and (len(batch) >= ADOPTED_MAX or size + len(data) > _BATCH_BYTES_MAX):
                yield batch
                batch, size = [], 0
            batch.append((descriptor, data))
            size += len(data)
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
    batch: list[_Encoded],
    allow_gaps: bool,
    now_ms: int,
) -> None:
    keys = catalog.keys
    row = encode_record(Life(State.COMMITTED, epoch, secrets.token_hex(8), now_ms))
    lost_the_race = False

    def change(record: TopicRecord) -> Change:
        """At first the keys are taken to be new, as they are but for rare rows."""
        nonlocal lost_the_race
        writes: list[Write] = []
        compares: list[Compare] = []
        for descriptor, data in batch:
            record = _extended(record, topic, descriptor, allow_gaps)
            life = keys.life(topic, descriptor.object_id)
            revision = _free(catalog, life, descriptor) if lost_the_race else ABSENT
            writes += [
                Put(keys.descriptor(topic, descriptor.start_offset), data),
                Put(life, row),
            ]
            compares += [
                Compare(keys.descriptor(topic, descriptor.start_offset), ABSENT),
                Compare(life, revision),
            ]
        writes.append(Put(keys.current(topic), pointer(batch[-1][0].start_offset)))
        lost_the_race = True
        return Change(record, tuple(writes), tuple(compares))

    catalog.update(topic, epoch, change)


def _extended(
    record: TopicRecord, topic: TopicName, descriptor: ObjectDescriptor, allow_gaps: bool
) -> TopicRecord:
    start = descriptor.start_offset
    if start < record.tail or (start > record.tail and not allow_gaps):
        raise CommitRefused(
            f"{topic}: the chain ends at offset {record.tail}, "
            f"and {descriptor.object_id} does not begin there"
        )
    record = record.with_lost(record.tail, start)
    return replace(record, tail=skip_lost(record, descriptor.next_offset))


def _free(catalog: Catalog, key: str, descriptor: ObjectDescriptor) -> int:
    """The revision of the key's row, if the object may become committed."""
    entry = catalog.kv.get(key)
    if entry is None:
        return ABSENT
    state = decode_record(entry.value, Life, key).state
    if not may_become(state, State.COMMITTED):
        raise CommitRefused(f"{descriptor.object_id} is {state}: it is being deleted")
    return entry.revision
