"""The partitions of a topic: `orders-part-0`, `orders-part-1` and so on, each a topic of its own.

A topic has partitions or has none. `orders` and `orders-part-0` would be the same partition for
Spark and for Danube's clients, so one of them is not created beside the other.

Beware: only creations that go through `Store.create` are checked. `Store.topic` opens or creates
the one topic that it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.errors import TopicConflict, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import PARTITIONS_MAX


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    topic: str
    created: bool
    """False if it existed before."""
    partitions: tuple[str, ...] = ()
    """All its partitions; none if it is a topic without partitions."""


def partition_names(base: TopicName, count: int) -> list[TopicName]:
    """Returns the names of `count` partitions; UsageError if there cannot be as many."""
    if not 1 <= count <= PARTITIONS_MAX:
        raise UsageError(f"{base} cannot have {count} partitions; it must be 1 to {PARTITIONS_MAX}")
    if base.is_partition:
        raise UsageError(
            f"{base} is the name of a partition, which has no partitions of its own; name the "
            f"topic {base.base}"
        )
    return [parse_topic(f"{base}-part-{number}") for number in range(count)]


def partitions_of(base: TopicName, topics: Iterable[TopicName]) -> list[TopicName]:
    """Returns those of the topics that are partitions of `base`, ordered by their number."""
    found = {each for each in topics if each.is_partition and each.base == str(base)}
    return sorted(found, key=lambda each: each.partition)


def require_no_partitions(topic: TopicName, present: Iterable[TopicName]) -> None:
    """Raises TopicConflict if a topic without partitions cannot be created under this name."""
    found = partitions_of(topic, present)
    if found:
        raise TopicConflict(
            f"{topic} has {len(found)} partitions, such as {found[0]}: a topic has partitions or "
            "has none; choose another name, or delete the partitions"
        )


def has_no_partitions(topic: TopicName) -> TopicConflict:
    """Returns the error for partitions of a name that a topic without partitions has."""
    return TopicConflict(
        f"{topic.base} exists as a topic without partitions, so {topic} cannot be created: choose "
        "another name, or delete it"
    )


def require_not_fewer(base: TopicName, found: list[TopicName], count: int) -> None:
    """Raises TopicConflict if the topic has more partitions already."""
    if found and found[-1].partition >= count:
        raise TopicConflict(
            f"{base} has {len(found)} partitions, up to {found[-1]}: their number can grow, and "
            f"not become {count}; delete the topic first"
        )
