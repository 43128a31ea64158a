"""A subscription delivers every message of its topic, whatever tier it is in and whoever reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.registry import stable_number
from forebay.errors import SubscriptionBusy, UnknownSubscription, UnknownTopic
from forebay.format.names import parse_topic
from forebay.limits import OUTBOX_BYTES_MAX
from support.dispatching import TOPIC, Dispatching, dispatching, eventually, settled

EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Dispatching]:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        yield found


def numbered(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


async def append(found: Dispatching, start: int, end: int) -> None:
    topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
    await topic.append_many_async(numbered(start, end), durability="synced")


async def test_messages_before_and_after_subscribing_are_delivered(shared: Dispatching) -> None:
    await append(shared, 0, 50)
    consumer = await shared.consumer()
    assert await consumer.take(50) == numbered(0, 50)
    await append(shared, 50, 60)
    assert await consumer.take(10) == numbered(50, 60)


async def test_a_new_subscription_begins_at_the_end_by_default(tmp_path: Path) -> None:
    async with dispatching(tmp_path) as found:
        await append(found, 0, 10)
        consumer = await found.consumer()
        await append(found, 10, 12)
        assert await consumer.take(2) == numbered(10, 12)


async def test_messages_that_come_between_subscribing_and_connecting_are_delivered(
    tmp_path: Path,
) -> None:
    async with dispatching(tmp_path) as found:
        await append(found, 0, 5)
        number = await found.registry.subscribe(TOPIC, "s1", SubscriptionType.SHARED, "c1")
        await append(found, 5, 8)
        consumer = await found.connected(number)
        assert await consumer.take(3) == numbered(5, 8)


async def test_a_consumer_gets_no_more_than_it_may_have_unacknowledged(tmp_path: Path) -> None:
    async with dispatching(
        tmp_path, max_unacked_messages=3, subscription_start="earliest"
    ) as found:
        await append(found, 0, 10)
        consumer = await found.consumer()
        assert await consumer.take(3) == numbered(0, 3)
        assert await consumer.idle()
        consumer.subscription.ack(1, 2)
        assert await consumer.take(1) == numbered(3, 4)
        assert consumer.subscription.window.position == 0


async def test_a_restart_delivers_what_was_not_acknowledged_and_nothing_else(
    tmp_path: Path,
) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 10)
        consumer = await found.consumer()
        await consumer.take(10)
        for offset in (0, 1, 2, 5, 9):
            consumer.subscription.ack(offset, offset + 1)
    async with dispatching(tmp_path) as found:
        number = stable_number(str(TOPIC), "s1", "c1")
        assert await found.registry.knows(number), "without having subscribed again"
        consumer = await found.connected(number)
        assert await consumer.take(5) == [b"3", b"4", b"6", b"7", b"8"]
        assert await consumer.idle()


async def test_an_acknowledgement_of_what_an_earlier_run_delivered_counts(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 10)
        number = await found.registry.subscribe(TOPIC, "s1", SubscriptionType.SHARED, "c1")
    async with dispatching(tmp_path) as found:
        subscription = await found.registry.find(TOPIC, "s1")
        subscription.ack(4, 6)
        subscription.ack(2**62, 2**62 + 1)  # never appended: ignored
        consumer = await found.connected(number)
        assert await consumer.take(8) == [*numbered(0, 4), *numbered(6, 10)]


async def test_a_consumer_that_does_not_read_holds_back_nobody(shared: Dispatching) -> None:
    topic = await asyncio.to_thread(shared.store.topic, str(TOPIC))
    large = [b"%07d" % number + b"x" * OUTBOX_BYTES_MAX for number in range(12)]
    slow = await shared.consumer("slow")
    fast = await shared.consumer("fast")
    await topic.append_many_async(large, durability="synced")
    got = [int(each[:7]) for each in await fast.take(11)]
    await settled(slow.subscription)
    assert len(slow.consumer._queue) == 1, "one message of any size, and no more"
    slow.leave()
    got += [int(each[:7]) for each in await fast.take(1)]
    assert sorted(got) == list(range(12))


async def test_two_subscriptions_at_the_same_place_read_a_range_once(shared: Dispatching) -> None:
    await append(shared, 0, 100)
    first = await shared.consumer(subscription="a")
    await first.take(100)
    feed = first.subscription.feed
    kept = list(feed._chunks)
    second = await shared.consumer(subscription="b")
    assert await second.take(100) == numbered(0, 100)
    assert feed._chunks == kept


async def test_every_tier_is_read(shared: Dispatching) -> None:
    topic = await asyncio.to_thread(shared.store.topic, str(TOPIC))
    await append(shared, 0, 40)
    await asyncio.to_thread(topic.upload)
    await append(shared, 40, 80)
    consumer = await shared.consumer()
    got: list[bytes] = []
    while len(got) < 80:
        got += await consumer.take(1)
        consumer.subscription.ack(len(got) - 1, len(got))
    assert got == numbered(0, 80)


async def test_a_second_consumer_of_an_exclusive_subscription_is_refused(
    shared: Dispatching,
) -> None:
    await append(shared, 0, 3)
    first = await shared.consumer("c1", kind=EXCLUSIVE)
    with pytest.raises(SubscriptionBusy, match="'c1'"):
        await shared.consumer("c2", kind=EXCLUSIVE)
    with pytest.raises(SubscriptionBusy, match="is exclusive"):
        await shared.consumer("c2", kind=SubscriptionType.SHARED)
    await first.take(3)
    first.leave()
    second = await shared.consumer("c2", kind=FAILOVER)
    assert await second.take(3) == numbered(0, 3), "unacknowledged, and the type may change now"


async def test_a_stream_of_a_second_exclusive_consumer_waits_for_the_first(
    shared: Dispatching,
) -> None:
    await append(shared, 0, 3)
    first = await shared.consumer("c1", kind=EXCLUSIVE)
    await first.take(3)
    first.leave()
    second = await shared.consumer("c2", kind=EXCLUSIVE)
    await second.take(3)
    again = await shared.connected(stable_number(str(TOPIC), "s1", "c1"))
    assert await again.idle()
    second.leave()
    assert await again.take(3) == numbered(0, 3)


async def test_a_second_stream_of_a_consumer_takes_over(shared: Dispatching) -> None:
    await append(shared, 0, 3)
    first = await shared.consumer("c1", kind=EXCLUSIVE)
    await first.take(3)
    second = await shared.connected(first.consumer.number)
    assert await second.take(3) == numbered(0, 3)
    assert await first.idle()
    third = await shared.connected(first.consumer.number)
    await third.take(3)
    second.leave()  # it was set aside: its end changes nothing
    await append(shared, 3, 4)
    assert await third.take(1) == numbered(3, 4)
    third.leave()
    assert await first.take(4) == numbered(0, 4), "a stream that was set aside is used again"


async def test_an_acknowledgement_creates_no_topic(shared: Dispatching) -> None:
    with pytest.raises(UnknownTopic):
        await shared.registry.find(parse_topic("nothing"), "s1")
    assert not await asyncio.to_thread(shared.store.exists, "nothing")


async def test_a_nack_delivers_again_after_its_delay(shared: Dispatching) -> None:
    await append(shared, 0, 2)
    consumer = await shared.consumer()
    await consumer.take(2)
    consumer.subscription.nack(0, 0)
    assert await consumer.take(1) == [b"0"]
    assert consumer.subscription.window.counters.nacked == 1


async def test_an_acknowledgement_that_does_not_come_is_a_redelivery(tmp_path: Path) -> None:
    async with dispatching(
        tmp_path, ack_timeout_ms=100, redelivery_delay_ms=1, subscription_start="earliest"
    ) as found:
        await append(found, 0, 2)
        consumer = await found.consumer()
        await consumer.take(2)
        consumer.subscription.ack(1, 2)
        assert await consumer.take(1) == [b"0"]
        assert consumer.subscription.window.counters.timed_out == 1


async def test_a_message_that_fails_too_often_goes_to_the_dead_letter_topic(
    tmp_path: Path,
) -> None:
    async with dispatching(
        tmp_path, max_redeliveries=1, poison="dead_letter", subscription_start="earliest"
    ) as found:
        await append(found, 0, 3)
        consumer = await found.consumer(kind=EXCLUSIVE)
        await consumer.take(3)
        consumer.subscription.nack(0, 0)
        assert await consumer.take(1) == [b"0"]
        consumer.subscription.nack(0, 0)
        consumer.subscription.ack(1, 3)
        await eventually(lambda: consumer.subscription.window.position == 3)
        letters = await asyncio.to_thread(found.store.topic, f"{TOPIC}-dead-letters")
        (letter,) = await asyncio.to_thread(lambda: list(letters.read()))
        assert letter.payload == b"0"
        assert letter.attributes == {
            "forebay-topic": str(TOPIC),
            "forebay-offset": "0",
            "forebay-subscription": "s1",
        }


async def test_a_seek_starts_again_there_and_survives_a_restart(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 6)
        consumer = await found.consumer()
        await consumer.take(6)
        consumer.subscription.ack(0, 6)
        await found.registry.seek(TOPIC, "s1", 4)
        assert await consumer.take(2) == numbered(4, 6)
    async with dispatching(tmp_path) as found:
        consumer = await found.connected(stable_number(str(TOPIC), "s1", "c1"))
        assert await consumer.take(2) == numbered(4, 6)


async def test_a_deleted_subscription_ends_its_streams_and_is_gone(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 3)
        consumer = await found.consumer()
        await consumer.take(3)
        consumer.subscription.ack(0, 2)
        await found.registry.delete(TOPIC, "s1")
        assert await consumer.consumer.take() == []
        with pytest.raises(UnknownSubscription):
            await found.registry.find(TOPIC, "s1")
        again = await found.consumer()
        assert await again.take(3) == numbered(0, 3), "it begins as a new one does"


async def test_lost_messages_are_passed_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 4)
        topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
        await asyncio.to_thread(topic.upload)
        await append(found, 4, 7)
    for file in (tmp_path / "data/wal/default/orders").iterdir():
        file.unlink()
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        consumer = await found.consumer()
        await append(found, 100, 102)
        assert await consumer.take(6) == [*numbered(0, 4), b"100", b"101"]
        assert consumer.subscription.counts.lost == 3
        assert "goes past messages that are gone" in caplog.text


async def test_a_subscription_can_be_told_to_stop_at_lost_messages(tmp_path: Path) -> None:
    async with dispatching(tmp_path, subscription_start="earliest") as found:
        await append(found, 0, 4)
    for file in (tmp_path / "data/wal/default/orders").iterdir():
        file.unlink()
    async with dispatching(tmp_path, subscription_start="earliest", on_lost="block") as found:
        await append(found, 100, 102)
        consumer = await found.consumer()
        await eventually(lambda: consumer.subscription.problem)
        assert consumer.subscription.window.position == 0
        topic = await asyncio.to_thread(found.store.topic, str(TOPIC))
        await asyncio.to_thread(topic.accept_loss)
        assert await consumer.take(2) == [b"100", b"101"]
