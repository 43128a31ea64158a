"""`/v1/topics`: which topics there are, where everything of one is, and where one offset is.

    GET  /v1/topics                                     names, and how far those open here are
    GET  /v1/topics/{namespace}/{topic}                 watermarks, memory, segments, objects
    PUT  /v1/topics/{namespace}/{topic}                 makes the topic; 200 if it was there
    POST /v1/topics/{namespace}/{topic}/trim            one pass of local retention
    GET  /v1/topics/{namespace}/{topic}/explain/{offset}

Looking opens no topic. Every look is a view of its own, on a thread of its own: a view is one
moment, and waits for the catalog.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.queries import Query, parse_query
from forebay.admin.site import Site, topic_of
from forebay.errors import UnknownTopic, UsageError
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX
from forebay.topic.describe import describe, explain

TOPICS_LIMIT: Final = 100
TOPICS_MAX: Final = 1000
PIECES_LIMIT: Final = 100
PIECES_MAX: Final = 10_000
"""Segments, and objects, of one answer."""
_STAGES: Final = ("start", "appended", "synced", "uploaded", "verified")


def routes(site: Site) -> list[BaseRoute]:
    async def every(request: Request) -> Response:
        query = parse_query(request.scope["query_string"], ("prefix", "limit", "after"))
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "after"))
        limit = _limit(query, TOPICS_LIMIT, least=1, most=TOPICS_MAX)
        return JSONResponse(await run_in_threadpool(_list, site, prefix, after, limit))

    async def one(request: Request) -> Response:
        query = parse_query(request.scope["query_string"], ("limit",))
        limit = _limit(query, PIECES_LIMIT, least=0, most=PIECES_MAX)
        topic = topic_of(request.path_params)
        return JSONResponse(await run_in_threadpool(_describe, site, topic, limit))

    async def make(request: Request) -> Response:
        topic = topic_of(request.path_params)
        made = await run_in_threadpool(_make, site, topic)
        return JSONResponse({"topic": str(topic), "created": made}, 201 if made else 200)

    async def trim(request: Request) -> Response:
        topic = topic_of(request.path_params)
        return JSONResponse(await run_in_threadpool(_trim, site, topic))

    async def offset(request: Request) -> Response:
        topic = topic_of(request.path_params)
        wanted = _whole("offset", request.path_params["offset"], 0, OFFSET_MAX)
        return JSONResponse(await run_in_threadpool(_explain, site, topic, wanted))

    path = "/v1/topics/{namespace}/{topic}"
    return [
        Route("/v1/topics", every, methods=["GET"]),
        Route(path, one, methods=["GET"]),
        Route(path, make, methods=["PUT"]),
        Route(f"{path}/trim", trim, methods=["POST"]),
        Route(f"{path}/explain/{{offset}}", offset, methods=["GET"]),
    ]


def _limit(query: Query, default: int, *, least: int, most: int) -> int:
    return _whole("limit", query.get("limit", [str(default)])[0], least, most)


def _whole(name: str, text: str, least: int, most: int) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        raise UsageError(f"{name} is {text[:40]!r}; it must be a whole number, {least} to {most}")
    return int(text)


# ---- on threads -------------------------------------------------------------------------------


def _list(site: Site, prefix: str, after: str, limit: int) -> dict[str, Any]:
    names = [name for name in site.store.topics() if name.startswith(prefix)]
    start = bisect_right(names, after) if after else 0
    page = names[start : start + limit]
    more = start + limit < len(names)
    return {
        "topics": [_outline(site, name) for name in page],
        "total": len(names),
        "next": page[-1] if more else None,
    }


def _outline(site: Site, name: str) -> dict[str, Any]:
    """How far the topic is, if it is open here; else its name alone is known without asking."""
    topic = site.store.opened(name)
    if topic is None:
        return {"topic": name, "open": False, **dict.fromkeys(_STAGES)}
    return {"topic": name, "open": True, "start": topic.start_offset, **asdict(topic.watermarks())}


def _describe(site: Site, name: TopicName, limit: int) -> dict[str, Any]:
    with site.store.view() as view:
        facts = asdict(describe(view.topic(str(name)), limit))
    topic = site.store.opened(str(name))
    if topic is None:
        return {**facts, "open": False, "appended": None, "memory": None}
    memory = topic.in_memory()
    return {
        **facts,
        "open": True,
        "appended": topic.watermarks().appended,
        "memory": [memory.start, memory.stop],
    }


def _explain(site: Site, name: TopicName, offset: int) -> dict[str, Any]:
    # Memory first: what is in none of the tiers after that was in it.
    topic = site.store.opened(str(name))
    with site.store.view() as view:
        facts = asdict(explain(view.topic(str(name)), offset))
    in_memory = topic is not None and offset in topic.in_memory()
    if topic is not None and facts["state"] == "not yet synced":
        marks = topic.watermarks()
        facts["synced"] = offset < marks.synced
        facts["state"] = "in memory" if offset < marks.appended else "not yet appended"
    return {**facts, "in_memory": in_memory}


def _make(site: Site, name: TopicName) -> bool:
    """Whether it was not there before."""
    with site.store.view() as view:
        try:
            view.topic(str(name))
        except UnknownTopic:
            made = True
        else:
            made = False
    site.topic(name)
    return made


def _trim(site: Site, name: TopicName) -> dict[str, Any]:
    with site.store.view() as view:
        view.topic(str(name))  # none is made to find nothing in it
    gone = site.topic(name).trim_local()
    return {
        "topic": str(name),
        "removed": [
            {
                "file": str(each.path),
                "start_offset": each.first_offset,
                "next_offset": each.end_offset,
                "bytes": each.size,
            }
            for each in gone
        ],
    }
