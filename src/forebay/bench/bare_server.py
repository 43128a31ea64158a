"""The limit of `forebay bench http`: a service that reads the bodies of requests, nothing more.

    python -m forebay.bench.bare_server

It has the HTTP server, the event loop and the settings of `forebay serve`, and an application that
returns the length of the body. It prints one line of JSON with its `url` and serves until its
standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Final

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.admin.server import AdminServer
from forebay.settings import AdminSettings

MODULE: Final = "forebay.bench.bare_server"


def bare_app() -> Starlette:
    async def messages(request: Request) -> Response:
        return JSONResponse({"bytes": len(await request.body())})

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield

    path = "/v1/topics/{namespace}/{topic}/messages"
    app = Starlette(routes=[Route(path, messages, methods=["POST"])], lifespan=lifespan)
    app.state.stopping = asyncio.Event()
    return app


def main() -> None:
    server = AdminServer(AdminSettings(listen="127.0.0.1:0"))
    url = server.bind()

    def until_input_ends() -> None:
        sys.stdin.buffer.read()
        server.stop()

    print(json.dumps({"url": url}), flush=True)
    threading.Thread(target=until_input_ends, daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(bare_app()))
    server.close()


if __name__ == "__main__":
    main()
