"""Kinds of schemas: names, fingerprints, plain payloads, and what is missing or too much."""

from __future__ import annotations

import json
import sys
import time

import pytest

from forebay.errors import InvalidPayload, InvalidSchema, SchemasNotInstalled, UsageError
from forebay.schemas.kinds import check_payload, fingerprint, incompatible, kind_named, parse


def test_a_kind_is_known_by_the_names_that_clients_use() -> None:
    assert [kind_named(each) for each in ("JSON_Schema", "jsonschema", "Proto", "avro")] == [
        "json_schema",
        "json_schema",
        "protobuf",
        "avro",
    ]
    with pytest.raises(UsageError, match="use one of avro, "):
        kind_named("xml")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("string", [b"", b"a", "ä".encode()], [b"\xff", b"\xed\xa0\x80"]),
        (
            "number",
            [b"0", b"-12", b"1.5", b"1e300", b"9" * 1000],
            [b"", b"01", b"x", b"1\n", b"NaN"],
        ),
        ("bytes", [b"", b"\xff" * 2_000_000], []),
    ],
)
def test_plain_payloads(kind: str, good: list[bytes], bad: list[bytes]) -> None:
    schema = parse(kind, b"anything")
    for payload in good:
        check_payload(schema, payload)
    for payload in bad:
        with pytest.raises(InvalidPayload):
            check_payload(schema, payload)


def test_fingerprints_differ_by_kind_and_by_what_means_something() -> None:
    def of(kind: str, definition: bytes) -> str:
        return fingerprint(kind, parse(kind, definition))

    assert of("string", b"a") == of("string", b"b") != of("bytes", b"a")
    assert of("avro", b'"int"') == of("avro", b'{"type": "int"}') != of("avro", b'"long"')
    assert of("json_schema", b"{}") == of("json_schema", b" { } ")


def test_the_modes_ask_in_the_direction_that_they_name() -> None:
    new, old = parse("avro", b'"long"'), parse("avro", b'"int"')
    assert incompatible("backward", new, old) == []
    assert incompatible("forward", new, old) != []
    assert incompatible("full", new, old) != []
    assert incompatible("full", new, parse("avro", b'{"type": "long"}')) == []
    assert incompatible("none", new, old) == []
    assert incompatible("backward", new, parse("string", b"x")) != []


@pytest.mark.parametrize(
    ("kind", "module", "definition"),
    [
        ("avro", "fastavro.schema", b'"float"'),
        ("json_schema", "jsonschema_rs", b'{"title": "missing"}'),
    ],
)
def test_a_library_that_is_missing_is_named(
    kind: str, module: str, definition: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SchemasNotInstalled, match="pip install 'forebay"):
        parse(kind, definition)


def test_the_compiler_of_protobuf_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.schemas.protobuf.find_spec", lambda _name: None)
    with pytest.raises(SchemasNotInstalled, match="grpcio-tools"):
        parse("protobuf", b'syntax = "proto3"; message Missing {}')


def many(count: int, least: int) -> bytes:
    return json.dumps({"anyOf": [{"minimum": least + at} for at in range(count)]}).encode()


def test_a_comparison_that_would_take_long_is_given_up() -> None:
    new, old = parse("json_schema", many(3000, 10**6)), parse("json_schema", many(3000, 0))
    began = time.process_time()
    with pytest.raises(InvalidSchema, match="too many steps"):
        incompatible("backward", new, old)
    assert time.process_time() - began < 60
