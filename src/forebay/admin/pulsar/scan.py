"""Compares the ledgers in the bucket with the catalog, by Pulsar's path, as a stream of JSON.

    GET /admin/v2/namespaces/{tenant}/{namespace}/scanOffloadedLedgers

    {"objects": [{"ledger": 7, "name": "<uuid>-ledger-7", "status": "OK", ...}, ...],
     "total": 2, "errors": 0, "unknown": 0}

Every object of a ledger below the namespace is one of `objects`, data and index alike. `status` is
one of Pulsar's: OK; NOT-FOUND, the topic has no such ledger; NOT-OFFLOADED, its offload is not
complete; BAD-UUID, another attempt at it is; UNKNOWN, the object is in no topic's place. `errors`
counts those that are neither OK nor UNKNOWN. A sweep removes what an offload left behind.

Beware: Pulsar's own brokers answer something that is not JSON. If the bucket fails on the way, the
status is 200 already: the answer then ends with an `error`, and the counts are of what was seen.
What is offloaded during the scan may be shown as it was before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.admin.context import ServerContext
from forebay.admin.errors import ErrorFields, Refused, error_fields
from forebay.admin.operations import Endpoint, Reply
from forebay.admin.pulsar.paths import (
    NAMESPACE_PATH,
    namespace_of,
    operation,
)
from forebay.admin.records import JSON, Count, Record, encode
from forebay.admin.request import LONG_STALL_SECONDS
from forebay.admin.response import Client, ClientStalled, disconnected, report_drop
from forebay.errors import ForebayError, ServiceUnavailable
from forebay.format.descriptor import decode_outline
from forebay.format.names import (
    TOPICS_PREFIX,
    LedgerName,
    TopicName,
    managed_ledger_name,
    parse_ledger,
    topic_of_key,
)
from forebay.objects.backend import ObjectMeta
from forebay.topic.resources import StoreResources

Status: TypeAlias = Literal["OK", "UNKNOWN", "BAD-UUID", "NOT-FOUND", "NOT-OFFLOADED"]
_PIECE_OBJECTS: Final = 100
"""Objects that are sent at once."""
_SCANS_MAX: Final = 4
"""Each lists everything below a namespace; more at the same time are refused."""

# ---- records ----------------------------------------------------------------------------------


class ScannedObject(Record, frozen=True, rename="camel", omit_defaults=True):
    """An object of a ledger."""

    ledger: Count
    name: str
    uri: str
    uuid: str
    size: Count
    last_modified: Annotated[Count, Meta(description="In milliseconds since 1970.")]
    status: Status
    managed_ledger_name: str | UnsetType = UNSET
    num_entries: Count | UnsetType = UNSET
    offloaded: bool | UnsetType = UNSET


class Scan(Record, frozen=True, omit_defaults=True):
    """All objects of ledgers below a namespace."""

    objects: list[ScannedObject]
    total: Count
    errors: Count
    unknown: Count
    error: (
        Annotated[ErrorFields, Meta(description="Why the scan ended before its end.")] | UnsetType
    ) = UNSET


SCAN: Final = operation(
    "scanOffloadedLedgers",
    "Compares the ledgers in the object store with the catalog.",
    {200: Reply("The objects.", Scan)},
)


def routes(context: ServerContext) -> list[Endpoint]:
    running: set[_ScanResponse] = set()

    async def get(request: Request) -> Response:
        namespace = namespace_of(request)
        if request.method == "HEAD":
            return Response(media_type=JSON)
        if len(running) >= _SCANS_MAX:
            raise ServiceUnavailable(f"{len(running)} scans are running: try again later")
        pieces = _pieces(context, namespace)
        found = _ScanResponse(context, pieces, namespace, running)
        # The first one here: if the bucket does not answer at all, the status says so.
        await found.begin()
        return found

    return [Endpoint(f"{NAMESPACE_PATH}/scanOffloadedLedgers", get, SCAN)]


class _ScanResponse(Response):
    """Sends the pieces while the client reads them, and closes what they are made from."""

    def __init__(
        self,
        context: ServerContext,
        pieces: Generator[bytes],
        namespace: str,
        running: set[_ScanResponse],
    ) -> None:
        super().__init__(None, media_type=JSON)
        del self.headers["content-length"]  # in chunks
        self._context = context
        self._pieces = pieces
        self._namespace = namespace
        self._running = running
        self._next: bytes | None = None

    async def begin(self) -> None:
        self._running.add(self)
        try:
            self._next = await self._take()
        except BaseException:
            self._running.discard(self)
            raise

    async def _take(self) -> bytes | None:
        return await run_in_threadpool(next, self._pieces, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, send, self._context.response_memory, LONG_STALL_SECONDS)
        gone = client.gone = asyncio.create_task(disconnected(receive))
        sending = asyncio.create_task(self._send(client))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.wait({sending, gone})
            client.close()
            await run_in_threadpool(self._pieces.close)
            self._running.discard(self)
        if not sending.cancelled():
            sending.result()

    async def _send(self, client: Client) -> None:
        await client.start(self.status_code, self.raw_headers)
        sent = 0
        try:
            while (piece := self._next) is not None:
                await client.write(piece)
                sent += len(piece)
                self._next = None
                if not await client.takes():
                    await client.drained()
                self._next = await self._take()
            await client.end()
        except ClientDisconnect:
            pass
        except ClientStalled:
            report_drop(f"the scan of {self._namespace}", sent)


# ---- on threads -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Counts:
    total: int = 0
    errors: int = 0
    unknown: int = 0

    def add(self, status: Status) -> None:
        self.total += 1
        self.unknown += status == "UNKNOWN"
        self.errors += status not in {"OK", "UNKNOWN"}


def _pieces(context: ServerContext, namespace: str) -> Generator[bytes]:
    """Yields the JSON in pieces. Raises only before the first one."""
    counts = _Counts()
    waiting: list[bytes] = []
    start = b'{"objects":['
    error: dict[str, object] | None = None
    with context.store.view() as view:
        resources = view.resources()
        if resources is None:
            raise Refused(400, "a store in memory has no offloaded ledgers")
        found = _objects(context, resources, namespace)
        try:
            for each in found:
                counts.add(each.status)
                waiting.append(encode(each))
                if len(waiting) == _PIECE_OBJECTS:
                    yield start + b",".join(waiting)
                    start, waiting = b",", []
                    _require_going(context)
        except (ForebayError, Refused) as problem:
            if start != b",":
                raise
            error = _fields(problem)
    tail: dict[str, object] = asdict(counts)
    if error is not None:
        tail["error"] = error
    left = start + b",".join(waiting) if waiting or start != b"," else b""
    yield left + b"]," + encode(tail)[1:]


def _fields(problem: ForebayError | Refused) -> dict[str, object]:
    if isinstance(problem, ForebayError):
        return error_fields(problem)
    return {"kind": "ServiceUnavailable", "message": str(problem)}


def _require_going(context: ServerContext) -> None:
    if context.stopping.is_set():
        raise Refused(503, "the server is stopping: scan again")


@dataclass(slots=True)
class _Known:
    """What the catalog says about the ledgers of one topic, by their ids."""

    topic: TopicName
    committed: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The uuid and the number of entries."""
    attempted: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, resources: StoreResources, topic: TopicName) -> _Known:
        known = cls(topic)
        for attempt in resources.catalog.ledgers(topic).attempts():
            known.attempted[attempt.name.ledger_id] = attempt.name.uid
        for each in resources.catalog.get_object_descriptors(topic, decoder=decode_outline):
            name = parse_ledger(each.object_id)
            if name is not None:
                known.committed[name.ledger_id] = name.uid, each.count
        return known

    def status(self, name: LedgerName) -> Status:
        uid, _ = self.committed.get(name.ledger_id, (None, 0))
        if uid is not None:
            return "OK" if uid == name.uid else "BAD-UUID"
        uid = self.attempted.get(name.ledger_id)
        if uid is None:
            return "NOT-FOUND"
        return "NOT-OFFLOADED" if uid == name.uid else "BAD-UUID"


