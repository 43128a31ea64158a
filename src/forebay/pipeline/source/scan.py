"""Runs a scan: `plan_scan` on the driver, `read_split` in a task. Nothing here depends on Spark.

Consecutive pieces in objects are read as one stream, with read-ahead. A segment is read through one
buffer. Memory is bounded. Every checksum and every offset is checked: damage raises an error with
the topic, the object or file, and the position.

If a segment or an object is gone when it is read, its offsets are planned again, once: a segment
that retention deleted is in an object, and an object that a compaction replaced is in another.

Beware: frames are valid only until the next ones are read.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final

from forebay.catalog.records import TopicRecord
from forebay.errors import CorruptFrame, ForebayError, MissingData, ObjectChanged, UsageError
from forebay.files.disk import ReadFile
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import Scan
from forebay.format.names import TopicName, object_key
from forebay.limits import MIB
from forebay.logs import event
from forebay.pipeline.location import NO_DATA
from forebay.pipeline.source.options import ScanOptions
from forebay.pipeline.source.plan import (
    OffsetRange,
    Piece,
    Split,
    after_skipped,
    joined,
    plan_topic,
    recut,
    resolve_range,
    splits,
)
from forebay.read.object_stream import ObjectStream
from forebay.read.tiered_log import CatalogSource
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources, executor_resources
from forebay.topic.view import StoreView, TopicView
from forebay.wal.segment import ChunkReader, require_complete

if TYPE_CHECKING:
    import pyarrow as pa

_log: Final = logging.getLogger("forebay.pipeline")

CHUNK_BYTES: Final = 1 * MIB
"""Bytes to read of a file at a time: they stay in the processor's cache until the batch is made."""
BATCH_BYTES: Final = 1 * MIB
"""About the bytes of one Arrow batch. Larger batches are not faster in Spark: their memory is given
back to the system each time, and new pages from it cost more than the copying."""
_TRIES: Final = 3
"""Attempts at a plan. More are not needed: retention deletes a segment hours after its upload."""


# ---- frames of a split


def scan_split(resources: StoreResources, split: Split) -> Iterator[tuple[TopicName, Scan]]:
    """Yields the frames of the split in order, a chunk at a time, with their topic."""
    chunks = ChunkReader(CHUNK_BYTES)
    for neighbours in _neighbours(split.pieces):
        for frames in scan_pieces(resources, neighbours, chunks):
            yield neighbours[0].topic, frames
            del frames  # frees its chunk before the next one is fetched


def scan_pieces(
    resources: StoreResources, pieces: Sequence[Piece], chunks: ChunkReader | None = None
) -> Iterator[Scan]:
    """Yields the frames of consecutive pieces of one topic, as `_neighbours` groups them."""
    first = pieces[0]
    if first.descriptor is not None:
        if resources.objects_are_files and not first.descriptor.encoded:
            yield from _local_frames(resources, pieces, chunks or ChunkReader(CHUNK_BYTES))
        else:
            yield from _object_frames(resources, pieces)
        return
    done = first.first
    try:
        for frames in _segment_frames(resources, first, chunks or ChunkReader(CHUNK_BYTES)):
            done = frames.offsets[-1] + 1
            yield frames
            del frames
    except FileNotFoundError:
        event(
            _log,
            logging.INFO,
            "segment is gone; its offsets are planned again",
            topic=first.topic,
            file=first.path,
            first=done,
            next=first.next,
        )
        yield from _frames_of_second_plan(resources, _plan_again(resources, first, done))


def _plan_again(resources: StoreResources, piece: Piece, start: int) -> list[Piece]:
    """Plans the rest of a piece whose segment is gone; MissingData if no object holds it."""
    gone = (
        f"{piece.topic}: {piece.path} is not on {gethostname()}, and no object holds offsets "
        f"{start} to {piece.next - 1}: upload them first, or give every executor access to the "
        "data directory"
    )
    if resources.server is not None:
        _ = resources.catalog  # raises an error that says why, if it cannot be opened here
    with StoreView(resources.settings, disk=resources.disk, clock=resources.clock) as store:
        view = store.topic(str(piece.topic))
        if view.end_offset < piece.next:
            raise MissingData(gone)
        planned = plan_topic(view, start, piece.next)
    if any(each.path == piece.path for each in planned):
        raise MissingData(gone)
    return planned


def _frames_of_second_plan(resources: StoreResources, pieces: Sequence[Piece]) -> Iterator[Scan]:
    """Yields the frames of a second plan; MissingData if a segment is gone again."""
    for neighbours in _neighbours(pieces):
        if neighbours[0].descriptor is not None:
            yield from _object_frames(resources, neighbours)
            continue
        try:
            yield from _segment_frames(resources, neighbours[0], ChunkReader(CHUNK_BYTES))
        except FileNotFoundError as error:
            raise MissingData(
                f"{neighbours[0].topic}: {neighbours[0].path}, which holds offset "
                f"{neighbours[0].first}, was deleted while it was read: run the query again"
            ) from error


