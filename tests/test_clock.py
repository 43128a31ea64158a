"""The machine's own clocks."""

from __future__ import annotations

import time

import pytest

from forebay.clock import SYSTEM_CLOCK, JumpWatch, since_1970
from forebay.limits import CLOCK_HOLD_SECONDS, CLOCK_JUMP_SECONDS
from forebay.testing import ManualClock


def test_intervals_go_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end while a machine sleeps, so the time since boot counts, sleep included."""
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5000.25}.__getitem__)
    assert SYSTEM_CLOCK.monotonic() == 5000.25


def test_intervals_are_in_seconds_and_never_go_back() -> None:
    first = time.clock_gettime(time.CLOCK_BOOTTIME)
    seen = [SYSTEM_CLOCK.monotonic() for _ in range(100)]
    last = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert [first, *seen, last] == sorted([first, *seen, last])


def test_the_time_of_day_is_in_whole_units_since_1970() -> None:
    before = time.time_ns()
    now_ns, now_ms = SYSTEM_CLOCK.now_ns(), SYSTEM_CLOCK.now_ms()
    after = time.time_ns()
    assert before <= now_ns <= after
    assert before // 1_000_000 <= now_ms <= after // 1_000_000
    assert type(now_ns) is type(now_ms) is int


def test_a_clock_before_1970_stands_at_1970() -> None:
    clock = ManualClock(now_ms=-1500)
    shown = since_1970(clock)
    assert (shown.now_ms(), shown.now_ns(), shown.monotonic()) == (0, 0, 0.0)
    clock.advance(2)
    assert (shown.now_ms(), shown.monotonic()) == (500, 2.0)
    assert since_1970(shown) is shown


def test_the_clock_of_the_machine_is_used_as_it_is() -> None:
    assert since_1970(SYSTEM_CLOCK) is SYSTEM_CLOCK


def test_a_jump_of_the_clock_is_noticed_once_and_waited_out() -> None:
    clock = ManualClock()
    watch = JumpWatch(clock)
    clock.advance(1e8)
    clock.jump(CLOCK_JUMP_SECONDS - 1)
    assert watch.look() is None
    assert watch.steady
    clock.jump(2)
    assert watch.look() == pytest.approx(CLOCK_JUMP_SECONDS + 1)
    assert watch.look() is None
    steady = []
    for seconds in (CLOCK_HOLD_SECONDS - 1, 1):
        clock.advance(seconds)
        steady.append(watch.steady)
    assert steady == [False, True]
    clock.jump(-1e8)
    assert watch.look() == pytest.approx(-1e8)
