"""`KeyRouter`: which consumer gets a key, of those whose filters match it.

The assignment is rendezvous hashing: every consumer has a score for each slot of keys, made from
its name, and the highest wins. So a consumer that comes takes keys from the others and moves none
between them, and the keys of one that goes are spread over the rest. Consumers with the same
filters are one class; the filters are tried once for a class. A spot is a set of classes and a
slot, and knows its winner. A key costs a walk over all consumers only if its spot is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from forebay.dispatch.key_filter import KeyFilter
from forebay.limits import KEY_CHARACTERS_MAX, KEY_SLOTS, KEYS_ASSIGNED_MAX

Key = str | bytes
"""A key, or the hash of one that is too long to be kept."""


def kept_key(key: str) -> Key:
    """The key as a subscription keeps it: a hash if it is long."""
    return key if len(key) <= KEY_CHARACTERS_MAX else _digest(key, 16)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _score(seed: int, salt: int) -> int:
    """Mixes two hashes; the high bits decide, and depend on all bits of both."""
    mixed = (seed ^ salt) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF


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


class Spot:
    """Keys that always have the same consumer."""

    __slots__ = ("best", "classes", "consumer", "salt")

    def __init__(self, classes: Sequence[_Class], slot: int) -> None:
        self.classes = classes
        self.salt = int.from_bytes(_digest(str(slot), 8), "little")
        self.elect()

    def elect(self) -> None:
        """Looks for the winner among all consumers."""
        self.best, self.consumer = max(
            (_score(seed, self.salt), consumer)
            for each in self.classes
            for consumer, seed in each.seeds.items()
        )


class KeyRouter:
    """Consumers have numbers. A spot is out of date when `generation` has changed."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, ...], _Class] = {}
        self._class_of: dict[int, tuple[str, ...]] = {}
        self._keys: dict[Key, Spot | None] = {}
        self._spots: dict[tuple[tuple[int, ...], int], Spot] = {}
        self._numbers = count()
        self.generation = 0

    def add(self, consumer: int, name: str, filters: Sequence[str]) -> None:
        """Adds a consumer that is not there."""
        sort = tuple(sorted(set(filters)))
        found = self._classes.get(sort)
        if found is None:
            found = self._classes[sort] = _Class(next(self._numbers), sort)
            self._forget()
        seed = int.from_bytes(_digest(name, 8), "little")
        found.seeds[consumer] = seed
        self._class_of[consumer] = sort
        for spot in self._spots.values():
            if found in spot.classes:
                score = _score(seed, spot.salt)
                spot.best, spot.consumer = max((spot.best, spot.consumer), (score, consumer))

    def remove(self, consumer: int) -> None:
        sort = self._class_of.pop(consumer)
        found = self._classes[sort]
        del found.seeds[consumer]
        if not found.seeds:
            del self._classes[sort]
            self._forget()
        for spot in self._spots.values():
            if spot.consumer == consumer:
                spot.elect()

    def _forget(self) -> None:
        self.generation += 1
        self._keys.clear()
        self._spots.clear()

    def takes_empty_keys(self, consumer: int) -> bool:
        return self._classes[self._class_of[consumer]].matches("")

    def choose(self, key: Key) -> int | None:
        """The consumer of the key, or None if no filter matches it."""
        spot = self.spot(key)
        return None if spot is None else spot.consumer

    def spot(self, key: Key) -> Spot | None:
        """The spot of the key; it stays right until the next generation."""
        if key in self._keys:
            return self._keys[key]
        spot = self._find(key)
        if len(self._keys) >= KEYS_ASSIGNED_MAX:
            self._keys.clear()
        self._keys[key] = spot
        return spot

    def _find(self, key: Key) -> Spot | None:
        matching = [each for each in self._classes.values() if each.matches(key)]
        if not matching:
            return None
        digest = key[:8] if isinstance(key, bytes) else _digest(key, 8)
        slot = int.from_bytes(digest, "little") % KEY_SLOTS
        place = (tuple(each.number for each in matching), slot)
        spot = self._spots.get(place)
        if spot is None:
            if len(self._spots) >= KEY_SLOTS:
                self._forget()
            spot = self._spots[place] = Spot(matching, slot)
        return spot
