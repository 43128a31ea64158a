"""The routes of the server, put together."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from forebay.admin import health
from forebay.admin.problems import on_bug, on_forebay_error, on_http_error
from forebay.admin.site import Site
from forebay.errors import ForebayError


def build_app(site: Site) -> Starlette:
    """The whole application. Each module of handlers has a function `routes`."""
    routes: list[BaseRoute] = [*health.routes(site)]
    return Starlette(
        routes=routes,
        exception_handlers={
            ForebayError: on_forebay_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
