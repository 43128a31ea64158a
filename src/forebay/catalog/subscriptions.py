"""The subscriptions of topics: one row for each, and a cursor for each.

    <root>/subscriptions/<namespace>/<topic>/<name>     the row: `forebay.format.subscription`
    <topic>/cursors/sub%2F<name>                        the cursor: `forebay.format.cursor`

Both rows are created in one transaction, and removed in one: a subscription has a cursor from the
moment at which it exists. The rows of all topics are next to each other, so that one scan finds
them. Only the owner of a topic writes them: every change compares the topic's record, and with it
the epoch, and can be repeated if its response was lost.

Beware: rows are only in the catalog. A topic that was rebuilt from its bucket has no subscriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from forebay.catalog.catalog import Catalog, Change, until_known
from forebay.catalog.cursors import read_cursors
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.records import TopicRecord
from forebay.errors import DescriptorError, ServiceUnavailable, UnknownSubscription
from forebay.format.cursor import Cursor, decode_cursor_row, encode_cursor_row
from forebay.format.names import (
    TopicName,
    after_prefix,
    subscription_cursor,
    subscription_of_cursor,
)
from forebay.format.subscription import (
    SubscriptionRow,
    decode_subscription,
    encode_subscription,
)
from forebay.limits import SUBSCRIPTIONS_PAGE

_NEXT_KEY: Final = "\1"
_TRIES: Final = 100


class Subscribed(NamedTuple):
    """A subscription as the catalog has it."""

    row: SubscriptionRow
    cursor: Cursor
    created: bool
    """Whether it was not there before."""


def read_all(
    catalog: Catalog, damaged: Callable[[DescriptorError], None] | None = None
) -> Iterator[tuple[TopicName, SubscriptionRow]]:
    """Yields every subscription of every topic, ordered by the key, reading a page at a time.

    A row that cannot be decoded is passed to `damaged` as an error, or raised.
    """
    for entry in _entries(catalog, catalog.keys.all_subscriptions()):
        try:
            found = _decoded(catalog, entry)
        except DescriptorError as error:
            if damaged is None:
                raise
            damaged(error)
        else:
            yield found


def read_subscriptions(catalog: Catalog, topic: TopicName) -> Iterator[SubscriptionRow]:
    """Yields the subscriptions of a topic, ordered by the key, reading a page at a time."""
    for entry in _entries(catalog, catalog.keys.subscriptions(topic)):
        yield _decoded(catalog, entry)[1]


def subscription_names(catalog: Catalog, topic: TopicName) -> Iterator[str]:
    """Yields the names of a topic's subscriptions, those with damaged rows too."""
    for entry in _entries(catalog, catalog.keys.subscriptions(topic)):
        found = catalog.keys.subscription_of(entry.key)
        if found is not None:
            yield found[1]


def subscription_cursors(catalog: Catalog, topic: TopicName) -> Iterator[tuple[str, Cursor]]:
    """Yields the name and the cursor of each subscription of a topic, reading a page at a time."""
    prefix = catalog.keys.subscription_cursor_rows(topic)
    for name, cursor in read_cursors(catalog, topic, prefix):
        found = subscription_of_cursor(name)
        assert found is not None, "the prefix says so"
        yield found, cursor


def _entries(catalog: Catalog, prefix: str) -> Iterator[Entry]:
    at, end = prefix, after_prefix(prefix)
    while page := catalog.kv.range(at, end, limit=SUBSCRIPTIONS_PAGE):
        yield from page
        at = page[-1].key + _NEXT_KEY


def _decoded(catalog: Catalog, entry: Entry) -> tuple[TopicName, SubscriptionRow]:
    place = catalog.keys.subscription_of(entry.key)
    if place is None:
        raise DescriptorError(f"{entry.key} is not the key of a subscription")
    row = decode_subscription(entry.value, entry.key)
    if row.name != place[1]:
        raise DescriptorError(f"{entry.key} holds the subscription {row.name!r}")
    return place[0], row


