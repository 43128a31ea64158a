"""A catalog whose requests are timed and whose failures are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forebay.catalog.kv import Compare, Entry, Kv, Put, Remove, Watch
from forebay.errors import ServiceError
from forebay.metrics import SECONDS, Counter, Histogram

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
DESCRIPTOR_WRITES = Counter(
    "forebay_catalog_descriptor_write_total",
    "Descriptors of objects that were written to the catalog.",
)


class ObservedKv:
    """Forwards to `inner`; `backend` is the metrics' label. What a watch waits is not measured."""

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
