"""Swaps with others at work, on every backend: each of them before every single call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.etcd import EtcdKv
from forebay.catalog.records import encode_record
from forebay.catalog.swap import swap, swap_back
from forebay.errors import CommitRefused
from forebay.format.descriptor import ObjectDescriptor
from support.catalog_swaps import LARGE, fill, planned, require_whole, swapped
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


def fresh(backend: Backend) -> Setup:
    """A topic below a prefix that nothing else is below."""
    setup = Setup(Backend(backend.kv, backend.ttl, backend.boottime, backend.location))
    setup.create()
    return setup


def interrupt(setup: Setup, call: int, other: Callable[[], object]) -> list[object]:
    """Runs `other` before the given call of the catalog's backend; returns what it did."""
    outcomes: list[object] = []
    calls = 0

    def before(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            setup.kv.before = None
            outcomes.append(other())

    setup.kv.before = before
    return outcomes


def done(work: Callable[[], object]) -> bool:
    """Whether the work was done, and not refused."""
    try:
        return work() is not None
    except CommitRefused:
        return False


def take_over(setup: Setup) -> bool:
    record = replace(setup.record(), epoch=2)
    setup.put(setup.catalog.keys.record(TOPIC), encode_record(record))
    return True


Other = Callable[[Setup, list[ObjectDescriptor]], object]
OTHERS: Final[dict[str, Other]] = {
    "commit": lambda setup, _: setup.add(setup.record().tail, setup.record().tail + 9),
    "retire": lambda setup, made: setup.catalog.retire(TOPIC, None, made[0]),
    "condemn": lambda setup, _: setup.catalog.condemn(
        TOPIC, LARGE, setup.catalog.life(TOPIC, LARGE)
    ),
    "swap": lambda setup, made: swapped(setup, made[1:3]),
    "the same swap": lambda setup, made: swapped(setup, made[:3]),
    "undo": lambda setup, _: swap_back(setup.catalog, TOPIC, LARGE),
    "new owner": lambda setup, _: take_over(setup),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("back", [False, True], ids=["swap", "undo"])
def test_whoever_comes_in_between_the_chain_stays_whole(
    backend: Backend, other: str, back: bool
) -> None:
    """On etcd before every third call; the soak has all of them."""
    interleave(backend, other, back, 3 if isinstance(backend.kv, EtcdKv) else 1)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["etcd"], indirect=True)
@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("back", [False, True], ids=["swap", "undo"])
def test_whoever_comes_in_between_any_calls_of_etcd_the_chain_stays_whole(
    backend: Backend, other: str, back: bool
) -> None:
    interleave(backend, other, back, 1)


def interleave(backend: Backend, other: str, back: bool, step: int) -> None:
    """Runs the other operation before the first call, and before every `step`-th after it."""
    for call in range(1, 40, step):
        setup = fresh(backend)
        made = fill(setup, 0, 10, 20, 30)
        intent, large, small = planned(setup, made[:3])
        if back:
            swap(setup.catalog, TOPIC, intent, large, small, clock=setup.clock)
        work = OTHERS[other]
        others = interrupt(setup, call, lambda: done(lambda: work(setup, made)))  # noqa: B023
        if back:
            own = done(lambda: swap_back(setup.catalog, TOPIC, LARGE))  # noqa: B023
        else:
            own = done(lambda: swap(setup.catalog, TOPIC, intent, large, small))  # noqa: B023
        setup.kv.before = None
        require_whole(setup)
        assert own or others == [True], "not both are refused"
        if not others:
            return
    pytest.fail("there were more calls than were tried")


@pytest.mark.parametrize("back", [False, True], ids=["swap", "undo"])
def test_of_a_swap_and_a_condemnation_one_wins_at_every_interleaving(
    backend: Backend, back: bool
) -> None:
    """Whoever has condemned a key deletes the object: nothing may name it any more."""
    for call in range(1, 40):
        setup = fresh(backend)
        made = fill(setup, 0, 10, 20, 30)
        intent, large, small = planned(setup, made[:3])
        if back:
            swap(setup.catalog, TOPIC, intent, large, small, clock=setup.clock)
        name = made[1].object_id if back else LARGE
        seen = setup.catalog.life(TOPIC, name)
        others = interrupt(
            setup,
            call,
            lambda: setup.catalog.condemn(TOPIC, name, seen) is not None,  # noqa: B023
        )
        if back:
            own = done(lambda: swap_back(setup.catalog, TOPIC, LARGE))  # noqa: B023
        else:
            own = done(lambda: swap(setup.catalog, TOPIC, intent, large, small))  # noqa: B023
        setup.kv.before = None
        require_whole(setup)
        assert own is (others != [True])
        if not others:
            return
    pytest.fail("there were more calls than were tried")


# ---- what readers see ----


def test_a_range_is_answered_as_of_one_moment(backend: Backend) -> None:
    """It takes two requests to find it, and a swap or an undo comes between them."""
    setup = fresh(backend)
    made = fill(setup, 0, 10, 20, 30)
    compacted = False
    for start in range(0, 40, 3):
        for call in range(1, 5):
            intent, large, small = planned(setup, made[:3])

            def change() -> object:
                if compacted:  # noqa: B023  # used within this round only
                    name = setup.catalog.get_object_descriptors_range(TOPIC, 0, limit=1)[
                        0
                    ].object_id
                    return swap_back(setup.catalog, TOPIC, name)
                return swap(setup.catalog, TOPIC, intent, large, small)  # noqa: B023

            changed = interrupt(setup, call, change)
            found = setup.catalog.get_object_descriptors_range(TOPIC, start)
            setup.kv.before = None
            if not changed:
                change()
            compacted = not compacted
            assert found[0].start_offset <= start <= found[0].end_offset
            assert all(one.next_offset == then.start_offset for one, then in pairwise(found))
            assert found[-1].end_offset == 39


def test_a_retirement_that_read_the_old_descriptor_does_not_remove_the_new_one(
    backend: Backend,
) -> None:
    for call in range(1, 10):
        setup = fresh(backend)
        made = fill(setup, 0, 10, 20)
        plan = planned(setup, made[:2])
        swaps = interrupt(setup, call, lambda: done(lambda: swap(setup.catalog, TOPIC, *plan)))  # noqa: B023
        token = setup.catalog.retire(TOPIC, None, made[0])
        setup.kv.before = None
        require_whole(setup)
        assert (token is None) is (swaps == [True])
        if not swaps:
            return
    pytest.fail("there were more calls than were tried")
