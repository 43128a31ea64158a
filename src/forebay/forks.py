"""What a fork does to things that do not survive one.

Connections are closed before a fork and made anew on both sides of it (`registering`): neither
SQLite nor gRPC survives one, as their locks and threads are the parent's and the child's copy of
the memory says otherwise.

Open logs and uploads stay the parent's (`disown_after_fork`): the child has neither the parent's
threads nor a right to its files. Were it to write what the parent had queued, both would write it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol


class Forkable(Protocol):
    def before_fork(self) -> None:
        """Waits for what is running, keeps the rest out, and closes what cannot be forked."""

    def after_fork_in_parent(self) -> None: ...

    def after_fork_in_child(self) -> None:
        """Locks are as they were in the parent, whose other threads are not here."""


class Disownable(Protocol):
    def disown(self) -> None:
        """Called once, in the child, before it runs anything else."""


_lock: Final = threading.Lock()
_registered: Final[weakref.WeakSet[Forkable]] = weakref.WeakSet()
_forking: Final[list[Forkable]] = []
_owned: Final[weakref.WeakSet[Disownable]] = weakref.WeakSet()


@contextmanager
def registering(each: Forkable) -> Iterator[None]:
    """No fork happens inside; after it, the methods of `each` are called at every fork."""
    with _lock:
        yield
        _registered.add(each)


def disown_after_fork(owned: Disownable) -> None:
    """Has `owned.disown` called in every child that is forked while it exists."""
    _owned.add(owned)


def _before() -> None:
    _lock.acquire()
    for each in list(_registered):
        each.before_fork()
        _forking.append(each)


def _after_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()
    _lock.release()


def _after_in_child() -> None:
    try:
        while _forking:
            _forking.pop().after_fork_in_child()
    finally:
        _lock.release()
        for owned in list(_owned):
            owned.disown()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
