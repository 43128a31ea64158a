"""Operations: a route of the server and its documentation, declared together.

A module of handlers returns `Endpoint`s. An endpoint is a Starlette route that carries its
`Operation`s: the type of the query, the body and the responses. `document` makes the OpenAPI 3.1
document from the endpoints of the application, so that a route cannot be missing from it.

Beware: an operation describes its handler and does not check it. The tests send every operation
requests of all kinds, and compare the responses with the document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any, Final, TypeAlias, get_args

from msgspec import Meta, Struct, UnsetType
from msgspec.json import schema_components
from starlette.routing import Route

from forebay.admin.errors import Error, ErrorFields
from forebay.admin.records import JSON, Offset, Record
from forebay.admin.request import query_schema
from forebay.limits import SCHEMA_SUBJECT_BYTES_MAX, SUBSCRIPTION_NAME_BYTES_MAX

Json: TypeAlias = dict[str, Any]
BYTES: Final = "application/octet-stream"
RAW: Final = Annotated[str, Meta(extra_json_schema={"format": "binary"})]
_REFERENCE: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Lines:
    """A body of lines, each of which is one of some records."""

    name: str
    description: str
    kinds: Sequence[type[Struct]]

    def schema(self) -> Json:
        return {"type": "string", "description": f"One {self.name} in JSON on each line."}


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful response."""

    description: str
    kind: Any = None
    """The type of the body, or `Lines`; None for no body."""
    media_type: str = JSON
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Types by name; one that may be absent is `| UnsetType`."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path."""

    name: str
    tag: str
    summary: str
    replies: Mapping[int, Reply]
    errors: Sequence[int] = ()
    """Statuses in addition to those that every operation has."""
    method: str = "GET"
    query: type[Struct] | None = None
    """A type whose fields are the query parameters."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Types of request headers, by name."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Types, or `Lines`, by media type."""
    public: bool = False
    """Whether the operation is allowed without a token."""
    error: type[Record] = Error
    """The body of its error responses."""


class Endpoint(Route):
    """A route and its operations."""

    def __init__(
        self,
        path: str,
        handler: Callable[..., Any],
        *operations: Operation,
        all_methods: bool = False,
    ) -> None:
        """With `all_methods`, the handler itself refuses unknown methods."""
        methods = None if all_methods else [each.method for each in operations]
        super().__init__(path, handler, methods=methods)
        self.operations = operations

    @property
    def documented_path(self) -> str:
        return re.sub(r":path\}", "}", self.path)


# ---- what operations share --------------------------------------------------------------------

_Name: TypeAlias = Annotated[
    str,
    # Names may have letters and digits of any script, which a JSON pattern cannot express.
    Meta(min_length=1, max_length=255, extra_json_schema={"pattern": "^[A-Za-z0-9_-]+$"}),
]
PATH_PARAMETERS: Final[Mapping[str, Any]] = {
    "tenant": Annotated[_Name, Meta(description="`public`: there is no other one.")],
    "namespace": Annotated[_Name, Meta(description="`default` of `/default/orders`.")],
    "topic": Annotated[_Name, Meta(description="`orders` of `/default/orders`.")],
    "offset": Annotated[Offset, Meta(description="The offset.")],
    "file": Annotated[str, Meta(pattern="^[A-Za-z0-9._-]+$", description="The segment's name.")],
    "key": Annotated[
        str, Meta(min_length=1, max_length=1024, description="The object's key; has slashes.")
    ],
    "id": Annotated[str, Meta(min_length=1, description="The job's id.")],
    "name": Annotated[str, Meta(min_length=1, description="The file's name.")],
    "subscription": Annotated[
        str,
        Meta(min_length=1, max_length=SUBSCRIPTION_NAME_BYTES_MAX, description="Its name."),
    ],
    "subject": Annotated[
        str,
        Meta(min_length=1, max_length=SCHEMA_SUBJECT_BYTES_MAX, description="May have slashes."),
    ],
    "schema": Annotated[Offset, Meta(description="The id of a subject.")],
}
_SHARED: Final = ("tenant", "namespace", "topic")
_ALWAYS: Final = (401, 403, 412, 500, 503)
ERRORS: Final = {
    400: ("UsageError", "The request is invalid: the message says what to change."),
    401: ("TokenWanted", "A token is needed: `Authorization: Bearer`."),
    403: ("Refused", "The request comes from the page of another site, or names another host."),
    404: ("NotFound", "The topic, subscription, schema, object, job or file does not exist."),
    409: ("Conflict", "The state of the server or of the topic does not allow the request."),
    410: ("Lost", "The offsets are recorded as lost; `end` is where to continue."),
    412: (
        "Precondition",
        "`Forebay-Store` names another store, or Pulsar's API refuses it: nothing was applied.",
    ),
    413: ("TooLarge", "The body is larger than the limit for one request."),
    415: ("EncodedBody", "The body has a `Content-Encoding`; only `identity` is accepted."),
    416: ("OutOfRange", "Outside the range that exists; `start` and `end` are its bounds."),
    429: ("TooMany", "Too many requests wait: try again later."),
    500: ("InternalError", "The server failed, or stored data is damaged; see its log."),
    501: ("NotInstalled", "The server does not have the library of this kind of schema."),
    502: ("StoreRefused", "The object store or the catalog refused a request of the server."),
    503: (
        "Unavailable",
        "Try again later. The request may have been applied, unless `taken` is false.",
    ),
    504: ("TimedOut", "The request did not finish in time. It may still be applied."),
    507: (
        "DiskFull",
        "The disk is full. The request may have been applied, unless `taken` is false.",
    ),
}
"""Names and descriptions of the error responses, by status."""

