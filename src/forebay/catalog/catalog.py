"""`Catalog`: the metadata of every topic: its record, its descriptors, and the state of its keys.

An object counts once the catalog has its descriptor. The descriptors of a topic are its chain:
together they cover its offsets without a gap. Everything is a compare-and-set on a `Kv`, so the
code is the same for etcd and SQLite. Every change of a chain compares the topic's record. This
keeps the chain contiguous no matter who commits (I4), and stops an owner of an older epoch from
changing anything (I7). The layout of the keys: `docs/formats/catalog.md`.

Beware: after ServiceUnavailable, a change may or may not have been made. Every change here can be
repeated: a commit that was already made succeeds again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, TypeVar

from forebay.catalog.chain import WINDOW, Chain, Totals, Write, pointer, read_windows, stored
from forebay.catalog.kv import ABSENT, Compare, Entry, Kv, Put, Remove, Watch
from forebay.catalog.ledgers import LedgerAttempt, Ledgers, ledger_span
from forebay.catalog.records import (
    Life,
    Owner,
    Range,
    State,
    TopicRecord,
    decode_cursor,
    decode_pointer,
    decode_record,
    encode_cursor,
    encode_record,
    may_become,
    skip_holes,
)
from forebay.clock import SYSTEM_CLOCK, Clock, since_1970
from forebay.errors import (
    CommitRefused,
    DescriptorError,
    ServiceUnavailable,
    TopicDeleted,
    TopicFenced,
)
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.names import (
    CatalogKeys,
    ObjectName,
    TopicName,
    after_prefix,
    is_ledger,
    parse_object,
)
from forebay.limits import CATALOG_PAGE, OFFSET_MAX
from forebay.metrics import Counter

DESCRIPTOR_WRITES = Counter(
    "forebay_catalog_descriptor_write_total",
    "Object descriptors written to the catalog.",
)

_Result = TypeVar("_Result")
_TRIES: Final = 100
"""Attempts at one compare-and-set. Each one that fails means that another process succeeded."""
_NAMES_MAX: Final = 1000
_COMMIT_TRIES: Final = 3
_SEARCH_FACTOR: Final = 16
"""How much further back each request of a search looks, until it finds an object."""
_NEXT_KEY: Final = "\1"
"""Appended to a key, it makes the next possible key, because no key contains a zero byte."""


@dataclass(frozen=True, slots=True)
class Intent:
    """The right to write one object and to commit it. It lasts until a sweep revokes it."""

    object_id: str
    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class LedgerIntent:
    """The intent to write a ledger, and the attempt at the same offsets that it replaces."""

    intent: Intent
    previous: LedgerAttempt | None
    """Its files are to be deleted. Nobody can commit it any more."""


@dataclass(frozen=True, slots=True)
class Change:
    """A topic's new record, with the other writes and comparisons of the same transaction."""

    record: TopicRecord
    writes: tuple[Write, ...] = ()
    compares: tuple[Compare, ...] = ()


