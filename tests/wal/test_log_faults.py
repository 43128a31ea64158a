"""Disks that fail: all who wait get the error, the log stops, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.errors import LogStopped
from forebay.testing import CrashDisk, FaultDisk, ManualClock
from forebay.testing.faults import Operation
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.view import LogView
from support.disks import (
    PATIENCE_SECONDS,
    LogDirectory,
    errno_text,
    in_thread,
    payloads,
    texts,
    wait_until,
    waiting,
)
from support.faulty_disks import EVERYTHING, FaultyDirectory, faulty_directory


@pytest.fixture
def faulty() -> Iterator[FaultyDirectory]:
    directory = faulty_directory()
    yield directory
    directory.faults.clear()
    directory.close()


SEGMENT_FAULTS: dict[str, tuple[Operation, int, str, int | None]] = {
    "no space": ("append", errno.ENOSPC, ".log", None),
    "no space after a part": ("append", errno.ENOSPC, ".log", 13),
    "write error": ("append", errno.EIO, ".log", None),
    "write error after a part": ("append", errno.EIO, ".log", 7),
    "failed sync": ("sync", errno.EIO, ".log", None),
    "failed sync for want of space": ("sync", errno.ENOSPC, ".log", None),
    "failed publication": ("write_at", errno.EIO, "wal.synced", None),
}


@pytest.fixture(params=sorted(SEGMENT_FAULTS))
def broken(request: pytest.FixtureRequest, faulty: FaultyDirectory) -> tuple[FaultyDirectory, Wal]:
    """A log with 5 synced messages, whose next commit fails."""
    wal = faulty.open()
    wal.append_many(texts(0, 5), durability="synced")
    operation, code, path, partial = SEGMENT_FAULTS[request.param]
    faulty.fail(operation, code, path, partial=partial)
    return faulty, wal


def append_until_refused(wal: Wal, wanted: list[bytes]) -> None:
    for payload in wanted:
        offset = wal.append(payload, durability="synced")
        assert wal.watermarks().synced > offset


# -- who gets the error -------------------------------------------------------------------------


def test_the_error_reaches_every_append_that_waited(broken: tuple[FaultyDirectory, Wal]) -> None:
    _, wal = broken
    offsets = [wal.append(payload) for payload in texts(5, 8)]
    waits = [in_thread(lambda offset=offset: wal.wait(offset)) for offset in offsets]  # type: ignore[misc]
    appends = [in_thread(lambda: wal.append(b"x", durability="synced")) for _ in range(4)]
    many = in_thread(lambda: wal.append_many([b"y"] * 3, durability="synced"))
    everybody: list[Future[Any]] = [*waits, *appends, many]
    for each in everybody:
        with pytest.raises(LogStopped) as caught:
            each.result(PATIENCE_SECONDS)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.synced == 5
    assert wal.stopped


async def test_the_error_reaches_every_task_that_waited(
    broken: tuple[FaultyDirectory, Wal],
) -> None:
    _, wal = broken
    tasks = [
        asyncio.create_task(wal.append_async(b"x", durability="synced")),
        asyncio.create_task(wal.append_async(b"y", durability="synced")),
        asyncio.create_task(anext(wal.async_reader("latest"))),
    ]
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [type(result) for result in results] == [LogStopped] * 3
    with pytest.raises(LogStopped):
        await wal.append_async(b"later")


def test_a_stopped_log_refuses_everything_and_says_why(broken: tuple[FaultyDirectory, Wal]) -> None:
    directory, wal = broken
    live = wal.tail_reader("latest")
    reading = in_thread(lambda: next(live))
    wait_until(lambda: waiting(wal) == 1)
    with pytest.raises(LogStopped):
        wal.append(b"x", durability="synced")
    with pytest.raises(LogStopped):
        reading.result(PATIENCE_SECONDS)
    before = directory.contents()
    for call in (
        lambda: wal.append(b"x"),
        lambda: wal.append(b"x", durability="synced"),
        lambda: wal.append_many([b"x"]),
        lambda: wal.append_message(forebay.StreamMessage(b"x")),
        lambda: wal.wait(5),
        wal.flush,
        wal.rotate,
        lambda: wal.retain(EVERYTHING, 5),
        lambda: next(wal.tail_reader("latest")),
        lambda: next(wal.tail_reader(5)),
    ):
        with pytest.raises(LogStopped):
            call()
    assert directory.contents() == before, "after an error nothing is written any more"


def test_what_was_synced_can_still_be_read_from_a_stopped_log(
    broken: tuple[FaultyDirectory, Wal],
) -> None:
    directory, wal = broken
    with pytest.raises(LogStopped):
        wal.append(b"x", durability="synced")
    assert payloads(wal) == texts(0, 5)
    assert [m.payload for m in LogView(directory.path, disk=directory.disk).reader(0)] == texts(
        0, 5
    )


def test_producers_that_wait_for_room_are_told(faulty: FaultyDirectory) -> None:
    wal = faulty.open(queue_max_bytes=2000)
    wal.append(b"first", durability="synced")
    faulty.fail("sync", path=".log")
    told = [in_thread(lambda: [wal.append(bytes(300)) for _ in range(100)]) for _ in range(3)]
    many = in_thread(lambda: wal.append_many([bytes(300)] * 100))
    everybody: list[Future[Any]] = [*told, many]
    for producer in everybody:
        with pytest.raises(LogStopped):
            producer.result(PATIENCE_SECONDS)


def test_shutting_down_a_stopped_log_says_that_messages_are_in_doubt_and_releases_it(
    broken: tuple[FaultyDirectory, Wal],
) -> None:
    directory, wal = broken
    wal.append(b"in doubt")
    with pytest.raises(LogStopped):
        wal.shutdown()
    directory.faults.clear()
    assert payloads(directory.open())[:5] == texts(0, 5)


def test_readers_of_a_file_that_cannot_be_read_get_the_error_and_can_try_again(
    faulty: FaultyDirectory,
) -> None:
    wal = faulty.open(cache_capacity=0)
    wal.append_many(texts(0, 50), durability="synced")
    reader = wal.tail_reader(0, end=50)
    faulty.fail("read_into", times=2)
    for _ in range(2):
        with pytest.raises(OSError, match=errno_text(errno.EIO)):
            next(reader)
    assert [m.payload for m in reader] == texts(0, 50)
    assert not wal.stopped
    assert wal.append(b"unharmed", durability="synced") == 50


# -- what is there afterwards -------------------------------------------------------------------


def test_a_stopped_log_is_opened_again_with_everything_that_was_acknowledged(
    broken: tuple[FaultyDirectory, Wal],
) -> None:
    directory, wal = broken
    with pytest.raises(LogStopped):
        wal.append_many(texts(5, 8), durability="synced")
    reopened = directory.reopen()
    served = payloads(reopened)
    assert served == texts(0, len(served))
    assert len(served) >= 5
    assert reopened.append(b"next", durability="synced") == len(served)
    directory.power.crash()
    assert payloads(directory.open()) == [*served, b"next"]


@pytest.mark.parametrize("crash_seed", [None, *range(8)])
@pytest.mark.parametrize("noted", [True, False])
def test_what_is_served_after_a_failed_sync_survives_a_power_loss(
    faulty: FaultyDirectory, noted: bool, crash_seed: int | None
) -> None:
    wal = faulty.open()
    wal.append_many(texts(0, 5), durability="synced")
    faulty.fail("sync", path=".log")
    if not noted:
        faulty.fail("create", path="wal.failed")
    with pytest.raises(LogStopped):
        wal.append_many(texts(5, 8), durability="synced")
    assert ("wal.failed" in faulty.names()) is noted
    reopened = faulty.reopen()
    served = payloads(reopened)
    assert served[:5] == texts(0, 5)
    faulty.power.crash(None if crash_seed is None else random.Random(crash_seed))
    again = payloads(faulty.open())
    assert again == served


def test_a_failed_sync_is_not_tried_again(faulty: FaultyDirectory) -> None:
    wal = faulty.open()
    wal.append(b"synced", durability="synced")
    faulty.fail("sync", path=".log")
    with pytest.raises(LogStopped):
        wal.append(b"lost", durability="synced")
    for _ in range(3):
        with pytest.raises(LogStopped):
            wal.flush()
        with pytest.raises(LogStopped):
            wal.append(b"more", durability="synced")
    assert wal.watermarks().synced == 1
    faulty.power.crash()
    assert payloads(faulty.open()) == [b"synced"]


def test_a_disk_that_stays_broken_can_be_opened_once_it_is_mended(faulty: FaultyDirectory) -> None:
    wal = faulty.open()
    wal.append(b"one", durability="synced")
    faulty.fail("any", times=None)
    with pytest.raises(LogStopped):
        wal.append(b"two", durability="synced")
    wal.abandon()
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            faulty.open()
    faulty.faults.clear()
    reopened = faulty.open()
    assert payloads(reopened)[:1] == [b"one"]
    assert reopened.append(b"three", durability="synced") in {1, 2}


def test_a_full_disk_stops_the_log_and_room_starts_it_again(faulty: FaultyDirectory) -> None:
    wal = faulty.open()
    wal.append_many(texts(0, 5), durability="synced")
    faulty.faults.space = 300
    with pytest.raises(LogStopped) as caught:
        append_until_refused(wal, texts(5, 100))
    acknowledged = wal.watermarks().synced
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert payloads(wal) == texts(0, acknowledged)
    reopened = faulty.reopen()
    served = payloads(reopened)
    assert len(served) >= acknowledged
    assert served == texts(0, len(served))
    assert reopened.append(b"next", durability="synced") == len(served)


def test_short_writes_are_no_error_at_all() -> None:
    crash = CrashDisk()
    faults = FaultDisk(crash, short_writes=random.Random(7))
    directory = LogDirectory(faults, Path("/log"), crash)
    wal = directory.open(rotate_max_bytes=3000)
    for payload in texts(0, 200):
        wal.append(payload, durability="synced")
    crash.crash()
    assert payloads(directory.open()) == texts(0, 200)
    directory.close()


# -- rotation, checkpoints, retention -----------------------------------------------------------

ROTATION_FAULTS: list[tuple[Operation, str]] = [
    ("sync", ".log"),
    ("create", "wal.1.log"),
    ("sync_dir", "log"),
    ("append", "wal.1.log"),
    ("sync", "wal.1.log"),
    ("create", "wal.ckpt.tmp"),
    ("append", "wal.ckpt.tmp"),
    ("sync", "wal.ckpt.tmp"),
    ("replace", "wal.ckpt"),
    ("write_at", "wal.synced"),
]


@pytest.mark.parametrize("how", ["full", "asked", "old"])
@pytest.mark.parametrize(("operation", "path"), ROTATION_FAULTS)
def test_a_failure_in_the_middle_of_a_rotation_stops_the_log_and_loses_nothing(
    faulty: FaultyDirectory, operation: Operation, path: str, how: str
) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = faulty.open(
        clock=clock,
        pool=pool,
        rotate_max_bytes=10_000 if how == "full" else None,
        rotate_max_seconds=60,
    )
    wal.append_many(texts(0, 5, 1000), durability="synced")
    faulty.fail(operation, path=path)

    def go_on() -> None:
        if how == "asked":
            wal.rotate()
        elif how == "old":
            clock.advance(61)
            wait_until(lambda: wal.stopped or wal.segments()[-1].index is None)
        append_until_refused(wal, texts(5, 40, 1000))

    with pytest.raises(LogStopped):
        go_on()
    acknowledged = wal.watermarks().synced
    pool.close()
    assert payloads(wal) == texts(0, acknowledged, 1000)
    reopened = faulty.reopen()
    served = payloads(reopened)
    assert len(served) >= acknowledged
    assert served == texts(0, len(served), 1000)
    assert reopened.append(b"next", durability="synced") == len(served)
    reopened.rotate()
    faulty.power.crash(random.Random(1))
    assert payloads(faulty.open()) == [*served, b"next"]


def test_an_index_that_cannot_be_written_stops_nothing(faulty: FaultyDirectory) -> None:
    wal = faulty.open(cache_capacity=0)
    wal.append_many(texts(0, 5), durability="synced")
    faulty.fail("create", errno.ENOSPC, ".idx")
    wal.rotate()
    assert wal.append(b"next", durability="synced") == 5
    assert payloads(wal, 3) == [*texts(3, 5), b"next"]


RETENTION_FAULTS: list[tuple[Operation, str]] = [
    ("create", "wal.ckpt.tmp"),
    ("sync", "wal.ckpt.tmp"),
    ("replace", "wal.ckpt"),
    ("write_at", "wal.synced"),
    ("unlink", "wal.log"),
    ("unlink", "wal.1.log"),
    ("unlink", "wal.idx"),
    ("sync_dir", "log"),
]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize(("operation", "path"), RETENTION_FAULTS)
def test_a_failure_in_the_middle_of_retention_loses_nothing_that_should_stay(
    faulty: FaultyDirectory, operation: Operation, path: str, skip: int
) -> None:
    wal = faulty.open(rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    committed = wal.segments()[3].end_offset
    faulty.fail(operation, path=path, skip=skip)
    try:
        wal.retain(EVERYTHING, committed)
    except OSError:
        assert wal.stopped
        with pytest.raises(LogStopped):
            wal.append(b"x")
    faulty.power.crash(random.Random(skip))
    faulty.faults.clear()
    reopened = faulty.open()
    start = reopened.start_offset
    assert start <= committed
    assert payloads(reopened) == texts(start, 40)


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_an_error_but_not_a_loss(
    faulty: FaultyDirectory,
) -> None:
    wal = faulty.open()
    wal.append(b"one", durability="synced")
    wal.append(b"two")
    faulty.fail("create", errno.ENOSPC, "wal.ckpt.tmp")
    with pytest.raises(OSError, match=errno_text(errno.ENOSPC)):
        wal.shutdown()
    wal.shutdown()
    assert payloads(faulty.open()) == [b"one", b"two"]
