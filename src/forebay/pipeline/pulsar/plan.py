"""Plans a scan of a bucket: which blocks each task reads.

A block of Pulsar's default size is a task. Smaller ones are packed, in the order of topics and
ledgers, up to `split_bytes`. A block is never cut: an index says only where blocks begin.

A `Split` also has the ledgers around its own in their topics. A message in chunks may continue in
another block, or in the next ledger: see `chunks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from forebay.format.pulsar.index import LedgerIndex
from forebay.format.pulsar.topic import PulsarTopic
from forebay.pipeline.pulsar.bucket import Bucket, Ledger, within
from forebay.pipeline.pulsar.options import PulsarOptions
from forebay.pipeline.pulsar.read import Part

AROUND: Final = 8
"""The ledgers before and after its own in which a task looks for chunks."""
CLOCK_SLACK_MS: Final = 3_600_000
"""How far the clocks of producers, brokers and the store may differ before a ledger is skipped that
has messages of the wanted time."""
LATE_MS: Final = 7 * 24 * 3_600_000
"""How long after it was published a message may be stored: a replicator catches up for days."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A ledger of the same topic."""

    ledger: Ledger
    read: bool
    """Whether this query reads it, or this batch of a stream."""


@dataclass(frozen=True, slots=True)
class Split:
    """What one task reads. Can be pickled."""

    parts: tuple[Part, ...]
    around: tuple[Neighbour, ...] = ()
    """The ledgers of the parts and those around them, sorted."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def plan_ledgers(bucket: Bucket, options: PulsarOptions) -> list[Split]:
    """The splits of a batch query."""
    there = bucket.look()
    options.require_topics(dict.fromkeys(ledger.topic for ledger in there))
    subscribed = [ledger for ledger in there if options.matches(ledger.topic)]
    wanted = in_time(subscribed, options)
    return splits(bucket, wanted, subscribed, options.split_bytes)


def in_time(ledgers: Sequence[Ledger], options: PulsarOptions) -> list[Ledger]:
    start, end = options.starting_time, options.ending_time
    return within(ledgers, start, end, CLOCK_SLACK_MS, LATE_MS)


def splits(
    bucket: Bucket, wanted: Sequence[Ledger], known: Sequence[Ledger], split_bytes: int
) -> list[Split]:
    """Splits that read the wanted ledgers; `known` are all in which chunks may be, sorted."""
    parts = (part for ledger in wanted for part in blocks_of(ledger, bucket.index(ledger)))
    read = {ledger.id for ledger in wanted}
    neighbours = [Neighbour(ledger, ledger.id in read) for ledger in known]
    numbers = {each.ledger.id: number for number, each in enumerate(neighbours)}
    return [Split(each, _around(each, neighbours, numbers)) for each in _packed(parts, split_bytes)]


def blocks_of(ledger: Ledger, index: LedgerIndex) -> Iterator[Part]:
    """One part for each block of the ledger."""
    for number, block in enumerate(index.blocks):
        last = number + 1 == len(index.blocks)
        known = index.metadata.last_entry_id is not None
        following = index.next_entry_id(number) if known or not last else None
        end = index.block_end(number)
        yield Part(ledger, block.first_entry_id, following, block.position, end)


def _packed(parts: Iterable[Part], split_bytes: int) -> Iterator[tuple[Part, ...]]:
    packed: list[Part] = []
    size = 0
    for part in parts:
        if packed and size + part.size > split_bytes:
            yield tuple(packed)
            packed, size = [], 0
        size += part.size
        before = packed[-1] if packed else None
        if before is not None and before.ledger == part.ledger and before.end == part.begin:
            packed[-1] = replace(before, next=part.next, end=part.end)
        else:
            packed.append(part)
    if packed:
        yield tuple(packed)


def _around(
    parts: Sequence[Part],
    known: Sequence[Neighbour],
    numbers: Mapping[tuple[PulsarTopic, int], int],
) -> tuple[Neighbour, ...]:
    """The ledgers of the parts and those around and between them, by the numbers of all."""
    ends: dict[PulsarTopic, tuple[int, int]] = {}
    for ledger in dict.fromkeys(part.ledger for part in parts):
        at = numbers[ledger.id]
        first, last = ends.get(ledger.topic, (at, at))
        ends[ledger.topic] = min(first, at), max(last, at)
    return tuple(
        each
        for topic, (first, last) in ends.items()
        for each in known[max(first - AROUND, 0) : last + AROUND + 1]
        if each.ledger.topic == topic
    )
