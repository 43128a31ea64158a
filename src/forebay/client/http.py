"""`ServerClient`: one kept-alive connection to a server. `ClientPool`: several, for many threads.

An error that the server sends (`{"kind": ..., "message": ..., ...}`) is raised as the class that
the server raised, with its fields and the `status` of the response. If the server does not respond
or the response breaks off, ServiceUnavailable is raised.

A client that knows its store asks each new connection for the store before it sends anything else,
the token included. After a server has ended, another program may listen on its port.

Beware: after ServiceUnavailable the request may have been carried out. Ask `took_nothing` whether
it certainly was not. A request is sent a second time only if the server had closed the idle
connection, and never if it is a POST or streams its body.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from forebay import errors
from forebay.errors import (
    CommitRefused,
    DiskError,
    ForebayError,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.names import TopicName, managed_ledger_name
from forebay.limits import KIB, MIB
from forebay.settings import ServerAddress

STORE_HEADER: Final = "Forebay-Store"
"""In a request: the id of the store that it is meant for."""
INSTANCE_HEADER: Final = "Forebay-Instance"
"""In a response: the instance (run) of the server that sent it."""
_SILENT: Final[Mapping[int, type[ForebayError]]] = {
    401: ServiceRefused,
    403: ServiceRefused,
    404: ObjectMissing,
    409: CommitRefused,
    412: ServiceUnavailable,
    503: ServiceUnavailable,
}
"""The errors of responses without a body, such as those to HEAD."""
_REFUSED: Final = {400, 401, 403, 404, 413, 415}
"""Statuses with which the server refuses a request before it does anything."""
_BODY_BYTES_MAX: Final = 64 * MIB
_ERROR_BYTES_MAX: Final = 1 * MIB
_LINE_BYTES_MAX: Final = 256 * MIB
_IDENTITY_BYTES_MAX: Final = 64 * KIB
_HEALTH_PATH: Final = "/healthz"
_READ_BYTES: Final = 64 * KIB
_GONE: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
_POOL_SILENCE_SECONDS: Final = 60.0
"""How long a client of a pool waits for the next bytes."""
_POOL_IDLE_MAX: Final = 8
_Error = TypeVar("_Error", bound=ForebayError)


def topic_path(topic: TopicName, *rest: str) -> str:
    """Returns `/v1/topics/<namespace>/<topic>/...` with each part quoted."""
    parts = ("v1", "topics", topic.namespace, topic.topic, *rest)
    return "/" + "/".join(quote(part, safe="") for part in parts)


def pulsar_path(topic: TopicName, *rest: str) -> str:
    """Returns `/admin/v2/persistent/<tenant>/<namespace>/<topic>/...` with each part quoted."""
    name = managed_ledger_name(topic).split("/")
    parts = ("admin", "v2", "persistent", name[0], name[1], name[3])
    return "/" + "/".join([*parts, *(quote(part, safe="") for part in rest)])


@dataclass(slots=True)
class Response:
    """A response whose body has not been read yet. Read all of it, or close the client."""

    status: int
    headers: http.client.HTTPMessage
    body: http.client.HTTPResponse

    def read(self, bytes_max: int = _BODY_BYTES_MAX) -> bytes:
        """Returns the whole body.

        Raises HTTPException or OSError if it breaks off, and ServiceError if it is too large.
        """
        data = self.body.read(bytes_max + 1)
        if len(data) <= bytes_max and self.body.length:  # read(n) does not raise this itself
            raise http.client.IncompleteRead(data, self.body.length)
        if len(data) > bytes_max:
            self.body.close()
            raise ServiceError(f"the server's response is larger than {bytes_max} bytes")
        return data


class ServerClient:
    """One connection to a server, opened by the first request. One request at a time.

    Not thread-safe, except `interrupt`. Raises UsageError if the address is invalid.
    """

    def __init__(self, address: ServerAddress, *, timeout_seconds: float = 60) -> None:
        self.address = address
        self.instance: str | None = None
        """The instance of the server that sent the last response, if it named one."""
        self._connection, self._path = _connection(address, timeout_seconds)
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._interrupted = False

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | list[str]] | None = None,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sends a request and returns the response if its status is below 400.

        Otherwise raises the error that the server sent. Raises ServiceUnavailable if no response
        came.
        """
        target = self._path + path + (f"?{urlencode(query, doseq=True)}" if query else "")
        sent = dict(headers or {})
        if self.address.token is not None:
            sent["Authorization"] = f"Bearer {self.address.token}"
        if self.address.store is not None:
            sent[STORE_HEADER] = self.address.store
        response = self._send(method, target, body, sent)
        if response.status >= 400:
            raise self._error_of(response)
        return Response(response.status, response.headers, response)

    def identity(self) -> ServerIdentity:
        """Asks which server is at the address, without sending the token.

        Raises ServiceError if it is not a Forebay server.
        """
        response = self._send("GET", self._path + _HEALTH_PATH, None, {})
        try:
            found = _read_identity(response)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unavailable(error) from error
        if found is None:
            self.close()
            raise not_sent(
                ServiceError(f"what responds at {self.address.url} is not a Forebay server")
            )
        return found

    def pin(self) -> None:
        """Ties the client to the store that the server serves now, unless it already has one."""
        if self.address.store is None:
            self.address = replace(self.address, store=self.identity().store)

    def _error_of(self, response: http.client.HTTPResponse) -> ForebayError:
        try:
            body = response.read(_ERROR_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return self._unavailable(error)
        return response_error(self.address.url, response.status, body)

    def _send(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        if self._response is not None and not self._response.isclosed():
            self.close()  # the rest of the last response would be read as the next one
        elif self._connection.sock is not None and _was_closed(self._connection.sock):
            self.close()
        reused = self._connection.sock is not None
        again = method != "POST" and (body is None or isinstance(body, bytes))
        try:
            return self._once(method, target, body, headers)
        except _GONE as error:
            # The server closes idle connections, so this does not mean that it has ended.
            if self._interrupted or not reused or not again:
                raise self._unavailable(error) from error
        return self._once(method, target, body, headers, last=True)

    def _once(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
        *,
        last: bool = False,
    ) -> http.client.HTTPResponse:
        """Makes one attempt. Raises an error of `_GONE` as it is, so that the caller can try again.

        With `last`, that is ServiceUnavailable too.
        """
        asked = False
        try:
            self._response = None
            self._open()
            asked = True
            self._ask(method, target, body, headers)
            self._response = self._connection.getresponse()
            self.instance = self._response.headers.get(INSTANCE_HEADER)
        except ssl.SSLError as error:
            self.close()
            refused = ServiceRefused(f"{self.address.url}: {error}; check ca_file")
            raise (refused if asked else not_sent(refused)) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if asked and isinstance(error, _GONE) and not last:
                raise
            away = self._unavailable(error)
            raise (away if asked else not_sent(away)) from error
        except BaseException:  # the connection may have half a response left: do not reuse it
            self.close()
            raise
        return self._response

    def _open(self) -> None:
        """Connects if necessary, and checks that the server has the right store."""
        if self._connection.sock is None:
            self._connection.connect()
            self._raise_if_interrupted()
            if self.address.store is not None:
                self._require_store(self.address.store)
        self._raise_if_interrupted()

    def _require_store(self, store: str) -> None:
        url = self.address.url
        self._connection.request("GET", self._path + _HEALTH_PATH)
        found = _read_identity(self._connection.getresponse())
        if found is None:
            raise not_sent(
                ServiceUnavailable(
                    f"what responds at {url} now is not a Forebay server; nothing was sent to it"
                )
            )
        if found.store != store:
            raise not_sent(
                ServiceUnavailable(
                    f"the server at {url} now serves another store ({found.store}, not {store}); "
                    "nothing was sent to it"
                )
            )
        if self._connection.sock is None:
            raise ConnectionAbortedError("it closes the connection after each response")

    def _raise_if_interrupted(self) -> None:
        self._socket = self._connection.sock
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")

    def _ask(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
    ) -> None:
        try:
            self._connection.request(method, target, body=body, headers=headers)
        except (ConnectionResetError, BrokenPipeError):
            # A server that refuses a body responds before it has read all of it.
            if body is None or not self._has_responded():
                raise

    def _has_responded(self) -> bool:
        connected = self._connection.sock
        if connected is None or isinstance(connected, ssl.SSLSocket):
            return False
        try:
            return bool(connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _unavailable(self, error: BaseException) -> ServiceUnavailable:
        why = "timed out" if isinstance(error, TimeoutError) else str(error) or repr(error)
        if self._interrupted:
            why = "interrupted"
        return ServiceUnavailable(f"the server at {self.address.url} does not respond: {why}")

    def json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | list[str]] | None = None,
        value: object = None,
    ) -> Any:
        """Sends a JSON value, or nothing, and returns the JSON value of the response."""
        body = None if value is None else json.dumps(value).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        response = self.request(method, path, query=query, body=body, headers=headers)
        try:
            return json.loads(response.read())
        except ValueError as error:
            raise ServiceError(f"{self.address.url}{path}: the response is not JSON") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unavailable(error) from error

    def lines(
        self, path: str, query: Mapping[str, str | int | list[str]] | None = None
    ) -> Iterator[bytes]:
        """Yields the lines of a response as they arrive, without line ends; skips blank lines.

        The last line needs no line end. If the response breaks off, ServiceUnavailable is raised
        and an incomplete last line is dropped.
        """
        response = self.request("GET", path, query=query)
        parts: list[bytes] = []
        held = 0
        try:
            while data := response.body.read1(_READ_BYTES):
                head, *lines = data.split(b"\n")
                parts.append(head)
                held += len(head)
                if held > _LINE_BYTES_MAX:
                    raise ServiceError(f"a line of the response is over {_LINE_BYTES_MAX} bytes")
                if lines:
                    lines[:0], parts = [b"".join(parts)], [lines.pop()]
                    held = len(parts[0])
                    for line in lines:
                        if line.strip():
                            yield line.rstrip(b"\r")
            if self._interrupted:
                raise self._unavailable(ConnectionAbortedError())
            if (line := b"".join(parts)).strip():
                yield line.rstrip(b"\r")
        except (OSError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error
        finally:
            self.close()

    def interrupt(self) -> None:
        """Ends the request that is waiting, and every later one. Call it from another thread."""
        self._interrupted = True
        connected = self._socket
        if connected is not None:
            with suppress(OSError):  # already closed
                # Shut down the plain socket: the other thread is using TLS's state.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. The next request opens a new one."""
        self._connection.close()
        self._socket = None

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ClientPool:
    """Connections to one server, kept for later requests and closed after an error. Thread-safe."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[ServerClient] = []
        self._pid = os.getpid()

    @contextmanager
    def borrowed(self, *, fresh: bool = False) -> Iterator[ServerClient]:
        """Lends a client that no other thread uses. Read its responses fully inside the block.

        Raises ServiceUnavailable if a response breaks off. The server may have closed a kept
        connection, so use `fresh` for a request that cannot be sent twice.
        """
        client = self._new() if fresh else self._take()
        whole = False
        try:
            yield client
            whole = True
        except ForebayError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailable(
                f"the server at {self.address.url} broke off: {error!r}"
            ) from error
        finally:
            if whole:
                self._give_back(client)
            else:
                client.close()

    def _take(self) -> ServerClient:
        with self._lock:
            if self._pid != os.getpid():  # after a fork: the connections belong to the parent
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> ServerClient:
        return ServerClient(self.address, timeout_seconds=_POOL_SILENCE_SECONDS)

    def _give_back(self, client: ServerClient) -> None:
        with self._lock:
            if len(self._idle) < _POOL_IDLE_MAX:
                self._idle.append(client)
                return
        client.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What `/healthz` reports: the run of the server, and the id of its store."""

    instance: str
    store: str | None
    """None if the server is of an older version."""


def wire_error(facts: Mapping[str, Any]) -> ForebayError:
    """Returns the error that a server sent, as an instance of the class that it raised.

    An unknown class becomes ServiceError.
    """
    message = str(facts.get("message", "the server sent an error without a message"))
    kind = getattr(errors, str(facts.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, ForebayError)):
        kind = ServiceError
    fields = {name: each for name, each in facts.items() if name not in {"kind", "message"}}
    if issubclass(kind, DiskError):
        number = fields.pop("errno", None)
        error: ForebayError = kind(number if isinstance(number, int) else errno.EIO, message)
    else:
        error = kind.__new__(kind, message)
        error.args = (message,)
    vars(error).update(fields)
    return error


def response_error(url: str, status: int, body: bytes) -> ForebayError:
    """Returns the error of a response with a status of 400 or more."""
    error: ForebayError
    if not body and status in _SILENT:
        error = _SILENT[status](f"{url} responded with status {status}")
    else:
        try:
            error = wire_error(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            error = ServiceError(
                f"{url} responded with status {status}, but is not a Forebay server"
            )
    vars(error)["status"] = status
    return error


def not_sent(error: _Error) -> _Error:
    """Marks an error whose request was never sent, and returns it."""
    vars(error)["taken"] = False
    return error


def took_nothing(error: ForebayError) -> bool:
    """Whether certainly nothing of the request was carried out. If False, it may have been."""
    known = vars(error)
    return known.get("taken") is False or known.get("status") in _REFUSED


def is_busy(error: ForebayError) -> bool:
    """Whether the server refused the request because it is busy. Send it again later."""
    known = vars(error)
    return known.get("taken") is False and known.get("status") == 503


def _connection(
    address: ServerAddress, timeout_seconds: float
) -> tuple[http.client.HTTPConnection, str]:
    """Returns an HTTP connection that is not open yet, and the prefix of the server's paths."""
    try:
        parts = urlsplit(address.url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(
            f"{address.url!r} is not the address of a server; use http://host:port or https://"
        )
    path = parts.path.rstrip("/")
    if parts.scheme == "http":
        plain = http.client.HTTPConnection(parts.hostname, port or 8650, timeout=timeout_seconds)
        plain.auto_open = 0  # connect only in _open, which checks the store first
        return plain, path
    file = None if address.ca_file is None else str(address.ca_file)
    try:
        context = ssl.create_default_context(cafile=file)
    except OSError as error:  # an SSLError is one
        raise UsageError(f"ca_file {file} cannot be read: {error}") from error
    secure = http.client.HTTPSConnection(
        parts.hostname, port or 443, timeout=timeout_seconds, context=context
    )
    secure.auto_open = 0
    return secure, path


def _read_identity(response: http.client.HTTPResponse) -> ServerIdentity | None:
    """Reads a response of `/healthz` to its end; None if it is not from a Forebay server."""
    body = response.read(_IDENTITY_BYTES_MAX)
    if response.status != 200 or response.read(1):
        return None
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("instance"), str):
        return None
    store = found.get("store")
    return ServerIdentity(found["instance"], store if isinstance(store, str) else None)


def _was_closed(connected: socket.socket) -> bool:
    """Whether the server closed an idle connection. Nothing else makes it readable."""
    return bool(select.select([connected], [], [], 0)[0])
