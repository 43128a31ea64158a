"""`/metrics`: the numbers of this process, as Prometheus reads them."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay import metrics
from forebay.admin.site import Site
from forebay.metrics import Gauge

BUILD: Final = Gauge(
    "forebay_build_info", "Always 1; the labels tell which version runs.", ["version", "python"]
)
STARTED: Final = Gauge(
    "forebay_start_time_seconds", "When the server began, in seconds since 1970-01-01 UTC."
)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def routes(site: Site) -> list[BaseRoute]:
    BUILD.set(1, version("forebay"), platform.python_version())
    STARTED.set(site.started)

    async def page(_request: Request) -> Response:
        text = await run_in_threadpool(metrics.render)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return [Route("/metrics", page, methods=["GET"])]
