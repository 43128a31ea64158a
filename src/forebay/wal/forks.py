"""What becomes of open logs in a forked child: they belong to the parent.

The child has neither the parent's writer threads nor a right to its files. Were it to write what
the parent had queued, both would write it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


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
