"""The records in the catalog, and the states of an object's key.

A topic has one record, changed only by compare-and-set. Every number in it is the *next* offset of
its stage, so 0 means that nothing is there yet:

    start_offset <= verified <= tail <= reserved

Every object key has a row with its state, from the intent to write the object until it is deleted.
Writers and deleters change this row by compare-and-set, so nobody writes to a key that is being
deleted, and nobody deletes a key that may still be committed:

    intended ──> committed <──> replaced ──> deleting ──> (no row)
        │            └───────────────────────^ ^  └──────> gone
        ├──────────────────────────────────────┘
        └──> (no row), by the process that intended it, if it left no object

A key stays `gone` if a delete request got no response: the request may still arrive, so the name is
never used again. The layout: `docs/formats/catalog.md`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, TypeVar

from forebay.errors import DescriptorError, UsageError
from forebay.format.cursor import Cursor
from forebay.limits import CATALOG_VALUE_BYTES_MAX, LOG_DISTANCE, LOST_RANGES_MAX, OFFSET_MAX


class State(StrEnum):
    INTENDED = "intended"
    COMMITTED = "committed"
    REPLACED = "replaced"
    DELETING = "deleting"
    GONE = "gone"


_NEXT: Final[dict[State | None, frozenset[State | None]]] = {
    None: frozenset({State.INTENDED, State.COMMITTED, State.REPLACED, State.DELETING, State.GONE}),
    State.INTENDED: frozenset({None, State.COMMITTED, State.DELETING, State.GONE}),
    State.COMMITTED: frozenset({State.REPLACED, State.DELETING}),
    State.REPLACED: frozenset({State.COMMITTED, State.DELETING}),
    State.DELETING: frozenset({None, State.GONE}),
    State.GONE: frozenset(),
}


def may_become(before: State | None, after: State | None) -> bool:
    """Whether a key may change from one state to the other. No change is always allowed.

    None is a key without a row. A restore can commit it, a compaction can replace it if a
    descriptor names it, and a sweep can delete it. A restore that finds a damaged object marks its
    key as gone, so that no upload uses the name.
    """
    return before == after or after in _NEXT[before]


class Deletion(StrEnum):
    """How far the deletion of a topic is. The record of a deleted topic stays for ever."""

    DELETING = "deleting"
    """What the topic had may still be there. Nobody may use it any more."""
    DELETED = "deleted"
    """Only the record is left, and a begin marker in the object store."""


Range: TypeAlias = tuple[int, int]
"""Offsets from the first to before the second."""


@dataclass(frozen=True, slots=True)
class Life:
    """The row of one object key."""

    state: State
    epoch: int
    """The epoch of the owner that intended the object."""
    token: str
    """Identifies the attempt to write or delete the object. Every change compares it."""
    updated_ms: int
    span: Range | None = None
    """The offsets of the object, if its name does not say them: of a ledger."""


HoleKind: TypeAlias = Literal["lost", "unknown", "accepted"]


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """The record of one topic.

    Offsets without a message are *holes*. They are lost, unknown or accepted. The chain of objects
    continues after a hole. Readers jump over accepted holes, and raise at the others.
    """

    epoch: int = 0
    """The epoch of the owner. Each new owner has a higher one, and only the highest may write."""
    log_id: str | None = None
    """The local log that has the topic's newest messages."""
    start_offset: int = 0
    """The oldest offset that can be read. Remote retention moves it."""
    tail: int = 0
    """One more than the last committed offset."""
    verified: int = 0
    """All objects before this offset were read back."""
    reserved: int = 0
    """No offset at or after this one was ever assigned to a message."""
    lost: tuple[Range, ...] = ()
    """Ranges that were assigned and whose messages are lost."""
    nonce: str | None = None
    """Identifies the last opening of the log. A copy of the log without it is older (rule R11)."""
    assigned: int = 0
    """Every offset before this one was assigned to a message, or is in a hole."""
    begin: int = 0
    """The offset of the newest begin marker in the store that this catalog knows."""
    begin_attempt: int = 0
    """The attempt in that marker's name."""
    marked: int = 0
    """The epoch of the newest begin marker that this catalog knows; 0 if it knows none."""
    unknown: tuple[Range, ...] = ()
    """Ranges that may never have been used. If they were, their messages are lost."""
    accepted: tuple[Range, ...] = ()
    """Ranges that were lost or unknown until an operator accepted that."""
    accept: bool = False
    """A restore accepted in advance what the next opening records as lost or unknown."""
    deletion: Deletion | None = None
    """Set if the topic was deleted: see `is_deleted`."""
    extra: str = ""
    """The fields that only a later release knows, as JSON, so that changes keep them."""

    @property
    def is_deleted(self) -> bool:
        """Whether this is all that is left, or will be left, of a topic that was deleted.

        Every offset is then the one at which a topic of the same name begins. A release that does
        not know `deletion` keeps the field when it creates the topic again, so the log id decides.
        """
        return self.deletion is not None and (
            self.log_id is None or self.deletion is Deletion.DELETING
        )

    @property
    def offset_limit(self) -> int:
        """The offset that a log must not reach until an object or a marker is added (rule R9)."""
        return min(max(self.tail, self.begin) + LOG_DISTANCE, OFFSET_MAX)

    def lost_range(self, offset: int) -> Range | None:
        """Returns the lost and unknown offsets around `offset`, or None if it is neither."""
        return _range_with(self.unaccepted, offset)

    def accepted_range(self, offset: int) -> Range | None:
        """Returns the accepted range that contains `offset`, or None."""
        return _range_with(self.accepted, offset)

    def hole_kind(self, offset: int) -> HoleKind | None:
        """Returns which kind of hole contains `offset`, or None if it is in none."""
        kinds: tuple[tuple[HoleKind, tuple[Range, ...]], ...] = (
            ("lost", self.lost),
            ("unknown", self.unknown),
            ("accepted", self.accepted),
        )
        return next((kind for kind, ranges in kinds if _range_with(ranges, offset)), None)

    @property
    def unaccepted(self) -> tuple[Range, ...]:
        """The lost and unknown ranges, ascending; adjacent ones are joined."""
        return _joined([*self.lost, *self.unknown])

    @property
    def holes(self) -> tuple[Range, ...]:
        """All holes, ascending; adjacent ones are joined."""
        return _joined([*self.lost, *self.unknown, *self.accepted])

    def with_lost(self, start: int, end: int) -> TopicRecord:
        """Returns the record with `start..end` lost too, but for holes that it already has.

        Raises DescriptorError if the record has no room for another range.
        """
        return self._with_holes(start, end, unknown=False)

    def with_unknown(self, start: int, end: int) -> TopicRecord:
        """Returns the record with `start..end` unknown too, but for holes that it already has.

        Raises DescriptorError if the record has no room for another range.
        """
        return self._with_holes(start, end, unknown=True)

    def _with_holes(self, start: int, end: int, *, unknown: bool) -> TopicRecord:
        added = list(_without([(start, end)], self.holes)) if start < end else []
        before = self.unknown if unknown else self.lost
        ranges = _joined([*before, *added])
        if len(ranges) > len(before):
            self.require_room(len(ranges) - len(before))
        return replace(self, unknown=ranges) if unknown else replace(self, lost=ranges)

    def with_accepted(self, start: int = 0, end: int = OFFSET_MAX) -> TopicRecord:
        """Returns the record with what is lost or unknown in `start..end` accepted.

        Raises DescriptorError if the record has no room for another range.
        """
        if start >= end:
            return self
        wanted = [(start, end)]
        moved = ranges_within((*self.lost, *self.unknown), start, end)
        after = replace(
            self,
            lost=tuple(_without(self.lost, wanted)),
            unknown=tuple(_without(self.unknown, wanted)),
            accepted=_joined([*self.accepted, *moved]),
        )
        after.require_room()
        return after

    def without_holes(self, start: int, end: int) -> TopicRecord:
        """Returns the record without the holes in `start..end`: an object holds these offsets."""
        held = [(start, end)]
        return replace(
            self,
            lost=tuple(_without(self.lost, held)),
            unknown=tuple(_without(self.unknown, held)),
            accepted=tuple(_without(self.accepted, held)),
        )

    def require_room(self, more: int = 0) -> None:
        """Raises DescriptorError if the record has too many ranges with `more` of them."""
        count = len(self.lost) + len(self.unknown) + len(self.accepted)
        if count + more > LOST_RANGES_MAX:
            raise DescriptorError(
                f"the topic has {count} lost ranges already; its record has no more room"
            )


