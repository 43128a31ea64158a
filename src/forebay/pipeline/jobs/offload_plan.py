"""What of one topic is due for upload, as a process sees it that does not own the topic.

The planner is the inline uploader's (`upload.plan.plan_object`); here is what it is asked with:
the segments up to the position that the owner published, the catalog's tail, and how long the
oldest message has waited. Several objects of one topic are planned at once, each ending with a
segment where it can, so that executors transfer them side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.catalog.adopt import is_restoring
from forebay.catalog.records import TopicRecord
from forebay.clock import Clock
from forebay.errors import CommitRefused, CorruptFrame, MissingData, UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import SegmentNames, TopicName
from forebay.settings import UploaderSettings
from forebay.topic.view import TopicView
from forebay.upload.plan import Place, PlannedObject, SegmentSource, plan_object
from forebay.wal.segment import Segment


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """The next objects of a topic, in their order; `epoch` is what their commits compare."""

    topic: TopicName
    epoch: int
    log_id: str | None
    """Which log the objects are made of; an owner that goes on with it changes nothing in it."""
    objects: tuple[PlannedObject, ...]
    unverified: tuple[ObjectDescriptor, ...]
    """Committed objects that nobody has read back: a run was interrupted."""
    complete: bool
    """Whether this is all that is due now."""

    @property
    def size(self) -> int:
        made = sum(each.size for each in self.objects)
        return made + sum(each.size for each in self.unverified)


class TopicPlanner:
    """Plans one topic again and again, and remembers where in its log the tail was."""

    def __init__(self, view: TopicView, settings: UploaderSettings, clock: Clock) -> None:
        self.view = view
        self.topic = view.topic
        self._settings = settings
        self._clock = clock
        self._source = self._new_source()
        self._log_id: str | None = None
        self._tail: Place | None = None

    def _new_source(self) -> SegmentSource:
        names = SegmentNames(self.view.store.settings.wal.file_name)
        return SegmentSource(self.view.store.disk, names)

    def plan(
        self,
        bytes_max: int | None,
        *,
        force: bool,
        inspect: bool = True,
        damage: CorruptFrame | None = None,
    ) -> TopicPlan | None:
        """The objects that are due, up to about so many bytes; None if none is.

        `force` takes everything that is synced, whatever the thresholds; `inspect` adds what is
        committed and was not read back. `damage` is a frame that cannot be read: what is before
        it is planned, and nothing behind it.
        """
        self.view.refresh()
        record = self._record()
        if record.log_id != self._log_id:  # positions and indexes of another log mean nothing
            self._source, self._log_id, self._tail = self._new_source(), record.log_id, None
        room = sys.maxsize if bytes_max is None else bytes_max
        objects: list[PlannedObject] = []
        unverified: list[ObjectDescriptor] = []
        complete = True
        for planned in self._due(record, force=force or damage is not None):
            if room <= 0:
                complete = False
                break
            sound = _before(planned, damage)
            if sound is not None:
                objects.append(sound)
                room -= sound.size
            if sound is not planned:
                break
        for descriptor in self._unverified(record) if inspect else ():
            if room <= 0:
                complete = False
                break
            unverified.append(descriptor)
            room -= descriptor.size
        if not unverified and not objects:
            return None
        return TopicPlan(
            self.topic, record.epoch, record.log_id, tuple(objects), tuple(unverified), complete
        )

    def _due(self, record: TopicRecord, *, force: bool) -> Iterator[PlannedObject]:
        segments = self._segments(record)
        if segments:
            yield from self._objects(segments, self._place(segments[0], record.tail), force=force)

    def _unverified(self, record: TopicRecord) -> Iterator[ObjectDescriptor]:
        tiers = self.view.store.tiers()
        if record.verified < record.tail and tiers is not None:
            for descriptor in tiers.catalog.all_descriptors(self.topic, record.verified):
                if descriptor.next_offset > record.verified:
                    yield descriptor

    def committed(self, planned: PlannedObject) -> None:
        """Remembers where the chain ends now, which saves looking for it."""
        self._tail = planned.end

    def _record(self) -> TopicRecord:
        record = self.view.record
        if record is None:
            raise UsageError(
                f"{self.topic}: the catalog does not know the topic; open it once with its store"
            )
        if is_restoring(record.log_id):
            raise CommitRefused(f"{self.topic}: a restore is under way, or was interrupted")
        return record

    def _segments(self, record: TopicRecord) -> list[Segment]:
        """Those with messages from the tail on; none where the log is on another machine."""
        found = [each for each in self.view.segments() if each.end_offset > record.tail]
        if found and found[0].first_offset > record.tail:
            raise MissingData(
                f"{self.topic}: the objects end at offset {record.tail}, and the segments begin "
                f"at {found[0].first_offset}: what is between is nowhere"
            )
        return found

    def _place(self, segment: Segment, tail: int) -> Place:
        known = self._tail
        right = known is not None and known.offset == tail and known.seq == segment.seq
        if known is not None and right and self._source.holds(segment, known):
            return known
        return self._source.locate(segment, tail)

    def _objects(
        self, segments: list[Segment], start: Place, *, force: bool
    ) -> Iterator[PlannedObject]:
        overdue = force or self._overdue(segments[0], start)
        while True:
            planned = plan_object(
                segments,
                start,
                self._settings,
                self._source.cut,
                overdue=overdue,
                whole_segments=True,
            )
            if planned is None:
                return
            yield planned
            start = planned.end
            overdue = force  # what is behind an object of this very moment has waited for nothing

    def _overdue(self, segment: Segment, start: Place) -> bool:
        """Whether the oldest message that is not uploaded has waited for too long.

        It has waited since it was published, or since the last object was made, which did not
        take it. A time to come tells nothing: somebody's clock is wrong.
        """
        now = self._clock.now_ms()
        known = [self._source.publish_time(segment, start) or 0, self._last_upload_ms()]
        since = max((each for each in known if each <= now), default=0)
        return now - since >= self._settings.max_open_seconds * 1000

    def _last_upload_ms(self) -> int:
        tiers, record = self.view.store.tiers(), self.view.record
        if tiers is None or record is None or record.tail == 0:
            return 0
        last = tiers.catalog.descriptors(self.topic, record.tail - 1, record.tail, 1)
        return last[-1].created_at * 1000 if last else 0


def _before(planned: PlannedObject, damage: CorruptFrame | None) -> PlannedObject | None:
    """What of the object is before a damaged frame; all of it where the frame is not in it."""
    if damage is None or damage.offset is None:
        return planned
    path = Path(damage.file)
    inside = any(
        each.path == path and each.start <= damage.position < each.end for each in planned.extents
    )
    return planned.cut_at(path, damage.position, damage.offset) if inside else planned
