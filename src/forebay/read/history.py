"""One topic's objects as a stream of frames: ordered, from any offset, in bounded memory.

Objects are fetched by ranged requests, some ahead (`forebay.read.ahead`), and scanned where they
lie (`forebay.read.assemble`). Everything is checked: checksums, consecutive offsets, and that an
object begins and ends as its descriptor says. After any error the stream is where its last frame
left it: ask again and it tries again, with descriptors that it asks for anew where that can help.

Memory: the chunk being read, those fetched ahead, and one frame that straddles a cut. A scan that
the caller still holds while asking for the next one comes on top.

What a caller gets wrong: None is not the end of the topic. It says that no object holds the next
offset (`offset`) yet; the log's segments may.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from types import TracebackType
from typing import Final, Protocol

from forebay.errors import (
    CorruptFrame,
    ForebayError,
    LogClosed,
    MissingData,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key
from forebay.format.resync import next_frame
from forebay.logs import event
from forebay.read.ahead import DescriptorSource, ReadAhead, Taken
from forebay.read.assemble import Damage, FrameAssembler
from forebay.read.fetch import FetchCancelled, FetchPool
from forebay.read.metrics import (
    BYTES_FETCHED,
    BYTES_USED,
    OBJECTS_READ,
    SKIPPED,
    count_error,
    counted_request,
)
from forebay.read.ranges import Chunk, ObjectRange, object_range
from forebay.settings import CloudReaderSettings

__all__ = ["DescriptorSource", "ObjectStream", "RangeStore"]

_log: Final = logging.getLogger("forebay.read")


class RangeStore(Protocol):
    """What is needed of `forebay.objects.backend.Backend`."""

    @property
    def name(self) -> str: ...

    def get_range(self, key: str, start: int, end: int) -> Buffer: ...


class ObjectStream:
    """`next` belongs to one thread; `close` may come from any."""

    def __init__(
        self,
        topic: TopicName,
        store: RangeStore,
        source: DescriptorSource,
        pool: FetchPool | None,
        settings: CloudReaderSettings,
        start: int,
        end: int | None = None,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        """Offsets from `start` up to, not including, `end`; `chunk_bytes` overrides the setting.

        Without a pool nothing is fetched ahead, and the thread that reads does it itself.
        """
        self._topic = topic
        self._store = store
        self._source = source
        self._lenient = settings.lenient
        self._chunk_bytes = chunk_bytes or settings.fetch_chunk_size
        self._end = end
        self._ahead = ReadAhead(
            source,
            self._fetch,
            pool,
            chunk_bytes=self._chunk_bytes,
            chunks_max=settings.read_ahead_chunks,
            start=start,
            end=end,
        )
        self._object: ObjectDescriptor | None = None
        self._frames: FrameAssembler | None = None
        self._ready: deque[Scan] = deque()
        self._damage: Damage | None = None
        self._whole = False
        self._gone: set[str] = set()
        self._busy = threading.Lock()
        self._counting = threading.Lock()
        self._closed = False
        self._torn = False
        self.offset = start
        """Of the next message."""
        self.bytes_fetched = 0
        self.bytes_used = 0
        self.skipped = 0
        """Messages that were stepped over."""

    @property
    def window(self) -> int:
        """How many chunks ahead are fetched at present."""
        return self._ahead.window

    def next(self, limit: int | None = None) -> Scan | None:
        """The next frames, at most `limit`; None at the end, after the last object, or if closed.

        CorruptFrame for damage, MissingData for an object that is named and not there, what
        `DescriptorSource.missing` says for a gap, ServiceError where the store or the catalog
        fails.
        """
        try:
            with self._busy:
                return None if self._closed else self._next(limit)
        except FetchCancelled:
            if not self._closed:
                raise LogClosed(f"{self._topic}: the store was closed while it was read") from None
            return None
        except ForebayError as error:
            count_error(error)
            raise
        finally:
            if self._closed:
                self._drop_if_idle()

    def _next(self, limit: int | None) -> Scan | None:
        if self._torn:  # an interrupt came in the middle: what was fetched may be half used
            self._restart()
        self._torn = True
        try:
            frames = self._hand_out(limit) if self._more() else None
        except (ForebayError, FetchCancelled):
            self._torn = False
            raise
        self._torn = False
        return frames

    def close(self) -> None:
        """Ends the stream and drops what it holds; a request under way ends by itself, unheard."""
        self._closed = True
        self._ahead.close()
        self._drop_if_idle()

    def __enter__(self) -> ObjectStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drop_if_idle(self) -> None:
        # Whoever is in `next` drops everything on the way out.
        if self._busy.acquire(blocking=False):
            try:
                self._forget()
            finally:
                self._busy.release()

    def _forget(self) -> None:
        self._ready.clear()
        self._object = None
        self._frames = None
        self._damage = None
        self._whole = False

    # ---- frames ----

    def _more(self) -> bool:
        """Whether frames are ready to be handed out, fetching until some are."""
        while not self._ready:
            if self._finished():
                self._restart()
                return False
            try:
                if self._damage is not None:
                    self._step_over(self._damage)
                    continue
                taken = self._ahead.take()
            except _ObjectGone as gone:
                self._replan(gone)
                continue
            except _ObjectShort as short:
                self._cut_short(short.chunk)
                continue
            if taken is None:
                self._forget()
                return False
            self._feed(taken)
        return True

    def _finished(self) -> bool:
        """Whether the end is reached; an object whose last message is wanted is read to its end."""
        if self._end is None or self.offset < self._end:
            return False
        if self._object is None or self._end < self._object.next_offset:
            return True
        return self._whole and self._damage is None

    def _hand_out(self, limit: int | None) -> Scan:
        assert limit is None or limit > 0
        frames = self._ready[0]
        assert self._lenient or frames.offsets[0] == self.offset, "what is read has no gaps"
        if limit is None or limit >= len(frames):
            self._ready.popleft()
        else:
            self._ready[0] = frames.part(limit, len(frames))
            frames = frames.part(0, limit)
        self.offset = frames.offsets[-1] + 1
        used = frames.safe_length - frames.positions[0] + HEADER_BYTES
        self.bytes_used += used
        BYTES_USED.add(used)
        return frames

    def _feed(self, taken: Taken) -> None:
        chunk = taken.chunk
        descriptor = chunk.range.descriptor
        if chunk.first:
            OBJECTS_READ.add()
        frames = self._assembler(chunk)
        stop = descriptor.next_offset
        if self._end is not None:
            stop = min(stop, self._end)
        for found in frames.feed(taken.data):
            first = found.offsets[0]
            at, until = max(self.offset - first, 0), min(stop - first, len(found))
            if at < until:
                self._ready.append(found.part(at, until))
                self._gone.clear()
        self._whole = chunk.last
        if chunk.last:
            frames.require_end(chunk.range.next_offset)
        self._damage = frames.damage

    def _assembler(self, chunk: Chunk) -> FrameAssembler:
        """The one that the chunk is due in."""
        if chunk.first:
            wanted = chunk.range
            self._object = wanted.descriptor
            self._frames = FrameAssembler(wanted.offset, wanted.start, wanted.descriptor.size)
        assert self._frames is not None, "chunks come in order, the first of an object first"
        return self._frames

    # ---- trouble ----

    def _restart(self) -> None:
        """Forgets everything that was fetched: the next call goes on at `offset`."""
        self._ahead.seek(self.offset)
        self._forget()

    def _replan(self, gone: _ObjectGone) -> None:
        """Asks for the descriptors anew; raises if they name the same object again."""
        object_id = gone.descriptor.object_id
        self._restart()
        if object_id not in self._gone:
            self._gone.add(object_id)
            return
        self._gone.clear()
        raise MissingData(
            f"{self._key(gone.descriptor)} is not in {self._store.name}, though its descriptor is "
            f"in the catalog (offset {self.offset})"
        ) from gone

    def _cut_short(self, chunk: Chunk) -> None:
        frames = self._assembler(chunk)
        size = chunk.range.descriptor.size
        self._damage = Damage(
            f"the object is shorter than the {size} bytes of its descriptor",
            frames.position,
            frames.offset,
        )

    def _step_over(self, damage: Damage) -> None:
        """Raises, or finds the next valid frame where the reader is lenient."""
        descriptor = self._object
        assert descriptor is not None, "damage is in an object"
        if not self._lenient:
            self._restart()
            raise CorruptFrame(
                damage.reason,
                file=self._key(descriptor),
                position=damage.position,
                offset=damage.offset,
            )
        found = self._salvaged(descriptor, damage)
        self._forget()
        if found is None:
            resumed = descriptor.next_offset
            self._ahead.seek(resumed)
        else:
            resumed, position = found
            rest = object_range(descriptor, resumed, self._end)
            self._ahead.seek(resumed, rest._replace(offset=resumed, start=position))
        self._note_skipped(descriptor, damage, resumed)

    def _note_skipped(self, descriptor: ObjectDescriptor, damage: Damage, resumed: int) -> None:
        stop = resumed if self._end is None else min(resumed, self._end)
        lost = max(stop - self.offset, 0)
        self.offset += lost
        self.skipped += lost
        SKIPPED.add(lost)
        event(
            _log,
            logging.WARNING,
            "damaged frames skipped",
            topic=self._topic,
            object=descriptor.object_id,
            reason=damage.reason,
            position=damage.position,
            offset=damage.offset,
            skipped=lost,
            resumed_at=resumed,
        )

    def _salvaged(self, descriptor: ObjectDescriptor, damage: Damage) -> tuple[int, int] | None:
        def read(start: int, end: int) -> Buffer:
            return self._fetch(Chunk(ObjectRange(descriptor, 0, start, end), start, end))

        try:
            return next_frame(descriptor, damage.offset, damage.position, read, self._chunk_bytes)
        except _ObjectShort:  # what is there of the last chunk is given up with the rest
            return None

    # ---- requests ----

    def _key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(self._topic, descriptor.object_id)

    def _fetch(self, chunk: Chunk) -> Buffer:
        """Runs on the pool's threads."""
        descriptor = chunk.range.descriptor
        try:
            with counted_request():
                data = self._store.get_range(self._key(descriptor), chunk.start, chunk.end)
        except ObjectMissing as error:
            raise _ObjectGone(descriptor) from error
        except (ServiceUnavailable, ServiceRefused):
            raise
        except ServiceError as error:
            raise _ObjectShort(chunk) from error
        BYTES_FETCHED.add(len(data))
        with self._counting:
            self.bytes_fetched += len(data)
        if len(data) != chunk.end - chunk.start:
            raise _ObjectShort(chunk)
        return data


class _ObjectGone(Exception):
    def __init__(self, descriptor: ObjectDescriptor) -> None:
        super().__init__(descriptor.object_id)
        self.descriptor = descriptor


class _ObjectShort(Exception):
    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk.range.descriptor.object_id)
        self.chunk = chunk
