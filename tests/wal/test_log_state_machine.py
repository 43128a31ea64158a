"""The log against a plain list, through power losses, kills, failures and retention.

After each crash the log must be a prefix of the list that holds at least everything that was
acknowledged as synced; the list is then cut to what the log says.
"""

from __future__ import annotations

import contextlib
import errno
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.errors import ForebayError, LogStopped, OffsetOutOfRange
from forebay.format.message import decode_messages
from forebay.settings import DeleterSettings, WalSettings
from forebay.testing import CrashDisk, Fault, FaultDisk, ManualClock
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.retention import Deleter
from forebay.wal.view import LogView
from forebay.wal.watermarks import Visibility

DIRECTORY = Path("/data/log")
EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))

seeds = st.integers(0, 2**32)
sizes = st.sampled_from([0, 1, 10, 60, 300])
durabilities = st.sampled_from(["buffered", "buffered", "synced"])


class LogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.power = CrashDisk(self.clock)
        self.log: list[bytes] = []
        """Everything that the log may hold; the index is the offset."""
        self.acknowledged = 0
        """How many of them were acknowledged as synced."""
        self.published = 0
        """How many of them another process may have seen."""
        self.start = 0
        self.start_max = 0
        """Where the log begins if an interrupted retention got to its end."""
        self.serial = 0
        self.wal: Wal | None = None

    @initialize(
        rotate=st.sampled_from([1, 200, 1000, None]),
        cache=st.sampled_from([0, 3, 1000]),
        batch=st.sampled_from([1, 500, 1 << 20]),
        queue=st.sampled_from([1, 400, 1 << 20]),
        short_writes=st.booleans(),
    )
    def begin(
        self, rotate: int | None, cache: int, batch: int, queue: int, short_writes: bool
    ) -> None:
        self.settings = WalSettings(
            dir=DIRECTORY,
            cache_capacity=cache,
            queue_max_bytes=queue,
            fsync_interval_ms=5000,
            fsync_max_batch_bytes=batch,
            rotate_max_bytes=rotate,
            rotate_max_seconds=60,
        )
        self.short_writes = short_writes
        self.open()

    # -- opening and ending ---------------------------------------------------------------------

    def open(self) -> None:
        """Opens the log behind its own `FaultDisk`, so that the log before it can be cut off."""
        dice = random.Random(self.serial) if self.short_writes else None
        self.disk = FaultDisk(self.power, short_writes=dice)
        self.pool = WriterPool(1, self.clock)
        self.clock.subscribe(self.pool.recheck)
        self.wal = Wal(self.settings, disk=self.disk, clock=self.clock, pool=self.pool)
        start, end = self.wal.start_offset, self.wal.current_offset()
        assert max(self.acknowledged, self.published) <= end <= len(self.log)
        assert self.start <= start <= self.start_max
        del self.log[end:]
        self.start = self.start_max = start
        self.acknowledged = end
        assert self.read(start, end, "synced") == self.log[start:]

    def end_process(self) -> None:
        """Nothing that the log does from now on reaches the disk."""
        assert self.wal is not None
        self.disk.inject(Fault("any", errno.EIO, times=None))
        with contextlib.suppress(ForebayError, OSError):
            self.wal.abandon()
        self.pool.close()
        self.note_acknowledged()  # including what was synced just before
        self.wal = None

    @property
    def open_wal(self) -> Wal:
        if self.wal is None:
            self.open()
        assert self.wal is not None
        return self.wal

    def note_acknowledged(self) -> None:
        assert self.wal is not None
        self.acknowledged = max(self.acknowledged, self.wal.watermarks().synced)

    @rule(seed=st.none() | seeds, torn=st.booleans())
    def lose_power(self, seed: int | None, torn: bool) -> None:
        self.open_wal  # noqa: B018
        self.end_process()
        self.power.crash(None if seed is None else random.Random(seed), torn=torn)

    @rule()
    def kill(self) -> None:
        self.open_wal  # noqa: B018
        self.end_process()
        self.power.kill()

    @rule()
    def shut_down(self) -> None:
        wal = self.open_wal
        wal.shutdown()
        wal.shutdown()
        self.pool.close()
        self.acknowledged = len(self.log)
        self.wal = None

    @rule(seed=st.none() | seeds)
    def shut_down_and_lose_power(self, seed: int | None) -> None:
        self.shut_down()
        self.power.crash(None if seed is None else random.Random(seed))

    # -- appending ------------------------------------------------------------------------------

    def payload(self, size: int) -> bytes:
        self.serial += 1
        return f"{self.serial}".encode().ljust(size, b".")

    def append_one(self, size: int, durability: Any) -> None:
        wal = self.open_wal
        payload = self.payload(size)
        self.log.append(payload)
        assert wal.append(payload, durability=durability) == len(self.log) - 1
        if durability == "synced":
            self.acknowledged = len(self.log)

    @rule(size=sizes, durability=durabilities)
    def append(self, size: int, durability: Any) -> None:
        self.open_wal  # noqa: B018
        self.append_one(size, durability)

    @rule(lengths=st.lists(sizes, max_size=12), durability=durabilities)
    def append_many(self, lengths: list[int], durability: Any) -> None:
        wal = self.open_wal
        batch = [self.payload(size) for size in lengths]
        first = len(self.log)
        self.log += batch
        assert wal.append_many(batch, durability=durability) == range(first, len(self.log))
        if durability == "synced" and batch:
            self.acknowledged = len(self.log)

    @rule()
    def flush(self) -> None:
        self.open_wal.flush()
        self.acknowledged = len(self.log)

    @rule()
    def rotate(self) -> None:
        wal = self.open_wal
        wal.rotate()
        self.acknowledged = len(self.log)

    @rule(seconds=st.sampled_from([0.1, 6, 61]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- failing --------------------------------------------------------------------------------

    @rule(
        skip=st.integers(0, 12),
        operation=st.sampled_from(["any", "sync", "append", "sync_dir", "create", "replace"]),
        forever=st.booleans(),
        seed=st.none() | seeds,
        restart=st.sampled_from(["reopen", "kill", "power"]),
        data=st.lists(st.tuples(sizes, durabilities), min_size=1, max_size=5),
    )
    def fail_then_restart(
        self,
        skip: int,
        operation: Any,
        forever: bool,
        seed: int | None,
        restart: str,
        data: list[tuple[int, str]],
    ) -> None:
        wal = self.open_wal
        self.disk.inject(Fault(operation, errno.EIO, skip=skip, times=None if forever else 1))
        try:
            for size, durability in data:
                self.append_one(size, durability)
            wal.rotate()
        except (LogStopped, OSError):
            pass
        self.disk.clear()
        if restart == "reopen":
            self.note_acknowledged()
            wal.abandon()
            self.note_acknowledged()
            self.pool.close()
            self.wal = None
            self.open()
        else:
            self.end_process()
            if restart == "kill":
                self.power.kill()
            else:
                self.power.crash(None if seed is None else random.Random(seed))

    # -- retention ------------------------------------------------------------------------------

    @rule(part=st.floats(0, 1))
    def retain(self, part: float) -> None:
        wal = self.open_wal
        committed = int(part * wal.watermarks().synced)
        self.note_acknowledged()
        dropped = wal.retain(EVERYTHING, committed)
        assert all(segment.end_offset <= committed for segment in dropped)
        self.start = self.start_max = wal.start_offset
        assert self.start <= committed or not dropped

    @rule(part=st.floats(0, 1), skip=st.integers(0, 10), seed=st.none() | seeds)
    def lose_power_during_retention(self, part: float, skip: int, seed: int | None) -> None:
        wal = self.open_wal
        wal.flush()
        self.note_acknowledged()
        self.disk.inject(Fault("any", errno.EIO, skip=skip, times=None))
        # A rotation by age, on the writer's thread, may meet the fault first and stop the log.
        with contextlib.suppress(LogStopped, OSError):
            wal.retain(EVERYTHING, int(part * len(self.log)))
        self.start_max = max(self.start, wal.start_offset)
        self.end_process()
        self.power.crash(None if seed is None else random.Random(seed))

    # -- reading --------------------------------------------------------------------------------

    def read(self, start: int, end: int, visibility: Visibility) -> list[bytes]:
        assert self.wal is not None
        with self.wal.tail_reader(start, end=end, visibility=visibility) as reader:
            messages = list(reader)
        assert [message.offset for message in messages] == list(range(start, end))
        return [message.payload for message in messages]

    @rule(
        first=st.floats(0, 1),
        last=st.floats(0, 1),
        visibility=st.sampled_from(["synced", "buffered"]),
    )
    def read_anywhere(self, first: float, last: float, visibility: Visibility) -> None:
        self.open_wal  # noqa: B018
        span = len(self.log) - self.start
        start = self.start + int(first * span)
        end = start + int(last * (len(self.log) - start))
        assert self.read(start, end, visibility) == self.log[start:end]
        if visibility == "synced" and start < end:
            self.acknowledged = max(self.acknowledged, end)

    @rule(first=st.floats(0, 1))
    def read_frames(self, first: float) -> None:
        wal = self.open_wal
        synced = wal.watermarks().synced
        start = self.start + int(first * (synced - self.start))
        reader = wal.tail_reader(start, end=synced)
        got = [m.payload for frames in reader.frames() for m in decode_messages(frames)]
        assert got == self.log[start:synced]

    @rule(after=st.integers(-1, 30))
    def read_the_cache(self, after: int) -> None:
        wal = self.open_wal
        messages, synced = wal.read_cached_since(after)
        offsets = [offset for offset, _ in messages]
        if offsets:
            assert offsets == list(range(offsets[0], synced))
            assert offsets[0] > after
        assert [message.payload for _, message in messages] == [self.log[at] for at in offsets]

    @rule()
    def read_outside(self) -> None:
        wal = self.open_wal
        for offset in (self.start - 1, len(self.log) + 1):
            with pytest.raises(OffsetOutOfRange) as caught:
                wal.tail_reader(offset)
            assert (caught.value.start, caught.value.end) == (self.start, len(self.log))

    @rule()
    def look_from_outside(self) -> None:
        wal = self.open_wal
        before = wal.watermarks().synced
        view = LogView(DIRECTORY, disk=self.power)
        # What is published is synced, though producers may not have been woken yet.
        assert before <= view.end_offset <= len(self.log)
        self.published = max(self.published, view.end_offset)
        with view.reader(self.start) as reader:
            assert [m.payload for m in reader] == self.log[self.start : view.end_offset]

    # -- always ---------------------------------------------------------------------------------

    @precondition(lambda self: self.wal is not None)
    @invariant()
    def watermarks_are_in_order(self) -> None:
        assert self.wal is not None
        marks = self.wal.watermarks()
        assert self.acknowledged <= marks.synced <= marks.appended == len(self.log)
        assert self.wal.start_offset == self.start

    @precondition(lambda self: self.wal is not None)
    @invariant()
    def segments_meet(self) -> None:
        assert self.wal is not None
        segments = [segment for segment in self.wal.segments() if segment.count]
        for older, newer in pairwise(segments):
            assert older.end_offset == newer.first_offset
            assert older.seq < newer.seq

    def teardown(self) -> None:
        if self.wal is not None:
            self.flush()
            assert self.read(self.start, len(self.log), "synced") == self.log[self.start :]
            self.shut_down()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(300)
def test_the_log_is_a_list_that_survives() -> None:
    run(150, 30)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_log_is_a_list_that_survives_for_long() -> None:
    run(4_000, 60)
