"""`executor_resources`: what a process that runs tasks opens once, for all tasks of a store.

Spark's Python workers are forked and used again for many tasks. Clients of object stores and of
etcd do not survive a fork, so they are opened by the task that first needs them, in the worker
itself, and stay open for the next tasks of the same store. Threads of one process share them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from typing import Final

from forebay.client.disk import server_to_ask
from forebay.errors import UsageError
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, catalog_file

_STORES_MAX: Final = 4
"""That one process keeps open; a worker of a shared cluster may serve many."""

_open: Final[dict[tuple[int, bytes], StoreResources]] = {}
_lock = threading.Lock()


def open_resources(settings: StoreSettings) -> StoreResources:
    """What a process of a job uses, through the store's server where it cannot see its files.

    Which of both it is, is decided here, once.
    """
    return StoreResources(settings, server=server_to_ask(settings))


def open_existing(settings: StoreSettings) -> StoreResources:
    """`open_resources` of a store that has a catalog; UsageError if there is none: none is made."""
    missing = catalog_file(settings)
    if missing is not None and not missing.exists():
        raise UsageError(f"there is no catalog at {missing}: `forebay restore` makes one")
    return open_resources(settings)


def executor_resources(settings: StoreSettings) -> StoreResources:
    """The resources of this process for this store; not to be closed by their users."""
    key = (os.getpid(), pickle.dumps((settings, _catalog_inode(settings))))
    with _lock:
        found = _open.pop(key, None)
        if found is None:
            while len(_open) >= _STORES_MAX:
                _open.pop(next(iter(_open))).close()
            found = open_resources(settings)
        _open[key] = found  # the most recently used one last
        return found


def _catalog_inode(settings: StoreSettings) -> int | None:
    """Which file the catalog is: one that was removed and made anew is another."""
    path = catalog_file(settings)
    try:
        return None if path is None else path.stat().st_ino
    except OSError:
        return None


def close_executor_resources() -> None:
    """Closes what this process opened."""
    with _lock:
        for key in [key for key in _open if key[0] == os.getpid()]:
            _open.pop(key).close()


atexit.register(close_executor_resources)
