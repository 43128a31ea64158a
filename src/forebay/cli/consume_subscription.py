"""`forebay consume --subscription`: messages that are acknowledged after they were printed.

A message is acknowledged once it was written to standard output and flushed. If the command ends
before that, whatever the reason, the message is delivered again.

It goes through the broker of the server that --url names, or of the one that runs on the data
directory. Without a server the command opens the store and delivers the messages itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from forebay.cli.message_format import Facts
from forebay.cli.options import client_of, open_view, viewed_topic
from forebay.errors import UnknownSubscription, UsageError
from forebay.format.subscription import KINDS
from forebay.settings import ServerAddress, StoreSettings

if TYPE_CHECKING:
    from forebay.format.names import TopicName

_RECONNECT_SECONDS: Final = 30.0
_ANY_HOST: Final = {"0.0.0.0", "::"}  # noqa: S104  # what is listened on, not connected to


@dataclass(frozen=True, slots=True)
class Subscriber:
    """The options of `consume` for a subscription."""

    topic: TopicName
    subscription: str
    kind: str | None
    """None: as the subscription is, or exclusive."""
    consumer: str | None
    filters: tuple[str, ...]
    limit: int | None

    @property
    def name(self) -> str:
        return self.consumer or f"{socket.gethostname()[:64]}-{os.getpid()}"


def consume_subscription(
    server: ServerAddress | None,
    settings: StoreSettings,
    wanted: Subscriber,
    line: Callable[[Facts], bytes],
) -> None:
    """Prints messages until the user interrupts, or as many as wanted; exit code 130 after that."""
    try:
        if server is not None:
            _through(server, settings, wanted, line)
        else:
            _here(settings, wanted, line)
    except KeyboardInterrupt:
        sys.exit(130)


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


# ---- through a server -------------------------------------------------------------------------


def _through(
    server: ServerAddress,
    settings: StoreSettings,
    wanted: Subscriber,
    line: Callable[[Facts], bytes],
) -> None:
    from forebay.broker.client import connect
    from forebay.cli.messages import message_facts
    from forebay.client.address import TOKEN_VARIABLE

    address, secure = _broker_of(server)
    kind = wanted.kind or _known_kind(server, wanted)
    token = settings.broker.token or os.environ.get(TOKEN_VARIABLE) or None
    with (
        connect(
            address,
            token=token,
            tls=secure,
            ca_file=settings.admin.ca_file if secure else None,
            timeout=_RECONNECT_SECONDS,
        ) as client,
        client.consumer(
            str(wanted.topic),
            wanted.subscription,
            type=kind.replace("-", "_"),
            name=wanted.name,
            key_filters=wanted.filters,
        ) as consumer,
    ):
        for message in islice(consumer, wanted.limit):
            _print(line(message_facts(message)))
            consumer.ack(message)


def _broker_of(server: ServerAddress) -> tuple[str, bool]:
    """The address of the server's broker, and whether it uses TLS."""
    with client_of(server) as client:
        found = client.json("GET", "/healthz").get("broker")
    if not isinstance(found, str):
        raise UsageError(
            f"the server at {server.url} runs no broker, which delivers subscriptions: set "
            "broker.enabled, and start it again"
        )
    parts = urlsplit(found)
    host, port = parts.hostname or "", parts.port
    if host in _ANY_HOST:
        host = urlsplit(server.url).hostname or host
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), parts.scheme == "https"


def _known_kind(server: ServerAddress, wanted: Subscriber) -> str:
    from forebay.client.http import topic_path

    path = topic_path(wanted.topic, "subscriptions", wanted.subscription)
    with client_of(server) as client:
        try:
            return str(client.json("GET", path)["type"])
        except UnknownSubscription:
            return KINDS[0]


# ---- in this process --------------------------------------------------------------------------


def _here(settings: StoreSettings, wanted: Subscriber, line: Callable[[Facts], bytes]) -> None:
    import asyncio

    import forebay

    with open_view(settings) as view:
        viewed_topic(view, str(wanted.topic))  # UnknownTopic, instead of creating one
    with forebay.open(settings) as store:
        asyncio.run(_deliver(store, settings, wanted, line))


async def _deliver(
    store: Any, settings: StoreSettings, wanted: Subscriber, line: Callable[[Facts], bytes]
) -> None:
    from forebay.dispatch.policy import SubscriptionType
    from forebay.dispatch.registry import Registry

    registry = Registry(store, settings.broker)
    try:
        await registry.load()
        kind = wanted.kind or await _stored_kind(registry, wanted)
        number = await registry.subscribe(
            wanted.topic,
            wanted.subscription,
            SubscriptionType(KINDS.index(kind)),
            wanted.name,
            wanted.filters,
        )
        _, consumer = await registry.connect(number, _encoded)
        subscription = await registry.find(wanted.topic, wanted.subscription)
        left = wanted.limit
        while left is None or left > 0:
            for facts in map(json.loads, islice(await consumer.take(), left)):
                _print(line(facts))
                subscription.ack(facts["offset"], facts["offset"] + 1)
                left = None if left is None else left - 1
    finally:
        await registry.close()


async def _stored_kind(registry: Any, wanted: Subscriber) -> str:
    try:
        found = await registry.find(wanted.topic, wanted.subscription)
    except UnknownSubscription:
        return KINDS[0]
    return KINDS[found.window.kind]


def _encoded(delivery: Any) -> bytes:
    from forebay.cli.messages import message_facts

    return json.dumps(message_facts(delivery.message)).encode()
