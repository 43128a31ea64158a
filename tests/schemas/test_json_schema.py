"""JSON Schema: what counts as compatible is accepted by the library, and nothing takes long."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidPayload, InvalidSchema
from forebay.schemas import json_schema


def parsed(source: Any) -> json_schema.JsonSchema:
    return json_schema.parse(json.dumps(source).encode())


def objects(*required: str, more: Any = None, **properties: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required)}
    return found if more is None else {**found, "additionalProperties": more}


INT, TEXT = {"type": "integer"}, {"type": "string"}
TREE = {
    "type": "object",
    "properties": {"v": INT, "sub": {"type": "array", "items": {"$ref": "#"}}},
}

MATRIX: list[tuple[Any, Any, Any, bool]] = [
    # the schema of the writer, that of the reader, a value of the writer, and whether it is read
    (INT, INT, 1, True),
    (INT, {"type": "number"}, 1, True),
    ({"type": "number"}, INT, 1.5, False),
    (INT, TEXT, 1, False),
    (INT, {"type": ["integer", "null"]}, 1, True),
    ({"type": ["integer", "null"]}, INT, None, False),
    (INT, True, 1, True),
    (INT, {}, 1, True),
    ({}, INT, "x", False),
    (True, False, 1, False),
    (objects(a=INT), objects(a=INT, b=TEXT), {"a": 1}, True),
    (objects(a=INT), objects("b", a=INT, b=TEXT), {"a": 1}, False),
    (objects("a", a=INT), objects(a=INT), {"a": 1}, True),
    (objects(a=INT, b=TEXT), objects(a=INT), {"a": 1, "b": "x"}, True),
    (objects(a=INT, b=TEXT), objects(a=INT, more=False), {"a": 1, "b": "x"}, False),
    (objects(a=INT, b=INT), objects(a=INT, more=INT), {"b": 1}, True),
    (objects(a=INT, b=TEXT), objects(a=INT, more=INT), {"b": "x"}, False),
    (objects(a=INT, more=True), objects(a=INT, b=TEXT), {"b": 1}, False),
    (objects(a=INT, more=TEXT), objects(a=INT, b=TEXT), {"b": "x"}, True),
    (objects(a=INT, more=TEXT), objects(a=INT, more=False), {"b": "x"}, False),
    (objects(a=INT), objects(a=TEXT), {"a": 1}, False),
    ({"enum": [1, 2]}, {"enum": [1, 2, 3]}, 2, True),
    ({"enum": [1, 2, 3]}, {"enum": [1, 2]}, 3, False),
    ({"const": "a"}, TEXT, "a", True),
    (TEXT, {"enum": ["a"]}, "b", False),
    ({"enum": [1, "a"]}, {"type": ["integer", "string"]}, "a", True),
    ({**INT, "minimum": 5}, {**INT, "minimum": 3}, 5, True),
    ({**INT, "minimum": 3}, {**INT, "minimum": 5}, 3, False),
    (INT, {**INT, "maximum": 5}, 9, False),
    ({**TEXT, "maxLength": 3}, {**TEXT, "maxLength": 5}, "abc", True),
    (TEXT, {**TEXT, "minLength": 1}, "", False),
    (TEXT, {**TEXT, "pattern": "^a"}, "b", False),
    ({**TEXT, "pattern": "^a"}, TEXT, "a", True),
    ({"type": "array", "items": INT}, {"type": "array", "items": {"type": "number"}}, [1], True),
    ({"type": "array", "items": INT}, {"type": "array", "items": TEXT}, [1], False),
    ({"type": "array"}, {"type": "array", "uniqueItems": True}, [1, 1], False),
    (INT, {"anyOf": [INT, TEXT]}, 1, True),
    ({"anyOf": [INT, TEXT]}, {"anyOf": [INT, TEXT, {"type": "null"}]}, 1, True),
    ({"anyOf": [INT, TEXT]}, INT, "x", False),
    ({"anyOf": [INT, {"type": "number"}]}, {"type": "number"}, 1, True),
    ({"allOf": [objects(a=INT), objects("b", b=TEXT)]}, objects("b"), {"b": "x"}, True),
    (objects(a=INT), {"allOf": [objects(a=INT), {"required": ["a"]}]}, {}, False),
    ({"$ref": "#/$defs/x", "$defs": {"x": INT}}, {"type": "number"}, 1, True),
    (TREE, TREE, {"v": 1, "sub": [{"v": 2}]}, True),
    (
        TREE,
        {**TREE, "properties": {**TREE["properties"], "v": TEXT}},  # type: ignore[dict-item]
        {"v": 1},
        False,
    ),
    (INT, {"not": {"const": 3}}, 3, False),
    ({"enum": [1, 2]}, {"enum": [1], "allOf": [{}]}, 2, False),
    ({"allOf": [objects(b=TEXT)]}, {"properties": {"b": INT}}, {"b": "x"}, False),
    ({"anyOf": [objects(b=TEXT)]}, {"properties": {"b": INT}}, {"b": "x"}, False),
    (
        {"allOf": [objects(a=INT, x=INT), objects(b=TEXT, x=INT)]},
        {"properties": {"a": INT, "b": INT}},
        {"b": "x"},
        False,
    ),
    (
        {"properties": {"x": INT}, "patternProperties": {"^y": INT}},
        {"patternProperties": {"^y": INT}, "additionalProperties": False},
        {"x": 1},
        False,
    ),
]


@pytest.mark.parametrize(("writer", "reader", "value", "works"), MATRIX)
def test_the_matrix_is_what_the_library_accepts(
    writer: Any, reader: Any, value: Any, works: bool
) -> None:
    assert (parsed(reader).unreadable(parsed(writer)) == []) is works
    assert jsonschema_rs.is_valid(writer, value)
    assert jsonschema_rs.is_valid(reader, value) is works


@st.composite
def sources(draw: st.DrawFn, depth: int = 2) -> Any:
    simple: Any = draw(
        st.sampled_from(
            [
                INT,
                TEXT,
                {"type": "number", "minimum": 0},
                {"type": "number", "maximum": 10},
                {**TEXT, "maxLength": 2},
                {"type": ["string", "null"]},
                {"enum": [1, "a", None]},
                {"const": 1},
                {"type": "boolean"},
                True,
            ]
        )
    )
    shapes = ["simple", "object", "array", "any", "all"]
    shape = draw(st.sampled_from(shapes if depth else ["simple"]))
    below = sources(depth - 1)
    match shape:
        case "object":
            properties = draw(st.dictionaries(st.sampled_from("ab"), below, max_size=2))
            required = draw(st.sets(st.sampled_from(sorted(properties)))) if properties else []
            found = {"properties": properties, "required": sorted(required)}
            if draw(st.booleans()):
                found["type"] = "object"
            more = draw(st.sampled_from([None, False, INT]))
            return found if more is None else {**found, "additionalProperties": more}
        case "array":
            return {"type": "array", "items": draw(below)}
        case "all":
            more = simple if simple is not True and draw(st.booleans()) else {}
            return {"allOf": [draw(below), draw(below)], **more}
        case "any":
            return {"anyOf": [draw(below), draw(below)]}
    return simple


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from(["", "a", "ab", "abc"])
)


def _objects_of(schema: Any) -> st.SearchStrategy[Any]:
    named = {name: values_of(each) for name, each in schema["properties"].items()}
    if schema.get("additionalProperties") == INT:
        named["c"] = values_of(INT)
    return st.fixed_dictionaries({}, optional=named)


def _of_both(parts: Any) -> st.SearchStrategy[Any]:
    """Objects with properties of all parts."""
    named: dict[str, Any] = {}
    for each in parts:
        if isinstance(each, dict):
            named |= {name: values_of(one) for name, one in each.get("properties", {}).items()}
    return st.fixed_dictionaries({}, optional=named)


def values_of(schema: Any) -> st.SearchStrategy[Any]:
    """Values that a writer of the schema writes: properties that it names, and no others."""
    if not isinstance(schema, dict):
        return LEAVES
    if "anyOf" in schema:
        return st.one_of(*map(values_of, schema["anyOf"]))
    if "allOf" in schema:
        parts = schema["allOf"]
        return st.one_of(*map(values_of, parts), _of_both(parts))
    if "properties" in schema:
        return st.one_of(LEAVES, _objects_of(schema))
    match schema.get("type"):
        case "array":
            return st.lists(values_of(schema["items"]), max_size=2)
    return st.one_of(LEAVES, st.sampled_from(schema.get("enum", [1])))


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), writer=sources(), reader=sources())
def test_what_a_compatible_writer_writes_is_valid_for_the_reader(
    data: st.DataObject, writer: Any, reader: Any
) -> None:
    if parsed(reader).unreadable(parsed(writer)):
        return
    value = data.draw(values_of(writer))
    if jsonschema_rs.is_valid(writer, value):
        assert jsonschema_rs.is_valid(reader, value)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(source=sources())
def test_every_schema_reads_itself(source: Any) -> None:
    assert parsed(source).unreadable(parsed(source)) == []


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"properties": {"x": {"$ref": "#"}}}, {"properties": {"x": {"$ref": "#"}}}]},
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)},
                "a30": False,
            },
        },
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "#/nothing"},
        {"$ref": "#anchor"},
        {"$dynamicRef": "#x"},
        {"properties": {"a": {"$id": "http://x/y"}}},
        {"type": "strange"},
        {"pattern": "("},
        {"pattern": "(?=a)b"},
        {"$schema": "http://127.0.0.1:1/draft"},
        "text",
    ],
)
def test_a_schema_that_is_invalid_or_may_take_for_ever_is_refused(source: Any) -> None:
    with pytest.raises(InvalidSchema):
        parsed(source)


def test_a_pattern_takes_linear_time() -> None:
    with pytest.raises(InvalidPayload):
        parsed({"pattern": "^(a+)+$"}).check(json.dumps("a" * 100_000 + "b").encode())


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xff", b"NaN", b'{"a": 1, "a": 2}', b"[" * 100_000, b"1 2", b"9" * 10_000],
)
def test_a_payload_that_is_not_plain_json_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidPayload):
        parsed({"type": "object"}).check(payload)


def test_an_error_says_where_the_payload_is_wrong() -> None:
    schema = parsed(objects(a={"type": "array", "items": INT}))
    with pytest.raises(InvalidPayload, match="at /a/1"):
        schema.check(b'{"a": [1, "x"]}')
    schema.check(b'{"a": [1, 2]}')


def test_a_recursive_schema_checks_what_is_nested() -> None:
    schema = parsed(TREE)
    schema.check(b'{"v": 1, "sub": [{"v": 2, "sub": []}]}')
    with pytest.raises(InvalidPayload):
        schema.check(b'{"v": 1, "sub": [{"v": "2"}]}')
