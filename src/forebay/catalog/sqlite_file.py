"""Connections to a SQLite file: one to write, a few to read, none that survives a fork.

Writers of this process wait for each other on a lock, which is fair. They wait for other processes
in SQLite, which is not. Readers see the last commit and never wait (WAL mode). A database in memory
has a single connection.

SQLite keeps its view of a file's locks in memory that all connections of a process share. A forked
child inherits that memory but not the locks, so it would believe that it holds them. All
connections are therefore closed before a fork, and parent and child open new ones when needed.

Beware: `<path>`, `<path>-wal` and `<path>-shm` are one database. Copy it with `VACUUM INTO` or the
backup command, never with `cp` of the first file alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from forebay.catalog.kv import deadline_of_request
from forebay.errors import (
    InvalidSetting,
    LogClosed,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
    remedy,
)
from forebay.files.local import make_private_dirs, open_private
from forebay.forks import registering
from forebay.interrupts import give_up, held, holding
from forebay.limits import MIB

READERS_IDLE_MAX: Final = 4
_WAL_BYTES_KEPT: Final = 16 * MIB
_FLOCK_POLL_SECONDS: Final = 0.002
_LOANS_POLL_SECONDS: Final = 0.001

_UNAVAILABLE: Final = {
    sqlite3.SQLITE_BUSY: "another process holds its lock; try again",
    sqlite3.SQLITE_LOCKED: "another process holds its lock; try again",
    sqlite3.SQLITE_FULL: "the disk is full; free some space",
    sqlite3.SQLITE_IOERR: "the disk failed; check it",
    sqlite3.SQLITE_INTERRUPT: "the operation was interrupted; try again",
}
_REFUSED: Final = {
    sqlite3.SQLITE_READONLY: "it is read-only; check the permissions",
    sqlite3.SQLITE_PERM: "access was denied; check the permissions",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check that it exists, and its permissions",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database; check metadata.path",
    sqlite3.SQLITE_CORRUPT: "the database is damaged; restore it from a backup",
}

_SHARED: Final = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|gfs2?|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|"
    "smb2|smb3|smbfs|fuse\\.(?:ceph|ceph-fuse|curlftpfs|davfs|gcsfuse|geesefs|glusterfs|goofys|"
    "juicefs|mfs|moosefs|mount-s3|mountpoint-s3|rclone|s3fs|sshfs)"
)
"""Network file systems, on which SQLite's locks do not work. Any other type is accepted."""
_inherited: Final[list[sqlite3.Connection]] = []
"""Connections that could not be closed before a fork. They are kept here so that the child does
not close them: that could delete the parent's write-ahead log."""