class Catalog:
    """The catalog below `root_prefix` in `kv`. Thread-safe.

    Every method may raise ServiceError, and DescriptorError if a stored value is damaged.
    """

    def __init__(self, kv: Kv, root_prefix: str = "/forebay", clock: Clock = SYSTEM_CLOCK) -> None:
        self.kv = kv
        self.keys = CatalogKeys(root_prefix)
        self._clock = since_1970(clock)

    @property
    def name(self) -> str:
        return self.kv.name

    def close(self) -> None:
        self.kv.close()

    # -- topics ---------------------------------------------------------------------------------

    def topics(self, prefix: str = "", *, deleted: bool = False) -> Iterator[TopicName]:
        """Yields every topic that has a record, ordered by name.

        With a prefix, only those whose `namespace/topic` begins with it. With `deleted`, also those
        that were deleted.
        """
        at = self.keys.topics() + prefix
        end = after_prefix(at)
        while found := self.kv.range(at, end, limit=1):
            parts = found[0].key.removeprefix(self.keys.topics()).split("/")
            own = self.keys.topics() + "/".join(parts[:2]) + "/"
            entry = self.kv.get(own + "record")
            topic = self.keys.topic_of_record(entry.key) if entry is not None else None
            if (
                entry is not None
                and topic is not None
                and len(parts) > 2
                and (deleted or not _is_deleted(entry))
            ):
                yield topic
            at = after_prefix(own) if len(parts) > 2 else found[0].key + _NEXT_KEY

    def record(self, topic: TopicName) -> TopicRecord | None:
        """Returns the topic's record; None if there is no such topic, or it was deleted."""
        found = self.find(topic)
        return None if found is None or found.is_deleted else found

    def find(self, topic: TopicName) -> TopicRecord | None:
        """`record`, or what is left of it if the topic was deleted."""
        return self._record(topic)[0]

    def superseded(self, topic: TopicName, epoch: int) -> TopicFenced:
        """Returns the error for a process whose epoch, or whose topic, the catalog does not have.

        It is a TopicDeleted if the topic was deleted.
        """
        return fenced(topic, epoch, self.find(topic))

    def owner(self, topic: TopicName) -> Owner | None:
        entry = self.kv.get(self.keys.owner(topic))
        return None if entry is None else decode_record(entry.value, Owner, entry.key)

    def update(
        self,
        topic: TopicName,
        epoch: int | None,
        change: Callable[[TopicRecord], Change],
        *,
        deleted: bool = False,
    ) -> TopicRecord:
        """Commits what `change` returns, in one transaction, and returns the new record.

        `change` is called again, with the new record, when another process changed the record
        first. Raises TopicFenced if the topic's epoch is not `epoch`; None skips that check,
        for changes that any process may make. Raises CommitRefused if the topic does not exist,
        TopicDeleted if it was deleted, unless `deleted` says that this is known, and
        ServiceUnavailable if every attempt lost against another process.
        """
        for _ in range(_TRIES):
            record, revision = self._record(topic)
            if record is None:
                raise CommitRefused(f"{topic}: there is no such topic in {self.name}")
            if (epoch is not None and record.epoch != epoch) or (record.is_deleted and not deleted):
                raise fenced(topic, epoch or 0, record)
            wanted = change(record)
            writes = list(wanted.writes)
            if wanted.record != record:
                writes.append(Put(self.keys.record(topic), encode_record(wanted.record)))
            if not writes:
                return record
            compares = [Compare(self.keys.record(topic), revision), *wanted.compares]
            if self.kv.commit(compares, writes) is not None:
                DESCRIPTOR_WRITES.add(self._described(topic, writes))
                return wanted.record
        raise ServiceUnavailable(
            f"{topic}: other processes kept changing the topic in {self.name}; try again"
        )

    def _described(self, topic: TopicName, writes: list[Write]) -> int:
        starts = [self.keys.descriptor_start(topic, one.key) for one in writes]
        return sum(
            start is not None and isinstance(one, Put)
            for start, one in zip(starts, writes, strict=True)
        )

    def watch(self, topic: TopicName, after: int) -> Watch:
        """Watches every key of the topic, for changes with a revision above `after`."""
        prefix = self.keys.topic(topic)
        return self.kv.watch(prefix, after_prefix(prefix), after=after)

    def _record(self, topic: TopicName) -> tuple[TopicRecord | None, int]:
        entry = self.kv.get(self.keys.record(topic))
        if entry is None:
            return None, ABSENT
        return decode_record(entry.value, TopicRecord, entry.key), entry.revision

    # -- descriptors ----------------------------------------------------------------------------

    def get_object_descriptors_range(
        self,
        topic: TopicName,
        start: int,
        end: int | None = None,
        limit: int = CATALOG_PAGE,
        *,
        decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
        begins: bool = False,
    ) -> list[ObjectDescriptor]:
        """Returns the descriptors that overlap `start..end`, oldest first, at most `limit`.

        `end` is not included. There may be fewer than `limit` although more follow. An empty
        result means that there are none. `begins` says that an object probably begins at `start`:
        then the end row is read only if none does.

        This takes a few requests, however many objects there are: the end row of the object that
        holds `start`, and the descriptors from that object on. The result is consistent: a
        compaction between two requests would move the border between objects, which would look
        like a gap, and a reader would take that for the end of the topic or for lost data. So the
        result ends at a gap between two requests. If no object holds `start`, the topic's record
        is read too. If that does not say why, a search finds out.
        """
        if end is not None and end <= start:
            return []
        stop = OFFSET_MAX if end is None else end
        tail = self._tail(topic)

        def page(first: int, width: int) -> list[ObjectDescriptor]:
            found: list[ObjectDescriptor] = []
            read = self.chain(topic).descriptors
            for entries in read_windows(read, first, stop, limit, width=width, tail=tail):
                more = self._decoded(topic, entries, decoder)
                if found and more and found[-1].next_offset != more[0].start_offset:
                    break
                found += more
            return found

        if begins and (found := page(start, 1)) and found[0].start_offset == start:
            return found
        seen: Entry | None = None
        for _ in range(_TRIES if start > 0 else 0):
            row = self._end_row(topic, start, tail)
            if row is None or row == seen or (first := decode_pointer(row.value, row.key)) > start:
                break
            last = self.keys.end_offset(topic, row.key)
            found = page(first, limit * max(last - first, 1))
            if found and found[0].start_offset == first and found[0].end_offset >= start:
                return found
            seen = row  # read it again: a compaction may have changed the objects meanwhile
        found = page(start, WINDOW)
        if (found and found[0].start_offset == start) or self._is_hole(topic, start):
            return found
        return self._searched(topic, start, stop, limit, decoder)

    def _end_row(
        self, topic: TopicName, offset: int, tail: Callable[[], int | None]
    ) -> Entry | None:
        """Returns the first end row of an object that ends at `offset` or after it."""
        windows = read_windows(
            self.chain(topic).ends,
            offset,
            OFFSET_MAX + 1,
            1,
            width=WINDOW,
            tail=tail,
        )
        return next((rows[0] for rows in windows if rows), None)

    def _tail(self, topic: TopicName) -> Callable[[], int | None]:
        """Returns what reads the topic's tail, once. A missing or damaged record has none."""

        @cache
        def tail() -> int | None:
            try:
                record = self.record(topic)
            except DescriptorError:
                return None
            return None if record is None else record.tail

        return tail

    def _is_hole(self, topic: TopicName, offset: int) -> bool:
        """Whether the record says that no object holds the offset. A damaged one says nothing."""
        try:
            record = self.record(topic)
        except DescriptorError:
            return False
        return record is not None and not (
            record.start_offset <= offset < record.tail and skip_holes(record, offset) == offset
        )

    def _searched(
        self,
        topic: TopicName,
        start: int,
        stop: int,
        limit: int,
        decoder: Callable[[bytes], ObjectDescriptor],
    ) -> list[ObjectDescriptor]:
        """Does the same without end rows: for catalogs of earlier releases and those of Danube.

        A result with a gap is checked by searching again, because of compactions.
        """
        at, until = self.keys.descriptor(topic, start), self.keys.descriptor(topic, stop)
        for _ in range(_TRIES):
            before = self._last_before(topic, start)
            found = [
                each for each in self._decoded(topic, before, decoder) if each.end_offset >= start
            ]
            if len(found) >= limit:
                return found
            rest = self.kv.range(at, until, limit=limit - len(found))
            found += self._decoded(topic, rest, decoder)
            if _joined(found, start) or self._last_before(topic, start) == before:
                return found
        raise ServiceUnavailable(
            f"{topic}: other processes kept changing the objects in {self.name}; try again"
        )

    def _last_before(self, topic: TopicName, offset: int) -> list[Entry]:
        """Returns the last descriptor that begins before `offset`, or an empty list.

        It halves the range of offsets, with requests that read one entry each: etcd would read
        every entry of the range if it were asked for the last one.
        """

        def first(low: int, high: int) -> list[Entry]:
            keys = self.keys
            return self.kv.range(keys.descriptor(topic, low), keys.descriptor(topic, high), limit=1)

        low, distance = offset, 1
        found: list[Entry] = []
        while low > 0 and not found:
            distance *= _SEARCH_FACTOR
            low = max(offset - distance, 0)
            found = first(low, offset)
        high = offset
        while found and (at := self.keys.descriptor_start(topic, found[0].key)) is not None:
            if high - at <= 1:
                break
            middle = (at + high + 1) // 2
            later = first(middle, high)
            found, high = (later, high) if later else (found, middle)
        return found

    def chain(self, topic: TopicName) -> Chain:
        """Returns the rows that every change of the topic's chain writes."""
        return Chain(self.kv, self.keys, topic)

    def totals(self, topic: TopicName) -> Totals:
        """Returns the number of the topic's objects and their bytes, as far as they are counted."""
        return self.chain(topic).totals()

    def get_object_descriptors(
        self,
        topic: TopicName,
        start: int = 0,
        *,
        decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
    ) -> Iterator[ObjectDescriptor]:
        """Yields every descriptor from the one that holds `start`, reading a page at a time.

        Who keeps very many of them passes `decode_outline`: an index may have thousands of entries.

        If a compaction happens between two pages, the first descriptor of the next page may
        overlap offsets that were already yielded.
        """
        while page := self.get_object_descriptors_range(topic, start, decoder=decoder):
            yield from page
            start = page[-1].next_offset

    def get_last_object_descriptors(
        self,
        topic: TopicName,
        limit: int,
        end: int = OFFSET_MAX,
        *,
        decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
    ) -> list[ObjectDescriptor]:
        """Returns the last `limit` descriptors that begin before `end`, oldest first.

        It reads one end row for each of them, going back, and then the descriptors at once. So it
        takes about `limit` requests, however many objects there are. If a compaction happens
        meanwhile, there may be fewer, or older ones.
        """
        totals = self.totals(topic)
        first = 0
        if totals.next is not None or totals.objects > limit:
            tail = self._tail(topic)()
            first = end if tail is None else min(end, tail)
            for _ in range(limit):
                before = self._start_before(topic, first)
                if before is None:
                    break
                first = before
        entries = self.chain(topic).descriptors(first, end, limit) if limit else []
        return self._decoded(topic, entries, decoder)

    def _start_before(self, topic: TopicName, offset: int) -> int | None:
        """Returns where the last object that begins before `offset` begins."""
        row = self.kv.get(self.keys.end(topic, offset - 1)) if offset > 0 else None
        if row is not None:
            return decode_pointer(row.value, row.key)
        found = self._last_before(topic, offset)
        return self.keys.descriptor_start(topic, found[0].key) if found else None

    def _descriptor(self, topic: TopicName, entry: Entry) -> ObjectDescriptor:
        return self._decoded(topic, [entry])[0]

    def _decoded(
        self,
        topic: TopicName,
        entries: Sequence[Entry],
        decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
    ) -> list[ObjectDescriptor]:
        """Decodes the entries; DescriptorError if one is damaged or does not belong to its key."""
        prefix = self.keys.objects(topic)
        found = []
        for entry in entries:
            try:
                descriptor = decoder(entry.value)
            except DescriptorError as error:
                raise DescriptorError(f"{self.name}: {entry.key}: {error}") from error
            if entry.key != f"{prefix}{descriptor.start_offset:020d}":
                held = f"{entry.key} holds offset {descriptor.start_offset}"
                raise DescriptorError(f"{self.name}: {held}")
            found.append(descriptor)
        return found

    # -- adding an object to the chain ----------------------------------------------------------

    def intend(self, topic: TopicName, epoch: int, name: ObjectName | str) -> Intent:
        """Announces that the object will be written, before its first byte is.

        An `ObjectName` that is in use gets the next free attempt number; a `str` is used as it is.
        An existing intent of this epoch or an older one is taken over: its process was fenced, or
        is this one. Raises TopicFenced if the topic's epoch is not `epoch`, and CommitRefused if no
        name is free.
        """
        record = self.find(topic)
        if record is None or record.is_deleted or record.epoch != epoch:
            raise fenced(topic, epoch, record)
        attempt = 0
        for _ in range(_NAMES_MAX):
            object_id = name if isinstance(name, str) else str(name._replace(attempt=attempt))
            key = self.keys.life(topic, object_id)
            entry = self.kv.get(key)
            life = None if entry is None else decode_record(entry.value, Life, key)
            if life is None or (life.state is State.INTENDED and life.epoch <= epoch):
                intent = Intent(object_id, epoch, secrets.token_hex(8))
                span = None if life is None else life.span
                row = Life(State.INTENDED, epoch, intent.token, self._clock.now_ms(), span)
                revision = entry.revision if entry else ABSENT
                put = Put(key, encode_record(row))
                if self.kv.commit([Compare(key, revision)], [put]) is not None:
                    return intent
            elif isinstance(name, str):
                break
            else:
                attempt += 1
        raise CommitRefused(f"{topic}: no name is free for the object {name}")

    def intend_ledger(self, topic: TopicName, epoch: int, span: Range) -> LedgerIntent:
        """Announces a ledger of these offsets, under a name that was never used.

        An attempt at the same first offset that was not committed gives way to this one, which gets
        its ledger id. Raises TopicFenced if the topic's epoch is not `epoch`.
        """
        ledgers = self.ledgers(topic)
        for _ in range(_TRIES):
            record, revision = self._record(topic)
            if record is None or record.is_deleted or record.epoch != epoch:
                raise fenced(topic, epoch, record)
            now_ms = self._clock.now_ms()
            wanted = ledgers.prepare(span, now_ms)
            intent = Intent(wanted.attempt.object_id, epoch, secrets.token_hex(8))
            key = self.keys.life(topic, intent.object_id)
            row = Life(State.INTENDED, epoch, intent.token, now_ms, span)
            compares = [Compare(self.keys.record(topic), revision), Compare(key, ABSENT)]
            writes = [Put(key, encode_record(row)), *wanted.writes]
            if self.kv.commit([*compares, *wanted.compares], writes) is not None:
                return LedgerIntent(intent, wanted.previous)
        raise ServiceUnavailable(
            f"{topic}: other processes kept changing the topic in {self.name}; try again"
        )

    def ledgers(self, topic: TopicName) -> Ledgers:
        """Returns the rows of the topic's ledgers."""
        return Ledgers(self.kv, self.keys, topic)

    def renew(self, topic: TopicName, intent: Intent) -> bool:
        """Sets the intent's time to now, so that a sweep leaves it alone.

        Returns False if the intent was revoked, or if its row changed at the same moment.
        """
        key = self.keys.life(topic, intent.object_id)
        entry = self.kv.get(key)
        life = None if entry is None else decode_record(entry.value, Life, key)
        if not (entry and life and life.token == intent.token and life.state is State.INTENDED):
            return False
        row = replace(life, updated_ms=self._clock.now_ms())
        put = Put(key, encode_record(row))
        return self.kv.commit([Compare(key, entry.revision)], [put]) is not None

    def put_object_descriptor(
        self,
        topic: TopicName,
        intent: Intent,
        descriptor: ObjectDescriptor,
        *,
        verified: bool = False,
    ) -> TopicRecord:
        """Adds the object to the end of the chain and returns the new record.

        `verified` says that the object was read back. The verified watermark then moves in the
        same transaction, if everything before the object is verified. A commit that was already
        made succeeds again. Raises TopicFenced if the topic has a new owner. Raises CommitRefused
        if the tail moved or a sweep revoked the intent: plan again.
        """
        return until_known(lambda: self._commit(topic, intent, descriptor, verified))

    def _commit(
        self, topic: TopicName, intent: Intent, descriptor: ObjectDescriptor, verified: bool
    ) -> TopicRecord:
        key = self.keys.descriptor(topic, descriptor.start_offset)
        there = self.kv.get(key)
        record, _ = self._record(topic)
        life_key = self.keys.life(topic, intent.object_id)
        if there is not None and record is not None:
            life = self.life(topic, intent.object_id)
            if life is not None and life.state is State.COMMITTED and life.token == intent.token:
                # The token, not the name: a later owner may have used the same name.
                return record
            if record.is_deleted or record.epoch != intent.epoch:
                raise fenced(topic, intent.epoch, record)
            raise CommitRefused(
                f"{topic}: offset {descriptor.start_offset} is already in another object; "
                "plan again"
            )
        span = ledger_span(descriptor)
        row = Life(State.COMMITTED, intent.epoch, intent.token, self._clock.now_ms(), span)
        ledger = is_ledger(intent.object_id)

        def change(record: TopicRecord) -> Change:
            if record.tail != descriptor.start_offset:
                raise CommitRefused(
                    f"{topic}: {descriptor.object_id} does not begin where the chain ends, "
                    f"at offset {record.tail}; plan again"
                )
            entry = self.kv.get(life_key)
            life = None if entry is None else decode_record(entry.value, Life, life_key)
            if entry is None or life is None or life.token != intent.token:
                raise CommitRefused(
                    f"{topic}: the intent of {intent.object_id} was revoked; plan again"
                )
            if life.state is not State.INTENDED:
                raise CommitRefused(f"{topic}: {intent.object_id} is {life.state}; plan again")
            ended = self._ended_attempt(topic, descriptor) if ledger else None
            tail = mark = skip_holes(record, descriptor.next_offset)
            if not verified or skip_holes(record, record.verified) != descriptor.start_offset:
                mark = record.verified
            return Change(
                replace(record, tail=tail, verified=mark),
                (
                    *self.chain(topic).changed([descriptor]),
                    Put(life_key, encode_record(row)),
                    Put(self.keys.current(topic), pointer(descriptor.start_offset)),
                    *(() if ended is None else (ended[1],)),
                ),
                (
                    Compare(key, ABSENT),
                    Compare(life_key, entry.revision),
                    *(() if ended is None else (ended[0],)),
                ),
            )

        return self.update(topic, intent.epoch, change)

    def _ended_attempt(
        self, topic: TopicName, descriptor: ObjectDescriptor
    ) -> tuple[Compare, Write]:
        return self.ledgers(topic).completed(descriptor.object_id, descriptor.start_offset)

    def withdraw(self, topic: TopicName, object_id: str, token: str) -> None:
        """Removes an intent of the caller whose object does not exist; no effect otherwise."""
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        life = None if entry is None else decode_record(entry.value, Life, key)
        if entry and life and life.token == token and life.state is State.INTENDED:
            self.kv.commit([Compare(key, entry.revision)], [Remove(key)])

    def mark_verified(self, topic: TopicName, descriptor: ObjectDescriptor) -> TopicRecord:
        """Moves the verified watermark past the object, if the object is the next one."""

        def change(record: TopicRecord) -> Change:
            verified = skip_holes(record, record.verified)  # a restore may have left a gap there
            next_one = descriptor.start_offset <= verified < descriptor.next_offset
            if not next_one or descriptor.next_offset > record.tail:
                return Change(record)
            return Change(replace(record, verified=skip_holes(record, descriptor.next_offset)))

        return self.update(topic, None, change)

    def replace_descriptor(
        self, topic: TopicName, said: ObjectDescriptor, found: ObjectDescriptor
    ) -> bool:
        """Replaces the descriptor `said` of an object by `found`, if it is still in the chain.

        Both describe the same object and range; what may differ are hints and hashes. Returns
        False if the chain has another descriptor there.
        """
        names = {(each.object_id, each.start_offset, each.end_offset) for each in (said, found)}
        assert len(names) == 1, "both describe the same object"
        key = self.keys.descriptor(topic, said.start_offset)
        done = False

        def change(record: TopicRecord) -> Change:
            nonlocal done
            entry = self.kv.get(key)
            done = entry is not None and self._descriptor(topic, entry) == said
            if entry is None or not done:
                return Change(record)
            put = Put(key, encode_descriptor(stored(found)))
            return Change(record, (put,), (Compare(key, entry.revision),))

        self.update(topic, None, change)
        return done

    def get_current_pointer(self, topic: TopicName) -> int | None:
        """Returns the offset at which the newest object starts, as its pointer says."""
        entry = self.kv.get(self.keys.current(topic))
        return None if entry is None else decode_pointer(entry.value, entry.key)

    # -- deleting an object ---------------------------------------------------------------------

    def lives(self, topic: TopicName) -> Iterator[tuple[str, Life]]:
        """Yields each object id of the topic with its state, reading a page at a time."""
        prefix = self.keys.lives(topic)
        at, end = prefix, after_prefix(prefix)
        while page := self.kv.range(at, end, limit=CATALOG_PAGE):
            for entry in page:
                yield (
                    entry.key.removeprefix(prefix),
                    decode_record(entry.value, Life, entry.key),
                )
            at = page[-1].key + _NEXT_KEY

    def life(self, topic: TopicName, object_id: str) -> Life | None:
        entry = self.kv.get(self.keys.life(topic, object_id))
        return None if entry is None else decode_record(entry.value, Life, entry.key)

    def condemn(
        self, topic: TopicName, object_id: str, seen: Life | None, span: Range | None = None
    ) -> str | None:
        """Marks the key as being deleted, if its row is still `seen`.

        `span` are the offsets of a ledger without a row, if they are known. Returns the token for
        `bury`. Returns None if the row has changed or a descriptor names the object; the object
        must not be deleted then.
        """
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        now = None if entry is None else decode_record(entry.value, Life, key)
        if now != seen or not may_become(now.state if now else None, State.DELETING):
            return None
        compares = [Compare(key, entry.revision if entry else ABSENT)]
        start = span[0] if span is not None else _start_of(object_id, now)
        if start is not None and (now is None or now.state is not State.REPLACED):
            named = self.kv.get(self.keys.descriptor(topic, start))
            if named and self._descriptor(topic, named).object_id == object_id:
                return None
            at = self.keys.descriptor(topic, start)
            compares.append(Compare(at, named.revision if named else ABSENT))
        token = secrets.token_hex(8)
        epoch = now.epoch if now else 0
        kept = span if now is None else now.span
        row = Life(State.DELETING, epoch, token, self._clock.now_ms(), kept)
        writes: list[Write] = [Put(key, encode_record(row))]
        if start is not None and now is not None and now.state is State.REPLACED:
            writes.append(Remove(self.keys.replaced_descriptor(topic, start, object_id)))
        if start is not None and is_ledger(object_id) and self._passed(topic, start):
            given_up = self.ledgers(topic).given_up(object_id, start)
            if given_up is not None:
                compares.append(given_up[0])
                writes.append(given_up[1])
        return token if self.kv.commit(compares, writes) is not None else None

    def forget_gone(self, topic: TopicName, object_id: str, seen: Life) -> None:
        """Removes the row of a ledger that is gone, if it is still `seen`.

        Call it when no late writer can be left. The name is never used again.
        """
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        if entry is None or decode_record(entry.value, Life, key) != seen:
            return
        if is_ledger(object_id) and seen.state is State.GONE:
            self.kv.commit([Compare(key, entry.revision)], [Remove(key)])

    def _passed(self, topic: TopicName, offset: int) -> bool:
        """Whether the chain goes on after the offset."""
        tail = self._tail(topic)()
        return tail is not None and tail > offset

    def bury(self, topic: TopicName, object_id: str, token: str, *, certain: bool) -> None:
        """Call it after the object was deleted. Removes the key's row, or marks it as gone.

        `certain` removes the row, so the name can be used again. Pass it only if this process
        called `condemn` or `retire` itself and got a response to every delete request: a request
        without a response may still arrive and delete a new object of that name.
        """
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        life = None if entry is None else decode_record(entry.value, Life, key)
        if not (entry and life and life.token == token and life.state is State.DELETING):
            return
        mark = replace(life, state=State.GONE, updated_ms=self._clock.now_ms())
        write: Write = Remove(key) if certain else Put(key, encode_record(mark))
        self.kv.commit([Compare(key, entry.revision)], [write])

    def retire(
        self, topic: TopicName, epoch: int | None, descriptor: ObjectDescriptor
    ) -> str | None:
        """Removes the oldest object from the chain and marks its key as being deleted.

        Returns the token for `bury`, or None if the object is not the oldest one.
        """
        key = self.keys.descriptor(topic, descriptor.start_offset)
        life_key = self.keys.life(topic, descriptor.object_id)
        token = secrets.token_hex(8)
        done = False

        def change(record: TopicRecord) -> Change:
            nonlocal done
            done = False
            oldest = self.get_object_descriptors_range(topic, 0, limit=1)
            entry, life_entry = self.kv.get(key), self.kv.get(life_key)
            found = [*oldest, self._descriptor(topic, entry)] if entry else []
            if not entry or {each.object_id for each in found} != {descriptor.object_id}:
                return Change(record)
            done = True
            span = ledger_span(descriptor)
            row = Life(State.DELETING, record.epoch, token, self._clock.now_ms(), span)
            start = skip_holes(record, descriptor.next_offset)
            return Change(
                replace(
                    record,
                    start_offset=max(record.start_offset, start),
                    verified=max(record.verified, start),
                ),
                (
                    *self.chain(topic).changed([], [found[-1]]),
                    Put(life_key, encode_record(row)),
                ),
                (
                    Compare(key, entry.revision),
                    Compare(life_key, life_entry.revision if life_entry else ABSENT),
                ),
            )

        self.update(topic, epoch, change)
        return token if done else None

    # -- cursors --------------------------------------------------------------------------------

    def cursor(self, topic: TopicName, subscription: str) -> int | None:
        """Returns the last offset that the subscription acknowledged; None if there is none."""
        entry = self.kv.get(self.keys.cursor(topic, subscription))
        return None if entry is None else decode_cursor(entry.value, entry.key)

    def put_cursor(self, topic: TopicName, subscription: str, offset: int) -> None:
        self.kv.commit([], [Put(self.keys.cursor(topic, subscription), encode_cursor(offset))])


