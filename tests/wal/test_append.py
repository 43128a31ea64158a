"""Appending: order, durability, back-pressure, rotation, shutting down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import forebay
from disks import (
    NEVER_MS,
    PATIENCE_SECONDS,
    GatedPlace,
    Place,
    WatchedDisk,
    in_thread,
    on_local_disk,
    payloads,
    texts,
    wait_until,
)
from forebay.errors import (
    LogClosed,
    LogStopped,
    MessageTooLarge,
    OffsetOutOfRange,
    UsageError,
    WaitTimeout,
)
from forebay.format.message import MessageId, StreamMessage
from forebay.limits import MESSAGE_BYTES_MAX
from forebay.settings import StoreSettings, WalSettings
from forebay.testing import CrashDisk, ManualClock
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool


def synced(wal: Wal) -> int:
    return wal.watermarks().synced


# -- offsets and durability ---------------------------------------------------------------------


def test_offsets_are_consecutive_from_zero_whatever_the_way_in(place: Place) -> None:
    wal = place.open()
    assert wal.append(b"a") == 0
    assert wal.append_many([b"b", b"c"]) == range(1, 3)
    assert wal.append_message(StreamMessage(b"d", msg_id=MessageId(topic_name="/a/b"))) == 3
    assert wal.append(b"e", durability="synced") == 4
    assert wal.append_many([]) == range(5, 5)
    assert wal.current_offset() == 5
    assert payloads(wal) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_buffered_append_returns_before_anything_is_synced(gated_place: GatedPlace) -> None:
    wal = gated_place.open()
    gated_place.gate.shut()
    for number in range(100):
        assert wal.append(b"x") == number
    assert wal.watermarks() == forebay.Watermarks(appended=100, synced=0)
    gated_place.gate.open()
    wal.flush()
    assert synced(wal) == 100


def test_a_synced_append_returns_only_after_the_sync(gated_place: GatedPlace) -> None:
    wal = gated_place.open()
    gated_place.gate.shut()
    waiting = in_thread(lambda: wal.append(b"x", durability="synced"))
    assert gated_place.gate.reached.wait(PATIENCE_SECONDS)
    assert not waiting.done()
    with pytest.raises(WaitTimeout):
        wal.wait(0, timeout=0.01)
    gated_place.gate.open()
    assert waiting.result(PATIENCE_SECONDS) == 0
    wal.wait(0, timeout=0)


def test_durability_can_be_awaited_later(place: Place) -> None:
    wal = place.open()
    offsets = [wal.append(payload) for payload in texts(0, 10)]
    wal.wait(offsets[3])
    assert synced(wal) >= 4
    wal.flush()
    assert synced(wal) == 10
    for bad in (-1, 10, 11):
        with pytest.raises(OffsetOutOfRange):
            wal.wait(bad)


def test_whoever_waits_has_the_log_commit_at_once_whatever_the_interval(place: Place) -> None:
    clock = ManualClock()
    wal = place.open(clock=clock)
    wal.append(b"nobody waits")
    assert wal.append(b"somebody does", durability="synced") == 1
    assert synced(wal) == 2


def test_the_interval_bounds_how_long_a_message_stays_unsynced(place: Place) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = place.open(clock=clock, pool=pool, fsync_interval_ms=5000)
    for turn in range(1, 4):
        wal.append(b"x")
        clock.advance(4.999)
        assert synced(wal) == turn - 1
        clock.advance(0.002)
        wait_until(lambda: synced(wal) == wal.current_offset())
    wal.shutdown()
    pool.close()


@pytest.mark.parametrize("many", [False, True])
def test_a_full_batch_is_committed_though_nobody_waits(place: Place, many: bool) -> None:
    wal = place.open(clock=ManualClock(), fsync_max_batch_bytes=4096)
    if many:
        wal.append_many([bytes(100)] * 60)
    else:
        for _ in range(60):
            wal.append(bytes(100))
    wait_until(lambda: synced(wal) > 0)


def test_a_synced_append_survives_a_power_loss_and_a_buffered_one_need_not(
    crashing: Place,
) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    wal.append(b"synced", durability="synced")
    wal.append(b"buffered")
    crashing.crash.crash()
    assert payloads(crashing.open()) == [b"synced"]


def test_many_threads_get_every_offset_once_and_the_log_holds_what_each_appended(
    place: Place,
) -> None:
    wal = place.open(rotate_max_bytes=10_000)
    seen: dict[int, bytes] = {}

    def produce(number: int) -> None:
        rng = random.Random(number)
        for turn in range(60):
            payload = f"{number}:{turn}".encode().ljust(rng.randint(1, 300))
            if turn % 7 == 0:
                batch = [payload + bytes([part]) for part in range(3)]
                seen.update(zip(wal.append_many(batch), batch, strict=True))
            else:
                durability = "synced" if turn % 3 == 0 else "buffered"
                seen[wal.append(payload, durability=durability)] = payload  # type: ignore[arg-type]

    producers = [in_thread(lambda number=number: produce(number)) for number in range(6)]  # type: ignore[misc]
    for producer in producers:
        producer.result(PATIENCE_SECONDS)
    wal.flush()
    assert sorted(seen) == list(range(wal.current_offset()))
    assert payloads(wal) == [seen[offset] for offset in sorted(seen)]
    wal.shutdown()
    assert payloads(place.open()) == [seen[offset] for offset in sorted(seen)]


def test_what_a_message_carries_comes_back(place: Place) -> None:
    clock = ManualClock()
    wal = place.open(clock=clock)
    wal.append(b"payload", {"k": "v", "ü": "€"}, "key", "synced")
    wal.append_many([b"a", b"b"], [{"n": "1"}, None], [None, "r"], "synced")
    first, second, third = wal.tail_reader(0, end=3)
    assert (first.payload, first.attributes, first.routing_key) == (
        b"payload",
        {"k": "v", "ü": "€"},
        "key",
    )
    assert first.publish_time == clock.now_ms()
    assert first.msg_id.topic_name == wal.topic
    assert (second.attributes, second.routing_key) == ({"n": "1"}, None)
    assert (third.attributes, third.routing_key) == ({}, "r")


# -- refusals -----------------------------------------------------------------------------------


def test_a_bad_argument_is_refused_before_anything_is_appended(place: Place) -> None:
    wal = place.open()
    with pytest.raises(UsageError):
        wal.append(b"x", durability="uploaded")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        wal.append_many([b"x"], durability="")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        wal.append_message(StreamMessage(b"x"), durability="fsync")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        wal.append_many([b"x"], attributes=[None, None])
    with pytest.raises(UsageError):
        wal.append_many([b"x", b"y"], routing_keys=["k"])
    with pytest.raises(TypeError):
        wal.append("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        wal.append(b"x", {"k": 1})  # type: ignore[dict-item]
    assert wal.current_offset() == 0
    assert wal.append(b"fine", durability="synced") == 0
    assert payloads(wal) == [b"fine"]


async def test_a_bad_durability_is_refused_in_asyncio_too(place: Place) -> None:
    wal = place.open()
    with pytest.raises(UsageError):
        await wal.append_async(b"x", durability="both")  # type: ignore[arg-type]
    assert wal.current_offset() == 0


def test_a_message_over_the_limit_leaves_no_hole(crashing: Place) -> None:
    wal = crashing.open()
    wal.append(b"before")
    for _ in range(3):
        with pytest.raises(MessageTooLarge):
            wal.append(bytes(MESSAGE_BYTES_MAX + 1))
    with pytest.raises(MessageTooLarge):
        wal.append_message(StreamMessage(bytes(MESSAGE_BYTES_MAX)))
    assert wal.append(b"after", durability="synced") == 1
    assert payloads(wal) == [b"before", b"after"]


@pytest.mark.parametrize("good", [0, 3, 5000])
def test_a_batch_with_a_message_that_cannot_be_written_is_refused_as_a_whole(
    place: Place, good: int
) -> None:
    wal = place.open()
    wal.append(b"before")
    for bad in (bytes(MESSAGE_BYTES_MAX + 1), "text", None):
        with pytest.raises((MessageTooLarge, TypeError)):
            wal.append_many([*[bytes(1000)] * good, bad])  # type: ignore[list-item]
    assert wal.append(b"after", durability="synced") == 1
    assert payloads(wal) == [b"before", b"after"]


# -- back-pressure ------------------------------------------------------------------------------

QUEUE_BYTES = 64 * 1024


def fill_queue(wal: Wal, payload: bytes = bytes(1000)) -> list[int]:
    """Appends from another thread until an append waits; answers the offsets it got."""
    got: list[int] = []
    stop = threading.Event()

    def produce() -> None:
        while not stop.is_set():
            got.append(wal.append(payload))

    producer = in_thread(produce)
    before = -1
    # Nobody can see a thread wait, but a count that no longer grows while it runs can be seen.
    while before != len(got):
        before = len(got)
        threading.Event().wait(0.05)
    stop.set()
    assert not producer.done()
    return list(got)


@pytest.mark.parametrize("watched", [False, True])
def test_the_queue_is_bounded_and_an_append_that_finds_it_full_waits(
    gated_place: GatedPlace, watched: bool
) -> None:
    wal = gated_place.open(queue_max_bytes=QUEUE_BYTES)
    gated_place.gate.shut()
    seen: list[int] = []
    if watched:
        # A reader of what is not synced yet looks into the queue all the time.
        reader = wal.tail_reader(0, visibility="buffered")
        in_thread(lambda: seen.extend(message.offset for message in reader))
    got = fill_queue(wal)
    assert len(got) * 1000 <= 3 * QUEUE_BYTES, "memory is bounded"
    assert len(got) * 1000 >= QUEUE_BYTES / 2
    gated_place.gate.open()
    wait_until(lambda: wal.current_offset() == len(got) + 1)
    wal.flush()
    assert len(payloads(wal)) == len(got) + 1
    if watched:
        wait_until(lambda: len(seen) == len(got) + 1)
        reader.close()


def test_small_batches_between_large_messages_count_too(gated_place: GatedPlace) -> None:
    wal = gated_place.open(queue_max_bytes=QUEUE_BYTES)
    gated_place.gate.shut()
    got: list[int] = []

    def produce() -> None:
        for _ in range(100):
            got.append(wal.append(bytes(10_000)))
            got.extend(wal.append_many([b"small"]))

    producer = in_thread(produce)
    assert gated_place.gate.reached.wait(PATIENCE_SECONDS)
    threading.Event().wait(0.1)
    assert len(got) < 60
    gated_place.gate.open()
    producer.result(PATIENCE_SECONDS)
    assert got == list(range(200))


def test_a_batch_larger_than_the_queue_gets_a_consecutive_range_while_others_append(
    place: Place,
) -> None:
    wal = place.open(queue_max_bytes=QUEUE_BYTES, rotate_max_bytes=100_000)
    done = threading.Event()
    others: dict[int, bytes] = {}

    def produce(name: bytes) -> None:
        count = 0
        while not done.is_set():
            payload = name + str(count).encode()
            others[wal.append(payload)] = payload
            count += 1

    producers = [in_thread(lambda name=name: produce(name)) for name in (b"a", b"b")]  # type: ignore[misc]
    batch = texts(0, 600, 500)
    ranges = [wal.append_many(batch) for _ in range(3)]
    done.set()
    for producer in producers:
        producer.result(PATIENCE_SECONDS)
    wal.flush()
    everything = payloads(wal)
    for found in ranges:
        assert len(found) == 600
        assert [everything[offset] for offset in found] == batch
    for offset, payload in others.items():
        assert everything[offset] == payload
    assert len(everything) == 3 * 600 + len(others)


def test_a_message_larger_than_the_queue_passes(place: Place) -> None:
    wal = place.open(queue_max_bytes=1000, fsync_max_batch_bytes=1000)
    for _ in range(3):
        wal.append(bytes(50_000))
    wal.append(bytes(50_000), durability="synced")
    assert [len(payload) for payload in payloads(wal)] == [50_000] * 4


async def test_asyncio_appends_wait_for_room_without_blocking_the_loop(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open(queue_max_bytes=QUEUE_BYTES)
    gated_place.gate.shut()

    async def produce() -> list[int]:
        return [await wal.append_async(bytes(1000)) for _ in range(100)]

    tasks = [asyncio.create_task(produce()) for _ in range(5)]
    assert await asyncio.to_thread(gated_place.gate.reached.wait, PATIENCE_SECONDS)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    assert wal.current_offset() * 1000 <= 3 * QUEUE_BYTES
    gated_place.gate.open()
    offsets = [offset for task in tasks for offset in await asyncio.wait_for(task, 60)]
    assert sorted(offsets) == list(range(500))


async def test_asyncio_appends_do_not_block_the_loop_while_a_large_batch_is_taken(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open(queue_max_bytes=QUEUE_BYTES)
    gated_place.gate.shut()
    batch = in_thread(lambda: wal.append_many([bytes(1000)] * 500))
    assert await asyncio.to_thread(gated_place.gate.reached.wait, PATIENCE_SECONDS)
    # The batch has the log to itself though there may be room.
    task = asyncio.create_task(wal.append_async(b"one more", durability="synced"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    gated_place.gate.open()
    assert await asyncio.wait_for(task, 60) == 500
    assert batch.result(PATIENCE_SECONDS) == range(500)


async def test_a_cancelled_asyncio_append_that_waits_for_room_appends_nothing(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open(queue_max_bytes=QUEUE_BYTES)
    gated_place.gate.shut()
    got = await asyncio.to_thread(fill_queue, wal)
    task = asyncio.create_task(wal.append_async(b"never"))
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gated_place.gate.open()
    await asyncio.to_thread(wait_until, lambda: wal.current_offset() == len(got) + 1)
    await asyncio.to_thread(wal.flush)
    assert b"never" not in payloads(wal)


async def test_asyncio_appends_are_synced_when_they_say_so(crashing: Place) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    offsets = await asyncio.gather(
        *(wal.append_async(payload, durability="synced") for payload in texts(0, 50))
    )
    assert sorted(offsets) == list(range(50))
    late = await wal.append_async(b"late")
    await wal.wait_async(late)
    crashing.crash.crash()
    assert len(payloads(crashing.open())) == 51


async def test_cancelling_a_wait_changes_nothing_about_the_message(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open()
    gated_place.gate.shut()
    task = asyncio.create_task(wal.append_async(b"x", durability="synced"))
    assert await asyncio.to_thread(gated_place.gate.reached.wait, PATIENCE_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gated_place.gate.open()
    await wal.wait_async(0)
    assert payloads(wal) == [b"x"]


# -- rotation -----------------------------------------------------------------------------------


def test_a_segment_that_is_full_is_followed_by_another(place: Place) -> None:
    wal = place.open(rotate_max_bytes=1000)
    for payload in texts(0, 100):
        wal.append(payload, durability="synced")
    segments = wal.segments()
    assert len(segments) > 5
    assert all(1000 <= segment.size < 1200 for segment in segments[:-1])
    assert [segment.seq for segment in segments] == list(range(len(segments)))
    assert payloads(wal) == texts(0, 100)


def test_rotation_is_by_size_within_one_large_commit_too(place: Place) -> None:
    wal = place.open(rotate_max_bytes=5000)
    for payload in texts(0, 500):
        wal.append(payload)
    wal.append_many(texts(500, 1000))
    wal.flush()
    assert all(segment.size < 12_000 for segment in wal.segments())
    wal.shutdown()
    assert payloads(place.open()) == texts(0, 1000)


def test_a_segment_that_is_old_is_sealed_even_if_nothing_is_appended(place: Place) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = place.open(clock=clock, pool=pool, rotate_max_seconds=60)
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


def test_an_empty_segment_is_never_sealed(place: Place) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = place.open(clock=clock, pool=pool, rotate_max_seconds=60)
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


def test_a_log_that_rotates_often_does_not_pile_up_timers(place: Place) -> None:
    pool = WriterPool(1)
    wal = place.open(pool=pool, rotate_max_bytes=1)
    for _ in range(50):
        wal.append(b"x", durability="synced")
    assert len(wal.segments()) == 50
    assert len(pool._timers) < 5
    wal.shutdown()
    pool.close()


def test_a_clock_that_goes_back_keeps_the_log_going(place: Place) -> None:
    class JumpingClock(ManualClock):
        jump_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.jump_ms

    clock = JumpingClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = place.open(clock=clock, pool=pool, rotate_max_seconds=60, fsync_interval_ms=1000)
    wal.append(b"one", durability="synced")
    clock.jump_ms = -86_400_000
    wal.append(b"two")
    clock.advance(2)
    wait_until(lambda: synced(wal) == 2)
    clock.advance(100)
    wal.append(b"three", durability="synced")
    wal.shutdown()
    reopened = place.open(clock=clock, pool=pool)
    assert payloads(reopened) == [b"one", b"two", b"three"]
    reopened.shutdown()
    pool.close()


# -- threads ------------------------------------------------------------------------------------


def writer_threads() -> int:
    return sum(thread.name.startswith("forebay-writer") for thread in threading.enumerate())


def test_a_thousand_open_topics_share_a_few_threads() -> None:
    before = writer_threads()
    settings = StoreSettings(data=Path("/data"), writer_threads=3)
    with forebay.Store(settings, disk=CrashDisk()) as store:
        topics = [store.topic(f"topic-{number}") for number in range(1000)]
        for topic in topics:
            topic.append(b"x")
        for topic in topics[:200]:
            topic.append(b"y", durability="synced")
        assert writer_threads() - before <= 3
        assert all(topic.watermarks().synced == 2 for topic in topics[:200])
    wait_until(lambda: writer_threads() == before)


def test_a_log_whose_disk_hangs_does_not_hold_up_another_while_there_are_threads(
    gated_place: GatedPlace,
) -> None:
    pool = WriterPool(2)
    slow = gated_place.open(pool=pool)
    other = Place(CrashDisk(), Path("/other"))
    fast = other.open(pool=pool)
    slow.append(b"warm", durability="synced")
    for turn in range(20):
        wait_until(lambda: pool._idle == pool.thread_count)
        gated_place.gate.shut()
        waiting = in_thread(lambda: slow.append(b"x", durability="synced"))
        assert in_thread(lambda: fast.append(b"y", durability="synced")).result(30) == turn
        gated_place.gate.open()
        waiting.result(PATIENCE_SECONDS)
    fast.shutdown()
    slow.shutdown()
    pool.close()


def test_two_jobs_at_once_get_two_threads_though_one_is_idle() -> None:
    pool = WriterPool(2)
    idle = threading.Event()
    pool.submit(idle.set)
    assert idle.wait(PATIENCE_SECONDS)
    wait_until(lambda: pool._idle == 1)
    second_ran = threading.Event()
    first_saw_it = in_thread_job(pool, lambda: second_ran.wait(5))
    pool.submit(second_ran.set)
    assert first_saw_it.result(PATIENCE_SECONDS)
    pool.close()


def in_thread_job(pool: WriterPool, call: Callable[[], bool]) -> Future[bool]:
    future: Future[bool] = Future()

    def job() -> None:
        future.set_result(call())

    pool.submit(job)
    return future


# -- memory only --------------------------------------------------------------------------------


def test_a_log_in_memory_keeps_what_the_cache_holds_and_says_what_it_dropped() -> None:
    wal = Wal(WalSettings(cache_capacity=10, fsync_interval_ms=NEVER_MS))
    for payload in texts(0, 100):
        wal.append(payload, durability="synced")
    assert wal.start_offset == 90
    assert payloads(wal) == texts(90, 100)
    with pytest.raises(OffsetOutOfRange):
        wal.tail_reader(89)
    assert wal.segments() == []
    wal.rotate()
    assert wal.append(b"next") == 100
    wal.shutdown()
    with pytest.raises(LogClosed):
        wal.append(b"late")


def test_a_reader_of_a_log_in_memory_that_was_too_slow_is_told() -> None:
    wal = Wal(WalSettings(cache_capacity=10, fsync_interval_ms=NEVER_MS))
    wal.append_many(texts(0, 5), durability="synced")
    reader = wal.tail_reader(0)
    assert next(reader).offset == 0
    wal.append_many(texts(5, 100), durability="synced")
    got = [next(reader).offset for _ in range(4)]
    assert got == [1, 2, 3, 4]
    with pytest.raises(OffsetOutOfRange) as caught:
        next(reader)
    assert (caught.value.start, caught.value.end) == (90, 100)
    wal.shutdown()


# -- shutting down ------------------------------------------------------------------------------


def test_shutting_down_syncs_everything_and_may_be_done_twice(crashing: Place) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    wal.append_many(texts(0, 100))
    wal.shutdown()
    wal.shutdown()
    assert synced(wal) == 100
    wal.flush()
    wal.wait(99)
    crashing.crash.crash()
    assert payloads(crashing.open()) == texts(0, 100)


def test_everything_that_changes_a_closed_log_is_refused_and_touches_nothing(
    place: Place,
) -> None:
    wal = place.open(rotate_max_bytes=100)
    for payload in texts(0, 5):
        wal.append(payload, durability="synced")
    wal.shutdown()
    before = place.contents()
    with pytest.raises(LogClosed):
        wal.append(b"x")
    with pytest.raises(LogClosed):
        wal.append(b"x", durability="synced")
    with pytest.raises(LogClosed):
        wal.append_many([b"x"])
    with pytest.raises(LogClosed):
        wal.append_message(StreamMessage(b"x"))
    with pytest.raises(LogClosed):
        wal.rotate()
    with pytest.raises(LogClosed):
        next(wal.tail_reader("latest"))
    assert place.contents() == before
    assert payloads(wal) == texts(0, 5), "what was synced can still be read"


async def test_asyncio_appends_to_a_closed_log_are_refused(place: Place) -> None:
    wal = place.open()
    wal.shutdown()
    with pytest.raises(LogClosed):
        await wal.append_async(b"x")


def test_shutting_down_while_producers_append_syncs_exactly_what_was_accepted(
    place: Place,
) -> None:
    wal = place.open(queue_max_bytes=20_000, rotate_max_bytes=30_000)
    accepted: dict[int, bytes] = {}
    started = threading.Barrier(5)

    def produce(name: int) -> None:
        started.wait(PATIENCE_SECONDS)
        count = 0
        while True:
            payload = f"{name}:{count}".encode().ljust(200)
            try:
                if name == 0:
                    batch = [payload] * 150
                    accepted.update(zip(wal.append_many(batch), batch, strict=True))
                else:
                    accepted[wal.append(payload)] = payload
            except LogClosed:
                return
            count += 1

    producers = [in_thread(lambda name=name: produce(name)) for name in range(4)]  # type: ignore[misc]
    started.wait(PATIENCE_SECONDS)
    wait_until(lambda: wal.current_offset() > 500)
    wal.shutdown()
    for producer in producers:
        producer.result(PATIENCE_SECONDS)
    found = payloads(place.open())
    for offset, payload in accepted.items():
        assert found[offset] == payload


def test_two_threads_that_shut_down_at_once_both_return_when_it_is_done(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open()
    wal.append(b"x")
    gated_place.gate.shut()
    first = in_thread(wal.shutdown)
    assert gated_place.gate.reached.wait(PATIENCE_SECONDS)
    second = in_thread(wal.shutdown)
    threading.Event().wait(0.05)
    assert not second.done()
    gated_place.gate.open()
    first.result(PATIENCE_SECONDS)
    second.result(PATIENCE_SECONDS)
    assert payloads(gated_place.open()) == [b"x"]


def test_a_shutdown_interrupted_after_its_last_sync_has_released_the_log(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open()
    wal.append(b"x", durability="synced")
    wal.append(b"y")
    with interrupted_sync(gated_place, "wal.ckpt.tmp"), pytest.raises(KeyboardInterrupt):
        wal.shutdown()
    wal.shutdown()
    assert payloads(gated_place.open()) == [b"x", b"y"]


def test_a_shutdown_interrupted_before_its_last_sync_can_be_finished(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open()
    wal.append(b"x", durability="synced")
    wal.append(b"y")
    with interrupted_sync(gated_place, "wal.log"), pytest.raises(KeyboardInterrupt):
        wal.shutdown()
    with pytest.raises(LogStopped):
        wal.shutdown()
    # Nobody knows whether the interrupted sync was done; what came before it was.
    assert payloads(gated_place.open())[:1] == [b"x"]


@contextlib.contextmanager
def interrupted_sync(place: GatedPlace, name: str) -> Iterator[None]:
    def interrupt(path: Path) -> None:
        if path.name == name:
            raise KeyboardInterrupt

    disk = place.disk
    assert isinstance(disk, WatchedDisk)
    kept, disk.on_sync = disk.on_sync, interrupt
    yield
    disk.on_sync = kept


def test_closing_the_store_syncs_and_closes_every_topic(tmp_path: Path) -> None:
    store = forebay.open(tmp_path)
    for name in ("a", "b"):
        store.topic(name).append(name.encode())
    store.close()
    store.close()
    with pytest.raises(LogClosed):
        store.topic("a")
    with forebay.open(tmp_path) as again:
        assert again.topics() == ["/default/a", "/default/b"]
        assert [m.payload for m in again.topic("b").read()] == [b"b"]


# -- fork ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_neither_write_to_the_log_nor_keep_its_lock(tmp_path: Path) -> None:
    place = on_local_disk(tmp_path)
    wal = place.open()
    wal.append(b"before", durability="synced")
    wal.append(b"buffered in the parent")
    from_parent, to_child = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child
        code = 1
        signal.alarm(20)  # a child that hangs must not outlive the test
        try:
            os.close(to_child)
            refused = 0
            for call in (
                lambda: wal.append(b"child"),
                lambda: wal.append(b"child", durability="synced"),
                lambda: wal.append_many([b"child"]),
                wal.rotate,
            ):
                try:
                    call()
                except LogClosed:
                    refused += 1
            wal.shutdown()
            os.read(from_parent, 1)
            code = 0 if refused == 4 else 2
        finally:
            os._exit(code)
    os.close(from_parent)
    wal.append(b"after", durability="synced")
    wal.shutdown()
    reopened = place.open()  # while the child is still there
    expected = [b"before", b"buffered in the parent", b"after"]
    assert payloads(reopened) == expected
    os.close(to_child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reopened.append(b"and on", durability="synced") == 3
    reopened.shutdown()
    assert payloads(place.open()) == [*expected, b"and on"]
    place.close()
