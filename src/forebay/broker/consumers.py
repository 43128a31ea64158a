"""`danube.ConsumerService`: Subscribe, ReceiveMessages, Ack and Nack.

A stream of messages never ends by itself: Danube's client would open it again at once, and for
ever. If a second stream of the same consumer comes, it gets the messages, and the first one stays
open in silence. A stream of a consumer that is not known ends after some seconds, with NOT_FOUND.

Acknowledgements are recorded by topic, subscription and offset, as clients send them. Those that
come late, or twice, change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import grpc

from forebay.broker import danube_pb2 as pb
from forebay.broker.calls import Calls, Context, service
from forebay.broker.context import BrokerContext
from forebay.broker.requests import parse_name, parse_topic_name
from forebay.broker.status import Refused
from forebay.dispatch.feed import Delivery
from forebay.dispatch.policy import SubscriptionType
from forebay.dispatch.subscription import Consumer
from forebay.errors import MessageTooLarge, UnknownSubscription, UnknownTopic, UsageError
from forebay.limits import OFFSET_MAX

_UNKNOWN_SECONDS: Final = 5.0
"""How long a stream of an unknown consumer stays open, so that its client does not open thousands
of them."""


class ConsumerService:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._registry = context.registry
        self._bytes_max = context.settings.message_bytes_max

    async def subscribe(self, request: pb.ConsumerRequest, _call: Context) -> pb.ConsumerResponse:
        topic = parse_topic_name(request.topic_name)
        name = parse_name("subscription", request.subscription)
        consumer = parse_name("consumer_name", request.consumer_name)
        try:
            kind = SubscriptionType(request.subscription_type)
        except ValueError:
            raise UsageError(f"there is no subscription type {request.subscription_type}") from None
        filters = tuple(request.key_filters)
        reliable = await self._context.topics.delivery(topic)
        if reliable is None:
            raise UnknownTopic(f"there is no topic {topic}: a producer creates it")
        if reliable:
            number = await self._registry.subscribe(topic, name, kind, consumer, filters)
        else:
            fanout = await self._context.topics.nonreliable(topic, create=False)
            number = await self._registry.subscribe_fanout(fanout, name, kind, consumer, filters)
        return pb.ConsumerResponse(
            request_id=request.request_id,
            consumer_id=number,
            consumer_name=request.consumer_name,
        )

    async def receive(self, request: pb.ReceiveRequest, call: Context) -> None:
        try:
            subscription, consumer = await self._registry.connect(request.consumer_id, self._wire)
        except (UnknownSubscription, UnknownTopic):
            await self._delay()
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                f"there is no consumer {request.consumer_id}: subscribe again",
            ) from None
        writing = asyncio.create_task(self._write(consumer, call))
        cut = asyncio.create_task(consumer.cut.wait())
        try:
            await asyncio.wait({writing, cut}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            subscription.leave(consumer)
            writing.cancel()
            cut.cancel()
            ended = await asyncio.gather(writing, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]
        if consumer.cut.is_set():
            # No status would reach a client that does not read.
            raise asyncio.CancelledError
        if self._context.gate.stopping.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        raise Refused(grpc.StatusCode.NOT_FOUND, "the subscription was deleted")

    async def _write(self, consumer: Consumer, call: Context) -> None:
        """Writes messages until the subscription ends, or the client leaves."""
        while messages := await consumer.take():
            for data in messages:
                await call.write(data)

    async def _delay(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._context.gate.stopping.wait(), _UNKNOWN_SECONDS)

    def _wire(self, delivery: Delivery) -> bytes:
        """The message as Danube's clients get it."""
        if delivery.wire is None:
            delivery.wire = wire_message(delivery)
        if len(delivery.wire) > self._bytes_max:
            raise MessageTooLarge(
                f"offset {delivery.offset} has {len(delivery.wire)} bytes, and clients get at most "
                f"{self._bytes_max} (broker.message_bytes_max): read it by a stream, or move the "
                "subscription past it"
            )
        return delivery.wire

    async def ack(self, request: pb.AckRequest, _call: Context) -> pb.AckResponse:
        offset = _offset(request.msg_id)
        await self._answer(request.msg_id, request.subscription_name, offset, None)
        return pb.AckResponse(request_id=request.request_id)

    async def nack(self, request: pb.NackRequest, _call: Context) -> pb.NackResponse:
        offset = _offset(request.msg_id)
        delay = request.delay_ms if request.HasField("delay_ms") else None
        await self._answer(request.msg_id, request.subscription_name, offset, (delay,))
        return pb.NackResponse(request_id=request.request_id)

    async def _answer(
        self, message: pb.MsgID, name: str, offset: int, nack: tuple[int | None] | None
    ) -> None:
        topic = parse_topic_name(message.topic_name)
        if self._context.topics.fanout(topic) is not None:
            return  # nothing is kept of a non-reliable topic
        subscription = await self._registry.find(topic, name)
        if nack is None:
            subscription.ack(offset, offset + 1)
        else:
            subscription.nack(offset, nack[0])


def _offset(message: pb.MsgID) -> int:
    if message.topic_offset >= OFFSET_MAX:
        raise UsageError(f"{message.topic_offset} is not an offset")
    return message.topic_offset


def wire_message(delivery: Delivery) -> bytes:
    """Encodes a stored message for Danube's clients, with the offset that it has."""
    message = delivery.message
    found = pb.StreamMessage(
        request_id=message.request_id,
        msg_id=pb.MsgID(
            producer_id=message.msg_id.producer_id,
            topic_name=message.msg_id.topic_name,
            broker_addr=message.msg_id.broker_addr,
            topic_offset=delivery.offset,
        ),
        payload=message.payload,
        publish_time=message.publish_time,
        producer_name=message.producer_name,
        subscription_name=message.subscription_name or "",
        attributes=message.attributes,
        schema_id=message.schema_id,
        schema_version=message.schema_version,
        routing_key=message.routing_key,
    )
    return found.SerializeToString()


def services(context: BrokerContext, calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    consumers = ConsumerService(context)
    return [
        service(
            "danube.ConsumerService",
            {
                "Subscribe": calls.unary(
                    "Subscribe", pb.ConsumerRequest.FromString, consumers.subscribe
                ),
                "ReceiveMessages": calls.server_stream(
                    "ReceiveMessages", pb.ReceiveRequest.FromString, consumers.receive
                ),
                "Ack": calls.unary("Ack", pb.AckRequest.FromString, consumers.ack),
                "Nack": calls.unary("Nack", pb.NackRequest.FromString, consumers.nack),
            },
        )
    ]
