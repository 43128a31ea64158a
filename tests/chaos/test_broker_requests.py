"""Whatever bytes a client sends, it gets a status, and the server serves on."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from forebay.broker import (
    consumers,
    discovery,
    producers,
    schemas,
    schemas_pb2,
    streams,
    streams_pb2,
)
from forebay.broker import danube_pb2 as pb
from forebay.broker.calls import Calls, Gate
from forebay.broker.context import BrokerContext
from forebay.limits import ATTRIBUTES_MAX, KEY_FILTERS_MAX, MIB
from forebay.settings import StoreSettings
from forebay.topic.store import Store
from support.hostile_broker import (
    PREFACE,
    TOPIC,
    RawClient,
    attacked,
    connect,
    frame,
    headers,
    message,
    resident_mib,
    serves,
    settings,
)
from support.server_processes import ServerProcess

SOAK: Final = os.environ.get("FOREBAY_SOAK", "0") not in {"", "0"}
ROUNDS: Final = 400 if SOAK else 12
"""How often every method is called in every way."""
AT_ONCE: Final = 64
GROWTH_MIB: Final = 400
"""More than the buffers of the calls at the same time, and far less than what is sent."""
FAULTS: Final = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
"""Statuses that only a fault of the server has."""
WRITE_FAILED: Final = "Internal error from Core"
"""The client's own status if the server has refused the stream before the client had written."""
METHODS: Final[dict[str, Any]] = {
    "danube.ProducerService/CreateProducer": pb.ProducerRequest,
    "danube.ProducerService/SendMessage": pb.StreamMessage,
    "danube.ConsumerService/Subscribe": pb.ConsumerRequest,
    "danube.ConsumerService/ReceiveMessages": pb.ReceiveRequest,
    "danube.ConsumerService/Ack": pb.AckRequest,
    "danube.ConsumerService/Nack": pb.NackRequest,
    "danube.Discovery/TopicLookup": pb.TopicLookupRequest,
    "danube.Discovery/TopicPartitions": pb.TopicLookupRequest,
    "danube.HealthCheck/HealthCheck": pb.HealthCheckRequest,
    "danube.StorageService/ListSegmentDescriptors": pb.ListSegmentDescriptorsRequest,
    "danube_schema.SchemaRegistry/RegisterSchema": schemas_pb2.RegisterSchemaRequest,
    "danube_schema.SchemaRegistry/GetSchema": schemas_pb2.GetSchemaRequest,
    "danube_schema.SchemaRegistry/GetLatestSchema": schemas_pb2.GetLatestSchemaRequest,
    "danube_schema.SchemaRegistry/ListVersions": schemas_pb2.ListVersionsRequest,
    "danube_schema.SchemaRegistry/CheckCompatibility": schemas_pb2.CheckCompatibilityRequest,
    "danube_schema.SchemaRegistry/DeleteSchemaVersion": schemas_pb2.DeleteSchemaVersionRequest,
    "danube_schema.SchemaRegistry/SetCompatibilityMode": schemas_pb2.SetCompatibilityModeRequest,
    "danube_schema.SchemaRegistry/ConfigureTopicSchema": schemas_pb2.ConfigureTopicSchemaRequest,
    "danube_schema.SchemaRegistry/UpdateTopicValidationPolicy": (
        schemas_pb2.UpdateTopicValidationPolicyRequest
    ),
    "danube_schema.SchemaRegistry/GetTopicSchemaConfig": schemas_pb2.GetTopicSchemaConfigRequest,
    "danube_schema.SchemaRegistry/ListSubjects": schemas_pb2.ListSubjectsRequest,
    "forebay.Streams/ProduceStream": streams_pb2.ProduceRequest,
    "forebay.Streams/FetchStream": streams_pb2.FetchRequest,
}
STREAMS: Final = {each for each in METHODS if "Stream" in each or "Receive" in each}
TEXTS: Final = (
    *(
        "",
        "/",
        "//",
        "///",
        "/a",
        "a",
        "a/b",
        "/a/b/c",
        "/../..",
        "/./.",
        "/default/..",
        "/default/.",
    ),
    *("/default/\0", "/default/a\nb", "/default/ ", "/default/ä", "\ufeff", "/default/%2e%2e"),
    *(TOPIC, TOPIC + "-part-0", TOPIC + "-part--1", TOPIC + "-part-" + "9" * 40, TOPIC + "/"),
    *("*", "?", "[", "*" * 256, "*a" * 128, "?*" * 100 + "b", "\U0010ffff" * 64, "p", "s", "c"),
    *("/default/" + "x" * 250, "/default/" + "x" * 300, "x" * 100_000),
)
BROKEN_PATH: Final = headers(1, "danube.A/B").replace(b"/danube", b"\xfadanube") + message(1, b"")
NUMBERS: Final = (0, 1, 2, 99, 2**31 - 1, 2**32 - 1, 2**53, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with attacked(tmp_path_factory.mktemp("hostile")) as found:
        yield found


# -- making requests ------------------------------------------------------------------------------


def hostile_value(field: FieldDescriptor, dice: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return dice.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.randbytes(dice.choice((0, 1, 1000, 70_000)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return dice.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return dice.choice((0, 1, 2, 3, 4, 7, 2**31 - 1, -1))
    most = {FieldDescriptor.TYPE_UINT32: 2**32 - 1, FieldDescriptor.TYPE_INT32: 2**31 - 1}
    return min(dice.choice(NUMBERS), most.get(field.type, 2**64 - 1))


def hostile_message(kind: Any, dice: random.Random, depth: int = 0) -> Any:
    """A message whose every field may have an extreme value."""
    found = kind()
    for field in kind.DESCRIPTOR.fields:
        if dice.random() < 0.25 or depth > 4:
            continue
        many = dice.choice((0, 1, 3, 70, 2000))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(found, field.name).update({f"k{each}": "v" * 9 for each in range(many)})
        elif field.message_type is not None:
            inner = [hostile_message(field.message_type._concrete_class, dice, depth + 1)]
            place = getattr(found, field.name)
            if field.is_repeated:
                place.extend(inner * min(many, 70))
            else:
                place.CopyFrom(inner[0])
        elif field.is_repeated:
            getattr(found, field.name).extend(hostile_value(field, dice) for _ in range(many))
        else:
            setattr(found, field.name, hostile_value(field, dice))
    return found


def mutated(raw: bytes, dice: random.Random) -> bytes:
    data = bytearray(raw or b"\x00")
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(len(data))
        action = dice.randrange(4)
        if action == 0:
            data[at] = dice.randrange(256)
        elif action == 1:
            del data[at:]
            data += b"\x00"
        elif action == 2:
            data[at:at] = dice.randbytes(dice.choice((1, 5, 50)))
        else:
            data[at:at] = b"\x12\xff\xff\xff\xff\x0f"  # a field that claims to have 4 GiB
    return bytes(data)


def requests(kind: Any, dice: random.Random) -> Iterator[bytes]:
    yield b""
    yield dice.randbytes(dice.choice((1, 10, 100, 5000)))
    whole = hostile_message(kind, dice).SerializeToString()
    yield whole
    yield mutated(whole, dice)
    yield b"\x12\x02\xc3\x28" + b"\x1a\x02\xff\xfe"  # text that is no UTF-8
    yield b"\x12\x80" * 5000  # a varint without an end
    yield b"\x0b" * 10_000  # groups in groups


async def answer(
    channel: grpc.aio.Channel, method: str, raw: bytes
) -> tuple[grpc.StatusCode, str | None]:
    """The status of a call; a stream is read until it ends, or for a moment."""
    seconds = 0.5 if method in STREAMS else 100
    stub: Any = channel.stream_stream(f"/{method}")
    call = stub(iter([raw]), timeout=seconds)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return await call.code(), None


# -- tests ----------------------------------------------------------------------------------------


def test_the_fuzz_knows_every_method() -> None:
    class Named(Calls):
        def __init__(self) -> None:
            super().__init__(Gate(None))
            self.names: set[str] = set()

        def unary(self, method: str, *more: Any) -> Any:
            self.names.add(method)
            return super().unary(method, *more)

        server_stream = stream = unary  # type: ignore[assignment]

    found = Named()
    with Store(StoreSettings(data=None)) as store:
        for each in (producers, consumers, discovery, schemas, streams):
            each.services(BrokerContext(store, "127.0.0.1:1"), found)
    missing = found.names - {each.split("/")[1] for each in METHODS}
    assert not missing, "add them to METHODS"


@pytest.mark.timeout(3600 if SOAK else 300)
async def test_every_method_answers_hostile_requests_with_a_status(server: ServerProcess) -> None:
    address = server.where["broker"]
    await serves(address)
    before = resident_mib(server.pid)
    dice = random.Random(16)
    gate = asyncio.Semaphore(AT_ONCE)
    statuses: Counter[tuple[str, str]] = Counter()
    bad: list[str] = []

    async def attack(channel: grpc.aio.Channel, method: str, raw: bytes) -> None:
        async with gate:
            status, details = await answer(channel, method, raw)
        statuses[method, status.name] += 1
        if status in FAULTS and details != WRITE_FAILED:
            bad.append(f"{method} {status.name} {details} {raw[:200]!r}")

    async with RawClient(address) as client:
        await client.producer()
        await client.subscribe()
        for _ in range(ROUNDS):
            async with asyncio.TaskGroup() as group:
                for method, kind in METHODS.items():
                    for raw in requests(kind, dice):
                        group.create_task(attack(client.channel, method, raw))
    assert not bad, f"{len(bad)}: {bad[:3]}\n{server.said}"
    assert len({name for name, _ in statuses}) == len(METHODS)
    await serves(address)
    assert resident_mib(server.pid) - before < GROWTH_MIB, statuses


async def test_names_and_numbers_over_their_limits_are_refused_by_name(
    server: ServerProcess,
) -> None:
    invalid, large = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    many = {f"k{each}": "v" for each in range(ATTRIBUTES_MAX + 1)}
    async with RawClient(server.where["broker"]) as client:
        number = await client.producer()
        own = pb.MsgID(producer_id=number, topic_name=TOPIC)
        far = pb.MsgID(topic_name=TOPIC, topic_offset=2**64 - 1)
        await client.subscribe()
        filters = ["*a"] * (KEY_FILTERS_MAX + 1)
        for status, method, request in (
            (invalid, "ProducerService/CreateProducer", _named("x" * 5_000_000)),
            (large, "ProducerService/CreateProducer", _named("x" * 10 * MIB)),
            (invalid, "ProducerService/CreateProducer", _named("/default/../../etc")),
            (invalid, "ProducerService/CreateProducer", _named("/default/a\0b")),
            (invalid, "ProducerService/SendMessage", pb.StreamMessage(msg_id=own, attributes=many)),
            (invalid, "ProducerService/SendMessage", _sized(own, 4 * MIB)),
            (invalid, "ProducerService/SendMessage", _sized(own, 4 * MIB - 60)),
            (large, "ProducerService/SendMessage", _sized(own, 9 * MIB)),
            (invalid, "ConsumerService/Subscribe", _subscribing(key_filters=filters)),
            (invalid, "ConsumerService/Subscribe", _subscribing(key_filters=[""])),
            (invalid, "ConsumerService/Subscribe", _subscribing(key_filters=["*" * 2_000_000])),
            (invalid, "ConsumerService/Subscribe", _subscribing(subscription="s" * 300)),
            (invalid, "ConsumerService/Subscribe", _subscribing(subscription_type=9)),
            (invalid, "ConsumerService/Ack", pb.AckRequest(msg_id=far, subscription_name="s")),
            (invalid, "ConsumerService/Ack", pb.AckRequest(subscription_name="s")),
            (invalid, "ConsumerService/Nack", _nacking(own, 2**64 - 1)),
            (invalid, "HealthCheck/HealthCheck", pb.HealthCheckRequest(client=9)),  # type: ignore[arg-type]
        ):
            got = await client.status(method, request.SerializeToString())
            assert got is status, f"{method} {str(request)[:200]}: {got}"


def _named(topic: str) -> pb.ProducerRequest:
    return pb.ProducerRequest(topic_name=topic, producer_name="p", dispatch_strategy=pb.Reliable)


def _sized(own: pb.MsgID, size: int) -> pb.StreamMessage:
    return pb.StreamMessage(msg_id=own, payload=bytes(size))


def _subscribing(**fields: Any) -> pb.ConsumerRequest:
    base = {"topic_name": TOPIC, "consumer_name": "c", "subscription": "s", "subscription_type": 3}
    return pb.ConsumerRequest(**{**base, **fields})


def _nacking(own: pb.MsgID, delay_ms: int) -> pb.NackRequest:
    return pb.NackRequest(msg_id=own, subscription_name="s", delay_ms=delay_ms)


async def test_the_largest_message_that_is_taken_can_be_delivered(server: ServerProcess) -> None:
    topic = "/default/largest"
    async with RawClient(server.where["broker"]) as client:
        number = await client.producer(topic)
        consumer = await client.subscribe(topic=topic)
        sizes = []
        for size in range(4 * MIB - 120, 4 * MIB, 8):
            raw = _sized(pb.MsgID(producer_id=number, topic_name=topic), size).SerializeToString()
            if await client.status("ProducerService/SendMessage", raw) is not grpc.StatusCode.OK:
                break
            sizes.append(size)
        assert sizes, "the limit is not much less than it says"
        got = []
        async with asyncio.timeout(60):
            async for each in client.messages(consumer):
                got.append(len(each.payload))
                assert each.ByteSize() <= 4 * MIB
                if len(got) == len(sizes):
                    break
        assert got == sizes


async def test_an_acknowledgement_creates_no_topic(server: ServerProcess) -> None:
    async with RawClient(server.where["broker"]) as client:
        for method, kind in (
            ("ConsumerService/Ack", pb.AckRequest),
            ("ConsumerService/Nack", pb.NackRequest),
        ):
            request = kind(msg_id=pb.MsgID(topic_name="/default/never"), subscription_name="s")
            got = await client.status(method, request.SerializeToString())
            assert got is grpc.StatusCode.NOT_FOUND
    assert "/default/never" not in str(server.client.json("GET", "/v1/topics"))


async def test_unknown_methods_are_unimplemented(server: ServerProcess) -> None:
    async with RawClient(server.where["broker"]) as client:
        for name in ("Nope/Nope", "ProducerService/Nope", "ProducerService/", "../../etc/passwd"):
            assert await client.status(name, b"x") is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_http2_harm_nobody(server: ServerProcess) -> None:
    address, dice = server.where["broker"], random.Random(3)
    call = headers(1, "danube.Discovery/TopicLookup")
    attacks = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        dice.randbytes(100_000),
        b"\x16\x03\x01\x02\x00\x01\x00" + dice.randbytes(500),  # TLS on a port without it
        PREFACE,
        PREFACE + dice.randbytes(10_000),
        PREFACE + settings((4, 2**32 - 1)),
        PREFACE + settings() + frame(0, 0, 0, b"data of no stream"),
        PREFACE + settings() + b"\xff\xff\xff" + bytes(100_000),
        PREFACE + settings() + headers(1, "danube.Discovery/TopicLookup", "text/plain"),
        PREFACE + settings() + headers(2, "danube.Discovery/TopicLookup"),
        PREFACE + settings() + call + message(1, b"x", declared=2**32 - 1),
        PREFACE + settings() + call + frame(0, 1, 1, b"\x01\x00\x00\x00\x01x"),  # compressed
        PREFACE + settings() + call + frame(8, 0, 1, b"\x00\x00\x00\x00"),  # a window of nothing
        PREFACE + settings() + b"".join(frame(6, 0, 0, bytes(8)) for _ in range(2000)),  # pings
        PREFACE + settings() + b"".join(frame(4, 0, 0, b"") for _ in range(5000)),
        *(PREFACE + settings() + mutated(call + message(1, b"\x12\x01x"), dice) for _ in range(50)),
    ]
    for each in attacks:
        await asyncio.to_thread(_throw, address, each)
    await serves(address)


async def test_a_path_that_is_no_utf8_does_not_end_the_server(server: ServerProcess) -> None:
    """gRPC's own loop ends: it is started again, and streams that are open go on."""
    address, topic = server.where["broker"], "/default/path"
    async with RawClient(address) as open_before, asyncio.timeout(60):
        consumer = await open_before.subscribe(topic=topic) if await _made(address, topic) else 0
        stream = open_before.messages(consumer)
        for each in range(3):
            await asyncio.to_thread(_throw, address, PREFACE + settings() + BROKEN_PATH)
            await serves(address)
            async with RawClient(address) as client:
                await client.send(await client.producer(topic), b"%d" % each, topic)
            assert (await anext(stream)).payload == b"%d" % each
        await stream.aclose()


async def _made(address: str, topic: str) -> int:
    async with RawClient(address) as client:
        return await client.producer(topic)


def _throw(address: str, data: bytes) -> None:
    with connect(address) as attack:
        attack.settimeout(0.2)
        try:
            attack.sendall(data)
            while attack.recv(65_536):
                pass
        except OSError:
            pass  # it was cut off, or waits for more
