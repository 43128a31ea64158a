"""JSON Schema: definitions, which schema accepts what another one does, and payloads in JSON.

jsonschema-rs checks definitions and payloads, without fetching anything and with a regular
expression engine whose time is linear. What the comparison cannot decide counts as incompatible:
combinators that changed, patterns, formats. Two schemas are compared by what their writers write:
a writer writes the properties that its schema names, and others only where `additionalProperties`
or `patternProperties` say so. Otherwise nobody could ever add a property.

Beware: a schema that looks at one place of a payload many times takes time for each, and one that
does so recursively takes exponential time. `_places` refuses the second and limits the first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from forebay.errors import InvalidPayload, InvalidSchema, SchemasNotInstalled
from forebay.limits import PAYLOAD_CHECK_COST_MAX, SCHEMA_DEPTH_MAX
from forebay.schemas.bounds import Steps, load_json
from forebay.schemas.json_places import Subschema, looks_of, target_of

_REGEX_BYTES: Final = 1 << 20
_EQUAL_ONLY: Final = (
    "pattern",
    "format",
    "multipleOf",
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "patternProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
    "unevaluatedItems",
    "oneOf",
    "contentEncoding",
    "contentMediaType",
)
"""Keywords of a reader that must be those of the writer, or be absent."""
_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ALL_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string"})
_TYPE_NAMES: Final = {
    type(None): "null",
    bool: "boolean",
    dict: "object",
    list: "array",
    int: "integer",
    float: "number",
    str: "string",
}

Checked: TypeAlias = Any
"""A validator of jsonschema-rs, whose class depends on the draft."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    canonical: bytes
    root: Subschema = field(repr=False)
    validator: Checked = field(repr=False, compare=False)
    looks: int
    """How often the schema looks at one place of a payload at most."""

    def unreadable(self, writer: JsonSchema) -> list[str]:
        """Why this schema refuses what `writer` allows; empty if it does not."""
        if writer.canonical == self.canonical:
            return []
        return _Comparison(writer.root, self.root).compare(writer.root, self.root, "")

    def check(self, payload: bytes) -> None:
        """Raises InvalidPayload unless the payload is JSON that the schema accepts."""
        if len(payload) * self.looks > PAYLOAD_CHECK_COST_MAX:
            raise InvalidPayload(
                f"a payload of {len(payload)} bytes takes too long with this schema, which looks "
                f"at a place up to {self.looks} times: make one of them smaller"
            )
        value = load_json(payload, "the payload", InvalidPayload)
        try:
            error = next(self.validator.iter_errors(value), None)
        except ValueError as failed:
            raise InvalidPayload(f"the payload cannot be checked: {str(failed)[:200]}") from failed
        if error is not None:
            place = "/".join(map(str, error.instance_path))[:200]
            raise InvalidPayload(
                f"the payload is not as its JSON schema says, at /{place}: {error.message[:300]}"
            )


def parse(definition: bytes) -> JsonSchema:
    """Parses a definition; InvalidSchema says what is wrong with it."""
    try:
        import jsonschema_rs
    except ImportError as error:
        raise SchemasNotInstalled(
            "schemas of the type json_schema need jsonschema-rs: pip install 'forebay[schemas]'"
        ) from error
    root = load_json(definition, "the JSON schema", InvalidSchema)
    if not isinstance(root, dict | bool):
        raise InvalidSchema("the JSON schema is neither an object nor true or false")
    try:
        jsonschema_rs.meta.validate(root)
        looks = looks_of(root)
        validator = jsonschema_rs.validator_for(
            root,
            validate_formats=False,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(
                size_limit=_REGEX_BYTES, dfa_size_limit=_REGEX_BYTES
            ),
        )
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        if isinstance(error, InvalidSchema):
            raise
        first = str(error).strip().partition("\n")[0]
        raise InvalidSchema(f"the JSON schema is not valid: {first[:300]}") from error
    canonical = json.dumps(root, separators=(",", ":"), sort_keys=True).encode()
    return JsonSchema(canonical, root, validator, looks)


