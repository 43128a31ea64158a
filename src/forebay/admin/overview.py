"""`/v1/overview`: everything that the page shows, in one document.

    GET /v1/overview?topics=50&after=/default/m&since=1794806400.5
    GET /v1/overview/spans?topic=/default/orders&start=1000&end=2000

The first has all topics' numbers a page at a time, each with its ranges of offsets by tier, and
the history after `since`. The second has the ranges of one topic in a window, for zooming in: what
the first joined because it was too narrow to be seen is apart here.

What a caller gets wrong: it is a picture of about now. It is made at most once a second for all
who ask, on a thread.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections import OrderedDict
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.admin import history
from forebay.admin.alerts import Alert, alerts
from forebay.admin.job_rows import job_rows
from forebay.admin.site import Site
from forebay.admin.topic_page import TopicPage, topic_page, window_spans
from forebay.config.reference import describe as describe_settings
from forebay.errors import UnknownTopic, UsageError
from forebay.format.names import parse_topic
from forebay.limits import OFFSET_MAX
from forebay.objects import store as objects

TOPICS: Final = 50
TOPICS_MAX: Final = 200
SPANS_MAX: Final = 400
"""Of one topic; with many topics on a page each has fewer."""
_PAGE_SPANS_MAX: Final = 4000
_PAGE_SPANS_MIN: Final = 80
_FRESH_SECONDS: Final = 0.9
"""A little less than a second, so that who asks every second gets a new one each time."""
_PAGES_MAX: Final = 8
_NOTICES_MAX: Final = 50


class Overview:
    """Makes the documents, and remembers the last ones for a second. Thread-safe."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._pages: OrderedDict[tuple[int, str], tuple[float, dict[str, Any]]] = OrderedDict()

    def document(self, topics: int, after: str, since: float) -> bytes:
        """As JSON. May wait for a disk or a catalog."""
        found = dict(self._page(topics, after))
        found["history"] = {
            "interval": history.INTERVAL_SECONDS,
            "fields": history.FIELDS,
            "rows": self._site.watch.history.rows(since),
        }
        return orjson.dumps(found)

    def spans(self, name: str, start: int, end: int) -> bytes:
        """The ranges of one topic in a window, as JSON; UnknownTopic if there is none."""
        states = self._site.watch.states
        if name not in states.names() and self._site.store.opened(name) is None:
            raise UnknownTopic(f"there is no topic {name} here")
        spans = window_spans(self._site, states.read(name), start, end, SPANS_MAX)
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
        site = self._site
        watch = site.watch
        reached = watch.reach.now()
        names = watch.states.names()
        shown = [name for name in names if name > after][:topics]
        most = min(max(_PAGE_SPANS_MAX // max(len(shown), 1), _PAGE_SPANS_MIN), SPANS_MAX)
        pages = [topic_page(site, watch.states.read(name), most) for name in shown]
        found: list[Alert] = alerts(site, reached, pages)
        more = bool(shown) and shown[-1] < names[-1]
        return {
            "at": round(time.time(), 3),
            "server": _server(site),
            "objects": {**_objects(site), **asdict(reached)},
            "topics": [page.facts for page in pages],
            "topics_total": len(names),
            "after": after or None,
            "next": shown[-1] if more else None,
            "totals": _totals(pages),
            "requests": _requests(),
            "jobs": [] if site.jobs is None else job_rows(site.jobs.list()),
            "notices": [asdict(each) for each in watch.notices.recent(_NOTICES_MAX)],
            "alerts": [asdict(each) for each in found],
        }


def _server(site: Site) -> dict[str, Any]:
    settings = site.settings
    uploader, deleter = settings.uploader, settings.deleter
    data = None if settings.data is None else Path(settings.data)
    return {
        "version": _version(),
        "instance": site.instance,
        "started": site.started,
        "up_seconds": round(time.time() - site.started, 3),
        "url": site.url,
        "data": None if data is None else str(data),
        "disk": None if data is None else _disk(data),
        "catalog": settings.metadata.backend,
        "runner": uploader.runner if uploader.enabled else None,
        "interval_seconds": uploader.interval_seconds,
        "max_open_seconds": uploader.max_open_seconds,
        "max_object_bytes": uploader.max_object_bytes,
        "max_object_messages": uploader.max_object_messages,
        "deletion_lag_minutes": deleter.deletion_lag_minutes,
        "unready": site.unready,
        "jobs": site.jobs is not None,
        "spark": None if site.jobs is None else asdict(site.jobs.driver()),
    }


@functools.cache
def _version() -> str:
    return metadata.version("forebay")


def _disk(data: Path) -> dict[str, int] | None:
    try:
        used = shutil.disk_usage(data)
    except OSError:
        return None
    return {"free": used.free, "total": used.total}


def _objects(site: Site) -> dict[str, Any]:
    cloud = describe_settings(site.settings)["storage"]["cloud"]
    root = cloud["root"]
    if root is None and site.settings.data is not None:
        root = str(Path(site.settings.data) / "objects")
    return {"backend": cloud["backend"], "root": root}


def _totals(pages: list[TopicPage]) -> dict[str, int]:
    """Of the topics that are shown."""
    names = pages[0].sizes.keys() if pages else ()
    return {name: sum(page.sizes[name] for page in pages) for name in names}


def _requests() -> dict[str, Any]:
    """To the object store, by this process since it began."""
    return {
        "by_operation": [
            {"operation": operation, "outcome": outcome, "count": round(count)}
            for (operation, outcome), count in sorted(objects.REQUESTS.values().items())
        ],
        "bytes_up": round(objects.BYTES.value("up")),
        "bytes_down": round(objects.BYTES.value("down")),
    }


# ---- over HTTP --------------------------------------------------------------------------------


def routes(site: Site) -> list[BaseRoute]:
    overview = Overview(site)

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
    if text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise UsageError(f"{name} is {text[:40]!r}; it must be a whole number from {least} to {most}")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise UsageError(f"since is {text[:40]!r}; it must be seconds since 1970, such as 1794806400.5")
