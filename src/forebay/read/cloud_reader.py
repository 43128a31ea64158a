"""`CloudReader`: reads a range of offsets from a topic's objects.

It reads objects only, and ends after the last of them. To continue into the local log, use a reader
of the topic.

Beware: `end_inclusive` is the last offset to read, not one more. Close the iterator or the reader
when you stop early, because requests may be in flight.
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
from forebay.interrupts import holding
from forebay.read.fetch_pool import FetchPool
from forebay.read.object_stream import DescriptorSource, ObjectStream
from forebay.read.sidecar_index import SidecarIndexes
from forebay.read.verify import ReadableStore
from forebay.settings import CloudReaderSettings


class CloudReader:
    """Reads ranges of one topic. Thread-safe; each iterator belongs to one thread.

    Without a `pool` nothing is fetched ahead. With `indexes`, fewer bytes are fetched to find an
    offset inside a large object.
    """

    def __init__(
        self,
        topic: TopicName,
        store: ReadableStore,
        source: DescriptorSource,
        settings: CloudReaderSettings,
        pool: FetchPool | None,
        indexes: SidecarIndexes | None = None,
    ) -> None:
        self._topic = topic
        self._store = store
        self._source = source
        self._settings = settings
        self._pool = pool
        self._indexes = indexes
        self._lock = threading.RLock()
        self._streams: weakref.WeakSet[ObjectStream] = weakref.WeakSet()
        self._closed = False

    def stream(self, start: int, end_inclusive: int | None = None) -> ObjectStream:
        """Returns the stream that `frames` and `read_range` use, with its counters.

        Raises LogClosed after `close`.
        """
        end = None if end_inclusive is None else end_inclusive + 1
        stream = ObjectStream(
            self._topic,
            self._store,
            self._source,
            self._pool,
            self._settings,
            start,
            end,
            indexes=self._indexes,
        )
        holding(self._lock, lambda: self._streams.add(stream))
        if self._closed:
            stream.close()
            raise LogClosed(f"the reader of {self._topic} is closed")
        return stream

    def frames(self, start: int, end_inclusive: int | None = None) -> Generator[Scan]:
        """Yields scanned frames, one chunk at a time. Ends after the last object at the latest.

        See `ObjectStream.next` for the errors.
        """
        with self.stream(start, end_inclusive) as stream:
            while True:
                frames = stream.next()
                if frames is None:
                    return
                yield frames
                del frames  # release its chunk before the next one is fetched

    def read_range(self, start: int, end_inclusive: int | None = None) -> Generator[StreamMessage]:
        """Yields the messages from `start` to `end_inclusive`, or to the last object's end.

        See `ObjectStream.next` for the errors.
        """
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
        """Ends all iterators. May be called from any thread."""
        self._closed = True
        for stream in holding(self._lock, lambda: list(self._streams)):
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
