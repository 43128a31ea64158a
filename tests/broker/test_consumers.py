"""Danube's own client consumes: order, acknowledgements, redelivery, streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from danube import Consumer, SubType
from grpc.aio import AioRpcError

from forebay.broker import danube_pb2 as pb
from forebay.dispatch.subscription import Subscription
from forebay.format.names import parse_topic
from support.danube_brokers import (
    DanubeBroker,
    DanubeUser,
    Inbox,
    calls_of,
    end_connections,
    running_broker,
    until,
    within,
)

TOPIC = "/default/t1"


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % each for each in range(first, first + count)]


async def send(producer: Any, count: int, first: int = 0) -> None:
    for payload in numbers(count, first):
        await within(producer.send(payload))


async def subscription(broker: DanubeBroker, topic: str = TOPIC, name: str = "s1") -> Subscription:
    return await broker.context.registry.find(parse_topic(topic), name)


def number_of(consumer: Consumer, topic: str = TOPIC) -> int:
    return int(consumer._consumers[topic].consumer_id)


async def test_messages_come_in_the_order_in_which_they_were_sent(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    await send(producer, 250)  # more than are delivered without an acknowledgement
    assert await inbox.read(250) == numbers(250)


async def test_a_message_is_delivered_as_it_was_sent(
    danube: DanubeUser, broker: DanubeBroker
) -> None:
    producer = await danube.producer(TOPIC, "maker")
    inbox = await danube.inbox(TOPIC)
    await within(producer.send(b"one", {"a": "1", "b": "2"}))
    request_id = await within(producer.send_with_key(b"two", {}, "key"))
    one, two = await inbox.take_many(2)
    assert (one.payload, dict(one.attributes)) == (b"one", {"a": "1", "b": "2"})
    assert not one.HasField("routing_key")
    assert (two.payload, two.routing_key) == (b"two", "key")
    assert (two.request_id, two.producer_name, two.subscription_name) == (request_id, "maker", "")
    assert (two.msg_id.topic_name, two.msg_id.topic_offset) == (TOPIC, 1)
    assert two.msg_id.broker_addr == broker.address
    assert two.publish_time > 1_700_000_000_000


async def test_messages_that_came_another_way_are_delivered_and_acknowledged(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    """The client acknowledges nothing whose topic is not the one it subscribed to."""
    topic = broker.store.topic(TOPIC)
    await asyncio.to_thread(topic.append, b"before")
    inbox = await danube.inbox(TOPIC)
    await asyncio.to_thread(topic.append, b"after")
    assert await inbox.read(1) == [b"after"]
    found = await subscription(broker)
    await until(lambda: found.window.position == 2, "the acknowledgement")


async def test_a_new_subscription_begins_with_the_next_message(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    await send(producer, 5)
    inbox = await danube.inbox(TOPIC)
    await send(producer, 5, first=5)
    assert await inbox.read(5) == numbers(5, first=5)


async def test_a_new_subscription_begins_with_the_oldest_message_if_configured(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, subscription_start="earliest") as broker:
        producer = await broker.user.producer(TOPIC)
        await send(producer, 5)
        inbox = await broker.user.inbox(TOPIC)
        assert await inbox.read(5) == numbers(5)


async def test_a_subscription_counts_from_the_moment_it_exists(tmp_path: Path) -> None:
    """Nothing was received, nothing acknowledged: a restart misses nothing all the same."""
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        await send(producer, 3)
        await broker.user.consumer(TOPIC)
        await send(producer, 3, first=3)
    async with running_broker(tmp_path) as broker:
        inbox = await broker.user.inbox(TOPIC)
        assert await inbox.read(3) == numbers(3, first=3)


async def test_acknowledged_messages_are_not_delivered_again(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 6)
        found = await inbox.take_many(6)
        await inbox.ack(found[0], found[1], found[4])  # out of order, with a gap
    async with running_broker(tmp_path) as broker:
        inbox = await broker.user.inbox(TOPIC)
        assert await inbox.read(3) == [b"2", b"3", b"5"]
        assert await inbox.is_quiet()


async def test_every_subscription_gets_every_message(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    inboxes = [await danube.inbox(TOPIC, subscription=f"s{each}") for each in range(3)]
    await send(producer, 20)
    for inbox in inboxes:
        assert await inbox.read(20) == numbers(20)


async def test_a_consumer_gets_no_more_than_it_may_leave_unacknowledged(tmp_path: Path) -> None:
    async with running_broker(tmp_path, max_unacked_messages=3) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 6)
        held = await inbox.take_many(3)
        assert await inbox.is_quiet()
        await inbox.ack(held[1])
        assert (await inbox.take()).payload == b"3"
        assert await inbox.is_quiet()


async def test_a_slow_consumer_loses_nothing(danube: DanubeUser) -> None:
    """Its queue is full, then the connection, then its outbox at the broker."""
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC, kind=SubType.SHARED)
    size = 200_000
    await within(asyncio.gather(*(producer.send(bytes(size)) for _ in range(150))))
    for _ in range(150):
        message = await inbox.take()
        assert len(message.payload) == size
        await inbox.ack(message)


async def test_a_message_of_a_topic_with_a_long_history_is_found(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    """A subscription that lags reads objects, then segments, then what is in memory."""
    producer = await danube.producer(TOPIC)
    await danube.consumer(TOPIC)
    await send(producer, 40)
    topic = broker.store.topic(TOPIC)
    await asyncio.to_thread(topic.upload)
    await asyncio.to_thread(topic.trim_local)
    await send(producer, 40, first=40)
    inbox = await danube.inbox(TOPIC)
    assert await inbox.read(80) == numbers(80)


# -- redelivery ---------------------------------------------------------------------------------


async def test_a_nacked_message_comes_again_after_its_delay(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC, kind=SubType.SHARED)
    await send(producer, 2)
    one, two = await inbox.take_many(2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await within(inbox.consumer.nack(one, delay_ms=500, reason="not now"))
    await within(inbox.consumer.nack(two, delay_ms=0))
    assert await inbox.read(2) == [b"1", b"0"]
    assert loop.time() - began >= 0.5


async def test_a_nack_holds_back_what_comes_after_it_where_order_is_promised(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, redelivery_delay_ms=100) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 1)
        await within(inbox.consumer.nack(await inbox.take()))
        await send(producer, 2, first=1)
        assert await inbox.read(3) == numbers(3)


async def test_a_message_that_nobody_acknowledges_comes_again(tmp_path: Path) -> None:
    async with running_broker(tmp_path, ack_timeout_ms=200, redelivery_delay_ms=10) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 1)
        first, second, third = await inbox.take_many(3)
        assert {each.payload for each in (first, second, third)} == {b"0"}
        await inbox.ack(third)
        found = await subscription(broker)
        assert found.window.counters.redelivered >= 2
        assert found.window.position == 1


async def refuse(inbox: Inbox, payload: bytes, times: int) -> None:
    for _ in range(times):
        message = await inbox.take()
        assert message.payload == payload
        await within(inbox.consumer.nack(message, delay_ms=0))


async def test_a_message_that_fails_too_often_blocks_where_that_is_configured(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, max_redeliveries=2, poison="block") as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 1)
        await refuse(inbox, b"0", 3)
        found = await subscription(broker)
        await until(lambda: found.window.blocked == [0], "the block")
        await send(producer, 1, first=1)
        assert await inbox.is_quiet()
        assert found.window.position == 0
        found.ack(0, 1)  # an operator decides
        assert await inbox.read(1) == [b"1"]


async def test_a_message_that_fails_too_often_is_dropped_where_that_is_configured(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, max_redeliveries=1, poison="drop") as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC, kind=SubType.SHARED)
        await send(producer, 1)
        await refuse(inbox, b"0", 2)
        await send(producer, 1, first=1)
        assert await inbox.read(1) == [b"1"]
        found = await subscription(broker)
        await until(lambda: found.window.position == 2, "the end")
        assert found.window.counters.dropped == 1


@pytest.mark.parametrize("name", [None, "/default/graveyard"])
async def test_a_message_that_fails_too_often_is_moved_where_that_is_configured(
    tmp_path: Path, name: str | None
) -> None:
    async with running_broker(
        tmp_path, max_redeliveries=1, poison="dead_letter", dead_letter_topic=name
    ) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC, kind=SubType.SHARED)
        await within(producer.send(b"0", {"k": "v"}))
        await refuse(inbox, b"0", 2)
        found = await subscription(broker)
        await until(lambda: found.window.position == 1, "the dead letter")
        letters = list(broker.store.topic(name or f"{TOPIC}-dead-letters").read(0))
        assert [each.payload for each in letters] == [b"0"]
        assert dict(letters[0].attributes) == {
            "k": "v",
            "forebay-topic": TOPIC,
            "forebay-offset": "0",
            "forebay-subscription": "s1",
        }


async def test_dead_letters_are_consumed_like_any_other_topic(tmp_path: Path) -> None:
    async with running_broker(
        tmp_path, max_redeliveries=0, poison="dead_letter", subscription_start="earliest"
    ) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC, kind=SubType.SHARED)
        await send(producer, 1)
        await refuse(inbox, b"0", 1)
        found = await subscription(broker)
        await until(lambda: found.window.position == 1, "the dead letter")
        letters = await broker.user.inbox(f"{TOPIC}-dead-letters")
        assert await letters.read(1) == [b"0"]


async def test_what_a_consumer_had_goes_to_another_one_when_it_leaves(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    client = await danube.client()
    first = await danube.inbox(TOPIC, "c1", SubType.SHARED, client=client)
    await send(producer, 3)
    assert len(await first.take_many(3)) == 3
    second = await danube.inbox(TOPIC, "c2", SubType.SHARED)
    await end_connections(client)
    assert sorted(await second.read(3)) == numbers(3)


# -- acknowledgements ---------------------------------------------------------------------------


def ack(offset: int, topic: str = TOPIC, name: str = "s1") -> bytes:
    place = pb.MsgID(topic_name=topic, topic_offset=offset)
    return pb.AckRequest(request_id=5, msg_id=place, subscription_name=name).SerializeToString()


async def test_acknowledgements_that_come_late_or_twice_change_nothing(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    await send(producer, 2)
    first = await inbox.take()
    for _ in range(3):
        await inbox.ack(first)
        await within(inbox.consumer.nack(first))
    assert await inbox.read(1) == [b"1"]
    assert await inbox.is_quiet()
    answer = await broker.call("danube.ConsumerService/Ack", ack(0))
    assert pb.AckResponse.FromString(answer).request_id == 5


async def test_acknowledgements_of_what_does_not_exist_are_harmless(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    method = "danube.ConsumerService/Ack"
    await broker.call(method, ack(10**6))
    await broker.call("danube.ConsumerService/Nack", ack(10**6))
    unknown = [ack(0, topic="/default/none"), ack(0, name="none")]
    for raw in unknown:
        assert await broker.refused(method, raw) is grpc.StatusCode.NOT_FOUND
    assert await broker.refused(method, ack(2**64 - 1)) is grpc.StatusCode.INVALID_ARGUMENT
    bare = pb.AckRequest(request_id=1, subscription_name="s1").SerializeToString()
    assert await broker.refused(method, bare) is grpc.StatusCode.INVALID_ARGUMENT
    assert not broker.store.exists("/default/none")
    await send(producer, 2)
    assert await inbox.read(2) == numbers(2)


# -- streams ------------------------------------------------------------------------------------


async def test_the_same_consumer_takes_over_and_the_old_stream_stays_open(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    """An old stream that ended would be opened again at once, and take over in its turn."""
    producer = await danube.producer(TOPIC)
    old = await danube.inbox(TOPIC)
    await send(producer, 2)
    assert len(await old.take_many(2)) == 2
    before = calls_of("ReceiveMessages")
    new = await danube.inbox(TOPIC)
    assert await new.read(2) == numbers(2)  # not acknowledged by the old one
    await send(producer, 20, first=2)
    assert await new.read(20) == numbers(20, first=2)
    assert await old.is_quiet()
    assert calls_of("ReceiveMessages") == before + 1
    assert number_of(old.consumer) == number_of(new.consumer)


async def test_an_old_stream_that_leaves_disturbs_nobody(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    client = await danube.client()
    await danube.inbox(TOPIC, client=client)
    new = await danube.inbox(TOPIC)
    found = await subscription(broker)
    await until(lambda: len(found.consumers) == 1, "the takeover")
    await end_connections(client)
    await send(producer, 3)
    assert await new.read(3) == numbers(3)


async def test_an_unknown_consumer_makes_few_calls(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    """NOT_FOUND at once would make the client open 2,000 streams a second."""
    await danube.producer(TOPIC)
    consumer = await danube.consumer(TOPIC)
    consumer._consumers[TOPIC].consumer_id = 4711
    before = calls_of("ReceiveMessages")
    inbox = Inbox(consumer, await consumer.receive())
    assert await inbox.is_quiet(1.0)
    assert calls_of("ReceiveMessages") == before + 1


async def test_an_unknown_consumer_is_told_so_in_the_end(broker: DanubeBroker) -> None:
    with pytest.raises(AioRpcError) as caught:
        await within(broker.stream(4711).read())
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stream_stays_open_when_the_log_ends_for_a_while(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    await send(producer, 1)
    assert await inbox.read(1) == numbers(1)
    before = calls_of("ReceiveMessages")
    await asyncio.to_thread(broker.store.storage(TOPIC).wal.shutdown)
    await send(producer, 2, first=1)
    assert await inbox.read(2) == numbers(2, first=1)
    assert calls_of("ReceiveMessages") == before


async def test_consumers_of_a_deleted_topic_get_nothing_of_it_and_all_of_the_next(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    await send(producer, 3)
    assert await inbox.read(2) == numbers(2)
    before = calls_of("ReceiveMessages")
    await asyncio.to_thread(broker.store.delete, TOPIC)
    await until(lambda: calls_of("ReceiveMessages") > before, "the end of the stream")
    again = await danube.producer(TOPIC)
    new = await danube.inbox(TOPIC)
    await send(again, 3, first=3)
    assert await new.read(3) == numbers(3, first=3)
    assert calls_of("ReceiveMessages") <= before + 3, "no storm of streams"


async def test_consumers_keep_their_numbers_after_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        number = number_of(await broker.user.consumer(TOPIC))
        await send(producer, 1)
    async with running_broker(tmp_path) as broker:
        stream = broker.stream(number)  # without subscribing again
        message = pb.StreamMessage.FromString(await within(stream.read()))
        assert message.payload == b"0"
        assert number_of(await broker.user.consumer(TOPIC)) == number
        stream.cancel()


async def test_a_stopping_server_takes_the_last_acknowledgements(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 50)
        assert await inbox.read(50) == numbers(50)
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        inbox = await broker.user.inbox(TOPIC)
        await send(producer, 1, first=50)
        assert await inbox.read(1) == [b"50"]


# -- refusals -----------------------------------------------------------------------------------


def subscribe(**fields: Any) -> bytes:
    names = {"topic_name": TOPIC, "consumer_name": "c9", "subscription": "s1", **fields}
    return pb.ConsumerRequest(request_id=3, **names).SerializeToString()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"topic_name": "/default/none"}, grpc.StatusCode.NOT_FOUND),
        ({"topic_name": "t1"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"consumer_name": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"subscription": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"subscription": "s" * 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"subscription_type": 9}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"key_filters": ["x" * 1000]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"key_filters": ["x"] * 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"key_filters": [""]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_cannot_be_subscribed_to_is_refused(
    broker: DanubeBroker, danube: DanubeUser, fields: dict[str, Any], status: grpc.StatusCode
) -> None:
    await danube.producer(TOPIC)
    assert await broker.refused("danube.ConsumerService/Subscribe", subscribe(**fields)) is status


async def test_subscribing_creates_no_topic(broker: DanubeBroker) -> None:
    await broker.refused("danube.ConsumerService/Subscribe", subscribe())
    assert not broker.store.exists(TOPIC)


async def test_subscribing_again_gives_the_same_number(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    await danube.producer(TOPIC)
    answers = [
        pb.ConsumerResponse.FromString(
            await broker.call("danube.ConsumerService/Subscribe", subscribe())
        )
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert (answers[0].request_id, answers[0].consumer_name) == (3, "c9")
