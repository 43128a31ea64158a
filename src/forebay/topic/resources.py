"""`StoreResources`: what a process opens of a store: disk, catalog, objects, threads, lease.

Every kind of process uses this class: an owner of topics, a read-only view, a job's driver and its
executors. Each resource is opened on first use and shared by all threads. `close` closes them all.

A process that cannot see the directory of the server that owns the topics has a `server`. It then
reads segments through the server, and objects too if they are files on the server's machine. The
HTTP client is imported only then, so that short commands start quickly.

Beware: using the catalog creates its file. `StoreView` looks for the file first.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final

from forebay.catalog.adopt import restored
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import FILE_NAME, connect_kv
from forebay.catalog.ownership import Session
from forebay.client.address import wal_root
from forebay.clock import SYSTEM_CLOCK, Clock, JumpWatch, since_1970
from forebay.errors import CommitRefused, CorruptLog, LogClosed, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.forks import disown_after_fork
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.objects.buffers import return_large_blocks
from forebay.objects.store import CloudStore, connect
from forebay.read.fetch_pool import FetchPool
from forebay.read.sidecar_index import SidecarIndexes
from forebay.read.tiered_log import CatalogSource, KnownFirst, LocalTier, TieredLog
from forebay.read.verify import FaultKind, examine_object, looks_same, verify_object
from forebay.settings import ServerAddress, StoreSettings
from forebay.upload.engine import UploadPorts
from forebay.wal.identity import LocalLog, read_log_id, read_nonces
from forebay.wal.view import LogView

if TYPE_CHECKING:
    from forebay.client.disk import ServerDisk
    from forebay.client.http import ClientPool


def catalog_file(settings: StoreSettings) -> Path | None:
    """Returns the path of the catalog's file, which may not exist; None if it is not a file."""
    if settings.metadata.backend != "sqlite":
        return None
    path = settings.metadata.path
    return Path(path) if path is not None else Path(settings.data or "") / FILE_NAME


