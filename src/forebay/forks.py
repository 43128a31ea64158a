"""Has connections let go of before a fork, and taken up again on both sides of it.

Neither SQLite nor gRPC survives one: their locks and threads are the parent's, and the child's
copy of the memory says otherwise.
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


_lock: Final = threading.Lock()
_known: Final[weakref.WeakSet[Forkable]] = weakref.WeakSet()
_forking: Final[list[Forkable]] = []


@contextmanager
def registering(each: Forkable) -> Iterator[None]:
    """No fork happens inside; after it, `each` hears of every fork as long as it exists."""
    with _lock:
        yield
        _known.add(each)


def _before() -> None:
    _lock.acquire()
    for each in list(_known):
        each.before_fork()
        _forking.append(each)


def _after_in_parent() -> None:
    while _forking:
        _forking.pop().after_fork_in_parent()
    _lock.release()


def _after_in_child() -> None:
    while _forking:
        _forking.pop().after_fork_in_child()
    _lock.release()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


# ---- What becomes of open logs in a forked child: they belong to the parent.
#
# The child has neither the parent's writer threads nor a right to its files. Were it to write
# what the parent had queued, both would write it.


class Disownable(Protocol):
    def disown(self) -> None:
        """Called once, in the child, before it runs anything else."""


_open: weakref.WeakSet[Disownable] = weakref.WeakSet()


def disown_after_fork(owned: Disownable) -> None:
    """Has `owned.disown` called in every child that is forked while it exists."""
    _open.add(owned)


def _in_child() -> None:
    for owned in list(_open):
        owned.disown()


os.register_at_fork(after_in_child=_in_child)
