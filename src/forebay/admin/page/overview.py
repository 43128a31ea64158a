"""`/v1/overview`: everything that the page shows, in one document.

    GET /v1/overview?topics=50&after=/default/m&since=1794806400.5
    GET /v1/overview/spans?topic=/default/orders&start=1000&end=2000

The first has the topics' numbers, a page of topics at a time, each with its spans (ranges of
offsets by tier), and the history after `since`. The second has the spans of one topic in a window,
for zooming in: spans that the first joined because they were too narrow to be seen are apart here.

What a caller gets wrong: the document is about now. It is made at most once a second for all
clients, on a thread.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.admin.context import ServerContext
from forebay.admin.jobs import DONE, RUNNING, JobRecord
from forebay.admin.page import history
from forebay.admin.page.topic import TopicPage, topic_page, window_spans
from forebay.admin.page.watch import ProbeResult
from forebay.admin.request import whole_number
from forebay.config.reference import describe as describe_settings
from forebay.errors import UnknownTopic, UsageError
from forebay.format.names import parse_topic
from forebay.limits import MIB, OFFSET_MAX
from forebay.objects import store as objects

TOPICS: Final = 50
TOPICS_MAX: Final = 200
SPANS_MAX: Final = 400
"""Of one topic; with many topics on a page, each has fewer."""
_PAGE_SPANS_MAX: Final = 4000
_PAGE_SPANS_MIN: Final = 80
_FRESH_SECONDS: Final = 0.9
"""A little less than a second: a client that asks every second gets a new document each time."""
_PAGES_MAX: Final = 8
_LOG_EVENTS_MAX: Final = 50
_ALERTS_MAX: Final = 20
_DISK_BYTES_MIN: Final = 256 * MIB
_DISK_SHARE_MIN: Final = 0.05
"""The same for a small disk, as a share."""
_LATE: Final = 3
"""Uploads that are so many intervals late raise an alert."""
ROWS_MAX: Final = 20
_CYCLES_MAX: Final = 8
"""Rows of cycles, so that requested jobs stay visible."""
_CYCLE: Final = "interval"
_NOT_SUMMED: Final = "topics"
"""The one number of a summary that is not summed: every cycle looks at the same topics."""


def routes(context: ServerContext) -> list[BaseRoute]:
    overview = Overview(context)

    async def document(request: Request) -> Response:
        query = request.query_params
        topics = _number(query.get("topics", str(TOPICS)), "topics", 1, TOPICS_MAX)
        after = query.get("after", "")
        if after:
            after = str(parse_topic(after))
        since = _seconds(query.get("since", "0"))
        return _json(await run_in_threadpool(overview.document, topics, after, since))

    async def spans(request: Request) -> Response:
        query = request.query_params
        if "topic" not in query:
            raise UsageError("topic is missing: name the topic whose ranges are wanted")
        name = str(parse_topic(query["topic"]))
        start = _number(query.get("start", "0"), "start", 0, OFFSET_MAX)
        end = _number(query.get("end", str(OFFSET_MAX)), "end", 0, OFFSET_MAX)
        if end <= start:
            raise UsageError(f"end is {end}; it must be over start, {start}")
        return _json(await run_in_threadpool(overview.spans, name, start, end))

    return [Route("/v1/overview", document), Route("/v1/overview/spans", spans)]


def _json(body: bytes) -> Response:
    headers = {"Cache-Control": "no-store"}
    return Response(body, media_type="application/json", headers=headers)


def _number(text: str, name: str, least: int, most: int) -> int:
    return whole_number(name, text, least, most, rule=f"a whole number from {least} to {most}")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise UsageError(f"since is {text[:40]!r}; it must be seconds since 1970, such as 1794806400.5")


class Overview:
    """Makes the documents, and caches the last ones for a second. Thread-safe."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, str], tuple[float, dict[str, Any]]] = OrderedDict()

    def document(self, topics: int, after: str, since: float) -> bytes:
        """The overview as JSON. May wait for a disk or the catalog."""
        found = dict(self._page(topics, after))
        found["history"] = {
            "interval": history.INTERVAL_SECONDS,
            "fields": history.FIELDS,
            "rows": self._context.watch.history.rows(since),
        }
        return orjson.dumps(found)

    def spans(self, name: str, start: int, end: int) -> bytes:
        """The spans of one topic in a window, as JSON; UnknownTopic if there is no such topic."""
        states = self._context.watch.states
        if name not in states.names() and self._context.store.opened(name) is None:
            raise UnknownTopic(f"there is no topic {name} here")
        spans = window_spans(self._context, states.read(name), start, end, SPANS_MAX)
        return orjson.dumps({"topic": name, "start": start, "end": end, "spans": spans})

    def _page(self, topics: int, after: str) -> dict[str, Any]:
        with self._lock:
            made, found = self._pages.pop((topics, after), (0.0, {}))
            if not found or time.monotonic() - made >= _FRESH_SECONDS:
                made, found = time.monotonic(), self._make(topics, after)
            self._pages[topics, after] = made, found
            while len(self._pages) > _PAGES_MAX:
                self._pages.popitem(last=False)
            return found

    def _make(self, topics: int, after: str) -> dict[str, Any]:
        context = self._context
        watch = context.watch
        probe = watch.store_probe.result()
        names = watch.states.names()
        shown = [name for name in names if name > after][:topics]
        most = min(max(_PAGE_SPANS_MAX // max(len(shown), 1), _PAGE_SPANS_MIN), SPANS_MAX)
        pages = [topic_page(context, watch.states.read(name), most) for name in shown]
        found: list[Alert] = alerts(context, probe, pages)
        more = bool(shown) and shown[-1] < names[-1]
        return {
            "at": round(time.time(), 3),
            "server": _server_fields(context),
            "objects": {**_objects_fields(context), **asdict(probe)},
            "topics": [page.fields for page in pages],
            "topics_total": len(names),
            "after": after or None,
            "next": shown[-1] if more else None,
            "totals": _totals(pages),
            "requests": _request_counts(),
            "jobs": [] if context.jobs is None else job_rows(context.jobs.list()),
            "notices": [asdict(each) for each in watch.log_events.recent(_LOG_EVENTS_MAX)],
            "alerts": [asdict(each) for each in found],
        }


def _server_fields(context: ServerContext) -> dict[str, Any]:
    settings = context.settings
    uploader, deleter = settings.uploader, settings.deleter
    data = None if settings.data is None else Path(settings.data)
    return {
        "version": _version(),
        "instance": context.instance,
        "started": context.started,
        "up_seconds": round(time.time() - context.started, 3),
        "url": context.url,
        "data": None if data is None else str(data),
        "disk": None if data is None else _disk_usage(data),
        "catalog": settings.metadata.backend,
        "runner": uploader.runner if uploader.enabled else None,
        "interval_seconds": uploader.interval_seconds,
        "max_open_seconds": uploader.max_open_seconds,
        "max_object_bytes": uploader.max_object_bytes,
        "max_object_messages": uploader.max_object_messages,
        "deletion_lag_minutes": deleter.deletion_lag_minutes,
        "unready": context.unready,
        "jobs": context.jobs is not None,
        "spark": None if context.jobs is None else asdict(context.jobs.driver()),
    }


@functools.cache
def _version() -> str:
    return metadata.version("forebay")


def _disk_usage(data: Path) -> dict[str, int] | None:
    try:
        used = shutil.disk_usage(data)
    except OSError:
        return None
    return {"free": used.free, "total": used.total}


def _objects_fields(context: ServerContext) -> dict[str, Any]:
    cloud = describe_settings(context.settings)["storage"]["cloud"]
    root = cloud["root"]
    if root is None and context.settings.data is not None:
        root = str(Path(context.settings.data) / "objects")
    return {"backend": cloud["backend"], "root": root}


def _totals(pages: list[TopicPage]) -> dict[str, int]:
    """Over the topics that are shown."""
    names = pages[0].sizes.keys() if pages else ()
    return {name: sum(page.sizes[name] for page in pages) for name in names}


def _request_counts() -> dict[str, Any]:
    """To the object store, by this process since it began."""
    return {
        "by_operation": [
            {"operation": operation, "outcome": outcome, "count": round(count)}
            for (operation, outcome), count in sorted(objects.REQUESTS.values().items())
        ],
        "bytes_up": round(objects.BYTES.value("up")),
        "bytes_down": round(objects.BYTES.value("down")),
    }


# ---- alerts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alert:
    """What an operator should know now, and what happens next."""

    kind: str
    level: Literal["info", "warning", "error"]
    text: str
    topic: str | None = None


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
            "lost: uploads go on when it is ready.",
        )
    ]


