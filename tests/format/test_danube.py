"""Danube's names and descriptors, as its versions wrote them."""

from __future__ import annotations

import pytest

from forebay.errors import DescriptorError
from forebay.format.danube import (
    decode_danube_descriptor,
    is_named_by_time,
    parse_bucket_key,
    parse_descriptor_key,
)
from forebay.format.names import TopicName
from support.danube_files import WRITTEN_AT, descriptor, descriptor_key

ORDERS = TopicName("default", "orders")
TOPICS = "storage/topics/default/orders"


def test_objects_of_every_version_are_recognised() -> None:
    for folder, name, number in (
        ("objects", "data-0-9.dnb1", 9),
        ("objects", f"data-0-{WRITTEN_AT}.dnb1", WRITTEN_AT),
        ("segments", f"data-0-{WRITTEN_AT}.dnb1", WRITTEN_AT),
    ):
        found = parse_bucket_key(f"{TOPICS}/{folder}/{name}")
        assert found is not None
        assert (found.topic, found.folder, found.object) == (ORDERS, folder, (0, number))
        assert not found.pending
        assert not found.of_forebay


def test_other_names_are_no_objects() -> None:
    pending = parse_bucket_key(f"{TOPICS}/objects/data-7-pending.dnb1")
    assert pending is not None
    assert (pending.object, pending.pending) == (None, True)
    marker = parse_bucket_key(f"{TOPICS}/objects/begin-0")
    assert marker is not None
    assert marker.of_forebay
    for key in (
        f"{TOPICS}/objects/a/data-0-9.dnb1",
        f"{TOPICS}/state",
        "storage/topics/default/or.ders/objects/data-0-9.dnb1",
        "elsewhere/default/orders/objects/data-0-9.dnb1",
    ):
        assert parse_bucket_key(key) is None
    for name in ("data-00-9.dnb1", "data-0-9-1.dnb1", "data-0-9.dnb1.json", "data-0-9.dnb2"):
        found = parse_bucket_key(f"{TOPICS}/objects/{name}")
        assert found is not None
        assert found.object is None


def test_a_time_in_a_name_is_told_from_a_last_offset_by_the_size() -> None:
    assert is_named_by_time(f"data-0-{WRITTEN_AT}.dnb1", 10**6)
    assert is_named_by_time(f"data-{WRITTEN_AT + 5}-{WRITTEN_AT}.dnb1", 10**6)
    assert not is_named_by_time("data-0-9.dnb1", 0)  # a damaged object of ours
    assert not is_named_by_time(f"data-{WRITTEN_AT - 9}-{WRITTEN_AT}.dnb1", 10**6)
    assert not is_named_by_time(f"data-{WRITTEN_AT - 10**6}-{WRITTEN_AT}.dnb1", 0)  # cut off
    assert not is_named_by_time("data-0-pending.dnb1", 0)


def test_descriptors_of_every_version_are_decoded() -> None:
    golden = (
        b'{"completed":true,"created_at":1700000000,"end_offset":5,"etag":null,'
        b'"object_id":"data-0-5.dnb1","offset_index":[[0,0]],"size":888,"start_offset":0}'
    )
    assert descriptor(0, 5, 888, "data-0-5.dnb1") == golden
    for later in (False, True):
        found = decode_danube_descriptor(descriptor(0, 5, 888, "data-0-5.dnb1", later=later))
        assert (found.object_id, found.start_offset, found.end_offset) == ("data-0-5.dnb1", 0, 5)
        assert (found.size, found.offset_index) == (888, None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"segment_id":7}', b"\xff"])
def test_damaged_descriptors_are_refused(data: bytes) -> None:
    with pytest.raises(DescriptorError):
        decode_danube_descriptor(data)


def test_keys_of_descriptors_are_told_from_others() -> None:
    for folder in ("objects", "segments"):
        key = descriptor_key("/danube", "/default/orders", 1000, folder)
        assert parse_descriptor_key("/danube", key) == (ORDERS, folder, 1000)
        assert parse_descriptor_key("/other", key) is None
    for name in ("objects/cur", "state", "objects/1000"):
        assert parse_descriptor_key("/danube", f"/danube/{TOPICS}/{name}") is None
