"""`/healthz`: the process lives. `/readyz`: it takes messages."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.problems import problem
from forebay.admin.site import Site


def routes(site: Site) -> list[BaseRoute]:
    async def healthz(_request: Request) -> Response:
        told = {
            "status": "ok",
            "instance": site.instance,
            "store": site.store_id,
            "up_seconds": round(time.time() - site.started, 3),
        }
        return JSONResponse(told)

    async def readyz(_request: Request) -> Response:
        if site.unready is not None:
            return problem(503, "ServiceUnavailable", f"not ready: {site.unready}")
        return JSONResponse({"status": "ready", "instance": site.instance})

    return [Route("/healthz", healthz), Route("/readyz", readyz)]
