"""`SubscriptionGauges`: the gauges of the subscriptions of a server.

They are computed when the metrics are requested, on a thread. Those of subscriptions that are
loaded come from memory. A subscription that nobody has used since the server started is not loaded,
and matters most: nobody reads what it keeps. Its cursor is read from the catalog, now and then.

Offsets that are recorded as lost count as messages here, because the catalog is not asked for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby, islice
from operator import itemgetter
from typing import Final, NamedTuple

from forebay import metrics as process_metrics
from forebay.catalog.catalog import Catalog
from forebay.catalog.subscriptions import read_all, subscription_cursors
from forebay.dispatch import metrics
from forebay.dispatch.registry import Registry
from forebay.dispatch.report import live_subscriptions
from forebay.errors import ForebayError
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName
from forebay.format.subscription import SubscriptionRow
from forebay.topic.lag import SeenLog
from forebay.topic.store import Store
from forebay.topic.subscription_facts import SubscriptionFacts, facts_of

SHOWN_MAX: Final = 1000
"""The subscriptions that are reported. Each takes ten lines."""
_STORED_SECONDS: Final = 60.0
"""How often the catalog is read for subscriptions that are not loaded."""


class _Stored(NamedTuple):
    topic: TopicName
    row: SubscriptionRow
    cursor: Cursor


class SubscriptionGauges:
    """Sets the gauges of one server, as long as this object exists."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._stored: list[_Stored] = []
        self._read_at: float | None = None
        process_metrics.collect_from(self)

    def collect(self) -> None:
        shown = 0
        for topic, facts in self._all():
            shown += 1
            if shown <= SHOWN_MAX:
                _show(topic, facts)
        metrics.NOT_SHOWN.add(max(shown - SHOWN_MAX, 0))

    def _all(self) -> Iterator[tuple[str, SubscriptionFacts]]:
        for topic in self._registry.topics():
            name = topic.storage.name
            for facts in live_subscriptions(self._registry.lags, topic, None, cheap=True):
                yield name, facts
        self._read_stored()
        for name_of_topic, rows in groupby(self._stored, key=itemgetter(0)):
            opened = self._store.opened(str(name_of_topic))
            if opened is not None and self._registry.loaded(name_of_topic) is None:
                log, start = SeenLog.of_topic(opened), opened.start_known
                for each in rows:
                    yield (
                        opened.name,
                        facts_of(
                            each.row, each.cursor, log, None, start, self._registry.lags, cheap=True
                        ),
                    )

    def _read_stored(self) -> None:
        now, catalog = time.monotonic(), self._store.catalog
        if catalog is None or (self._read_at is not None and now - self._read_at < _STORED_SECONDS):
            return
        self._read_at = now
        try:
            self._stored = _read(catalog)
        except ForebayError:
            return  # the catalog is away; others say so


def _read(catalog: Catalog) -> list[_Stored]:
    found: list[_Stored] = []
    rows = islice(read_all(catalog, lambda _error: None), SHOWN_MAX)
    for topic, group in groupby(rows, key=itemgetter(0)):
        cursors = dict(subscription_cursors(catalog, topic))
        found += [_Stored(topic, row, cursors[row.name]) for _, row in group if row.name in cursors]
    return found


def _show(topic: str, facts: SubscriptionFacts) -> None:
    labels = (topic, facts.name)
    metrics.POSITION.set(facts.position, *labels)
    metrics.LAG.set(facts.lag, *labels)
    metrics.LAG_BYTES.set(facts.lag_bytes, *labels)
    if facts.lag_seconds is not None:
        metrics.LAG_SECONDS.set(round(facts.lag_seconds, 3), *labels)
    metrics.OUTSTANDING.set(facts.outstanding, *labels)
    metrics.CONSUMERS.set(len(facts.connected), *labels)
    metrics.DELIVERED.set(facts.delivered, *labels)
    metrics.REDELIVERED.set(facts.redelivered, *labels)
    metrics.FAILING.set(int(facts.problem is not None), *labels)
