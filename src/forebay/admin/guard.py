"""`Guard`: the middleware that authenticates requests, counts them, and adds response headers.

With a token, every path but the public ones requires it. A request without it leaves a line in the
log, at most one each second, which counts those in between. Without a token only this machine
reaches the server, and a web page in a browser on this machine must not: neither by DNS rebinding
(the `Host` is checked) nor from another site (the `Origin` is).

A request may name the store that it is meant for (`Forebay-Store`), and is refused if this is
another one: the client still has the address of a server that was here before. Each response
names the run of the server that gave it (`Forebay-Instance`).

A body with a `Content-Encoding` is refused before it is read: stored as it came, it would be read
as something else.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.admin.errors import error_response, in_form_of
from forebay.client.http import INSTANCE_HEADER, STORE_HEADER
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.listening import is_loopback
from forebay.logs import event
from forebay.metrics import SECONDS, Counter, Histogram
from forebay.settings import AdminSettings

_log: Final = logging.getLogger("forebay.admin")
REQUESTS: Final = Counter(
    "forebay_http_requests_total",
    "Requests by method, route and status.",
    ["method", "route", "status"],
)
REQUEST_SECONDS: Final = Histogram(
    "forebay_http_request_seconds",
    "Time from a request to the start of its response, by method and route.",
    SECONDS,
    ["method", "route"],
)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD"})
_IDENTITY: Final = b"identity"
_TOKEN_LINE_SECONDS: Final = 1.0
_SHOWN: Final = 200
_PUBLIC: Final = {"/", "/healthz", "/readyz"}
_ASSETS: Final = "/assets/"
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
_STORE: Final = STORE_HEADER.lower().encode()
_HEADERS: Final = [(b"x-content-type-options", b"nosniff")]
_PAGE_HEADERS: Final = [
    *_HEADERS,
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


class Guard:
    """ASGI middleware around all routes."""

    def __init__(
        self,
        app: ASGIApp,
        settings: AdminSettings,
        *,
        store: str = "",
        instance: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._app = app
        self._clock = clock
        self._store = store
        instance_header = [(INSTANCE_HEADER.lower().encode(), instance.encode())]
        self._headers = [*_HEADERS, *instance_header]
        self._page_headers = [*_PAGE_HEADERS, *instance_header]
        self._token = None if settings.token is None else settings.token.encode()
        own = None if settings.url is None else urlsplit(settings.url.lower())
        self._own_host = None if own is None else own.hostname
        self._own_origin = None if own is None else own.netloc
        self._token_line_at = float("-inf")
        self._token_lines_left_out = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        page = path == "/" or path.startswith(_ASSETS)
        added = self._page_headers if page else self._headers
        began = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                # Not the path: a client that asks for many paths must not create as many series.
                route = getattr(scope.get("route"), "path", "none")
                REQUESTS.add(1, method, route, str(message["status"]))
                REQUEST_SECONDS.observe(time.perf_counter() - began, method, route)
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        refusal = self._refusal(scope, path)
        respond = self._app if refusal is None else in_form_of(path, refusal)
        await respond(scope, receive, sending)

    def _refusal(self, scope: Scope, path: str) -> Response | None:
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        refusal = self._refuse_access(scope, path, headers)
        if refusal is not None or scope["method"] in _WITHOUT_BODY:
            return refusal
        return _refuse_encoding(headers)

    def _refuse_access(
        self, scope: Scope, path: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> Response | None:
        if self._token is None:
            return self._refuse_origin(headers) or self._refuse_store(headers)
        # Before the token: for the wrong server, a client has the wrong token.
        refusal = self._refuse_store(headers)
        if refusal is not None or path in _PUBLIC or path.startswith(_ASSETS):
            return refusal
        problem = _token_problem(headers, self._token)
        if problem is None:
            return None
        self._log_token(scope, path, problem)
        return _token_wanted()

    def _log_token(self, scope: Scope, path: str, problem: str) -> None:
        """Logs a request without the token, at most one each second: logs must not fill the disk.

        The line has nothing of what the client sent as its token.
        """
        now = self._clock.monotonic()
        if now < self._token_line_at + _TOKEN_LINE_SECONDS:
            self._token_lines_left_out += 1
            return
        left_out, self._token_lines_left_out = self._token_lines_left_out, 0
        self._token_line_at = now
        client = scope.get("client")
        event(
            _log,
            logging.WARNING,
            "a request without a valid token was refused",
            client="unknown" if client is None else client[0],
            method=scope["method"][:_SHOWN],
            path=path[:_SHOWN],
            reason=problem,
            others=left_out,
        )

    def _refuse_store(self, headers: Sequence[tuple[bytes, bytes]]) -> Response | None:
        for name, store in headers:
            if name == _STORE and store != self._store.encode():
                return error_response(
                    412,
                    "ServiceUnavailable",
                    f"the request is for the store {store[:80].decode('latin-1')!r}, and this is "
                    f"{self._store}: another server has the address now; nothing was taken",
                    taken=False,
                )
        return None

    def _refuse_origin(self, headers: Sequence[tuple[bytes, bytes]]) -> Response | None:
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
        name = _without_port(host)
        if not is_loopback(name) and name.strip("[]") != self._own_host:
            return error_response(
                403,
                "ServiceRefused",
                f"the request is for the host {host[:80]!r}, which is not this server's: use "
                "127.0.0.1 or localhost, or set admin.url, or admin.token",
                taken=False,
            )
        for origin in origins:
            netloc = origin.decode("latin-1").lower().partition("://")[2]
            if netloc not in {host, self._own_origin}:
                return error_response(
                    403,
                    "ServiceRefused",
                    "pages of other sites may not send requests to this server",
                    taken=False,
                )
        return None


def _token_problem(headers: Sequence[tuple[bytes, bytes]], token: bytes) -> str | None:
    """Returns what is wrong with the token of a request; None if it is the right one."""
    given = [value for name, value in headers if name == b"authorization"]
    scheme, _, value = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    # In constant time, so that a token cannot be guessed byte by byte.
    same = hmac.compare_digest(value.strip(), token)
    if same and scheme.lower() == b"bearer":
        return None
    return "wrong" if given else "missing"


def _token_wanted() -> Response:
    response = error_response(
        401,
        "ServiceRefused",
        "this server requires a token: Authorization: Bearer <admin.token> (the commands take it "
        "from the configuration or from FOREBAY_TOKEN)",
        taken=False,
    )
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _refuse_encoding(headers: Sequence[tuple[bytes, bytes]]) -> Response | None:
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() != _IDENTITY:
            response = error_response(
                415,
                "UsageError",
                f"the body has the Content-Encoding {value[:80].decode('latin-1')!r}, and only "
                "identity is accepted: send it without an encoding; nothing was taken",
                taken=False,
            )
            response.headers["Accept-Encoding"] = "identity"
            return response
    return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
