"""`ServerClient`: one kept-alive connection to a server, and its errors as ours.

An error that the server tells is raised as the class that the server raised. A server that does
not answer, or breaks off, is ServiceUnavailable: what was asked may have happened. Nothing is
asked again here; a request on a connection that the server had closed meanwhile is the exception.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from forebay import errors
from forebay.errors import (
    ForebayError,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.names import TopicName
from forebay.limits import MIB
from forebay.settings import ServerAddress

_ANSWER_BYTES_MAX: Final = 64 * MIB
_ERROR_BYTES_MAX: Final = 1 * MIB
_LINE_BYTES_MAX: Final = 256 * MIB


def topic_path(topic: TopicName, *rest: str) -> str:
    """`/v1/topics/<namespace>/<topic>/...`, each part quoted."""
    parts = ("v1", "topics", topic.namespace, topic.topic, *rest)
    return "/" + "/".join(quote(part, safe="") for part in parts)


@dataclass(slots=True)
class Answer:
    """A response whose body has not been read yet; read it, or close the client."""

    status: int
    headers: http.client.HTTPMessage
    body: http.client.HTTPResponse

    def read(self, bytes_max: int = _ANSWER_BYTES_MAX) -> bytes:
        data = self.body.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise ServiceError(f"the server's answer is larger than {bytes_max} bytes")
        return data


class ServerClient:
    """Not thread-safe: one request at a time."""

    def __init__(self, address: ServerAddress, *, timeout_seconds: float = 60) -> None:
        parts = urlsplit(address.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"{address.url!r} is no address of a server; it is http://host:port")
        self.address = address
        self._timeout = timeout_seconds
        self._path = parts.path.rstrip("/")
        port = parts.port or (443 if parts.scheme == "https" else 8650)
        if parts.scheme == "https":
            context = ssl.create_default_context(
                cafile=None if address.ca_file is None else str(address.ca_file)
            )
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=timeout_seconds, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(
                parts.hostname, port, timeout=timeout_seconds
            )

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer if its status is below 400; else the error that it tells."""
        target = self._path + path + (f"?{urlencode(query)}" if query else "")
        sent = dict(headers or {})
        if self.address.token is not None:
            sent["Authorization"] = f"Bearer {self.address.token}"
        response = self._send(method, target, body, sent)
        if response.status >= 400:
            with response:
                told = response.read(_ERROR_BYTES_MAX)
            raise _error_of(self.address.url, response.status, told)
        return Answer(response.status, response.headers, response)

    def _send(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        reused = self._connection.sock is not None
        try:
            return self._once(method, target, body, headers)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            # The server closes connections that were idle for long; that is not its end.
            self._connection.close()
            if not reused or not (body is None or isinstance(body, bytes)) or method == "POST":
                raise self._unavailable(error) from error
        except ssl.SSLError as error:
            self._connection.close()
            raise ServiceRefused(f"{self.address.url}: {error}; check ca_file") from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._unavailable(error) from error
        try:
            return self._once(method, target, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._unavailable(error) from error

    def _once(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        self._connection.request(method, target, body=body, headers=headers)
        return self._connection.getresponse()

    def _unavailable(self, error: Exception) -> ServiceUnavailable:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)
        return ServiceUnavailable(f"the server at {self.address.url} does not answer: {why}")

    def json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        value: object = None,
    ) -> Any:
        """Sends a JSON value, or nothing, and answers the JSON value that comes back."""
        body = None if value is None else json.dumps(value).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self.request(method, path, query=query, body=body, headers=headers)
        try:
            return json.loads(answer.read())
        except ValueError as error:
            raise ServiceError(f"{self.address.url}{path}: the answer is not JSON") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error

    def lines(self, path: str, query: Mapping[str, str | int] | None = None) -> Iterator[bytes]:
        """The lines of an answer as they come, without their ends; blank ones are left out."""
        answer = self.request("GET", path, query=query)
        try:
            while line := answer.body.readline(_LINE_BYTES_MAX):
                if line.strip():
                    yield line.rstrip(b"\r\n")
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error
        finally:
            self.close()

    def interrupt(self) -> None:
        """From another thread: ends a request that waits."""
        connected = self._connection.sock
        if connected is not None:
            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def told_error(told: Mapping[str, Any]) -> ForebayError:
    """The error that a server tells: `{"kind": ..., "message": ..., ...}`."""
    message = str(told.get("message", "the server told an error without words"))
    kind = getattr(errors, str(told.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, ForebayError)):
        return ServiceError(message)
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(
        {name: each for name, each in told.items() if name not in {"kind", "message"}}
    )
    return error


def _error_of(url: str, status: int, body: bytes) -> ForebayError:
    try:
        told = json.loads(body)["error"]
        return told_error(told)
    except (ValueError, KeyError, TypeError):
        return ServiceError(f"{url} answered with status {status}, and is no Forebay server")
