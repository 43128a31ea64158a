"""Swaps with others at work, on every ground: each of them before every single call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from catalog_swaps import LARGE, fill, planned, require_whole, swapped
from catalog_worlds import TOPIC, World
from forebay.catalog.records import encode_record
from forebay.catalog.swap import swap, swap_back
from forebay.errors import CommitRefused
from forebay.format.descriptor import ObjectDescriptor
from kv_grounds import GROUNDS, Ground, etcd_ground


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    yield ground
    ground.kv.close()


def fresh(ground: Ground) -> World:
    """A topic below a prefix that nothing else is below."""
    world = World(Ground(ground.kv, ground.ttl, ground.boottime, ground.location))
    world.create()
    return world


def interrupt(world: World, call: int, other: Callable[[], object]) -> list[object]:
    """`other` runs before the so manieth call of the catalog's ground; answers what it did."""
    outcomes: list[object] = []
    calls = 0

    def before(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            world.kv.before = None
            outcomes.append(other())

    world.kv.before = before
    return outcomes


def done(work: Callable[[], object]) -> bool:
    """Whether it was not refused."""
    try:
        return work() is not None
    except CommitRefused:
        return False


def take_over(world: World) -> bool:
    record = replace(world.record(), epoch=2)
    world.put(world.catalog.keys.record(TOPIC), encode_record(record))
    return True


Other = Callable[[World, list[ObjectDescriptor]], object]
OTHERS: Final[dict[str, Other]] = {
    "commit": lambda world, _: world.add(world.record().tail, world.record().tail + 9),
    "retire": lambda world, made: world.catalog.retire(TOPIC, None, made[0]),
    "condemn": lambda world, _: world.catalog.condemn(
        TOPIC, LARGE, world.catalog.life(TOPIC, LARGE)
    ),
    "swap": lambda world, made: swapped(world, made[1:3]),
    "the same swap": lambda world, made: swapped(world, made[:3]),
    "undo": lambda world, _: swap_back(world.catalog, TOPIC, LARGE),
    "new owner": lambda world, _: take_over(world),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("back", [False, True], ids=["swap", "undo"])
def test_whoever_comes_in_between_the_chain_stays_whole(
    ground: Ground, other: str, back: bool
) -> None:
    for call in range(1, 40):
        world = fresh(ground)
        made = fill(world, 0, 10, 20, 30)
        intent, large, small = planned(world, made[:3])
        if back:
            swap(world.catalog, TOPIC, intent, large, small, clock=world.clock)
        work = OTHERS[other]
        others = interrupt(world, call, lambda: done(lambda: work(world, made)))  # noqa: B023
        if back:
            own = done(lambda: swap_back(world.catalog, TOPIC, LARGE))  # noqa: B023
        else:
            own = done(lambda: swap(world.catalog, TOPIC, intent, large, small))  # noqa: B023
        world.kv.before = None
        require_whole(world)
        assert own or others == [True], "not both are refused"
        if not others:
            return
    pytest.fail("there were more calls than were tried")


@pytest.mark.parametrize("back", [False, True], ids=["swap", "undo"])
def test_of_a_swap_and_a_condemnation_one_wins_at_every_interleaving(
    ground: Ground, back: bool
) -> None:
    """Whoever has condemned a key deletes the object: nothing may name it any more."""
    for call in range(1, 40):
        world = fresh(ground)
        made = fill(world, 0, 10, 20, 30)
        intent, large, small = planned(world, made[:3])
        if back:
            swap(world.catalog, TOPIC, intent, large, small, clock=world.clock)
        name = made[1].object_id if back else LARGE
        seen = world.catalog.life(TOPIC, name)
        others = interrupt(
            world,
            call,
            lambda: world.catalog.condemn(TOPIC, name, seen) is not None,  # noqa: B023
        )
        if back:
            own = done(lambda: swap_back(world.catalog, TOPIC, LARGE))  # noqa: B023
        else:
            own = done(lambda: swap(world.catalog, TOPIC, intent, large, small))  # noqa: B023
        world.kv.before = None
        require_whole(world)
        assert own is (others != [True])
        if not others:
            return
    pytest.fail("there were more calls than were tried")


# ---- what readers see ----


def test_a_range_is_answered_as_of_one_moment(ground: Ground) -> None:
    """Though two requests find it, and a swap, or an undo, comes in between."""
    world = fresh(ground)
    made = fill(world, 0, 10, 20, 30)
    compacted = False
    for start in range(0, 40, 3):
        for call in range(1, 5):
            intent, large, small = planned(world, made[:3])

            def change() -> object:
                if compacted:  # noqa: B023  # used within this round only
                    name = world.catalog.get_object_descriptors_range(TOPIC, 0, limit=1)[
                        0
                    ].object_id
                    return swap_back(world.catalog, TOPIC, name)
                return swap(world.catalog, TOPIC, intent, large, small)  # noqa: B023

            changed = interrupt(world, call, change)
            found = world.catalog.get_object_descriptors_range(TOPIC, start)
            world.kv.before = None
            if not changed:
                change()
            compacted = not compacted
            assert found[0].start_offset <= start <= found[0].end_offset
            assert all(one.next_offset == then.start_offset for one, then in pairwise(found))
            assert found[-1].end_offset == 39


def test_a_retirement_that_read_the_old_descriptor_does_not_remove_the_new_one(
    ground: Ground,
) -> None:
    for call in range(1, 10):
        world = fresh(ground)
        made = fill(world, 0, 10, 20)
        plan = planned(world, made[:2])
        swaps = interrupt(world, call, lambda: done(lambda: swap(world.catalog, TOPIC, *plan)))  # noqa: B023
        token = world.catalog.retire(TOPIC, None, made[0])
        world.kv.before = None
        require_whole(world)
        assert (token is None) is (swaps == [True])
        if not swaps:
            return
    pytest.fail("there were more calls than were tried")
