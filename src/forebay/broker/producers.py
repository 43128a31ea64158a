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
from forebay.broker.schemas import SchemaReferences
from forebay.broker.status import Refused
from forebay.dispatch.fanout import FanoutTopic
from forebay.dispatch.registry import stable_number
from forebay.errors import MessageTooLarge, UsageError
from forebay.format.message import MessageId, StreamMessage
from forebay.format.names import TopicName
from forebay.limits import ATTRIBUTES_MAX, KIB, OFFSET_MAX
from forebay.logs import event
from forebay.metrics import Counter
from forebay.topic.storage import WalStorage

_log: Final = logging.getLogger("forebay.broker")
MESSAGES: Final = Counter(
    "forebay_broker_messages_total", "Messages that producers sent and that were acknowledged."
)
_SERVER_FIELDS_BYTES: Final = 8 * KIB
"""More than the fields take that the server sets: names, the address, numbers."""
MESSAGE_BYTES: Final = Counter(
    "forebay_broker_message_bytes_total", "Payload bytes of messages that were acknowledged."
)


class ProducerService:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._topics = context.topics
        self._settings = context.settings
        self._producers = context.producers
        self._guard = context.guard
        self._references = SchemaReferences(context)
        self._pending_bytes = 0

    async def create(self, request: pb.ProducerRequest, _call: Context) -> pb.ProducerResponse:
        topic = parse_topic_name(request.topic_name)
        name = parse_name("producer_name", request.producer_name)
        reliable = request.dispatch_strategy == pb.Reliable
        if reliable:
            await self._topics.reliable(topic, create=True)
        else:
            await self._topics.nonreliable(topic, create=True)
        named = await self._references.require(topic, request.schema_ref)
        number = stable_number(str(topic), name)
        exclusive = request.producer_access_mode == pb.Exclusive
        self._producers.add(Producer(number, name, topic, reliable, exclusive))
        if not named:
            event(
                _log,
                logging.WARNING,
                "a producer sends a whole schema instead of a reference: it is ignored",
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
        if self._pending_bytes + size > self._settings.pending_bytes_max:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many messages wait to be stored: send it again later",
            )
        if size > self._settings.message_bytes_max - _SERVER_FIELDS_BYTES:
            self._require_size(_delivered(producer, request, self._context.address).ByteSize())
        self._pending_bytes += size
        try:
            if self._guard.is_free(producer.topic) is not True:
                await self._require_schema(producer.topic, request)
            await self._accept(producer, request)
        finally:
            self._pending_bytes -= size
        MESSAGES.add()
        MESSAGE_BYTES.add(len(request.payload))
        return pb.MessageResponse(request_id=request.request_id)

    async def _require_schema(self, topic: TopicName, request: pb.StreamMessage) -> None:
        """Raises SchemaMismatch or InvalidPayload if the topic refuses the message."""
        number = request.schema_id if request.HasField("schema_id") else None
        version = request.schema_version if request.HasField("schema_version") else None
        if self._guard.is_quick(topic, request.payload, version):
            self._guard.check(topic, number, version, request.payload)
            return
        await asyncio.to_thread(self._guard.check, topic, number, version, request.payload)

    def _require_size(self, size: int) -> None:
        most = self._settings.message_bytes_max
        if size > most:
            raise MessageTooLarge(
                f"the message has {size} bytes with all its fields; at most {most} are allowed "
                "(broker.message_bytes_max)"
            )

    async def _known_again(self, request: pb.StreamMessage) -> Producer:
        """The producer of an earlier run of the server, if the message names it rightly."""
        number = request.msg_id.producer_id
        try:
            topic = parse_topic_name(request.msg_id.topic_name)
            name = parse_name("producer_name", request.producer_name)
        except UsageError:
            topic, name = None, ""
        if topic is None or stable_number(str(topic), name) != number:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"there is no producer {number}: create it first"
            )
        reliable = await self._topics.delivery(topic)
        if reliable is None:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"there is no topic {topic}: create the producer again"
            )
        return self._producers.add(Producer(number, name, topic, reliable))

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


def _delivered(producer: Producer, request: pb.StreamMessage, address: str) -> pb.StreamMessage:
    """The message as consumers get it, with the longest offset that there is.

    The fields that the server sets can make it larger than it came. A message that is too large to
    be delivered would block every subscription of its topic.
    """
    request.msg_id.producer_id = producer.number
    request.msg_id.topic_name = str(producer.topic)
    request.msg_id.broker_addr = address
    request.msg_id.topic_offset = OFFSET_MAX
    request.publish_time = request.publish_time or int(time.time() * 1000)
    request.producer_name = producer.name
    return request


def _publish(fanout: FanoutTopic, message: StreamMessage, request: pb.StreamMessage) -> None:
    request.msg_id.producer_id = message.msg_id.producer_id
    request.msg_id.topic_name = message.msg_id.topic_name
    request.msg_id.broker_addr = message.msg_id.broker_addr
    request.msg_id.topic_offset = 0
    request.publish_time = message.publish_time
    request.producer_name = message.producer_name
    fanout.publish(request.SerializeToString(), message.routing_key)


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
