"""`MemoryBackend`: objects in the memory of this process, for tests and for `backend: memory`.

Objects are lost when the process ends. `connect` returns the same backend for the same root.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import ObjectMissing, UsageError
from forebay.format.layout import Buffer
from forebay.objects.backend import (
    ObjectMeta,
    WriterScope,
    check_key,
    check_metadata,
    check_range,
    ends_early,
    require_etag,
    taken,
)


class _Stored(NamedTuple):
    data: bytes
    meta: ObjectMeta


class MemoryWriter(WriterScope):
    def __init__(
        self, backend: MemoryBackend, key: str, metadata: dict[str, str], create: bool
    ) -> None:
        self._backend = backend
        self._key = key
        self._metadata = metadata
        self._create = create
        self._data: bytearray | None = bytearray()

    def write(self, data: Buffer) -> None:
        self._open_data().extend(data)

    def close(self) -> ObjectMeta:
        data = self._open_data()
        self._data = None
        return self._backend.publish(self._key, bytes(data), self._metadata, self._create)

    def abort(self) -> None:
        self._data = None

    def _open_data(self) -> bytearray:
        if self._data is None:
            raise UsageError(f"the writer of {self._key!r} is closed or aborted")
        return self._data

    @property
    def ended(self) -> bool:
        return self._data is None


class MemoryBackend:
    def __init__(self, root: str = "", *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._name = f"memory://{root}"
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Stored] = {}
        self._versions = 0

    @property
    def name(self) -> str:
        return self._name

    def head(self, key: str) -> ObjectMeta:
        return self._stored(key).meta

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        check_range(start, end)
        stored = self._stored(key)
        require_etag(self._name, key, etag, stored.meta.etag)
        data = stored.data
        if end > len(data):
            raise ends_early(self._name, key, start, end)
        return memoryview(data)[start:end]

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        return self.publish(check_key(key), bytes(data), check_metadata(metadata), create)

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,  # noqa: ARG002 - the whole object is in memory anyway
        concurrent_parts: int,  # noqa: ARG002 - as above
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> MemoryWriter:
        return MemoryWriter(self, check_key(key), check_metadata(metadata), create)

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        found = self._stored(source)
        self.publish(check_key(target), found.data, dict(found.meta.metadata), create)

    def delete_object(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        with self._lock:
            found = [stored.meta for stored in self._objects.values()]
        for meta in sorted(found, key=lambda meta: meta.key):
            if meta.key.startswith(prefix) and (after is None or meta.key > after):
                yield ObjectMeta(meta.key, meta.size, meta.etag, meta.modified_ms)

    def close(self) -> None:
        """Does nothing: other users may share the objects."""

    def publish(self, key: str, data: bytes, metadata: dict[str, str], create: bool) -> ObjectMeta:
        with self._lock:
            if create and key in self._objects:
                raise taken(self._name, key)
            self._versions += 1
            etag = f"{self._versions:x}"
            meta = ObjectMeta(key, len(data), etag, self._clock.now_ms(), metadata)
            self._objects[key] = _Stored(data, meta)
        return meta

    def _stored(self, key: str) -> _Stored:
        with self._lock:
            stored = self._objects.get(check_key(key))
        if stored is None:
            raise ObjectMissing(f"{self._name}: there is no object {key!r}")
        return stored
