"""Reads an object back and compares it with its descriptor, frame by frame.

It checks the size, every checksum, that the offsets are consecutive from the descriptor's first to
its last, the hash of the content, and that each index entry is the position of its frame. The
uploader uses it to read back what it wrote, and `forebay verify` to read everything again.

The hash decides whether the object is the one that was uploaded: another topic's object may have
the same range and size, and copying a bucket changes the etags. A wrong index is no damage, because
it is only a hint; `Examined.found` has the right one. A message that names another topic is logged.

Beware: once an object passes, its segments may be deleted. A store that cannot be reached is not a
fault of the object: ServiceError is raised, and says nothing about the object.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Final, Protocol

from forebay.errors import (
    CorruptFrame,
    CorruptLog,
    DescriptorError,
    ForeignObject,
    LedgerError,
    LogClosed,
    MissingData,
    ObjectMissing,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from forebay.format.blocks import BlockAssembler, object_decoder
from forebay.format.content import ContentHash, MessageSurvey
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.layout import Buffer
from forebay.format.names import TopicName, object_key, parse_ledger
from forebay.format.pulsar.frames import EntryAssembler
from forebay.format.pulsar.index import decode_index
from forebay.format.pulsar.topic_ledger import offsets_of_ledger
from forebay.limits import LEDGER_INDEX_BYTES_MAX
from forebay.logs import event
from forebay.objects.backend import ObjectMeta
from forebay.read.decoding import decoded
from forebay.read.fetch_pool import FetchCancelled, FetchFuture, FetchPool
from forebay.read.metrics import (
    BYTES_FETCHED,
    FOREIGN_NAMES,
    OBJECTS_READ,
    count_error,
    counted_request,
)
from forebay.settings import CloudReaderSettings

_log: Final = logging.getLogger("forebay.read")


class ReadableStore(Protocol):
    """The part of `forebay.objects.backend.Backend` that readers use."""

    @property
    def name(self) -> str: ...

    def head(self, key: str) -> ObjectMeta: ...

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer: ...


class FaultKind(StrEnum):
    MISSING = "missing"
    RESIZED = "resized"
    CORRUPT = "corrupt"
    CONTENT = "content"
    """Every frame is valid, but the hash is not the descriptor's: it is another object."""
    INDEX = "index"
    """Only the index is wrong; everything else is right."""


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
    found: ObjectDescriptor | None = None
    """The descriptor with what the object showed, if that differs and the object is right."""
    foreign_offset: int | None = None
    """The first message that names another topic."""
    raw_bytes: int = 0
    """Bytes of the frames; `bytes` counts those of the object."""
    content_hash: str | None = None
    """The hash of the frames; None unless all of them were read."""
    highest_publish_time: int | None = None


def looks_same(store: ReadableStore, topic: TopicName, descriptor: ObjectDescriptor) -> bool:
    """Whether the object has the etag of its descriptor for certain; False if one is unknown.

    Raises MissingData if it is missing, and CorruptLog if it has another size. Copying a bucket
    changes the etags, so an object with another etag must be read to know whether it is intact.
    """
    meta, fault = _head(store, topic, descriptor)
    if fault is not None:
        raise fault.error
    return meta is not None and meta.etag is not None and meta.etag == descriptor.etag


def other_content(store: str, key: str, said: str, found: str) -> ForeignObject:
    """The error for an object whose hash is not the one in its descriptor."""
    return ForeignObject(
        f"{store}: {key} is not the object of its descriptor: its content has the hash {found}, "
        f"but the descriptor says {said}. Put the right object back from a copy of the store, or "
        "let `forebay repair` write it again while the local log has its messages"
    )


