"""The client's side of a connection: address, token, TLS, errors by class, waits between attempts.

A status becomes the error of `forebay.errors` that the server raised, as far as a client can act on
it. UNAVAILABLE becomes ServiceUnavailable: the caller tries again, after a wait that grows.

Beware: the token is sent with every call, encrypted only with TLS. It is never part of an error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import grpc

from forebay import errors
from forebay.errors import (
    ForebayError,
    LostOffsets,
    OffsetOutOfRange,
    OutOfSequence,
    ProducerReplaced,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from forebay.limits import FRAME_PAYLOAD_BYTES_MAX, MIB

_RECEIVED_BYTES_MAX: Final = FRAME_PAYLOAD_BYTES_MAX + MIB
_WAIT_SECONDS_MIN: Final = 0.05
_WAIT_SECONDS_MAX: Final = 2.0
_DETAILS_MAX: Final = 2000

_BY_STATUS: Final[dict[grpc.StatusCode, type[ForebayError]]] = {
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServiceUnavailable,
    grpc.StatusCode.CANCELLED: ServiceUnavailable,
    grpc.StatusCode.ABORTED: ProducerReplaced,
    grpc.StatusCode.UNAUTHENTICATED: ServiceRefused,
    grpc.StatusCode.PERMISSION_DENIED: ServiceRefused,
    grpc.StatusCode.UNIMPLEMENTED: ServiceRefused,
    grpc.StatusCode.NOT_FOUND: UnknownTopic,
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.FAILED_PRECONDITION: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
}


class Connection:
    """A channel to one server. It connects when it is first used, and again when it must."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """`ca_file` switches TLS on, too. Raises UsageError if the address is not `host:port`."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or "/" in address or "@" in address:
            raise UsageError("the address of a server is host:port, such as 127.0.0.1:6650")
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        options = [
            ("grpc.max_receive_message_length", _RECEIVED_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            # Calls of one process share a connection otherwise, and with it its flow control.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if tls or ca_file is not None:
            roots = None if ca_file is None else _read(ca_file)
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.aio.secure_channel(address, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options)

    def stream(self, method: str) -> grpc.aio.StreamStreamCall[Any, Any]:
        """Begins a call of `forebay.Streams`; requests and responses are bytes."""
        return self._channel.stream_stream(f"/forebay.Streams/{method}")(metadata=self._metadata)

    def error(self, error: grpc.aio.AioRpcError) -> ForebayError:
        """The error to raise for the status of a call."""
        trailers = {key: str(value) for key, value in _items(error.trailing_metadata())}
        details = (error.details() or error.code().name)[:_DETAILS_MAX]
        code = error.code()
        kind = _BY_STATUS.get(code, ServiceError)
        if kind is ServiceUnavailable:
            return ServiceUnavailable(f"the server at {self.address} cannot be used now: {details}")
        named = getattr(errors, trailers.get("forebay-error", ""), None)
        if isinstance(named, type) and issubclass(named, ForebayError):
            rebuilt = _rebuilt(named, details, trailers)
            if rebuilt is not None:
                return rebuilt
        return kind(f"{self.address}: {details}")

    async def close(self) -> None:
        await self._channel.close()


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the CA certificates cannot be read: {error}") from error


def _items(metadata: Any) -> Iterable[tuple[str, Any]]:
    return metadata or ()


def _rebuilt(
    kind: type[ForebayError], details: str, trailers: dict[str, str]
) -> ForebayError | None:
    """The error that the server raised; None if a client cannot act on it as such."""
    numbers = {
        name: int(trailers[f"forebay-{name}"])
        for name in ("start", "end", "expected")
        if trailers.get(f"forebay-{name}", "").isdecimal()
    }
    if kind in (OffsetOutOfRange, LostOffsets) and {"start", "end"} <= numbers.keys():
        found: ForebayError = (LostOffsets if kind is LostOffsets else OffsetOutOfRange)(
            details, start=numbers["start"], end=numbers["end"]
        )
        return found
    if kind is OutOfSequence and "expected" in numbers:
        return OutOfSequence(details, expected=numbers["expected"])
    return kind(details) if issubclass(kind, UsageError) else None


class Attempts:
    """Waits between attempts to reach a server, until `timeout` seconds without success."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._wait = _WAIT_SECONDS_MIN
        self._since: float | None = None
        """When the first attempt failed after the last success."""

    def succeeded(self) -> None:
        self._wait, self._since = _WAIT_SECONDS_MIN, None

    async def failed(self, error: ForebayError) -> None:
        """Waits before the next attempt. Raises the error if it has been in vain for too long."""
        now = time.monotonic()
        self._since = self._since or now
        if now + self._wait > self._since + self._timeout:
            raise error
        await asyncio.sleep(self._wait * random.uniform(0.5, 1))  # noqa: S311  # not a secret
        self._wait = min(2 * self._wait, _WAIT_SECONDS_MAX)
