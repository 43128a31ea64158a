"""A catalog on any backend, with faults, a clock that stands still, and topics as wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from forebay.catalog.catalog import Catalog, Intent
from forebay.catalog.kv import Put
from forebay.catalog.records import Life, State, TopicRecord, encode_record
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import ObjectName, TopicName
from forebay.testing import ManualClock
from forebay.testing.kv import FaultKv
from support.kv_stores import Backend

TOPIC: Final = TopicName("default", "orders")


def descriptor_of(
    start: int, end: int, object_id: str | None = None, **changes: Any
) -> ObjectDescriptor:
    """An object of the messages `start` to `end`, the end included."""
    name = object_id or str(ObjectName(start, end))
    count = end - start + 1
    fields = {"size": 50 * count, "etag": '"e"', "created_at": 1_700_000_000, **changes}
    return ObjectDescriptor(name, start, end, **fields)


@dataclass
class Setup:
    backend: Backend
    clock: ManualClock = field(default_factory=ManualClock)
    kv: FaultKv = field(init=False)
    catalog: Catalog = field(init=False)

    def __post_init__(self) -> None:
        self.kv = FaultKv(self.backend.kv)
        self.catalog = Catalog(self.kv, self.backend.prefix, self.clock)

    def put(self, key: str, value: bytes) -> None:
        assert self.backend.kv.commit([], [Put(key, value)]) is not None

    def create(self, topic: TopicName = TOPIC, **fields: Any) -> TopicRecord:
        """A topic with this record, as if an owner had taken it."""
        record = TopicRecord(**{"epoch": 1, "reserved": 10**6, **fields})
        self.put(self.catalog.keys.record(topic), encode_record(record))
        return record

    def record(self) -> TopicRecord:
        record = self.catalog.record(TOPIC)
        assert record is not None
        return record

    def intend(self, start: int, end: int, epoch: int = 1) -> Intent:
        return self.catalog.intend(TOPIC, epoch, ObjectName(start, end))

    def add(self, start: int, end: int, epoch: int = 1) -> ObjectDescriptor:
        """Commits an object to the end of the chain."""
        intent = self.intend(start, end, epoch)
        descriptor = descriptor_of(start, end, intent.object_id)
        self.catalog.put_object_descriptor(TOPIC, intent, descriptor)
        return descriptor

    def row(self, object_id: str, state: State, epoch: int = 1, token: str = "t") -> Life:
        life = Life(state, epoch, token, self.clock.now_ms())
        self.put(self.catalog.keys.life(TOPIC, object_id), encode_record(life))
        return life

    def state(self, object_id: str) -> State | None:
        life = self.catalog.life(TOPIC, object_id)
        return None if life is None else life.state

    def chain(self) -> list[tuple[int, int]]:
        found = self.catalog.get_object_descriptors(TOPIC)
        return [(each.start_offset, each.end_offset) for each in found]

    def lose_answers(self, times: int = 1) -> None:
        """The next commits happen, and nobody is told."""
        self.kv.fail("commit", times=times, applied=True)
