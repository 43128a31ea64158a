"""Carries repairs out: files and objects written again, losses recorded; copies kept of all that
is changed.

Every step leaves a store that is no worse than before it, and that a second run finds its way in:
a file is replaced by a whole one, an object likewise, and a loss is in the catalog before the log
is cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Change
from forebay.catalog.ownership import acquire
from forebay.catalog.records import TopicRecord, skip_lost
from forebay.errors import CorruptLog, MissingData, ObjectMissing
from forebay.files.disk import AppendFile, Disk, append_all, replace_file
from forebay.format.checkpoint import SegmentEntry, WalCheckpoint, encode_checkpoint
from forebay.format.frame import scan
from forebay.format.names import (
    CHECKPOINT_FILE,
    LOG_ID_FILE,
    UPLOADER_CHECKPOINT_FILE,
    ObjectName,
    TopicName,
    object_key,
)
from forebay.format.object_index import ObjectIndex
from forebay.format.segment_index import encode_index
from forebay.limits import MIB, READ_CHUNK_BYTES
from forebay.objects.store import CloudStore
from forebay.settings import UploaderSettings
from forebay.topic.opening import lock_name
from forebay.topic.repairs_frames import Hole, Piece, cover, frames_of
from forebay.topic.repairs_plan import LocalPlan, ObjectRewrite, Rewrite
from forebay.topic.tiers import Tiers
from forebay.upload.transfer import Transferred, describe, put_sidecar, require_size
from forebay.wal.chunks import build_index
from forebay.wal.publisher import Publisher
from forebay.wal.recovery import remove_segment

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
            for start in range(0, size, _COPY_BYTES):
                append_all(target, store.get_range(key, start, min(start + _COPY_BYTES, size)))
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
    """Repairs of one topic's files; the caller holds the lock through `publisher`."""

    def __init__(
        self, disk: Disk, topic: TopicName, plan: LocalPlan, publisher: Publisher, copies: Copies
    ) -> None:
        self._disk = disk
        self._topic = topic
        self._plan = plan
        self._publisher = publisher
        self._copies = copies
        self._directory = plan.survey.directory

    def run(self) -> None:
        plan = self._plan
        for rewrite in plan.rewrites:
            self._rewrite(rewrite)
        for target in plan.indexes:
            self._index(plan.survey.path(target.seq), target.seq, target.first)
        if not plan.changes:
            return
        for segment in plan.removals:
            self._copies.keep(self._topic, segment.path)
        if plan.targets:
            self._remember()
            self._remove()
        else:
            # Without a segment, a checkpoint names none that would tell what is to be removed.
            self._remove()
            self._remember()

    def _rewrite(self, rewrite: Rewrite) -> None:
        path = self._plan.survey.path(rewrite.target.seq)
        self._copies.keep(self._topic, path)
        temporary = path.with_name(path.name + ".tmp")
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        with closing(self._disk.create(temporary)) as file:
            for frames in frames_of(rewrite.pieces):
                append_all(file, frames)
            file.sync()
        self._disk.replace(temporary, path)
        self._disk.sync_dir(self._directory)
        if rewrite.target.seq != self._plan.targets[-1].seq:
            self._index(path, rewrite.target.seq, rewrite.target.first)

    def _index(self, path: Path, seq: int, first: int) -> None:
        at = path.with_name(self._plan.survey.names.index(seq))
        index = build_index(self._disk, path, first)
        self._copies.keep(self._topic, at)
        replace_file(self._disk, at, encode_index(index, self._disk.size(path)))

    def _remember(self) -> None:
        survey, targets = self._plan.survey, self._plan.targets
        last = targets[-1] if targets else None
        entries = tuple(
            SegmentEntry(each.seq, each.first, None if each is last else each.end)
            for each in targets
        )
        at = self._directory / CHECKPOINT_FILE
        self._copies.keep(self._topic, at)
        checkpoint = WalCheckpoint(survey.start, survey.end, entries)
        replace_file(self._disk, at, encode_checkpoint(checkpoint))
        size = self._disk.size(survey.path(last.seq)) if last is not None else 0
        self._publisher.publish(
            seq=last.seq if last is not None else 0,
            position=size,
            next_offset=survey.end,
            start_offset=survey.start,
        )

    def _remove(self) -> None:
        for segment in self._plan.removals:
            remove_segment(self._disk, self._plan.survey.names, segment.path, segment.seq)
        if self._plan.removals:
            self._disk.sync_dir(self._directory)


