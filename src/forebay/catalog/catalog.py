"""`Catalog`: what counts, topic by topic: descriptors, tails, and the lives of keys.

All of it is compare-and-set on a `Kv`, the same for etcd and for SQLite. A topic's record is the
one thing that every change of its chain compares, so that the chain stays contiguous whoever
commits (I4), and an owner of an older epoch can change nothing (I7).

What a caller gets wrong: ServiceUnavailable from a change means that nobody knows whether it was
made. All changes here can be repeated; a commit that finds itself done has succeeded.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from forebay.catalog.kv import ABSENT, Compare, Entry, Kv, Put, Remove, Watch
from forebay.catalog.records import (
    Life,
    Owner,
    State,
    TopicRecord,
    decode_cursor,
    decode_pointer,
    decode_record,
    encode_cursor,
    encode_record,
    may_become,
    skip_lost,
)
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import CommitRefused, DescriptorError, ServiceUnavailable, TopicFenced
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.names import CatalogKeys, ObjectName, TopicName, after_prefix, parse_object
from forebay.limits import CATALOG_PAGE, OFFSET_MAX
from forebay.metrics import Counter

DESCRIPTOR_WRITES = Counter(
    "forebay_catalog_descriptor_write_total",
    "Descriptors of objects that were written to the catalog.",
)

_TRIES: Final = 100
"""Of one compare-and-set, each lost to a process that made progress."""
_NAMES_MAX: Final = 1000
_COMMIT_TRIES: Final = 3
_NEXT_KEY: Final = "\1"
"""Behind a key: the next key there can be, as none has a zero byte."""

Write: TypeAlias = Put | Remove


@dataclass(frozen=True, slots=True)
class Intent:
    """The right to write one object and to commit it, until a sweep takes it back."""

    object_id: str
    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a topic's record, and what else changes in the same transaction."""

    record: TopicRecord
    writes: tuple[Write, ...] = ()
    compares: tuple[Compare, ...] = ()


