"""The journal writes, syncs, rotates and removes the files of one log.

A rotation syncs the old segment, creates the new one and syncs the directory, in this order, before
the first frame is written. The checkpoint is written after that, so that it may be one rotation
behind the files, and is never ahead of them.

Beware: this class has no locks, so call it from one thread at a time. After any error do not write
through it again, because what the device holds is then unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from forebay.clock import Clock
from forebay.errors import DiskError, InvalidSetting, remedy
from forebay.files.disk import (
    AppendFile,
    Disk,
    append_all,
    append_all_parts,
    replace_file,
)
from forebay.format.checkpoint import SegmentEntry, WalCheckpoint
from forebay.format.frame import scan
from forebay.format.index import SegmentIndex, encode_index
from forebay.format.layout import Buffer
from forebay.format.names import FAILED_FILE, SegmentNames
from forebay.logs import event
from forebay.settings import WalSettings
from forebay.wal import metrics
from forebay.wal.checkpoints import CheckpointStore, Publisher, out_of_place, read_published
from forebay.wal.identity import Claim, resolve_identity
from forebay.wal.memory import FrameBatch
from forebay.wal.recovery import Recovered, Recovery, remove_segment
from forebay.wal.segment import Segment, SegmentSet

_log: Final = logging.getLogger("forebay.wal")


class Journal:
    """The open files of one log, whose directory the caller has locked and recovered."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        settings: WalSettings,
        clock: Clock,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        recovered: Recovered,
        topic: str,
    ) -> None:
        self._topic = topic
        self._disk = disk
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._names = SegmentNames(settings.file_name)
        self.checkpoints = checkpoints
        self._publisher = publisher
        self._file: AppendFile | None = None
        self._written = 0
        self._sync_failed = False
        self.segments = recovered.segments
        self.start_offset = recovered.start_offset
        self.next_offset = recovered.next_offset
        self._active_since = 0.0
        """When the active segment was created, in the clock's monotonic time."""
        if self.segments.active is not None:
            self._file = disk.open_append(self.segments.active.path)
            self._written = self.segments.active.size
            age_ms = max(clock.now_ms() - self.segments.active.created_ms, 0)
            self._active_since = clock.monotonic() - age_ms / 1000
        try:
            self._checkpoint()
            self.publish()
        except BaseException:
            self._close_file()
            raise

    def commit(self, batches: Sequence[FrameBatch]) -> None:
        """Writes and syncs the batches; `segments` then covers them. `publish` comes after it.

        May rotate. Raises OSError; the batches may or may not be stored then. It is a DiskError if
        the active segment is no longer in its place: synced bytes that nobody can find are lost.
        """
        started = self._clock.monotonic()
        first, size = self.next_offset, 0
        pending: list[Buffer] = []
        for batch in batches:
            if self._file is None or self._full():
                self._write(pending)
                pending = []
                self._begin_segment(batch.first_offset)
            active = self.segments.active
            assert active is not None
            assert active.index is not None
            active.index.add(batch.first_offset, self._written)
            active.index.survey(scan(batch.data, expected=batch.first_offset, consecutive=True))
            pending.append(batch.data)
            self._written += len(batch.data)
            size += len(batch.data)
            self.next_offset = batch.end_offset
        self._write(pending)
        self._sync()
        metrics.committed(self.next_offset - first, size, self._clock.monotonic() - started)

    def rotate(self) -> None:
        """Seals the active segment, unless it is empty; the next commit begins a new one."""
        active = self.segments.active
        if active is None or active.count == 0:
            return
        self._seal()
        self._checkpoint()
        self.publish()

    def rotation_due(self) -> float | None:
        """The monotonic time when the active segment becomes too old; None if it never does.

        Not the time of day: after a jump of the clock, that can be years away.
        """
        active = self.segments.active
        seconds = self._settings.rotate_max_seconds
        if active is None or active.count == 0 or seconds is None:
            return None
        return self._active_since + seconds

    def configure(self, settings: WalSettings) -> None:
        """Rotates by these limits from now on."""
        self._settings = settings

    def forget(self, dropped: Sequence[Segment], start_offset: int) -> None:
        """Drops the oldest sealed segments from `segments`; `remove` then deletes the files."""
        gone = {segment.seq for segment in dropped}
        kept = tuple(segment for segment in self.segments.sealed if segment.seq not in gone)
        self.segments = SegmentSet(kept, self.segments.active)
        self.start_offset = start_offset

    def remove(self, dropped: Sequence[Segment]) -> None:
        """Deletes the files of segments passed to `forget`, after writing the checkpoint.

        After a crash in between, recovery finishes the removal.
        """
        self._checkpoint()
        self.publish()
        for segment in dropped:
            remove_segment(self._disk, self._names, segment.path, segment.seq)
        self._disk.sync_dir(self._directory)

    def mark_failed(self, error: BaseException) -> None:
        """If a sync failed, writes a mark that makes the next open copy the segment.

        Raises OSError if the mark cannot be written.
        """
        if self._sync_failed:
            self._publisher.require_in_place()
            replace_file(self._disk, self._directory / FAILED_FILE, repr(error).encode())

    def close(self, *, clean: bool) -> None:
        """Closes the files and releases the lock; a clean close writes a checkpoint first."""
        try:
            if clean:
                self._checkpoint()
        finally:
            try:
                self._close_file()
            finally:
                self._publisher.close()

    def _full(self) -> bool:
        limit = self._settings.rotate_max_bytes
        if limit is not None and self._written >= limit:
            return True
        due = self.rotation_due()
        return due is not None and self._clock.monotonic() >= due

    def _rotated_by(self) -> str:
        """The limit that the segment, which was just sealed, has reached."""
        limit, seconds = self._settings.rotate_max_bytes, self._settings.rotate_max_seconds
        if limit is not None and self._written >= limit:
            return "bytes"
        old = seconds is not None and self._clock.monotonic() >= self._active_since + seconds
        return "age" if old else "forced"

    def _write(self, buffers: list[Buffer]) -> None:
        if buffers:
            assert self._file is not None
            append_all_parts(self._file, buffers)

    def _sync(self) -> None:
        """Syncs the active segment. `segments` covers the written bytes only after that."""
        active = self.segments.active
        if self._file is None or active is None or self._written == active.size:
            return
        try:
            self._file.sync()
        except Exception:  # an interrupt is no error of the disk
            self._sync_failed = True
            raise
        if not self._file.in_place():
            raise out_of_place(str(active.path))
        synced = Segment(
            active.seq,
            active.path,
            active.first_offset,
            self.next_offset,
            self._written,
            active.created_ms,
            self._clock.now_ms(),
            active.index,
        )
        self.segments = SegmentSet(self.segments.sealed, synced)

    def _seal(self) -> None:
        # What follows names files by their paths, and must not write into another directory.
        self._publisher.require_in_place()
        self._sync()
        self._close_file()
        active = self.segments.active
        if active is not None:
            self._write_index(active)
            sealed = (*self.segments.sealed, replace(active, index=None))
            self.segments = SegmentSet(sealed, None)
            metrics.rotations.add()
            event(
                _log,
                logging.INFO,
                "segment rotated",
                topic=self._topic,
                file=active.path.name,
                start=active.first_offset,
                end=active.end_offset - 1,
                bytes=active.size,
                closed_by=self._rotated_by(),
            )

    def _begin_segment(self, first_offset: int) -> None:
        self._seal()
        seq = self.segments.sealed[-1].seq + 1 if self.segments.sealed else 0
        path = self._directory / self._names.segment(seq)
        self._file = self._disk.create(path)
        self._disk.sync_dir(self._directory)
        self._written = 0
        self._active_since = self._clock.monotonic()
        now = self._clock.now_ms()
        active = Segment(seq, path, first_offset, first_offset, 0, now, now, SegmentIndex(0))
        self.segments = SegmentSet(self.segments.sealed, active)
        self._checkpoint()

    def _write_index(self, segment: Segment) -> None:
        """Writes the index file. A failure is only logged, because readers can rebuild an index."""
        assert segment.index is not None
        path = self._directory / self._names.index(segment.seq)
        try:
            if self._disk.exists(path):
                self._disk.unlink(path)
            with closing(self._disk.create(path)) as file:
                append_all(file, encode_index(segment.index, segment.size))
        except OSError as error:
            text = "an index was not written; readers will scan the segment instead"
            event(_log, logging.WARNING, text, file=path, error=error)

    def _checkpoint(self) -> None:
        entries = [
            SegmentEntry(segment.seq, segment.first_offset, segment.end_offset)
            for segment in self.segments.sealed
        ]
        active = self.segments.active
        if active is not None:
            entries.append(SegmentEntry(active.seq, active.first_offset, None))
        synced = max((segment.end_offset for segment in self.segments), default=self.next_offset)
        self.checkpoints.update_wal(
            WalCheckpoint(
                start_offset=self.start_offset,
                next_offset=synced,
                segments=tuple(entries),
                rotated_at_ms=active.created_ms if active is not None else None,
            )
        )

    def publish(self) -> None:
        """Publishes what `segments` covers, for readers in other processes.

        Call it once the owner has confirmed that it may acknowledge these messages (rule R5).
        """
        newest = self.segments.active or (
            self.segments.sealed[-1] if self.segments.sealed else None
        )
        self._publisher.publish(
            seq=newest.seq if newest else 0,
            position=newest.size if newest else 0,
            next_offset=newest.end_offset if newest else self.next_offset,
            start_offset=self.start_offset,
        )

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class VolatileJournal:
    """The journal of a log in memory: it has no files, and keeps only what the cache holds."""

    def __init__(self, next_offset: int = 0) -> None:
        self.checkpoints = None
        self.segments = SegmentSet()
        self.start_offset = next_offset
        self.next_offset = next_offset

    def commit(self, batches: Sequence[FrameBatch]) -> None:
        self.next_offset = batches[-1].end_offset

    def publish(self) -> None: ...

    def rotate(self) -> None: ...

    def configure(self, settings: WalSettings) -> None: ...

    def rotation_due(self) -> float | None:
        return None

    def forget(self, dropped: Sequence[Segment], start_offset: int) -> None: ...

    def remove(self, dropped: Sequence[Segment]) -> None: ...

    def mark_failed(self, error: BaseException) -> None: ...

    def close(self, *, clean: bool) -> None: ...


