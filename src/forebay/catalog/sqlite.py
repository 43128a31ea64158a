"""The catalog in a SQLite file, for one machine and any number of its processes.

The tables: `keys` is the map, `changes` holds the newest changes for watches (bounded), `leases`
holds when each lease ends, and `state` is one row of counters. Every write transaction is BEGIN
IMMEDIATE, so the compared values cannot change before it writes.

Leases are timed by the time since boot, which cannot be set: jumps of the wall clock do not matter,
and a lease from an earlier boot has ended. No thread watches leases. Every read, write and watch
first removes the leases that have ended, together with their keys, so nobody sees them.

Beware: the file must be on a local disk. Network file systems are refused.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from forebay.catalog.kv import (
    ABSENT,
    Change,
    Compare,
    Entry,
    Put,
    Remove,
    Watch,
    check_commit,
    check_key,
    check_range,
)
from forebay.catalog.sqlite_file import SqliteFile, require_local
from forebay.errors import (
    LogClosed,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    TopicFenced,
    UsageError,
)
from forebay.limits import MIB

CHANGES_MAX: Final = 16_384
CHANGES_BYTES_MAX: Final = 64 * MIB
"""The limits of the table `changes`. When one is exceeded, the table is cut to half of both."""

_WATCH_BATCH: Final = 64
_WATCH_POLL_SECONDS: Final = 0.05
"""How late a watch may see another process's change, or the end of a lease."""

_APPLICATION_ID: Final = 0x46_42_43_31
_VERSION: Final = 1
_SCHEMA: Final = (
    """CREATE TABLE state (
        revision INTEGER NOT NULL, sequence INTEGER NOT NULL, cut INTEGER NOT NULL,
        compacted INTEGER NOT NULL, bytes INTEGER NOT NULL)""",
    "INSERT INTO state VALUES (0, 0, 0, 0, 0)",
    """CREATE TABLE keys (
        key TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL, revision INTEGER NOT NULL,
        lease INTEGER)""",
    "CREATE INDEX keys_by_lease ON keys (lease) WHERE lease IS NOT NULL",
    """CREATE TABLE changes (
        sequence INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB)""",
    """CREATE TABLE leases (
        id INTEGER PRIMARY KEY AUTOINCREMENT, boot TEXT NOT NULL, expires REAL NOT NULL,
        ttl REAL NOT NULL)""",
)
_PUT: Final = (
    "INSERT INTO keys VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
    "value = excluded.value, revision = excluded.revision, lease = excluded.lease"
)
_RANGE: Final = "SELECT key, value, revision, lease FROM keys WHERE key >= ? AND key < ?"
_ENDED: Final = "SELECT id FROM leases WHERE boot != ? OR expires <= ?"


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    source = Path("/proc/sys/kernel/random/boot_id")
    try:
        return source.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ServiceRefused(
            f"{source} cannot be read, and leases need it: {error.strerror}"
        ) from error


