"""Adds objects that are already in the object store to a topic's chain. Restores use this.

A restore owns the topic while it runs. It marks the topic's record with a log id that no local log
has (`restoring`). While the mark is there, the chain may lack objects that are in the store, so the
topic must not be opened or swept. A restore that is interrupted continues where it stopped.

Beware: each batch is its own transaction. After an error, the batches that were already committed
stay in the chain.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.chain import Write, pointer, stored
from forebay.catalog.kv import ABSENT, Compare, Put
from forebay.catalog.records import (
    Life,
    State,
    TopicRecord,
    decode_record,
    encode_record,
    may_become,
    skip_holes,
)
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import CommitRefused, ForebayError
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.names import TopicName
from forebay.limits import CATALOG_OPERATIONS_MAX, DESCRIPTOR_BYTES_MAX, MIB

ADOPTED_MAX: Final = 30
"""Descriptors in one transaction. Each takes three writes and two comparisons."""
_BATCH_BYTES_MAX: Final = 1 * MIB
_RESTORING: Final = "restore of "

assert 3 * ADOPTED_MAX + 3 <= CATALOG_OPERATIONS_MAX
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


def adopt(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    descriptors: Iterable[ObjectDescriptor],
    *,
    allow_gaps: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Adds the objects to the end of the chain and returns the number of transactions.

    The objects must exist; this is not checked. Raises CommitRefused if an object does not begin
    where the chain ends. With `allow_gaps`, the offsets in between are recorded as lost instead.
    Raises TopicFenced if the topic has a new epoch. After an error, also one that `descriptors`
    raised, the objects before the record's tail have been added.
    """
    count = 0
    for batch in _batches(descriptors):
        _adopt(catalog, topic, epoch, batch, allow_gaps, clock.now_ms())
        count += 1
    return count


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
    batch: list[ObjectDescriptor],
    allow_gaps: bool,
    now_ms: int,
) -> None:
    keys = catalog.keys
    row = encode_record(Life(State.COMMITTED, epoch, secrets.token_hex(8), now_ms))
    lost_the_race = False

    def change(record: TopicRecord) -> Change:
        """The first attempt assumes that no key has a row yet, which is nearly always true."""
        nonlocal lost_the_race
        writes: list[Write] = catalog.chain(topic).changed(batch)
        compares: list[Compare] = []
        for descriptor in batch:
            record = _extended(record, topic, descriptor, allow_gaps)
            life = keys.life(topic, descriptor.object_id)
            revision = _free(catalog, life, descriptor) if lost_the_race else ABSENT
            writes.append(Put(life, row))
            compares += [
                Compare(keys.descriptor(topic, descriptor.start_offset), ABSENT),
                Compare(life, revision),
            ]
        writes.append(Put(keys.current(topic), pointer(batch[-1].start_offset)))
        lost_the_race = True
        return Change(record, tuple(writes), tuple(compares))

    catalog.update(topic, epoch, change)


def _extended(
    record: TopicRecord, topic: TopicName, descriptor: ObjectDescriptor, allow_gaps: bool
) -> TopicRecord:
    start = descriptor.start_offset
    if start < record.tail or (start > record.tail and not allow_gaps):
        raise CommitRefused(
            f"{topic}: {descriptor.object_id} does not begin where the chain ends, "
            f"at offset {record.tail}"
        )
    record = record.with_lost(record.tail, start)
    return replace(record, tail=skip_holes(record, descriptor.next_offset))


def _free(catalog: Catalog, key: str, descriptor: ObjectDescriptor) -> int:
    """Returns the revision of the key's row; CommitRefused if it may not become committed."""
    entry = catalog.kv.get(key)
    if entry is None:
        return ABSENT
    state = decode_record(entry.value, Life, key).state
    if not may_become(state, State.COMMITTED):
        raise CommitRefused(f"{descriptor.object_id} cannot be added to the chain: it is {state}")
    return entry.revision
