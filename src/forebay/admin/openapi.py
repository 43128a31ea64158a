"""`/openapi.json`: the HTTP interface of the server, in OpenAPI 3.1.

The document is data: paths here, schemas in `openapi_schemas`. A test compares it with the routes
of the application, and another one sends the server requests of all kinds that it allows.
"""

from __future__ import annotations

import functools
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay import __version__
from forebay.admin.executors import MODIFIED
from forebay.admin.openapi_schemas import (
    COUNT,
    FLAG,
    OFFSET,
    SCHEMAS,
    TEXT,
    Json,
    described,
    enum,
    integer,
    ref,
)
from forebay.admin.topics import PARTS_LIMIT, PARTS_MAX, TOPICS_LIMIT, TOPICS_MAX
from forebay.limits import OFFSET_MAX

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
BYTES: Final = "application/octet-stream"

_NAME: Final[Json] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[A-Za-z0-9_-]+$",
}
"""Names may have letters and digits of any script, which a JSON pattern cannot express."""


@functools.cache
def document() -> bytes:
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Forebay",
                "version": __version__,
                "summary": "A tiered log store: messages in and out, what is where, jobs.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": PATHS,
            "components": {
                "schemas": SCHEMAS,
                "parameters": {
                    "namespace": path("namespace", _NAME, "`default` of `/default/orders`."),
                    "topic": path("topic", _NAME, "`orders` of `/default/orders`."),
                },
                "responses": {
                    name: response(ERROR_DESCRIPTIONS[status], ref("Error"))
                    for status, name in ERROR_NAMES.items()
                },
                "securitySchemes": {
                    "token": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "`admin.token`, where one is set.",
                    }
                },
            },
            "security": [{"token": []}, {}],
        }
    )


def routes() -> list[BaseRoute]:
    async def openapi(_request: Request) -> Response:
        return Response(document(), media_type=JSON)

    return [Route("/openapi.json", openapi, methods=["GET"])]


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


# ---- operations and responses -----------------------------------------------------------------


def operation(
    name: str,
    tag: str,
    summary: str,
    *,
    parameters: tuple[Json, ...] = (),
    body: Json | None = None,
    responses: dict[str, Json],
) -> Json:
    found: Json = {"operationId": name, "tags": [tag], "summary": summary}
    if parameters:
        found["parameters"] = list(parameters)
    if body is not None:
        found["requestBody"] = {"required": True, "content": body}
    return {**found, "responses": responses}


def public(found: Json) -> Json:
    """An operation that requires no token."""
    return {**found, "security": []}


def response(
    description: str, schema: Json, kind: str = JSON, headers: dict[str, Json] | None = None
) -> Json:
    found: Json = {"description": description, "content": {kind: {"schema": schema}}}
    return found if headers is None else {**found, "headers": headers}


def errors(*statuses: int) -> dict[str, Json]:
    """The error responses of an operation, with those that every one has."""
    return {
        str(status): {"$ref": f"#/components/responses/{ERROR_NAMES[status]}"}
        for status in sorted({*statuses, *_ALWAYS})
    }


