"""The calls that executors, sinks and whoever starts jobs make."""

from __future__ import annotations

from typing import Final

from forebay.admin.objects import MODIFIED
from forebay.admin.openapi_words import (
    BYTES,
    COUNT,
    LINES,
    OF_TOPIC,
    TEXT,
    TOPIC,
    Json,
    answer,
    call,
    header,
    path,
    problems,
    query,
    ref,
    whole,
)

_RANGE: Final = header(
    "Range", {"type": "string", "pattern": "^bytes=[0-9]{1,18}-[0-9]{0,18}$"}, "A part of it."
)
_RANGED: Final[dict[str, Json]] = {
    "Accept-Ranges": {"schema": TEXT},
    "Content-Length": {"schema": COUNT},
}


# ---- for executors and sinks ------------------------------------------------------------------

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
        "get": call(
            "readSegment",
            "cluster",
            "The synced bytes of a segment.",
            parameters=_SEGMENT,
            answers={
                "200": answer("All of them.", _RAW, BYTES, _RANGED),
                "206": answer("A part of them.", _RAW, BYTES, _RANGED),
                **problems(400, 404, 409, 416),
            },
        ),
    },
    "/v1/objects/{key}": {
        "get": call(
            "readObject",
            "cluster",
            "The bytes of an object, where the objects are files of the server's machine.",
            parameters=(_KEY, _RANGE),
            answers={
                "200": answer("All of them.", _RAW, BYTES, _OBJECT_HEADERS),
                "206": answer("A part of them.", _RAW, BYTES, _OBJECT_HEADERS),
                **problems(400, 404, 409, 416, 502),
            },
        ),
        "head": call(
            "lookAtObject",
            "cluster",
            "The size of an object, in `Content-Length`.",
            parameters=(_KEY,),
            answers={
                "200": {"description": "It is there.", "headers": _OBJECT_HEADERS},
                **{
                    status: {"description": "As of GET, without the words."}
                    for status in problems(400, 404, 409, 502)
                },
            },
        ),
        "put": call(
            "writeObject",
            "cluster",
            "Writes an object that the catalog has as intended, or staged rows.",
            parameters=(_KEY,),
            body={BYTES: {"schema": _RAW}},
            answers={
                "200": answer("It is stored.", ref("StoredObject")),
                **problems(400, 404, 409, 502, 507),
            },
        ),
    },
    "/v1/sink/commit": {
        "post": call(
            "commitBatch",
            "cluster",
            "Appends the staged rows of a batch of the Spark sink, each once.",
            body=_BATCH,
            answers={
                "200": answer("Lines, each one a SinkLine.", TEXT, LINES),
                **problems(400, 413, 502, 504),
            },
        ),
    },
    "/v1/sink/forget": {
        "post": call(
            "forgetBatch",
            "cluster",
            "Removes the staged rows of a batch that failed, unless it is under way.",
            body=_BATCH,
            answers={
                "200": answer("Whether they went.", ref("Forgotten")),
                **problems(400, 413, 502, 504),
            },
        ),
    },
}

# ---- jobs -------------------------------------------------------------------------------------

_ID: Final = path("id", {"type": "string", "minLength": 1}, "Of the job.")
_JOBS: Final[dict[str, Json]] = {
    "/v1/jobs": {
        "get": call(
            "listJobs",
            "jobs",
            "Jobs on Spark, the newest first, and how the Spark driver is.",
            parameters=(
                query("kind", TEXT, "Only those of a kind."),
                query("state", TEXT, "Only those in a state."),
                query("trigger", TEXT, "Only those that were begun so."),
                query("limit", whole(1, 1000, 100), "So many at most."),
            ),
            answers={"200": answer("The jobs.", ref("JobList")), **problems(400)},
        ),
        "post": call(
            "startJob",
            "jobs",
            "Queues a job.",
            body={"application/json": {"schema": ref("NewJob")}},
            answers={
                "202": answer("It is queued.", ref("Job"), headers={"Location": {"schema": TEXT}}),
                **problems(400, 404, 409, 429),
            },
        ),
    },
    "/v1/jobs/{id}": {
        "get": call(
            "showJob",
            "jobs",
            "One job.",
            parameters=(_ID,),
            answers={"200": answer("The job.", ref("Job")), **problems(404)},
        ),
        "delete": call(
            "cancelJob",
            "jobs",
            "Ends a job that is not over.",
            parameters=(_ID,),
            answers={
                "200": answer("It is over.", ref("Job")),
                "202": answer("It is asked to end.", ref("Job")),
                **problems(404),
            },
        ),
    },
}


WORK: Final[dict[str, Json]] = {**_CLUSTER, **_JOBS}
