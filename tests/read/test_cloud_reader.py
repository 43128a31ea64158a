"""`CloudReader`: messages of objects, between two offsets, both included."""

from __future__ import annotations

import threading

import pytest

from forebay.errors import LogClosed
from forebay.format.descriptor import decode_descriptor
from forebay.format.frame import encode_frame, scan
from forebay.format.index import ObjectIndex
from forebay.limits import OBJECT_INDEX_MESSAGES
from forebay.read.cloud_reader import CloudReader
from forebay.read.fetch_pool import FetchPool
from forebay.settings import CloudReaderSettings
from support.danube_messages import SAMPLE, encoded, fixed, varint, without
from support.stored_objects import PATIENCE, TOPIC, Gate, HookedStore, StoredTopic, message, payload


def reader_of(topic: StoredTopic, pool: FetchPool, store: HookedStore | None = None) -> CloudReader:
    settings = CloudReaderSettings(fetch_chunk_size=64 * 1024)
    return CloudReader(TOPIC, store or topic.store, topic, settings, pool)


def messages(count: int = 3000) -> StoredTopic:
    topic = StoredTopic()
    for start in range(0, count, 1000):
        topic.add(start, [message(offset) for offset in range(start, start + 1000)], 100)
    return topic


def test_a_range_includes_both_ends(pool: FetchPool) -> None:
    with reader_of(messages(), pool) as reader:
        for start, end in ((0, 0), (5, 7), (995, 1005), (2999, 2999)):
            found = list(reader.read_range(start, end))
            assert [one.offset for one in found] == list(range(start, end + 1))
            assert [one.payload for one in found] == [b"m%d" % n for n in range(start, end + 1)]


def test_without_an_end_it_ends_after_the_last_object(pool: FetchPool) -> None:
    reader = reader_of(messages(), pool)
    assert [one.offset for one in reader.read_range(1500)] == list(range(1500, 3000))
    assert [one.offset for one in reader.read_range(2990, 5000)] == list(range(2990, 3000))
    assert list(reader.read_range(3000)) == []


def test_an_empty_range_reads_nothing(pool: FetchPool) -> None:
    topic = messages()
    assert list(reader_of(topic, pool).read_range(5, 4)) == []
    assert topic.queries == 0


def test_frames_are_handed_out_undecoded(pool: FetchPool) -> None:
    topic = messages()
    found = [offset for scan in reader_of(topic, pool).frames(10, 1999) for offset, _ in scan]
    assert found == list(range(10, 2000))


def test_a_thousand_offsets_in_the_middle_fetch_at_most_two_intervals_more(
    pool: FetchPool,
) -> None:
    topic, index = StoredTopic(), ObjectIndex()
    payloads = [payload(n, 300) for n in range(20_000)]
    made = topic.add(0, payloads, None)
    index.add(scan(bytes(topic.data(made))), 0)
    topic.rename(made, offset_index=index.frozen())
    interval = OBJECT_INDEX_MESSAGES * 316
    reader = reader_of(topic, pool)
    for start in (0, 9_499, 9_500, 9_999, 18_999):
        stream = reader.stream(start, start + 999)
        count = 0
        while (frames := stream.next()) is not None:
            count += len(frames)
        assert count == 1000
        assert stream.bytes_used == 1000 * 316
        assert stream.bytes_fetched <= stream.bytes_used + 2 * interval
    whole = reader.stream(0)
    while whole.next() is not None:
        pass
    assert whole.bytes_fetched <= 1.05 * whole.bytes_used


@pytest.mark.parametrize("number", [fixed, varint], ids=["bincode 1", "bincode 2"])
@pytest.mark.parametrize("appended", [0, 2, 3])
def test_objects_of_danube_are_read(pool: FetchPool, number: object, appended: int) -> None:
    topic = StoredTopic()
    raw = encoded(SAMPLE, number, appended)  # type: ignore[arg-type]
    data = encode_frame(4, raw) + encode_frame(5, raw)
    topic.store.put_object("storage/topics/default/orders/objects/data-4-5.dnb1", data)
    topic.named = [
        decode_descriptor(
            b'{"completed":true,"created_at":1700000000,"end_offset":5,"etag":null,'
            b'"object_id":"data-4-5.dnb1","size":%d,"start_offset":4}' % len(data)
        )
    ]
    found = list(reader_of(topic, pool).read_range(5))
    (one,) = found
    wanted = without(SAMPLE, appended)
    assert (one.offset, one.payload, one.attributes) == (5, wanted.payload, wanted.attributes)
    assert (one.schema_id, one.routing_key) == (wanted.schema_id, wanted.routing_key)


def test_leaving_an_iteration_closes_its_stream(pool: FetchPool) -> None:
    reader = reader_of(messages(), pool)
    iteration = reader.read_range(0)
    assert next(iteration).offset == 0
    iteration.close()
    assert list(iteration) == []


def test_close_ends_an_iteration_that_waits(pool: FetchPool) -> None:
    topic, gate = messages(), Gate()
    reader = reader_of(topic, pool, HookedStore(topic.store, gate))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(reader.read_range(0)))
    thread.start()
    gate.arrived(1)
    reader.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert found == []
    gate.open()
    with pytest.raises(LogClosed):
        next(reader.read_range(0))
