"""Sizes, durations and times as people write them: `8MiB`, `512k`; `250ms`, `5m`, `1h30m`;
`2026-01-01T00:00Z`.

All size units are powers of 1024: `MB` and `MiB` mean the same, and so does `_mb` in the name of a
setting. Arithmetic is exact; nothing is rounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from typing import Final, Literal

NUMBER: Final = re.compile(r"[-+]?\d+(_\d+)*(\.\d+)?([eE][-+]?\d{1,2})?", re.ASCII)
_TEXT_MAX: Final = 64
_LETTERS: Final = "kmgtp"
_DIGITS_MAX: Final = 18
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MOMENT_FORMS: Final = (
    "a date and time such as 2026-01-31T12:00:00Z, a duration before now such as 10m, or "
    "milliseconds since 1970"
)
_SIZE: Final = re.compile(rf"(\d+(?:\.\d+)?)\s*([{_LETTERS}]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)
_SECONDS: Final = {
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a plain number. `scale` is its value in bytes or seconds."""

    name: str
    measures: Literal["size", "duration"]
    scale: Fraction


BYTES: Final = Unit("bytes", "size", Fraction(1))
MEGABYTES: Final = Unit("MiB", "size", Fraction(1024**2))
MILLISECONDS: Final = Unit("milliseconds", "duration", Fraction(1, 1000))
SECONDS: Final = Unit("seconds", "duration", Fraction(1))
MINUTES: Final = Unit("minutes", "duration", Fraction(60))
HOURS: Final = Unit("hours", "duration", Fraction(3600))

_ENDINGS: Final = {
    "_bytes": BYTES,
    "_chunk_size": BYTES,
    "_mb": MEGABYTES,
    "_ms": MILLISECONDS,
    "_seconds": SECONDS,
    "_minutes": MINUTES,
    "_hours": HOURS,
}


def unit_of(name: str) -> Unit | None:
    """The unit that the name of a setting ends with; None if it ends with no unit."""
    for ending, unit in _ENDINGS.items():
        if f"_{name}".endswith(ending):
            return unit
    return None


def parse_number(text: str) -> Fraction | None:
    """Parses a number without a unit; returns None if the text is not one."""
    if len(text) > _TEXT_MAX or NUMBER.fullmatch(text) is None:
        return None
    return Fraction(text.replace("_", ""))


def parse_size(text: str) -> Fraction | None:
    """Returns a size in bytes; None if the text is not a size."""
    match = _SIZE.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if match is None:
        return None
    letter = match[2].lower()
    power = _LETTERS.index(letter) + 1 if letter else 0
    return Fraction(match[1]) * (1 << 10 * power)


def parse_duration(text: str) -> Fraction | None:
    """Returns a duration in seconds; None if the text is not a duration.

    Every number needs a unit. Units appear at most once, the largest first.
    """
    if len(text) > _TEXT_MAX:
        return None
    position, total, used = 0, Fraction(0), [-1]
    units = list(_SECONDS)
    while match := _TIME.match(text, position):
        total += Fraction(match[1]) * _SECONDS[match[2]]
        used.append(units.index(match[2]))
        position = match.end()
    ordered = all(before < after for before, after in pairwise(used))
    return total if ordered and len(used) > 1 and position == len(text) else None


def parse_moment(text: str, now_ms: int | None = None) -> int | None:
    """Returns a time as milliseconds since 1970; None if the text is not one.

    A date and time is in UTC unless it has a time zone. A plain number is in milliseconds since
    1970. With `now_ms`, a duration means that long before now.
    """
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return int(text)
    ago = None if now_ms is None else parse_duration(text)
    if ago is not None and now_ms is not None:
        return max(now_ms - int(ago * 1000), 0)
    try:
        moment = datetime.fromisoformat(text) if len(text) <= _TEXT_MAX else None
    except ValueError:
        return None
    if moment is None:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(-((_EPOCH - moment) // timedelta(milliseconds=1)), 0)


def parse_quantity(text: str, unit: Unit) -> Fraction | None:
    """Returns bytes or seconds; None if the text is not a quantity. Plain numbers are in `unit`."""
    number = parse_number(text)
    if number is not None:
        return number * unit.scale
    return parse_size(text) if unit.measures == "size" else parse_duration(text)


def as_number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def format_size(size: int) -> str:
    """The shortest exact form with one unit, such as `64MiB`."""
    power = 0
    while size and size % 1024 == 0 and power < len(_LETTERS):
        size //= 1024
        power += 1
    return f"{size}{_LETTERS[power - 1].upper()}iB" if power else str(size)


def format_duration(seconds: Fraction) -> str:
    """In the largest unit that gives a whole number, such as `90s`."""
    for name, scale in _SECONDS.items():
        if seconds and (seconds / scale).denominator == 1:
            return f"{seconds / scale}{name}"
    return "0s" if not seconds else f"{float(seconds)}s"
