"""The server tells which topics there are, where everything of one is, and where an offset is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import (
    InvalidTopicName,
    TopicConflict,
    TopicDeleted,
    UnknownTopic,
    UsageError,
)
from forebay.format.cursor import Cursor
from forebay.format.subscription import SubscriptionRow
from forebay.limits import OFFSET_MAX
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from support.served import Served, served
from support.storages import storage_of

ORDERS = "/v1/topics/default/orders"
THERE = "/v1/topics/default/there"


def quiet(data: Path) -> StoreSettings:
    """Nothing is synced, uploaded or deleted but by a call."""
    return StoreSettings(
        data=data,
        wal=WalSettings(fsync_interval_ms=3_600_000),
        uploader=UploaderSettings(enabled=False),
        deleter=DeleterSettings(
            retention_time_minutes=0, deletion_lag_minutes=0, check_interval_minutes=60
        ),
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(quiet(tmp_path)) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """For tests that change nothing: one topic, `/default/there`."""
    with served(quiet(tmp_path_factory.mktemp("data"))) as server:
        server.store.topic("there")
        yield server


def get(server: Served, path: str, **query: str | int) -> Any:
    return server.client.json("GET", path, query=query)


def fill(server: Served, segments: int = 3) -> None:
    """So many segments of ten messages, and an object of all but the last one."""
    topic = server.store.topic("orders")
    for number in range(segments):
        topic.append_many([b"x" * 100] * 10, durability="synced")
        if number == segments - 2:
            topic.upload()
        topic.rotate()


# ---- all topics -------------------------------------------------------------------------------


def test_topics_are_listed_a_page_at_a_time(server: Served) -> None:
    for name in ("a", "b", "c", "d"):
        server.store.topic(name).append(b"x", durability="synced")
    first = get(server, "/v1/topics", limit=3)
    assert [each["topic"] for each in first["topics"]] == ["/default/a", "/default/b", "/default/c"]
    assert (first["total"], first["next"]) == (4, "/default/c")
    last = get(server, "/v1/topics", limit=3, after=first["next"])
    assert [each["topic"] for each in last["topics"]] == ["/default/d"]
    assert last["next"] is None


def test_a_page_that_ends_with_the_last_topic_has_no_next_one(server: Served) -> None:
    server.store.topic("a")
    assert get(server, "/v1/topics", limit=1)["next"] is None
    assert get(server, "/v1/topics", after="/default/a")["topics"] == []


def test_topics_are_found_by_the_beginning_of_their_name(server: Served) -> None:
    for name in ("/shop/orders", "/shop/orders-old", "/mail/orders"):
        server.store.topic(name)
    found = get(server, "/v1/topics", prefix="/shop/orders")
    assert [each["topic"] for each in found["topics"]] == ["/shop/orders", "/shop/orders-old"]
    assert found["total"] == 2


def test_a_topic_that_is_open_here_is_listed_with_its_watermarks(tmp_path: Path) -> None:
    with served(quiet(tmp_path)) as server:
        fill(server)
    with served(quiet(tmp_path)) as server:
        assert get(server, "/v1/topics")["topics"] == [
            {
                "topic": "/default/orders",
                "open": False,
                "start": None,
                "appended": None,
                "synced": None,
                "uploaded": None,
                "verified": None,
            }
        ], "a list opens no topic"
        server.store.topic("orders").append(b"more")
        assert get(server, "/v1/topics")["topics"] == [
            {
                "topic": "/default/orders",
                "open": True,
                "start": 0,
                "appended": 31,
                "synced": 30,
                "uploaded": 20,
                "verified": 20,
            }
        ]


@pytest.mark.parametrize(
    "query",
    [{"limit": 0}, {"limit": 1001}, {"limit": "ten"}, {"limit": -1}, {"limit": "٣"}, {"page": 1}],
    ids=str,
)
def test_a_list_that_cannot_be_asked_for_is_refused(
    shared: Served, query: dict[str, str | int]
) -> None:
    with pytest.raises(UsageError):
        get(shared, "/v1/topics", **query)


# ---- one topic --------------------------------------------------------------------------------


def test_a_topic_is_told_with_its_watermarks_segments_and_objects(server: Served) -> None:
    fill(server)
    server.store.topic("orders").append(b"in memory alone")
    facts = get(server, ORDERS)
    assert facts["topic"] == "/default/orders"
    assert facts["open"] is True
    assert facts["start_offset"] == 0
    stages = [facts[name] for name in ("appended", "synced", "uploaded", "verified")]
    assert stages == [31, 30, 20, 20]
    assert facts["memory"] == [0, 31]
    ranges = [(each["start_offset"], each["next_offset"]) for each in facts["segments"]]
    assert ranges == [(0, 10), (10, 20), (20, 30)]
    assert [each["deletable"] for each in facts["segments"]] == [True, True, False]
    assert facts["segments"][2]["kept_because"] == "it holds the newest message"
    (only,) = facts["objects"]
    assert (only["start_offset"], only["next_offset"], only["verified"]) == (0, 20, True)
    assert facts["segments_bytes"] == sum(each["bytes"] for each in facts["segments"])
    assert (facts["objects_total"], facts["objects_bytes"]) == (1, only["bytes"])
    assert facts["problems"] == []


def test_a_topic_is_told_with_its_subscriptions(server: Served) -> None:
    fill(server)
    storage = storage_of(server.store.topic("orders"))
    storage.ack_checkpoint(3)
    storage.create_subscription(SubscriptionRow("billing", 3, 5), Cursor(12, ((20, 22),)))
    storage.flush_cursors()
    facts = get(server, ORDERS)
    assert [each["name"] for each in facts["cursors"]] == ["checkpoint"]
    (shown,) = facts["subscriptions"]
    assert shown.pop("updated_ms") > 0
    assert shown["lag_bytes"] > 0
    assert {
        "name": "billing",
        "type": "key-shared",
        "position": 12,
        "ranges": 1,
        "acknowledged": [[20, 22]],
        "lag": 16,
        "consumers": 0,
        "created_ms": 5,
        "live": False,
    }.items() <= shown.items()


def test_the_newest_segments_and_objects_are_shown_and_all_are_counted(server: Served) -> None:
    topic = server.store.topic("orders")
    for _ in range(4):
        topic.append_many([b"x"] * 5, durability="synced")
        topic.upload()
        topic.rotate()
    facts = get(server, ORDERS, limit=2)
    for pieces in ("segments", "objects"):
        assert [each["start_offset"] for each in facts[pieces]] == [10, 15]
        assert facts[f"{pieces}_total"] == 4
        assert facts[f"{pieces}_bytes"] == 2 * sum(each["bytes"] for each in facts[pieces])
    assert (facts["objects_before"], facts["objects_counted"]) == (10, True)
    older = get(server, ORDERS, limit=2, before=10)
    assert [each["start_offset"] for each in older["objects"]] == [0, 5]
    assert older["objects_before"] is None
    none = get(server, ORDERS, limit=0)
    assert none["segments"] == none["objects"] == []
    assert none["objects_total"] == 4


def test_a_topic_that_is_not_open_here_is_told_without_what_is_in_memory(tmp_path: Path) -> None:
    with served(quiet(tmp_path)) as server:
        fill(server)
    with served(quiet(tmp_path)) as server:
        facts = get(server, ORDERS)
        assert facts["open"] is False
        assert (facts["appended"], facts["memory"], facts["synced"]) == (None, None, 30)
        assert server.store.opened("orders") is None, "looking opens no topic"


@pytest.mark.parametrize("limit", [-1, 10_001, "all", ""])
def test_a_limit_that_is_none_is_refused(shared: Served, limit: str | int) -> None:
    with pytest.raises(UsageError, match="limit is"):
        get(shared, THERE, limit=limit)


@pytest.mark.parametrize("path", ["", "/explain/0"])
def test_a_topic_that_nobody_knows_is_not_found(shared: Served, path: str) -> None:
    with pytest.raises(UnknownTopic, match="/default/orders"):
        get(shared, ORDERS + path)
    with pytest.raises(UnknownTopic):
        shared.client.json("POST", f"{ORDERS}/trim")
    assert get(shared, "/v1/topics")["total"] == 1, "asking makes no topic"


@pytest.mark.parametrize("name", ["a.b", "a%20b", "..", "%2e%2e"])
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("PUT", ""), ("GET", "/explain/0"), ("POST", "/trim")]
)
def test_a_name_that_is_no_topics_is_refused(
    shared: Served, name: str, method: str, path: str
) -> None:
    with pytest.raises(InvalidTopicName):
        shared.client.json(method, f"/v1/topics/default/{name}{path}")


# ---- one offset -------------------------------------------------------------------------------


def test_an_offset_is_explained_in_every_tier_that_holds_it(server: Served) -> None:
    fill(server)
    facts = get(server, f"{ORDERS}/explain/13")
    assert facts["state"] == "stored"
    assert facts["in_memory"] is True
    assert [each["tier"] for each in facts["places"]] == ["segment", "object"]
    assert (facts["synced"], facts["uploaded"], facts["verified"]) == (True, True, True)


def test_an_offset_that_is_appended_and_not_synced_is_in_memory(server: Served) -> None:
    fill(server)
    topic = server.store.topic("orders")
    offset = topic.append(b"not synced")
    facts = get(server, f"{ORDERS}/explain/{offset}")
    assert (facts["state"], facts["in_memory"], facts["synced"]) == ("in memory", True, False)
    assert facts["places"] == []
    topic.flush()
    facts = get(server, f"{ORDERS}/explain/{offset}")
    assert (facts["state"], facts["in_memory"], facts["synced"]) == ("stored", True, True)


def test_an_offset_that_left_memory_is_in_the_files_alone(tmp_path: Path) -> None:
    settings = replace(quiet(tmp_path), wal=WalSettings(cache_capacity=5))
    with served(settings) as server:
        fill(server)
        facts = get(server, f"{ORDERS}/explain/3")
        assert (facts["state"], facts["in_memory"]) == ("stored", False)


def test_an_offset_beyond_the_end_is_not_appended_yet(server: Served) -> None:
    fill(server)
    for offset in (30, OFFSET_MAX):
        facts = get(server, f"{ORDERS}/explain/{offset}")
        assert (facts["state"], facts["in_memory"]) == ("not yet appended", False)


@pytest.mark.parametrize("offset", ["-1", "1.0", "latest", str(OFFSET_MAX + 1), "9" * 5000, "٣"])
def test_an_offset_that_is_none_is_refused(shared: Served, offset: str) -> None:
    with pytest.raises(UsageError, match="offset is"):
        get(shared, f"{THERE}/explain/{offset.replace('٣', '%D9%A3')}")


# ---- what changes something -------------------------------------------------------------------


def test_a_topic_is_made_once(server: Served) -> None:
    first = server.client.request("PUT", ORDERS)
    assert first.status == 201
    assert b'"created":true' in first.read()
    again = server.client.request("PUT", ORDERS)
    assert again.status == 200
    assert b'"created":false' in again.read()
    assert server.store.topics() == ["/default/orders"]


def test_a_trim_answers_the_segments_that_went(server: Served) -> None:
    fill(server)
    files = [each.path for each in server.store.topic("orders").segments()]
    answer = server.client.json("POST", f"{ORDERS}/trim")
    assert [each["file"] for each in answer["removed"]] == [str(path) for path in files[:2]]
    assert answer["removed"][1]["next_offset"] == 20
    assert not files[0].exists()
    assert files[2].exists()
    assert server.client.json("POST", f"{ORDERS}/trim")["removed"] == []
    facts = get(server, ORDERS)
    assert facts["start_offset"] == 0, "the objects have what went"
    assert facts["segments_total"] == 1


# ---- settings ---------------------------------------------------------------------------------


def change(server: Served, path: str = ORDERS, **body: Any) -> Any:
    return server.client.json("PATCH", f"{path}/settings", value=body)


def own(settings: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: each["value"] for each in settings if each["source"] == "topic"}


def test_settings_are_changed_and_in_effect_at_once(server: Served) -> None:
    topic = server.store.topic("orders")
    found = change(server, values={"max_object_messages": 5, "max_open_seconds": "2m"})
    assert found["topic"] == "/default/orders"
    assert own(found["settings"]) == {"max_object_messages": 5, "max_open_seconds": 120}
    topic.append_many([b"x"] * 10)
    assert len(topic.upload()) == 2
    found = change(server, values={"retention_size_mb": None}, unset=["max_open_seconds"])
    assert own(found["settings"]) == {"max_object_messages": 5, "retention_size_mb": None}
    assert get(server, f"{ORDERS}/settings") == found
    described = get(server, ORDERS)
    assert described["settings"] == found["settings"]
    assert described["uploaded_by"] is None, "uploads are off here"


def test_settings_of_a_topic_that_is_not_open_are_changed_too(tmp_path: Path) -> None:
    with served(quiet(tmp_path)) as server:
        server.store.topic("orders")
    with served(quiet(tmp_path)) as server:
        assert own(change(server, values={"rolling": True})["settings"]) == {"rolling": True}
        assert server.store.opened("orders") is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"values": {"rollin": True}}, "did you mean rolling?"),
        ({"values": {"unset": 1}}, "'unset' is not a setting of a topic"),
        ({"values": {"rolling": "perhaps"}}, "it must be true or false"),
        ({"values": {"rolling": [1]}}, "is a list; it must be text"),
        ({"values": {"max_object_bytes": 0}}, "max_object_bytes is 0"),
        ({"unset": ["rollin"]}, "did you mean rolling?"),
        ({"settings": {}}, "unknown key 'settings'"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_change_nothing(
    shared: Served, body: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        change(shared, THERE, **body)
    assert told in str(caught.value)
    assert own(get(shared, f"{THERE}/settings")["settings"]) == {}


def test_a_topic_that_does_not_exist_has_no_settings(shared: Served) -> None:
    absent = "/v1/topics/default/absent"
    with pytest.raises(UnknownTopic):
        get(shared, f"{absent}/settings")
    with pytest.raises(UnknownTopic):
        change(shared, absent, values={"rolling": True})
    assert "/default/absent" not in shared.store.topics()


# ---- topics are created and deleted -----------------------------------------------------------


def test_a_deleted_topic_is_gone_and_goes_on_when_it_is_created_again(server: Served) -> None:
    fill(server)
    topic = server.store.topic("orders")
    gone = server.client.json("DELETE", ORDERS)
    assert gone["topic"] == "/default/orders"
    [part] = gone["deleted"]
    assert (part["topic"], part["next_offset"], part["objects"]) == ("/default/orders", 30, 1)
    assert part["rows"] > 0
    assert part["files"] > 0
    assert get(server, "/v1/topics")["topics"] == []
    for method, path in (("GET", ORDERS), ("DELETE", ORDERS), ("POST", f"{ORDERS}/trim")):
        with pytest.raises(UnknownTopic):
            server.client.json(method, path)
    with pytest.raises(TopicDeleted):
        topic.append(b"late")
    assert server.client.json("PUT", ORDERS) == {
        "topic": "/default/orders",
        "created": True,
        "partitions": [],
    }
    assert get(server, ORDERS)["start_offset"] == 30
    assert server.store.topic("orders").append(b"new") == 30


def test_partitions_are_created_and_deleted(server: Served) -> None:
    made = server.client.json("PUT", ORDERS, query={"partitions": 2})
    names = ["/default/orders-part-0", "/default/orders-part-1"]
    assert made == {"topic": "/default/orders", "created": True, "partitions": names}
    assert [each["topic"] for each in get(server, "/v1/topics")["topics"]] == names
    with pytest.raises(TopicConflict):
        server.client.json("PUT", ORDERS)
    for wrong in (0, 1001):
        with pytest.raises(UsageError):
            server.client.json("PUT", ORDERS, query={"partitions": wrong})
    gone = server.client.json("DELETE", ORDERS, query={"partitions": "true"})
    assert [each["topic"] for each in gone["deleted"]] == names[::-1]
    assert get(server, "/v1/topics")["topics"] == []
    with pytest.raises(UnknownTopic):
        server.client.json("DELETE", ORDERS, query={"partitions": "true"})
