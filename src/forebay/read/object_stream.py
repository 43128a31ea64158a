"""`ObjectStream`: the frames of one topic's objects, in order, from any offset, in bounded memory.

`forebay.read.plan` decides which bytes to fetch next; this module fetches them. A stream begins
with one chunk of read-ahead and doubles it while it is read in order. So a reader of one message
fetches little, and a sequential reader soon never waits. It checks every checksum, that offsets are
consecutive, and that each object begins and ends as its descriptor says. After an error the stream
stays at its next offset, and the next call tries again, with new descriptors if they can help.

An object with another etag than its descriptor says may be a copy, or an object of another topic.
It is read whole once, and its hash decides. This is not done for a descriptor without a hash. An
index is a hint: where it leads to no frame, the object is read from its start.

Memory: the chunk being read, the chunks fetched ahead, and one frame that spans two chunks. In a
compressed object it is one block, and in addition the decompressed block and those that are
decompressed ahead of it (`forebay.read.decoding`). A scan that the caller still holds during the
next call adds its chunk or block.

Beware: None is not the end of the topic. It means that no object holds the next offset (`offset`)
yet. The log's segments may hold it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Protocol, TypeVar

from forebay.errors import (
    CorruptFrame,
    ForebayError,
    LogClosed,
    MissingData,
    ObjectChanged,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.blocks import BlockAssembler, ObjectDecoder, next_place, object_decoder
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, Corruption, FrameTooLarge, Scan
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key
from forebay.format.pulsar.frames import EntryAssembler
from forebay.interrupts import give_up, held, holding
from forebay.limits import DESCRIPTOR_INDEX_ENTRIES
from forebay.logs import event
from forebay.objects.backend import ObjectMeta
from forebay.read.decoding import decoded
from forebay.read.fetch_pool import FetchCancelled, FetchFuture, FetchPool
from forebay.read.metrics import (
    BYTES_FETCHED,
    BYTES_USED,
    OBJECTS_READ,
    OTHER_ETAGS,
    SKIPPED,
    WRONG_INDEXES,
    count_error,
    counted_request,
)
from forebay.read.plan import (
    DESCRIPTOR_PAGE,
    Chunk,
    KnownObjects,
    ObjectRange,
    Position,
    object_range,
    plan,
    position_after,
    position_of,
)
from forebay.read.sidecar_index import SidecarIndexes
from forebay.read.verify import Fault, FaultKind, ReadableStore, examine_object, require_known_form
from forebay.settings import CloudReaderSettings

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("forebay.read")

_PROVEN_MAX: Final = 10_000
_proven: Final[dict[tuple[str, str, str], str | None]] = {}
"""The etags of objects whose content was compared: by store, key and content hash. Readers of this
process need not compare them again."""


class DescriptorSource(Protocol):
    """The part of the catalog that streams use. Thread-safe."""

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        """Returns the descriptors that overlap `start..end` (end not included), oldest first."""

    def missing(self, offset: int) -> ForebayError | None:
        """Returns the error to raise if no object holds `offset` but a later object exists.

        None if there is no message with that offset, and readers may jump over it: the stream ends
        there as it does after the last object.
        """


class ObjectStream:
    """The frames of a range of offsets. One thread uses it, but any thread may call `close`."""

    def __init__(
        self,
        topic: TopicName,
        store: ReadableStore,
        source: DescriptorSource,
        pool: FetchPool | None,
        settings: CloudReaderSettings,
        start: int,
        end: int | None = None,
        *,
        chunk_bytes: int | None = None,
        indexes: SidecarIndexes | None = None,
    ) -> None:
        """Reads the offsets `start..end`, `end` not included; None: up to the last object.

        `chunk_bytes` overrides `fetch_chunk_size`. Without a pool, the calling thread fetches each
        chunk when it is needed, and nothing is fetched ahead. `indexes` finds positions inside
        large objects; without it, the entries in the descriptors have to do.
        """
        self._topic = topic
        self._store = store
        self._source = source
        self._pool, self._settings = pool, settings
        self._lenient = settings.lenient
        self._chunk_bytes = chunk_bytes or settings.fetch_chunk_size
        self._ahead_max = 0 if pool is None else settings.read_ahead_chunks
        self._bytes_max: int | None = None
        self._request_bytes, self._window_max = self._chunk_bytes, self._ahead_max
        self._indexes = indexes
        self._distrusted: set[str] = set()
        """Objects whose sidecars turned out to have a wrong index."""
        self._end = end
        self._busy = threading.RLock()
        """Held by `next` and `seek`."""
        self._stale = False
        """Whether fetched data must be dropped before the next frames are returned."""
        self._closed = False
        # Requests in flight, in order, and the position at which fetching continues after them.
        self._fetches: deque[tuple[Chunk, FetchFuture[Buffer]]] = deque()
        self._position = Position(start)
        self._known = KnownObjects()
        self._page: FetchFuture[list[ObjectDescriptor]] | None = None
        self._window = min(1, self._window_max)
        self._sequential = False
        # Frames that are ready, the object that is being read, and a chunk that may hold more.
        self._ready: deque[Scan] = deque()
        self._object: ObjectDescriptor | None = None
        self._frames: ObjectDecoder | None = None
        self._decoding: tuple[Chunk, Iterator[Scan]] | None = None
        self._missing: set[str] = set()
        """Objects that were found missing since the last frames were returned."""
        self._other: _OtherEtag | None = None
        """An object with another etag, to be compared before it is read."""
        self._etags: dict[str, str | None] = {}
        """The etags of objects that may be read although their descriptors name others."""
        self._range: ObjectRange | None = None
        """The range of the object that is being read."""
        self._misled = False
        """Whether the bytes of that range do not end where a frame ends."""
        self._unindexed: set[str] = set()
        """Objects whose index was wrong; they are read from their start."""
        self._damaged: set[str] = set()
        """Objects that are damaged, although their index was doubted first."""
        self.offset = start
        """The offset of the next message."""
        self._counting = threading.RLock()
        self.bytes_fetched = 0
        self.bytes_used = 0
        self.skipped = 0
        """The number of damaged messages that a lenient stream skipped."""

    @property
    def window(self) -> int:
        """How many chunks are currently fetched ahead."""
        return self._window

    @property
    def closed(self) -> bool:
        return self._closed

    def next(self, limit: int | None = None) -> Scan | None:
        """Returns the next frames, at most `limit`, and waits for them if necessary.

        Returns None at the end of the range, after the last object, and after `close`. Raises
        CorruptFrame for a damaged frame (a lenient stream skips it), MissingData if an object in
        the catalog is not in the store, ForeignObject if an object has another etag and another
        content than its descriptor says, what `DescriptorSource.missing` returns for a gap,
        ServiceError if the store or the catalog fails, LogClosed if the pool was closed, and
        FrameTooLarge for a frame over the limit.
        """
        try:
            return holding(self._busy, lambda: None if self._closed else self._next(limit))
        except FetchCancelled:
            if not self._closed:
                raise LogClosed(f"{self._topic}: the store was closed during the read") from None
            return None
        except ForebayError as error:
            count_error(error)
            raise
        finally:
            if self._closed:
                self._drop_if_idle()

    def _next(self, limit: int | None) -> Scan | None:
        if self._stale:
            self._restart()
        self._stale = True  # stays so after an interrupt: fetched data may be partly used
        try:
            frames = self._pop_frames(limit) if self._fill() else None
        except (ForebayError, FetchCancelled):
            self._stale = False
            raise
        self._stale = False
        return frames

    def seek(self, start: int, end: int | None) -> None:
        """Continues with the offsets `start..end`, `end` not included."""
        holding(self._busy, lambda: self._seek(start, end))

    def _seek(self, start: int, end: int | None) -> None:
        self._stale = True
        self._missing.clear()
        self.offset, self._end = start, end

    def limit(self, bytes_max: int | None) -> None:
        """Limits the bytes in chunks: the one being read and those that are fetched ahead.

        Applies to the next requests. A limit below the size of a chunk makes the requests smaller.
        A frame that is larger than the limit raises FrameTooLarge. None removes the limit.
        """
        self._bytes_max = bytes_max
        self._request_bytes, self._window_max = self._chunk_bytes, self._ahead_max
        if bytes_max is not None:
            self._request_bytes = min(bytes_max, self._chunk_bytes)
            self._window_max = min(bytes_max // self._request_bytes - 1, self._ahead_max)
        self._window = max(min(self._window, self._window_max), min(1, self._window_max))

    def close(self) -> None:
        """Ends the stream, drops its data and cancels its requests. A waiting `next` ends too."""
        self._closed = True
        for _, future in self._fetches.copy():
            future.cancel()
        page = self._page
        if page is not None:
            page.cancel()
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
        # If a thread is in `next`, it drops everything when it returns. It may be this one, if a
        # signal handler closes the stream.
        if held(self._busy):
            return
        try:
            if self._busy.acquire(blocking=False):
                self._drop_frames()
        finally:
            give_up(self._busy)

    def _drop_frames(self) -> None:
        self._ready.clear()
        self._object = None
        self._frames = None
        self._decoding = None

    # ---- frames ----

    def _fill(self) -> bool:
        """Fetches until frames are ready; returns False if there are no more."""
        while not self._ready:
            if self._finished():
                self._restart()
                return False
            try:
                if self._other is not None:
                    self._compare_content(self._other)
                elif self._decoding is not None:
                    self._decode(*self._decoding)
                elif self._frames is not None and self._frames.corruption is not None:
                    if not self._distrust_sidecar():
                        self._step_over(self._frames.corruption)
                elif not self._read_chunk():
                    self._drop_frames()
                    return False
            except _ObjectGone as gone:
                self._replan(gone)
            except _OtherEtag as other:
                self._other = other
            except _ObjectShort as short:
                size = short.chunk.range.descriptor.size
                self._decoder(short.chunk).fail(
                    f"the object is shorter than the {size} bytes of its descriptor"
                )
        return True

    def _finished(self) -> bool:
        """Whether the end is reached. If the range ends with an object, its end is checked too."""
        if self._end is None or self.offset < self._end:
            return False
        return self._object is None or self._end < self._object.next_offset

    def _pop_frames(self, limit: int | None) -> Scan:
        assert limit is None or limit > 0
        frames = self._ready[0]
        assert self._lenient or frames.offsets[0] == self.offset, "frames have no gaps"
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

    def _decode(self, chunk: Chunk, scans: Iterator[Scan]) -> None:
        """Makes frames that the chunk completes ready, if they are in the range.

        All of them, or those of one block.
        """
        frames = self._frames
        assert frames is not None, "a chunk is decoded while its object is read"
        if isinstance(frames, BlockAssembler | EntryAssembler):
            frames.bytes_max = self._bytes_max
        stop = chunk.range.descriptor.next_offset
        if self._end is not None:
            stop = min(stop, self._end)
        for found in scans:
            first = found.offsets[0]
            at, until = max(self.offset - first, 0), min(stop - first, len(found))
            if at < until:
                self._ready.append(found.part(at, until))
                self._missing.clear()
                if isinstance(frames, BlockAssembler | EntryAssembler):
                    return
        self._decoding = None
        if chunk.last and frames.corruption is None:
            frames.require_end(chunk.range.next_offset)
            self._misled = frames.corruption is not None
            if frames.corruption is None:
                self._object = self._frames = None

    def _decoder(self, chunk: Chunk) -> ObjectDecoder:
        """Returns the decoder of the chunk's object. Chunks must come in order."""
        if chunk.first:
            wanted = self._range = chunk.range
            self._misled = False
            self._object = wanted.descriptor
            self._frames = object_decoder(
                wanted.descriptor, wanted.offset, wanted.start, self.offset
            )
        assert self._frames is not None, "chunks come in order, the first of an object first"
        return self._frames

    # ---- fetching ahead ----

    def _read_chunk(self) -> bool:
        """Waits for the next chunk and decodes it; returns False if no object holds the offset.

        Raises what the fetch raised, and the next call tries again. Raises FetchCancelled after
        `close`.
        """
        if self._bytes_max is not None and self._frames is not None:
            needed = self._frames.needed
            if needed > self._bytes_max:
                raise FrameTooLarge(needed)
        if self._sequential:
            self._window = min(2 * self._window, self._window_max)
        gap = self._fetch_ahead()
        if not self._fetches:
            self._known = KnownObjects()  # the next call requests the descriptors again
            page, self._page = self._page, None
            if page is not None:
                page.cancel()
            error = None
            if gap is not None:
                error = self._submit(partial(self._source.missing, gap)).result()
            if error is not None:
                raise error
            return False
        chunk, future = self._fetches[0]
        try:
            data = future.result()
        except Exception:
            self._drop_fetches()  # later requests may have failed in the same way
            self._position = position_of(chunk)
            raise
        self._fetches.popleft()
        self._sequential = True
        if chunk.first:
            OBJECTS_READ.add()
        ahead = self._pool is not None and self._bytes_max is None
        self._decoding = chunk, decoded(self._decoder(chunk), data, ahead=ahead)
        return True

    def _fetch_ahead(self) -> int | None:
        """Requests the next chunk and a window of chunks after it.

        Returns the offset of a gap after them, if there is one. Waits for descriptors, and raises
        their errors, only if nothing can be fetched without them.
        """
        waited = False
        while True:
            missing = max(1 + self._window - len(self._fetches), 0)
            planned = plan(
                self._position,
                self._known,
                end=self._end,
                chunk_bytes=self._request_bytes,
                count=missing,
            )
            for chunk in planned.chunks:
                self._start_fetch(chunk)
            due = not self._fetches and planned.gap is None
            if due and not waited and self._known.complete:
                self._known = KnownObjects()  # an object may have been added
                continue
            page = self._page
            if planned.page is not None and (page is None or (due and page.failed)):
                page = self._request_page(planned.page)
            short = len(planned.chunks) < missing
            if page is None or (due and waited) or not (due or (short and page.succeeded)):
                return planned.gap
            found = page.result()
            self._page = None
            self._extend_known(found)
            waited = due

    def _start_fetch(self, chunk: Chunk) -> None:
        future = self._submit(partial(self._fetch, chunk))
        self._fetches.append((chunk, future))
        if self._closed:
            future.cancel()
        self._position = position_after(chunk)

    def _request_page(self, start: int) -> FetchFuture[list[ObjectDescriptor]]:
        page = self._page = self._submit(partial(self._descriptors, start, self._end))
        if self._closed:
            page.cancel()
        return page

    def _descriptors(self, start: int, end: int | None) -> list[ObjectDescriptor]:
        """Reads a page of descriptors. Those that are not read whole get their whole index."""
        found = self._source.descriptors(start, end, DESCRIPTOR_PAGE)
        return [self._refined(each, start, end) for each in found]

    def _refined(
        self, descriptor: ObjectDescriptor, start: int, end: int | None
    ) -> ObjectDescriptor:
        if self._indexes is None or descriptor.object_id in self._distrusted:
            return descriptor
        for border in (start, descriptor.next_offset if end is None else end):
            if descriptor.start_offset < border <= descriptor.end_offset:
                descriptor = self._indexes.refined(
                    self._topic, descriptor, border, self._chunk_bytes
                )
        return descriptor

    def _extend_known(self, found: list[ObjectDescriptor]) -> None:
        """Adds a page of descriptors, and drops those that are no longer needed."""
        first = self._fetches[0][0] if self._fetches else None
        offset = self._position.offset if first is None else first.range.descriptor.next_offset
        ahead = (each for each in (*self._known.descriptors, *found) if each.end_offset >= offset)
        known = (
            replace(each, offset_index=None) if each.object_id in self._unindexed else each
            for each in ahead
        )
        self._known = KnownObjects(tuple(known), complete=len(found) < DESCRIPTOR_PAGE)

    def _submit(self, request: Callable[[], _Result]) -> FetchFuture[_Result]:
        if self._pool is not None:
            return self._pool.submit(request)
        future = FetchFuture(request)
        future.run()
        return future

    def _drop_fetches(self) -> None:
        """Cancels all requests, and sets the read-ahead back to one chunk."""
        while self._fetches:
            self._fetches.popleft()[1].cancel()
        self._sequential = False
        self._window = min(1, self._window_max)

    def _move(self, position: Position) -> None:
        """Drops everything that was fetched or is known, and continues at `position`."""
        self._drop_fetches()
        self._drop_frames()
        page, self._page = self._page, None
        if page is not None:
            page.cancel()
        self._position = position
        self._known = KnownObjects()

    def _restart(self) -> None:
        self._move(Position(self.offset))

    def _fetch(self, chunk: Chunk) -> Buffer:
        """Fetches one chunk. Runs on the pool's threads."""
        descriptor = chunk.range.descriptor
        require_known_form(self._topic, descriptor)
        etag = None
        if descriptor.content_hash is not None:
            etag = self._etags.get(descriptor.object_id, descriptor.etag)
        key = self._key(descriptor)
        try:
            with counted_request():
                data = self._store.get_range(key, chunk.start, chunk.end, etag=etag)
        except ObjectMissing as error:
            raise _ObjectGone(descriptor) from error
        except ObjectChanged as error:
            raise _OtherEtag(descriptor, error.etag) from error
        except (ServiceUnavailable, ServiceRefused):
            raise
        except ServiceError as error:
            raise _ObjectShort(chunk) from error
        BYTES_FETCHED.add(len(data))
        holding(self._counting, lambda: self._count(len(data)))
        if len(data) != chunk.end - chunk.start:
            raise _ObjectShort(chunk)
        return data

    def _count(self, fetched: int) -> None:
        self.bytes_fetched += fetched

    def _key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(self._topic, descriptor.object_id)

    # ---- missing and corrupt objects ----

    def _replan(self, gone: _ObjectGone) -> None:
        """Reads the descriptors again. Raises MissingData if they name the same object again."""
        object_id = gone.descriptor.object_id
        self._restart()
        if object_id not in self._missing:
            self._missing.add(object_id)
            return
        self._missing.clear()
        raise MissingData(
            f"{self._key(gone.descriptor)} is not in {self._store.name}, but its descriptor is "
            f"in the catalog (read at offset {self.offset}); run `forebay repair`"
        ) from gone

    def _compare_content(self, other: _OtherEtag) -> None:
        """Reads an object with another etag whole, once in this process, and compares its hash.

        Raises ForeignObject if every frame is valid and the hash differs, or if it names another
        topic. An object that is only damaged is read as far as it is valid.
        """
        descriptor, key = other.descriptor, self._key(other.descriptor)
        assert descriptor.content_hash is not None, "only those with a hash are compared"
        known = (self._store.name, key, descriptor.content_hash)
        if known not in _proven or _proven[known] != other.etag:
            try:
                seen = examine_object(
                    _Closing(self._store, self), self._pool, self._settings, self._topic, descriptor
                )
            except LogClosed:
                if self._closed:
                    raise FetchCancelled from None
                raise
            fault = seen.fault
            if fault is not None and fault.kind is FaultKind.MISSING:
                self._other = None
                raise _ObjectGone(descriptor)
            foreign = fault is not None and (
                fault.kind is FaultKind.CONTENT or seen.foreign_offset is not None
            )
            OTHER_ETAGS.add(1, "other" if foreign else "damaged" if _is_damage(fault) else "same")
            if foreign:
                assert fault is not None
                self._other = None
                self._restart()
                raise fault.error
            if not _is_damage(fault):
                if len(_proven) >= _PROVEN_MAX:
                    _proven.clear()
                _proven[known] = other.etag
        self._etags[descriptor.object_id] = other.etag
        self._other = None

    def _doubts_index(self, corruption: Corruption, descriptor: ObjectDescriptor) -> bool:
        """Whether the index may be wrong. If so, reading begins again at the object's start.

        It may be wrong if no frame is where the range begins, or if the range ends inside a frame.
        Each object is read from its start only once for that reason.
        """
        wanted, object_id = self._range, descriptor.object_id
        if object_id in self._unindexed:
            self._unindexed.discard(object_id)
            self._damaged.add(object_id)
        if wanted is None or object_id in self._damaged:
            return False
        begins_wrong = corruption.position == wanted.start > 0
        ends_wrong = self._misled and wanted.end < descriptor.size
        if not (begins_wrong or ends_wrong):
            return False
        self._unindexed.add(object_id)
        WRONG_INDEXES.add()
        event(
            _log,
            logging.WARNING,
            "the index of an object leads to no frame: it is read from its start",
            topic=self._topic,
            object=object_id,
            position=corruption.position,
            offset=corruption.offset,
        )
        self._restart()
        return True

    def _distrust_sidecar(self) -> bool:
        """Reads the object again without its sidecar; False if it was read so already.

        What looks like damage may be an index entry that names the wrong position.
        """
        descriptor = self._object
        assert descriptor is not None, "corruption is in an object"
        index = len(descriptor.offset_index or ())
        if index <= DESCRIPTOR_INDEX_ENTRIES or descriptor.object_id in self._distrusted:
            return False
        self._distrusted.add(descriptor.object_id)
        self._restart()
        return True

    def _step_over(self, corruption: Corruption) -> None:
        """Raises CorruptFrame, or, if lenient, continues at the next valid frame."""
        descriptor = self._object
        assert descriptor is not None, "corruption is in an object"
        if self._doubts_index(corruption, descriptor):
            return
        if not self._lenient:
            self._restart()
            raise CorruptFrame(
                corruption.reason,
                file=self._key(descriptor),
                position=corruption.position,
                offset=corruption.offset,
            )
        found = self._resynchronise(descriptor, corruption)
        if found is None:
            resumed = descriptor.next_offset
            self._move(Position(resumed))
        else:
            resumed, start = found
            rest = object_range(descriptor, resumed, self._end)
            rest = rest._replace(offset=resumed, start=start)
            self._move(Position(descriptor.next_offset, rest, start))
        stop = resumed if self._end is None else min(resumed, self._end)
        skipped = max(stop - self.offset, 0)
        self.offset += skipped
        self.skipped += skipped
        SKIPPED.add(skipped)
        event(
            _log,
            logging.WARNING,
            "damaged frames skipped",
            topic=self._topic,
            object=descriptor.object_id,
            reason=corruption.reason,
            position=corruption.position,
            offset=corruption.offset,
            skipped=skipped,
            resumed_at=resumed,
        )

    def _resynchronise(
        self, descriptor: ObjectDescriptor, corruption: Corruption
    ) -> tuple[int, int] | None:
        """Returns (offset, position) of the next valid frame of the object, or None."""

        def read(start: int, end: int) -> Buffer:
            return self._fetch(Chunk(ObjectRange(descriptor, 0, start, end), start, end))

        try:
            return next_place(
                descriptor, corruption.offset, corruption.position, read, self._chunk_bytes
            )
        except _ObjectShort:  # the rest of the object is skipped
            return None


class _ObjectGone(Exception):
    def __init__(self, descriptor: ObjectDescriptor) -> None:
        super().__init__(descriptor.object_id)
        self.descriptor = descriptor


class _OtherEtag(Exception):
    def __init__(self, descriptor: ObjectDescriptor, etag: str | None) -> None:
        super().__init__(descriptor.object_id)
        self.descriptor = descriptor
        self.etag = etag


def _is_damage(fault: Fault | None) -> bool:
    return fault is not None and fault.kind is not FaultKind.INDEX


class _Closing:
    """A store whose requests end once the stream is closed."""

    def __init__(self, store: ReadableStore, stream: ObjectStream) -> None:
        self._store = store
        self._stream = stream

    @property
    def name(self) -> str:
        return self._store.name

    def head(self, key: str) -> ObjectMeta:
        return self._store.head(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        if self._stream.closed:
            raise FetchCancelled
        return self._store.get_range(key, start, end, etag=etag)


class _ObjectShort(Exception):
    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk.range.descriptor.object_id)
        self.chunk = chunk
