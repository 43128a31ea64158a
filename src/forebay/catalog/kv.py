"""`Kv`: what the catalog needs of a metadata store, as etcd has it, and `ObservedKv` around one.

An ordered map with transactions, leases and watches. Every implementation passes
`tests/catalog/test_kv.py`:

- A key's revision changes with every write to it and is never reused; revisions only grow.
- `commit` applies all of its writes at one moment, or none, and what it applied is durable when it
  returns. If it raises ServiceUnavailable nobody knows: read, and try again.
- A key put with a lease goes away when the lease ends, and not before.
- Values are bytes up to `CATALOG_VALUE_BYTES_MAX`; a transaction has at most
  `CATALOG_OPERATIONS_MAX` writes. A call that cannot be right (too large, a key twice in one
  transaction) is a UsageError, and nothing was sent. After `close` every call raises LogClosed.

What a caller gets wrong: a lease is alive as long as the server says so. The holder may count on
what `keep_alive` returns only from the moment *before* the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from forebay.errors import ServiceError, UsageError
from forebay.limits import CATALOG_OPERATIONS_MAX, CATALOG_VALUE_BYTES_MAX, KIB, MIB
from forebay.metrics import SECONDS, Counter, Histogram

ABSENT: Final = 0
"""The revision of a key that is not there."""

KEY_BYTES_MAX: Final = 2 * KIB
COMMIT_BYTES_MAX: Final = 1472 * KIB
"""Keys and values of one transaction together; etcd refuses requests over 1.5 MiB."""

_OPERATION_BYTES: Final = 64
"""What a request says about an operation besides its key and value, at most."""

CATALOG_SECONDS = Histogram(
    "forebay_catalog_seconds",
    "Time that a request to the catalog took, failed ones too.",
    SECONDS,
    ("operation", "backend"),
)
CATALOG_ERRORS = Counter(
    "forebay_catalog_errors_total",
    "Requests that the catalog did not carry out, or did not answer.",
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
    """The transaction counts only if the key still has this revision; ABSENT: if it has none."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Removing what is not there is no error."""

    key: str


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a watch saw: the key's new value, or None if it was removed."""

    key: str
    value: bytes | None
    revision: int


class Watch(Protocol):
    """Changes in order, none left out. Iterating blocks; `close` from any thread ends it.

    Iterating again goes on where the last iteration stopped. A catalog that cannot be reached is
    tried again and again; closing the catalog ends its watches.
    """

    def __iter__(self) -> Iterator[Change]: ...

    def close(self) -> None: ...


class Kv(Protocol):
    """Thread-safe."""

    @property
    def name(self) -> str:
        """What to call it in messages; no secret is in it."""

    def get(self, key: str) -> Entry | None: ...

    def range(self, start: str, end: str, *, limit: int, descending: bool = False) -> list[Entry]:
        """Entries with `start` <= key < `end`, by key, at most `limit`."""

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        """The revision of the writes, or None, with nothing written, if a comparison failed.

        TopicFenced, with nothing written, if a put names a lease that is gone.
        """

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        """Changes to keys in the range with a revision over `after`.

        ServiceError from the iterator if some of them are no longer known (compacted): read the
        range, and watch from there.
        """

    def revision(self) -> int:
        """The newest revision of all."""

    def grant(self, ttl_seconds: float) -> int:
        """A new lease; its number is never 0."""

    def keep_alive(self, lease: int) -> float:
        """Renews the lease; returns the seconds it has from now on. TopicFenced if it is gone."""

    def revoke(self, lease: int) -> None:
        """Ends the lease, and removes its keys. Idempotent."""

    def close(self) -> None: ...


def check_key(key: str) -> bytes:
    """The key as it is stored and compared; UsageError if it cannot be one."""
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
    """The bounds as bytes, None if nothing can be between them; an empty `start` is the first."""
    if limit < 1:
        raise UsageError(f"the limit of a range is {limit}; it must be at least 1")
    low = check_key(start) if start else b""
    high = check_key(end) if end else b""
    return (low, high) if low < high else None


def check_commit(compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> None:
    """UsageError if no catalog would take the transaction."""
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
            raise UsageError(f"a catalog transaction that writes {write.key!r} twice")
        seen.add(write.key)
        total += len(check_key(write.key)) + size + _OPERATION_BYTES
    if total > COMMIT_BYTES_MAX:
        raise UsageError(
            f"a catalog transaction of {total} bytes; at most {COMMIT_BYTES_MAX} are allowed"
        )


class ObservedKv:
    """A `Kv` whose requests are timed and whose failures are counted, under the label `backend`.

    How long a watch waits is not measured.
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

    def range(self, start: str, end: str, *, limit: int, descending: bool = False) -> list[Entry]:
        with self._observed("range"):
            return self._inner.range(start, end, limit=limit, descending=descending)

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
