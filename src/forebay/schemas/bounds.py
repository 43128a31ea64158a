"""What keeps untrusted schemas and payloads from taking much time, memory or stack.

`load_json` parses JSON whose nesting is limited before it is parsed. `Steps` counts what a
comparison or a check does, and ends it with an error when that is too much.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from forebay.errors import ForebayError
from forebay.limits import SCHEMA_DEPTH_MAX, SCHEMA_STEPS_MAX

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")

Raised = Callable[[str], ForebayError]
"""Makes the error of a caller: that of a schema, or that of a payload."""


class Steps:
    """Counts down; raises when there are no more."""

    def __init__(self, what: str, raised: Raised, left: int = SCHEMA_STEPS_MAX) -> None:
        self._what = what
        self._raised = raised
        self._left = left

    def take(self, count: int = 1) -> None:
        self._left -= count
        if self._left < 0:
            raise self._raised(f"{self._what} takes too many steps: make it smaller")


def load_json(data: bytes, what: str, raised: Raised) -> Any:
    """Parses strict JSON: UTF-8, no NaN, nested at most SCHEMA_DEPTH_MAX deep, no key twice."""
    if depth_of(data) > SCHEMA_DEPTH_MAX:
        raise raised(f"{what} is nested more than {SCHEMA_DEPTH_MAX} deep")

    def refuse(constant: str) -> NoReturn:
        raise raised(f"{what} has {constant}, which is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise raised(f"{what} has an object with the same key twice")
        return found

    try:
        return json.loads(data.decode(), parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise raised(f"{what} is not JSON: {error}") from error


def depth_of(data: bytes) -> int:
    """How deep brackets are nested, those in strings not counted."""
    if sum(map(data.count, (b"[", b"{"))) <= SCHEMA_DEPTH_MAX:
        return sum(map(data.count, (b"[", b"{")))
    depth = deepest = 0
    text = escaped = False
    for byte in data:
        if text:
            text = escaped or byte != _QUOTE
            escaped = not escaped and byte == _BACKSLASH
        elif byte == _QUOTE:
            text = True
        elif byte in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif byte in _CLOSING:
            depth -= 1
    return deepest
