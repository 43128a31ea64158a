"""The catalogs that the contract suite runs on, and how time passes on each of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.etcd import EtcdKv
from forebay.catalog.kv import Change, Compare, Kv, ObservedKv, Put, Watch
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import ServiceUnavailable, TopicFenced
from forebay.testing.kv import FaultKv
from support.disks import wait_until
from support.etcd_server import EtcdServer
from support.paths import TESTS

PATIENCE_SECONDS: Final = 60.0
_numbers: Final = itertools.count()


class ManualBoottime:
    """Seconds since a boot that never happened. A test decides when they pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Backend:
    """A catalog, and a prefix in it that no other test uses."""

    kv: Kv
    ttl: float
    boottime: ManualBoottime | None = None
    """None: time passes by itself."""
    location: Sequence[str] = ()
    """How another process opens the same catalog; empty: it cannot."""
    prefix: str = field(default_factory=lambda: f"/test-{time.time_ns()}-{next(_numbers)}/")

    @property
    def end(self) -> str:
        return self.prefix[:-1] + "0"  # the character after the slash

    def key(self, name: str) -> str:
        return self.prefix + name

    def put(self, name: str, value: bytes, lease: int | None = None) -> int:
        revision = self.kv.commit([], [Put(self.key(name), value, lease)])
        assert revision is not None
        return revision

    def value(self, name: str) -> bytes | None:
        entry = self.kv.get(self.key(name))
        return None if entry is None else entry.value

    def names(self) -> list[str]:
        found = self.kv.range(self.prefix, self.end, limit=1000)
        return [entry.key.removeprefix(self.prefix) for entry in found]

    def pass_seconds(self, seconds: float) -> None:
        """Sleeps on a real clock: that time passes is what such a test is about."""
        if self.boottime is None:
            time.sleep(seconds)
        else:
            self.boottime.now += seconds


def sqlite_backend(path: Path | None, wrap: Callable[[Kv], Kv] = lambda kv: kv) -> Backend:
    boottime = ManualBoottime()
    location = () if path is None else ("sqlite", str(path))
    kv = SqliteKv(path, boottime=boottime, timeout_seconds=PATIENCE_SECONDS)
    return Backend(wrap(kv), 10.0, boottime, location)


BACKENDS: Final[dict[str, Callable[[Path], Backend]]] = {
    "sqlite": lambda folder: sqlite_backend(folder / "catalog.db"),
    "memory": lambda _: sqlite_backend(None),
    "faults": lambda folder: sqlite_backend(folder / "catalog.db", FaultKv),
    "observed": lambda folder: sqlite_backend(
        folder / "catalog.db", lambda kv: ObservedKv(kv, "sqlite")
    ),
}


def etcd_backend(server: EtcdServer) -> Backend:
    """A lease of a second is the shortest that etcd grants."""
    kv = EtcdKv([server.endpoint], timeout_seconds=PATIENCE_SECONDS)
    return Backend(kv, 1.0, None, ("etcd", server.endpoint))


def grant_with(kv: Kv, ttl: float, values: Mapping[str, bytes]) -> tuple[int, int]:
    """A lease that has keys with these values, and the revision at which they were put.

    On a busy machine a lease of a second can end before its keys are put: then it takes another.
    """
    while True:
        asked = time.monotonic()
        lease = kv.grant(ttl)
        try:
            put = kv.commit([], [Put(key, value, lease) for key, value in values.items()])
        except TopicFenced:
            assert time.monotonic() - asked >= ttl, "it ended before its time"
        else:
            assert put is not None
            return lease, put


def requested_backend(request: pytest.FixtureRequest, folder: Path) -> Backend:
    """The one that a fixture's parameter names: a name of `BACKENDS`, or `etcd`."""
    if request.param == "etcd":
        return etcd_backend(request.getfixturevalue("etcd"))
    return BACKENDS[request.param](folder)


class Watcher:
    """A thread that collects what a watch tells."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.seen: list[Change] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for change in self.watch:
                self.seen.append(change)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def wait_for(self, count: int) -> list[Change]:
        wait_until(lambda: len(self.seen) >= count or not self._thread.is_alive())
        return list(self.seen)

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the watch did not end"

    def close(self) -> None:
        self.watch.close()
        self.join()


def increment(kv: Kv, key: str, times: int) -> None:
    """Adds one to the number at the key, `times` times, by comparing and asking again."""
    for _ in range(times):
        while True:
            entry = kv.get(key)
            number, revision = (0, 0) if entry is None else (int(entry.value), entry.revision)
            try:
                done = kv.commit([Compare(key, revision)], [Put(key, b"%d" % (number + 1))])
            except ServiceUnavailable as error:
                raise AssertionError("nothing fails here") from error
            if done is not None:
                break


def open_location(kind: str, place: str) -> Kv:
    if kind == "sqlite":
        return SqliteKv(place, timeout_seconds=PATIENCE_SECONDS)
    return EtcdKv([place], timeout_seconds=PATIENCE_SECONDS)


def start_increments(backend: Backend, key: str, times: int) -> subprocess.Popen[bytes]:
    """Another process that does the same."""
    arguments = [*backend.location, key, str(times)]
    return subprocess.Popen([sys.executable, "-m", "support.kv_stores", *arguments], cwd=TESTS)


if __name__ == "__main__":
    _, kind, place, counted, repeats = sys.argv
    opened = open_location(kind, place)
    increment(opened, counted, int(repeats))
    opened.close()
