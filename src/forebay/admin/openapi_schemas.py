"""The schemas of request and response bodies in the OpenAPI document, and functions to write them.

The document around them, with the paths, is in `openapi`.
"""

from __future__ import annotations

from typing import Any, Final

from forebay.limits import ATTRIBUTES_MAX, OFFSET_MAX

Json = dict[str, Any]

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


def described(schema: Json, description: str) -> Json:
    """The schema with a description."""
    return {**schema, "description": description}


def nullable(schema: Json) -> Json:
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Json, **bounds: int) -> Json:
    return {"type": "array", "items": items, **bounds}


def enum(*words: str) -> Json:
    return {"type": "string", "enum": list(words)}


def integer(least: int, most: int, default: int | None = None) -> Json:
    found: Json = {"type": "integer", "minimum": least, "maximum": most}
    return found if default is None else {**found, "default": default}


def strict_object(properties: dict[str, Json], *, optional: tuple[str, ...] = ()) -> Json:
    """An object that has these keys and no others; all but the optional ones always."""
    return {**open_object(properties, optional=optional), "additionalProperties": False}


def open_object(properties: dict[str, Json], *, optional: tuple[str, ...] = ()) -> Json:
    """An object that has at least these keys."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_ATTRIBUTES: Final[Json] = {
    "type": "object",
    "additionalProperties": TEXT,
    "maxProperties": ATTRIBUTES_MAX,
}
_PAYLOAD: Final[dict[str, Json]] = {
    "payload": described(TEXT, "Of a payload that is UTF-8."),
    "payload_base64": described(TEXT, "Of any other."),
}
_ONE_PAYLOAD: Final[Json] = {"oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]}

# ---- errors, health ---------------------------------------------------------------------------

_GENERAL: Final[dict[str, Json]] = {
    "Error": strict_object(
        {
            "error": {
                **open_object(
                    {
                        "kind": described(TEXT, "The name of the error, as the library has it."),
                        "message": described(TEXT, "What is wrong, where, and what to do."),
                        "taken": described(
                            FLAG,
                            "`false`: nothing of the request was taken, for sure. Missing: that "
                            "is not known.",
                        ),
                    },
                    optional=("taken",),
                ),
                "description": "Some kinds have more fields, such as `start` and `end`.",
            }
        }
    ),
    "Health": strict_object(
        {
            "status": enum("ok"),
            "instance": described(TEXT, "Of this run of the server."),
            "store": described(TEXT, "Of the data directory: the same from one run to the next."),
            "up_seconds": {"type": "number"},
        }
    ),
    "Ready": strict_object({"status": enum("ready"), "instance": TEXT}),
    "Config": described(
        open_object(
            {"data": nullable(TEXT), "storage": {"type": "object"}, "admin": {"type": "object"}}
        ),
        "Section by section as in the configuration file, all keys given; secrets are `***`.",
    ),
}

# ---- messages ---------------------------------------------------------------------------------

_MESSAGES: Final[dict[str, Json]] = {
    "NewMessage": {
        **strict_object(
            {**_PAYLOAD, "attributes": nullable(_ATTRIBUTES), "routing_key": nullable(TEXT)},
            optional=("payload", "payload_base64", "attributes", "routing_key"),
        ),
        **_ONE_PAYLOAD,
    },
    "Message": {
        **strict_object(
            {
                "offset": COUNT,
                "publish_time": described(COUNT, "Milliseconds since 1970-01-01 UTC."),
                **_PAYLOAD,
                "attributes": _ATTRIBUTES,
                "routing_key": nullable(TEXT),
            },
            optional=("payload", "payload_base64"),
        ),
        **_ONE_PAYLOAD,
    },
    "MessageLine": described(
        {"oneOf": [ref("Message"), strict_object({"lost": RANGE}), ref("Error")]},
        "One line of an answer. An error is the last line.",
    ),
    "Appended": strict_object(
        {
            "topic": TEXT,
            "first_offset": COUNT,
            "next_offset": COUNT,
            "count": COUNT,
            "durability": enum("buffered", "synced", "uploaded"),
        }
    ),
}

# ---- topics -----------------------------------------------------------------------------------

_STAGES: Final = ("start", "appended", "synced", "uploaded", "verified")
_PIECE: Final[dict[str, Json]] = {"start_offset": COUNT, "next_offset": COUNT, "bytes": COUNT}
_TOPICS: Final[dict[str, Json]] = {
    "TopicList": strict_object(
        {
            "topics": array(
                strict_object(
                    {
                        "topic": TEXT,
                        "open": described(FLAG, "Whether this server has it open."),
                        **{
                            stage: described(nullable(COUNT), "Known of a topic that is open.")
                            for stage in _STAGES
                        },
                    }
                )
            ),
            "total": described(COUNT, "Of all pages."),
            "next": described(
                nullable(TEXT), "What `after` is for the next page; null on the last."
            ),
        }
    ),
    "Segment": strict_object(
        {
            "file": TEXT,
            **_PIECE,
            "uploaded": FLAG,
            "verified": FLAG,
            "deletable": FLAG,
            "kept_because": nullable(TEXT),
        }
    ),
    "Object": strict_object(
        {
            "object_id": TEXT,
            **_PIECE,
            "created_at": described(COUNT, "Seconds since 1970-01-01 UTC."),
            "verified": FLAG,
        }
    ),
    "Topic": strict_object(
        {
            "topic": TEXT,
            "open": described(FLAG, "Whether this server has it open."),
            "start_offset": COUNT,
            "appended": described(nullable(COUNT), "Next offset of the stage, as the next ones."),
            "synced": described(nullable(COUNT), "Null where the topic's log is not here."),
            "uploaded": COUNT,
            "verified": COUNT,
            "memory": described(nullable(RANGE), "What the owner holds in memory."),
            "reserved": nullable(COUNT),
            "epoch": nullable(COUNT),
            "owner": nullable(TEXT),
            "lost": array(RANGE),
            "segments": described(array(ref("Segment")), "The newest ones, oldest first."),
            "segments_total": COUNT,
            "segments_bytes": COUNT,
            "objects": described(array(ref("Object")), "The newest ones, oldest first."),
            "objects_total": COUNT,
            "objects_bytes": COUNT,
            "problems": described(array(TEXT), "What contradicts itself, in plain words."),
        }
    ),
    "Explanation": strict_object(
        {
            "topic": TEXT,
            "offset": COUNT,
            "state": enum(
                "stored",
                "in memory",
                "not yet appended",
                "not yet synced",
                "not yet uploaded",
                "lost",
                "removed",
                "missing",
            ),
            "places": array(
                strict_object(
                    {
                        "tier": enum("segment", "object"),
                        "name": TEXT,
                        "position": COUNT,
                        "frame_bytes": COUNT,
                    }
                )
            ),
            "in_memory": FLAG,
            "synced": FLAG,
            "uploaded": FLAG,
            "verified": FLAG,
            "deletable": described(nullable(FLAG), "Of the segment that holds it."),
            "kept_because": nullable(TEXT),
            "go_on_at": described(nullable(COUNT), "The next offset that can be read."),
            "problems": array(TEXT),
        }
    ),
    "Made": strict_object({"topic": TEXT, "created": described(FLAG, "False: it was there.")}),
    "Trimmed": strict_object(
        {"topic": TEXT, "removed": array(strict_object({"file": TEXT, **_PIECE}))}
    ),
}

# ---- for executors and sinks ------------------------------------------------------------------

_CLUSTER: Final[dict[str, Json]] = {
    "StoredObject": strict_object(
        {"key": TEXT, "size": COUNT, "etag": nullable(TEXT), "modified_ms": COUNT}
    ),
    "SinkBatch": strict_object(
        {
            "sink_id": {"type": "string", "minLength": 1},
            "batch": integer(0, OFFSET_MAX),
            "named": FLAG,
            "streaming": FLAG,
            "parts": array(
                strict_object(
                    {
                        "partition": COUNT,
                        "key": described(nullable(TEXT), "Where the rows are staged."),
                        "rows": COUNT,
                        "bytes": COUNT,
                        "digest": COUNT,
                        "topics": {"type": "object", "additionalProperties": COUNT},
                    }
                )
            ),
        }
    ),
    "SinkLine": described(
        {
            "oneOf": [
                strict_object({"working": FLAG}),
                strict_object({"appended": COUNT, "known": COUNT}),
                ref("Error"),
            ]
        },
        "One line of an answer; `working` comes every few seconds, another one is the last.",
    ),
    "Forgotten": strict_object({"forgotten": FLAG}),
}

# ---- jobs -------------------------------------------------------------------------------------

_JOB: Final[dict[str, Json]] = {
    "id": TEXT,
    "kind": TEXT,
    "topics": array(TEXT),
    "options": {"type": "object"},
    "trigger": enum("request", "interval"),
    "state": enum("queued", "running", "done", "failed", "cancelled", "lost"),
    "created": SECONDS,
    "started": nullable(SECONDS),
    "ended": nullable(SECONDS),
    "progress": strict_object({"done": COUNT, "total": COUNT, "label": TEXT}),
    "summary": {"type": "object", "additionalProperties": {"type": "integer"}},
    "error": nullable(TEXT),
    "details": array(TEXT),
    "attempts": COUNT,
}
_JOBS: Final[dict[str, Json]] = {
    "NewJob": described(
        strict_object(
            {
                "kind": enum("offload", "compact", "verify"),
                "topics": described(
                    array(TEXT, maxItems=10_000), "All of them, where none is named."
                ),
                "due": described(FLAG, "Of an offload: only what is due by the thresholds."),
                "target_bytes": described(integer(1, OFFSET_MAX), "Of a compaction."),
                "budget_bytes": described(
                    integer(1, OFFSET_MAX), "Of a compaction or a verification."
                ),
                "incremental": described(FLAG, "Of a verification."),
                "orphans": described(FLAG, "Of a verification."),
            },
            optional=(
                "topics",
                "due",
                "target_bytes",
                "budget_bytes",
                "incremental",
                "orphans",
            ),
        ),
        "An option of another kind of job is refused.",
    ),
    "Job": strict_object(_JOB),
    "SparkDriver": strict_object(
        {
            "state": enum("starting", "ready", "working", "restarting", "stopped"),
            "master": TEXT,
            "since": SECONDS,
            "pid": nullable(COUNT),
            "restarts": COUNT,
            "error": nullable(TEXT),
        }
    ),
    "JobList": strict_object({"jobs": array(ref("Job")), "spark": nullable(ref("SparkDriver"))}),
}

# ---- what the page polls ----------------------------------------------------------------------

_PAGE: Final[dict[str, Json]] = {
    "Span": open_object(
        {
            "start": COUNT,
            "end": COUNT,
            "tier": enum("memory", "segment", "object", "verified", "gap"),
            "state": TEXT,
        }
    ),
    "Spans": strict_object(
        {"topic": TEXT, "start": COUNT, "end": COUNT, "spans": array(ref("Span"))}
    ),
    "Overview": described(
        open_object(
            {
                "at": SECONDS,
                "server": {"type": "object"},
                "objects": {"type": "object"},
                "topics": array(
                    open_object(
                        {
                            "name": TEXT,
                            "open": FLAG,
                            **dict.fromkeys(_STAGES, COUNT),
                            "lag": {"type": "object"},
                            "spans": array(ref("Span")),
                        }
                    )
                ),
                "topics_total": COUNT,
                "next": nullable(TEXT),
                "totals": {"type": "object"},
                "requests": {"type": "object"},
                "jobs": array(
                    described(
                        strict_object({**_JOB, "runs": COUNT, "since": SECONDS}),
                        "Cycles in a row are one, with how many they are.",
                    )
                ),
                "notices": array({"type": "object"}),
                "alerts": array(open_object({"kind": TEXT, "level": TEXT, "text": TEXT})),
                "history": open_object(
                    {
                        "interval": {"type": "number"},
                        "fields": array(TEXT),
                        "rows": array(array({"type": ["number", "null"]})),
                    }
                ),
            }
        ),
        "What the page shows, and may show in another way with every version.",
    ),
}

SCHEMAS: Final[dict[str, Json]] = {
    **_GENERAL,
    **_MESSAGES,
    **_TOPICS,
    **_CLUSTER,
    **_JOBS,
    **_PAGE,
}
