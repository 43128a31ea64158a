"""The begin markers of a topic in the object store."""

from __future__ import annotations

from forebay.format.marker import BeginMarker, encode_marker
from forebay.format.names import MarkerName, TopicName, object_key
from forebay.objects.markers import list_markers, read_marker
from forebay.objects.memory import MemoryBackend

TOPIC = TopicName("default", "orders")
MARKER = BeginMarker("a" * 32, "b" * 32, 3, 100)


def test_the_newest_marker_is_the_last_one_whatever_the_order_of_names() -> None:
    store = MemoryBackend()
    for name in (
        "begin-100",
        "begin-9",
        "begin-100-2",
        "begin-100-10",
        "begin-1x",
        "data-0-9.dnb1",
    ):
        store.put_object(object_key(TOPIC, name), b"?")
    store.put_object(object_key(TopicName("default", "other"), "begin-500"), b"?")
    names = [each.name for each in list_markers(store, TOPIC)]
    assert names == [(9, 0), (100, 0), (100, 2), (100, 10)]


def test_a_marker_is_read_and_a_damaged_one_is_none() -> None:
    store = MemoryBackend()
    for offset, data in enumerate((encode_marker(MARKER), b"", b"{}", b" " * 5000)):
        store.put_object(object_key(TOPIC, str(MarkerName(offset))), data)
    found = [read_marker(store, each) for each in list_markers(store, TOPIC)]
    assert found == [MARKER, None, None, None]