# ---- the document -----------------------------------------------------------------------------


def document(endpoints: Sequence[Endpoint]) -> Json:
    """The OpenAPI document."""
    schemas = _Schemas([each for endpoint in endpoints for each in endpoint.operations])
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        item = paths.setdefault(endpoint.documented_path, {})
        for operation in endpoint.operations:
            item[operation.method.lower()] = _operation(endpoint, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay",
            "version": version("forebay"),
            "summary": "A tiered log store: messages, topics and jobs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "parameters": {name: _path_parameter(name) for name in _SHARED},
            "responses": {
                name: _reply(Reply(description, Error), schemas)
                for name, description in ERRORS.values()
            },
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "`admin.token`, if one is set.",
                }
            },
        },
        "security": [{"token": []}, {}],
    }


def _operation(endpoint: Endpoint, operation: Operation, schemas: _Schemas) -> Json:
    found: Json = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": [
            *map(_path_reference, endpoint.param_convertors),
            *_query_parameters(operation.query),
            *(_parameter(name, "header", _schema(k)) for name, k in operation.headers.items()),
        ],
    }
    if operation.body:
        found["requestBody"] = {"required": True, "content": schemas.content(operation.body)}
    if operation.public:
        found["security"] = []
    encoded = () if operation.method in {"GET", "HEAD"} else (415,)
    statuses = sorted({*operation.errors, *encoded, *_ALWAYS})
    found["responses"] = {
        **{str(status): _reply(each, schemas) for status, each in operation.replies.items()},
        **{str(status): _error(status, operation, schemas) for status in statuses},
    }
    return found


def _error(status: int, operation: Operation, schemas: _Schemas) -> Json:
    name, description = ERRORS[status]
    if operation.method == "HEAD":  # a response without a body
        return {"description": description}
    if operation.error is not Error:
        return _reply(Reply(description, operation.error), schemas)
    return {"$ref": f"#/components/responses/{name}"}


def _reply(reply: Reply, schemas: _Schemas) -> Json:
    found: Json = {"description": reply.description}
    if reply.kind is not None:
        found["content"] = schemas.content({reply.media_type: reply.kind})
    if reply.headers:
        found["headers"] = {
            name: {"schema": _schema(kind), "required": UnsetType not in get_args(kind)}
            for name, kind in reply.headers.items()
        }
    return found


# ---- parameters -------------------------------------------------------------------------------


def _path_reference(name: str) -> Json:
    if name in _SHARED:
        return {"$ref": f"#/components/parameters/{name}"}
    return _path_parameter(name)


def _path_parameter(name: str) -> Json:
    return _parameter(name, "path", _schema(PATH_PARAMETERS[name]), required=True)


def _query_parameters(query: type[Struct] | None) -> list[Json]:
    if query is None:
        return []
    schema = query_schema(query)
    return [
        _parameter(name, "query", each, required=name in schema["required"])
        for name, each in schema["properties"].items()
    ]


def _parameter(name: str, place: str, schema: Json, *, required: bool = False) -> Json:
    described = {"name": name, "in": place, "required": required}
    schema = dict(schema)
    return {**described, "description": schema.pop("description", ""), "schema": schema}


# ---- schemas ----------------------------------------------------------------------------------


def _schema(kind: Any) -> Json:
    """The JSON Schema of a type that contains no record."""
    return schema_components([kind], ref_template=_REFERENCE)[0][0]


class _Schemas:
    """The schemas of all records in bodies."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        bodies = [kind for each in operations for kind in each.body.values()]
        replies = [reply.kind for each in operations for reply in each.replies.values()]
        records = {each.__name__: each for each in _below(Record)}
        sent = _components([*replies, Error, *(each.error for each in operations)])
        for name, schema in sent.items():
            _close(schema, records.get(name))
        self.components = {**sent, **_components(bodies)}
        for name in self.components.keys() & records.keys():
            self.components[name] |= records[name].extra_schema
        for lines in (*bodies, *replies):
            if isinstance(lines, Lines) and len(lines.kinds) > 1:
                each = [_schema(kind) for kind in lines.kinds]
                self.components[lines.name] = {"description": lines.description, "oneOf": each}

    def content(self, kinds: Mapping[str, Any]) -> Json:
        return {
            media_type: {"schema": kind.schema() if isinstance(kind, Lines) else _schema(kind)}
            for media_type, kind in kinds.items()
        }


def _components(kinds: Iterable[Any]) -> dict[str, Json]:
    types: list[Any] = []
    for kind in kinds:
        types += kind.kinds if isinstance(kind, Lines) else [kind]
    known = [each for each in types if each is not None]
    return schema_components(known, ref_template=_REFERENCE)[1]


def _below(kind: type[Record]) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _close(schema: Json, kind: type[Record] | None) -> None:
    """Says that a response has no other fields, and which it always has.

    msgspec calls a field with a default optional. That is right for a request; in a response it is
    sent, unless the record leaves defaults out.
    """
    if schema["title"] != ErrorFields.__name__:
        schema["additionalProperties"] = False
    if kind is not None and not kind.__struct_config__.omit_defaults:
        for name, each in schema["properties"].items():
            if "default" in each:
                del each["default"]
                schema["required"].append(name)
