"""The clock that tests move."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.testing import CrashDisk, ManualClock


def test_a_manual_clock_moves_when_told_and_tells_its_subscribers() -> None:
    clock = ManualClock()
    seen: list[int] = []
    clock.subscribe(lambda: seen.append(clock.now_ms()))
    clock.advance(0.0015)
    clock.advance(2)
    assert seen == [1_700_000_000_001, 1_700_000_002_001]
    assert clock.monotonic() == 2.0015
    with pytest.raises(ValueError, match="goes back"):
        clock.advance(-1)


def test_the_time_of_day_can_jump_both_ways_while_the_monotonic_time_goes_on() -> None:
    clock = ManualClock(5_000)
    clock.jump(60)
    assert (clock.now_ms(), clock.monotonic()) == (65_000, 0.0)
    clock.jump(-100)
    clock.advance(1)
    assert (clock.now_ms(), clock.monotonic()) == (-34_000, 1.0)


def test_a_crash_disk_stamps_its_files_with_the_clock_it_was_given() -> None:
    clock = ManualClock(5_000)
    disk = CrashDisk(clock)
    file = disk.create(Path("file"))
    clock.advance(2.5)
    assert disk.modified(Path("file")) == 5.0
    file.append(b"data")
    assert disk.modified(Path("file")) == 7.5
