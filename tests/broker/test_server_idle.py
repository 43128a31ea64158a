"""What topics and subscriptions cost that nobody sends to: a measured run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.broker import danube_pb2 as pb
from forebay.limits import MIB
from support.server_processes import ServerProcess

TOPICS = 1000
SUBSCRIPTIONS = 200
SECONDS = 60.0
MEMORY_MAX = 300 * MIB
CPU_MAX = 0.01
_AT_ONCE = 16


def resident(pid: int) -> int:
    """The bytes of the process that are its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return (int(fields["Private_Dirty"]) + int(fields["Private_Clean"])) * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def name_of(number: int) -> str:
    return f"/default/idle-{number}"


async def create_topics(channel: grpc.aio.Channel, count: int) -> None:
    call: Any = channel.unary_unary(
        "/danube.ProducerService/CreateProducer",
        request_serializer=pb.ProducerRequest.SerializeToString,
    )
    turns = asyncio.Semaphore(_AT_ONCE)

    async def create(number: int) -> None:
        async with turns:
            await call(
                pb.ProducerRequest(
                    producer_name="p", topic_name=name_of(number), dispatch_strategy=pb.Reliable
                )
            )

    await asyncio.gather(*map(create, range(count)))


async def connect(channel: grpc.aio.Channel, number: int) -> object:
    """A consumer with an open stream."""
    subscribe: Any = channel.unary_unary(
        "/danube.ConsumerService/Subscribe",
        request_serializer=pb.ConsumerRequest.SerializeToString,
        response_deserializer=pb.ConsumerResponse.FromString,
    )
    receive: Any = channel.unary_stream(
        "/danube.ConsumerService/ReceiveMessages",
        request_serializer=pb.ReceiveRequest.SerializeToString,
    )
    answer = await subscribe(
        pb.ConsumerRequest(
            topic_name=name_of(number),
            consumer_name="c",
            subscription="s",
            subscription_type=pb.ConsumerRequest.Shared,
        )
    )
    return receive(pb.ReceiveRequest(consumer_id=answer.consumer_id))


async def share_of_a_core(pid: int) -> float:
    began = cpu_seconds(pid)
    await asyncio.sleep(SECONDS)
    return (cpu_seconds(pid) - began) / SECONDS


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_a_thousand_idle_topics_and_200_subscriptions_cost_little(tmp_path: Path) -> None:
    server = await asyncio.to_thread(ServerProcess, "serve", tmp_path / "data", tmp_path / "log")
    with server:
        await asyncio.to_thread(server.wait_ready)
        share, bytes_ = await share_of_a_core(server.pid), resident(server.pid)
        async with grpc.aio.insecure_channel(server.where["broker"]) as channel:
            await create_topics(channel, TOPICS)
            streams = [await connect(channel, number) for number in range(SUBSCRIPTIONS)]
            await asyncio.sleep(10)  # what opening left to do is not idleness
            more = resident(server.pid) - bytes_
            more_share = await share_of_a_core(server.pid) - share
            assert len(streams) == SUBSCRIPTIONS
        sys.stdout.write(f"{more / MIB:.0f} MiB more, {more_share:.2%} more of a core\n")
        assert more < MEMORY_MAX
        assert more_share < CPU_MAX
