"""Reads an object back and compares it with its descriptor, frame by frame.

It checks the size, every checksum, that the offsets are consecutive from the descriptor's first to
its last, and that each index entry is the position of its frame. The uploader uses it to read back
what it wrote, and `forebay verify` to read everything again.

Beware: once an object passes, its segments may be deleted. A store that cannot be reached is not a
fault of the object: ServiceError is raised, and says nothing about the object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    LogClosed,
    MissingData,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, FrameAssembler, Scan
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key
from forebay.objects.store import CloudStore
from forebay.read.metrics import BYTES_FETCHED, OBJECTS_READ, count_error, counted_request
from forebay.read.object_stream import FetchCancelled, FetchFuture, FetchPool
from forebay.settings import CloudReaderSettings


class FaultKind(StrEnum):
    MISSING = "missing"
    RESIZED = "resized"
    CORRUPT = "corrupt"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that is wrong with an object."""

    kind: FaultKind
    error: CorruptLog
    position: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of reading an object. `bytes` and `messages` count up to the first fault."""

    bytes: int
    messages: int
    same_etag: bool
    fault: Fault | None


def looks_same(store: CloudStore, topic: TopicName, descriptor: ObjectDescriptor) -> bool:
    """Whether the object still has the etag of its descriptor.

    Raises MissingData if it is missing, and CorruptLog if it has another size. Copying a bucket
    changes the etags, so an object with another etag must be read to know whether it is intact.
    """
    same, fault = _head(store, topic, descriptor)
    if fault is not None:
        raise fault.error
    return same


def verify_object(
    store: CloudStore,
    pool: FetchPool | None,
    settings: CloudReaderSettings,
    topic: TopicName,
    descriptor: ObjectDescriptor,
) -> None:
    """Raises CorruptFrame, CorruptLog or MissingData if the object is not what it should be.

    Raises ServiceError if the store does not respond.
    """
    fault = examine_object(store, pool, settings, topic, descriptor).fault
    if fault is not None:
        raise fault.error


def examine_object(
    store: CloudStore,
    pool: FetchPool | None,
    settings: CloudReaderSettings,
    topic: TopicName,
    descriptor: ObjectDescriptor,
) -> Examined:
    """Reads the object up to its first fault, and returns what it found.

    The pool fetches ahead. Without a pool each chunk is read when it is needed: for local files,
    passing chunks between threads costs more than reading them. Raises ServiceError if the store
    does not respond, and LogClosed if the pool was closed.
    """
    same, fault = _head(store, topic, descriptor)
    if fault is None:
        reading = _ReadBack(store, object_key(topic, descriptor.object_id), descriptor)
        ahead = settings.read_ahead_chunks if pool is not None else 0
        with closing(reading.chunks(pool, settings.fetch_chunk_size, ahead)) as chunks:
            fault = reading.run(chunks)
        seen = Examined(reading.frames.position, reading.messages, same, fault)
    else:
        seen = Examined(0, 0, same, fault)
    if fault is not None:
        count_error(fault.error)
    return seen


def _head(
    store: CloudStore, topic: TopicName, descriptor: ObjectDescriptor
) -> tuple[bool, Fault | None]:
    """Returns whether the etag is the same, and the fault that the object's metadata shows."""
    key = object_key(topic, descriptor.object_id)
    try:
        meta = store.head(key)
    except ObjectMissing as error:
        missing = MissingData(
            f"{store.name}: {key} is missing, but its descriptor is in the catalog"
        )
        missing.__cause__ = error
        return False, Fault(FaultKind.MISSING, missing, offset=descriptor.start_offset)
    if meta.size != descriptor.size:
        what = f"{key} has {meta.size} bytes, but its descriptor says {descriptor.size}"
        resized = CorruptLog(f"{store.name}: {what}")
        return False, Fault(FaultKind.RESIZED, resized, position=min(meta.size, descriptor.size))
    return descriptor.etag is None or meta.etag is None or meta.etag == descriptor.etag, None


class _ReadBack:
    """One object, read from its first byte to its last."""

    def __init__(self, store: CloudStore, key: str, descriptor: ObjectDescriptor) -> None:
        self._store = store
        self._key = key
        self._descriptor = descriptor
        self._index = deque(descriptor.offset_index or ())
        self.frames = FrameAssembler(descriptor.start_offset, 0, descriptor.size)
        self.messages = 0

    def run(self, chunks: Iterator[Buffer]) -> Fault | None:
        frames = self.frames
        OBJECTS_READ.add()
        try:
            for chunk in chunks:
                at = frames.position
                for found in frames.feed(chunk):
                    fault = self._compare_index(found, at)
                    if fault is not None:
                        return fault
                    at += found.safe_length - found.positions[0] + HEADER_BYTES
                    self.messages += len(found)
                if frames.corruption is not None:
                    break
        except ObjectMissing as error:
            gone = MissingData(f"{self._store.name}: {self._key} was deleted while it was read")
            gone.__cause__ = error
            return Fault(FaultKind.MISSING, gone, frames.position, frames.offset)
        except FetchCancelled:
            raise LogClosed(f"{self._key}: the store was closed during the read") from None
        except (ServiceUnavailable, ServiceRefused):
            raise
        except ServiceError as error:
            return self._corrupt(f"the object cannot be read to its end: {error}")
        frames.require_end(self._descriptor.next_offset)
        return None if frames.corruption is None else self._corrupt(frames.corruption.reason)

    def _corrupt(self, reason: str) -> Fault:
        position, offset = self.frames.position, self.frames.offset
        error = CorruptFrame(reason, file=self._key, position=position, offset=offset)
        return Fault(FaultKind.CORRUPT, error, position, offset)

    def _compare_index(self, frames: Scan, position: int) -> Fault | None:
        """Checks the index entries of these frames, the first of which is at `position`."""
        index = self._index
        while index and index[0][0] <= frames.offsets[-1]:
            offset, said = index.popleft()
            at = position + frames.positions[offset - frames.offsets[0]] - frames.positions[0]
            if at != said:
                error = CorruptLog(
                    f"{self._store.name}: {self._key}: the frame of offset {offset} is at position "
                    f"{at}, but its descriptor's index says {said}"
                )
                return Fault(FaultKind.INDEX, error, at, offset)
        return None

    # ---- requests ----

    def chunks(self, pool: FetchPool | None, chunk_bytes: int, ahead: int) -> Generator[Buffer]:
        """Yields the object's bytes in order, and fetches `ahead` chunks before they are needed."""
        starts = range(0, self._descriptor.size, chunk_bytes)
        if pool is None or not ahead:
            for start in starts:
                yield self._fetch(start, chunk_bytes)
            return
        due = iter(starts)
        under_way: deque[FetchFuture[Buffer]] = deque()
        try:
            while True:
                for start in islice(due, ahead + 1 - len(under_way)):
                    under_way.append(pool.submit(partial(self._fetch, start, chunk_bytes)))
                if not under_way:
                    return
                yield under_way.popleft().result()
        finally:
            for fetch in under_way:
                fetch.cancel()

    def _fetch(self, start: int, chunk_bytes: int) -> Buffer:
        end = min(start + chunk_bytes, self._descriptor.size)
        with counted_request():
            data = self._store.get_range(self._key, start, end)
        BYTES_FETCHED.add(end - start)
        return data
