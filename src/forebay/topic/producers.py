"""`TopicProducers`: which messages of its idempotent producers a topic has.

An idempotent producer numbers its messages, from 1 on. A message that was appended before is not
appended again, and one that would leave out a number is refused. The log decides: it holds the
numbers with the messages (`forebay.format.producers`). In memory are the last number of each
producer and where its last batches are. They are read when the first idempotent producer connects:
from a row of the catalog, and from the log after the offset of that row.

    <topic>/notes/producers

The row is written in the background, often enough that little of the log has to be read after a
crash. It says that it is complete while no idempotent producer is connected; then nothing has to be
read, whatever others append. It never has a message that is not synced.

At most IDEMPOTENT_PRODUCERS_MAX producers are known. Those that have been unused longest are
forgotten, and begin with 1 again. A connected producer is not forgotten.

Beware: `connect` and `flush` ask the catalog and read the log. Call them on a thread that may wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.job_state import began_here, is_of_deleted, origin
from forebay.catalog.kv import Put
from forebay.catalog.records import TopicRecord
from forebay.errors import (
    LostOffsets,
    OffsetOutOfRange,
    OutOfSequence,
    TooManyProducers,
    TopicFenced,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, parse_topic
from forebay.format.producers import (
    KnownProducer,
    ProducersRow,
    Run,
    decode_producers_row,
    encode_producers_row,
    idempotent_id,
    last_runs,
)
from forebay.interrupts import holding
from forebay.limits import (
    IDEMPOTENT_PRODUCERS_MAX,
    OFFSET_MAX,
    PRODUCER_NAME_BYTES_MAX,
    PRODUCER_RUNS_MAX,
    PRODUCERS_ROW_BYTES,
    PRODUCERS_ROW_MESSAGES,
)
from forebay.wal.log import Wal
from forebay.wal.reader import LogReader

ROW_NAME: Final = "producers"
_Runs = deque[Run]


class ReadLog:
    """How the messages of a topic are read, over both tiers."""

    def __init__(self, start: Callable[[], int], reader: Callable[[int, int], LogReader]) -> None:
        """`start` returns the oldest offset; `reader` reads the offsets from one to another."""
        self.start = start
        self.reader = reader


class Appended(NamedTuple):
    """What became of a batch."""

    offsets: range
    """Those of all its messages, or only of the new ones if the others' are not known any more."""
    end: int
    """The offset after its last message: once everything before it is synced, the batch is."""


class IdempotentProducer:
    """A connected producer. One task at a time appends; it must not be cancelled meanwhile."""

    def __init__(self, owner: TopicProducers, name: str, number: int) -> None:
        self._owner = owner
        self.name = name
        self.producer_id = number
        self._parts = owner.wal.producer(number, name)

    @property
    def last_sequence(self) -> int:
        """The number of the last message that was appended; 0 if there is none."""
        return self._owner.last_sequence(self.producer_id)

    async def append(
        self,
        first_sequence: int,
        payloads: Sequence[Buffer],
        attributes: Sequence[Mapping[str, str] | None] | None = None,
        routing_keys: Sequence[str | None] | None = None,
    ) -> Appended:
        """Appends the messages that are new, and returns as soon as they have offsets.

        Raises OutOfSequence if a number is left out, and what `Wal.append_many_async` raises.
        """
        owner, number = self._owner, self.producer_id
        known = owner.begin(number, first_sequence, len(payloads))
        if known == len(payloads):
            return owner.found(number, first_sequence, known)
        try:
            offsets = await owner.wal.append_many_async(
                payloads[known:],
                None if attributes is None else attributes[known:],
                None if routing_keys is None else routing_keys[known:],
                producer=self._parts,
                first_request_id=first_sequence + known,
            )
        except BaseException:
            owner.doubt()
            raise
        size = sum(map(len, payloads))
        owner.appended(number, Run(first_sequence + known, offsets.start, len(offsets)), size)
        return owner.found(number, first_sequence, len(payloads), offsets)

    def disconnect(self) -> None:
        self._owner.disconnect(self)