class _Transaction:
    """A write transaction, and the counters in `state`. It first removes leases that have ended."""

    def __init__(self, connection: sqlite3.Connection, boot: str, now: float) -> None:
        self._connection = connection
        self.now = now
        self._found = connection.execute("SELECT * FROM state").fetchone()
        self.revision: int
        self.revision, self._sequence, self._cut, self._compacted, self._bytes = self._found
        self.wrote = False
        for (lease,) in connection.execute(_ENDED, (boot, now)).fetchall():
            self.revoke(lease)

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        self.wrote = True
        return self._connection.execute(sql, values)

    def holds(self, compare: Compare) -> bool:
        sql = "SELECT revision FROM keys WHERE key = ?"
        found = self._connection.execute(sql, (compare.key,)).fetchone()
        return bool((found[0] if found else ABSENT) == compare.revision)

    def require_lease(self, lease: int) -> float:
        """Returns the seconds for which the lease was granted; TopicFenced if it has ended."""
        sql = "SELECT ttl FROM leases WHERE id = ?"
        found = self._connection.execute(sql, (lease,)).fetchone()
        if found is None:
            raise TopicFenced(f"the lease {lease} has ended")
        return float(found[0])

    def apply(self, writes: Sequence[Put | Remove]) -> None:
        """Applies the writes at one new revision. If they change nothing, the revision stays."""
        revision = self.revision + 1
        for write in writes:
            if isinstance(write, Put):
                if write.lease is not None:
                    self.require_lease(write.lease)
                value = bytes(write.value)
                self.execute(_PUT, write.key, value, revision, write.lease)
                self._log(revision, write.key, value)
            elif self.execute("DELETE FROM keys WHERE key = ?", write.key).rowcount:
                self._log(revision, write.key, None)

    def revoke(self, lease: int) -> None:
        sql = "SELECT key FROM keys WHERE lease = ? ORDER BY key"
        keys = self._connection.execute(sql, (lease,)).fetchall()
        self.apply([Remove(key) for (key,) in keys])
        self.execute("DELETE FROM leases WHERE id = ?", lease)

    def finish(self, changes_max: int, bytes_max: int) -> None:
        if self._sequence - self._cut > changes_max or self._bytes > bytes_max:
            self._trim(changes_max // 2, bytes_max // 2)
        state = (self.revision, self._sequence, self._cut, self._compacted, self._bytes)
        if state != self._found:
            self.execute(
                "UPDATE state SET revision = ?, sequence = ?, cut = ?, compacted = ?, bytes = ?",
                *state,
            )

    def _log(self, revision: int, key: str, value: bytes | None) -> None:
        self.revision = revision
        self._sequence += 1
        self._bytes += len(value or b"")
        self.execute(
            "INSERT INTO changes VALUES (?, ?, ?, ?)", self._sequence, revision, key, value
        )

    def _trim(self, changes_max: int, bytes_max: int) -> None:
        rows = self._connection.execute(
            "SELECT sequence, revision, coalesce(length(value), 0) FROM changes ORDER BY sequence"
        )
        for sequence, revision, size in rows:
            if self._sequence - self._cut <= changes_max and self._bytes <= bytes_max:
                break
            self._cut, self._compacted = sequence, revision
            self._bytes -= size
        rows.close()
        self.execute("DELETE FROM changes WHERE sequence <= ?", self._cut)


class SqliteKv:
    """A `Kv` in the file at `path`, or in memory if `path` is None. Thread-safe.

    Raises InvalidSetting if the file is on a network file system, and ServiceError if it cannot be
    opened. `boottime`, `boot_id` and `mountinfo` are for tests; the machine's own are the default.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        timeout_seconds: float = 5.0,
        boottime: Callable[[], float] = _boottime,
        boot_id: str | None = None,
        mountinfo: str | None = None,
        changes_max: int = CHANGES_MAX,
        changes_bytes_max: int = CHANGES_BYTES_MAX,
    ) -> None:
        path = None if path is None else Path(path)
        if path is not None:
            require_local(path, mountinfo)
        self._boottime = boottime
        self._boot = _boot_id() if boot_id is None else boot_id
        self._limits = (changes_max, changes_bytes_max)
        self._file = SqliteFile(
            path,
            _SCHEMA,
            application_id=_APPLICATION_ID,
            version=_VERSION,
            timeout_seconds=timeout_seconds,
        )
        self._watches: dict[int, weakref.ref[SqliteWatch]] = {}

    @property
    def name(self) -> str:
        return self._file.name

    def __repr__(self) -> str:
        return f"SqliteKv({self.name})"

    # ---- reading ----

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._reading() as connection:
            sql = "SELECT key, value, revision, lease FROM keys WHERE key = ?"
            found = connection.execute(sql, (key,)).fetchone()
        return None if found is None else Entry(*found)

    def range(self, start: str, end: str, *, limit: int) -> list[Entry]:
        if check_range(start, end, limit) is None:
            return []
        with self._reading() as connection:
            sql = f"{_RANGE} ORDER BY key LIMIT ?"
            rows = connection.execute(sql, (start, end, limit)).fetchall()
        return [Entry(*row) for row in rows]

    def revision(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT revision FROM state").fetchone()[0])

    def watch(self, start: str, end: str, *, after: int) -> Watch:
        if check_range(start, end) is None:
            raise UsageError(f"the watch from {start!r} to {end!r} covers no key")
        self.revision()  # raises here if the catalog is closed or broken
        watch = SqliteWatch(self, start, end, after)
        number = id(watch)
        self._watches[number] = weakref.ref(watch, lambda _: self._watches.pop(number, None))
        return watch

    # ---- writing ----

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        check_commit(compares, writes)
        leased = any(isinstance(write, Put) and write.lease is not None for write in writes)
        with self._writing(flock=leased) as transaction:
            if not all(transaction.holds(compare) for compare in compares):
                return None
            transaction.apply(writes)
            return transaction.revision

    def grant(self, ttl_seconds: float) -> int:
        if not 0 < ttl_seconds < float("inf"):
            raise UsageError(f"a lease of {ttl_seconds} seconds; it must be more than 0 and finite")
        with self._writing(flock=True) as transaction:
            cursor = transaction.execute(
                "INSERT INTO leases (boot, expires, ttl) VALUES (?, ?, ?)",
                self._boot,
                transaction.now + ttl_seconds,
                float(ttl_seconds),
            )
            assert cursor.lastrowid
            return cursor.lastrowid

    def keep_alive(self, lease: int) -> float:
        with self._writing() as transaction:
            ttl = transaction.require_lease(lease)
            transaction.execute(
                "UPDATE leases SET expires = ? WHERE id = ?", transaction.now + ttl, lease
            )
            return ttl

    def revoke(self, lease: int) -> None:
        with self._writing() as transaction:
            transaction.revoke(lease)

    def close(self) -> None:
        self._file.close()
        self._wake_watches()  # so that they end

    # ---- inside ----

    @contextmanager
    def _writing(self, *, flock: bool = False) -> Iterator[_Transaction]:
        with self._file.writer(flock=flock) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                transaction = _Transaction(connection, self._boot, self._boottime())
                before = transaction.revision
                yield transaction
                transaction.finish(*self._limits)
                connection.execute("COMMIT" if transaction.wrote else "ROLLBACK")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        if transaction.revision != before:
            self._wake_watches()

    def _wake_watches(self) -> None:
        for reference in list(self._watches.values()):
            watch = reference()
            if watch is not None:
                watch.wake()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        while True:
            with self._file.reader() as connection:
                ended = connection.execute(_ENDED, (self._boot, self._boottime())).fetchone()
                if ended is None:
                    yield connection
                    return
            with self._writing():
                pass  # a write transaction removes the ended leases when it begins

    def changes(
        self, start: str, end: str, after: int, at: int | None
    ) -> tuple[int, list[tuple[int, Change]]]:
        """Returns the sequence number that was reached, and the next changes with their numbers.

        `at` is what the last call reached; None begins after the revision `after`. Raises
        ServiceError if changes after that were removed.
        """
        with self._reading() as connection:
            connection.execute("BEGIN")
            try:
                return self._changes(connection, start, end, after, at)
            finally:
                connection.execute("COMMIT")

    def _changes(
        self, connection: sqlite3.Connection, start: str, end: str, after: int, at: int | None
    ) -> tuple[int, list[tuple[int, Change]]]:
        newest, cut, compacted = connection.execute(
            "SELECT sequence, cut, compacted FROM state"
        ).fetchone()
        if after < compacted if at is None else at < cut:
            raise ServiceError(
                f"{self.name}: the changes after revision {after} are no longer known; "
                "read the range again, and watch from its revision"
            )
        rows = connection.execute(
            "SELECT sequence, key, value, revision FROM changes WHERE sequence > ? "
            "AND revision > ? AND key >= ? AND key < ? ORDER BY sequence LIMIT ?",
            (cut if at is None else at, after, start, end, _WATCH_BATCH),
        ).fetchall()
        found = [(sequence, Change(*change)) for sequence, *change in rows]
        return (found[-1][0] if len(found) == _WATCH_BATCH else newest), found


class SqliteWatch:
    """A `Watch` that reads the table `changes` when this process writes, and polls for others."""

    def __init__(self, kv: SqliteKv, start: str, end: str, after: int) -> None:
        self._kv = kv
        self._start = start
        self._end = end
        self._after = after
        self._at: int | None = None
        self._closed = threading.Event()
        self._woken = threading.Event()

    def __iter__(self) -> Iterator[Change]:
        while not self._closed.is_set():
            self._woken.clear()
            reached: int | None = self._at
            found: list[tuple[int, Change]] = []
            try:
                reached, found = self._kv.changes(self._start, self._end, self._after, self._at)
            except LogClosed:
                return
            except ServiceUnavailable:
                pass  # locked, or no space to remove the keys of ended leases: try again
            for sequence, change in found:
                if self._closed.is_set():
                    return
                self._at = sequence
                yield change
            self._at = reached
            if not found:
                self._woken.wait(_WATCH_POLL_SECONDS)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._closed.set()
        self.wake()
