"""`/v1/topics`: the list of topics, where everything of one topic is, and where one offset is.

    GET  /v1/topics                                     names, and how far those open here are
    GET  /v1/topics/{namespace}/{topic}                 watermarks, memory, segments, objects
    PUT  /v1/topics/{namespace}/{topic}                 creates the topic; 200 if it exists
    DELETE /v1/topics/{namespace}/{topic}               deletes the topic with everything in it
    POST /v1/topics/{namespace}/{topic}/trim            one pass of local retention
    POST /v1/topics/{namespace}/{topic}/accept-loss     readers jump over offsets without messages
    GET  /v1/topics/{namespace}/{topic}/explain/{offset}
    GET  /v1/topics/{namespace}/{topic}/settings        values, and where they come from
    PATCH /v1/topics/{namespace}/{topic}/settings       changes settings that the topic has itself

The GETs open no topic: each makes a view, on a thread, because a view waits for the catalog.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.json import Decoder
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.operations import Endpoint, Operation, Reply
from forebay.admin.records import (
    JSON,
    Count,
    Offset,
    OffsetRange,
    Record,
    decode_body,
    json_response,
)
from forebay.admin.request import offset_of, read_body, read_query, topic_of
from forebay.config.topics import TopicSetting, in_effect
from forebay.dispatch.report import subscriptions_of
from forebay.errors import UnknownTopic
from forebay.format.names import TopicName
from forebay.limits import KIB, PARTITIONS_MAX
from forebay.topic.accept import AcceptedLoss, accept_loss
from forebay.topic.configure import configure_topic
from forebay.topic.describe import (
    OBJECTS_LISTED,
    CursorFacts,
    FrameLocation,
    ObjectFacts,
    OffsetFacts,
    SegmentFacts,
    TopicFacts,
    UploadedBy,
    describe,
    explain,
)
from forebay.topic.subscription_facts import SubscriptionFacts

TOPICS_MAX: Final = 1000
PARTS_MAX: Final = 1000
"""Segments, and objects, of one response."""
_SETTINGS_MAX: Final = 100
_BODY_BYTES_MAX: Final = 64 * KIB
TOPIC_PATH: Final = "/v1/topics/{namespace}/{topic}"

# ---- records ----------------------------------------------------------------------------------

_Open = Annotated[bool, Meta(description="Whether this server has the topic open.")]
_Stage = Annotated[
    Count | None, Meta(description="The next offset of this stage; null if the topic is not open.")
]


class TopicsQuery(Struct, frozen=True):
    prefix: Annotated[
        str, Meta(description="Only names that begin with this, such as `/default/`.")
    ] = ""
    limit: Annotated[
        int, Meta(ge=1, le=TOPICS_MAX, description="The maximum number of topics.")
    ] = 100
    after: Annotated[str, Meta(description="The last name of the previous page.")] = ""


class TopicQuery(Struct, frozen=True):
    limit: Annotated[
        int,
        Meta(
            ge=0,
            le=PARTS_MAX,
            description="The maximum number of segments and of objects to list, the newest ones.",
        ),
    ] = OBJECTS_LISTED
    before: Annotated[
        Count | None,
        Meta(
            description="List the objects that begin before this offset: `objects_before` of the "
            "page before."
        ),
    ] = None


class MakeQuery(Struct, frozen=True):
    partitions: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=PARTITIONS_MAX,
                description="Create so many partitions, `<topic>-part-<number>`; by default a "
                "topic without partitions.",
            ),
        ]
        | UnsetType
    ) = UNSET


class DeleteQuery(Struct, frozen=True):
    partitions: Annotated[bool, Meta(description="Delete all partitions of the topic.")] = False


class AcceptQuery(Struct, frozen=True):
    start: Annotated[Offset, Meta(description="The first offset; by default 0.")] | UnsetType = (
        UNSET
    )
    end: (
        Annotated[Offset, Meta(description="The offset to stop before; by default all.")]
        | UnsetType
    ) = UNSET
    dry_run: Annotated[bool, Meta(description="Only says what would be accepted.")] = False


class TopicOutline(Record, frozen=True):
    """The name and watermarks of a topic."""

    topic: str
    open: _Open
    start: _Stage = None
    appended: _Stage = None
    synced: _Stage = None
    uploaded: _Stage = None
    verified: _Stage = None


class TopicList(Record, frozen=True):
    """A page of topics, by name."""

    topics: list[TopicOutline]
    total: Annotated[Count, Meta(description="The number of topics on all pages.")]
    next: Annotated[str | None, Meta(description="`after` of the next page; null on the last.")]


class Topic(Record, frozen=True):
    """The watermarks, segments and objects of a topic."""

    topic: str
    open: _Open
    start_offset: Count
    appended: Annotated[Count | None, Meta(description="The next offset of this stage.")]
    synced: Annotated[Count | None, Meta(description="Null if the topic's log is not here.")]
    uploaded: Count
    verified: Count
    memory: Annotated[
        OffsetRange | None, Meta(description="The offsets that the owner has in memory.")
    ]
    reserved: Count | None
    epoch: Count | None
    owner: str | None
    lost: list[OffsetRange]
    unknown: Annotated[
        list[OffsetRange], Meta(description="Offsets that may never have been used.")
    ]
    accepted: Annotated[
        list[OffsetRange],
        Meta(description="Offsets that were lost or unknown. Readers jump over them."),
    ]
    segments: Annotated[list[SegmentFacts], Meta(description="The newest ones, oldest first.")]
    segments_total: Count
    segments_bytes: Count
    objects: Annotated[
        list[ObjectFacts],
        Meta(description="The newest ones, or the last ones before `before`, oldest first."),
    ]
    objects_total: Count
    objects_bytes: Count
    objects_counted: Annotated[
        bool,
        Meta(
            description="False: the two totals are lower bounds, because the owner has not "
            "counted the objects of a catalog that an earlier release wrote."
        ),
    ]
    objects_before: Annotated[
        Count | None,
        Meta(description="`before` of the next page of older objects; null on the last."),
    ]
    uploaded_by: Annotated[
        UploadedBy | None,
        Meta(description="What uploads the topic in the background; null if nothing does."),
    ]
    settings: Annotated[
        list[TopicSetting], Meta(description="What a topic can set itself, and its source.")
    ]
    cursors: Annotated[
        list[CursorFacts],
        Meta(
            description="What consumers acknowledged, as the catalog has it; those of "
            "subscriptions are not among them."
        ),
    ]
    subscriptions: Annotated[
        list[SubscriptionFacts],
        Meta(
            description="With what they acknowledged and their lags, as this server has it, or "
            "the catalog."
        ),
    ]
    problems: Annotated[list[str], Meta(description="Contradictions that were found.")]


class TopicSettings(Record, frozen=True):
    """All settings that a topic can have of its own."""

    topic: str
    settings: Annotated[
        list[TopicSetting],
        Meta(description="Values are in the unit that the key ends with."),
    ]


class NewSettings(Record, frozen=True):
    """A change of settings. It is made as a whole, or not at all."""

    values: Annotated[
        Mapping[str, str | int | float | bool | None],
        Meta(
            max_length=_SETTINGS_MAX,
            description="New values by key, written as in the configuration file.",
        ),
    ] = {}  # msgspec copies it
    unset: Annotated[
        tuple[str, ...],
        Meta(max_length=_SETTINGS_MAX, description="Keys that get the store's setting again."),
    ] = ()


_NEW_SETTINGS: Final = Decoder(NewSettings)


class Explanation(Record, frozen=True):
    """The location of one offset."""

    topic: str
    offset: Count
    state: Literal[
        "stored",
        "in memory",
        "not yet appended",
        "not yet synced",
        "not yet uploaded",
        "lost",
        "unknown",
        "accepted",
        "removed",
        "missing",
    ]
    places: list[FrameLocation]
    in_memory: bool
    synced: bool
    uploaded: bool
    verified: bool
    deletable: Annotated[
        bool | None, Meta(description="Whether the segment of the offset may be deleted.")
    ]
    kept_because: str | None
    go_on_at: Annotated[Count | None, Meta(description="The next offset that can be read.")]
    problems: list[str]


class Made(Record, frozen=True):
    topic: str
    created: Annotated[bool, Meta(description="False if all of it existed before.")]
    partitions: Annotated[
        list[str], Meta(description="All partitions; none for a topic without partitions.")
    ]


class DeletedPart(Record, frozen=True):
    """A topic or partition that was deleted."""

    topic: str
    next_offset: Annotated[Count, Meta(description="Where a topic of the same name begins.")]
    objects: Count
    bytes: Count
    rows: Annotated[Count, Meta(description="Rows of the catalog: descriptors, cursors, states.")]
    files: Annotated[Count, Meta(description="Files of the local log.")]
    unknown: Annotated[
        Count, Meta(description="Files in the object store that are not ours: they were kept.")
    ]


class Deleted(Record, frozen=True):
    topic: str
    deleted: list[DeletedPart]


class RemovedSegment(Record, frozen=True):
    file: str
    start_offset: Count
    next_offset: Count
    bytes: Count


class Trimmed(Record, frozen=True):
    topic: str
    removed: list[RemovedSegment]


class Accepted(Record, frozen=True):
    """Offsets without messages that readers jump over from now on."""

    topic: str
    lost: Annotated[list[OffsetRange], Meta(description="They were lost until now.")]
    unknown: Annotated[list[OffsetRange], Meta(description="They were unknown until now.")]
    accepted: Annotated[list[OffsetRange], Meta(description="All accepted ranges of the topic.")]
    dry_run: Annotated[bool, Meta(description="Whether nothing was changed.")]


# ---- routes -----------------------------------------------------------------------------------


LIST_TOPICS: Final = Operation(
    "listTopics",
    "topics",
    "Lists topics by name, with the progress of those that are open here.",
    {200: Reply("A page.", TopicList)},
    errors=(400, 502),
    query=TopicsQuery,
)
DESCRIBE_TOPIC: Final = Operation(
    "describeTopic",
    "topics",
    "Returns the watermarks, segments and objects of a topic.",
    {200: Reply("The topic.", Topic)},
    errors=(400, 404, 502),
    query=TopicQuery,
)
MAKE_TOPIC: Final = Operation(
    "makeTopic",
    "topics",
    "Creates a topic, or partitions of it, if they do not exist.",
    {200: Reply("The topic existed.", Made), 201: Reply("The topic was created.", Made)},
    errors=(400, 409, 502, 507),
    method="PUT",
    query=MakeQuery,
)
DELETE_TOPIC: Final = Operation(
    "deleteTopic",
    "topics",
    "Deletes a topic with its messages, objects, cursors and settings. This cannot be undone.",
    {200: Reply("What was deleted.", Deleted)},
    errors=(400, 404, 409, 502, 507),
    method="DELETE",
    query=DeleteQuery,
)
TRIM_TOPIC: Final = Operation(
    "trimTopic",
    "topics",
    "Deletes local segments that are verified and old enough.",
    {200: Reply("The segments that were deleted.", Trimmed)},
    errors=(400, 404, 409, 502, 507),
    method="POST",
)
ACCEPT_LOSS: Final = Operation(
    "acceptLoss",
    "topics",
    "Accepts lost and unknown offsets: readers jump over them. This cannot be undone.",
    {200: Reply("The ranges that were accepted; none if there were none.", Accepted)},
    errors=(400, 404, 502),
    method="POST",
    query=AcceptQuery,
)
EXPLAIN_OFFSET: Final = Operation(
    "explainOffset",
    "topics",
    "Returns where one message is, and whether it may be deleted.",
    {200: Reply("The location.", Explanation)},
    errors=(400, 404, 502),
)
TOPIC_SETTINGS: Final = Operation(
    "topicSettings",
    "topics",
    "Returns the settings that a topic can have of its own.",
    {200: Reply("The settings.", TopicSettings)},
    errors=(400, 404, 502),
)
CONFIGURE_TOPIC: Final = Operation(
    "configureTopic",
    "topics",
    "Changes settings that a topic has of its own.",
    {200: Reply("The settings in effect.", TopicSettings)},
    errors=(400, 404, 502),
    method="PATCH",
    body={JSON: NewSettings},
)


def routes(context: ServerContext) -> list[Endpoint]:
    async def list_all(request: Request) -> Response:
        query = read_query(request.scope["query_string"], TopicsQuery)
        return json_response(await run_in_threadpool(_list, context, query))

    async def show(request: Request) -> Response:
        query = read_query(request.scope["query_string"], TopicQuery)
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_describe, context, topic, query))

    async def create(request: Request) -> Response:
        query = read_query(request.scope["query_string"], MakeQuery)
        topic = topic_of(request.path_params)
        made = await run_in_threadpool(_create, context, topic, query)
        return json_response(made, 201 if made.created else 200)

    async def delete(request: Request) -> Response:
        query = read_query(request.scope["query_string"], DeleteQuery)
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_delete, context, topic, query))

    async def trim(request: Request) -> Response:
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_trim, context, topic))

    async def accept(request: Request) -> Response:
        query = read_query(request.scope["query_string"], AcceptQuery)
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_accept, context, topic, query))

    async def explain_offset(request: Request) -> Response:
        topic, offset = topic_of(request.path_params), offset_of(request.path_params)
        return json_response(await run_in_threadpool(_explain, context, topic, offset))

    async def settings(request: Request) -> Response:
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_settings, context, topic))

    async def configure(request: Request) -> Response:
        topic = topic_of(request.path_params)
        change = decode_body(await read_body(request, _BODY_BYTES_MAX), _NEW_SETTINGS)
        return json_response(await run_in_threadpool(_configure, context, topic, change))

    return [
        Endpoint("/v1/topics", list_all, LIST_TOPICS),
        Endpoint(TOPIC_PATH, show, DESCRIBE_TOPIC),
        Endpoint(TOPIC_PATH, create, MAKE_TOPIC),
        Endpoint(TOPIC_PATH, delete, DELETE_TOPIC),
        Endpoint(f"{TOPIC_PATH}/trim", trim, TRIM_TOPIC),
        Endpoint(f"{TOPIC_PATH}/accept-loss", accept, ACCEPT_LOSS),
        Endpoint(f"{TOPIC_PATH}/explain/{{offset}}", explain_offset, EXPLAIN_OFFSET),
        Endpoint(f"{TOPIC_PATH}/settings", settings, TOPIC_SETTINGS),
        Endpoint(f"{TOPIC_PATH}/settings", configure, CONFIGURE_TOPIC),
    ]


# ---- on threads -------------------------------------------------------------------------------


def _list(context: ServerContext, query: TopicsQuery) -> TopicList:
    names = [name for name in context.store.topics() if name.startswith(query.prefix)]
    start = bisect_right(names, query.after) if query.after else 0
    page = names[start : start + query.limit]
    more = start + query.limit < len(names)
    outlines = [_outline(context, name) for name in page]
    return TopicList(outlines, len(names), page[-1] if more else None)


def _outline(context: ServerContext, name: str) -> TopicOutline:
    """The watermarks of a topic that is open here; of another, its name alone."""
    topic = context.store.opened(name)
    if topic is None:
        return TopicOutline(name, open=False)
    marks = asdict(topic.watermarks())
    return TopicOutline(name, open=True, start=topic.start_known, **marks)


def _describe(context: ServerContext, name: TopicName, query: TopicQuery) -> Topic:
    with context.store.view() as view:
        seen = view.topic(str(name))
        facts = _fields(describe(seen, query.limit, query.before))
        if context.registry.loaded(name) is not None:
            facts["subscriptions"], _ = subscriptions_of(context.registry, seen)
    topic = context.store.opened(str(name))
    if topic is None:
        return Topic(**facts, open=False, appended=None, memory=None)
    memory = topic.in_memory()
    return Topic(
        **facts,
        open=True,
        appended=topic.watermarks().appended,
        memory=(memory.start, memory.stop),
    )


def _explain(context: ServerContext, name: TopicName, offset: int) -> Explanation:
    # The open topic first: what leaves memory later is found in the tiers by the view.
    topic = context.store.opened(str(name))
    with context.store.view() as view:
        facts = _fields(explain(view.topic(str(name)), offset))
    in_memory = topic is not None and offset in topic.in_memory()
    if topic is not None and facts["state"] == "not yet synced":
        marks = topic.watermarks()
        facts["synced"] = offset < marks.synced
        facts["state"] = "in memory" if offset < marks.appended else "not yet appended"
    return Explanation(**facts, in_memory=in_memory)


def _fields(facts: TopicFacts | OffsetFacts | AcceptedLoss) -> dict[str, Any]:
    return {each.name: getattr(facts, each.name) for each in fields(facts)}


def _create(context: ServerContext, name: TopicName, query: MakeQuery) -> Made:
    """Creates the topic or its partitions, as far as they do not exist."""
    partitions = None if query.partitions is UNSET else query.partitions
    made = context.store.create(str(name), partitions=partitions)
    return Made(made.topic, made.created, list(made.partitions))


def _delete(context: ServerContext, name: TopicName, query: DeleteQuery) -> Deleted:
    store = context.store
    done = store.delete_partitions(str(name)) if query.partitions else [store.delete(str(name))]
    return Deleted(str(name), [DeletedPart(**asdict(each)) for each in done])


def _trim(context: ServerContext, name: TopicName) -> Trimmed:
    with context.store.view() as view:
        view.topic(str(name))  # UnknownTopic, instead of creating one
    removed = context.topic(name).trim_local()
    return Trimmed(
        str(name),
        [
            RemovedSegment(str(each.path), each.first_offset, each.end_offset, each.size)
            for each in removed
        ],
    )


def _settings(context: ServerContext, name: TopicName) -> TopicSettings:
    with context.store.view() as view:
        topic = view.topic(str(name))
        own, policies = topic.own_settings(), topic.namespace_policies()
    return TopicSettings(str(name), in_effect(context.settings, own, policies))


def _configure(context: ServerContext, name: TopicName, change: NewSettings) -> TopicSettings:
    topic = context.store.opened(str(name))
    if topic is not None:
        return TopicSettings(str(name), topic.configure(change.values, unset=change.unset))
    with context.store.view() as view:
        view.topic(str(name))  # UnknownTopic, also if only the object store knows it
        resources = view.resources()
        if resources is None:
            raise UnknownTopic(f"there is no topic {name} in the catalog")
        found = configure_topic(
            resources.catalog, name, context.settings, change.values, change.unset
        )
    return TopicSettings(str(name), found)


def _accept(context: ServerContext, name: TopicName, query: AcceptQuery) -> Accepted:
    start, end = (None if each is UNSET else each for each in (query.start, query.end))
    with context.store.view() as view:
        view.topic(str(name))  # UnknownTopic, also if only the object store knows it
        resources = view.resources()
        if resources is None:
            raise UnknownTopic(f"there is no topic {name} in the catalog")
        found = accept_loss(resources.catalog, name, start, end, dry_run=query.dry_run)
    return Accepted(**_fields(found))
