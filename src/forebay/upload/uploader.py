"""`Uploader`: one topic's way from segments to objects.

A cycle plans, transfers and commits objects until nothing is due, then reads back what is not
verified yet. The catalog's tail says where to go on; the checkpoint only remembers at which byte
that was. Nothing is uploaded that is not synced, nothing twice that is committed, and nothing is
stepped over: a damaged frame ends the cycle with an error, after everything before it was
committed.

What a caller gets wrong: an error here loses nothing. The next cycle begins where the catalog
says, whatever the last one left behind; what it left is for `sweep`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.catalog.catalog import Catalog, Intent, fenced
from forebay.catalog.records import TopicRecord
from forebay.clock import Clock
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    ForebayError,
    LogClosed,
    MissingData,
    TopicFenced,
    UsageError,
)
from forebay.forks import disown_after_fork
from forebay.format.checkpoint import UploaderCheckpoint
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName
from forebay.limits import CLOSE_SECONDS_MAX
from forebay.logs import event
from forebay.objects.store import CloudStore
from forebay.settings import UploaderSettings
from forebay.upload import metrics
from forebay.upload.plan import Place, PlannedObject, SegmentSource, plan_object
from forebay.upload.transfer import describe, put_sidecar, transfer
from forebay.wal.checkpoints import CheckpointStore
from forebay.wal.log import Wal
from forebay.wal.segment import Segment

_log: Final = logging.getLogger("forebay.upload")


@dataclass(frozen=True, slots=True)
class UploadPorts:
    """What the uploaders of all topics share."""

    catalog: Catalog
    store: CloudStore
    settings: UploaderSettings
    verify: Callable[[TopicName, ObjectDescriptor], None]
    """Raises unless the object holds exactly the frames that its descriptor says."""
    clock: Clock


class Uploader:
    """One cycle at a time, whoever calls."""

    def __init__(self, topic: TopicName, wal: Wal, epoch: int, ports: UploadPorts) -> None:
        if wal.checkpoints is None:
            raise UsageError(f"{topic}: a log in memory has no files to upload")
        self.topic = topic
        self.epoch = epoch
        self.source = SegmentSource(wal.disk, wal.names)
        self._wal = wal
        self.ports = ports
        self.checkpoints: CheckpointStore = wal.checkpoints
        self._turn = threading.Lock()
        self._marks = threading.Lock()
        self._uploaded = self._verified = self._start = 0
        self._stopping = threading.Event()
        self.last_error: ForebayError | None = None
        disown_after_fork(self)

    def disown(self) -> None:
        """In a forked child: the parent uploads, and would be in the way."""
        self._turn = threading.Lock()
        self._marks = threading.Lock()
        self._stopping = threading.Event()
        self._stopping.set()

    # -- watermarks -----------------------------------------------------------------------------

    @property
    def uploaded(self) -> int:
        return self._uploaded

    @property
    def verified(self) -> int:
        return self._verified

    @property
    def start_offset(self) -> int:
        """The oldest offset of the topic, by the catalog's word."""
        return self._start

    def follow(self, record: TopicRecord) -> None:
        """Takes over what the catalog says about the topic's tail.

        Not from the record of a later owner: its tail may be behind a range that is lost, which
        this log's newest messages are in.
        """
        if record.epoch != self.epoch:
            return
        with self._marks:
            self._uploaded = max(self._uploaded, record.tail)
            self._verified = max(self._verified, record.verified)
            self._start = max(self._start, record.start_offset)

    # -- a cycle --------------------------------------------------------------------------------

    def cycle(self, *, force: bool = False) -> list[ObjectDescriptor]:
        """Uploads what is due, or with `force` everything synced; answers the new objects."""
        with self._turn:
            started = self.ports.clock.monotonic()
            try:
                self._require_going()
                done = self._cycle(force=force)
            except LogClosed:
                raise
            except ForebayError as error:
                self.last_error = error
                metrics.cycles.add(1, "failed")
                metrics.failures.add(1, type(error).__name__)
                event(_log, logging.ERROR, "upload failed", topic=self.topic, error=error)
                raise
            self.last_error = None
            metrics.cycles.add(1, "done" if done else "idle")
            metrics.cycle_seconds.observe(self.ports.clock.monotonic() - started)
            return done

    def _cycle(self, *, force: bool) -> list[ObjectDescriptor]:
        done: list[ObjectDescriptor] = []
        record = self.record()
        try:
            record = self._upload_due(record, done, force=force)
        except (LogClosed, TopicFenced):
            raise
        except Exception:
            # What is committed is read back all the same; the first error is the one to tell.
            with suppress(ForebayError):
                self._verify_committed(self.record())
            raise
        if record.verified < record.tail:
            self._verify_committed(record)
        return done

    def _upload_due(
        self, record: TopicRecord, done: list[ObjectDescriptor], *, force: bool
    ) -> TopicRecord:
        """Option B: every object in one go."""
        while (planned := self.plan(record.tail, force=force)) is not None:
            try:
                record = self._upload(planned, done)
            except CommitRefused:
                record = self.record()
                if record.tail <= planned.start_offset:
                    raise
                # The pipeline was faster: on from where it got to.
        return record

    def stop(self) -> None:
        """No cycle begins any more, and one that is under way ends at its next step."""
        self._stopping.set()

    def close(self, seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Ends the cycle that is under way, if one is; what it did not commit does not count.

        One that waits for a store that does not answer is left to find out by itself, after so
        many seconds.
        """
        self.stop()
        if self._turn.acquire(timeout=seconds):
            try:
                self._abandon()
            finally:
                self._turn.release()

    def _abandon(self) -> None:
        """Gives up what a cycle left open; here a cycle leaves nothing."""

    def _require_going(self, _written: int = 0) -> None:
        if self._stopping.is_set():
            raise LogClosed(f"{self.topic}: the upload was ended")

    def record(self) -> TopicRecord:
        record = self.ports.catalog.record(self.topic)
        if record is None:
            raise MissingData(
                f"{self.topic}: {self.ports.catalog.name} has lost the topic; "
                "`forebay restore` rebuilds it from the objects"
            )
        if record.epoch != self.epoch:
            raise fenced(self.topic, self.epoch, record.epoch)
        self.follow(record)
        return record

    def plan(self, tail: int, *, force: bool) -> PlannedObject | None:
        """The next object that is due from the tail on."""
        segments = self.segments_from(tail)
        if not segments:
            return None
        start = self.place(segments[0], tail)
        overdue = force or self._overdue(segments[0])
        return plan_object(segments, start, self.ports.settings, self.source.cut, overdue=overdue)

    def segments_from(self, offset: int) -> list[Segment]:
        """The segments with synced messages from `offset` on; the first one holds it."""
        segments = [each for each in self._wal.segments() if each.end_offset > offset]
        if segments and segments[0].first_offset > offset:
            raise MissingData(
                f"{self.topic}: the objects end at offset {offset}, and the segments begin at "
                f"{segments[0].first_offset}: what is between is nowhere"
            )
        return segments

    def place(self, segment: Segment, tail: int) -> Place:
        """Where the tail is in the log: by the checkpoint if it is right, else by the index."""
        memory = self.checkpoints.get_uploader()
        if memory is not None and memory.last_committed_offset == tail - 1:
            place = Place(memory.last_read_file_seq, memory.last_read_byte_position, tail)
            if place.seq == segment.seq and self.source.holds(segment, place):
                return place
        return self.source.locate(segment, tail)

    def _overdue(self, segment: Segment) -> bool:
        """Whether the oldest message that is not uploaded may have waited for too long.

        It is younger than its segment, and younger than the last commit.
        """
        now = self.ports.clock.now_ms()
        memory = self.checkpoints.get_uploader()
        known = (segment.created_ms, memory.updated_at * 1000 if memory else 0)
        # What is later than now was noted before somebody put the clock back: it tells nothing.
        since = max((each for each in known if each <= now), default=0)
        return now - since >= self.ports.settings.max_open_seconds * 1000

    # -- one object -----------------------------------------------------------------------------

    def _upload(self, planned: PlannedObject, done: list[ObjectDescriptor]) -> TopicRecord:
        try:
            return self._upload_whole(planned, done)
        except CorruptFrame as error:
            metrics.corrupt_frames.add()
            sound = (
                planned.cut_at(Path(error.file), error.position, error.offset)
                if error.offset is not None
                else None
            )
            if sound is not None:
                self._upload_whole(sound, done)
            raise

    def _upload_whole(self, planned: PlannedObject, done: list[ObjectDescriptor]) -> TopicRecord:
        ports = self.ports
        started = ports.clock.monotonic()
        name = ObjectName(planned.start_offset, planned.next_offset - 1)
        intent = ports.catalog.intend(self.topic, self.epoch, name)
        moved = transfer(
            ports.store,
            self.source,
            self.topic,
            intent.object_id,
            planned,
            ports.settings,
            self._require_going,
        )
        descriptor = describe(
            intent.object_id,
            planned.start_offset,
            planned.next_offset,
            moved,
            ports.clock.now_ms(),
        )
        return self.commit(intent, descriptor, planned.end, done, started)

    def commit(
        self,
        intent: Intent,
        descriptor: ObjectDescriptor,
        end: Place,
        done: list[ObjectDescriptor],
        started: float,
    ) -> TopicRecord:
        """Makes the object count; `end` is where in the log it ends."""
        ports = self.ports
        if ports.settings.sidecars:
            put_sidecar(ports.store, self.topic, descriptor)
        record = ports.catalog.commit(self.topic, intent, descriptor)
        self.follow(record)
        done.append(descriptor)
        self.remember(descriptor.end_offset, end, descriptor.object_id)
        metrics.objects_created.add()
        metrics.bytes_uploaded.add(descriptor.size)
        metrics.bytes_per_object.observe(descriptor.size)
        metrics.msgs_per_object.observe(descriptor.count)
        event(
            _log,
            logging.INFO,
            "object committed",
            topic=self.topic,
            object=descriptor.object_id,
            bytes=descriptor.size,
            messages=descriptor.count,
            seconds=ports.clock.monotonic() - started,
        )
        return record

    def remember(self, committed_offset: int | None, end: Place, object_id: str | None) -> None:
        self.note(
            UploaderCheckpoint(
                last_committed_offset=committed_offset,
                last_read_file_seq=end.seq,
                last_read_byte_position=end.position,
                last_object_id=object_id,
                updated_at=self.ports.clock.now_ms() // 1000,
            )
        )

    def note(self, checkpoint: UploaderCheckpoint) -> None:
        """Best effort: a full disk must not stop what would empty it."""
        try:
            self.checkpoints.update_uploader(checkpoint)
        except OSError as error:
            event(
                _log,
                logging.WARNING,
                "the upload checkpoint was not written; the place is looked for again",
                topic=self.topic,
                error=error,
            )

    # -- reading back ---------------------------------------------------------------------------

    def _verify_committed(self, record: TopicRecord) -> None:
        """Reads back, in order, what was committed and not yet verified."""
        catalog = self.ports.catalog
        for descriptor in catalog.all_descriptors(self.topic, record.verified):
            if descriptor.next_offset <= record.verified:
                continue
            self._require_going()
            try:
                self.ports.verify(self.topic, descriptor)
            except ForebayError:
                metrics.verified.add(1, "failed")
                raise
            metrics.verified.add(1, "good")
            record = catalog.mark_verified(self.topic, descriptor)
            self.follow(record)
