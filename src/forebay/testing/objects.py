"""`FaultBackend`: any object store, with calls that fail or wait as a test plans them.

>>> from forebay import Catalog, CloudStore, Store, StoreSettings
>>> from forebay.catalog.sqlite import SqliteKv
>>> from forebay.objects.memory import MemoryBackend
>>> from forebay.testing import CrashDisk
>>> backend = FaultBackend(MemoryBackend())
>>> catalog, objects = Catalog(SqliteKv(None)), CloudStore(backend)
>>> store = Store(StoreSettings(data="/data"), disk=CrashDisk(), catalog=catalog, store=objects)
>>> topic = store.topic("orders")
>>> _ = topic.append(b"one", durability="synced")
>>> backend.inject(ObjectFault("complete"))
>>> try:
...     topic.upload()
... except ServiceUnavailable:
...     print("try again")
try again
>>> len(topic.upload())
1
>>> store.close()

An `ObjectFault` says which calls fail, with which error, after how many that pass, and how often.
With `when="after"` the call is carried out before it fails, as when a response is lost. A hook is
called before or after each call of an operation, and may block, so a test can choose the order in
which threads continue, or simulate a slow store:

>>> import time
>>> backend.hook("get_range", lambda key: time.sleep(0.03))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from forebay.errors import ServiceUnavailable
from forebay.format.layout import Buffer
from forebay.objects.backend import Backend, ObjectMeta, ObjectWriter, WriterScope

ObjectOperation: TypeAlias = Literal[
    "any",
    "head",
    "get_range",
    "put",
    "open_writer",
    "write",
    "complete",
    "abort",
    "copy",
    "delete",
    "list",
]
When: TypeAlias = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class ObjectFault:
    """The calls that fail: those of `operation` whose key has `key` in it, after `skip` of them.

    `write`, `complete` and `abort` are the calls of a writer; `complete` is its `close`. A copy
    matches by its source or its target. `times=None` never ends.
    """

    operation: ObjectOperation
    error: type[Exception] = ServiceUnavailable
    when: When = "before"
    key: str | None = None
    skip: int = 0
    times: int | None = 1

    def __post_init__(self) -> None:
        if self.operation not in get_args(ObjectOperation):
            raise ValueError(f"no such operation: {self.operation!r}")

    def matches(self, operation: ObjectOperation, keys: tuple[str, ...]) -> bool:
        if self.operation not in ("any", operation):
            return False
        return self.key is None or any(self.key in key for key in keys)


class _Planned:
    """A fault, and how many of its calls are left."""

    __slots__ = ("fault", "left", "skip")

    def __init__(self, fault: ObjectFault) -> None:
        self.fault = fault
        self.skip = fault.skip
        self.left = fault.times

    def strikes(self) -> bool:
        """Counts one matching call, and says whether it fails."""
        if self.skip:
            self.skip -= 1
            return False
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True, slots=True)
class _Hook:
    operation: ObjectOperation
    when: When
    call: Callable[[str], None]


class FaultWriter(WriterScope):
    def __init__(self, backend: FaultBackend, inner: ObjectWriter, key: str) -> None:
        self._backend = backend
        self._inner = inner
        self._key = key
        self._ended = False

    def write(self, data: Buffer) -> None:
        with self._backend.struck("write", self._key):
            self._inner.write(data)

    def close(self) -> ObjectMeta:
        """A fault before it aborts the object; one after it leaves it published."""
        try:
            with self._backend.struck("complete", self._key):
                meta = self._inner.close()
        except BaseException:
            self._ended = True
            self._inner.abort()
            raise
        self._ended = True
        return meta

    def abort(self) -> None:
        self._ended = True
        with self._backend.struck("abort", self._key):
            self._inner.abort()

    @property
    def ended(self) -> bool:
        return self._ended


class FaultBackend:
    """A `Backend` in front of `inner`. Thread-safe."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.fired = 0
        """How many calls a fault has made to raise."""
        self._calls: list[tuple[ObjectOperation, str]] = []
        self._planned: list[_Planned] = []
        self._hooks: list[_Hook] = []
        self._lock = threading.Lock()

    def inject(self, fault: ObjectFault) -> None:
        """Adds to the plan; of several faults that match a call, the first injected strikes."""
        with self._lock:
            self._planned.append(_Planned(fault))

    def hook(
        self, operation: ObjectOperation, call: Callable[[str], None], *, when: When = "before"
    ) -> None:
        """`call` gets the key, in the thread of the operation, and may block or raise."""
        with self._lock:
            self._hooks.append(_Hook(operation, when, call))

    def clear(self) -> None:
        """Forgets the plan and the hooks; the counts stay."""
        with self._lock:
            self._planned.clear()
            self._hooks.clear()

    def calls(self, operation: ObjectOperation = "any") -> int:
        """The number of calls of an operation so far, including those that failed."""
        with self._lock:
            return sum(operation in ("any", done) for done, _ in self._calls)

    @property
    def name(self) -> str:
        return self.inner.name

    def head(self, key: str) -> ObjectMeta:
        with self.struck("head", key):
            return self.inner.head(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        with self.struck("get_range", key):
            return self.inner.get_range(key, start, end, etag=etag)

    def put_object(
        self,
        key: str,
        data: Buffer,
        metadata: Mapping[str, str] | None = None,
        *,
        create: bool = False,
    ) -> ObjectMeta:
        with self.struck("put", key):
            return self.inner.put_object(key, data, metadata, create=create)

    def open_streaming_writer(
        self,
        key: str,
        *,
        chunk_bytes: int,
        concurrent_parts: int,
        metadata: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> FaultWriter:
        with self.struck("open_writer", key):
            inner = self.inner.open_streaming_writer(
                key,
                chunk_bytes=chunk_bytes,
                concurrent_parts=concurrent_parts,
                metadata=metadata,
                create=create,
            )
        return FaultWriter(self, inner, key)

    def copy_object(self, source: str, target: str, *, create: bool = False) -> None:
        with self.struck("copy", source, target):
            self.inner.copy_object(source, target, create=create)

    def delete_object(self, key: str) -> None:
        with self.struck("delete", key):
            self.inner.delete_object(key)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        with self.struck("list", prefix):
            yield from self.inner.list(prefix, after=after)

    def close(self) -> None:
        self.inner.close()

    @contextmanager
    def struck(self, operation: ObjectOperation, *keys: str) -> Iterator[None]:
        """Around a call: hooks, then a fault; the call; hooks, then a fault."""
        with self._lock:
            self._calls.append((operation, keys[0]))
            fault = self._strike(operation, keys)
        self._run_hooks(operation, "before", keys[0])
        if fault is not None and fault.when == "before":
            raise fault.error(f"{self.name}: a planned fault of {operation} of {keys[0]!r}")
        yield
        self._run_hooks(operation, "after", keys[0])
        if fault is not None:
            raise fault.error(f"{self.name}: a planned fault after {operation} of {keys[0]!r}")

    def _strike(self, operation: ObjectOperation, keys: tuple[str, ...]) -> ObjectFault | None:
        for planned in self._planned:
            if planned.fault.matches(operation, keys) and planned.strikes():
                self.fired += 1
                return planned.fault
        return None

    def _run_hooks(self, operation: ObjectOperation, when: When, key: str) -> None:
        with self._lock:
            hooks = [
                hook.call
                for hook in self._hooks
                if hook.when == when and hook.operation in ("any", operation)
            ]
        for call in hooks:
            call(key)
