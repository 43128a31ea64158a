"""Batches of the Spark sink: rows that are staged as objects, appended once.

    POST /v1/sink/commit   appends the rows of one batch
    POST /v1/sink/forget   removes the staged rows of a write that failed, unless a batch needs them

The body says where the rows are staged (`forebay.pipeline.sink.owner`). The response to a commit
is a stream of lines: `{"working": true}` while it works, then `{"appended": n, "known": n}` or
`{"error": ...}`. If the client disconnects, the commit still runs to its end. A repeated request
finds the rows that it appended. Batches of one sink wait for each other, for a bounded time. A body
counts against a byte budget until its batch is done, because it is in memory until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, structs
from msgspec.json import Decoder
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from forebay.admin.context import ServerContext
from forebay.admin.errors import ERRORS, Error, error_fields, error_response
from forebay.admin.operations import Endpoint, Lines, Operation, Reply
from forebay.admin.records import (
    JSON,
    LINES,
    Count,
    Offset,
    Record,
    decode_body,
    json_line,
    json_response,
)
from forebay.admin.request import BUDGET_WAIT_SECONDS, STALL_SECONDS, ByteBudget, RequestBody
from forebay.errors import ForebayError, ServiceUnavailable, WaitTimeout
from forebay.format.names import write_of_staged
from forebay.limits import OFFSET_MAX
from forebay.logs import event
from forebay.pipeline.sink.commit import NO_BATCH, Committed, SinkBatch
from forebay.pipeline.sink.owner import (
    PARTS_MAX,
    REQUEST_BYTES_MAX,
    check_request,
    commit_in,
    forget_in,
)
from forebay.pipeline.sink.staging import Part

_Result = TypeVar("_Result")
_log: Final = logging.getLogger("forebay.admin")
_THREADS: Final = 4
_COMMITS_MAX: Final = 64
"""Running or waiting; more are refused."""
_TURN_SECONDS_MAX: Final = 120.0
"""How long a batch waits for another one of the same sink."""
_WORKING_SECONDS: Final = 2.0
_QUERY_CHARS_MAX: Final = 200
_BUDGET_BODIES: Final = 4
"""Bodies of the largest size, at a time."""


# ---- records ----------------------------------------------------------------------------------


class BatchPart(Record, frozen=True):
    """The rows of one partition."""

    partition: Offset
    key: Annotated[str | None, Meta(description="Where the rows are staged.")]
    rows: Offset
    bytes: Offset
    topics: Annotated[dict[str, Offset], Meta(description="Numbers of rows by topic.")] = {}  # noqa: RUF012  # msgspec copies it
    digest: Count = 0
    checksum: Annotated[Count | None, Meta(description="Of all rows, in order.")] = None
    zeros: Annotated[
        list[str],
        Meta(description="Topics that stand for the partition 0 of a topic that may have none."),
    ] = []  # noqa: RUF012  # msgspec copies it


class BatchRequest(Record, frozen=True):
    """A batch of the Spark sink."""

    sink_id: Annotated[str, Meta(min_length=1)]
    batch: Offset
    named: bool
    parts: Annotated[list[BatchPart], Meta(max_length=PARTS_MAX)]
    streaming: bool = False
    query: Annotated[
        Annotated[str, Meta(min_length=1, max_length=_QUERY_CHARS_MAX)] | None,
        Meta(description="The id of the streaming query that numbers the batches."),
    ] = None
    after: Annotated[
        Annotated[int, Meta(ge=NO_BATCH, le=OFFSET_MAX)] | None,
        Meta(
            description="The sink's last batch when this one was planned; -1 if it had none. "
            "The batch is refused if another one was appended since."
        ),
    ] = None


class Working(Record, frozen=True):
    working: bool


class BatchResult(Record, frozen=True):
    """The result of a commit: how many rows were appended, and how many were there before."""

    appended: Count
    known: Annotated[Count, Meta(description="Rows that an earlier request had appended.")]


class Forgotten(Record, frozen=True):
    forgotten: Annotated[bool, Meta(description="Whether the staged rows were removed.")]


_DECODER: Final = Decoder(BatchRequest)
_BODY: Final = {JSON: BatchRequest}
_COMMIT_LINES: Final = Lines(
    "SinkLine",
    "`working` is sent every few seconds. Any other line is the last one.",
    [Working, BatchResult, Error],
)

# ---- routes -----------------------------------------------------------------------------------


COMMIT_BATCH: Final = Operation(
    "commitBatch",
    "cluster",
    "Appends the staged rows of a batch of the Spark sink, each once.",
    {200: Reply("Lines.", _COMMIT_LINES, LINES)},
    errors=(400, 413, 502, 504),
    method="POST",
    body=_BODY,
)
FORGET_BATCH: Final = Operation(
    "forgetBatch",
    "cluster",
    "Removes the staged rows of a batch that failed, unless the batch is being committed.",
    {200: Reply("Whether they were removed.", Forgotten)},
    errors=(400, 413, 502, 504),
    method="POST",
    body=_BODY,
)


def routes(context: ServerContext, *, stall_seconds: float = STALL_SECONDS) -> list[Endpoint]:
    """`stall_seconds` is how long a sink may take for the next chunk of a body."""
    commits = SinkCommits(context, stall_seconds=stall_seconds)

    async def commit(request: Request) -> Response:
        try:
            batch = await commits.read(request)
        except ClientDisconnect:
            return _disconnected()
        return StreamingResponse(_lines(commits.commit(batch)), media_type=LINES)

    async def forget(request: Request) -> Response:
        try:
            batch = await commits.read(request)
        except ClientDisconnect:
            return _disconnected()
        return json_response(Forgotten(await commits.forget(batch)))

    return [
        Endpoint(
            "/v1/sink/commit",
            commit,
            COMMIT_BATCH,
        ),
        Endpoint(
            "/v1/sink/forget",
            forget,
            FORGET_BATCH,
        ),
    ]


def _disconnected() -> Response:
    return error_response(400, "UsageError", "the client disconnected before the end of the body")


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """A request, with its body, which holds bytes of the budget until it is released."""

    run: SinkBatch
    parts: list[Part]
    body: RequestBody

    @property
    def writes(self) -> frozenset[str]:
        return frozenset(write_of_staged(part.key) for part in self.parts if part.key is not None)


class SinkCommits:
    """The batches that one server is committing. For the event loop's thread."""

    def __init__(self, context: ServerContext, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._budget: ByteBudget | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sink")
        self._turns: dict[str, asyncio.Lock] = {}
        """One lock for each sink that has a batch here, by sink id."""
        self._tasks: dict[asyncio.Task[BatchResult], frozenset[str]] = {}
        """The running commits, with the writes whose staged rows they need."""

    async def read(self, request: Request) -> SinkRequest:
        """The batch of a request, read within limits."""
        if self._budget is None:
            most = _BUDGET_BODIES * REQUEST_BYTES_MAX
            limit = f"of at most {most} for batches of sinks"
            self._budget = ByteBudget(most, BUDGET_WAIT_SECONDS, limit)
        body = RequestBody(
            request.receive,
            self._budget,
            dict(request.scope["headers"]),
            REQUEST_BYTES_MAX,
            "of one batch: write it from fewer partitions",
            stall_seconds=self._stall_seconds,
        )
        try:
            return SinkRequest(*await asyncio.to_thread(_decoded, await body.read()), body)
        except BaseException:
            body.release()
            raise

    def commit(self, batch: SinkRequest) -> asyncio.Task[BatchResult]:
        """Begins a commit, which is never cancelled: rows appended by half help nobody."""
        run = batch.run
        if len(self._tasks) >= _COMMITS_MAX:
            batch.body.release()
            raise ServiceUnavailable(f"{_COMMITS_MAX} batches are under way: try again later")
        turn = self._turns.setdefault(run.sink_id, asyncio.Lock())
        work = partial(commit_in, self._context.store, run, batch.parts)
        task = asyncio.create_task(self._in_turn(turn, run.sink_id, work), name=run.sink_id)
        self._tasks[task] = batch.writes
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: batch.body.release())
        return task

    async def forget(self, batch: SinkRequest) -> bool:
        """Whether the staged rows were removed.

        They stay while a batch of the sink is under way, or one of another sink that needs them.
        """
        try:
            needed = any(batch.writes & each for each in self._tasks.values())
            if needed or batch.run.sink_id in self._turns:
                return False
            await self._run(partial(forget_in, self._context.store, batch.parts))
        finally:
            batch.body.release()
        return True

    async def _in_turn(
        self, turn: asyncio.Lock, sink_id: str, work: Callable[[], Committed]
    ) -> BatchResult:
        try:
            async with asyncio.timeout(_TURN_SECONDS_MAX):
                await turn.acquire()
        except TimeoutError:
            raise WaitTimeout(
                f"another batch of the sink {sink_id!r} is under way: try again later"
            ) from None
        try:
            committed = await self._run(work)
            return BatchResult(committed.appended, committed.known)
        finally:
            turn.release()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _ended(self, task: asyncio.Task[BatchResult]) -> None:
        self._tasks.pop(task)
        if all(each.get_name() != task.get_name() for each in self._tasks):
            del self._turns[task.get_name()]
        if not task.cancelled() and task.exception() is not None:
            event(_log, logging.WARNING, "a batch of a sink failed", error=task.exception())


def _decoded(data: bytes) -> tuple[SinkBatch, list[Part]]:
    """May take long: not on the event loop."""
    found = decode_body(data, _DECODER)
    batch = SinkBatch(
        found.sink_id, found.batch, found.named, found.streaming, found.query, found.after
    )
    parts = [Part(**structs.asdict(each)) for each in found.parts]
    check_request(batch, parts)
    return batch, parts


async def _lines(task: asyncio.Task[BatchResult]) -> AsyncIterator[bytes]:
    """Yields lines until the commit is done. The commit continues if the client disconnects."""
    while not (await asyncio.wait({task}, timeout=_WORKING_SECONDS))[0]:
        yield json_line(Working(working=True))
    try:
        last: BatchResult | dict[str, Any] = task.result()
    except ForebayError as error:
        last = {"error": error_fields(error)}
        ERRORS.add(1, type(error).__name__)
    except Exception as error:  # noqa: BLE001  # a bug: the response has begun, and must end well
        event(_log, logging.ERROR, "a commit failed", trace=error, error=repr(error))
        last = {"error": {"kind": "InternalError", "message": "the server failed; see its log"}}
        ERRORS.add(1, "InternalError")
    yield json_line(last)