AnyJournal: TypeAlias = Journal | VolatileJournal


def open_journal(
    disk: Disk,
    settings: WalSettings,
    clock: Clock,
    claim: Claim,
    known_offset: int = 0,
    topic: str = "",
) -> AnyJournal:
    """Locks the directory, recovers the log in it, acquires the claim and opens the files.

    Everything before `known_offset` must be in the log, otherwise this raises MissingData; a log in
    memory begins there. Raises LogLocked, DiskError, CorruptLog, and what the claim raises.
    """
    if settings.dir is None:
        if not settings.cache_capacity:
            raise InvalidSetting(
                "cache_capacity is 0; a log in memory (dir is None) needs at least 1"
            )
        return VolatileJournal(known_offset)
    # A later change of the working directory must not move the log.
    directory = Path(settings.dir).absolute()
    try:
        return _lock_and_recover(disk, directory, settings, clock, claim, known_offset, topic)
    except OSError as error:
        reason = f"{directory}: cannot open the log: {error}; {remedy(error)}"
        raise DiskError(error.errno, reason) from error


def _lock_and_recover(
    disk: Disk,
    directory: Path,
    settings: WalSettings,
    clock: Clock,
    claim: Claim,
    known_offset: int,
    topic: str,
) -> Journal:
    names = SegmentNames(settings.file_name)
    disk.make_dirs(directory)
    publisher = Publisher(disk, directory)
    try:
        checkpoints = CheckpointStore(disk, directory, publisher)
        published = read_published(disk, directory)
        recovery = Recovery(
            disk, directory, names, clock, checkpoints.get_wal(), published, known_offset
        )
        recovered = resolve_identity(disk, directory, names, publisher, recovery.run(), claim)
        return Journal(disk, directory, settings, clock, checkpoints, publisher, recovered, topic)
    except BaseException:
        publisher.close()
        raise
