"""The words that the OpenAPI document is written in: schemas, parameters and answers. Pure."""

from __future__ import annotations

from typing import Any, Final

from forebay.limits import OFFSET_MAX

Json = dict[str, Any]

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
BYTES: Final = "application/octet-stream"

TEXT: Final[Json] = {"type": "string"}
FLAG: Final[Json] = {"type": "boolean"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
SECONDS: Final[Json] = {"type": "number", "description": "Seconds since 1970-01-01 UTC."}
RANGE: Final[Json] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 2,
    "maxItems": 2,
    "description": "Offsets: the first, and one more than the last.",
}
OFFSET: Final[Json] = {"type": "integer", "minimum": 0, "maximum": OFFSET_MAX}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def told(schema: Json, description: str) -> Json:
    """The schema with what it means."""
    return {**schema, "description": description}


def nullable(schema: Json) -> Json:
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def listed(items: Json, **bounds: int) -> Json:
    return {"type": "array", "items": items, **bounds}


def choice(*words: str) -> Json:
    return {"type": "string", "enum": list(words)}


def whole(least: int, most: int, default: int | None = None) -> Json:
    found: Json = {"type": "integer", "minimum": least, "maximum": most}
    return found if default is None else {**found, "default": default}


def record(properties: dict[str, Json], *, optional: tuple[str, ...] = ()) -> Json:
    """An object that has these keys and no others; all but the optional ones always."""
    return {**loose(properties, optional=optional), "additionalProperties": False}


def loose(properties: dict[str, Json], *, optional: tuple[str, ...] = ()) -> Json:
    """An object that has at least these keys."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


# ---- parameters -------------------------------------------------------------------------------


def query(name: str, schema: Json, description: str, *, required: bool = False) -> Json:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "schema": schema,
        "description": description,
    }


def path(name: str, schema: Json, description: str) -> Json:
    return {**query(name, schema, description, required=True), "in": "path"}


def header(name: str, schema: Json, description: str) -> Json:
    return {**query(name, schema, description), "in": "header"}


def shared(name: str) -> Json:
    return {"$ref": f"#/components/parameters/{name}"}


TOPIC: Final = "/v1/topics/{namespace}/{topic}"
OF_TOPIC: Final = (shared("namespace"), shared("topic"))


# ---- calls ----------------------------------------------------------------------------------


def call(
    name: str,
    tag: str,
    summary: str,
    *,
    parameters: tuple[Json, ...] = (),
    body: Json | None = None,
    answers: dict[str, Json],
) -> Json:
    found: Json = {"operationId": name, "tags": [tag], "summary": summary}
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"] = {"required": True, "content": body}
    return {**found, "responses": answers}


def public(operation: Json) -> Json:
    """One that wants no token."""
    return {**operation, "security": []}


# ---- answers ----------------------------------------------------------------------------------


def answer(
    description: str, schema: Json, kind: str = JSON, headers: dict[str, Json] | None = None
) -> Json:
    found: Json = {"description": description, "content": {kind: {"schema": schema}}}
    return found if headers is None else {**found, "headers": headers}


def problems(*statuses: int) -> dict[str, Json]:
    """The error answers of a call, and those of every call."""
    return {
        str(status): {"$ref": f"#/components/responses/{PROBLEMS[status]}"}
        for status in sorted({*statuses, *_ALWAYS})
    }


PROBLEMS: Final = {
    400: "UsageError",
    401: "TokenWanted",
    403: "Refused",
    404: "NotFound",
    409: "Conflict",
    410: "Lost",
    412: "AnotherStore",
    413: "TooLarge",
    416: "OutOfRange",
    429: "TooMany",
    500: "InternalError",
    502: "StoreRefused",
    503: "Unavailable",
    504: "TimedOut",
    507: "DiskFull",
}
_ALWAYS: Final = (401, 403, 412, 500, 503)
MEANINGS: Final = {
    400: "The call cannot be right as it is: the message says what to change.",
    401: "A token is wanted: `Authorization: Bearer`.",
    403: "The request comes from the page of another site, or names another host.",
    404: "There is no such thing here.",
    409: "The state of the server, or of the topic, forbids it.",
    410: "The offsets are recorded as lost; `end` is where to go on.",
    412: "`Forebay-Store` names another store than this server's: nothing was taken.",
    413: "More than one request may carry.",
    416: "Not in the range that there is; `start` and `end` tell it.",
    429: "As many wait as may: come back later.",
    500: "The server failed, or stored data is damaged; its log says more.",
    502: "The object store or the catalog refuses what the server asks.",
    503: "Not now: come back later. What was asked may have happened, unless `taken` is false.",
    504: "It was not done in time; it may still happen.",
    507: "The disk is full. What was acknowledged is kept; what was asked may have happened.",
}
