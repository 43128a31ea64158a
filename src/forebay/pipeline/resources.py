"""`workbench`: what one Python worker opens once, and its tasks use one after the other.

Spark's Python workers are forked and used again for many tasks. Clients of object stores and of
etcd do not survive a fork, so they are opened by the task that first needs them, in the worker
itself, and stay open for the next tasks of the same store.

A worker that cannot see the directory of the server that owns the topics reads segments through
that server, and objects too where they are files of the server's machine. Which it is, is decided
once for each workbench.
"""

from __future__ import annotations

import atexit
import os
import pickle
from functools import cached_property
from pathlib import Path
from socket import gethostname
from typing import Final

from forebay.catalog.adopt import restored
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.client.disk import ServerDisk, server_to_ask, wal_root
from forebay.client.http import ClientPool
from forebay.client.objects import ServerBackend
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import CommitRefused, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.names import TopicName
from forebay.objects.buffers import return_large_blocks
from forebay.objects.store import CloudStore, connect
from forebay.read.object_stream import FetchPool
from forebay.settings import StoreSettings
from forebay.topic.view import catalog_file
from forebay.wal.identity import read_log_id

_STORES_MAX: Final = 4
"""That one worker keeps open; a worker of a shared cluster may serve many."""


class Workbench:
    """Everything a task may need of a store, each opened on first use."""

    def __init__(self, settings: StoreSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        return_large_blocks()
        self.settings = settings
        self.clock = clock
        self.server = server_to_ask(settings)
        """The server to go through; None where everything is within reach."""
        self._closers: list[CloudStore | Catalog | FetchPool | ClientPool] = []
        self.disk = self._disk()

    @property
    def _data(self) -> Path | None:
        return None if self.settings.data is None else Path(self.settings.data)

    def _disk(self) -> LocalDisk | ServerDisk:
        if self.server is None:
            return LocalDisk()
        clients = ClientPool(self.server)
        self._closers.append(clients)
        return ServerDisk(clients, wal_root(self.settings))

    @property
    def objects_are_files(self) -> bool:
        """Whether objects are files that this process reads itself."""
        return self.settings.cloud.backend == "fs" and self.server is None

    def segments_of(self, topic: TopicName, log_id: str | None) -> Disk:
        """The disk with the topic's segments, of that log.

        CommitRefused if they are of another one: a copy of a directory, at the same path as the
        directory on another machine, is not what was planned.
        """
        expected = restored(log_id)
        if isinstance(self.disk, ServerDisk):
            return self.disk.of_log(expected)
        directory = wal_root(self.settings) / topic.namespace / topic.topic
        if expected is not None and self.disk.exists(directory):
            found = read_log_id(self.disk, directory)
            if found != expected:
                raise CommitRefused(
                    f"{topic}: {directory} on {gethostname()} holds the log {found}, and the log "
                    f"{expected} was planned: is it a copy?"
                )
        return self.disk

    @cached_property
    def store(self) -> CloudStore:
        if self.server is not None and self.settings.cloud.backend == "fs":
            store = CloudStore(ServerBackend(self.server))
        else:
            store = connect(self.settings.cloud, self._data)
        self._closers.append(store)
        return store

    @cached_property
    def catalog(self) -> Catalog:
        settings = self.settings
        if self.server is not None and settings.metadata.backend == "sqlite":
            raise UsageError(
                f"{gethostname()} needs the catalog, which is the file {catalog_file(settings)} on "
                f"the machine of {self.server.url}: let executors see that directory, or keep the "
                "catalog in etcd"
            )
        prefix = settings.metadata.prefix or settings.uploader.root_prefix
        catalog = Catalog(connect_kv(settings.metadata, self._data), prefix, self.clock)
        self._closers.append(catalog)
        return catalog

    @cached_property
    def pool(self) -> FetchPool | None:
        """None for objects that are files here: handing them from thread to thread costs more
        than reading them."""
        if self.objects_are_files:
            return None
        pool = FetchPool(self.settings.cloud_reader.fetch_threads)
        self._closers.append(pool)
        return pool

    def close(self) -> None:
        while self._closers:
            self._closers.pop().close()


_open: Final[dict[tuple[int, bytes], Workbench]] = {}


def workbench(settings: StoreSettings) -> Workbench:
    """The one of this process for this store; not to be closed by its users."""
    key = (os.getpid(), pickle.dumps((settings, _catalog_inode(settings))))
    found = _open.pop(key, None)
    if found is None:
        while len(_open) >= _STORES_MAX:
            _open.pop(next(iter(_open))).close()
        found = Workbench(settings)
    _open[key] = found  # the most recently used one last
    return found


def _catalog_inode(settings: StoreSettings) -> int | None:
    """Which file the catalog is: one that was removed and made anew is another."""
    path = catalog_file(settings)
    try:
        return None if path is None else path.stat().st_ino
    except OSError:
        return None


def close_workbenches() -> None:
    """Closes what this process opened."""
    for key in [key for key in _open if key[0] == os.getpid()]:
        _open.pop(key).close()


atexit.register(close_workbenches)
