"""Objects that go while they are read: compacted, removed by retention, or simply gone."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import MissingData, OffsetOutOfRange
from forebay.format.descriptor import ObjectDescriptor
from forebay.read.fetch_pool import FetchPool
from forebay.read.metrics import ERRORS
from support.stored_objects import HookedStore, StoredTopic, drained, payload, plain, stream_of


def small_objects() -> tuple[StoredTopic, list[ObjectDescriptor]]:
    topic = StoredTopic()
    made = [
        topic.add(start, [payload(start + n, 40) for n in range(4)], 1) for start in range(0, 24, 4)
    ]
    return topic, made


def compact(topic: StoredTopic, replaced: list[ObjectDescriptor], attempt: int = 0) -> None:
    """One object in the place of several, which are gone at once."""
    first, last = replaced[0].start_offset, replaced[-1].end_offset
    for one in replaced:
        topic.delete(one)
    topic.add(first, [topic.frames[offset] for offset in range(first, last + 1)], 3, attempt)


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("chunk_bytes", [30, 56, 1000])
def test_a_compaction_in_mid_read_loses_and_repeats_nothing(
    pool: FetchPool, ahead: int, chunk_bytes: int
) -> None:
    for steps in range(24):
        topic, made = small_objects()
        stream = stream_of(topic, pool, chunk_bytes=chunk_bytes, ahead=ahead)
        found: list[tuple[int, bytes]] = []
        for _ in range(steps):
            frames = stream.next(1)
            assert frames is not None
            found += plain(frames)
        compact(topic, made)
        assert found + drained(stream) == sorted(topic.frames.items())


def test_a_compaction_of_a_compaction_is_followed(pool: FetchPool) -> None:
    topic, made = small_objects()
    stream = stream_of(topic, pool, ahead=0)
    assert stream.next(1) is not None
    compact(topic, made)
    replaced = threading.Event()

    def before(key: str, *_: object) -> None:
        if key.endswith("data-0-23.dnb1") and not replaced.is_set():
            replaced.set()
            compact(topic, list(topic.named), attempt=1)

    stream = stream_of(topic, pool, 1, store=HookedStore(topic.store, before))
    assert drained(stream) == [one for one in sorted(topic.frames.items()) if one[0] >= 1]
    assert replaced.is_set()


@pytest.mark.parametrize("lenient", [False, True])
def test_an_object_that_is_named_and_gone_is_missing_data(pool: FetchPool, lenient: bool) -> None:
    topic, made = small_objects()
    topic.delete(made[2], forget=False)
    before = ERRORS.value("missing")
    stream = stream_of(topic, pool, lenient=lenient)
    found: list[tuple[int, bytes]] = []
    for _ in range(2):
        with pytest.raises(MissingData, match=r"data-8-11\.dnb1.*memory://.*offset 8"):
            drained(stream, found=found)
    assert [offset for offset, _ in found] == list(range(8))
    assert ERRORS.value("missing") == before + 2
    topic.add(8, [payload(n, 40) for n in range(8, 12)], 1, attempt=1)
    topic.named.remove(made[2])
    assert [offset for offset, _ in drained(stream)] == list(range(8, 24))


def test_an_object_that_retention_removed_is_reported_as_out_of_range(pool: FetchPool) -> None:
    topic, made = small_objects()
    stream = stream_of(topic, pool, ahead=0)
    assert stream.next() is not None
    for one in made[:3]:
        topic.delete(one)
    with pytest.raises(OffsetOutOfRange) as raised:
        drained(stream)
    assert raised.value.start == made[3].start_offset


def test_when_all_objects_were_removed_the_stream_ends(pool: FetchPool) -> None:
    topic, made = small_objects()
    stream = stream_of(topic, pool, 5, ahead=0)
    assert stream.next(1) is not None
    for one in made:
        topic.delete(one)
    topic_end = drained(stream)
    assert [offset for offset, _ in topic_end] == list(range(6, 6 + len(topic_end)))
    assert stream.next() is None
