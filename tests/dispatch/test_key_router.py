"""Keys are spread evenly, stay where they are, and the router's memory is bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dispatch.key_router import Key, KeyRouter, kept_key
from forebay.limits import KEY_CHARACTERS_MAX, KEY_SLOTS

CHANGES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([(), ("a*",), ("*b", "a"), ("*",)])), max_size=25
)
KEYS: list[Key] = ["a", "b", "ab", "ba", "abb", "c", "cc", b"a hash of"]


def router(consumers: dict[int, tuple[str, ...]]) -> KeyRouter:
    made = KeyRouter()
    for number, filters in consumers.items():
        made.add(number, f"name-{number}", filters)
    return made


@given(changes=CHANGES)
def test_what_was_asked_before_makes_no_difference(
    changes: list[tuple[int, tuple[str, ...]]],
) -> None:
    """The router that saw all changes agrees with one that is made for the consumers of now."""
    old, there = KeyRouter(), dict[int, tuple[str, ...]]()
    for number, filters in changes:
        if number in there:
            old.remove(number)
            del there[number]
        else:
            old.add(number, f"name-{number}", filters)
            there[number] = filters
        fresh = router(dict(sorted(there.items(), reverse=True)))
        assert [old.choose(key) for key in KEYS] == [fresh.choose(key) for key in KEYS]


@pytest.mark.parametrize("count", [2, 10, 100])
def test_keys_are_spread_evenly(count: int) -> None:
    made = router(dict.fromkeys(range(count), ()))
    got = Counter(made.choose(f"key-{number}") for number in range(20_000))
    fair = 20_000 / count
    assert len(got) == count
    assert max(got.values()) < 1.5 * fair
    assert min(got.values()) > 0.5 * fair


def test_more_keys_than_it_remembers_are_assigned_as_before() -> None:
    made = router({1: (), 2: (), 3: ("a*",)})
    keys = [f"{letter}{number}" for number in range(KEY_SLOTS) for letter in "ab"]
    first = [made.choose(key) for key in keys]
    assert [made.choose(key) for key in keys] == first


def test_the_numbers_of_consumers_say_nothing_about_their_keys() -> None:
    """After a restart consumers may have other numbers; their names are the same."""
    one, other = KeyRouter(), KeyRouter()
    names = ["x", "y", "z"]
    for number, name in enumerate(names):
        one.add(number, name, ())
        other.add(10 - number, name, ())
    for key in map(str, range(100)):
        assert 10 - (one.choose(key) or 0) == other.choose(key)


def test_a_long_key_is_kept_as_a_hash() -> None:
    assert kept_key("k" * KEY_CHARACTERS_MAX) == "k" * KEY_CHARACTERS_MAX
    long = kept_key("k" * (KEY_CHARACTERS_MAX + 1))
    assert isinstance(long, bytes)
    assert len(long) == 16
    assert kept_key("\ud800" * (KEY_CHARACTERS_MAX + 1)) != long
