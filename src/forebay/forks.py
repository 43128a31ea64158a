"""Hooks for objects that do not survive `os.fork`.

Connections (`registering`) are closed before a fork and opened again on both sides of it. Neither
SQLite nor gRPC survives a fork, because the child has copies of their locks, but not their threads.

Open logs and uploads (`disown_after_fork`) stay with the parent. The child has neither the parent's
threads nor the right to its files: if it wrote what the parent had queued, it would be written
twice. In the child they are closed.
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
        """Waits for running calls, blocks new ones, and closes what cannot be forked."""

    def after_fork_in_parent(self) -> None:
        """Lets calls in again."""

    def after_fork_in_child(self) -> None:
        """The same in the child; a thread that held a lock in the parent does not exist here."""


class Disownable(Protocol):
    def disown(self) -> None:
        """Called once, in the child, before it runs anything else."""


_lock: Final = threading.Lock()
_registered: Final[weakref.WeakSet[Forkable]] = weakref.WeakSet()
_forking: Final[list[Forkable]] = []
_owned: Final[weakref.WeakSet[Disownable]] = weakref.WeakSet()


@contextmanager
def registering(each: Forkable) -> Iterator[None]:
    """Registers `each` for every fork after the block. No fork happens during the block."""
    with _lock:
        yield
        _registered.add(each)


def disown_after_fork(owned: Disownable) -> None:
    """Calls `owned.disown` in every child forked while `owned` exists."""
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
