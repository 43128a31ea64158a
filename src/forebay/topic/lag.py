"""`Lags`: how far subscriptions are behind, in bytes and in time.

The lag in messages is exact, and computed from the cursor alone (`unread_between`). The other two
are found here:

    bytes     a segment or an object of which nothing is acknowledged counts whole; of one that is
              acknowledged in part, the share of its offsets counts. Objects count as they are when
              they are not compressed. Beyond LAG_OBJECTS_MAX objects the rest is estimated from
              the size of those.
    seconds   the age of the oldest message that is not acknowledged: since it was published. It is
              read once for each position, from wherever it is.

Callers that ask again and again, for many subscriptions, say that it must be cheap: then messages
are read from objects only now and then, and the age of a message that was not read yet is unknown.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from forebay.catalog.catalog import Catalog
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import ForebayError, LostOffsets
from forebay.format.descriptor import decode_outline
from forebay.format.names import TopicName, parse_topic
from forebay.limits import LAG_OBJECTS_MAX
from forebay.topic.store import Topic
from forebay.topic.view import TopicView
from forebay.wal.reader import LogReader
from forebay.wal.segment import Segment

Range = tuple[int, int]
"""A range of offsets, end not included."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_KNOWN_MAX: Final = 10_000
"""Messages whose times are remembered, and topics whose objects are."""
_OBJECTS_SECONDS: Final = 30.0
"""How long the sizes of a topic's objects are used again."""
_CHEAP_READS: Final = 8
_CHEAP_SECONDS: Final = 10.0
"""So many messages are read from objects in this time for all cheap calls together."""
_HOLES_MAX: Final = 100
"""Lost ranges that a search for the oldest message goes past."""


class Part(NamedTuple):
    """A segment or an object."""

    start: int
    end: int
    size: int


class Lag(NamedTuple):
    bytes: int
    seconds: float | None
    """None if the oldest message could not be read, or was not yet."""


@dataclass(frozen=True, slots=True)
class SeenLog:
    """What the lag of a topic is computed from, at one moment."""

    topic: TopicName
    end: int
    """One more than the last synced offset."""
    segments: Sequence[Segment]
    read: Callable[[int, int], LogReader]
    """A reader from an offset to before another one."""

    @classmethod
    def of_topic(cls, topic: Topic) -> SeenLog:
        """Of a topic that is open here."""

        def read(start: int, end: int) -> LogReader:
            return topic.read(start, end=end)

        return cls(parse_topic(topic.name), topic.watermarks().synced, topic.segments(), read)

    @classmethod
    def of_view(cls, view: TopicView) -> SeenLog:
        return cls(view.topic, view.end_offset, view.segments(), view.reader)


def bytes_in(parts: Iterable[Part], ranges: Sequence[Range]) -> int:
    """About how many bytes of the parts are in the ranges. Both ascend."""
    total = 0.0
    at = 0
    for part in parts:
        while at < len(ranges) and ranges[at][1] <= part.start:
            at += 1
        shared = 0
        for start, end in ranges[at:]:
            if start >= part.end:
                break
            shared += min(end, part.end) - max(start, part.start)
        if shared:
            total += part.size * (shared / (part.end - part.start))
    return round(total)


def parts_of(segments: Iterable[Segment]) -> list[Part]:
    return [Part(each.first_offset, each.end_offset, each.size) for each in segments if each.count]