ERROR_NAMES: Final = {
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
ERROR_DESCRIPTIONS: Final = {
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

# ---- paths ------------------------------------------------------------------------------------

_START: Final[Json] = {"anyOf": [OFFSET, enum("earliest", "latest")], "default": "earliest"}
_FALSE: Final[Json] = {**FLAG, "default": False}


def _page(description: str, kind: str) -> Json:
    return {"200": response(description, TEXT, kind), "304": {"description": "Not modified."}}


_RANGE: Final = header(
    "Range", {"type": "string", "pattern": "^bytes=[0-9]{1,18}-[0-9]{0,18}$"}, "A part of it."
)
_RANGED: Final[dict[str, Json]] = {
    "Accept-Ranges": {"schema": TEXT},
    "Content-Length": {"schema": COUNT},
}

_LINES: Final = "One NewMessage in JSON on each line."
_MESSAGES: Final[dict[str, Json]] = {
    f"{TOPIC}/messages": {
        "post": operation(
            "produce",
            "messages",
            "Appends messages: one that is the body, or one for each line of NDJSON.",
            parameters=(
                *OF_TOPIC,
                query(
                    "durability",
                    {**enum("buffered", "synced", "uploaded"), "default": "synced"},
                    "How far they have to get before the answer comes.",
                ),
                query("routing_key", TEXT, "Of a body that is one payload."),
                query(
                    "attribute",
                    {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}},
                    "`key=value`, of a body that is one payload; may be repeated.",
                ),
            ),
            body={
                LINES: {"schema": described(TEXT, _LINES)},
                BYTES: {"schema": {"type": "string", "format": "binary"}},
            },
            responses={
                "200": response(
                    "They are in the topic, which was made if need be.", ref("Appended")
                ),
                **errors(400, 409, 413, 502, 504, 507),
            },
        ),
        "get": operation(
            "consume",
            "messages",
            "Messages over all tiers, one on each line; with `follow`, those to come too.",
            parameters=(
                *OF_TOPIC,
                query("start", _START, "An offset, or an end of the topic."),
                query("end", OFFSET, "The offset to stop before."),
                query("limit", OFFSET, "So many messages at most."),
                query("follow", _FALSE, "Waits for more at the end of the topic."),
                query(
                    "visibility",
                    {**enum("synced", "buffered"), "default": "synced"},
                    "`buffered` sees messages that a crash may take back.",
                ),
                query("skip_lost", _FALSE, "Tells of lost offsets in a line, and goes on."),
            ),
            responses={
                "200": response("Lines, each one a MessageLine.", TEXT, LINES),
                **errors(400, 404, 409, 410, 416, 502, 504, 507),
            },
        ),
    },
}

_TOPICS: Final[dict[str, Json]] = {
    "/v1/topics": {
        "get": operation(
            "listTopics",
            "topics",
            "The topics by name, and how far those are that are open here.",
            parameters=(
                query("prefix", TEXT, "What their names begin with, such as `/default/`."),
                query("limit", integer(1, TOPICS_MAX, TOPICS_LIMIT), "Of one page."),
                query("after", TEXT, "The last name of the page before."),
            ),
            responses={"200": response("A page.", ref("TopicList")), **errors(400, 502)},
        ),
    },
    TOPIC: {
        "get": operation(
            "describeTopic",
            "topics",
            "Where everything of a topic is.",
            parameters=(
                *OF_TOPIC,
                query(
                    "limit",
                    integer(0, PARTS_MAX, PARTS_LIMIT),
                    "So many of the newest segments, and of the newest objects.",
                ),
            ),
            responses={
                "200": response("All facts.", ref("Topic")),
                **errors(400, 404, 502),
            },
        ),
        "put": operation(
            "makeTopic",
            "topics",
            "Makes a topic; one that is there stays as it is.",
            parameters=OF_TOPIC,
            responses={
                "200": response("It was there.", ref("Made")),
                "201": response("It is there now.", ref("Made")),
                **errors(400, 409, 502, 507),
            },
        ),
    },
    f"{TOPIC}/explain/{{offset}}": {
        "get": operation(
            "explainOffset",
            "topics",
            "Where one message is, and what may become of it.",
            parameters=(*OF_TOPIC, path("offset", OFFSET, "The offset.")),
            responses={
                "200": response("The facts.", ref("Explanation")),
                **errors(400, 404, 502),
            },
        ),
    },
    f"{TOPIC}/trim": {
        "post": operation(
            "trimTopic",
            "topics",
            "One pass of local retention: segments go that are verified and old enough.",
            parameters=OF_TOPIC,
            responses={
                "200": response("The segments that went.", ref("Trimmed")),
                **errors(400, 404, 409, 502, 507),
            },
        ),
    },
}

_SEGMENT: Final = (
    *OF_TOPIC,
    path("file", {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"}, "Its name."),
    query("log", TEXT, "The id of the log that it has to be of."),
    _RANGE,
)
_KEY: Final = path(
    "key", {"type": "string", "minLength": 1, "maxLength": 1024}, "Of the object; has slashes."
)
_OBJECT_HEADERS: Final[dict[str, Json]] = {
    **_RANGED,
    "ETag": {"schema": TEXT},
    MODIFIED: {"schema": COUNT, "required": True},
}
_RAW: Final[Json] = {"type": "string", "format": "binary"}
_BATCH: Final[Json] = {"application/json": {"schema": ref("SinkBatch")}}
_CLUSTER: Final[dict[str, Json]] = {
    f"{TOPIC}/segments/{{file}}": {
        "get": operation(
            "readSegment",
            "cluster",
            "The synced bytes of a segment.",
            parameters=_SEGMENT,
            responses={
                "200": response("All of them.", _RAW, BYTES, _RANGED),
                "206": response("A part of them.", _RAW, BYTES, _RANGED),
                **errors(400, 404, 409, 416),
            },
        ),
    },
    "/v1/objects/{key}": {
        "get": operation(
            "readObject",
            "cluster",
            "The bytes of an object, where the objects are files of the server's machine.",
            parameters=(_KEY, _RANGE),
            responses={
                "200": response("All of them.", _RAW, BYTES, _OBJECT_HEADERS),
                "206": response("A part of them.", _RAW, BYTES, _OBJECT_HEADERS),
                **errors(400, 404, 409, 416, 502),
            },
        ),
        "head": operation(
            "lookAtObject",
            "cluster",
            "The size of an object, in `Content-Length`.",
            parameters=(_KEY,),
            responses={
                "200": {"description": "It is there.", "headers": _OBJECT_HEADERS},
                **{
                    status: {"description": "As of GET, without the words."}
                    for status in errors(400, 404, 409, 502)
                },
            },
        ),
        "put": operation(
            "writeObject",
            "cluster",
            "Writes an object that the catalog has as intended, or staged rows.",
            parameters=(_KEY,),
            body={BYTES: {"schema": _RAW}},
            responses={
                "200": response("It is stored.", ref("StoredObject")),
                **errors(400, 404, 409, 502, 507),
            },
        ),
    },
    "/v1/sink/commit": {
        "post": operation(
            "commitBatch",
            "cluster",
            "Appends the staged rows of a batch of the Spark sink, each once.",
            body=_BATCH,
            responses={
                "200": response("Lines, each one a SinkLine.", TEXT, LINES),
                **errors(400, 413, 502, 504),
            },
        ),
    },
    "/v1/sink/forget": {
        "post": operation(
            "forgetBatch",
            "cluster",
            "Removes the staged rows of a batch that failed, unless it is under way.",
            body=_BATCH,
            responses={
                "200": response("Whether they went.", ref("Forgotten")),
                **errors(400, 413, 502, 504),
            },
        ),
    },
}

_ID: Final = path("id", {"type": "string", "minLength": 1}, "Of the job.")
_JOBS: Final[dict[str, Json]] = {
    "/v1/jobs": {
        "get": operation(
            "listJobs",
            "jobs",
            "Jobs on Spark, the newest first, and how the Spark driver is.",
            parameters=(
                query("kind", TEXT, "Only those of a kind."),
                query("state", TEXT, "Only those in a state."),
                query("trigger", TEXT, "Only those that were begun so."),
                query("limit", integer(1, 1000, 100), "So many at most."),
            ),
            responses={"200": response("The jobs.", ref("JobList")), **errors(400)},
        ),
        "post": operation(
            "startJob",
            "jobs",
            "Queues a job.",
            body={"application/json": {"schema": ref("NewJob")}},
            responses={
                "202": response(
                    "It is queued.", ref("Job"), headers={"Location": {"schema": TEXT}}
                ),
                **errors(400, 404, 409, 429),
            },
        ),
    },
    "/v1/jobs/{id}": {
        "get": operation(
            "showJob",
            "jobs",
            "One job.",
            parameters=(_ID,),
            responses={"200": response("The job.", ref("Job")), **errors(404)},
        ),
        "delete": operation(
            "cancelJob",
            "jobs",
            "Ends a job that is not over.",
            parameters=(_ID,),
            responses={
                "200": response("It is over.", ref("Job")),
                "202": response("It is asked to end.", ref("Job")),
                **errors(404),
            },
        ),
    },
}

_PLAIN: Final = "text/plain"
_SERVER: Final[dict[str, Json]] = {
    "/healthz": {
        "get": public(
            operation(
                "health",
                "server",
                "The process lives.",
                responses={"200": response("It does.", ref("Health")), **errors()},
            )
        ),
    },
    "/readyz": {
        "get": public(
            operation(
                "readiness",
                "server",
                "The server takes messages.",
                responses={"200": response("It does.", ref("Ready")), **errors()},
            )
        ),
    },
    "/metrics": {
        "get": operation(
            "metrics",
            "server",
            "The numbers of the process, as Prometheus reads them.",
            responses={"200": response("Text.", TEXT, _PLAIN), **errors()},
        ),
    },
    "/v1/config": {
        "get": operation(
            "configuration",
            "server",
            "All settings, without secrets.",
            responses={"200": response("The settings.", ref("Config")), **errors()},
        ),
    },
    "/openapi.json": {
        "get": operation(
            "openapi",
            "server",
            "This document.",
            responses={"200": response("It.", {"type": "object"}), **errors()},
        ),
    },
    "/v1/overview": {
        "get": operation(
            "overview",
            "page",
            "Everything that the page shows.",
            parameters=(
                query("topics", integer(1, 200, 50), "Of one page."),
                query("after", TEXT, "The last name of the page before."),
                query("since", {"type": "number", "minimum": 0, "default": 0}, "Of the history."),
            ),
            responses={"200": response("A picture.", ref("Overview")), **errors(400, 502)},
        ),
    },
    "/v1/overview/spans": {
        "get": operation(
            "spans",
            "page",
            "Which offsets of a topic are where, in a window.",
            parameters=(
                query("topic", TEXT, "Its name.", required=True),
                query("start", integer(0, OFFSET_MAX, 0), "Of the window."),
                query("end", OFFSET, "Of the window; not included."),
            ),
            responses={"200": response("Ranges.", ref("Spans")), **errors(400, 404, 502)},
        ),
    },
    "/": {
        "get": public(
            operation(
                "page",
                "page",
                "The page.",
                responses={**_page("It.", "text/html"), **errors()},
            )
        ),
    },
    "/assets/{name}": {
        "get": public(
            operation(
                "asset",
                "page",
                "A part of the page.",
                parameters=(path("name", {"type": "string", "minLength": 1}, "Of the file."),),
                responses={**_page("It.", "*/*"), **errors(404)},
            )
        ),
    },
}

PATHS: Final[dict[str, Json]] = {**_MESSAGES, **_TOPICS, **_CLUSTER, **_JOBS, **_SERVER}
