"""Which objects become one: a pure decision on a topic's descriptors.

A group is a run of neighbours, small ones only, that together are not over the target. It has at
most as many objects as one transaction can swap, so thousands of objects take several rounds:
the objects that one round makes are the small ones of the next.

What is left alone: objects that were not read back yet, those of at least half the target, and
any whose name does not say its range. No group reaches over a lost range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from forebay.catalog.records import TopicRecord
from forebay.catalog.swap import OBJECTS_PER_SWAP_MAX, SWAP_BYTES_MAX, Kept, encode_kept
from forebay.errors import UsageError
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName, parse_object


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large an object may become."""

    target_bytes: int
    messages_max: int | None = None
    objects_max: int = OBJECTS_PER_SWAP_MAX
    """Of one group."""
    kept_bytes_max: int = SWAP_BYTES_MAX
    """Of the descriptors that the swap of one group keeps."""

    def __post_init__(self) -> None:
        if self.target_bytes < 1:
            raise UsageError(f"the target is {self.target_bytes} bytes; an object has at least one")


@dataclass(frozen=True, slots=True)
class Group:
    """Objects that become one."""

    topic: TopicName
    epoch: int
    """Of the topic when it was planned."""
    objects: tuple[ObjectDescriptor, ...]

    @property
    def name(self) -> ObjectName:
        return ObjectName(self.objects[0].start_offset, self.objects[-1].end_offset)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.objects)

    @property
    def messages(self) -> int:
        return self.name.end - self.name.start + 1


class _Run:
    """Neighbours that may become a group."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.objects: list[ObjectDescriptor] = []
        self._size = self._messages = self._kept = 0

    def takes(self, each: ObjectDescriptor) -> bool:
        bounds = self._bounds
        if not self.objects:
            return True
        messages = self._messages + each.count
        return (
            each.start_offset == self.objects[-1].next_offset
            and len(self.objects) < bounds.objects_max
            and self._size + each.size <= bounds.target_bytes
            and (bounds.messages_max is None or messages <= bounds.messages_max)
            and self._kept + _kept_bytes(each) <= bounds.kept_bytes_max
        )

    def add(self, each: ObjectDescriptor) -> None:
        self.objects.append(each)
        self._size += each.size
        self._messages += each.count
        self._kept += _kept_bytes(each)


def plan_groups(
    topic: TopicName,
    record: TopicRecord,
    descriptors: Iterable[ObjectDescriptor],
    bounds: Bounds,
    leave: Collection[str] = (),
) -> Iterator[Group]:
    """The groups of one round, oldest first; `leave`: names of objects to leave alone."""
    run = _Run(bounds)
    for each in descriptors:
        fits = each.object_id not in leave and _is_small(each, record, bounds)
        if fits and run.takes(each):
            run.add(each)
            continue
        if len(run.objects) > 1:
            yield Group(topic, record.epoch, tuple(run.objects))
        run = _Run(bounds)
        if fits:
            run.add(each)
    if len(run.objects) > 1:
        yield Group(topic, record.epoch, tuple(run.objects))


def _is_small(each: ObjectDescriptor, record: TopicRecord, bounds: Bounds) -> bool:
    name = parse_object(each.object_id)
    return (
        each.completed
        and each.next_offset <= record.verified
        and 2 * each.size < bounds.target_bytes
        and name is not None
        and (name.start, name.end) == (each.start_offset, each.end_offset)
    )


def _kept_bytes(each: ObjectDescriptor) -> int:
    """The name of the object that takes its place is about as long as its own, twice at most."""
    return len(encode_kept(Kept(2 * each.object_id, each)))
