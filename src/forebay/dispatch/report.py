"""What a server tells of its subscriptions: their state in memory, and that of the catalog.

A topic whose subscriptions are loaded is told from memory, which is ahead of the catalog. Another
one is told from the catalog, and nothing is opened for it.

Beware: this runs on threads, while the event loop changes what it reads. `steady` reads again if it
notices that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from forebay.catalog.records import TopicRecord
from forebay.dispatch.registry import LoadedTopic, Registry
from forebay.dispatch.subscription import Subscription
from forebay.format.cursor import Cursor
from forebay.format.subscription import SubscriptionRow
from forebay.topic.lag import Lags, SeenLog
from forebay.topic.store import Topic
from forebay.topic.subscription_facts import (
    RANGES_LISTED,
    SUBSCRIPTIONS_LISTED,
    ConsumerFacts,
    SubscriptionFacts,
    facts_of,
    stored_subscriptions,
)
from forebay.topic.view import TopicView

_Value = TypeVar("_Value")
_TRIES: Final = 1000


def steady(read: Callable[[], _Value]) -> _Value:
    """Returns what `read` returns; calls it again if it found something in the middle of a change.

    Python notices when a dictionary or a set changes while it is iterated over.
    """
    for _ in range(_TRIES):
        try:
            return read()
        except RuntimeError:
            continue
    return read()


def subscriptions_of(
    registry: Registry, view: TopicView, only: str | None = None
) -> tuple[list[SubscriptionFacts], list[str]]:
    """The subscriptions of a topic by name, and what is damaged among them.

    With `only`, the one of that name. May wait for disks and for the catalog.
    """
    loaded = registry.loaded(view.topic)
    if loaded is None:
        return stored_subscriptions(view, registry.lags, only)
    return live_subscriptions(registry.lags, loaded, view.record, only), []


def live_subscriptions(
    lags: Lags,
    loaded: LoadedTopic,
    record: TopicRecord | None,
    only: str | None = None,
    *,
    cheap: bool = False,
) -> list[SubscriptionFacts]:
    """The subscriptions of a topic that are loaded, by name. See `subscriptions_of`."""
    log, start = SeenLog.of_topic(Topic(loaded.storage)), loaded.storage.start_known
    rows = [each for each in steady(loaded.rows) if only in {None, each[0].name}]
    rows.sort(key=lambda each: each[0].name)
    return [
        _live(lags, row, subscription, log, record, start, cheap=cheap)
        for row, subscription in rows[:SUBSCRIPTIONS_LISTED]
    ]


def _live(
    lags: Lags,
    row: SubscriptionRow,
    subscription: Subscription,
    log: SeenLog,
    record: TopicRecord | None,
    start: int,
    *,
    cheap: bool,
) -> SubscriptionFacts:
    window, counts = subscription.window, subscription.counts
    cursor: Cursor = steady(window.cursor)
    found = facts_of(
        row,
        cursor,
        log,
        record,
        start,
        lags,
        cheap=cheap,
        published_ms=subscription.feed.published_ms(cursor.position),
    )
    blocked = steady(lambda: window.blocked)
    return replace(
        found,
        live=True,
        connected=steady(lambda: _connected(subscription)),
        outstanding=window.outstanding,
        waiting=window.waiting,
        delivered=steady(lambda: subscription.delivered),
        redelivered=window.counters.redelivered,
        nacked=window.counters.nacked,
        timed_out=window.counters.timed_out,
        dead_letters=window.counters.dead_letters,
        dropped=window.counters.dropped,
        blocked=tuple(blocked[:RANGES_LISTED]),
        skipped=counts.skipped,
        lost=counts.lost,
        removed=counts.removed,
        problem=subscription.problem or _blocked_problem(blocked),
    )


def _connected(subscription: Subscription) -> tuple[ConsumerFacts, ...]:
    delivered = {each.number: each.delivered for each in subscription.consumers}
    return tuple(
        ConsumerFacts(
            each.name, each.unacked, delivered.get(each.consumer, 0), each.active, each.filters
        )
        for each in subscription.window.consumers
    )


def _blocked_problem(blocked: list[int]) -> str | None:
    if not blocked:
        return None
    more = f" and {len(blocked) - 1} more" if len(blocked) > 1 else ""
    return f"the message at offset {blocked[0]}{more} failed too often: skip it, or seek"
