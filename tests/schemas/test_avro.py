"""Avro: who reads what, and which payloads are valid, is as fastavro has it; limits hold."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.read import SchemaResolutionError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidPayload, InvalidSchema
from forebay.schemas import avro


def parsed(source: Any) -> avro.AvroSchema:
    return avro.parse(json.dumps(source).encode())


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [
            {"name": each[0], "type": each[1], **({"default": each[2]} if len(each) > 2 else {})}
            for each in fields
        ],
        **more,
    }


def written(source: Any, value: Any) -> bytes:
    found = io.BytesIO()
    schemaless_writer(found, parse_schema(source), value)
    return found.getvalue()


def fastavro_reads(writer: Any, reader: Any, value: Any) -> bool:
    data = io.BytesIO(written(writer, value))
    try:
        schemaless_reader(data, parse_schema(writer), parse_schema(reader))
    except (SchemaResolutionError, UnicodeDecodeError, ValueError, TypeError):
        return False
    return True


ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
SMALLER = {"type": "enum", "name": "E", "symbols": ["A"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
NODE = record(("v", "int"), ("next", ["null", "R"]))

MATRIX: list[tuple[Any, Any, Any, bool]] = [
    # what was written with, what reads it, a value that shows it, and whether that works
    ("int", "int", 1, True),
    ("int", "long", 1, True),
    ("int", "float", 1, True),
    ("int", "double", 1, True),
    ("long", "int", 2**40, False),
    ("long", "float", 1, True),
    ("long", "double", 1, True),
    ("float", "double", 1.5, True),
    ("double", "float", 1.5, False),
    ("string", "bytes", "a", True),
    ("bytes", "string", b"a", True),
    ("int", "string", 1, False),
    ("null", "boolean", None, False),
    ("int", ["null", "long"], 1, True),
    ("int", ["null", "string"], 1, False),
    (["null", "int"], ["null", "int", "string"], 1, True),
    (["null", "int"], "int", None, False),
    ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, [1], True),
    ({"type": "array", "items": "string"}, {"type": "array", "items": "int"}, ["a"], False),
    ({"type": "map", "values": "int"}, {"type": "map", "values": "double"}, {"a": 1}, True),
    ({"type": "map", "values": "int"}, {"type": "array", "items": "int"}, {"a": 1}, False),
    (ENUM, ENUM, "B", True),
    (SMALLER, ENUM, "A", True),
    (ENUM, SMALLER, "B", False),
    (ENUM, {**SMALLER, "default": "A"}, "B", True),
    (FIXED, FIXED, b"ab", True),
    (FIXED, {**FIXED, "size": 3}, b"ab", False),
    (record(("a", "int")), record(("a", "int"), ("b", "string", "")), {"a": 1}, True),
    (record(("a", "int")), record(("a", "int"), ("b", "string")), {"a": 1}, False),
    (record(("a", "int"), ("b", "int")), record(("b", "int")), {"a": 1, "b": 2}, True),
    (record(("a", "int")), record(("a", "long")), {"a": 1}, True),
    (record(("a", "string")), record(("a", "int")), {"a": "x"}, False),
    (NODE, NODE, {"v": 1, "next": {"v": 2, "next": None}}, True),
    (
        NODE,
        record(("v", "long"), ("next", ["null", "R"])),
        {"v": 1, "next": {"v": 2, "next": None}},
        True,
    ),
    (
        NODE,
        record(("v", "string"), ("next", ["null", "R"])),
        {"v": 1, "next": None},
        False,
    ),
]


@pytest.mark.parametrize(("writer", "reader", "value", "works"), MATRIX)
def test_the_matrix_is_what_fastavro_reads(
    writer: Any, reader: Any, value: Any, works: bool
) -> None:
    assert (parsed(reader).unreadable(parsed(writer)) == []) is works
    assert fastavro_reads(writer, reader, value) is works


def test_a_field_is_found_by_the_alias_of_its_reader() -> None:
    renamed = record(("n", "int"))
    renamed["fields"][0]["aliases"] = ["a"]
    assert parsed(renamed).unreadable(parsed(record(("a", "int")))) == []


PRIMITIVES = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]


@st.composite
def sources(draw: st.DrawFn) -> Any:
    """A schema: a record of fields that may have defaults."""
    kinds = st.one_of(
        st.sampled_from(PRIMITIVES),
        st.sampled_from(PRIMITIVES).map(lambda each: {"type": "array", "items": each}),
        st.sampled_from(PRIMITIVES).map(lambda each: {"type": "map", "values": each}),
        st.lists(st.sampled_from(PRIMITIVES), min_size=1, max_size=3, unique=True),
    )
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4))
    return record(*((name, draw(kinds)) for name in names))


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, list):
        return st.one_of(*map(values_of, kind))
    if isinstance(kind, dict):
        match kind["type"]:
            case "array":
                return st.lists(values_of(kind["items"]), max_size=3)
            case "map":
                return st.dictionaries(st.text(max_size=3), values_of(kind["values"]), max_size=3)
        return st.fixed_dictionaries(
            {each["name"]: values_of(each["type"]) for each in kind["fields"]}
        )
    return {
        "null": st.none(),
        "boolean": st.booleans(),
        "int": st.integers(-(2**31), 2**31 - 1),
        "long": st.integers(-(2**63), 2**63 - 1),
        "float": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
        "bytes": st.binary(max_size=5).filter(bytes.isascii),
        "string": st.text(max_size=5),
    }[kind]


QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(data=st.data(), writer=sources(), reader=sources())
def test_what_counts_as_readable_is_read_by_fastavro(
    data: st.DataObject, writer: Any, reader: Any
) -> None:
    value = data.draw(values_of(writer))
    if not parsed(reader).unreadable(parsed(writer)):
        assert fastavro_reads(writer, reader, value)


@QUICK
@given(data=st.data(), source=sources())
def test_every_value_that_fastavro_writes_is_valid_and_no_part_of_it_is(
    data: st.DataObject, source: Any
) -> None:
    payload = written(source, data.draw(values_of(source)))
    schema = parsed(source)
    schema.check(payload)
    for end in range(len(payload)):
        with pytest.raises(InvalidPayload):
            schema.check(payload[:end])
    with pytest.raises(InvalidPayload):
        schema.check(payload + b"\0")


@QUICK
@given(payload=st.binary(max_size=40))
def test_any_bytes_are_valid_only_if_fastavro_reads_them(payload: bytes) -> None:
    source = record(("a", ["null", "string"]), ("b", {"type": "array", "items": "int"}))
    try:
        parsed(source).check(payload)
    except InvalidPayload:
        return
    schemaless_reader(io.BytesIO(payload), parse_schema(source), None)


@pytest.mark.parametrize(
    ("source", "payload"),
    [
        (NODE, b"\0\2" * 100_000),  # a list that is nested without an end
        ({"type": "array", "items": "null"}, b"\xfe\xff\xff\xff\xff\x1f\0"),  # 2**40 nothings
        ("string", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"),  # a length of 2**63
        ("long", b"\xff" * 20),
        ("int", b"\xfe\xff\xff\xff\xff\x1f"),
        ("string", b"\x02\xff"),
        ("boolean", b"\2"),
        (ENUM, b"\4"),
        (["null"], b"\2"),
    ],
)
def test_a_hostile_payload_is_refused_quickly(source: Any, payload: bytes) -> None:
    with pytest.raises(InvalidPayload):
        parsed(source).check(payload)


@pytest.mark.parametrize(
    "definition",
    [
        b"",
        b"{",
        b"1",
        b'{"type": "record"}',
        b'{"type": "record", "name": "R", "fields": [{"name": "a", "type": "T"}]}',
        b'{"type": "record", "name": "R", "fields": [{"name": "a", "type": "R"}]}',
        b'{"type": "enum", "name": "E"}',
        b'{"type": "fixed", "name": "F"}',
        b"[" * 1000,
        b'{"type": "array", "items": ' * 1000,
        b'{"a": 1, "a": 2}',
        b"NaN",
        b"\xff",
    ],
)
def test_a_bad_definition_is_an_invalid_schema(definition: bytes) -> None:
    with pytest.raises(InvalidSchema):
        avro.parse(definition)


def test_the_canonical_form_leaves_out_what_means_nothing() -> None:
    with_doc = record(("a", "int"), doc="about R")
    assert parsed(with_doc).canonical == parsed(record(("a", {"type": "int"}))).canonical
    assert parsed(with_doc).canonical != parsed(record(("a", "long"))).canonical