def put_log_id(disk: Disk, topic: TopicName, directory: Path, log_id: str, copies: Copies) -> None:
    copies.keep(topic, directory / LOG_ID_FILE)
    replace_file(disk, directory / LOG_ID_FILE, log_id.encode())


def drop_uploader_checkpoint(disk: Disk, topic: TopicName, directory: Path, copies: Copies) -> None:
    """The next upload looks for its place, and writes one."""
    copies.keep(topic, directory / UPLOADER_CHECKPOINT_FILE)
    disk.unlink(directory / UPLOADER_CHECKPOINT_FILE)
    disk.sync_dir(directory)


# ---- objects and the catalog ------------------------------------------------------------------


def write_object(
    store: CloudStore, key: str, pieces: Sequence[Piece], settings: UploaderSettings
) -> Transferred:
    index = ObjectIndex()
    size = 0
    with store.open_writer(
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


def rewrite_object(tiers: Tiers, topic: TopicName, wanted: ObjectRewrite, copies: Copies) -> None:
    """Under its name, with the bytes that the name stands for; read back before it counts."""
    descriptor = wanted.descriptor
    key = object_key(topic, descriptor.object_id)
    copies.keep_object(topic, tiers.store, key)
    done = write_object(tiers.store, key, wanted.pieces, tiers.settings.uploader)
    if done.meta.size != descriptor.size:
        raise CorruptLog(
            f"{key}: written again it has {done.meta.size} bytes, and its descriptor says "
            f"{descriptor.size}"
        )
    tiers.read_back(topic, descriptor)


def record_losses(
    tiers: Tiers, disk: Disk, topic: TopicName, plan: LocalPlan, losses: Sequence[Hole]
) -> None:
    """Uploads what is readable before each hole, and records the hole; in this order, so that the
    chain has no gap at any time."""
    directory = plan.survey.directory
    lock = lock_name(disk, directory)
    ownership, record = acquire(tiers.session, topic, lock, _known(topic))
    for start, end in sorted(losses):
        if record.tail < start:
            pieces, holes = cover(record.tail, start, plan.survey.runs)
            if holes:
                raise MissingData(f"{topic}: offsets {holes[0][0]} to {holes[0][1] - 1} are gone")
            for piece in pieces:
                _upload(tiers, topic, ownership.epoch, piece)

        def change(record: TopicRecord, end: int = end) -> Change:
            if record.tail >= end:
                return Change(record)
            lost = record.with_lost(record.tail, end)
            verified = skip_lost(lost, record.verified)
            reserved = max(record.reserved, end)
            return Change(replace(lost, tail=end, verified=verified, reserved=reserved))

        record = tiers.catalog.update(topic, ownership.epoch, change)
    ownership.release(plan.survey.end)


def _known(topic: TopicName) -> Callable[[TopicRecord | None], TopicRecord]:
    def decide(record: TopicRecord | None) -> TopicRecord:
        if record is None:
            raise MissingData(f"{topic}: the catalog does not know the topic any more")
        return record

    return decide


def _upload(tiers: Tiers, topic: TopicName, epoch: int, piece: Piece) -> None:
    catalog, settings = tiers.catalog, tiers.settings.uploader
    intent = catalog.intend(topic, epoch, ObjectName(piece.first, piece.end - 1))
    key = object_key(topic, intent.object_id)
    done = write_object(tiers.store, key, [piece], settings)
    now_ms = tiers.clock.now_ms()
    descriptor = describe(intent.object_id, piece.first, piece.end, done, now_ms)
    if settings.sidecars:
        put_sidecar(tiers.store, topic, descriptor)
    catalog.commit(topic, intent, descriptor)
    tiers.read_back(topic, descriptor)
    catalog.mark_verified(topic, descriptor)
