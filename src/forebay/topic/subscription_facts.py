"""`SubscriptionFacts`: a subscription as operators see it, at one moment.

`stored_subscriptions` reads what the catalog has, for topics that no process serves. A server
replaces what its memory knows better: `forebay.dispatch.report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.records import TopicRecord, unread_ranges
from forebay.catalog.subscriptions import read_subscriptions, subscription_cursors
from forebay.errors import DescriptorError
from forebay.format.cursor import Cursor
from forebay.format.names import TopicName
from forebay.format.subscription import SubscriptionRow
from forebay.topic.lag import Lags, SeenLog
from forebay.topic.view import TopicView

SUBSCRIPTIONS_LISTED: Final = 1000
RANGES_LISTED: Final = 100
"""Ranges of acknowledged offsets, and blocked offsets, of one subscription."""

_READ_AT_ONCE: Final = 100
"""Subscriptions of a topic whose oldest messages are read from objects, if they are there."""

Range = tuple[int, int]
"""A range of offsets, end not included."""


@dataclass(frozen=True, slots=True)
class ConsumerFacts:
    """A consumer that is connected."""

    name: str
    unacked: int
    """Messages that it has and has not acknowledged."""
    delivered: int
    """Messages that it got since it connected."""
    active: bool
    """Whether it gets messages: of an exclusive or failover subscription one does."""
    filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionFacts:
    name: str
    type: str
    """exclusive, shared, failover or key-shared."""
    position: int
    """Every message before this offset is acknowledged."""
    ranges: int
    """Ranges of acknowledged offsets after it."""
    acknowledged: tuple[Range, ...] = ()
    """The first of these ranges."""
    lag: int
    """Messages that are not acknowledged. Those that are lost or were removed do not count."""
    lag_bytes: int
    """About how many bytes they have."""
    lag_seconds: float | None
    """The age of the oldest of them; null if it is unknown."""
    consumers: int
    """Consumers that are known, connected or not."""
    created_ms: int
    updated_ms: int
    """When its cursor was written."""
    live: bool = False
    """Whether a server delivers its messages. The fields below are counted by that server, since it
    loaded the subscription."""
    connected: tuple[ConsumerFacts, ...] = ()
    outstanding: int = 0
    """Messages that consumers have and have not acknowledged."""
    waiting: int = 0
    """Messages that wait to be delivered again, or failed too often."""
    delivered: int = 0
    redelivered: int = 0
    nacked: int = 0
    timed_out: int = 0
    dead_letters: int = 0
    """Messages that were moved to the dead-letter topic."""
    dropped: int = 0
    """Messages that failed too often and were given up."""
    blocked: tuple[int, ...] = ()
    """The first offsets of messages that failed too often and stay until somebody skips them."""
    skipped: int = 0
    """Messages that an operator skipped."""
    lost: int = 0
    """Offsets that it went past because they are recorded as lost."""
    removed: int = 0
    """Offsets that it went past because retention had removed them."""
    problem: str | None = None
    """Why nothing is delivered."""


def facts_of(
    row: SubscriptionRow,
    cursor: Cursor,
    log: SeenLog,
    record: TopicRecord | None,
    start: int,
    lags: Lags,
    *,
    cheap: bool = False,
    published_ms: int | None = None,
) -> SubscriptionFacts:
    """The facts of a subscription with this cursor. `start` is the topic's oldest offset."""
    unread = unread_ranges(record or TopicRecord(), cursor, start, log.end)
    lag = lags.of(log, unread, cheap=cheap, published_ms=published_ms)
    return SubscriptionFacts(
        name=row.name,
        type=row.kind_name,
        position=cursor.position,
        ranges=len(cursor.ranges),
        acknowledged=cursor.ranges[:RANGES_LISTED],
        lag=sum(each[1] - each[0] for each in unread),
        lag_bytes=lag.bytes,
        lag_seconds=lag.seconds,
        consumers=len(row.consumers),
        created_ms=row.created_ms,
        updated_ms=cursor.updated_ms,
    )


def stored_subscriptions(
    view: TopicView,
    lags: Lags | None = None,
    only: str | None = None,
    *,
    cheap: bool = False,
) -> tuple[list[SubscriptionFacts], list[str]]:
    """The subscriptions as the catalog has them, and what is damaged among them.

    With `only`, the one of that name. For `cheap` see `Lags`.
    """
    resources = view.store.resources()
    if resources is None:
        return [], []
    lags = lags or Lags(resources.catalog, view.store.clock.now_ms)
    rows, damage = _rows(resources.catalog, view.topic, only)
    cursors = dict(subscription_cursors(resources.catalog, view.topic)) if rows else {}
    log, start = SeenLog.of_view(view), view.start_offset
    return [
        facts_of(
            row,
            cursors.get(row.name, Cursor()),
            log,
            view.record,
            start,
            lags,
            cheap=cheap or at >= _READ_AT_ONCE,
        )
        for at, row in enumerate(rows)
    ], damage


def _rows(
    catalog: Catalog, topic: TopicName, only: str | None
) -> tuple[list[SubscriptionRow], list[str]]:
    rows: list[SubscriptionRow] = []
    wanted = (row for row in read_subscriptions(catalog, topic) if only is None or row.name == only)
    try:
        # Appended one by one: those before a damaged one are shown.
        for row in islice(wanted, SUBSCRIPTIONS_LISTED):
            rows.append(row)  # noqa: PERF402
    except DescriptorError as error:
        return rows, [str(error)]
    return rows, []
