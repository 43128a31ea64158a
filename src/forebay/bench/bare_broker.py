"""The limit of `forebay bench broker`: a bare grpc.aio service that Danube's client can use.

    python -m forebay.bench.bare_broker synced|buffered FILE

It has the event loop of `forebay serve`, and the methods that the client calls. It knows no topics:
it keeps messages for one consumer each, in memory, and passes them on as they came. `synced` writes
the payload to FILE, and syncs it, on a thread before it answers; `buffered` answers at once.
`forebay.Streams/ProduceStream` returns every request as it came. The service prints one line of
JSON with its address as `broker` and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import uvloop

from forebay.broker import danube_pb2 as pb

MODULE: Final = "forebay.bench.bare_broker"
_STOP_SECONDS: Final = 1.0
_CALLS_MAX: Final = 16_384

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class BareBroker:
    """Does as little as Danube's client accepts."""

    def __init__(self, file: int, *, synced: bool) -> None:
        self._file = file
        self._synced = synced
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self._topics: dict[int, str] = {}
        """Topics by the numbers of consumers."""

    async def create_producer(self, raw: bytes, _call: _Context) -> bytes:
        request = pb.ProducerRequest.FromString(raw)
        response = pb.ProducerResponse(request_id=request.request_id, producer_id=1)
        return response.SerializeToString()

    async def send(self, raw: bytes, _call: _Context) -> bytes:
        request = pb.StreamMessage.FromString(raw)
        if self._synced:
            await asyncio.to_thread(self._write, request.payload)
        queue = self._queues.get(request.msg_id.topic_name)
        if queue is not None:
            queue.put_nowait(raw)
        return pb.MessageResponse(request_id=request.request_id).SerializeToString()

    def _write(self, payload: bytes) -> None:
        os.write(self._file, payload)
        os.fdatasync(self._file)

    async def subscribe(self, raw: bytes, _call: _Context) -> bytes:
        request = pb.ConsumerRequest.FromString(raw)
        self._queues[request.topic_name] = asyncio.Queue()
        number = len(self._topics) + 1
        self._topics[number] = request.topic_name
        response = pb.ConsumerResponse(request_id=request.request_id, consumer_id=number)
        return response.SerializeToString()

    async def receive(self, raw: bytes, call: _Context) -> None:
        queue = self._queues[self._topics[pb.ReceiveRequest.FromString(raw).consumer_id]]
        while True:
            await call.write(await queue.get())

    async def ack(self, raw: bytes, _call: _Context) -> bytes:
        request = pb.AckRequest.FromString(raw)
        return pb.AckResponse(request_id=request.request_id).SerializeToString()

    async def lookup(self, _raw: bytes, call: _Context) -> bytes:
        await call.abort(grpc.StatusCode.NOT_FOUND, "the client goes on with the address it has")
        raise AssertionError("abort raises")

    async def partitions(self, raw: bytes, _call: _Context) -> bytes:
        request = pb.TopicLookupRequest.FromString(raw)
        response = pb.TopicPartitionsResponse(
            request_id=request.request_id, partitions=[request.topic]
        )
        return response.SerializeToString()

    async def health(self, _raw: bytes, _call: _Context) -> bytes:
        return pb.HealthCheckResponse().SerializeToString()

    async def echo(self, requests: AsyncIterator[bytes], call: _Context) -> None:
        async for raw in requests:
            await call.write(raw)

    def services(self) -> list[grpc.GenericRpcHandler]:
        unary = grpc.unary_unary_rpc_method_handler
        methods: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
            "danube.ProducerService": {
                "CreateProducer": unary(self.create_producer),
                "SendMessage": unary(self.send),
            },
            "danube.ConsumerService": {
                "Subscribe": unary(self.subscribe),
                "ReceiveMessages": grpc.unary_stream_rpc_method_handler(self.receive),
                "Ack": unary(self.ack),
            },
            "danube.Discovery": {
                "TopicLookup": unary(self.lookup),
                "TopicPartitions": unary(self.partitions),
            },
            "danube.HealthCheck": {"HealthCheck": unary(self.health)},
            "forebay.Streams": {"ProduceStream": grpc.stream_stream_rpc_method_handler(self.echo)},
        }
        return [grpc.method_handlers_generic_handler(name, each) for name, each in methods.items()]


async def serve(broker: BareBroker) -> None:
    # gRPC would cancel some of more than 1,000 calls that wait; the broker accepts them too.
    limits = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
    server = grpc.aio.server(options=[(name, _CALLS_MAX) for name in limits])
    server.add_generic_rpc_handlers(tuple(broker.services()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"broker": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await server.stop(_STOP_SECONDS)


def main() -> None:
    durability, path = sys.argv[1:]
    file = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(BareBroker(file, synced=durability == "synced")))


if __name__ == "__main__":
    main()