def skip_holes(record: TopicRecord, offset: int) -> int:
    """Returns `offset`, or the end of the hole that contains it."""
    hole = _range_with(record.holes, offset)
    return offset if hole is None else hole[1]


def outside_holes(record: TopicRecord, ranges: Iterable[Range]) -> list[Range]:
    """Returns the parts of `ranges`, which ascend, that are in no hole."""
    return list(_without(ranges, record.holes))


def messages_between(record: TopicRecord, start: int, end: int) -> int:
    """Returns how many messages `start..end` can have: its offsets without those in holes."""
    if start >= end:
        return 0
    return sum(each[1] - each[0] for each in _without([(start, end)], record.holes))


def unread_between(record: TopicRecord, cursor: Cursor, start: int, end: int) -> int:
    """Returns how many messages of `start..end` the cursor's consumer has not acknowledged."""
    return sum(each[1] - each[0] for each in unread_ranges(record, cursor, start, end))


def unread_ranges(record: TopicRecord, cursor: Cursor, start: int, end: int) -> list[Range]:
    """Returns the messages of `start..end` that the cursor's consumer has not acknowledged."""
    if start >= end:
        return []
    there = _without([(start, end)], record.holes)
    return list(_without(there, [(0, cursor.position), *cursor.ranges]))


def ranges_within(ranges: Iterable[Range], start: int, end: int) -> list[Range]:
    """Returns the parts of `ranges` that are in `start..end`."""
    return [
        (max(each[0], start), min(each[1], end))
        for each in ranges
        if each[0] < end and start < each[1]
    ]


