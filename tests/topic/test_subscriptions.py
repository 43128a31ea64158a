"""Subscriptions of a topic: they and their cursors survive restarts and lost responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.cursors import read_cursor
from forebay.catalog.kv import Put
from forebay.catalog.subscriptions import read_subscriptions
from forebay.config import settings_from
from forebay.errors import (
    ForebayError,
    OffsetOutOfRange,
    ServiceUnavailable,
    TooManySubscriptions,
    TopicFenced,
    UnknownSubscription,
    UsageError,
)
from forebay.format.cursor import Cursor
from forebay.format.names import subscription_cursor
from forebay.format.subscription import ConsumerRow, SubscriptionRow, encode_subscription
from forebay.limits import SUBSCRIPTIONS_MAX
from forebay.settings import MetadataSettings, StoreSettings, UploaderSettings
from forebay.testing.kv import FaultKv
from forebay.topic.describe import describe
from forebay.topic.storage import WalStorage
from forebay.topic.store import Store, Topic, open_store
from forebay.topic.view import StoreView
from support.catalogs import TOPIC
from support.cli_runs import done
from support.disks import wait_until
from support.kv_stores import BACKENDS, Backend, requested_backend
from support.storages import storage_of

ROW: Final = SubscriptionRow("billing", 1, 5, (ConsumerRow(7, "c", (), 6),))
HOUR: Final = 3600.0
Stored = tuple[SubscriptionRow | None, int | None]


@dataclass
class Opened:
    """A topic of 100 messages with a catalog that can fail."""

    kv: FaultKv
    prefix: str
    path: Path
    flush_seconds: float = HOUR

    def __post_init__(self) -> None:
        self.open()
        self.topic.append_many([b"m"] * 100, durability="synced")

    def open(self) -> None:
        settings = StoreSettings(
            data=self.path,
            uploader=UploaderSettings(enabled=False),
            metadata=MetadataSettings(progress_flush_interval_seconds=self.flush_seconds),
        )
        self.catalog = Catalog(self.kv, self.prefix)
        self.store = Store(settings, catalog=self.catalog)

    @property
    def topic(self) -> Topic:
        return self.store.topic(str(TOPIC))

    @property
    def storage(self) -> WalStorage:
        return storage_of(self.topic)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def create(self, position: int = 10) -> None:
        self.storage.create_subscription(ROW, Cursor(position))

    def stored(self) -> Stored:
        """The row and the position, as the catalog has them."""
        rows = {row.name: row for row in read_subscriptions(self.catalog, TOPIC)}
        cursor = read_cursor(self.catalog, TOPIC, subscription_cursor("billing"))
        return rows.get("billing"), None if cursor is None else cursor.position

    def position(self) -> int:
        return self.storage.subscription_cursor("billing").position


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def opened(backend: Backend, tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(_Kept(backend.kv), backend.prefix, tmp_path / "data")
    yield opened
    opened.kv.heal()
    opened.store.close()


class _Kept(FaultKv):
    """Stays open when a store is closed, so that the next one can use it."""

    def close(self) -> None:
        """Left to the test."""


def test_a_subscription_survives_a_restart(opened: Opened) -> None:
    assert opened.storage.create_subscription(ROW, Cursor(10, ((12, 14),)))[0] == ROW
    opened.storage.put_cursor("billing", Cursor(40, ((50, 60),)))
    assert opened.stored() == (ROW, 10), "the catalog gets it later"
    opened.reopen()
    assert opened.stored() == (ROW, 40)
    assert opened.storage.subscriptions() == [ROW]
    found = opened.storage.subscription_cursor("billing")
    assert (found.position, found.ranges) == (40, ((50, 60),))


def test_a_cursor_that_was_put_is_written_after_the_interval(
    backend: Backend, tmp_path: Path
) -> None:
    opened = Opened(_Kept(backend.kv), backend.prefix, tmp_path / "data", 0.01)
    opened.create(0)
    for position in (3, 7, 90):
        opened.storage.put_cursor("billing", Cursor(position))
        wait_until(lambda: opened.stored()[1] == position)  # noqa: B023
    opened.store.close()


def test_a_subscription_that_exists_keeps_what_was_acknowledged(opened: Opened) -> None:
    opened.create()
    opened.storage.put_cursor("billing", Cursor(30))
    other = SubscriptionRow("billing", 2)
    row, cursor = opened.storage.create_subscription(other, Cursor(90))
    assert (row, cursor.position) == (ROW, 30), "what was put and not written yet"
    opened.reopen()
    row, cursor = opened.storage.create_subscription(other, Cursor(90))
    assert (row, cursor.position) == (ROW, 30)


def test_a_reset_moves_back_and_is_written_at_once(opened: Opened) -> None:
    opened.create()
    opened.storage.put_cursor("billing", Cursor(60))
    opened.storage.flush_cursors()
    opened.storage.reset_cursor("billing", Cursor(5))
    assert (opened.stored()[1], opened.position()) == (5, 5)
    opened.storage.flush_cursors()
    assert opened.stored()[1] == 5
    opened.storage.put_cursor("billing", Cursor(6))
    opened.reopen()
    assert (opened.stored()[1], opened.position()) == (6, 6)


def test_a_reset_that_comes_during_a_flush_is_not_undone(opened: Opened) -> None:
    opened.create()
    opened.storage.put_cursor("billing", Cursor(60))
    storage = opened.storage
    resetting = threading.Thread(target=storage.reset_cursor, args=("billing", Cursor(5)))

    def begin(operation: str) -> None:
        if operation == "commit":
            opened.kv.before = None
            resetting.start()

    opened.kv.before = begin
    storage.flush_cursors()
    resetting.join()
    assert (opened.stored()[1], opened.position()) == (5, 5)


def test_a_flush_that_comes_during_a_reset_does_not_undo_it(opened: Opened) -> None:
    opened.create()
    storage = opened.storage
    flushing = threading.Thread(target=storage.flush_cursors)

    def begin(operation: str) -> None:
        if operation == "commit":
            opened.kv.before = None
            storage.put_cursor("billing", Cursor(60))
            flushing.start()

    opened.kv.before = begin
    storage.reset_cursor("billing", Cursor(5))
    flushing.join()
    assert (opened.stored()[1], opened.position()) == (5, 5)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("target", [5, 90])
def test_after_a_reset_without_a_response_the_next_flush_writes_what_is_in_effect(
    opened: Opened, applied: bool, target: int
) -> None:
    opened.create(50)
    storage = opened.storage
    opened.kv.fail("commit", times=3, applied=applied)
    with pytest.raises(ServiceUnavailable):
        storage.reset_cursor("billing", Cursor(target))
    assert opened.position() == 50
    assert opened.stored()[1] == (target if applied else 50)
    storage.flush_cursors()
    assert opened.stored()[1] == 50, "the catalog is not ahead of what was acknowledged"
    storage.reset_cursor("billing", Cursor(target))
    assert (opened.stored()[1], opened.position()) == (target, target)


def test_a_response_that_is_lost_once_does_not_fail_a_change(opened: Opened) -> None:
    opened.kv.fail("commit", applied=True)
    opened.create()
    assert opened.stored() == (ROW, 10)
    opened.kv.fail("commit", applied=True)
    opened.storage.reset_cursor("billing", Cursor(3))
    assert (opened.stored()[1], opened.position()) == (3, 3)
    opened.kv.fail("commit", applied=True)
    assert opened.storage.delete_subscription("billing")
    assert opened.stored() == (None, None)


@pytest.mark.parametrize("change", ["create", "reset", "delete"])
@pytest.mark.parametrize("operation", ["get", "range", "commit"])
def test_a_catalog_that_fails_at_any_call_leaves_the_old_or_the_new_state(
    opened: Opened, change: str, operation: str
) -> None:
    storage = opened.storage
    changes: dict[str, tuple[Callable[[], object], Stored]] = {
        "create": (opened.create, (ROW, 10)),
        "reset": (lambda: storage.reset_cursor("billing", Cursor(3)), (ROW, 3)),
        "delete": (lambda: storage.delete_subscription("billing"), (None, None)),
    }
    run, after = changes[change]
    for call in range(1, 4):
        storage.delete_subscription("billing")
        if change != "create":
            opened.create()
        before = opened.stored()
        opened.kv.fail(operation, at=call, times=3, applied=operation == "commit")
        try:
            run()
        except ForebayError:
            opened.kv.heal()
            assert opened.stored() in (before, after)
            run()
        opened.kv.heal()
        storage.flush_cursors()
        assert opened.stored() == after


def test_nothing_brings_a_deleted_subscription_back(opened: Opened) -> None:
    opened.create()
    opened.storage.put_cursor("billing", Cursor(20))
    assert opened.storage.delete_subscription("billing")
    opened.storage.put_cursor("billing", Cursor(30))
    opened.storage.flush_cursors()
    assert opened.stored() == (None, None)
    with pytest.raises(UnknownSubscription, match="has no subscription 'billing'"):
        opened.storage.subscription_cursor("billing")
    assert not opened.storage.delete_subscription("billing")
    opened.reopen()
    opened.storage.put_cursor("billing", Cursor(30))  # before the cursors were read
    opened.storage.flush_cursors()
    assert opened.stored() == (None, None)
    opened.create(40)
    assert (opened.stored(), opened.position()) == ((ROW, 40), 40)


def test_a_subscription_that_is_created_again_begins_where_it_is_told_to(opened: Opened) -> None:
    opened.create(10)
    opened.kv.fail("commit", applied=True)
    opened.kv.fail("get", at=4, times=2)  # the attempts to find out
    with pytest.raises(ServiceUnavailable):
        opened.storage.delete_subscription("billing")
    opened.create(70)
    assert (opened.stored(), opened.position()) == ((ROW, 70), 70)


def test_a_row_is_updated(opened: Opened) -> None:
    opened.create()
    after = SubscriptionRow("billing", 3, 5, ())
    assert opened.storage.update_subscription(after) == after
    assert opened.stored() == (after, 10)
    with pytest.raises(UnknownSubscription):
        opened.storage.update_subscription(SubscriptionRow("other", 1))


def test_an_owner_that_was_fenced_changes_no_subscription(opened: Opened) -> None:
    opened.create()
    storage = opened.storage
    opened.catalog.update(
        TOPIC, None, lambda record: Change(replace(record, epoch=record.epoch + 1))
    )
    with pytest.raises(TopicFenced):
        storage.reset_cursor("billing", Cursor(3))
    assert opened.stored() == (ROW, 10)
    assert storage.wal.ended, "the log takes no more appends either"


def test_a_cursor_beyond_the_log_is_refused(opened: Opened) -> None:
    with pytest.raises(OffsetOutOfRange):
        opened.create(101)
    opened.create(100)
    with pytest.raises(OffsetOutOfRange):
        opened.storage.reset_cursor("billing", Cursor(0, ((100, 102),)))
    with pytest.raises(OffsetOutOfRange):
        opened.storage.put_cursor("billing", Cursor(101))


def test_a_cursor_waits_until_its_messages_are_synced(opened: Opened) -> None:
    opened.create()
    last = opened.topic.append(b"m")
    opened.storage.put_cursor("billing", Cursor(last + 1))
    assert opened.topic.watermarks().synced == last + 1


def test_a_topic_has_a_limited_number_of_subscriptions(tmp_path: Path) -> None:
    backend = BACKENDS["memory"](tmp_path)
    opened = Opened(_Kept(backend.kv), backend.prefix, tmp_path / "data")
    keys = opened.catalog.keys
    for first in range(0, SUBSCRIPTIONS_MAX, 100):
        names = [f"s{number}" for number in range(first, first + 100)]
        rows = [(name, encode_subscription(SubscriptionRow(name, 1))) for name in names]
        opened.kv.commit([], [Put(keys.subscription(TOPIC, name), row) for name, row in rows])
    with pytest.raises(TooManySubscriptions, match="has 10000 subscriptions"):
        opened.create()
    assert opened.stored() == (None, None)
    assert opened.storage.delete_subscription("s0")
    opened.create()
    opened.store.close()


# ---- the public interface ----


def test_a_subscription_is_shown_with_its_lag(opened: Opened) -> None:
    opened.storage.create_subscription(ROW, Cursor(10, ((20, 30),)))
    (shown,) = opened.topic.subscriptions()
    assert (shown.name, shown.type, shown.created_ms) == ("billing", "shared", 5)
    assert (shown.cursor.position, shown.cursor.ranges) == (10, ((20, 30),))
    assert shown.consumers == ROW.consumers
    assert shown.lag == 80
    opened.catalog.update(TOPIC, None, lambda record: Change(record.with_lost(25, 40)))
    assert opened.topic.subscriptions()[0].lag == 70, "lost messages are not counted"


def test_describe_shows_subscriptions_and_does_not_list_their_cursors_twice(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with open_store(data) as store:
        topic = store.topic("orders")
        topic.append_many([b"m"] * 20, durability="synced")
        storage = storage_of(topic)
        storage.ack_checkpoint(3)
        storage.create_subscription(ROW, Cursor(5, ((8, 10),)))
        storage.create_subscription(SubscriptionRow("audit", 0), Cursor(20))
    with StoreView(settings_from(data)) as views:
        facts = describe(views.topic("orders"))
    assert [each.name for each in facts.cursors] == ["checkpoint"]
    audit, billing = facts.subscriptions
    assert (audit.name, audit.type, audit.lag, audit.consumers) == ("audit", "exclusive", 0, 0)
    assert (billing.position, billing.ranges, billing.lag, billing.consumers) == (5, 1, 13, 1)
    said = done("describe", "orders", "--data", data)
    assert (
        "subscription billing: shared, acknowledged before 5, and 1 ranges after it; lag 13 "
        "messages, "
    ) in said
    assert (
        "subscription audit: exclusive, acknowledged before 20; lag 0 messages; no consumer" in said
    )
    shown = json.loads(done("describe", "orders", "--data", data, "--json"))
    assert [each["name"] for each in shown["subscriptions"]] == ["audit", "billing"]
    assert shown["subscriptions"][1]["lag"] == 13


def test_describe_names_a_damaged_subscription(opened: Opened) -> None:
    opened.create()
    opened.kv.commit([], [Put(opened.catalog.keys.subscription(TOPIC, "later"), b"{")])
    with opened.store.view() as views:
        facts = describe(views.topic("orders"))
    assert [each.name for each in facts.subscriptions] == ["billing"]
    assert "orders/later" in facts.problems[0]


def test_a_seek_moves_anywhere_in_the_topic(opened: Opened) -> None:
    opened.create()
    topic = opened.topic
    now = datetime.now(UTC)
    moves = [
        (42, 42),
        ("earliest", 0),
        ("latest", 100),
        (now - timedelta(days=1), 0),
        (100, 100),
        (0, 0),
        (now + timedelta(days=1), 100),
    ]
    for start, wanted in moves:
        assert topic.seek("billing", start) == wanted  # type: ignore[arg-type]
        assert (opened.stored()[1], opened.position()) == (wanted, wanted)
    for bad in (-1, "first", 1.5, None):
        with pytest.raises(UsageError):
            topic.seek("billing", bad)  # type: ignore[arg-type]
    with pytest.raises(OffsetOutOfRange):
        topic.seek("billing", 101)
    with pytest.raises(UnknownSubscription):
        topic.seek("other", 0)
    assert opened.position() == 100


def test_a_subscription_is_deleted_once(opened: Opened) -> None:
    opened.create()
    opened.topic.delete_subscription("billing")
    assert opened.topic.subscriptions() == []
    with pytest.raises(UnknownSubscription, match="has no subscription 'billing'"):
        opened.topic.delete_subscription("billing")


def test_a_topic_in_memory_has_subscriptions_in_memory() -> None:
    with open_store(None) as store:
        topic = store.topic("orders")
        topic.append_many([b"m"] * 10, durability="synced")
        storage = storage_of(topic)
        storage.create_subscription(ROW, Cursor(2))
        assert storage.create_subscription(ROW, Cursor(9))[1].position == 2
        storage.put_cursor("billing", Cursor(4))
        assert [each.lag for each in topic.subscriptions()] == [6]
        assert topic.seek("billing", 1) == 1
        assert storage.subscription_cursor("billing") == Cursor(1)
        storage.update_subscription(SubscriptionRow("billing", 3))
        assert topic.subscriptions()[0].type == "key-shared"
        topic.delete_subscription("billing")
        storage.put_cursor("billing", Cursor(4))
        assert topic.cursors() == {}
        with pytest.raises(UnknownSubscription):
            topic.seek("billing", 1)
        with pytest.raises(UnknownSubscription):
            storage.update_subscription(ROW)
