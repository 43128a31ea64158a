"""`AdminServer`: the application on a socket.

What a caller gets wrong: `bind` says where it listens, and whether it can; do it before anything
else is started. Signals are the caller's: this server installs no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, cast

import uvicorn
from starlette.applications import Starlette

from forebay.admin.connections import (
    KEEP_ALIVE_SECONDS,
    Connection,
    ConnectionLimits,
    connections_max,
    tend_all,
)
from forebay.errors import UsageError, remedy
from forebay.settings import AdminSettings

_STOP_SECONDS: Final = 3
_BACKLOG: Final = 512
_TICKS: Final = 5
"""Of uvicorn, a tenth of a second each, from one look at the connections to the next."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host, by its name or its address."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class AdminServer:
    """Binds, serves until it is stopped, and lets requests end."""

    def __init__(self, settings: AdminSettings, limits: ConnectionLimits | None = None) -> None:
        self._settings = settings
        self._limits = limits or ConnectionLimits(connections_max())
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def bind(self) -> str:
        """Takes the address and answers its URL; UsageError if it is taken or not ours."""
        settings = self._settings
        host, _, port = settings.listen.rpartition(":")
        host = host.strip("[]")
        if settings.token is None and not is_loopback(host):
            raise UsageError(
                f"admin.listen is {settings.listen}, which other machines reach, and admin.token "
                "is not set: set a token, or listen on 127.0.0.1"
            )
        _require_certificate(settings)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, int(port)))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise UsageError(_refusal(settings.listen, error)) from error
        self._socket = bound
        if settings.url is not None:
            return settings.url.rstrip("/")
        scheme = "http" if settings.cert_file is None else "https"
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{bound.getsockname()[1]}"

    async def serve(self, app: Starlette) -> None:
        """Until `stop`. Streams end when the event `app.state.stopping` is set, as it is then."""
        assert self._socket is not None, "bind it first"
        settings = self._settings
        config = uvicorn.Config(
            app,
            http=_connections(self._limits),
            log_config=None,
            access_log=False,
            lifespan="on",
            ssl_certfile=None if settings.cert_file is None else str(settings.cert_file),
            ssl_keyfile=None if settings.key_file is None else str(settings.key_file),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_STOP_SECONDS,
            server_header=False,
            proxy_headers=False,
            ws="none",
        )
        self._server = _Quiet(config, app.state.stopping)
        await self._server.serve(sockets=[self._socket])

    @property
    def started(self) -> bool:
        return self._server is not None and self._server.started

    def stop(self) -> None:
        """From the event loop's thread, or a signal's handler."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _connections(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    # A class is what uvicorn wants to be given; what it does is to call it, with keywords.
    return cast("type[asyncio.Protocol]", partial(Connection, limits=limits))


class _Quiet(uvicorn.Server):
    """Without handlers of signals, and with a word to streams before it waits for their end."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            tend_all(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # of a client that takes nothing of what it asked for
        await asyncio.sleep(0)  # which is when they are closed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _require_certificate(settings: AdminSettings) -> None:
    """UsageError, with the files, for a certificate that cannot be used."""
    if settings.cert_file is None or settings.key_file is None:
        return
    for name, file in (("cert_file", settings.cert_file), ("key_file", settings.key_file)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise UsageError(
                f"admin.{name} {file} cannot be read: {error.strerror}; {remedy(error)}"
                if error.errno != errno.ENOENT
                else f"admin.{name} {file} is not there"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as error:  # an SSLError is one
        raise UsageError(
            f"admin.cert_file {settings.cert_file} and admin.key_file {settings.key_file} are no "
            f"certificate and its private key in PEM ({error})"
        ) from error


def _refusal(listen: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{listen} is taken by another process: stop that one, or choose another address with "
            "--listen or admin.listen (port 0 takes a free one)"
        )
    return f"cannot listen on {listen}: {error.strerror}; choose another address with --listen"
