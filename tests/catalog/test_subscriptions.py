"""The rows of subscriptions and their cursors, on every catalog."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.cursors import read_cursor, replace_cursor
from forebay.catalog.kv import Remove
from forebay.catalog.subscriptions import (
    create_subscription,
    delete_subscription,
    put_subscription,
    read_all,
    read_subscriptions,
    subscription_cursors,
    subscription_names,
)
from forebay.errors import (
    CommitRefused,
    DescriptorError,
    TopicFenced,
    UnknownSubscription,
    UsageError,
)
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName, parse_topic, subscription_cursor
from forebay.format.subscription import ConsumerRow, SubscriptionRow
from forebay.limits import SUBSCRIPTIONS_PAGE
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend

NAME: Final = "billing/ä %"
ROW: Final = SubscriptionRow(NAME, 3, 5, (ConsumerRow(2**64 - 1, "c", ("eu-*",), 6),))
START: Final = Cursor(7, ((9, 12),))


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    setup = Setup(backend)
    setup.create()
    return setup


def create(setup: Setup, row: SubscriptionRow = ROW, topic: TopicName = TOPIC) -> None:
    assert create_subscription(setup.catalog, topic, 1, row, START, 10).created


def stored(setup: Setup, name: str = NAME) -> tuple[SubscriptionRow | None, Cursor | None]:
    """The row and the cursor of one subscription, read past all faults."""
    setup.kv.heal()
    rows = {row.name: row for row in read_subscriptions(setup.catalog, TOPIC)}
    return rows.get(name), read_cursor(setup.catalog, TOPIC, subscription_cursor(name))


def at(position: int) -> Cursor:
    return replace(START, position=position, epoch=1, updated_ms=10)


def test_a_subscription_is_created_with_its_cursor(setup: Setup) -> None:
    create(setup)
    assert stored(setup) == (ROW, at(7))
    assert list(subscription_names(setup.catalog, TOPIC)) == [NAME]
    assert list(subscription_cursors(setup.catalog, TOPIC)) == [(NAME, at(7))]


def test_a_subscription_that_is_there_stays_as_it_is(setup: Setup) -> None:
    create(setup)
    other = replace(ROW, kind=0, consumers=())
    found = create_subscription(setup.catalog, TOPIC, 1, other, Cursor(99), 20)
    assert found == (ROW, at(7), False)
    assert stored(setup) == (ROW, at(7))


def test_a_subscription_without_its_cursor_begins_at_the_start(setup: Setup) -> None:
    create(setup)
    replaced = setup.catalog.keys.cursor_row(TOPIC, subscription_cursor(NAME))
    setup.backend.kv.commit([], [Remove(replaced)])
    row, cursor, created = create_subscription(setup.catalog, TOPIC, 1, ROW, Cursor(99), 20)
    assert (row, cursor.position, created) == (ROW, 0, False)
    assert stored(setup)[1] == cursor


def test_the_subscriptions_of_all_topics_are_found_in_one_scan(setup: Setup) -> None:
    topics = [parse_topic(name) for name in ("/a/b", "/a/b-part-1", "/ä/b", "/default/orders")]
    wanted = []
    for topic in topics:
        setup.create(topic)
        for number in range(SUBSCRIPTIONS_PAGE - 2):
            row = SubscriptionRow(f"s/{number}", 1)
            create(setup, row, topic)
            wanted.append((topic, row))
    found = list(read_all(setup.catalog))
    assert len(found) == len(wanted)
    assert set(found) == set(wanted)
    rows = list(read_subscriptions(setup.catalog, parse_topic("/a/b")))
    assert {row.name for row in rows} == {f"s/{n}" for n in range(SUBSCRIPTIONS_PAGE - 2)}


def test_a_row_is_replaced_and_keeps_fields_of_a_later_release(setup: Setup) -> None:
    create(setup, replace(ROW, extra='{"later":1}'))
    after = put_subscription(setup.catalog, TOPIC, 1, replace(ROW, consumers=()))
    assert after == replace(ROW, consumers=(), extra='{"later":1}')
    assert stored(setup)[0] == after
    with pytest.raises(UnknownSubscription, match="has no subscription 'other'"):
        put_subscription(setup.catalog, TOPIC, 1, SubscriptionRow("other", 1))


def test_a_subscription_goes_with_its_cursor(setup: Setup) -> None:
    create(setup)
    create(setup, SubscriptionRow("other", 1))
    assert delete_subscription(setup.catalog, TOPIC, 1, NAME)
    assert stored(setup) == (None, None)
    assert not delete_subscription(setup.catalog, TOPIC, 1, NAME)
    assert stored(setup, "other")[1] == at(7)


def test_a_cursor_without_a_row_is_not_written(setup: Setup) -> None:
    name = subscription_cursor(NAME)
    assert replace_cursor(setup.catalog, TOPIC, 1, name, Cursor(1), 0) is None
    assert stored(setup) == (None, None)
    create(setup)
    assert replace_cursor(setup.catalog, TOPIC, 1, name, Cursor(2), 20) == Cursor(2, (), 1, 20)
    assert stored(setup)[1] == Cursor(2, (), 1, 20), "it moves back"


def test_an_owner_of_an_older_epoch_changes_no_subscription(setup: Setup) -> None:
    create(setup)
    setup.create(epoch=2)
    for change in CHANGES.values():
        with pytest.raises(TopicFenced):
            change(setup)
    assert stored(setup) == (ROW, at(7))
    with pytest.raises(CommitRefused, match="no such topic"):
        create_subscription(setup.catalog, parse_topic("none"), 1, ROW, START, 0)


def test_a_damaged_row_is_named_and_can_be_left_out(setup: Setup) -> None:
    create(setup)
    key = setup.catalog.keys.subscription(TOPIC, "bad")
    for value in (b"{", b'{"kind":1,"name":"another"}'):
        setup.put(key, value)
        with pytest.raises(DescriptorError, match="orders/bad"):
            list(read_all(setup.catalog))
        errors: list[DescriptorError] = []
        assert list(read_all(setup.catalog, errors.append)) == [(TOPIC, ROW)]
        assert len(errors) == 1
        assert set(subscription_names(setup.catalog, TOPIC)) == {NAME, "bad"}


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_a_name_that_cannot_be_one_is_refused(setup: Setup, name: str) -> None:
    row = SubscriptionRow(name, 1)
    for change in (
        lambda: create_subscription(setup.catalog, TOPIC, 1, row, START, 0),
        lambda: put_subscription(setup.catalog, TOPIC, 1, row),
        lambda: delete_subscription(setup.catalog, TOPIC, 1, name),
    ):
        with pytest.raises(UsageError, match=r"the name of a subscription|the name is"):
            change()


def test_the_longest_name_is_stored(setup: Setup) -> None:
    name = "/" * 256
    create(setup, SubscriptionRow(name, 1))
    assert stored(setup, name)[1] == at(7)


# ---- killed at every call of the catalog --------------------------------------------------------


class Killed(BaseException):
    """The process ends here: nothing of it runs any more."""


def kill_at(call: int, calls: Iterator[int], _operation: str) -> None:
    if next(calls) == call:
        raise Killed


def _create(setup: Setup) -> None:
    create_subscription(setup.catalog, TOPIC, 1, ROW, START, 10)


def _delete(setup: Setup) -> None:
    delete_subscription(setup.catalog, TOPIC, 1, NAME)


def _reset(setup: Setup) -> None:
    replace_cursor(setup.catalog, TOPIC, 1, subscription_cursor(NAME), at(3), 10)


def _put(setup: Setup) -> None:
    put_subscription(setup.catalog, TOPIC, 1, replace(ROW, kind=1))


CHANGES: Final[dict[str, Callable[[Setup], None]]] = {
    "create": _create,
    "reset": _reset,
    "put": _put,
    "delete": _delete,
}
AFTER: Final = {
    "create": (ROW, at(7)),
    "reset": (ROW, at(3)),
    "put": (replace(ROW, kind=1), at(7)),
    "delete": (None, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_at_any_call_leaves_the_old_or_the_new_state(setup: Setup, change: str) -> None:
    for call in itertools.count(1):
        _delete(setup)
        if change != "create":
            create(setup)
        before = stored(setup)
        calls = itertools.count(1)
        setup.kv.before = partial(kill_at, call, calls)
        try:
            CHANGES[change](setup)
        except Killed:
            setup.kv.before = None
            assert stored(setup) == before, "the commit is the last call"
            CHANGES[change](setup)
            assert stored(setup) == AFTER[change], "it can be repeated"
        else:
            setup.kv.before = None
            assert stored(setup) == AFTER[change]
            assert call > 2, "there were calls to be killed at"
            return


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("operation", ["get", "commit"])
@pytest.mark.parametrize("applied", [False, True])
def test_a_lost_response_at_any_call_leaves_the_old_or_the_new_state(
    setup: Setup, change: str, operation: str, applied: bool
) -> None:
    for call in range(1, 5):
        _delete(setup)
        if change != "create":
            create(setup)
        before = stored(setup)
        setup.kv.fail(operation, at=call, times=3, applied=applied)
        try:
            CHANGES[change](setup)
        except Exception:  # noqa: BLE001  # of the test's faults
            assert stored(setup) in (before, AFTER[change])
            CHANGES[change](setup)
        assert stored(setup) == AFTER[change]
