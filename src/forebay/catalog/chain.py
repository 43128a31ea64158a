"""The rows of a topic's chain: its descriptors, a row for each end offset, and the totals.

A descriptor's key has the offset at which its object begins, and a lookup wants the object that
holds an offset. So each object has an *end row* too, whose key has its last offset. The first end
row at or after an offset is that of the object that holds it: one request that reads one entry.
The totals count objects and bytes, so that nobody has to read the chain to count it. *Time rows*
lead from a publish time to an object (`forebay.catalog.times`).

All of these are written in the transaction that changes the chain, which compares the topic's
record. The layout: `docs/formats/catalog.md`.

Beware: catalogs of earlier releases, and those of Danube, have neither end rows nor totals nor time
rows. `Chain.index` adds them, a batch at a time. Until then a lookup finds no end row, or one of a
later object, and must search (`Catalog.get_object_descriptors_range`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from forebay.catalog.kv import ABSENT, Compare, Entry, Kv, Put, Remove
from forebay.catalog.records import TopicRecord, decode_json, decode_record
from forebay.catalog.times import TimeRows, Times, Write, begun, decode_times, pointer
from forebay.errors import DescriptorError
from forebay.format.descriptor import (
    ObjectDescriptor,
    decode_outline,
    encode_descriptor,
    sampled,
)
from forebay.format.names import CatalogKeys, TopicName
from forebay.limits import CATALOG_OPERATIONS_MAX, DESCRIPTOR_INDEX_ENTRIES, OFFSET_MAX

_LOOKUPS: Final = 3
"""How often a lookup by time is tried while the rows are made anew."""
INDEXED_BATCH: Final = 64
"""Objects that one transaction of `Chain.index` adds rows for."""

assert INDEXED_BATCH + 2 <= CATALOG_OPERATIONS_MAX

__all__ = ["WINDOW", "Chain", "Totals", "Write", "pointer", "read_windows", "stored"]


@dataclass(frozen=True, slots=True)
class Totals:
    """How many objects a topic has, and their bytes."""

    objects: int = 0
    bytes: int = 0
    next: int | None = None
    """Only objects that begin before this offset are counted; None: all of them are."""
    times: Times | None = None
    """How far the time rows go; None if there are none yet."""

    def counts(self, descriptor: ObjectDescriptor) -> bool:
        return self.next is None or descriptor.start_offset < self.next


_NOTHING_COUNTED: Final = Totals(next=0)


def encode_totals(totals: Totals) -> bytes:
    body = asdict(totals)
    if totals.times is None:
        del body["times"]
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def decode_totals(data: bytes, what: str) -> Totals:
    """Decodes what `encode_totals` returned. `what` names it in the DescriptorError."""
    match decode_json(data, what):
        case {
            "objects": int() as objects,
            "bytes": int() as size,
            "next": int() | None as after,
            **rest,
        }:
            return Totals(objects, size, after, decode_times(rest.get("times")))
    raise DescriptorError(f"{what} does not hold the totals of a topic")


def stored(descriptor: ObjectDescriptor) -> ObjectDescriptor:
    """Returns the descriptor as the catalog keeps it, with few entries of its index."""
    return sampled(descriptor, DESCRIPTOR_INDEX_ENTRIES)


WINDOW: Final = 4096
"""Offsets that the first request of `read_windows` covers, if the caller knows no better."""
_WINDOW_FACTOR: Final = 16


def read_windows(
    read: Callable[[int, int, int], list[Entry]],
    start: int,
    stop: int,
    limit: int,
    *,
    width: int,
    tail: Callable[[], int | None],
) -> Iterator[list[Entry]]:
    """Reads the first `limit` entries of `start..stop`, a window of offsets at a time.

    `read` returns the entries of a window, at most as many as its last argument says. Each window
    is larger than the one before. For etcd counts all keys of the range that it is asked for,
    whatever the limit: in one range to the end of a long topic that takes longer than anything
    else. `tail` is called after the first window; the rest after the tail, where nothing is
    expected, is one window.
    """
    end = min(start + width, stop)
    found = read(start, end, limit)
    yield found
    limit -= len(found)
    known: int | None = None
    while limit > 0 and end < stop:
        known = tail() or 0 if known is None else known
        width *= _WINDOW_FACTOR
        start, end = end, min(end + width, stop, known) if end < known else stop
        found = read(start, end, limit)
        yield found
        limit -= len(found)


class Chain:
    """The chain of one topic, as rows of the catalog."""

    def __init__(self, kv: Kv, keys: CatalogKeys, topic: TopicName) -> None:
        self._kv = kv
        self._keys = keys
        self._topic = topic
        self._times = TimeRows(kv, keys, topic)

    def changed(
        self,
        added: Sequence[ObjectDescriptor],
        removed: Sequence[ObjectDescriptor] = (),
        *,
        ends_max: int | None = None,
        in_order: bool = True,
    ) -> list[Write]:
        """Returns the writes that add and remove objects.

        They must be part of a transaction that compares the record as it was before this call and
        changes it: nothing else protects the totals. With `ends_max`, only the end rows of the
        last `ends_max` added objects are written. `in_order` says that objects were added at the
        end, replaced by others with the same messages, or removed at the start. Otherwise the time
        rows are made anew later.
        """
        keys, topic = self._keys, self._topic
        starts = {each.start_offset for each in added}
        ends = {each.end_offset for each in added}
        rows: list[Write] = []
        for each in removed:
            if each.start_offset not in starts:
                rows.append(Remove(keys.descriptor(topic, each.start_offset)))
            if each.end_offset not in ends:
                rows.append(Remove(keys.end(topic, each.end_offset)))
        first = 0 if ends_max is None else max(len(added) - ends_max, 0)
        for number, each in enumerate(added):
            key = keys.descriptor(topic, each.start_offset)
            rows.append(Put(key, encode_descriptor(stored(each))))
            if number >= first:
                rows.append(Put(keys.end(topic, each.end_offset), pointer(each.start_offset)))
        return rows + self._totals_changed(added, removed, in_order=in_order)

    def _totals_changed(
        self,
        added: Sequence[ObjectDescriptor],
        removed: Sequence[ObjectDescriptor],
        *,
        in_order: bool,
    ) -> list[Write]:
        before, _ = self._totals()
        known = before
        if known is None:
            if self._kv.get(self._keys.current(self._topic)) is not None:
                return []  # a catalog of an earlier release: `index` will count
            known = Totals(times=begun())
        times = known.times if in_order else None
        rows: list[Write] = []
        if times is not None and added:
            times, rows = self._times.added(times, added)
        elif times is not None:
            times, rows = self._times.retired(times, removed[-1])
        more = [each for each in added if known.counts(each)]
        fewer = [each for each in removed if known.counts(each)]
        after = replace(
            known,
            objects=known.objects + len(more) - len(fewer),
            bytes=known.bytes + sum(e.size for e in more) - sum(e.size for e in fewer),
            times=times,
        )
        return rows if after == before else [*rows, self._put(after)]

    def totals(self) -> Totals:
        """Returns the totals; those of no object at all if nothing was counted yet."""
        return self._totals()[0] or _NOTHING_COUNTED

    def first_at(self, time_ms: int) -> int | None:
        """Returns an offset before which no object has a message of that time or later.

        None if no object has such a message. Takes two requests, or three after long pauses.
        """
        for _ in range(_LOOKUPS):
            totals = self.totals()
            times = totals.times
            if times is None:
                return 0
            found = self._times.find(times, time_ms, totals.objects)
            if found is not None:
                return found
            if times.highest is None or time_ms > times.highest:
                return times.next
            # The row of the highest time is gone: a new series has replaced this one.
        return 0

    def index(self, batches: int) -> bool:
        """Adds the rows that are missing in a chain of an earlier release; whether all is done.

        Works on at most `batches` batches, and continues there at the next call. A batch during
        which another process changed the chain is done at the next call.
        """
        for _ in range(batches):
            totals, revision = self._totals()
            known = totals or _NOTHING_COUNTED
            if known.next is None:
                return self._index_times(known, revision)
            # Compared by the last batch: a commit after this would add an object uncounted.
            record = self._kv.get(self._keys.record(self._topic))
            page = self._page(known, record, known.next)
            compares = [Compare(self._keys.totals(self._topic), revision)]
            if not page:
                if record is not None:
                    compares.append(Compare(record.key, record.revision))
                self._kv.commit(compares, [self._put(replace(known, next=None))])
                continue  # the time rows are next
            compares += [Compare(entry.key, entry.revision) for entry in page]
            found = [decode_outline(entry.value) for entry in page]
            rows: list[Write] = [
                Put(self._keys.end(self._topic, each.end_offset), pointer(each.start_offset))
                for each in found
            ]
            after = Totals(
                known.objects + len(found),
                known.bytes + sum(each.size for each in found),
                found[-1].start_offset + 1,
                known.times,
            )
            if self._kv.commit(compares, [*rows, self._put(after)]) is None:
                return False
        return False

    def _index_times(self, totals: Totals, revision: int) -> bool:
        """Adds the next batch of time rows; whether all is done, as far as it can be done.

        It cannot go past an object whose descriptor does not name its highest publish time.
        """
        times = totals.times or begun(0)
        if times.next is None:
            return self._times.remove_former(times)
        record = self._kv.get(self._keys.record(self._topic))
        page = self._page(totals, record, times.next)
        found = [decode_outline(entry.value) for entry in page]
        after, rows, whole = self._times.counted(times, found)
        compares = [Compare(self._keys.totals(self._topic), revision)]
        compares += [Compare(entry.key, entry.revision) for entry in page]
        if not page:
            after = replace(times, next=None)
            if record is not None:
                compares.append(Compare(record.key, record.revision))
        if after != times or totals.times is None:
            self._kv.commit(compares, [*rows, self._put(replace(totals, times=after))])
        return not whole

    def _page(self, known: Totals, record: Entry | None, start: int) -> list[Entry]:
        """Returns the next descriptors from `start` on."""
        mean = max(start // known.objects, 1) if start and known.objects else WINDOW
        tail = decode_record(record.value, TopicRecord, record.key).tail if record else None
        windows = read_windows(
            self.descriptors, start, OFFSET_MAX, INDEXED_BATCH, width=64 * mean, tail=lambda: tail
        )
        return list(next(filter(None, windows), ()))

    def descriptors(self, start: int, stop: int, limit: int) -> list[Entry]:
        """Returns the descriptors that begin in `start..stop`."""
        keys, topic = self._keys, self._topic
        at, end = keys.descriptor(topic, start), keys.descriptor(topic, stop)
        return self._kv.range(at, end, limit=limit)

    def ends(self, start: int, stop: int, limit: int) -> list[Entry]:
        """Returns the end rows of the objects whose last offset is in `start..stop`."""
        at, end = self._keys.end(self._topic, start), self._keys.end(self._topic, stop)
        return self._kv.range(at, end, limit=limit)

    def _totals(self) -> tuple[Totals | None, int]:
        entry = self._kv.get(self._keys.totals(self._topic))
        if entry is None:
            return None, ABSENT
        try:
            return decode_totals(entry.value, entry.key), entry.revision
        except DescriptorError:
            return _NOTHING_COUNTED, entry.revision  # `index` counts again

    def _put(self, totals: Totals) -> Put:
        return Put(self._keys.totals(self._topic), encode_totals(totals))
