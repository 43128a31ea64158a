"""`/v1/topics/{namespace}/{topic}/subscriptions`: what consumers have read, and how to move them.

    GET    .../subscriptions                   all of a topic: positions, lags, consumers, problems
    GET    .../subscriptions/{name}            one of them
    PUT    .../subscriptions/{name}            creates one, at a position; 200 if it exists
    DELETE .../subscriptions/{name}            deletes it; its consumers' streams end
    POST   .../subscriptions/{name}/seek       moves it to an offset or a time, back or on
    POST   .../subscriptions/{name}/skip       acknowledges messages that nobody has processed
    POST   .../subscriptions/{name}/reset      delivers everything again, from the oldest message
    GET    /v1/nonreliable                     topics that are not stored, and who listens

Changes go through the registry of the process, in its event loop, so that they reach consumers that
are connected. Without a broker there are none, and the same calls change the catalog alone.

The GETs open no topic. The others do: only a topic's owner may change its subscriptions.

Beware: a name may have slashes. One that ends in `/seek`, `/skip` or `/reset` cannot be named here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.json import Decoder
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.admin.context import ServerContext
from forebay.admin.operations import Endpoint, Operation, Reply
from forebay.admin.records import JSON, Count, Offset, Record, decode_body, json_response
from forebay.admin.request import read_body, read_query, topic_of
from forebay.admin.topics import TOPIC_PATH, TOPICS_MAX
from forebay.catalog.nonreliable import find_nonreliable, nonreliable_topics
from forebay.dispatch import metrics
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.report import steady, subscriptions_of
from forebay.errors import UnknownSubscription, UnknownTopic, UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.format.subscription import KINDS
from forebay.limits import KIB, SUBSCRIPTION_NAME_BYTES_MAX
from forebay.topic.store import Start
from forebay.topic.subscription_facts import SUBSCRIPTIONS_LISTED, SubscriptionFacts

_BODY_BYTES_MAX: Final = 4 * KIB
_TIME_MS_MAX: Final = 253_402_300_799_000
"""The last second of the year 9999."""
PATH: Final = f"{TOPIC_PATH}/subscriptions"
ONE_PATH: Final = f"{PATH}/{{subscription:path}}"

# ---- records ----------------------------------------------------------------------------------

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Kind = Literal["exclusive", "shared", "failover", "key-shared"]
_Start = Annotated[
    Offset | Literal["earliest", "latest"],
    Meta(
        description="The offset of the next message to deliver, or where the topic begins or ends."
    ),
]
_StartTime = Annotated[
    int,
    Meta(
        ge=0,
        le=_TIME_MS_MAX,
        description="Instead of `start`: the first message that was published at this time or "
        "later, in milliseconds since 1970.",
    ),
]


class Subscriptions(Record, frozen=True):
    """The subscriptions of a topic, by name."""

    topic: str
    subscriptions: list[SubscriptionFacts]
    truncated: Annotated[
        bool, Meta(description=f"Whether there may be more than {SUBSCRIPTIONS_LISTED}.")
    ]
    problems: Annotated[list[str], Meta(description="Rows of the catalog that are damaged.")]


class NewSubscription(Record, frozen=True):
    """A subscription to create. Without a place, `broker.subscription_start` says where."""

    type: Annotated[Kind, Meta(description="How consumers share the messages.")] = "exclusive"
    start: _Start | UnsetType = UNSET
    start_time: _StartTime | UnsetType = UNSET


class Place(Record, frozen=True):
    """Where a subscription is moved to: one of the two."""

    start: _Start | UnsetType = UNSET
    start_time: _StartTime | UnsetType = UNSET


class Skip(Record, frozen=True):
    """Which messages to acknowledge."""

    messages: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["all", "blocked"],
        Meta(
            description="A number: the next ones that are not acknowledged. `all`: all that are in "
            "the topic now. `blocked`: those that failed too often."
        ),
    ]


class SubscriptionCreated(Record, frozen=True):
    topic: str
    subscription: str
    type: Kind
    position: Count
    created: Annotated[bool, Meta(description="False if the subscription existed before.")]


class SubscriptionMoved(Record, frozen=True):
    topic: str
    subscription: str
    position: Annotated[Count, Meta(description="The offset of the next message to deliver.")]


class MessagesSkipped(Record, frozen=True):
    topic: str
    subscription: str
    skipped: Annotated[Count, Meta(description="The number of messages.")]
    position: Count


class SubscriptionDeleted(Record, frozen=True):
    topic: str
    subscription: str


class Listener(Record, frozen=True):
    """A subscription of a topic that is not stored."""

    name: str
    type: Kind
    consumers: Annotated[list[str], Meta(description="The names of those that are connected.")]


class NonReliable(Record, frozen=True):
    """A topic that is not stored."""

    topic: str
    created_ms: Count
    published: Annotated[Count, Meta(description="Messages since the server started.")]
    dropped: Annotated[
        Count, Meta(description="Messages that a subscription did not get, counted for each.")
    ]
    subscriptions: Annotated[
        list[Listener], Meta(description="Those that were used since the server started.")
    ]


class NonReliableList(Record, frozen=True):
    """A page of topics that are not stored, by name."""

    topics: list[NonReliable]
    total: Count
    next: Annotated[str | None, Meta(description="`after` of the next page; null on the last.")]


class NonReliableQuery(Struct, frozen=True):
    limit: Annotated[
        int, Meta(ge=1, le=TOPICS_MAX, description="The maximum number of topics.")
    ] = 100
    after: Annotated[str, Meta(description="The last name of the previous page.")] = ""


_NEW: Final = Decoder(NewSubscription)
_PLACE: Final = Decoder(Place)
_SKIP: Final = Decoder(Skip)

# ---- operations -------------------------------------------------------------------------------

_CHANGE_ERRORS: Final = (400, 404, 409, 502, 507)
LIST: Final = Operation(
    "listSubscriptions",
    "subscriptions",
    "Returns the subscriptions of a topic: positions, lags, consumers and problems.",
    {200: Reply("The subscriptions.", Subscriptions)},
    errors=(400, 404, 409, 502),
)
SHOW: Final = Operation(
    "showSubscription",
    "subscriptions",
    "Returns one subscription of a topic.",
    {200: Reply("The subscription.", SubscriptionFacts)},
    errors=(400, 404, 409, 502),
)
CREATE: Final = Operation(
    "createSubscription",
    "subscriptions",
    "Creates a subscription if it does not exist.",
    {
        200: Reply("The subscription existed, and is unchanged.", SubscriptionCreated),
        201: Reply("The subscription was created.", SubscriptionCreated),
    },
    errors=(*_CHANGE_ERRORS, 416),
    method="PUT",
    body={JSON: NewSubscription},
)
DELETE: Final = Operation(
    "deleteSubscription",
    "subscriptions",
    "Deletes a subscription, and what it has acknowledged.",
    {200: Reply("The subscription was deleted.", SubscriptionDeleted)},
    errors=_CHANGE_ERRORS,
    method="DELETE",
)
SEEK: Final = Operation(
    "seekSubscription",
    "subscriptions",
    "Moves a subscription: everything before the place counts as acknowledged, nothing after it.",
    {200: Reply("The subscription was moved.", SubscriptionMoved)},
    errors=(*_CHANGE_ERRORS, 416),
    method="POST",
    body={JSON: Place},
)
SKIP: Final = Operation(
    "skipMessages",
    "subscriptions",
    "Acknowledges messages of a subscription that nobody has processed.",
    {200: Reply("The messages were skipped; none if there were none.", MessagesSkipped)},
    errors=_CHANGE_ERRORS,
    method="POST",
    body={JSON: Skip},
)
RESET: Final = Operation(
    "resetSubscription",
    "subscriptions",
    "Moves a subscription to the oldest message of its topic, so that all are delivered again.",
    {200: Reply("The subscription was moved.", SubscriptionMoved)},
    errors=_CHANGE_ERRORS,
    method="POST",
)
LIST_NONRELIABLE: Final = Operation(
    "listNonReliableTopics",
    "subscriptions",
    "Lists the topics that are not stored, with who listens to them here.",
    {200: Reply("A page.", NonReliableList)},
    errors=(400, 502),
    query=NonReliableQuery,
)


def routes(context: ServerContext) -> list[Endpoint]:
    registry = context.registry

    async def list_all(request: Request) -> Response:
        topic = topic_of(request.path_params)
        return json_response(await run_in_threadpool(_list, context, topic))

    async def show(request: Request) -> Response:
        topic, name = _place(request)
        return json_response(await run_in_threadpool(_show, context, topic, name))

    async def create(request: Request) -> Response:
        topic, name = _place(request)
        body = await read_body(request, _BODY_BYTES_MAX)
        new = decode_body(body or b"{}", _NEW)
        kind = SubscriptionType(KINDS.index(new.type))
        position, created = await registry.create(topic, name, kind, _start(new))
        reply = SubscriptionCreated(str(topic), name, new.type, position, created)
        return json_response(reply, 201 if created else 200)

    async def delete(request: Request) -> Response:
        topic, name = _place(request)
        await registry.delete(topic, name)
        return json_response(SubscriptionDeleted(str(topic), name))

    async def seek(request: Request) -> Response:
        topic, name = _place(request)
        start = _start(decode_body(await read_body(request, _BODY_BYTES_MAX), _PLACE))
        if start is None:
            raise UsageError("give start, which is an offset, earliest or latest; or start_time")
        position = await registry.seek(topic, name, start)
        return json_response(SubscriptionMoved(str(topic), name, position))

    async def skip(request: Request) -> Response:
        topic, name = _place(request)
        body = decode_body(await read_body(request, _BODY_BYTES_MAX), _SKIP)
        position, skipped = await registry.skip(topic, name, body.messages)
        return json_response(MessagesSkipped(str(topic), name, skipped, position))

    async def reset(request: Request) -> Response:
        topic, name = _place(request)
        position = await registry.seek(topic, name, "earliest")
        return json_response(SubscriptionMoved(str(topic), name, position))

    async def nonreliable(request: Request) -> Response:
        query = read_query(request.scope["query_string"], NonReliableQuery)
        return json_response(await run_in_threadpool(_nonreliable, context, query))

    return [
        Endpoint(PATH, list_all, LIST),
        Endpoint(f"{ONE_PATH}/seek", _PostOnly(seek), SEEK, all_methods=True),
        Endpoint(f"{ONE_PATH}/skip", _PostOnly(skip), SKIP, all_methods=True),
        Endpoint(f"{ONE_PATH}/reset", _PostOnly(reset), RESET, all_methods=True),
        Endpoint(ONE_PATH, show, SHOW),
        Endpoint(ONE_PATH, create, CREATE),
        Endpoint(ONE_PATH, delete, DELETE),
        Endpoint("/v1/nonreliable", nonreliable, LIST_NONRELIABLE),
    ]


class _PostOnly:
    """Refuses other methods, which would otherwise be taken for those of a name with a slash."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        response = await self._handler(request)
        await response(scope, receive, send)