class _Comparison:
    """Finds why a reader's schema may refuse what a writer's accepts."""

    def __init__(self, writer: Subschema, reader: Subschema) -> None:
        self._roots = writer, reader
        self._open: set[tuple[int, int]] = set()
        self._steps = Steps("the comparison of two JSON schemas", InvalidSchema)

    def compare(self, writer: Subschema, reader: Subschema, at: str) -> list[str]:
        self._steps.take()
        writer, reader = self._followed(writer, 0), self._followed(reader, 1)
        if reader is True or reader == {} or writer is False:
            return []
        if reader is False:
            return [f"{at or '/'}: nothing is allowed here"]
        writer = {} if writer is True else writer
        assert isinstance(writer, dict)
        assert isinstance(reader, dict)
        key = id(writer), id(reader)
        if key in self._open:  # a recursive schema: the answer is that of the comparison under way
            return []
        self._open.add(key)
        try:
            return self._objects(writer, reader, at)
        finally:
            self._open.discard(key)

    def _followed(self, schema: Subschema, side: int) -> Subschema:
        for _ in range(SCHEMA_DEPTH_MAX):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            found = target_of(self._roots[side], schema["$ref"])
            more = {key: value for key, value in schema.items() if key != "$ref"}
            if more.keys() & (_CHECKING | {"properties", "required"}):
                return {"allOf": [found, more]}
            schema = found
        return schema

    def _objects(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        if self._are_equal(writer, reader):
            return []
        values = _values_of(writer)
        if values is not None:
            return self._enumerated(values, reader, at)
        errors = self._whole(writer, reader, at)
        if not errors:
            return []
        for word in ("anyOf", "oneOf"):  # each branch of the writer must do
            if word in writer and writer.get(word) != reader.get(word):
                rest = {key: value for key, value in writer.items() if key != word}
                branches = [
                    self.compare({"allOf": [rest, each]} if rest else each, reader, at)
                    for each in writer[word]
                ]
                return [why for found in branches for why in found]
        if "allOf" in writer:  # one part of the writer is enough
            rest = {key: value for key, value in writer.items() if key != "allOf"}
            merged = _merged([rest, *(self._followed(each, 0) for each in writer["allOf"])])
            if merged is not None:
                return self.compare(merged, reader, at)
            if any(not self.compare(_open(each), reader, at) for each in writer["allOf"]):
                return []
        return errors

    def _are_equal(self, writer: dict[str, Any], reader: dict[str, Any]) -> bool:
        return writer.keys() == reader.keys() and self._is_equal(writer, reader)

    def _is_equal(self, writer: object, reader: object) -> bool:
        """Whether both are the same text without references, which may lead elsewhere."""
        before, after = _frozen(writer), _frozen(reader)
        self._steps.take((len(before) + len(after)) // 64)
        return before == after and '"$ref"' not in before

    def _same(self, writer: dict[str, Any], reader: dict[str, Any], word: str) -> bool:
        """Whether a keyword is equal on both sides, with what it depends on."""
        return all(
            self._is_equal(writer.get(name), reader.get(name))
            for name in _DEPENDING.get(word, (word,))
        )

    def _whole(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        errors = [*self._types(writer, reader, at), *self._bounds(writer, reader, at)]
        errors += [
            f"{at or '/'}: {word} was added or changed"
            for word in _EQUAL_ONLY
            if word in reader and not self._same(writer, reader, word)
        ]
        if (values := _values_of(reader)) is not None and _values_of(writer) is None:
            errors.append(f"{at or '/'}: only {json.dumps(values)[:60]} is allowed now")
        for each in reader.get("allOf", ()):
            errors += self.compare(writer, each, at)
        changed = "anyOf" in reader and not self._same(writer, reader, "anyOf")
        if changed and all(self.compare(writer, each, at) for each in reader["anyOf"]):
            errors.append(f"{at or '/'}: no branch of anyOf accepts what was allowed")
        kinds = _types_of(writer)
        if "object" in kinds:
            errors += self._properties(writer, reader, at)
        if "array" in kinds:
            errors += self._items(writer, reader, at)
        return errors

    def _types(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        more = {
            each
            for each in _types_of(writer) - _types_of(reader)
            if not (each == "integer" and "number" in _types_of(reader))
        }
        return [f"{at or '/'}: {', '.join(sorted(more))} is not allowed any more"] if more else []

    def _bounds(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        errors = []
        for word in (*_LOWER, *_UPPER):
            if word not in reader:
                continue
            before, after = writer.get(word), reader[word]
            if isinstance(before, bool) or isinstance(after, bool):  # draft 4's exclusive bounds
                fits = before == after
            else:
                fits = before is not None and (
                    before >= after if word in _LOWER else before <= after
                )
            if not fits and not (word in {"minLength", "minItems", "minProperties"} and after == 0):
                errors.append(f"{at or '/'}: {word} is stricter")
        if reader.get("uniqueItems") and not writer.get("uniqueItems"):
            errors.append(f"{at or '/'}: uniqueItems is stricter")
        return errors

    def _enumerated(self, values: list[Any], reader: dict[str, Any], at: str) -> list[str]:
        """Asks the library about each value that the writer may write."""
        import jsonschema_rs

        self._steps.take(100 * len(values))
        _, root = self._roots
        definitions = {
            word: root[word] for word in ("$schema",) if isinstance(root, dict) and word in root
        }
        if _has_ref(reader):
            return [f"{at or '/'}: an enum became a schema with references, which is not compared"]
        try:
            validator = jsonschema_rs.validator_for(
                {**definitions, **reader},
                validate_formats=False,
                offline=True,
                pattern_options=jsonschema_rs.RegexOptions(size_limit=_REGEX_BYTES),
            )
        except (ValueError, TypeError, jsonschema_rs.ReferencingError):
            return [f"{at or '/'}: cannot be compared"]
        refused = [each for each in values if not validator.is_valid(each)]
        if not refused:
            return []
        return [f"{at or '/'}: {json.dumps(refused[0])[:60]} is not allowed any more"]

    def _properties(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        before, after = writer.get("properties", {}), reader.get("properties", {})
        missing = [each for each in reader.get("required", ()) if each not in _required(writer)]
        errors = [f"{at}/{each}: is required, and was not" for each in missing]
        # What the writer says it writes. Parts that it combines may name more.
        others = writer.get("additionalProperties", bool(writer.keys() & _COMBINING))
        for name, schema in before.items():
            if name in after:
                errors += self.compare(schema, after[name], f"{at}/{name}")
            elif "additionalProperties" in reader:
                errors += self.compare(schema, reader["additionalProperties"], f"{at}/{name}")
        if others is not False:
            for name, schema in after.items():
                if name not in before:
                    errors += self.compare(others, schema, f"{at}/{name}")
            if "additionalProperties" in reader:
                errors += self.compare(others, reader["additionalProperties"], f"{at}/*")
        limited = reader.get("additionalProperties", True) is not True or bool(after)
        changed = _of_pattern(writer) and not self._same(writer, reader, "patternProperties")
        if changed and limited:
            errors.append(f"{at or '/'}: patternProperties was changed")
        return errors

    def _items(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        first, rest = _items_of(writer)
        first_read, rest_read = _items_of(reader)
        errors: list[str] = []
        for number in range(max(len(first), len(first_read))):
            wrote = first[number] if number < len(first) else rest
            reads = first_read[number] if number < len(first_read) else rest_read
            errors += self.compare(wrote, reads, f"{at}/{number}")
        return errors + self.compare(rest, rest_read, f"{at}/[]")


_CHECKING: Final = frozenset(
    {*_EQUAL_ONLY, *_LOWER, *_UPPER, "type", "enum", "const", "allOf", "anyOf", "uniqueItems"}
    | {"items", "prefixItems", "additionalItems", "additionalProperties"}
)


_COMBINING: Final = frozenset(
    {"allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies"}
)
"""Keywords whose parts may name properties."""


def _open(schema: Subschema) -> Subschema:
    """A part of a writer's schema: others may name properties that it does not."""
    if not isinstance(schema, dict) or "additionalProperties" in schema:
        return schema
    return {"allOf": [schema], "additionalProperties": True}


_DEPENDING: Final = {
    "if": ("if", "then", "else"),
    "contains": ("contains", "minContains", "maxContains"),
}


def _frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _has_ref(value: Any) -> bool:
    if isinstance(value, dict):
        return "$ref" in value or any(map(_has_ref, value.values()))
    return isinstance(value, list) and any(map(_has_ref, value))


def _values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that an enum or const lists."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _types_of(schema: dict[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    if kind is None:
        values = _values_of(schema)
        if values is None:
            return _ALL_TYPES
        return frozenset(_TYPE_NAMES[type(each)] for each in values)
    return frozenset([kind] if isinstance(kind, str) else kind)


def _required(schema: dict[str, Any]) -> set[str]:
    return set(schema.get("required", ()))


def _of_pattern(schema: dict[str, Any]) -> bool:
    return bool(schema.get("patternProperties"))


def _items_of(schema: dict[str, Any]) -> tuple[list[Subschema], Subschema]:
    """The schemas of the first items, and that of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", []), items


def _merged(parts: list[Subschema]) -> dict[str, Any] | None:
    """All parts as one schema; None if two of them say something about the same keyword."""
    merged: dict[str, Any] = {}
    for each in parts:
        if not isinstance(each, dict):
            return None
        for word, value in each.items():
            if word == "required":
                merged[word] = sorted({*merged.get(word, ()), *value})
            elif word == "properties" and not merged.get(word, {}).keys() & value.keys():
                merged[word] = {**merged.get(word, {}), **value}
            elif word in merged and merged[word] != value:
                return None
            else:
                merged[word] = value
    return merged
