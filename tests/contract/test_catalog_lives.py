"""The life of an object's key, on every ground: who may write to a name, and who may delete it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from catalog_worlds import TOPIC, World, descriptor_of
from forebay.catalog.catalog import Intent
from forebay.catalog.records import Life, State, may_become
from forebay.errors import CommitRefused, ServiceUnavailable, TopicFenced
from forebay.format.names import ObjectName, pending_object
from forebay.limits import CATALOG_PAGE
from kv_grounds import GROUNDS, Ground, etcd_ground

NAME: Final = "data-0-9.dnb1"
STATES: Final[list[State | None]] = [None, *State]


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    ground: Ground
    if request.param == "etcd":
        ground = etcd_ground(request.getfixturevalue("etcd"))
    else:
        ground = GROUNDS[request.param](tmp_path)
    world = World(ground)
    world.create()
    yield world
    ground.kv.close()


# ---- the table ----

ALLOWED: Final = {
    (None, State.INTENDED),
    (None, State.COMMITTED),
    (None, State.REPLACED),
    (None, State.DELETING),
    (State.INTENDED, None),
    (State.INTENDED, State.COMMITTED),
    (State.INTENDED, State.DELETING),
    (State.COMMITTED, State.REPLACED),
    (State.COMMITTED, State.DELETING),
    (State.REPLACED, State.COMMITTED),
    (State.REPLACED, State.DELETING),
    (State.DELETING, None),
    (State.DELETING, State.GONE),
}


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_a_key_goes_from_state_to_state_by_the_table_alone(
    before: State | None, after: State | None
) -> None:
    assert may_become(before, after) is (before == after or (before, after) in ALLOWED)


@pytest.mark.parametrize("before", STATES)
def test_every_operation_keeps_to_the_table(world: World, before: State | None) -> None:
    operations: dict[str, Callable[[], object]] = {
        "intend": lambda: world.catalog.intend(TOPIC, 1, NAME),
        "renew": lambda: world.catalog.renew(TOPIC, Intent(NAME, 1, "t")),
        "withdraw": lambda: world.catalog.withdraw(TOPIC, NAME, "t"),
        "condemn": lambda: world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME)),
        "bury": lambda: world.catalog.bury(TOPIC, NAME, "t", certain=True),
        "bury uncertain": lambda: world.catalog.bury(TOPIC, NAME, "t", certain=False),
    }
    for name, operation in operations.items():
        if before is not None:
            world.row(NAME, before)
        elif (life := world.catalog.life(TOPIC, NAME)) is not None:
            world.row(NAME, State.INTENDED, token=life.token)
            world.catalog.withdraw(TOPIC, NAME, life.token)
        try:
            operation()
        except CommitRefused:
            assert name == "intend"
        assert may_become(before, world.state(NAME)), name


# ---- intents ----


def test_an_intent_is_a_row_with_the_epoch_and_a_token(world: World) -> None:
    intent = world.intend(0, 9)
    life = Life(State.INTENDED, 1, intent.token, world.clock.now_ms())
    assert world.catalog.life(TOPIC, NAME) == life
    assert list(world.catalog.lives(TOPIC)) == [(NAME, life)]


@pytest.mark.parametrize("older", [1, 2])
def test_an_intent_of_an_older_or_the_same_epoch_is_taken_over(world: World, older: int) -> None:
    world.create(epoch=2)
    world.row(NAME, State.INTENDED, epoch=older)
    intent = world.intend(0, 9, epoch=2)
    assert intent.object_id == NAME
    assert world.catalog.life(TOPIC, NAME) == Life(
        State.INTENDED, 2, intent.token, world.clock.now_ms()
    )


def test_an_intent_of_a_newer_epoch_is_left_alone(world: World) -> None:
    world.create(epoch=2)
    newer = world.row(NAME, State.INTENDED, epoch=3)
    assert world.intend(0, 9, epoch=2).object_id == "data-0-9-1.dnb1"
    assert world.catalog.life(TOPIC, NAME) == newer


@pytest.mark.parametrize("state", [State.COMMITTED, State.REPLACED, State.DELETING, State.GONE])
def test_a_name_that_is_taken_gets_a_number(world: World, state: State) -> None:
    world.row(NAME, state)
    world.row("data-0-9-1.dnb1", State.GONE)
    intent = world.intend(0, 9)
    assert intent.object_id == "data-0-9-2.dnb1"
    assert world.state(NAME) is state
    world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9, intent.object_id))
    assert world.chain() == [(0, 9)]


def test_a_fixed_name_that_is_taken_is_refused(world: World) -> None:
    name = pending_object(0, "ab")
    first = world.catalog.intend(TOPIC, 1, name)
    assert world.catalog.intend(TOPIC, 1, name).object_id == first.object_id
    world.row(name, State.DELETING)
    with pytest.raises(CommitRefused, match="no name is free"):
        world.catalog.intend(TOPIC, 1, name)


def test_a_name_lost_to_a_race_is_tried_again_before_another(world: World) -> None:
    def interfere(operation: str) -> None:
        if operation == "commit":
            world.kv.before = None
            world.row(NAME, State.INTENDED)

    world.kv.before = interfere
    assert world.intend(0, 9).object_id == NAME


def test_an_intent_of_who_is_not_the_owner_is_fenced(world: World) -> None:
    for epoch in (0, 2):
        with pytest.raises(TopicFenced):
            world.intend(0, 9, epoch=epoch)
    assert list(world.catalog.lives(TOPIC)) == []


def test_an_intent_whose_answer_was_lost_is_taken_over_by_asking_again(world: World) -> None:
    world.lose_answers()
    with pytest.raises(ServiceUnavailable):
        world.intend(0, 9)
    assert world.state(NAME) is State.INTENDED
    assert world.intend(0, 9).object_id == NAME


def test_lives_are_read_page_by_page(world: World) -> None:
    names = {str(ObjectName(n, n)) for n in range(CATALOG_PAGE + 2)}
    for name in names:
        world.row(name, State.GONE)
    assert {name for name, _ in world.catalog.lives(TOPIC)} == names


# ---- withdraw ----


def test_only_the_own_intent_is_withdrawn(world: World) -> None:
    intent = world.intend(0, 9)
    world.catalog.withdraw(TOPIC, NAME, "another")
    assert world.state(NAME) is State.INTENDED
    world.catalog.withdraw(TOPIC, NAME, intent.token)
    assert world.state(NAME) is None
    world.catalog.withdraw(TOPIC, NAME, intent.token)


def test_a_committed_key_is_not_withdrawn(world: World) -> None:
    intent = world.intend(0, 9)
    world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    world.catalog.withdraw(TOPIC, NAME, intent.token)
    assert world.state(NAME) is State.COMMITTED


# ---- condemn and bury ----


def test_a_condemned_key_is_buried_by_its_token_alone(world: World) -> None:
    world.intend(0, 9)
    token = world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME))
    assert token is not None
    assert world.state(NAME) is State.DELETING
    world.catalog.bury(TOPIC, NAME, "another", certain=True)
    assert world.state(NAME) is State.DELETING
    world.catalog.bury(TOPIC, NAME, token, certain=True)
    assert world.state(NAME) is None
    world.catalog.bury(TOPIC, NAME, token, certain=True)


def test_a_burial_that_is_not_certain_leaves_a_mark_for_ever(world: World) -> None:
    token = world.catalog.condemn(TOPIC, NAME, None)
    assert token is not None
    world.catalog.bury(TOPIC, NAME, token, certain=False)
    assert world.state(NAME) is State.GONE
    assert world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME)) is None
    assert world.intend(0, 9).object_id == "data-0-9-1.dnb1"


def test_a_key_that_changed_since_it_was_seen_is_not_condemned(world: World) -> None:
    seen = world.row(NAME, State.INTENDED, token="old")
    world.intend(0, 9)
    assert world.catalog.condemn(TOPIC, NAME, seen) is None
    assert world.catalog.condemn(TOPIC, NAME, None) is None
    assert world.state(NAME) is State.INTENDED


def test_an_object_that_a_descriptor_names_is_not_condemned(world: World) -> None:
    world.add(0, 9)
    assert world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME)) is None
    assert world.state(NAME) is State.COMMITTED


def test_an_unknown_object_is_condemned_unless_a_descriptor_names_it(world: World) -> None:
    world.add(0, 9)
    life = world.catalog.life(TOPIC, NAME)
    assert life is not None
    world.row(NAME, State.INTENDED, token=life.token)
    world.catalog.withdraw(TOPIC, NAME, life.token)
    assert world.catalog.condemn(TOPIC, NAME, None) is None
    assert world.catalog.condemn(TOPIC, "data-0-7.dnb1", None) is not None
    assert world.catalog.condemn(TOPIC, "data-0-pending-ab.dnb1", None) is not None
    assert world.catalog.condemn(TOPIC, "something else", None) is not None


def test_of_a_commit_and_a_condemnation_one_wins_at_every_interleaving(world: World) -> None:
    for call in range(1, 9):
        start = world.record().tail
        intent = world.intend(start, start + 9)
        seen = world.catalog.life(TOPIC, intent.object_id)
        answers: list[str | None] = []
        calls = 0

        def sweep(_: str) -> None:
            nonlocal calls
            calls += 1
            if calls == call:  # noqa: B023  # used within this round only
                world.kv.before = None
                answers.append(world.catalog.condemn(TOPIC, intent.object_id, seen))  # noqa: B023

        world.kv.before = sweep
        try:
            world.catalog.put_object_descriptor(
                TOPIC, intent, descriptor_of(start, start + 9, intent.object_id)
            )
            committed = True
        except CommitRefused:
            committed = False
        world.kv.before = None
        assert committed is (answers in ([], [None]))
        assert (world.record().tail == start + 10) is committed
        expected = State.COMMITTED if committed else State.DELETING
        assert world.state(intent.object_id) is expected


def test_a_condemnation_whose_answer_was_lost_can_be_made_again(world: World) -> None:
    world.intend(0, 9)
    world.lose_answers()
    with pytest.raises(ServiceUnavailable):
        world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME))
    seen = world.catalog.life(TOPIC, NAME)
    assert seen is not None
    assert seen.state is State.DELETING
    assert world.catalog.condemn(TOPIC, NAME, seen) is not None


# ---- retire ----


def test_only_the_oldest_object_is_retired(world: World) -> None:
    first, second = world.add(0, 9), world.add(10, 19)
    assert world.catalog.retire(TOPIC, 1, second) is None
    token = world.catalog.retire(TOPIC, 1, first)
    assert token is not None
    assert world.chain() == [(10, 19)]
    assert world.record().start_offset == 10
    assert world.state(NAME) is State.DELETING
    world.catalog.bury(TOPIC, NAME, token, certain=True)
    assert world.state(NAME) is None
    assert world.catalog.retire(TOPIC, 1, first) is None


def test_a_retired_object_that_was_never_verified_does_not_hold_up_those_behind_it(
    world: World,
) -> None:
    first, second = world.add(0, 9), world.add(10, 19)
    world.catalog.retire(TOPIC, 1, first)
    record = world.record()
    assert record.start_offset <= record.verified <= record.tail
    assert world.catalog.mark_verified(TOPIC, second).verified == 20


def test_retiring_crosses_a_lost_range_and_can_leave_nothing(world: World) -> None:
    first = world.add(0, 9)
    world.create(tail=50, verified=50, lost=((10, 50),))
    world.catalog.retire(TOPIC, None, first)
    record = world.record()
    assert (record.start_offset, record.verified, record.tail) == (50, 50, 50)
    assert world.chain() == []


def test_a_fenced_owner_retires_nothing(world: World) -> None:
    first = world.add(0, 9)
    world.create(epoch=2, tail=10)
    with pytest.raises(TopicFenced):
        world.catalog.retire(TOPIC, 1, first)
    assert world.chain() == [(0, 9)]


def test_of_two_who_retire_an_object_one_gets_the_token(world: World) -> None:
    first = world.add(0, 9)
    world.add(10, 19)
    tokens: list[str | None] = []

    def other(operation: str) -> None:
        if operation == "commit":
            world.kv.before = None
            tokens.append(world.catalog.retire(TOPIC, None, first))

    world.kv.before = other
    tokens.append(world.catalog.retire(TOPIC, None, first))
    assert [token is None for token in tokens] == [False, True]
    assert world.chain() == [(10, 19)]


def test_a_retirement_whose_answer_was_lost_leaves_a_key_to_be_swept(world: World) -> None:
    first = world.add(0, 9)
    world.lose_answers()
    with pytest.raises(ServiceUnavailable):
        world.catalog.retire(TOPIC, 1, first)
    assert world.catalog.retire(TOPIC, 1, first) is None
    assert world.catalog.condemn(TOPIC, NAME, world.catalog.life(TOPIC, NAME)) is not None


# ---- renewing ----


def test_a_renewed_intent_is_as_young_as_a_new_one_and_is_still_the_same(world: World) -> None:
    intent = world.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    world.clock.advance(3600)
    assert world.catalog.renew(TOPIC, intent)
    life = Life(State.INTENDED, 1, intent.token, world.clock.now_ms())
    assert world.catalog.life(TOPIC, NAME) == life
    assert world.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10


def test_a_sweep_that_looked_before_an_intent_was_renewed_takes_nothing(world: World) -> None:
    intent = world.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    seen = world.catalog.life(TOPIC, NAME)
    world.clock.advance(3600)
    assert world.catalog.renew(TOPIC, intent)
    assert world.catalog.condemn(TOPIC, NAME, seen) is None


@pytest.mark.parametrize("state", [state for state in STATES if state is not State.INTENDED])
def test_what_is_not_intended_any_more_is_not_renewed(world: World, state: State | None) -> None:
    if state is not None:
        world.row(NAME, state)
    before = world.catalog.life(TOPIC, NAME)
    world.clock.advance(3600)
    assert not world.catalog.renew(TOPIC, Intent(NAME, 1, "t"))
    assert world.catalog.life(TOPIC, NAME) == before


def test_an_intent_that_somebody_took_over_is_not_renewed(world: World) -> None:
    first = world.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    second = world.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    assert first.object_id == second.object_id
    assert not world.catalog.renew(TOPIC, first)
    assert world.catalog.renew(TOPIC, second)
