"""One topic's objects as a stream of frames: ordered, from any offset, in bounded memory.

`forebay.read.plan` says which bytes to fetch next; this is the shell that fetches them. It begins
with one chunk ahead and doubles that while it is read in order, so a reader of one message fetches
little and one that goes on soon never waits. Everything is checked: checksums, consecutive offsets,
and that an object begins and ends as its descriptor says. After any error the stream is where its
last frame left it: the next call tries again, with new descriptors where that can help.

Memory: the chunk being read, those fetched ahead, and one frame that straddles a cut. A scan that
the caller still holds while asking for the next one comes on top.

What a caller gets wrong: None is not the end of the topic. It says that no object holds the next
offset (`offset`) yet; the log's segments may.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Generic, Protocol, TypeVar

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
from forebay.forks import disown_after_fork
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, Corruption, FrameAssembler, Scan
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key
from forebay.format.resync import next_frame
from forebay.limits import FETCH_THREADS
from forebay.logs import event
from forebay.read.metrics import (
    BYTES_FETCHED,
    BYTES_USED,
    OBJECTS_READ,
    SKIPPED,
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
from forebay.settings import CloudReaderSettings

_Result = TypeVar("_Result")

_log: Final = logging.getLogger("forebay.read")

JOIN_SECONDS: Final = 1.0
"""How long closing a pool waits for all its threads; one in a slow request is left to end alone."""


class RangeStore(Protocol):
    """What is needed of `forebay.objects.backend.Backend`."""

    @property
    def name(self) -> str: ...

    def get_range(self, key: str, start: int, end: int) -> Buffer: ...


class DescriptorSource(Protocol):
    """What a stream asks of a topic's catalog. Called from the reader's and the pool's threads."""

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        """Those that hold offsets from `start` up to, not including, `end`; the oldest first."""

    def missing(self, offset: int) -> ForebayError:
        """What to raise for an offset that no object holds though a later one is there."""


