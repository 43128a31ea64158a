"""The waiters of a watermark: woken before they are removed, and cheap to give up."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from forebay.wal import watermarks
from forebay.wal.watermarks import Waiters


class FakeWaiter:
    producer = False
    since = 0.0

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


@pytest.mark.parametrize("order", ["first to last", "last to first", "shuffled"])
def test_giving_up_does_not_look_at_all_the_others(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """As when many tasks that wait for their appends are cancelled: n log n steps in all."""
    waiters, all_of_them = Waiters(), [FakeWaiter() for _ in range(2000)]
    for target, waiter in enumerate(all_of_them, 1):
        waiters.add(target, waiter)
    steps = 0

    def heapify(heap: list[Any]) -> None:
        nonlocal steps
        steps += len(heap)
        real(heap)

    real = heapq.heapify
    monkeypatch.setattr(watermarks.heapq, "heapify", heapify)  # type: ignore[attr-defined]
    if order == "last to first":
        all_of_them.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(all_of_them)
    for left, waiter in enumerate(all_of_them, 1):
        assert waiters.discard(waiter)
        assert not waiters.discard(waiter)
        assert len(waiters) == len(all_of_them) - left
    assert steps < 3 * len(all_of_them)
    assert waiters.nearest > 2000
    assert not any(waiter.woken for waiter in all_of_them)


def test_the_nearest_target_is_that_of_somebody_who_still_waits() -> None:
    waiters, first, second = Waiters(), FakeWaiter(), FakeWaiter()
    waiters.add(5, first)
    waiters.add(9, second)
    assert waiters.nearest == 5
    waiters.discard(first)
    assert waiters.nearest == 9
    waiters.wake_reached(8)
    assert second.woken == 0
    waiters.wake_reached(9)
    assert (first.woken, second.woken, len(waiters)) == (0, 1, 0)


def test_a_waiter_whose_waking_raised_is_still_there_to_be_woken_again() -> None:
    class Interrupted(FakeWaiter):
        def wake(self) -> None:
            super().wake()
            if self.woken == 1:
                raise KeyboardInterrupt

    waiters, interrupted, after = Waiters(), Interrupted(), FakeWaiter()
    waiters.add(1, interrupted)
    waiters.add(2, after)
    with pytest.raises(KeyboardInterrupt):
        waiters.wake_reached(2)
    assert len(waiters) == 2
    waiters.wake_reached(2)
    assert (interrupted.woken, after.woken, len(waiters)) == (2, 1, 0)