class Lags:
    """The lags of all subscriptions of a store. Thread-safe."""

    def __init__(
        self, catalog: Catalog | None, now_ms: Callable[[], int] = SYSTEM_CLOCK.now_ms
    ) -> None:
        self._catalog = catalog
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._published: OrderedDict[tuple[TopicName, int], int] = OrderedDict()
        """For each topic and offset: when its message was published."""
        self._objects: OrderedDict[TopicName, tuple[float, Range, list[Part]]] = OrderedDict()
        """For each topic: when its objects were read, of which offsets, and their sizes."""
        self._reads: deque[float] = deque(maxlen=_CHEAP_READS)
        """When cheap calls read messages from objects."""

    def of(
        self,
        log: SeenLog,
        unread: Sequence[Range],
        *,
        cheap: bool = False,
        published_ms: int | None = None,
    ) -> Lag:
        """The lag of a subscription that has not acknowledged these ranges, which ascend.

        `published_ms` is when the first of their messages was published, if the caller knows.
        """
        if not unread:
            return Lag(0, 0.0)
        first = unread[0][0]
        parts = [*self._object_parts(log, first), *parts_of(log.segments)]
        if published_ms is None:
            published_ms = self._published_ms(log, first, cheap=cheap)
        if published_ms is None:
            return Lag(bytes_in(parts, unread), None)
        age = max(self._now_ms() - published_ms, 0) / 1000
        return Lag(bytes_in(parts, unread), age)

    # -- bytes ----------------------------------------------------------------------------------

    def _object_parts(self, log: SeenLog, start: int) -> list[Part]:
        """The objects from `start` to the first segment."""
        end = _first_local(log)
        if self._catalog is None or start >= end:
            return []
        with self._lock:
            known = self._objects.get(log.topic)
        now = time.monotonic()
        if known is not None and now - known[0] < _OBJECTS_SECONDS:
            covered, parts = known[1:]
            if covered[0] <= start and end <= covered[1]:
                return [each for each in parts if each.end > start and each.start < end]
        found = estimated_to(end, _read_parts(self._catalog, log.topic, start, end))
        with self._lock:
            _remember(self._objects, log.topic, (now, (start, end), found))
        return found

    # -- time -----------------------------------------------------------------------------------

    def _published_ms(self, log: SeenLog, offset: int, *, cheap: bool) -> int | None:
        key = (log.topic, offset)
        with self._lock:
            known = self._published.get(key)
            if known is not None:
                self._published.move_to_end(key)
                return known
        if cheap and offset < _first_local(log) and not self._may_read():
            return None
        try:
            found = _read_time(log, offset)
        except (ForebayError, OSError):
            return None  # whoever delivers the message reports why it cannot be read
        if found is not None:
            with self._lock:
                _remember(self._published, key, found)
        return found

    def _may_read(self) -> bool:
        now = time.monotonic()
        with self._lock:
            full = len(self._reads) == _CHEAP_READS
            if full and now - self._reads[0] < _CHEAP_SECONDS:
                return False
            self._reads.append(now)
            return True


def _first_local(log: SeenLog) -> int:
    return next((each.first_offset for each in log.segments if each.count), log.end)


def _read_parts(catalog: Catalog, topic: TopicName, start: int, end: int) -> list[Part]:
    found: list[Part] = []
    try:
        while len(found) < LAG_OBJECTS_MAX and (
            page := catalog.get_object_descriptors_range(topic, start, end, decoder=decode_outline)
        ):
            found += [Part(each.start_offset, each.next_offset, each.logical_size) for each in page]
            start = found[-1].end
    except ForebayError:
        pass  # the catalog is away, or damaged: others say so
    return found


def estimated_to(end: int, parts: list[Part]) -> list[Part]:
    """Adds one part for the objects that were not read: as large as the others are."""
    if len(parts) < LAG_OBJECTS_MAX or parts[-1].end >= end:
        return parts
    offsets = sum(each.end - each.start for each in parts)
    size = sum(each.size for each in parts) * (end - parts[-1].end) // max(offsets, 1)
    return [*parts, Part(parts[-1].end, end, size)]


def _read_time(log: SeenLog, offset: int) -> int | None:
    """When the first message at `offset` or later was published; None if there is none."""
    at = offset
    for _ in range(_HOLES_MAX):
        try:
            # One message first: a reader reads ahead up to its end.
            for end in (at + 1, log.end):
                with log.read(at, end) as reader:
                    for message in reader:
                        return message.publish_time
        except LostOffsets as lost:
            at = lost.end
            if at < log.end:
                continue
        return None
    return None


def _remember(known: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    known.pop(key, None)
    known[key] = value
    while len(known) > _KNOWN_MAX:
        known.popitem(last=False)
