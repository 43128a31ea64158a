"""`/v1/topics`: the list of topics, where everything of one topic is, and where one offset is.

    GET  /v1/topics                                     names, and how far those open here are
    GET  /v1/topics/{namespace}/{topic}                 watermarks, memory, segments, objects
    PUT  /v1/topics/{namespace}/{topic}                 creates the topic; 200 if it exists
    POST /v1/topics/{namespace}/{topic}/trim            one pass of local retention
    GET  /v1/topics/{namespace}/{topic}/explain/{offset}

The GETs open no topic: each makes a view, on a thread, because a view waits for the catalog.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.context import ServerContext
from forebay.admin.request import parse_query, topic_of, whole_number
from forebay.errors import UnknownTopic
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX
from forebay.topic.describe import describe, explain

TOPICS_LIMIT: Final = 100
TOPICS_MAX: Final = 1000
PARTS_LIMIT: Final = 100
PARTS_MAX: Final = 10_000
"""Segments, and objects, of one response."""
_STAGES: Final = ("start", "appended", "synced", "uploaded", "verified")


def routes(context: ServerContext) -> list[BaseRoute]:
    async def list_all(request: Request) -> Response:
        query = parse_query(request.scope["query_string"], ("prefix", "limit", "after"))
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "after"))
        limit = _whole("limit", query.get("limit", [str(TOPICS_LIMIT)])[0], 1, TOPICS_MAX)
        return JSONResponse(await run_in_threadpool(_list, context, prefix, after, limit))

    async def show(request: Request) -> Response:
        query = parse_query(request.scope["query_string"], ("limit",))
        limit = _whole("limit", query.get("limit", [str(PARTS_LIMIT)])[0], 0, PARTS_MAX)
        topic = topic_of(request.path_params)
        return JSONResponse(await run_in_threadpool(_describe, context, topic, limit))

    async def create(request: Request) -> Response:
        topic = topic_of(request.path_params)
        created = await run_in_threadpool(_create, context, topic)
        return JSONResponse({"topic": str(topic), "created": created}, 201 if created else 200)

    async def trim(request: Request) -> Response:
        topic = topic_of(request.path_params)
        return JSONResponse(await run_in_threadpool(_trim, context, topic))

    async def explain_offset(request: Request) -> Response:
        topic = topic_of(request.path_params)
        offset = _whole("offset", request.path_params["offset"], 0, OFFSET_MAX)
        return JSONResponse(await run_in_threadpool(_explain, context, topic, offset))

    path = "/v1/topics/{namespace}/{topic}"
    return [
        Route("/v1/topics", list_all, methods=["GET"]),
        Route(path, show, methods=["GET"]),
        Route(path, create, methods=["PUT"]),
        Route(f"{path}/trim", trim, methods=["POST"]),
        Route(f"{path}/explain/{{offset}}", explain_offset, methods=["GET"]),
    ]


def _whole(name: str, text: str, least: int, most: int) -> int:
    return whole_number(name, text, least, most, rule=f"a whole number, {least} to {most}")


# ---- on threads -------------------------------------------------------------------------------


def _list(context: ServerContext, prefix: str, after: str, limit: int) -> dict[str, Any]:
    names = [name for name in context.store.topics() if name.startswith(prefix)]
    start = bisect_right(names, after) if after else 0
    page = names[start : start + limit]
    more = start + limit < len(names)
    return {
        "topics": [_outline(context, name) for name in page],
        "total": len(names),
        "next": page[-1] if more else None,
    }


def _outline(context: ServerContext, name: str) -> dict[str, Any]:
    """The watermarks of a topic that is open here; of another, its name alone."""
    topic = context.store.opened(name)
    if topic is None:
        return {"topic": name, "open": False, **dict.fromkeys(_STAGES)}
    return {"topic": name, "open": True, "start": topic.start_offset, **asdict(topic.watermarks())}


def _describe(context: ServerContext, name: TopicName, limit: int) -> dict[str, Any]:
    with context.store.view() as view:
        found = asdict(describe(view.topic(str(name)), limit))
    topic = context.store.opened(str(name))
    if topic is None:
        return {**found, "open": False, "appended": None, "memory": None}
    memory = topic.in_memory()
    return {
        **found,
        "open": True,
        "appended": topic.watermarks().appended,
        "memory": [memory.start, memory.stop],
    }


def _explain(context: ServerContext, name: TopicName, offset: int) -> dict[str, Any]:
    # The open topic first: what leaves memory later is found in the tiers by the view.
    topic = context.store.opened(str(name))
    with context.store.view() as view:
        found = asdict(explain(view.topic(str(name)), offset))
    in_memory = topic is not None and offset in topic.in_memory()
    if topic is not None and found["state"] == "not yet synced":
        marks = topic.watermarks()
        found["synced"] = offset < marks.synced
        found["state"] = "in memory" if offset < marks.appended else "not yet appended"
    return {**found, "in_memory": in_memory}


def _create(context: ServerContext, name: TopicName) -> bool:
    """Whether it did not exist before."""
    with context.store.view() as view:
        try:
            view.topic(str(name))
        except UnknownTopic:
            created = True
        else:
            created = False
    context.topic(name)
    return created


def _trim(context: ServerContext, name: TopicName) -> dict[str, Any]:
    with context.store.view() as view:
        view.topic(str(name))  # UnknownTopic, instead of creating one
    removed = context.topic(name).trim_local()
    return {
        "topic": str(name),
        "removed": [
            {
                "file": str(each.path),
                "start_offset": each.first_offset,
                "next_offset": each.end_offset,
                "bytes": each.size,
            }
            for each in removed
        ],
    }
