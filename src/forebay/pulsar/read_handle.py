"""Reads the entries of a ledger: from its two objects, by any number of readers at a time.

`ReadHandle` is what BookKeeper's interface of that name is to Pulsar: the entries of one ledger.
`OffloadedReadHandle` reads them from the object store, in ranges of a megabyte. A reader finds the
block of an entry in the index, and goes through its entries from the nearest place that an earlier
reader has seen. Each call of `read` has a position, requests and a read-ahead of its own, so
readers of one ledger do not disturb each other. What they share is the index and the places.

Memory of each reader: the chunk being read, those fetched ahead, and one entry. The places of a
ledger are at most PLACES_MAX.

Beware: `read` returns an iterator. The errors of the store, and of damaged data, are raised while
it is read; those of wrong entry ids at once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Final, Protocol

from forebay.errors import LedgerError, LogClosed, ObjectMissing, UsageError
from forebay.format.layout import Buffer
from forebay.format.names import LEDGER_VERSION, LEDGER_VERSION_NAME
from forebay.format.pulsar import codec
from forebay.format.pulsar.blocks import ENTRY_HEADER_BYTES, Entries, Entry, EntryScanner
from forebay.format.pulsar.index import LedgerIndex, decode_index
from forebay.format.pulsar.ledger_metadata import LedgerMetadata
from forebay.limits import KIB, LEDGER_INDEX_BYTES_MAX, MIB, READ_AHEAD_CHUNKS
from forebay.objects.backend import ObjectMeta
from forebay.read.fetch_pool import FetchCancelled, FetchFuture, FetchPool
from forebay.read.metrics import BYTES_FETCHED, OBJECTS_READ, counted_request
from forebay.read.verify import ReadableStore

READ_BYTES: Final = 1 * MIB
"""The size of a request, as Pulsar's own."""
PLACES_MAX: Final = 100_000
PLACE_BYTES: Final = 64 * KIB
"""At least so many bytes are between two places that are remembered."""


class ReadHandle(Protocol):
    """The entries of one ledger. Thread-safe."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def metadata(self) -> LedgerMetadata: ...

    @property
    def last_add_confirmed(self) -> int:
        """The id of the last entry; -1 if there is none."""

    @property
    def length(self) -> int:
        """The bytes of all entries."""

    @property
    def closed(self) -> bool:
        """Whether nothing is written to the ledger any more."""

    def read(self, first: int, last: int) -> Iterator[Entry]:
        """Returns the entries `first..last`, `last` included; raises UsageError for others.

        The data of an entry is valid as long as it is held, and may hold a megabyte.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """How the entries of offloaded ledgers are read."""

    read_bytes: int = READ_BYTES
    read_ahead_chunks: int = READ_AHEAD_CHUNKS
    """How many requests a reader has ahead of the current one, at most; needs a pool."""
    verify: bool = True
    """Whether entries have to be messages whose checksum is right; old clients send none."""


@dataclass(frozen=True, slots=True)
class LedgerObjects:
    """The keys of the two objects of a ledger."""

    ledger_id: int
    data: str
    index: str


