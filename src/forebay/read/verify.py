"""Reads an object back and compares it with its descriptor, frame by frame.

What passes counts for deletion: every checksum, consecutive offsets from the first to the last
that the descriptor names, the size, and that the index leads where it says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from forebay.errors import CorruptLog, ForebayError, MissingData, ObjectMissing
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, Scan
from forebay.format.names import TopicName, object_key
from forebay.objects.store import CloudStore
from forebay.read.fetch import FetchPool
from forebay.read.history import ObjectStream
from forebay.settings import CloudReaderSettings


class _One:
    """A source of this one descriptor."""

    def __init__(self, descriptor: ObjectDescriptor) -> None:
        self._descriptor = descriptor

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        descriptor = self._descriptor
        inside = start <= descriptor.end_offset and (end is None or end > descriptor.start_offset)
        return [descriptor] if inside and limit > 0 else []

    def missing(self, offset: int) -> ForebayError:
        return MissingData(f"{self._descriptor.object_id} does not hold offset {offset}")


def looks_same(store: CloudStore, topic: TopicName, descriptor: ObjectDescriptor) -> bool:
    """Whether the object still has the etag of its descriptor.

    Raises where it is missing or has another size. A bucket that was copied has other etags: then
    only reading the object tells.
    """
    key = object_key(topic, descriptor.object_id)
    try:
        meta = store.head(key)
    except ObjectMissing as error:
        raise MissingData(
            f"{store.name}: {key} is missing, and the catalog counts on it"
        ) from error
    if meta.size != descriptor.size:
        raise CorruptLog(
            f"{store.name}: {key} has {meta.size} bytes, its descriptor says {descriptor.size}"
        )
    return descriptor.etag is None or meta.etag is None or meta.etag == descriptor.etag


def verify_object(
    store: CloudStore,
    pool: FetchPool,
    settings: CloudReaderSettings,
    topic: TopicName,
    descriptor: ObjectDescriptor,
) -> None:
    """CorruptFrame, CorruptLog or MissingData for an object that is not what it should be."""
    looks_same(store, topic, descriptor)
    settings = replace(settings, lenient=False)
    key = object_key(topic, descriptor.object_id)
    index = deque(descriptor.offset_index or ())
    count = position = 0
    end = descriptor.next_offset
    with ObjectStream(
        topic, store, _One(descriptor), pool, settings, descriptor.start_offset, end
    ) as stream:
        while (frames := stream.next()) is not None:
            _require_indexed(f"{store.name}: {key}", index, frames, position)
            count += len(frames)
            position += frames.safe_length - frames.positions[0] + HEADER_BYTES
            del frames
    if count != descriptor.count:
        raise CorruptLog(
            f"{store.name}: {key} has {count} messages, its descriptor says {descriptor.count}"
        )


def _require_indexed(what: str, index: deque[tuple[int, int]], frames: Scan, position: int) -> None:
    """Takes the entries that the frames, the first of them at `position`, prove right."""
    while index and index[0][0] <= frames.offsets[-1]:
        offset, said = index.popleft()
        at = position + frames.positions[offset - frames.offsets[0]] - frames.positions[0]
        if at != said:
            raise CorruptLog(
                f"{what}: the frame of offset {offset} is at position {at}, its descriptor's index "
                f"says {said}"
            )
