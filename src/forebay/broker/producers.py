"""`danube.ProducerService`: CreateProducer and SendMessage.

A producer's id is computed from its topic and its name. So it is the same after the server was
started again, and a message whose producer is not known yet names it: the producer is known again
after its first message.

A message is acknowledged when it is synced, or as `broker.ack` says. Messages of all producers that
wait at the same time share a sync. Topic, offset and producer of a stored message are those that
the server knows, whatever the client sent.

Beware: after UNAVAILABLE a message may or may not be stored. Danube's clients send it again, so it
may be stored twice. Streams of idempotent producers do not have that problem: `broker/streams.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

import grpc

from forebay.broker import danube_pb2 as pb
from forebay.broker.calls import Calls, Context, service
from forebay.broker.context import BrokerContext
from forebay.broker.known_producers import Producer
from forebay.broker.requests import parse_name, parse_topic_name
from forebay.broker.status import Refused
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.registry import stable_number
from forebay.errors import MessageTooLarge, UsageError
from forebay.format.message import MessageId, StreamMessage
from forebay.limits import ATTRIBUTES_MAX, KIB, OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.topic.storage import WalStorage

_log: Final = logging.getLogger("forebay.broker")
MESSAGES: Final = Counter(
    "forebay_broker_messages_total", "Messages that producers sent and that were acknowledged."
)
MESSAGE_BYTES: Final = Counter(
    "forebay_broker_message_bytes_total", "Payload bytes of messages that were acknowledged."
)
_ADDED_BYTES_MAX: Final = 4 * KIB
"""More than the names, the address and the offset that the server writes into a message."""


class ProducerService:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._topics = context.topics
        self._settings = context.settings
        self._producers = context.producers
        self._pending_bytes = 0

    async def create(self, request: pb.ProducerRequest, _call: Context) -> pb.ProducerResponse:
        topic = parse_topic_name(request.topic_name)
        name = parse_name("producer_name", request.producer_name)
        reliable = request.dispatch_strategy == pb.Reliable
        if reliable:
            await self._topics.reliable(topic, create=True)
        else:
            await self._topics.nonreliable(topic, create=True)
        number = stable_number(str(topic), name)
        exclusive = request.producer_access_mode == pb.Exclusive
        self._producers.add(Producer(number, name, topic, reliable, exclusive))
        if request.schema_ref:
            event(
                _log,
                logging.WARNING,
                "a producer names a schema, and there is no registry: it is ignored",
                topic=topic,
                producer=name,
            )
        return pb.ProducerResponse(
            request_id=request.request_id, producer_id=number, producer_name=request.producer_name
        )

    async def send(self, request: pb.StreamMessage, _call: Context) -> pb.MessageResponse:
        size = request.ByteSize()
        self._require_size(size)
        producer = self._producers.find(request.msg_id.producer_id)
        if producer is None:
            producer = await self._known_again(request)
        if size + _ADDED_BYTES_MAX > self._settings.message_bytes_max:
            self._require_size(_delivered_bytes(producer, request, self._context.address))
        if self._pending_bytes + size > self._settings.pending_bytes_max:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many messages wait to be stored: send it again later",
            )
        self._pending_bytes += size
        try:
            await self._accept(producer, request)
        finally:
            self._pending_bytes -= size
        MESSAGES.add()
        MESSAGE_BYTES.add(len(request.payload))
        return pb.MessageResponse(request_id=request.request_id)

    def _require_size(self, size: int) -> None:
        limit = self._settings.message_bytes_max
        if size > limit:
            raise MessageTooLarge(
                f"the message has {size} bytes with all its fields; at most {limit} are allowed "
                "(broker.message_bytes_max)"
            )

    async def _known_again(self, request: pb.StreamMessage) -> Producer:
        """The producer of an earlier run of the server, if the message names it rightly."""
        number = request.msg_id.producer_id
        try:
            topic = parse_topic_name(request.msg_id.topic_name)
        except UsageError:
            topic = None
        if topic is None or stable_number(str(topic), request.producer_name) != number:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"there is no producer {number}: create it first"
            )
        reliable = await self._topics.delivery(topic)
        if reliable is None:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"there is no topic {topic}: create the producer again"
            )
        return self._producers.add(Producer(number, request.producer_name, topic, reliable))

    async def _accept(self, producer: Producer, request: pb.StreamMessage) -> None:
        message = _stored(producer, request, self._context.address)
        if not producer.reliable:
            fanout = await self._topics.nonreliable(producer.topic, create=False)
            _publish(fanout, message, request)
            return
        storage = await self._topics.reliable(producer.topic, create=False)
        await self._append(storage, message)

    async def _append(self, storage: WalStorage, message: StreamMessage) -> None:
        ack = self._settings.ack
        offset = await storage.wal.append_message_async(
            message, "buffered" if ack == "uploaded" else ack
        )
        if ack == "uploaded":
            await asyncio.to_thread(storage.wait_uploaded, offset + 1)


def _stored(producer: Producer, request: pb.StreamMessage, address: str) -> StreamMessage:
    """The message as it is stored: nothing that the server knows comes from the client."""
    if len(request.attributes) > ATTRIBUTES_MAX:
        raise MessageTooLarge(
            f"the message has {len(request.attributes)} attributes; at most {ATTRIBUTES_MAX}"
        )
    if request.publish_time > OFFSET_MAX:
        raise UsageError("publish_time is not a time in milliseconds since 1970")
    return StreamMessage(
        request.payload,
        request.request_id,
        MessageId(producer.number, str(producer.topic), address),
        request.publish_time or int(time.time() * 1000),
        producer.name,
        request.subscription_name,
        dict(request.attributes),
        request.schema_id if request.HasField("schema_id") else None,
        request.schema_version if request.HasField("schema_version") else None,
        request.routing_key if request.HasField("routing_key") else None,
    )


def _publish(fanout: FanoutTopic, message: StreamMessage, request: pb.StreamMessage) -> None:
    _stamp(request, message, 0)
    fanout.publish(request.SerializeToString(), message.routing_key)


def _stamp(request: pb.StreamMessage, message: StreamMessage, offset: int) -> None:
    """Makes the request what consumers get."""
    request.msg_id.producer_id = message.msg_id.producer_id
    request.msg_id.topic_name = message.msg_id.topic_name
    request.msg_id.broker_addr = message.msg_id.broker_addr
    request.msg_id.topic_offset = offset
    request.publish_time = message.publish_time
    request.producer_name = message.producer_name


def _delivered_bytes(producer: Producer, request: pb.StreamMessage, address: str) -> int:
    """The size of the message as consumers get it, with the longest offset."""
    delivered = pb.StreamMessage()
    delivered.CopyFrom(request)
    _stamp(delivered, _stored(producer, request, address), OFFSET_MAX)
    return delivered.ByteSize()


def services(context: BrokerContext, calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    producers = ProducerService(context)
    return [
        service(
            "danube.ProducerService",
            {
                "CreateProducer": calls.unary(
                    "CreateProducer", pb.ProducerRequest.FromString, producers.create
                ),
                "SendMessage": calls.unary(
                    "SendMessage", pb.StreamMessage.FromString, producers.send
                ),
            },
        )
    ]