class StoreResources:
    """The resources of one store. Thread-safe.

    A `catalog` or `store` that is passed in is used, and not closed. After `close`, opening a
    resource raises LogClosed.
    """

    def __init__(
        self,
        settings: StoreSettings,
        clock: Clock = SYSTEM_CLOCK,
        *,
        catalog: Catalog | None = None,
        store: CloudStore | None = None,
        server: ServerAddress | None = None,
    ) -> None:
        return_large_blocks()
        self.settings = settings
        self.clock = since_1970(clock)
        self.jumps = JumpWatch(self.clock)
        self.server = server
        """The server to read through; None if this process sees the files itself."""
        self._lock = threading.RLock()
        disown_after_fork(self)
        self._given_catalog = catalog
        self._given_store = store
        self._catalog = catalog
        self._store = store
        self._session: Session | None = None
        self._pool: FetchPool | None = None
        self._indexes: SidecarIndexes | None = None
        self._closed = False
        self._clients: ClientPool | None = None
        self.disk: LocalDisk | ServerDisk = LocalDisk()
        if server is not None:
            from forebay.client.disk import ServerDisk
            from forebay.client.http import ClientPool

            self._clients = ClientPool(server)
            self.disk = ServerDisk(self._clients, wal_root(settings))

    def disown(self) -> None:
        """Replaces the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def open(self) -> StoreResources:
        """Opens the catalog and the object store now. Closes everything if one of them fails."""
        try:
            _ = self.catalog, self.store
        except BaseException:
            self.close()
            raise
        return self

    def finish_by(self, deadline: float) -> None:
        """Limits the requests of the lease and of all topics to the catalog from now on.

        They are given up at `deadline`, by `time.monotonic`.
        """
        with self._lock:
            session = self._session
        if session is not None:
            session.finish_by(deadline)

    def close(self) -> None:
        """Ends the lease and closes everything. Idempotent.

        Every topic and reader must have been closed before.
        """
        with self._lock:
            self._closed = True
            own_store = None if self._store is self._given_store else self._store
            own_catalog = None if self._catalog is self._given_catalog else self._catalog
        for each in (self._session, self._pool, self._clients, own_store, own_catalog):
            if each is not None:
                each.close()

    # -- the resources --------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """The catalog; UsageError if it is a file on the server's machine."""
        with self._lock:
            if self._catalog is None:
                self._require_open()
                settings = self.settings
                if self.server is not None and settings.metadata.backend == "sqlite":
                    raise UsageError(
                        f"{gethostname()} needs the catalog, which is the file "
                        f"{catalog_file(settings)} on the machine of {self.server.url}: share "
                        "that directory with the executors, or keep the catalog in etcd"
                    )
                prefix = settings.metadata.prefix or settings.uploader.root_prefix
                kv = connect_kv(settings.metadata, self._data)
                self._catalog = Catalog(kv, prefix, self.clock)
            return self._catalog

    @property
    def store(self) -> CloudStore:
        """The object store."""
        with self._lock:
            if self._store is None:
                self._require_open()
                if self.server is not None and self.settings.cloud.backend == "fs":
                    from forebay.client.objects import ServerBackend

                    self._store = CloudStore(ServerBackend(self.server))
                else:
                    self._store = connect(self.settings.cloud, self._data)
            return self._store

    @property
    def sidecar_indexes(self) -> SidecarIndexes:
        """The indexes of objects that were read from their sidecars."""
        with self._lock:
            if self._indexes is None:
                self._indexes = SidecarIndexes(self.store)
            return self._indexes

    @property
    def fetch_pool(self) -> FetchPool:
        """The threads that fetch objects ahead of readers."""
        with self._lock:
            if self._pool is None:
                self._require_open()
                self._pool = FetchPool(self.settings.cloud_reader.fetch_threads)
            return self._pool

    @property
    def pool(self) -> FetchPool | None:
        """`fetch_pool`, or None if objects are local files.

        For local files, passing chunks between threads costs more than reading them.
        """
        return None if self.objects_are_files else self.fetch_pool

    @property
    def session(self) -> Session:
        """The session of this process. It gets a lease when the first topic is taken."""
        with self._lock:
            if self._session is None:
                self._require_open()
                self._session = Session(self.catalog, self.settings.metadata, self.clock)
            return self._session

    @property
    def upload_ports(self) -> UploadPorts:
        return UploadPorts(
            self.store,
            self.settings.uploader,
            self._verify_upload,
            self.clock,
            self._verify_committed,
        )

    @property
    def objects_are_files(self) -> bool:
        """Whether objects are files that this process reads itself."""
        return self.settings.cloud.backend == "fs" and self.server is None

    @property
    def _data(self) -> Path | None:
        return None if self.settings.data is None else Path(self.settings.data)

    def _require_open(self) -> None:
        if self._closed:
            raise LogClosed(f"the store {self.settings.data} is closed")

    # -- operations -----------------------------------------------------------------------------

    def segments_of(self, topic: TopicName, log_id: str | None) -> Disk:
        """Returns the disk with the topic's segments, which must belong to the log `log_id`.

        Raises CommitRefused if they belong to another log, such as an old copy of the directory at
        the same path on another machine.
        """
        expected = restored(log_id)
        if not isinstance(self.disk, LocalDisk):
            return self.disk.of_log(expected)
        directory = wal_root(self.settings) / topic.namespace / topic.topic
        if expected is not None and self.disk.exists(directory):
            found = read_log_id(self.disk, directory)
            if found != expected:
                raise CommitRefused(
                    f"{topic}: {directory} on {gethostname()} holds the log {found}, but the log "
                    f"{expected} was planned: is it a copy?"
                )
        return self.disk

    def local_log(self, topic: TopicName) -> LocalLog | None:
        """Returns what the topic's local log says of itself, up to its published position.

        None if there is no log, or none that can be read without opening it.
        """
        directory = wal_root(self.settings) / topic.namespace / topic.topic
        try:
            log_id = read_log_id(self.disk, directory)
            if log_id is None:
                return None
            view = LogView(directory, file_name=self.settings.wal.file_name, disk=self.disk)
            nonces = read_nonces(self.disk, directory)
        except (CorruptLog, OSError):
            return None
        return LocalLog(log_id, view.start_offset, view.end_offset, nonces)

    def tiered_log(
        self, topic: TopicName, log: LocalTier, known: ObjectDescriptor | None = None
    ) -> TieredLog:
        """Returns one log over the objects and the local `log`.

        `known` is the object that will be read first, if the caller has its descriptor.
        """
        source = CatalogSource(self.catalog, topic)
        return TieredLog(
            topic,
            log,
            source if known is None else KnownFirst(known, source),
            self.store,
            self.fetch_pool,
            self.settings.cloud_reader,
            self.sidecar_indexes,
        )

    def read_back(self, topic: TopicName, descriptor: ObjectDescriptor) -> None:
        """Reads the object. Raises CorruptLog if it is not exactly what its descriptor says."""
        verify_object(self.store, self.pool, self.settings.cloud_reader, topic, descriptor)

    def examine(self, topic: TopicName, descriptor: ObjectDescriptor) -> ObjectDescriptor:
        """Reads the object, and returns its descriptor with what the object showed.

        Raises CorruptLog if the object is damaged or another one. A wrong index is put right.
        """
        seen = examine_object(self.store, self.pool, self.settings.cloud_reader, topic, descriptor)
        if seen.fault is not None and seen.fault.kind is not FaultKind.INDEX:
            raise seen.fault.error
        return seen.found or descriptor

    def require_there(self, topic: TopicName, descriptor: ObjectDescriptor) -> bool:
        """Raises CorruptLog if the object is missing or damaged. Called before deleting segments.

        Compares size and etag. If the etag differs or is unknown, reads the object whole and
        compares its hash. Returns False if it has another etag and its descriptor no hash: its
        frames are valid then, but they may be those of another object.
        """
        if looks_same(self.store, topic, descriptor):
            return True
        self.examine(topic, descriptor)
        return descriptor.content_hash is not None

    def _verify_upload(self, topic: TopicName, descriptor: ObjectDescriptor) -> None:
        """Reads the object back, or with `verify_after_upload: false` compares size and etag."""
        if self.settings.uploader.verify_after_upload:
            self.read_back(topic, descriptor)
        else:
            self.require_there(topic, descriptor)

    def _verify_committed(self, topic: TopicName, descriptor: ObjectDescriptor) -> ObjectDescriptor:
        """The same for an object of the chain. Returns the descriptor that it should have."""
        if self.settings.uploader.verify_after_upload:
            return self.examine(topic, descriptor)
        self.require_there(topic, descriptor)
        return descriptor


