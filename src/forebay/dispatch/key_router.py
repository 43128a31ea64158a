"""`KeyRouter`: which consumer gets a key, of those whose filters match it.

The assignment is rendezvous hashing: every consumer has a score for each slot of keys, made from
its name, and the highest wins. So a consumer that comes takes keys from the others and moves none
between them, and the keys of one that goes are spread over the rest. Consumers with the same
filters are one class; the filters are tried once for a class, and the winner of a slot is known for
each set of classes. A key costs a walk over all consumers only if nobody asked for its slot before.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Final

from forebay.dispatch.key_filter import KeyFilter
from forebay.limits import KEY_CHARACTERS_MAX, KEY_SLOTS, KEYS_ASSIGNED_MAX

Key = str | bytes
"""A key, or the hash of one that is too long to be kept."""
_MASK: Final = 2**64 - 1
_MISSING: Final = -1
"""No consumer has this number."""


def kept_key(key: str) -> Key:
    """The key as a subscription keeps it: a hash if it is long."""
    return key if len(key) <= KEY_CHARACTERS_MAX else _digest(key, 16)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _score(seed: int, slot: int) -> int:
    """Mixes two numbers; each bit of the result depends on all bits of both."""
    mixed = (seed ^ (slot + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK


class _Class:
    """The consumers with the same filters."""

    __slots__ = ("_filters", "number", "seeds", "takes_all")

    def __init__(self, number: int, filters: Sequence[str]) -> None:
        self.number = number
        self._filters = [KeyFilter(each) for each in filters]
        self.takes_all = not filters or any(each.everything for each in self._filters)
        self.seeds: dict[int, int] = {}
        """Those of its consumers."""

    def matches(self, key: Key) -> bool:
        if self.takes_all:
            return True
        return isinstance(key, str) and any(each.matches(key) for each in self._filters)


class KeyRouter:
    """Consumers have numbers from 0 on."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, ...], _Class] = {}
        self._class_of: dict[int, tuple[str, ...]] = {}
        self._numbers = count()
        self._keys: dict[Key, int] = {}
        self._winners: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
        """Of a set of classes and a slot: the highest score, and whose it is."""

    def add(self, consumer: int, name: str, filters: Sequence[str]) -> None:
        """Adds a consumer that is not there."""
        sort = tuple(sorted(set(filters)))
        found = self._classes.get(sort)
        if found is None:
            found = self._classes[sort] = _Class(next(self._numbers), sort)
        seed = int.from_bytes(_digest(name, 8), "little")
        found.seeds[consumer] = seed
        self._class_of[consumer] = sort
        self._keys.clear()
        for (classes, slot), best in self._winners.items():
            if found.number in classes:
                self._winners[classes, slot] = max(best, (_score(seed, slot), consumer))

    def remove(self, consumer: int) -> None:
        sort = self._class_of.pop(consumer)
        found = self._classes[sort]
        del found.seeds[consumer]
        if not found.seeds:
            del self._classes[sort]
        self._keys.clear()
        self._winners = {
            place: best
            for place, best in self._winners.items()
            if best[1] != consumer and (found.seeds or found.number not in place[0])
        }

    def takes_empty_keys(self, consumer: int) -> bool:
        return self._classes[self._class_of[consumer]].matches("")

    def choose(self, key: Key) -> int | None:
        """The consumer of the key, or None if no filter matches it."""
        found = self._keys.get(key)
        if found is None:
            found = self._assign(key)
            if len(self._keys) >= KEYS_ASSIGNED_MAX:
                self._keys.clear()
            self._keys[key] = found
        return None if found == _MISSING else found

    def _assign(self, key: Key) -> int:
        matching = [each for each in self._classes.values() if each.matches(key)]
        if not matching:
            return _MISSING
        digest = key[:8] if isinstance(key, bytes) else _digest(key, 8)
        slot = int.from_bytes(digest, "little") % KEY_SLOTS
        place = (tuple(each.number for each in matching), slot)
        best = self._winners.get(place)
        if best is None:
            best = max(
                (_score(seed, slot), consumer)
                for each in matching
                for consumer, seed in each.seeds.items()
            )
            if len(self._winners) >= KEY_SLOTS:
                self._winners.clear()
            self._winners[place] = best
        return best[1]
