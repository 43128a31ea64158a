"""The query of a request, read strictly: a parameter that nobody asked for is an error.

A typing mistake in a name would otherwise be a default that was taken in silence.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX

Query: TypeAlias = dict[str, list[str]]
_PARAMETERS_MAX: Final = 2048
_SHOWN: Final = 40
_BOOLEANS: Final = {"true": True, "false": False}
_Word = TypeVar("_Word", bound=str)


def parse_query(raw: bytes, known: Collection[str], repeated: Collection[str] = ()) -> Query:
    """The parameters by name; UsageError for one that is not known, or comes twice."""
    if not raw:
        return {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_PARAMETERS_MAX,
        )
    except ValueError as error:  # UnicodeDecodeError is one
        raise UsageError("the query cannot be read: it must be UTF-8, percent-encoded") from error
    found: Query = {}
    for name, text in pairs:
        if name not in known and name not in repeated:
            names = ", ".join(sorted({*known, *repeated})) or "none"
            raise UsageError(f"unknown parameter {name[:_SHOWN]!r}; known ones: {names}")
        if name in found and name not in repeated:
            raise UsageError(f"{name} is given twice")
        found.setdefault(name, []).append(text)
    return found


def one_of(query: Query, name: str, words: Collection[_Word], default: _Word) -> _Word:
    text = query.get(name, [default])[0]
    for word in words:
        if word == text:
            return word
    raise UsageError(f"{name} is {text[:_SHOWN]!r}; it must be one of {', '.join(words)}")


def flag(query: Query, name: str) -> bool:
    """`true` or `false`; false where it is not given."""
    return _BOOLEANS[one_of(query, name, tuple(_BOOLEANS), "false")]


def number(query: Query, name: str) -> int | None:
    """A whole number from 0 on; None where it is not given."""
    return _whole(name, query[name][0], "a whole number from 0 on") if name in query else None


def start_of(query: Query) -> int | Literal["earliest", "latest"]:
    text = query.get("start", ["earliest"])[0]
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    return _whole("start", text, "an offset, earliest or latest")


def _whole(name: str, text: str, rule: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= OFFSET_MAX:
        return int(text)
    raise UsageError(f"{name} is {text[:_SHOWN]!r}; it must be {rule}")
