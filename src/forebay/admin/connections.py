"""`Connection`: one connection of the HTTP server, and what it may cost.

The HTTP server by itself closes a connection that rests after a request, and no other. Here also
one that never asks, whose head or body does not go on, or whose client does not take the rest of an
answer, comes to an end. There are so many at most, so that descriptors are left for the logs: a
new one is told so, and closed.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forebay.limits import KIB
from forebay.metrics import Counter

KEEP_ALIVE_SECONDS: Final = 75
_MOST: Final = 1024
_SHARE: Final = 4
_UNLIMITED: Final = 1 << 20
_BUSY: Final = (
    b'{"error":{"kind":"ServiceUnavailable","taken":false,'
    b'"message":"the server has as many connections as it may have: come back later"}}'
)
_TOO_LARGE: Final = (
    b'{"error":{"kind":"UsageError","taken":false,'
    b'"message":"the head of the request is too large: send less in it"}}'
)
REFUSED: Final = Counter(
    "forebay_http_connections_refused_total",
    "Connections that the server closed by itself: one too many, silent for too long, or with a "
    "head that is too large.",
    ["reason"],
)


def connections_max() -> int:
    """A quarter of the descriptors that the process may open, and no more than 1,024."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = _UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return max(min(known // _SHARE, _MOST), 1)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections_max: int
    head_seconds: float = 20.0
    """From the connection to the end of its first request's head."""
    body_seconds: float = 630.0
    """Of silence in a body; those who read bodies wait less, or as long."""
    closing_seconds: float = 60.0
    """For a client to take what is left of its last answer."""
    head_bytes_max: int = 64 * KIB
    """Of a head that comes in pieces, beyond the first."""


class Connection(HttpToolsProtocol):
    """On the event loop's thread."""

    def __init__(self, *, limits: ConnectionLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._asked = False
        self._in_head = False
        self._head_bytes = 0
        self._resting_since = self._heard = self.loop.time()
        self._closing_since: float | None = None

    # -- what the HTTP server calls -------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections_max:
            self._refuse(b"503 Service Unavailable", _BUSY, "many")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # uvicorn would answer what came behind a refusal
        self._heard = self.loop.time()
        went_on = self._in_head
        super().data_received(data)
        if not went_on or not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.head_bytes_max:
            self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE, "head")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._asked = True
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self._resting_since = self.loop.time()
        super().on_response_complete()

    # -- what it may cost -----------------------------------------------------------------------

    def tend(self) -> None:
        """Ends it if its client has been silent for too long; to be called now and then."""
        now = self.loop.time()
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > self._limits.closing_seconds:
                self.transport.abort()
        elif now > self._ends_at():
            REFUSED.add(1, "silent")
            self.transport.close()

    def _ends_at(self) -> float:
        if not self._asked:
            return self._resting_since + self._limits.head_seconds
        if self.cycle.response_complete:
            # Whoever sends some bytes of a next head now and then is not resting to uvicorn.
            return self._resting_since + KEEP_ALIVE_SECONDS + self._limits.head_seconds
        if self.cycle.more_body and not self.flow.read_paused:
            return self._heard + self._limits.body_seconds
        return float("inf")

    def _refuse(self, status: bytes, body: bytes, reason: str) -> None:
        REFUSED.add(1, reason)
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        end = b"retry-after: 1\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + end + body)
        self.transport.close()


def tend_all(connections: Iterable[object]) -> None:
    for connection in list(connections):
        if isinstance(connection, Connection):
            connection.tend()
