"""Producers over connections that break and servers that are killed: nothing twice or lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import forebay
from forebay.broker.blocking import Client
from forebay.broker.client import connect_async
from forebay.errors import MaybeStored
from forebay.topic.store import Store
from support.brokers import broker_settings, running_broker
from support.proxy import FaultProxy, Faults
from support.server_processes import PATIENCE, ServerProcess

LOST_ANSWERS = Faults(timeout_after_success_rate=0.1, hang_seconds=0.02)


def in_log(data: Path, topic: str = "orders") -> list[int]:
    with Store(broker_settings(data)) as store:
        return [int(message.payload) for message in store.topic(topic).read()]


async def test_an_idempotent_producer_repeats_what_was_not_answered(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_broker(data) as broker:
        with FaultProxy(broker.address, seed=7) as proxy:
            async with (
                connect_async(proxy.address) as client,
                connect_async(broker.address) as direct,
            ):
                producer = await client.producer("orders", name="shop", idempotent=True)
                other = await direct.producer("orders", name="other")
                with proxy.faults(LOST_ANSWERS):
                    futures = []
                    for number in range(300):
                        futures.append(await producer.submit(b"%d" % number))
                        if number % 10 == 0:
                            await other.send(b"-1")
                        if number % 20 == 19:
                            await futures[-1]
                await producer.close()
                offsets = [future.result() for future in futures]
            assert proxy.stats().faults["timeout_after_success"] > 0
    found = in_log(data)
    assert [number for number in found if number >= 0] == list(range(300))
    for number, offset in enumerate(offsets):
        assert offset is None or found[offset] == number


async def test_another_producer_says_that_messages_may_be_stored(tmp_path: Path) -> None:
    data = tmp_path / "data"
    acknowledged = []
    unknown: list[str] = []
    async with running_broker(data) as broker:
        with FaultProxy(broker.address, seed=7) as proxy:
            async with connect_async(proxy.address) as client:
                producer = await client.producer("orders")
                with proxy.faults(LOST_ANSWERS):
                    for number in range(100):
                        try:
                            await producer.send(b"%d" % number)
                            acknowledged.append(number)
                        except MaybeStored as error:
                            unknown.append(str(error))
    assert unknown
    assert all("may or may not be stored" in words for words in unknown)
    found = in_log(data)
    assert len(found) == len(set(found)), "nothing was sent twice"
    assert set(acknowledged) <= set(found)


async def test_a_producer_goes_on_when_the_server_was_started_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{found.getsockname()[1]}"
    async with connect_async(listen) as client:
        async with running_broker(data, listen=listen):
            producer = await client.producer("orders", name="shop", idempotent=True)
            await producer.send(b"0")
        waiting = await producer.submit(b"1")
        async with running_broker(data, listen=listen):
            assert await waiting == 1
            assert await producer.send(b"2") == 2
            reader = client.read("orders")
            assert [int(message.payload) async for message in reader] == [0, 1, 2]
            await producer.close()


# -- kill -9 ----------------------------------------------------------------------------------


class KilledServer:
    """A server process on one address, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{found.getsockname()[1]}"
        self.data = folder / "data"
        self._config = folder / "forebay.yml"
        self._config.write_text(
            f"data: {self.data}\nbroker: {{listen: '{self.address}'}}\n"
            "storage: {uploader: {enabled: false}}\n"
        )
        self._log = folder / "log"

    @contextmanager
    def running(self) -> Iterator[ServerProcess]:
        with ServerProcess("serve", self._config, self._log, broker=self.address) as server:
            server.wait_ready()
            yield server


@pytest.mark.kill
def test_kill_9_of_the_server_neither_loses_nor_repeats_a_message(tmp_path: Path) -> None:
    server = KilledServer(tmp_path)
    stop = threading.Event()
    sent: list[Future[int | None]] = []

    def produce(client: Client) -> None:
        with client.producer("orders", name="shop", idempotent=True) as producer:
            while not stop.is_set():
                sent.append(producer.submit(b"%d" % len(sent)))
                if len(sent) > 500:  # so many are on their way
                    sent[-500].result()

    def answered(since: int) -> bool:
        return sum(each.done() for each in sent[since:]) > 500

    with forebay.connect(server.address, timeout=PATIENCE) as client:
        thread = threading.Thread(target=produce, args=(client,))
        with server.running() as process:
            thread.start()
            process.wait_until(partial(answered, 0), "the first messages were answered")
            process.kill()
        with server.running() as process:
            process.wait_until(partial(answered, len(sent)), "more messages were answered")
            process.kill()
        with server.running() as process:
            process.wait_until(partial(answered, len(sent)), "more messages were answered")
            stop.set()
            thread.join()
    assert all(each.exception() is None for each in sent)
    assert in_log(server.data) == list(range(len(sent)))


async def test_a_server_that_stops_answers_what_it_has_received(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running_broker(data) as broker, connect_async(broker.address, timeout=1) as client:
        producer = await client.producer("orders")
        futures = [await producer.submit(b"%d" % number) for number in range(1000)]
        await broker.stop()
        await asyncio.wait(futures)
        offsets = [each.result() for each in futures if each.exception() is None]
    assert set(offsets) <= set(range(len(in_log(data))))
