"""Carries repairs out: files and objects written again, losses recorded; copies kept of all that
is changed.

Every step leaves a store that is no worse than before it, and that a second run finds its way in:
a file is replaced by a whole one, an object likewise, and a loss is in the catalog before the log
is cut. Before anything of a log is changed, recovery itself opens what it would become
(`PlannedDisk`).

What a caller gets wrong: that recovery opens a log says nothing about frames in the middle of
sealed segments, which it does not read. The survey has read them.
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
from forebay.catalog.records import TopicRecord, skip_lost
from forebay.clock import SYSTEM_CLOCK
from forebay.errors import CorruptLog, ForebayError, MissingData, ObjectMissing
from forebay.files.disk import AppendFile, Disk, ReadFile, append_all, replace_file
from forebay.format.checkpoint import Published, SegmentEntry, WalCheckpoint, encode_checkpoint
from forebay.format.frame import scan
from forebay.format.index import ObjectIndex, encode_index
from forebay.format.names import (
    CHECKPOINT_FILE,
    FAILED_FILE,
    LOG_ID_COPY_FILE,
    LOG_ID_FILE,
    UPLOADER_CHECKPOINT_FILE,
    ObjectName,
    TopicName,
    object_key,
    staged_segment,
)
from forebay.limits import MIB, READ_CHUNK_BYTES
from forebay.objects.store import CloudStore
from forebay.repair.frames import FrameSlice, Hole, cover, frames_of
from forebay.repair.plan import LocalPlan, ObjectRewrite, Rewrite
from forebay.repair.survey import Survey
from forebay.settings import UploaderSettings
from forebay.topic.opening import lock_name
from forebay.topic.resources import StoreResources
from forebay.upload.engine import Transferred, describe, put_sidecar, require_size
from forebay.wal.checkpoints import Publisher
from forebay.wal.identity import write_log_id
from forebay.wal.recovery import Recovery, remove_segment
from forebay.wal.segment import build_index

_COPY_BYTES: Final = 4 * MIB
FOLDER: Final = "repair"


class Copies:
    """What a repair changes, as it was: below `<data>/repair/<time>/`, made when first needed."""

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
        """A copy of the file, if there is one; the first copy of a run is the one that counts."""
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
    """Repairs of one topic's files; the caller holds the lock through `publisher`.

    First `stage`, which writes new files beside the old ones, then `finish`: segments may hold each
    other's frames, so none is replaced before all of them are written. What a run that was
    interrupted between has left is found by the next survey.
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
        """Returns why a log of the new files would not open; None if it would."""
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
        for path in self._staged.values():
            self._disk.unlink(path)

    def finish(self) -> None:
        plan = self._plan
        for rewrite in plan.rewrites:
            self._replace(rewrite)
        for target in plan.indexes:
            self._index(plan.survey.path(target.seq), target.seq, target.first)
        if plan.changes:
            for segment in plan.removals:
                self._copies.keep(self._topic, segment.path)
            if plan.targets:
                self._remember()
                self._remove()
            else:
                # Without a segment, a checkpoint names none that would tell what is to be removed.
                self._remove()
                self._remember()
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

    def _remember(self) -> None:
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
    """Recovery has read all that it needs, and begins to write."""


class PlannedDisk:
    """A disk as it will be once a repair is done, for reading.

    `staged` maps a file to the one that takes its place; files in `gone` are removed.
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
            return False  # a note of a failed sync asks for writing, not for a check
        return self._disk.exists(self._place(path))

    def size(self, path: Path) -> int:
        return self._disk.size(self._place(path))

    def modified(self, path: Path) -> float:
        return self._disk.modified(self._place(path))

    def open_read(self, path: Path) -> ReadFile:
        return self._disk.open_read(self._place(path))

    def unlink(self, path: Path) -> None: ...

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
    """What recovery would say against the log, or None. Changes nothing on a PlannedDisk."""
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
    """The next upload looks for its place, and writes one."""
    copies.keep(topic, directory / UPLOADER_CHECKPOINT_FILE)
    disk.unlink(directory / UPLOADER_CHECKPOINT_FILE)
    disk.sync_dir(directory)


def write_object(
    store: CloudStore, key: str, pieces: Sequence[FrameSlice], settings: UploaderSettings
) -> Transferred:
    index = ObjectIndex()
    size = 0
    with store.open_streaming_writer(
        key,
        chunk_bytes=settings.stream_chunk_size,
        concurrent_parts=settings.concurrent_parts,
    ) as writer:
        for frames in frames_of(pieces):
            index.add(scan(frames), size)
            writer.write(frames)
            size += len(frames)
        meta = writer.close()
    require_size(store, meta, size)
    return Transferred(meta, index.frozen())


def rewrite_object(
    resources: StoreResources, topic: TopicName, wanted: ObjectRewrite, copies: Copies
) -> None:
    """Under its name, with the bytes that the name stands for; read back before it counts."""
    descriptor = wanted.descriptor
    key = object_key(topic, descriptor.object_id)
    copies.keep_object(topic, resources.store, key)
    done = write_object(resources.store, key, wanted.pieces, resources.settings.uploader)
    if done.meta.size != descriptor.size:
        raise CorruptLog(
            f"{key}: written again it has {done.meta.size} bytes, and its descriptor says "
            f"{descriptor.size}"
        )
    resources.read_back(topic, descriptor)


def record_losses(
    resources: StoreResources, disk: Disk, topic: TopicName, plan: LocalPlan, losses: Sequence[Hole]
) -> None:
    """Uploads what is readable before each hole, and records the hole; in this order, so that the
    chain has no gap at any time."""
    directory = plan.survey.directory
    lock = lock_name(disk, directory)
    ownership, record = acquire(resources.session, topic, lock, _known(topic))
    for start, end in sorted(losses):
        if record.tail < start:
            pieces, holes = cover(record.tail, start, plan.survey.runs)
            if holes:
                raise MissingData(f"{topic}: offsets {holes[0][0]} to {holes[0][1] - 1} are gone")
            for piece in pieces:
                _upload(resources, topic, ownership.epoch, piece)

        def change(record: TopicRecord, end: int = end) -> Change:
            return Change(with_loss(record, (record.tail, end)))

        record = resources.catalog.update(topic, ownership.epoch, change)
    ownership.release(plan.survey.end)


def with_loss(record: TopicRecord, hole: Hole) -> TopicRecord:
    """The record once the hole is in it, and what is before the hole is in objects."""
    start, end = hole
    if record.tail >= end:
        return record
    lost = record.with_lost(start, end)
    verified = skip_lost(lost, record.verified)
    return replace(lost, tail=end, verified=verified, reserved=max(record.reserved, end))


def _known(topic: TopicName) -> Callable[[TopicRecord | None], TopicRecord]:
    def decide(record: TopicRecord | None) -> TopicRecord:
        if record is None:
            raise MissingData(f"{topic}: the catalog does not know the topic any more")
        return record

    return decide


def _upload(resources: StoreResources, topic: TopicName, epoch: int, piece: FrameSlice) -> None:
    catalog, settings = resources.catalog, resources.settings.uploader
    intent = catalog.intend(topic, epoch, ObjectName(piece.first, piece.end - 1))
    key = object_key(topic, intent.object_id)
    done = write_object(resources.store, key, [piece], settings)
    now_ms = resources.clock.now_ms()
    descriptor = describe(intent.object_id, piece.first, piece.end, done, now_ms)
    resources.read_back(topic, descriptor)
    if settings.sidecars:
        put_sidecar(resources.store, topic, descriptor)
    catalog.put_object_descriptor(topic, intent, descriptor, verified=True)
