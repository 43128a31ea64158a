"""`TopicSubscriptions`: the subscriptions of a topic that this process owns, and their cursors.

The catalog has a row for each subscription, and a cursor. A cursor in memory is ahead of the one in
the catalog (`forebay.topic.cursors`); the row is the same. Without a catalog both are in memory
only. `forebay.dispatch` decides what a subscription delivers; nothing here does.

Beware: everything here may ask the catalog. Call it on a thread that may wait, and that is not
interrupted (`run_aside`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.catalog.catalog import Catalog
from forebay.catalog.subscriptions import (
    create_subscription,
    delete_subscription,
    put_subscription,
    read_subscriptions,
    subscription_names,
)
from forebay.errors import TooManySubscriptions, UnknownSubscription
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName, subscription_cursor
from forebay.format.subscription import ConsumerRow, SubscriptionRow, check_subscription
from forebay.limits import SUBSCRIPTIONS_MAX
from forebay.topic.cursors import TopicCursors


@dataclass(frozen=True, slots=True)
class Subscription:
    """A subscription at one moment."""

    name: str
    type: str
    """exclusive, shared, failover or key-shared."""
    cursor: Cursor
    """What was acknowledged."""
    lag: int
    """Messages that are not acknowledged. Those that are lost or were removed do not count."""
    consumers: tuple[ConsumerRow, ...]
    """Those that are known, connected or not."""
    created_ms: int


class TopicSubscriptions:
    """The subscriptions of one topic. Thread-safe."""

    def __init__(
        self,
        topic: TopicName,
        catalog: Catalog | None,
        epoch: int,
        cursors: TopicCursors,
        now_ms: Callable[[], int],
    ) -> None:
        self._topic = topic
        self._catalog = catalog
        self._epoch = epoch
        self._cursors = cursors
        self._now_ms = now_ms
        self._names: set[str] | None = None
        """What the catalog has, once that was read. Only this process adds and removes some."""
        self._rows: dict[str, SubscriptionRow] = {}
        """Without a catalog: the rows."""

    def rows(self) -> list[SubscriptionRow]:
        """Returns the rows of all subscriptions."""
        if self._catalog is None:
            return list(self._rows.copy().values())
        return list(read_subscriptions(self._catalog, self._topic))

    def cursor(self, name: str) -> Cursor:
        """Returns what was acknowledged; raises UnknownSubscription if there is no such one."""
        found = self._cursors.known(subscription_cursor(name))
        if found is None:
            raise self._unknown(name)
        return found

    def create(self, row: SubscriptionRow, start: Cursor) -> tuple[SubscriptionRow, Cursor]:
        """Creates the subscription with a cursor; if it exists, returns what is there.

        Raises UsageError if the row cannot be stored, and TooManySubscriptions.
        """
        name = subscription_cursor(row.name)
        return self._cursors.alone(name, lambda: self._create(name, row, start))

    def _create(
        self, cursor_name: str, row: SubscriptionRow, start: Cursor
    ) -> tuple[SubscriptionRow, Cursor]:
        check_subscription(row)
        names = self._known_names()
        if row.name not in names and len(names) >= SUBSCRIPTIONS_MAX:
            raise TooManySubscriptions(
                f"{self._topic} has {len(names)} subscriptions, the most that a topic can have; "
                "delete some that nobody uses"
            )
        if self._catalog is None:
            created = row.name not in self._rows
            found, cursor = self._rows.setdefault(row.name, row), start
        else:
            found, cursor, created = create_subscription(
                self._catalog, self._topic, self._epoch, row, start, self._now_ms()
            )
            names.add(row.name)
        known = None if created else self._cursors.in_memory(cursor_name)
        if known is None:
            self._cursors.replaced(cursor_name, cursor)
        return found, known or cursor

    def _known_names(self) -> set[str]:
        if self._catalog is None:
            return set(self._rows)
        if self._names is None:
            self._names = set(subscription_names(self._catalog, self._topic))
        return self._names

    def update(self, row: SubscriptionRow) -> SubscriptionRow:
        """Replaces the row, and returns it as it is stored. Raises UnknownSubscription."""
        if self._catalog is not None:
            return put_subscription(self._catalog, self._topic, self._epoch, row)
        check_subscription(row)
        if row.name not in self._rows:
            raise self._unknown(row.name)
        self._rows[row.name] = row
        return row

    def delete(self, name: str) -> bool:
        """Removes the subscription with its cursor; returns whether it was there."""
        cursor_name = subscription_cursor(name)
        return self._cursors.alone(cursor_name, lambda: self._delete(cursor_name, name))

    def _delete(self, cursor_name: str, name: str) -> bool:
        gone = self._rows.pop(name, None) is not None
        if self._catalog is not None:
            gone = delete_subscription(self._catalog, self._topic, self._epoch, name)
            self._known_names().discard(name)
        self._cursors.replaced(cursor_name, None)
        return gone

    def reset(self, name: str, cursor: Cursor) -> None:
        """Moves the cursor, back too, and writes that at once. Raises UnknownSubscription."""
        if not self._cursors.reset(subscription_cursor(name), cursor):
            raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownSubscription:
        return UnknownSubscription(f"{self._topic} has no subscription {name[:300]!r}")
