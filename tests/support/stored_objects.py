"""Topics whose history is in objects, for the suites of readers: made from plain payloads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from forebay.errors import ForebayError, LostOffsets, OffsetOutOfRange
from forebay.format.blocks import RawBlock, compress_block
from forebay.format.content import ContentHash
from forebay.format.descriptor import ZSTD, ObjectDescriptor
from forebay.format.frame import Scan, encode_frame
from forebay.format.layout import Buffer
from forebay.format.message import MessageId, StreamMessage, encode_message
from forebay.format.names import ObjectName, TopicName, object_key
from forebay.objects.backend import ObjectMeta
from forebay.objects.memory import MemoryBackend
from forebay.read.fetch_pool import FetchPool
from forebay.read.object_stream import ObjectStream
from forebay.settings import CloudReaderSettings

TOPIC: Final = TopicName("default", "orders")
PATIENCE: Final = 60.0
"""Seconds to wait for what must happen."""


def payload(offset: int, size: int = 10) -> bytes:
    """Bytes that no other offset has."""
    return (b"%010d" % offset + bytes(size))[: max(size, 10)]


def message(offset: int) -> bytes:
    return encode_message(StreamMessage(b"m%d" % offset, 0, MessageId(1, str(TOPIC))), offset)


class StoredTopic:
    """Objects in a store, their descriptors in a list, and what a reader should find in them."""

    def __init__(self, store: MemoryBackend | None = None) -> None:
        self.store = store or MemoryBackend()
        self.named: list[ObjectDescriptor] = []
        self.frames: dict[int, bytes] = {}
        self.lost: range = range(0)
        self.queries = 0
        self.queried: list[tuple[int, int | None]] = []

    def add(
        self, start: int, payloads: Sequence[bytes], every: int | None = 3, attempt: int = 0
    ) -> ObjectDescriptor:
        """An object with an index entry for every so many frames, or without an index."""
        data, index = bytearray(), []
        for number, one in enumerate(payloads):
            if every and number % every == 0:
                index.append((start + number, len(data)))
            data += encode_frame(start + number, one)
            self.frames[start + number] = one
        name = str(ObjectName(start, start + len(payloads) - 1, attempt))
        descriptor = ObjectDescriptor(
            name,
            start,
            start + len(payloads) - 1,
            len(data),
            None,
            0,
            offset_index=tuple(index) if every else None,
        )
        self.store.put_object(self.key(descriptor), bytes(data))
        self.named.append(descriptor)
        self.named.sort(key=lambda one: one.start_offset)
        return descriptor

    def add_blocks(
        self, start: int, blocks: Sequence[Sequence[bytes]], *, indexed: bool = True
    ) -> ObjectDescriptor:
        """A compressed object of these blocks, each with an index entry or none at all."""
        data, index, raw, content, at = bytearray(), [], 0, ContentHash(), start
        for payloads in blocks:
            frames = b"".join(encode_frame(at + n, one) for n, one in enumerate(payloads))
            self.frames.update({at + n: one for n, one in enumerate(payloads)})
            index.append((at, len(data)))
            data += compress_block(RawBlock(at, len(payloads), frames), 3)
            content.add(frames)
            raw += len(frames)
            at += len(payloads)
        name = str(ObjectName(start, at - 1, compressed=True))
        descriptor = ObjectDescriptor(
            name,
            start,
            at - 1,
            len(data),
            None,
            0,
            offset_index=tuple(index) if indexed else None,
            content_hash=content.value,
            raw_size=raw,
            codec=ZSTD,
        )
        self.store.put_object(self.key(descriptor), bytes(data))
        self.named.append(descriptor)
        self.named.sort(key=lambda one: one.start_offset)
        return descriptor

    def key(self, descriptor: ObjectDescriptor) -> str:
        return object_key(TOPIC, descriptor.object_id)

    def data(self, descriptor: ObjectDescriptor) -> bytearray:
        return bytearray(self.store.get_range(self.key(descriptor), 0, descriptor.size))

    def overwrite(self, descriptor: ObjectDescriptor, at: int, new: bytes) -> None:
        data = self.data(descriptor)
        data[at : at + len(new)] = new
        self.store.put_object(self.key(descriptor), bytes(data))

    def rename(self, descriptor: ObjectDescriptor, **changed: object) -> ObjectDescriptor:
        """Another descriptor for the same object."""
        other = replace(descriptor, **changed)  # type: ignore[arg-type]
        self.named[self.named.index(descriptor)] = other
        return other

    def delete(self, descriptor: ObjectDescriptor, *, forget: bool = True) -> None:
        self.store.delete_object(self.key(descriptor))
        if forget:
            self.named.remove(descriptor)

    # ---- the source of descriptors ----

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        self.queries += 1
        self.queried.append((start, end))
        return [
            one
            for one in self.named
            if one.end_offset >= start and (end is None or one.start_offset < end)
        ][:limit]

    def missing(self, offset: int) -> ForebayError:
        if offset in self.lost:
            return LostOffsets(f"{offset} is lost", start=self.lost.start, end=self.lost.stop)
        start = self.named[0].start_offset if self.named else 0
        end = self.named[-1].next_offset if self.named else 0
        return OffsetOutOfRange(f"no object holds {offset}", start=start, end=end)


class HookedStore:
    """A store whose requests go through `before`, which may wait or raise."""

    def __init__(self, store: MemoryBackend, before: Callable[[str, int, int], None]) -> None:
        self._store = store
        self._before = before
        self.requests: list[tuple[str, int, int]] = []

    @property
    def name(self) -> str:
        return self._store.name

    def head(self, key: str) -> ObjectMeta:
        return self._store.head(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        self.requests.append((key, start, end))
        self._before(key, start, end)
        return self._store.get_range(key, start, end, etag=etag)


class Gate:
    """Requests wait until it is opened; `arrived` tells how many do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._waiting = 0

    def __call__(self, *_: object) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open, PATIENCE)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def arrived(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting >= count, PATIENCE)


def settings_of(*, ahead: int = 4, lenient: bool = False) -> CloudReaderSettings:
    return CloudReaderSettings(read_ahead_chunks=ahead, lenient=lenient)


def stream_of(
    topic: StoredTopic,
    pool: FetchPool,
    start: int = 0,
    end: int | None = None,
    *,
    chunk_bytes: int = 64,
    ahead: int = 4,
    lenient: bool = False,
    store: HookedStore | None = None,
) -> ObjectStream:
    settings = settings_of(ahead=ahead, lenient=lenient)
    return ObjectStream(
        TOPIC, store or topic.store, topic, pool, settings, start, end, chunk_bytes=chunk_bytes
    )


def drained(
    stream: ObjectStream,
    limit: int | None = None,
    found: list[tuple[int, bytes]] | None = None,
) -> list[tuple[int, bytes]]:
    """All that the stream still gives, added to `found`, which keeps it if it raises."""
    found = [] if found is None else found
    while (frames := stream.next(limit)) is not None:
        assert 0 < len(frames) <= (limit or len(frames))
        found += plain(frames)
    return found


def plain(frames: Scan) -> list[tuple[int, bytes]]:
    return [(offset, bytes(one)) for offset, one in frames]
