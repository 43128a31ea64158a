"""Where a streaming query has got to, topic by topic, and how far its next batch may go.

In the checkpoint it is JSON of the shape that Spark's Kafka source writes: the topic, its
partition, and the next offset to read.

    {"/default/orders": {"0": 123}, "/default/clicks-part-2": {"2": 7}}

A topic's name is written whole, its partition number too, so that `orders` and `orders-part-0` are
never taken for each other. Offsets say nothing about files or objects: what they name may move
from one to the other before a batch is run again. All of it is pure but for `TopicSizes`, which
looks descriptors and index files up to tell how many bytes messages take.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from forebay.errors import InvalidTopicName, UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, parse_topic
from forebay.limits import OFFSET_MAX
from forebay.pipeline.source.plan import KnownPlaces
from forebay.topic.view import TopicView
from forebay.wal.segment import Segment

Positions: TypeAlias = dict[TopicName, int]
"""The next offset to read of each topic."""

_Key = TypeVar("_Key", bound=TopicName | str)
_SHAPE: Final = 'it should be like {"/default/orders": {"0": 123}}'


# ---- the checkpoint's JSON


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


# ---- how far a batch goes


def share(
    wanted: Mapping[_Key, int],
    limit: int,
    *,
    least: Mapping[_Key, int] | None = None,
    turn: int = 0,
) -> dict[_Key, int]:
    """Shares `limit` out in proportion to what is wanted: never more in all, nor than wanted.

    Each that wants something gets `least` of it first (1, or what is wanted if that is less),
    as far as the limit goes; the first in line is another one at every `turn`, so that with a
    limit below the number of topics all of them have their turns. A topic that gets nothing is not
    in the result.
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


class Sizes(Protocol):
    """About how many bytes one topic's messages take."""

    def message_bytes(self, first: int, end: int) -> int:
        """Of one message at `first`: at least 1."""

    def reach(self, first: int, end: int, limit: int) -> int:
        """The offset up to which the messages from `first` take about `limit` bytes."""


def limit_bytes(
    start: Positions, end: Positions, limit: int, sizes: Mapping[TopicName, Sizes]
) -> Positions:
    """The end of a batch of about `limit` bytes at most, and of at least one message."""
    one = {
        topic: sizes[topic].message_bytes(offset, end[topic])
        for topic, offset in start.items()
        if offset < end[topic]
    }
    wanted = {topic: size * (end[topic] - start[topic]) for topic, size in one.items()}
    given = share(wanted, limit, least=one, turn=turn_of(start))
    found = dict(start)
    for topic, amount in given.items():
        reached = sizes[topic].reach(start[topic], end[topic], amount)
        found[topic] = min(max(reached, start[topic] + 1), end[topic])
    if one and not given:  # every message is larger than the limit
        waiting = sorted(one)
        topic = waiting[turn_of(start) % len(waiting)]
        found[topic] = start[topic] + 1
    return found


# ---- which topics


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


# ---- lag


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


# ---- how many bytes messages take

_PAGE: Final = 2
"""Descriptors asked for at once: each may have an index of some hundred kilobytes."""
_PARTS: Final = 16
"""In which a segment is looked at."""


@dataclass(frozen=True, slots=True)
class PositionMap:
    """One object or segment: known (offset, position) in it, its beginning and its end included."""

    places: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        return self.places[0][0]

    @property
    def next(self) -> int:
        return self.places[-1][0]

    def position(self, offset: int) -> int:
        """About where the message of the offset begins."""
        at = bisect_right(self.places, offset, key=lambda place: place[0])
        (low, begin), (high, end) = self._between(at)
        return begin + (end - begin) * (offset - low) // (high - low)

    def offset(self, position: int) -> int:
        """About which message is at the position; the one before it, if in doubt."""
        at = bisect_right(self.places, position, key=lambda place: place[1])
        (low, begin), (high, end) = self._between(at)
        return low + (high - low) * (position - begin) // (end - begin)

    def _between(self, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
        after = min(max(at, 1), len(self.places) - 1)
        return self.places[after - 1], self.places[after]


class TopicSizes:
    """About how many bytes the messages of a topic take, by the indexes of objects and segments.

    An index knows the position of one message in a thousand, or one in a mebibyte; between two
    that it knows, messages are taken to be of one size. Nothing is read but descriptors and index
    files, and of those no more than the asked-for bytes need. The last object is remembered.
    """

    def __init__(self, view: TopicView, known: KnownPlaces) -> None:
        self._view = view
        self._known = known
        self._held: PositionMap | None = None

    def message_bytes(self, first: int, end: int) -> int:
        """Of one message at `first` or after it: at least 1."""
        for known in self._maps(first, end):
            at = min(max(first, known.first), known.next - 1)
            return max(known.position(at + 1) - known.position(at), 1)
        return 1

    def reach(self, first: int, end: int, limit: int) -> int:
        """The offset up to which the messages from `first` take about `limit` bytes."""
        at, left = first, limit
        for known in self._maps(first, end):
            at = max(at, known.first)
            stop = min(known.next, end)
            begin = known.position(at)
            size = known.position(stop) - begin
            if size > left:
                return min(max(known.offset(begin + left), at), stop)
            left -= size
            at = stop
        return at

    def _maps(self, first: int, end: int) -> Iterator[PositionMap]:
        """Those that hold `first..end`, in order; a range that is lost is in none."""
        at = first
        held = self._held
        if held is not None and held.first <= at < held.next:
            yield held
            at = held.next
        while at < end and (page := self._objects(at, end)):
            for descriptor in page:
                self._held = _of_object(descriptor)
                yield self._held
                at = descriptor.next_offset
        for segment in self._view.segments():
            if at < min(segment.end_offset, end):
                yield self._of_segment(segment)
                at = segment.end_offset

    def _objects(self, first: int, end: int) -> list[ObjectDescriptor]:
        resources, record = self._view.store.resources(), self._view.record
        if resources is None or record is None or first >= record.tail:
            return []
        return resources.catalog.get_object_descriptors_range(self._view.topic, first, end, _PAGE)

    def _of_segment(self, segment: Segment) -> PositionMap:
        last = segment.end_offset - 1
        places = {(segment.first_offset, 0), *self._known.of(segment)}
        try:
            for part in range(1, _PARTS):
                places.add(self._view.indexes.floor(segment, last, segment.size * part // _PARTS))
        except FileNotFoundError:
            pass  # retention was faster; the segment's two ends serve
        return _position_map(places, segment.end_offset, segment.size)


def _of_object(descriptor: ObjectDescriptor) -> PositionMap:
    places = {(descriptor.start_offset, 0), *(descriptor.offset_index or ())}
    return _position_map(places, descriptor.next_offset, descriptor.size)


def _position_map(places: set[tuple[int, int]], end: int, size: int) -> PositionMap:
    """Ascending in both, whatever came in."""
    found: list[tuple[int, int]] = []
    for place in sorted(places):
        if not found or (place[0] > found[-1][0] and place[1] > found[-1][1]):
            found.append(place)
    while len(found) > 1 and (found[-1][0] >= end or found[-1][1] >= size):
        found.pop()
    return PositionMap((*found, (end, size)))