class Catalog:
    """Thread-safe, as its `Kv` is."""

    def __init__(self, kv: Kv, root_prefix: str = "/forebay", clock: Clock = SYSTEM_CLOCK) -> None:
        self.kv = kv
        self.keys = CatalogKeys(root_prefix)
        self._clock = clock

    @property
    def name(self) -> str:
        return self.kv.name

    def close(self) -> None:
        self.kv.close()

    # -- topics ---------------------------------------------------------------------------------

    def topics(self) -> Iterator[TopicName]:
        """Every topic that has a record, by name."""
        at, end = self.keys.topics(), after_prefix(self.keys.topics())
        while found := self.kv.range(at, end, limit=1):
            parts = found[0].key.removeprefix(self.keys.topics()).split("/")
            own = self.keys.topics() + "/".join(parts[:2]) + "/"
            entry = self.kv.get(own + "record")
            topic = self.keys.topic_of_record(entry.key) if entry is not None else None
            if topic is not None and len(parts) > 2:
                yield topic
            at = after_prefix(own) if len(parts) > 2 else found[0].key + _NEXT_KEY

    def record(self, topic: TopicName) -> TopicRecord | None:
        return self._record(topic)[0]

    def owner(self, topic: TopicName) -> Owner | None:
        entry = self.kv.get(self.keys.owner(topic))
        return None if entry is None else decode_record(entry.value, Owner, entry.key)

    def update(
        self, topic: TopicName, epoch: int | None, change: Callable[[TopicRecord], Change]
    ) -> TopicRecord:
        """Changes the record and whatever `change` adds, in one transaction.

        TopicFenced if the topic has another epoch by now; None is for changes that any process
        may make. `change` is called again when another process was faster.
        """
        for _ in range(_TRIES):
            record, revision = self._record(topic)
            if record is None:
                raise CommitRefused(f"{topic}: {self.name} does not know the topic")
            if epoch is not None and record.epoch != epoch:
                raise fenced(topic, epoch, record.epoch)
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
        raise ServiceUnavailable(f"{topic}: {self.name} changes too fast to be changed")

    def _described(self, topic: TopicName, writes: list[Write]) -> int:
        starts = [self.keys.descriptor_start(topic, one.key) for one in writes]
        return sum(
            start is not None and isinstance(one, Put)
            for start, one in zip(starts, writes, strict=True)
        )

    def watch(self, topic: TopicName, after: int) -> Watch:
        """Changes to anything of the topic with a revision over `after`."""
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
    ) -> list[ObjectDescriptor]:
        """Those that overlap `start..end`, oldest first, at most `limit`; as of one moment.

        The one that begins before `start` is found by a request of its own. A compaction between
        the two requests moves the border between objects: without a second look there could be a
        hole that never was, which to a reader is the end of the topic, or lost data.
        """
        if end is not None and end <= start:
            return []
        first = self.keys.descriptor(topic, 0)
        from_start = self.keys.descriptor(topic, start)
        stop = self.keys.descriptor(topic, OFFSET_MAX if end is None else end)
        for _ in range(_TRIES):
            before = self.kv.range(first, from_start, limit=1, descending=True)
            found = [
                each for each in self._decoded(topic, before, decoder) if each.end_offset >= start
            ]
            if len(found) >= limit:
                return found
            behind = self.kv.range(from_start, stop, limit=limit - len(found))
            found += self._decoded(topic, behind, decoder)
            if _joined(found, start):
                return found
            if self.kv.range(first, from_start, limit=1, descending=True) == before:
                return found
        raise ServiceUnavailable(f"{topic}: {self.name} changes too fast to be read")

    def get_object_descriptors(
        self, topic: TopicName, start: int = 0
    ) -> Iterator[ObjectDescriptor]:
        """Every descriptor from the one that holds `start` on, a page at a time.

        Where a compaction comes in between two pages, the next one reaches back over the last.
        """
        while page := self.get_object_descriptors_range(topic, start):
            yield from page
            start = page[-1].next_offset

    def _descriptor(self, topic: TopicName, entry: Entry) -> ObjectDescriptor:
        return self._decoded(topic, [entry])[0]

    def _decoded(
        self,
        topic: TopicName,
        entries: Sequence[Entry],
        decoder: Callable[[bytes], ObjectDescriptor] = decode_descriptor,
    ) -> list[ObjectDescriptor]:
        """The descriptors that the entries hold; DescriptorError if one is not that of its key."""
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

    # -- the way of an object into the chain ----------------------------------------------------

    def intend(self, topic: TopicName, epoch: int, name: ObjectName | str) -> Intent:
        """Announces that the object will be written; a plain name that is taken gets a number.

        A name that was intended before is taken over: the process that intended it has been
        fenced, or was this one.
        """
        record = self.record(topic)
        if record is None or record.epoch != epoch:
            raise fenced(topic, epoch, record.epoch if record else 0)
        attempt = 0
        for _ in range(_NAMES_MAX):
            object_id = name if isinstance(name, str) else str(name._replace(attempt=attempt))
            key = self.keys.life(topic, object_id)
            entry = self.kv.get(key)
            life = None if entry is None else decode_record(entry.value, Life, key)
            if life is None or (life.state is State.INTENDED and life.epoch <= epoch):
                intent = Intent(object_id, epoch, secrets.token_hex(8))
                row = Life(State.INTENDED, epoch, intent.token, self._clock.now_ms())
                revision = entry.revision if entry else ABSENT
                put = Put(key, encode_record(row))
                if self.kv.commit([Compare(key, revision)], [put]) is not None:
                    return intent
            elif isinstance(name, str):
                break
            else:
                attempt += 1
        raise CommitRefused(f"{topic}: no name is free for {name}")

    def renew(self, topic: TopicName, intent: Intent) -> bool:
        """Makes the intent young again, for a sweep; False if it is not one any more."""
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
        """Adds the object to the end of the chain, if the chain still ends where it begins.

        `verified` says that the object was read back: if everything before it is verified, it is
        from this very moment on. Succeeds when it was done before. TopicFenced if the topic has
        another owner by now; CommitRefused if the tail moved, or a sweep took the intent back:
        plan again.
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
                return record  # the name alone proves nothing: a later owner's may be the same
            if record.epoch != intent.epoch:
                raise fenced(topic, intent.epoch, record.epoch)
            raise CommitRefused(f"{topic}: offset {descriptor.start_offset} is in another object")
        row = Life(State.COMMITTED, intent.epoch, intent.token, self._clock.now_ms())

        def change(record: TopicRecord) -> Change:
            if record.tail != descriptor.start_offset:
                raise CommitRefused(
                    f"{topic}: the chain ends at offset {record.tail}, "
                    f"and {descriptor.object_id} does not begin there"
                )
            entry = self.kv.get(life_key)
            life = None if entry is None else decode_record(entry.value, Life, life_key)
            if entry is None or life is None or life.token != intent.token:
                raise CommitRefused(f"{topic}: {intent.object_id} is no longer intended")
            if life.state is not State.INTENDED:
                raise CommitRefused(f"{topic}: {intent.object_id} is {life.state}")
            tail = mark = skip_lost(record, descriptor.next_offset)
            if not verified or skip_lost(record, record.verified) != descriptor.start_offset:
                mark = record.verified
            return Change(
                replace(record, tail=tail, verified=mark),
                (
                    Put(key, encode_descriptor(descriptor)),
                    Put(life_key, encode_record(row)),
                    Put(self.keys.current(topic), pointer(descriptor.start_offset)),
                ),
                (Compare(key, ABSENT), Compare(life_key, entry.revision)),
            )

        return self.update(topic, intent.epoch, change)

    def withdraw(self, topic: TopicName, object_id: str, token: str) -> None:
        """Forgets an intent of one's own whose object is not there (any more)."""
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        life = None if entry is None else decode_record(entry.value, Life, key)
        if entry and life and life.token == token and life.state is State.INTENDED:
            self.kv.commit([Compare(key, entry.revision)], [Remove(key)])

    def mark_verified(self, topic: TopicName, descriptor: ObjectDescriptor) -> TopicRecord:
        """Records that the object was read back; the watermark moves if it is the next one."""

        def change(record: TopicRecord) -> Change:
            verified = skip_lost(record, record.verified)  # a restore may have found a gap there
            next_one = descriptor.start_offset <= verified < descriptor.next_offset
            if not next_one or descriptor.next_offset > record.tail:
                return Change(record)
            return Change(replace(record, verified=skip_lost(record, descriptor.next_offset)))

        return self.update(topic, None, change)

    def get_current_pointer(self, topic: TopicName) -> int | None:
        """Where the newest object starts, by its pointer."""
        entry = self.kv.get(self.keys.current(topic))
        return None if entry is None else decode_pointer(entry.value, entry.key)

    # -- the end of an object -------------------------------------------------------------------

    def lives(self, topic: TopicName) -> Iterator[tuple[str, Life]]:
        """The rows of all keys of a topic, a page at a time."""
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

    def condemn(self, topic: TopicName, object_id: str, seen: Life | None) -> str | None:
        """Makes the key one that is being deleted, if its row still is as it was `seen`.

        Returns the token for `bury`, or None if another process was faster, or a descriptor names
        the object: then it must not be deleted.
        """
        key = self.keys.life(topic, object_id)
        entry = self.kv.get(key)
        now = None if entry is None else decode_record(entry.value, Life, key)
        if now != seen or not may_become(now.state if now else None, State.DELETING):
            return None
        compares = [Compare(key, entry.revision if entry else ABSENT)]
        name = parse_object(object_id)
        if name is not None and (now is None or now.state is not State.REPLACED):
            named = self.kv.get(self.keys.descriptor(topic, name.start))
            if named and self._descriptor(topic, named).object_id == object_id:
                return None
            at = self.keys.descriptor(topic, name.start)
            compares.append(Compare(at, named.revision if named else ABSENT))
        token = secrets.token_hex(8)
        epoch = now.epoch if now else 0
        row = Life(State.DELETING, epoch, token, self._clock.now_ms())
        writes: list[Write] = [Put(key, encode_record(row))]
        if name is not None and now is not None and now.state is State.REPLACED:
            writes.append(Remove(self.keys.replaced_descriptor(topic, name.start, object_id)))
        return token if self.kv.commit(compares, writes) is not None else None

    def bury(self, topic: TopicName, object_id: str, token: str, *, certain: bool) -> None:
        """After the object was deleted: its row goes, or stays as a mark if that is not certain.

        `certain` is for the process that condemned the key itself and got a response to every
        request.
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
        """Takes the oldest object out of the chain; its key is being deleted from then on.

        Returns the token for `bury`; None if it is not the oldest one (any more).
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
            row = Life(State.DELETING, record.epoch, token, self._clock.now_ms())
            start = skip_lost(record, descriptor.next_offset)
            return Change(
                replace(
                    record,
                    start_offset=max(record.start_offset, start),
                    verified=max(record.verified, start),
                ),
                (Remove(key), Put(life_key, encode_record(row))),
                (
                    Compare(key, entry.revision),
                    Compare(life_key, life_entry.revision if life_entry else ABSENT),
                ),
            )

        self.update(topic, epoch, change)
        return token if done else None

    # -- cursors --------------------------------------------------------------------------------

    def cursor(self, topic: TopicName, subscription: str) -> int | None:
        """The last offset that the subscription acknowledged."""
        entry = self.kv.get(self.keys.cursor(topic, subscription))
        return None if entry is None else decode_cursor(entry.value, entry.key)

    def put_cursor(self, topic: TopicName, subscription: str, offset: int) -> None:
        self.kv.commit([], [Put(self.keys.cursor(topic, subscription), encode_cursor(offset))])


def until_known(change: Callable[[], TopicRecord]) -> TopicRecord:
    """Repeats a change of which nobody knows whether it was made; it finds out by itself."""
    for _ in range(_COMMIT_TRIES - 1):
        try:
            return change()
        except ServiceUnavailable:
            continue
    return change()


def fenced(topic: TopicName, epoch: int, now: int) -> TopicFenced:
    return TopicFenced(
        f"{topic}: another process took the topic over (its epoch is {now}, ours was {epoch}); "
        "open the topic again to get it back"
    )


def pointer(start: int) -> bytes:
    return b'{"start":"%020d"}' % start


def _joined(found: Sequence[ObjectDescriptor], start: int) -> bool:
    """Whether the first one holds `start`, and the border between the requests has no gap."""
    if not found or found[0].start_offset > start:
        return False
    if found[0].start_offset == start:
        return True
    return len(found) > 1 and found[1].start_offset == found[0].next_offset