def _start_of(object_id: str, life: Life | None) -> int | None:
    """The first offset of an object, by its name or by its row."""
    name = parse_object(object_id)
    if name is not None:
        return name.start
    return life.span[0] if life is not None and life.span is not None else None


def until_known(change: Callable[[], _Result]) -> _Result:
    """Repeats the change after ServiceUnavailable, a few times.

    The change may have been made although the call failed, so it must succeed when repeated.
    """
    for _ in range(_COMMIT_TRIES - 1):
        try:
            return change()
        except ServiceUnavailable:
            continue
    return change()


def fenced(topic: TopicName, epoch: int, now: TopicRecord | int | None) -> TopicFenced:
    """Returns the error for a process of that epoch; `now` is the topic's record, or its epoch."""
    if isinstance(now, TopicRecord):
        if now.is_deleted:
            return was_deleted(topic)
        now = now.epoch
    return TopicFenced(
        f"{topic}: another process took the topic over (its epoch is {now or 0}, ours was "
        f"{epoch}); open the topic again to get it back"
    )


def was_deleted(topic: TopicName | str) -> TopicDeleted:
    return TopicDeleted(
        f"{topic}: the topic was deleted; open it again to create a new one of that name, which "
        "has new offsets"
    )


def _is_deleted(entry: Entry) -> bool:
    """Whether the record is that of a deleted topic. A damaged one is not."""
    try:
        return decode_record(entry.value, TopicRecord, entry.key).is_deleted
    except DescriptorError:
        return False


def _joined(found: Sequence[ObjectDescriptor], start: int) -> bool:
    """Whether the first object holds `start` and the second one begins where it ends."""
    if not found or found[0].start_offset > start:
        return False
    if found[0].start_offset == start:
        return True
    return len(found) > 1 and found[1].start_offset == found[0].next_offset
