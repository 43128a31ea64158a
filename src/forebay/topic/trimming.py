"""Deletes local segments that objects cover, and objects that are beyond remote retention.

A segment is deleted when it exceeds the retention age or size *and* objects hold all its messages.
These objects must have been read back and committed longer ago than the deletion lag, and must
still exist unchanged: with their size and etag, or, if the etag is another one, with the hash of
their descriptor. If the descriptor has no hash, they must have the frames of the segment. A segment
that ends before the topic's start offset needs no objects: remote retention has already deleted
those.

Remote retention deletes messages whether subscriptions have read them or not, and says so, unless
`keep_unread` is on. What a subscription has read is what its cursor in the catalog says.

The time of day may be wrong. An object from the future gets its age from the moment when it was
first seen, and after a jump of the clock no object is deleted because of its age for a day.

Beware: if an object is missing, damaged or another one, its segment is kept and the error is
raised. Older segments may have been deleted before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from forebay.catalog.catalog import fenced
from forebay.catalog.records import TopicRecord, unread_between
from forebay.catalog.subscriptions import subscription_cursors
from forebay.errors import CorruptLog, DescriptorError, ForeignObject
from forebay.format.content import ContentHash
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import TopicName, object_files, object_key, sidecar
from forebay.logs import event
from forebay.metrics import Counter
from forebay.read.cloud_reader import CloudReader
from forebay.read.tiered_log import CatalogSource
from forebay.settings import StoreSettings
from forebay.topic.resources import StoreResources
from forebay.upload.plan import Extent, SegmentSource
from forebay.wal.log import Wal
from forebay.wal.retention import Deleter
from forebay.wal.segment import Segment

_log: Final = logging.getLogger("forebay.topic")
SEGMENTS_DELETED: Final = Counter("forebay_wal_delete_total", "Local segments deleted.")
OBJECTS_DELETED: Final = Counter(
    "forebay_remote_objects_deleted_total", "Objects that remote retention deleted."
)
REFUSED: Final = Counter(
    "forebay_wal_delete_refused_total",
    "Segments kept because their objects are missing or damaged.",
)
UNREAD_REMOVED: Final = Counter(
    "forebay_subscription_unread_removed_total",
    "Messages that remote retention deleted before a subscription had acknowledged them, "
    "counted once for each subscription.",
)
_MB: Final = 1024 * 1024
_FIRST_SEEN_MAX: Final = 10_000


class Trimmer:
    """Retention of one topic, local and remote."""

    def __init__(
        self,
        topic: TopicName,
        wal: Wal,
        deleter: Deleter,
        resources: StoreResources,
    ) -> None:
        self._topic = topic
        self._wal = wal
        self._resources = resources
        self._catalog = resources.catalog
        self._store = resources.store
        self._deleter = deleter
        self._remote = resources.settings.remote_retention
        self._clock = resources.clock
        self._first_seen: dict[str, float] = {}
        """When objects from the future were first seen, in monotonic time."""
        self._kept: str | None = None
        """The object that was kept last for subscriptions."""

    def configure(self, settings: StoreSettings) -> None:
        """Uses the retention of these settings from the next pass on."""
        self._deleter, self._remote = Deleter(settings.deleter), settings.remote_retention

    def trim_local(self, epoch: int) -> list[Segment]:
        """Runs one pass over the local segments and returns those it deleted.

        Raises TopicFenced if the topic has another epoch. The catalog's record then describes the
        log of another owner, and messages that only this log holds may be recorded as lost.
        """
        record = self._catalog.find(self._topic)
        if record is None:
            return []
        if record.is_deleted or record.epoch != epoch:
            raise fenced(self._topic, epoch, record)
        segments = [segment for segment in self._wal.segments() if segment.count]
        wanted = self._deleter.choose(
            segments,
            committed_offset=max(record.verified, record.start_offset),
            pinned=(),
            now_ms=self._clock.now_ms(),
        )
        safe, damage = self._safe_until(record, wanted)
        gone = self._wal.retain(self._deleter, safe) if safe else []
        if gone:
            SEGMENTS_DELETED.add(len(gone))
            event(
                _log,
                logging.INFO,
                "segments deleted",
                topic=self._topic,
                count=len(gone),
                start=gone[-1].end_offset,
            )
        if damage is not None:
            raise damage
        return gone

    def _safe_until(
        self, record: TopicRecord, wanted: Sequence[Segment]
    ) -> tuple[int, CorruptLog | None]:
        """Returns the end offset of the last segment that may be deleted, or 0 if there is none.

        Also returns the error if a missing or damaged object is why the next segment is kept.
        """
        safe = 0
        for segment in wanted:
            try:
                if segment.end_offset > record.start_offset and not self._covered(segment):
                    break
            except CorruptLog as error:
                REFUSED.add()
                event(_log, logging.ERROR, "segment kept", file=segment.path, error=error)
                return safe, error
            safe = segment.end_offset
        return safe, None

    def _covered(self, segment: Segment) -> bool:
        """Whether objects hold the whole segment, are old enough, and still exist unchanged."""
        lag_minutes = self._deleter.settings.deletion_lag_minutes
        if lag_minutes is None:
            return False
        offset = segment.first_offset
        for descriptor in self._catalog.get_object_descriptors(self._topic, offset):
            if descriptor.start_offset > offset:
                return False
            if self._age_ms(descriptor) < lag_minutes * 60_000:
                return False
            if not self._resources.require_there(self._topic, descriptor):
                self._require_same_frames(segment, descriptor)
            offset = descriptor.next_offset
            if offset >= segment.end_offset:
                return True
        return False

    def _age_ms(self, descriptor: ObjectDescriptor) -> float:
        """Returns the age of the object; if it is from the future, since it was first seen."""
        age_ms = self._clock.now_ms() - descriptor.created_at * 1000
        if age_ms >= 0:
            self._first_seen.pop(descriptor.object_id, None)
            return age_ms
        now = self._clock.monotonic()
        first = self._first_seen.setdefault(descriptor.object_id, now)
        if len(self._first_seen) > _FIRST_SEEN_MAX:
            del self._first_seen[next(iter(self._first_seen))]
        return (now - first) * 1000

    def _require_same_frames(self, segment: Segment, descriptor: ObjectDescriptor) -> None:
        """Raises ForeignObject if the object's frames are not those of the segment.

        For descriptors of an earlier release, which have no hash to compare.
        """
        first = max(segment.first_offset, descriptor.start_offset)
        end = min(segment.end_offset, descriptor.next_offset)
        source = SegmentSource(self._wal.disk, self._wal.names)
        begin, stop = source.locate(segment, first), source.locate(segment, end)
        extent = Extent(segment.seq, segment.path, begin.position, stop.position, first, end)
        here, there = ContentHash(), ContentHash()
        for frames in source.frames([extent]):
            here.add(frames.raw)
        reader = replace(self._resources.settings.cloud_reader, lenient=False)
        with CloudReader(
            self._topic,
            self._store,
            CatalogSource(self._catalog, self._topic),
            reader,
            self._resources.pool,
        ) as objects:
            for frames in objects.frames(first, end - 1):
                there.add(frames.raw)
        if here.value != there.value:
            key = object_key(self._topic, descriptor.object_id)
            raise ForeignObject(
                f"{self._store.name}: {key} does not have the messages {first} to {end - 1} of "
                f"{segment.path}, which is kept. Its etag is not the one of its descriptor, which "
                "has no hash: put the right object back, or let `forebay repair` write it again"
            )

    def trim_remote(self, epoch: int | None) -> list[ObjectDescriptor]:
        """Runs one pass of remote retention and returns the deleted objects.

        It deletes whole objects, oldest first, and each descriptor before its object. The newest
        one stays: without the catalog, it tells how far offsets were assigned (rule R9).
        """
        minutes, size_mb = self._remote.time_minutes, self._remote.size_mb
        if minutes is None and size_mb is None:
            return []
        if not self._clock_is_steady():
            minutes = None
        record = self._catalog.record(self._topic) or TopicRecord()
        objects, total = self._totals()
        gone: list[ObjectDescriptor] = []
        missed: dict[str, int] = {}
        try:
            while (
                oldest := self._catalog.get_object_descriptors_range(self._topic, 0, limit=1)
            ) and objects > len(gone) + 1:
                descriptor = oldest[0]
                too_old = minutes is not None and self._age_ms(descriptor) >= minutes * 60_000
                too_much = size_mb is not None and total > size_mb * _MB
                if not (too_old or too_much):
                    break
                unread = self._unread(record, descriptor)
                if unread and self._remote.keep_unread:
                    self._log_kept(descriptor, unread)
                    break
                token = self._catalog.retire(self._topic, epoch, descriptor)
                if token is None:
                    break
                for name, count in unread.items():
                    missed[name] = missed.get(name, 0) + count
                total -= descriptor.size
                self._delete(descriptor, token)
                gone.append(descriptor)
        finally:  # also of a pass that the object store ended
            self._log_missed(missed)
        return gone

    def _unread(self, record: TopicRecord, descriptor: ObjectDescriptor) -> dict[str, int]:
        """Returns how many messages of the object each subscription has not acknowledged.

        Those that have acknowledged all are left out. A cursor that cannot be read stops the pass
        only if unread messages are to be kept.
        """
        found: dict[str, int] = {}
        start, end = descriptor.start_offset, descriptor.next_offset
        try:
            for name, cursor in subscription_cursors(self._catalog, self._topic):
                if count := unread_between(record, cursor, start, end):
                    found[name] = count
        except DescriptorError as error:
            if self._remote.keep_unread:
                raise
            event(_log, logging.WARNING, "a cursor is damaged", topic=self._topic, error=error)
        return found

    def _log_kept(self, descriptor: ObjectDescriptor, unread: dict[str, int]) -> None:
        """Logs why the object stays, once for each object."""
        if self._kept == descriptor.object_id:
            return
        self._kept = descriptor.object_id
        name = min(unread)
        event(
            _log,
            logging.INFO,
            "remote retention keeps objects that a subscription has not read",
            topic=self._topic,
            object=descriptor.object_id,
            subscription=name,
            messages=unread[name],
            subscriptions=len(unread),
        )

    def _log_missed(self, missed: dict[str, int]) -> None:
        for name, count in missed.items():
            UNREAD_REMOVED.add(count)
            event(
                _log,
                logging.WARNING,
                "remote retention deleted messages that a subscription had not acknowledged",
                topic=self._topic,
                subscription=name,
                messages=count,
            )

    def _clock_is_steady(self) -> bool:
        jumps = self._resources.jumps
        jump = jumps.look()
        if jump is not None:
            event(
                _log,
                logging.WARNING,
                "the clock jumped: no object is deleted by its age for a day; set the clock right",
                jump_seconds=round(jump),
            )
        return jumps.steady

    def _totals(self) -> tuple[int, int]:
        """Returns the number of objects and their bytes. Reads them all if they are not counted."""
        known = self._catalog.totals(self._topic)
        if known.next is None:
            return known.objects, known.bytes
        sizes = [each.size for each in self._catalog.get_object_descriptors(self._topic)]
        return len(sizes), sum(sizes)

    def _delete(self, descriptor: ObjectDescriptor, token: str) -> None:
        """Deletes an object that was removed from the chain. If this fails, a sweep deletes it."""
        self._store.delete_object(object_key(self._topic, sidecar(descriptor.object_id)))
        for name in object_files(descriptor.object_id):
            self._store.delete_object(object_key(self._topic, name))
        self._catalog.bury(self._topic, descriptor.object_id, token, certain=True)
        OBJECTS_DELETED.add()
        event(
            _log,
            logging.INFO,
            "object deleted by remote retention",
            topic=self._topic,
            object=descriptor.object_id,
        )