# ---- the resources of a job's processes ---------------------------------------------------------

_STORES_MAX: Final = 4
"""Stores that one process keeps open. A worker of a shared cluster may serve many."""

_open: Final[dict[bytes, StoreResources]] = {}
_inherited: Final[list[StoreResources]] = []
"""In a forked child, the parent's resources. They are kept so that nothing closes them here."""
_open_lock = threading.Lock()
_users = 0
"""Threads that run tasks now. While there are several, nothing is evicted: others may use it."""


def open_resources(settings: StoreSettings) -> StoreResources:
    """Returns the resources for a process of a job.

    Decides once whether this process reads files itself or through the store's server.
    """
    from forebay.client.disk import server_to_ask

    return StoreResources(settings, server=server_to_ask(settings))


def open_existing(settings: StoreSettings) -> StoreResources:
    """Like `open_resources`, but raises UsageError if there is no catalog. Creates none."""
    missing = catalog_file(settings)
    if missing is not None and not missing.exists():
        raise UsageError(f"there is no catalog at {missing}: `forebay restore` creates one")
    return open_resources(settings)


def executor_resources(settings: StoreSettings) -> StoreResources:
    """Returns this process's resources for the store. The caller must not close them.

    Spark forks its Python workers and reuses them for many tasks. Clients of object stores and of
    etcd do not survive a fork. So the first task that needs them opens them in the worker, and
    they stay open for later tasks of the same store. Threads share them.
    """
    key = pickle.dumps((settings, _catalog_inode(settings)))
    with _open_lock:
        found = _open.pop(key, None)
        if found is None:
            while len(_open) >= _STORES_MAX and _users <= 1:
                _open.pop(next(iter(_open))).close()
            found = open_resources(settings)
        _open[key] = found  # the most recently used is last
        return found


@contextmanager
def using_executor_resources() -> Iterator[None]:
    """Wraps the tasks of a thread: nothing is evicted while other threads run theirs."""
    global _users  # noqa: PLW0603
    with _open_lock:
        _users += 1
    try:
        yield
    finally:
        with _open_lock:
            _users -= 1


def _catalog_inode(settings: StoreSettings) -> int | None:
    """Returns the inode of the catalog's file, which changes if the file is created again."""
    path = catalog_file(settings)
    try:
        return None if path is None else path.stat().st_ino
    except OSError:
        return None


def close_executor_resources() -> None:
    """Closes all resources that this process opened for tasks."""
    with _open_lock:
        while _open:
            _open.popitem()[1].close()


def _forget_in_child() -> None:
    """Forgets the parent's resources, and replaces the lock, which a parent's thread may hold."""
    global _open_lock, _users  # noqa: PLW0603
    _open_lock = threading.Lock()
    _users = 0
    _inherited.extend(_open.values())
    _open.clear()


atexit.register(close_executor_resources)
os.register_at_fork(after_in_child=_forget_in_child)
