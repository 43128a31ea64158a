"""Runs a scan: `plan_scan` on the driver, `read_split` in a task. Nothing here depends on Spark.

A task reads its blocks a chunk at a time. Entries that hold one message as it is become rows
without a Python object for each, and so do batches (`batches`). The others are decoded one by one:
single compressed messages, and what is only marked (`messages`). Chunks whose others are elsewhere
are looked for when the last one is met, or at the end of each part (`chunks`).

Damage raises CorruptLog with the object, the position and the entry. With failOnDataLoss=false what
is damaged is left out: an entry that cannot be decoded, or what follows in the blocks of the part.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from forebay.errors import CorruptLog, LedgerError
from forebay.format.pulsar.blocks import Entries
from forebay.format.pulsar.columns import PLAIN, EntryColumns, entry_columns
from forebay.format.pulsar.entry import ParsedEntry, decode_entry
from forebay.format.pulsar.messages import (
    Chunk,
    ChunkAssembler,
    ChunkPlace,
    Message,
    in_batch,
    messages_of,
)
from forebay.limits import MIB
from forebay.logs import event
from forebay.objects.store import connect
from forebay.pipeline.pulsar.batches import BatchGroup, is_batch
from forebay.pipeline.pulsar.bucket import Bucket, Ledger
from forebay.pipeline.pulsar.chunks import Found, resolve
from forebay.pipeline.pulsar.columns import BatchMaker
from forebay.pipeline.pulsar.options import PulsarOptions
from forebay.pipeline.pulsar.plan import Neighbour, Split, plan_ledgers
from forebay.pipeline.pulsar.read import Part, read_part
from forebay.topic.resources import StoreResources, executor_resources

if TYPE_CHECKING:
    import pyarrow as pa

_log: Final = logging.getLogger("forebay.pipeline")

OnDamage: TypeAlias = Callable[[CorruptLog], None]

BATCH_BYTES: Final = 1 * MIB
"""About the bytes of one Arrow batch."""
_BATCH_ROWS: Final = 10_000
"""The most decoded messages of one batch."""
_GROUP_ROWS_MIN: Final = 32
"""With fewer messages in consecutive batches, these are decoded one by one, and share a record
batch with others: each record batch costs as much."""
_RUNS_MAX: Final = 8
"""With more runs of plain entries among others in a batch, all its entries are decoded one by one:
many small batches cost more."""


def plan_scan(options: PulsarOptions) -> list[Split]:
    """The splits that read what the options select of the ledgers that are in the bucket now."""
    with closing(connect(options.cloud)) as store:
        bucket = Bucket(store, fail_on_data_loss=options.fail_on_data_loss)
        planned = plan_ledgers(bucket, options)
    event(
        _log,
        logging.INFO,
        "ledgers planned",
        ledgers=len({part.ledger.id for split in planned for part in split.parts}),
        splits=len(planned),
        bytes=sum(split.size for split in planned),
    )
    return planned


def read_split(
    options: PulsarOptions, split: Split, damaged: OnDamage | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the split, in record batches of about BATCH_BYTES.

    `damaged` gets each error of damaged data, which is left out if it returns. Without it, the
    options decide.
    """
    damaged = damaged or (_raise if options.fail_on_data_loss else _log_it)
    resources = executor_resources(options.settings)
    maker = BatchMaker(options.columns, options.starting_time, options.ending_time)
    for part in split.parts:
        reader = PartReader(resources, part, split.around, maker, damaged)
        for batch in reader.batches():
            if batch.num_rows:
                yield batch
            del batch


def _raise(error: CorruptLog) -> None:
    raise error


def _log_it(error: CorruptLog) -> None:
    event(_log, logging.WARNING, "damaged data left out", reason=str(error))