def create_subscription(
    catalog: Catalog,
    topic: TopicName,
    epoch: int,
    row: SubscriptionRow,
    cursor: Cursor,
    now_ms: int,
) -> Subscribed:
    """Writes the row and the cursor, unless the subscription exists; returns what is there then.

    If only its row exists, the cursor is written with nothing acknowledged, so that no message is
    missed. Raises UsageError if the row cannot be stored, CommitRefused if the topic does not
    exist, and TopicFenced if its epoch is not `epoch`.
    """
    keys = catalog.keys
    key, cursor_key = (
        keys.subscription(topic, row.name),
        keys.cursor_row(topic, subscription_cursor(row.name)),
    )
    data = encode_subscription(row)
    found: Subscribed | None = None

    def change(record: TopicRecord) -> Change:
        nonlocal found
        entry, place = catalog.kv.get(key), catalog.kv.get(cursor_key)
        if entry is not None and place is not None:
            there = decode_subscription(entry.value, key)
            found = Subscribed(there, decode_cursor_row(place.value, cursor_key), created=False)
            return Change(record)
        start = cursor if entry is None else Cursor()
        begin = replace(start, epoch=epoch, updated_ms=now_ms)
        value = data if entry is None else entry.value
        found = Subscribed(decode_subscription(value, key), begin, created=entry is None)
        return Change(
            record,
            (Put(key, value), Put(cursor_key, encode_cursor_row(begin))),
            (_unchanged(key, entry), _unchanged(cursor_key, place)),
        )

    until_known(lambda: catalog.update(topic, epoch, change))
    assert found is not None, "the change was made"
    return found


def note_listener(catalog: Catalog, topic: TopicName, row: SubscriptionRow) -> None:
    """Writes, or adds its consumers to, the row of a subscription of a non-reliable topic.

    It has no cursor, and the topic no owner. The row lets consumers come back by their numbers.
    """
    key = catalog.keys.subscription(topic, row.name)
    for _ in range(_TRIES):
        entry = catalog.kv.get(key)
        merged = row
        if entry is not None:
            ids = {each.id for each in row.consumers}
            before = decode_subscription(entry.value, key)
            others = tuple(each for each in before.consumers if each.id not in ids)
            merged = replace(row, created_ms=before.created_ms, consumers=others + row.consumers)
        put = Put(key, encode_subscription(merged))
        if catalog.kv.commit([_unchanged(key, entry)], [put]) is not None:
            return
    raise ServiceUnavailable(f"{topic}: the row of {row.name!r} keeps changing; try again")


def put_subscription(
    catalog: Catalog, topic: TopicName, epoch: int, row: SubscriptionRow
) -> SubscriptionRow:
    """Replaces the row of a subscription, and returns it as it was written.

    It keeps fields that only a later release knows. Raises UnknownSubscription if there is no such
    subscription, UsageError if the row cannot be stored, and TopicFenced as above.
    """
    key = catalog.keys.subscription(topic, row.name)
    after = row

    def change(record: TopicRecord) -> Change:
        nonlocal after
        entry = catalog.kv.get(key)
        if entry is None:
            raise UnknownSubscription(f"{topic} has no subscription {row.name!r}")
        extra = row.extra or decode_subscription(entry.value, key).extra
        data = encode_subscription(replace(row, extra=extra))
        after = decode_subscription(data, key)
        if data == entry.value:
            return Change(record)
        return Change(record, (Put(key, data),), (Compare(key, entry.revision),))

    until_known(lambda: catalog.update(topic, epoch, change))
    return after


def delete_subscription(catalog: Catalog, topic: TopicName, epoch: int, name: str) -> bool:
    """Removes the row and the cursor; returns whether any of them was there.

    After a lost response, a call that is repeated may return False. Raises TopicFenced as above.
    """
    keys = catalog.keys
    places = (keys.subscription(topic, name), keys.cursor_row(topic, subscription_cursor(name)))
    gone = False

    def change(record: TopicRecord) -> Change:
        nonlocal gone
        entries = [entry for entry in map(catalog.kv.get, places) if entry is not None]
        gone = gone or bool(entries)
        return Change(
            record,
            tuple(Remove(entry.key) for entry in entries),
            tuple(Compare(entry.key, entry.revision) for entry in entries),
        )

    until_known(lambda: catalog.update(topic, epoch, change))
    return gone


def _unchanged(key: str, entry: Entry | None) -> Compare:
    return Compare(key, ABSENT if entry is None else entry.revision)
