"""Many logs share a few threads, and one that hangs does not block another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from forebay.settings import StoreSettings
from forebay.testing import CrashDisk
from forebay.wal.pool import WriterPool
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    idle_threads,
    in_thread,
    wait_until,
)
from support.tiered_stores import store_on


def writer_threads() -> int:
    return sum(thread.name.startswith("forebay-writer") for thread in threading.enumerate())


def test_a_thousand_open_topics_share_a_few_threads() -> None:
    before = writer_threads()
    settings = StoreSettings(data=Path("/data"), writer_threads=3)
    with store_on(CrashDisk(), settings) as store:
        topics = [store.topic(f"topic-{number}") for number in range(1000)]
        for topic in topics:
            topic.append(b"x")
        for topic in topics[:200]:
            topic.append(b"y", durability="synced")
        assert writer_threads() - before <= 3
        assert all(topic.watermarks().synced == 2 for topic in topics[:200])
    wait_until(lambda: writer_threads() == before)


def test_a_log_whose_disk_hangs_does_not_hold_up_another_while_there_are_threads(
    gated: GatedDirectory,
) -> None:
    pool = WriterPool(2)
    slow = gated.open(pool=pool)
    other = LogDirectory(CrashDisk(), Path("/other"))
    fast = other.open(pool=pool)
    slow.append(b"warm", durability="synced")
    for turn in range(20):
        wait_until(lambda: idle_threads(pool) == pool.thread_count)
        gated.gate.shut()
        waiting = in_thread(lambda: slow.append(b"x", durability="synced"))
        assert (
            in_thread(lambda: fast.append(b"y", durability="synced")).result(PATIENCE_SECONDS)
            == turn
        )
        gated.gate.open()
        waiting.result(PATIENCE_SECONDS)
    fast.shutdown()
    slow.shutdown()
    pool.close()


def test_two_jobs_at_once_get_two_threads_though_one_is_idle() -> None:
    pool = WriterPool(2)
    idle = threading.Event()
    pool.submit(idle.set)
    assert idle.wait(PATIENCE_SECONDS)
    wait_until(lambda: idle_threads(pool) == 1)
    second_ran = threading.Event()
    first_saw_it = in_thread_job(pool, lambda: second_ran.wait(PATIENCE_SECONDS))
    pool.submit(second_ran.set)
    assert first_saw_it.result(PATIENCE_SECONDS)
    pool.close()


def in_thread_job(pool: WriterPool, call: Callable[[], bool]) -> Future[bool]:
    future: Future[bool] = Future()

    def job() -> None:
        future.set_result(call())

    pool.submit(job)
    return future
