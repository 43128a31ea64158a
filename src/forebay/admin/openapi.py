"""`/openapi.json`: what can be asked of the server, in OpenAPI 3.1.

The document is data: schemas in `openapi_schemas`, calls in `openapi_paths`. A test compares it
with the routes that there are, and another one asks the server everything that it allows.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from forebay.admin.openapi_paths import PATHS
from forebay.admin.openapi_schemas import SCHEMAS
from forebay.admin.openapi_words import JSON, MEANINGS, PROBLEMS, Json, answer, path, ref

_NAME: Final[Json] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[A-Za-z0-9_-]+$",
}
"""Letters and digits of any script may be in a name; patterns of JSON cannot say so."""


@functools.cache
def document() -> bytes:
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Forebay",
                "version": version("forebay"),
                "summary": "A tiered log store: messages in and out, what is where, jobs.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": PATHS,
            "components": {
                "schemas": SCHEMAS,
                "parameters": {
                    "namespace": path("namespace", _NAME, "`default` of `/default/orders`."),
                    "topic": path("topic", _NAME, "`orders` of `/default/orders`."),
                },
                "responses": {
                    name: answer(MEANINGS[status], ref("Error"))
                    for status, name in PROBLEMS.items()
                },
                "securitySchemes": {
                    "token": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "`admin.token`, where one is set.",
                    }
                },
            },
            "security": [{"token": []}, {}],
        }
    )


def routes() -> list[BaseRoute]:
    async def openapi(_request: Request) -> Response:
        return Response(document(), media_type=JSON)

    return [Route("/openapi.json", openapi, methods=["GET"])]
