"""ProduceStream and FetchStream, request by request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.broker import danube_pb2
from forebay.broker import streams_pb2 as pb
from forebay.format.frame import scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import ATTRIBUTES_MAX, STREAM_BATCH_BYTES_MAX
from support.brokers import RunningBroker, running_broker

TOPIC = "/default/orders"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with running_broker(tmp_path / "data") as running:
        yield running


@asynccontextmanager
async def call_of(
    broker: RunningBroker, method: str, token: str | None = None
) -> AsyncIterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(broker.address, options) as channel:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        call: Any = channel.stream_stream(f"/forebay.Streams/{method}")(metadata=metadata)
        yield call
        call.cancel()


def opening(**fields: Any) -> bytes:
    wanted = {"topic": TOPIC, "producer_name": "meter"} | fields
    return pb.ProduceRequest(open=pb.OpenProducer(**wanted)).SerializeToString()


def batch(*payloads: bytes, first: int = 0, **fields: Any) -> bytes:
    found = pb.Batch(first_sequence=first, payloads=payloads, **fields)
    return pb.ProduceRequest(batch=found).SerializeToString()


@asynccontextmanager
async def producing(broker: RunningBroker, **fields: Any) -> AsyncIterator[Any]:
    async with call_of(broker, "ProduceStream") as call:
        await call.write(opening(**fields))
        call.opened = pb.ProduceResponse.FromString(await call.read())
        yield call


async def answer(call: Any) -> range:
    found = pb.ProduceResponse.FromString(await call.read())
    return range(found.first_offset, found.end_offset)


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def status_after_reading(call: Any) -> grpc.StatusCode:
    try:
        while isinstance(await call.read(), bytes):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def fetching(**fields: Any) -> bytes:
    wanted = {"topic": TOPIC} | fields
    return pb.FetchRequest(open=pb.OpenFetch(**wanted)).SerializeToString()


async def fetched(broker: RunningBroker, **fields: Any) -> list[StreamMessage]:
    """Everything up to the end that the request names."""
    found: list[StreamMessage] = []
    async with call_of(broker, "FetchStream") as call:
        await call.write(fetching(**fields))
        first = pb.FetchResponse.FromString(await call.read())
        expected = first.next_offset
        while isinstance(raw := await call.read(), bytes):
            response = pb.FetchResponse.FromString(raw)
            frames = scan(response.frames, expected=expected, consecutive=True)
            found += decode_messages(frames)
            expected = response.next_offset
            assert expected == frames.offsets[-1] + 1
        assert await call.code() is grpc.StatusCode.OK
    return found


# -- producing --------------------------------------------------------------------------------


async def test_batches_are_pipelined_and_answered_in_order(broker: RunningBroker) -> None:
    async with producing(broker) as call:
        for number in range(50):
            await call.write(batch(b"%d" % number, b"more"))
        await call.done_writing()
        answers = [await answer(call) for _ in range(50)]
        assert answers == [range(2 * number, 2 * number + 2) for number in range(50)]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    found = await fetched(broker, offset=0, end_offset=100)
    assert [each.payload for each in found[::2]] == [b"%d" % number for number in range(50)]
    assert {each.producer_name for each in found} == {"meter"}
    assert {each.msg_id.topic_name for each in found} == {TOPIC}
    assert all(0 < each.msg_id.producer_id < 2**63 for each in found)


async def test_attributes_and_keys_are_stored(broker: RunningBroker) -> None:
    async with producing(broker, durability="buffered") as call:
        await call.write(
            batch(
                b"a",
                b"b",
                attributes=[pb.Attributes(values={"k": "v"}), pb.Attributes()],
                keys=[pb.RoutingKey(), pb.RoutingKey(value="")],
            )
        )
        assert await answer(call) == range(2)
    first, second = await fetched(broker, offset=0, end_offset=2)
    assert (first.attributes, first.routing_key) == ({"k": "v"}, None)
    assert (second.attributes, second.routing_key) == ({}, "")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"\xff\xff", "not a message of this call"),
        (pb.ProduceRequest().SerializeToString(), "must have a batch"),
        (opening(), "must have a batch"),
        (batch(), "a batch of 0 messages"),
        (batch(*[b""] * 100_001), "a batch of 100001 messages"),
        (batch(b"a", b"b", attributes=[pb.Attributes()]), "2 payloads, but 1 attributes"),
        (batch(b"a", keys=[pb.RoutingKey()] * 2), "1 payloads, but 2 keys"),
        (batch(b"a", first=1), "only for idempotent producers"),
        (batch(b"x" * STREAM_BATCH_BYTES_MAX), "send smaller batches"),
        (
            batch(b"a", attributes=[pb.Attributes(values={str(at): "" for at in range(1025)})]),
            f"more than {ATTRIBUTES_MAX} attributes",
        ),
    ],
)
async def test_a_bad_batch_is_refused_after_the_good_ones_were_answered(
    broker: RunningBroker, request_: bytes, words: str
) -> None:
    async with producing(broker) as call:
        await call.write(batch(b"good"))
        await call.write(request_)
        assert await answer(call) == range(1)
        code, details = await status(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details
    async with producing(broker) as call:
        await call.write(batch(b"next"))
        assert await answer(call) == range(1, 2)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (batch(b"a"), "INVALID_ARGUMENT", "must open it"),
        (b"\xff", "INVALID_ARGUMENT", "not a message"),
        (opening(topic="orders"), "INVALID_ARGUMENT", "full topic name"),
        (opening(topic="/a/b/c"), "INVALID_ARGUMENT", ""),
        (opening(producer_name=""), "INVALID_ARGUMENT", "producer_name"),
        (opening(durability="maybe"), "INVALID_ARGUMENT", "'buffered' or 'synced'"),
    ],
)
async def test_a_bad_opening_is_refused(
    broker: RunningBroker, request_: bytes, code: str, words: str
) -> None:
    async with call_of(broker, "ProduceStream") as call:
        await call.write(request_)
        found, details = await status(call)
        assert found.name == code
        assert words in details


async def test_a_message_over_the_servers_limit_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", message_bytes_max=2000) as broker:
        async with producing(broker) as call:
            await call.write(batch(b"x" * 2001))
            code, details = await status(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "broker.message_bytes_max" in details


async def test_a_stream_respects_exclusive_access(broker: RunningBroker) -> None:
    wanted = danube_pb2.ProducerRequest(
        producer_name="owner",
        topic_name=TOPIC,
        dispatch_strategy=danube_pb2.Reliable,
        producer_access_mode=danube_pb2.Exclusive,
    )
    async with grpc.aio.insecure_channel(broker.address) as channel:
        create: Any = channel.unary_unary("/danube.ProducerService/CreateProducer")
        await create(wanted.SerializeToString())
    async with call_of(broker, "ProduceStream") as call:
        await call.write(opening())
        assert await status_after_reading(call) is grpc.StatusCode.PERMISSION_DENIED
    async with producing(broker, producer_name="owner") as call:
        await call.write(batch(b"a"))
        assert await answer(call) == range(1)


async def test_a_stream_needs_the_token(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", token="secret") as broker:
        for method in ("ProduceStream", "FetchStream"):
            async with call_of(broker, method) as call:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        async with call_of(broker, "ProduceStream", "secret") as call:
            await call.write(opening())
            assert isinstance(await call.read(), bytes)


async def test_topics_are_created_only_if_allowed(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", auto_create_topics=False) as broker:
        async with call_of(broker, "ProduceStream") as call:
            await call.write(opening())
            assert await call.code() is grpc.StatusCode.NOT_FOUND
        async with call_of(broker, "FetchStream") as call:
            await call.write(fetching(offset=0))
            assert await call.code() is grpc.StatusCode.NOT_FOUND


# -- idempotent producers ---------------------------------------------------------------------


async def test_a_repeated_batch_has_its_first_offsets(broker: RunningBroker) -> None:
    async with producing(broker, idempotent=True) as call:
        assert call.opened.last_sequence == 0
        await call.write(batch(b"1", b"2", first=1))
        await call.write(batch(b"3", first=3))
        assert [await answer(call), await answer(call)] == [range(2), range(2, 3)]
    async with producing(broker, idempotent=True) as call:
        assert call.opened.last_sequence == 3
        await call.write(batch(b"1", b"2", first=1))
        await call.write(batch(b"3", b"4", first=3))
        assert [await answer(call), await answer(call)] == [range(2), range(2, 4)]
    found = await fetched(broker, offset=0, end_offset=4)
    assert [each.payload for each in found] == [b"1", b"2", b"3", b"4"]
    assert [each.request_id for each in found] == [1, 2, 3, 4]


async def test_a_gap_is_a_failed_precondition_with_the_expected_number(
    broker: RunningBroker,
) -> None:
    async with producing(broker, idempotent=True) as call:
        await call.write(batch(b"1", first=1))
        await call.write(batch(b"3", first=3))
        assert await answer(call) == range(1)
        code, details = await status(call)
        trailers = dict(await call.trailing_metadata())
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "must have the number 2, not 3" in details
    assert trailers["forebay-error"] == "OutOfSequence"
    assert trailers["forebay-expected"] == "2"


async def test_a_second_stream_of_an_idempotent_producer_ends_the_first(
    broker: RunningBroker,
) -> None:
    async with producing(broker, idempotent=True) as first:
        await first.write(batch(b"1", first=1))
        assert await answer(first) == range(1)
        async with producing(broker, idempotent=True) as second:
            assert second.opened.last_sequence == 1
            code, details = await status(first)
            assert code is grpc.StatusCode.ABORTED
            assert "'meter' was opened" in details
            await second.write(batch(b"2", first=2))
            assert await answer(second) == range(1, 2)


async def test_a_first_stream_that_does_not_read_is_ended_too(broker: RunningBroker) -> None:
    async with producing(broker, idempotent=True) as first:
        for number in range(1, 2000):  # nobody reads the answers
            await first.write(batch(b"m", first=number))
        async with producing(broker, idempotent=True) as second:
            last = second.opened.last_sequence
            await second.write(batch(b"m", first=last + 1))
            assert await answer(second) == range(last, last + 1)
        assert await status_after_reading(first) is grpc.StatusCode.ABORTED


# -- fetching ---------------------------------------------------------------------------------


async def store_some(broker: RunningBroker, count: int, size: int = 10) -> None:
    topic = await asyncio.to_thread(broker.store.topic, TOPIC)
    await topic.append_many_async(
        [b"%d" % number + b"." * size for number in range(count)], durability="synced"
    )


async def test_a_reader_begins_where_it_asks_and_stops_at_the_end(broker: RunningBroker) -> None:
    await store_some(broker, 10)
    everything = await fetched(broker, position="earliest", end_offset=10)
    assert [each.offset for each in everything] == list(range(10))
    assert [each.offset for each in await fetched(broker, offset=4, end_offset=7)] == [4, 5, 6]
    assert await fetched(broker, offset=4, end_offset=4) == []
    after = everything[0].publish_time + 1_000_000
    async with call_of(broker, "FetchStream") as call:
        await call.write(fetching(time_ms=after))
        assert pb.FetchResponse.FromString(await call.read()).next_offset == 10


async def test_at_the_end_a_reader_waits_for_new_messages(broker: RunningBroker) -> None:
    await store_some(broker, 3)
    async with call_of(broker, "FetchStream") as call:
        await call.write(fetching(position="latest"))
        assert pb.FetchResponse.FromString(await call.read()).next_offset == 3
        reading = asyncio.create_task(call.read())
        await store_some(broker, 1)
        response = pb.FetchResponse.FromString(await reading)
        assert [each.offset for each in decode_messages(scan(response.frames))] == [3]


async def test_responses_are_no_larger_than_asked(broker: RunningBroker) -> None:
    await store_some(broker, 500, size=300)
    async with call_of(broker, "FetchStream") as call:
        await call.write(fetching(offset=0, end_offset=500, max_bytes=2000))
        sizes = []
        while isinstance(raw := await call.read(), bytes):
            sizes.append(len(pb.FetchResponse.FromString(raw).frames))
        assert max(sizes) <= 2000
        assert min(sizes[1:-1]) > 1000
    large = await fetched(broker, offset=0, end_offset=3, max_bytes=1)
    assert [each.offset for each in large] == [0, 1, 2]


async def test_both_tiers_are_read(broker: RunningBroker) -> None:
    await store_some(broker, 20)
    topic = broker.store.topic(TOPIC)
    await asyncio.to_thread(topic.upload)
    await asyncio.to_thread(topic.rotate)
    await store_some(broker, 5)
    assert [each.offset for each in await fetched(broker, offset=0, end_offset=25)] == [*range(25)]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"offset": 99}, "OUT_OF_RANGE", "offset 99 is not in the log"),
        ({"offset": 2**63}, "OUT_OF_RANGE", "is not in the log"),
        ({}, "INVALID_ARGUMENT", "start must be"),
        ({"position": "middle"}, "INVALID_ARGUMENT", "start must be"),
        ({"offset": 0, "max_bytes": 2**40}, "INVALID_ARGUMENT", "max_bytes"),
        ({"offset": 0, "end_offset": 2**63}, "INVALID_ARGUMENT", "end_offset"),
        ({"offset": 0, "topic": "/default/other"}, "NOT_FOUND", "/default/other"),
        (
            {"subscription": pb.SubscriptionStart(name="s", consumer_name="c", type=9)},
            "INVALID_ARGUMENT",
            "no subscription type 9",
        ),
        (
            {"subscription": pb.SubscriptionStart(consumer_name="c")},
            "INVALID_ARGUMENT",
            "name of a subscription",
        ),
    ],
)
async def test_a_bad_request_to_fetch_is_refused(
    broker: RunningBroker, fields: dict[str, Any], code: str, words: str
) -> None:
    await store_some(broker, 2)
    async with call_of(broker, "FetchStream") as call:
        await call.write(fetching(**fields))
        found, details = await status(call)
        assert found.name == code
        assert words in details


async def test_streams_end_with_unavailable_when_the_server_stops(broker: RunningBroker) -> None:
    async with producing(broker) as producer, call_of(broker, "FetchStream") as reader:
        await producer.write(batch(b"1"))
        assert await answer(producer) == range(1)
        await reader.write(fetching(position="latest"))
        await reader.read()
        await broker.stop()
        assert await producer.code() is grpc.StatusCode.UNAVAILABLE
        assert await reader.code() is grpc.StatusCode.UNAVAILABLE
