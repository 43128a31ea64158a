"""`Cursor`: which messages of a topic a consumer has acknowledged, as JSON for the catalog.

    {"epoch":7,"position":1200,"ranges":[3,2,10,1],"updated_ms":1790000000000}

Every message before `position` is acknowledged. `ranges` are acknowledged offsets above it, as
pairs of numbers: the distance from the end of the pair before, or from the position, and the number
of offsets. Here these are 1203, 1204 and 1215. The layout: `docs/formats/catalog.md`.

A cursor never moves back: every change adds offsets. It takes at most CURSOR_BYTES_MAX. Beyond
that, the highest ranges are left out, and their messages are delivered again.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.errors import DescriptorError, UsageError
from forebay.limits import CURSOR_BYTES_MAX, OFFSET_MAX

Range = tuple[int, int]
"""A range of offsets, end not included."""
_KNOWN: Final = frozenset({"epoch", "position", "ranges", "updated_ms"})


@dataclass(frozen=True, slots=True)
class Cursor:
    position: int = 0
    """Every message before this offset is acknowledged."""
    ranges: tuple[Range, ...] = ()
    """Acknowledged offsets after the position, ascending; none of them touch."""
    epoch: int = 0
    """The epoch of the owner that wrote it."""
    updated_ms: int = 0
    extra: str = ""
    """Fields that this release does not know, as JSON."""

    def contains(self, offset: int) -> bool:
        at = bisect_right(self.ranges, (offset, OFFSET_MAX + 1)) - 1
        return offset < self.position or (at >= 0 and offset < self.ranges[at][1])

    def with_range(self, start: int, end: int) -> Cursor:
        """Returns the cursor with the offsets from `start` to before `end` added."""
        if not 0 <= start <= end <= OFFSET_MAX:
            raise UsageError(f"{start} to {end} is not a range of offsets")
        return self._joined([*self.ranges, (start, end)])

    def merged(self, other: Cursor) -> Cursor:
        """Returns the cursor with everything that the other one has acknowledged."""
        return self._joined([*self.ranges, *other.ranges, (0, other.position)])

    def before(self, end: int) -> Cursor:
        """Returns the cursor without the offsets from `end` on; itself if it has none."""
        if self.position <= end and (not self.ranges or self.ranges[-1][1] <= end):
            return self
        ranges = tuple((first, min(last, end)) for first, last in self.ranges if first < end)
        return replace(self, position=min(self.position, end), ranges=ranges)

    def _joined(self, ranges: Iterable[Range]) -> Cursor:
        position = self.position
        found: list[Range] = []
        for start, end in sorted(ranges):
            if start <= position:
                position = max(position, end)
            elif found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            elif start < end:
                found.append((start, end))
        return replace(self, position=position, ranges=tuple(found))


def encode_cursor_row(cursor: Cursor) -> bytes:
    """Encodes the cursor; leaves out its highest ranges if it would be larger than the limit."""
    row = _encoded(cursor)
    if len(row) <= CURSOR_BYTES_MAX:
        return row
    low, high = 0, len(cursor.ranges)
    while low < high:  # the number of ranges that fit
        middle = (low + high + 1) // 2
        fits = len(_encoded(replace(cursor, ranges=cursor.ranges[:middle]))) <= CURSOR_BYTES_MAX
        low, high = (middle, high) if fits else (low, middle - 1)
    return _encoded(replace(cursor, ranges=cursor.ranges[:low]))


def _encoded(cursor: Cursor) -> bytes:
    body = json.loads(cursor.extra) if cursor.extra else {}
    body |= {
        "epoch": cursor.epoch,
        "position": cursor.position,
        "ranges": list(_deltas(cursor)),
        "updated_ms": cursor.updated_ms,
    }
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()


def _deltas(cursor: Cursor) -> Iterator[int]:
    before = cursor.position
    for start, end in cursor.ranges:
        yield start - before
        yield end - start
        before = end


def decode_cursor_row(data: bytes, what: str) -> Cursor:
    """Decodes a cursor. `what` names it in the DescriptorError. Keeps fields it does not know."""
    if len(data) > 2 * CURSOR_BYTES_MAX:
        raise DescriptorError(f"{what} has {len(data)} bytes, which is too large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DescriptorError(f"{what}: {error}") from error
    if not isinstance(body, dict):
        raise DescriptorError(f"{what} is not a JSON object")
    position = _number(body, "position", what)
    deltas = body.get("ranges", [])
    if not isinstance(deltas, list) or len(deltas) % 2:
        raise DescriptorError(f"{what}: ranges is not a list of pairs")
    ranges: list[Range] = []
    at = position
    for gap, length in zip(deltas[::2], deltas[1::2], strict=True):
        if type(gap) is not int or type(length) is not int or gap < 1 or length < 1:
            raise DescriptorError(f"{what}: ranges has a number that is not at least 1")
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    if at > OFFSET_MAX:
        raise DescriptorError(f"{what}: ranges goes beyond the last offset")
    unknown = {name: value for name, value in body.items() if name not in _KNOWN}
    return Cursor(
        position,
        tuple(ranges),
        _number(body, "epoch", what, 0),
        _number(body, "updated_ms", what, 0),
        json.dumps(unknown, separators=(",", ":"), sort_keys=True) if unknown else "",
    )


def _number(body: dict[str, Any], name: str, what: str, default: int | None = None) -> int:
    value = body.get(name, default)
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise DescriptorError(f"{what}: {name} is not an integer in 0..{OFFSET_MAX}")
    return value
