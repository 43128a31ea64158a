"""The machine's own clocks."""

from __future__ import annotations

import time

import pytest

from forebay.clock import SYSTEM_CLOCK


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