class ObjectStream:
    """`next` and `seek` belong to one thread; `close` may come from any."""

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
        self._pool = pool
        self._lenient = settings.lenient
        self._chunk_bytes = chunk_bytes or settings.fetch_chunk_size
        self._window_max = 0 if pool is None else settings.read_ahead_chunks
        self._end = end
        self._busy = threading.Lock()
        """Held by `next` and `seek`."""
        self._stale = False
        """Whether what was fetched must be dropped before the next frames are returned."""
        self._lock = threading.Lock()
        self._closed = False
        # What is under way, in order, and where fetching goes on behind it.
        self._fetches: deque[tuple[Chunk, FetchFuture[Buffer]]] = deque()
        self._position = Position(start)
        self._known = KnownObjects()
        self._page: FetchFuture[list[ObjectDescriptor]] | None = None
        self._window = min(1, self._window_max)
        self._sequential = False
        # What was fetched: frames to return, and the object that is not read to its end yet.
        self._ready: deque[Scan] = deque()
        self._object: ObjectDescriptor | None = None
        self._frames: FrameAssembler | None = None
        self._missing: set[str] = set()
        """Objects that were not there since the last frames were found."""
        self.offset = start
        """Of the next message."""
        self.bytes_fetched = 0
        self.bytes_used = 0
        self.skipped = 0
        """Messages that were stepped over."""

    @property
    def window(self) -> int:
        """How many chunks ahead are fetched at present."""
        return self._window

    @property
    def closed(self) -> bool:
        return self._closed

    def next(self, limit: int | None = None) -> Scan | None:
        """The next frames, at most `limit`; None at the end, after the last object, or if closed.

        CorruptFrame for damage, MissingData for an object that is named and not there, what
        `DescriptorSource.missing` returns for a gap, ServiceError where the store or the catalog
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
        if self._stale:
            self._restart()
        self._stale = True  # an interrupt leaves it so: what was fetched may be half used
        try:
            frames = self._pop_frames(limit) if self._fill() else None
        except (ForebayError, FetchCancelled):
            self._stale = False
            raise
        self._stale = False
        return frames

    def seek(self, start: int, end: int | None) -> None:
        """Goes on with the offsets from `start` up to, not including, `end`."""
        with self._busy:
            self._stale = True
            self._missing.clear()
            self.offset, self._end = start, end

    def close(self) -> None:
        """Ends the stream and drops what it holds, and the results of requests under way."""
        self._closed = True
        with self._lock:
            fetches = list(self._fetches)
        for _, future in fetches:
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
        # A thread that is in `next` drops everything on the way out.
        if self._busy.acquire(blocking=False):
            try:
                self._drop_frames()
            finally:
                self._busy.release()

    def _drop_frames(self) -> None:
        self._ready.clear()
        self._object = None
        self._frames = None

    # ---- frames ----

    def _fill(self) -> bool:
        """Fetches until frames are ready; False if there are no more."""
        while not self._ready:
            if self._finished():
                self._restart()
                return False
            try:
                if self._frames is not None and self._frames.corruption is not None:
                    self._step_over(self._frames.corruption)
                elif not self._read_chunk():
                    self._drop_frames()
                    return False
            except _ObjectGone as gone:
                self._replan(gone)
            except _ObjectShort as short:
                size = short.chunk.range.descriptor.size
                self._assembler(short.chunk).fail(
                    f"the object is shorter than the {size} bytes of its descriptor"
                )
        return True

    def _finished(self) -> bool:
        """Whether the end is reached; an object whose last message is wanted is read to its end."""
        if self._end is None or self.offset < self._end:
            return False
        return self._object is None or self._end < self._object.next_offset

    def _pop_frames(self, limit: int | None) -> Scan:
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

    def _feed(self, chunk: Chunk, data: Buffer) -> None:
        """Has the frames that the chunk completes ready, as far as they are wanted."""
        if chunk.first:
            OBJECTS_READ.add()
        frames = self._assembler(chunk)
        stop = chunk.range.descriptor.next_offset
        if self._end is not None:
            stop = min(stop, self._end)
        for found in frames.feed(data):
            first = found.offsets[0]
            at, until = max(self.offset - first, 0), min(stop - first, len(found))
            if at < until:
                self._ready.append(found.part(at, until))
                self._missing.clear()
        if chunk.last:
            frames.require_end(chunk.range.next_offset)
            if frames.corruption is None:
                self._object = self._frames = None

    def _assembler(self, chunk: Chunk) -> FrameAssembler:
        """The one for the object of the chunk, which is the next of the stream."""
        if chunk.first:
            wanted = chunk.range
            self._object = wanted.descriptor
            self._frames = FrameAssembler(wanted.offset, wanted.start, wanted.descriptor.size)
        assert self._frames is not None, "chunks come in order, the first of an object first"
        return self._frames

    # ---- fetching ahead ----

    def _read_chunk(self) -> bool:
        """Waits for the next chunk and decodes it; False if no object holds the next offset.

        Raises what fetching it raised; the next call tries again. FetchCancelled once closed.
        """
        if self._sequential:
            self._window = min(2 * self._window, self._window_max)
        gap = self._fetch_ahead()
        if not self._fetches:
            self._known = KnownObjects()  # the next call asks for descriptors anew
            page, self._page = self._page, None
            if page is not None:
                page.cancel()
            if gap is not None:
                raise self._source.missing(gap)
            return False
        chunk, future = self._fetches[0]
        try:
            data = future.result()
        except Exception:
            self._drop_fetches()  # those ahead may have met the same failure
            self._position = position_of(chunk)
            raise
        with self._lock:
            self._fetches.popleft()
        self._sequential = True
        self._feed(chunk, data)
        return True

    def _fetch_ahead(self) -> int | None:
        """Has the next chunk under way, and a window of those after it; returns a gap behind them.

        Waits for descriptors only if nothing can be fetched without them, and raises only then.
        """
        waited = False
        while True:
            missing = 1 + self._window - len(self._fetches)
            planned = plan(
                self._position,
                self._known,
                end=self._end,
                chunk_bytes=self._chunk_bytes,
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
        with self._lock:
            self._fetches.append((chunk, future))
        if self._closed:
            future.cancel()
        self._position = position_after(chunk)

    def _request_page(self, start: int) -> FetchFuture[list[ObjectDescriptor]]:
        query = partial(self._source.descriptors, start, self._end, DESCRIPTOR_PAGE)
        page = self._page = self._submit(query)
        if self._closed:
            page.cancel()
        return page

    def _extend_known(self, found: list[ObjectDescriptor]) -> None:
        """Adds a page of descriptors, and drops those that nothing is to be fetched of again."""
        first = self._fetches[0][0] if self._fetches else None
        offset = self._position.offset if first is None else first.range.descriptor.next_offset
        ahead = (each for each in (*self._known.descriptors, *found) if each.end_offset >= offset)
        self._known = KnownObjects(tuple(ahead), complete=len(found) < DESCRIPTOR_PAGE)

    def _submit(self, request: Callable[[], _Result]) -> FetchFuture[_Result]:
        if self._pool is not None:
            return self._pool.submit(request)
        future = FetchFuture(request)
        future.run()
        return future

    def _drop_fetches(self) -> None:
        """Also begins with one chunk ahead again."""
        with self._lock:
            fetches = list(self._fetches)
            self._fetches.clear()
        for _, future in fetches:
            future.cancel()
        self._sequential = False
        self._window = min(1, self._window_max)

    def _move(self, position: Position) -> None:
        """Drops all that was fetched or is known, and goes on there."""
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
        with self._lock:
            self.bytes_fetched += len(data)
        if len(data) != chunk.end - chunk.start:
            raise _ObjectShort(chunk)
        return data

    def _key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(self._topic, descriptor.object_id)

    # ---- missing objects and corrupt ones ----

    def _replan(self, gone: _ObjectGone) -> None:
        """Asks for the descriptors anew; raises if they name the same object again."""
        object_id = gone.descriptor.object_id
        self._restart()
        if object_id not in self._missing:
            self._missing.add(object_id)
            return
        self._missing.clear()
        raise MissingData(
            f"{self._key(gone.descriptor)} is not in {self._store.name}, though its descriptor is "
            f"in the catalog (offset {self.offset})"
        ) from gone

    def _step_over(self, corruption: Corruption) -> None:
        """Raises, or goes on at the next valid frame where the reader is lenient."""
        descriptor = self._object
        assert descriptor is not None, "corruption is in an object"
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
        """(offset, position) of the next valid frame of the object, if there is one."""

        def read(start: int, end: int) -> Buffer:
            return self._fetch(Chunk(ObjectRange(descriptor, 0, start, end), start, end))

        try:
            return next_frame(
                descriptor, corruption.offset, corruption.position, read, self._chunk_bytes
            )
        except _ObjectShort:  # what is there of the last chunk is given up with the rest
            return None


class _ObjectGone(Exception):
    def __init__(self, descriptor: ObjectDescriptor) -> None:
        super().__init__(descriptor.object_id)
        self.descriptor = descriptor


class _ObjectShort(Exception):
    def __init__(self, chunk: Chunk) -> None:
        super().__init__(chunk.range.descriptor.object_id)
        self.chunk = chunk


class FetchPool:
    """Threads that all streams of a store share for their requests.

    They start as they are needed, up to `threads`, and end with `close`. A thread runs a request
    and nothing else. The pool bounds the requests in flight, and serves them in the order in which
    they were submitted; how much one stream has under way is the stream's own bound.
    """

    def __init__(self, threads: int = FETCH_THREADS) -> None:
        self._threads_max = threads
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[FetchFuture[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        disown_after_fork(self)

    def disown(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._threads.clear()
        self._waiting.clear()
        self._closed = True

    @property
    def thread_count(self) -> int:
        return len(self._threads)

    @property
    def idle_count(self) -> int:
        """Threads that wait for a request."""
        return self._idle

    def submit(self, job: Callable[[], _Result]) -> FetchFuture[_Result]:
        """Runs `job` on one of the threads; LogClosed after `close`."""
        fetch: FetchFuture[_Result] = FetchFuture(job)
        with self._changed:
            if self._closed:
                raise LogClosed("the pool of fetching threads is closed")
            self._waiting.append(fetch)  # type: ignore[arg-type] # only run and cancel are used
            self._provide_thread()
        return fetch

    def close(self) -> None:
        """Cancels what has not begun and ends the threads; waits no longer than JOIN_SECONDS."""
        with self._changed:
            self._closed = True
            for fetch in self._waiting:
                fetch.cancel()
            self._waiting.clear()
            self._changed.notify_all()
        patience = JOIN_SECONDS / max(len(self._threads), 1)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(patience)

    def _provide_thread(self) -> None:
        if self._idle >= len(self._waiting):
            self._changed.notify()
            return
        if len(self._threads) < self._threads_max:
            name = f"forebay-fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: the others will do
                if not self._threads:
                    self._waiting.pop()
                    raise
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (fetch := self._next()) is not None:
            fetch.run()
            del fetch  # its result is the reader's: an idle thread must not keep it alive

    def _next(self) -> FetchFuture[object] | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._idle -= 1
            return self._waiting.popleft()


class FetchFuture(Generic[_Result]):
    """The result of one request. `result` belongs to one thread; `cancel` may come from any."""

    __slots__ = ("_cancelled", "_error", "_finished", "_job", "_value")

    def __init__(self, job: Callable[[], _Result]) -> None:
        self._job: Callable[[], _Result] | None = job
        self._value: _Result | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._finished = threading.Event()

    @property
    def succeeded(self) -> bool:
        """Whether `result` would return at once."""
        return self._finished.is_set() and self._error is None and not self._cancelled

    @property
    def failed(self) -> bool:
        """Whether `result` would raise at once."""
        return self._finished.is_set() and not self.succeeded

    def run(self) -> None:
        """Called once, by a thread of the pool."""
        job = self._job
        if job is None:
            return
        try:
            self._value = job()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
            self._error = error
        self._job = None
        if self._cancelled:  # which came meanwhile, and could not drop what was not there
            self._value = None
        self._finished.set()

    def cancel(self) -> None:
        """Wakes the thread that waits; a result that is there or on its way is dropped."""
        self._cancelled = True
        self._job = None
        self._value = None
        self._finished.set()

    def result(self) -> _Result:
        """Waits for the result; raises what the request raised, or FetchCancelled."""
        self._finished.wait()
        value = self._value
        if self._cancelled:  # read after the value, which a cancel drops
            raise FetchCancelled
        if self._error is not None:
            raise self._error
        return value  # type: ignore[return-value] # there is one, being neither of the others


class FetchCancelled(Exception):
    """The result of this request is not wanted any more."""
