"""Offloads and ledgers of a topic over HTTP, by Pulsar's paths.

    PUT  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload   starts one, before a message
    GET  …/offload                                                   how the last one went
    GET  …/internalStats                                             ledgers with their sizes
    GET  …/internal-info                                             ledgers with their offloads

An offload runs in the background, one at a time for each topic. How it went is in memory only, as
in Pulsar's brokers: after a restart none was run. What is offloaded is in the catalog all the same.
`pulsar-admin topics offload -s` adds up the sizes of `internalStats` itself, and sends the position
of the first ledger to keep.

Beware: all but GET offload open the topic, because only its owner knows what is not offloaded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from msgspec.json import Decoder
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.errors import Refused
from forebay.admin.operations import Endpoint, Reply
from forebay.admin.pulsar.paths import BODY_BYTES_MAX, TOPIC_PATH, operation, topic_of
from forebay.admin.records import Count, Record, decode_body, json_response
from forebay.admin.request import read_body
from forebay.errors import InvalidTopicName, TopicConflict, UnknownTopic, UsageError
from forebay.format.names import TopicName
from forebay.pulsar.managed_ledger import Ledger, ManagedLedger, Position, managed_ledger

# ---- records ----------------------------------------------------------------------------------

_Long = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class SentMessageId(Struct, frozen=True, rename="camel"):
    """The position before which to offload. Only its ledger counts."""

    ledger_id: _Long
    entry_id: _Long
    partition_index: _Long = -1


class MessageId(Record, frozen=True, rename="camel"):
    """A message as Pulsar names it; -1 three times is the earliest one."""

    ledger_id: _Long
    entry_id: _Long
    partition_index: _Long


class OffloadStatus(Record, frozen=True, rename="camel"):
    """How the last offload that was asked for went, since the server opened the topic."""

    status: Literal["NOT_RUN", "RUNNING", "SUCCESS", "ERROR"]
    last_error: str
    first_unoffloaded_message: MessageId


class StatsOfLedger(Record, frozen=True, rename="camel"):
    """A ledger by what it holds. The open one shows 0: see `currentLedgerSize`."""

    ledger_id: Count
    entries: Count
    size: Annotated[Count, Meta(description="Bytes.")]
    offloaded: Annotated[bool, Meta(description="Whether its offload is complete.")]
    under_replicated: bool = False


class InternalStats(Record, frozen=True, rename="camel"):
    """The ledgers of a topic, oldest first. The last one is open."""

    entries_added_counter: Count
    number_of_entries: Count
    total_size: Count
    current_ledger_entries: Count
    current_ledger_size: Count
    last_ledger_created_timestamp: str
    waiting_cursors_count: Count
    pending_add_entries_count: Count
    last_confirmed_entry: Annotated[str, Meta(description="Its ledger and entry.")]
    state: Literal["LedgerOpened"]
    ledgers: list[StatsOfLedger]
    cursors: Annotated[
        dict[str, str], Meta(description="None: subscriptions have calls of their own.")
    ]


class InfoOfLedger(Record, frozen=True, rename="camel"):
    """A ledger by what is known about its offload."""

    ledger_id: Count
    entries: Count
    size: Count
    timestamp: Annotated[
        Count, Meta(description="When it was closed, in milliseconds since 1970; 0 if it is open.")
    ]
    is_offloaded: Annotated[
        bool, Meta(description="As in Pulsar: whether an offload was begun; it may have failed.")
    ]
    offloaded_context_uuid: Annotated[
        str | None,
        Meta(description="The uuid of the last attempt, as in the names of its objects."),
    ]


class InternalInfo(Record, frozen=True, rename="camel"):
    """What is recorded about the ledgers of a topic, oldest first. The last one is open."""

    version: Count
    ledgers: list[InfoOfLedger]
    cursors: dict[str, str]


_MESSAGE_ID: Final = Decoder(SentMessageId | None)

OFFLOAD: Final = operation(
    "offloadTopic",
    "Starts to offload the closed ledgers of a topic before a message.",
    {204: Reply("The offload has begun.")},
    errors=(409, 507),
    method="PUT",
    body=SentMessageId,
)
OFFLOAD_STATUS: Final = operation(
    "offloadStatus",
    "Returns how the last offload of a topic goes.",
    {200: Reply("The state.", OffloadStatus)},
    errors=(409, 507),
)
INTERNAL_STATS: Final = operation(
    "internalStats",
    "Returns the ledgers of a topic with their sizes.",
    {200: Reply("The ledgers.", InternalStats)},
    errors=(409, 507),
)
INTERNAL_INFO: Final = operation(
    "internalInfo",
    "Returns the ledgers of a topic with the state of their offloads.",
    {200: Reply("The ledgers.", InternalInfo)},
    errors=(409, 507),
)


def routes(context: ServerContext) -> list[Endpoint]:
    async def put(request: Request) -> Response:
        topic = topic_of(request)
        body = await read_body(request, BODY_BYTES_MAX)
        position = decode_body(body, _MESSAGE_ID) if body else None
        if position is None:
            raise Refused(400, "messageId is null")
        before = Position(position.ledger_id, position.entry_id)
        await run_in_threadpool(_start, context, topic, before)
        return Response(status_code=204)

    async def status(request: Request) -> Response:
        return json_response(await run_in_threadpool(_status, context, topic_of(request)))

    async def stats(request: Request) -> Response:
        return json_response(await run_in_threadpool(_stats, context, topic_of(request)))

    async def info(request: Request) -> Response:
        return json_response(await run_in_threadpool(_info, context, topic_of(request)))

    return [
        Endpoint(f"{TOPIC_PATH}/offload", put, OFFLOAD),
        Endpoint(f"{TOPIC_PATH}/offload", status, OFFLOAD_STATUS),
        Endpoint(f"{TOPIC_PATH}/internalStats", stats, INTERNAL_STATS),
        Endpoint(f"{TOPIC_PATH}/internal-info", info, INTERNAL_INFO),
    ]


# ---- on threads -------------------------------------------------------------------------------


def _managed(context: ServerContext, topic: TopicName) -> ManagedLedger:
    """The ledgers of a topic; UnknownTopic if there is none. Opens it."""
    with context.store.view() as view:
        view.topic(str(topic))
    return managed_ledger(context.store.storage(str(topic)))


def _start(context: ServerContext, topic: TopicName, before: Position) -> None:
    try:
        _managed(context, topic).start_offload(before)
    except (UnknownTopic, TopicConflict, InvalidTopicName):
        raise
    except UsageError as error:  # the position, or the topic's format
        raise Refused(412, str(error)) from error


def _status(context: ServerContext, topic: TopicName) -> OffloadStatus:
    if context.store.opened(str(topic)) is None:
        with context.store.view() as view:
            view.topic(str(topic))  # UnknownTopic
        return OffloadStatus("NOT_RUN", "", MessageId(-1, -1, -1))
    found = _managed(context, topic).status()
    first = found.first_unoffloaded or Position(-1, -1)
    return OffloadStatus(found.state.value, found.error, MessageId(*first, -1))


def _stats(context: ServerContext, topic: TopicName) -> InternalStats:
    ledgers = _managed(context, topic).ledgers()
    *closed, current = ledgers
    return InternalStats(
        entries_added_counter=sum(each.entries for each in ledgers),
        number_of_entries=sum(each.entries for each in ledgers),
        total_size=sum(each.size for each in ledgers),
        current_ledger_entries=current.entries,
        current_ledger_size=current.size,
        last_ledger_created_timestamp=_iso((closed[-1].closed_ms or 0) if closed else 0),
        waiting_cursors_count=0,
        pending_add_entries_count=0,
        last_confirmed_entry=f"{current.ledger_id}:{current.entries - 1}",
        state="LedgerOpened",
        ledgers=[
            *(
                StatsOfLedger(each.ledger_id, each.entries, each.size, each.offloaded)
                for each in closed
            ),
            StatsOfLedger(current.ledger_id, 0, 0, offloaded=False),
        ],
        cursors={},
    )


def _stats_of(ledger: Ledger) -> StatsOfLedger:
    return StatsOfLedger(ledger.ledger_id, ledger.entries, ledger.size, ledger.offloaded)


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _info(context: ServerContext, topic: TopicName) -> InternalInfo:
    ledgers = _managed(context, topic).ledgers()
    return InternalInfo(len(ledgers), [_info_of(each) for each in ledgers], {})


def _info_of(ledger: Ledger) -> InfoOfLedger:
    is_open = ledger.closed_ms is None
    return InfoOfLedger(
        ledger.ledger_id,
        0 if is_open else ledger.entries,
        0 if is_open else ledger.size,
        ledger.closed_ms or 0,
        ledger.context is not None,
        None if ledger.context is None else ledger.context.uid,
    )
