"""Appending: order, durability, and what is refused."""

from __future__ import annotations

import asyncio
import random

import pytest

import forebay
from forebay.errors import MessageTooLarge, OffsetOutOfRange, UsageError, WaitTimeout
from forebay.format.message import MessageId, StreamMessage
from forebay.limits import MESSAGE_BYTES_MAX
from forebay.testing import ManualClock
from forebay.wal.pool import WriterPool
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    in_thread,
    payloads,
    texts,
    wait_until,
)
from support.log_steps import synced

# -- offsets and durability ---------------------------------------------------------------------


def test_offsets_are_consecutive_from_zero_whatever_the_way_in(directory: LogDirectory) -> None:
    wal = directory.open()
    assert wal.append(b"a") == 0
    assert wal.append_many([b"b", b"c"]) == range(1, 3)
    assert wal.append_message(StreamMessage(b"d", msg_id=MessageId(topic_name="/a/b"))) == 3
    assert wal.append(b"e", durability="synced") == 4
    assert wal.append_many([]) == range(5, 5)
    assert wal.current_offset() == 5
    assert payloads(wal) == [b"a", b"b", b"c", b"d", b"e"]


def test_a_buffered_append_returns_before_anything_is_synced(gated: GatedDirectory) -> None:
    wal = gated.open()
    gated.gate.shut()
    for number in range(100):
        assert wal.append(b"x") == number
    assert wal.watermarks() == forebay.Watermarks(appended=100, synced=0)
    gated.gate.open()
    wal.flush()
    assert synced(wal) == 100


def test_a_synced_append_returns_only_after_the_sync(gated: GatedDirectory) -> None:
    wal = gated.open()
    gated.gate.shut()
    waiting = in_thread(lambda: wal.append(b"x", durability="synced"))
    assert gated.gate.reached.wait(PATIENCE_SECONDS)
    assert not waiting.done()
    with pytest.raises(WaitTimeout):
        wal.wait(0, timeout=0.01)
    gated.gate.open()
    assert waiting.result(PATIENCE_SECONDS) == 0
    wal.wait(0, timeout=0)


def test_durability_can_be_awaited_later(directory: LogDirectory) -> None:
    wal = directory.open()
    offsets = [wal.append(payload) for payload in texts(0, 10)]
    wal.wait(offsets[3])
    assert synced(wal) >= 4
    wal.flush()
    assert synced(wal) == 10
    for bad in (-1, 10, 11):
        with pytest.raises(OffsetOutOfRange):
            wal.wait(bad)


def test_whoever_waits_has_the_log_commit_at_once_whatever_the_interval(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    wal = directory.open(clock=clock)
    wal.append(b"nobody waits")
    assert wal.append(b"somebody does", durability="synced") == 1
    assert synced(wal) == 2


def test_the_interval_bounds_how_long_a_message_stays_unsynced(directory: LogDirectory) -> None:
    clock = ManualClock()
    pool = WriterPool(1, clock)
    clock.subscribe(pool.recheck)
    wal = directory.open(clock=clock, pool=pool, fsync_interval_ms=5000)
    for turn in range(1, 4):
        wal.append(b"x")
        clock.advance(4.999)
        assert synced(wal) == turn - 1
        clock.advance(0.002)
        wait_until(lambda: synced(wal) == wal.current_offset())
    wal.shutdown()
    pool.close()


@pytest.mark.parametrize("many", [False, True])
def test_a_full_batch_is_committed_though_nobody_waits(directory: LogDirectory, many: bool) -> None:
    wal = directory.open(clock=ManualClock(), fsync_max_batch_bytes=4096)
    if many:
        wal.append_many([bytes(100)] * 60)
    else:
        for _ in range(60):
            wal.append(bytes(100))
    wait_until(lambda: synced(wal) > 0)


def test_a_synced_append_survives_a_power_loss_and_a_buffered_one_need_not(
    crashing: LogDirectory,
) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    wal.append(b"synced", durability="synced")
    wal.append(b"buffered")
    crashing.crash.crash()
    assert payloads(crashing.open()) == [b"synced"]


def test_many_threads_get_every_offset_once_and_the_log_holds_what_each_appended(
    directory: LogDirectory,
) -> None:
    wal = directory.open(rotate_max_bytes=10_000)
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
    assert payloads(directory.open()) == [seen[offset] for offset in sorted(seen)]


def test_what_a_message_carries_comes_back(directory: LogDirectory) -> None:
    clock = ManualClock()
    wal = directory.open(clock=clock)
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


async def test_asyncio_appends_are_synced_when_they_say_so(crashing: LogDirectory) -> None:
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
    gated: GatedDirectory,
) -> None:
    wal = gated.open()
    gated.gate.shut()
    task = asyncio.create_task(wal.append_async(b"x", durability="synced"))
    assert await asyncio.to_thread(gated.gate.reached.wait, PATIENCE_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gated.gate.open()
    await wal.wait_async(0)
    assert payloads(wal) == [b"x"]


# -- refusals -----------------------------------------------------------------------------------


def test_a_bad_argument_is_refused_before_anything_is_appended(directory: LogDirectory) -> None:
    wal = directory.open()
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


async def test_a_bad_durability_is_refused_in_asyncio_too(directory: LogDirectory) -> None:
    wal = directory.open()
    with pytest.raises(UsageError):
        await wal.append_async(b"x", durability="both")  # type: ignore[arg-type]
    assert wal.current_offset() == 0


def test_a_message_over_the_limit_leaves_no_hole(crashing: LogDirectory) -> None:
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
    directory: LogDirectory, good: int
) -> None:
    wal = directory.open()
    wal.append(b"before")
    for bad in (bytes(MESSAGE_BYTES_MAX + 1), "text", None):
        with pytest.raises((MessageTooLarge, TypeError)):
            wal.append_many([*[bytes(1000)] * good, bad])  # type: ignore[list-item]
    assert wal.append(b"after", durability="synced") == 1
    assert payloads(wal) == [b"before", b"after"]
