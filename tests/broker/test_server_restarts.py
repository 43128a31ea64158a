"""A server that is away for a while under load: Danube's own clients go on by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from danube import SubType
from grpc.aio import AioRpcError

from support.danube_brokers import DanubeUser, Inbox, until
from support.prometheus_text import parse
from support.s3_server import free_ports
from support.server_processes import PATIENCE, ServerProcess

pytestmark = [pytest.mark.kill, pytest.mark.long]
TOPIC = "/default/t1"
KINDS = [SubType.EXCLUSIVE, SubType.SHARED, SubType.FAILOVER, SubType.KEY_SHARED]
_AGAIN_SECONDS = 0.1


class Load:
    """One producer and a consumer of each type, for as long as the block runs."""

    def __init__(self) -> None:
        self.sent: set[bytes] = set()
        """Acknowledged to the producer."""
        self.errors: set[grpc.StatusCode] = set()
        """Of sends that the client gave up."""
        self.got: list[set[bytes]] = [set() for _ in KINDS]
        self._stopping = False

    async def produce(self, producer: Any) -> None:
        number = 0
        while not self._stopping:
            payload = b"%d" % number
            try:
                await producer.send_with_key(payload, None, f"key-{number % 3}")
            except AioRpcError as error:
                self.errors.add(error.code())
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self.sent.add(payload)
            number += 1
            await asyncio.sleep(0.01)

    async def consume(self, inbox: Inbox, got: set[bytes]) -> None:
        while True:
            message = await inbox.take(PATIENCE)
            got.add(bytes(message.payload))
            with contextlib.suppress(AioRpcError):  # it comes again
                await inbox.ack(message)

    @contextlib.asynccontextmanager
    async def running(self, danube: DanubeUser) -> AsyncIterator[None]:
        producer = await danube.producer(TOPIC)
        async with asyncio.TaskGroup() as group:
            consumers = []
            for kind, got in zip(KINDS, self.got, strict=True):
                inbox = await danube.inbox(TOPIC, kind=kind, subscription=f"s{int(kind)}")
                consumers.append(group.create_task(self.consume(inbox, got)))
            producing = group.create_task(self.produce(producer))
            yield
            self._stopping = True
            await producing
            await until(lambda: all(got >= self.sent for got in self.got), "the last message")
            for each in consumers:
                each.cancel()

    async def goes_on(self) -> None:
        """Waits until messages that are sent from now on reach every consumer."""
        before = len(self.sent)
        await until(lambda: len(self.sent) > before + 5, "new messages")
        seen = set(self.sent)
        await until(lambda: all(got >= seen for got in self.got), "their delivery")


def calls(server: ServerProcess, method: str) -> float:
    page = server.client.request("GET", "/metrics").read().decode()
    samples = parse(page)["forebay_broker_calls_total"].samples
    return samples.get(("", (("method", method),)), 0.0)


async def restart(tmp_path: Path, number: signal.Signals, seconds: float) -> Load:
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def start() -> ServerProcess:
        return ServerProcess("serve", tmp_path / "data", tmp_path / "log", broker=address)

    danube, load = DanubeUser(f"http://{address}"), Load()
    server = await asyncio.to_thread(start)
    try:
        async with load.running(danube):
            await load.goes_on()
            code = await asyncio.to_thread(server.stop, number)
            assert code == (0 if number is signal.SIGTERM else -number), server.said
            server.__exit__(None, None, None)
            await asyncio.sleep(seconds)  # how long it is away is what is tested
            server = await asyncio.to_thread(start)
            await load.goes_on()
            assert calls(server, "Subscribe") == 0
            assert calls(server, "ReceiveMessages") <= 4 * len(KINDS)
    finally:
        await danube.close()
        server.__exit__(None, None, None)
    return load


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, 1), (signal.SIGTERM, 6)], ids=["kill-1s", "term-6s"]
)
async def test_clients_go_on_after_a_restart(
    tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    errors = (await restart(tmp_path, number, seconds)).errors
    assert errors <= {grpc.StatusCode.UNAVAILABLE}
    if seconds > 5:
        assert errors, "the client gives up after some 3 seconds, and says so"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGTERM, 1), (signal.SIGKILL, 6)], ids=["term-1s", "kill-6s"]
)
async def test_clients_go_on_after_any_restart(
    tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    errors = (await restart(tmp_path, number, seconds)).errors
    assert errors <= {grpc.StatusCode.UNAVAILABLE}
