"""Carries out repairs: writes files and objects again, records losses, and keeps copies.

A repair may be interrupted after any step: the store is then no worse than before, and a second run
continues. Files and objects are replaced by complete ones, and a loss is in the catalog before the
log is cut. Before a log is changed, recovery checks that the result would open (`PlannedDisk`).
Everything that is changed is copied first (`Copies`).

Beware: recovery does not read the frames in the middle of sealed segments, so it does not prove
that they are valid. The survey has read them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn

from forebay.catalog.catalog import Change
from forebay.catalog.ownership import acquire
from forebay.catalog.records import TopicRecord, skip_holes
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import CommitRefused, CorruptLog, ForebayError, MissingData, ObjectMissing
from forebay.files.disk import AppendFile, Disk, ReadFile, append_all, replace_file
from forebay.format.checkpoint import Published, SegmentEntry, WalCheckpoint, encode_checkpoint
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import scan
from forebay.format.index import encode_index
from forebay.format.layout import Buffer
from forebay.format.names import (
    CHECKPOINT_FILE,
    FAILED_FILE,
    LOG_ID_COPY_FILE,
    LOG_ID_FILE,
    UPLOADER_CHECKPOINT_FILE,
    ObjectName,
    TopicName,
    object_key,
    object_metadata,
    parse_ledger,
    staged_segment,
)
from forebay.limits import MIB, READ_CHUNK_BYTES
from forebay.objects.backend import ObjectMeta
from forebay.objects.store import CloudStore
from forebay.repair.frames import FrameSlice, Hole, cover, frames_of
from forebay.repair.plan import LocalPlan, ObjectRewrite, Rewrite
from forebay.repair.survey import Survey
from forebay.settings import UploaderSettings
from forebay.topic.opening import lock_name
from forebay.topic.resources import StoreResources
from forebay.upload.compression import FrameWriter
from forebay.upload.engine import (
    NewObject,
    ObjectBuilder,
    describe,
    level_of,
    new_index,
    put_ledger_index,
    put_sidecar,
    require_size,
)
from forebay.wal.checkpoints import Publisher
from forebay.wal.identity import write_log_id
from forebay.wal.recovery import Recovery, remove_segment
from forebay.wal.segment import build_index

_COPY_BYTES: Final = 4 * MIB
FOLDER: Final = "repair"


class Copies:
    """Copies of everything that a repair changes, in `<data>/repair/<time>/`.

    The directory is created when the first copy is made.
    """

    def __init__(self, disk: Disk, data: Path, now_ms: int) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ms / 1000))
        self._disk = disk
        self.folder = data / FOLDER / stamp
        number = 0
        while disk.exists(self.folder):
            number += 1
            self.folder = data / FOLDER / f"{stamp}-{number}"
        self.count = 0

    def keep(self, topic: TopicName, path: Path) -> None:
        """Copies the file, if it exists. A second copy of the same file in a run is not made."""
        if not self._disk.exists(path):
            return
        with closing(self._disk.open_read(path)) as source:
            target = self._begin(topic, path.name)
            if target is None:
                return
            with closing(target):
                buffer = memoryview(bytearray(READ_CHUNK_BYTES))
                position = 0
                while taken := source.read_into(buffer, position):
                    append_all(target, buffer[:taken])
                    position += taken
                target.sync()
        self._end(topic)

    def keep_object(self, topic: TopicName, store: CloudStore, key: str) -> None:
        try:
            size = store.head(key).size
        except ObjectMissing:
            return
        target = self._begin(topic, key.rpartition("/")[2])
        if target is None:
            return
        with closing(target):
            for chunk in store.open_ranged_reader(key, end=size, chunk_bytes=_COPY_BYTES):
                append_all(target, chunk)
            target.sync()
        self._end(topic)

    def _folder(self, topic: TopicName) -> Path:
        return self.folder / topic.namespace / topic.topic

    def _begin(self, topic: TopicName, name: str) -> AppendFile | None:
        folder = self._folder(topic)
        self._disk.make_dirs(folder)
        if self._disk.exists(folder / name):
            return None
        return self._disk.create(folder / name)

    def _end(self, topic: TopicName) -> None:
        self._disk.sync_dir(self._folder(topic))
        self.count += 1


class LocalRepair:
    """Repairs one topic's files. `publisher` holds the lock on the directory.

    Call `stage`, which writes new files beside the old ones, and then `finish`. Segments may hold
    each other's frames, so none is replaced before all are written. If a run is interrupted in
    between, the next survey finds the staged files.
    """

    def __init__(
        self, disk: Disk, topic: TopicName, plan: LocalPlan, publisher: Publisher, copies: Copies
    ) -> None:
        self._disk = disk
        self._topic = topic
        self._plan = plan
        self._publisher = publisher
        self._copies = copies
        self._directory = plan.survey.directory
        self._staged: dict[Path, Path] = {}

    def stage(self) -> str | None:
        """Writes the new files. Returns why the new log would not open; None if it would."""
        for rewrite in self._plan.rewrites:
            self._stage(rewrite)
        if self._staged:
            self._disk.sync_dir(self._directory)
        survey = self._plan.survey
        if not self._plan.changes:
            return why_closed(PlannedDisk(self._disk), survey, survey.checkpoint, survey.published)
        gone = frozenset(each.path for each in self._plan.removals)
        planned = PlannedDisk(self._disk, self._staged, gone)
        return why_closed(planned, survey, self._checkpoint(), self._published(planned))

    def discard(self) -> None:
        """Removes the staged files."""
        for path in self._staged.values():
            self._disk.unlink(path)

    def finish(self) -> None:
        """Puts the staged files in place, then writes indexes, checkpoint and position."""
        plan = self._plan
        for rewrite in plan.rewrites:
            self._replace(rewrite)
        for target in plan.indexes:
            self._index(plan.survey.path(target.seq), target.seq, target.first)
        if plan.changes:
            for segment in plan.removals:
                self._copies.keep(self._topic, segment.path)
            if plan.targets:
                self._write_checkpoints()
                self._remove()
            else:
                # A checkpoint without segments could not tell a second run what to remove.
                self._remove()
                self._write_checkpoints()
        for path in plan.survey.staged:
            self._disk.unlink(path)

    def _stage(self, rewrite: Rewrite) -> None:
        path = self._plan.survey.path(rewrite.target.seq)
        places = (path.with_name(staged_segment(path.name, copy)) for copy in itertools.count())
        place = next(each for each in places if not self._disk.exists(each))
        self._staged[path] = place
        with closing(self._disk.create(place)) as file:
            for frames in frames_of(rewrite.pieces):
                append_all(file, frames)
            file.sync()

    def _replace(self, rewrite: Rewrite) -> None:
        path = self._plan.survey.path(rewrite.target.seq)
        self._copies.keep(self._topic, path)
        self._disk.replace(self._staged[path], path)
        self._disk.sync_dir(self._directory)
        if rewrite.target.seq != self._plan.targets[-1].seq:
            self._index(path, rewrite.target.seq, rewrite.target.first)

    def _index(self, path: Path, seq: int, first: int) -> None:
        at = path.with_name(self._plan.survey.names.index(seq))
        index = build_index(self._disk, path, first)
        self._copies.keep(self._topic, at)
        replace_file(self._disk, at, encode_index(index, self._disk.size(path)))

    def _checkpoint(self) -> WalCheckpoint:
        survey, targets = self._plan.survey, self._plan.targets
        last = targets[-1] if targets else None
        entries = tuple(
            SegmentEntry(each.seq, each.first, None if each is last else each.end)
            for each in targets
        )
        return WalCheckpoint(survey.start, survey.end, entries)

    def _published(self, disk: Disk) -> Published:
        survey, targets = self._plan.survey, self._plan.targets
        seq = targets[-1].seq if targets else 0
        size = disk.size(survey.path(seq)) if targets else 0
        return Published(seq, size, survey.end, survey.start, 0)

    def _write_checkpoints(self) -> None:
        at = self._directory / CHECKPOINT_FILE
        self._copies.keep(self._topic, at)
        replace_file(self._disk, at, encode_checkpoint(self._checkpoint()))
        position = self._published(self._disk)
        self._publisher.publish(
            seq=position.seq,
            position=position.position,
            next_offset=position.next_offset,
            start_offset=position.start_offset,
        )

    def _remove(self) -> None:
        for segment in self._plan.removals:
            remove_segment(self._disk, self._plan.survey.names, segment.path, segment.seq)
        if self._plan.removals:
            self._disk.sync_dir(self._directory)


class _CheckedError(Exception):
    """Recovery has read everything and begins to write, so the log would open."""


class PlannedDisk:
    """A read-only view of a disk as it will be after a repair.

    `staged` maps a file to the file that will replace it. Files in `gone` do not exist. Writing
    raises _CheckedError.
    """

    def __init__(
        self,
        disk: Disk,
        staged: Mapping[Path, Path] | None = None,
        gone: frozenset[Path] = frozenset(),
    ) -> None:
        self._disk = disk
        self._staged = dict(staged or {})
        self._gone = gone

    def _place(self, path: Path) -> Path:
        if path in self._gone:
            raise FileNotFoundError(str(path))
        return self._staged.get(path, path)

    def list_dir(self, path: Path) -> list[str]:
        names = {*self._disk.list_dir(path), *(each.name for each in self._staged)}
        return sorted(names - {each.name for each in self._gone})

    def exists(self, path: Path) -> bool:
        if path in self._gone or path.name == FAILED_FILE:
            return False  # the mark of a failed sync would make recovery write
        return self._disk.exists(self._place(path))

    def size(self, path: Path) -> int:
        return self._disk.size(self._place(path))

    def modified(self, path: Path) -> float:
        return self._disk.modified(self._place(path))

    def open_read(self, path: Path) -> ReadFile:
        return self._disk.open_read(self._place(path))

    def unlink(self, path: Path) -> None: ...

    def remove_dir(self, path: Path) -> None: ...

    def sync_dir(self, path: Path) -> None: ...

    def make_dirs(self, path: Path) -> NoReturn:  # noqa: ARG002
        raise _CheckedError

    def create(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError

    def open_append(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError

    def replace(self, source: Path, target: Path) -> NoReturn:  # noqa: ARG002
        raise _CheckedError

    def open_locked(self, path: Path) -> AppendFile:  # noqa: ARG002
        raise _CheckedError


def why_closed(
    disk: Disk, survey: Survey, checkpoint: WalCheckpoint | None, published: Published | None
) -> str | None:
    """Returns why recovery would refuse the log, or None. Changes nothing on a `PlannedDisk`."""
    recovery = Recovery(disk, survey.directory, survey.names, SYSTEM_CLOCK, checkpoint, published)
    try:
        recovery.run()
    except _CheckedError:
        return None
    except ForebayError as error:
        return str(error)
    return None


def put_log_id(disk: Disk, topic: TopicName, directory: Path, log_id: str, copies: Copies) -> None:
    copies.keep(topic, directory / LOG_ID_FILE)
    copies.keep(topic, directory / LOG_ID_COPY_FILE)
    write_log_id(disk, directory, log_id)


def drop_uploader_checkpoint(disk: Disk, topic: TopicName, directory: Path, copies: Copies) -> None:
    """Removes the checkpoint. The next upload finds its position by itself, and writes one."""
    copies.keep(topic, directory / UPLOADER_CHECKPOINT_FILE)
    disk.unlink(directory / UPLOADER_CHECKPOINT_FILE)
    disk.sync_dir(directory)


class _Nowhere:
    """Takes the bytes of an object that is only hashed."""

    def write(self, data: Buffer) -> None: ...


def _build(
    writer: FrameWriter,
    pieces: Sequence[FrameSlice],
    settings: UploaderSettings,
    level: int | None = None,
    ledger_block_bytes: int | None = None,
) -> ObjectBuilder:
    index = new_index(settings)
    builder = ObjectBuilder(writer, level, index, ledger_block_bytes=ledger_block_bytes)
    for frames in frames_of(pieces):
        builder.add(scan(frames))
    builder.flush()
    return builder


def rewrite_object(
    resources: StoreResources, topic: TopicName, wanted: ObjectRewrite, copies: Copies
) -> None:
    """Writes a damaged or missing object again under its name, and reads it back.

    This is the one place where an object is replaced. It is safe because the object is committed
    and read again here: one that is what its descriptor says is left alone. And the frames are
    hashed before the first byte is written: CorruptLog if they are not those of the descriptor.
    """
    store, settings, descriptor = resources.store, resources.settings.uploader, wanted.descriptor
    key = object_key(topic, descriptor.object_id)
    try:
        resources.read_back(topic, descriptor)
    except CorruptLog:
        pass
    else:
        return  # somebody else has written it again
    _require_content(key, descriptor, _build(_Nowhere(), wanted.pieces, settings))
    copies.keep_object(topic, store, key)
    with store.open_streaming_writer(
        key,
        chunk_bytes=settings.stream_chunk_size,
        concurrent_parts=settings.concurrent_parts,
        metadata=object_metadata(topic, descriptor.object_id),
    ) as writer:
        level = level_of(descriptor.object_id, settings)
        block_bytes = descriptor.block_bytes if descriptor.is_ledger else None
        builder = _build(writer, wanted.pieces, settings, level, block_bytes)
        _require_content(key, descriptor, builder)
        meta = writer.close()
        require_size(store, meta, builder.stored)
    name = parse_ledger(descriptor.object_id)
    if name is not None:
        put_ledger_index(store, topic, name, builder.ledger_index(topic), create=False)
    if builder.blocks is not None:
        descriptor = _encoded_again(resources, topic, descriptor, builder, meta)
    resources.read_back(topic, descriptor)


def _encoded_again(
    resources: StoreResources,
    topic: TopicName,
    said: ObjectDescriptor,
    builder: ObjectBuilder,
    meta: ObjectMeta,
) -> ObjectDescriptor:
    """Puts a descriptor of the new bytes into the catalog: another library compresses otherwise,
    and another release may encode entries otherwise.

    Raises CommitRefused if somebody else has changed the chain.
    """
    index = builder.index.frozen()
    found = replace(said, size=meta.size, etag=meta.etag, offset_index=index)
    if not resources.catalog.replace_descriptor(topic, said, found):
        raise CommitRefused(f"{topic}: the chain no longer has {said.object_id}; repair again")
    if resources.settings.uploader.sidecars:
        put_sidecar(resources.store, topic, found)
    return found


def _require_content(key: str, descriptor: ObjectDescriptor, builder: ObjectBuilder) -> None:
    said = descriptor.content_hash or builder.content.value
    if (builder.size, builder.content.value) != (descriptor.logical_size, said):
        raise CorruptLog(
            f"{key} is not written again: the frames of its messages have {builder.size} bytes "
            f"(content {builder.content.value}), but its descriptor says "
            f"{descriptor.logical_size} ({descriptor.content_hash})"
        )


def record_losses(
    resources: StoreResources, disk: Disk, topic: TopicName, plan: LocalPlan, losses: Sequence[Hole]
) -> None:
    """Uploads the readable messages before each hole, then records the hole as lost.

    In this order the chain has no gap at any time.
    """
    directory = plan.survey.directory
    lock = lock_name(disk, directory)
    ownership, record = acquire(resources.session, topic, lock, _known(topic))
    for start, end in sorted(losses):
        if record.tail < start:
            pieces, holes = cover(record.tail, start, plan.survey.runs)
            if holes:
                raise MissingData(
                    f"{topic}: offsets {holes[0][0]} to {holes[0][1] - 1} cannot be read any more"
                )
            for piece in pieces:
                _upload(resources, topic, ownership.epoch, piece)

        def change(record: TopicRecord, end: int = end) -> Change:
            return Change(with_loss(record, (record.tail, end)))

        record = resources.catalog.update(topic, ownership.epoch, change)
    ownership.release(plan.survey.end)


def with_loss(record: TopicRecord, hole: Hole) -> TopicRecord:
    """Returns the record with the hole recorded. All before it must be in objects.

    Offsets that were certainly assigned are lost. The others may never have been used.
    """
    start, end = hole
    if record.tail >= end:
        return record
    certain = min(max(start, record.assigned), end)
    lost = record.with_lost(start, certain).with_unknown(certain, end)
    verified = skip_holes(lost, record.verified)
    return replace(lost, tail=end, verified=verified, reserved=max(record.reserved, end))


def _known(topic: TopicName) -> Callable[[TopicRecord | None], TopicRecord]:
    def decide(record: TopicRecord | None) -> TopicRecord:
        if record is None:
            raise MissingData(f"{topic}: the topic is no longer in the catalog")
        return record

    return decide


def _upload(resources: StoreResources, topic: TopicName, epoch: int, piece: FrameSlice) -> None:
    catalog, settings = resources.catalog, resources.settings.uploader
    compressed = settings.compression != "none"
    name = ObjectName(piece.first, piece.end - 1, compressed=compressed)
    intent = catalog.intend(topic, epoch, name)
    with NewObject(resources.store, topic, intent.object_id, settings) as made:
        done = _build(made, [piece], settings, made.level).finish(made)
    now_ms = resources.clock.now_ms()
    descriptor = describe(intent.object_id, piece.first, piece.end, done, now_ms)
    resources.read_back(topic, descriptor)
    if settings.sidecars:
        put_sidecar(resources.store, topic, descriptor)
    catalog.put_object_descriptor(topic, intent, descriptor, verified=True)
