"""Finds the first message that was published at a time or later, over both tiers.

Publish times need not ascend, so this means the lowest offset with such a time. The time rows of
the catalog (`forebay.catalog.times`) lead to the object that holds it. In the local log, the index
of each sealed segment has its highest publish time. What remains is read in order: the messages of
one object or one segment, and of objects and segments whose highest time is not known.

Offsets that are lost hold no message, so a search passes over them.

Beware: a message that is appended during a search may be missed. If no message is found, the result
is the end of the log at the time of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple, Protocol

from forebay.catalog.catalog import Catalog
from forebay.errors import LostOffsets, OffsetOutOfRange, UsageError
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.names import TopicName
from forebay.interrupts import run_aside
from forebay.limits import CATALOG_PAGE, OFFSET_MAX
from forebay.wal.reader import LogReader
from forebay.wal.segment import Segment, SegmentIndexes

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def milliseconds(time: datetime) -> int:
    """Returns a time as milliseconds since 1970, rounded up: no earlier message is included.

    Raises UsageError for a time without a time zone, which could mean several moments.
    """
    if time.tzinfo is None:
        raise UsageError(
            f"{time.isoformat()} has no time zone; pass one, such as "
            "datetime(2026, 1, 1, tzinfo=timezone.utc)"
        )
    return max(-((_EPOCH - time) // timedelta(milliseconds=1)), 0)


class LocalLog(Protocol):
    """The part of a local log that a search uses."""

    @property
    def start_offset(self) -> int: ...

    def segments(self) -> Iterable[Segment]: ...


class Place(NamedTuple):
    """Offsets among which a message may be, in one object or one segment."""

    first: int
    next: int
    descriptor: ObjectDescriptor | None = None


OpenReader = Callable[[int, ObjectDescriptor | None], LogReader]
"""Opens a reader at an offset. The descriptor is that of the object that holds it, if known."""


class TimeSearch:
    """A search in one topic. `tail`: every message before it is in an object of the catalog."""

    def __init__(
        self,
        topic: TopicName,
        catalog: Catalog | None,
        tail: int,
        local: LocalLog,
        indexes: SegmentIndexes,
    ) -> None:
        self._topic = topic
        self._catalog = catalog
        self._tail = tail
        self._local = local
        self._indexes = indexes
        self._found: list[ObjectDescriptor] = []

    def reader(self, time_ms: int, start: int, end: int, open_reader: OpenReader) -> LogReader:
        """Returns a reader at the first message of `start..end` at that time or later.

        If there is none, the reader is at `end`.
        """
        at = max(self._begin(time_ms), start)
        while at < end:
            place = self._place(at, time_ms)
            if place.first >= end:
                break
            until = min(place.next, end)
            reader = open_reader(place.first, place.descriptor)
            try:
                if reader.find_time(time_ms, until):
                    return reader
                at = max(until, reader.position)
            except LostOffsets as lost:
                at = lost.end
            except OffsetOutOfRange as gone:
                if gone.start <= place.first:
                    raise
                at = gone.start  # retention has removed it meanwhile
            except BaseException:
                reader.close()
                raise
            reader.close()
        return open_reader(end, None)

    def _begin(self, time_ms: int) -> int:
        """Returns an offset before which no message is of that time or later."""
        if self._catalog is None:
            return 0
        # The tail is older than this answer, so the rows cover every object before it.
        chain = self._catalog.chain(self._topic)
        found = run_aside(lambda: chain.first_at(time_ms))
        return self._tail if found is None else found

    def _place(self, at: int, time_ms: int) -> Place:
        """Returns the next place from `at` on that may hold such a message."""
        while at < self._local.start_offset and (page := self._objects(at)):
            for each in page:
                highest = each.highest_publish_time
                if each.end_offset >= at and (highest is None or highest >= time_ms):
                    return Place(max(at, each.start_offset), each.next_offset, each)
            at = max(at, page[-1].next_offset)
        for segment in self._local.segments():
            if segment.end_offset <= at:
                continue
            highest = self._indexes.highest_publish_time(segment)
            if highest is None or highest >= time_ms:
                return Place(max(at, segment.first_offset), segment.end_offset)
            at = segment.end_offset
        return Place(at, OFFSET_MAX)

    def _objects(self, at: int) -> list[ObjectDescriptor]:
        """Returns the object that holds `at`, then pages of those after it."""
        catalog = self._catalog
        if catalog is None:
            return []
        if not self._found:
            read = partial(catalog.get_object_descriptors_range, limit=1, begins=True)
        else:
            read = partial(
                catalog.get_object_descriptors_range, limit=CATALOG_PAGE, decoder=decode_outline
            )
        self._found = run_aside(lambda: read(self._topic, at))
        return self._found
