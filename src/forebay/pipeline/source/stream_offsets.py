"""The position of a streaming query in its topics, and how far its next batch goes.

The position in the checkpoint is JSON in the shape of Spark's Kafka source: topic, partition, and
the next offset to read.

    {"/default/orders": {"0": 123}, "/default/clicks-part-2": {"2": 7}}

The name of a topic includes its partition, so `orders` and `orders-part-0` are different keys. A
position does not say which file or object holds an offset, because that may change before a batch
is run again. Only `TopicSizes` does I/O: it reads descriptors and index files to estimate the size
of messages.

Offsets without messages (holes) count nowhere: not for the limits of a batch, and not for the lag.
A batch that reaches a hole which it may skip ends after it, however wide the hole is.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from forebay.catalog.records import TopicRecord, messages_between, offset_after
from forebay.config import settings_from
from forebay.errors import InvalidTopicName, UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, parse_topic
from forebay.limits import OFFSET_MAX
from forebay.pipeline.source.plan import KnownPlaces, after_skipped
from forebay.settings import StoreSettings
from forebay.topic.view import StoreView, TopicView
from forebay.wal.segment import Segment

Positions: TypeAlias = dict[TopicName, int]
"""For each topic, the next offset to read."""

_Key = TypeVar("_Key", bound=TopicName | str)
_SHAPE: Final = 'it should look like {"/default/orders": {"0": 123}}'


# ---- the checkpoint's JSON


def encode_positions(positions: Mapping[TopicName, int]) -> dict[str, dict[str, int]]:
    """Returns the positions in the JSON form of a checkpoint, in a stable order of topics."""
    return {
        str(topic): {str(topic.partition): positions[topic]} for topic in sorted(positions, key=str)
    }


def decode_positions(document: object) -> Positions:
    """The inverse of `encode_positions`. Raises UsageError for any other value."""
    if not isinstance(document, dict):
        raise UsageError(f"{document!r} is not a position of a stream: {_SHAPE}")
    found: Positions = {}
    for name, partitions in document.items():
        try:
            topic = parse_topic(name)
        except InvalidTopicName as error:
            raise UsageError(f"a stream's position has an invalid topic: {error}") from error
        if not isinstance(partitions, dict) or list(partitions) != [str(topic.partition)]:
            raise UsageError(
                f"{topic}: a stream's position has {partitions!r} where the partition "
                f"{topic.partition} and its offset should be: {_SHAPE}"
            )
        offset = partitions[str(topic.partition)]
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= OFFSET_MAX:
            raise UsageError(
                f"{topic}: {offset!r} in a stream's position is not an offset: {_SHAPE}"
            )
        if topic in found:
            raise UsageError(f"{topic} occurs twice in a stream's position: {_SHAPE}")
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
    """Divides `limit` among the keys in proportion to `wanted`. No key gets more than it wants.

    First each key gets its `least` (by default 1) until the limit is used up. `turn` selects the
    key to start with. With an increasing `turn` every key gets something eventually, even if there
    are more keys than the limit. A key that gets nothing is not in the result.
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
        given[key] += 1  # the remainder of the rounding
    return given


def turn_of(positions: Mapping[TopicName, int]) -> int:
    """The `turn` for `share`: a number that grows by one with every message that is read."""
    return sum(positions.values())


Holes: TypeAlias = Mapping[TopicName, TopicRecord]
"""For each topic, the record, which has its holes. A topic that is not in it has none."""
_WHOLE: Final = TopicRecord()


def limit_messages(
    start: Positions,
    end: Positions,
    limit: int,
    holes: Holes | None = None,
    *,
    fail_on_data_loss: bool = True,
) -> Positions:
    """The end of a batch of at most `limit` messages between `start` and `end`.

    `fail_on_data_loss` says which holes the batch may skip; see `after_skipped`.
    """
    records = {topic: (holes or {}).get(topic, _WHOLE) for topic in start}
    wanted = {
        topic: messages_between(records[topic], offset, end[topic])
        for topic, offset in start.items()
    }
    given = share(wanted, limit, turn=turn_of(start))
    found: Positions = {}
    for topic, offset in start.items():
        count = given.get(topic, 0)
        if count == wanted[topic]:  # if it is 0, nothing or only a hole is left
            found[topic] = end[topic]
        else:
            reached = offset_after(records[topic], offset, count)
            found[topic] = _after_hole(records[topic], reached, end[topic], fail_on_data_loss)
    return found


def _after_hole(record: TopicRecord, offset: int, end: int, fail_on_data_loss: bool) -> int:
    return min(after_skipped(record, offset, fail_on_data_loss=fail_on_data_loss), end)


