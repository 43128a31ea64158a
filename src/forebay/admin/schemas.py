"""`/v1/schemas`: subjects and their versions; and the schemas of topics.

    GET    /v1/schemas                       a page of subjects, with their latest versions
    POST   /v1/schemas/check                 whether a schema could be registered, and why not
    GET    /v1/schemas/ids/{schema}          a version by the id that messages carry
    GET    /v1/schemas/subjects/{subject}    a version with its definition, the latest by default
    POST   /v1/schemas/subjects/{subject}    registers a schema; 200 if the subject has it already
    PATCH  /v1/schemas/subjects/{subject}    sets the compatibility mode
    DELETE /v1/schemas/subjects/{subject}    deletes one version
    GET    /v1/topics/{ns}/{topic}/schema    which schema the messages of a topic have
    PUT    .../schema                        gives a topic a subject and a policy
    DELETE .../schema                        the topic takes every message again

Definitions are text here. One of the type string, number or bytes that is not UTF-8 is shown with
replacement characters; it says nothing anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.json import Decoder
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.operations import Endpoint, Operation, Reply
from forebay.admin.records import JSON, Count, Record, decode_body, json_response
from forebay.admin.request import read_body, read_query, topic_of
from forebay.admin.topics import TOPIC_PATH
from forebay.errors import UnknownSchema, UsageError
from forebay.format.names import TopicName
from forebay.format.schema import SubjectRow, TopicSchemaRow, VersionRow
from forebay.limits import (
    KIB,
    SCHEMA_BYTES_MAX,
    SCHEMA_TAGS_MAX,
    SCHEMA_VERSION_MAX,
)
from forebay.schemas.registry import NewSchema

_BODY_BYTES_MAX: Final = 4 * SCHEMA_BYTES_MAX
_SMALL_BODY_BYTES_MAX: Final = 4 * KIB
_PAGE_MAX: Final = 1000
_PARSED_AT_ONCE: Final = 4
"""Definitions; others wait, so that threads are left for other calls."""
SUBJECT_PATH: Final = "/v1/schemas/subjects/{subject:path}"
TOPIC_SCHEMA_PATH: Final = f"{TOPIC_PATH}/schema"
_Result = TypeVar("_Result")

# ---- records ----------------------------------------------------------------------------------

Kind = Literal["avro", "json_schema", "protobuf", "string", "number", "bytes"]
Mode = Literal["none", "backward", "forward", "full"]
Policy = Literal["none", "warn", "enforce"]
_Definition = Annotated[
    str,
    Meta(min_length=1, description=f"The schema, at most {SCHEMA_BYTES_MAX} bytes of UTF-8."),
]
_Tags = Annotated[list[str], Meta(max_length=SCHEMA_TAGS_MAX)]
_Version = Annotated[int, Meta(ge=1, le=SCHEMA_VERSION_MAX)]


class SubjectLine(Record, frozen=True):
    """A subject and its latest version."""

    subject: str
    id: Annotated[Count, Meta(description="What messages carry as `schema_id`.")]
    type: str
    mode: Mode
    latest: Count
    versions: Annotated[Count, Meta(description="How many there are.")]
    tags: list[str]


class Subjects(Record, frozen=True):
    """A page of subjects."""

    subjects: list[SubjectLine]
    next: Annotated[str | None, Meta(description="`after` of the next page; null on the last.")]
    problems: Annotated[list[str], Meta(description="Rows of the catalog that are damaged.")]


class SchemaVersion(Record, frozen=True):
    """One version of a subject."""

    subject: str
    id: Count
    version: Count
    type: str
    definition: str
    fingerprint: str
    description: str
    created_ms: Count
    created_by: str
    tags: list[str]
    mode: Mode
    versions: Annotated[list[Count], Meta(description="All versions of the subject.")]


class NewVersion(Record, frozen=True):
    """A schema to register."""

    type: Kind
    definition: _Definition
    description: str = ""
    created_by: str = ""
    tags: _Tags = field(default_factory=list)


class VersionRegistered(Record, frozen=True):
    subject: str
    id: Count
    version: Count
    created: Annotated[bool, Meta(description="False if the subject had this schema before.")]
    fingerprint: str


class SchemaCheck(Record, frozen=True):
    """A schema to compare with the latest version of a subject."""

    subject: str
    type: Kind
    definition: _Definition
    mode: Annotated[Mode, Meta(description="Instead of that of the subject.")] | UnsetType = UNSET


class SchemaChecked(Record, frozen=True):
    compatible: bool
    errors: list[str]


class SubjectMode(Record, frozen=True):
    mode: Mode


class SubjectState(Record, frozen=True):
    """A subject after a change."""

    subject: str
    id: Count
    mode: Mode
    versions: list[Count]


class NewTopicSchema(Record, frozen=True):
    """The schema of a topic."""

    subject: str
    policy: Policy = "none"
    payload: Annotated[bool, Meta(description="Whether payloads are checked too.")] = False


class TopicSchema(Record, frozen=True):
    topic: str
    subject: str
    policy: Policy
    payload: bool


class TopicSchemaCleared(Record, frozen=True):
    topic: str
    cleared: Annotated[bool, Meta(description="Whether it had a schema.")]


class SubjectsQuery(Struct, frozen=True):
    limit: Annotated[
        int, Meta(ge=1, le=_PAGE_MAX, description="The maximum number of subjects.")
    ] = 100
    after: Annotated[str, Meta(description="The last subject of the previous page.")] = ""


class VersionQuery(Struct, frozen=True):
    version: Annotated[_Version, Meta(description="The version; the latest by default.")] | (
        UnsetType
    ) = UNSET


class DeleteQuery(Struct, frozen=True):
    version: Annotated[_Version, Meta(description="The version to delete.")]


_NEW: Final = Decoder(NewVersion)
_CHECK: Final = Decoder(SchemaCheck)
_MODE: Final = Decoder(SubjectMode)
_TOPIC: Final = Decoder(NewTopicSchema)

# ---- operations -------------------------------------------------------------------------------

_CHANGE_ERRORS: Final = (400, 404, 409, 413, 415, 501, 502, 507)
LIST: Final = Operation(
    "listSubjects",
    "schemas",
    "Lists the subjects of schemas with their latest versions.",
    {200: Reply("A page.", Subjects)},
    errors=(400, 502),
    query=SubjectsQuery,
)
SHOW: Final = Operation(
    "showSchema",
    "schemas",
    "Returns a version of a subject with its definition.",
    {200: Reply("The version.", SchemaVersion)},
    errors=(400, 404, 502),
    query=VersionQuery,
)
SHOW_BY_ID: Final = Operation(
    "showSchemaById",
    "schemas",
    "Returns a version by the id that messages carry.",
    {200: Reply("The version.", SchemaVersion)},
    errors=(400, 404, 502),
    query=VersionQuery,
)
REGISTER: Final = Operation(
    "registerSchema",
    "schemas",
    "Registers a schema as a new version, unless the subject has it.",
    {
        200: Reply("The subject had this schema.", VersionRegistered),
        201: Reply("The version was added.", VersionRegistered),
    },
    errors=_CHANGE_ERRORS,
    method="POST",
    body={JSON: NewVersion},
)
CHECK: Final = Operation(
    "checkSchema",
    "schemas",
    "Returns whether a schema could be registered, and why not.",
    {200: Reply("The result.", SchemaChecked)},
    errors=_CHANGE_ERRORS,
    method="POST",
    body={JSON: SchemaCheck},
)
SET_MODE: Final = Operation(
    "setSchemaMode",
    "schemas",
    "Sets the compatibility mode of a subject.",
    {200: Reply("The subject.", SubjectState)},
    errors=_CHANGE_ERRORS,
    method="PATCH",
    body={JSON: SubjectMode},
)
DELETE: Final = Operation(
    "deleteSchemaVersion",
    "schemas",
    "Deletes a version of a subject. Its number is not given again.",
    {200: Reply("What is left.", SubjectState)},
    errors=_CHANGE_ERRORS,
    method="DELETE",
    query=DeleteQuery,
)
SHOW_TOPIC: Final = Operation(
    "showTopicSchema",
    "schemas",
    "Returns which schema the messages of a topic have, and whether it is enforced.",
    {200: Reply("The schema.", TopicSchema)},
    errors=(400, 404, 502),
)
SET_TOPIC: Final = Operation(
    "setTopicSchema",
    "schemas",
    "Gives a topic a subject and a policy.",
    {200: Reply("The schema.", TopicSchema)},
    errors=_CHANGE_ERRORS,
    method="PUT",
    body={JSON: NewTopicSchema},
)
CLEAR_TOPIC: Final = Operation(
    "clearTopicSchema",
    "schemas",
    "Takes the schema of a topic away, so that it takes every message.",
    {200: Reply("What was done.", TopicSchemaCleared)},
    errors=_CHANGE_ERRORS,
    method="DELETE",
)


def routes(context: ServerContext) -> list[Endpoint]:
    schemas = _Schemas(context)
    return [
        Endpoint("/v1/schemas", schemas.list, LIST),
        Endpoint("/v1/schemas/check", schemas.check, CHECK),
        Endpoint("/v1/schemas/ids/{schema}", schemas.show_by_id, SHOW_BY_ID),
        Endpoint(SUBJECT_PATH, schemas.show, SHOW),
        Endpoint(SUBJECT_PATH, schemas.register, REGISTER),
        Endpoint(SUBJECT_PATH, schemas.set_mode, SET_MODE),
        Endpoint(SUBJECT_PATH, schemas.delete, DELETE),
        Endpoint(TOPIC_SCHEMA_PATH, schemas.show_topic, SHOW_TOPIC),
        Endpoint(TOPIC_SCHEMA_PATH, schemas.set_topic, SET_TOPIC),
        Endpoint(TOPIC_SCHEMA_PATH, schemas.clear_topic, CLEAR_TOPIC),
    ]


class _Schemas:
    def __init__(self, context: ServerContext) -> None:
        self._guard = context.guard
        self._registry = context.guard.registry
        self._places = asyncio.Semaphore(_PARSED_AT_ONCE)

    async def _changed(self, change: Callable[[], _Result]) -> _Result:
        try:
            return await run_in_threadpool(change)
        finally:
            self._guard.changed()

    async def list(self, request: Request) -> Response:
        query = read_query(request.scope["query_string"], SubjectsQuery)
        return json_response(await run_in_threadpool(self._page, query))

    def _page(self, query: SubjectsQuery) -> Subjects:
        problems: list[str] = []
        lines: list[SubjectLine] = []
        for row in self._registry.subjects(
            lambda error: problems.append(str(error)), after=query.after
        ):
            if len(lines) == query.limit:
                return Subjects(lines, lines[-1].subject, problems)
            lines.append(self._line(row))
        return Subjects(lines, None, problems)

    def _line(self, row: SubjectRow) -> SubjectLine:
        latest = self._registry.version(row)
        return SubjectLine(
            row.name,
            row.id,
            latest.kind,
            _mode(row),
            row.latest,
            len(row.versions),
            list(latest.tags),
        )

    async def show(self, request: Request) -> Response:
        name, version = request.path_params["subject"], _version(request)
        return json_response(
            await run_in_threadpool(lambda: self._shown(self._registry.subject(name), version))
        )

    async def show_by_id(self, request: Request) -> Response:
        text, version = request.path_params["schema"], _version(request)
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise UsageError(f"{text[:80]!r} is not the id of a schema")
        return json_response(
            await run_in_threadpool(
                lambda: self._shown(self._registry.subject_of(int(text)), version)
            )
        )

    def _shown(self, subject: SubjectRow, version: int | None) -> SchemaVersion:
        return _version_of(subject, self._registry.version(subject, version))

    async def register(self, request: Request) -> Response:
        body = decode_body(await read_body(request, _BODY_BYTES_MAX), _NEW)
        new = NewSchema(
            request.path_params["subject"],
            body.type,
            _bytes(body.definition),
            body.description,
            body.created_by,
            tuple(body.tags),
        )
        async with self._places:
            found = await self._changed(lambda: self._registry.register(new))
        reply = VersionRegistered(
            found.subject.name,
            found.subject.id,
            found.version.version,
            found.is_new,
            found.version.fingerprint,
        )
        return json_response(reply, 201 if found.is_new else 200)

    async def check(self, request: Request) -> Response:
        body = decode_body(await read_body(request, _BODY_BYTES_MAX), _CHECK)
        mode = None if body.mode is UNSET else body.mode
        async with self._places:
            errors = await run_in_threadpool(
                self._registry.check, body.subject, body.type, _bytes(body.definition), mode
            )
        return json_response(SchemaChecked(not errors, errors))

    async def set_mode(self, request: Request) -> Response:
        body = decode_body(await read_body(request, _SMALL_BODY_BYTES_MAX), _MODE)
        name = request.path_params["subject"]
        row = await self._changed(lambda: self._registry.set_mode(name, body.mode))
        return json_response(_state(row))

    async def delete(self, request: Request) -> Response:
        query = read_query(request.scope["query_string"], DeleteQuery)
        name = request.path_params["subject"]
        row = await self._changed(lambda: self._registry.delete(name, query.version))
        return json_response(_state(row))

    async def show_topic(self, request: Request) -> Response:
        topic = topic_of(request.path_params)
        row = await run_in_threadpool(self._registry.topic_schema, topic)
        if row is None:
            raise UnknownSchema(f"{topic} has no schema")
        return json_response(_topic(topic, row))

    async def set_topic(self, request: Request) -> Response:
        topic = topic_of(request.path_params)
        body = decode_body(await read_body(request, _SMALL_BODY_BYTES_MAX), _TOPIC)
        row = await self._changed(
            lambda: self._registry.configure_topic(
                topic, body.subject, body.policy, payload=body.payload
            )
        )
        return json_response(_topic(topic, row))

    async def clear_topic(self, request: Request) -> Response:
        topic = topic_of(request.path_params)
        cleared = await self._changed(lambda: self._registry.clear_topic(topic))
        return json_response(TopicSchemaCleared(str(topic), cleared))


def _version(request: Request) -> int | None:
    query = read_query(request.scope["query_string"], VersionQuery)
    return None if query.version is UNSET else query.version


def _bytes(definition: str) -> bytes:
    try:
        return definition.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the definition is not Unicode text") from error


def _mode(row: SubjectRow) -> Mode:
    found: dict[str, Mode] = {each: each for each in ("none", "backward", "forward", "full")}
    return found[row.mode]


def _policy(row: TopicSchemaRow) -> Policy:
    found: dict[str, Policy] = {each: each for each in ("none", "warn", "enforce")}
    return found[row.policy]


def _topic(topic: TopicName, row: TopicSchemaRow) -> TopicSchema:
    return TopicSchema(str(topic), row.subject, _policy(row), row.payload)


def _state(row: SubjectRow) -> SubjectState:
    return SubjectState(row.name, row.id, _mode(row), [each for each, _ in row.versions])


def _version_of(subject: SubjectRow, row: VersionRow) -> SchemaVersion:
    return SchemaVersion(
        row.subject,
        subject.id,
        row.version,
        row.kind,
        row.definition.decode(errors="replace"),
        row.fingerprint,
        row.description,
        row.created_ms,
        row.created_by,
        list(row.tags),
        _mode(subject),
        [each for each, _ in subject.versions],
    )