def _neighbours(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups consecutive pieces in objects, compressed ones and ledgers apart from others.

    Each piece in a segment is a separate group.
    """
    listed = list(pieces)
    neighbours = listed[:1]
    for before, piece in pairwise(listed):
        follows = before.topic == piece.topic and before.next == piece.first
        both = before.descriptor is not None and piece.descriptor is not None
        if follows and both and _form(before) == _form(piece):
            neighbours.append(piece)
        else:
            yield neighbours
            neighbours = [piece]
    if neighbours:
        yield neighbours


def _form(piece: Piece) -> tuple[str | None, str | None]:
    each = piece.descriptor
    return (None, None) if each is None else (each.codec, each.format)


class PlannedSource:
    """A source of descriptors: from the plan at first, from the catalog when the plan is outdated.

    A stream asks for the same offsets again if it did not find an object. The plan is outdated
    then.
    """

    def __init__(
        self, resources: StoreResources, topic: TopicName, planned: Sequence[ObjectDescriptor]
    ) -> None:
        self._resources = resources
        self._topic = topic
        self._planned = planned
        self._given = 0

    @property
    def _catalog(self) -> CatalogSource:
        """Opened when it is used: most tasks never connect to the catalog."""
        return CatalogSource(self._resources.catalog, self._topic)

    def descriptors(self, start: int, end: int | None, limit: int) -> list[ObjectDescriptor]:
        if start < self._given:
            self._planned = ()
        found = [
            each
            for each in self._planned
            if each.end_offset >= start and (end is None or each.start_offset < end)
        ][:limit]
        if not self._planned:
            return self._catalog.descriptors(start, end, limit)
        self._given = found[-1].next_offset if found else self._given
        return found

    def missing(self, offset: int) -> ForebayError | None:
        return self._catalog.missing(offset)


def _object_frames(resources: StoreResources, pieces: Sequence[Piece]) -> Iterator[Scan]:
    topic, first, stop = pieces[0].topic, pieces[0].first, pieces[-1].next
    source = PlannedSource(resources, topic, joined(pieces))
    settings = replace(resources.settings.cloud_reader, lenient=False)
    with ObjectStream(
        topic,
        resources.store,
        source,
        resources.pool,
        settings,
        first,
        stop,
        indexes=resources.sidecar_indexes,
    ) as stream:
        while (frames := stream.next()) is not None:
            yield frames
            del frames
        if stream.offset != stop:
            raise MissingData(
                f"{topic}: the objects end at offset {stream.offset}, but the plan goes to "
                f"{stop - 1}, with {pieces[-1].place} as the last one"
            )


def _local_frames(
    resources: StoreResources, pieces: Sequence[Piece], chunks: ChunkReader
) -> Iterator[Scan]:
    """Reads objects that are local files like segments, which takes half the time.

    If a file is gone, `_object_frames` looks up in the catalog where its offsets are now. It also
    compares the hash of an object with another etag, and ignores an index that is wrong.
    """
    done = pieces[0].first
    for number, piece in enumerate(pieces):
        assert piece.descriptor is not None
        path = resources.store.local_path(object_key(piece.topic, piece.descriptor.object_id))
        assert path is not None, "the objects are files here"
        try:
            _require_own(resources, piece.topic, piece.descriptor)
            for frames in _file_frames(resources, path, piece, chunks):
                done = frames.offsets[-1] + 1
                yield frames
                del frames
        except (FileNotFoundError, CorruptFrame, ObjectChanged) as error:
            if isinstance(error, CorruptFrame) and done == piece.next:
                raise  # there are bytes after the last frame
            yield from _object_frames(
                resources, [piece._replace(first=done), *pieces[number + 1 :]]
            )
            return


def _require_own(resources: StoreResources, topic: TopicName, descriptor: ObjectDescriptor) -> None:
    """Raises ObjectChanged if the object has another etag than its descriptor says."""
    if descriptor.content_hash is not None:
        key = object_key(topic, descriptor.object_id)
        resources.store.get_range(key, 0, 0, etag=descriptor.etag)


def _segment_frames(resources: StoreResources, piece: Piece, chunks: ChunkReader) -> Iterator[Scan]:
    assert piece.path is not None, "a piece is in an object or in a segment"
    return _file_frames(resources, piece.path, piece, chunks)


def _file_frames(
    resources: StoreResources, path: Path, piece: Piece, chunks: ChunkReader
) -> Iterator[Scan]:
    file = resources.disk.open_read(path)
    try:
        yield from _frames_of(file, path, piece, chunks)
    finally:
        file.close()


def _frames_of(file: ReadFile, path: Path, piece: Piece, chunks: ChunkReader) -> Iterator[Scan]:
    position, offset = piece.begin, piece.at
    while offset < piece.next:
        if position >= piece.end or position >= file.size():
            ends = f"the {_kind(piece)} ends at offset {offset}; it should end at {piece.next}"
            raise _damaged(piece, ends, position, offset)
        found = chunks.read(file, position, piece.end, offset)
        if not len(found):
            try:
                require_complete(found, path, position)
            except CorruptFrame as error:
                raise _damaged(piece, error.reason, error.position, error.offset) from error
        skip, take = max(piece.first - offset, 0), min(piece.next - offset, len(found))
        position += found.safe_length
        offset += len(found)
        if skip < take:
            yield found.part(skip, take)
    whole = piece.descriptor is not None and piece.next == piece.descriptor.next_offset
    if whole and position != piece.end:
        raise _damaged(piece, "there are bytes after the last frame", position, offset)


def _kind(piece: Piece) -> str:
    return "segment" if piece.descriptor is None else "object"


def _damaged(piece: Piece, reason: str, position: int, offset: int | None) -> CorruptFrame:
    place = (
        f"{piece.topic}: {piece.path}"
        if piece.descriptor is None
        else object_key(piece.topic, piece.descriptor.object_id)
    )
    return CorruptFrame(reason, file=place, position=position, offset=offset)


def in_parts(frames: Scan, part_bytes: int) -> Iterator[Scan]:
    """Yields the frames in parts of about `part_bytes`; a larger frame is a separate part."""
    at = 0
    while at < len(frames):
        stop = bisect_left(frames.positions, frames.positions[at] + part_bytes, at + 1)
        yield frames.part(at, stop)
        at = stop


# ---- the scan


def plan_scan(options: ScanOptions) -> list[Split]:
    """The splits that read what the options select of the messages that are synced now.

    UsageError for topics or offsets that do not fit the store; see also `plan_topic`.
    """
    for _ in range(_TRIES):
        try:
            with without_collections():
                return _plan_once(options)
        except FileNotFoundError as error:  # a segment was uploaded and deleted meanwhile
            gone = error
    raise MissingData(f"segments were deleted while the scan was planned: {gone}") from gone


@contextmanager
def without_collections() -> Iterator[None]:
    """Switches garbage collection off.

    A plan is up to some hundred thousand small objects without cycles. Searching them for cycles
    again and again took a quarter of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plan_once(options: ScanOptions) -> list[Split]:
    with open_view(options.settings) as store:
        topics = options.chosen(store.topics())
        for name, offsets in (
            ("startingOffsets", options.starting),
            ("endingOffsets", options.ending),
        ):
            offsets.require_named(name, topics)
        views = {topic: store.topic(str(topic)) for topic in topics}
        pieces: list[Piece] = []
        for view in views.values():
            pieces += _plan_view(view, options)
        planned = splits(
            pieces,
            options.split_bytes,
            options.partitions_min,
            lambda piece, size: recut(views[piece.topic], piece, size),
        )
    event(
        _log,
        logging.INFO,
        "scan planned",
        topics=len(topics),
        pieces=len(pieces),
        splits=len(planned),
        messages=sum(split.count for split in planned),
        bytes=sum(split.size for split in planned),
    )
    return planned


def open_view(settings: StoreSettings) -> StoreView:
    """A view of the store; UsageError if there is none."""
    data = settings.data
    if data is not None and Path(data) != NO_DATA and not Path(data).is_dir():
        raise UsageError(f"there is no store at {data}: it is not a directory")
    return StoreView(settings)


def range_of(resources: StoreResources, view: TopicView, options: ScanOptions) -> OffsetRange:
    """The offsets of the topic that the options select; OffsetOutOfRange as `resolve_range`.

    A range that begins inside offsets without messages, which are skipped, begins after them.
    """
    start, end = options.starting.of(view.topic), options.ending.of(view.topic)
    assert start is not None, "named partitions were checked"
    assert end is not None
    if options.starting_time is not None:
        start = view.offset_at_time(options.starting_time, resources)
    if options.ending_time is not None:
        end = view.offset_at_time(options.ending_time, resources)
    fail = options.fail_on_data_loss
    found = resolve_range(view, start, end, fail_on_data_loss=fail)
    first = after_skipped(view.record or TopicRecord(), found.start, fail_on_data_loss=fail)
    return replace(found, start=first, end=max(first, found.end))


def _plan_view(view: TopicView, options: ScanOptions) -> list[Piece]:
    wanted = range_of(executor_resources(options.settings), view, options)
    return plan_topic(
        view,
        wanted.start,
        wanted.end,
        split_bytes=options.split_bytes,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def read_split(
    settings: StoreSettings, split: Split, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the split, in record batches of about BATCH_BYTES."""
    from forebay.pipeline.source.columns import BatchMaker

    make = BatchMaker(columns).batch
    for topic, frames in scan_split(executor_resources(settings), split):
        for part in in_parts(frames, BATCH_BYTES):
            yield make(topic, part)
            del part
        del frames
