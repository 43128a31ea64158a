"""`KnownProducers`: the producers that were heard of lately, and exclusive access to topics.

A connection of gRPC cannot be told from another one, and a producer that goes away says nothing. So
a producer counts as alive while it was heard of lately: by a message or a health check.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import grpc

from forebay.broker.status import Refused
from forebay.format.names import TopicName
from forebay.limits import PRODUCERS_MAX

_EXCLUSIVE_SECONDS: Final = 30.0
"""A producer that has exclusive access and does nothing for this long loses it."""


@dataclass(slots=True)
class Producer:
    number: int
    name: str
    topic: TopicName
    reliable: bool
    exclusive: bool = False
    seen: float = 0.0
    """When it was heard of last, in monotonic time."""

    @property
    def alive(self) -> bool:
        return time.monotonic() < self.seen + _EXCLUSIVE_SECONDS


class KnownProducers:
    """The producers that are known, those used longest ago first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Producer] = OrderedDict()
        self._exclusive: dict[TopicName, int] = {}
        """The producers that have, or had, exclusive access."""

    def find(self, number: int) -> Producer | None:
        producer = self._known.get(number)
        if producer is not None:
            producer.seen = time.monotonic()
            self._known.move_to_end(number)
        return producer

    def add(self, producer: Producer) -> Producer:
        """Adds a producer, or changes one; Refused if another one has exclusive access."""
        holder = self._holder(producer.topic)
        if holder is not None and holder.number != producer.number:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{producer.topic}: the producer {holder.name!r} has exclusive access",
            )
        if producer.exclusive and self._has_others(producer):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{producer.topic} has other producers: exclusive access needs a topic without any",
            )
        producer.seen = time.monotonic()
        if producer.exclusive:
            self._exclusive[producer.topic] = producer.number
        elif self._exclusive.get(producer.topic) == producer.number:
            del self._exclusive[producer.topic]
        self._known[producer.number] = producer
        self._known.move_to_end(producer.number)
        while len(self._known) > PRODUCERS_MAX:
            self._known.popitem(last=False)
        return producer

    def _has_others(self, producer: Producer) -> bool:
        return any(
            each.topic == producer.topic and each.number != producer.number and each.alive
            for each in self._known.values()
        )

    def _holder(self, topic: TopicName) -> Producer | None:
        """The producer with exclusive access, if it is alive."""
        holder = self._known.get(self._exclusive.get(topic, 0))
        if holder is None or not holder.alive:
            self._exclusive.pop(topic, None)
            return None
        return holder
