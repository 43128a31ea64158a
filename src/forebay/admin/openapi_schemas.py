"""The schemas of what the server takes and answers."""

from __future__ import annotations

from typing import Final

from forebay.admin.openapi_words import (
    COUNT,
    FLAG,
    RANGE,
    SECONDS,
    TEXT,
    Json,
    choice,
    listed,
    loose,
    nullable,
    record,
    ref,
    told,
    whole,
)
from forebay.limits import ATTRIBUTES_MAX, OFFSET_MAX

_ATTRIBUTES: Final[Json] = {
    "type": "object",
    "additionalProperties": TEXT,
    "maxProperties": ATTRIBUTES_MAX,
}
_PAYLOAD: Final[dict[str, Json]] = {
    "payload": told(TEXT, "Of a payload that is UTF-8."),
    "payload_base64": told(TEXT, "Of any other."),
}
_ONE_PAYLOAD: Final[Json] = {"oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]}

# ---- errors, health ---------------------------------------------------------------------------

_GENERAL: Final[dict[str, Json]] = {
    "Error": record(
        {
            "error": {
                **loose(
                    {
                        "kind": told(TEXT, "The name of the error, as the library has it."),
                        "message": told(TEXT, "What is wrong, where, and what to do."),
                        "taken": told(
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
    "Health": record(
        {
            "status": choice("ok"),
            "instance": told(TEXT, "Of this run of the server."),
            "store": told(TEXT, "Of the data directory: the same from one run to the next."),
            "up_seconds": {"type": "number"},
        }
    ),
    "Ready": record({"status": choice("ready"), "instance": TEXT}),
    "Config": told(
        loose({"data": nullable(TEXT), "storage": {"type": "object"}, "admin": {"type": "object"}}),
        "Section by section as in the configuration file, all keys given; secrets are `***`.",
    ),
}

# ---- messages ---------------------------------------------------------------------------------

_MESSAGES: Final[dict[str, Json]] = {
    "NewMessage": {
        **record(
            {**_PAYLOAD, "attributes": nullable(_ATTRIBUTES), "routing_key": nullable(TEXT)},
            optional=("payload", "payload_base64", "attributes", "routing_key"),
        ),
        **_ONE_PAYLOAD,
    },
    "Message": {
        **record(
            {
                "offset": COUNT,
                "publish_time": told(COUNT, "Milliseconds since 1970-01-01 UTC."),
                **_PAYLOAD,
                "attributes": _ATTRIBUTES,
                "routing_key": nullable(TEXT),
            },
            optional=("payload", "payload_base64"),
        ),
        **_ONE_PAYLOAD,
    },
    "MessageLine": told(
        {"oneOf": [ref("Message"), record({"lost": RANGE}), ref("Error")]},
        "One line of an answer. An error is the last line.",
    ),
    "Appended": record(
        {
            "topic": TEXT,
            "first_offset": COUNT,
            "next_offset": COUNT,
            "count": COUNT,
            "durability": choice("buffered", "synced", "uploaded"),
        }
    ),
}

# ---- topics -----------------------------------------------------------------------------------

_STAGES: Final = ("start", "appended", "synced", "uploaded", "verified")
_PIECE: Final[dict[str, Json]] = {"start_offset": COUNT, "next_offset": COUNT, "bytes": COUNT}
_TOPICS: Final[dict[str, Json]] = {
    "TopicList": record(
        {
            "topics": listed(
                record(
                    {
                        "topic": TEXT,
                        "open": told(FLAG, "Whether this server has it open."),
                        **{
                            stage: told(nullable(COUNT), "Known of a topic that is open.")
                            for stage in _STAGES
                        },
                    }
                )
            ),
            "total": told(COUNT, "Of all pages."),
            "next": told(nullable(TEXT), "What `after` is for the next page; null on the last."),
        }
    ),
    "Segment": record(
        {
            "file": TEXT,
            **_PIECE,
            "uploaded": FLAG,
            "verified": FLAG,
            "deletable": FLAG,
            "kept_because": nullable(TEXT),
        }
    ),
    "Object": record(
        {
            "object_id": TEXT,
            **_PIECE,
            "created_at": told(COUNT, "Seconds since 1970-01-01 UTC."),
            "verified": FLAG,
        }
    ),
    "Topic": record(
        {
            "topic": TEXT,
            "open": told(FLAG, "Whether this server has it open."),
            "start_offset": COUNT,
            "appended": told(nullable(COUNT), "Next offset of the stage, as the next ones."),
            "synced": told(nullable(COUNT), "Null where the topic's log is not here."),
            "uploaded": COUNT,
            "verified": COUNT,
            "memory": told(nullable(RANGE), "What the owner holds in memory."),
            "reserved": nullable(COUNT),
            "epoch": nullable(COUNT),
            "owner": nullable(TEXT),
            "lost": listed(RANGE),
            "segments": told(listed(ref("Segment")), "The newest ones, oldest first."),
            "segments_total": COUNT,
            "segments_bytes": COUNT,
            "objects": told(listed(ref("Object")), "The newest ones, oldest first."),
            "objects_total": COUNT,
            "objects_bytes": COUNT,
            "problems": told(listed(TEXT), "What contradicts itself, in plain words."),
        }
    ),
    "Explanation": record(
        {
            "topic": TEXT,
            "offset": COUNT,
            "state": choice(
                "stored",
                "in memory",
                "not yet appended",
                "not yet synced",
                "not yet uploaded",
                "lost",
                "removed",
                "missing",
            ),
            "places": listed(
                record(
                    {
                        "tier": choice("segment", "object"),
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
            "deletable": told(nullable(FLAG), "Of the segment that holds it."),
            "kept_because": nullable(TEXT),
            "go_on_at": told(nullable(COUNT), "The next offset that can be read."),
            "problems": listed(TEXT),
        }
    ),
    "Made": record({"topic": TEXT, "created": told(FLAG, "False: it was there.")}),
    "Trimmed": record({"topic": TEXT, "removed": listed(record({"file": TEXT, **_PIECE}))}),
}

# ---- for executors and sinks ------------------------------------------------------------------

_CLUSTER: Final[dict[str, Json]] = {
    "StoredObject": record(
        {"key": TEXT, "size": COUNT, "etag": nullable(TEXT), "modified_ms": COUNT}
    ),
    "SinkBatch": record(
        {
            "sink_id": {"type": "string", "minLength": 1},
            "batch": whole(0, OFFSET_MAX),
            "named": FLAG,
            "streaming": FLAG,
            "parts": listed(
                record(
                    {
                        "partition": COUNT,
                        "key": told(nullable(TEXT), "Where the rows are staged."),
                        "rows": COUNT,
                        "bytes": COUNT,
                        "digest": COUNT,
                        "topics": {"type": "object", "additionalProperties": COUNT},
                    }
                )
            ),
        }
    ),
    "SinkLine": told(
        {
            "oneOf": [
                record({"working": FLAG}),
                record({"appended": COUNT, "known": COUNT}),
                ref("Error"),
            ]
        },
        "One line of an answer; `working` comes every few seconds, another one is the last.",
    ),
    "Forgotten": record({"forgotten": FLAG}),
}

# ---- jobs -------------------------------------------------------------------------------------

_JOB: Final[dict[str, Json]] = {
    "id": TEXT,
    "kind": TEXT,
    "topics": listed(TEXT),
    "options": {"type": "object"},
    "trigger": choice("request", "interval"),
    "state": choice("queued", "running", "done", "failed", "cancelled", "lost"),
    "created": SECONDS,
    "started": nullable(SECONDS),
    "ended": nullable(SECONDS),
    "progress": record({"done": COUNT, "total": COUNT, "label": TEXT}),
    "summary": {"type": "object", "additionalProperties": {"type": "integer"}},
    "error": nullable(TEXT),
    "details": listed(TEXT),
    "attempts": COUNT,
}
_JOBS: Final[dict[str, Json]] = {
    "NewJob": told(
        record(
            {
                "kind": choice("offload", "compact", "verify"),
                "topics": told(listed(TEXT, maxItems=10_000), "All of them, where none is named."),
                "due": told(FLAG, "Of an offload: only what is due by the thresholds."),
                "target_bytes": told(whole(1, OFFSET_MAX), "Of a compaction."),
                "budget_bytes": told(whole(1, OFFSET_MAX), "Of a compaction or a verification."),
                "incremental": told(FLAG, "Of a verification."),
                "orphans": told(FLAG, "Of a verification."),
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
    "Job": record(_JOB),
    "SparkDriver": record(
        {
            "state": choice("starting", "ready", "working", "restarting", "stopped"),
            "master": TEXT,
            "since": SECONDS,
            "pid": nullable(COUNT),
            "restarts": COUNT,
            "error": nullable(TEXT),
        }
    ),
    "JobList": record({"jobs": listed(ref("Job")), "spark": nullable(ref("SparkDriver"))}),
}

# ---- what the page polls ----------------------------------------------------------------------

_PAGE: Final[dict[str, Json]] = {
    "Span": loose(
        {
            "start": COUNT,
            "end": COUNT,
            "tier": choice("memory", "segment", "object", "verified", "gap"),
            "state": TEXT,
        }
    ),
    "Spans": record({"topic": TEXT, "start": COUNT, "end": COUNT, "spans": listed(ref("Span"))}),
    "Overview": told(
        loose(
            {
                "at": SECONDS,
                "server": {"type": "object"},
                "objects": {"type": "object"},
                "topics": listed(
                    loose(
                        {
                            "name": TEXT,
                            "open": FLAG,
                            **dict.fromkeys(_STAGES, COUNT),
                            "lag": {"type": "object"},
                            "spans": listed(ref("Span")),
                        }
                    )
                ),
                "topics_total": COUNT,
                "next": nullable(TEXT),
                "totals": {"type": "object"},
                "requests": {"type": "object"},
                "jobs": listed(
                    told(
                        record({**_JOB, "runs": COUNT, "since": SECONDS}),
                        "Cycles in a row are one, with how many they are.",
                    )
                ),
                "notices": listed({"type": "object"}),
                "alerts": listed(loose({"kind": TEXT, "level": TEXT, "text": TEXT})),
                "history": loose(
                    {
                        "interval": {"type": "number"},
                        "fields": listed(TEXT),
                        "rows": listed(listed({"type": ["number", "null"]})),
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