def offset_after(record: TopicRecord, start: int, messages: int) -> int:
    """Returns one more than the offset of the last of `messages` messages from `start` on.

    Offsets in holes are not counted. 0 messages end at `start`.
    """
    at, left = start, messages
    for hole in record.holes:
        if left <= 0 or hole[0] - at >= left:
            break
        if hole[1] > at:
            left -= max(hole[0] - at, 0)
            at = hole[1]
    return at + max(left, 0) if messages > 0 else start


def offset_before(record: TopicRecord, end: int, messages: int) -> int:
    """Returns the offset of the first of the last `messages` messages before `end`.

    Offsets in holes are not counted. 0 if there are not as many messages.
    """
    at, left = end, messages
    for hole in reversed(record.holes):
        if left <= 0 or at - hole[1] >= left:
            break
        if hole[0] < at:
            left -= max(at - hole[1], 0)
            at = hole[0]
    return max(at - left, 0) if messages > 0 else end


def _range_with(ranges: tuple[Range, ...], offset: int) -> Range | None:
    at = bisect_right(ranges, (offset, OFFSET_MAX)) - 1
    return ranges[at] if at >= 0 and offset < ranges[at][1] else None


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Returns the ranges ascending, those that touch or overlap joined."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


def _without(ranges: Iterable[Range], holes: Iterable[Range]) -> Iterator[Range]:
    """Yields the parts of `ranges` that are in none of `holes`. Both ascend."""
    others = list(holes)
    for start, end in ranges:
        at = start
        for hole in others[max(bisect_right(others, (start, OFFSET_MAX)) - 1, 0) :]:
            if hole[0] >= end:
                break
            if at < hole[0]:
                yield at, hole[0]
            at = max(at, hole[1])
        if at < end:
            yield at, end


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a topic's lease."""

    epoch: int
    name: str
    """Machine and process, for error messages."""
    lock: str
    """The local lock that the owner holds. A process that gets this lock knows the owner ended."""
    since_ms: int


