"""`Backend`: the interface of an object store, and what every implementation guarantees.

`tests/objects/test_backend.py` checks the guarantees for every backend:

- An object is visible whole or not at all. A writer that is aborted, fails, or whose process dies
  publishes nothing.
- With `create=True` an object that has the key is not replaced: ObjectExists is raised, and nothing
  is changed. Of several callers at the same time one creates the object. The exceptions, with their
  windows, are in `docs/guide/durability.md`.
- When `put_object`, `close`, `copy_object` or `delete_object` returns, its effect is durable and
  visible to all.
- Errors are those of `forebay.errors`: ObjectMissing, ObjectExists, ServiceRefused (a retry cannot
  help) and ServiceUnavailable (the backend's own retries failed). No error or log line contains a
  secret.
- A backend is thread-safe. A writer is not.

Keys are relative, such as `storage/topics/default/orders/objects/data-0-9.dnb1`; the backend adds
the bucket and its prefix. `check_key` and `check_metadata` define what every backend accepts.

Beware: after ServiceUnavailable the request may have been carried out. ObjectExists may be about
the caller's own object: a client that got no response sends the request again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from forebay.errors import ObjectChanged, ObjectExists, ServiceError, ServiceRefused, UsageError
from forebay.format.layout import Buffer
from forebay.limits import KIB, OBJECT_KEY_BYTES_MAX

OBJECT_METADATA_BYTES_MAX: Final = 2 * KIB
"""Names and values together; the limit of S3."""

_METADATA_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_METADATA_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class CopyUnsupported(ServiceRefused):
    """The server cannot copy this object: use `CloudStore.copy_or_rewrite`."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What the store knows about an object."""

    key: str
    size: int
    etag: str | None
    modified_ms: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata given to `put_object` or the writer; always empty from `list`."""


class ObjectWriter(Protocol):
    """An object that is being written. Not thread-safe.

    Leaving its `with` block closes it; an exception in the block aborts it.
    """

    def write(self, data: Buffer) -> None:
        """Takes all of `data`; waits while too many parts are in flight.

        The caller may reuse the buffer afterwards.
        """

    def close(self) -> ObjectMeta:
        """Publishes the object; if any part failed, raises and publishes nothing."""

    def abort(self) -> None:
        """Discards the written bytes. Idempotent; does nothing after `close`."""

    def __enter__(self) -> ObjectWriter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class WriterScope(ABC):
    """`with` for a writer: aborts it after an exception, otherwise closes it if it is open."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it was closed or aborted."""

    @abstractmethod
    def close(self) -> ObjectMeta: ...

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self.ended:
            self.close()


class Backend(Protocol):
    """An object store. Thread-safe."""

    @property
    def name(self) -> str:
        """The store's name in messages, such as `s3://bucket/prefix`, without secrets."""

    def head(self, key: str) -> ObjectMeta:
        """Returns size, etag and metadata; raises ObjectMissing."""

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        """Returns exactly the bytes `start..end`, `end` excluded.

        Raises ObjectMissing, and ServiceError if the object ends before `end`. With an `etag`,
        raises ObjectChanged if the object has another one; a store that sends none passes.
        """

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        """Writes a small object in one request, replacing one with the same key.

        With `create`, raises ObjectExists if there is one.
        """

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> ObjectWriter:
        """Writes a large object in parts; holds at most `concurrent_parts` + 1 chunks in memory.

        With `create`, `write` or `close` raises ObjectExists if the key is taken.
        """

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        """Copies on the server, atomically; raises ObjectMissing, and CopyUnsupported.

        With `create`, raises ObjectExists if the target exists.
        """

    def delete_object(self, key: str) -> None:
        """Deletes the object. Succeeds if there is none."""

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        """Yields the objects whose key starts with `prefix`, in order of keys, fetched by pages.

        Keys up to and including `after` are left out. An object that is created or deleted
        meanwhile may or may not be listed.
        """

    def close(self) -> None: ...


def check_key(key: str) -> str:
    """Returns the key; raises UsageError unless every backend can store it."""
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts:
        raise UsageError(f"the key {key!r} has an empty part, or one that is '.' or '..'")
    if not key.isprintable():  # refuses NUL, line ends and lone surrogates too
        raise UsageError(f"the key {key!r} has characters that cannot be printed")
    if len(key.encode()) > OBJECT_KEY_BYTES_MAX:
        raise UsageError(
            f"the key {key[:80]!r}... is longer than the limit of {OBJECT_KEY_BYTES_MAX} bytes"
        )
    return key


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a copy; raises UsageError for names and values that not all stores keep unchanged.

    Metadata are HTTP headers: Azure requires names to be identifiers, S3 makes them lower case, and
    spaces at the ends of a value are lost.
    """
    for name, value in (metadata or {}).items():
        if _METADATA_NAME.fullmatch(name) is None or _METADATA_VALUE.fullmatch(value) is None:
            raise UsageError(
                f"the metadata {name!r} must have a name of a-z, 0-9 and '_', and a value of "
                "printable ASCII that neither starts nor ends with a space"
            )
    found = dict(metadata or {})
    if sum(len(name) + len(value) for name, value in found.items()) > OBJECT_METADATA_BYTES_MAX:
        raise UsageError(
            f"the metadata are longer than the limit of {OBJECT_METADATA_BYTES_MAX} bytes"
        )
    return found


def check_range(start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise UsageError(f"{start}..{end} is not a range of bytes")


def taken(name: str, key: str) -> ObjectExists:
    """The error of a creation whose key is taken."""
    return ObjectExists(f"{name}: the object {key!r} exists already; it was not changed")


def require_etag(name: str, key: str, wanted: str | None, found: str | None) -> None:
    """Raises ObjectChanged if the etag is known and not the wanted one."""
    if wanted is not None and found is not None and found != wanted:
        raise ObjectChanged(f"{name}: {key} has the etag {found}, not {wanted}", found)


def ends_early(name: str, key: str, start: int, end: int) -> ServiceError:
    """The error of `get_range` for an object that is shorter than `end`."""
    return ServiceError(f"{name}: the object {key!r} ends before the end of {start}..{end}")
