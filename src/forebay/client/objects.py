"""`ServerBackend`: a server's object store through the server.

For objects that are files on the server's machine, and for the rows of a sink that was told of a
server and of nothing else. It offers what tasks need: looking, reading and writing. Listing,
copying and deleting are for those who own the objects.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any, Final, NoReturn
from urllib.parse import quote

from forebay.client import ServerClient
from forebay.errors import (
    ForebayError,
    ObjectMissing,
    OffsetOutOfRange,
    ServiceError,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.objects.backend import (
    ObjectMeta,
    WriterScope,
    check_key,
    check_metadata,
    check_range,
    ends_early,
)
from forebay.settings import ServerAddress

# ---- `ServerClients`: connections to one server, kept for the next request, for many threads.


_SECONDS_MAX: Final = 60.0
"""Of silence."""
_KEPT_MAX: Final = 8


class ServerClients:
    """Thread-safe. A connection is its borrower's alone; after an error it is closed."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[ServerClient] = []
        self._pid = os.getpid()

    @contextmanager
    def borrowed(self, *, fresh: bool = False) -> Iterator[ServerClient]:
        """A client, whose answers are to be read to their end inside the block.

        An answer that breaks off is ServiceUnavailable. A kept connection may have been closed by
        the server; what cannot be sent twice wants a fresh one.
        """
        client = self._new() if fresh else self._take()
        whole = False
        try:
            yield client
            whole = True
        except ForebayError:
            raise
        except (OSError, HTTPException) as error:
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
            if self._pid != os.getpid():  # a connection of the process that forked is its own
                self._idle, self._pid = [], os.getpid()
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> ServerClient:
        return ServerClient(self.address, timeout_seconds=_SECONDS_MAX)

    def _give_back(self, client: ServerClient) -> None:
        with self._lock:
            if len(self._idle) < _KEPT_MAX:
                self._idle.append(client)
                return
        client.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()


# ---- server_objects


_MODIFIED: Final = "Forebay-Modified-Ms"
_PIECES_MAX: Final = 4
"""Between the one who writes an object and the one who sends it."""
_LOOK_SECONDS: Final = 0.2


def _path_of(key: str) -> str:
    return f"/v1/objects/{quote(check_key(key))}"


class ServerBackend:
    """The operations of `Backend` that tasks need. Thread-safe."""

    def __init__(self, address: ServerAddress) -> None:
        self._clients = ServerClients(address)
        self._name = f"{address.url}/v1/objects"

    @property
    def name(self) -> str:
        return self._name

    def head(self, key: str) -> ObjectMeta:
        path = _path_of(key)
        try:
            with self._clients.borrowed() as client:
                answer = client.request("HEAD", path)
                answer.read()
        except ObjectMissing:
            raise self._missing(key) from None
        found = answer.headers
        etag = found["ETag"]
        return ObjectMeta(
            key,
            int(found["Content-Length"]),
            None if etag is None else etag.strip('"'),
            int(found[_MODIFIED]),
        )

    def get_range(self, key: str, start: int, end: int) -> Buffer:
        check_range(start, end)
        if start == end:
            if self.head(key).size < end:
                raise ends_early(self._name, key, start, end)
            return b""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        try:
            with self._clients.borrowed() as client:
                answer = client.request("GET", _path_of(key), headers=headers)
                data = answer.read(end - start)
                told = answer.headers["Content-Range"]
        except ObjectMissing:
            raise self._missing(key) from None
        except OffsetOutOfRange:
            raise ends_early(self._name, key, start, end) from None
        if len(data) < end - start:
            size = int(told.rpartition("/")[2])
            if size < end:
                raise ends_early(self._name, key, start, end)
            raise ServiceUnavailable(f"{self._name}: {key!r}: an answer that broke off")
        return data

    def put(self, key: str, data: Buffer, metadata: Mapping[str, str] | None = None) -> ObjectMeta:
        _require_none(metadata)
        with self._clients.borrowed() as client:
            answer = client.request("PUT", _path_of(key), body=bytes(data))
            return _meta_of(answer.read())

    def open_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,  # noqa: ARG002 - one stream is all there is
        metadata: Mapping[str, str] | None = None,
    ) -> ServerWriter:
        _require_none(metadata)
        return ServerWriter(self._clients, key, chunk_bytes)

    def copy(self, source: str, target: str) -> None:  # noqa: ARG002  # as the protocol has it
        self._refused("copies")

    def delete(self, key: str) -> None:  # noqa: ARG002  # as the protocol has it
        self._refused("deletes")

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:  # noqa: ARG002
        self._refused("lists")

    def close(self) -> None:
        self._clients.close()

    def _missing(self, key: str) -> ObjectMissing:
        return ObjectMissing(f"{self._name}: there is no object {key!r}")

    def _refused(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._name}: nobody {what} objects through a server: do it where they are"
        )


def _require_none(metadata: Mapping[str, str] | None) -> None:
    if check_metadata(metadata):
        raise UsageError("objects that are put through a server have no metadata")


def _meta_of(told: bytes) -> ObjectMeta:
    try:
        found: Any = json.loads(told)
        return ObjectMeta(
            str(found["key"]), int(found["size"]), found["etag"], int(found["modified_ms"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the server's answer tells of no object: {error!r}") from error


class _Broken(Exception):
    """Ends the sending of an object that is not to be."""


class ServerWriter(WriterScope):
    """One object on its way to the server, which shows it when its last byte has come.

    A thread sends what `write` hands it, some pieces at most between the two. An aborted one
    breaks the request off, so that the server never sees its end.
    """

    def __init__(self, clients: ServerClients, key: str, chunk_bytes: int) -> None:
        self._key = key
        self._path = _path_of(key)
        self._clients = clients
        self._chunk_bytes = max(chunk_bytes // _PIECES_MAX, 1)
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_PIECES_MAX)
        self._gathered = bytearray()
        self._aborted = threading.Event()
        self._ended = False
        self._result: ObjectMeta | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def write(self, data: Buffer) -> None:
        self._require_open()
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), self._chunk_bytes):
                self._gathered += view[start : start + self._chunk_bytes]
                if len(self._gathered) >= self._chunk_bytes:
                    self._hand_over()

    def close(self) -> ObjectMeta:
        self._require_open()
        try:
            self._hand_over()
            self._put(None)
            assert self._thread is not None
            self._thread.join()
            self._require_well()
        finally:
            self.abort()
        assert self._result is not None
        return self._result

    def abort(self) -> None:
        self._ended = True
        self._gathered = bytearray()
        self._aborted.set()
        if self._thread is not None:
            self._thread.join()

    def _require_open(self) -> None:
        if self._ended:
            raise UsageError(f"the writer of {self._key!r} is closed")

    def _require_well(self) -> None:
        if self._error is not None:
            raise self._error

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="put", daemon=True)
            self._thread.start()
        if self._gathered:
            piece, self._gathered = bytes(self._gathered), bytearray()
            self._put(piece)

    def _put(self, piece: bytes | None) -> None:
        """Waits while the pieces are too many, unless the sending has ended."""
        while True:
            self._require_well()
            try:
                self._pieces.put(piece, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return

    # -- the thread -----------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            with self._clients.borrowed(fresh=True) as client:
                answer = client.request("PUT", self._path, body=self._body())
                self._result = _meta_of(answer.read())
        except _Broken:
            pass
        except BaseException as error:  # noqa: BLE001  # told to the one who writes
            self._error = error

    def _body(self) -> Iterator[bytes]:
        while True:
            if self._aborted.is_set():
                raise _Broken
            try:
                piece = self._pieces.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if piece is None:
                return
            yield piece
