"""The four types of subscriptions, as Danube's own client sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from danube import SubType
from grpc.aio import AioRpcError

from forebay.broker import danube_pb2 as pb
from forebay.format.names import parse_topic
from support.danube_brokers import (
    DanubeBroker,
    DanubeUser,
    Inbox,
    end_connections,
    running_broker,
    until,
    within,
)

TOPIC = "/default/t1"


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % each for each in range(first, first + count)]


async def connected(broker: DanubeBroker, count: int) -> None:
    found = await broker.context.registry.find(parse_topic(TOPIC), "s1")
    await until(lambda: len(found.consumers) == count, f"{count} consumers")


async def inboxes(
    broker: DanubeBroker, count: int, kind: SubType, filters: Sequence[list[str]] = ()
) -> list[Inbox]:
    """Consumers c0, c1 and so on, in the order of their connecting."""
    found = []
    for each in range(count):
        chosen = filters[each] if filters else None
        found.append(await broker.user.inbox(TOPIC, f"c{each}", kind, filters=chosen))
        await connected(broker, each + 1)
    return found


async def drained(boxes: Sequence[Inbox], count: int) -> list[list[Any]]:
    """All messages, by consumer, each acknowledged; ends when there are so many."""
    found: list[list[Any]] = [[] for _ in boxes]
    while sum(map(len, found)) < count:
        await until(lambda: any(box.waiting for box in boxes), "a message")
        for box, got in zip(boxes, found, strict=True):
            while box.waiting:
                message = await box.take()
                await box.ack(message)
                got.append(message)
    return found


def payloads(messages: Sequence[Any]) -> list[bytes]:
    return [bytes(each.payload) for each in messages]


# -- exclusive ----------------------------------------------------------------------------------


async def test_an_exclusive_subscription_refuses_a_second_consumer(danube: DanubeUser) -> None:
    await danube.producer(TOPIC)
    await danube.inbox(TOPIC, "c1")
    with pytest.raises(AioRpcError) as caught:
        await danube.consumer(TOPIC, "c2")
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_an_exclusive_subscription_is_free_when_its_consumer_has_left(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    client = await danube.client()
    first = await danube.inbox(TOPIC, "c1", client=client)
    await within(producer.send(b"0"))
    await within(producer.send(b"1"))
    await first.ack(await first.take())
    await end_connections(client)
    await connected(broker, 0)
    second = await danube.inbox(TOPIC, "c2")
    assert await second.read(1) == [b"1"]


async def subscribe_until_refused(danube: DanubeUser, kind: SubType) -> None:
    """A consumer of a non-reliable topic keeps others away once it is connected."""
    while True:
        await danube.consumer(TOPIC, "c2", kind)


@pytest.mark.parametrize("reliable", [True, False])
async def test_a_subscription_in_use_keeps_its_type(danube: DanubeUser, reliable: bool) -> None:
    await danube.producer(TOPIC, reliable=reliable)
    await danube.inbox(TOPIC, "c1", SubType.SHARED)
    with pytest.raises(AioRpcError) as caught:
        await subscribe_until_refused(danube, SubType.FAILOVER)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_subscription_that_nobody_uses_changes_its_type_and_keeps_its_place(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    client = await danube.client()
    first = await danube.inbox(TOPIC, "c1", client=client)
    for payload in numbers(4):
        await within(producer.send(payload))
    assert await first.read(2) == numbers(2)
    await end_connections(client)
    await connected(broker, 0)
    second = await danube.inbox(TOPIC, "c2", SubType.SHARED)
    assert await second.read(2) == numbers(2, first=2)


# -- shared -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
async def test_consumers_that_share_get_messages_in_turn(tmp_path: Path, reliable: bool) -> None:
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC, reliable=reliable)
        kind = SubType.SHARED
        boxes = [await broker.user.inbox(TOPIC, f"c{each}", kind) for each in range(3)]
        await all_get_one(broker, producer, boxes, reliable=reliable)
        for payload in numbers(30):
            await within(producer.send(payload))
        found = await drained(boxes, 30)
        assert [len(each) for each in found] == [10, 10, 10]
        assert sorted(int(each) for got in found for each in payloads(got)) == list(range(30))


async def all_get_one(
    broker: DanubeBroker, producer: Any, boxes: Sequence[Inbox], *, reliable: bool
) -> None:
    """Waits until all consumers are connected."""
    if reliable:
        await connected(broker, len(boxes))
        return
    fanout = broker.context.topics.fanout(parse_topic(TOPIC))
    assert fanout is not None
    await until(lambda: len(fanout.subscriptions["s1"].consumers) == len(boxes), "all consumers")


async def test_a_consumer_that_acknowledges_nothing_holds_back_nobody(tmp_path: Path) -> None:
    async with running_broker(tmp_path, max_unacked_messages=5) as broker:
        producer = await broker.user.producer(TOPIC)
        slow, fast = await inboxes(broker, 2, SubType.SHARED)
        for payload in numbers(60):
            await within(producer.send(payload))
        got = payloads((await drained([fast], 55))[0])
        assert slow.waiting == 5
        held = payloads(await slow.take_many(5))
        assert sorted(map(int, got + held)) == list(range(60))


# -- failover -----------------------------------------------------------------------------------


async def test_the_first_consumer_gets_everything_until_it_leaves(broker: DanubeBroker) -> None:
    danube = broker.user
    producer = await danube.producer(TOPIC)
    clients = [await danube.client() for _ in range(3)]
    boxes = []
    for each, client in enumerate(clients):
        kind = SubType.FAILOVER
        boxes.append(await danube.inbox(TOPIC, f"c{each}", kind, client=client))
        await connected(broker, each + 1)
    expected = 0
    for each, client in enumerate(clients):
        for payload in numbers(5, first=expected):
            await within(producer.send(payload))
        assert await boxes[each].read(4) == numbers(4, first=expected)
        assert all(not box.waiting for box in boxes[each + 1 :])
        expected += 4  # the fifth goes to the next one, before what comes then
        await end_connections(client)
        await connected(broker, 2 - each)
        expected_next = expected + 1
        if each < 2:
            assert await boxes[each + 1].read(1) == numbers(1, first=expected)
        expected = expected_next


async def test_the_first_consumer_keeps_its_place_when_it_connects_again(
    broker: DanubeBroker,
) -> None:
    producer = await broker.user.producer(TOPIC)
    _, second = await inboxes(broker, 2, SubType.FAILOVER)
    again = await broker.user.inbox(TOPIC, "c0", SubType.FAILOVER)
    found = await broker.context.registry.find(parse_topic(TOPIC), "s1")
    await until(lambda: len(found.consumers) == 2, "the takeover")
    for payload in numbers(5):
        await within(producer.send(payload))
    assert await again.read(5) == numbers(5)
    assert not second.waiting


# -- key-shared ---------------------------------------------------------------------------------


async def send_keys(producer: Any, count: int, keys: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await within(producer.send_with_key(b"%d" % number, None, f"key-{number % keys}"))


async def test_a_key_is_read_by_one_consumer_in_order(broker: DanubeBroker) -> None:
    producer = await broker.user.producer(TOPIC)
    boxes = await inboxes(broker, 3, SubType.KEY_SHARED)
    await send_keys(producer, 120, keys=24)
    found = await drained(boxes, 120)
    readers = Counter(
        each.routing_key for got in found for each in {m.routing_key: m for m in got}.values()
    )
    assert set(readers.values()) == {1}
    assert all(found), "every consumer has keys"
    for got in found:
        for key in {each.routing_key for each in got}:
            own = [int(each.payload) for each in got if each.routing_key == key]
            assert own == sorted(own)


async def test_keys_stay_where_they_are_when_a_consumer_comes(broker: DanubeBroker) -> None:
    producer = await broker.user.producer(TOPIC)
    boxes = await inboxes(broker, 2, SubType.KEY_SHARED)
    await send_keys(producer, 40, keys=40)
    before = await drained(boxes, 40)
    boxes.append(await broker.user.inbox(TOPIC, "c2", SubType.KEY_SHARED))
    await connected(broker, 3)
    await send_keys(producer, 40, keys=40, first=40)
    after = await drained(boxes, 40)
    for box in range(2):
        old = {each.routing_key for each in before[box]}
        assert {each.routing_key for each in after[box]} <= old
    assert after[2], "the new one gets some"


async def test_a_keys_messages_wait_until_its_last_consumer_is_done(broker: DanubeBroker) -> None:
    """A consumer that leaves has some messages of a key: they come first."""
    danube = broker.user
    producer = await danube.producer(TOPIC)
    client = await danube.client()
    first = await danube.inbox(TOPIC, "c0", SubType.KEY_SHARED, client=client)
    await send_keys(producer, 6, keys=2)
    held = await first.take_many(6)
    await first.ack(held[0], held[3])
    second = await danube.inbox(TOPIC, "c1", SubType.KEY_SHARED)
    await connected(broker, 2)
    await send_keys(producer, 4, keys=2, first=6)
    await end_connections(client)
    found = (await drained([second], 8))[0]
    assert [int(each.payload) for each in found if each.routing_key == "key-0"] == [2, 4, 6, 8]
    assert [int(each.payload) for each in found if each.routing_key == "key-1"] == [1, 5, 7, 9]


@pytest.mark.parametrize("reliable", [True, False])
async def test_key_filters_choose_what_a_consumer_gets(tmp_path: Path, reliable: bool) -> None:
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC, reliable=reliable)
        kind = SubType.KEY_SHARED
        filters = [["eu-*"], ["us-?", "us-west"], ["*"]]
        boxes = [
            await broker.user.inbox(TOPIC, f"c{at}", kind, filters=each)
            for at, each in enumerate(filters)
        ]
        await all_get_one(broker, producer, boxes, reliable=reliable)
        keys = ["eu-1", "us-1", "us-west", "us-east", "eu-north", "asia"]
        for key in keys:
            await within(producer.send_with_key(key.encode(), None, key))
        found = await drained(boxes, len(keys))
        got = [set(payloads(each)) for each in found]
        assert got[0] <= {b"eu-1", b"eu-north"}
        assert got[1] <= {b"us-1", b"us-west"}
        assert got[2] >= {b"us-east", b"asia"}


async def test_a_key_that_nobody_wants_waits_and_holds_back_nobody(broker: DanubeBroker) -> None:
    producer = await broker.user.producer(TOPIC)
    (box,) = await inboxes(broker, 1, SubType.KEY_SHARED, [["a*"]])
    for key in ["b", "a1", "b", "a2"]:
        await within(producer.send_with_key(key.encode(), None, key))
    assert await box.read(2) == [b"a1", b"a2"]
    found = await broker.context.registry.find(parse_topic(TOPIC), "s1")
    assert found.window.position == 0
    other = await broker.user.inbox(TOPIC, "c9", SubType.KEY_SHARED, filters=["b"])
    assert await other.read(2) == [b"b", b"b"]
    assert found.window.position == 4


# -- non-reliable topics ------------------------------------------------------------------------


async def test_a_non_reliable_topic_stores_nothing(broker: DanubeBroker) -> None:
    danube = broker.user
    producer = await danube.producer(TOPIC, reliable=False)
    await within(producer.send(b"to nobody"))
    box = await danube.inbox(TOPIC)
    await all_get_one(broker, producer, [box], reliable=False)
    await within(producer.send(b"now", {"k": "v"}))
    message = await box.take()
    assert (message.payload, dict(message.attributes)) == (b"now", {"k": "v"})
    assert (message.msg_id.topic_name, message.msg_id.topic_offset) == (TOPIC, 0)
    await box.ack(message)
    await within(box.consumer.nack(message))
    assert await box.is_quiet()
    assert not broker.store.exists(TOPIC)


async def test_consumers_of_a_non_reliable_topic_come_back_by_their_number(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.user.producer(TOPIC, reliable=False)
        consumer = await broker.user.consumer(TOPIC)
        number = consumer._consumers[TOPIC].consumer_id
    async with running_broker(tmp_path) as broker:
        stream = broker.stream(number)
        producer = await broker.user.producer(TOPIC, reliable=False)
        fanout = broker.context.topics.fanout(parse_topic(TOPIC))
        assert fanout is not None
        await until(lambda: fanout.subscriptions.get("s1"), "the consumer")
        await within(producer.send(b"hello"))
        assert pb.StreamMessage.FromString(await within(stream.read())).payload == b"hello"
        stream.cancel()


async def test_an_exclusive_non_reliable_subscription_has_one_consumer(danube: DanubeUser) -> None:
    await danube.producer(TOPIC, reliable=False)
    await danube.inbox(TOPIC, "c1")
    with pytest.raises(AioRpcError) as caught:
        await subscribe_until_refused(danube, SubType.EXCLUSIVE)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_same_consumer_takes_over_a_non_reliable_stream(broker: DanubeBroker) -> None:
    danube = broker.user
    producer = await danube.producer(TOPIC, reliable=False)
    old = await danube.inbox(TOPIC)
    await all_get_one(broker, producer, [old], reliable=False)
    fanout = broker.context.topics.fanout(parse_topic(TOPIC))
    assert fanout is not None
    before = next(iter(fanout.subscriptions["s1"].consumers.values()))
    new = await danube.inbox(TOPIC)
    consumers = fanout.subscriptions["s1"].consumers
    await until(lambda: before not in consumers.values(), "the takeover")
    await within(producer.send(b"one"))
    assert (await new.take()).payload == b"one"
    assert await old.is_quiet()
