"""The guard of a topic: what it keeps, and what holds while the catalog is away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import InvalidPayload, SchemaMismatch, ServiceUnavailable
from forebay.format.names import TopicName
from forebay.limits import PAYLOAD_CHECK_BYTES_MAX
from forebay.schemas.guard import UNFIT, SchemaGuard
from forebay.schemas.registry import NewSchema, SchemaRegistry
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend

SCHEMA = NewSchema("s", "json_schema", b'{"type": "integer"}')


@pytest.fixture(params=["sqlite"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def guard(backend: Backend) -> SchemaGuard:
    setup = Setup(backend)
    setup.create()
    registry = SchemaRegistry(setup.catalog, setup.clock)
    registry.register(SCHEMA)
    return SchemaGuard(registry)


def enforce(guard: SchemaGuard, policy: str = "enforce") -> None:
    guard.registry.configure_topic(TOPIC, "s", policy, payload=True)
    guard.changed()


def test_a_topic_without_a_schema_takes_everything(guard: SchemaGuard) -> None:
    assert guard.is_free(TOPIC) is None
    guard.check(TOPIC, None, None, b"x")
    assert guard.is_free(TOPIC) is True
    guard.require_free(TOPIC)


def test_a_change_counts_at_once(guard: SchemaGuard) -> None:
    guard.check(TOPIC, None, None, b"x")
    enforce(guard)
    assert guard.is_free(TOPIC) is None
    with pytest.raises(SchemaMismatch, match="names none"):
        guard.check(TOPIC, None, None, b"1")
    with pytest.raises(SchemaMismatch):
        guard.require_free(TOPIC)
    assert guard.is_free(TOPIC) is False


def test_the_schema_and_the_payload_of_a_message_must_fit(guard: SchemaGuard) -> None:
    enforce(guard)
    guard.check(TOPIC, 1, 1, b"7")
    guard.check(TOPIC, 1, None, b"7")
    assert guard.is_quick(TOPIC, b"7", 1)
    assert not guard.is_quick(TOPIC, b"7" * 10_000, 1)
    for number, version in ((2, 1), (1, 2), (2**64 - 1, None)):
        with pytest.raises(SchemaMismatch):
            guard.check(TOPIC, number, version, b"7")
    for payload in (b"x", b"7.5", b" " * (PAYLOAD_CHECK_BYTES_MAX + 1)):
        with pytest.raises(InvalidPayload):
            guard.check(TOPIC, 1, 1, payload)


def test_a_warning_is_counted_and_the_message_taken(guard: SchemaGuard) -> None:
    enforce(guard, "warn")
    before = UNFIT.value("warn", "payload"), UNFIT.value("warn", "schema")
    guard.check(TOPIC, 1, 1, b"x")
    guard.check(TOPIC, None, None, b"7")
    guard.require_free(TOPIC)
    assert UNFIT.value("warn", "payload") == before[0] + 1
    assert UNFIT.value("warn", "schema") == before[1] + 1


def test_what_is_known_holds_while_the_catalog_is_away(
    guard: SchemaGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforce(guard)
    guard.check(TOPIC, 1, 1, b"7")

    def away(*_: object) -> None:
        raise ServiceUnavailable("the catalog is away")

    monkeypatch.setattr(guard.registry, "topic_schema", away)
    guard.changed()
    with pytest.raises(InvalidPayload):
        guard.check(TOPIC, 1, 1, b"x")
    assert guard.is_free(TOPIC) is False
    with pytest.raises(ServiceUnavailable):
        guard.check(TopicName("default", "unknown"), 1, 1, b"7")


def test_a_change_by_another_process_is_read_in_the_background(
    guard: SchemaGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforce(guard)
    guard.check(TOPIC, 1, 1, b"7")
    guard.registry.set_policy(TOPIC, "none")
    assert guard.is_free(TOPIC) is False
    monkeypatch.setattr("forebay.schemas.guard._FRESH_SECONDS", -1.0)
    deadline = time.monotonic() + 60
    while not guard.is_free(TOPIC):
        assert time.monotonic() < deadline
