"""`danube.Discovery`, `danube.HealthCheck` and `danube.StorageService`.

A lookup answers where a topic's clients connect to: here, as there is one broker. Partitions are
exactly the topics `<topic>-part-<n>`, never other topics whose names begin alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from forebay.broker import danube_pb2 as pb
from forebay.broker.calls import Calls, Context, service
from forebay.broker.context import BrokerContext
from forebay.broker.requests import parse_topic_name
from forebay.errors import UnknownTopic, UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.limits import OFFSET_MAX

_DESCRIPTORS_MAX: Final = 4096
"""Descriptors in one response; ask again after the end of the last one for more."""


class DiscoveryService:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    async def lookup(
        self, request: pb.TopicLookupRequest, _call: Context
    ) -> pb.TopicLookupResponse:
        topic = parse_topic_name(request.topic)
        if await self._context.topics.delivery(topic) is None:
            raise UnknownTopic(f"there is no topic {topic}")
        url = f"{self._context.scheme}://{self._context.address}"
        return pb.TopicLookupResponse(
            request_id=request.request_id,
            response_type=pb.TopicLookupResponse.Connect,
            connect_url=url,
            broker_url=url,
            proxy=False,
        )

    async def partitions(
        self, request: pb.TopicLookupRequest, _call: Context
    ) -> pb.TopicPartitionsResponse:
        topic = parse_topic_name(request.topic)
        found = await self._context.topics.partitions(topic)
        return pb.TopicPartitionsResponse(request_id=request.request_id, partitions=found)

    async def health(
        self, request: pb.HealthCheckRequest, _call: Context
    ) -> pb.HealthCheckResponse:
        known = pb.HealthCheckRequest
        if request.client == known.Producer:
            healthy = self._context.producers.find(request.id) is not None
        elif request.client == known.Consumer:
            healthy = await self._context.registry.knows(request.id)
        else:
            raise UsageError(f"there is no client type {request.client}")
        response = pb.HealthCheckResponse
        return response(status=response.OK if healthy else response.CLOSE)

    async def descriptors(
        self, request: pb.ListSegmentDescriptorsRequest, _call: Context
    ) -> pb.ListSegmentDescriptorsResponse:
        topic = parse_topic_name(request.topic)
        after = request.after_offset
        if after >= OFFSET_MAX:
            raise UsageError(f"{after} is not an offset")
        found = await asyncio.to_thread(self._descriptors, topic, after + 1 if after else 0)
        return pb.ListSegmentDescriptorsResponse(segments=[_segment(each) for each in found])

    def _descriptors(self, topic: TopicName, start: int) -> Sequence[ObjectDescriptor]:
        catalog = self._context.store.catalog
        if catalog is None or catalog.record(topic) is None:
            raise UnknownTopic(f"there is no topic {topic} with objects")
        return catalog.get_object_descriptors_range(topic, start, limit=_DESCRIPTORS_MAX)


def _segment(descriptor: ObjectDescriptor) -> pb.SegmentDescriptorProto:
    return pb.SegmentDescriptorProto(
        segment_id=descriptor.object_id,
        start_offset=descriptor.start_offset,
        end_offset=descriptor.end_offset,
        size=descriptor.size,
        etag=descriptor.etag or "",
        created_at=descriptor.created_at,
    )


def services(context: BrokerContext, calls: Calls) -> Sequence[grpc.GenericRpcHandler]:
    discovery = DiscoveryService(context)
    lookup = pb.TopicLookupRequest.FromString
    health = pb.HealthCheckRequest.FromString
    listing = pb.ListSegmentDescriptorsRequest.FromString
    return [
        service(
            "danube.Discovery",
            {
                "TopicLookup": calls.unary("TopicLookup", lookup, discovery.lookup),
                "TopicPartitions": calls.unary("TopicPartitions", lookup, discovery.partitions),
            },
        ),
        service(
            "danube.HealthCheck",
            {"HealthCheck": calls.unary("HealthCheck", health, discovery.health)},
        ),
        service(
            "danube.StorageService",
            {
                "ListSegmentDescriptors": calls.unary(
                    "ListSegmentDescriptors", listing, discovery.descriptors
                )
            },
        ),
    ]