def _place(request: Request) -> tuple[TopicName, str]:
    """The topic and the subscription that a request's path names."""
    name = request.path_params["subscription"]
    if not 0 < len(name.encode(errors="replace")) <= SUBSCRIPTION_NAME_BYTES_MAX:
        raise UsageError(f"the name of a subscription has 1 to {SUBSCRIPTION_NAME_BYTES_MAX} bytes")
    return topic_of(request.path_params), name


def _start(body: NewSubscription | Place) -> Start | None:
    if body.start_time is UNSET:
        return None if body.start is UNSET else body.start
    if body.start is not UNSET:
        raise UsageError("give start or start_time, not both")
    return datetime.fromtimestamp(body.start_time / 1000, UTC)


# ---- on threads -------------------------------------------------------------------------------


def _list(context: ServerContext, name: TopicName) -> Subscriptions:
    with context.store.view() as view:
        _require_stored(context, name)
        found, damaged = subscriptions_of(context.registry, view.topic(str(name)))
    return Subscriptions(str(name), found, len(found) >= SUBSCRIPTIONS_LISTED, damaged)


def _show(context: ServerContext, topic: TopicName, name: str) -> SubscriptionFacts:
    with context.store.view() as view:
        _require_stored(context, topic)
        found, _ = subscriptions_of(context.registry, view.topic(str(topic)), name)
    if not found:
        raise UnknownSubscription(f"{topic} has no subscription {name!r}")
    return found[0]


