"""Lookups, partitions, health checks and descriptors, as Danube's clients ask for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from danube import DanubeError

from forebay.broker import danube_pb2 as pb
from support.danube_brokers import DanubeBroker, DanubeUser, running_broker, within
from support.s3_server import free_ports

TOPIC = "/default/t1"


def lookup(topic: str) -> bytes:
    return pb.TopicLookupRequest(request_id=9, topic=topic).SerializeToString()


async def partitions(broker: DanubeBroker, topic: str) -> list[str]:
    answer = await broker.call("danube.Discovery/TopicPartitions", lookup(topic))
    found = pb.TopicPartitionsResponse.FromString(answer)
    assert found.request_id == 9
    return list(found.partitions)


async def health(broker: DanubeBroker, client: Any, number: int) -> int:
    raw = pb.HealthCheckRequest(request_id=1, client=client, id=number).SerializeToString()
    answer = await broker.call("danube.HealthCheck/HealthCheck", raw)
    return pb.HealthCheckResponse.FromString(answer).status


async def test_a_topic_is_not_found_until_a_producer_creates_it(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    method = "danube.Discovery/TopicLookup"
    assert await broker.refused(method, lookup(TOPIC)) is grpc.StatusCode.NOT_FOUND
    with pytest.raises(DanubeError, match="no partitions found"):
        await danube.consumer(TOPIC)
    await danube.producer(TOPIC)
    found = pb.TopicLookupResponse.FromString(await broker.call(method, lookup(TOPIC)))
    assert found == pb.TopicLookupResponse(
        request_id=9,
        response_type=pb.TopicLookupResponse.Connect,
        connect_url=f"http://{broker.address}",
        broker_url=f"http://{broker.address}",
        proxy=False,
    )


async def test_clients_are_told_the_configured_address(tmp_path: Path) -> None:
    async with running_broker(
        tmp_path, listen=f"127.0.0.1:{free_ports(1)[0]}", url="here:1"
    ) as broker:
        await broker.call(
            "danube.ProducerService/CreateProducer",
            pb.ProducerRequest(producer_name="p", topic_name=TOPIC).SerializeToString(),
        )
        answer = await broker.call("danube.Discovery/TopicLookup", lookup(TOPIC))
        assert pb.TopicLookupResponse.FromString(answer).connect_url == "http://here:1"


@pytest.mark.parametrize("method", ["TopicLookup", "TopicPartitions"])
@pytest.mark.parametrize("name", ["", "t1", "/default", "/a/b/c", "/default/a b", "/default/\n"])
async def test_a_name_that_is_no_topic_is_refused(
    broker: DanubeBroker, method: str, name: str
) -> None:
    found = await broker.refused(f"danube.Discovery/{method}", lookup(name))
    assert found is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("reliable", [True, False])
async def test_partitions_are_exactly_those_of_the_topic(
    broker: DanubeBroker, danube: DanubeUser, reliable: bool
) -> None:
    await danube.producer("/default/a", partitions=12, reliable=reliable)
    await danube.producer("/default/ab", reliable=reliable)
    await danube.producer("/default/a-partial", reliable=reliable)
    await danube.producer("/default/a-part-x", reliable=reliable)
    await danube.producer("/other/a", partitions=2, reliable=reliable)
    expected = [f"/default/a-part-{part}" for part in range(12)]
    assert await partitions(broker, "/default/a") == expected
    assert await partitions(broker, "/default/ab") == ["/default/ab"]
    assert await partitions(broker, "/default/a-part-3") == ["/default/a-part-3"]
    assert await partitions(broker, "/default/nothing") == []


async def test_partitions_are_the_same_after_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.user.producer("/default/a", partitions=2)
        await broker.user.producer("/default/b", partitions=2, reliable=False)
    async with running_broker(tmp_path) as broker:
        for name in ("/default/a", "/default/b"):
            assert await partitions(broker, name) == [f"{name}-part-0", f"{name}-part-1"]


async def test_health_checks_know_who_is_there(broker: DanubeBroker, danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    consumer = await danube.consumer(TOPIC)
    known, check = pb.HealthCheckRequest, pb.HealthCheckResponse
    producer_id = producer._producers[0].producer_id
    consumer_id = consumer._consumers[TOPIC].consumer_id
    assert await health(broker, known.Producer, producer_id) == check.OK
    assert await health(broker, known.Consumer, consumer_id) == check.OK
    assert await health(broker, known.Producer, 1) == check.CLOSE
    assert await health(broker, known.Consumer, 1) == check.CLOSE


async def test_a_client_of_no_known_type_is_refused(broker: DanubeBroker) -> None:
    raw = bytes.fromhex("0801 1005 1801")
    found = await broker.refused("danube.HealthCheck/HealthCheck", raw)
    assert found is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_stays_good_after_a_restart(tmp_path: Path) -> None:
    """A client that hears CLOSE drops the message it gets next, or never asks again."""
    async with running_broker(tmp_path) as broker:
        producer = await broker.user.producer(TOPIC)
        consumer = await broker.user.consumer(TOPIC)
        producer_id = producer._producers[0].producer_id
        consumer_id = consumer._consumers[TOPIC].consumer_id
    async with running_broker(tmp_path) as broker:
        known, check = pb.HealthCheckRequest, pb.HealthCheckResponse
        assert await health(broker, known.Consumer, consumer_id) == check.OK
        assert await health(broker, known.Producer, producer_id) == check.CLOSE


async def test_a_consumer_that_was_told_to_close_gets_its_message_all_the_same(
    broker: DanubeBroker, danube: DanubeUser
) -> None:
    """The client drops the message that tells it, subscribes again, and gets it again."""
    producer = await danube.producer(TOPIC)
    inbox = await danube.inbox(TOPIC)
    inbox.consumer._consumers[TOPIC].stop_event.set()  # as a health check does
    await within(producer.send(b"one"))
    assert await inbox.read(1) == [b"one"]
    await within(producer.send(b"two"))
    assert await inbox.read(1) == [b"two"]


async def test_descriptors_of_objects_are_listed(broker: DanubeBroker, danube: DanubeUser) -> None:
    producer = await danube.producer(TOPIC)
    method = "danube.StorageService/ListSegmentDescriptors"
    for _ in range(2):
        for number in range(3):
            await within(producer.send(b"%d" % number))
        await asyncio.to_thread(broker.store.topic(TOPIC).upload)

    async def listed(after: int) -> list[tuple[int, int]]:
        raw = pb.ListSegmentDescriptorsRequest(topic=TOPIC, after_offset=after).SerializeToString()
        answer = pb.ListSegmentDescriptorsResponse.FromString(await broker.call(method, raw))
        assert all(each.size > 0 and each.created_at > 0 for each in answer.segments)
        assert all(each.segment_id.endswith(".dnb1") for each in answer.segments)
        return [(each.start_offset, each.end_offset) for each in answer.segments]

    assert await listed(0) == [(0, 2), (3, 5)]
    assert await listed(2) == [(3, 5)]
    assert await listed(5) == []
    unknown = pb.ListSegmentDescriptorsRequest(topic="/default/none").SerializeToString()
    assert await broker.refused(method, unknown) is grpc.StatusCode.NOT_FOUND
