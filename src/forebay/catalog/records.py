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
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from forebay.errors import DescriptorError, UsageError
from forebay.limits import CATALOG_VALUE_BYTES_MAX, LOST_RANGES_MAX, OFFSET_MAX


class State(StrEnum):
    INTENDED = "intended"
    COMMITTED = "committed"
    REPLACED = "replaced"
    DELETING = "deleting"
    GONE = "gone"


_NEXT: Final[dict[State | None, frozenset[State | None]]] = {
    None: frozenset({State.INTENDED, State.COMMITTED, State.REPLACED, State.DELETING}),
    State.INTENDED: frozenset({None, State.COMMITTED, State.DELETING}),
    State.COMMITTED: frozenset({State.REPLACED, State.DELETING}),
    State.REPLACED: frozenset({State.COMMITTED, State.DELETING}),
    State.DELETING: frozenset({None, State.GONE}),
    State.GONE: frozenset(),
}


def may_become(before: State | None, after: State | None) -> bool:
    """Whether a key may change from one state to the other. No change is always allowed.

    None is a key without a row. A restore can commit it, a compaction can replace it if a
    descriptor names it, and a sweep can delete it.
    """
    return before == after or after in _NEXT[before]


@dataclass(frozen=True, slots=True)
class Life:
    """The row of one object key."""

    state: State
    epoch: int
    """The epoch of the owner that intended the object."""
    token: str
    """Identifies the attempt to write or delete the object. Every change compares it."""
    updated_ms: int


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """The record of one topic."""

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
    lost: tuple[tuple[int, int], ...] = ()
    """Ranges of offsets (end not included) that were assigned and whose messages are lost."""

    def lost_range(self, offset: int) -> tuple[int, int] | None:
        """Returns the lost range that contains `offset`, or None."""
        return next((each for each in self.lost if each[0] <= offset < each[1]), None)

    def with_lost(self, start: int, end: int) -> TopicRecord:
        """Returns the record with `start..end` lost too, joined to the last range if they touch.

        Raises DescriptorError if the record has no room for another range.
        """
        if start >= end:
            return self
        if self.lost and self.lost[-1][1] >= start:
            joined = (self.lost[-1][0], max(end, self.lost[-1][1]))
            return replace(self, lost=(*self.lost[:-1], joined))
        if len(self.lost) >= LOST_RANGES_MAX:
            raise DescriptorError(
                f"the topic has {len(self.lost)} lost ranges already; its record has no more room"
            )
        return replace(self, lost=(*self.lost, (start, end)))


def skip_lost(record: TopicRecord, offset: int) -> int:
    """Returns `offset`, or the end of the lost range that contains it."""
    while (hole := record.lost_range(offset)) is not None:
        offset = hole[1]
    return offset


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
    return json.dumps(asdict(record), separators=(",", ":"), sort_keys=True).encode()


def decode_record(data: bytes, kind: type[_Record], what: str) -> _Record:
    """Decodes a record of that kind. `what` names it in the DescriptorError."""
    body = decode_json(data, what)
    try:
        known = {field.name for field in fields(kind)}
        if not isinstance(body, dict) or body.keys() != known:
            raise ValueError(f"its fields are not {sorted(known)}")  # noqa: TRY301
        return kind(**{name: _checked(name, value) for name, value in body.items()})
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


def _checked(name: str, value: Any) -> Any:
    if name == "state":
        return State(value)
    if name == "lost":
        return tuple(_checked_range(each) for each in value)
    if name in _TEXTS or (name == "log_id" and value is not None):
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a string")
        return value
    if value is None and name == "log_id":
        return None
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError(f"{name} is not an integer in 0..{OFFSET_MAX}")
    return value


def _checked_range(value: Any) -> tuple[int, int]:
    start, end = value
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= OFFSET_MAX:
        raise ValueError(f"{value!r} is not a range of offsets")
    return start, end
