"""Streams over compressed objects, and over histories in which only some are compressed."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from forebay.errors import CorruptFrame
from forebay.format.blocks import (
    BLOCK_HEADER_BYTES,
    BlockHeader,
    decode_header,
    encode_header,
)
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor, sampled
from forebay.format.frame import FrameTooLarge
from forebay.format.names import object_key, sidecar
from forebay.limits import DESCRIPTOR_INDEX_ENTRIES, MIB
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.read.fetch_pool import FetchPool
from forebay.read.object_stream import ObjectStream
from forebay.read.sidecar_index import SidecarIndexes
from forebay.read.verify import FaultKind, examine_object
from forebay.settings import CloudReaderSettings
from support.stored_objects import (
    TOPIC,
    HookedStore,
    StoredTopic,
    drained,
    payload,
    settings_of,
    stream_of,
)

BLOCKS = [3, 1, 4, 2]
"""Messages of the blocks of the compressed object."""
FIRST = 5
"""Its first offset: plain objects are before and after it."""
STARTS = [FIRST + sum(BLOCKS[:number]) for number in range(len(BLOCKS) + 1)]
END = STARTS[-1] + 6


def mixed(*, indexed: bool = True) -> tuple[StoredTopic, ObjectDescriptor]:
    topic = StoredTopic()
    topic.add(0, [payload(n, 40) for n in range(FIRST)])
    blocks = [
        [payload(first + n, 40) for n in range(count)]
        for first, count in zip(STARTS, BLOCKS, strict=False)
    ]
    made = topic.add_blocks(FIRST, blocks, indexed=indexed)
    topic.add(STARTS[-1], [payload(n, 40) for n in range(STARTS[-1], END)])
    return topic, made


def positions(topic: StoredTopic, made: ObjectDescriptor) -> list[int]:
    data, found = topic.data(made), [0]
    while found[-1] < len(data):
        found.append(found[-1] + decode_header(data[found[-1] :]).size)
    return found


@pytest.mark.parametrize("chunk_bytes", [7, 33, 64, 1000])
@pytest.mark.parametrize("indexed", [True, False])
def test_every_range_of_a_mixed_history_is_read(
    pool: FetchPool, chunk_bytes: int, indexed: bool
) -> None:
    topic, _ = mixed(indexed=indexed)
    for start in range(END):
        for end in (start + 1, start + 3, None):
            stream = stream_of(topic, pool, start, end, chunk_bytes=chunk_bytes, ahead=2)
            stop = END if end is None else min(end, END)
            assert drained(stream) == [(n, topic.frames[n]) for n in range(start, stop)]


def test_a_reader_without_a_pool_decompresses_on_its_own_thread() -> None:
    topic, _ = mixed()
    stream = ObjectStream(TOPIC, topic.store, topic, None, settings_of(ahead=0), 0)
    assert [offset for offset, _ in drained(stream, limit=2)] == list(range(END))


# ---- damage ----


@pytest.mark.parametrize("chunk_bytes", [16, 1000])
def test_a_damaged_block_is_raised_with_object_position_and_offset(
    pool: FetchPool, chunk_bytes: int
) -> None:
    for number, first in enumerate(STARTS[:-1]):
        topic, made = mixed()
        at = positions(topic, made)[number]
        topic.overwrite(made, at + 9, b"\xee")
        topic.rename(made, offset_index=((FIRST, 0),))
        found: list[tuple[int, bytes]] = []
        with pytest.raises(CorruptFrame) as raised:
            drained(stream_of(topic, pool, chunk_bytes=chunk_bytes), found=found)
        assert [offset for offset, _ in found] == list(range(first))
        assert raised.value.file == topic.key(made)
        assert (raised.value.position, raised.value.offset) == (at, first)
        assert raised.value.reason == "damaged block header"


def test_damaged_data_of_a_block_is_raised_and_the_rest_can_be_read(pool: FetchPool) -> None:
    topic, made = mixed()
    at = positions(topic, made)[2]
    topic.overwrite(made, at + BLOCK_HEADER_BYTES, b"\0\0\0\0")
    stream = stream_of(topic, pool)
    with pytest.raises(CorruptFrame, match="decompress") as raised:
        drained(stream)
    assert (raised.value.position, raised.value.offset) == (at, STARTS[2])
    assert [n for n, _ in drained(stream_of(topic, pool, STARTS[3]))] == list(range(STARTS[3], END))


@pytest.mark.parametrize("place", ["header", "data"])
def test_a_lenient_reader_loses_the_damaged_block_and_no_other(pool: FetchPool, place: str) -> None:
    for number in range(len(BLOCKS)):
        topic, made = mixed()
        at = positions(topic, made)[number]
        topic.overwrite(made, at + (9 if place == "header" else BLOCK_HEADER_BYTES), b"\xee\xee")
        stream = stream_of(topic, pool, lenient=True)
        lost = range(STARTS[number], STARTS[number + 1])
        assert [n for n, _ in drained(stream)] == [n for n in range(END) if n not in lost]
        assert stream.skipped == len(lost)


def test_a_block_that_claims_too_much_is_damage_and_takes_no_memory(pool: FetchPool) -> None:
    topic, made = mixed()
    at = positions(topic, made)[1]
    said = decode_header(topic.data(made)[at:])
    topic.overwrite(made, at, encode_header(said._replace(raw_bytes=64 * MIB)))
    with pytest.raises(CorruptFrame, match="another size"):
        drained(stream_of(topic, pool))
    hostile = BlockHeader(said.first_offset, 1, 65 * MIB, 10)
    topic.overwrite(made, at, encode_header(hostile))
    with pytest.raises(CorruptFrame, match="impossible block length"):
        drained(stream_of(topic, pool))


@pytest.mark.parametrize("shift", [-3, 5])
def test_a_wrong_index_misleads_no_reader(pool: FetchPool, shift: int) -> None:
    topic, made = mixed()
    index = made.offset_index or ()
    wrong = tuple((offset, place + shift if place else 0) for offset, place in index)
    topic.rename(made, offset_index=wrong)
    for start in range(FIRST, STARTS[-1]):
        for end in (start + 1, None):
            stream = stream_of(topic, pool, start, end)
            stop = END if end is None else end
            assert [n for n, _ in drained(stream)] == list(range(start, stop))


def test_random_damage_gives_right_messages_or_an_error(pool: FetchPool) -> None:
    source = random.Random(15)
    for _ in range(150):
        topic, made = mixed(indexed=source.random() < 0.5)
        for _ in range(source.randint(1, 4)):
            topic.overwrite(made, source.randrange(made.size), source.randbytes(2))
        strict, lenient = stream_of(topic, pool), stream_of(topic, pool, lenient=True)
        found: list[tuple[int, bytes]] = []
        with suppress(CorruptFrame):
            drained(strict, found=found)
        assert [n for n, _ in found] == list(range(strict.offset))
        assert all(topic.frames[n] == data for n, data in found)
        kept = drained(lenient)
        assert all(topic.frames[n] == data for n, data in kept)
        assert len(kept) + lenient.skipped == END


def test_a_reader_with_a_limit_asks_for_room_before_it_decompresses(pool: FetchPool) -> None:
    topic = StoredTopic()
    made = topic.add_blocks(0, [[bytes(50_000)], [bytes(10)]])
    stream = stream_of(topic, pool, chunk_bytes=1000)
    stream.limit(10_000)
    with pytest.raises(FrameTooLarge) as raised:
        stream.next()
    header = decode_header(topic.data(made))
    assert raised.value.size == header.raw_bytes + header.stored_bytes
    stream.limit(raised.value.size)
    assert [n for n, _ in drained(stream)] == [0, 1]


# ---- reading back ----


def test_reading_back_compares_frames_sizes_and_index(pool: FetchPool) -> None:
    topic, made = mixed()

    def seen(descriptor: ObjectDescriptor) -> tuple[FaultKind | None, object]:
        found = examine_object(topic.store, pool, CloudReaderSettings(), TOPIC, descriptor)
        return (None if found.fault is None else found.fault.kind), found.found

    index = made.offset_index or ()
    assert seen(replace(made, etag="2")) == (None, None)
    assert seen(replace(made, content_hash=f"sha256:{'0' * 64}"))[0] is FaultKind.CONTENT
    assert seen(replace(made, raw_size=(made.raw_size or 0) + 1))[0] is FaultKind.CONTENT
    assert seen(replace(made, end_offset=made.end_offset + 1))[0] is FaultKind.CORRUPT
    for wrong in (
        (*index[:2], (index[2][0], index[2][1] + 1)),
        (*index[:2], (index[2][0] + 1, 99)),
    ):
        kind, found = seen(replace(made, offset_index=wrong))
        assert kind is FaultKind.INDEX
        assert isinstance(found, ObjectDescriptor)
        assert set(found.offset_index or ()) <= set(index)
    topic.overwrite(made, made.size - 1, b"?")
    assert seen(made)[0] is FaultKind.CORRUPT


# ---- how much is fetched ----


def test_a_hundred_messages_from_the_middle_cost_at_most_two_blocks_more(pool: FetchPool) -> None:
    source = random.Random(7)
    store = MemoryBackend()
    topic = StoredTopic(store)
    count, size = 200, 20
    payloads = [source.randbytes(50) + bytes(100) for _ in range(count * size)]
    blocks = [payloads[at : at + size] for at in range(0, len(payloads), size)]
    whole = topic.add_blocks(0, blocks)
    whole = topic.rename(whole, raw_size=count * MIB)  # as large as blocks of a real object
    store.put_object(object_key(TOPIC, sidecar(whole.object_id)), encode_descriptor(whole))
    few = topic.rename(whole, offset_index=sampled(whole, DESCRIPTOR_INDEX_ENTRIES).offset_index)
    assert len(few.offset_index or ()) == DESCRIPTOR_INDEX_ENTRIES < count
    bounds = [*(place for _, place in whole.offset_index or ()), whole.size]
    for start in (1000, 1003, 2019, 3990 - 100):
        hooked = HookedStore(store, lambda *_: None)
        stream = ObjectStream(
            TOPIC, hooked, topic, pool, settings_of(), start, start + 100,
            indexes=SidecarIndexes(CloudStore(store)),
        )  # fmt: skip
        assert [n for n, _ in drained(stream)] == list(range(start, start + 100))
        needed = bounds[(start + 99) // size + 1] - bounds[start // size]
        block = max(after - before for before, after in pairwise(bounds))
        fetched = sum(end - begin for _, begin, end in hooked.requests)
        assert needed <= fetched <= needed + 2 * block
