"""Records: the JSON bodies of requests and responses as typed structures, and how they travel.

A body is declared once, as a `Record` beside the handler that uses it. `decode_body` checks a
request against its record, `json_response` encodes one, and `forebay.admin.operations` makes the
OpenAPI schema from it. Limits are part of a field's type: `Annotated[int, Meta(ge=1)]`.

Beware: None in JSON is `null`, and a field that may be absent is `| UnsetType` with the default
`UNSET`. A field with another default is always sent.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from msgspec import DecodeError, Meta, Struct, ValidationError, to_builtins
from msgspec.json import Decoder, Encoder, schema
from starlette.responses import Response

from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
_SHOWN: Final = 80


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """An object with these fields and no others."""

    extra_schema: ClassVar[dict[str, Any]] = {}
    """Additions to the JSON Schema that the field types do not express."""


Count: TypeAlias = Annotated[int, Meta(ge=0)]
Offset: TypeAlias = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Seconds: TypeAlias = Annotated[float, Meta(description="Seconds since 1970-01-01 UTC.")]
OffsetRange: TypeAlias = Annotated[
    tuple[Count, Count], Meta(description="The first offset, and one more than the last.")
]
_R = TypeVar("_R")


def one_of(*words: str) -> Meta:
    """The words that a text can be. They are documented, and not checked when it is read."""
    return Meta(extra_json_schema={"enum": list(words)})


# ---- encoding ---------------------------------------------------------------------------------

ENCODER: Final = Encoder()


def encode(value: object) -> bytes:
    """The value as JSON. What UTF-8 cannot express becomes `?`: a file name in an error may."""
    try:
        return ENCODER.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(to_builtins(value), separators=(",", ":"), ensure_ascii=False)
        return text.encode(errors="replace")


def json_line(value: object) -> bytes:
    """The value as one line of NDJSON."""
    return encode(value) + b"\n"


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(value), status, headers, media_type=JSON)


# ---- decoding ---------------------------------------------------------------------------------


def decode_body(body: bytes, decoder: Decoder[_R]) -> _R:
    """The record in a body; UsageError, which names the field and the rule, if it has none."""
    try:
        return decoder.decode(body)
    except ValidationError as error:
        raise UsageError(explain(error, decoder.type)) from error
    except (DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the body is nested too deeply") from error


_GOT: Final = re.compile(r"got `(\w+)`")
_FIELD: Final = re.compile(r"field `(.*)`", re.DOTALL)
_STEP: Final = re.compile(r"\[[^]]*\]|[^.\[]+")
_KINDS: Final = {
    "array": "a list",
    "bool": "a boolean",
    "boolean": "true or false",
    "float": "a number",
    "int": "a number",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "str": "text",
    "string": "text",
}
"""Types by the names that msgspec and JSON Schema have for them."""


def explain(error: ValidationError, kind: Any, what: str = "the body") -> str:
    """Returns a message such as `rows is text; it must be a whole number from 0 on`.

    `kind` is the type that was expected. `what` is the subject if the value as a whole is wrong.
    """
    text, _, place = str(error).partition(" - at `")
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    schema = _schema_at(schema_of(kind), path)
    if text.startswith(("Expected", "Invalid enum")):
        got = _GOT.search(text)
        given = f"is {_KINDS.get(got[1], got[1])}; it must be" if got else "must be"
        return f"{path or what} {given} {rule(schema)}"
    within = f"{path}: " if path else ""
    if match := _FIELD.search(text):
        if "unknown" not in text:
            return f"{within}the key {match[1]!r} is missing"
        known = ", ".join(schema.get("properties", ()))
        return f"{within}unknown key {match[1][:_SHOWN]!r}; known ones: {known}"
    return f"{within}{text[:1].lower()}{text[1:]}"


@functools.cache
def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type, with the schemas of records in `$defs`."""
    return schema(kind)


def _schema_at(root: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of the value at a path like `parts[0].key`."""
    found = _resolved(root, root)
    for step in _STEP.findall(path):
        below: dict[str, Any] = {}
        for each in found.get("anyOf", [found]):
            if step.startswith("["):
                below |= each.get("items") or each.get("additionalProperties") or {}
            else:
                below |= each.get("properties", {}).get(step, {})
        found = _resolved(below, root)
    return found


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema that a reference points to."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return root["$defs"][name] if name else schema


def rule(schema: dict[str, Any]) -> str:
    """Describes in words the values that a schema allows."""
    if "anyOf" in schema:
        return ", or ".join(map(rule, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    words = _KINDS.get(schema.get("type", "object"), "another value")
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        return (
            f"{words} from {least} on"
            if most in {None, OFFSET_MAX}
            else f"{words}, {least} to {most}"
        )
    entries = schema.get("maxItems", schema.get("maxProperties"))
    return words if entries is None else f"{words} of at most {entries} entries"
