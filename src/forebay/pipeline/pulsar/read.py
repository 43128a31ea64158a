"""Reads a run of blocks of a ledger: `read_part` yields its entries, a chunk at a time.

Files are read into one buffer, which is reused. Objects of a remote store are fetched in ranges,
some of them ahead. Every entry's id is checked here; checksums are checked when it is decoded.

Beware: entries are valid only until the next ones are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from forebay.errors import CorruptLog, MissingData, ObjectMissing
from forebay.files.disk import ReadFile
from forebay.format.layout import Buffer
from forebay.format.pulsar.blocks import Entries, EntryScanner
from forebay.limits import MIB
from forebay.pipeline.pulsar.bucket import Ledger
from forebay.read.fetch_pool import FetchFuture, FetchPool
from forebay.topic.resources import StoreResources

CHUNK_BYTES: Final = 1 * MIB
"""Bytes to read of a file at a time: they stay in the processor's cache until the batch is made."""
FETCH_BYTES: Final = 4 * MIB
_FETCHES_AHEAD: Final = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive blocks of one ledger. Can be pickled."""

    ledger: Ledger
    first: int
    """The first entry."""
    next: int | None
    """The entry after the last one; None if the ledger does not say how many it has."""
    begin: int
    """The position of the first block's header."""
    end: int
    """The position after the last block."""

    @property
    def size(self) -> int:
        return self.end - self.begin


def read_part(resources: StoreResources, part: Part) -> Iterator[Entries]:
    """Yields the entries of the part.

    Raises CorruptLog, with object and position, if they are not all there, and MissingData if the
    object is gone.
    """
    scanner = EntryScanner(part.first, part.begin, part.end)
    try:
        for chunk in _chunks(resources, part):
            yield from scanner.feed(chunk)
            if scanner.damage is not None:
                break
    except FileNotFoundError as error:
        raise MissingData(
            f"{_place(resources, part)} was deleted after the query was planned: run it again"
        ) from error
    scanner.require_end(part.next)
    if scanner.damage is not None:
        reason, position, entry = scanner.damage
        raise CorruptLog(
            f"{_place(resources, part)}: {reason} at position {position} (entry {entry}); "
            "failOnDataLoss=false leaves out what follows in this block"
        )


def _place(resources: StoreResources, part: Part) -> str:
    return f"{resources.store.name}: {part.ledger.key} of {part.ledger.topic}"


def _chunks(resources: StoreResources, part: Part) -> Iterator[Buffer]:
    pool = resources.pool
    if pool is not None:
        yield from _fetched(resources, pool, part)
        return
    path = resources.store.local_path(part.ledger.key)
    assert path is not None, "objects are files here"
    file = resources.disk.open_read(path)
    try:
        yield from _from_file(file, part)
    finally:
        file.close()


def _from_file(file: ReadFile, part: Part) -> Iterator[Buffer]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, part.size)))
    position = part.begin
    while position < part.end:
        taken = file.read_into(buffer[: part.end - position], position)
        if not taken:
            return
        yield buffer[:taken]
        position += taken


def _fetched(resources: StoreResources, pool: FetchPool, part: Part) -> Iterator[Buffer]:
    starts = iter(range(part.begin, part.end, FETCH_BYTES))
    waiting: deque[FetchFuture[Buffer]] = deque()
    get, key = resources.store.get_range, part.ledger.key
    try:
        while True:
            while len(waiting) <= _FETCHES_AHEAD and (start := next(starts, None)) is not None:
                stop = min(start + FETCH_BYTES, part.end)
                waiting.append(pool.submit(partial(get, key, start, stop)))
            if not waiting:
                return
            try:
                chunk = waiting.popleft().result()
            except ObjectMissing as error:
                raise FileNotFoundError(str(error)) from error
            yield chunk
            del chunk
    finally:
        for each in waiting:
            each.cancel()
