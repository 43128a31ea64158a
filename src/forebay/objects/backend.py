"""The object store as a port: what a backend has to offer, and what it promises.

Every backend passes `tests/objects/test_backend.py`. The promises that matter:

- An object is there whole, or not at all: `put_object` and `ObjectWriter.close` publish at once,
  and a writer that is aborted, that fails, or whose process dies publishes nothing.
- When `put_object`, `close`, `copy_object` and `delete_object` return, what they did is durable and
  visible to all.
- Errors are those of `forebay.errors`: ObjectMissing, ServiceRefused (asking again is useless),
  ServiceUnavailable (the backend's retries are used up; what was asked may yet have happened).
  None of them, and no log line, contains a secret.
- Everything may be called from many threads at once; a single writer belongs to one thread.

Keys are relative: `storage/topics/default/orders/objects/data-0-9.dnb1`. The bucket and its
prefix are the backend's own. `check_key` and `check_metadata` say what every backend takes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from forebay.errors import ServiceError, ServiceRefused, UsageError
from forebay.format.layout import Buffer
from forebay.limits import KIB, OBJECT_KEY_BYTES_MAX

OBJECT_METADATA_BYTES_MAX: Final = 2 * KIB
"""Names and values together; S3 takes no more."""

_METADATA_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_METADATA_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class CopyUnsupported(ServiceRefused):
    """The server does not copy this object: read it and write it (`CloudStore.copy_or_rewrite`)."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """An object as the store describes it."""

    key: str
    size: int
    etag: str | None
    modified_ms: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What `put_object` or the writer was given; `list` leaves it empty."""


class ObjectWriter(Protocol):
    """One object in the making. Leaving its `with` block by an exception aborts it."""

    def write(self, data: Buffer) -> None:
        """Takes all of `data`; blocks while too many parts are in flight.

        The caller may reuse the buffer when it returns.
        """

    def close(self) -> ObjectMeta:
        """Publishes the object; raises, and publishes nothing, if any part of it failed."""

    def abort(self) -> None:
        """Gives up; nothing will be visible. Idempotent, and harmless after `close`."""

    def __enter__(self) -> ObjectWriter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class WriterScope(ABC):
    """`with` for a writer: an exception aborts it, and else it is closed, unless it was."""

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
    """A place for objects."""

    @property
    def name(self) -> str:
        """What to call it in messages, such as `s3://bucket/prefix`; no secret is in it."""

    def head(self, key: str) -> ObjectMeta:
        """ObjectMissing if there is none."""

    def get_range(self, key: str, start: int, end: int) -> Buffer:
        """Exactly the bytes `start..end`; ServiceError if the object ends before `end`."""

    def put_object(
        self, key: str, data: Buffer, metadata: Mapping[str, str] | None = None
    ) -> ObjectMeta:
        """A small object in one request; replaces one that is there."""

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectWriter:
        """A large object in parts; holds at most `concurrent_parts` + 1 chunks in memory."""

    def copy_object(self, source: str, target: str) -> None:
        """On the server, whole or not at all; ObjectMissing if there is no source."""

    def delete_object(self, key: str) -> None:
        """Idempotent: deleting what is not there succeeds."""

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        """All objects whose key starts with `prefix`, by key, a page at a time.

        `after` leaves out the keys up to and including it. Objects that come or go meanwhile may
        be missed or not.
        """

    def close(self) -> None: ...


def check_key(key: str) -> str:
    """The key as it is; UsageError if not every backend could store it under that name."""
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts:
        raise UsageError(f"the key {key!r} has an empty part, or one that is '.' or '..'")
    if not key.isprintable():  # which refuses NUL, line ends and lone surrogates
        raise UsageError(f"the key {key!r} has characters that cannot be printed")
    if len(key.encode()) > OBJECT_KEY_BYTES_MAX:
        raise UsageError(f"the key {key[:80]!r}... is over {OBJECT_KEY_BYTES_MAX} bytes long")
    return key


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy; UsageError for what does not travel as HTTP headers through all stores alike.

    Azure wants names that are identifiers, S3 makes them lower case, and spaces at the ends of a
    value are lost.
    """
    for name, value in (metadata or {}).items():
        if _METADATA_NAME.fullmatch(name) is None or _METADATA_VALUE.fullmatch(value) is None:
            raise UsageError(
                f"the metadata {name!r} must have a name of a-z, 0-9 and '_', and a value of "
                "printable ASCII that neither starts nor ends with a space"
            )
    found = dict(metadata or {})
    if sum(len(name) + len(value) for name, value in found.items()) > OBJECT_METADATA_BYTES_MAX:
        raise UsageError(f"the metadata are over {OBJECT_METADATA_BYTES_MAX} bytes long")
    return found


def check_range(start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise UsageError(f"the bytes {start}..{end} are no range")


def ends_early(name: str, key: str, start: int, end: int) -> ServiceError:
    """What `get_range` raises for an object that has not all of the range."""
    return ServiceError(f"{name}: the object {key!r} ends before the bytes {start}..{end} do")
