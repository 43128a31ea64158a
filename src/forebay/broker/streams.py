"""`forebay.Streams`: batches of messages in both directions, for high rates.

ProduceStream takes batches and acknowledges them by offset: `forebay.broker.produce_stream`.
FetchStream returns frames as they are stored: `forebay.broker.fetch_stream`. In both, the first
request opens the stream and gets the first response. docs/guide/broker.md explains the calls.

Beware: unlike those of Danube's protocol, these streams may end by themselves: with a status that
says whether to open them again (UNAVAILABLE) or not (everything else).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc

from forebay.broker import streams_pb2 as pb
from forebay.broker.calls import Calls, Context, service
from forebay.broker.context import BrokerContext
from forebay.broker.fetch_stream import FetchStreams
from forebay.broker.produce_stream import ProduceStreams
from forebay.broker.status import Refused
from forebay.errors import UsageError
from forebay.limits import STREAMS_MAX

_OPEN_SECONDS: Final = 10.0
"""How long a client may take to open a stream."""
_Message = TypeVar("_Message", pb.ProduceRequest, pb.FetchRequest)


class Places:
    """The number of streams that are open."""

    def __init__(self) -> None:
        self._taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes a place; Refused if there is none."""
        if self._taken >= STREAMS_MAX:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{STREAMS_MAX} streams are open, and no more can be: close some",
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


def services(context: BrokerContext, calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    producing, fetching, places = ProduceStreams(context), FetchStreams(context), Places()

    async def produce(
        requests: AsyncIterator[tuple[int, pb.ProduceRequest]], call: Context
    ) -> None:
        with places.taken():
            opened = await _first(requests, context)
            await producing.serve(opened, requests, call)

    async def fetch(requests: AsyncIterator[tuple[int, pb.FetchRequest]], call: Context) -> None:
        with places.taken():
            opened = await _first(requests, context)
            await fetching.serve(opened, requests, call)

    methods = {
        "ProduceStream": calls.stream("ProduceStream", _sized_produce, produce),
        "FetchStream": calls.stream("FetchStream", _sized_fetch, fetch),
    }
    return [service("forebay.Streams", methods)]


def _sized_produce(raw: bytes) -> tuple[int, pb.ProduceRequest]:
    return len(raw), pb.ProduceRequest.FromString(raw)


def _sized_fetch(raw: bytes) -> tuple[int, pb.FetchRequest]:
    return len(raw), pb.FetchRequest.FromString(raw)


async def _first(requests: AsyncIterator[tuple[int, _Message]], context: BrokerContext) -> _Message:
    """Waits for the request that opens the stream, but not for ever, nor if the server stops."""
    reading = asyncio.ensure_future(anext(requests, None))
    stopping = asyncio.create_task(context.gate.stopping.wait())
    try:
        await asyncio.wait(
            {reading, stopping}, timeout=_OPEN_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        stopping.cancel()
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # seen, also if this call is cancelled
    received = None if reading.cancelled() else reading.result()
    if received is None or received[1].WhichOneof("request") != "open":
        if context.gate.stopping.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        raise UsageError("the first request of a stream must open it, and come soon")
    return received[1]
