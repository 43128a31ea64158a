"""`/v1/config`: the settings in the shape of the file, all keys given, secrets as `***`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forebay.admin.site import Site
from forebay.config import describe


def routes(site: Site) -> list[BaseRoute]:
    async def config(_request: Request) -> Response:
        return JSONResponse(describe(site.settings))

    return [Route("/v1/config", config, methods=["GET"])]
