"""`Topics`: the topics as the broker knows them, reliable and non-reliable.

A reliable topic is a stored topic. A non-reliable one has no log: its messages go to the consumers
that are connected, and nowhere else. A topic is one or the other, as its first producer asked.

A partition `<topic>-part-<n>` is a topic of its own. A plain topic and partitions of the same base
name exclude each other, because `<topic>` and `<topic>-part-0` would be the same partition.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from forebay.catalog.nonreliable import (
    create_nonreliable,
    find_nonreliable,
    nonreliable_topics,
)
from forebay.dispatch.fanout import FanoutTopic
from forebay.errors import TopicConflict, TopicKindConflict, UnknownTopic
from forebay.format.names import TopicName
from forebay.settings import BrokerSettings
from forebay.topic.storage import WalStorage
from forebay.topic.store import Store

_PART: Final = "-part-"


class Topics:
    """Call every method in the event loop of the server."""

    def __init__(
        self, store: Store, settings: BrokerSettings, fanouts: dict[TopicName, FanoutTopic]
    ) -> None:
        """`fanouts` are the non-reliable topics in use."""
        self._store = store
        self._settings = settings
        self._storages: dict[TopicName, WalStorage] = {}
        self._fanouts = fanouts

    # -- producing ------------------------------------------------------------------------------

    async def reliable(self, topic: TopicName, *, create: bool) -> WalStorage:
        """Returns the open topic. With `create`, creates it if it does not exist and may be.

        Raises UnknownTopic, and TopicConflict if it is non-reliable or excluded by another topic.
        """
        storage = self._storages.get(topic)
        if storage is not None and not storage.wal.ended:
            return storage
        storage = await asyncio.to_thread(self._open, topic, create)
        self._storages[topic] = storage
        return storage

    def _open(self, topic: TopicName, create: bool) -> WalStorage:
        if not self._store.exists(str(topic)):
            if self._is_nonreliable(topic):
                raise TopicKindConflict(f"{topic} is non-reliable: produce to it as such")
            self._require_creatable(topic, create)
        return self._store.storage(str(topic))

    def _require_creatable(self, topic: TopicName, create: bool) -> None:
        if not (create and self._settings.auto_create_topics):
            raise UnknownTopic(f"there is no topic {topic}: create it first")
        for other in self._excluding(topic):
            raise TopicConflict(
                f"{topic} cannot be created, because {other} exists: a topic is either partitioned "
                "or not"
            )

    def _excluding(self, topic: TopicName) -> list[str]:
        """A topic that excludes this one: its base name, or a partition of it."""
        base = topic.base
        if topic.is_partition:
            return [base] if self._exists(base) else []
        return self._partitions(topic)[:1]

    async def nonreliable(self, topic: TopicName, *, create: bool) -> FanoutTopic:
        """Returns the non-reliable topic; see `reliable`."""
        found = self._fanouts.get(topic)
        if found is None:
            await asyncio.to_thread(self._find_nonreliable, topic, create)
            found = self._fanouts.setdefault(topic, FanoutTopic(str(topic)))
        return found

    def _find_nonreliable(self, topic: TopicName, create: bool) -> None:
        if self._is_nonreliable(topic):
            return
        if self._store.exists(str(topic)):
            raise TopicKindConflict(f"{topic} is reliable: produce to it as such")
        self._require_creatable(topic, create)
        catalog = self._store.catalog
        if catalog is not None:
            create_nonreliable(catalog, topic, int(time.time() * 1000))

    def fanout(self, topic: TopicName) -> FanoutTopic | None:
        """The non-reliable topic, if it is in use here."""
        return self._fanouts.get(topic)

    def _is_nonreliable(self, topic: TopicName) -> bool:
        if topic in self._fanouts:
            return True
        catalog = self._store.catalog
        return catalog is not None and find_nonreliable(catalog, topic) is not None

    # -- looking up -----------------------------------------------------------------------------

    async def delivery(self, topic: TopicName) -> bool | None:
        """Whether the topic is reliable; None if there is no such topic."""
        storage = self._storages.get(topic)
        if storage is not None and not storage.wal.ended:
            return True
        if topic in self._fanouts:
            return False
        return await asyncio.to_thread(self._delivery, topic)

    def _delivery(self, topic: TopicName) -> bool | None:
        if self._store.exists(str(topic)):
            return True
        return False if self._is_nonreliable(topic) else None

    async def partitions(self, topic: TopicName) -> list[str]:
        """`[topic]` if it exists, otherwise exactly its partitions, by number."""
        if await self.delivery(topic) is not None:
            return [str(topic)]
        return await asyncio.to_thread(self._partitions, topic)

    def _exists(self, name: str) -> bool:
        topic = TopicName(*name.removeprefix("/").split("/"))
        return self._delivery(topic) is not None

    def _partitions(self, topic: TopicName) -> list[str]:
        catalog = self._store.catalog
        open_here = {at for at, each in self._storages.copy().items() if not each.wal.ended}
        found: set[TopicName] = {*open_here, *self._fanouts}
        if catalog is not None:
            found.update(catalog.topics(f"{topic.namespace}/{topic.topic}{_PART}"))
            found.update(each.name for each in nonreliable_topics(catalog))
        own = [each for each in found if each.is_partition and each.base == str(topic)]
        return [str(each) for each in sorted(own, key=lambda each: each.partition)]

    def forget(self, topic: TopicName) -> None:
        """Forgets a topic that was deleted."""
        self._storages.pop(topic, None)
