"""Topics that are not stored, on every catalog: a name is of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.nonreliable import (
    create_nonreliable,
    delete_nonreliable,
    find_nonreliable,
    nonreliable_topics,
)
from forebay.catalog.subscriptions import create_subscription, read_all
from forebay.errors import DescriptorError, ServiceUnavailable, TopicKindConflict
from forebay.format.cursor import Cursor
from forebay.format.names import parse_topic
from forebay.format.subscription import SubscriptionRow, encode_subscription
from forebay.limits import CATALOG_PAGE, SUBSCRIPTIONS_PAGE
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    return Setup(backend)


@pytest.fixture
def store(setup: Setup, tmp_path: Path) -> Iterator[Store]:
    """A store with the catalog of the test."""
    settings = StoreSettings(data=tmp_path / "data", uploader=UploaderSettings(enabled=False))
    with Store(settings, catalog=Catalog(setup.kv, setup.backend.prefix)) as store:
        yield store


def test_a_topic_is_created_once_listed_and_deleted(setup: Setup) -> None:
    topics = [parse_topic(f"/ä/t{number:04}") for number in range(CATALOG_PAGE + 2)]
    for number, topic in enumerate(topics):
        assert create_nonreliable(setup.catalog, topic, number) == (topic, number)
    assert create_nonreliable(setup.catalog, topics[7], 99) == (topics[7], 7)
    found = list(nonreliable_topics(setup.catalog))
    assert found == [(topic, number) for number, topic in enumerate(topics)]
    assert delete_nonreliable(setup.catalog, topics[7])
    assert not delete_nonreliable(setup.catalog, topics[7])
    assert find_nonreliable(setup.catalog, topics[7]) is None


def test_the_rows_of_its_subscriptions_go_with_a_topic(setup: Setup) -> None:
    create_nonreliable(setup.catalog, TOPIC, 1)
    for number in range(SUBSCRIPTIONS_PAGE + 2):
        row = SubscriptionRow(f"s{number}", 1)
        setup.put(setup.catalog.keys.subscription(TOPIC, row.name), encode_subscription(row))
    assert delete_nonreliable(setup.catalog, TOPIC)
    assert list(read_all(setup.catalog)) == []


def test_the_subscriptions_of_a_stored_topic_stay(setup: Setup) -> None:
    setup.create()
    create_subscription(setup.catalog, TOPIC, 1, SubscriptionRow("s", 1), Cursor(), 0)
    assert not delete_nonreliable(setup.catalog, TOPIC)
    assert len(list(read_all(setup.catalog))) == 1


def test_the_row_is_that_of_the_document(setup: Setup) -> None:
    create_nonreliable(setup.catalog, TOPIC, 1_790_000_000_000)
    entry = setup.kv.get(setup.catalog.keys.nonreliable(TOPIC))
    assert entry is not None
    assert entry.value == b'{"created_ms":1790000000000}'
    setup.put(entry.key, b'{"later":1}')
    assert find_nonreliable(setup.catalog, TOPIC) == (TOPIC, 0)
    for value in (b"", b"[]", b'{"created_ms":"x"}'):
        setup.put(entry.key, value)
        with pytest.raises(DescriptorError, match="nonreliable/default/orders"):
            find_nonreliable(setup.catalog, TOPIC)


def test_a_creation_without_a_response_can_be_repeated(setup: Setup) -> None:
    setup.lose_answers()
    with pytest.raises(ServiceUnavailable):
        create_nonreliable(setup.catalog, TOPIC, 1)
    assert create_nonreliable(setup.catalog, TOPIC, 2) == (TOPIC, 1)


def test_a_stored_topic_is_not_created_as_another_kind(setup: Setup, store: Store) -> None:
    store.topic("orders").append(b"m")
    with pytest.raises(TopicKindConflict, match="/default/orders is a stored topic"):
        create_nonreliable(setup.catalog, TOPIC, 1)
    assert list(nonreliable_topics(setup.catalog)) == []


def test_a_topic_that_is_not_stored_is_not_opened_as_a_stored_one(
    setup: Setup, store: Store
) -> None:
    create_nonreliable(setup.catalog, TOPIC, 1)
    for _ in range(2):
        with pytest.raises(TopicKindConflict, match="/default/orders is a non-reliable topic"):
            store.topic("orders")
    assert store.topics() == [], "nothing of it is left on disk or in the catalog"
    delete_nonreliable(setup.catalog, TOPIC)
    assert store.topic("orders").append(b"m") == 0
    assert store.topics() == ["/default/orders"]


def test_of_two_that_create_a_topic_at_once_one_is_refused(setup: Setup, store: Store) -> None:
    def create_first(operation: str) -> None:
        if operation == "commit":  # the takeover of the stored topic
            setup.kv.before = None
            create_nonreliable(setup.catalog, TOPIC, 1)

    setup.kv.before = create_first
    with pytest.raises(TopicKindConflict, match="non-reliable"):
        store.topic("orders")
    assert setup.catalog.record(TOPIC) is None


def test_a_topic_is_refused_if_a_stored_one_is_created_meanwhile(setup: Setup) -> None:
    def create_first(operation: str) -> None:
        if operation == "commit":
            setup.kv.before = None
            setup.create()

    setup.kv.before = create_first
    with pytest.raises(TopicKindConflict, match="stored topic"):
        create_nonreliable(setup.catalog, TOPIC, 1)
    assert find_nonreliable(setup.catalog, TOPIC) is None