def _objects(
    context: ServerContext, resources: StoreResources, namespace: str
) -> Iterator[ScannedObject]:
    known: _Known | None = None
    for meta in resources.store.list(f"{TOPICS_PREFIX}{namespace}/"):
        name = parse_ledger(meta.key.rpartition("/")[2])
        if name is None:
            continue
        place = topic_of_key(meta.key)
        if place is not None and (known is None or known.topic != place[0]):
            known = _Known.of(resources, place[0])
        uri = _uri(context, meta.key)
        yield _scanned(meta, name, uri, None if place is None else known)


def _scanned(meta: ObjectMeta, name: LedgerName, uri: str, known: _Known | None) -> ScannedObject:
    own = meta.key.rpartition("/")[2]
    facts = (name.ledger_id, own, uri, name.uid, meta.size, max(meta.modified_ms, 0))
    if known is None:
        return ScannedObject(*facts, "UNKNOWN")
    managed, committed = managed_ledger_name(known.topic), known.committed.get(name.ledger_id)
    status = known.status(name)
    if committed is None:
        offloaded = UNSET if status == "NOT-FOUND" else False
        return ScannedObject(*facts, status, managed, offloaded=offloaded)
    return ScannedObject(*facts, status, managed, committed[1], offloaded=True)


def _uri(context: ServerContext, key: str) -> str:
    root = context.settings.cloud.root
    return f"{root.rstrip('/')}/{key}" if root else key
