"""`forebay subscriptions` does the same through a server and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, refused
from support.served import served


@dataclass
class Place:
    """Where commands go: a directory, or a server."""

    options: list[str]

    def done(self, *args: str) -> str:
        return done("subscriptions", *args, *self.options)

    def facts(self, *args: str) -> Any:
        return facts("subscriptions", *args, *self.options)

    def refused(self, *args: str) -> str:
        return refused("subscriptions", *args, *self.options)

    def position(self) -> int:
        return int(self.facts("list", "orders")["position"])


@pytest.fixture(params=["directory", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    if request.param == "server":
        with served(settings) as server:
            server.store.topic("orders").append_many([b"x"] * 10, durability="synced")
            yield Place(["--url", server.url])
        return
    with Store(settings) as store:
        store.topic("orders").append_many([b"x"] * 10, durability="synced")
    yield Place(["--data", str(tmp_path)])


def test_a_subscription_is_created_listed_and_deleted(place: Place) -> None:
    made = place.facts("create", "orders", "billing", "--type", "shared", "--offset", "3")
    assert made == {
        "topic": "/default/orders",
        "subscription": "billing",
        "type": "shared",
        "position": 3,
        "created": True,
    }
    said = place.done("create", "orders", "billing", "--type", "shared")
    assert said == "/default/orders: billing exists, and is unchanged; it is at 3\n"
    listed = place.done("list")
    start = "/default/orders: billing: shared, acknowledged before 3; lag 7 messages, "
    assert listed.startswith(start)
    assert listed.endswith("; no consumer\n")
    shown = place.facts("list", "orders")
    assert (shown["topic"], shown["name"], shown["lag"]) == ("/default/orders", "billing", 7)
    said = place.done("delete", "orders", "billing", "--yes")
    assert said == "/default/orders: billing was deleted\n"
    assert place.done("list", "orders") == ""


@pytest.mark.parametrize(
    ("options", "position"),
    [
        (["--offset", "5"], 5),
        (["--earliest"], 0),
        (["--latest"], 10),
        (["--time", "1h"], 0),
        (["--time", "2100-01-01T00:00Z"], 10),
    ],
    ids=str,
)
def test_a_subscription_is_moved(place: Place, options: list[str], position: int) -> None:
    place.done("create", "orders", "billing", "--offset", "3")
    said = place.done("seek", "orders", "billing", *options)
    assert said == f"/default/orders: billing moved to {position}\n"
    assert place.position() == position


def test_messages_are_skipped(place: Place) -> None:
    place.done("create", "orders", "billing", "--earliest")
    assert place.facts("skip", "orders", "billing", "--messages", "4") == {
        "topic": "/default/orders",
        "subscription": "billing",
        "skipped": 4,
        "position": 4,
    }
    assert place.facts("skip", "orders", "billing", "--blocked")["skipped"] == 0
    said = place.done("skip", "orders", "billing", "--all")
    assert said == "/default/orders: billing skipped 6 messages, is at 10\n"
    assert place.position() == 10


def test_a_reset_goes_back_to_the_oldest_message(place: Place) -> None:
    place.done("create", "orders", "billing", "--latest")
    assert place.facts("reset", "orders", "billing")["position"] == 0
    assert place.position() == 0


def test_json_is_one_object_on_each_line(place: Place) -> None:
    for name in ("a", "b"):
        place.done("create", "orders", name)
    lines = place.done("list", "--json").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["seek", "orders", "billing"], "give one of --offset, --time, --earliest and --latest"),
        (["seek", "orders", "billing", "--offset", "1", "--latest"], "give only one of --offset"),
        (["seek", "orders", "billing", "--time", "soon"], "--time is 'soon'; it must be"),
        (["seek", "orders", "billing", "--offset", "1"], "has no subscription 'billing'"),
        (["skip", "orders", "billing"], "give one of --messages, --all and --blocked"),
        (["skip", "orders", "billing", "--all", "--blocked"], "give one of --messages"),
        (["delete", "orders", "billing"], "add --yes"),
        (["delete", "orders", "billing", "--yes"], "has no subscription 'billing'"),
        (["list", "absent"], "there is no topic /default/absent"),
        (["create", "absent", "billing"], "there is no topic /default/absent"),
        (["create", "orders", "billing", "--type", "some"], "is not one of 'exclusive'"),
        (["create", "orders", "x" * 300], "256 bytes"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(place: Place, args: list[str], words: str) -> None:
    assert words in place.refused(*args)


def test_an_offset_that_is_not_in_the_topic_is_refused(place: Place) -> None:
    place.done("create", "orders", "billing", "--offset", "3")
    assert "11" in place.refused("seek", "orders", "billing", "--offset", "11")
    assert place.position() == 3


def test_a_directory_that_is_none_is_refused_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    said = refused("subscriptions", "reset", "orders", "billing", "--data", missing)
    assert "is not a data directory" in said
    assert not missing.exists()


def test_describe_shows_subscriptions_through_a_server(tmp_path: Path) -> None:
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        server.store.topic("orders").append_many([b"x"] * 10, durability="synced")
        done("subscriptions", "create", "orders", "billing", "--offset", "4", "--url", server.url)
        said = done("describe", "orders", "--url", server.url)
    assert "  subscription billing: exclusive, acknowledged before 4; lag 6 messages, " in said
