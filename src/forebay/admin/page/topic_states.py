"""`TopicStates`: the current state of the topics of a store, cheap to read repeatedly.

For a topic that is open here, everything local comes from memory. The catalog is asked for the
topic's record, and for its objects only when the record's revision changed: every change of the
objects changes it. A topic that is not open is read through a view, as any other process would, and
less often.

Beware: a state combines several sources, which change while they are read. Local files are read
before the catalog. A segment that is deleted in between is therefore found among the objects. While
the catalog does not respond, its last known state is used, and it is queried only every few
seconds.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from forebay.catalog.catalog import Catalog
from forebay.catalog.chain import Totals
from forebay.catalog.records import TopicRecord, decode_record
from forebay.errors import ForebayError, ServiceUnavailable, UnknownTopic
from forebay.format.descriptor import ObjectDescriptor, decode_outline
from forebay.format.names import TopicName, parse_topic
from forebay.settings import StoreSettings
from forebay.topic.store import Store
from forebay.wal.segment import Segment
from forebay.wal.watermarks import Watermarks

_Value = TypeVar("_Value")

TOPICS_CACHED_MAX: Final = 512
_NAMES_SHARE: Final = 50
"""Listing all topics may take a fiftieth of the time."""
_NAMES_SECONDS_MAX: Final = 30.0
_CATALOG_RETRY_SECONDS: Final = 5.0
_CLOSED_SECONDS: Final = 5.0
"""The maximum age of the state of a topic that only other processes change."""
_FULL_READ_SECONDS: Final = 10.0
OBJECTS_READ: Final = 200
"""So many of the newest objects are read, every _FULL_READ_SECONDS; meanwhile only new ones."""


@dataclass(frozen=True, slots=True)
class TopicState:
    name: str
    open: bool
    """Whether this server has it open."""
    start: int
    marks: Watermarks
    memory: range = range(0)
    segments: Sequence[Segment] = ()
    objects: Sequence[ObjectDescriptor] = ()
    """The newest ones, oldest first."""
    totals: Totals = Totals()  # noqa: RUF009  # it is frozen
    """Of all objects."""
    record: TopicRecord | None = None
    trouble: str | None = None
    """Why some of it is outdated or unknown."""
    settings: StoreSettings | None = None
    """The settings in effect; None if they are not known."""


@dataclass(slots=True)
class _Chain:
    """The newest objects of a topic as of a revision of its record."""

    record: TopicRecord | None = None
    revision: int = -1
    totals: Totals = field(default_factory=Totals)
    objects: list[ObjectDescriptor] = field(default_factory=list)
    full_read_at: float = -_FULL_READ_SECONDS


class TopicStates:
    """Thread-safe: one thread reads at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._names_lock = threading.Lock()
        self._names: list[str] = []
        self._names_until = 0.0
        self.catalog_trouble: str | None = None
        """Why the catalog does not respond; None while it does."""
        self._catalog_retry_at = 0.0
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._closed: OrderedDict[str, tuple[float, TopicState]] = OrderedDict()

    def names(self) -> list[str]:
        """The names of all topics. If listing them is slow, the cached list is used for longer."""
        with self._names_lock:
            now = time.monotonic()
            if now >= self._names_until:
                try:
                    self._names = self._store.topics()
                except ServiceUnavailable as error:
                    self._catalog_failed(error)
                took = time.monotonic() - now
                self._names_until = now + min(max(took * _NAMES_SHARE, 0.5), _NAMES_SECONDS_MAX)
            return self._names

    def _catalog_failed(self, error: ServiceUnavailable) -> None:
        self.catalog_trouble = str(error)
        self._catalog_retry_at = time.monotonic() + _CATALOG_RETRY_SECONDS

    def read(self, name: str) -> TopicState:
        """The topic about now; `trouble` says what could not be read."""
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
            start=topic.start_known,
            marks=topic.watermarks(),
            memory=topic.in_memory(),
            segments=[each for each in topic.segments() if each.count],
            settings=topic.in_effect,
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
        # The record includes uploads of other processes before this process learns of them.
        marks = replace(
            state.marks,
            uploaded=max(state.marks.uploaded, min(record.tail, state.marks.synced)),
            verified=max(state.marks.verified, min(record.verified, state.marks.synced)),
        )
        objects = [each for each in chain.objects if each.next_offset > state.start]
        return replace(state, marks=marks, objects=objects, totals=chain.totals, record=record)

    def _read_closed(self, name: str) -> TopicState:
        known = self._closed.pop(name, None)
        now = time.monotonic()
        if now < self._catalog_retry_at:
            known = known or (0.0, _unknown(name))
        elif known is None or now - known[0] >= _CLOSED_SECONDS:
            try:
                known = now, self._read_view(name)
            except UnknownTopic:
                known = now, _unknown(name)
            except (ForebayError, OSError) as error:
                known = now, replace(known[1] if known else _unknown(name), trouble=str(error))
        _cache(self._closed, name, known)
        return known[1]

    def _read_view(self, name: str) -> TopicState:
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
                totals=chain.totals,
                record=chain.record,
                settings=view.settings(),
            )

    # -- objects --------------------------------------------------------------------------------

    def _chain(self, topic: TopicName) -> _Chain:
        """Reads the chain from the catalog. Returns the last one if the catalog is unreachable."""
        if time.monotonic() < self._catalog_retry_at:
            return self._chains.get(str(topic), _Chain())
        try:
            found = self._read_chain(topic)
        except ServiceUnavailable as error:
            self._catalog_failed(error)
            raise
        self.catalog_trouble = None
        return found

    def _read_chain(self, topic: TopicName) -> _Chain:
        with self._store.view() as view:
            resources = view.resources()
            if resources is None:
                return _Chain()
            catalog = resources.catalog
            key = catalog.keys.record(topic)
            entry = catalog.kv.get(key)
            chain = self._chains.pop(str(topic), None) or _Chain()
            _cache(self._chains, str(topic), chain)
            if entry is None:
                self._chains[str(topic)] = chain = _Chain()
            elif entry.revision != chain.revision:
                chain.objects = self._objects(catalog, topic, chain)
                chain.totals = catalog.totals(topic)
                chain.record = decode_record(entry.value, TopicRecord, key)
                chain.revision = entry.revision
            return chain

    def _objects(self, catalog: Catalog, topic: TopicName, known: _Chain) -> list[ObjectDescriptor]:
        now = time.monotonic()
        long = len(known.objects) >= OBJECTS_READ
        if long and now - known.full_read_at < _FULL_READ_SECONDS:
            end = known.objects[-1].next_offset
            added = catalog.get_object_descriptors_range(topic, end, decoder=decode_outline)
            if not added or added[0].start_offset >= end:
                return (known.objects + added)[-2 * OBJECTS_READ :]
        known.full_read_at = now
        return catalog.get_last_object_descriptors(topic, OBJECTS_READ, decoder=decode_outline)

    def objects_between(self, name: str, start: int, end: int) -> list[ObjectDescriptor]:
        """The objects of a range of offsets, the first OBJECTS_READ of them."""
        with self._store.view() as view:
            resources = view.resources()
            if resources is None or time.monotonic() < self._catalog_retry_at:
                return []
            try:
                return resources.catalog.get_object_descriptors_range(
                    parse_topic(name), start, end, OBJECTS_READ, decoder=decode_outline
                )
            except ServiceUnavailable as error:
                self._catalog_failed(error)
                return []


def _unknown(name: str) -> TopicState:
    return TopicState(name, open=False, start=0, marks=Watermarks(0, 0))


def _cache(cache: OrderedDict[str, _Value], name: str, value: _Value) -> None:
    cache[name] = value
    while len(cache) > TOPICS_CACHED_MAX:
        cache.popitem(last=False)
