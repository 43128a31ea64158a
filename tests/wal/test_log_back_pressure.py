"""Back-pressure: the queue is bounded, and an append that finds it full waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forebay.wal.log import Wal
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    in_thread,
    payloads,
    texts,
    until,
    wait_until,
    waiting_for_room,
)

QUEUE_BYTES = 64 * 1024


def fill_queue(wal: Wal, payload: bytes = bytes(1000)) -> list[int]:
    """Appends from another thread until an append waits for room; returns the offsets it got."""
    got: list[int] = []
    stop = threading.Event()

    def produce() -> None:
        while not stop.is_set():
            got.append(wal.append(payload))

    producer = in_thread(produce)
    wait_until(lambda: waiting_for_room(wal) == 1)
    stop.set()
    assert not producer.done()
    return list(got)


@pytest.mark.parametrize("watched", [False, True])
def test_the_queue_is_bounded_and_an_append_that_finds_it_full_waits(
    gated: GatedDirectory, watched: bool
) -> None:
    wal = gated.open(queue_max_bytes=QUEUE_BYTES)
    gated.gate.shut()
    seen: list[int] = []
    if watched:
        # A reader of unsynced messages reads from the queue all the time.
        reader = wal.tail_reader(0, visibility="buffered")
        in_thread(lambda: seen.extend(message.offset for message in reader))
    got = fill_queue(wal)
    assert len(got) * 1000 <= 3 * QUEUE_BYTES, "memory is bounded"
    assert len(got) * 1000 >= QUEUE_BYTES / 2
    gated.gate.open()
    wait_until(lambda: wal.current_offset() == len(got) + 1)
    wal.flush()
    assert len(payloads(wal)) == len(got) + 1
    if watched:
        wait_until(lambda: len(seen) == len(got) + 1)
        reader.close()


def test_small_batches_between_large_messages_count_too(gated: GatedDirectory) -> None:
    wal = gated.open(queue_max_bytes=QUEUE_BYTES)
    gated.gate.shut()
    got: list[int] = []

    def produce() -> None:
        for _ in range(100):
            got.append(wal.append(bytes(10_000)))
            got.extend(wal.append_many([b"small"]))

    producer = in_thread(produce)
    wait_until(lambda: waiting_for_room(wal) == 1)
    assert len(got) < 60
    gated.gate.open()
    producer.result(PATIENCE_SECONDS)
    assert got == list(range(200))


def test_a_batch_larger_than_the_queue_gets_a_consecutive_range_while_others_append(
    directory: LogDirectory,
) -> None:
    wal = directory.open(queue_max_bytes=QUEUE_BYTES, rotate_max_bytes=100_000)
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


def test_a_message_larger_than_the_queue_passes(directory: LogDirectory) -> None:
    wal = directory.open(queue_max_bytes=1000, fsync_max_batch_bytes=1000)
    for _ in range(3):
        wal.append(bytes(50_000))
    wal.append(bytes(50_000), durability="synced")
    assert [len(payload) for payload in payloads(wal)] == [50_000] * 4


async def test_asyncio_appends_wait_for_room_without_blocking_the_loop(
    gated: GatedDirectory,
) -> None:
    wal = gated.open(queue_max_bytes=QUEUE_BYTES)
    gated.gate.shut()

    async def produce() -> list[int]:
        return [await wal.append_async(bytes(1000)) for _ in range(100)]

    tasks = [asyncio.create_task(produce()) for _ in range(5)]
    await until(lambda: waiting_for_room(wal) == len(tasks))
    assert not any(task.done() for task in tasks)
    assert wal.current_offset() * 1000 <= 3 * QUEUE_BYTES
    gated.gate.open()
    offsets = [offset for task in tasks for offset in await asyncio.wait_for(task, 60)]
    assert sorted(offsets) == list(range(500))


async def test_asyncio_appends_do_not_block_the_loop_while_a_large_batch_is_taken(
    gated: GatedDirectory,
) -> None:
    wal = gated.open(queue_max_bytes=QUEUE_BYTES)
    gated.gate.shut()
    batch = in_thread(lambda: wal.append_many([bytes(1000)] * 500))
    assert await asyncio.to_thread(gated.gate.reached.wait, PATIENCE_SECONDS)
    # While a batch is taken, other appends wait, even if there is room.
    task = asyncio.create_task(wal.append_async(b"one more", durability="synced"))
    await until(lambda: waiting_for_room(wal) == 2)
    assert not task.done()
    gated.gate.open()
    assert await asyncio.wait_for(task, 60) == 500
    assert batch.result(PATIENCE_SECONDS) == range(500)


async def test_a_cancelled_asyncio_append_that_waits_for_room_appends_nothing(
    gated: GatedDirectory,
) -> None:
    wal = gated.open(queue_max_bytes=QUEUE_BYTES)
    gated.gate.shut()
    got = await asyncio.to_thread(fill_queue, wal)
    task = asyncio.create_task(wal.append_async(b"never"))
    await until(lambda: waiting_for_room(wal) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gated.gate.open()
    await asyncio.to_thread(wait_until, lambda: wal.current_offset() == len(got) + 1)
    await asyncio.to_thread(wal.flush)
    assert b"never" not in payloads(wal)
