"""Which closed ledgers a topic's thresholds offload: pure decisions, without I/O.

A threshold of bytes keeps about so much of a topic local: going from the newest ledger to the
oldest, their sizes are added up, and every ledger at which the sum is *greater* than the threshold
is offloaded. The ledger that crosses it is one of them. A threshold of seconds offloads every
ledger that was closed so long ago. Either is enough. 0 bytes, or 0 seconds, offloads a ledger as
soon as it is closed; None, or a negative number, never offloads.

Beware: the sizes of offloaded ledgers count, although these are not offloaded again. That of the
open one does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from forebay.config.offload_policies import Thresholds


class LedgerFacts(Protocol):
    """What the decisions need to know of a ledger."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def size(self) -> int:
        """Bytes of its entries."""

    @property
    def closed_ms(self) -> int | None:
        """When it was closed, in milliseconds since 1970-01-01 UTC; None while it is open."""

    @property
    def offloaded(self) -> bool:
        """Whether its offload is complete."""


AnyLedger = TypeVar("AnyLedger", bound=LedgerFacts)


def select_ledgers(
    ledgers: Sequence[AnyLedger], thresholds: Thresholds, now_ms: int
) -> list[AnyLedger]:
    """Returns the ledgers to offload now, oldest first. `ledgers` are a topic's, oldest first."""
    if thresholds.off:
        return []
    size, age = thresholds.size_bytes, thresholds.age_seconds
    found: list[AnyLedger] = []
    summed = 0
    for ledger in reversed(ledgers):
        if ledger.closed_ms is None:
            continue
        summed += ledger.size
        if ledger.offloaded:
            continue
        large = size is not None and 0 <= size < summed
        # A clock that was put back shows an age below zero: such a ledger is not old.
        old = age is not None and age >= 0 and now_ms - ledger.closed_ms >= age * 1000
        if large or old:
            found.append(ledger)
    return found[::-1]


def next_due_ms(ledgers: Sequence[AnyLedger], thresholds: Thresholds) -> int | None:
    """Returns when the age alone makes the next ledger due; None if it never does.

    For a timer: the sizes change only when a message is appended, so they need none.
    """
    age = thresholds.age_seconds
    if age is None or age < 0:
        return None
    return min(
        (
            math.ceil(ledger.closed_ms + age * 1000)
            for ledger in ledgers
            if ledger.closed_ms is not None and not ledger.offloaded
        ),
        default=None,
    )


def lag_has_passed(offloaded_ms: int, lag_ms: int | None, now_ms: int) -> bool:
    """Whether the local copy of a ledger may go, so long after its offload was complete.

    A lag of None, or a negative one, never passes.
    """
    return lag_ms is not None and lag_ms >= 0 and now_ms - offloaded_ms > lag_ms
