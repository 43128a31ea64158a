"""`StoreResources`: what a process opens of a store: disk, catalog, objects, fetch threads.

Each is opened when it is first used. A process that cannot see the directory of the server that
owns the topics reads segments through that server, and objects too where they are files of the
server's machine. Which of both it is, is decided once for each `StoreResources`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from socket import gethostname

from forebay.catalog.adopt import restored
from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.client.disk import ServerDisk, server_to_ask, wal_root
from forebay.client.objects import ServerBackend, ServerClients
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import CommitRefused, UsageError
from forebay.files.disk import Disk
from forebay.files.local import LocalDisk
from forebay.format.names import TopicName
from forebay.objects.buffers import return_large_blocks
from forebay.objects.store import CloudStore, connect
from forebay.read.fetch import FetchPool
from forebay.settings import StoreSettings
from forebay.topic.view import catalog_file
from forebay.wal.identity import read_log_id


class StoreResources:
    """Everything a task may need of a store, each opened on first use."""

    def __init__(self, settings: StoreSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        return_large_blocks()
        self.settings = settings
        self.clock = clock
        self.server = server_to_ask(settings)
        """The server to go through; None where everything is within reach."""
        self._closers: list[CloudStore | Catalog | FetchPool | ServerClients] = []
        self.disk = self._disk()

    @property
    def _data(self) -> Path | None:
        return None if self.settings.data is None else Path(self.settings.data)

    def _disk(self) -> LocalDisk | ServerDisk:
        if self.server is None:
            return LocalDisk()
        clients = ServerClients(self.server)
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
