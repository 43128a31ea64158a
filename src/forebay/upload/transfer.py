"""Raw frames into one object, in bounded memory, with its sparse index on the way.

An object is written once under its final name and is invisible until it is whole. When it does
not have the planned size in the end, or the store says so, nothing of it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forebay.errors import CorruptLog
from forebay.format.descriptor import Index, ObjectDescriptor, encode_descriptor
from forebay.format.frame import Scan
from forebay.format.index import ObjectIndex
from forebay.format.names import TopicName, object_key, sidecar
from forebay.objects.backend import ObjectMeta, ObjectWriter
from forebay.objects.store import CloudStore
from forebay.settings import UploaderSettings
from forebay.upload import metrics
from forebay.upload.plan import PlannedObject, SegmentSource


@dataclass(slots=True)
class ObjectBuilder:
    """Feeds frames to a writer, and keeps count."""

    writer: ObjectWriter
    index: ObjectIndex
    size: int = 0
    messages: int = 0

    def add(self, frames: Scan) -> None:
        start = frames.safe_length if not len(frames) else 0
        view = memoryview(frames.buffer)[start : frames.safe_length]
        self.index.add(frames, self.size)
        self.writer.write(view)
        metrics.stream_chunk_bytes.observe(len(view))
        self.size += len(view)
        self.messages += len(frames)

    def add_all(self, pieces: Iterable[Scan], progress: Callable[[int], None] | None) -> None:
        for frames in pieces:
            self.add(frames)
            if progress is not None:
                progress(self.size)


@dataclass(frozen=True, slots=True)
class Transferred:
    """An object that is whole and in its place, and not yet committed."""

    meta: ObjectMeta
    index: Index


def transfer(
    store: CloudStore,
    source: SegmentSource,
    topic: TopicName,
    object_id: str,
    planned: PlannedObject,
    settings: UploaderSettings,
    progress: Callable[[int], None] | None = None,
) -> Transferred:
    """Writes the planned object; whatever goes wrong, there is none."""
    key = object_key(topic, object_id)
    writer = store.open_writer(
        key,
        chunk_bytes=settings.stream_chunk_size,
        concurrent_parts=settings.concurrent_parts,
    )
    with writer:
        builder = ObjectBuilder(writer, ObjectIndex())
        builder.add_all(source.frames(planned.extents), progress)
        meta = writer.close()
    require_size(store, meta, planned.size)
    return Transferred(meta, builder.index.frozen())


def require_size(store: CloudStore, meta: ObjectMeta, size: int) -> None:
    if meta.size != size:
        raise CorruptLog(f"{store.name}: {meta.key} has {meta.size} bytes, and {size} were written")


def describe(
    object_id: str, start_offset: int, next_offset: int, done: Transferred, now_ms: int
) -> ObjectDescriptor:
    return ObjectDescriptor(
        object_id=object_id,
        start_offset=start_offset,
        end_offset=next_offset - 1,
        size=done.meta.size,
        etag=done.meta.etag,
        created_at=now_ms // 1000,
        offset_index=done.index,
    )


def put_sidecar(store: CloudStore, topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """A copy of the descriptor beside the object, for a restore from the bucket alone."""
    key = object_key(topic, sidecar(descriptor.object_id))
    store.put(key, encode_descriptor(descriptor))
