"""`ServerBackend`: reads and writes a server's objects over HTTP.

It is used for objects that are files on the server's machine, and by sinks that know only the
server's address. It has the operations that tasks need: `head`, reading and writing.

Beware: listing, copying and deleting raise UsageError. Only the process that owns the objects does
that.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn
from urllib.parse import quote

from forebay.client.http import ClientPool
from forebay.errors import (
    ObjectMissing,
    OffsetOutOfRange,
    ServiceError,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.layout import Buffer
from forebay.format.names import object_metadata, topic_of_key
from forebay.objects.backend import (
    ObjectMeta,
    WriterScope,
    check_key,
    check_metadata,
    check_range,
    ends_early,
    require_etag,
)
from forebay.settings import ServerAddress

_MODIFIED: Final = "Forebay-Modified-Ms"
_QUEUE_CHUNKS_MAX: Final = 4
"""The length of the queue between the caller and the thread that sends."""
_POLL_SECONDS: Final = 0.2


def _path_of(key: str) -> str:
    return f"/v1/objects/{quote(check_key(key))}"


class ServerBackend:
    """The operations of `Backend` that tasks need. Thread-safe.

    Objects and staged rows are always created, never replaced, and sidecars are replaced, whatever
    `create` says. Unlike in other stores, creating an object again with the same bytes succeeds.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._pool = ClientPool(address)
        self._name = f"{address.url}/v1/objects"

    @property
    def name(self) -> str:
        return self._name

    def head(self, key: str) -> ObjectMeta:
        path = _path_of(key)
        try:
            with self._pool.borrowed() as client:
                response = client.request("HEAD", path)
                response.read()
        except ObjectMissing:
            raise self._missing(key) from None
        found = response.headers
        return ObjectMeta(
            key,
            int(found["Content-Length"]),
            _etag_of(found["ETag"]),
            int(found[_MODIFIED]),
        )

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        check_range(start, end)
        if start == end:
            if self.head(key).size < end:
                raise ends_early(self._name, key, start, end)
            return b""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        try:
            with self._pool.borrowed() as client:
                response = client.request("GET", _path_of(key), headers=headers)
                data = response.read(end - start)
                content_range = response.headers["Content-Range"]
                found = _etag_of(response.headers["ETag"])
        except ObjectMissing:
            raise self._missing(key) from None
        except OffsetOutOfRange:
            raise ends_early(self._name, key, start, end) from None
        require_etag(self._name, key, etag, found)
        if len(data) < end - start:
            size = int(content_range.rpartition("/")[2])
            if size < end:
                raise ends_early(self._name, key, start, end)
            raise ServiceUnavailable(f"{self._name}: the response for {key!r} broke off; try again")
        return data

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,  # noqa: ARG002 - the server decides by the key
    ) -> ObjectMeta:
        _require_own(key, metadata)
        with self._pool.borrowed() as client:
            response = client.request("PUT", _path_of(key), body=bytes(data))
            return _meta_of(response.read())

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,  # noqa: ARG002 - an object is sent as one stream
        metadata: Mapping[str, str] | None = None,
        create: bool = False,  # noqa: ARG002 - the server decides by the key
    ) -> ServerWriter:
        _require_own(key, metadata)
        return ServerWriter(self._pool, key, chunk_bytes)

    def copy_object(
        self,
        source: str,  # noqa: ARG002 - as the protocol has it
        target: str,  # noqa: ARG002 - as above
        *,
        create: bool = False,  # noqa: ARG002 - as above
    ) -> None:
        self._refused("copied")

    def delete_object(self, key: str) -> None:  # noqa: ARG002  # as the protocol has it
        self._refused("deleted")

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:  # noqa: ARG002
        self._refused("listed")

    def close(self) -> None:
        self._pool.close()

    def _missing(self, key: str) -> ObjectMissing:
        return ObjectMissing(f"{self._name}: there is no object {key!r}")

    def _refused(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._name}: objects cannot be {what} through a server; do it on its machine"
        )


def _etag_of(header: str | None) -> str | None:
    return None if header is None else header.strip('"')


def _require_own(key: str, metadata: Mapping[str, str] | None) -> None:
    """Raises UsageError for metadata that the server does not derive from the key by itself."""
    given, found = check_metadata(metadata), topic_of_key(key)
    if given and (found is None or given != object_metadata(*found)):
        raise UsageError("objects that are written through a server cannot have other metadata")


def _meta_of(body: bytes) -> ObjectMeta:
    try:
        found: Any = json.loads(body)
        return ObjectMeta(
            str(found["key"]), int(found["size"]), found["etag"], int(found["modified_ms"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the server's response describes no object: {error!r}") from error


class _Aborted(Exception):
    """Ends the request of an object whose writer was aborted."""


class ServerWriter(WriterScope):
    """Sends one object to the server. The object exists once `close` has returned.

    A thread sends what `write` puts into a short queue. `abort` breaks the request off before its
    end, and the server then discards what it got. Not thread-safe.
    """

    def __init__(self, pool: ClientPool, key: str, chunk_bytes: int) -> None:
        self._key = key
        self._path = _path_of(key)
        self._pool = pool
        self._chunk_bytes = max(chunk_bytes // _QUEUE_CHUNKS_MAX, 1)
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE_CHUNKS_MAX)
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
                    self._enqueue_gathered()

    def close(self) -> ObjectMeta:
        self._require_open()
        try:
            self._enqueue_gathered()
            self._enqueue(None)
            assert self._thread is not None
            self._thread.join()
            self._raise_if_failed()
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

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _enqueue_gathered(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="put", daemon=True)
            self._thread.start()
        if self._gathered:
            chunk, self._gathered = bytes(self._gathered), bytearray()
            self._enqueue(chunk)

    def _enqueue(self, chunk: bytes | None) -> None:
        """Waits while the queue is full. Raises the error that ended the sending thread."""
        while True:
            self._raise_if_failed()
            try:
                self._queue.put(chunk, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return

    # -- the sending thread ---------------------------------------------------------------------

    def _send(self) -> None:
        try:
            with self._pool.borrowed(fresh=True) as client:
                response = client.request("PUT", self._path, body=self._body())
                self._result = _meta_of(response.read())
        except _Aborted:
            pass
        except BaseException as error:  # noqa: BLE001  # raised by the next call of the writer
            self._error = error

    def _body(self) -> Iterator[bytes]:
        while True:
            if self._aborted.is_set():
                raise _Aborted
            try:
                chunk = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if chunk is None:
                return
            yield chunk