class Sizes(Protocol):
    """Estimates how many bytes the messages of one topic take."""

    def message_bytes(self, first: int, end: int) -> int:
        """The bytes of the message at `first`, or the next one that exists; at least 1."""

    def reach(self, first: int, end: int, limit: int) -> int:
        """Returns an offset, at most `end`: from `first` to it there are about `limit` bytes."""


def limit_bytes(
    start: Positions,
    end: Positions,
    limit: int,
    sizes: Mapping[TopicName, Sizes],
    holes: Holes | None = None,
    *,
    fail_on_data_loss: bool = True,
) -> Positions:
    """The end of a batch of about `limit` bytes at most, and at least one message."""
    records = {topic: (holes or {}).get(topic, _WHOLE) for topic in start}
    counts = {
        topic: messages_between(records[topic], offset, end[topic])
        for topic, offset in start.items()
    }
    one = {
        topic: sizes[topic].message_bytes(start[topic], end[topic])
        for topic, count in counts.items()
        if count
    }
    wanted = {topic: size * counts[topic] for topic, size in one.items()}
    given = share(wanted, limit, least=one, turn=turn_of(start))
    found = {topic: offset if counts[topic] else end[topic] for topic, offset in start.items()}
    if one and not given:  # every message is larger than the limit
        waiting = sorted(one)
        given = {waiting[turn_of(start) % len(waiting)]: 0}
    for topic, amount in given.items():
        record, first = records[topic], start[topic]
        reached = sizes[topic].reach(first, end[topic], amount)
        reached = max(reached, offset_after(record, first, 1))
        found[topic] = _after_hole(record, reached, end[topic], fail_on_data_loss)
    return found


# ---- which topics


