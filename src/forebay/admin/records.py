"""Records: the JSON bodies of requests and responses as typed structures, and how they travel.

A body is declared once, as a `Record` beside the handler that uses it. `decode_body` checks a
request against its record, `json_response` encodes one, and `forebay.admin.operations` makes the
OpenAPI schema from it. Limits are part of a field's type: `Annotated[int, Meta(ge=1)]`.

What a caller gets wrong: None in JSON is `null`, and a field that may be absent is `| UnsetType`
with the default `UNSET`. A field with another default is always sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from msgspec import DecodeError, Meta, Struct, ValidationError
from msgspec.json import Decoder, Encoder
from starlette.responses import Response

from forebay.errors import UsageError
from forebay.limits import OFFSET_MAX

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
_SHOWN: Final = 80


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """An object with these fields and no others."""

    extra_schema: ClassVar[dict[str, Any]] = {}
    """What JSON Schema says beyond the types of the fields."""


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


def json_line(value: object) -> bytes:
    """The value as one line of NDJSON."""
    return ENCODER.encode(value) + b"\n"


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(ENCODER.encode(value), status, headers, media_type=JSON)


# ---- decoding ---------------------------------------------------------------------------------


def decode_body(body: bytes, decoder: Decoder[_R]) -> _R:
    """The record in a body; UsageError, which names the field and the rule, if it has none."""
    try:
        return decoder.decode(body)
    except ValidationError as error:
        raise UsageError(explain(error, decoder.type)) from error
    except (DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error


_EXPECTED: Final = re.compile(r"Expected `(?P<kind>[^`]+)`(?:, got `(?P<found>\w+)`)?(?P<rule>.*)")
_NAMED: Final = re.compile(r"(?P<what>.*field) `(?P<name>.*)`", re.DOTALL)
_KINDS: Final = {
    "array": "a list",
    "bool": "a boolean",
    "float": "a number",
    "int": "a whole number",
    "null": "null",
    "object": "an object",
    "str": "text",
}


def explain(error: ValidationError, kind: Any) -> str:
    """What is wrong with a body and what to do, such as `rows is text; it must be a number`.

    `kind` is the type that the body should have: the fields that it knows are listed where a field
    is unknown.
    """
    text, _, place = str(error).partition(" - at `")
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    if match := _EXPECTED.fullmatch(text):
        allowed = " or ".join(_KINDS.get(each, each) for each in match["kind"].split(" | "))
        found = match["found"]
        given = f"is {_KINDS.get(found, found)}; it must be" if found else "must be"
        return f"{path or 'the body'} {given} {allowed}{match['rule']}"
    if match := _NAMED.fullmatch(text):
        within = f"{path}: " if path else ""
        name = repr(match["name"][:_SHOWN])
        if "unknown" not in match["what"]:
            return f"{within}the field {name} is missing"
        known = getattr(kind, "__struct_encode_fields__", ())
        return f"{within}unknown field {name}" + (
            f"; known are {', '.join(known)}" if known else ""
        )
    return f"{path or 'the body'}: {text[:1].lower()}{text[1:]}"
