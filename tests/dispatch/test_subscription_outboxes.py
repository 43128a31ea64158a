"""What waits for all consumers has one limit, and those that do not read cannot keep it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from forebay.dispatch.subscription import Consumer, Outboxes
from support.dispatching import TOPIC, dispatching, eventually, payload_of


def consumer(outboxes: Outboxes, number: int = 1) -> Consumer:
    return Consumer(number, f"c{number}", (), payload_of, outboxes)


async def test_what_is_being_written_counts_until_the_next_take() -> None:
    outboxes = Outboxes(10)
    found = consumer(outboxes)
    found.put(b"12345")
    assert await found.take() == [b"12345"]
    assert outboxes.bytes == 5
    found.put(b"67")
    assert await found.take() == [b"67"]
    assert outboxes.bytes == 2
    found.put(b"8")
    found.clear()
    assert outboxes.bytes == 2, "it is still being written"
    found.leave()
    assert outboxes.bytes == 0


async def test_whoever_waits_for_room_is_woken_once_there_is_some() -> None:
    outboxes = Outboxes(10)
    first, second = consumer(outboxes, 1), consumer(outboxes, 2)
    woken: list[int] = []
    first.put(b"1234567")
    second.put(b"1234567")
    assert outboxes.full
    outboxes.wake_when_free(lambda: woken.append(1))
    await first.take()
    assert not woken
    first.leave()
    assert woken == [1]
    assert not outboxes.full


async def test_a_consumer_that_does_not_read_is_cut_only_if_there_is_no_room() -> None:
    outboxes = Outboxes(10, stall_seconds=0.02)
    slow, other = consumer(outboxes, 1), consumer(outboxes, 2)
    slow.put(b"12345")
    await slow.take()
    await asyncio.sleep(0.1)
    assert not slow.cut.is_set()
    other.put(b"12345")
    async with asyncio.timeout(20):
        await slow.cut.wait()
    assert not other.cut.is_set(), "nothing is being written to it"


async def test_others_go_on_when_a_consumer_that_does_not_read_was_cut(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        outboxes = found.registry._outboxes = Outboxes(1000, stall_seconds=0.05)
        topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
        payloads = [b"%03d" % each + b"x" * 600 for each in range(20)]
        await topic.append_many_async(payloads, durability="synced")
        slow = await found.consumer("slow", subscription="slow")
        await slow.consumer.take()
        await eventually(lambda: outboxes.full)
        good = await found.consumer("good", subscription="good")
        await slow.consumer.cut.wait()
        slow.leave()  # as its stream does
        assert await good.take(20) == payloads
