"""Where a stream of messages reads from: the topic as its owner has it, or as others see it.

The owner's has the live end, and is what a follower needs. A view opens and changes nothing: it
serves who reads a topic that is not open here, or that cannot be, because the disk is full, say.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from forebay.admin.site import Site
from forebay.errors import UnknownTopic
from forebay.format.frame import Scan
from forebay.format.names import TopicName
from forebay.topic.store import Topic
from forebay.topic.view import TopicView
from forebay.wal.reader import LogReader
from forebay.wal.watermarks import Visibility


class Frames(Protocol):
    """A reader of pieces."""

    async def next_frames(self) -> Scan | None:
        """The next piece, valid until the next one is asked for; None at the end."""

    def close(self) -> None:
        """Ends it, also while it waits."""


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def start(self) -> int:
        """The oldest offset."""

    def end(self, visibility: Visibility) -> int:
        """The offset after the newest message that is visible so."""

    def read(self, start: int, end: int | None, visibility: Visibility) -> Frames:
        """OffsetOutOfRange if the start is not in the log."""


class OwnedTopic:
    """`threads` read what is not in memory, here and below."""

    def __init__(self, topic: Topic, threads: Executor) -> None:
        self._topic = topic
        self._threads = threads
        self.name = topic.name

    @property
    def start(self) -> int:
        return self._topic.start_offset

    def end(self, visibility: Visibility) -> int:
        marks = self._topic.watermarks()
        return marks.appended if visibility == "buffered" else marks.synced

    def read(self, start: int, end: int | None, visibility: Visibility) -> Frames:
        return self._topic.stream(start, end=end, visibility=visibility, threads=self._threads)


class ViewedTopic:
    def __init__(self, view: TopicView, threads: Executor) -> None:
        self._view = view
        self._threads = threads
        self.name = str(view.topic)
        self.start = view.start_offset

    def end(self, visibility: Visibility) -> int:  # noqa: ARG002  # a view sees what is synced
        return self._view.end_offset

    def read(
        self,
        start: int,
        end: int | None,
        visibility: Visibility,  # noqa: ARG002
    ) -> Frames:
        return _OnThreads(self._view.reader(start, end), self._threads)


class _OnThreads:
    """A reader of a view, whose every piece is read on a thread."""

    def __init__(self, reader: LogReader, threads: Executor) -> None:
        self._reader = reader
        self._threads = threads
        self._pieces = reader.frames()

    async def next_frames(self) -> Scan | None:
        read = partial(next, self._pieces, None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def close(self) -> None:
        self._reader.close()


def find_source(site: Site, name: TopicName, threads: Executor, *, follow: bool) -> Source:
    """UnknownTopic if the topic is not there, and then none is made. May wait for a disk."""
    if site.settings.data is None:
        if str(name) not in site.store.topics():
            raise UnknownTopic(f"there is no topic {name}")
        return OwnedTopic(site.topic(name), threads)
    # The view has the store's own connections: it opened nothing, and is closed by nobody.
    found = site.store.view().topic(str(name))
    return OwnedTopic(site.topic(name), threads) if follow else ViewedTopic(found, threads)
