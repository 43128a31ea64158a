"""Avro: definitions, which schema reads the data of which, and payloads in the binary encoding.

fastavro parses definitions and makes the canonical form. Resolution follows the rules of Avro's
specification; tests hold it against what fastavro reads. Payloads are checked by a walk that makes
no values: it takes a limited number of steps, whatever the bytes say, and no stack to speak of.

A record may have been renamed: names are compared without their namespace, and the aliases of the
reader count. Logical types are annotations, and say nothing about compatibility.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from forebay.errors import InvalidPayload, InvalidSchema, SchemasNotInstalled
from forebay.limits import (
    PAYLOAD_STEPS,
    PAYLOAD_STEPS_PER_BYTE,
    SCHEMA_DEPTH_MAX,
    SCHEMA_NODES_MAX,
)
from forebay.schemas.bounds import Steps, load_json

Type: TypeAlias = Any
"""A parsed type: the name of a primitive or of a named type, a dict, or the list of a union."""

_PROMOTED: Final = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}
"""What is written as the first is read as the second."""
_PRIMITIVES: Final = frozenset(
    {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}
)
_NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_VARINT_BYTES: Final = 10
_FIXED_SIZES: Final = {"float": 4, "double": 8}
_BLOCK_ITEMS_MAX: Final = 2**40
_MEMORY: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class AvroSchema:
    canonical: bytes
    root: Type = field(repr=False)
    named: dict[str, dict[str, Any]] = field(repr=False)

    def unreadable(self, writer: AvroSchema) -> list[str]:
        """Why data of `writer` cannot be read with this schema; empty if it can."""
        return _Resolution(writer, self).compare(writer.root, self.root, "")

    def check(self, payload: bytes) -> None:
        """Raises InvalidPayload unless the payload is one value of the schema, and nothing more."""
        walk = _Walk(self, payload)
        walk.value(self.root)
        if walk.at < len(payload):
            raise InvalidPayload(
                f"the payload has {len(payload) - walk.at} bytes after the value of the schema"
            )


def parse(definition: bytes) -> AvroSchema:
    """Parses a definition in JSON; InvalidSchema says what is wrong with it."""
    try:
        from fastavro.schema import (
            SchemaParseException,
            UnknownType,
            parse_schema,
            to_parsing_canonical_form,
        )
    except ImportError as error:
        raise SchemasNotInstalled(
            "schemas of the type avro need fastavro: pip install 'forebay[schemas]'"
        ) from error
    source = load_json(definition, "the Avro schema", InvalidSchema)
    if not isinstance(source, str | dict | list):
        raise InvalidSchema("the Avro schema is neither a name, an object nor a list")
    if _nodes(source) > SCHEMA_NODES_MAX:
        raise InvalidSchema(f"the Avro schema has more than {SCHEMA_NODES_MAX} parts")
    named: dict[str, Any] = {}
    try:
        root = parse_schema(source, named, _write_hint=False)
        canonical = to_parsing_canonical_form(root).encode()
    except UnknownType as error:
        raise InvalidSchema(
            f"the Avro schema names the type {error.name!r}, which it has not"
        ) from error
    except (SchemaParseException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidSchema(f"the Avro schema is not valid: {_text(error)}") from error
    except RecursionError as error:
        raise InvalidSchema("the Avro schema is nested too deep") from error
    schema = AvroSchema(canonical, root, named)
    _require_finite(schema)
    return schema


def _text(error: Exception) -> str:
    return _MEMORY.sub("", f"{type(error).__name__}: {error}")[:300]


def _nodes(source: Any) -> int:
    count, waiting = 0, [source]
    while waiting:
        each = waiting.pop()
        count += 1
        waiting += (
            each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        )
    return count


def _require_finite(schema: AvroSchema) -> None:
    """Refuses a record that contains itself in every value: no value of it ends."""
    finite: set[str] = set()

    def ends(kind: Type) -> bool:
        if isinstance(kind, list):
            return any(ends(each) for each in kind)
        if isinstance(kind, str):
            return kind in _PRIMITIVES or kind in finite
        if kind["type"] in {"record", "error"}:
            return all(ends(each["type"]) for each in kind["fields"])
        return not isinstance(kind["type"], dict | list) or ends(kind["type"])

    steps = Steps("the Avro schema", InvalidSchema)
    changed = True
    while changed:
        changed = False
        for name, kind in schema.named.items():
            steps.take()
            if name not in finite and ends(kind):
                finite.add(name)
                changed = True
    endless = sorted(schema.named.keys() - finite)
    if endless:
        raise InvalidSchema(f"the Avro record {endless[0]!r} contains itself in every value")


def _kind(kind: Type) -> str:
    return "union" if isinstance(kind, list) else kind if isinstance(kind, str) else kind["type"]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


class _Resolution:
    """Compares the types of a writer with those of a reader."""

    def __init__(self, writer: AvroSchema, reader: AvroSchema) -> None:
        self._writer = writer
        self._reader = reader
        self._known: dict[tuple[str, str], list[str]] = {}
        self._steps = Steps("the comparison of two Avro schemas", InvalidSchema)

    def compare(self, writer: Type, reader: Type, at: str) -> list[str]:
        self._steps.take()
        writer, reader = _resolved(writer, self._writer), _resolved(reader, self._reader)
        if isinstance(writer, list):
            return [why for each in writer for why in self.compare(each, reader, at)]
        if isinstance(reader, list):
            return self._in_union(writer, reader, at)
        wrote, reads = _kind(writer), _kind(reader)
        if wrote != reads:
            if (wrote, reads) in _PROMOTED:
                return []
            return [f"{at or 'the schema'}: {reads} does not read {wrote}"]
        match reads:
            case "array":
                return self.compare(writer["items"], reader["items"], f"{at}[]")
            case "map":
                return self.compare(writer["values"], reader["values"], f"{at}{{}}")
            case "record" | "error" | "enum" | "fixed":
                return self._named(writer, reader, at)
        return []

    def _in_union(self, writer: Type, reader: list[Type], at: str) -> list[str]:
        if any(not self.compare(writer, each, at) for each in reader):
            return []
        return [f"{at or 'the schema'}: the union does not read {_described(writer)}"]

    def _named(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        names = {_short(reader["name"]), *map(_short, reader.get("aliases", ()))}
        if _short(writer["name"]) not in names:
            return [f"{at or 'the schema'}: {reader['name']} does not read {writer['name']}"]
        key = writer["name"], reader["name"]
        if key not in self._known:
            self._known[key] = []  # taken to be readable where the type contains itself
            compared = {"enum": self._enum, "fixed": self._fixed}.get(reader["type"], self._record)
            self._known[key] = compared(writer, reader, at)
        return self._known[key]

    def _enum(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        missing = [each for each in writer["symbols"] if each not in set(reader["symbols"])]
        if not missing or reader.get("default") is not None:
            return []
        return [f"{at or reader['name']}: the enum has no symbol {missing[0]}, and no default"]

    def _fixed(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        if writer["size"] == reader["size"]:
            return []
        return [f"{at or reader['name']}: {writer['size']} bytes became {reader['size']}"]

    def _record(self, writer: dict[str, Any], reader: dict[str, Any], at: str) -> list[str]:
        written = {each["name"]: each for each in writer["fields"]}
        errors: list[str] = []
        for each in reader["fields"]:
            place = f"{at}.{each['name']}" if at else each["name"]
            names = (each["name"], *each.get("aliases", ()))
            found = next((written[name] for name in names if name in written), None)
            if found is not None:
                errors += self.compare(found["type"], each["type"], place)
            elif "default" not in each:
                errors.append(f"{place}: a new field without a default")
        return errors


def _resolved(kind: Type, schema: AvroSchema) -> Type:
    """The type without the indirections of names and of `{"type": ...}`."""
    for _ in range(SCHEMA_DEPTH_MAX + 1):
        if isinstance(kind, str) and kind not in _PRIMITIVES:
            kind = schema.named[kind]
        if not isinstance(kind, dict):
            return kind
        if kind["type"] in _PRIMITIVES:
            return kind["type"]  # with a logical type, which is an annotation
        if not isinstance(kind["type"], dict | list):
            return kind
        kind = kind["type"]
    return kind


def _described(kind: Type) -> str:
    name = _kind(kind)
    return f"{name} {kind['name']}" if name in _NAMED else name


class _Walk:
    """Reads one value of a schema without keeping it."""

    def __init__(self, schema: AvroSchema, payload: bytes) -> None:
        self._schema = schema
        self._payload = payload
        self._depth = 0
        most = PAYLOAD_STEPS + PAYLOAD_STEPS_PER_BYTE * len(payload)
        self._steps = Steps("the payload", InvalidPayload, most)
        self.at = 0

    def value(self, kind: Type) -> None:
        self._steps.take()
        kind = _resolved(kind, self._schema)
        name = _kind(kind)
        match name:
            case "null":
                return
            case "boolean":
                if self._take(1) not in (b"\0", b"\1"):
                    raise self._wrong("a boolean is neither 0 nor 1")
            case "int":
                if not -(2**31) <= self._number() < 2**31:
                    raise self._wrong("an int has more than 32 bits")
            case "long":
                self._number()
            case "float" | "double":
                self._take(_FIXED_SIZES[name])
            case "bytes":
                self._take(self._length())
            case "string":
                self._text()
            case "fixed":
                self._take(kind["size"])
            case "enum":
                if not 0 <= self._number() < len(kind["symbols"]):
                    raise self._wrong(f"there is no such symbol of {kind['name']}")
            case _:
                self._nested(name, kind)

    def _nested(self, name: str, kind: Type) -> None:
        self._depth += 1
        if self._depth > SCHEMA_DEPTH_MAX:
            raise self._wrong(f"the value is nested more than {SCHEMA_DEPTH_MAX} deep")
        if name == "union":
            branch = self._number()
            if not 0 <= branch < len(kind):
                raise self._wrong(f"a union of {len(kind)} types has no branch {branch}")
            self.value(kind[branch])
        elif name == "array":
            self._blocks(kind["items"], keyed=False)
        elif name == "map":
            self._blocks(kind["values"], keyed=True)
        else:
            for each in kind["fields"]:
                self.value(each["type"])
        self._depth -= 1

    def _blocks(self, item: Type, *, keyed: bool) -> None:
        while (count := self._number()) != 0:
            if count < 0:
                self._length()
                count = -count
            if count > _BLOCK_ITEMS_MAX:
                raise self._wrong(f"a block of {count} items")
            for _ in range(count):
                if keyed:
                    self._text()
                self.value(item)

    def _text(self) -> None:
        try:
            self._take(self._length()).decode()
        except UnicodeDecodeError:
            raise self._wrong("a string is not UTF-8") from None

    def _length(self) -> int:
        length = self._number()
        if length < 0:
            raise self._wrong("a length is negative")
        return length

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._payload):
            raise self._wrong("the payload ends in the middle of a value")
        found, self.at = self._payload[self.at : end], end
        return found

    def _number(self) -> int:
        number = shift = 0
        for _ in range(_VARINT_BYTES):
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                if number >= 2**64:
                    break
                return (number >> 1) ^ -(number & 1)
        raise self._wrong("a number has more than 64 bits")

    def _wrong(self, why: str) -> InvalidPayload:
        return InvalidPayload(
            f"the payload is not as its Avro schema says: {why}, at byte {self.at}"
        )
