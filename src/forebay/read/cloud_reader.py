"""`CloudReader`: the messages of a topic's objects, from one offset to another.

It reads objects only, and ends after the last of them. For the log that goes on behind them take a
reader of the topic.

What a caller gets wrong: the end is the last offset wanted, as in Danube, not one more. Close the
iterator, or the reader, when leaving it early: requests may be under way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from types import TracebackType

from forebay.errors import LogClosed
from forebay.format.frame import Scan
from forebay.format.message import StreamMessage, decode_messages
from forebay.format.names import TopicName
from forebay.read.object_stream import DescriptorSource, FetchPool, ObjectStream, RangeStore
from forebay.settings import CloudReaderSettings


class CloudReader:
    """Any number of ranges may be read at once, each by one thread; `close` ends them all."""

    def __init__(
        self,
        topic: TopicName,
        store: RangeStore,
        source: DescriptorSource,
        settings: CloudReaderSettings,
        pool: FetchPool | None,
    ) -> None:
        self._topic = topic
        self._store = store
        self._source = source
        self._settings = settings
        self._pool = pool
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[ObjectStream] = weakref.WeakSet()
        self._closed = False

    def stream(self, start: int, end_inclusive: int | None = None) -> ObjectStream:
        """The stream that `frames` and `read_range` read, with its counters."""
        end = None if end_inclusive is None else end_inclusive + 1
        stream = ObjectStream(
            self._topic, self._store, self._source, self._pool, self._settings, start, end
        )
        with self._lock:
            if self._closed:
                raise LogClosed(f"the reader of {self._topic} is closed")
            self._streams.add(stream)
        return stream

    def frames(self, start: int, end_inclusive: int | None = None) -> Generator[Scan]:
        """Scanned frames, a chunk's at a time, up to the last object at most."""
        with self.stream(start, end_inclusive) as stream:
            while True:
                frames = stream.next()
                if frames is None:
                    return
                yield frames
                del frames  # else its chunk stays while the next one is fetched

    def read_range(self, start: int, end_inclusive: int | None = None) -> Generator[StreamMessage]:
        """The messages from `start` to `end_inclusive`, up to the last object at most."""
        with self.stream(start, end_inclusive) as stream:
            while True:
                frames = stream.next()
                if frames is None:
                    return
                messages = decode_messages(frames)
                del frames
                yield from messages
                del messages

    def close(self) -> None:
        """Ends all iterations."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def __enter__(self) -> CloudReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
