"""The routes of the server, put together."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from forebay.admin import (
    assets,
    configuration,
    exposition,
    health,
    jobs,
    messages,
    objects,
    openapi,
    overview,
    segments,
    sink_door,
    topics,
)
from forebay.admin.guard import Guard
from forebay.admin.problems import on_bug, on_forebay_error, on_http_error
from forebay.admin.site import Site
from forebay.admin.watching import watching
from forebay.errors import ForebayError


def build_app(site: Site) -> Starlette:
    """The whole application. Each module of handlers has a function `routes`."""
    routes: list[BaseRoute] = [
        *health.routes(site),
        *jobs.routes(site),
        *overview.routes(site),
        *topics.routes(site),
        *messages.routes(site),
        *configuration.routes(site),
        *exposition.routes(site),
        *openapi.routes(),
        *assets.routes(),
        *segments.routes(site),
        *objects.routes(site),
        *sink_door.routes(site),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                Guard, settings=site.settings.admin, store=site.store_id, instance=site.instance
            )
        ],
        lifespan=lambda _app: watching(site.watch),
        exception_handlers={
            ForebayError: on_forebay_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    app.state.stopping = site.stopping
    return app
