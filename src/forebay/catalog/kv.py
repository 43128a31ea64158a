"""`Kv`: the interface of a metadata store, modelled on etcd, and `ObservedKv`, which measures one.

A `Kv` is an ordered map with transactions, leases and watches. Every implementation passes
`tests/catalog/test_kv.py`:

- Every write gives its key a new revision. Revisions only grow and are never reused.
- `commit` applies all of its writes at once, or none. They are durable when it returns. After
  ServiceUnavailable they may or may not have been applied: read, and try again.
- A key put with a lease is removed when the lease ends, and not before.
- A value has at most `CATALOG_VALUE_BYTES_MAX` bytes, and a transaction at most
  `CATALOG_OPERATIONS_MAX` writes. An invalid call (too large, or the same key twice in one
  transaction) raises UsageError before anything is sent. After `close` every call raises LogClosed.

`respond_by` limits how long the requests of a thread wait, for a caller with many of them.

Beware: the server decides when a lease ends. The seconds that `keep_alive` returns count from the
moment *before* the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from forebay.errors import ServiceError, UsageError
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_VALUE_BYTES_MAX, KIB, MIB
from forebay.metrics import SECONDS, Counter, Histogram

ABSENT: Final = 0
"""The revision of a key that does not exist."""

KEY_BYTES_MAX: Final = 2 * KIB
COMMIT_BYTES_MAX: Final = 1472 * KIB
"""All keys and values of one transaction. etcd refuses requests over 1.5 MiB."""

_OPERATION_BYTES: Final = 64
"""Upper bound of what an operation adds to a request besides its key and value."""

CATALOG_SECONDS = Histogram(
    "forebay_catalog_seconds",
    "Duration of requests to the catalog, failed ones included.",
    SECONDS,
    ("operation", "backend"),
)
CATALOG_ERRORS = Counter(
    "forebay_catalog_errors_total",
    "Requests to the catalog that failed or got no response.",
    ("operation", "backend"),
)

assert CATALOG_VALUE_BYTES_MAX + KEY_BYTES_MAX + _OPERATION_BYTES <= COMMIT_BYTES_MAX
assert COMMIT_BYTES_MAX < MIB + MIB // 2


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    revision: int
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Compare:
    """Requires that the key still has this revision; ABSENT requires that it does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes the key. It is not an error if the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a watch saw. `value` is the new value, or None if the key was removed."""

    key: str
    value: bytes | None
    revision: int


class Watch(Protocol):
    """Yields every change in order. Iterating blocks until the next change.

    `close` ends the iteration and may be called from any thread; closing the catalog does the same.
    A second iteration continues where the first one stopped. While the catalog cannot be reached,
    the watch keeps trying.
    """

    def __iter__(self) -> Iterator[Change]: ...

    def close(self) -> None: ...


class Kv(Protocol):
    """Thread-safe. Every call may raise ServiceError, or LogClosed after `close`."""

    @property
    def name(self) -> str:
        """A name for log lines and errors, without secrets."""

    def get(self, key: str) -> Entry | None: ...

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        """Returns the entries with `start` <= key < `end`, ordered by key, at most `limit`."""

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        """Returns the revision of the writes, or None if a comparison failed.

        Raises TopicFenced if a put names a lease that has ended. In both cases nothing is written.
        """

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        """Watches the keys in the range, for changes with a revision above `after`.

        The iterator raises ServiceError if some of those changes were compacted away: read the
        range again, and watch from its revision.
        """

    def revision(self) -> int:
        """Returns the newest revision of the whole store."""

    def grant(self, ttl_seconds: float) -> int:
        """Returns a new lease; its number is never 0."""

    def keep_alive(self, lease: int) -> float:
        """Renews the lease and returns its new seconds; TopicFenced if it has ended."""

    def revoke(self, lease: int) -> None:
        """Ends the lease and removes its keys. Idempotent."""

    def close(self) -> None: ...


_respond_by: Final[ContextVar[float]] = ContextVar("respond_by", default=float("inf"))


@contextmanager
def respond_by(deadline: float) -> Iterator[None]:
    """Within the block, requests of this thread to a catalog are given up at `deadline`.

    `deadline` is `time.monotonic`. A request that begins after it fails at once. A block inside
    another one can only shorten the time.
    """
    token = _respond_by.set(min(deadline, _respond_by.get()))
    try:
        yield
    finally:
        _respond_by.reset(token)


def deadline_of_request(timeout_seconds: float) -> float:
    """Returns when a request that begins now is given up, by `time.monotonic`."""
    return min(time.monotonic() + timeout_seconds, _respond_by.get())


def check_key(key: str) -> bytes:
    """Returns the key's bytes, by which keys are ordered; UsageError if the key is invalid."""
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the catalog key {key!r} is not Unicode text") from error
    if not encoded or len(encoded) > KEY_BYTES_MAX or b"\0" in encoded:
        raise UsageError(
            f"the catalog key {key[:80]!r} has {len(encoded)} bytes; it must have 1 to "
            f"{KEY_BYTES_MAX}, none of them zero"
        )
    return encoded


