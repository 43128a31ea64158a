"""The cursors of a topic: what its consumers acknowledged, one row for each name.

    <topic>/cursors/<name>

Only the owner of the topic writes them: a write compares the topic's record, and with it the epoch.
A write adds to what the row has, so a cursor never moves back, and a write whose response was lost
can be repeated. The value: `forebay.format.cursor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Change
from forebay.catalog.kv import ABSENT, Compare, Put
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


def read_cursors(catalog: Catalog, topic: TopicName) -> Iterator[tuple[str, Cursor]]:
    """Yields each name with its cursor, ordered by the key, reading a page at a time."""
    prefix = catalog.keys.cursor_rows(topic)
    at, end = prefix, after_prefix(prefix)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            name = catalog.keys.cursor_row_name(topic, entry.key)
            yield name, decode_cursor_row(entry.value, entry.key)
        at = page[-1].key + _NEXT_KEY
