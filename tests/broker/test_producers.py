"""Danube's own client produces: topics, ids, access, and the size of messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from danube import SubType, UnrecoverableError
from grpc.aio import AioRpcError

from forebay.broker import danube_pb2 as pb
from forebay.format.names import parse_topic
from forebay.limits import MIB, OFFSET_MAX
from support.danube_brokers import (
    DanubeBroker,
    DanubeUser,
    calls_of,
    running_broker,
    within,
)

TOPIC = "/default/t1"


def request(
    topic: str = TOPIC,
    name: str = "p1",
    *,
    reliable: bool = True,
    exclusive: bool = False,
) -> bytes:
    return pb.ProducerRequest(
        request_id=1,
        producer_name=name,
        topic_name=topic,
        producer_access_mode=pb.Exclusive if exclusive else pb.Shared,
        dispatch_strategy=pb.Reliable if reliable else pb.NonReliable,
    ).SerializeToString()


async def create(broker: DanubeBroker, raw: bytes) -> pb.ProducerResponse:
    answer = await broker.call("danube.ProducerService/CreateProducer", raw)
    return pb.ProducerResponse.FromString(answer)


def message(number: int, payload: bytes = b"x", topic: str = TOPIC, name: str = "p1") -> bytes:
    return pb.StreamMessage(
        request_id=7,
        msg_id=pb.MsgID(producer_id=number, topic_name=topic),
        payload=payload,
        publish_time=1,
        producer_name=name,
    ).SerializeToString()


async def test_a_message_is_stored_as_it_was_sent(broker: DanubeBroker, danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    assert await within(producer.send(b"one", {"k": "v"})) == 2  # the client's own number
    assert await within(producer.send_with_key(b"two", None, "key")) == 3
    found = list(broker.store.topic(TOPIC).read(0))
    assert [(each.payload, each.attributes, each.routing_key) for each in found] == [
        (b"one", {"k": "v"}, None),
        (b"two", {}, "key"),
    ]
    assert {each.producer_name for each in found} == {"p1"}
    assert {each.msg_id.topic_name for each in found} == {TOPIC}


async def test_a_sent_message_is_synced(broker: DanubeBroker, danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    await within(asyncio.gather(*(producer.send(b"%d" % each) for each in range(50))))
    assert broker.store.topic(TOPIC).watermarks().synced == 50


async def test_a_producer_that_comes_again_has_the_same_id(broker: DanubeBroker) -> None:
    first = await create(broker, request())
    again = await create(broker, request())
    other = await create(broker, request(name="p2"))
    assert (first.request_id, first.producer_name) == (1, "p1")
    assert first.producer_id == again.producer_id != other.producer_id


async def test_what_a_client_says_about_itself_is_not_stored(broker: DanubeBroker) -> None:
    number = (await create(broker, request())).producer_id
    lie = message(number, topic="/default/other", name="somebody")
    await broker.call("danube.ProducerService/SendMessage", lie)
    found = next(iter(broker.store.topic(TOPIC).read(0)))
    assert (found.msg_id.topic_name, found.producer_name) == (TOPIC, "p1")
    assert not broker.store.exists("/default/other")


async def test_a_message_names_a_producer_of_an_earlier_run(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        number = (await create(broker, request())).producer_id
    async with running_broker(tmp_path) as broker:
        answer = await broker.call("danube.ProducerService/SendMessage", message(number))
        assert pb.MessageResponse.FromString(answer).request_id == 7
        assert broker.store.topic(TOPIC).watermarks().synced == 1


async def test_a_producer_that_nobody_created_is_not_found(broker: DanubeBroker) -> None:
    await create(broker, request())
    send = "danube.ProducerService/SendMessage"
    assert await broker.refused(send, message(12345)) is grpc.StatusCode.NOT_FOUND


async def test_a_message_without_an_id_is_refused_and_the_server_goes_on(
    broker: DanubeBroker,
) -> None:
    number = (await create(broker, request())).producer_id
    bare = pb.StreamMessage(request_id=1, payload=b"x").SerializeToString()
    send = "danube.ProducerService/SendMessage"
    assert await broker.refused(send, bare) is grpc.StatusCode.NOT_FOUND
    await broker.call(send, message(number))


@pytest.mark.parametrize(
    "name", ["", "t1", "default/t1", "/default", "/default/a/b", "/default/a b", "//t1"]
)
async def test_a_name_that_is_no_topic_is_refused(broker: DanubeBroker, name: str) -> None:
    create_ = "danube.ProducerService/CreateProducer"
    assert await broker.refused(create_, request(name)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_letters_of_every_language_make_a_topic(danube: DanubeUser) -> None:
    producer = await danube.producer("/bücher/заказы_1-x")
    inbox = await danube.inbox("/bücher/заказы_1-x")
    await within(producer.send(b"one"))
    assert await inbox.read(1) == [b"one"]


async def test_topics_are_created_only_where_that_is_allowed(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_topics=False) as broker:
        create_ = "danube.ProducerService/CreateProducer"
        assert await broker.refused(create_, request()) is grpc.StatusCode.NOT_FOUND
        await asyncio.to_thread(broker.store.topic(TOPIC).append, b"made by hand")
        await create(broker, request())


@pytest.mark.parametrize("reliable", [True, False])
async def test_a_topic_is_reliable_or_not_as_its_first_producer_asked(
    broker: DanubeBroker, reliable: bool
) -> None:
    await create(broker, request(reliable=reliable))
    create_ = "danube.ProducerService/CreateProducer"
    other = request(name="p2", reliable=not reliable)
    assert await broker.refused(create_, other) is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_mismatch_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await create(broker, request("/default/a", reliable=True))
        await create(broker, request("/default/b", reliable=False))
    async with running_broker(tmp_path) as broker:
        for topic, reliable in [("/default/a", False), ("/default/b", True)]:
            found = await broker.refused(
                "danube.ProducerService/CreateProducer", request(topic, reliable=reliable)
            )
            assert found is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_topic_is_partitioned_or_not(danube: DanubeUser) -> None:
    await danube.producer("/default/plain")
    with pytest.raises(UnrecoverableError, match="partitioned"):
        await danube.producer("/default/plain", partitions=2)
    await danube.producer("/default/parts", partitions=2)
    with pytest.raises(UnrecoverableError, match="partitioned"):
        await danube.producer("/default/parts")


async def test_an_exclusive_producer_keeps_others_away(broker: DanubeBroker) -> None:
    create_ = "danube.ProducerService/CreateProducer"
    await create(broker, request(exclusive=True))
    await create(broker, request(exclusive=True))  # itself, after it lost the connection
    assert await broker.refused(create_, request(name="p2")) is grpc.StatusCode.PERMISSION_DENIED
    await create(broker, request())  # gives it up
    await create(broker, request(name="p2"))
    third = request(name="p3", exclusive=True)
    assert await broker.refused(create_, third) is grpc.StatusCode.PERMISSION_DENIED


# -- partitions ---------------------------------------------------------------------------------


async def test_a_partitioned_producer_takes_the_partitions_in_turn(danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC, partitions=3)
    inbox = await danube.inbox(TOPIC, kind=SubType.SHARED)
    for number in range(6):
        await within(producer.send(b"%d" % number))
    found = await inbox.take_many(6)
    await inbox.ack(*found)
    by_topic: dict[str, list[bytes]] = {each.msg_id.topic_name: [] for each in found}
    for each in found:
        by_topic[each.msg_id.topic_name].append(bytes(each.payload))
    assert by_topic == {
        f"{TOPIC}-part-{part}": [b"%d" % part, b"%d" % (part + 3)] for part in range(3)
    }


async def test_a_key_always_goes_to_the_same_partition(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC, partitions=3)
    for number in range(30):
        await within(producer.send_with_key(b"%d" % number, None, f"key-{number % 5}"))
    places: dict[str | None, int] = {}
    for part in range(3):
        for each in broker.store.topic(f"{TOPIC}-part-{part}").read(0):
            assert places.setdefault(each.routing_key, part) == part
    assert len(places) == 5


async def test_partitions_are_acknowledged_each_by_itself(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC, partitions=2)
    inbox = await danube.inbox(TOPIC)
    for number in range(4):
        await within(producer.send(b"%d" % number))
    assert sorted(await inbox.read(4)) == [b"0", b"1", b"2", b"3"]
    for part in range(2):
        found = await broker.context.registry.find(parse_topic(f"{TOPIC}-part-{part}"), "s1")
        assert found.window.position == 2


# -- the size of messages -----------------------------------------------------------------------


def delivered_size(broker: DanubeBroker, payload: int) -> int:
    """The size of a message as a consumer gets it, with the longest offset."""
    found = pb.StreamMessage(
        request_id=2,
        msg_id=pb.MsgID(
            producer_id=2**63 - 1,
            topic_name=TOPIC,
            broker_addr=broker.address,
            topic_offset=OFFSET_MAX,
        ),
        payload=bytes(payload),
        publish_time=1_790_000_000_000,
        producer_name="p1",
    )
    return found.ByteSize()


def largest_payload(broker: DanubeBroker) -> int:
    return 4 * MIB - (delivered_size(broker, 4 * MIB) - 4 * MIB)


async def test_a_message_of_exactly_the_limit_is_delivered(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    largest = largest_payload(broker)
    assert delivered_size(broker, largest) == 4 * MIB
    await within(producer.send(bytes(largest)))
    await within(producer.send(b"after"))
    assert [len(each) for each in await inbox.read(2)] == [largest, 5]


@pytest.mark.parametrize("more", [1, 100, 100_000, 3 * MIB])
@pytest.mark.parametrize("reliable", [True, False])
async def test_a_larger_message_is_refused_at_once_and_for_good(
    broker: DanubeBroker, danube: DanubeUser, more: int, reliable: bool
) -> None:
    producer = await danube.producer(TOPIC, reliable=reliable)
    before = calls_of("SendMessage")
    with pytest.raises(AioRpcError) as caught:
        await within(producer.send(bytes(largest_payload(broker) + more)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert calls_of("SendMessage") == before + 1
    await within(producer.send(b"smaller"))


async def test_names_that_a_client_leaves_out_count(broker: DanubeBroker) -> None:
    number = (await create(broker, request())).producer_id
    bare = pb.StreamMessage(msg_id=pb.MsgID(producer_id=number), payload=bytes(4 * MIB - 24))
    assert bare.ByteSize() < 4 * MIB
    found = await broker.refused("danube.ProducerService/SendMessage", bare.SerializeToString())
    assert found is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_producer_waits_while_too_much_is_being_stored(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED makes the client send again, until there is room."""
    async with running_broker(tmp_path, pending_bytes_max=4 * MIB) as broker:
        producer = await broker.user.producer(TOPIC)
        sends = (producer.send(bytes(3 * MIB)) for _ in range(4))
        assert len(await within(asyncio.gather(*sends))) == 4
        assert broker.store.topic(TOPIC).watermarks().synced >= 4


async def test_thousands_of_messages_sent_at_once_are_all_acknowledged(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    # gRPC would cancel some of them, because more than 1,000 wait for the event loop.
    producer = await danube.producer(TOPIC)
    answers = await within(asyncio.gather(*(producer.send(b"x") for _ in range(4000))))
    assert len(set(answers)) == 4000
    assert broker.store.topic(TOPIC).watermarks().synced == 4000
