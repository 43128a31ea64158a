"""`CloudStore`: the object store as every other layer uses it, a backend with metrics.

It counts requests, bytes and seconds by operation. The client library does not report the parts it
sends, so the parts of a writer are computed when it ends: one `put` for up to a chunk, otherwise a
`part` for each chunk and one `complete`. A request that the client retried counts once. A `list`
counts one request for every 1000 objects.

`connect` creates one from settings. It imports the client of remote stores only if one is
configured, because that takes time and most commands do not need it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from forebay.errors import (
    InvalidSetting,
    ObjectExists,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.layout import Buffer
from forebay.limits import MIB
from forebay.metrics import SECONDS, Counter, Gauge, Histogram
from forebay.objects.backend import Backend, CopyUnsupported, ObjectMeta, ObjectWriter, WriterScope
from forebay.objects.local import LocalBackend
from forebay.objects.memory import MemoryBackend
from forebay.settings import CloudSettings

T = TypeVar("T")

REQUESTS: Final = Counter(
    "forebay_store_requests_total",
    "Requests to the object store, by operation and outcome.",
    ("operation", "outcome"),
)
BYTES: Final = Counter(
    "forebay_store_bytes_total",
    "Bytes sent to (up) and received from (down) the object store.",
    ("direction",),
)
REQUEST_SECONDS: Final = Histogram(
    "forebay_store_request_seconds",
    "Duration of requests to the object store; for a writer, of each call.",
    SECONDS,
    ("operation",),
)
HELD: Final = Gauge(
    "forebay_uploader_memory_usage_bytes",
    "Upper bound of the bytes that object writers hold and have not sent yet.",
)
_LIST_PAGE: Final = 1000
_COPY_CHUNK_BYTES: Final = 8 * MIB
_COPY_PARTS: Final = 4
_lock: Final = threading.Lock()
_in_memory: Final[dict[str, MemoryBackend]] = {}


def outcome(error: BaseException) -> str:
    """The value of the label `outcome` for a request that failed."""
    match error:
        case ObjectMissing():
            return "missing"
        case ObjectExists():
            return "exists"
        case ServiceRefused():
            return "refused"
        case ServiceUnavailable():
            return "unavailable"
        case _:
            return "error"


@contextmanager
def _timed(operation: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        REQUEST_SECONDS.observe(time.perf_counter() - started, operation)


@contextmanager
def _counted(operation: str) -> Iterator[None]:
    try:
        with _timed(operation):
            yield
    except Exception as error:
        REQUESTS.add(1, operation, outcome(error))
        raise
    REQUESTS.add(1, operation, "ok")


class CloudWriter(WriterScope):
    """A backend's writer with metrics."""

    def __init__(self, inner: ObjectWriter, chunk_bytes: int, concurrent_parts: int) -> None:
        self._inner = inner
        self._chunk_bytes = chunk_bytes
        self._held_max = chunk_bytes * (concurrent_parts + 1)
        self._held = 0
        self._size = 0
        self._ended = False

    def write(self, data: Buffer) -> None:
        self._do("part", lambda: self._inner.write(data))
        size = memoryview(data).nbytes
        self._size += size
        BYTES.add(size, "up")
        self._hold(min(self._size, self._held_max))

    def _hold(self, size: int) -> None:
        """Updates the gauge with an upper bound: the parts in flight and the next one."""
        if size != self._held:
            HELD.add(size - self._held)
            self._held = size

    def close(self) -> ObjectMeta:
        try:
            meta = self._do("complete", self._inner.close)
        except BaseException:
            self._hold(0)
            raise
        self._ended = True
        self._hold(0)
        if self._size <= self._chunk_bytes:
            REQUESTS.add(1, "put", "ok")
        else:
            REQUESTS.add(-(-self._size // self._chunk_bytes), "part", "ok")
            REQUESTS.add(1, "complete", "ok")
        return meta

    def abort(self) -> None:
        self._ended = True
        self._hold(0)
        self._inner.abort()

    def _do(self, operation: str, function: Callable[[], T]) -> T:
        try:
            with _timed(operation):
                return function()
        except Exception as error:
            REQUESTS.add(1, operation, outcome(error))
            raise

    @property
    def ended(self) -> bool:
        return self._ended


class CloudStore:
    """A `Backend` with metrics, and with methods for whole objects, chunks and copies. Thread-safe.

    Errors and guarantees are those of `Backend`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def local_path(self, key: str) -> Path | None:
        """The file of the object, which may not exist; None unless the store is a directory."""
        backend = self._backend
        return backend.path_of(key) if isinstance(backend, LocalBackend) else None

    def head(self, key: str) -> ObjectMeta:
        with _counted("head"):
            return self._backend.head(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        with _counted("get_range"):
            data = self._backend.get_range(key, start, end, etag=etag)
        BYTES.add(end - start, "down")
        return data

    def open_ranged_reader(
        self, key: str, start: int = 0, *, end: int | None = None, chunk_bytes: int
    ) -> Iterator[Buffer]:
        """Yields the bytes from `start` to `end`, or to the end of the object, in chunks."""
        stop = self.head(key).size if end is None else end
        for at in range(start, stop, chunk_bytes):
            yield self.get_range(key, at, min(at + chunk_bytes, stop))

    def get_object(self, key: str, bytes_max: int) -> Buffer:
        """Returns the whole object; raises ServiceError if it is larger than `bytes_max`."""
        size = self.head(key).size
        if size > bytes_max:
            raise ServiceError(
                f"{self.name}: the object {key!r} has {size} bytes, over the limit of {bytes_max}"
            )
        return self.get_range(key, 0, size) if size else b""

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        with _counted("put"):
            meta = self._backend.put_object(key, data, metadata, create=create)
        BYTES.add(meta.size, "up")
        return meta

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> CloudWriter:
        inner = self._backend.open_streaming_writer(
            key,
            chunk_bytes=chunk_bytes,
            concurrent_parts=concurrent_parts,
            metadata=metadata,
            create=create,
        )
        return CloudWriter(inner, chunk_bytes, concurrent_parts)

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        with _counted("copy"):
            self._backend.copy_object(source, target, create=create)

    def copy_or_rewrite(
        self,
        source: str,
        target: str,
        chunk_bytes: int = _COPY_CHUNK_BYTES,
        concurrent_parts: int = _COPY_PARTS,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        """Copies on the server, or reads and writes the bytes if the server cannot copy.

        Returns the meta of the target.
        """
        try:
            self.copy_object(source, target, create=create)
        except CopyUnsupported:
            return self._rewrite(source, target, chunk_bytes, concurrent_parts, create)
        return self.head(target)

    def delete_object(self, key: str) -> None:
        with _counted("delete"):
            self._backend.delete_object(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        found = self._backend.list(prefix, after=after)
        while True:
            with _counted("list"):
                page = tuple(islice(found, _LIST_PAGE))
            yield from page
            if len(page) < _LIST_PAGE:
                return

    def close(self) -> None:
        self._backend.close()

    def _rewrite(
        self, source: str, target: str, chunk_bytes: int, concurrent_parts: int, create: bool
    ) -> ObjectMeta:
        meta = self.head(source)
        with self.open_streaming_writer(
            target,
            chunk_bytes=chunk_bytes,
            concurrent_parts=concurrent_parts,
            metadata=meta.metadata,
            create=create,
        ) as writer:
            for chunk in self.open_ranged_reader(source, end=meta.size, chunk_bytes=chunk_bytes):
                writer.write(chunk)
            return writer.close()


def connect(settings: CloudSettings, data: Path | None = None) -> CloudStore:
    """Creates the store that the settings describe, in `data` if they name no directory.

    Raises InvalidSetting. Sends nothing: wrong credentials show only at the first request.
    """
    return CloudStore(_backend(settings, data))


def _backend(settings: CloudSettings, data: Path | None) -> Backend:
    if settings.backend in ("fs", "memory") and settings.options:
        raise InvalidSetting(f"options must be empty: the backend {settings.backend} has none")
    if settings.backend == "memory":
        root = settings.root or ""
        with _lock:
            return _in_memory.setdefault(root, MemoryBackend(root))
    if settings.backend == "fs":
        if settings.root is None and data is None:
            raise InvalidSetting(
                "cloud.root is None, and there is no data directory; name a directory for objects"
            )
        return LocalBackend(settings.root or Path(data or "") / "objects")
    from forebay.objects.remote import RemoteBackend

    return RemoteBackend(settings)
