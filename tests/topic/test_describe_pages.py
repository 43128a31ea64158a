"""`describe` lists the newest objects, and older ones page by page; it counts them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.catalog.kv import Remove
from forebay.format.names import after_prefix
from forebay.topic.describe import TopicFacts, describe
from forebay.topic.factory import WalStorageFactory
from forebay.topic.view import StoreView

OBJECTS = 25


@pytest.fixture
def store(tmp_path: Path) -> Iterator[forebay.Store]:
    settings = forebay.StoreSettings(data=tmp_path)
    with forebay.Store(settings) as store:
        topic = store.topic("orders")
        for _ in range(OBJECTS):
            topic.append_many([b"x"] * 4, durability="synced")
            topic.upload()
        yield store


def described(store: forebay.Store, newest: int = 100, before: int | None = None) -> TopicFacts:
    with store.view() as view:
        return describe(view.topic("orders"), newest, before)


def forget_rows(store: forebay.Store) -> None:
    """Leaves the catalog as an earlier release would have written it."""
    with store.view() as view:
        resources = view.resources()
        assert resources is not None
        kv, keys = resources.catalog.kv, resources.catalog.keys
        topic = view.topic("orders").topic
        prefix = keys.ends(topic)
        for entry in kv.range(prefix, after_prefix(prefix), limit=1000):
            kv.commit([], [Remove(entry.key)])
        kv.commit([], [Remove(keys.totals(topic))])


@pytest.mark.parametrize("earlier", [False, True])
def test_pages_go_back_to_the_first_object_and_miss_none(
    store: forebay.Store, earlier: bool
) -> None:
    everything = described(store)
    assert len(everything.objects) == OBJECTS
    assert everything.objects_before is None
    if earlier:
        forget_rows(store)
    found = page = described(store, 10)
    listed = list(found.objects)
    assert [each.start_offset for each in listed] == list(range(60, 100, 4))
    while page.objects_before is not None:
        page = described(store, 10, page.objects_before)
        listed[:0] = page.objects
        assert page.problems == []
    assert listed == everything.objects


def test_all_objects_are_counted_whatever_is_listed(store: forebay.Store) -> None:
    whole, some, none = described(store), described(store, 3), described(store, 0)
    assert whole.objects_bytes == sum(each.bytes for each in whole.objects)
    for facts in (whole, some, none, described(store, 3, 40)):
        assert facts.objects_counted
        assert (facts.objects_total, facts.objects_bytes) == (OBJECTS, whole.objects_bytes)


def test_what_is_not_counted_yet_is_a_lower_bound_until_the_owner_has_counted_it(
    store: forebay.Store,
) -> None:
    whole = described(store)
    forget_rows(store)
    some = described(store, 3)
    assert (some.objects_counted, some.objects_total) == (False, 3)
    assert described(store).objects_counted  # all of them are on the page
    store.close()
    factory = WalStorageFactory(store.settings)
    factory.for_topic("/default/orders").index_chain()
    factory.close()
    with StoreView(store.settings) as view:
        some = describe(view.topic("orders"), 3)
    assert some.objects_counted
    assert (some.objects_total, some.objects_bytes) == (OBJECTS, whole.objects_bytes)