class OffloadedReadHandle:
    """The entries of a ledger that was offloaded. Thread-safe.

    `open_ledger` makes it, and has checked both objects.
    """

    def __init__(
        self,
        store: ReadableStore,
        objects: LedgerObjects,
        index: LedgerIndex,
        etag: str | None,
        pool: FetchPool | None,
        settings: ReadSettings,
    ) -> None:
        self.index = index
        self._store = store
        self._objects = objects
        self._etag = etag
        self._pool = pool
        self._settings = settings
        self._places = _Places()
        self._closed = False

    @property
    def ledger_id(self) -> int:
        return self._objects.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        return self.index.metadata

    @property
    def last_add_confirmed(self) -> int:
        return self.index.last_entry_id

    @property
    def length(self) -> int:
        return self.metadata.length

    @property
    def closed(self) -> bool:
        return self.metadata.closed

    @property
    def places(self) -> int:
        """How many positions of entries are remembered."""
        return len(self._places)

    def close(self) -> None:
        """Ends all readers: the next request of each raises LogClosed."""
        self._closed = True

    def __enter__(self) -> OffloadedReadHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, first: int, last: int) -> Iterator[Entry]:
        """Returns the entries `first..last`, `last` included.

        Raises UsageError at once if the ledger has no such entries. While it is read: LedgerError
        for data that is damaged or cut off, ObjectMissing and ServiceError.
        """
        return chain.from_iterable(self.scan(first, last))

    def scan(self, first: int, last: int) -> Iterator[Entries]:
        """As `read`, but in batches without an object for each entry: one for each request."""
        require_entries(first, last, self.last_add_confirmed)
        if self._closed:
            raise self._is_closed()
        return self._batches(first, last)

    def _batches(self, first: int, last: int) -> Iterator[Entries]:
        number = self.index.block_at(first)
        block = self.index.blocks[number]
        near = self._places.before(first)
        if near is not None and near[0] >= block.first_entry_id:
            position, block_end = near[1], self.index.block_end(number)
            scanner = EntryScanner(near[0], position, self.index.data_bytes, block_end)
        else:
            position = block.position
            scanner = EntryScanner(block.first_entry_id, position, self.index.data_bytes)
        with closing(self._chunks(position, self._end(last))) as chunks:
            for chunk in chunks:
                for entries in scanner.feed(chunk):
                    self._places.saw(entries)
                    yield from self._wanted(entries, first, last)
                    if scanner.entry_id > last:
                        return
                    del entries
                if scanner.damage is not None:
                    raise self._damaged(*scanner.damage)
        raise self._damaged("the object ends before the entry", scanner.position, scanner.entry_id)

    def _wanted(self, entries: Entries, first: int, last: int) -> Iterator[Entries]:
        """Yields the entries that are wanted, up to one that is damaged."""
        start = max(first - entries.first_entry_id, 0)
        stop = min(last + 1 - entries.first_entry_id, len(entries))
        if start >= stop:
            return
        wanted = entries.part(start, stop)
        good = len(wanted)
        if self._settings.verify:
            good = codec.check_entries(wanted.buffer, wanted.positions, wanted.lengths, 0)
        if good:
            yield wanted.part(0, good)
        if good < len(wanted):
            position = wanted.base + wanted.positions[good] - ENTRY_HEADER_BYTES
            raise self._damaged("a damaged message", position, wanted.first_entry_id + good)

    def _end(self, last: int) -> int:
        """A position at or after the end of the entry `last`, as near as is known."""
        block_end = self.index.block_end(self.index.block_at(last))
        after = self._places.after(last)
        return block_end if after is None else min(block_end, after[1])

    def _damaged(self, reason: str, position: int, entry_id: int) -> LedgerError:
        return LedgerError(
            f"{self._store.name}: {self._objects.data}: {reason} at position {position} "
            f"(entry {entry_id})"
        )

    def _is_closed(self) -> LogClosed:
        return LogClosed(f"{self._objects.data}: the ledger was closed")

    # ---- requests ----

    def _chunks(self, start: int, end: int) -> Generator[Buffer]:
        """Yields the bytes `start..end` in order. While it goes on, more is fetched ahead."""
        OBJECTS_READ.add()
        step = self._settings.read_bytes
        due = iter(range(start, end, step))
        window_max = 0 if self._pool is None else self._settings.read_ahead_chunks
        if self._pool is None or not window_max:
            for at in due:
                yield self._fetch(at, min(at + step, end))
            return
        under_way: deque[FetchFuture[Buffer]] = deque()
        window = 0
        try:
            while True:
                for at in islice(due, window + 1 - len(under_way)):
                    fetch = partial(self._fetch, at, min(at + step, end))
                    under_way.append(self._pool.submit(fetch))
                if not under_way:
                    return
                chunk = under_way.popleft().result()
                yield chunk
                del chunk
                window = min(max(2 * window, 1), window_max)
        except FetchCancelled:
            raise self._is_closed() from None
        finally:
            for waiting in under_way:
                waiting.cancel()

    def _fetch(self, start: int, end: int) -> Buffer:
        if self._closed:
            raise self._is_closed()
        with counted_request():
            data = self._store.get_range(self._objects.data, start, end, etag=self._etag)
        BYTES_FETCHED.add(end - start)
        return data