def check_range(start: str, end: str, limit: int = 1) -> tuple[bytes, bytes] | None:
    """Returns the bounds as bytes, or None if the range is empty. An empty `start` is allowed."""
    if limit < 1:
        raise UsageError(f"the limit of a range is {limit}; it must be at least 1")
    low = check_key(start) if start else b""
    high = check_key(end) if end else b""
    return (low, high) if low < high else None


def check_commit(compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> None:
    """Raises UsageError if the transaction is too large or writes a key twice."""
    for what, operations in (("comparisons", compares), ("writes", writes)):
        if len(operations) > CATALOG_OPERATIONS_MAX:
            raise UsageError(
                f"a catalog transaction of {len(operations)} {what}; "
                f"at most {CATALOG_OPERATIONS_MAX} are allowed"
            )
    total = sum(len(check_key(compare.key)) + _OPERATION_BYTES for compare in compares)
    seen: set[str] = set()
    for write in writes:
        size = 0 if isinstance(write, Remove) else len(write.value)
        if size > CATALOG_VALUE_BYTES_MAX:
            raise UsageError(
                f"the catalog value of {write.key!r} has {size} bytes; "
                f"at most {CATALOG_VALUE_BYTES_MAX} are allowed"
            )
        if write.key in seen:
            raise UsageError(f"a catalog transaction writes {write.key!r} twice")
        seen.add(write.key)
        total += len(check_key(write.key)) + size + _OPERATION_BYTES
    if total > COMMIT_BYTES_MAX:
        raise UsageError(
            f"a catalog transaction of {total} bytes; at most {COMMIT_BYTES_MAX} are allowed"
        )


class ObservedKv:
    """Wraps a `Kv`: measures the duration of requests and counts errors, labelled `backend`.

    Of a watch only its creation is measured, not the wait for changes.
    """

    def __init__(self, inner: Kv, backend: str) -> None:
        self._inner = inner
        self._backend = backend

    @property
    def name(self) -> str:
        return self._inner.name

    def __repr__(self) -> str:
        return f"ObservedKv({self._inner!r})"

    def get(self, key: str) -> Entry | None:
        with self._observed("get"):
            return self._inner.get(key)

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        with self._observed("range"):
            return self._inner.range(start, end, limit=limit)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        with self._observed("commit"):
            return self._inner.commit(compares, writes)

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        with self._observed("watch"):
            return self._inner.watch(start, end, after=after)

    def revision(self) -> int:
        with self._observed("revision"):
            return self._inner.revision()

    def grant(self, ttl_seconds: float) -> int:
        with self._observed("grant"):
            return self._inner.grant(ttl_seconds)

    def keep_alive(self, lease: int) -> float:
        with self._observed("keep_alive"):
            return self._inner.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        with self._observed("revoke"):
            self._inner.revoke(lease)

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _observed(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ServiceError:
            CATALOG_ERRORS.add(1, operation, self._backend)
            raise
        finally:
            CATALOG_SECONDS.observe(time.perf_counter() - started, operation, self._backend)
