"""Accepts offsets without messages, so that readers jump over them (rule R9b).

A topic's record says which offsets are lost, and which may never have been used. Readers raise
LostOffsets at both, because nobody has looked yet. `accept_loss` moves such ranges to the record's
`accepted` ranges. It changes the record by compare-and-set and needs no ownership: readers of a
running owner see the change when they read the record again, which they do at every hole.

Beware: there is no way back. If the log of a lost range turns up later, its messages stay unread.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.records import Range, TopicRecord, ranges_within
from forebay.errors import UnknownTopic, UsageError
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """What was accepted; with `dry_run`, what would be."""

    topic: str
    lost: list[Range]
    """Accepted now, and lost before."""
    unknown: list[Range]
    """Accepted now. It is unknown whether there were ever messages with these offsets."""
    accepted: list[Range]
    """All accepted ranges of the topic, including those of before."""
    dry_run: bool


def accept_loss(
    catalog: Catalog,
    topic: TopicName,
    start: int | None = None,
    end: int | None = None,
    *,
    dry_run: bool = False,
) -> AcceptedLoss:
    """Accepts what is lost or unknown in `start..end`, by default in the whole topic.

    Does nothing if nothing is. Raises UsageError if the range is empty, UnknownTopic if the catalog
    does not have the topic, and DescriptorError if its record has no room for more ranges.
    """
    first, stop = 0 if start is None else start, OFFSET_MAX if end is None else end
    if not 0 <= first < stop <= OFFSET_MAX:
        raise UsageError(
            f"{topic}: the range from {first} to {stop} has no offsets; it ends before {stop}, so "
            "its end must be greater than its start"
        )
    before = catalog.record(topic)
    if before is None:
        raise UnknownTopic(f"there is no topic {topic} in {catalog.name}")
    after = before.with_accepted(first, stop)

    def change(record: TopicRecord) -> Change:
        nonlocal before, after
        before, after = record, record.with_accepted(first, stop)
        return Change(after)

    if not dry_run:
        catalog.update(topic, None, change)
    return AcceptedLoss(
        str(topic),
        ranges_within(before.lost, first, stop),
        ranges_within(before.unknown, first, stop),
        list(after.accepted),
        dry_run,
    )