def _topic_alerts(context: ServerContext, page: TopicPage) -> list[Alert]:
    found: list[Alert] = []
    if page.missing:
        start, end = page.missing[0]
        more = f", and {len(page.missing) - 1} more ranges" if len(page.missing) > 1 else ""
        found.append(
            Alert(
                "missing",
                "error",
                f"The offsets {start} to {end - 1} of {page.name}{more} are in no tier, and not "
                f"recorded as lost. Run `forebay verify {page.name}`.",
                page.name,
            )
        )
    if page.trouble is not None:
        found.append(
            Alert("trouble", "warning", f"{page.name}: {page.trouble.rstrip('.')}.", page.name)
        )
    uploader = context.settings.uploader
    allowed = uploader.max_open_seconds + _LATE * uploader.interval_seconds
    lag = float(page.fields["lag"]["seconds"])
    if uploader.enabled and page.fields["open"] and lag > allowed:
        found.append(
            Alert(
                "late",
                "warning",
                f"Messages of {page.name} wait for their upload for {lag:.0f} s; it should be "
                f"{allowed:.0f} s at most.",
                page.name,
            )
        )
    return found


# ---- rows of jobs -----------------------------------------------------------------------------


def job_rows(jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
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
    found: list[dict[str, Any]] = []
    cycles = 0
    for row in rows:
        cycles += row[0].trigger == _CYCLE
        if row[0].trigger != _CYCLE or cycles <= _CYCLES_MAX:
            found.append(_row_fields(row))
    return found[:ROWS_MAX]


def _same_row(newer: JobRecord, older: JobRecord) -> bool:
    return (
        newer.trigger == older.trigger == _CYCLE
        and (newer.kind, newer.topics) == (older.kind, older.topics)
        and newer.state in (DONE, RUNNING)
        and older.state == DONE
    )


def _row_fields(row: Sequence[JobRecord]) -> dict[str, Any]:
    over = [job for job in row if job.over]
    return {
        **row[0].as_json(),
        "summary": _sum_summaries(job.summary for job in row),
        "runs": len(over),
        "since": row[-1].created,
    }


def _sum_summaries(summaries: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for summary in summaries:
        for name, value in summary.items():
            known = total.get(name, 0)
            total[name] = max(known, value) if name == _NOT_SUMMED else known + value
    return total
