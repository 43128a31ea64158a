"""A deletion is killed at every call of the catalog, the object store and the disk.

What the next process finds is the whole topic, or a deletion that is finished. A topic of the same
name that is created then has no old message and no old offset.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final, Literal, get_args

import pytest

from forebay.catalog.etcd import EtcdKv
from forebay.errors import ForebayError
from forebay.upload.deletion import begin_deletion
from forebay.upload.sweep import sweep
from support.deletions import NAME, TOPIC, Place, Port
from support.etcd_server import EtcdServer

SOAK: Final = os.environ.get("FOREBAY_SOAK", "0") not in {"", "0"}
CALLS_MAX: Final = 300
"""More calls than a deletion makes."""


Doing = Literal["open here", "owned by nobody", "finishing", "creating again", "sweeping"]


def prepare(place: Place, doing: Doing) -> Callable[[], object]:
    """Returns the call that is killed."""
    place.fill()
    if doing == "open here":
        return lambda: place.store.delete(NAME)
    place.restart()
    if doing == "owned by nobody":
        return lambda: place.store.delete(NAME)
    begin_deletion(place.catalog, place.cloud, TOPIC)
    if doing == "finishing":
        return place.store.finish_deletions
    if doing == "creating again":
        return place.topic
    return lambda: sweep(
        place.catalog, place.cloud, grace_minutes=0, dry_run=False, through_outages=False
    )


def killed_at_each_call(
    made: Callable[[], Place], doing: Doing, port: Port, *, after: bool = False, step: int = 1
) -> int:
    """Kills a process at its first, second, third … call, until it passes; returns how many."""
    for number in range(1, CALLS_MAX, step):
        place = made()
        try:
            call = prepare(place, doing)
            place.plan(port, number, after=after)
            try:
                call()
            except (ForebayError, OSError):
                assert place.killed, "it failed for another reason"
            passed = not place.killed
            check(place, number, begun=doing not in ("open here", "owned by nobody"))
            if passed:
                return number - 1
        finally:
            place.close()
    raise AssertionError("a deletion does not end")


def check(place: Place, number: int, *, begun: bool) -> None:
    rng = random.Random(number)
    place.restart(rng if number % 2 else None)
    if place.deleted:
        place.assert_hidden()
    elif begun:  # the topic was created again, and nothing else is there
        assert place.read() == {}
        place.store.delete(NAME)
    else:
        assert place.read() == place.messages, "the topic is there as a whole"
        place.store.delete(NAME)
    place.finish(number)
    if number % 3 != 1:  # otherwise the topic was created again
        place.assert_nothing_left()
    place.assert_goes_on()
    place.store.delete(NAME)
    place.assert_nothing_left()
    place.restart()
    place.assert_goes_on()


PORTS: Final[dict[str, tuple[Port, bool]]] = {
    "catalog": ("catalog", False),
    "after commits": ("catalog", True),
    "store": ("store", False),
    "after changes of the store": ("store", True),
    "disk": ("disk", False),
}


@pytest.mark.parametrize(("port", "after"), PORTS.values(), ids=PORTS)
def test_a_deletion_killed_at_any_call_leaves_the_topic_or_nothing_of_it(
    port: Port, after: bool
) -> None:
    assert killed_at_each_call(Place, "open here", port, after=after) >= 5


@pytest.mark.parametrize("doing", get_args(Doing)[1:])
@pytest.mark.parametrize(("port", "after"), PORTS.values(), ids=PORTS)
def test_what_finishes_a_deletion_may_be_killed_at_any_call_too(
    doing: Doing, port: Port, after: bool
) -> None:
    """Every seventh call; the soak has all of them."""
    count = killed_at_each_call(Place, doing, port, after=after, step=1 if SOAK else 7)
    assert count >= (0 if (doing, port) == ("sweeping", "disk") else 4)


@pytest.mark.parametrize(("port", "after"), PORTS.values(), ids=PORTS)
def test_a_deletion_killed_at_calls_leaves_the_topic_or_nothing_of_it_on_etcd(
    etcd: EtcdServer, port: Port, after: bool
) -> None:
    """Every fifth call; the soak has all of them."""
    numbers = itertools.count()
    with closing(EtcdKv([etcd.endpoint])) as kv:

        def made() -> Place:
            prefix = f"/deletions-{time.time_ns()}-{next(numbers)}"
            return Place(kv=kv, prefix=prefix)

        killed_at_each_call(made, "open here", port, after=after, step=1 if SOAK else 5)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_deletions_killed_again_and_again_leave_the_topic_or_nothing_of_it(seed: int) -> None:
    killed_at_random(seed)


@pytest.mark.parametrize("seed", range(12))
def test_deletions_killed_a_few_times_leave_the_topic_or_nothing_of_it(seed: int) -> None:
    killed_at_random(seed)


def killed_at_random(seed: int) -> None:
    """Topics are deleted and created by processes that are killed all the time."""
    rng = random.Random(seed)
    place = Place()
    try:
        for _ in range(10):
            port, after = rng.choice(list(PORTS.values()))
            place.plan(port, rng.randint(1, 60), after=after)
            with suppress(ForebayError, OSError):
                if place.messages:
                    place.delete()
                place.fill()
                if rng.random() < 0.7:
                    place.delete()
                    place.fill()
            place.restart(rng if rng.random() < 0.5 else None)
            place.learn()
        if not place.deleted:
            place.delete()
        place.store.finish_deletions()
        place.assert_nothing_left()
        place.assert_goes_on()
    finally:
        place.close()
