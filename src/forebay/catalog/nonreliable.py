"""The topics that are not stored: their messages go to whoever listens, and nowhere else.

    <root>/nonreliable/<namespace>/<topic>     {"created_ms":1790000000000}

Such a topic has no log, no objects and no record; its row says that it exists. A name is of one
kind: a row is created only where there is no record, in a transaction that compares both, and
`forebay.catalog.ownership` creates a record only where there is no row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.catalog.records import Deletion, TopicRecord, decode_json, decode_record
from forebay.errors import DescriptorError, ServiceUnavailable, TopicKindConflict
from forebay.format.names import TopicName, after_prefix
from forebay.limits import CATALOG_PAGE, OFFSET_MAX, SUBSCRIPTIONS_PAGE

_NEXT_KEY: Final = "\1"
_TRIES: Final = 100


class NonReliableTopic(NamedTuple):
    name: TopicName
    created_ms: int
    """Milliseconds since 1970."""


def create_nonreliable(catalog: Catalog, topic: TopicName, now_ms: int) -> NonReliableTopic:
    """Creates the topic; if it exists, returns what is there.

    Raises TopicKindConflict if there is a stored topic of this name.
    """
    key, record = catalog.keys.nonreliable(topic), catalog.keys.record(topic)
    value = json.dumps({"created_ms": now_ms}, separators=(",", ":")).encode()
    for _ in range(_TRIES):
        found = find_nonreliable(catalog, topic)
        if found is not None:
            return found
        stored = catalog.kv.get(record)
        if stored is not None and not _may_follow(stored):
            raise TopicKindConflict(
                f"{topic} is a stored topic; use it as a reliable one, or choose another name"
            )
        compares = [Compare(key, ABSENT), Compare(record, stored.revision if stored else ABSENT)]
        if catalog.kv.commit(compares, [Put(key, value)]) is not None:
            return NonReliableTopic(topic, now_ms)
    raise _contended(catalog, topic)


def _may_follow(stored: Entry) -> bool:
    """Whether the record is that of a topic whose deletion is finished."""
    record = decode_record(stored.value, TopicRecord, stored.key)
    return record.is_deleted and record.deletion is Deletion.DELETED


def find_nonreliable(catalog: Catalog, topic: TopicName) -> NonReliableTopic | None:
    """Returns the topic; None if there is no such one, which says nothing about stored ones."""
    entry = catalog.kv.get(catalog.keys.nonreliable(topic))
    return None if entry is None else _decoded(topic, entry)


def require_not_nonreliable(catalog: Catalog, topic: TopicName) -> None:
    """Raises TopicKindConflict if a topic of this name exists that is not stored."""
    if catalog.kv.get(catalog.keys.nonreliable(topic)) is not None:
        raise TopicKindConflict(
            f"{topic} is a non-reliable topic, which is not stored; use it as one, delete it, or "
            "choose another name"
        )


def nonreliable_topics(catalog: Catalog) -> Iterator[NonReliableTopic]:
    """Yields the topics that are not stored, ordered by the key, reading a page at a time."""
    prefix = catalog.keys.nonreliable_topics()
    at, end = prefix, after_prefix(prefix)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            topic = catalog.keys.nonreliable_of(entry.key)
            if topic is None:
                raise DescriptorError(f"{entry.key} is not the key of a topic")
            yield _decoded(topic, entry)
        at = page[-1].key + _NEXT_KEY


def delete_nonreliable(catalog: Catalog, topic: TopicName) -> bool:
    """Deletes the topic, after the rows of its subscriptions; returns whether it was there.

    Each transaction compares the topic's row: a stored topic of the same name keeps its own.
    """
    key, prefix = catalog.keys.nonreliable(topic), catalog.keys.subscriptions(topic)
    for _ in range(_TRIES):
        entry = catalog.kv.get(key)
        if entry is None:
            return False
        there = Compare(key, entry.revision)
        end = after_prefix(prefix)
        while rows := catalog.kv.range(prefix, end, limit=SUBSCRIPTIONS_PAGE):
            if catalog.kv.commit([there], [Remove(row.key) for row in rows]) is None:
                break
        if not rows and catalog.kv.commit([there], [Remove(key)]) is not None:
            return True
    raise _contended(catalog, topic)


def _decoded(topic: TopicName, entry: Entry) -> NonReliableTopic:
    body = decode_json(entry.value, entry.key)
    created = body.get("created_ms", 0) if isinstance(body, dict) else None
    if type(created) is not int or not 0 <= created <= OFFSET_MAX:
        raise DescriptorError(f"{entry.key} is not the row of a topic")
    return NonReliableTopic(topic, created)


def _contended(catalog: Catalog, topic: TopicName) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"{topic}: other processes kept creating and deleting it in {catalog.name}; try again"
    )
