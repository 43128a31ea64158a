"""The rows of the catalog for a topic's ledgers: their ids, and attempts to write them.

    <root>/storage/ledger-topics     how many topics have a number
    <topic>/ledger-ids               the topic's number, and how many ids it has given
    <topic>/ledgers/<start>          the last attempt to write the ledger that begins there

A ledger's id is the topic's number, shifted, plus the count of the topic: unique in the store, and
never given twice. An attempt has a uuid of its own, which is in the names of its two files. The row
of an attempt is written with the intent, and removed when the ledger is committed: from then on its
descriptor has what it said. Both compare the row, so of two attempts only the later one can be
committed. A retry keeps the id, so that ids ascend with the offsets, and takes a new uuid.

Beware: the rows are only in the catalog. A restore sets the ids after those that it found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from forebay.catalog.chain import Write, stored
from forebay.catalog.kv import ABSENT, Compare, Entry, Kv, Put, Remove
from forebay.catalog.records import Range, decode_json
from forebay.errors import CommitRefused, DescriptorError, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from forebay.format.names import (
    CatalogKeys,
    LedgerName,
    TopicName,
    after_prefix,
    is_ledger,
    parse_ledger,
)
from forebay.limits import CATALOG_PAGE, OFFSET_MAX

LEDGER_BITS: Final = 40
"""The low bits of an id count the ledgers of one topic."""
_NEXT_KEY: Final = "\1"
_TRIES: Final = 100


@dataclass(frozen=True, slots=True)
class LedgerIds:
    """The ids of one topic."""

    number: int
    """The number of the topic, from 1."""
    given: int = 0
    """How many ids it has given."""

    @property
    def next(self) -> int:
        return self.at(self.given)

    def at(self, count: int) -> int:
        return (self.number << LEDGER_BITS) + count

    def after(self, ledger: int) -> LedgerIds:
        """Returns the ids that come after `ledger`, if it is one of this topic."""
        number, count = ledger >> LEDGER_BITS, ledger & ((1 << LEDGER_BITS) - 1)
        return max(self, LedgerIds(number, count + 1), key=lambda ids: (ids.number, ids.given))


@dataclass(frozen=True, slots=True)
class LedgerAttempt:
    """An attempt to write a ledger, which is not committed."""

    object_id: str
    start: int
    end: int
    """One more than the last offset."""
    attempted_ms: int
    descriptor: ObjectDescriptor | None = None
    """Set once the ledger was written and read back: only its commit is missing, because a ledger
    before it is missing too."""

    @property
    def span(self) -> Range:
        return self.start, self.end

    @property
    def name(self) -> LedgerName:
        name = parse_ledger(self.object_id)
        assert name is not None, "the row was checked when it was decoded"
        return name


@dataclass(frozen=True, slots=True)
class Prepared:
    """A new attempt, as writes and comparisons of one transaction."""

    attempt: LedgerAttempt
    previous: LedgerAttempt | None
    """The attempt at the same offsets that it replaces. Its files are to be deleted."""
    writes: tuple[Write, ...]
    compares: tuple[Compare, ...]


class Ledgers:
    """The rows of one topic. Methods may raise ServiceError, and DescriptorError for damage."""

    def __init__(self, kv: Kv, keys: CatalogKeys, topic: TopicName) -> None:
        self._kv = kv
        self._keys = keys
        self._topic = topic

    def ids(self) -> LedgerIds | None:
        """Returns the topic's ids; None if it never had a ledger."""
        entry = self._kv.get(self._keys.ledger_ids(self._topic))
        return None if entry is None else _decode_ids(entry)

    def settled_ids(self) -> LedgerIds:
        """Returns the topic's ids. A topic without a number gets one, so that they stay the same.

        Raises ServiceUnavailable if every attempt lost against another process.
        """
        for _ in range(_TRIES):
            compares: list[Compare] = []
            writes: list[Write] = []
            ids = self._given(compares, writes)
            if not writes:
                return ids
            writes.append(Put(self._keys.ledger_ids(self._topic), _encode_ids(ids)))
            if self._kv.commit(compares, writes) is not None:
                return ids
        raise ServiceUnavailable(
            f"{self._topic}: other topics kept taking numbers for their ledgers; try again"
        )

    def attempts(self, start: int = 0) -> Iterator[LedgerAttempt]:
        """Yields the attempts that begin at `start` or after it, ordered by offset."""
        at = self._keys.ledger_attempt(self._topic, start)
        end = after_prefix(self._keys.ledger_attempts(self._topic))
        while page := self._kv.range(at, end, limit=CATALOG_PAGE):
            yield from map(_decode_attempt, page)
            at = page[-1].key + _NEXT_KEY

    def prepare(self, span: Range, now_ms: int) -> Prepared:
        """Returns a new attempt at a ledger of these offsets, with a new uuid."""
        key = self._keys.ledger_attempt(self._topic, span[0])
        entry = self._kv.get(key)
        previous = None if entry is None else _decode_attempt(entry)
        compares = [Compare(key, _revision(entry))]
        writes: list[Write] = []
        if previous is not None:
            ledger = previous.name.ledger_id
        else:
            ids = self._given(compares, writes)
            ledger = ids.next
            given = LedgerIds(ids.number, ids.given + 1)
            writes.append(Put(self._keys.ledger_ids(self._topic), _encode_ids(given)))
        object_id = str(LedgerName(str(uuid4()), ledger))
        attempt = LedgerAttempt(object_id, span[0], span[1], now_ms)
        writes.append(Put(key, _encode_attempt(attempt)))
        return Prepared(attempt, previous, tuple(writes), tuple(compares))

    def _given(self, compares: list[Compare], writes: list[Write]) -> LedgerIds:
        """Returns the ids given so far. A topic without a number gets one."""
        entry = self._kv.get(self._keys.ledger_ids(self._topic))
        compares.append(Compare(self._keys.ledger_ids(self._topic), _revision(entry)))
        if entry is not None:
            return _decode_ids(entry)
        topics = self._kv.get(self._keys.ledger_topics())
        compares.append(Compare(self._keys.ledger_topics(), _revision(topics)))
        number = 1 if topics is None else _decode_count(topics) + 1
        writes.append(Put(self._keys.ledger_topics(), _encode_count(number)))
        return LedgerIds(number)

    def written(self, descriptor: ObjectDescriptor) -> None:
        """Records that a ledger was written and read back, which cannot be committed yet.

        Raises CommitRefused if another attempt has begun since.
        """
        key = self._keys.ledger_attempt(self._topic, descriptor.start_offset)
        for _ in range(_TRIES):
            entry = self._kv.get(key)
            attempt = self._own(entry, descriptor.object_id, descriptor.start_offset)
            done = replace(attempt, descriptor=stored(descriptor))
            put = Put(key, _encode_attempt(done))
            if done == attempt or self._kv.commit([Compare(key, _revision(entry))], [put]):
                return
        raise ServiceUnavailable(f"{self._topic}: other processes kept changing {key}; try again")

    def completed(self, object_id: str, start: int) -> tuple[Compare, Write]:
        """Returns what the commit of a ledger compares and writes: its attempt ends.

        Raises CommitRefused if another attempt has begun since.
        """
        key = self._keys.ledger_attempt(self._topic, start)
        entry = self._kv.get(key)
        self._own(entry, object_id, start)
        return Compare(key, _revision(entry)), Remove(key)

    def _own(self, entry: Entry | None, object_id: str, start: int) -> LedgerAttempt:
        attempt = None if entry is None else _decode_attempt(entry)
        if attempt is None or attempt.object_id != object_id:
            raise CommitRefused(
                f"{self._topic}: another attempt to write the ledger at offset {start} has begun "
                f"since {object_id}; plan again"
            )
        return attempt

    def attempt_at(self, start: int) -> LedgerAttempt | None:
        """Returns the last attempt at the ledger that begins there."""
        entry = self._kv.get(self._keys.ledger_attempt(self._topic, start))
        return None if entry is None else _decode_attempt(entry)

    def given_up(self, object_id: str, start: int) -> tuple[Compare, Write] | None:
        """Returns what removes the row of the attempt, if it is the last one there; else None."""
        key = self._keys.ledger_attempt(self._topic, start)
        entry = self._kv.get(key)
        if entry is None or _decode_attempt(entry).object_id != object_id:
            return None
        return Compare(key, entry.revision), Remove(key)

    def continue_after(self, ledger: int) -> None:
        """Gives ids after this one, which a restore found, from now on."""
        while True:
            compares: list[Compare] = []
            entry = self._kv.get(self._keys.ledger_ids(self._topic))
            known = LedgerIds(0) if entry is None else _decode_ids(entry)
            compares.append(Compare(self._keys.ledger_ids(self._topic), _revision(entry)))
            topics = self._kv.get(self._keys.ledger_topics())
            compares.append(Compare(self._keys.ledger_topics(), _revision(topics)))
            count = 0 if topics is None else _decode_count(topics)
            wanted = known.after(ledger)
            writes: list[Write] = []
            if wanted != known:
                writes.append(Put(self._keys.ledger_ids(self._topic), _encode_ids(wanted)))
            if wanted.number > count:
                writes.append(Put(self._keys.ledger_topics(), _encode_count(wanted.number)))
            if not writes or self._kv.commit(compares, writes) is not None:
                return


