"""`build_app`: all routes of the server, put together behind the guard.

Each module of handlers has a function `routes`; those of the server itself are here:

    GET /healthz     the process is alive; which run and which store it is
    GET /readyz      200 when the server takes messages, 503 with the reason when it does not
    GET /metrics     the process's metrics in Prometheus' text format
    GET /v1/config   the settings in the shape of the configuration file, secrets as `***`
"""

from __future__ import annotations

import platform
import time
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay import __version__, metrics
from forebay.admin import executors, jobs, messages, openapi, sink_commits, topics
from forebay.admin.context import ServerContext
from forebay.admin.errors import error_response, on_bug, on_forebay_error, on_http_error
from forebay.admin.guard import Guard
from forebay.admin.page import assets, overview
from forebay.config import describe
from forebay.errors import ForebayError
from forebay.metrics import Gauge

BUILD: Final = Gauge(
    "forebay_build_info", "Always 1; the labels tell which version runs.", ["version", "python"]
)
STARTED: Final = Gauge(
    "forebay_start_time_seconds", "When the server began, in seconds since 1970-01-01 UTC."
)
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def build_app(context: ServerContext) -> Starlette:
    """The whole application. It starts and stops the context's watch with its lifespan."""
    routes: list[BaseRoute] = [
        *_server_routes(context),
        *messages.routes(context),
        *topics.routes(context),
        *jobs.routes(context),
        *executors.routes(context),
        *sink_commits.routes(context),
        *overview.routes(context),
        *assets.routes(),
        *openapi.routes(),
    ]
    guard = Middleware(
        Guard, settings=context.settings.admin, store=context.store_id, instance=context.instance
    )
    app = Starlette(
        routes=routes,
        middleware=[guard],
        lifespan=lambda _app: context.watch.running(),
        exception_handlers={
            ForebayError: on_forebay_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    app.state.stopping = context.stopping
    return app


def _server_routes(context: ServerContext) -> list[BaseRoute]:
    BUILD.set(1, __version__, platform.python_version())
    STARTED.set(context.started)

    async def healthz(_request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "instance": context.instance,
                "store": context.store_id,
                "up_seconds": round(time.time() - context.started, 3),
            }
        )

    async def readyz(_request: Request) -> Response:
        if context.unready is not None:
            return error_response(503, "ServiceUnavailable", f"not ready: {context.unready}")
        return JSONResponse({"status": "ready", "instance": context.instance})

    async def metrics_text(_request: Request) -> Response:
        text = await run_in_threadpool(metrics.render)
        return Response(text, headers={"Content-Type": _METRICS_TYPE})

    async def config(_request: Request) -> Response:
        return JSONResponse(describe(context.settings))

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics_text, methods=["GET"]),
        Route("/v1/config", config, methods=["GET"]),
    ]
