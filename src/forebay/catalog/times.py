"""The time rows of a topic: which object to look into for the first message at or after a time.

Publish times need not ascend, so the index has maxima. An object gets a *time row* only if its
highest publish time is above those of all objects before it. The key has that time, and the value
the offset at which the object begins. The first row at or after a time leads to the object that
holds the first message of that time or later: one request that reads one entry.

What the rows promise: no message before a row's offset is later than the time of the row before it.
A compaction keeps that promise, because it changes no message and no offset; so it leaves the rows
as they are, and a row may lead into the middle of an object. A restore may put messages between
others. It begins a new *series* of rows, which the owner of the topic then makes anew.

Beware: the rows end at the first object whose descriptor does not name its highest publish time
(`Times.next`): one of an earlier release. From there on a lookup has to go from object to object.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.catalog.kv import Entry, Kv, Put, Remove
from forebay.catalog.records import decode_pointer
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import CatalogKeys, TopicName, after_prefix
from forebay.limits import OFFSET_MAX

_WINDOW_ROWS: Final = 1024
"""About the rows that the first request of a lookup covers. etcd visits all keys of a range."""
_REMOVED_MAX: Final = 64
"""Rows of former series that one transaction removes."""

Write = Put | Remove


def pointer(start: int) -> bytes:
    """The value of a time row, of an end row and of the key `cur`: where the object begins."""
    return b'{"start":"%020d"}' % start


@dataclass(frozen=True, slots=True)
class Times:
    """How far a topic's time rows go."""

    series: str
    """Part of the keys of the rows: rows of another series do not count."""
    next: int | None = None
    """Only messages before this offset are covered; None: those of all objects are."""
    lowest: int | None = None
    highest: int | None = None
    """The times of the first and the last row; None if there is no row yet."""

    def with_row(self, time: int) -> Times:
        return replace(self, lowest=time if self.lowest is None else self.lowest, highest=time)


def begun(next_offset: int | None = None) -> Times:
    """A new series without rows."""
    return Times(secrets.token_hex(4), next_offset)


def decode_times(body: Any) -> Times | None:
    """Decodes the part of the totals; None if there is none, or one that cannot be read."""
    match body:
        case {"series": str() as series, **rest} if series.isalnum():
            numbers: list[Any] = [rest.get(name) for name in ("next", "lowest", "highest")]
            if all(n is None or (type(n) is int and 0 <= n <= OFFSET_MAX) for n in numbers):
                return Times(series, *numbers)
    return None


class TimeRows:
    """The time rows of one topic."""

    def __init__(self, kv: Kv, keys: CatalogKeys, topic: TopicName) -> None:
        self._kv = kv
        self._keys = keys
        self._topic = topic

    def added(self, times: Times, objects: Sequence[ObjectDescriptor]) -> tuple[Times, list[Write]]:
        """Returns the state and the writes after the objects were added to the chain.

        They are at its end, or hold the messages of objects that they replace.
        """
        rows: list[Write] = []
        for each in objects:
            if times.next is not None:
                if each.start_offset < times.next < each.next_offset:
                    times = replace(times, next=each.start_offset)
            elif each.highest_publish_time is None:
                times = replace(times, next=each.start_offset)
            else:
                times = self._counted(times, each, rows)
        return times, rows

    def _counted(self, times: Times, each: ObjectDescriptor, rows: list[Write]) -> Times:
        time = each.highest_publish_time
        if time is None or (times.highest is not None and time <= times.highest):
            return times
        rows.append(
            Put(self._keys.time(self._topic, times.series, time), pointer(each.start_offset))
        )
        return times.with_row(time)

    def counted(
        self, times: Times, objects: Sequence[ObjectDescriptor]
    ) -> tuple[Times, list[Write], bool]:
        """Covers the objects that begin at `times.next`; whether all of them could be covered."""
        rows: list[Write] = []
        for each in objects:
            if each.highest_publish_time is None:
                return replace(times, next=each.start_offset), rows, False
            times = replace(self._counted(times, each, rows), next=each.next_offset)
        return times, rows, True

    def retired(self, times: Times, oldest: ObjectDescriptor) -> tuple[Times | None, list[Write]]:
        """Returns the state and the writes after the oldest object was removed.

        None if the rows have to be made anew: the object had the highest time of all, so the rows
        tell nothing about the objects after it.
        """
        time = oldest.highest_publish_time
        if times.highest is None or time is None:
            return times, []
        if time >= times.highest and times.next is None:
            return None, []
        rows = self._rows(times, times.lowest or 0, OFFSET_MAX, 2)
        starts = [decode_pointer(row.value, row.key) for row in rows]
        if len(rows) < 2 or starts[1] > oldest.next_offset:
            return times, []
        # No message is left before the second row's offset, so nothing needs the first row.
        lowest = self._keys.time_of(self._topic, times.series, rows[1].key)
        return replace(times, lowest=lowest), [Remove(rows[0].key)]

    def find(self, times: Times, time_ms: int, objects: int) -> int | None:
        """Returns an offset before which no object has a message of that time or later.

        None if no object that is covered has one. `objects` is about the number of rows.
        """
        if times.highest is None or time_ms > times.highest:
            return None
        stop = times.highest + 1
        span = times.highest - (times.lowest or 0)
        end = min(time_ms + span * _WINDOW_ROWS // max(objects, 1) + 1, stop)
        for first, last in ((time_ms, end), (end, stop)):
            found = self._rows(times, first, last, 1) if first < last else []
            if found:
                return decode_pointer(found[0].value, found[0].key)
        return None

    def _rows(self, times: Times, start: int, stop: int, limit: int) -> list[Entry]:
        keys, topic = self._keys, self._topic
        at, end = (keys.time(topic, times.series, time) for time in (start, stop))
        return self._kv.range(at, end, limit=limit)

    def remove_former(self, times: Times) -> bool:
        """Removes rows of other series; whether none is left."""
        every = self._keys.times(self._topic)
        own = self._keys.times(self._topic, times.series)
        for start, end in ((every, own), (after_prefix(own), after_prefix(every))):
            found = self._kv.range(start, end, limit=_REMOVED_MAX)
            if found:
                self._kv.commit([], [Remove(entry.key) for entry in found])
                return False
        return True
