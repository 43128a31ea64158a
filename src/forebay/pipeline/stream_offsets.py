"""Where a streaming query has got to, topic by topic, and how far its next batch may go. Pure.

In the checkpoint it is JSON of the shape that Spark's Kafka source writes: the topic, its
partition, and the next offset to read.

    {"/default/orders": {"0": 123}, "/default/clicks-part-2": {"2": 7}}

A topic's name is written whole, its partition number too, so that `orders` and `orders-part-0` are
never taken for each other. Offsets say nothing about files or objects: what they name may move
from one to the other before a batch is run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from forebay.errors import InvalidTopicName, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import OFFSET_MAX

Positions: TypeAlias = dict[TopicName, int]
"""The next offset to read of each topic."""

_Key = TypeVar("_Key", bound=TopicName | str)
_SHAPE: Final = 'it should be like {"/default/orders": {"0": 123}}'


# -- the checkpoint's JSON ----------------------------------------------------------------------


def encode_positions(positions: Mapping[TopicName, int]) -> dict[str, dict[str, int]]:
    """As they are in a checkpoint; the same positions always give the same text."""
    return {
        str(topic): {str(topic.partition): positions[topic]} for topic in sorted(positions, key=str)
    }


def decode_positions(document: object) -> Positions:
    """UsageError for anything that `encode_positions` did not make."""
    if not isinstance(document, dict):
        raise UsageError(f"{document!r} is not a position of a stream: {_SHAPE}")
    found: Positions = {}
    for name, partitions in document.items():
        try:
            topic = parse_topic(name)
        except InvalidTopicName as error:
            raise UsageError(f"a stream's position names no topic: {error}") from error
        if not isinstance(partitions, dict) or list(partitions) != [str(topic.partition)]:
            raise UsageError(
                f"{topic}: a stream's position has {partitions!r} for its one partition, "
                f"{topic.partition}: {_SHAPE}"
            )
        offset = partitions[str(topic.partition)]
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= OFFSET_MAX:
            raise UsageError(f"{topic}: {offset!r} in a stream's position is no offset: {_SHAPE}")
        if topic in found:
            raise UsageError(f"{topic} is twice in a stream's position: {_SHAPE}")
        found[topic] = offset
    return found


# -- how far a batch goes -----------------------------------------------------------------------


def share(
    wanted: Mapping[_Key, int],
    limit: int,
    *,
    least: Mapping[_Key, int] | None = None,
    turn: int = 0,
) -> dict[_Key, int]:
    """Shares `limit` out in proportion to what is wanted: never more in all, nor than wanted.

    Everyone who wants something gets `least` of it first (1, or what is wanted if that is less),
    as far as the limit goes; the first in line is another one at every `turn`, so that with a
    limit below the number of topics all of them have their turns. Who gets nothing is not in the
    answer.
    """
    waiting = sorted(key for key, amount in wanted.items() if amount > 0)
    if sum(wanted[key] for key in waiting) <= limit:
        return {key: wanted[key] for key in waiting}
    at = turn % len(waiting)
    given: dict[_Key, int] = {}
    left = limit
    for key in (*waiting[at:], *waiting[:at]):
        first = min(1 if least is None else least[key], wanted[key])
        if first <= left:
            given[key] = first
            left -= first
    more = {key: wanted[key] - amount for key, amount in given.items()}
    total, remaining = sum(more.values()), left
    if total <= left:
        return {key: wanted[key] for key in given}
    for key, amount in more.items():
        part = remaining * amount // total
        given[key] += part
        left -= part
    for key in [key for key, amount in given.items() if amount < wanted[key]][:left]:
        given[key] += 1  # what the rounding left over
    return given


def turn_of(positions: Mapping[TopicName, int]) -> int:
    """A number that grows by one with every message that the stream reads."""
    return sum(positions.values())


def limit_messages(start: Positions, end: Positions, limit: int) -> Positions:
    """The end of a batch of at most `limit` messages between `start` and `end`."""
    wanted = {topic: end[topic] - offset for topic, offset in start.items()}
    given = share(wanted, limit, turn=turn_of(start))
    return {topic: offset + given.get(topic, 0) for topic, offset in start.items()}


class Ruler(Protocol):
    """Tells the bytes of one topic's messages, about."""

    def message_bytes(self, first: int, end: int) -> int:
        """Of one message at `first`: at least 1."""

    def reach(self, first: int, end: int, limit: int) -> int:
        """The offset up to which the messages from `first` take about `limit` bytes."""


