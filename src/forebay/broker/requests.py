"""Checks of what clients send: names of topics, producers, consumers and subscriptions."""

from __future__ import annotations

from functools import lru_cache

from forebay.errors import UsageError
from forebay.format.names import TopicName, parse_topic
from forebay.limits import CLIENT_NAME_BYTES_MAX, TOPIC_NAMES_KNOWN_MAX


@lru_cache(TOPIC_NAMES_KNOWN_MAX)  # every acknowledgement names its topic
def parse_topic_name(name: str) -> TopicName:
    """Parses `/namespace/topic`. Clients send nothing shorter, and compare names byte for byte."""
    topic = parse_topic(name)
    if str(topic) != name:
        raise UsageError(f"{name!r} is not a full topic name: write /namespace/topic")
    return topic


def parse_name(field: str, name: str) -> str:
    """Returns the name of a producer, consumer or subscription, if it is not empty or too long."""
    if not 0 < len(name.encode()) <= CLIENT_NAME_BYTES_MAX:
        raise UsageError(f"{field} must have 1 to {CLIENT_NAME_BYTES_MAX} bytes")
    return name