def _require_stored(context: ServerContext, topic: TopicName) -> None:
    """Raises UsageError for a topic that is not stored."""
    catalog = context.store.catalog
    if catalog is not None and find_nonreliable(catalog, topic) is not None:
        raise UnknownTopic(
            f"{topic} is non-reliable, and its subscriptions keep nothing: see /v1/nonreliable"
        )


def _nonreliable(context: ServerContext, query: NonReliableQuery) -> NonReliableList:
    catalog = context.store.catalog
    found = [] if catalog is None else list(nonreliable_topics(catalog))
    found.sort(key=lambda each: str(each.name))
    names = [str(each.name) for each in found]
    after = str(parse_topic(query.after)) if query.after else ""
    start = bisect_right(names, after) if after else 0
    page = found[start : start + query.limit]
    return NonReliableList(
        [
            _nonreliable_topic(
                str(each.name), each.created_ms, context.registry.fanouts.get(each.name)
            )
            for each in page
        ],
        len(names),
        names[start + query.limit - 1] if start + query.limit < len(names) else None,
    )


def _nonreliable_topic(name: str, created_ms: int, fanout: FanoutTopic | None) -> NonReliable:
    dropped = int(metrics.DROPPED.value(name))
    if fanout is None:
        return NonReliable(name, created_ms, 0, dropped, [])
    return NonReliable(
        name, created_ms, fanout.published, dropped, steady(lambda: _listeners(fanout))
    )


def _listeners(fanout: FanoutTopic) -> list[Listener]:
    return [
        Listener(name, KINDS[each.kind], [one.name for one in each.consumers.values()])
        for name, each in sorted(fanout.subscriptions.items())
    ]
