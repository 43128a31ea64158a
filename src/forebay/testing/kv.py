"""`FaultKv`: any catalog, with calls that fail as a test plans them.

>>> from forebay import Catalog, CloudStore, Store, StoreSettings
>>> from forebay.catalog.sqlite import SqliteKv
>>> from forebay.errors import ServiceUnavailable
>>> from forebay.objects.memory import MemoryBackend
>>> from forebay.testing import CrashDisk
>>> kv, objects = FaultKv(SqliteKv(None)), CloudStore(MemoryBackend())
>>> settings = StoreSettings(data="/data")
>>> store = Store(settings, disk=CrashDisk(), catalog=Catalog(kv), store=objects)
>>> topic = store.topic("orders")
>>> _ = topic.append(b"one", durability="synced")
>>> kv.fail("commit")
>>> try:
...     topic.upload()
... except ServiceUnavailable:
...     print("try again")
try again
>>> len(topic.upload())
1
>>> store.close()

A call that fails raises ServiceUnavailable and does nothing; with `applied=True` it is carried out
first, as when a response is lost. `before` is called with each operation's name before it runs, on
the caller's thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from forebay.catalog.kv import Compare, Entry, Kv, Put, Remove, Watch
from forebay.errors import ServiceUnavailable

READS: Final = ("get", "range", "revision", "watch")
OPERATIONS: Final = (*READS, "commit", "grant", "keep_alive", "revoke")


class FaultKv:
    """A `Kv` in front of `inner`. Thread-safe."""

    def __init__(self, inner: Kv, before: Callable[[str], None] | None = None) -> None:
        self.inner = inner
        self.before = before
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._faults: dict[tuple[str, int], bool] = {}

    def fail(self, operation: str, *, at: int = 1, times: int = 1, applied: bool = False) -> None:
        """Makes `times` calls fail, beginning with the `at`-th from now.

        With `applied` they are carried out before they fail.
        """
        assert operation in OPERATIONS, operation
        assert at >= 1
        with self._lock:
            first = self._counts[operation] + at
            for number in range(first, first + times):
                self._faults[operation, number] = applied

    def fail_reads(self, times: int = 1) -> None:
        """Makes the next `times` calls of each reading operation fail."""
        for operation in READS:
            self.fail(operation, times=times)

    def heal(self) -> None:
        """Cancels the faults that have not happened yet."""
        with self._lock:
            self._faults.clear()

    def count(self, operation: str) -> int:
        """The number of calls so far, including those that failed."""
        with self._lock:
            return self._counts[operation]

    @property
    def name(self) -> str:
        return self.inner.name

    def __repr__(self) -> str:
        return f"FaultKv({self.inner!r})"

    def get(self, key: str) -> Entry | None:
        with self._call("get"):
            return self.inner.get(key)

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        with self._call("range"):
            return self.inner.range(start, end, limit=limit)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        with self._call("commit"):
            return self.inner.commit(compares, writes)

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        with self._call("watch"):
            return self.inner.watch(start, end, after=after)

    def revision(self) -> int:
        with self._call("revision"):
            return self.inner.revision()

    def grant(self, ttl_seconds: float) -> int:
        with self._call("grant"):
            return self.inner.grant(ttl_seconds)

    def keep_alive(self, lease: int) -> float:
        with self._call("keep_alive"):
            return self.inner.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        with self._call("revoke"):
            self.inner.revoke(lease)

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        if self.before is not None:
            self.before(operation)
        with self._lock:
            self._counts[operation] += 1
            applied = self._faults.pop((operation, self._counts[operation]), None)
        if applied is False:
            raise ServiceUnavailable(f"{self.name}: no connection (a fault of the test)")
        yield
        if applied:
            raise ServiceUnavailable(f"{self.name}: no response in time (a fault of the test)")
