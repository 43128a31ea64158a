"""The life of an object's key, on every backend: who may write to a name, and who may delete it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Intent
from forebay.catalog.records import Life, State, may_become
from forebay.errors import CommitRefused, ServiceUnavailable, TopicFenced
from forebay.format.names import ObjectName, pending_object
from forebay.limits import CATALOG_PAGE
from support.catalogs import TOPIC, Setup, descriptor_of
from support.kv_stores import requested_backend

NAME: Final = "data-0-9.dnb1"
STATES: Final[list[State | None]] = [None, *State]


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    backend = requested_backend(request, tmp_path)
    setup = Setup(backend)
    setup.create()
    yield setup
    backend.kv.close()


# ---- the table ----

ALLOWED: Final = {
    (None, State.INTENDED),
    (None, State.COMMITTED),
    (None, State.REPLACED),
    (None, State.DELETING),
    (None, State.GONE),
    (State.INTENDED, None),
    (State.INTENDED, State.COMMITTED),
    (State.INTENDED, State.DELETING),
    (State.INTENDED, State.GONE),
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
def test_every_operation_keeps_to_the_table(setup: Setup, before: State | None) -> None:
    operations: dict[str, Callable[[], object]] = {
        "intend": lambda: setup.catalog.intend(TOPIC, 1, NAME),
        "renew": lambda: setup.catalog.renew(TOPIC, Intent(NAME, 1, "t")),
        "withdraw": lambda: setup.catalog.withdraw(TOPIC, NAME, "t"),
        "condemn": lambda: setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME)),
        "bury": lambda: setup.catalog.bury(TOPIC, NAME, "t", certain=True),
        "bury uncertain": lambda: setup.catalog.bury(TOPIC, NAME, "t", certain=False),
    }
    for name, operation in operations.items():
        if before is not None:
            setup.row(NAME, before)
        elif (life := setup.catalog.life(TOPIC, NAME)) is not None:
            setup.row(NAME, State.INTENDED, token=life.token)
            setup.catalog.withdraw(TOPIC, NAME, life.token)
        try:
            operation()
        except CommitRefused:
            assert name == "intend"
        assert may_become(before, setup.state(NAME)), name


# ---- intents ----


def test_an_intent_is_a_row_with_the_epoch_and_a_token(setup: Setup) -> None:
    intent = setup.intend(0, 9)
    life = Life(State.INTENDED, 1, intent.token, setup.clock.now_ms())
    assert setup.catalog.life(TOPIC, NAME) == life
    assert list(setup.catalog.lives(TOPIC)) == [(NAME, life)]


@pytest.mark.parametrize("older", [1, 2])
def test_an_intent_of_an_older_or_the_same_epoch_is_taken_over(setup: Setup, older: int) -> None:
    setup.create(epoch=2)
    setup.row(NAME, State.INTENDED, epoch=older)
    intent = setup.intend(0, 9, epoch=2)
    assert intent.object_id == NAME
    assert setup.catalog.life(TOPIC, NAME) == Life(
        State.INTENDED, 2, intent.token, setup.clock.now_ms()
    )


def test_an_intent_of_a_newer_epoch_is_left_alone(setup: Setup) -> None:
    setup.create(epoch=2)
    newer = setup.row(NAME, State.INTENDED, epoch=3)
    assert setup.intend(0, 9, epoch=2).object_id == "data-0-9-1.dnb1"
    assert setup.catalog.life(TOPIC, NAME) == newer


@pytest.mark.parametrize("state", [State.COMMITTED, State.REPLACED, State.DELETING, State.GONE])
def test_a_name_that_is_taken_gets_a_number(setup: Setup, state: State) -> None:
    setup.row(NAME, state)
    setup.row("data-0-9-1.dnb1", State.GONE)
    intent = setup.intend(0, 9)
    assert intent.object_id == "data-0-9-2.dnb1"
    assert setup.state(NAME) is state
    setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9, intent.object_id))
    assert setup.chain() == [(0, 9)]


def test_a_fixed_name_that_is_taken_is_refused(setup: Setup) -> None:
    name = pending_object(0, "ab")
    first = setup.catalog.intend(TOPIC, 1, name)
    assert setup.catalog.intend(TOPIC, 1, name).object_id == first.object_id
    setup.row(name, State.DELETING)
    with pytest.raises(CommitRefused, match=name):
        setup.catalog.intend(TOPIC, 1, name)


def test_a_name_lost_to_a_race_is_tried_again_before_another(setup: Setup) -> None:
    def interfere(operation: str) -> None:
        if operation == "commit":
            setup.kv.before = None
            setup.row(NAME, State.INTENDED)

    setup.kv.before = interfere
    assert setup.intend(0, 9).object_id == NAME


def test_an_intent_of_who_is_not_the_owner_is_fenced(setup: Setup) -> None:
    for epoch in (0, 2):
        with pytest.raises(TopicFenced):
            setup.intend(0, 9, epoch=epoch)
    assert list(setup.catalog.lives(TOPIC)) == []


def test_an_intent_whose_answer_was_lost_is_taken_over_by_asking_again(setup: Setup) -> None:
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        setup.intend(0, 9)
    assert setup.state(NAME) is State.INTENDED
    assert setup.intend(0, 9).object_id == NAME


def test_lives_are_read_page_by_page(setup: Setup) -> None:
    names = {str(ObjectName(n, n)) for n in range(CATALOG_PAGE + 2)}
    for name in names:
        setup.row(name, State.GONE)
    assert {name for name, _ in setup.catalog.lives(TOPIC)} == names


# ---- withdraw ----


def test_only_the_own_intent_is_withdrawn(setup: Setup) -> None:
    intent = setup.intend(0, 9)
    setup.catalog.withdraw(TOPIC, NAME, "another")
    assert setup.state(NAME) is State.INTENDED
    setup.catalog.withdraw(TOPIC, NAME, intent.token)
    assert setup.state(NAME) is None
    setup.catalog.withdraw(TOPIC, NAME, intent.token)


def test_a_committed_key_is_not_withdrawn(setup: Setup) -> None:
    intent = setup.intend(0, 9)
    setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9))
    setup.catalog.withdraw(TOPIC, NAME, intent.token)
    assert setup.state(NAME) is State.COMMITTED


# ---- condemn and bury ----


def test_a_condemned_key_is_buried_by_its_token_alone(setup: Setup) -> None:
    setup.intend(0, 9)
    token = setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME))
    assert token is not None
    assert setup.state(NAME) is State.DELETING
    setup.catalog.bury(TOPIC, NAME, "another", certain=True)
    assert setup.state(NAME) is State.DELETING
    setup.catalog.bury(TOPIC, NAME, token, certain=True)
    assert setup.state(NAME) is None
    setup.catalog.bury(TOPIC, NAME, token, certain=True)


def test_a_burial_that_is_not_certain_leaves_a_mark_for_ever(setup: Setup) -> None:
    token = setup.catalog.condemn(TOPIC, NAME, None)
    assert token is not None
    setup.catalog.bury(TOPIC, NAME, token, certain=False)
    assert setup.state(NAME) is State.GONE
    assert setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME)) is None
    assert setup.intend(0, 9).object_id == "data-0-9-1.dnb1"


def test_a_key_that_changed_since_it_was_seen_is_not_condemned(setup: Setup) -> None:
    seen = setup.row(NAME, State.INTENDED, token="old")
    setup.intend(0, 9)
    assert setup.catalog.condemn(TOPIC, NAME, seen) is None
    assert setup.catalog.condemn(TOPIC, NAME, None) is None
    assert setup.state(NAME) is State.INTENDED


def test_an_object_that_a_descriptor_names_is_not_condemned(setup: Setup) -> None:
    setup.add(0, 9)
    assert setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME)) is None
    assert setup.state(NAME) is State.COMMITTED


def test_an_unknown_object_is_condemned_unless_a_descriptor_names_it(setup: Setup) -> None:
    setup.add(0, 9)
    life = setup.catalog.life(TOPIC, NAME)
    assert life is not None
    setup.row(NAME, State.INTENDED, token=life.token)
    setup.catalog.withdraw(TOPIC, NAME, life.token)
    assert setup.catalog.condemn(TOPIC, NAME, None) is None
    assert setup.catalog.condemn(TOPIC, "data-0-7.dnb1", None) is not None
    assert setup.catalog.condemn(TOPIC, "data-0-pending-ab.dnb1", None) is not None
    assert setup.catalog.condemn(TOPIC, "something else", None) is not None


def test_of_a_commit_and_a_condemnation_one_wins_at_every_interleaving(setup: Setup) -> None:
    for call in range(1, 9):
        start = setup.record().tail
        intent = setup.intend(start, start + 9)
        seen = setup.catalog.life(TOPIC, intent.object_id)
        answers: list[str | None] = []
        calls = 0

        def sweep(_: str) -> None:
            nonlocal calls
            calls += 1
            if calls == call:  # noqa: B023  # used within this round only
                setup.kv.before = None
                answers.append(setup.catalog.condemn(TOPIC, intent.object_id, seen))  # noqa: B023

        setup.kv.before = sweep
        try:
            setup.catalog.put_object_descriptor(
                TOPIC, intent, descriptor_of(start, start + 9, intent.object_id)
            )
            committed = True
        except CommitRefused:
            committed = False
        setup.kv.before = None
        assert committed is (answers in ([], [None]))
        assert (setup.record().tail == start + 10) is committed
        expected = State.COMMITTED if committed else State.DELETING
        assert setup.state(intent.object_id) is expected


def test_a_condemnation_whose_answer_was_lost_can_be_made_again(setup: Setup) -> None:
    setup.intend(0, 9)
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME))
    seen = setup.catalog.life(TOPIC, NAME)
    assert seen is not None
    assert seen.state is State.DELETING
    assert setup.catalog.condemn(TOPIC, NAME, seen) is not None


# ---- retire ----


def test_only_the_oldest_object_is_retired(setup: Setup) -> None:
    first, second = setup.add(0, 9), setup.add(10, 19)
    assert setup.catalog.retire(TOPIC, 1, second) is None
    token = setup.catalog.retire(TOPIC, 1, first)
    assert token is not None
    assert setup.chain() == [(10, 19)]
    assert setup.record().start_offset == 10
    assert setup.state(NAME) is State.DELETING
    setup.catalog.bury(TOPIC, NAME, token, certain=True)
    assert setup.state(NAME) is None
    assert setup.catalog.retire(TOPIC, 1, first) is None


def test_a_retired_object_that_was_never_verified_does_not_hold_up_those_behind_it(
    setup: Setup,
) -> None:
    first, second = setup.add(0, 9), setup.add(10, 19)
    setup.catalog.retire(TOPIC, 1, first)
    record = setup.record()
    assert record.start_offset <= record.verified <= record.tail
    assert setup.catalog.mark_verified(TOPIC, second).verified == 20


def test_retiring_crosses_a_lost_range_and_can_leave_nothing(setup: Setup) -> None:
    first = setup.add(0, 9)
    setup.create(tail=50, verified=50, lost=((10, 50),))
    setup.catalog.retire(TOPIC, None, first)
    record = setup.record()
    assert (record.start_offset, record.verified, record.tail) == (50, 50, 50)
    assert setup.chain() == []


def test_a_fenced_owner_retires_nothing(setup: Setup) -> None:
    first = setup.add(0, 9)
    setup.create(epoch=2, tail=10)
    with pytest.raises(TopicFenced):
        setup.catalog.retire(TOPIC, 1, first)
    assert setup.chain() == [(0, 9)]


def test_of_two_who_retire_an_object_one_gets_the_token(setup: Setup) -> None:
    first = setup.add(0, 9)
    setup.add(10, 19)
    tokens: list[str | None] = []

    def other(operation: str) -> None:
        if operation == "commit":
            setup.kv.before = None
            tokens.append(setup.catalog.retire(TOPIC, None, first))

    setup.kv.before = other
    tokens.append(setup.catalog.retire(TOPIC, None, first))
    assert [token is None for token in tokens] == [False, True]
    assert setup.chain() == [(10, 19)]


def test_a_retirement_whose_answer_was_lost_leaves_a_key_to_be_swept(setup: Setup) -> None:
    first = setup.add(0, 9)
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        setup.catalog.retire(TOPIC, 1, first)
    assert setup.catalog.retire(TOPIC, 1, first) is None
    assert setup.catalog.condemn(TOPIC, NAME, setup.catalog.life(TOPIC, NAME)) is not None


# ---- renewing ----


def test_a_renewed_intent_is_as_young_as_a_new_one_and_is_still_the_same(setup: Setup) -> None:
    intent = setup.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    setup.clock.advance(3600)
    assert setup.catalog.renew(TOPIC, intent)
    life = Life(State.INTENDED, 1, intent.token, setup.clock.now_ms())
    assert setup.catalog.life(TOPIC, NAME) == life
    assert setup.catalog.put_object_descriptor(TOPIC, intent, descriptor_of(0, 9)).tail == 10


def test_a_sweep_that_looked_before_an_intent_was_renewed_takes_nothing(setup: Setup) -> None:
    intent = setup.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    seen = setup.catalog.life(TOPIC, NAME)
    setup.clock.advance(3600)
    assert setup.catalog.renew(TOPIC, intent)
    assert setup.catalog.condemn(TOPIC, NAME, seen) is None


@pytest.mark.parametrize("state", [state for state in STATES if state is not State.INTENDED])
def test_what_is_not_intended_any_more_is_not_renewed(setup: Setup, state: State | None) -> None:
    if state is not None:
        setup.row(NAME, state)
    before = setup.catalog.life(TOPIC, NAME)
    setup.clock.advance(3600)
    assert not setup.catalog.renew(TOPIC, Intent(NAME, 1, "t"))
    assert setup.catalog.life(TOPIC, NAME) == before


def test_an_intent_that_somebody_took_over_is_not_renewed(setup: Setup) -> None:
    first = setup.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    second = setup.catalog.intend(TOPIC, 1, ObjectName(0, 9))
    assert first.object_id == second.object_id
    assert not setup.catalog.renew(TOPIC, first)
    assert setup.catalog.renew(TOPIC, second)