class TopicProducers:
    """The idempotent producers of one topic. Thread-safe. Without a catalog it writes no row."""

    def __init__(self, wal: Wal, log: ReadLog, catalog: Catalog | None, epoch: int) -> None:
        self.wal = wal
        self._topic: TopicName = parse_topic(wal.topic)
        self._log = log
        self._catalog = catalog
        self._epoch = epoch
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        """Held while the row is read or written; taken first."""
        self._known: dict[int, _Runs] = {}
        """The last runs of each producer, by its id; those used longest ago come first."""
        self._connected: set[int] = set()
        self._begun: dict[int, int] = {}
        """Appends that run now, by producer: none of their messages is before this offset."""
        self._loaded = False
        self._doubted = False
        self._row = ProducersRow(0)
        """As it is in the catalog."""
        self._bytes = 0
        """Bytes of idempotent producers that were appended since the row was made."""
        self._scheduled = False
        self.schedule: Callable[[], None] | None = None
        """Called when the row is to be written and nobody was told so yet."""

    # -- connections ----------------------------------------------------------------------------

    def connect(self, name: str) -> IdempotentProducer:
        """Returns the producer of this name. Only one may be connected at a time.

        Raises UsageError for a name that is empty, too long or connected, TooManyProducers, and
        what the catalog or the log raises.
        """
        if not 0 < len(name.encode()) <= PRODUCER_NAME_BYTES_MAX:
            raise UsageError(
                f"the name of an idempotent producer has 1 to {PRODUCER_NAME_BYTES_MAX} bytes"
            )
        producer = IdempotentProducer(self, name, idempotent_id(self.wal.topic, name))
        holding(self._lock, lambda: self._add(producer))
        try:
            with self._writing:
                fresh = not self._loaded
                if fresh:
                    self._load()
                if fresh or self._row.complete:
                    self._write(holding(self._lock, self._current))
        except BaseException:
            self.disconnect(producer)
            raise
        return producer

    def _add(self, producer: IdempotentProducer) -> None:
        if producer.producer_id in self._connected:
            raise UsageError(
                f"{self._topic}: the idempotent producer {producer.name!r} is connected already"
            )
        if len(self._connected) >= IDEMPOTENT_PRODUCERS_MAX:
            raise TooManyProducers(
                f"{self._topic}: {IDEMPOTENT_PRODUCERS_MAX} idempotent producers are connected: "
                "close some, or use another topic"
            )
        self._connected.add(producer.producer_id)

    def disconnect(self, producer: IdempotentProducer) -> None:
        """Ends the connection. The catalog gets the numbers soon."""

        def remove() -> bool:
            self._connected.discard(producer.producer_id)
            return not self._connected and self._loaded and not self._row.complete

        if holding(self._lock, remove):
            self._schedule()

    def last_sequence(self, number: int) -> int:
        runs = self._known.get(number)
        return runs[-1].last_sequence if runs else 0

    # -- appending ------------------------------------------------------------------------------

    def begin(self, number: int, first: int, count: int) -> int:
        """Returns how many messages of the batch are known. Raises OutOfSequence after a gap.

        If there are new ones, `appended` or `doubt` must follow.
        """
        if first < 1 or first + count - 1 > OFFSET_MAX:
            raise UsageError(f"the number {first} is not in 1..{OFFSET_MAX}")
        return holding(self._lock, lambda: self._begin(number, first, count))

    def _begin(self, number: int, first: int, count: int) -> int:
        if self._doubted:
            raise TopicFenced(f"{self._topic}: an append failed half-way; connect again")
        expected = self.last_sequence(number) + 1
        if first > expected:
            raise OutOfSequence(
                f"{self._topic}: the next message of this producer must have the number "
                f"{expected}, not {first}; send the messages from there on. If the server has "
                "forgotten the producer, choose another name",
                expected=expected,
            )
        known = min(expected - first, count)
        if known < count:
            self._begun[number] = self.wal.current_offset()
        return known

    def appended(self, number: int, run: Run, size: int) -> None:
        """Records what `begin` announced: the new messages have these offsets."""
        if holding(self._lock, lambda: self._add_run(number, run, size)):
            self._schedule()

    def _add_run(self, number: int, run: Run, size: int) -> bool:
        self._begun.pop(number, None)
        self._remember(number, run)
        self._forget_some()
        self._bytes += size
        distance = run.last_offset - self._row.offset
        return distance >= PRODUCERS_ROW_MESSAGES or self._bytes >= PRODUCERS_ROW_BYTES

    def _remember(self, number: int, run: Run) -> None:
        runs = self._known.pop(number, None) or deque(maxlen=PRODUCER_RUNS_MAX)
        if runs and runs[-1].followed_by(run):
            runs[-1] = runs[-1].with_more(run.length)
        else:
            runs.append(run)
        self._known[number] = runs  # at the end: it was used last

    def _forget_some(self) -> None:
        if len(self._known) > IDEMPOTENT_PRODUCERS_MAX:
            unused = (number for number in self._known if number not in self._connected)
            self._known.pop(next(unused), None)

    def found(self, number: int, first: int, count: int, new: range | None = None) -> Appended:
        """Returns the offsets of messages that were appended, `new` if only theirs are known."""

        def look() -> Appended:
            runs = self._known[number]
            for run in reversed(runs):
                skipped = first - run.sequence
                if skipped >= 0 and skipped + count <= run.length:
                    start = run.offset + skipped
                    return Appended(range(start, start + count), start + count)
            # What is older than all runs was synced long ago, or will be before the newest.
            end = runs[-1].last_offset + 1
            return Appended(range(end, end) if new is None else new, end)

        return holding(self._lock, look)

    def doubt(self) -> None:
        """Called if an append raised: some of its messages may be in the log.

        The next producer that connects reads the log again. Until then nothing is appended.
        """

        def forget() -> None:
            self._doubted, self._loaded = True, False

        holding(self._lock, forget)

    # -- the row and the log --------------------------------------------------------------------

    def _load(self) -> None:
        """Reads the row, and the log after it. Call with `_writing` held."""
        end = self.wal.current_offset()
        row, start = self._stored(end)
        known: dict[int, _Runs] = {}
        for each in row.producers:
            run = Run(each.sequence, each.offset, 1)
            known[each.producer_id] = deque([run], maxlen=PRODUCER_RUNS_MAX)

        def take() -> None:
            self._known, self._row, self._bytes = known, row, 0
            self._begun.clear()

        holding(self._lock, take)
        self._scan(min(start, end), end)

        def finish() -> None:
            self._loaded, self._doubted = True, False

        holding(self._lock, finish)

    def _stored(self, end: int) -> tuple[ProducersRow, int]:
        """The row, and the offset from which on the log has to be read."""
        if self._catalog is None:
            return ProducersRow(0), self.wal.start_offset if self._doubted else end
        key = self._catalog.keys.job_state(self._topic, ROW_NAME)
        entry = self._catalog.kv.get(key)
        began = origin(self._catalog, self._topic)
        row = None if entry is None else decode_producers_row(entry.value, key)
        if row is None or is_of_deleted(row.origin, began):
            # No idempotent producer was ever connected, if the catalog has known the topic always.
            start = end if began_here(began) and not self._doubted else self._log.start()
            return ProducersRow(start, complete=True, origin=began), start
        if row.complete and row.origin == began and not self._doubted:
            return row, end
        return replace(row, origin=began), max(row.offset, self._log.start())

    def _scan(self, start: int, end: int) -> None:
        """Learns the last numbers from the log. Offsets that are recorded as lost are jumped."""
        while start < end:
            try:
                with self._log.reader(start, end) as reader:
                    for frames in reader.frames():
                        self._learn(last_runs(frames, self.wal.topic))
                        start = reader.position
            except LostOffsets as error:
                start = max(error.end, start + 1)
            except OffsetOutOfRange as error:
                if error.start <= start:  # not because retention was faster
                    raise
                start = error.start

    def _learn(self, runs: dict[int, Run]) -> None:
        def learn() -> None:
            for number, run in runs.items():
                self._remember(number, run)
                self._forget_some()

        holding(self._lock, learn)

    def flush(self, *, everything: bool = False) -> None:
        """Writes the row if it is due, or with `everything` if anything has changed.

        Waits until what it records is synced. Raises TopicFenced if another process owns the topic,
        ServiceError, and what a wait for the log raises.
        """
        if self._catalog is None:
            return
        with self._writing:
            self._scheduled = False
            row = holding(self._lock, lambda: self._due(everything))
            if row is not None:
                self._write(row)

    def _due(self, everything: bool) -> ProducersRow | None:
        """What to write now; None if the row in the catalog says enough."""
        if not self._loaded or self._row.complete:
            return None
        row = self._current()
        far = row.offset - self._row.offset >= PRODUCERS_ROW_MESSAGES
        due = row.complete or everything or far or self._bytes >= PRODUCERS_ROW_BYTES
        return row if due else None

    def _current(self) -> ProducersRow:
        """What is known now. Call with the lock held."""
        idle = not self._connected and not self._begun
        # A message that is being appended has an offset before it is known here.
        end = min(self._begun.values(), default=self.wal.current_offset())
        last = (
            KnownProducer(number, runs[-1].last_sequence, runs[-1].last_offset)
            for number, runs in self._known.items()
        )
        return ProducersRow(end, tuple(last), idle, self._row.origin, self._epoch)

    def _write(self, row: ProducersRow) -> None:
        """Writes the row as the owner of the topic. Call with `_writing` held."""
        catalog = self._catalog
        if catalog is None:
            return
        self.wal.await_synced(row.offset)
        key = catalog.keys.job_state(self._topic, ROW_NAME)

        def change(record: TopicRecord) -> Change:
            return Change(record, (Put(key, encode_producers_row(row)),))

        self._bytes = 0
        catalog.update(self._topic, self._epoch, change)
        self._row = row

    def _schedule(self) -> None:
        def first() -> bool:
            before, self._scheduled = self._scheduled, True
            return not before

        if self.schedule is not None and holding(self._lock, first):
            self.schedule()
