"""The begin markers of a topic in the object store (`docs/formats/marker.md`): listed and read.

The offset in a marker's name counts even if its content is damaged: offsets up to it may have been
assigned, whatever the log was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.errors import FormatError
from forebay.format.marker import MARKER_BYTES_MAX, BeginMarker, decode_marker
from forebay.format.names import MARKER_START, MarkerName, TopicName, objects_prefix, parse_marker
from forebay.objects.backend import Backend, ObjectMeta


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