@dataclass(frozen=True, slots=True)
class TopicEnds:
    """The oldest offset of a topic, and the offset after its newest message."""

    start: int
    end: int
    record: TopicRecord = _WHOLE
    """Has the holes between them."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream position that is outside its topic: deleted, or after the end."""

    topic: TopicName
    position: int
    now: TopicEnds | None
    """None if the topic does not exist."""

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.topic} is gone; the stream was at offset {self.position}"
        if self.now.end < self.position:
            return (
                f"{self.topic} ends at offset {self.now.end}, but the stream was at "
                f"{self.position}: the topic was created again, or the log of its owner is not "
                "visible here"
            )
        return (
            f"{self.topic}: retention has deleted offsets {self.position} to {self.now.start - 1}; "
            f"the oldest is {self.now.start}"
        )


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a stream can read now."""

    start: Positions
    """The first offset to read of each topic that exists."""
    end: Positions
    """For the same topics, the offset to stop before."""
    new: Positions
    """Topics that are new to the stream, with their oldest offsets."""
    losses: tuple[Loss, ...]


def outlook(
    position: Positions, now: Mapping[TopicName, TopicEnds], *, fail_on_data_loss: bool = True
) -> Outlook:
    """Returns what a stream at `position` can read. `now` has the current ends of the topics.

    A topic that ends before the stream's position is a loss, and the stream waits at its position.
    The first batch that includes a new topic reads no messages from it. This puts the topic's
    oldest offset into the checkpoint, so a batch that is run again reads the same messages. It is
    no loss if retention has deleted only offsets without messages, which the stream skips.
    """
    start: Positions = {}
    end: Positions = {}
    losses = []
    for topic, offset in position.items():
        found = now.get(topic)
        if found is not None and offset <= found.end:
            offset = _after_hole(found.record, offset, found.end, fail_on_data_loss)  # noqa: PLW2901
        if found is None or offset < found.start or offset > found.end:
            losses.append(Loss(topic, offset, found))
        if found is not None:
            start[topic] = max(offset, found.start)
            end[topic] = max(found.end, start[topic])
    new = {topic: found.start for topic, found in now.items() if topic not in position}
    return Outlook(start, end, new, tuple(losses))


def ranges(start: Positions, end: Positions) -> dict[TopicName, tuple[int, int]]:
    """The offset range that a batch from `start` to `end` reads from each topic, sorted by topic.

    A topic that is only in `end` is new, and nothing is read from it.
    """
    return {
        topic: (start[topic], end[topic])
        for topic in sorted(end)
        if topic in start and start[topic] < end[topic]
    }


# ---- lag


def stream_lag(
    progress: Mapping[str, Any], source: str | Path | StoreSettings | None = None
) -> dict[str, int]:
    """How many messages of each topic the query has not read yet.

    `progress` is `query.lastProgress`, or the progress that a StreamingQueryListener receives. The
    result covers all Forebay sources of the query. Other sources are ignored. With the store as
    `source` (its directory, configuration file or settings), offsets without messages do not count.
    Without it, they do: the progress has only offsets.
    """
    if source is None:
        return _lag(progress, lambda _: _WHOLE)
    with StoreView(settings_from(source)) as store:
        return _lag(progress, lambda topic: _record(store, topic))


def _record(store: StoreView, topic: TopicName) -> TopicRecord:
    resources = store.resources()
    found = None if resources is None else resources.catalog.record(topic)
    return found or _WHOLE


def _lag(
    progress: Mapping[str, Any], record_of: Callable[[TopicName], TopicRecord]
) -> dict[str, int]:
    found: dict[str, int] = {}
    for source in progress["sources"]:
        # Spark gives all sources that are written in Python the same name.
        if "PythonMicroBatchStream" not in str(source["description"]):
            continue
        try:
            newest, done = (_read(source[name]) for name in ("latestOffset", "endOffset"))
        except UsageError:  # a source of another format
            continue
        for topic, offset in newest.items():
            found[str(topic)] = messages_between(record_of(topic), done.get(topic, 0), offset)
    return found


def _read(document: Any) -> Positions:
    """Decodes positions, which Spark passes as text or as a decoded JSON value."""
    if document in (None, "", "null"):
        return {}
    return decode_positions(json.loads(document) if isinstance(document, str) else document)


# ---- how many bytes messages take

_PAGE: Final = 2
"""Descriptors per request. Each may contain an index of several hundred kilobytes."""
_PARTS: Final = 16
"""Parts of a segment. The position of one message is looked up in each part."""


@dataclass(frozen=True, slots=True)
class PositionMap:
    """Maps offsets to positions in one object or segment, and back, by interpolation."""

    places: tuple[tuple[int, int], ...]
    """Known (offset, position) pairs, ascending. The first is the beginning, the last the end."""

    @property
    def first(self) -> int:
        return self.places[0][0]

    @property
    def next(self) -> int:
        return self.places[-1][0]

    def position(self, offset: int) -> int:
        """The approximate position at which the message at `offset` begins."""
        at = bisect_right(self.places, offset, key=lambda place: place[0])
        (low, begin), (high, end) = self._between(at)
        return begin + (end - begin) * (offset - low) // (high - low)

    def offset(self, position: int) -> int:
        """The approximate offset of the message at `position`, rounded down."""
        at = bisect_right(self.places, position, key=lambda place: place[1])
        (low, begin), (high, end) = self._between(at)
        return low + (high - low) * (position - begin) // (end - begin)

    def _between(self, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
        after = min(max(at, 1), len(self.places) - 1)
        return self.places[after - 1], self.places[after]


class TopicSizes:
    """Estimates the bytes of a topic's messages from the indexes of objects and segments.

    An index has an entry for every 1,000 messages or every MiB. Messages between two entries are
    assumed to have the same size. Only the descriptors and index files that the estimate needs are
    read. The map of the last object is cached.
    """

    def __init__(self, view: TopicView, known: KnownPlaces) -> None:
        self._view = view
        self._known = known
        self._held: PositionMap | None = None

    def message_bytes(self, first: int, end: int) -> int:
        """The bytes of the message at `first`, or of the next one that exists; at least 1."""
        for known in self._maps(first, end):
            at = min(max(first, known.first), known.next - 1)
            return max(known.position(at + 1) - known.position(at), 1)
        return 1

    def reach(self, first: int, end: int, limit: int) -> int:
        """Returns an offset, at most `end`: from `first` to it there are about `limit` bytes."""
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
        """Yields the maps of the objects and segments of `first..end`, in order."""
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
            pass  # retention has deleted the segment; its two ends are good enough
        return _position_map(places, segment.end_offset, segment.size)


def _of_object(descriptor: ObjectDescriptor) -> PositionMap:
    """The positions are those before compression, as far as they are known."""
    stored, size = max(descriptor.size, 1), descriptor.logical_size
    places = {(descriptor.start_offset, 0)}
    places |= {(at, place * size // stored) for at, place in descriptor.offset_index or ()}
    return _position_map(places, descriptor.next_offset, size)


def _position_map(places: set[tuple[int, int]], end: int, size: int) -> PositionMap:
    """Makes a map of the places and the end. Drops places that do not ascend in both values."""
    found: list[tuple[int, int]] = []
    for place in sorted(places):
        if not found or (place[0] > found[-1][0] and place[1] > found[-1][1]):
            found.append(place)
    while len(found) > 1 and (found[-1][0] >= end or found[-1][1] >= size):
        found.pop()
    return PositionMap((*found, (end, size)))
