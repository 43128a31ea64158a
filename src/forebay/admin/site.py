"""`Site`: what all handlers of one server share."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from forebay.format.names import TopicName, parse_topic
from forebay.settings import StoreSettings
from forebay.topic.store import Store, Topic


@dataclass(slots=True)
class Site:
    """One server: its store, and how it goes."""

    store: Store
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    """Which run of the server this is."""
    started: float = field(default_factory=time.time)
    url: str = ""
    """Where it listens, once it does."""
    unready: str | None = None
    """Why it is not ready yet, or no longer; None when it is."""

    @property
    def settings(self) -> StoreSettings:
        return self.store.settings

    def topic(self, name: TopicName) -> Topic:
        """The topic, made if it is not there. May wait for a disk: not on the event loop."""
        return self.store.topic(str(name))


def topic_of(path: dict[str, str]) -> TopicName:
    """The topic that a request's path names."""
    return parse_topic(f"/{path['namespace']}/{path['topic']}")
