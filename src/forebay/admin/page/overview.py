"""`/v1/overview`: everything that the page shows, in one document.

    GET /v1/overview?topics=50&after=/default/m&since=1794806400.5
    GET /v1/overview/spans?topic=/default/orders&start=1000&end=2000

The first has the topics' numbers, a page of topics at a time, each with its spans (ranges of
offsets by tier), and the history after `since`. The second has the spans of one topic in a window,
for zooming in: spans that the first joined because they were too narrow to be seen are apart here.

Beware: the document describes the present. A thread builds it, at most once a second for all
clients.
"""

from __future__ import annotations

import functools
import math
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, structs
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from forebay.admin.context import ServerContext
from forebay.admin.jobs import DONE, RUNNING, DriverStatus, Job, JobRecord
from forebay.admin.operations import Endpoint, Operation, Reply
from forebay.admin.page import history
from forebay.admin.page.schemas import SchemaTable
from forebay.admin.page.topic import (
    Sizes,
    Span,
    TopicPage,
    TopicRow,
    summed,
    topic_page,
    window_spans,
)
from forebay.admin.page.watch import LogEvent, ProbeResult
from forebay.admin.records import JSON, Count, Offset, Record, Seconds, encode
from forebay.admin.request import read_query
from forebay.config.reference import describe as describe_settings
from forebay.errors import UnknownTopic, UsageError
from forebay.format.names import parse_topic
from forebay.limits import MIB, OFFSET_MAX
from forebay.objects import store as objects

TOPICS_MAX: Final = 200
SPANS_MAX: Final = 400
"""The maximum number of spans per topic. With many topics on a page, each gets fewer."""
_PAGE_SPANS_MAX: Final = 4000
_PAGE_SPANS_MIN: Final = 80
_FRESH_SECONDS: Final = 0.9
"""A little less than a second: a client that asks every second gets a new document each time."""
_PAGES_MAX: Final = 8
_LOG_EVENTS_MAX: Final = 50
_ALERTS_MAX: Final = 20
_DISK_BYTES_MIN: Final = 256 * MIB
_DISK_SHARE_MIN: Final = 0.05
"""The same limit for a small disk, as a fraction of its size."""
_LATE: Final = 3
"""Uploads that are late by this many intervals raise an alert."""
ROWS_MAX: Final = 20
_CYCLES_MAX: Final = 8
"""Rows of cycles, so that requested jobs stay visible."""
_CYCLE: Final = "interval"
_NOT_SUMMED: Final = "topics"
"""This number of a summary is not added up, because every cycle has the same topics."""


# ---- records ----------------------------------------------------------------------------------


class OverviewQuery(Struct, frozen=True):
    topics: Annotated[
        int, Meta(ge=1, le=TOPICS_MAX, description="The maximum number of topics on the page.")
    ] = 50
    after: Annotated[str, Meta(description="The last name of the previous page.")] = ""
    since: Annotated[
        float, Meta(ge=0, description="The history begins after this time, in seconds since 1970.")
    ] = 0.0


class SpansQuery(Struct, frozen=True):
    topic: Annotated[str, Meta(description="The topic's name.")]
    start: Annotated[Offset, Meta(description="The first offset of the window.")] = 0
    end: Annotated[Offset, Meta(description="The offset after the window.")] = OFFSET_MAX


class Spans(Record, frozen=True):
    """Ranges of offsets in a window of a topic."""

    topic: str
    start: Count
    end: Count
    spans: list[Span]


class DiskUsage(Record, frozen=True):
    free: Count
    total: Count


class ServerFacts(Record, frozen=True):
    """The server, and the settings that the page shows."""

    version: str
    instance: str
    started: Seconds
    up_seconds: float
    url: str
    data: str | None
    disk: DiskUsage | None
    catalog: str
    runner: str | None
    interval_seconds: float
    max_open_seconds: float | None
    max_object_bytes: Count
    max_object_messages: Count | None
    deletion_lag_minutes: float | None
    unready: str | None
    jobs: bool
    spark: DriverStatus | None


class ObjectStore(ProbeResult, frozen=True, kw_only=True):
    """Where the objects are, and whether the store responds."""

    backend: str
    root: str | None


class OperationCount(Record, frozen=True):
    operation: str
    outcome: str
    count: Count