_Record = TypeVar("_Record", Life, TopicRecord, Owner)


def encode_record(record: Life | TopicRecord | Owner) -> bytes:
    body = asdict(record)
    if body.get("deletion", "") is None:  # as earlier releases write it
        del body["deletion"]
    if body.get("span", "") is None:
        del body["span"]
    if extra := body.pop("extra", ""):
        body = {**json.loads(extra), **body}
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def decode_record(data: bytes, kind: type[_Record], what: str) -> _Record:
    """Decodes a record of that kind. `what` names it in the DescriptorError.

    Fields that an earlier release did not know have their defaults. A topic's record keeps fields
    that this release does not know; a changed row of a key or an owner does not.
    """
    body = decode_json(data, what)
    try:
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY301, TRY004
        known = {field.name for field in fields(kind)} - {"extra"}
        if missing := known - body.keys() - _ADDED:
            raise ValueError(f"it has no {sorted(missing)}")  # noqa: TRY301
        values = {name: _checked(name, body[name]) for name in known if name in body}
        unknown = {name: value for name, value in body.items() if name not in known}
        if unknown and kind is TopicRecord:
            values["extra"] = json.dumps(unknown, separators=(",", ":"), sort_keys=True)
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise DescriptorError(f"{what}: {error}") from error


def decode_json(data: bytes, what: str) -> Any:
    """Decodes JSON. DescriptorError, which names `what`, if it is invalid or too large."""
    if len(data) > CATALOG_VALUE_BYTES_MAX:
        raise DescriptorError(f"{what} has {len(data)} bytes, which is too large")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error}") from error


def decode_pointer(data: bytes, what: str) -> int:
    """Decodes the value of the key `cur`: the offset at which the newest object starts."""
    match decode_json(data, what):
        case {"start": str() as digits} if _DIGITS.fullmatch(digits):
            return int(digits)
    raise DescriptorError(f"{what} does not hold an offset")


def encode_cursor(offset: int) -> bytes:
    if type(offset) is not int or not 0 <= offset <= OFFSET_MAX:
        raise UsageError(f"{offset!r} is not a valid offset for a cursor")
    return b"%d" % offset


def decode_cursor(data: bytes, what: str) -> int:
    value = decode_json(data, what)
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise DescriptorError(f"{what} does not hold an offset")
    return value


_DIGITS: Final = re.compile(r"[0-9]{1,20}")
_TEXTS: Final = frozenset({"token", "name", "lock"})
_OPTIONAL: Final = frozenset({"log_id", "nonce"})
_ADDED: Final = frozenset(
    {
        "nonce",
        "assigned",
        "begin",
        "begin_attempt",
        "marked",
        "unknown",
        "accepted",
        "accept",
        "deletion",
        "span",
    }
)
"""Fields that records of earlier releases lack."""
_RANGES: Final = frozenset({"lost", "unknown", "accepted"})


def _checked(name: str, value: Any) -> Any:
    if name == "state":
        return State(value)
    if name == "deletion":
        return None if value is None else Deletion(value)
    if name == "span":
        return None if value is None else _checked_range(value)
    if name in _RANGES:
        ranges = tuple(_checked_range(each) for each in value)
        if any(one[1] > then[0] for one, then in pairwise(ranges)):
            raise ValueError(f"the ranges of {name} are not ascending")
        return ranges
    if value is None and name in _OPTIONAL:
        return None
    if name in _TEXTS or name in _OPTIONAL:
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a string")
        return value
    if name == "accept":
        if not isinstance(value, bool):
            raise ValueError(f"{name} is not true or false")
        return value
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError(f"{name} is not an integer in 0..{OFFSET_MAX}")
    return value


def _checked_range(value: Any) -> tuple[int, int]:
    start, end = value
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= OFFSET_MAX:
        raise ValueError(f"{value!r} is not a range of offsets")
    return start, end
