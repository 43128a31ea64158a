"""`/v1/jobs`: jobs on Spark (offload, compact, verify): requests for them, and past ones.

    POST /v1/jobs        {"kind": "offload", "topics": ["/default/orders"]}   202, with the job
    GET /v1/jobs         the newest first, and the status of the Spark driver
    GET /v1/jobs/{id}    one of them
    DELETE /v1/jobs/{id} cancels it, if it is not over yet

The jobs run behind the port `Jobs` (`forebay.service.jobs`); a server without Spark has none. A
job's states are `queued → running → done | failed | cancelled | lost`. A lost job was running when
its driver ended: the objects that it had committed remain, and a new job does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, Self, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, structs
from msgspec.json import Decoder
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.errors import error_response
from forebay.admin.operations import Endpoint, Operation, Reply
from forebay.admin.records import (
    JSON,
    Count,
    Record,
    Seconds,
    decode_body,
    json_response,
    one_of,
)
from forebay.admin.request import read_body, read_query
from forebay.errors import ForebayError, UnknownTopic
from forebay.format.names import parse_topic
from forebay.limits import OFFSET_MAX

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"
CANCELLED, LOST = "cancelled", "lost"
OVER: Final = frozenset({DONE, FAILED, CANCELLED, LOST})
"""States that a job does not leave."""
_BODY_BYTES_MAX: Final = 1024 * 1024
_TOPICS_MAX: Final = 1000
_LIST_MAX: Final = 1000

# ---- records ----------------------------------------------------------------------------------


class JobFields(Struct, frozen=True):
    """The fields of a job in responses and in the file of past jobs."""

    id: str
    kind: str
    topics: Annotated[tuple[str, ...], Meta(description="Empty for all topics.")]
    options: Mapping[str, int | bool | str]
    trigger: Annotated[
        str,
        one_of("request", "interval"),
        Meta(description="`interval` is a cycle of the pipeline."),
    ]
    state: Annotated[str, one_of(QUEUED, RUNNING, DONE, FAILED, CANCELLED, LOST)]
    created: Seconds
    started: Seconds | None = None
    ended: Seconds | None = None
    summary: Annotated[
        Mapping[str, int], Meta(description="Counts such as objects, messages and bytes.")
    ] = {}  # msgspec copies it
    error: str | None = None
    details: Annotated[
        tuple[str, ...], Meta(description="The first findings or errors, one line each.")
    ] = ()
    attempts: Annotated[
        Count, Meta(description="Cycles in a row that failed and are recorded as one.")
    ] = 1


class JobRecord(JobFields, frozen=True):
    """The current state of a job, and a line in the file of past jobs."""

    done: int = 0
    """Tasks of the running Spark job that are done."""
    total: int = 0
    label: str = ""
    """A description of the current step."""

    @property
    def over(self) -> bool:
        return self.state in OVER


class Progress(Record, frozen=True):
    done: Count
    total: Count
    label: str


class Job(JobFields, Record, frozen=True, kw_only=True):
    """A job as responses have it."""

    progress: Progress

    @classmethod
    def of(cls, record: JobRecord, **more: Any) -> Self:
        known = structs.asdict(record)
        progress = Progress(*(known.pop(name) for name in Progress.__struct_fields__))
        return cls(**{**known, "progress": progress, **more})


class DriverStatus(Record, frozen=True):
    """The process that runs the jobs."""

    state: Annotated[str, one_of("starting", "ready", "working", "restarting", "stopped")]
    master: str
    since: Seconds
    """When this state began."""
    pid: Count | None = None
    restarts: Count = 0
    error: Annotated[
        str | None, Meta(description="Why the last process ended, until the next one is ready.")
    ] = None


class JobList(Record, frozen=True):
    """Jobs, the newest first."""

    jobs: list[Job]
    spark: DriverStatus | None


class JobsQuery(Struct, frozen=True):
    kind: Annotated[str, Meta(description="Only jobs of this kind.")] = ""
    state: Annotated[str, Meta(description="Only jobs in this state.")] = ""
    trigger: Annotated[str, Meta(description="Only jobs with this trigger.")] = ""
    limit: Annotated[int, Meta(ge=1, le=_LIST_MAX, description="The maximum number of jobs.")] = 100


_Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=OFFSET_MAX)] | UnsetType
_Flag: TypeAlias = bool | UnsetType


class NewJob(Record, frozen=True, tag_field="kind"):
    """A request for a job. Its fields but `topics` are options of its kind of job."""

    topics: (
        Annotated[list[str], Meta(max_length=_TOPICS_MAX, description="Empty for all topics.")]
        | None
    ) = None


class Offload(NewJob, frozen=True, tag="offload"):
    """Uploads the synced messages."""

    due: _Flag = UNSET


class Compact(NewJob, frozen=True, tag="compact"):
    """Joins small objects, and compresses objects."""

    target_bytes: _Bytes = UNSET
    budget_bytes: _Bytes = UNSET
    compression: (
        Annotated[
            Literal["none", "zstd"],
            Meta(description="Rewrites every object that is not compressed so."),
        ]
        | UnsetType
    ) = UNSET


class Verify(NewJob, frozen=True, tag="verify"):
    """Reads objects back, and compares them with the catalog."""

    incremental: _Flag = UNSET
    budget_bytes: _Bytes = UNSET
    orphans: _Flag = UNSET


_NEW_JOBS: Final = {
    kind.__struct_config__.tag: Decoder(kind) for kind in (Offload, Compact, Verify)
}


# ---- the queue --------------------------------------------------------------------------------


class JobsFull(ForebayError):
    """The queue of waiting jobs is full."""


class Jobs(Protocol):
    """A queue of jobs. Its calls are quick, and made from the event loop's thread."""

    def submit(
        self, kind: str, topics: Sequence[str], options: Mapping[str, int | bool | str]
    ) -> JobRecord:
        """Queues a job; JobsFull if too many wait."""

    def list(self) -> Sequence[JobRecord]:
        """Returns all jobs that are kept, newest first. May be called from any thread."""

    def get(self, job_id: str) -> JobRecord | None: ...

    def cancel(self, job_id: str) -> JobRecord | None:
        """Ends a waiting job, asks a running one to end, and leaves one that is over."""

    def driver(self) -> DriverStatus:
        """Returns the state of the driver. May be called from any thread."""


