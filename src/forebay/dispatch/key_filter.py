"""`KeyFilter`: a glob on the whole key of a message. `*` is any text, `?` is any one character.

Every other character means itself, and case matters. Filters come from clients, so a match takes
time in proportion to the key, whatever the filter: there is no backtracking.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import UsageError
from forebay.limits import KEY_FILTER_CHARACTERS_MAX, KEY_FILTERS_MAX


def check_key_filters(filters: Sequence[str]) -> None:
    """Raises UsageError if a consumer may not have these filters."""
    if len(filters) > KEY_FILTERS_MAX:
        raise UsageError(
            f"{len(filters)} key filters are too many: a consumer has at most {KEY_FILTERS_MAX}"
        )
    for each in filters:
        if not 1 <= len(each) <= KEY_FILTER_CHARACTERS_MAX:
            raise UsageError(
                f"a key filter has {len(each)} characters, "
                f"not 1 to {KEY_FILTER_CHARACTERS_MAX}: {each[:40]!r}"
            )


class KeyFilter:
    """One filter, prepared for many keys."""

    __slots__ = ("_is_exact", "_jokers", "_last", "_literals", "_parts", "_stars", "everything")

    def __init__(self, glob: str) -> None:
        self.everything = not glob.strip("*") and glob != ""
        """Whether it matches every key."""
        self._is_exact = "*" not in glob
        self._parts = glob.split("*") if "?" not in glob else None
        if self._parts is None:
            self._compile(glob)

    def matches(self, key: str) -> bool:
        if self._parts is None:
            return self._simulate(key)
        if self._is_exact:
            return key == self._parts[0]
        return self._in_order(key, self._parts)

    def _in_order(self, key: str, parts: Sequence[str]) -> bool:
        """Without `?`: the texts between the stars, each at the first place after the one before.

        A later place could never help, so nothing is tried twice.
        """
        at, end = len(parts[0]), len(key) - len(parts[-1])
        if at > end or not key.startswith(parts[0]) or not key.endswith(parts[-1]):
            return False
        for part in parts[1:-1]:
            at = key.find(part, at, end)
            if at < 0:
                return False
            at += len(part)
        return True

    def _compile(self, glob: str) -> None:
        """A state for each character that is not a star, as a bit; a star holds the state."""
        self._stars = 0
        """The states that are kept whatever character follows."""
        self._jokers = 0
        self._literals: dict[str, int] = {}
        state = 1
        for character in glob:
            if character == "*":
                self._stars |= state
                continue
            if character == "?":
                self._jokers |= state
            else:
                self._literals[character] = self._literals.get(character, 0) | state
            state <<= 1
        self._is_exact = False
        self._last = state

    def _simulate(self, key: str) -> bool:
        """All ways through the filter at once: the bits of `states` are where one can be."""
        states = 1
        for character in key:
            taken = states & (self._literals.get(character, 0) | self._jokers)
            states = (taken << 1) | (states & self._stars)
            if not states:
                return False
        return bool(states & self._last)
