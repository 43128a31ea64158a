"""A server in this process, for tests of what it answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.applications import Starlette

from forebay.admin import messages
from forebay.admin.app import build_app
from forebay.admin.consume import StreamTimeouts
from forebay.admin.context import ServerContext
from forebay.admin.server import AdminServer, ConnectionLimits
from forebay.client.http import ServerClient
from forebay.objects.store import CloudStore
from forebay.service.directory import store_id
from forebay.settings import AdminSettings, ServerAddress, StoreSettings
from forebay.topic.store import Store

PATIENCE = 60.0
"""Seconds that anything may take on a busy machine before it counts as hung."""


@dataclass(slots=True)
class Served:
    """A running server and a client of it."""

    context: ServerContext
    client: ServerClient

    @property
    def store(self) -> Store:
        return self.context.store

    @property
    def url(self) -> str:
        return self.context.url

    def new_client(self, timeout_seconds: float = PATIENCE) -> ServerClient:
        return ServerClient(self.client.address, timeout_seconds=timeout_seconds)


@contextmanager
def served(settings: StoreSettings | Path, objects: CloudStore | None = None) -> Iterator[Served]:
    """Serves a store on a free port of the loopback, in a thread, until the block ends."""
    if isinstance(settings, Path):
        settings = StoreSettings(data=settings)
    settings = replace(settings, admin=replace(settings.admin, listen="127.0.0.1:0"))
    with Store(settings, store=objects) as store:
        data = store.settings.data
        if data is not None:
            Path(data).mkdir(parents=True, exist_ok=True)
        context = (
            ServerContext(store)
            if data is None
            else ServerContext(store, store_id=store_id(Path(data)))
        )
        with serving(context) as client:
            yield Served(context, client)


@contextmanager
def serving(
    context: ServerContext, app: Starlette | None = None, server: AdminServer | None = None
) -> Iterator[ServerClient]:
    """The server alone, over a context that is there."""
    admin: AdminSettings = context.settings.admin
    server = server or AdminServer(admin)
    app = app or build_app(context)
    context.url = server.bind()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(app)))
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.started:
            assert thread.is_alive(), "the server ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        address = ServerAddress(
            context.url, context.instance, admin.token, admin.ca_file, context.store_id
        )
        with ServerClient(address, timeout_seconds=PATIENCE) as client:
            yield client
    finally:
        server.stop()
        thread.join(PATIENCE)
        server.close()
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def strained(
    store: Store,
    *,
    timeouts: StreamTimeouts | None = None,
    stall_seconds: float = 10,
    limits: ConnectionLimits | None = None,
) -> Iterator[Served]:
    """A server that is less patient than usual."""
    context = ServerContext(store)
    app = build_app(context)
    app.router.routes[:0] = messages.routes(
        context, timeouts=timeouts or StreamTimeouts(), stall_seconds=stall_seconds
    )
    with serving(context, app, AdminServer(AdminSettings(listen="127.0.0.1:0"), limits)) as client:
        yield Served(context, client)
