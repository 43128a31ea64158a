"""The cursors of a topic: what its consumers acknowledged, one row for each name.

    <topic>/cursors/<name>

Only the owner of the topic writes them: a write compares the topic's record, and with it the epoch.
`write_cursor` adds to what the row has, so such a cursor never moves back. `replace_cursor` is for
an owner that knows the whole cursor: a seek may move it back. Both compare the row that they have
read, so a request that arrives late changes nothing, and one whose response was lost can be
repeated. The value: `forebay.format.cursor`.

The cursors of subscriptions are created and removed together with them, in
`forebay.catalog.subscriptions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.kv import ABSENT, Compare, Put, Remove
from forebay.catalog.records import TopicRecord
from forebay.format.cursor import Cursor, decode_cursor_row, encode_cursor_row
from forebay.format.names import TopicName, after_prefix
from forebay.limits import CATALOG_PAGE

_NEXT_KEY: Final = "\1"


def read_cursor(catalog: Catalog, topic: TopicName, name: str) -> Cursor | None:
    entry = catalog.kv.get(catalog.keys.cursor_row(topic, name))
    return None if entry is None else decode_cursor_row(entry.value, entry.key)


def write_cursor(
    catalog: Catalog, topic: TopicName, epoch: int, name: str, cursor: Cursor, now_ms: int
) -> Cursor:
    """Adds what the cursor has acknowledged to its row, and returns the row's cursor.

    Raises TopicFenced if the topic's epoch is not `epoch`.
    """
    key = catalog.keys.cursor_row(topic, name)
    after = cursor

    def change(record: TopicRecord) -> Change:
        nonlocal after
        entry = catalog.kv.get(key)
        before = Cursor() if entry is None else decode_cursor_row(entry.value, key)
        after = before.merged(cursor)
        if entry is not None and after == before:
            return Change(record)
        after = replace(after, epoch=epoch, updated_ms=now_ms)
        compare = Compare(key, entry.revision if entry else ABSENT)
        return Change(record, (Put(key, encode_cursor_row(after)),), (compare,))

    catalog.update(topic, epoch, change)
    return after


def replace_cursor(
    catalog: Catalog, topic: TopicName, epoch: int, name: str, cursor: Cursor, now_ms: int
) -> Cursor | None:
    """Writes the cursor in place of what its row has, and returns it; None if there is no row.

    It is written even if the row has the same already: requests of before that got no response
    cannot change it any more. Raises TopicFenced if the topic's epoch is not `epoch`.
    """
    key = catalog.keys.cursor_row(topic, name)
    after: Cursor | None = None

    def change(record: TopicRecord) -> Change:
        nonlocal after
        after = None
        entry = catalog.kv.get(key)
        if entry is None:
            return Change(record)
        extra = cursor.extra or decode_cursor_row(entry.value, key).extra
        after = replace(cursor, epoch=epoch, updated_ms=now_ms, extra=extra)
        put = Put(key, encode_cursor_row(after))
        return Change(record, (put,), (Compare(key, entry.revision),))

    catalog.update(topic, epoch, change)
    return after


def remove_cursor(catalog: Catalog, topic: TopicName, epoch: int, name: str) -> None:
    """Removes the row, if there is one. Raises TopicFenced if the topic's epoch is not `epoch`."""
    key = catalog.keys.cursor_row(topic, name)
    catalog.update(topic, epoch, lambda record: Change(record, (Remove(key),)))


def read_cursors(
    catalog: Catalog, topic: TopicName, prefix: str | None = None
) -> Iterator[tuple[str, Cursor]]:
    """Yields each name with its cursor, ordered by the key, reading a page at a time.

    With a prefix of keys, only those that start with it.
    """
    prefix = catalog.keys.cursor_rows(topic) if prefix is None else prefix
    at, end = prefix, after_prefix(prefix)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            name = catalog.keys.cursor_row_name(topic, entry.key)
            yield name, decode_cursor_row(entry.value, entry.key)
        at = page[-1].key + _NEXT_KEY
