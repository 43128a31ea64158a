"""What an executor does for a compaction: several objects into one, and the proof of it.

Raw frames are streamed, never decoded: every checksum is checked, that offsets are consecutive,
and that each object begins, ends and is as long as its descriptor says. All bytes are hashed on
the way. Then the new object is read back in the same manner, and must give the same: count,
first and last offset, size, index and hash. Nothing is committed here.

Doing it twice writes the same bytes under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

from forebay.errors import CorruptLog, ForebayError, MissingData
from forebay.format.descriptor import Index, ObjectDescriptor
from forebay.format.frame import HEADER_BYTES
from forebay.format.index import ObjectIndex
from forebay.format.names import TopicName, object_key
from forebay.pipeline.resources import executor_resources
from forebay.read.history import ObjectStream
from forebay.read.verify import looks_same
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources
from forebay.upload.engine import put_sidecar, require_size


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One object to write, and what it is made of, oldest first."""

    topic: TopicName
    object_id: str
    objects: tuple[ObjectDescriptor, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was read of some objects."""

    start_offset: int
    next_offset: int
    messages: int
    size: int
    sha256: str
    """Of all frames, headers too, in the order of their offsets."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An object that is whole and in its place, and not yet committed."""

    descriptor: ObjectDescriptor
    before: Proof
    after: Proof


def rewrite(settings: StoreSettings, job: Rewrite) -> Rewritten:
    """Writes the object, and reads it back; CorruptLog where anything differs.

    It is as old as the newest object in it: remote retention by age is not put off.
    """
    bench = executor_resources(settings)
    for each in job.objects:
        looks_same(bench.store, job.topic, each)
    writer = bench.store.open_writer(
        object_key(job.topic, job.object_id),
        chunk_bytes=settings.uploader.stream_chunk_size,
        concurrent_parts=settings.uploader.concurrent_parts,
    )
    with writer:
        before, index = _read(bench, job.topic, job.objects, writer.write)
        meta = writer.close()
    require_size(bench.store, meta, before.size)
    descriptor = ObjectDescriptor(
        job.object_id,
        before.start_offset,
        before.next_offset - 1,
        before.size,
        meta.etag,
        max(each.created_at for each in job.objects),
        offset_index=index,
    )
    after, index_again = _read(bench, job.topic, (descriptor,), None)
    if (after, index_again) != (before, index):
        raise CorruptLog(
            f"{bench.store.name}: {meta.key} does not hold what it was made of: {after}, and "
            f"{before} was written"
        )
    if settings.uploader.sidecars:
        put_sidecar(bench.store, job.topic, descriptor)
    return Rewritten(descriptor, before, after)


class _Chain:
    """A source of these descriptors alone."""

    def __init__(self, topic: TopicName, objects: tuple[ObjectDescriptor, ...]) -> None:
        self._topic = topic
        self._objects = objects

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        found = (
            each
            for each in self._objects
            if each.end_offset >= start and (end is None or each.start_offset < end)
        )
        return [each for each, _ in zip(found, range(limit), strict=False)]

    def missing(self, offset: int) -> ForebayError:
        return MissingData(f"{self._topic}: offset {offset} is in none of the objects to compact")


def _read(
    bench: StoreResources,
    topic: TopicName,
    objects: tuple[ObjectDescriptor, ...],
    write: Callable[[memoryview], None] | None,
) -> tuple[Proof, Index]:
    """Every frame of the objects; at most what a stream fetches ahead is in memory."""
    reading = replace(bench.settings.cloud_reader, lenient=False)
    start, end = objects[0].start_offset, objects[-1].next_offset
    digest, index = sha256(), ObjectIndex()
    size = messages = 0
    source = _Chain(topic, objects)
    with ObjectStream(topic, bench.store, source, bench.pool, reading, start, end) as stream:
        while (frames := stream.next()) is not None:
            first = frames.positions[0] - HEADER_BYTES
            raw = memoryview(frames.buffer)[first : frames.safe_length]
            index.add(frames, size)
            digest.update(raw)
            if write is not None:
                write(raw)
            size += len(raw)
            messages += len(frames)
            del frames, raw  # else their chunk stays while the next one is fetched
        following = stream.offset
    said = (end, end - start, sum(each.size for each in objects))
    if (following, messages, size) != said:
        raise CorruptLog(
            f"{topic}: the objects from {objects[0].object_id} to {objects[-1].object_id} hold "
            f"{messages} messages in {size} bytes up to offset {following}, and their descriptors "
            f"say {said[1]} in {said[2]} up to {end}"
        )
    return Proof(start, following, messages, size, digest.hexdigest()), index.frozen()