# ---- requests ---------------------------------------------------------------------------------


class _Kind(Struct):
    kind: Literal["offload", "compact", "verify"]


_KIND: Final = Decoder(_Kind)


def parse_request(body: bytes) -> tuple[str, tuple[str, ...], dict[str, int | bool | str]]:
    """Kind, topics and options of a request for a job; UsageError for anything else."""
    kind = decode_body(body, _KIND).kind
    options = structs.asdict(decode_body(body, _NEW_JOBS[kind]))
    topics = options.pop("topics") or []
    names = tuple(dict.fromkeys(str(parse_topic(each)) for each in topics))
    return kind, names, {name: value for name, value in options.items() if value is not UNSET}


START_JOB: Final = Operation(
    "startJob",
    "jobs",
    "Queues a job.",
    {202: Reply("The job is queued.", Job, headers={"Location": str})},
    errors=(400, 404, 409, 429),
    method="POST",
    body={JSON: Offload | Compact | Verify},
)
LIST_JOBS: Final = Operation(
    "listJobs",
    "jobs",
    "Lists the jobs on Spark, the newest first, and the status of the Spark driver.",
    {200: Reply("The jobs.", JobList)},
    errors=(400,),
    query=JobsQuery,
)
SHOW_JOB: Final = Operation(
    "showJob", "jobs", "Shows a job.", {200: Reply("The job.", Job)}, (404,)
)
CANCEL_JOB: Final = Operation(
    "cancelJob",
    "jobs",
    "Cancels a job that has not ended.",
    {200: Reply("The job has ended.", Job), 202: Reply("The job was asked to end.", Job)},
    errors=(404,),
    method="DELETE",
)


def routes(context: ServerContext) -> list[Endpoint]:
    async def create(request: Request) -> Response:
        kind, topics, options = parse_request(await read_body(request, _BODY_BYTES_MAX))
        if context.jobs is None:
            return _no_spark()
        if topics:
            await asyncio.to_thread(_require_known, context, topics)
        try:
            job = context.jobs.submit(kind, topics, options)
        except JobsFull as error:
            return error_response(429, "ServiceUnavailable", str(error))
        return json_response(Job.of(job), 202, {"Location": f"/v1/jobs/{job.id}"})

    async def list_all(request: Request) -> Response:
        query = read_query(request.scope["query_string"], JobsQuery, lenient=True)
        if context.jobs is None:
            return json_response(JobList([], None))
        found = [Job.of(job) for job in context.jobs.list() if _is_wanted(job, query)]
        return json_response(JobList(found[: query.limit], context.jobs.driver()))

    async def show(request: Request) -> Response:
        job = None if context.jobs is None else context.jobs.get(request.path_params["id"])
        return _unknown(request) if job is None else json_response(Job.of(job))

    async def cancel(request: Request) -> Response:
        job = None if context.jobs is None else context.jobs.cancel(request.path_params["id"])
        if job is None:
            return _unknown(request)
        return json_response(Job.of(job), 200 if job.over else 202)

    return [
        Endpoint(
            "/v1/jobs",
            create,
            START_JOB,
        ),
        Endpoint(
            "/v1/jobs",
            list_all,
            LIST_JOBS,
        ),
        Endpoint(
            "/v1/jobs/{id}",
            show,
            SHOW_JOB,
        ),
        Endpoint(
            "/v1/jobs/{id}",
            cancel,
            CANCEL_JOB,
        ),
    ]


def _is_wanted(job: JobRecord, query: JobsQuery) -> bool:
    wanted = {"kind": query.kind, "state": query.state, "trigger": query.trigger}
    return all(getattr(job, name) == value for name, value in wanted.items() if value)


def _require_known(context: ServerContext, topics: Sequence[str]) -> None:
    unknown = set(topics).difference(context.store.topics())
    if unknown:
        raise UnknownTopic(f"there is no topic {min(unknown)} in {context.settings.data}")


def _unknown(request: Request) -> Response:
    return error_response(
        404,
        "UsageError",
        f"there is no job {request.path_params['id'][:80]!r}; old jobs are forgotten",
    )


def _no_spark() -> Response:
    return error_response(
        409,
        "ServiceRefused",
        "this server runs no Spark, so it has no jobs: start it with `forebay up`, or run "
        "`forebay offload`, `forebay compact` or `forebay verify` in another process",
    )
