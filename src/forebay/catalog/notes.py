"""What jobs remember of a topic in the catalog: small values under names of their own.

    <topic>/notes/<name>

A note is bytes that mean something to its writer alone. It is changed by compare-and-set, so that
two runs of one job cannot both go on from the same memory. Nothing that decides what counts in a
topic (records, descriptors, ownership, lives) reads notes, and a note does not make a topic.

What a caller gets wrong: notes live in the catalog alone. A topic that was rebuilt from its bucket
has none, so the absence of a note proves nothing by itself; see `origin`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import ABSENT, Compare, Entry, Put, Remove
from forebay.errors import CommitRefused, UsageError
from forebay.format.names import TopicName, after_prefix
from forebay.limits import CATALOG_PAGE, NOTE_BYTES_MAX

BEGAN: Final = "began"
"""The note of `origin`: put with a topic's first record, if the topic was empty then."""

HERE: Final = "here"

_NEXT_KEY: Final = "\1"


@dataclass(frozen=True, slots=True)
class Note:
    """A note as it was read; its revision is what the next write compares."""

    name: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Anything:
    """Whatever the note is now, it is replaced."""


ANYTHING: Final = Anything()


def read_note(catalog: Catalog, topic: TopicName, name: str) -> bytes | None:
    """The value of the note, or None if there is none."""
    found = find_note(catalog, topic, name)
    return None if found is None else found.value


def find_note(catalog: Catalog, topic: TopicName, name: str) -> Note | None:
    """The note with its revision, for a `write_note` that must follow it and nothing else."""
    entry = catalog.kv.get(catalog.keys.note(topic, name))
    return None if entry is None else Note(name, entry.value, entry.revision)


def write_note(
    catalog: Catalog,
    topic: TopicName,
    name: str,
    value: bytes,
    *,
    expected: Note | bytes | Anything | None,
) -> Note:
    """Writes the note if it still is as `expected`; answers it as it is now.

    `expected` is None for a note that must not be there yet, a value or a Note for one that must
    not have changed, ANYTHING for last writer wins. CommitRefused if it is otherwise: read it, and
    decide again. A note that already has this value counts as written, so that a write whose
    answer was lost can be asked for again.
    """
    if len(value) > NOTE_BYTES_MAX:
        raise UsageError(
            f"the note {name!r} of {topic} has {len(value)} bytes; at most {NOTE_BYTES_MAX} are "
            "allowed"
        )
    key = catalog.keys.note(topic, name)
    entry = catalog.kv.get(key)
    if entry is not None and entry.value == value:
        return Note(name, value, entry.revision)
    if not _is_expected(entry, expected):
        raise _changed(topic, name)
    compares = (
        []
        if isinstance(expected, Anything)
        else [Compare(key, entry.revision if entry else ABSENT)]
    )
    revision = catalog.kv.commit(compares, [Put(key, value)])
    if revision is None:
        raise _changed(topic, name)
    return Note(name, value, revision)


def remove_note(catalog: Catalog, topic: TopicName, name: str) -> None:
    """Idempotent."""
    catalog.kv.commit([], [Remove(catalog.keys.note(topic, name))])


def notes(catalog: Catalog, topic: TopicName, prefix: str = "") -> Iterator[Note]:
    """The notes whose names start with `prefix`, in the order of their keys, a page at a time."""
    own = catalog.keys.notes(topic)
    at, end = catalog.keys.note(topic, prefix) if prefix else own, after_prefix(own)
    while page := catalog.kv.range(at, end, limit=CATALOG_PAGE):
        for entry in page:
            name = catalog.keys.note_name(topic, entry.key)
            if name is None or not name.startswith(prefix):
                return
            yield Note(name, entry.value, entry.revision)
        at = page[-1].key + _NEXT_KEY


def origin(catalog: Catalog, topic: TopicName) -> str | None:
    """Which history of the topic this catalog's notes belong to; it changes with a restore.

    HERE: the catalog has known the topic since it was empty, so a note that is absent was never
    written. Another text: a restore has added to the topic, and notes of before may be older than
    what it added. None: the local log outlived an earlier catalog.
    """
    value = read_note(catalog, topic, BEGAN)
    return None if value is None else value.decode("utf-8", "replace")


def _is_expected(entry: Entry | None, expected: Note | bytes | Anything | None) -> bool:
    match expected:
        case Anything():
            return True
        case None:
            return entry is None
        case Note():
            return entry is not None and entry.revision == expected.revision
        case _:
            return entry is not None and entry.value == expected


def _changed(topic: TopicName, name: str) -> CommitRefused:
    return CommitRefused(
        f"{topic}: the note {name!r} was changed by another process; read it, and decide again"
    )
