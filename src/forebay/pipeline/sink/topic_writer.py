"""`Door`: the way to a topic's owner, through which the sink appends.

One process owns a topic at a time, and only it can append. `LocalDoor` makes the process that
commits a batch the owner for as long as that takes: it opens the store, and closes it again.
`StoreDoor` is the door inside a process that owns the topics already, such as a server: there
other producers append to the same topics meanwhile, and the rows of a batch stay in their order
with messages of others between them.

What a caller gets wrong: two commits of one sink at the same time. `LocalDoor` rules them out, as
it owns the topics alone; with `StoreDoor` its user has to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Protocol, Self

from forebay.errors import LogLocked, LostOffsets, TopicOwned, UsageError
from forebay.format.names import TopicName
from forebay.pipeline.sink.marks import MARK, Position, parse_mark
from forebay.settings import StoreSettings
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView

_TOPICS_MAX: Final = 10_000
"""Of one batch: each is an open log while the batch is appended."""


OWNED_SECONDS_MAX: Final = 30.0
"""How long a topic that another process owns is waited for."""
_LOOK_SECONDS: Final = 0.1


class Door(Protocol):
    """An owner of topics. Not thread-safe."""

    def end(self, topic: TopicName) -> int:
        """The topic's next offset; everything before it is synced. The topic is made if needed.

        From then on nobody but this door's process appends to the topic, until it is closed, and
        nobody but this door appends messages of the sink.
        """

    def start(self, topic: TopicName) -> int:
        """The oldest offset that can be read."""

    def last(self, topic: TopicName, sink_id: str, start: int) -> Position | None:
        """Of the sink's messages at or after `start`, the last one's position."""

    def append(
        self,
        topic: TopicName,
        payloads: Sequence[bytes],
        attributes: Sequence[dict[str, str]],
        keys: Sequence[str | None],
    ) -> None:
        """Appends in this order; they count after `flush`."""

    def flush(self) -> None:
        """Returns when everything appended through this door is synced."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def connect_door(settings: StoreSettings) -> Door:
    """A door to the topics of a store that no server owns."""
    return LocalDoor(settings)


class StoreDoor:
    """Appends through a store that is open, and stays so. Not thread-safe.

    A topic is held from its first use on: if its log stops in between, everything after that
    fails, and nothing is appended behind a hole.
    """

    def __init__(self, store: Store, *, wait_seconds: float = OWNED_SECONDS_MAX) -> None:
        self._store = store
        self._wait_seconds = wait_seconds
        self._topics: dict[TopicName, Topic] = {}

    def end(self, topic: TopicName) -> int:
        opened = self._topic(topic)
        opened.flush()
        return opened.watermarks().synced

    def start(self, topic: TopicName) -> int:
        return self._topic(topic).start_offset

    def last(self, topic: TopicName, sink_id: str, start: int) -> Position | None:
        opened = self._topic(topic)
        end = self.end(topic)
        at, found = max(start, opened.start_offset), None
        while at < end:
            try:
                with opened.read(at, end=end) as reader:
                    for message in reader:
                        at = message.offset + 1
                        found = parse_mark(message.attributes.get(MARK), sink_id) or found
                    break
            except LostOffsets as lost:
                at = lost.end
        return found

    def append(
        self,
        topic: TopicName,
        payloads: Sequence[bytes],
        attributes: Sequence[dict[str, str]],
        keys: Sequence[str | None],
    ) -> None:
        self._topic(topic).append_many(payloads, attributes, keys)

    def flush(self) -> None:
        for topic in self._topics.values():
            topic.flush()

    def close(self) -> None:
        """Lets go of the topics, which stay open. Idempotent."""
        self._topics.clear()

    def _topic(self, name: TopicName) -> Topic:
        found = self._topics.get(name)
        if found is None:
            if len(self._topics) >= _TOPICS_MAX:
                raise UsageError(f"a batch for more than {_TOPICS_MAX} topics: write it in parts")
            found = self._topics[name] = self._opened(name)
        return found

    def _opened(self, name: TopicName) -> Topic:
        """Another sink owns a topic for one batch alone: it is waited for."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                return self._store.topic(str(name))
            except (LogLocked, TopicOwned) as error:
                if time.monotonic() >= deadline:
                    raise TopicOwned(self._who_owns(name, error)) from error
            time.sleep(_LOOK_SECONDS)

    def _who_owns(self, name: TopicName, error: LogLocked | TopicOwned) -> str:
        with StoreView(self._store.settings) as view:
            tiers = view.tiers()
            owner = None if tiers is None else tiers.catalog.owner(name)
        who = "another process" if owner is None else owner.name
        return (
            f"the sink cannot append to {name}, which {who} owns: close the topic there, then run "
            f"the write again. The rows were not appended ({error})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LocalDoor(StoreDoor):
    """Owns the topics itself, in this process, from their first use to its close."""

    def __init__(self, settings: StoreSettings, *, wait_seconds: float = OWNED_SECONDS_MAX) -> None:
        # Uploading is for whoever owns the topics for longer, and for the pipeline.
        quiet = replace(settings, uploader=replace(settings.uploader, enabled=False))
        super().__init__(Store(quiet), wait_seconds=wait_seconds)

    def close(self) -> None:
        """Gives the topics up. Idempotent."""
        super().close()
        self._store.close()
