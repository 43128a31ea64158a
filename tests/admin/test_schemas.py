"""Schemas over HTTP: subjects, versions, modes, and the schemas of topics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import (
    IncompatibleSchema,
    InvalidSchema,
    SchemaMismatch,
    UnknownSchema,
    UnknownTopic,
    UsageError,
)
from forebay.settings import StoreSettings, UploaderSettings
from support.served import Served, served

ORDERS = "/v1/schemas/subjects/orders%2Fvalue"
TOPIC_SCHEMA = "/v1/topics/default/orders/schema"
FIRST = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}}})
BREAKING = json.dumps({"type": "object", "properties": {"id": {"type": "string"}}})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    settings = StoreSettings(data=tmp_path, uploader=UploaderSettings(enabled=False))
    with served(settings) as server:
        server.store.topic("orders").append(b"x")
        yield server


def call(server: Served, method: str, path: str, **body: Any) -> Any:
    return server.client.json(method, path, value=body or None)


def register(server: Served, definition: str = FIRST, path: str = ORDERS) -> Any:
    return call(server, "POST", path, type="json_schema", definition=definition, tags=["eu"])


def test_a_schema_is_registered_listed_and_shown(server: Served) -> None:
    made = register(server)
    assert (made["subject"], made["id"], made["version"]) == ("orders/value", 1, 1)
    assert made["created"] is True
    assert register(server)["created"] is False
    shown = call(server, "GET", ORDERS)
    assert (shown["definition"], shown["mode"], shown["versions"]) == (FIRST, "backward", [1])
    assert call(server, "GET", "/v1/schemas/ids/1?version=1") == shown
    (line,) = call(server, "GET", "/v1/schemas")["subjects"]
    assert line == {
        "subject": "orders/value",
        "id": 1,
        "type": "json_schema",
        "mode": "backward",
        "latest": 1,
        "versions": 1,
        "tags": ["eu"],
    }


def test_subjects_come_in_pages(server: Served) -> None:
    for name in "abc":
        register(server, path=f"/v1/schemas/subjects/{name}")
    page = call(server, "GET", "/v1/schemas?limit=2")
    assert ([each["subject"] for each in page["subjects"]], page["next"]) == (["a", "b"], "b")
    page = call(server, "GET", "/v1/schemas?limit=2&after=b")
    assert ([each["subject"] for each in page["subjects"]], page["next"]) == (["c"], None)


def test_modes_checks_and_deletions(server: Served) -> None:
    register(server)
    body = {"subject": "orders/value", "type": "json_schema", "definition": BREAKING}
    found = call(server, "POST", "/v1/schemas/check", **body)
    assert (found["compatible"], len(found["errors"])) == (False, 1)
    with pytest.raises(IncompatibleSchema):
        register(server, BREAKING)
    assert call(server, "PATCH", ORDERS, mode="none")["mode"] == "none"
    assert register(server, BREAKING)["version"] == 2
    assert call(server, "DELETE", f"{ORDERS}?version=1")["versions"] == [2]
    with pytest.raises(UnknownSchema):
        call(server, "GET", f"{ORDERS}?version=1")


def test_bad_requests_say_what_is_wrong(server: Served) -> None:
    register(server)
    for method, path, body, error in (
        ("GET", "/v1/schemas/subjects/none", {}, UnknownSchema),
        ("GET", "/v1/schemas/ids/77", {}, UnknownSchema),
        ("GET", "/v1/schemas/ids/x", {}, UsageError),
        ("GET", f"{ORDERS}?version=0", {}, UsageError),
        ("GET", "/v1/schemas?limit=0", {}, UsageError),
        ("POST", ORDERS, {"type": "xml", "definition": "x"}, UsageError),
        ("POST", ORDERS, {"type": "avro", "definition": "{"}, InvalidSchema),
        ("POST", ORDERS, {"type": "avro"}, UsageError),
        (
            "POST",
            "/v1/schemas/subjects/" + "s" * 300,
            {"type": "avro", "definition": '"int"'},
            UsageError,
        ),
        ("PATCH", ORDERS, {"mode": "upward"}, UsageError),
        ("DELETE", ORDERS, {}, UsageError),
        ("DELETE", f"{ORDERS}?version=9", {}, UnknownSchema),
        ("GET", TOPIC_SCHEMA, {}, UnknownSchema),
        ("PUT", TOPIC_SCHEMA, {"subject": "none"}, UnknownSchema),
        ("PUT", TOPIC_SCHEMA, {"subject": "orders/value", "policy": "maybe"}, UsageError),
        ("PUT", "/v1/topics/default/none/schema", {"subject": "orders/value"}, UnknownTopic),
    ):
        with pytest.raises(error):
            call(server, method, path, **body)


def test_a_topic_that_enforces_a_schema_takes_no_messages_over_http(server: Served) -> None:
    register(server)
    made = call(server, "PUT", TOPIC_SCHEMA, subject="orders/value", policy="enforce", payload=True)
    assert made == {
        "topic": "/default/orders",
        "subject": "orders/value",
        "policy": "enforce",
        "payload": True,
    }
    assert call(server, "GET", TOPIC_SCHEMA) == made
    messages = "/v1/topics/default/orders/messages"
    with pytest.raises(SchemaMismatch):
        call(server, "POST", messages, id=1)
    assert call(server, "DELETE", TOPIC_SCHEMA)["cleared"] is True
    call(server, "POST", messages, id=1)


def test_the_schema_of_a_topic_goes_with_it(server: Served) -> None:
    register(server)
    call(server, "PUT", TOPIC_SCHEMA, subject="orders/value")
    server.store.delete("orders")
    server.store.topic("orders").append(b"y")
    with pytest.raises(UnknownSchema):
        call(server, "GET", TOPIC_SCHEMA)
