"""The begin markers of a topic in the object store: listed, read and created.

The format is in `docs/formats/marker.md`. The offset in a marker's name counts even if its content
is damaged: offsets up to it may have been assigned, whatever the log was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forebay.errors import FormatError, ObjectExists, ServiceRefused
from forebay.format.marker import (
    MARKER_BYTES_MAX,
    BeginMarker,
    decode_marker,
    encode_marker,
)
from forebay.format.names import MARKER_START, MarkerName, TopicName, objects_prefix, parse_marker
from forebay.objects.backend import Backend, ObjectMeta

_ATTEMPTS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class StoredMarker:
    """A begin marker in the listing."""

    name: MarkerName
    meta: ObjectMeta


def list_markers(store: Backend, topic: TopicName) -> list[StoredMarker]:
    """Returns the topic's markers, the newest last. Lists only their common prefix."""
    prefix = objects_prefix(topic)
    return in_order(
        StoredMarker(name, meta)
        for meta in store.list(prefix + MARKER_START)
        if (name := parse_marker(meta.key.removeprefix(prefix))) is not None
    )


def in_order(markers: Iterable[StoredMarker]) -> list[StoredMarker]:
    """Returns the markers, the newest last. A listing has them in the order of their text."""
    return sorted(markers, key=lambda each: each.name)


def read_marker(store: Backend, marker: StoredMarker) -> BeginMarker | None:
    """Reads one marker, in one bounded request; None if its content is damaged."""
    if not 0 < marker.meta.size <= MARKER_BYTES_MAX:
        return None
    data = bytes(store.get_range(marker.meta.key, 0, marker.meta.size))
    try:
        return decode_marker(data, f"{store.name}: {marker.meta.key}")
    except FormatError:
        return None


def create_marker(store: Backend, topic: TopicName, offset: int, marker: BeginMarker) -> MarkerName:
    """Creates a marker for an opening at `offset`, under a name after those at this offset.

    A marker of this opening that exists already is a success: an earlier request may have got no
    response.
    """
    data = encode_marker(marker)
    newest = next(reversed(list_markers(store, topic)), None)
    first = 0
    if newest is not None and newest.name.offset == offset:
        if read_marker(store, newest) == marker:
            return newest.name
        first = newest.name.attempt + 1
    for attempt in range(first, first + _ATTEMPTS_MAX):
        name = MarkerName(offset, attempt)
        key = objects_prefix(topic) + str(name)
        try:
            store.put_object(key, data, create=True)
        except ObjectExists:
            if read_marker(store, StoredMarker(name, store.head(key))) != marker:
                continue
        return name
    raise ServiceRefused(
        f"{store.name}: {objects_prefix(topic)}{MARKER_START}{offset} and all its further names "
        "are taken; delete the oldest of them"
    )
