"""`SubscriptionStream`: messages of a subscription over a FetchStream, and their acknowledgements.

If the connection is lost, the stream is opened again, and the server delivers again what was not
acknowledged. Acknowledgements are sent together, as soon as the loop has a moment. One that is lost
with the connection costs a delivery, never a message.

`AsyncConsumer` and `Consumer` in `forebay.broker.client` are the public interfaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from forebay.broker import danube_pb2
from forebay.broker import streams_pb2 as pb
from forebay.broker.connection import Attempts, Connection
from forebay.errors import CorruptFrame, ServiceUnavailable, UsageError
from forebay.format.frame import End, scan
from forebay.format.message import StreamMessage, decode_messages

TYPES: Final = {
    "exclusive": danube_pb2.ConsumerRequest.Exclusive,
    "shared": danube_pb2.ConsumerRequest.Shared,
    "failover": danube_pb2.ConsumerRequest.Failover,
    "key_shared": danube_pb2.ConsumerRequest.KeyShared,
}


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    topic: str
    subscription: str
    name: str
    type: str = "exclusive"
    key_filters: tuple[str, ...] = ()
    timeout: float = 60.0
    """How long to try to reach the server before the consumer raises ServiceUnavailable."""

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise UsageError(
                f"type is {self.type!r}; it must be 'exclusive', 'shared', 'failover' or "
                "'key_shared'"
            )


class SubscriptionStream:
    """One consumer. One task at a time may read it; everything belongs to one event loop."""

    def __init__(self, connection: Connection, options: ConsumerOptions) -> None:
        self._connection = connection
        self._options = options
        self._attempts = Attempts(options.timeout)
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._reading: asyncio.Task[Any] | None = None
        """The read that is under way. A caller that is cancelled leaves it to the next one: gRPC
        would end the call with it, and acknowledgements could not be sent any more."""
        self._acks: list[int] = []
        self._nacks: list[tuple[int, int | None]] = []
        self._answering: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Opens the stream, if it is not: the subscription exists from then on."""
        while self._call is None:
            try:
                await self._open()
            except grpc.aio.AioRpcError as error:
                await self._lost(error)

    async def _open(self) -> None:
        options = self._options
        self._call = call = self._connection.stream("FetchStream")
        start = pb.SubscriptionStart(
            name=options.subscription,
            consumer_name=options.name,
            type=TYPES[options.type],
            key_filters=options.key_filters,
        )
        opened = pb.OpenFetch(topic=options.topic, subscription=start)
        await call.write(pb.FetchRequest(open=opened).SerializeToString())
        if not isinstance(await call.read(), bytes):
            raise ServiceUnavailable("the server has ended the stream")

    async def next_messages(self) -> list[StreamMessage]:
        """Waits for messages, and returns those that came together."""
        while True:
            await self.open()
            assert self._call is not None
            try:
                raw = await self._read(self._call)
            except grpc.aio.AioRpcError as error:
                await self._lost(error)
                continue
            if not isinstance(raw, bytes):
                self._forget()
                raise ServiceUnavailable("the server has ended the stream")
            self._attempts.succeeded()
            return self._decoded(pb.FetchResponse.FromString(raw).frames)

    async def _read(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> Any:
        if self._reading is None:
            self._reading = asyncio.ensure_future(call.read())
        reading = self._reading
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done() and self._reading is reading:
                self._reading = None

    def _decoded(self, frames: bytes) -> list[StreamMessage]:
        found = scan(frames)
        if found.end is not End.COMPLETE:
            raise CorruptFrame(
                found.end.describe(),
                file=f"the stream of {self._connection.address}",
                position=found.safe_length,
                offset=None,
            )
        return list(decode_messages(found))

    # -- acknowledgements -----------------------------------------------------------------------

    def ack(self, offsets: Iterable[int]) -> None:
        self._acks += offsets
        self._answer()

    def nack(self, offset: int, delay_ms: int | None) -> None:
        self._nacks.append((offset, delay_ms))
        self._answer()

    def _answer(self) -> None:
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._send_answers())

    async def _send_answers(self) -> None:
        while (self._acks or self._nacks) and self._call is not None:
            acks, self._acks = self._acks, []
            nacks, self._nacks = self._nacks, []
            try:
                for request in _answers(acks, nacks):
                    await self._call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # these are delivered again; reading tells why the stream has ended

    async def _lost(self, error: grpc.aio.AioRpcError) -> None:
        self._forget()
        raised = self._connection.error(error)
        if not isinstance(raised, ServiceUnavailable):
            raise raised from None
        await self._attempts.failed(raised)

    def _forget(self) -> None:
        call, self._call = self._call, None
        self._acks.clear()
        self._nacks.clear()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        if call is not None:
            call.cancel()

    async def close(self) -> None:
        """Sends what was acknowledged, and ends the stream."""
        if self._answering is not None:
            await asyncio.wait({self._answering})
        call = self._call
        if call is not None:
            # The server ends the stream when it has seen the last acknowledgement.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                await call.done_writing()
                async with asyncio.timeout(1):
                    while isinstance(await self._read(call), bytes):
                        pass
        self._forget()


def _answers(acks: list[int], nacks: list[tuple[int, int | None]]) -> Iterable[bytes]:
    if acks:
        request = pb.FetchRequest()
        for start, end in ranges(acks):
            request.acknowledge.acks.add(start=start, end=end)
        yield request.SerializeToString()
    for delay in {each[1] for each in nacks}:
        request = pb.FetchRequest()
        for start, end in ranges([offset for offset, own in nacks if own == delay]):
            request.acknowledge.nacks.add(start=start, end=end)
        if delay is not None:
            request.acknowledge.nack_delay_ms = delay
        yield request.SerializeToString()


def ranges(offsets: list[int]) -> list[tuple[int, int]]:
    """The offsets as ranges, ends not included."""
    found: list[tuple[int, int]] = []
    for offset in sorted(set(offsets)):
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found
