"""Danube's own clients in a process that tests kill, and what they did, in a file.

Arguments: `produce` or `consume`, the URL of the broker, the topic, the file, and a name. Each line
of the file is one event, written in one system call, so that a kill loses none that has happened:

    P payload                                a producer's message was acknowledged
    D subscription offset key payload time   a consumer got a message
    A subscription offset                    a consumer is about to acknowledge it
    N subscription offset                    a consumer is about to refuse it

A consuming process has one consumer of each of the subscriptions SUBSCRIPTIONS. Errors of the
broker are those of its restarts: the applications go on after them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from danube import DanubeClient, DanubeClientBuilder, DanubeError, DispatchStrategy, SubType
from grpc.aio import AioRpcError

SUBSCRIPTIONS: Final = {
    "exclusive": SubType.EXCLUSIVE,
    "shared": SubType.SHARED,
    "failover": SubType.FAILOVER,
    "keyed": SubType.KEY_SHARED,
}
PRODUCERS: Final = 3
KEYS: Final = 12
NACK_SHARE: Final = 0.01
_AGAIN_SECONDS: Final = 0.2
_SEND_SECONDS: Final = 0.005
"""Between two messages of a producer, so that the machine keeps up."""
_NICE: Final = 19
"""Without a broker, Danube's consumers open their streams again in a tight loop: the broker that
starts needs the machine."""

Note = Callable[..., None]


def open_log(path: Path) -> Note:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(*words: object) -> None:
        os.write(file, (" ".join(map(str, words)) + "\n").encode())

    return note


async def produce(client: DanubeClient, topic: str, note: Note, name: str) -> None:
    builder = client.new_producer().with_topic(topic).with_name(name)
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    while True:
        try:
            await producer.create()
            break
        except AioRpcError:
            await asyncio.sleep(_AGAIN_SECONDS)
    rng = random.Random(name)
    for number in itertools.count():
        key = f"k{rng.randrange(KEYS)}"
        payload = f"{name}:{number}"
        while True:
            try:
                await producer.send_with_key(payload.encode(), None, key)
                break
            except AioRpcError:
                await asyncio.sleep(_AGAIN_SECONDS)
        note("P", payload)
        await asyncio.sleep(_SEND_SECONDS)


async def consume(client: DanubeClient, topic: str, note: Note, name: str, where: str) -> None:
    builder = client.new_consumer().with_topic(topic).with_consumer_name(name)
    consumer = builder.with_subscription(where).with_subscription_type(SUBSCRIPTIONS[where]).build()
    while True:
        try:
            await consumer.subscribe()
            break
        except (AioRpcError, DanubeError):  # no topic yet, no broker, or somebody else has it
            await asyncio.sleep(_AGAIN_SECONDS)
    queue: asyncio.Queue[Any] = await consumer.receive()
    rng = random.Random()
    while True:
        message = await queue.get()
        offset = message.msg_id.topic_offset
        key, payload = message.routing_key, message.payload.decode()
        note("D", where, offset, key, payload, time.monotonic_ns())
        refused = rng.random() < NACK_SHARE
        note("N" if refused else "A", where, offset)
        try:
            if refused:
                await consumer.nack(message, delay_ms=rng.randrange(100))
            else:
                await consumer.ack(message)
        except AioRpcError:
            continue  # it comes again


async def main() -> None:
    what, url, topic, path, name = sys.argv[1:]
    note = open_log(Path(path))
    logging.disable()  # a client logs every call that finds no broker
    os.nice(_NICE)
    async with asyncio.TaskGroup() as group:
        if what == "produce":
            for each in range(PRODUCERS):
                client = await DanubeClientBuilder().service_url(url).build()
                group.create_task(produce(client, topic, note, f"{name}{each}"))
        else:
            for where in SUBSCRIPTIONS:
                client = await DanubeClientBuilder().service_url(url).build()
                group.create_task(consume(client, topic, note, name, where))


if __name__ == "__main__":
    asyncio.run(main())
