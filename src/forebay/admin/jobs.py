"""`/v1/jobs`: jobs on Spark (offload, compact, verify): requests for them, and past ones.

    POST /v1/jobs        {"kind": "offload", "topics": ["/default/orders"]}   202, with the job
    GET /v1/jobs         the newest first, and the status of the Spark driver
    GET /v1/jobs/{id}    one of them
    DELETE /v1/jobs/{id} cancels it, if it is not over yet

The jobs run behind the port `Jobs` (`forebay.service.jobs`); a server without Spark has none. A
job's states are `queued → running → done | failed | cancelled | lost`. A lost job was running when
its driver ended: what it had committed counts, and a new job does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.context import ServerContext
from forebay.admin.errors import error_response
from forebay.admin.request import whole_number
from forebay.errors import ForebayError, UnknownTopic, UsageError
from forebay.format.names import parse_topic

KINDS: Final = ("offload", "compact", "verify")
QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"
CANCELLED, LOST = "cancelled", "lost"
OVER: Final = frozenset({DONE, FAILED, CANCELLED, LOST})
"""States that a job does not leave."""
_BODY_BYTES_MAX: Final = 1024 * 1024
_TOPICS_MAX: Final = 1000
_LIST_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as it is now."""

    id: str
    kind: str
    topics: tuple[str, ...]
    """Those that were named; empty for all topics."""
    options: Mapping[str, int | bool]
    trigger: str
    """`request`, or `interval` for a cycle of the pipeline."""
    state: str
    created: float
    """In seconds since 1970, as the other times."""
    started: float | None = None
    ended: float | None = None
    done: int = 0
    """Tasks of the running Spark job that are done."""
    total: int = 0
    label: str = ""
    """What is being done, in plain words."""
    summary: Mapping[str, int] = field(default_factory=dict)
    """What it did: numbers of objects, messages, bytes and such."""
    error: str | None = None
    details: tuple[str, ...] = ()
    """The first findings or errors, one line each."""
    attempts: int = 1
    """Cycles in a row that failed and are recorded as one."""

    @property
    def over(self) -> bool:
        return self.state in OVER

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        progress = {name: found.pop(name) for name in ("done", "total", "label")}
        return {**found, "progress": progress}


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """The process that runs the jobs."""

    state: str
    """`starting`, `ready`, `working`, `restarting` or `stopped`."""
    master: str
    since: float
    """When it got into this state."""
    pid: int | None = None
    restarts: int = 0
    error: str | None = None
    """Why the last process ended, while the next one is not ready."""


class JobsFull(ForebayError):
    """The queue of waiting jobs is full."""


class Jobs(Protocol):
    """A queue of jobs. Its calls are quick, and made from the event loop's thread."""

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool]
    ) -> JobRecord:
        """Queues a job; JobsFull if too many wait."""

    def list(self) -> Sequence[JobRecord]:
        """All jobs that are kept, the newest first. From any thread."""

    def get(self, job_id: str) -> JobRecord | None: ...

    def cancel(self, job_id: str) -> JobRecord | None:
        """Ends a waiting job, asks a running one to end, and leaves one that is over."""

    def driver(self) -> DriverStatus:
        """From any thread."""


_WHOLE: Final = "a whole number of at least 1"
_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "offload": {"due": "true or false"},
    "compact": {"target_bytes": _WHOLE, "budget_bytes": _WHOLE},
    "verify": {
        "incremental": "true or false",
        "budget_bytes": _WHOLE,
        "orphans": "true or false",
    },
}
"""The options of each kind of job, with the rule for their values."""


