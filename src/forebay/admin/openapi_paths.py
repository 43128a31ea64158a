"""The calls of the server, path by path."""

from __future__ import annotations

from typing import Final

from forebay.admin.openapi_words import (
    BYTES,
    FLAG,
    LINES,
    OF_TOPIC,
    OFFSET,
    TEXT,
    TOPIC,
    Json,
    answer,
    call,
    choice,
    path,
    problems,
    public,
    query,
    ref,
    told,
    whole,
)
from forebay.admin.openapi_work import WORK
from forebay.admin.topics import PIECES_LIMIT, PIECES_MAX, TOPICS_LIMIT, TOPICS_MAX
from forebay.limits import OFFSET_MAX

_START: Final[Json] = {"anyOf": [OFFSET, choice("earliest", "latest")], "default": "earliest"}
_FALSE: Final[Json] = {**FLAG, "default": False}


def _page(description: str, kind: str) -> Json:
    return {"200": answer(description, TEXT, kind), "304": {"description": "Not modified."}}


# ---- messages ---------------------------------------------------------------------------------

_LINES: Final = "One NewMessage in JSON on each line."
_MESSAGES: Final[dict[str, Json]] = {
    f"{TOPIC}/messages": {
        "post": call(
            "produce",
            "messages",
            "Appends messages: one that is the body, or one for each line of NDJSON.",
            parameters=(
                *OF_TOPIC,
                query(
                    "durability",
                    {**choice("buffered", "synced", "uploaded"), "default": "synced"},
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
                LINES: {"schema": told(TEXT, _LINES)},
                BYTES: {"schema": {"type": "string", "format": "binary"}},
            },
            answers={
                "200": answer("They are in the topic, which was made if need be.", ref("Appended")),
                **problems(400, 409, 413, 502, 504, 507),
            },
        ),
        "get": call(
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
                    {**choice("synced", "buffered"), "default": "synced"},
                    "`buffered` sees messages that a crash may take back.",
                ),
                query("skip_lost", _FALSE, "Tells of lost offsets in a line, and goes on."),
            ),
            answers={
                "200": answer("Lines, each one a MessageLine.", TEXT, LINES),
                **problems(400, 404, 409, 410, 416, 502, 504, 507),
            },
        ),
    },
}

# ---- topics -----------------------------------------------------------------------------------

_TOPICS: Final[dict[str, Json]] = {
    "/v1/topics": {
        "get": call(
            "listTopics",
            "topics",
            "The topics by name, and how far those are that are open here.",
            parameters=(
                query("prefix", TEXT, "What their names begin with, such as `/default/`."),
                query("limit", whole(1, TOPICS_MAX, TOPICS_LIMIT), "Of one page."),
                query("after", TEXT, "The last name of the page before."),
            ),
            answers={"200": answer("A page.", ref("TopicList")), **problems(400, 502)},
        ),
    },
    TOPIC: {
        "get": call(
            "describeTopic",
            "topics",
            "Where everything of a topic is.",
            parameters=(
                *OF_TOPIC,
                query(
                    "limit",
                    whole(0, PIECES_MAX, PIECES_LIMIT),
                    "So many of the newest segments, and of the newest objects.",
                ),
            ),
            answers={"200": answer("All facts.", ref("Topic")), **problems(400, 404, 502)},
        ),
        "put": call(
            "makeTopic",
            "topics",
            "Makes a topic; one that is there stays as it is.",
            parameters=OF_TOPIC,
            answers={
                "200": answer("It was there.", ref("Made")),
                "201": answer("It is there now.", ref("Made")),
                **problems(400, 409, 502, 507),
            },
        ),
    },
    f"{TOPIC}/explain/{{offset}}": {
        "get": call(
            "explainOffset",
            "topics",
            "Where one message is, and what may become of it.",
            parameters=(*OF_TOPIC, path("offset", OFFSET, "The offset.")),
            answers={"200": answer("The facts.", ref("Explanation")), **problems(400, 404, 502)},
        ),
    },
    f"{TOPIC}/trim": {
        "post": call(
            "trimTopic",
            "topics",
            "One pass of local retention: segments go that are verified and old enough.",
            parameters=OF_TOPIC,
            answers={
                "200": answer("The segments that went.", ref("Trimmed")),
                **problems(400, 404, 409, 502, 507),
            },
        ),
    },
}

# ---- the server itself ------------------------------------------------------------------------

_PLAIN: Final = "text/plain"
_SERVER: Final[dict[str, Json]] = {
    "/healthz": {
        "get": public(
            call(
                "health",
                "server",
                "The process lives.",
                answers={"200": answer("It does.", ref("Health")), **problems()},
            )
        ),
    },
    "/readyz": {
        "get": public(
            call(
                "readiness",
                "server",
                "The server takes messages.",
                answers={"200": answer("It does.", ref("Ready")), **problems()},
            )
        ),
    },
    "/metrics": {
        "get": call(
            "metrics",
            "server",
            "The numbers of the process, as Prometheus reads them.",
            answers={"200": answer("Text.", TEXT, _PLAIN), **problems()},
        ),
    },
    "/v1/config": {
        "get": call(
            "configuration",
            "server",
            "All settings, without secrets.",
            answers={"200": answer("The settings.", ref("Config")), **problems()},
        ),
    },
    "/openapi.json": {
        "get": call(
            "openapi",
            "server",
            "This document.",
            answers={"200": answer("It.", {"type": "object"}), **problems()},
        ),
    },
    "/v1/overview": {
        "get": call(
            "overview",
            "page",
            "Everything that the page shows.",
            parameters=(
                query("topics", whole(1, 200, 50), "Of one page."),
                query("after", TEXT, "The last name of the page before."),
                query("since", {"type": "number", "minimum": 0, "default": 0}, "Of the history."),
            ),
            answers={"200": answer("A picture.", ref("Overview")), **problems(400, 502)},
        ),
    },
    "/v1/overview/spans": {
        "get": call(
            "spans",
            "page",
            "Which offsets of a topic are where, in a window.",
            parameters=(
                query("topic", TEXT, "Its name.", required=True),
                query("start", whole(0, OFFSET_MAX, 0), "Of the window."),
                query("end", OFFSET, "Of the window; not included."),
            ),
            answers={"200": answer("Ranges.", ref("Spans")), **problems(400, 404, 502)},
        ),
    },
    "/": {
        "get": public(
            call("page", "page", "The page.", answers={**_page("It.", "text/html"), **problems()})
        ),
    },
    "/assets/{name}": {
        "get": public(
            call(
                "asset",
                "page",
                "A part of the page.",
                parameters=(path("name", {"type": "string", "minLength": 1}, "Of the file."),),
                answers={**_page("It.", "*/*"), **problems(404)},
            )
        ),
    },
}

PATHS: Final[dict[str, Json]] = {**_MESSAGES, **_TOPICS, **WORK, **_SERVER}
