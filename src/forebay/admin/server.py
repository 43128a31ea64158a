"""`AdminServer`: the application on a socket, and what one connection may cost.

uvicorn by itself closes a connection that is idle after a request, and no other. `Connection` also
closes one that never sends a request, whose head or body stalls, or whose client does not read the
rest of a response. The number of connections is limited, so that file descriptors are left for the
logs: one too many gets a 503 and is closed.

Beware: call `bind` before anything else is started. It returns the address, or raises if the server
cannot listen there. The caller must handle signals: this server installs no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.admin.response import IS_FULL, WRITE_BUFFER_BYTES
from forebay.errors import UsageError
from forebay.limits import KIB
from forebay.listening import bind_error, bind_socket, host_and_port, shown_address
from forebay.metrics import Counter
from forebay.settings import AdminSettings

KEEP_ALIVE_SECONDS: Final = 75
_STOP_SECONDS: Final = 3
_BACKLOG: Final = 512
_CHECK_TICKS: Final = 5
"""Ticks of uvicorn, a tenth of a second each, between two checks of the connections."""
_CONNECTIONS_MAX: Final = 1024
_DESCRIPTORS_SHARE: Final = 4
_DESCRIPTORS_UNLIMITED: Final = 1 << 20
_TOO_MANY: Final = (
    b'{"error":{"kind":"ServiceUnavailable","taken":false,'
    b'"message":"the server has too many connections: try again later"}}'
)
_HEAD_TOO_LARGE: Final = (
    b'{"error":{"kind":"UsageError","taken":false,'
    b'"message":"the head of the request is too large: send less in it"}}'
)
REFUSED: Final = Counter(
    "forebay_http_connections_refused_total",
    "Connections that the server closed by itself: one too many, silent for too long, or with a "
    "head that is too large.",
    ["reason"],
)


class AdminServer:
    """Binds, serves until it is stopped, and lets running requests end."""

    def __init__(self, settings: AdminSettings, limits: ConnectionLimits | None = None) -> None:
        self._settings = settings
        self._limits = limits or ConnectionLimits(connections_max())
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def bind(self) -> str:
        """Listens, and returns the URL; UsageError if the address cannot be used."""
        settings = self._settings
        bound = bind_socket(settings)
        try:
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise UsageError(bind_error(settings, error)) from error
        self._socket = bound
        if settings.url is not None:
            return settings.url.rstrip("/")
        scheme = "http" if settings.cert_file is None else "https"
        host, _ = host_and_port(settings.listen)
        return f"{scheme}://{shown_address(host, bound.getsockname()[1])}"

    async def serve(self, app: Starlette) -> None:
        """Serves until `stop`, which sets the event `app.state.stopping`: streams end then."""
        assert self._socket is not None, "bind it first"
        settings = self._settings
        config = uvicorn.Config(
            app,
            # uvicorn's type is a class; it only calls it, with keywords.
            http=cast("type[asyncio.Protocol]", partial(Connection, limits=self._limits)),
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
        self._server = _UvicornServer(config, app.state.stopping)
        await self._server.serve(sockets=[self._socket])

    @property
    def started(self) -> bool:
        return self._server is not None and self._server.started

    def stop(self) -> None:
        """Asks the server to stop. Call it on the event loop's thread or in a signal handler."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class _UvicornServer(uvicorn.Server):
    """Installs no signal handlers, ends streams before it waits for them, checks connections."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def on_tick(self, counter: int) -> bool:
        if counter % _CHECK_TICKS == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.close_if_stalled()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client reads nothing of its response
        await asyncio.sleep(0)  # the transports close in the next turn of the loop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---- connections ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections_max: int
    head_seconds: float = 20.0
    """The time limit for a new connection to send the headers of its first request."""
    body_seconds: float = 630.0
    """The time limit without a byte of a body. Handlers have the same or a shorter limit."""
    closing_seconds: float = 60.0
    """The time limit for a client to read the rest of its last response."""
    head_bytes_max: int = 64 * KIB
    """The limit for headers that arrive in several parts, without the first part."""


def connections_max() -> int:
    """A quarter of the descriptors that the process may open, at most 1,024."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = _DESCRIPTORS_UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return max(min(descriptors // _DESCRIPTORS_SHARE, _CONNECTIONS_MAX), 1)


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits. On the event loop's thread."""

    def __init__(self, *, limits: ConnectionLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._has_request = False
        self._in_head = False
        self._head_bytes = 0
        self._idle_since = self._received_at = self.loop.time()
        self._closing_since: float | None = None

    # -- what uvicorn calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The default for TLS is 512 KiB.
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self._limits.connections_max:
            self._refuse(b"503 Service Unavailable", _TOO_MANY, "many")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # uvicorn would respond to what comes after a refusal
        self._received_at = self.loop.time()
        was_in_head = self._in_head
        super().data_received(data)
        if not was_in_head or not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.head_bytes_max:
            self._refuse(b"431 Request Header Fields Too Large", _HEAD_TOO_LARGE, "head")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[IS_FULL] = self._is_full  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._has_request = True
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def _is_full(self) -> bool:
        return self.flow.write_paused

    # -- limits ---------------------------------------------------------------------------------

    def close_if_stalled(self) -> None:
        """Closes the connection if its client was silent for too long; called periodically."""
        now = self.loop.time()
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > self._limits.closing_seconds:
                self.transport.abort()
        elif now > self._deadline():
            REFUSED.add(1, "silent")
            self.transport.close()

    def _deadline(self) -> float:
        if not self._has_request:
            return self._idle_since + self._limits.head_seconds
        if self.cycle.response_complete:
            # To uvicorn, a client that sends some bytes of the next head now and then is not idle.
            return self._idle_since + KEEP_ALIVE_SECONDS + self._limits.head_seconds
        if self.cycle.more_body and not self.flow.read_paused:
            return self._received_at + self._limits.body_seconds
        return float("inf")

    def _refuse(self, status: bytes, body: bytes, reason: str) -> None:
        REFUSED.add(1, reason)
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        end = b"retry-after: 1\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + end + body)
        self.transport.close()
