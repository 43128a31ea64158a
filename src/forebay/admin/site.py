"""`Site`: what all handlers of one server share."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.admin.watching import Watch
from forebay.format.names import TopicName, parse_topic
from forebay.settings import StoreSettings
from forebay.topic.store import Store, Topic

if TYPE_CHECKING:
    from forebay.admin.jobs import Jobs


@dataclass(slots=True)
class Site:
    """One server: its store, and how it goes."""

    store: Store
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    """Which run of the server this is."""
    store_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Which store it is, from one run to the next; of one that nobody can find again, any."""
    started: float = field(default_factory=time.time)
    url: str = ""
    """Where it listens, once it does."""
    unready: str | None = None
    """Why it is not ready yet, or no longer; None when it is."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop: streams end."""
    jobs: Jobs | None = None
    """Who runs jobs on Spark; None for a server without Spark."""
    watch: Watch = field(init=False)
    """What the page shows of the past: history, notices, the object store's answers."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.store)

    @property
    def settings(self) -> StoreSettings:
        return self.store.settings

    def topic(self, name: TopicName) -> Topic:
        """The topic, made if it is not there. May wait for a disk: not on the event loop."""
        return self.store.topic(str(name))


def topic_of(path: dict[str, str]) -> TopicName:
    """The topic that a request's path names."""
    return parse_topic(f"/{path['namespace']}/{path['topic']}")