def limit_bytes(
    start: Positions, end: Positions, limit: int, rulers: Mapping[TopicName, Ruler]
) -> Positions:
    """The end of a batch of about `limit` bytes at most, and of at least one message."""
    one = {
        topic: rulers[topic].message_bytes(offset, end[topic])
        for topic, offset in start.items()
        if offset < end[topic]
    }
    wanted = {topic: size * (end[topic] - start[topic]) for topic, size in one.items()}
    given = share(wanted, limit, least=one, turn=turn_of(start))
    found = dict(start)
    for topic, amount in given.items():
        reached = rulers[topic].reach(start[topic], end[topic], amount)
        found[topic] = min(max(reached, start[topic] + 1), end[topic])
    if one and not given:  # every message is larger than the limit
        waiting = sorted(one)
        topic = waiting[turn_of(start) % len(waiting)]
        found[topic] = start[topic] + 1
    return found


# -- which topics -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicEnds:
    """A topic as it is now: its oldest offset, and the one after its newest."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that a stream should have read and cannot."""

    topic: TopicName
    position: int
    now: TopicEnds | None
    """None if there is no such topic."""

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.topic} is gone; the stream was at offset {self.position}"
        if self.now.end < self.position:
            return (
                f"{self.topic} ends at offset {self.now.end}, and the stream was at "
                f"{self.position}: it was made anew, or the log of its owner is not to be seen here"
            )
        return (
            f"{self.topic}: offsets {self.position} to {self.now.start - 1} are gone, removed by "
            f"retention; its oldest is {self.now.start}"
        )


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a stream at some position can read now."""

    start: Positions
    """Of the topics that can be read, the first offset to read."""
    end: Positions
    """Of the same topics: the offset before which to stop."""
    new: Positions
    """Topics that the stream did not know, at their oldest offsets."""
    losses: tuple[Loss, ...]

    @property
    def messages(self) -> int:
        return sum(self.end[topic] - offset for topic, offset in self.start.items())


def outlook(position: Positions, now: Mapping[TopicName, TopicEnds]) -> Outlook:
    """What there is to read for a stream at `position`, as the topics are `now`.

    A topic that was made anew, or whose newest part is not to be seen, waits at its position. A
    topic that is new begins at its oldest offset in a batch that reads nothing of it: so the
    offset is in the checkpoint before the first message is read, and a batch that is run again
    reads the same ones.
    """
    start: Positions = {}
    end: Positions = {}
    losses = []
    for topic, offset in position.items():
        found = now.get(topic)
        if found is None or offset < found.start or offset > found.end:
            losses.append(Loss(topic, offset, found))
        if found is not None:
            start[topic] = max(offset, found.start)
            end[topic] = max(found.end, start[topic])
    new = {topic: found.start for topic, found in now.items() if topic not in position}
    return Outlook(start, end, new, tuple(losses))


def ranges(start: Positions, end: Positions) -> dict[TopicName, tuple[int, int]]:
    """What a batch from `start` to `end` reads, by topic, in the order of their names.

    A topic that only `end` knows begins there.
    """
    return {
        topic: (start[topic], end[topic])
        for topic in sorted(end)
        if topic in start and start[topic] < end[topic]
    }


# -- lag ----------------------------------------------------------------------------------------


def stream_lag(progress: Mapping[str, Any]) -> dict[str, int]:
    """Messages that each topic has and the query has not read, by a StreamingQueryProgress.

    `progress` is `query.lastProgress`, or what a StreamingQueryListener is given. The topics of
    all sources of this format that the query has; other sources are left out.
    """
    found: dict[str, int] = {}
    for source in progress["sources"]:
        # Spark calls every source that is written in Python by the same name.
        if "PythonMicroBatchStream" not in str(source["description"]):
            continue
        try:
            newest, done = (_read(source[name]) for name in ("latestOffset", "endOffset"))
        except UsageError:  # of another format
            continue
        for topic, offset in newest.items():
            found[str(topic)] = max(offset - done.get(topic, 0), 0)
    return found


def _read(document: Any) -> Positions:
    """Spark gives JSON as text or decoded, by where the progress comes from."""
    if document in (None, "", "null"):
        return {}
    return decode_positions(json.loads(document) if isinstance(document, str) else document)
