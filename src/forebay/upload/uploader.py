"""`Uploader`: uploads one topic in its owner's process.

`run_once` plans and uploads objects until none is due (`engine` has the steps of one). Then it
reads back committed objects that are not verified: those of a restore or of an earlier release.
Each cycle begins at the catalog's tail. The checkpoint only remembers that tail's byte position.
Only synced messages are uploaded, and committed ones are never uploaded again. No message is
skipped: a damaged frame ends the cycle with an error, after everything before it was committed.

Beware: an error here loses no data. The next cycle begins at the catalog's tail again, and `sweep`
removes what the failed one left behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import Catalog, Intent, fenced
from forebay.catalog.records import TopicRecord
from forebay.errors import (
    CommitRefused,
    CorruptFrame,
    CorruptLog,
    ForebayError,
    LogClosed,
    MissingData,
    OffloadInProgress,
    TopicFenced,
    UsageError,
)
from forebay.forks import disown_after_fork
from forebay.format.checkpoint import UploaderCheckpoint
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName
from forebay.limits import CLOSE_SECONDS_MAX
from forebay.logs import event
from forebay.settings import UploaderSettings
from forebay.upload import engine, metrics
from forebay.upload.engine import Uploaded, UploadPorts, set_aside
from forebay.upload.ledgers import remove_attempt
from forebay.upload.plan import PlannedObject, SegmentSource, TopicPlanner
from forebay.wal.checkpoints import CheckpointStore
from forebay.wal.log import Wal
from forebay.wal.segment import LogPosition, Segment

_log: Final = logging.getLogger("forebay.upload")


class Uploader:
    """Uploads one topic. Thread-safe; one cycle runs at a time."""

    def __init__(
        self, topic: TopicName, wal: Wal, epoch: int, catalog: Catalog, ports: UploadPorts
    ) -> None:
        if wal.checkpoints is None:
            raise UsageError(f"{topic}: a log in memory has no files to upload")
        self.topic = topic
        self.epoch = epoch
        self.catalog = catalog
        self.ports = ports
        self.source = SegmentSource(wal.disk, wal.names)
        self.planner = TopicPlanner(topic, self.source, ports.settings, ports.clock)
        self._wanted = ports.settings
        """The settings of the next cycle."""
        self.wal = wal
        self.checkpoints: CheckpointStore = wal.checkpoints
        self._turn = threading.Lock()
        self._offloads = threading.Lock()
        """Held while ledgers are offloaded, and by an offload that waits for its turn."""
        self._marks = threading.Lock()
        self._uploaded = self._verified = self._start = 0
        self._stopping = threading.Event()
        self.last_error: ForebayError | None = None
        self.unfinished = False
        """Whether the last cycle ended at `max_batch_bytes` and left something that is due."""
        self.look: Callable[[], None] = lambda: None
        """Called before each cycle. Raises if nothing may be uploaded."""
        disown_after_fork(self)

    def disown(self) -> None:
        """Stops this uploader in a forked child; the parent goes on uploading."""
        self._turn = threading.Lock()
        self._offloads = threading.Lock()
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
        """The oldest offset of the topic, according to the catalog."""
        return self._start

    def follow(self, record: TopicRecord) -> None:
        """Updates the watermarks from the topic's record.

        A record of a later owner is ignored. Its tail may come after a lost range, and this log's
        newest messages may be in that range.
        """
        if record.epoch != self.epoch:
            return
        with self._marks:
            self._uploaded = max(self._uploaded, record.tail)
            self._verified = max(self._verified, record.verified)
            self._start = max(self._start, record.start_offset)

    # -- settings -------------------------------------------------------------------------------

    def configure(self, settings: UploaderSettings) -> None:
        """Uses these settings from the next cycle on. Does not wait for a running one."""
        self._wanted = settings
        if self._turn.acquire(blocking=False):
            try:
                self._adopt_settings()
            finally:
                self._turn.release()

    def _adopt_settings(self) -> None:
        """Takes over the settings that `configure` got. The caller has the turn."""
        settings = self._wanted
        if settings != self.ports.settings:
            self.ports = replace(self.ports, settings=settings)
            self.planner = TopicPlanner(self.topic, self.source, settings, self.ports.clock)
        if not settings.rolling:
            self._abandon()

    # -- a cycle --------------------------------------------------------------------------------

    def run_once(self, *, force: bool = False) -> list[ObjectDescriptor]:
        """Runs one cycle and returns the new objects. `force` uploads everything that is synced.

        Raises ForebayError after logging it and setting `last_error`, and LogClosed after `stop`.
        """
        with self._turn:
            started = self.ports.clock.monotonic()
            done: list[ObjectDescriptor] = []
            self.unfinished = False
            try:
                self._require_going()
                self.look()
                self._adopt_settings()
                self._upload_and_verify(done, force=force)
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

    def _upload_and_verify(self, done: list[ObjectDescriptor], *, force: bool) -> None:
        record = self.record()
        try:
            record = self._upload_due(record, done, force=force)
        except (LogClosed, TopicFenced):
            raise
        except Exception:
            # Verify what was committed before the error. If that fails too, raise the first error.
            with suppress(ForebayError):
                self._verify_committed(self.record())
            raise
        self._verify_committed(record)

    def _upload_due(
        self, record: TopicRecord, done: list[ObjectDescriptor], *, force: bool
    ) -> TopicRecord:
        """Uploads every object that is due, and adds it to `done`; returns the latest record."""
        if self.ports.settings.ledgers:
            return self._offload_due(record, done, force=force)
        batch = 0
        while (planned := self._plan(record.tail, force=force)) is not None:
            batch += planned.size
            if self._exceeds_batch(batch, planned, force=force):
                break
            try:
                record = self._upload(planned, done)
            except CommitRefused:
                record = self.record()
                if record.tail <= planned.start_offset:
                    raise
                # The pipeline committed these offsets first: continue at its tail.
        return record

    def _exceeds_batch(self, batch: int, planned: PlannedObject, *, force: bool) -> bool:
        """Whether the plan is left for the next cycle, which then begins soon.

        `batch` counts the bytes of the cycle so far and of the plan. One plan is always carried
        out, so that a frame larger than the batch does not stop the topic.
        """
        most = self.ports.settings.max_batch_bytes
        self.unfinished = not force and most is not None and planned.size < batch > most
        return self.unfinished

    # -- ledgers --------------------------------------------------------------------------------

    def offload(self, until: int) -> list[ObjectDescriptor]:
        """Uploads the sealed segments as ledgers that end at `until` or before it.

        A ledger that fails does not stop the others: those after it are written, and committed once
        the chain reaches them. Then the first error is raised. Raises OffloadInProgress if another
        offload of the topic runs, and LogClosed after `stop`.
        """
        if not self._offloads.acquire(blocking=False):
            raise OffloadInProgress(
                f"{self.topic}: an offload of the topic is running; try again when it has ended"
            )
        try:
            with self._turn:
                self._require_going()
                self.look()
                self._adopt_settings()
                done: list[ObjectDescriptor] = []
                planned = self.planned_ledgers(self.record().tail, force=True)
                self._offload([each for each in planned if each.next_offset <= until], done)
                return done
        finally:
            self._offloads.release()

    def planned_ledgers(self, tail: int, *, force: bool) -> list[PlannedObject]:
        """Returns the ledgers that are made of the sealed segments after `tail`.

        With `force` all of them, otherwise those that are due.
        """
        return list(
            self.planner.due(
                self.wal.segments(),
                tail,
                self._known_position(tail),
                force=force,
                waiting_since=self._waiting_since,
            )
        )

    def _offload_due(
        self, record: TopicRecord, done: list[ObjectDescriptor], *, force: bool
    ) -> TopicRecord:
        """Uploads the ledgers that are due, unless an offload waits, which would do the same."""
        planned = self.planned_ledgers(record.tail, force=force)
        if not planned:
            return record
        alone = self._offloads.acquire(blocking=False)
        try:
            if alone or force:
                self._offload(self._within_batch(planned, force=force), done)
            else:
                self.unfinished = True
        finally:
            if alone:
                self._offloads.release()
        return self.record()

    def _within_batch(self, planned: list[PlannedObject], *, force: bool) -> list[PlannedObject]:
        kept: list[PlannedObject] = []
        batch = 0
        for each in planned:
            batch += each.size
            if self._exceeds_batch(batch, each, force=force):
                break
            kept.append(each)
        return kept

    def _offload(self, planned: list[PlannedObject], done: list[ObjectDescriptor]) -> None:
        first: ForebayError | None = None
        for each in planned:
            try:
                self._offload_one(each, done)
            except (LogClosed, TopicFenced):
                raise
            except ForebayError as error:
                if self.record().start_offset >= each.next_offset:
                    continue  # it was deleted meanwhile: nobody misses its ledger
                event(_log, logging.ERROR, "ledger not offloaded", topic=self.topic, error=error)
                first = first or error
        if first is not None:
            raise first

    def _offload_one(self, planned: PlannedObject, done: list[ObjectDescriptor]) -> None:
        record = self.record()
        if planned.next_offset <= record.tail:
            return  # another process has committed it
        if planned.start_offset != record.tail:
            self._write_ahead(planned)
            return
        try:
            self._upload(planned, done)
        except CommitRefused:
            if self.record().tail <= planned.start_offset:
                raise

    def _write_ahead(self, planned: PlannedObject) -> None:
        """Writes a ledger that cannot be committed yet: the chain does not reach it."""
        ledgers = self.catalog.ledgers(self.topic)
        known = ledgers.attempt_at(planned.start_offset)
        if known is not None and known.descriptor is not None and known.span == planned.span:
            return
        store = self.ports.store
        task = engine.intend(self.catalog, self.topic, self.epoch, planned, store=store)
        try:
            uploaded = engine.upload(self.ports, self.source, task, self._require_going)
            ledgers.written(uploaded.descriptor)
        except ForebayError:
            self._remove(task.intent)
            raise

    def _commit_written(
        self, planned: PlannedObject, done: list[ObjectDescriptor]
    ) -> TopicRecord | None:
        """Commits a ledger that was written ahead; None if there is none, or not a good one."""
        task = engine.take_over(self.catalog, self.topic, self.epoch, planned)
        if task is None:
            return None
        try:
            uploaded = engine.upload(self.ports, self.source, task)
        except CorruptLog:
            return None  # it is removed, and written again
        return self.commit(task.intent, uploaded, planned.end, done)

    def stop(self) -> None:
        """Lets no new cycle begin, and ends a running one at its next step. Does not wait."""
        self._stopping.set()

    def close(self, seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Ends a running cycle and waits for it, at most `seconds`.

        What the cycle did not commit does not count.
        """
        self.stop()
        if self._turn.acquire(timeout=seconds):
            try:
                self._abandon()
            finally:
                self._turn.release()

    def _abandon(self) -> None:
        """Gives up an object that a cycle left open. There is none here; see `RollingUploader`."""

    def _require_going(self, _written: int = 0) -> None:
        if self._stopping.is_set():
            raise LogClosed(f"{self.topic}: the uploader was stopped")

    def record(self) -> TopicRecord:
        """Reads the topic's record and updates the watermarks.

        Raises MissingData if the catalog has no record, and TopicFenced if it has a new epoch.
        """
        record = self.catalog.find(self.topic)
        if record is None:
            raise MissingData(
                f"{self.topic}: the topic is no longer in {self.catalog.name}; "
                "`forebay restore` rebuilds it from the objects"
            )
        if record.is_deleted or record.epoch != self.epoch:
            raise fenced(self.topic, self.epoch, record)
        self.follow(record)
        return record

    # -- planning -------------------------------------------------------------------------------

    def _plan(self, tail: int, *, force: bool) -> PlannedObject | None:
        """Returns the next object that is due from the tail on, or None."""
        due = self.planner.due(
            self.wal.segments(),
            tail,
            self._known_position(tail),
            force=force,
            waiting_since=self._waiting_since,
        )
        return next(due, None)

    def locate(self, segment: Segment, tail: int) -> LogPosition:
        """Returns where the tail is in the log: by the checkpoint if right, else by the index."""
        return self.planner.locate(segment, tail, self._known_position(tail))

    def _known_position(self, tail: int) -> LogPosition | None:
        """Returns where the checkpoint says the tail is in the log; it may be wrong."""
        memory = self.checkpoints.get_uploader()
        if memory is None or memory.last_committed_offset != tail - 1:
            return None
        return LogPosition(memory.last_read_file_seq, memory.last_read_byte_position, tail)

    def _waiting_since(self, segment: Segment, _start: LogPosition) -> Iterator[int]:
        """The oldest message was written after its segment was created and the last commit."""
        yield segment.created_ms
        memory = self.checkpoints.get_uploader()
        if memory is not None:
            yield memory.updated_at * 1000

    # -- one object -----------------------------------------------------------------------------

    def _upload(self, planned: PlannedObject, done: list[ObjectDescriptor]) -> TopicRecord:
        try:
            return self._upload_whole(planned, done)
        except CorruptFrame as error:
            if planned.holds(error):
                metrics.corrupt_frames.add()
                sound = planned.before(error)
                if sound is not None:
                    self._upload_whole(sound, done)
            raise

    def _upload_whole(self, planned: PlannedObject, done: list[ObjectDescriptor]) -> TopicRecord:
        if planned.ledger and (record := self._commit_written(planned, done)) is not None:
            return record
        store = self.ports.store
        task = engine.intend(self.catalog, self.topic, self.epoch, planned, store=store)
        try:
            uploaded = engine.upload(self.ports, self.source, task, self._require_going)
        except ForebayError as error:
            if planned.ledger:
                self._remove(task.intent)
            elif isinstance(error, CorruptLog) and not planned.holds(error):
                set_aside(self.catalog, store, self.topic, task.intent, error)
            raise
        try:
            return self.commit(task.intent, uploaded, planned.end, done)
        except (CommitRefused, TopicFenced):  # other errors may follow a commit that was made
            if planned.ledger:
                self._remove(task.intent)
            raise

    def _remove(self, intent: Intent) -> None:
        """Removes what a failed attempt at a ledger left."""
        store, object_id = self.ports.store, intent.object_id
        remove_attempt(self.catalog, store, self.topic, object_id, certain=True)

    def commit(
        self, intent: Intent, uploaded: Uploaded, end: LogPosition, done: list[ObjectDescriptor]
    ) -> TopicRecord:
        """Commits the object, which ends at `end` in the log, and writes the checkpoint."""
        record = engine.commit(self.catalog, self.topic, intent, uploaded)
        self.follow(record)
        descriptor = uploaded.descriptor
        done.append(descriptor)
        self.note(
            UploaderCheckpoint(
                last_committed_offset=descriptor.end_offset,
                last_read_file_seq=end.seq,
                last_read_byte_position=end.position,
                last_object_id=descriptor.object_id,
                updated_at=self.ports.clock.now_ms() // 1000,
            )
        )
        return record

    def note(self, checkpoint: UploaderCheckpoint) -> None:
        """Writes the checkpoint, or logs why not: a full disk must not stop the upload."""
        try:
            self.checkpoints.update_uploader(checkpoint)
        except OSError as error:
            event(
                _log,
                logging.WARNING,
                "upload checkpoint not written: the next cycle searches for its position",
                topic=self.topic,
                error=error,
            )

    # -- reading back ---------------------------------------------------------------------------

    def _verify_committed(self, record: TopicRecord) -> None:
        """Reads back committed objects that are not verified, oldest first."""
        if record.verified >= record.tail:
            return
        for descriptor in self.catalog.get_object_descriptors(self.topic, record.verified):
            if descriptor.next_offset <= record.verified:
                continue
            self._require_going()
            try:
                found = engine.read_back_committed(self.ports, self.topic, descriptor)
            except CorruptLog as error:
                raise CorruptLog(
                    f"{error}. Segments are kept until it is mended: put a good copy back, or run "
                    f"`forebay repair {self.topic} --apply`, which writes it again from the log; "
                    "`forebay restore --verify --allow-gaps` records as lost what no copy holds"
                ) from error
            if found != descriptor:
                sidecars = self.ports.settings.sidecars
                store = self.ports.store
                engine.correct(
                    self.catalog, store, self.topic, descriptor, found, sidecars=sidecars
                )
            record = self.catalog.mark_verified(self.topic, descriptor)
            self.follow(record)
