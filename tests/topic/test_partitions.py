"""Topics are created with and without partitions, and deleted with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import (
    InvalidTopicName,
    ServiceUnavailable,
    TopicConflict,
    UnknownTopic,
    UsageError,
)
from forebay.format.names import parse_topic
from forebay.limits import PARTITIONS_MAX
from forebay.settings import StoreSettings
from forebay.testing import ObjectFault
from forebay.topic.partitions import CreatedTopic
from forebay.topic.store import Store, open_store
from support.deletions import Place

PARTITIONS = ("/default/orders-part-0", "/default/orders-part-1", "/default/orders-part-2")


@pytest.fixture(params=["on disk", "in memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    settings = StoreSettings(data=tmp_path if request.param == "on disk" else None)
    with Store(settings) as store:
        yield store


def test_a_topic_is_created_once(store: Store) -> None:
    assert store.create("orders") == CreatedTopic("/default/orders", created=True)
    assert store.create("orders") == CreatedTopic("/default/orders", created=False)
    assert store.topics() == ["/default/orders"]


def test_partitions_are_created_and_more_are_added(store: Store) -> None:
    first = store.create("orders", partitions=2)
    assert first == CreatedTopic("/default/orders", created=True, partitions=PARTITIONS[:2])
    assert store.topics() == list(PARTITIONS[:2]) == store.partitions("orders")
    assert not store.create("orders", partitions=2).created
    assert store.create("orders", partitions=3).created
    assert store.partitions("/default/orders") == list(PARTITIONS)
    assert store.create("orders-part-3").created
    with pytest.raises(TopicConflict, match="their number can grow"):
        store.create("orders", partitions=2)


def test_partitions_are_ordered_by_their_numbers(store: Store) -> None:
    store.create("orders", partitions=11)
    assert [parse_topic(each).partition for each in store.partitions("orders")] == [*range(11)]


def test_a_topic_with_partitions_and_one_without_cannot_have_the_same_name(store: Store) -> None:
    store.create("orders")
    for name, count in (("orders", 2), ("orders-part-5", None)):
        with pytest.raises(TopicConflict, match="exists as a topic without partitions"):
            store.create(name, partitions=count)
    store.delete("orders")
    store.create("orders", partitions=2)
    with pytest.raises(TopicConflict, match="has 2 partitions, such as /default/orders-part-0"):
        store.create("orders")
    store.create("orders-old")
    store.create("/other/orders")
    assert store.partitions("orders") == list(PARTITIONS[:2])


def test_all_partitions_are_deleted_and_nothing_else(store: Store) -> None:
    store.create("orders", partitions=3)
    store.create("orders-part")
    for name in PARTITIONS:
        store.topic(name).append(b"old")
    with pytest.raises(UnknownTopic, match="it has 3 partitions"):
        store.delete("orders")
    gone = store.delete_partitions("orders")
    assert [(each.topic, each.next_offset) for each in gone] == [
        (name, 1) for name in reversed(PARTITIONS)
    ]
    assert store.topics() == ["/default/orders-part"]
    with pytest.raises(UnknownTopic):
        store.delete_partitions("orders")
    store.create("orders", partitions=3)
    assert [store.topic(name).append(b"new") for name in PARTITIONS] == [1, 1, 1]


@pytest.mark.parametrize("count", [0, -1, PARTITIONS_MAX + 1])
def test_a_wrong_number_of_partitions_is_refused(store: Store, count: int) -> None:
    with pytest.raises(UsageError, match="1 to 1000"):
        store.create("orders", partitions=count)
    with pytest.raises(UsageError, match="name the topic /default/orders"):
        store.create("orders-part-1", partitions=2)
    with pytest.raises(InvalidTopicName):
        store.create("a/b")
    assert store.topics() == []


def test_partitions_whose_deletion_was_interrupted_are_deleted_by_the_next_call() -> None:
    place = Place()
    try:
        place.store.create("orders", partitions=2)
        for name in PARTITIONS[:2]:
            place.store.topic(name).append(b"old", durability="uploaded")
        place.backend.inject(ObjectFault("delete"))
        with pytest.raises(ServiceUnavailable):
            place.store.delete_partitions("orders")
        assert place.store.topics() == [PARTITIONS[0]]
        assert [each.topic for each in place.store.delete_partitions("orders")] == [
            PARTITIONS[1],
            PARTITIONS[0],
        ]
        assert place.store.topics() == []
    finally:
        place.close()


def test_a_store_lists_no_partitions_of_other_topics(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.create("orders", partitions=1)
        assert store.partitions("order") == store.partitions("orders-part-0") == []
