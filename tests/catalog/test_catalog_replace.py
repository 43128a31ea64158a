"""Replacing what a descriptor says of its object, while other processes change the chain."""

from __future__ import annotations

from dataclasses import replace

from forebay.catalog.kv import Put
from forebay.format.descriptor import encode_descriptor
from support.reservoirs import TOPIC, Reservoir


def test_a_descriptor_is_replaced_only_by_who_knows_the_one_that_is_there() -> None:
    at = Reservoir()
    first, second = at.fill(at.own(), 0, 10, 20)
    better = replace(first, content_hash=f"sha256:{'1' * 64}", highest_publish_time=7)
    assert at.catalog.replace_descriptor(TOPIC, first, better)
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [better, second]
    assert not at.catalog.replace_descriptor(TOPIC, first, replace(first, etag="late"))
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [better, second]
    assert at.catalog.get_object_descriptors_range(TOPIC, 5) == [better, second]
    at.close()


def test_a_descriptor_that_changes_meanwhile_is_left_alone() -> None:
    at = Reservoir()
    [first] = at.fill(at.own(), 0, 10)
    key = at.catalog.keys.descriptor(TOPIC, 0)
    theirs = replace(first, etag="theirs")
    commit = at.kv.commit
    changed: list[object] = []

    def late(compares: object, writes: object) -> object:
        if not changed:
            changed.append(commit([], [Put(key, encode_descriptor(theirs))]))
        return commit(compares, writes)  # type: ignore[arg-type]

    at.kv.commit = late  # type: ignore[method-assign,assignment]
    assert not at.catalog.replace_descriptor(TOPIC, first, replace(first, etag="mine"))
    assert list(at.catalog.get_object_descriptors(TOPIC)) == [theirs]
    at.close()
