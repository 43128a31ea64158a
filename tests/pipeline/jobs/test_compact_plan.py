"""Which objects become one: decided on descriptors alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.catalog.records import TopicRecord
from forebay.catalog.swap import OBJECTS_PER_SWAP_MAX
from forebay.errors import UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.limits import KIB
from forebay.pipeline.jobs.compact import Bounds, Group, plan_groups
from support.catalogs import TOPIC, descriptor_of

VERIFIED = TopicRecord(epoch=7, tail=10**9, verified=10**9, reserved=10**9)


def chain(*sizes: int) -> list[ObjectDescriptor]:
    """Objects of ten messages and so many bytes."""
    return [descriptor_of(10 * at, 10 * at + 9, size=size) for at, size in enumerate(sizes)]


def planned(
    objects: Sequence[ObjectDescriptor],
    target: int = 1000,
    record: TopicRecord = VERIFIED,
    leave: Sequence[str] = (),
    messages_max: int | None = None,
) -> list[list[int]]:
    """The groups, as the numbers of their objects."""
    bounds = Bounds(target, messages_max)
    groups = plan_groups(TOPIC, record, objects, bounds, leave)
    return [[each.start_offset // 10 for each in group.objects] for group in groups]


def test_neighbours_are_joined_up_to_the_target() -> None:
    assert planned(chain(300, 300, 300, 300, 300)) == [[0, 1, 2], [3, 4]]
    assert planned(chain(400, 400, 201)) == [[0, 1]]
    assert planned(chain(400, 400, 200)) == [[0, 1, 2]]


def test_one_alone_is_left_as_it_is() -> None:
    assert planned([]) == []
    assert planned(chain(1)) == []
    assert planned(chain(1, 999, 1)) == []


def test_objects_of_half_the_target_are_left_alone_and_end_a_group() -> None:
    assert planned(chain(499, 500, 10, 20, 5000, 1, 1)) == [[2, 3], [5, 6]]


def test_a_group_is_not_over_what_one_transaction_swaps() -> None:
    groups = planned(chain(*[1] * (2 * OBJECTS_PER_SWAP_MAX + 1)))
    assert [len(group) for group in groups] == [OBJECTS_PER_SWAP_MAX] * 2
    large = [replace(each, etag="e" * 400 * KIB) for each in chain(*[1] * 5)]
    assert planned(large) == [[0, 1], [2, 3]]


def test_only_what_was_read_back_is_compacted() -> None:
    record = replace(VERIFIED, verified=35)
    assert planned(chain(*[1] * 6), record=record) == [[0, 1, 2]]


def test_no_group_reaches_over_a_lost_range() -> None:
    objects = chain(*[1] * 6)
    assert planned([*objects[:2], *objects[3:]]) == [[0, 1], [3, 4, 5]]


def test_a_bound_of_messages_is_kept() -> None:
    assert planned(chain(*[1] * 5), messages_max=20) == [[0, 1], [2, 3]]


def test_what_is_to_be_left_alone_is() -> None:
    objects = chain(*[1] * 5)
    assert planned(objects, leave=[objects[2].object_id]) == [[0, 1], [3, 4]]


def test_an_object_whose_name_does_not_say_its_range_is_left_alone() -> None:
    objects = chain(*[1] * 5)
    for other in ("data-20-28.dnb1", "data-21-29.dnb1", "segment-2"):
        objects[2] = replace(objects[2], object_id=other)
        assert planned(objects) == [[0, 1], [3, 4]]
    objects[2] = replace(objects[2], object_id="data-20-29-3.dnb1")
    assert planned(objects) == [[0, 1, 2, 3, 4]]


def test_a_group_knows_what_it_becomes() -> None:
    [group] = plan_groups(TOPIC, VERIFIED, chain(10, 20, 30), Bounds(1000))
    assert (str(group.name), group.size, group.messages) == ("data-0-29.dnb1", 60, 30)
    assert (group.topic, group.epoch) == (TOPIC, 7)


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="target is 0"):
        Bounds(0)


@given(
    sizes=st.lists(st.integers(1, 120), max_size=100),
    gaps=st.sets(st.integers(0, 99)),
    target=st.integers(1, 400),
    verified=st.integers(0, 1000),
)
def test_every_group_can_be_swapped(
    sizes: list[int], gaps: set[int], target: int, verified: int
) -> None:
    objects = [each for at, each in enumerate(chain(*sizes)) if at not in gaps]
    record = replace(VERIFIED, verified=verified)
    groups: list[Group] = list(plan_groups(TOPIC, record, objects, Bounds(target)))
    for group in groups:
        assert 2 <= len(group.objects) <= OBJECTS_PER_SWAP_MAX
        assert group.size <= target
        assert group.objects[-1].next_offset <= verified
        assert all(one.next_offset == then.start_offset for one, then in pairwise(group.objects))
    flat = [each for group in groups for each in group.objects]
    assert flat == sorted(set(flat), key=lambda each: each.start_offset)
    for one, then in pairwise(objects):
        if then.start_offset == one.next_offset and then.next_offset <= verified:
            small = one.size + then.size <= target and 2 * max(one.size, then.size) < target
            assert not small or one in flat or then in flat