def ledger_span(descriptor: ObjectDescriptor) -> Range | None:
    """Returns the offsets of a ledger, for the row of its key; None for any other object."""
    if not is_ledger(descriptor.object_id):
        return None
    return descriptor.start_offset, descriptor.next_offset


def _revision(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.revision


def _encode_count(count: int) -> bytes:
    return json.dumps({"topics": count}, separators=(",", ":")).encode()


def _decode_count(entry: Entry) -> int:
    match decode_json(entry.value, entry.key):
        case {"topics": int() as count} if _is_number(count) and count < 1 << (63 - LEDGER_BITS):
            return count
    raise DescriptorError(f"{entry.key} does not hold a number of topics")


def _encode_ids(ids: LedgerIds) -> bytes:
    body = {"given": ids.given, "number": ids.number}
    return json.dumps(body, separators=(",", ":")).encode()


def _decode_ids(entry: Entry) -> LedgerIds:
    match decode_json(entry.value, entry.key):
        case {"given": int() as given, "number": int() as number} if (
            _is_number(given, number) and given < 1 << LEDGER_BITS <= number << LEDGER_BITS
        ):
            return LedgerIds(number, given)
    raise DescriptorError(f"{entry.key} does not hold the ids of ledgers")


def _encode_attempt(attempt: LedgerAttempt) -> bytes:
    body: dict[str, object] = {
        "attempted_ms": attempt.attempted_ms,
        "end": attempt.end,
        "object_id": attempt.object_id,
        "start": attempt.start,
    }
    if attempt.descriptor is not None:
        body["descriptor"] = encode_descriptor(attempt.descriptor).decode()
    return json.dumps(body, separators=(",", ":")).encode()


def _decode_attempt(entry: Entry) -> LedgerAttempt:
    body = decode_json(entry.value, entry.key)
    match body:
        case {
            "attempted_ms": int() as attempted_ms,
            "end": int() as end,
            "object_id": str() as object_id,
            "start": int() as start,
        } if _is_number(attempted_ms, start, end) and start < end and is_ledger(object_id):
            return LedgerAttempt(object_id, start, end, attempted_ms, _descriptor(entry, body))
    raise DescriptorError(f"{entry.key} does not hold an attempt to write a ledger")


def _descriptor(entry: Entry, body: dict[str, object]) -> ObjectDescriptor | None:
    match body.get("descriptor"):
        case None:
            return None
        case str() as text:
            try:
                found = decode_descriptor(text.encode())
            except DescriptorError as error:
                raise DescriptorError(f"{entry.key}: {error}") from error
            if (found.object_id, found.start_offset) == (body["object_id"], body["start"]):
                return found
    raise DescriptorError(f"{entry.key} does not hold the descriptor of its ledger")


def _is_number(*values: int) -> bool:
    return all(type(each) is int and 0 <= each <= OFFSET_MAX for each in values)
