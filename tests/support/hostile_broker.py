"""A server whose gRPC port is attacked, and what a client can do to it without a client library."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import yaml

from forebay.broker import danube_pb2 as pb
from support.server_processes import ServerProcess

TOPIC: Final = "/default/orders"
PATIENCE: Final = 120.0
"""Seconds that anything may take on a busy machine before it counts as hung."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, DATA, WINDOW_UPDATE = 4, 1, 0, 8
END_STREAM, END_HEADERS = 1, 4
NO_WINDOW: Final = ((4, 0),)
"""SETTINGS_INITIAL_WINDOW_SIZE 0: the server may send no data on any stream."""


@contextmanager
def attacked(place: Path, **broker: Any) -> Iterator[ServerProcess]:
    """`forebay serve` with the broker on a free port."""
    place.mkdir(exist_ok=True)
    config = place / "server.yml"
    body = {"data": str(place / "data"), "broker": {"listen": "127.0.0.1:0", **broker}}
    config.write_text(yaml.safe_dump(body))
    with ServerProcess("serve", config, place / "log") as server:
        yield server


def resident_mib(pid: int) -> float:
    """The memory of a process that is not shared with files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


class RawClient:
    """Calls of raw messages on one channel."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.metadata = tuple(metadata)

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def call(self, method: str, raw: bytes, seconds: float = PATIENCE) -> bytes:
        stub: Any = self.channel.unary_unary(f"/danube.{method}")
        answer: bytes = await stub(raw, timeout=seconds, metadata=self.metadata)
        return answer

    async def status(self, method: str, raw: bytes, seconds: float = PATIENCE) -> grpc.StatusCode:
        try:
            await self.call(method, raw, seconds)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def producer(self, topic: str = TOPIC, name: str = "p", *, reliable: bool = True) -> int:
        request = pb.ProducerRequest(
            topic_name=topic,
            producer_name=name,
            dispatch_strategy=pb.Reliable if reliable else pb.NonReliable,
        )
        answer = await self.call("ProducerService/CreateProducer", request.SerializeToString())
        return int(pb.ProducerResponse.FromString(answer).producer_id)

    async def send(self, producer: int, payload: bytes, topic: str = TOPIC) -> None:
        message = pb.StreamMessage(
            msg_id=pb.MsgID(producer_id=producer, topic_name=topic), payload=payload
        )
        await self.call("ProducerService/SendMessage", message.SerializeToString())

    async def subscribe(
        self, name: str = "s", consumer: str = "c", kind: int = 1, topic: str = TOPIC
    ) -> int:
        request = pb.ConsumerRequest(
            topic_name=topic,
            consumer_name=consumer,
            subscription=name,
            subscription_type=kind,  # type: ignore[arg-type]
        )
        answer = await self.call("ConsumerService/Subscribe", request.SerializeToString())
        return int(pb.ConsumerResponse.FromString(answer).consumer_id)

    def receive(self, consumer: int) -> Any:
        request = pb.ReceiveRequest(consumer_id=consumer).SerializeToString()
        stub: Any = self.channel.unary_stream("/danube.ConsumerService/ReceiveMessages")
        return stub(request, metadata=self.metadata)

    async def messages(self, consumer: int, name: str = "s") -> AsyncGenerator[pb.StreamMessage]:
        """The messages of a consumer, each acknowledged after it was used."""
        stream = self.receive(consumer)
        async for raw in stream:
            message = pb.StreamMessage.FromString(raw)
            yield message
            ack = pb.AckRequest(msg_id=message.msg_id, subscription_name=name)
            await self.call("ConsumerService/Ack", ack.SerializeToString())


async def serves(address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
    """Checks that an honest client can produce and consume."""
    topic, mark = "/default/honest", b"still here"
    async with RawClient(address, metadata) as client, asyncio.timeout(PATIENCE):
        producer = await client.producer(topic, "honest")
        consumer = await client.subscribe("honest", "honest", topic=topic)
        await client.send(producer, mark, topic)
        async for message in client.messages(consumer, "honest"):
            if message.payload == mark:
                break


# -- HTTP/2 by hand -------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def settings(*pairs: tuple[int, int]) -> bytes:
    body = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs)
    return frame(SETTINGS, 0, 0, body)


def headers(stream: int, method: str, content_type: str = "application/grpc") -> bytes:
    """The headers of a call, each a literal that is not indexed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{method}",
        ":authority": "x",
        "te": "trailers",
        "content-type": content_type,
    }
    body = b"".join(b"\x00" + _text(key) + _text(value) for key, value in fields.items())
    return frame(HEADERS, END_HEADERS, stream, body)


def _text(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


def message(stream: int, raw: bytes, *, declared: int | None = None, end: bool = True) -> bytes:
    """A gRPC message; `declared` is the length that it claims to have."""
    size = len(raw) if declared is None else declared
    body = b"\x00" + size.to_bytes(4, "big") + raw
    parts = [body[at : at + 16_000] for at in range(0, len(body), 16_000)]
    flags = [0] * (len(parts) - 1) + [END_STREAM if end else 0]
    return b"".join(
        frame(DATA, flag, stream, part) for flag, part in zip(flags, parts, strict=True)
    )


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def stalled_stream(address: str, consumer: int) -> socket.socket:
    """A consumer that opens its stream and lets the server send nothing on it."""
    found = connect(address)
    request = pb.ReceiveRequest(consumer_id=consumer).SerializeToString()
    call = headers(1, "danube.ConsumerService/ReceiveMessages") + message(1, request)
    found.sendall(PREFACE + settings(*NO_WINDOW) + call)
    return found