def service_error(name: str, error: sqlite3.Error) -> ServiceError:
    """Returns the error to raise for an error of SQLite: ServiceUnavailable or ServiceRefused."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary in _UNAVAILABLE:
        return ServiceUnavailable(f"{name}: {_UNAVAILABLE[primary]} ({error})")
    reason = _REFUSED.get(primary) if primary is not None else None
    return ServiceRefused(f"{name}: {reason or 'SQLite refused the request'} ({error})")


class SqliteFile:
    """The database at `path`, created with `schema` if it does not exist. Thread-safe.

    The database is in memory if `path` is None. Methods raise ServiceError, and LogClosed after
    `close`.
    """

    def __init__(
        self,
        path: Path | None,
        schema: Sequence[str],
        *,
        application_id: int,
        version: int,
        timeout_seconds: float,
    ) -> None:
        self.path = path
        self.name = "the catalog in memory" if path is None else f"the catalog {path}"
        self._schema = schema
        self._application_id = application_id
        self._version = version
        self._timeout = timeout_seconds
        self._lock = threading.RLock()
        self._gate = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._idle: list[sqlite3.Connection] = []
        self._loans: dict[int, list[sqlite3.Connection]] = {}
        """The connections that are being read with, by an id for each loan."""
        self._unusable: str | None = None
        self._identity: tuple[int, int] | None = None
        self._paused = False
        with registering(self):
            self._create()

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """Lends a connection for reading; no other thread uses it meanwhile."""
        if self.path is None:
            with self.writer() as only:
                yield only
            return
        loan: list[sqlite3.Connection] = []
        try:
            holding(self._gate, lambda: self._borrow(loan))
            if not loan:
                loan.append(self._connect("rw"))
            yield loan[0]
            if len(self._idle) < READERS_IDLE_MAX:
                self._idle.append(loan.pop())
            self._end_loan(loan)
        except BaseException as error:  # not `finally`, which could be interrupted
            self._end_loan(loan)
            if isinstance(error, sqlite3.Error):
                raise service_error(self.name, error) from error
            raise

    @contextmanager
    def writer(self, *, flock: bool = False) -> Iterator[sqlite3.Connection]:
        """Lends the connection for writing; with `flock`, `<path>.lock` is locked meanwhile."""
        try:
            self._take_lock()
            self._require_usable()
            with self._flocked() if flock else nullcontext():
                self._require_same_file()
                if self._writer is None:
                    self._writer = self._connect("rw")
                yield self._writer
            give_up(self._lock)
        except BaseException as error:  # not `finally`, which could be interrupted
            if isinstance(error, sqlite3.Error):
                self._drop_writer()
            else:
                self._roll_back()
            give_up(self._lock)
            if isinstance(error, sqlite3.Error):
                raise service_error(self.name, error) from error
            raise

    def close(self) -> None:
        """Waits for running operations, then closes the connections. Idempotent."""
        held = self._quiesce()
        self._unusable = self._unusable or "it was closed"
        if held:
            self._close_connections()
            self._release()

    # ---- opening ----

    def _create(self) -> None:
        try:
            if self.path is None:
                self._writer = self._connect("memory")
                self._make_schema(self._writer)
                return
            make_private_dirs(self.path.parent)
            with self._flocked():
                if not self.path.exists():
                    # SQLite would use the umask. Its other files get the mode of this one.
                    os.close(open_private(self.path, os.O_RDWR | os.O_CREAT))
                self._writer = self._connect("rwc")
                if self._writer.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
                    raise ServiceRefused(
                        f"{self.name}: its file system does not support SQLite's WAL mode; "
                        "put it on a local disk"
                    )
                self._make_schema(self._writer)
                self._identity = self._stat()
                _sync_directory(self.path.parent)
        except sqlite3.Error as error:
            self._drop_writer()
            raise service_error(self.name, error) from error
        except OSError as error:
            self._drop_writer()
            raise ServiceRefused(f"{self.name}: {error.strerror}; {remedy(error)}") from error
        except ServiceError:
            self._drop_writer()
            raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        place = "" if self.path is None else quote(os.fsencode(self.path.absolute()))
        connection = sqlite3.connect(
            f"file:{place}?mode={mode}",
            uri=True,
            timeout=self._timeout,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_KEPT}")
        return connection

    def _make_schema(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application == 0 and tables == 0:
            for statement in self._schema:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={self._application_id}")
            connection.execute(f"PRAGMA user_version={self._version}")
        elif application != self._application_id:
            raise ServiceRefused(
                f"{self.name}: the database belongs to another program; check metadata.path"
            )
        elif version != self._version:
            raise ServiceRefused(
                f"{self.name}: it has format {version}, but this program reads only {self._version}"
            )
        connection.execute("COMMIT")

    # ---- connections ----

    def _take_lock(self) -> None:
        left = max(deadline_of_request(self._timeout) - time.monotonic(), 0.0)
        if not left or not self._lock.acquire(timeout=left):
            raise ServiceUnavailable(
                f"{self.name}: other threads held its lock for {left:g} seconds; try again"
            )

    def _borrow(self, loan: list[sqlite3.Connection]) -> None:
        self._require_usable()
        self._loans[id(loan)] = loan
        if self._idle:
            loan.append(self._idle.pop())

    def _end_loan(self, loan: list[sqlite3.Connection]) -> None:
        while loan:
            loan.pop().close()
        self._loans.pop(id(loan), None)

    def _roll_back(self) -> None:
        """Ends a transaction that was interrupted."""
        if held(self._lock) and self._writer is not None and self._writer.in_transaction:
            with suppress(sqlite3.Error):
                self._writer.rollback()

    def _drop_writer(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with suppress(sqlite3.Error):
                writer.close()

    def _close_connections(self) -> None:
        self._drop_writer()
        while self._idle:
            self._idle.pop().close()

    # ---- checks ----

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise LogClosed(f"{self.name}: {self._unusable}")

    def _stat(self) -> tuple[int, int] | None:
        assert self.path is not None
        try:
            found = self.path.stat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino)

    def _require_same_file(self) -> None:
        """Writes to a file that was removed or replaced would be lost, so they are refused."""
        if self.path is not None and self._stat() != self._identity:
            raise ServiceRefused(
                f"{self.name}: the file was removed or replaced while it was open; "
                "open the store again"
            )

    @contextmanager
    def _flocked(self) -> Iterator[None]:
        if self.path is None:
            yield
            return
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            file = open_private(lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ServiceRefused(f"{lock}: {error.strerror}; {remedy(error)}") from error
        try:
            self._await_flock(file, lock)
            yield
            fcntl.flock(file, fcntl.LOCK_UN)
            unlocked, file = file, -1
            os.close(unlocked)
        except BaseException:  # not `finally`, which could be interrupted
            if file != -1:
                os.close(file)
            raise

    def _await_flock(self, file: int, lock: Path) -> None:
        deadline = deadline_of_request(self._timeout)
        while not _try_flock(file):
            if time.monotonic() >= deadline:
                raise ServiceUnavailable(f"{lock}: another process holds it; try again")
            time.sleep(_FLOCK_POLL_SECONDS)

    # ---- forks ----

    def _quiesce(self) -> bool:
        """Waits until no connection is in use, and keeps both locks; False after the timeout."""
        deadline = time.monotonic() + 2 * self._timeout
        if not self._lock.acquire(timeout=2 * self._timeout):
            return False
        while True:
            self._gate.acquire()  # nothing is lent from now on
            if not self._loans:
                return True
            self._gate.release()
            if time.monotonic() >= deadline:
                self._lock.release()
                return False
            time.sleep(_LOANS_POLL_SECONDS)

    def _release(self) -> None:
        self._gate.release()
        self._lock.release()

    def before_fork(self) -> None:
        self._paused = self._quiesce()
        if self._paused and self.path is not None:
            self._close_connections()

    def after_fork_in_parent(self) -> None:
        if self._paused:
            self._release()

    def after_fork_in_child(self) -> None:
        if self.path is None:
            self._unusable = self._unusable or "it is in the memory of the parent process"
        elif not self._paused:
            self._unusable = self._unusable or "it was in use when the process was forked"
        if self._writer is not None:
            _inherited.append(self._writer)
        _inherited.extend(self._idle)
        self._writer, self._idle, self._loans = None, [], {}
        self._lock = threading.RLock()
        self._gate = threading.RLock()


def _try_flock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def filesystem_type(path: Path, mountinfo: str) -> str | None:
    """Returns the file system type of the absolute `path`, or None if no mount matches.

    `mountinfo` is the text of Linux's `/proc/self/mountinfo`, one line for each mount: numbers, the
    mounted root, the mount point (blanks as `\\040`), options, ` - `, and the type:

        36 35 98:0 / /mnt/shared rw,noatime shared:1 - nfs4 server:/export rw
    """
    found: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        deep = len(point.parts)
        # Of two mounts on the same point, the later one hides the earlier.
        if path.is_relative_to(point) and (found is None or deep >= found[0]):
            found = (deep, right.split(" ")[0])
    return None if found is None else found[1]


def require_local(path: Path, mountinfo: str | None = None) -> None:
    """Raises InvalidSetting if the file would be on a network file system."""
    if mountinfo is None:
        source = Path("/proc/self/mountinfo")
        if not source.exists():
            return
        mountinfo = source.read_text(encoding="utf-8", errors="surrogateescape")
    kind = filesystem_type(path.parent.resolve(), mountinfo)
    if kind is not None and _SHARED.fullmatch(kind):
        raise InvalidSetting(
            f"metadata.path is {path}, which is on a network file system ({kind}): SQLite's locks "
            "do not work there; put it on a local disk, or use etcd"
        )