class Requests(Record, frozen=True):
    """Requests to the object store by this process since its start."""

    by_operation: list[OperationCount]
    bytes_up: Count
    bytes_down: Count


class JobRow(Job, frozen=True, kw_only=True):
    """A job, or several successful cycles in a row."""

    runs: Annotated[Count, Meta(description="The number of finished jobs in this row.")]
    since: Seconds


class Alert(Record, frozen=True):
    """A problem that an operator should know about, and what happens next."""

    kind: str
    level: Literal["info", "warning", "error"]
    text: str
    topic: str | None = None


class HistoryRows(Record, frozen=True):
    interval: Annotated[float, Meta(description="Seconds between two rows.")]
    fields: tuple[str, ...]
    rows: list[tuple[float | None, ...]]


class Page(Record, frozen=True):
    """A page of topics, and all other data that is shown with it."""

    at: Seconds
    server: ServerFacts
    objects: ObjectStore
    topics: list[TopicRow]
    topics_total: Count
    after: str | None
    next: Annotated[str | None, Meta(description="`after` of the next page; null on the last.")]
    totals: Sizes
    requests: Requests
    schemas: SchemaTable
    jobs: list[JobRow]
    notices: list[LogEvent]
    alerts: list[Alert]


class Overview(Page, frozen=True):
    """What the page shows. It may change with every version."""

    history: HistoryRows


# ---- routes -----------------------------------------------------------------------------------

SHOW_OVERVIEW: Final = Operation(
    "overview",
    "page",
    "Returns everything that the page shows.",
    {200: Reply("The overview.", Overview)},
    errors=(400, 502),
    query=OverviewQuery,
)
SHOW_SPANS: Final = Operation(
    "spans",
    "page",
    "Returns which offsets of a topic are in which tier, in a window.",
    {200: Reply("The spans.", Spans)},
    errors=(400, 404, 502),
    query=SpansQuery,
)


def routes(context: ServerContext) -> list[Endpoint]:
    overviews = Overviews(context)

    async def document(request: Request) -> Response:
        query = read_query(request.scope["query_string"], OverviewQuery, lenient=True)
        after = str(parse_topic(query.after)) if query.after else ""
        return _json(await run_in_threadpool(overviews.document, query.topics, after, query.since))

    async def spans(request: Request) -> Response:
        query = read_query(request.scope["query_string"], SpansQuery, lenient=True)
        name = str(parse_topic(query.topic))
        if query.end <= query.start:
            raise UsageError(f"end is {query.end}; it must be over start, {query.start}")
        return _json(await run_in_threadpool(overviews.spans, name, query.start, query.end))

    return [
        Endpoint("/v1/overview", document, SHOW_OVERVIEW),
        Endpoint("/v1/overview/spans", spans, SHOW_SPANS),
    ]


def _json(body: bytes) -> Response:
    return Response(body, media_type=JSON, headers={"Cache-Control": "no-store"})


