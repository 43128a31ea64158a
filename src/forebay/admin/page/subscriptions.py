"""The subscriptions of a topic as the page shows them, cheap to read repeatedly.

Those that the server has loaded come from memory. Others are read from the catalog, every few
seconds. A topic with many shows those with a problem, and those that are furthest behind.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Annotated, Final

from msgspec import Meta

from forebay.admin.page.topic_states import TOPICS_CACHED_MAX, TopicState
from forebay.admin.records import Count, Record
from forebay.dispatch.registry import Registry
from forebay.dispatch.report import live_subscriptions
from forebay.errors import ForebayError
from forebay.format.names import parse_topic
from forebay.topic.store import Store
from forebay.topic.subscription_facts import SubscriptionFacts, stored_subscriptions

ROWS_MAX: Final = 20
"""Subscriptions of one topic."""
_NAMES_MAX: Final = 5
_STORED_SECONDS: Final = 5.0


class SubscriptionLine(Record, frozen=True):
    """A subscription."""

    name: str
    type: str
    live: bool
    connected: Count
    consumers: Annotated[
        list[str], Meta(description="The names of the first ones that are connected.")
    ]
    position: Count
    lag: Annotated[Count, Meta(description="Messages that are not acknowledged.")]
    lag_bytes: Count
    lag_seconds: float | None
    outstanding: Count
    redelivered: Count
    dead_letters: Count
    problem: str | None


class PageSubscriptions:
    """One thread reads at a time."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._stored: OrderedDict[str, tuple[float, list[SubscriptionFacts]]] = OrderedDict()

    def rows(self, state: TopicState) -> tuple[list[SubscriptionLine], int]:
        """Returns the lines of a topic by name, and how many subscriptions it has."""
        loaded = self._registry.loaded(parse_topic(state.name))
        if loaded is None:
            found = self._read(state.name)
        else:
            found = live_subscriptions(self._registry.lags, loaded, state.record, cheap=True)
        first = sorted(found, key=lambda each: (each.problem is None, -each.lag))[:ROWS_MAX]
        return [_line(each) for each in sorted(first, key=lambda each: each.name)], len(found)

    def _read(self, name: str) -> list[SubscriptionFacts]:
        known = self._stored.pop(name, None)
        now = time.monotonic()
        if known is None or now - known[0] >= _STORED_SECONDS:
            known = now, self._read_catalog(name, [] if known is None else known[1])
        self._stored[name] = known
        while len(self._stored) > TOPICS_CACHED_MAX:
            self._stored.popitem(last=False)
        return known[1]

    def _read_catalog(self, name: str, before: list[SubscriptionFacts]) -> list[SubscriptionFacts]:
        try:
            with self._store.view() as store, store.topic(name) as view:
                return stored_subscriptions(view, self._registry.lags, cheap=True)[0]
        except (ForebayError, OSError):
            return before  # the page says of the topic what is wrong


def _line(facts: SubscriptionFacts) -> SubscriptionLine:
    return SubscriptionLine(
        facts.name,
        facts.type,
        facts.live,
        len(facts.connected),
        [each.name for each in facts.connected[:_NAMES_MAX]],
        facts.position,
        facts.lag,
        facts.lag_bytes,
        None if facts.lag_seconds is None else round(facts.lag_seconds, 1),
        facts.outstanding,
        facts.redelivered,
        facts.dead_letters,
        facts.problem,
    )
