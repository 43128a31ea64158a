"""`build_app`: all routes of the server, put together behind the guard.

Each module of handlers has a function `routes`; those of the server itself are here:

    GET /healthz     the process is alive; which run and which store it is
    GET /readyz      200 if the server accepts messages, 503 with the reason if it does not
    GET /metrics     the process's metrics in Prometheus' text format
    GET /v1/config   the settings in the shape of the configuration file, secrets as `***`
    GET /openapi.json   the document of all routes, in OpenAPI 3.1
"""

from __future__ import annotations

import platform
from typing import Annotated, Any, Final, Literal

from msgspec import Meta
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from forebay import __version__, metrics
from forebay.admin import executors, jobs, messages, schemas, sink_commits, subscriptions, topics
from forebay.admin.context import ServerContext
from forebay.admin.errors import (
    Refused,
    error_response,
    on_bug,
    on_forebay_error,
    on_http_error,
    on_refused,
)
from forebay.admin.guard import Guard
from forebay.admin.operations import Endpoint, Operation, Reply, document
from forebay.admin.page import assets, overview
from forebay.admin.pulsar import offload, policies, scan
from forebay.admin.records import ENCODER, JSON, Record, json_response
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


class Health(Record, frozen=True):
    status: Literal["ok"]
    instance: Annotated[str, Meta(description="The id of this run of the server.")]
    store: Annotated[str, Meta(description="The id of the store, the same in every run.")]
    up_seconds: float
    broker: Annotated[
        str | None, Meta(description="The URL of the gRPC server; null if there is none.")
    ]


class Ready(Record, frozen=True):
    status: Literal["ready"]
    instance: str


class Config(Record, frozen=True):
    """The settings by section as in the configuration file, all keys given; secrets are `***`."""

    data: str | None
    storage: dict[str, Any]
    metadata: dict[str, Any]
    broker: dict[str, Any]
    admin: dict[str, Any]
    spark: dict[str, Any]


HEALTH: Final = Operation(
    "health",
    "server",
    "Returns that the process is alive.",
    {200: Reply("The process is alive.", Health)},
    public=True,
)
READINESS: Final = Operation(
    "readiness",
    "server",
    "Returns whether the server accepts messages.",
    {200: Reply("The server accepts messages.", Ready)},
    public=True,
)
METRICS: Final = Operation(
    "metrics",
    "server",
    "Returns the metrics of the process in Prometheus' text format.",
    {200: Reply("The metrics.", str, "text/plain")},
)
CONFIG: Final = Operation(
    "configuration",
    "server",
    "Returns all settings, without secrets.",
    {200: Reply("The settings.", Config)},
)


def build_app(context: ServerContext) -> Starlette:
    """The whole application. The context runs with its lifespan."""
    routes: list[Endpoint] = [
        *_server_routes(context),
        *messages.routes(context),
        *topics.routes(context),
        *subscriptions.routes(context),
        *schemas.routes(context),
        *jobs.routes(context),
        *executors.routes(context),
        *sink_commits.routes(context),
        *policies.routes(context),
        *offload.routes(context),
        *scan.routes(context),
        *overview.routes(context),
        *assets.routes(),
    ]
    routes.append(_document_route(routes))
    guard = Middleware(
        Guard, settings=context.settings.admin, store=context.store_id, instance=context.instance
    )
    app = Starlette(
        routes=routes,
        middleware=[guard],
        lifespan=lambda _app: context.running(),
        exception_handlers={
            ForebayError: on_forebay_error,
            Refused: on_refused,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    app.state.stopping = context.stopping
    return app


def _document_route(endpoints: list[Endpoint]) -> Endpoint:
    text: bytes | None = None

    async def openapi(_request: Request) -> Response:
        nonlocal text
        if text is None:
            text = ENCODER.encode(document([*endpoints, endpoint]))
        return Response(text, media_type=JSON)

    operation = Operation(
        "openapi", "server", "Returns this document.", {200: Reply("The document.", dict[str, Any])}
    )
    endpoint = Endpoint("/openapi.json", openapi, operation)
    return endpoint


def _server_routes(context: ServerContext) -> list[Endpoint]:
    BUILD.set(1, __version__, platform.python_version())
    STARTED.set(context.started)

    async def healthz(_request: Request) -> Response:
        return json_response(
            Health("ok", context.instance, context.store_id, context.up_seconds, context.broker)
        )

    async def readyz(_request: Request) -> Response:
        if context.unready is not None:
            return error_response(503, "ServiceUnavailable", f"not ready: {context.unready}")
        return json_response(Ready("ready", context.instance))

    async def metrics_text(_request: Request) -> Response:
        text = await run_in_threadpool(metrics.render)
        return Response(text, headers={"Content-Type": _METRICS_TYPE})

    async def config(_request: Request) -> Response:
        return json_response(Config(**describe(context.settings)))

    return [
        Endpoint("/healthz", healthz, HEALTH),
        Endpoint("/readyz", readyz, READINESS),
        Endpoint("/metrics", metrics_text, METRICS),
        Endpoint("/v1/config", config, CONFIG),
    ]
