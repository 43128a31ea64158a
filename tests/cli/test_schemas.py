"""`forebay schemas` does the same through a server and without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, refused
from support.served import served

FIRST = '{"type": "object", "properties": {"id": {"type": "integer"}}}'
BREAKING = '{"type": "object", "properties": {"id": {"type": "string"}}}'


@pytest.fixture(params=["directory", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """The options of commands: a directory, or a server."""
    settings = StoreSettings(data=tmp_path / "data", uploader=UploaderSettings(enabled=False))
    if request.param == "server":
        with served(settings) as server:
            server.store.topic("orders").append(b"x")
            yield ["--url", server.url]
        return
    with Store(settings) as store:
        store.topic("orders").append(b"x")
    yield ["--data", str(tmp_path / "data")]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    first, breaking = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(FIRST)
    breaking.write_text(BREAKING)
    return str(first), str(breaking)


def test_a_schema_is_registered_listed_shown_and_deleted(
    place: list[str], files: tuple[str, str]
) -> None:
    said = done("schemas", "register", "s/v", files[0], *place)
    assert said == "s/v: version 1 was registered, id 1\n"
    again = facts("schemas", "register", "s/v", files[0], *place)
    assert (again["version"], again["created"]) == (1, False)
    assert done("schemas", "list", *place) == "s/v: id 1, json_schema, version 1 of 1, backward\n"
    assert json.loads(done("schemas", "list", "--json", *place))["subject"] == "s/v"
    assert done("schemas", "show", "s/v", *place) == FIRST + "\n"
    shown = facts("schemas", "show", "s/v", "--version", "1", *place)
    assert (shown["definition"], shown["versions"], shown["mode"]) == (FIRST, [1], "backward")
    said = done("schemas", "delete", "s/v", "--version", "1", "--yes", *place)
    assert said == "s/v: version 1 was deleted; versions left: none\n"
    assert done("schemas", "list", *place) == ""


def test_a_check_and_a_mode(place: list[str], files: tuple[str, str]) -> None:
    done("schemas", "register", "s", files[0], *place)
    assert done("schemas", "check", "s", files[0], *place) == "s: is compatible\n"
    said = done("schemas", "check", "s", files[1], *place, code=1)
    assert said.startswith("s: is not compatible\n")
    assert "breaks the mode backward" in refused("schemas", "register", "s", files[1], *place)
    assert done("schemas", "mode", "s", "none", *place) == "s: the mode is none\n"
    assert facts("schemas", "check", "s", files[1], *place)["compatible"] is True
    done("schemas", "register", "s", files[1], *place)


def test_a_topic_gets_a_schema(place: list[str], files: tuple[str, str]) -> None:
    done("schemas", "register", "s", files[0], *place)
    assert "has no schema" in refused("schemas", "topic", "orders", *place)
    done("schemas", "topic", "orders", "--subject", "s", "--payload", *place)
    said = done("schemas", "topic", "orders", "--policy", "enforce", *place)
    assert said == "/default/orders: s, policy enforce, payloads are checked\n"
    found = facts("schemas", "topic", "orders", *place)
    assert found == {
        "topic": "/default/orders",
        "subject": "s",
        "policy": "enforce",
        "payload": True,
    }
    done("schemas", "topic", "orders", "--clear", *place)
    assert "has no schema" in refused("schemas", "topic", "orders", *place)


def test_wrong_uses_are_refused_in_one_line(place: list[str], files: tuple[str, str]) -> None:
    for args in (
        ("show", "none"),
        ("register", "s", "/nowhere/x.json"),
        ("register", "s", files[0], "--type", "avro"),
        ("delete", "s", "--version", "1", "--yes"),
        ("mode", "none", "full"),
        ("topic", "orders", "--clear", "--policy", "warn"),
        ("topic", "nobody", "--subject", "s"),
    ):
        refused("schemas", *args, *place)
    assert "add --yes" in refused("schemas", "delete", "s", "--version", "1", *place)
    assert "give --type" in refused("schemas", "register", "s", "-", *place)
