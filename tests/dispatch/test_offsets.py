"""A set of offsets is a sorted set, from whichever end it is emptied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.dispatch.offsets import Offsets


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400))
def test_it_agrees_with_a_set(steps: list[tuple[bool, int]]) -> None:
    made, wanted = Offsets(), set[int]()
    for is_added, offset in steps:
        if is_added and offset not in wanted:
            made.add(offset)
            wanted.add(offset)
        else:
            made.discard(offset)
            wanted.discard(offset)
        assert [*made] == sorted(wanted)
        assert (len(made), made.first) == (len(wanted), min(wanted, default=None))


def test_it_is_emptied_from_its_lowest_offset() -> None:
    made = Offsets()
    for offset in range(1000):
        made.add(offset)
    for offset in range(999):
        made.discard(offset)
        assert made.first == offset + 1
    made.add(3)
    assert [*made] == [3, 999]
