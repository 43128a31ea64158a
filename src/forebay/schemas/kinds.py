"""The kinds of schemas: parsing by kind, fingerprints, and the modes of compatibility.

    backward   the new schema reads what was written with the latest one
    forward    the latest schema reads what is written with the new one
    full       both
    none       anything goes, another kind too

As in Danube, a new schema is compared with the latest version alone. Parsed schemas are kept: a
definition of Protobuf takes a process to compile.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Final, TypeAlias

from forebay.errors import InvalidPayload, UsageError
from forebay.format.schema import KINDS
from forebay.limits import PAYLOAD_CHECK_BYTES_MAX, SCHEMAS_CACHED_MAX
from forebay.schemas import avro, json_schema, protobuf
from forebay.schemas.avro import AvroSchema
from forebay.schemas.json_schema import JsonSchema
from forebay.schemas.plain import PlainSchema
from forebay.schemas.protobuf import ProtobufSchema

_ALIASES: Final = {"jsonschema": "json_schema", "json": "json_schema", "proto": "protobuf"}
_REASONS_MAX: Final = 20

Parsed: TypeAlias = AvroSchema | JsonSchema | ProtobufSchema | PlainSchema


def kind_named(name: str) -> str:
    """The kind in its usual spelling; UsageError if there is none of this name."""
    found = _ALIASES.get(name.lower(), name.lower())
    if found not in KINDS:
        raise UsageError(f"the type of a schema is {name[:80]!r}; use one of {', '.join(KINDS)}")
    return found


class _Cache:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], Parsed] = OrderedDict()

    def parse(self, kind: str, definition: bytes) -> Parsed:
        key = kind, hashlib.sha256(definition).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = _parsed(kind, definition)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > SCHEMAS_CACHED_MAX:
                self._kept.popitem(last=False)
        return found


def _parsed(kind: str, definition: bytes) -> Parsed:
    match kind:
        case "avro":
            return avro.parse(definition)
        case "json_schema":
            return json_schema.parse(definition)
        case "protobuf":
            return protobuf.parse(definition)
        case _:
            return PlainSchema(kind)


_cache: Final = _Cache()


def parse(kind: str, definition: bytes) -> Parsed:
    """Parses a definition, which may take a while. Raises InvalidSchema and SchemasNotInstalled."""
    return _cache.parse(kind, definition)


def fingerprint(kind: str, schema: Parsed) -> str:
    """The same for definitions that differ in what means nothing, such as spaces."""
    return hashlib.sha256(kind.encode() + b"\0" + schema.canonical).hexdigest()


def incompatible(mode: str, new: Parsed, latest: Parsed) -> list[str]:
    """Why the new schema breaks the mode; empty if it does not."""
    if mode == "none":
        return []
    errors: list[str] = []
    if mode in {"backward", "full"}:
        errors += [f"the new schema does not read old data: {why}" for why in _why(new, latest)]
    if mode in {"forward", "full"}:
        errors += [f"the old schema does not read new data: {why}" for why in _why(latest, new)]
    return errors[:_REASONS_MAX]


def _why(reader: Parsed, writer: Parsed) -> list[str]:
    try:
        return _unreadable(reader, writer)
    except RecursionError:
        return ["the two are nested too deep to be compared"]


def _unreadable(reader: Parsed, writer: Parsed) -> list[str]:
    match reader, writer:
        case AvroSchema(), AvroSchema():
            return reader.unreadable(writer)
        case JsonSchema(), JsonSchema():
            return reader.unreadable(writer)
        case ProtobufSchema(), ProtobufSchema():
            return reader.unreadable(writer)
        case PlainSchema(), PlainSchema():
            return reader.unreadable(writer)
    return ["it is of another type"]


def check_payload(schema: Parsed, payload: bytes) -> None:
    """Raises InvalidPayload unless the payload is as the schema says."""
    if len(payload) > PAYLOAD_CHECK_BYTES_MAX and not _is_bytes(schema):
        raise InvalidPayload(
            f"a payload of {len(payload)} bytes; at most {PAYLOAD_CHECK_BYTES_MAX} are checked "
            "against a schema: send smaller messages, or check no payloads of the topic"
        )
    schema.check(payload)


def _is_bytes(schema: Parsed) -> bool:
    return isinstance(schema, PlainSchema) and schema.kind == "bytes"
