"""Subscriptions lose nothing, and stop for nothing, when disks, catalogs and others fail them."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from forebay.dispatch import registry
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.feed import ChunkCache, Delivery, Feed
from forebay.dispatch.policy import Policy, SubscriptionType
from forebay.dispatch.registry import stable_number
from forebay.dispatch.subscription import Consumer, Subscription
from forebay.dispatch.window import Window
from forebay.errors import (
    LogStopped,
    ServiceUnavailable,
    SubscriptionBusy,
    TooManySubscriptions,
    TopicFenced,
    UnknownTopic,
    UsageError,
)
from forebay.format.cursor import Cursor
from forebay.format.names import parse_topic
from forebay.limits import KEY_FILTERS_MAX
from forebay.testing import Fault
from forebay.topic.store import Topic
from support.dispatching import TOPIC, TestConsumer, dispatching, eventually, payload_of, settled
from support.faulty_dispatch import FaultyDispatching, faulty_dispatching

SHARED, EXCLUSIVE = SubscriptionType.SHARED, SubscriptionType.EXCLUSIVE


async def append(found: FaultyDispatching, *payloads: bytes) -> None:
    topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
    await topic.append_many_async(payloads, durability="synced")


async def stop_log(found: FaultyDispatching, payload: bytes) -> None:
    """A disk error ends the log; the payload may or may not be stored."""
    found.disk.inject(Fault("sync", errno.EIO, path="wal.log"))
    with pytest.raises(LogStopped):
        await append(found, payload)


async def test_a_log_that_stopped_and_was_opened_again_is_delivered_on() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        first = await found.consumer(subscription="s1")
        second = await found.consumer(subscription="s2")
        assert await first.take(1) == await second.take(1) == [b"a"]
        await settled(first.subscription)  # both wait at the end of the log that stops
        await stop_log(found, b"b")
        await append(found, b"c")
        assert await first.take(2) == await second.take(2) == [b"b", b"c"]
        await append(found, b"d")
        assert await first.take(1) == await second.take(1) == [b"d"]


async def test_a_subscription_opens_a_log_that_stopped_and_reads_what_is_in_it() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        consumer = await found.consumer()
        await consumer.take(1)
        await settled(consumer.subscription)
        await stop_log(found, b"b")
        assert await consumer.take(1) == [b"b"], "no producer had to open it"


async def test_a_disk_that_stays_broken_is_tried_again_and_reported() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        consumer = await found.consumer()
        await consumer.take(1)
        await settled(consumer.subscription)
        found.disk.inject(Fault("any", errno.EIO, path="orders", times=None))
        with pytest.raises(LogStopped):
            await append(found, b"b")
        await eventually(lambda: consumer.subscription.problem)
        found.disk.clear()
        await append(found, b"c")
        got = await consumer.take(1)
        got += [] if got == [b"c"] else await consumer.take(1)
        assert got[-1] == b"c"
        assert consumer.subscription.problem is None


async def test_acknowledgements_before_a_disk_error_are_not_forgotten() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a", b"b")
        consumer = await found.consumer()
        await consumer.take(2)
        consumer.subscription.ack(0, 2)
        await settled(consumer.subscription)
        await stop_log(found, b"c")
        await consumer.take(1)
        storage = await asyncio.to_thread(found.store.storage, str(TOPIC))
        assert (await asyncio.to_thread(storage.subscription_cursor, "s1")).position == 2


async def test_a_message_that_comes_while_a_subscription_looks_wakes_it(tmp_path: Path) -> None:
    async with dispatching(tmp_path) as found:
        topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
        feed = await new_feed(topic)
        others: list[int] = []
        feed.wake_beyond(0, lambda: others.append(0))
        await topic.append_async(b"a", durability="synced")
        await eventually(lambda: others)
        feed.wake_beyond(1, lambda: others.append(1))  # the task waits for offset 1 now
        woken: list[int] = []
        feed.wake_beyond(0, lambda: woken.append(0))  # who looked before "a" came
        await eventually(lambda: woken)
        await feed.close()


async def new_feed(topic: Topic) -> Feed:
    async def reopen() -> Topic:
        raise AssertionError("the log has not ended")

    return Feed(topic, reopen, ChunkCache())


async def test_acknowledgements_count_if_a_seek_fails() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a", b"b", b"c")
        consumer = await found.consumer()
        await consumer.take(3)
        asked, answered = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def wait(operation: str) -> None:
            if operation == "commit":
                loop.call_soon_threadsafe(asked.set)
                answered.wait(20)

        found.kv.before = wait
        found.kv.fail("commit", times=1000)
        moving = asyncio.create_task(found.registry.seek(TOPIC, "s1", 0))
        await asked.wait()
        consumer.subscription.ack(0, 2)
        answered.set()
        with pytest.raises(ServiceUnavailable):
            await moving
        found.kv.heal()
        assert consumer.subscription.window.position == 2
        assert await consumer.idle()


async def test_a_seek_back_during_a_redelivery_delivers_everything_in_order() -> None:
    async with faulty_dispatching() as found:
        await append(found, *(b"%d" % each for each in range(20)))
        consumer = await found.consumer(kind=EXCLUSIVE)
        await consumer.take(20)
        consumer.subscription.ack(0, 10)
        consumer.subscription.feed.forget()
        consumer.subscription.nack(15, 0)
        await asyncio.sleep(0)  # it reads offset 15 now
        await found.registry.seek(TOPIC, "s1", 3)
        got: list[bytes] = []
        while not got or got[-1] != b"19":
            got += await consumer.take(1)
        assert got[-17:] == [b"%d" % each for each in range(3, 20)]
        assert consumer.subscription.problem is None


async def test_dead_letters_are_tried_again_after_any_error(tmp_path: Path) -> None:
    async with dispatching(tmp_path) as found:
        topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
        await topic.append_many_async([b"a", b"b"], durability="synced")
        stored: list[bytes] = []
        failures = [RuntimeError("one"), OSError("two")]

        async def store(delivery: Delivery, _name: str) -> None:
            if failures:
                raise failures.pop()
            stored.append(delivery.message.payload)

        policy = Policy(max_redeliveries=0, poison="dead_letter", redelivery_delay_ms=1)
        window = Window(SHARED, policy, Cursor())
        feed = await new_feed(topic)
        subscription = Subscription("s", window, feed, lambda _: True, store)
        consumer = Consumer(1, "c", (), payload_of)
        subscription.join(consumer)
        await TestConsumer(subscription, consumer).take(2)
        subscription.nack(0, None)
        subscription.nack(1, None)
        await eventually(lambda: window.position == 2)
        assert sorted(stored) == [b"a", b"b"]
        await subscription.close()
        await feed.close()


async def test_a_consumer_that_connects_to_a_closed_subscription_is_told_so() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        first = await found.consumer(kind=SHARED)
        await first.subscription.close()
        late = Consumer(7, "late", (), payload_of)
        first.subscription.join(late)
        assert await asyncio.wait_for(late.take(), 10) == []


async def test_an_acknowledgement_of_an_unknown_topic_creates_nothing() -> None:
    async with faulty_dispatching() as found:
        for each in range(3):
            with pytest.raises(UnknownTopic):
                await found.registry.find(parse_topic(f"unknown-{each}"), "s1")
        assert await asyncio.to_thread(found.store.topics) == []
        assert found.registry._opening == {}


async def test_consumers_do_not_wait_for_ever_for_a_catalog_that_is_away() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        settings = found.store.settings.broker
        again = registry.Registry(found.store, settings, patience_seconds=0.1)
        found.kv.fail("range", times=10_000)
        loading = asyncio.create_task(again.load())
        with pytest.raises(ServiceUnavailable):
            await again.knows(1)
        with pytest.raises(ServiceUnavailable):
            await again.connect(1, payload_of)
        found.kv.heal()
        await asyncio.wait_for(loading, 20)
        assert not await again.knows(1)


async def test_the_catalog_may_be_away_while_messages_are_delivered_and_acknowledged() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        consumer = await found.consumer()
        found.kv.fail("commit", times=10_000)
        found.kv.fail_reads(times=10_000)
        topic = found.store.opened(str(TOPIC))
        assert topic is not None
        await topic.append_async(b"b", durability="synced")
        assert await consumer.take(2) == [b"a", b"b"]
        consumer.subscription.ack(0, 2)
        with pytest.raises(ServiceUnavailable):
            await found.consumer("c2", subscription="s2")
        found.kv.heal()
        second = await found.consumer("c2", subscription="s2")
        assert await second.take(2) == [b"a", b"b"]
        assert consumer.subscription.window.position == 2


async def test_filters_that_cannot_work_are_refused_before_anything_is_created() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        for filters in (("",), ("x" * 300,), tuple(map(str, range(KEY_FILTERS_MAX + 1)))):
            with pytest.raises(UsageError):
                await found.consumer(kind=SubscriptionType.KEY_SHARED, filters=filters)
        loaded = found.registry.loaded(TOPIC)
        assert loaded is None or loaded.rows() == []


async def test_a_storm_of_consumers_is_refused_at_the_limit_and_forgotten_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "SUBSCRIPTION_CONSUMERS_MAX", 5)
    async with faulty_dispatching() as found:
        await append(found, b"a")
        for each in range(5):
            await found.registry.subscribe(TOPIC, "s1", SHARED, f"c{each}")
        with pytest.raises(SubscriptionBusy, match="the most that it can have"):
            await found.registry.subscribe(TOPIC, "s1", SHARED, "one more")
        consumer = await found.connected(stable_number(str(TOPIC), "s1", "c0"))
        assert await consumer.take(1) == [b"a"]


async def test_a_storm_of_subscriptions_of_a_non_reliable_topic_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "SUBSCRIPTIONS_MAX", 3)
    async with faulty_dispatching() as found:
        fanout = FanoutTopic(str(TOPIC))
        for each in range(3):
            await found.registry.subscribe_fanout(fanout, f"s{each}", SHARED, "c")
        with pytest.raises(TooManySubscriptions):
            await found.registry.subscribe_fanout(fanout, "s3", SHARED, "c")
        await found.registry.subscribe_fanout(fanout, "s2", SHARED, "c2")


async def test_a_topic_that_another_process_took_over_is_delivered_when_it_comes_back() -> None:
    async with faulty_dispatching() as found:
        await append(found, b"a")
        consumer = await found.consumer()
        await consumer.take(1)
        await settled(consumer.subscription)
        held = await asyncio.to_thread(found.store.storage, str(TOPIC))
        held.fence(TopicFenced("another process has it"))
        await append(found, b"b")
        assert await consumer.take(1) == [b"b"]