class PartReader:
    """Reads one part of a split."""

    def __init__(
        self,
        resources: StoreResources,
        part: Part,
        around: Sequence[Neighbour],
        maker: BatchMaker,
        damaged: OnDamage,
    ) -> None:
        self._resources = resources
        self._part = part
        self._around = around
        self._maker = maker
        self._damaged = damaged
        self._positions: dict[ChunkPlace, int] = {}
        """Of the entries that are chunks."""
        self._assembler = ChunkAssembler()
        self._group = BatchGroup()
        self._messages: list[Message] = []
        self._bytes = 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for entries in read_part(self._resources, self._part):
                yield from self._batches_of(entries)
                del entries
        except CorruptLog as error:
            self._damaged(error)
        for ledger, message in self._resolved(self._assembler.finish()):
            yield self._maker.decoded(ledger, [message])

    def _resolved(self, chunks: list[tuple[ChunkPlace, Chunk]]) -> Iterator[tuple[Ledger, Message]]:
        """What this task yields of chunks whose others are not all in the part."""
        left = [Found(place, self._positions[place], chunk) for place, chunk in chunks]
        if left:
            yield from resolve(self._resources, self._part, left, self._around)

    def _batches_of(self, entries: Entries) -> Iterator[pa.RecordBatch]:
        found = entry_columns(entries.buffer, entries.positions, entries.lengths)
        plain = np.frombuffer(found.flags, np.int64) & PLAIN != 0
        at, count = 0, len(entries)
        while at < count:
            stop = bisect_left(entries.positions, entries.positions[at] + BATCH_BYTES, at + 1)
            yield from self._rows(entries, found, plain, at, stop)
            at = stop

    def _rows(
        self,
        entries: Entries,
        found: EntryColumns,
        plain: np.ndarray[tuple[int], np.dtype[np.bool_]],
        first: int,
        stop: int,
    ) -> Iterator[pa.RecordBatch]:
        turns = np.flatnonzero(plain[first + 1 : stop] != plain[first : stop - 1]) + first + 1
        if len(turns) > _RUNS_MAX:
            yield from self._decode(entries, first, stop)
            return
        bounds = [first, *turns.tolist(), stop]
        for begin, end in pairwise(bounds):
            if plain[begin]:
                yield self._maker.plain(self._part.ledger, entries, found, begin, end)
            else:
                yield from self._decode(entries, begin, end)

    def _decode(self, entries: Entries, first: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Decodes entries that are not plain. Nothing needs the buffer afterwards."""
        view = memoryview(entries.buffer)
        for number in range(first, stop):
            position, entry_id = entries.positions[number], entries.first_entry_id + number
            data = view[position : position + entries.lengths[number]]
            place = entries.base + position
            try:
                entry = decode_entry(data)
                batch = is_batch(entry.metadata)
                if batch:
                    self._group.add(entry_id, place, entry)
            except LedgerError as error:
                self._bad_entry(entry_id, place, error)
                continue
            if not batch:
                yield from self._grouped()
                self._take(entry_id, place, entry)
            elif self._group.size >= BATCH_BYTES:
                yield from self._grouped()
            if self._bytes >= BATCH_BYTES or len(self._messages) >= _BATCH_ROWS:
                yield from self._flushed()
        yield from self._grouped()
        yield from self._flushed()

    def _grouped(self) -> Iterator[pa.RecordBatch]:
        """The rows of the batches that were collected. A few of them wait with other messages."""
        group, self._group = self._group, BatchGroup()
        if not group.batches:
            return
        rows = group.rows() if group.count >= _GROUP_ROWS_MIN else None
        if rows is not None:
            yield from self._flushed()
            yield self._maker.batched(self._part.ledger, rows)
            return
        for entry_id, position, entry, payload in group.batches:
            try:
                self._add(list(in_batch(entry_id, entry, payload)))
            except LedgerError as error:
                self._bad_entry(entry_id, position, error)

    def _take(self, entry_id: int, position: int, entry: ParsedEntry) -> None:
        try:
            decoded = messages_of(entry_id, entry)
            if isinstance(decoded, Chunk):
                place = ChunkPlace(self._part.ledger.ledger_id, entry_id)
                self._positions[place] = position
                decoded = self._with_chunk(place, decoded)
            self._add(decoded)
        except LedgerError as error:
            self._bad_entry(entry_id, position, error)

    def _add(self, messages: list[Message]) -> None:
        self._messages += messages
        self._bytes += sum(len(each.value or b"") for each in messages)

    def _bad_entry(self, entry_id: int, position: int, error: LedgerError) -> None:
        part = self._part
        self._damaged(
            CorruptLog(
                f"{self._resources.store.name}: {part.ledger.key} of {part.ledger.topic}: entry "
                f"{entry_id} at position {position}: {error}"
            )
        )

    def _with_chunk(self, place: ChunkPlace, chunk: Chunk) -> list[Message]:
        """The message that the chunk completes. It has its place, so the order stays."""
        whole = self._assembler.add(place, chunk)
        if whole is not None:
            return [whole.message]
        if chunk.number + 1 < chunk.count:
            return []
        dropped = self._assembler.take_dropped(chunk.uuid)
        return [message for _, message in self._resolved(dropped)]

    def _flushed(self) -> Iterator[pa.RecordBatch]:
        messages, self._messages, self._bytes = self._messages, [], 0
        for at in range(0, len(messages), _BATCH_ROWS):
            yield self._maker.decoded(self._part.ledger, messages[at : at + _BATCH_ROWS])