class Overviews:
    """Makes overviews, and caches the last ones for a second. Thread-safe."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, str], tuple[float, Page]] = OrderedDict()

    def document(self, topics: int, after: str, since: float) -> bytes:
        """The overview as JSON. May wait for a disk or the catalog."""
        rows = self._context.watch.history.rows(since)
        past = HistoryRows(history.INTERVAL_SECONDS, history.FIELDS, rows)
        page = structs.asdict(self._page(topics, after))
        return encode(Overview(**page, history=past))

    def spans(self, name: str, start: int, end: int) -> bytes:
        """The spans of one topic in a window, as JSON; UnknownTopic if there is no such topic."""
        states = self._context.watch.states
        if name not in states.names() and self._context.store.opened(name) is None:
            raise UnknownTopic(f"there is no topic {name} here")
        spans = window_spans(self._context, states.read(name), start, end, SPANS_MAX)
        return encode(Spans(name, start, end, spans))

    def _page(self, topics: int, after: str) -> Page:
        with self._lock:
            made, found = self._pages.pop((topics, after), (0.0, None))
            if found is None or time.monotonic() - made >= _FRESH_SECONDS:
                made, found = time.monotonic(), self._make_page(topics, after)
            self._pages[topics, after] = made, found
            while len(self._pages) > _PAGES_MAX:
                self._pages.popitem(last=False)
            return found

    def _make_page(self, topics: int, after: str) -> Page:
        context = self._context
        watch = context.watch
        probe = watch.store_probe.result()
        names = watch.states.names()
        shown = [name for name in names if name > after][:topics]
        most = min(max(_PAGE_SPANS_MAX // max(len(shown), 1), _PAGE_SPANS_MIN), SPANS_MAX)
        pages = [topic_page(context, watch.states.read(name), most) for name in shown]
        more = bool(shown) and shown[-1] < names[-1]
        return Page(
            at=round(time.time(), 3),
            server=_server_facts(context),
            objects=_object_store(context, probe),
            topics=[page.row for page in pages],
            topics_total=len(names),
            after=after or None,
            next=shown[-1] if more else None,
            totals=summed([page.row.sizes for page in pages]),
            requests=_request_counts(),
            schemas=context.page_schemas.table(),
            jobs=[] if context.jobs is None else job_rows(context.jobs.list()),
            notices=watch.log_events.recent(_LOG_EVENTS_MAX),
            alerts=alerts(context, probe, pages),
        )


def _server_facts(context: ServerContext) -> ServerFacts:
    settings = context.settings
    uploader, deleter = settings.uploader, settings.deleter
    data = None if settings.data is None else Path(settings.data)
    return ServerFacts(
        version=_version(),
        instance=context.instance,
        started=context.started,
        up_seconds=context.up_seconds,
        url=context.url,
        data=None if data is None else str(data),
        disk=None if data is None else _disk_usage(data),
        catalog=settings.metadata.backend,
        runner=uploader.runner if uploader.enabled else None,
        interval_seconds=uploader.interval_seconds,
        max_open_seconds=uploader.max_open_seconds,
        max_object_bytes=uploader.object_bytes_max,
        max_object_messages=uploader.max_object_messages,
        deletion_lag_minutes=deleter.deletion_lag_minutes,
        unready=context.unready,
        jobs=context.jobs is not None,
        spark=None if context.jobs is None else context.jobs.driver(),
    )


@functools.cache
def _version() -> str:
    return metadata.version("forebay")


def _disk_usage(data: Path) -> DiskUsage | None:
    try:
        used = shutil.disk_usage(data)
    except OSError:
        return None
    return DiskUsage(used.free, used.total)


def _object_store(context: ServerContext, probe: ProbeResult) -> ObjectStore:
    cloud = describe_settings(context.settings)["storage"]["cloud"]
    root = cloud["root"]
    if root is None and context.settings.data is not None:
        root = str(Path(context.settings.data) / "objects")
    return ObjectStore(**structs.asdict(probe), backend=cloud["backend"], root=root)


def _request_counts() -> Requests:
    return Requests(
        [
            OperationCount(operation, outcome, round(count))
            for (operation, outcome), count in sorted(objects.REQUESTS.values().items())
        ],
        round(objects.BYTES.value("up")),
        round(objects.BYTES.value("down")),
    )


# ---- alerts -----------------------------------------------------------------------------------


def alerts(context: ServerContext, probe: ProbeResult, pages: Sequence[TopicPage]) -> list[Alert]:
    """The most severe first, at most 20."""
    found: list[Alert] = []
    if context.unready is not None:
        found.append(Alert("unready", "info", f"The server is not ready yet: {context.unready}."))
    if probe.state == "away":
        found.append(
            Alert(
                "store",
                "error",
                f"The object store does not answer: {(probe.why or '').rstrip('.')}. Appends go "
                "on; what is waiting is uploaded when it answers again.",
            )
        )
    trouble = context.watch.states.catalog_trouble
    if trouble is not None:
        found.append(
            Alert(
                "catalog",
                "error",
                f"The catalog does not answer: {trouble.rstrip('.')}. What is shown of objects is "
                "what it said last; nothing is uploaded until it answers again.",
            )
        )
    found += _disk_alerts(context)
    found += _spark_alerts(context)
    for page in pages:
        found += _topic_alerts(context, page)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda each: order[each.level])[:_ALERTS_MAX]


def _disk_alerts(context: ServerContext) -> list[Alert]:
    data = context.settings.data
    if data is None:
        return []
    try:
        disk = shutil.disk_usage(Path(data))
    except FileNotFoundError:
        return []  # nothing was stored yet
    except OSError as error:
        return [Alert("disk", "error", f"The data directory cannot be looked at: {error}.")]
    if disk.free >= min(_DISK_BYTES_MIN, disk.total * _DISK_SHARE_MIN):
        return []
    return [
        Alert(
            "disk",
            "error",
            f"The disk of the data directory is nearly full: {disk.free // MIB} MiB are free. "
            "When it is full, appends are refused and nothing is lost: free some space.",
        )
    ]


def _spark_alerts(context: ServerContext) -> list[Alert]:
    driver = None if context.jobs is None else context.jobs.driver()
    if driver is None or driver.error is None:
        return []
    return [
        Alert(
            "spark",
            "warning",
            f"The Spark driver ended ({driver.error.rstrip('.')}) and is started again. Nothing is "
            "lost: uploads continue when it is ready.",
        )
    ]


def _topic_alerts(context: ServerContext, page: TopicPage) -> list[Alert]:
    found: list[Alert] = []
    row = page.row
    if page.missing:
        start, end = page.missing[0]
        more = f", and {len(page.missing) - 1} more ranges" if len(page.missing) > 1 else ""
        found.append(
            Alert(
                "missing",
                "error",
                f"The offsets {start} to {end - 1} of {row.name}{more} are in no tier, and not "
                f"recorded as lost. Run `forebay verify {row.name}`.",
                row.name,
            )
        )
    if row.trouble is not None:
        found.append(
            Alert("trouble", "warning", f"{row.name}: {row.trouble.rstrip('.')}.", row.name)
        )
    found += [
        Alert(
            "subscription",
            "warning",
            f"The subscription {each.name} of {row.name}: {each.problem.rstrip('.')}.",
            row.name,
        )
        for each in row.subscriptions
        if each.problem is not None
    ]
    uploader = context.settings.uploader
    waits = row.upload_seconds
    allowed = math.inf if waits is None else waits + _LATE * uploader.interval_seconds
    lag = row.lag.seconds
    if uploader.enabled and row.open and lag > allowed:
        found.append(
            Alert(
                "late",
                "warning",
                f"Messages of {row.name} wait for their upload for {lag:.0f} s; it should be "
                f"{allowed:.0f} s at most.",
                row.name,
            )
        )
    return found


# ---- rows of jobs -----------------------------------------------------------------------------


def job_rows(jobs: Sequence[JobRecord]) -> list[JobRow]:
    """The jobs as the page lists them: those that are not over, then the others, newest first.

    The pipeline's own cycles come every few seconds and are alike; a requested job would soon be
    out of sight. Successful cycles in a row are therefore one row, with the sum of what they did in
    `summary`, their number in `runs` and the first one's time in `since`; times and `progress` are
    those of the newest. A running cycle is part of the row of those before it.
    """
    # Requested ones first, so that a running cycle is next to those before it.
    going = sorted((job for job in jobs if not job.over), key=lambda job: job.trigger == _CYCLE)
    over = [job for job in jobs if job.over]
    rows: list[list[JobRecord]] = []
    for job in [*going, *over]:
        if rows and _same_row(rows[-1][-1], job):
            rows[-1].append(job)
        else:
            rows.append([job])
    found: list[JobRow] = []
    cycles = 0
    for row in rows:
        cycles += row[0].trigger == _CYCLE
        if row[0].trigger != _CYCLE or cycles <= _CYCLES_MAX:
            found.append(_row(row))
    return found[:ROWS_MAX]


def _same_row(newer: JobRecord, older: JobRecord) -> bool:
    return (
        newer.trigger == older.trigger == _CYCLE
        and (newer.kind, newer.topics) == (older.kind, older.topics)
        and newer.state in (DONE, RUNNING)
        and older.state == DONE
    )


def _row(jobs: Sequence[JobRecord]) -> JobRow:
    summary = _sum_summaries(job.summary for job in jobs)
    runs = sum(job.over for job in jobs)
    return JobRow.of(jobs[0], summary=summary, runs=runs, since=jobs[-1].created)


def _sum_summaries(summaries: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for summary in summaries:
        for name, value in summary.items():
            known = total.get(name, 0)
            total[name] = max(known, value) if name == _NOT_SUMMED else known + value
    return total
