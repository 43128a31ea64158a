"""What must be true of a topic after any failure, checked in the catalog and in the bucket.

All of it looks at the catalog's own keys and at the store's own listing, not at what the product
says about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from forebay.catalog.catalog import Catalog
from forebay.catalog.kv import Put
from forebay.catalog.records import State
from forebay.errors import LostOffsets
from forebay.format.descriptor import ObjectDescriptor, decode_descriptor
from forebay.format.names import (
    TopicName,
    after_prefix,
    object_files,
    object_key,
    object_of_file,
    objects_prefix,
    parse_object,
    sidecar,
)
from forebay.objects.store import CloudStore
from forebay.topic.store import Topic
from forebay.upload.sweep import Action, Kind, SweepItem, SweepReport, sweep

NAME: Final = "/default/orders"
TOPIC: Final = TopicName("default", "orders")


@dataclass
class Contents:
    """Everything that a reader finds in a topic."""

    messages: dict[int, bytes] = field(default_factory=dict)
    lost: list[tuple[int, int]] = field(default_factory=list)


def read_all(topic: Topic) -> Contents:
    """From the start to the end, each offset once and in order; a lost range is stepped over."""
    found = Contents()
    at, end = topic.start_offset, topic.watermarks().appended
    while at < end:
        try:
            for message in topic.read(at, end=end):
                assert message.offset == at, "an offset is missing, or comes twice"
                found.messages[at] = message.payload
                at += 1
            assert at == end, "the reader ended before the log did"
        except LostOffsets as hole:
            found.lost.append((hole.start, hole.end))
            at = hole.end
    assert not any(start <= at < end for at in found.messages for start, end in found.lost)
    assert_no_payload_twice(found)
    return found


def assert_no_payload_twice(found: Contents) -> None:
    """Every message of these tests has bytes of its own."""
    counts = Counter(found.messages.values())
    assert [payload for payload, count in counts.items() if count > 1] == []


def raw_descriptors(catalog: Catalog, topic: TopicName = TOPIC) -> Iterator[ObjectDescriptor]:
    prefix = catalog.keys.objects(topic)
    for entry in catalog.kv.range(prefix, after_prefix(prefix), limit=10_000):
        if catalog.keys.descriptor_start(topic, entry.key) is not None:
            yield decode_descriptor(entry.value)


def assert_chain(
    catalog: Catalog, store: CloudStore, topic: TopicName = TOPIC
) -> list[ObjectDescriptor]:
    """No gap, no overlap, each object there with its size, and no object in it twice."""
    record = catalog.record(topic)
    assert record is not None
    chain = list(raw_descriptors(catalog, topic))
    at = record.start_offset
    for descriptor in chain:
        hole = record.lost_range(at)
        at = at if hole is None else hole[1]
        assert descriptor.start_offset == at, f"the chain has a gap or an overlap at {at}: {chain}"
        assert descriptor.end_offset >= at
        life = catalog.life(topic, descriptor.object_id)
        assert life is not None
        assert life.state is State.COMMITTED
        assert store.head(object_key(topic, descriptor.object_id)).size == descriptor.size
        at = descriptor.next_offset
    hole = record.lost_range(at)
    assert record.tail == (at if hole is None else hole[1])
    assert len({descriptor.object_id for descriptor in chain}) == len(chain)
    committed = {name for name, life in catalog.lives(topic) if life.state is State.COMMITTED}
    assert committed == {descriptor.object_id for descriptor in chain}
    return chain


def assert_each_committed_once(catalog: Catalog, topic: TopicName = TOPIC) -> None:
    """By the catalog's history, which must reach back to its beginning: no second write."""
    prefix = catalog.keys.topic(topic)
    last = catalog.kv.commit([], [Put(f"{prefix}~now", b"")])
    assert last is not None
    watch = catalog.kv.watch(prefix, after_prefix(prefix), after=0)
    writes: Counter[int] = Counter()
    for change in watch:
        if change.revision >= last:
            break
        start = catalog.keys.descriptor_start(topic, change.key)
        if start is not None:
            assert change.value is not None, f"the descriptor at {start} was removed"
            writes[start] += 1
    watch.close()
    assert writes == Counter(each.start_offset for each in raw_descriptors(catalog, topic))


def assert_only_orphans_are_swept(
    catalog: Catalog, store: CloudStore, topic: TopicName = TOPIC
) -> set[str]:
    """What nothing names is what a sweep reports, and then removes; what counts stays.

    Returns the keys that were orphans.
    """
    chain = list(raw_descriptors(catalog, topic))
    objects = {object_key(topic, name) for each in chain for name in object_files(each.object_id)}
    counted = objects | {object_key(topic, sidecar(each.object_id)) for each in chain}
    before = _sizes(store, topic)
    waiting = {key for key in before if _after_tail(catalog, topic, key)}
    orphans = before.keys() - counted - waiting
    looked = sweep(catalog, store, [topic], grace_minutes=0, dry_run=True)
    assert looked.errors == 0, looked
    assert {item.action for item in _found(looked, waiting)} <= {Action.WOULD_REMOVE}, looked
    items = [item for item in _found(looked, waiting) if item.bytes]
    reported = {_object(item.key) for item in items}
    assert reported == {_object(key) for key in orphans}
    found = sum(item.bytes for item in _found(looked, waiting))
    assert found == sum(before[key] for key in orphans)
    assert looked.committed == len(chain)
    assert _sizes(store, topic) == before, "a dry run changed something"
    done = sweep(catalog, store, [topic], grace_minutes=0, dry_run=False)
    assert {item.key for item in done.items} == {item.key for item in looked.items}
    assert {item.action for item in _found(done, waiting)} <= {Action.REMOVED}, done
    left = _sizes(store, topic)
    assert left.keys() == before.keys() & (counted | waiting)
    assert left.keys() >= objects
    return orphans


def _after_tail(catalog: Catalog, topic: TopicName, key: str) -> bool:
    """Whether it is an object after the tail. A sweep keeps it until the tail has passed it."""
    record = catalog.record(topic)
    object_id = _object(key).rpartition("/")[2]
    life, name = catalog.life(topic, object_id), parse_object(object_id)
    span = life.span if life is not None and name is None else name and (name.start, name.end + 1)
    return record is not None and span is not None and span[1] > record.tail


def _object(key: str) -> str:
    """The key of the object that a file belongs to."""
    prefix, slash, name = key.rpartition("/")
    return prefix + slash + object_of_file(name)


def _found(report: SweepReport, waiting: set[str]) -> list[SweepItem]:
    """The items but for begin markers and objects after the tail."""
    kept = {_object(key) for key in waiting}
    return [
        item
        for item in report.items
        if item.kind is not Kind.MARKER and _object(item.key) not in kept
    ]


def _sizes(store: CloudStore, topic: TopicName) -> dict[str, int]:
    """The sizes of the topic's keys but for begin markers."""
    found = store.list(objects_prefix(topic))
    return {each.key: each.size for each in found if "/begin-" not in each.key}
