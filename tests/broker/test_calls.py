"""Requests as Danube's clients were recorded to send them, and what is no request at all.

The hexadecimal requests are those of version 0.5.0 of the Python client, on the topic /default/t1.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError

from forebay.broker import danube_pb2 as pb
from support import brokers
from support.danube_brokers import DanubeBroker, running_broker, within

TOPIC = "/default/t1"
NAME = TOPIC.encode().hex()
LOOKUP = "0801120b" + NAME
CREATE = "0801 12027031 1a0b" + NAME + "3001"
PARTITIONS = "0802120b" + NAME
SUBSCRIBE = "0801 120b" + NAME + "1a026331 22027331"


def varint(number: int) -> str:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return (bytes(found) + bytes([number])).hex()


async def test_recorded_calls_in_the_order_of_a_client(broker: DanubeBroker) -> None:
    async def call(method: str, recorded: str) -> bytes:
        return await broker.call(f"danube.{method}", bytes.fromhex(recorded))

    lookup = await broker.refused("danube.Discovery/TopicLookup", bytes.fromhex(LOOKUP))
    assert lookup is grpc.StatusCode.NOT_FOUND
    created = pb.ProducerResponse.FromString(await call("ProducerService/CreateProducer", CREATE))
    assert (created.request_id, created.producer_name) == (1, "p1")
    producer = varint(created.producer_id)
    check = pb.HealthCheckResponse.FromString(
        await call("HealthCheck/HealthCheck", "0801 18" + producer)
    )
    assert check.status == pb.HealthCheckResponse.OK

    partitions = await call("Discovery/TopicPartitions", PARTITIONS)
    assert partitions == bytes.fromhex("0802 120b" + NAME)
    found = pb.TopicLookupResponse.FromString(await call("Discovery/TopicLookup", LOOKUP))
    assert (found.request_id, found.response_type, found.proxy) == (1, 1, False)
    subscribed = await call("ConsumerService/Subscribe", SUBSCRIBE)
    consumer = pb.ConsumerResponse.FromString(subscribed)
    assert (consumer.request_id, consumer.consumer_name) == (1, "c1")
    await call("HealthCheck/HealthCheck", "0802 1001 18" + varint(consumer.consumer_id))

    msg_id = f"08{producer} 120b{NAME}"
    message = f"0802 12{varint(len(bytes.fromhex(msg_id)))} {msg_id} 1a0568656c6c6f 2a027031"
    assert await call("ProducerService/SendMessage", message) == bytes.fromhex("0802")
    stream = broker.stream(consumer.consumer_id)
    delivered = pb.StreamMessage.FromString(await within(stream.read()))
    assert delivered.payload == b"hello"
    ack = pb.AckRequest(request_id=2, msg_id=delivered.msg_id, subscription_name="s1")
    assert await call("ConsumerService/Ack", ack.SerializeToString().hex()) == bytes.fromhex("0802")
    stream.cancel()


async def test_a_producer_of_version_0_5_0_sends_its_schema_inside_the_request(
    broker: DanubeBroker,
) -> None:
    """Field 4 was a message `Schema` of its own: name, data and type."""
    schema = "0a06 736368656d61 1202 7b7d 1803"
    inline = f"0801 12027031 1a0b{NAME} 22{len(bytes.fromhex(schema)):02x}{schema} 3001"
    raw = bytes.fromhex(inline)
    answer = await broker.call("danube.ProducerService/CreateProducer", raw)
    assert pb.ProducerResponse.FromString(answer).producer_id > 0


async def test_a_client_of_version_0_5_0_finds_the_broker_in_field_5(
    broker: DanubeBroker,
) -> None:
    """`brokerServiceUrl`, which is `connect_url` today."""
    await broker.call("danube.ProducerService/CreateProducer", bytes.fromhex(CREATE))
    raw = await broker.call("danube.Discovery/TopicLookup", bytes.fromhex(LOOKUP))
    url = f"http://{broker.address}".encode()
    assert b"\x2a" + bytes([len(url)]) + url in raw


async def test_unknown_fields_of_newer_clients_are_ignored(broker: DanubeBroker) -> None:
    newer = bytes.fromhex(CREATE + "fa3f0568656c6c6f")
    await broker.call("danube.ProducerService/CreateProducer", newer)


METHODS = [
    "danube.ProducerService/CreateProducer",
    "danube.ProducerService/SendMessage",
    "danube.ConsumerService/Subscribe",
    "danube.ConsumerService/Ack",
    "danube.ConsumerService/Nack",
    "danube.Discovery/TopicLookup",
    "danube.Discovery/TopicPartitions",
    "danube.HealthCheck/HealthCheck",
    "danube.StorageService/ListSegmentDescriptors",
]


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_refused(broker: DanubeBroker, method: str) -> None:
    for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f"):
        assert await broker.refused(method, raw) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_that_asks_with_no_message_is_refused(broker: DanubeBroker) -> None:
    call: Any = broker.channel.unary_stream("/danube.ConsumerService/ReceiveMessages")
    with pytest.raises(AioRpcError) as caught:
        await within(call(b"\xff").read())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "method", ["danube.Discovery/GetSchema", "danube.AuthService/Authenticate", "a.B/C"]
)
async def test_a_call_that_does_not_exist_is_unimplemented(
    broker: DanubeBroker, method: str
) -> None:
    assert await broker.refused(method, b"") is grpc.StatusCode.UNIMPLEMENTED


async def test_a_token_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    async with running_broker(tmp_path, token="secret") as broker:
        raw = bytes.fromhex(CREATE)
        method = "danube.ProducerService/CreateProducer"
        assert await broker.refused(method, raw) is grpc.StatusCode.UNAUTHENTICATED
        call: Any = broker.channel.unary_unary(f"/{method}")
        for token in ("Bearer wrong", "secret", "Bearer"):
            with pytest.raises(AioRpcError) as caught:
                await call(raw, metadata=[("authorization", token)])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await call(raw, metadata=[("authorization", "Bearer secret")])


async def test_a_call_during_the_stop_is_unavailable(tmp_path: Path) -> None:
    """So the client tries again, and finds the next server."""
    async with running_broker(tmp_path) as broker:
        broker.context.gate.stopping.set()
        found = await broker.refused(METHODS[0], bytes.fromhex(CREATE))
        assert found is grpc.StatusCode.UNAVAILABLE


async def test_many_calls_at_once_are_all_answered(broker: DanubeBroker) -> None:
    calls = (broker.refused(METHODS[5], bytes.fromhex(LOOKUP)) for _ in range(500))
    assert set(await within(asyncio.gather(*calls))) == {grpc.StatusCode.NOT_FOUND}


async def test_calls_while_the_server_stops_are_unavailable_and_never_cancelled(
    tmp_path: Path,
) -> None:
    """The client tells its user of a cancelled call; after UNAVAILABLE it tries again."""
    found: set[grpc.StatusCode] = set()
    async with brokers.running_broker(tmp_path) as broker:

        async def caller() -> None:
            async with grpc.aio.insecure_channel(broker.address) as channel:
                call: Any = channel.unary_unary(f"/{METHODS[5]}")
                while grpc.StatusCode.UNAVAILABLE not in found:
                    try:
                        await within(call(bytes.fromhex(LOOKUP)))
                    except AioRpcError as error:
                        found.add(error.code())

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(caller())
            while not found:  # noqa: ASYNC110  # a condition of the callers
                await asyncio.sleep(0.001)
            await broker.stop()
    assert found == {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
