"""A server in a process of its own for `forebay bench http`: ours, or a bare one beside it.

    python -m forebay.bench.http_server ours DIRECTORY
    python -m forebay.bench.http_server bare

Says its port in one line, and serves until its standard input ends. Both have the same HTTP server
with the same settings; the bare one has an application that reads the body and says how long it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.admin.app import build_app
from forebay.admin.context import ServerContext
from forebay.admin.server import AdminServer
from forebay.settings import AdminSettings, StoreSettings
from forebay.topic.store import Store

MODULE: Final = "forebay.bench.http_server"
_LISTEN: Final = AdminSettings(listen="127.0.0.1:0")
_THREADS: Final = 32


def bare_app() -> Starlette:
    """Reads what it is sent, and nothing else."""

    async def messages(request: Request) -> Response:
        return JSONResponse({"bytes": len(await request.body())})

    @contextlib.asynccontextmanager
    async def living(_app: Starlette) -> AsyncIterator[None]:
        yield

    path = "/v1/topics/{namespace}/{topic}/messages"
    app = Starlette(routes=[Route(path, messages, methods=["POST"])], lifespan=living)
    app.state.stopping = asyncio.Event()
    return app


@contextlib.contextmanager
def our_app(data: Path) -> Iterator[Starlette]:
    with Store(StoreSettings(data=data, admin=_LISTEN)) as store:
        yield build_app(ServerContext(store))


def serve(app: Starlette) -> None:
    server = AdminServer(_LISTEN)
    url = server.bind()

    def until_input_ends() -> None:
        sys.stdin.buffer.read()
        server.stop()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        await server.serve(app)

    print(url.rpartition(":")[2], flush=True)
    threading.Thread(target=until_input_ends, daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    server.close()


def main(arguments: list[str]) -> None:
    if arguments[0] == "bare":
        serve(bare_app())
        return
    with our_app(Path(arguments[1])) as app:
        serve(app)


if __name__ == "__main__":
    main(sys.argv[1:])
