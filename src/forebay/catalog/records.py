"""The catalog's own records, and the life of an object's key as a table.

A topic has one record, changed by compare-and-set alone. Every number in it is the *next* offset
of its stage, so that 0 means that nothing is there yet:

    start_offset <= verified <= tail <= reserved

The life of a key, from the first intent to write the object to its end. Nobody writes to a key
that is being deleted, and nobody deletes one that may still be committed, because both sides
change this row by comparing it:

    intended ──> committed <──> replaced ──> deleting ──> (no row)
        │            └───────────────────────^ ^  └──────> gone
        ├──────────────────────────────────────┘
        └──> (no row), by the one who intended it and left no object there

`gone` stays as a mark where it is not certain that the last request to delete was answered: the
name is never used again. The layout: `docs/formats/catalog.md`.
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
    """Whether a key may go from one state to the other; staying is always allowed.

    None is a key without a row. One that was never seen can be committed by a restore, be replaced
    by a compaction if a descriptor names it, and be deleted by a sweep.
    """
    return before == after or after in _NEXT[before]


@dataclass(frozen=True, slots=True)
class Life:
    """Where the key of one object is in its life."""

    state: State
    epoch: int
    """Of the owner that intended it."""
    token: str
    """Which attempt this is; whoever changes the row compares it."""
    updated_ms: int


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """What the catalog knows of a topic as a whole."""

    epoch: int = 0
    """Of the owner; each new one is higher, and only the highest may change anything."""
    log_id: str | None = None
    """Which local log the topic's newest messages are in."""
    start_offset: int = 0
    """The oldest offset that can be read; remote retention moves it."""
    tail: int = 0
    """One more than the last committed offset."""
    verified: int = 0
    """One more than the last offset of the objects that were read back."""
    reserved: int = 0
    """No offset from here on was ever handed out."""
    lost: tuple[tuple[int, int], ...] = ()
    """Ranges, the end not included, that were handed out and whose messages are gone."""

    def lost_range(self, offset: int) -> tuple[int, int] | None:
        """The lost range that `offset` is in."""
        return next((each for each in self.lost if each[0] <= offset < each[1]), None)

    def with_lost(self, start: int, end: int) -> TopicRecord:
        """Also lost: `start..end`; joined with a lost range that ends there."""
        if start >= end:
            return self
        if self.lost and self.lost[-1][1] >= start:
            joined = (self.lost[-1][0], max(end, self.lost[-1][1]))
            return replace(self, lost=(*self.lost[:-1], joined))
        if len(self.lost) >= LOST_RANGES_MAX:
            raise DescriptorError(
                f"the topic has {len(self.lost)} lost ranges; there is no more room"
            )
        return replace(self, lost=(*self.lost, (start, end)))


def skip_lost(record: TopicRecord, offset: int) -> int:
    """The next offset whose message exists or will."""
    while (hole := record.lost_range(offset)) is not None:
        offset = hole[1]
    return offset


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a topic's lease."""

    epoch: int
    name: str
    """For people: the process and its machine."""
    lock: str
    """The local lock that the owner holds besides; whoever holds the same one has outlived it."""
    since_ms: int


_Record = TypeVar("_Record", Life, TopicRecord, Owner)


def encode_record(record: Life | TopicRecord | Owner) -> bytes:
    return json.dumps(asdict(record), separators=(",", ":"), sort_keys=True).encode()


def decode_record(data: bytes, kind: type[_Record], what: str) -> _Record:
    """DescriptorError, saying `what`, for anything but a record of that kind."""
    body = decode_json(data, what)
    try:
        known = {field.name for field in fields(kind)}
        if not isinstance(body, dict) or body.keys() != known:
            raise ValueError(f"it has not exactly the fields {sorted(known)}")  # noqa: TRY301
        return kind(**{name: _checked(name, value) for name, value in body.items()})
    except (ValueError, TypeError) as error:
        raise DescriptorError(f"{what}: {error}") from error


def decode_json(data: bytes, what: str) -> Any:
    """DescriptorError, saying `what`, for anything but JSON of a bearable size."""
    if len(data) > CATALOG_VALUE_BYTES_MAX:
        raise DescriptorError(f"{what}: {len(data)} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error}") from error


def decode_pointer(data: bytes, what: str) -> int:
    """The offset that `cur` points to: where the newest object starts."""
    match decode_json(data, what):
        case {"start": str() as digits} if _DIGITS.fullmatch(digits):
            return int(digits)
    raise DescriptorError(f"{what} points to no offset")


def encode_cursor(offset: int) -> bytes:
    if type(offset) is not int or not 0 <= offset <= OFFSET_MAX:
        raise UsageError(f"{offset!r} is no offset for a cursor")
    return b"%d" % offset


def decode_cursor(data: bytes, what: str) -> int:
    value = decode_json(data, what)
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise DescriptorError(f"{what} is no offset")
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
            raise ValueError(f"{name} is no text")
        return value
    if value is None and name == "log_id":
        return None
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError(f"{name} is no whole number in 0..{OFFSET_MAX}")
    return value


def _checked_range(value: Any) -> tuple[int, int]:
    start, end = value
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= OFFSET_MAX:
        raise ValueError(f"{value!r} is no range of offsets")
    return start, end
