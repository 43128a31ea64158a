"""`workbench`: what one Python worker opens once, and its tasks use one after the other.

Spark's Python workers are forked and used again for many tasks. Clients of object stores and of
etcd do not survive a fork, so they are opened by the task that first needs them, in the worker
itself, and stay open for the next tasks of the same store.
"""

from __future__ import annotations

import atexit
import os
import pickle
from functools import cached_property
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.connect import connect_kv
from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.files.local import LocalDisk
from forebay.objects.connect import connect
from forebay.objects.large_blocks import return_large_blocks
from forebay.objects.store import CloudStore
from forebay.read.fetch import FetchPool
from forebay.settings import StoreSettings
from forebay.topic.view import catalog_file

_STORES_MAX: Final = 4
"""That one worker keeps open; a worker of a shared cluster may serve many."""


class Workbench:
    """Everything a task may need of a store, each opened on first use."""

    def __init__(self, settings: StoreSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        return_large_blocks()
        self.settings = settings
        self.clock = clock
        self.disk = LocalDisk()
        self._closers: list[CloudStore | Catalog | FetchPool] = []

    @property
    def _data(self) -> Path | None:
        return None if self.settings.data is None else Path(self.settings.data)

    @cached_property
    def store(self) -> CloudStore:
        store = connect(self.settings.cloud, self._data)
        self._closers.append(store)
        return store

    @cached_property
    def catalog(self) -> Catalog:
        settings = self.settings
        prefix = settings.metadata.prefix or settings.uploader.root_prefix
        catalog = Catalog(connect_kv(settings.metadata, self._data), prefix, self.clock)
        self._closers.append(catalog)
        return catalog

    @cached_property
    def pool(self) -> FetchPool | None:
        """None for objects that are files here: handing them from thread to thread costs more
        than reading them."""
        if self.settings.cloud.backend == "fs":
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