def require_entries(first: int, last: int, last_add_confirmed: int) -> None:
    """Raises UsageError unless the ledger has the entries `first..last`."""
    if not 0 <= first <= last <= last_add_confirmed:
        raise UsageError(
            f"entries {first}..{last} cannot be read: the ledger has the entries "
            f"0..{last_add_confirmed}"
        )


class _Places:
    """Positions of entries that readers have seen, ascending. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entry_ids: list[int] = []
        self._positions: list[int] = []
        self._apart = PLACE_BYTES

    def __len__(self) -> int:
        return len(self._entry_ids)

    def before(self, entry_id: int) -> tuple[int, int] | None:
        """The last known entry that is not after this one, and its position."""
        with self._lock:
            at = bisect_right(self._entry_ids, entry_id) - 1
            return None if at < 0 else (self._entry_ids[at], self._positions[at])

    def after(self, entry_id: int) -> tuple[int, int] | None:
        """The first known entry after this one, and its position."""
        with self._lock:
            at = bisect_right(self._entry_ids, entry_id)
            if at == len(self._entry_ids):
                return None
            return self._entry_ids[at], self._positions[at]

    def saw(self, entries: Entries) -> None:
        """Remembers some of these entries: none that is near to a known one."""
        at = 0
        while at < len(entries):
            position = entries.base + entries.positions[at] - ENTRY_HEADER_BYTES
            self._add(entries.first_entry_id + at, position)
            wanted = entries.positions[at] + self._apart
            at = max(bisect_left(entries.positions, wanted, at), at + 1)

    def _add(self, entry_id: int, position: int) -> None:
        with self._lock:
            at = bisect_left(self._positions, position)
            near = self._positions[max(at - 1, 0) : at + 1]
            if any(abs(position - each) < self._apart for each in near):
                return
            self._entry_ids.insert(at, entry_id)
            self._positions.insert(at, position)
            if len(self._positions) > PLACES_MAX:
                del self._entry_ids[1::2], self._positions[1::2]
                self._apart *= 2


# ---- opening ----


def open_ledger(
    store: ReadableStore,
    objects: LedgerObjects,
    pool: FetchPool | None = None,
    settings: ReadSettings | None = None,
) -> OffloadedReadHandle:
    """Opens an offloaded ledger; reads its whole index, and none of its data.

    Raises ObjectMissing if one of its objects is missing, and LedgerError if an object has another
    format version than 1, if the index is damaged, or if the data object has another size than
    the index says.
    """
    meta = store.head(objects.index)
    require_version(store, objects.index, meta)
    if meta.size > LEDGER_INDEX_BYTES_MAX:
        raise LedgerError(
            f"{store.name}: {objects.index} has {meta.size} bytes; an index has at most "
            f"{LEDGER_INDEX_BYTES_MAX}"
        )
    raw = store.get_range(objects.index, 0, meta.size, etag=meta.etag) if meta.size else b""
    try:
        index = decode_index(raw)
    except LedgerError as error:
        raise LedgerError(f"{store.name}: {objects.index}: {error}") from error
    data = _data_of(store, objects, index)
    return OffloadedReadHandle(store, objects, index, data.etag, pool, settings or ReadSettings())


def _data_of(store: ReadableStore, objects: LedgerObjects, index: LedgerIndex) -> ObjectMeta:
    try:
        meta = store.head(objects.data)
    except ObjectMissing as error:
        raise ObjectMissing(
            f"{store.name}: {objects.data} is missing, but its index {objects.index} is there"
        ) from error
    require_version(store, objects.data, meta)
    if meta.size != index.data_bytes:
        raise LedgerError(
            f"{store.name}: {objects.data} has {meta.size} bytes, but its index says "
            f"{index.data_bytes}: it is cut off, or another object"
        )
    return meta


def require_version(store: ReadableStore, key: str, meta: ObjectMeta) -> None:
    """Raises LedgerError unless the user metadata of an object have the known format version.

    On GCS their names have capital letters.
    A reader compares the etag in each request, so the version holds for all of them.
    """
    names = {name.lower(): value for name, value in meta.metadata.items()}
    found = names.get(LEDGER_VERSION_NAME)
    if found != LEDGER_VERSION:
        raise LedgerError(
            f"{store.name}: {key} has the format version {found!r} in its user metadata "
            f"({LEDGER_VERSION_NAME}), not {LEDGER_VERSION!r}: a later release may read it"
        )
