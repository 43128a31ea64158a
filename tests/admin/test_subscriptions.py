"""Operators see subscriptions over HTTP, and move, create and delete them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from forebay.catalog.nonreliable import create_nonreliable
from forebay.errors import (
    OffsetOutOfRange,
    SubscriptionBusy,
    TopicKindConflict,
    UnknownSubscription,
    UnknownTopic,
    UsageError,
)
from forebay.format.names import parse_topic
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings
from support.served import Served, served

ORDERS = "/v1/topics/default/orders"
SUBSCRIPTIONS = f"{ORDERS}/subscriptions"
BILLING = f"{SUBSCRIPTIONS}/billing"


def quiet(data: Path) -> StoreSettings:
    """Nothing is uploaded or deleted but by a call."""
    return StoreSettings(
        data=data,
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(
            retention_size_mb=0, deletion_lag_minutes=0, check_interval_minutes=60
        ),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(quiet(tmp_path)) as server:
        server.store.topic("orders").append_many([b"x" * 100] * 10, durability="synced")
        yield server


def call(server: Served, method: str, path: str, **body: Any) -> Any:
    return server.client.json(method, path, value=body or None)


def billing(server: Served) -> Any:
    return call(server, "GET", BILLING)


# ---- what is shown ----------------------------------------------------------------------------


def test_a_subscription_is_shown_with_its_position_and_lags(server: Served) -> None:
    before = time.time()
    call(server, "PUT", BILLING, type="key-shared", start=4)
    found = call(server, "GET", SUBSCRIPTIONS)
    (facts,) = found["subscriptions"]
    assert (found["topic"], found["truncated"], found["problems"]) == ("/default/orders", False, [])
    assert (facts["name"], facts["type"], facts["position"]) == ("billing", "key-shared", 4)
    assert facts["lag"] == 6
    (segment,) = server.store.topic("orders").segments()
    assert facts["lag_bytes"] == round(segment.size * 6 / 10)
    assert 0 <= facts["lag_seconds"] < 60 + time.time() - before
    assert (facts["live"], facts["connected"], facts["problem"]) == (True, [], None)
    one = billing(server)
    assert one == {**facts, "lag_seconds": one["lag_seconds"]}


def test_a_subscription_that_nobody_uses_is_shown_without_opening_its_topic(
    tmp_path: Path,
) -> None:
    with served(quiet(tmp_path)) as server:
        topic = server.store.topic("orders")
        topic.append_many([b"x" * 100] * 10, durability="synced")
        call(server, "PUT", BILLING, start=3)
    with served(quiet(tmp_path)) as server:
        facts = billing(server)
        assert (facts["position"], facts["lag"], facts["live"]) == (3, 7, False)
        assert facts["lag_bytes"] > 0
        assert server.store.opened("orders") is None


def test_the_lag_counts_what_is_only_in_objects(server: Served) -> None:
    topic = server.store.topic("orders")
    (descriptor,) = topic.upload()
    topic.rotate()
    topic.append_many([b"y" * 50] * 5, durability="synced")
    topic.trim_local()
    (segment,) = [each for each in topic.segments() if each.count]
    assert segment.first_offset == 10
    call(server, "PUT", BILLING, start="earliest")
    facts = billing(server)
    assert facts["lag"] == 15
    assert facts["lag_bytes"] == descriptor.logical_size + segment.size
    assert facts["lag_seconds"] is not None


def test_a_topic_that_has_no_subscription_is_an_empty_list(server: Served) -> None:
    assert call(server, "GET", SUBSCRIPTIONS)["subscriptions"] == []


def test_describe_shows_what_the_server_has_in_memory(server: Served) -> None:
    call(server, "PUT", BILLING, start=1)
    (facts,) = call(server, "GET", ORDERS)["subscriptions"]
    assert (facts["position"], facts["live"]) == (1, True)


def test_consumers_that_are_connected_are_shown(server: Served) -> None:
    from support.dispatching import payload_of

    registry = server.context.registry

    async def use() -> None:
        await registry.load()
        kind = (await registry.find(parse_topic("orders"), "billing")).window.kind
        number = await registry.subscribe(parse_topic("orders"), "billing", kind, "till-1")
        subscription, consumer = await registry.connect(number, payload_of)
        taken = 0
        while taken < 10:
            taken += len(await consumer.take())
        (await registry.find(parse_topic("orders"), "billing")).ack(5, 7)
        facts = await asyncio.to_thread(billing, server)
        (connected,) = facts["connected"]
        assert (connected["name"], connected["unacked"], connected["active"]) == ("till-1", 8, True)
        assert (facts["outstanding"], facts["delivered"], facts["lag"]) == (8, 10, 8)
        assert (facts["ranges"], facts["acknowledged"]) == (1, [[5, 7]])
        subscription.leave(consumer)
        await registry.close()

    call(server, "PUT", BILLING, start="earliest")
    asyncio.run(use())


# ---- create and delete ------------------------------------------------------------------------


def test_a_subscription_is_created_once(server: Served) -> None:
    first = call(server, "PUT", BILLING, type="failover", start="earliest")
    assert first == {
        "topic": "/default/orders",
        "subscription": "billing",
        "type": "failover",
        "position": 0,
        "created": True,
    }
    again = call(server, "PUT", BILLING, type="failover", start=5)
    assert (again["created"], again["position"]) == (False, 0)
    with pytest.raises(SubscriptionBusy, match="failover"):
        call(server, "PUT", BILLING, type="shared")


def test_a_new_subscription_begins_at_the_end_unless_it_is_said_where(server: Served) -> None:
    assert server.client.json("PUT", BILLING)["position"] == 10


def test_a_name_may_have_any_characters(server: Served) -> None:
    name = "a/b c%2Fé?"
    path = f"{SUBSCRIPTIONS}/{quote(name, safe='')}"
    call(server, "PUT", path, start=2)
    assert call(server, "POST", f"{path}/seek", start=3)["subscription"] == name
    (facts,) = call(server, "GET", SUBSCRIPTIONS)["subscriptions"]
    assert (facts["name"], facts["position"]) == (name, 3)
    call(server, "DELETE", path)


def test_a_deleted_subscription_is_gone_and_begins_anew(tmp_path: Path) -> None:
    with served(quiet(tmp_path)) as server:
        server.store.topic("orders").append_many([b"x"] * 3, durability="synced")
        call(server, "PUT", BILLING, start=1)
        call(server, "DELETE", BILLING)
        with pytest.raises(UnknownSubscription):
            billing(server)
        with pytest.raises(UnknownSubscription):
            call(server, "DELETE", BILLING)
    with served(quiet(tmp_path)) as server:
        assert call(server, "GET", SUBSCRIPTIONS)["subscriptions"] == []
        assert call(server, "PUT", BILLING, start="latest")["position"] == 3


def test_a_topic_that_was_deleted_takes_its_subscriptions_with_it(server: Served) -> None:
    call(server, "PUT", BILLING, start=1)
    call(server, "DELETE", ORDERS)
    with pytest.raises(UnknownTopic):
        call(server, "GET", SUBSCRIPTIONS)
    server.store.topic("orders").append(b"x", durability="synced")
    assert call(server, "GET", SUBSCRIPTIONS)["subscriptions"] == []
    assert call(server, "PUT", BILLING)["created"]


# ---- seek, reset, skip ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "position"),
    [({"start": 2}, 2), ({"start": 10}, 10), ({"start": "earliest"}, 0), ({"start": "latest"}, 10)],
    ids=str,
)
def test_a_subscription_is_moved_back_and_on(
    server: Served, body: dict[str, Any], position: int
) -> None:
    call(server, "PUT", BILLING, start=5)
    assert call(server, "POST", f"{BILLING}/seek", **body)["position"] == position
    assert (billing(server)["position"], billing(server)["lag"]) == (position, 10 - position)


def test_a_seek_survives_the_server(tmp_path: Path) -> None:
    with served(quiet(tmp_path)) as server:
        server.store.topic("orders").append_many([b"x"] * 10, durability="synced")
        call(server, "PUT", BILLING, start=5)
        call(server, "POST", f"{BILLING}/seek", start=2)
    with served(quiet(tmp_path)) as server:
        assert billing(server)["position"] == 2


def test_a_subscription_is_moved_to_a_time(server: Served) -> None:
    topic = server.store.topic("orders")
    first = next(iter(topic.read(0))).publish_time
    call(server, "PUT", BILLING, start="latest")
    assert call(server, "POST", f"{BILLING}/seek", start_time=first)["position"] == 0
    later = first + 3_600_000
    assert call(server, "POST", f"{BILLING}/seek", start_time=later)["position"] == 10


def test_a_reset_delivers_everything_again(server: Served) -> None:
    call(server, "PUT", BILLING, start=7)
    assert call(server, "POST", f"{BILLING}/reset")["position"] == 0
    assert billing(server)["lag"] == 10


def test_the_next_messages_are_skipped_and_counted(server: Served) -> None:
    call(server, "PUT", BILLING, start=2)
    skipped = call(server, "POST", f"{BILLING}/skip", messages=3)
    assert (skipped["skipped"], skipped["position"]) == (3, 5)
    assert (billing(server)["lag"], billing(server)["skipped"]) == (5, 3)
    skipped = call(server, "POST", f"{BILLING}/skip", messages="all")
    assert (skipped["skipped"], skipped["position"]) == (5, 10)
    assert call(server, "POST", f"{BILLING}/skip", messages=100)["skipped"] == 0
    assert billing(server)["position"] == 10


def test_skipping_what_blocks_does_nothing_if_nothing_does(server: Served) -> None:
    call(server, "PUT", BILLING, start=2)
    skipped = call(server, "POST", f"{BILLING}/skip", messages="blocked")
    assert (skipped["skipped"], skipped["position"]) == (0, 2)


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [{}, {"start": -1}, {"start": "middle"}, {"start": 0, "start_time": 0}, {"offset": 1}],
    ids=str,
)
def test_a_place_that_is_none_is_refused(server: Served, body: dict[str, Any]) -> None:
    call(server, "PUT", BILLING)
    with pytest.raises(UsageError):
        server.client.json("POST", f"{BILLING}/seek", value=body)


@pytest.mark.parametrize("messages", [0, -1, "some", None, 1.5])
def test_a_number_to_skip_that_is_none_is_refused(server: Served, messages: Any) -> None:
    call(server, "PUT", BILLING)
    with pytest.raises(UsageError):
        call(server, "POST", f"{BILLING}/skip", messages=messages)


def test_an_offset_that_is_not_in_the_topic_is_refused(server: Served) -> None:
    call(server, "PUT", BILLING, start=5)
    with pytest.raises(OffsetOutOfRange):
        call(server, "POST", f"{BILLING}/seek", start=11)
    assert billing(server)["position"] == 5


def test_an_unknown_subscription_or_topic_is_refused_and_creates_nothing(server: Served) -> None:
    for path, error in ((BILLING, UnknownSubscription), (OTHER, UnknownTopic)):
        with pytest.raises(error):
            call(server, "POST", f"{path}/seek", start=0)
        with pytest.raises(error):
            call(server, "GET", path)
    with pytest.raises(UnknownTopic):
        call(server, "PUT", OTHER)
    assert server.store.topics() == ["/default/orders"]


OTHER = "/v1/topics/default/other/subscriptions/billing"


# ---- topics that are not stored ---------------------------------------------------------------


def test_topics_that_are_not_stored_are_listed_apart(server: Served) -> None:
    catalog = server.store.catalog
    assert catalog is not None
    for name in ("ticks", "beats"):
        create_nonreliable(catalog, parse_topic(name), 1_790_000_000_000)
    page = server.client.json("GET", "/v1/nonreliable", query={"limit": 1})
    assert (page["total"], page["next"]) == (2, "/default/beats")
    last = server.client.json("GET", "/v1/nonreliable", query={"after": page["next"]})
    (ticks,) = last["topics"]
    assert (ticks["topic"], ticks["subscriptions"], last["next"]) == ("/default/ticks", [], None)
    with pytest.raises(TopicKindConflict):
        call(server, "PUT", "/v1/topics/default/ticks/subscriptions/s")
    with pytest.raises(UnknownTopic, match="nonreliable"):
        call(server, "GET", "/v1/topics/default/ticks/subscriptions")
