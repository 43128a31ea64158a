"""The Python client, for threads and for asyncio: what is stored, once, and what errors say."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

import forebay
from forebay.broker.client import connect, connect_async
from forebay.errors import (
    LogClosed,
    LostOffsets,
    MessageTooLarge,
    OffsetOutOfRange,
    ProducerReplaced,
    ServiceRefused,
    ServiceUnavailable,
    UnknownTopic,
    UsageError,
)
from forebay.format.message import StreamMessage
from support.brokers import RunningBroker, running_broker
from support.etcd_server import make_certificates
from support.holed_topics import END, HELD, leave_a_wide_hole


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with running_broker(tmp_path / "data") as running:
        yield running


async def stored(broker: RunningBroker, topic: str = "orders") -> list[StreamMessage]:
    async with connect_async(broker.address) as client:
        return [message async for message in client.read(topic)]


# -- for asyncio ------------------------------------------------------------------------------


async def test_messages_are_sent_and_read(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        async with await client.producer("orders", name="shop") as producer:
            assert await producer.send(b"a", attributes={"k": "v"}, routing_key="key") == 0
            assert await producer.send_many([b"b", b"c"]) == [1, 2]
            assert await producer.send_many([]) == []
            future = await producer.submit(b"d")
            assert await future == 3
        found = [message async for message in client.read("/default/orders")]
        assert [each.payload for each in found] == [b"a", b"b", b"c", b"d"]
        assert (found[0].attributes, found[0].routing_key) == ({"k": "v"}, "key")
        assert {each.producer_name for each in found} == {"shop"}
        part = [message.offset async for message in client.read("orders", 1, end=3)]
        assert part == [1, 2]
        raw = [frames async for frames in client.read("orders", 2).frames()]
        assert [offset for frames in raw for offset in frames.offsets] == [2, 3]


async def test_many_messages_on_their_way_stay_in_order(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        producer = await client.producer("orders", idempotent=True, name="shop")
        futures = [await producer.submit(b"%d" % number) for number in range(5000)]
        await producer.flush()
        assert [future.result() for future in futures] == list(range(5000))
        assert producer.last_sequence == 5000
    found = await stored(broker)
    assert [int(each.payload) for each in found] == list(range(5000))
    assert [each.request_id for each in found] == list(range(1, 5001))


async def test_what_is_on_its_way_is_bounded(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        producer = await client.producer("orders")
        payload = bytes(1_000_000)
        futures = [await producer.submit(payload) for _ in range(30)]
        assert sum(each.done() for each in futures) >= 20


async def test_a_reader_that_follows_waits_for_new_messages(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        async with await client.producer("orders") as producer:
            await producer.send(b"before")
            reader = client.read("orders", "latest", follow=True)
            assert await reader.open() == 1
            waiting = asyncio.ensure_future(anext(reader))
            await producer.send(b"after")
            assert (await waiting).payload == b"after"
        past = client.read("orders", datetime(2020, 1, 1, tzinfo=UTC))
        assert [message.payload async for message in past] == [b"before", b"after"]


async def test_a_consumer_gets_again_what_it_does_not_acknowledge(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        producer = await client.producer("orders")
        await producer.send(b"before")
        consumer = await client.consumer("orders", "billing", name="c1")
        await producer.send_many([b"1", b"2", b"3"])
        got = [await anext(consumer) for _ in range(3)]
        assert [each.payload for each in got] == [b"1", b"2", b"3"]
        consumer.ack(got[0], got[2].offset)
        consumer.nack(got[1], delay_ms=0)
        assert (await anext(consumer)).payload == b"2"
        await consumer.close()
        again = await client.consumer("orders", "billing", type="exclusive", name="c1")
        message = await anext(again)
        assert message.payload == b"2"
        again.ack(message)


async def test_two_consumers_share_a_subscription(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        producer = await client.producer("orders")
        first = await client.consumer("orders", "billing", type="shared", name="c1")
        second = await client.consumer("orders", "billing", type="shared", name="c2")
        await producer.send_many([b"%d" % number for number in range(10)])
        seen = {(await anext(each)).payload for each in (first, second) for _ in range(5)}
        assert seen == {b"%d" % number for number in range(10)}


# -- what goes wrong --------------------------------------------------------------------------


async def test_errors_have_the_class_that_the_server_raised(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        with pytest.raises(UnknownTopic, match="/default/nothing"):
            await anext(client.read("nothing"))
        with pytest.raises(UnknownTopic):
            await client.consumer("nothing", "s")
        producer = await client.producer("orders")
        await producer.send_many([b"a", b"b"])
        with pytest.raises(OffsetOutOfRange) as caught:
            await anext(client.read("orders", 7, follow=True))
        assert (caught.value.start, caught.value.end) == (0, 2)
        with pytest.raises(MessageTooLarge):
            await producer.send(bytes(5 * 2**20))
        with pytest.raises(UsageError, match="must be a str"):
            await producer.send(b"", attributes={"k": 5})  # type: ignore[dict-item]
        with pytest.raises(UsageError, match="2 payloads, but 1 attributes"):
            await producer.send_many([b"a", b"b"], attributes=[{}])
        assert await producer.send(b"c") == 2, "the producer still works"


async def test_offsets_that_are_lost_are_an_error_with_their_range(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await asyncio.to_thread(leave_a_wide_hole, data)
    async with running_broker(data) as broker, connect_async(broker.address) as client:
        reader = client.read("orders", follow=True)
        assert [(await anext(reader)).offset for _ in range(HELD)] == list(range(HELD))
        with pytest.raises(LostOffsets) as caught:
            await anext(reader)
        assert caught.value.end == END
        after = client.read("orders", caught.value.end)
        assert [message.offset async for message in after] == list(range(END, END + HELD))


async def test_the_token_is_sent_and_never_shown(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", token="right-token") as broker:
        async with connect_async(broker.address, token="right-token") as client:
            await (await client.producer("orders")).send(b"a")
        async with connect_async(broker.address, token="wrong-token") as client:
            with pytest.raises(ServiceRefused, match="needs a token") as caught:
                await client.producer("orders")
            assert "wrong-token" not in repr(caught.value)


async def test_a_server_with_tls_is_trusted_by_its_authority_alone(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    async with running_broker(
        tmp_path / "data", cert_file=made.cert_file, key_file=made.key_file
    ) as broker:
        async with connect_async(broker.address, ca_file=made.ca_file) as client:
            await (await client.producer("orders")).send(b"a")
            assert [message.payload async for message in client.read("orders")] == [b"a"]
        async with connect_async(broker.address, tls=True, timeout=0.5) as client:
            with pytest.raises(ServiceUnavailable):
                await client.producer("orders")


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":6650", "host:port", "http://host:6650", "user:pw@host:6650"]
)
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(UsageError, match="host:port") as caught:
        connect(address)
    assert "pw" not in str(caught.value)


async def test_bad_options_are_refused_at_once(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        with pytest.raises(UsageError, match="needs a name"):
            await client.producer("orders", idempotent=True)
        with pytest.raises(UsageError, match="'buffered' or 'synced'"):
            await client.producer("orders", durability="never")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="it must be 'exclusive'"):
            await client.consumer("orders", "s", type="private")
        with pytest.raises(UsageError, match="it must be an offset"):
            await anext(client.read("orders", -1, end=1))
        with pytest.raises(UsageError, match="cannot be read"):
            connect_async(broker.address, ca_file="/nowhere/ca.pem")


async def test_a_server_that_is_away_is_an_error_after_the_timeout() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    async with connect_async(address, timeout=0.3) as client:
        with pytest.raises(ServiceUnavailable, match=address):
            await client.producer("orders")
        with pytest.raises(ServiceUnavailable, match=address):
            await anext(client.read("orders"))
        with pytest.raises(ServiceUnavailable, match=address):
            await client.consumer("orders", "s")


async def test_the_name_of_an_idempotent_producer_is_used_once(broker: RunningBroker) -> None:
    async with connect_async(broker.address) as client:
        first = await client.producer("orders", name="shop", idempotent=True)
        await first.send(b"1")
        second = await client.producer("orders", name="shop", idempotent=True)
        assert second.last_sequence == 1
        with pytest.raises(ProducerReplaced, match="'shop' was opened"):
            await first.send(b"never")
        await second.send(b"2")
        await first.close()
    assert [each.payload for each in await stored(broker)] == [b"1", b"2"]


async def test_close_raises_what_a_submitted_message_has_raised(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data", message_bytes_max=2000) as broker,
        connect_async(broker.address) as client,
    ):
        producer = await client.producer("orders")
        future = await producer.submit(bytes(3000))
        with pytest.raises(MessageTooLarge, match=r"broker\.message_bytes_max"):
            await producer.close()
        assert isinstance(future.exception(), MessageTooLarge)
        with pytest.raises(LogClosed, match="the producer is closed"):
            await producer.submit(b"later")


# -- for threads ------------------------------------------------------------------------------


async def test_the_client_for_threads_does_the_same(broker: RunningBroker) -> None:
    def use() -> None:
        with forebay.connect(broker.address) as client:
            with client.producer("orders", name="shop", idempotent=True) as producer:
                assert producer.name == "shop"
                assert producer.send(b"a", attributes={"k": "v"}) == 0
                assert producer.send_many([b"b", b"c"], routing_keys=["x", None]) == [1, 2]
                futures = [producer.submit(b"%d" % number) for number in range(1000)]
                producer.flush()
                assert [future.result() for future in futures] == list(range(3, 1003))
                assert producer.last_sequence == 1003
                with pytest.raises(MessageTooLarge):
                    producer.submit(bytes(5 * 2**20))
            with pytest.raises(LogClosed):
                producer.send(b"later")
            with client.read("orders") as reader:
                assert [message.offset for message in reader] == list(range(1003))
            assert sum(len(frames) for frames in client.read("orders", 3).frames()) == 1000
            with client.read("orders", "latest", follow=True) as reader:
                assert reader.open() == 1003
            with client.consumer("orders", "billing", name="c1") as consumer:
                with client.producer("orders") as other:
                    other.send(b"new")
                message = next(consumer)
                assert message.payload == b"new"
                consumer.nack(message, delay_ms=0)
                message = next(consumer)
                consumer.ack(message)
            with pytest.raises(UnknownTopic):
                next(client.read("nothing"))
        client.close()

    await asyncio.to_thread(use)
    found = await stored(broker)
    assert (found[0].attributes, found[1].routing_key) == ({"k": "v"}, "x")


async def test_threads_share_a_producer(broker: RunningBroker) -> None:
    def use() -> None:
        with (
            forebay.connect(broker.address) as client,
            client.producer("orders", name="shop", idempotent=True) as producer,
            ThreadPoolExecutor(8) as threads,
        ):
            sent = list(threads.map(lambda number: producer.send(b"%d" % number), range(400)))
            assert sorted(each for each in sent if each is not None) == list(range(400))

    await asyncio.to_thread(use)
    assert sorted(int(each.payload) for each in await stored(broker)) == list(range(400))


def test_importing_forebay_does_not_import_grpc() -> None:
    program = "import forebay, sys; forebay.open; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
