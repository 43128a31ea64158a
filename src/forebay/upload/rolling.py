"""The rolling writer: keeps one object per topic open across upload cycles.

Every cycle adds the messages synced since the last one. An object ends when the next frame does not
fit (bytes, messages), or after some time (age, idle time). A cycle writes as many objects as there
are messages for, with the same borders as the uploader that plans ahead. The last offset is not
known in advance, so the object is written under a pending name and copied by the object store when
it is complete. The copy replaces nothing, and is read back and committed like any other object. The
checkpoint shows the progress, for information only: after a restart or an error the object is
abandoned and built again from the log.

Beware: while an object is open, up to one part of it is in memory, for each topic. The uploader
that plans ahead (`uploader.Uploader`) keeps nothing in memory between cycles.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.records import TopicRecord
from forebay.errors import CorruptFrame, CorruptLog, ForebayError, ObjectExists
from forebay.format.checkpoint import UploaderCheckpoint
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import (
    ObjectName,
    TopicName,
    object_key,
    object_metadata,
    pending_object,
)
from forebay.logs import event
from forebay.objects.backend import ObjectWriter
from forebay.upload import metrics
from forebay.upload.engine import (
    ObjectBuilder,
    StoredObject,
    Uploaded,
    UploadPorts,
    describe,
    level_of,
    new_index,
    read_back_and_put_sidecar,
    require_same,
    require_size,
    set_aside,
)
from forebay.upload.plan import Closed, PlannedObject, plan_object
from forebay.upload.uploader import Uploader
from forebay.wal.log import Wal
from forebay.wal.segment import LogPosition

_log: Final = logging.getLogger("forebay.upload")


@dataclass(slots=True)
class OpenObject:
    """An object in progress."""

    writer: ObjectWriter
    builder: ObjectBuilder
    intent: Intent
    start_offset: int
    position: LogPosition
    """Where the next frame for it is in the log."""
    opened_ms: int
    active_ms: int
    """By the time of day, for the checkpoint."""
    opened_at: float
    active_at: float
    """By the monotonic clock: a jump of the time of day must not keep the object open."""


class RollingUploader(Uploader):
    """An `Uploader` that keeps one object open across cycles; one cycle at a time.

    While the settings say that the topic does not roll, it plans ahead as `Uploader` does. If they
    change so, the open object is abandoned, and its messages are uploaded again from the log.
    """

    def __init__(
        self, topic: TopicName, wal: Wal, epoch: int, catalog: Catalog, ports: UploadPorts
    ) -> None:
        super().__init__(topic, wal, epoch, catalog, ports)
        self._open: OpenObject | None = None
        self._forget_abandoned()

    def _forget_abandoned(self) -> None:
        memory = self.checkpoints.get_uploader()
        if memory is not None and memory.active_start_offset is not None:
            event(
                _log,
                logging.INFO,
                "open object abandoned: it is built again from the log",
                topic=self.topic,
                start=memory.active_start_offset,
                bytes=memory.active_bytes_written,
            )
            self.checkpoints.update_uploader(
                UploaderCheckpoint(
                    memory.last_committed_offset,
                    memory.last_read_file_seq,
                    memory.last_read_byte_position,
                    memory.last_object_id,
                    memory.updated_at,
                )
            )

    def _upload_due(
        self, record: TopicRecord, done: list[ObjectDescriptor], *, force: bool
    ) -> TopicRecord:
        """Adds new messages to the open object, and finishes it when a limit is reached.

        A full object is followed by the next one in the same cycle.
        """
        if not self.ports.settings.rolling:
            return super()._upload_due(record, done, force=force)
        try:
            if self._open is not None and self._open.start_offset != record.tail:
                self._abandon()  # another process committed these offsets
            batch = 0
            while (planned := self._next(record.tail)) is not None:
                batch += planned.size
                if self._exceeds_batch(batch, planned, force=force):
                    break
                full = self._extend(planned)
                if full is None and planned.closed_by is Closed.BATCH:
                    continue
                if full is None and not force:
                    break
                record = self._finish(done, full or Closed.FORCED)
            if self._open is not None:
                closed_by = Closed.FORCED if force else self._due(self._open)
                if closed_by is not None:
                    record = self._finish(done, closed_by)
        except BaseException:
            self._abandon()
            raise
        self._remember_progress()
        return record

    def _next(self, tail: int) -> PlannedObject | None:
        """Returns the synced messages after the open object, as far as the object has room."""
        opened = self._open
        offset = opened.position.offset if opened else tail
        segments = self.planner.segments_from(self.wal.segments(), offset)
        if not segments:
            return None
        start = opened.position if opened else self.locate(segments[0], tail)
        settings = self.ports.settings
        if opened is not None:
            room = max(settings.object_bytes_max - opened.builder.size, 1)
            left = settings.max_object_messages
            left = None if left is None else max(left - opened.builder.messages, 1)
            settings = replace(settings, max_object_bytes=room, max_object_messages=left)
        return plan_object(segments, start, settings, self.source.cut, overdue=True)

    def _extend(self, planned: PlannedObject) -> Closed | None:
        """Adds frames to the open object; returns which limit the next frame would exceed, if any.

        At a damaged frame, the object is finished with what comes before it, and CorruptFrame is
        raised.
        """
        ports = self.ports
        opened = self._open or self._begin(planned)
        now, at = ports.clock.now_ms(), ports.clock.monotonic()
        if (
            opened.builder.size + planned.size > ports.settings.object_bytes_max
            and opened.builder.size
        ):
            return Closed.BYTES
        try:
            for extent in planned.extents:
                for frames in self.source.frames([extent]):
                    self._require_going()
                    opened.builder.add(frames)
                    offset = opened.position.offset + len(frames)
                    start = opened.position.position if opened.position.seq == extent.seq else 0
                    opened.position = LogPosition(extent.seq, start + frames.safe_length, offset)
        except CorruptFrame:
            metrics.corrupt_frames.add()
            if opened.builder.messages:
                self._finish([], Closed.DAMAGE)
            raise
        opened.active_ms, opened.active_at = now, at
        return planned.closed_by if planned.full else None

    def _begin(self, planned: PlannedObject) -> OpenObject:
        ports = self.ports
        first = planned.extents[0]
        name = pending_object(
            planned.start_offset,
            f"{self.epoch:x}{secrets.token_hex(4)}",
            compressed=planned.compressed,
        )
        intent = self.catalog.intend(self.topic, self.epoch, name)
        writer = ports.store.open_streaming_writer(
            object_key(self.topic, name),
            chunk_bytes=ports.settings.stream_chunk_size,
            concurrent_parts=ports.settings.concurrent_parts,
            metadata=object_metadata(self.topic, name),
        )
        event(
            _log,
            logging.INFO,
            "object started",
            topic=self.topic,
            object=name,
            start=planned.start_offset,
            bytes_max=ports.settings.object_bytes_max,
        )
        now, at = ports.clock.now_ms(), ports.clock.monotonic()
        start = LogPosition(first.seq, first.start, first.first_offset)
        builder = ObjectBuilder(writer, level_of(name, ports.settings), new_index(ports.settings))
        opened = OpenObject(writer, builder, intent, planned.start_offset, start, now, now, at, at)
        self._open = opened
        return opened

    def _due(self, opened: OpenObject) -> Closed | None:
        """Returns which time limit the open object has reached, if any."""
        settings, now = self.ports.settings, self.ports.clock.monotonic()
        age, idle = settings.max_open_seconds, settings.max_idle_seconds
        if age is not None and now - opened.opened_at >= age:
            return Closed.AGE
        if idle is not None and now - opened.active_at >= idle:
            return Closed.IDLE
        return None

    def _finish(self, done: list[ObjectDescriptor], closed_by: Closed) -> TopicRecord:
        """Completes the open object, copies it to its final name, and commits it."""
        ports, opened = self.ports, self._open
        assert opened is not None
        started = ports.clock.monotonic()
        opened.builder.flush()
        require_size(ports.store, opened.writer.close(), opened.builder.stored)
        try:
            uploaded, intent = self._copy(opened, started, closed_by)
            record = self.commit(intent, uploaded, opened.position, done)
        except ForebayError:
            # The next cycle uses another pending name, so failed ones would pile up.
            with suppress(ForebayError):
                self._remove_pending(opened)
            raise
        self._open = None
        self._remove_pending(opened)
        return record

    def _copy(
        self, opened: OpenObject, started: float, closed_by: Closed
    ) -> tuple[Uploaded, Intent]:
        """Copies the pending object to its final name, reads it back, and writes its sidecar."""
        ports = self.ports
        pending = object_key(self.topic, opened.intent.object_id)
        compressed = opened.builder.level is not None
        last = opened.position.offset - 1
        name = ObjectName(opened.start_offset, last, compressed=compressed)
        intent = self.catalog.intend(self.topic, self.epoch, name)
        try:
            stored = self._create(pending, intent.object_id, opened.builder)
            descriptor = describe(
                intent.object_id,
                opened.start_offset,
                opened.position.offset,
                opened.builder.transferred(stored),
                ports.clock.now_ms(),
            )
            read_back_and_put_sidecar(ports, self.topic, descriptor)
        except CorruptLog as error:
            set_aside(self.catalog, ports.store, self.topic, intent, error)
            raise
        seconds = ports.clock.monotonic() - started
        return Uploaded(descriptor, seconds, opened.builder.chunks, closed_by), intent

    def _create(self, pending: str, object_id: str, builder: ObjectBuilder) -> StoredObject:
        """Copies the pending object to the name, or finds the same frames there."""
        store, settings = self.ports.store, self.ports.settings
        try:
            meta = store.copy_or_rewrite(
                pending,
                object_key(self.topic, object_id),
                chunk_bytes=settings.stream_chunk_size,
                concurrent_parts=settings.concurrent_parts,
                create=True,
            )
        except ObjectExists:
            size, content_hash = builder.size, builder.content.value
            return require_same(store, self.topic, object_id, size, content_hash)
        require_size(store, meta, builder.stored)
        return StoredObject(meta)

    def _remove_pending(self, opened: OpenObject) -> None:
        self.ports.store.delete_object(object_key(self.topic, opened.intent.object_id))
        self.catalog.withdraw(self.topic, opened.intent.object_id, opened.intent.token)

    def _abandon(self) -> None:
        """Gives up the open object. If part of it is in the store, a sweep removes it."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.writer.abort()

    def _remember_progress(self) -> None:
        opened = self._open
        if opened is not None:
            opened.builder.drain()
        memory = self.checkpoints.get_uploader()
        if opened is None or (memory and memory.active_bytes_written == opened.builder.size):
            return
        before = memory or UploaderCheckpoint(None, opened.position.seq, 0, None, 0)
        self.note(
            replace(
                before,
                active_start_offset=opened.start_offset,
                active_bytes_written=opened.builder.size,
                active_msgs_written=opened.builder.messages,
                index_entries_in_progress=opened.builder.index.frozen(),
                opened_at_unix=opened.opened_ms // 1000,
                last_activity_unix=opened.active_ms // 1000,
            )
        )
