"""What all calls of the broker have in common: access, limits, errors as status codes, metrics.

A service is a table of methods. Each is a function that gets the decoded request and the call's
context, and returns a response or, for a stream, writes messages and returns when it ends. It
raises ForebayError, which becomes a status in `forebay.broker.status`.

Requests are decoded here and not by gRPC, which would answer INTERNAL to bytes that are no message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from forebay.broker.status import ERRORS, Refused, details_of, status_of, trailers_of
from forebay.logs import event
from forebay.metrics import SECONDS, Counter, Histogram

_log: Final = logging.getLogger("forebay.broker")
CALLS: Final = Counter("forebay_broker_calls_total", "Calls that began, by method.", ["method"])
CALL_SECONDS: Final = Histogram(
    "forebay_broker_call_seconds", "Time of a call that is not a stream.", SECONDS, ["method"]
)
_TOKEN_LINE_SECONDS: Final = 1.0
_BEARER: Final = "Bearer "
_QUIET_SECONDS: Final = 0.05
_QUIET_SECONDS_MAX: Final = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Message(Protocol):
    """A compiled message, as far as calls need it."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802  # protobuf's name


_Request = TypeVar("_Request")
Unary: TypeAlias = Callable[[_Request, Context], Awaitable[Message]]
ServerStream: TypeAlias = Callable[[_Request, Context], Awaitable[None]]
Stream: TypeAlias = Callable[[AsyncIterator[Any], Context], Awaitable[None]]


class Gate:
    """Decides whether a call may begin: the token, and whether the server is stopping."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()
        self._line_at = float("-inf")
        self._lines_left_out = 0
        self._began = float("-inf")
        """When the last call began."""
        self.stopping = asyncio.Event()
        """Set when the server begins to stop: calls that begin are refused, streams end."""

    def admit(self, context: Context) -> None:
        """Raises Refused unless the call may begin."""
        self._began = time.monotonic()
        if self.stopping.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        if self._token is None:
            return
        sent = dict(context.invocation_metadata() or ()).get("authorization", "")
        sent = sent if isinstance(sent, str) else ""
        given = sent.removeprefix(_BEARER).encode() if sent.startswith(_BEARER) else b""
        if not hmac.compare_digest(given, self._token):
            self._log_refusal(context.peer())
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                "this server needs a token: send it as `authorization: Bearer`",
            )

    async def quiet(self) -> None:
        """Waits until no call has begun for a moment, or for a second at most.

        gRPC cancels a call that arrives while it stops. Danube's clients raise that to their users;
        after UNAVAILABLE, which calls get until then, they pause and try again.
        """
        deadline = time.monotonic() + _QUIET_SECONDS_MAX
        while (now := time.monotonic()) < deadline and now < self._began + _QUIET_SECONDS:  # noqa: ASYNC110
            await asyncio.sleep(self._began + _QUIET_SECONDS - now)

    def _log_refusal(self, peer: str) -> None:
        """At most one line each second, which counts those in between."""
        now = time.monotonic()
        if now < self._line_at + _TOKEN_LINE_SECONDS:
            self._lines_left_out += 1
            return
        event(
            _log,
            logging.WARNING,
            "a call without the token was refused",
            peer=peer,
            more=self._lines_left_out,
        )
        self._line_at, self._lines_left_out = now, 0


class Calls:
    """Makes the handlers of services, all behind one gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def unary(
        self, method: str, decode: Callable[[bytes], _Request], serve: Unary[_Request]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        async def call(raw: bytes, context: Context) -> bytes:
            began = time.monotonic()
            CALLS.add(1, method)
            try:
                self._gate.admit(context)
                response = await serve(_decoded(decode, raw), context)
            except Exception as error:  # noqa: BLE001  # becomes the status of the call
                await _abort(context, method, error)
            CALL_SECONDS.observe(time.monotonic() - began, method)
            return response.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(call)

    def server_stream(
        self, method: str, decode: Callable[[bytes], _Request], serve: ServerStream[_Request]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A stream of responses; `serve` writes them to the context, as bytes."""

        async def call(raw: bytes, context: Context) -> None:
            CALLS.add(1, method)
            try:
                self._gate.admit(context)
                await serve(_decoded(decode, raw), context)
            except Exception as error:  # noqa: BLE001  # becomes the status of the call
                await _abort(context, method, error)

        return grpc.unary_stream_rpc_method_handler(call)

    def stream(
        self, method: str, decode: Callable[[bytes], _Request], serve: Stream
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Streams in both directions; `serve` gets decoded requests, and writes bytes."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> None:
            CALLS.add(1, method)

            async def decoded() -> AsyncIterator[_Request]:
                async for raw in requests:
                    yield _decoded(decode, raw)

            try:
                self._gate.admit(context)
                await serve(decoded(), context)
            except Exception as error:  # noqa: BLE001  # becomes the status of the call
                await _abort(context, method, error)

        return grpc.stream_stream_rpc_method_handler(call)


def service(
    name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
) -> grpc.GenericRpcHandler:
    """The handler of a service, such as `danube.Discovery`."""
    return grpc.method_handlers_generic_handler(name, dict(methods))


def _decoded(decode: Callable[[bytes], _Request], raw: bytes) -> _Request:
    try:
        return decode(raw)
    except DecodeError:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of this call"
        ) from None


async def _abort(context: Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # a write failed: the client is gone
        raise asyncio.CancelledError from error
    status = status_of(error)
    ERRORS.add(1, method, status.name)
    await context.abort(status, details_of(error, method), trailers_of(error))
    raise AssertionError("abort raises")
