"""The chunks of a topic's objects in order, fetched before they are asked for.

Runs over objects and over pages of descriptors. Slow start: one chunk ahead at first, twice as
many after each chunk that is taken, up to the bound, so that a reader that wants one message
fetches little, and one that goes on is soon never kept waiting. What is under way or waits to be
taken is at most the bound, beside the chunk that was taken last or the one that is waited for.

What a caller gets wrong: `take` answering None is no state. Ask again and the descriptors are
asked for anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from forebay.errors import ForebayError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.layout import Buffer
from forebay.read.fetch import Fetch, FetchCancelled, FetchPool, InPlace
from forebay.read.ranges import Chunk, ObjectRange, chunks, object_range

DESCRIPTOR_PAGE: Final = 16
"""Descriptors that are asked for at a time: with a full index one takes half a megabyte."""


class DescriptorSource(Protocol):
    """What a reader asks of a topic's catalog. Called from the reader's and the pool's threads."""

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        """Those that hold offsets from `start` up to, not including, `end`; the oldest first."""

    def missing(self, offset: int) -> ForebayError:
        """What to raise for an offset that no object holds though a later one is there."""


class Taken(NamedTuple):
    chunk: Chunk
    data: Buffer


class _Planned:
    """A chunk that will be due; without a fetch while nobody fetches it."""

    __slots__ = ("chunk", "fetch")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.fetch: Fetch[Buffer] | None = None


class ReadAhead:
    """Belongs to one thread, but for `close`."""

    def __init__(
        self,
        source: DescriptorSource,
        fetch: Callable[[Chunk], Buffer],
        pool: FetchPool | None,
        *,
        chunk_bytes: int,
        chunks_max: int,
        start: int,
        end: int | None,
    ) -> None:
        self._source = source
        self._fetch = fetch
        self._pool = InPlace() if pool is None else pool
        self._chunk_bytes = chunk_bytes
        self._chunks_max = 0 if pool is None else chunks_max
        self._end = end
        self._lock = threading.Lock()
        self._closed = False
        self._queue: deque[_Planned] = deque()
        self._page: Fetch[list[ObjectDescriptor]] | None = None
        self._descriptors: deque[ObjectDescriptor] = deque()
        self._chunks: Iterator[Chunk] = iter(())
        self._more = True
        self._offset = start
        self._going = False
        self._window = min(1, self._chunks_max)

    @property
    def window(self) -> int:
        """How many chunks ahead are fetched at present."""
        return self._window

    def seek(self, offset: int, resume: ObjectRange | None = None) -> None:
        """Forgets all that was planned and goes on at `offset`, or with the rest of an object."""
        self._forget()
        self._offset = offset if resume is None else resume.descriptor.next_offset
        self._chunks = iter(()) if resume is None else chunks(resume, self._chunk_bytes)
        self._slow_down()

    def take(self) -> Taken | None:
        """The next chunk; None if no descriptor holds the next offset, nor a later one.

        Raises what fetching it raised; the next call tries again. FetchCancelled once closed.
        """
        if self._going:  # whoever comes back reads on
            self._window = min(2 * self._window, self._chunks_max)
        self._plan(1 + self._window)
        with self._lock:
            self._require_open()
            planned = self._queue[0] if self._queue else None
        if planned is None or planned.fetch is None:
            self._at_the_end()
            return None
        try:
            data = planned.fetch.result()
        except Exception:
            self._start_over()
            raise
        with self._lock:
            self._require_open()
            self._queue.popleft()
        self._going = True
        return Taken(planned.chunk, data)

    def close(self) -> None:
        """From any thread: drops everything, and wakes a `take` that waits."""
        with self._lock:
            self._closed = True
        self._cancel()

    def _require_open(self) -> None:
        if self._closed:
            raise FetchCancelled

    def _cancel(self) -> None:
        with self._lock:
            planned, page = list(self._queue), self._page
            self._queue.clear()
            self._page = None
        for one in planned:
            if one.fetch is not None:
                one.fetch.cancel()
        if page is not None:
            page.cancel()

    def _forget(self) -> None:
        self._cancel()
        self._descriptors.clear()
        self._more = True

    def _start_over(self) -> None:
        """After a failure: what was fetched ahead may have met the same one, so ask for it anew."""
        with self._lock:
            for one in self._queue:
                if one.fetch is not None:
                    one.fetch.cancel()
                one.fetch = None
        self._slow_down()

    def _slow_down(self) -> None:
        self._going = False
        self._window = min(1, self._chunks_max)

    def _at_the_end(self) -> None:
        """Raises if there is a later descriptor; a later call asks for descriptors anew."""
        gap = bool(self._descriptors)
        self._forget()
        if gap:
            raise self._source.missing(self._offset)

    def _plan(self, count: int) -> None:
        """Has the first `count` chunks under way, if there are so many.

        Waits for descriptors only to have the very first, and raises only then.
        """
        for planned in list(self._queue)[:count]:
            if planned.fetch is None:
                self._start(planned)
        while len(self._queue) < count:
            chunk = self._next_chunk(wait=not self._queue)
            if chunk is None:
                return
            planned = _Planned(chunk)
            with self._lock:
                self._require_open()
                self._queue.append(planned)
            self._start(planned)

    def _start(self, planned: _Planned) -> None:
        with self._lock:
            self._require_open()
            chunk = planned.chunk
            planned.fetch = self._pool.submit(lambda: self._fetch(chunk))

    def _next_chunk(self, *, wait: bool) -> Chunk | None:
        while True:
            chunk = next(self._chunks, None)
            if chunk is not None:
                return chunk
            descriptor = self._next_descriptor(wait=wait)
            if descriptor is None:
                return None
            wanted = object_range(descriptor, self._offset, self._end)
            self._chunks = chunks(wanted, self._chunk_bytes)
            self._offset = descriptor.next_offset

    def _next_descriptor(self, *, wait: bool) -> ObjectDescriptor | None:
        """The one that holds the next offset to plan, if it is known or `wait` allows to ask."""
        if self._end is not None and self._offset >= self._end:
            return None
        if not self._descriptors and not self._turn_page(wait=wait):
            return None
        descriptor = self._descriptors[0]
        if descriptor.start_offset > self._offset:
            return None
        self._descriptors.popleft()
        if self._more and self._page is None and len(self._descriptors) <= DESCRIPTOR_PAGE // 2:
            last = self._descriptors[-1] if self._descriptors else descriptor
            self._request_page(last.next_offset)
        return descriptor

    def _turn_page(self, *, wait: bool) -> bool:
        """Whether there is a further descriptor."""
        if not wait and (self._page is None or not self._page.succeeded):
            return False
        if self._page is None or self._page.failed:
            self._request_page(self._offset)
        page = self._page
        if page is None:
            raise FetchCancelled
        found = page.result()
        self._page = None
        self._more = len(found) >= DESCRIPTOR_PAGE
        self._descriptors.extend(one for one in found if one.end_offset >= self._offset)
        return bool(self._descriptors)

    def _request_page(self, start: int) -> None:
        end = self._end
        with self._lock:
            self._require_open()
            self._page = self._pool.submit(
                lambda: self._source.descriptors(start, end, DESCRIPTOR_PAGE)
            )