def parse_request(body: bytes) -> tuple[str, tuple[str, ...], dict[str, int | bool]]:
    """Kind, topics and options of a request for a job; UsageError for anything else."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError('the body must be an object, such as {"kind": "offload"}')
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"kind is {_shown(kind)}; it must be one of {', '.join(KINDS)}")
    topics = found.pop("topics", None) or []
    if not isinstance(topics, list) or not all(isinstance(each, str) for each in topics):
        raise UsageError(f"topics is {_shown(topics)}; it must be a list of names")
    if len(topics) > _TOPICS_MAX:
        raise UsageError(f"topics has {len(topics)} names; at most {_TOPICS_MAX} are taken")
    names = tuple(dict.fromkeys(str(parse_topic(each)) for each in topics))
    return kind, names, {name: _option(kind, name, value) for name, value in found.items()}


def _option(kind: str, name: str, value: object) -> int | bool:
    known = _OPTIONS[kind]
    if name not in known:
        raise UsageError(f"{kind} has no option {name[:80]!r}; it has {', '.join(known)}")
    rule = known[name]
    if rule == _WHOLE and isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if rule != _WHOLE and isinstance(value, bool):
        return value
    raise UsageError(f"{name} is {_shown(value)}; it must be {rule}")


def _shown(value: object) -> str:
    return repr(value)[:80]


def routes(context: ServerContext) -> list[BaseRoute]:
    async def create(request: Request) -> Response:
        kind, topics, options = parse_request(await _body(request))
        if context.jobs is None:
            return _no_spark()
        if topics:
            await asyncio.to_thread(_require_known, context, topics)
        try:
            job = context.jobs.submit(kind, topics, options)
        except JobsFull as error:
            return error_response(429, "ServiceUnavailable", str(error))
        return JSONResponse(job.as_json(), 202, {"Location": f"/v1/jobs/{job.id}"})

    async def list_all(request: Request) -> Response:
        is_wanted = _filter(request)
        text = request.query_params.get("limit", "100")
        limit = whole_number("limit", text, 1, _LIST_MAX, rule=f"1 to {_LIST_MAX}")
        jobs = context.jobs.list() if context.jobs is not None else []
        found = [job.as_json() for job in jobs if is_wanted(job)]
        spark = None if context.jobs is None else asdict(context.jobs.driver())
        return JSONResponse({"jobs": found[:limit], "spark": spark})

    async def show(request: Request) -> Response:
        job = None if context.jobs is None else context.jobs.get(request.path_params["id"])
        return _unknown(request) if job is None else JSONResponse(job.as_json())

    async def cancel(request: Request) -> Response:
        job = None if context.jobs is None else context.jobs.cancel(request.path_params["id"])
        if job is None:
            return _unknown(request)
        return JSONResponse(job.as_json(), 200 if job.over else 202)

    return [
        Route("/v1/jobs", create, methods=["POST"]),
        Route("/v1/jobs", list_all, methods=["GET"]),
        Route("/v1/jobs/{id}", show, methods=["GET"]),
        Route("/v1/jobs/{id}", cancel, methods=["DELETE"]),
    ]


def _require_known(context: ServerContext, topics: Sequence[str]) -> None:
    unknown = set(topics).difference(context.store.topics())
    if unknown:
        raise UnknownTopic(f"there is no topic {min(unknown)} in {context.settings.data}")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_BYTES_MAX:
            raise UsageError(f"the body is larger than {_BODY_BYTES_MAX} bytes")
    return bytes(body)


def _filter(request: Request) -> Callable[[JobRecord], bool]:
    asked = {name: request.query_params.get(name) for name in ("kind", "state", "trigger")}
    given = {name: value for name, value in asked.items() if value}
    return lambda job: all(getattr(job, name) == value for name, value in given.items())


def _unknown(request: Request) -> Response:
    return error_response(
        404, "UsageError", f"there is no job {request.path_params['id'][:80]!r} here, or no more"
    )


def _no_spark() -> Response:
    return error_response(
        409,
        "ServiceRefused",
        "this server runs no Spark, so it has no jobs: start it with `forebay up`, or run "
        "`forebay offload`, `forebay compact` or `forebay verify` beside it",
    )
