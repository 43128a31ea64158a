"""Rotation: a segment that is full or old is sealed, and another follows."""

from __future__ import annotations

from forebay.testing import ManualClock
from forebay.wal.pool import Job, WriterPool
from support.disks import LogDirectory, payloads, texts, wait_until
from support.log_steps import synced


def test_a_segment_that_is_full_is_followed_by_another(directory: LogDirectory) -> None:
    wal = directory.open(rotate_max_bytes=1000)
    for payload in texts(0, 100):
        wal.append(payload, durability="synced")
    segments = wal.segments()
    assert len(segments) > 5
    assert all(1000 <= segment.size < 1200 for segment in segments[:-1])
    assert [segment.seq for segment in segments] == list(range(len(segments)))
    assert payloads(wal) == texts(0, 100)


def test_rotation_is_by_size_within_one_large_commit_too(directory: LogDirectory) -> None:
    wal = directory.open(rotate_max_bytes=5000)
    for payload in texts(0, 500):
        wal.append(payload)
    wal.append_many(texts(500, 1000))
    wal.flush()
    assert all(segment.size < 12_000 for segment in wal.segments())
    wal.shutdown()
    assert payloads(directory.open()) == texts(0, 1000)


def test_a_segment_that_is_old_is_sealed_even_if_nothing_is_appended(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    wal.append(b"one", durability="synced")
    first = wal.segments()[0]
    assert first.index is not None
    clock.advance(59)
    assert wal.segments()[-1].index is not None
    clock.advance(2)
    wait_until(lambda: wal.segments()[-1].index is None)
    wal.append(b"two", durability="synced")
    assert [segment.first_offset for segment in wal.segments()] == [0, 1]
    clock.advance(61)
    wait_until(lambda: wal.segments()[-1].index is None)
    assert payloads(wal) == [b"one", b"two"]
    wal.shutdown()
    pool.close()


def test_an_empty_segment_is_never_sealed(directory: LogDirectory) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    for _ in range(5):
        wal.rotate()
        clock.advance(100)
    assert wal.segments() == []
    wal.append(b"one", durability="synced")
    for _ in range(5):
        wal.rotate()
        clock.advance(100)
    assert len(wal.segments()) == 1
    wal.shutdown()
    pool.close()


def test_a_log_that_rotates_often_does_not_pile_up_timers(directory: LogDirectory) -> None:
    class CountingPool(WriterPool):
        timers = 0

        def call_at(self, when: float, job: Job) -> None:
            self.timers += 1
            super().call_at(when, job)

    pool = CountingPool(1, ManualClock())  # no timer ends, as no time passes
    wal = directory.open(pool=pool, rotate_max_bytes=1)
    for _ in range(50):
        wal.append(b"x", durability="synced")
    assert len(wal.segments()) == 50
    assert pool.timers < 5
    wal.shutdown()
    pool.close()


def test_a_clock_that_goes_back_keeps_the_log_going(directory: LogDirectory) -> None:
    class JumpingClock(ManualClock):
        jump_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.jump_ms

    clock = JumpingClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60, fsync_interval_ms=1000)
    wal.append(b"one", durability="synced")
    clock.jump_ms = -86_400_000
    wal.append(b"two")
    clock.advance(2)
    wait_until(lambda: synced(wal) == 2)
    clock.advance(100)
    wal.append(b"three", durability="synced")
    wal.shutdown()
    reopened = directory.open(clock=clock, pool=pool)
    assert payloads(reopened) == [b"one", b"two", b"three"]
    reopened.shutdown()
    pool.close()


TEN_YEARS = 10 * 365 * 86_400.0


def test_a_jump_of_the_clock_and_back_does_not_keep_a_segment_from_growing_old(
    directory: LogDirectory,
) -> None:
    """The segment is created in the future; it would be sealed in ten years."""
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    clock.jump(TEN_YEARS)
    wal.append(b"one", durability="synced")
    clock.jump(-TEN_YEARS)
    clock.advance(59)
    wal.append(b"two", durability="synced")
    assert wal.segments()[-1].index is not None
    clock.advance(2)
    wait_until(lambda: wal.segments()[-1].index is None)
    wal.shutdown()
    pool.close()


def test_a_jump_of_the_clock_forward_seals_no_segment_before_its_time(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    wal.append(b"one", durability="synced")
    clock.jump(TEN_YEARS)
    wal.append(b"two", durability="synced")
    assert len(wal.segments()) == 1
    wal.shutdown()
    pool.close()


def test_a_segment_that_an_earlier_process_began_in_the_future_is_new(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    clock.jump(TEN_YEARS)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    wal.append(b"one", durability="synced")
    wal.shutdown()
    clock.jump(-TEN_YEARS)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=60)
    clock.advance(59)
    assert wal.segments()[-1].index is not None
    clock.advance(2)
    wait_until(lambda: wal.segments()[-1].index is None)
    wal.shutdown()
    pool.close()


def test_limits_that_change_count_from_then_on(directory: LogDirectory) -> None:
    wal = directory.open(rotate_max_bytes=1000, rotate_max_seconds=None)
    wal.configure_rotation(None, None)
    for payload in texts(0, 50):
        wal.append(payload, durability="synced")
    assert len(wal.segments()) == 1
    wal.configure_rotation(1000, None)
    for payload in texts(50, 100):
        wal.append(payload, durability="synced")
    first, *others = wal.segments()
    assert first.size > 5000
    assert len(others) > 3
    assert all(segment.size < 1200 for segment in others)
    assert payloads(wal) == texts(0, 100)


def test_a_shorter_age_seals_a_segment_that_is_waiting_for_a_longer_one(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, rotate_max_seconds=3600)
    wal.append(b"one", durability="synced")
    clock.advance(30)
    wal.configure_rotation(None, 60)
    clock.advance(31)
    wait_until(lambda: wal.segments()[-1].index is None)
    wal.append(b"two", durability="synced")
    wal.configure_rotation(None, None)
    clock.advance(10_000)
    wal.append(b"three", durability="synced")
    assert [segment.first_offset for segment in wal.segments()] == [0, 1]
    wal.shutdown()
    pool.close()
