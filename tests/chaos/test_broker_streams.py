"""Clients that do not read, do not finish, or come in thousands harm nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from forebay.broker import danube_pb2 as pb
from forebay.broker import streams_pb2
from forebay.limits import MIB
from support.dispatching import eventually
from support.hostile_broker import (
    PREFACE,
    TOPIC,
    RawClient,
    attacked,
    connect,
    headers,
    message,
    resident_mib,
    serves,
    settings,
    stalled_stream,
)
from support.server_processes import ServerProcess

SOAK: Final = os.environ.get("FOREBAY_SOAK", "0") not in {"", "0"}
STALLED: Final = 500 if SOAK else 64
CONNECTIONS: Final = 2000
CANCELLED: Final = 10_000 if SOAK else 500
SUBSCRIPTIONS: Final = 2000 if SOAK else 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with attacked(tmp_path) as found:
        yield found


@pytest.mark.timeout(900)
async def test_consumers_that_never_read_take_bounded_memory_and_hold_back_nobody(
    server: ServerProcess,
) -> None:
    address, count = server.where["broker"], 3 * STALLED if SOAK else 80
    async with RawClient(address) as client, RawClient(address) as reader:
        producer = await client.producer()
        with ExitStack() as stack:
            for each in range(STALLED):
                number = await client.subscribe("stalled", f"c{each}")
                stack.enter_context(await asyncio.to_thread(stalled_stream, address, number))
            good = reader.messages(await client.subscribe("good", "good"), "good")
            for each in range(count):
                await client.send(producer, each.to_bytes(4, "big") + bytes(MIB))
                got = await asyncio.wait_for(anext(good), 60)
                assert int.from_bytes(got.payload[:4], "big") == each
            await good.aclose()
            assert resident_mib(server.pid) < (1500 if SOAK else 600)
    await serves(address)


async def test_requests_that_never_end_hold_back_nobody(server: ServerProcess) -> None:
    address = server.where["broker"]
    await serves(address)
    before = resident_mib(server.pid)
    with ExitStack() as stack:
        for each in range(50):
            half = stack.enter_context(await asyncio.to_thread(connect, address))
            method = ("ProducerService/SendMessage", "ConsumerService/ReceiveMessages")[each % 2]
            call = headers(1, f"danube.{method}")
            part = message(1, bytes(30_000), declared=4 * MIB, end=False)
            half.sendall(PREFACE + settings() + call + part)
        await serves(address)
        assert resident_mib(server.pid) - before < 200


@pytest.mark.timeout(600)
async def test_2000_connections_are_served_beside_others(server: ServerProcess) -> None:
    address = server.where["broker"]
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            idle = stack.enter_context(await asyncio.to_thread(connect, address))
            idle.sendall(PREFACE + settings())
        await serves(address)
        assert resident_mib(server.pid) < 600
    await serves(address)


@pytest.mark.timeout(600)
async def test_streams_that_are_opened_and_cancelled_leave_nothing_behind(
    server: ServerProcess,
) -> None:
    address = server.where["broker"]
    async with RawClient(address) as client:
        await client.producer()
        number = await client.subscribe()
        await _open_and_cancel(client, number, CANCELLED // 5)
        before = resident_mib(server.pid)
        await _open_and_cancel(client, number, CANCELLED)
        await serves(address)
        assert resident_mib(server.pid) - before < 100


async def _open_and_cancel(client: RawClient, number: int, count: int) -> None:
    for _ in range(0, count, 50):
        calls = [client.receive(number if each % 2 else 17) for each in range(50)]
        await client.status("HealthCheck/HealthCheck", b"")  # the streams are there, too
        for each in calls:
            each.cancel()


@pytest.mark.timeout(600)
async def test_a_storm_of_subscriptions_and_consumers_is_served(server: ServerProcess) -> None:
    async with RawClient(server.where["broker"]) as client:
        producer = await client.producer()
        numbers = [await client.subscribe(f"s{each}", "c") for each in range(SUBSCRIPTIONS)]
        assert len(set(numbers)) == SUBSCRIPTIONS
        streams = [client.receive(each) for each in numbers]
        await client.send(producer, b"for all")
        async with asyncio.timeout(120):
            for each in streams:
                assert pb.StreamMessage.FromString(await each.read()).payload == b"for all"
        for each in streams:
            each.cancel()


async def test_producers_that_never_wait_are_told_to_wait(tmp_path: Path) -> None:
    with attacked(tmp_path, pending_bytes_max=4 * MIB) as server:
        async with RawClient(server.where["broker"]) as client:
            producer = await client.producer()
            sent = pb.StreamMessage(
                msg_id=pb.MsgID(producer_id=producer, topic_name=TOPIC), payload=bytes(MIB)
            ).SerializeToString()
            method = "ProducerService/SendMessage"
            got = await asyncio.gather(*(client.status(method, sent) for _ in range(200)))
        allowed = {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert grpc.StatusCode.OK in got
        assert set(got) <= allowed
        await serves(server.where["broker"])
        assert resident_mib(server.pid) < 900


async def test_a_request_that_nacks_billions_of_messages_is_refused(server: ServerProcess) -> None:
    opening = streams_pb2.OpenFetch(
        topic=TOPIC,
        subscription=streams_pb2.SubscriptionStart(name="s", consumer_name="c", type=1),
    )
    many = [streams_pb2.OffsetRange(start=0, end=100_000)] * 50_000
    nacking = streams_pb2.Acknowledge(nacks=many)
    requests = [
        streams_pb2.FetchRequest(open=opening).SerializeToString(),
        streams_pb2.FetchRequest(acknowledge=nacking).SerializeToString(),
    ]
    async with RawClient(server.where["broker"]) as client:
        await client.producer()
        stub: Any = client.channel.stream_stream("/forebay.Streams/FetchStream")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub(iter(requests), timeout=60):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await serves(server.where["broker"])


async def test_a_stop_under_load_loses_no_acknowledged_message(tmp_path: Path) -> None:
    acknowledged: set[bytes] = set()
    got: set[bytes] = set()
    with attacked(tmp_path, subscription_start="earliest") as server:
        address = server.where["broker"]
        async with RawClient(address) as client, RawClient(address) as reader:
            producer = await client.producer()
            number = await client.subscribe()

            async def produce(who: int) -> None:
                for each in range(100_000):
                    payload = b"%d-%d" % (who, each)
                    await client.send(producer, payload)
                    acknowledged.add(payload)

            async def consume() -> None:
                async for each in reader.messages(number):
                    got.add(each.payload)

            tasks = [*(asyncio.create_task(produce(who)) for who in range(4))]
            tasks.append(asyncio.create_task(consume()))
            await eventually(lambda: len(got) >= 50)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop, signal.SIGTERM, 60))
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            assert all(isinstance(each, grpc.aio.AioRpcError) for each in ends)
            assert await stopping == 0, server.said
    with attacked(tmp_path) as server:
        async with RawClient(server.where["broker"]) as client, asyncio.timeout(60):
            async for each in client.messages(await client.subscribe()):
                got.add(each.payload)
                if got >= acknowledged:
                    break