def require_known_form(topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """Raises DescriptorError if the object has an unknown codec or contains no frames."""
    if descriptor.unknown_form is not None:
        raise DescriptorError(
            f"{object_key(topic, descriptor.object_id)} has the form {descriptor.unknown_form!r}, "
            "which this release does not read: use a later one"
        )


def verify_object(
    store: ReadableStore,
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
    store: ReadableStore,
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
    require_known_form(topic, descriptor)
    meta, fault = _head(store, topic, descriptor)
    if meta is None:
        seen = Examined(0, 0, same_etag=False, fault=fault)
    else:
        reading = _ReadBack(store, topic, descriptor, meta)
        ahead = settings.read_ahead_chunks if pool is not None else 0
        with closing(reading.chunks(pool, settings.fetch_chunk_size, ahead)) as chunks:
            seen = reading.run(chunks)
    if seen.fault is not None:
        count_error(seen.fault.error)
    return seen


def _head(
    store: ReadableStore, topic: TopicName, descriptor: ObjectDescriptor
) -> tuple[ObjectMeta | None, Fault | None]:
    """Returns the object's metadata, or the fault that they show."""
    key = object_key(topic, descriptor.object_id)
    try:
        meta = store.head(key)
    except ObjectMissing as error:
        missing = MissingData(
            f"{store.name}: {key} is missing, but its descriptor is in the catalog"
        )
        missing.__cause__ = error
        return None, Fault(FaultKind.MISSING, missing, offset=descriptor.start_offset)
    if meta.size != descriptor.size:
        what = f"{key} has {meta.size} bytes, but its descriptor says {descriptor.size}"
        resized = CorruptLog(f"{store.name}: {what}")
        return None, Fault(FaultKind.RESIZED, resized, position=min(meta.size, descriptor.size))
    return meta, None


class _ReadBack:
    """One object, read from its first byte to its last."""

    def __init__(
        self, store: ReadableStore, topic: TopicName, descriptor: ObjectDescriptor, meta: ObjectMeta
    ) -> None:
        self._store = store
        self._topic = topic
        self._key = object_key(topic, descriptor.object_id)
        self._descriptor = descriptor
        self._etag = meta.etag
        self._entries = deque(descriptor.offset_index or ())
        self._index: list[tuple[int, int]] = []
        """The right positions of the entries so far."""
        self._wrong_entry: Fault | None = None
        self._content = ContentHash()
        self._survey = MessageSurvey(str(topic))
        self._frames = object_decoder(descriptor, descriptor.start_offset, 0)
        self._messages = 0
        self._raw_bytes = 0

    def run(self, chunks: Iterator[Buffer]) -> Examined:
        fault = (
            self._read(chunks)
            or self._compare_raw_size()
            or self._compare_content()
            or self._compare_index_object()
            or self._wrong_entry
        )
        self._tell_foreign_name()
        right = fault is None or fault.kind is FaultKind.INDEX
        found = self._found() if right else None
        known = None not in (self._descriptor.etag, self._etag)
        return Examined(
            self._frames.position,
            self._messages,
            not known or self._descriptor.etag == self._etag,
            fault,
            found if found != self._descriptor else None,
            self._survey.foreign_offset,
            self._raw_bytes,
            self._content.value if right else None,
            self._survey.highest_publish_time,
        )

    def _read(self, chunks: Iterator[Buffer]) -> Fault | None:
        frames = self._frames
        OBJECTS_READ.add()
        try:
            for chunk in chunks:
                at = frames.position
                for found in decoded(frames, chunk, ahead=True):
                    raw = found.raw
                    self._content.add(raw)
                    if isinstance(frames, BlockAssembler):
                        self._compare_blocks(found, frames.block_position)
                    elif isinstance(frames, EntryAssembler):
                        self._compare_entries(found, frames.positions)
                    else:
                        self._compare_index(found, at)
                    self._survey.add(found)
                    at += len(raw)
                    self._raw_bytes += len(raw)
                    self._messages += len(found)
                    del found, raw  # frees a block before the next one is decompressed
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
        position, offset = self._frames.position, self._frames.offset
        error = CorruptFrame(reason, file=self._key, position=position, offset=offset)
        return Fault(FaultKind.CORRUPT, error, position, offset)

    def _compare_raw_size(self) -> Fault | None:
        said, found = self._descriptor.logical_size, self._raw_bytes
        if said == found:
            return None
        error = CorruptLog(
            f"{self._store.name}: {self._key} has frames of {found} bytes, but its descriptor says "
            f"{said}"
        )
        return Fault(FaultKind.CONTENT, error, 0, self._descriptor.start_offset)

    def _compare_content(self) -> Fault | None:
        said, found = self._descriptor.content_hash, self._content.value
        if said is None or said == found:
            return None
        error = other_content(self._store.name, self._key, said, found)
        return Fault(FaultKind.CONTENT, error, 0, self._descriptor.start_offset)

    def _compare_index(self, frames: Scan, position: int) -> None:
        """Checks the index entries of these frames, the first of which is at `position`."""
        entries = self._entries
        while entries and entries[0][0] <= frames.offsets[-1]:
            offset, said = entries.popleft()
            at = position + frames.positions[offset - frames.offsets[0]] - frames.positions[0]
            self._index.append((offset, at))
            if at != said and self._wrong_entry is None:
                error = CorruptLog(
                    f"{self._store.name}: {self._key}: the frame of offset {offset} is at position "
                    f"{at}, but its descriptor's index says {said}"
                )
                self._wrong_entry = Fault(FaultKind.INDEX, error, at, offset)

    def _compare_entries(self, frames: Scan, positions: Sequence[int]) -> None:
        """Checks the index entries of these entries of a ledger, which are at `positions`."""
        entries = self._entries
        while entries and entries[0][0] <= frames.offsets[-1]:
            offset, said = entries.popleft()
            at = positions[offset - frames.offsets[0]]
            if offset == self._descriptor.start_offset:
                at = 0  # that of the block, which has the first entry
            self._index.append((offset, at))
            if at != said and self._wrong_entry is None:
                error = CorruptLog(
                    f"{self._store.name}: {self._key}: the entry of offset {offset} is at position "
                    f"{at}, but its descriptor's index says {said}"
                )
                self._wrong_entry = Fault(FaultKind.INDEX, error, at, offset)

    def _compare_index_object(self) -> Fault | None:
        """Checks the index object of a ledger, without which it is no ledger for a broker."""
        descriptor, name = self._descriptor, parse_ledger(self._descriptor.object_id)
        if name is None or not descriptor.is_ledger:
            return None
        key = object_key(self._topic, name.index_name)
        try:
            size = self._store.head(key).size
            index = decode_index(self._store.get_range(key, 0, min(size, LEDGER_INDEX_BYTES_MAX)))
        except ObjectMissing:
            missing = MissingData(f"{self._store.name}: {key}, the index of a ledger, is missing")
            return Fault(FaultKind.CORRUPT, missing, 0, descriptor.start_offset)
        except LedgerError as error:
            damaged = CorruptLog(f"{self._store.name}: {key}: {error}")
            return Fault(FaultKind.CORRUPT, damaged, 0, descriptor.start_offset)
        said = (offsets_of_ledger(index), index.data_bytes)
        wanted = ((descriptor.start_offset, descriptor.next_offset), descriptor.size)
        if said != wanted:
            other = CorruptLog(
                f"{self._store.name}: {key} is the index of a ledger with offsets and size {said}, "
                f"but its descriptor says {wanted}"
            )
            return Fault(FaultKind.CORRUPT, other, 0, descriptor.start_offset)
        return None

    def _compare_blocks(self, frames: Scan, position: int) -> None:
        """Checks the index entries of a block at `position`: only its first frame may have one."""
        entries, first = self._entries, frames.offsets[0]
        while entries and entries[0][0] <= frames.offsets[-1]:
            offset, said = entries.popleft()
            if offset == first:
                self._index.append((offset, position))
            if (offset, said) != (first, position) and self._wrong_entry is None:
                error = CorruptLog(
                    f"{self._store.name}: {self._key}: the index of its descriptor says that a "
                    f"block begins with offset {offset} at position {said}, but the block at "
                    f"{position} begins with offset {first}"
                )
                self._wrong_entry = Fault(FaultKind.INDEX, error, position, offset)

    def _tell_foreign_name(self) -> None:
        offset = self._survey.foreign_offset
        if offset is not None:
            FOREIGN_NAMES.add()
            event(
                _log,
                logging.WARNING,
                "a message names another topic",
                topic=self._topic,
                object=self._descriptor.object_id,
                offset=offset,
                hash_compared=self._descriptor.content_hash is not None,
            )

    def _found(self) -> ObjectDescriptor:
        """Returns the descriptor with what the object showed.

        Hash and etag are added to a descriptor without a hash only if the object is surely the one
        that was uploaded: it has its etag, or every message names the topic.
        """
        said = self._descriptor
        index = None if said.offset_index is None else tuple(self._index)
        found = replace(said, offset_index=index)
        own = self._survey.highest_publish_time is not None and self._survey.foreign_offset is None
        same_etag = said.etag is not None and said.etag == self._etag
        if said.content_hash is None and not (same_etag or own):
            return found
        published = said.highest_publish_time
        return replace(
            found,
            etag=self._etag if self._etag is not None else said.etag,
            content_hash=self._content.value,
            highest_publish_time=self._survey.highest_publish_time
            if published is None
            else published,
        )

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
