"""`TopicStates`: what is known of the topics of a store, read cheaply again and again.

Of a topic that is open here, everything local comes from memory. The catalog is asked for the
topic's record, and for its objects only when the record's revision changed: every change of a
chain changes it. Topics that are not open are looked at as any other process would, more rarely.

What a caller gets wrong: a state is a picture of about now, put together from places that move.
Local files are looked at before the catalog, so that what was deleted locally in between is in the
objects that are found. While the catalog does not answer, what it said last is shown, and it is
asked only every few seconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import TopicRecord, decode_record
from forebay.errors import ForebayError, ServiceUnavailable, UnknownTopic
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.names import TopicName, parse_topic
from forebay.topic.store import Store
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

_Kept = TypeVar("_Kept")

TOPICS_KEPT_MAX: Final = 512
_NAMES_SHARE: Final = 50
"""Listing all topics takes at most a fiftieth of the time."""
_NAMES_SECONDS_MAX: Final = 30.0
_AWAY_SECONDS: Final = 5.0
_CLOSED_SECONDS: Final = 5.0
"""How old a picture of a topic may be that is not open here: only other processes move it."""
_WHOLE_SECONDS: Final = 10.0
_WHOLE_OBJECTS: Final = 500
"""Long chains are read in full only so often; in between, only what was added to their end."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic about now."""

    name: str
    open: bool
    """Whether this server has it open."""
    start: int
    marks: Watermarks
    memory: range = range(0)
    segments: Sequence[Segment] = ()
    objects: Sequence[ObjectDescriptor] = ()
    record: TopicRecord | None = None
    trouble: str | None = None
    """Why some of it is old, or unknown."""


@dataclass(slots=True)
class _Chain:
    """The objects of a topic as of a revision of its record."""

    record: TopicRecord | None = None
    revision: int = -1
    objects: list[ObjectDescriptor] = field(default_factory=list)
    read_whole: float = -_WHOLE_SECONDS


class TopicStates:
    """Thread-safe: one reads, others wait for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._names_lock = threading.Lock()
        self._names: list[str] = []
        self._names_until = 0.0
        self.catalog_trouble: str | None = None
        """Why the catalog does not answer; None while it does."""
        self._away_until = 0.0
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._closed: OrderedDict[str, tuple[float, TopicState]] = OrderedDict()

    def names(self) -> list[str]:
        """All topics by name; how old the list may be depends on what it costs."""
        with self._names_lock:
            now = time.monotonic()
            if now >= self._names_until:
                try:
                    self._names = self._store.topics()
                except ServiceUnavailable as error:
                    self._away(error)
                took = time.monotonic() - now
                self._names_until = now + min(max(took * _NAMES_SHARE, 0.5), _NAMES_SECONDS_MAX)
            return self._names

    def _away(self, error: ServiceUnavailable) -> None:
        self.catalog_trouble = str(error)
        self._away_until = time.monotonic() + _AWAY_SECONDS

    def read(self, name: str) -> TopicState:
        """The topic about now; what cannot be read is told in its `trouble`."""
        with self._lock:
            state = self._read_open(name)
            return state if state is not None else self._read_closed(name)

    def _read_open(self, name: str) -> TopicState | None:
        topic = self._store.opened(name)
        if topic is None:
            return None
        state = TopicState(
            name,
            open=True,
            start=topic.start_offset,
            marks=topic.watermarks(),
            memory=topic.in_memory(),
            segments=[each for each in topic.segments() if each.count],
        )
        try:
            chain = self._chain(parse_topic(name))
        except ForebayError as error:
            chain = self._chains.get(name, _Chain())
            if not isinstance(error, ServiceUnavailable):
                state = replace(state, trouble=str(error))
        record = chain.record
        if record is None:
            return state
        # What another process uploaded is in the record before the topic here follows it.
        marks = replace(
            state.marks,
            uploaded=max(state.marks.uploaded, min(record.tail, state.marks.synced)),
            verified=max(state.marks.verified, min(record.verified, state.marks.synced)),
        )
        objects = [each for each in chain.objects if each.next_offset > state.start]
        return replace(state, marks=marks, objects=objects, record=record)

    def _read_closed(self, name: str) -> TopicState:
        known = self._closed.pop(name, None)
        now = time.monotonic()
        if now < self._away_until:
            known = known or (0.0, _nothing(name))
        elif known is None or now - known[0] >= _CLOSED_SECONDS:
            try:
                known = now, self._look(name)
            except UnknownTopic:
                known = now, _nothing(name)
            except (ForebayError, OSError) as error:
                known = now, replace(known[1] if known else _nothing(name), trouble=str(error))
        _keep(self._closed, name, known)
        return known[1]

    def _look(self, name: str) -> TopicState:
        with self._store.view() as store, store.topic(name) as view:
            segments = [each for each in view.segments() if each.count]
            chain = self._chain(view.topic)
            record = chain.record or TopicRecord()
            marks = Watermarks(view.end_offset, view.end_offset, record.tail, record.verified)
            return TopicState(
                name,
                open=False,
                start=view.start_offset,
                marks=marks,
                segments=segments,
                objects=[each for each in chain.objects if each.next_offset > view.start_offset],
                record=chain.record,
            )

    # -- objects --------------------------------------------------------------------------------

    def _chain(self, topic: TopicName) -> _Chain:
        """As the catalog has it; as it had it last, while it does not answer."""
        if time.monotonic() < self._away_until:
            return self._chains.get(str(topic), _Chain())
        try:
            found = self._ask(topic)
        except ServiceUnavailable as error:
            self._away(error)
            raise
        self.catalog_trouble = None
        return found

    def _ask(self, topic: TopicName) -> _Chain:
        with self._store.view() as view:
            tiers = view.tiers()
            if tiers is None:
                return _Chain()
            catalog = tiers.catalog
            key = catalog.keys.record(topic)
            entry = catalog.kv.get(key)
            chain = self._chains.pop(str(topic), None) or _Chain()
            _keep(self._chains, str(topic), chain)
            if entry is None:
                self._chains[str(topic)] = chain = _Chain()
            elif entry.revision != chain.revision:
                chain.objects = self._objects(catalog, topic, chain)
                chain.record = decode_record(entry.value, TopicRecord, key)
                chain.revision = entry.revision
            return chain

    def _objects(self, catalog: Catalog, topic: TopicName, known: _Chain) -> list[ObjectDescriptor]:
        now = time.monotonic()
        long = len(known.objects) >= _WHOLE_OBJECTS
        if long and now - known.read_whole < _WHOLE_SECONDS:
            end = known.objects[-1].next_offset
            added = _outlines(catalog, topic, end)
            if not added or added[0].start_offset >= end:
                return known.objects + added
        known.read_whole = now
        return _outlines(catalog, topic, 0)


def _nothing(name: str) -> TopicState:
    return TopicState(name, open=False, start=0, marks=Watermarks(0, 0))


def _outlines(catalog: Catalog, topic: TopicName, start: int) -> list[ObjectDescriptor]:
    found: list[ObjectDescriptor] = []
    while page := catalog.descriptors(topic, start, decoder=decode_outline):
        found += page
        start = page[-1].next_offset
    return found


def _keep(kept: OrderedDict[str, _Kept], name: str, value: _Kept) -> None:
    kept[name] = value
    while len(kept) > TOPICS_KEPT_MAX:
        kept.popitem(last=False)
