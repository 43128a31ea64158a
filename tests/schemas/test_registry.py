"""Subjects, versions and topics in the catalog: on SQLite and etcd, and with two at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.catalog.kv import Compare, Put, Remove
from forebay.errors import (
    DescriptorError,
    IncompatibleSchema,
    ServiceUnavailable,
    UnknownSchema,
    UnknownTopic,
    UsageError,
)
from forebay.format.names import TopicName
from forebay.format.schema import TopicSchemaRow
from forebay.limits import SCHEMA_BYTES_MAX, SCHEMAS_PAGE
from forebay.schemas.registry import NewSchema, SchemaRegistry
from support.catalogs import TOPIC, Setup
from support.kv_stores import Backend, requested_backend

NAME = "billing/ä %"


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = requested_backend(request, tmp_path)
    yield backend
    backend.kv.close()


@pytest.fixture
def setup(backend: Backend) -> Setup:
    setup = Setup(backend)
    setup.create()
    return setup


@pytest.fixture
def registry(setup: Setup) -> SchemaRegistry:
    return SchemaRegistry(setup.catalog, setup.clock)


def record(*fields: str, subject: str = NAME, default: bool = True) -> NewSchema:
    more = {"default": 0} if default else {}
    body = {
        "type": "record",
        "name": "R",
        "fields": [{"name": each, "type": "int", **more} for each in fields],
    }
    return NewSchema(subject, "avro", json.dumps(body).encode(), tags=("eu",))


def test_versions_are_added_read_and_deleted(registry: SchemaRegistry) -> None:
    first = registry.register(record("a"))
    second = registry.register(record("a", "b"))
    assert (first.is_new, second.is_new) == (True, True)
    assert first.subject.id == second.subject.id == 1
    assert [each.version for each in registry.versions(second.subject)] == [1, 2]
    assert registry.register(record("a")) == (second.subject, first.version, False)
    assert registry.subject_of(1) == second.subject
    left = registry.delete(NAME, 1)
    assert [each for each, _ in left.versions] == [2]
    with pytest.raises(UnknownSchema):
        registry.version(left, 1)
    registry.delete(NAME, 2)
    assert list(registry.subjects()) == []
    with pytest.raises(UnknownSchema):
        registry.subject(NAME)
    with pytest.raises(UnknownSchema):
        registry.subject_of(1)
    again = registry.register(record("a"))
    assert (again.subject.id, again.version.version) == (1, 3)
    assert registry.register(record("a", subject="other")).subject.id == 2


def test_the_mode_of_a_subject_decides(registry: SchemaRegistry) -> None:
    registry.register(record("a"))
    breaking = record("a", "b", default=False)
    with pytest.raises(IncompatibleSchema, match="b: a new field without a default"):
        registry.register(breaking)
    other = NewSchema(NAME, "string", b"x")
    with pytest.raises(IncompatibleSchema, match="of the type avro"):
        registry.register(other)
    assert registry.check(NAME, "avro", breaking.definition, "FORWARD") == []
    assert registry.check(NAME, "avro", breaking.definition, "full") != []
    assert registry.set_mode(NAME, "None").mode == "none"
    registry.register(breaking)
    assert registry.register(other).version.version == 3
    with pytest.raises(UsageError):
        registry.set_mode(NAME, "upward")


def test_subjects_are_listed_over_pages_and_a_damaged_one_is_told_of(
    registry: SchemaRegistry, setup: Setup
) -> None:
    names = [f"s{number:02d}" for number in range(SCHEMAS_PAGE + 4)]
    for name in names:
        registry.register(NewSchema(name, "string", b"x"))
    assert [each.name for each in registry.subjects()] == names
    assert [each.name for each in registry.subjects(after="s17")] == names[18:]
    setup.put(setup.catalog.keys.schema_subject("s03"), b"[]")
    damaged: list[DescriptorError] = []
    found = [each.name for each in registry.subjects(damaged.append)]
    assert found == [name for name in names if name != "s03"]
    assert "s03" in str(damaged[0])
    with pytest.raises(DescriptorError):
        list(registry.subjects())


def test_what_is_too_large_or_unknown_is_refused(registry: SchemaRegistry) -> None:
    for wrong in (
        NewSchema("", "string", b"x"),
        NewSchema("s" * 257, "string", b"x"),
        NewSchema("\ud800", "string", b"x"),
        NewSchema("s", "xml", b"x"),
        NewSchema("s", "string", b""),
        NewSchema("s", "string", b"x" * (SCHEMA_BYTES_MAX + 1)),
        NewSchema("s", "string", b"x", "d" * 5000),
        NewSchema("s", "string", b"x", tags=("t",) * 33),
    ):
        with pytest.raises(UsageError):
            registry.register(wrong)
    registry.register(NewSchema("s", "string", b"\xff" * SCHEMA_BYTES_MAX))
    with pytest.raises(UsageError, match="no catalog"):
        SchemaRegistry(None).register(record("a"))


def test_registrations_at_once_get_versions_of_their_own(registry: SchemaRegistry) -> None:
    registry.register(record("a"))
    done: list[int] = []

    def register(number: int) -> None:
        done.append(registry.register(record("a", f"f{number}")).version.version)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(2, 8))
    subject = registry.subject(NAME)
    assert [each for each, _ in subject.versions] == list(range(1, 8))


def test_a_registration_whose_answer_was_lost_is_repeated(
    registry: SchemaRegistry, setup: Setup
) -> None:
    commit = setup.backend.kv.commit

    class Lossy:
        def __getattr__(self, name: str) -> object:
            return getattr(setup.backend.kv, name)

        def commit(self, compares: list[Compare], writes: list[Put | Remove]) -> None:
            commit(compares, writes)
            raise ServiceUnavailable("the answer was lost")

    whole = setup.catalog.kv
    setup.catalog.kv = Lossy()  # type: ignore[assignment]
    with pytest.raises(ServiceUnavailable):
        registry.register(record("a"))
    setup.catalog.kv = whole
    again = registry.register(record("a"))
    assert (again.version.version, again.is_new) == (1, False)


def test_a_topic_has_a_subject_and_a_policy(registry: SchemaRegistry) -> None:
    registry.register(record("a"))
    assert registry.topic_schema(TOPIC) is None
    with pytest.raises(UnknownSchema):
        registry.set_policy(TOPIC, "warn")
    assert registry.assign(TOPIC, NAME) == TopicSchemaRow(NAME)
    assert registry.assign(TOPIC, "another") == TopicSchemaRow(NAME)
    registry.set_policy(TOPIC, "warn", payload=True)
    assert registry.topic_schema(TOPIC) == TopicSchemaRow(NAME, "warn", payload=True)
    with pytest.raises(UsageError, match="last version"):
        registry.delete(NAME, 1)
    with pytest.raises(UnknownSchema):
        registry.configure_topic(TOPIC, "another")
    with pytest.raises(UnknownTopic):
        registry.configure_topic(TopicName("default", "none"), NAME)
    assert registry.clear_topic(TOPIC)
    assert not registry.clear_topic(TOPIC)
    registry.delete(NAME, 1)
