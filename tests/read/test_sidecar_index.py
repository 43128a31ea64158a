"""A read that starts inside a large object finds its position by the index in the sidecar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from forebay.catalog.chain import stored
from forebay.errors import CorruptFrame, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.frame import encode_frame
from forebay.format.names import object_key, sidecar
from forebay.limits import MIB
from forebay.objects.backend import ObjectMeta
from forebay.objects.memory import MemoryBackend
from forebay.read.fetch_pool import FetchPool
from forebay.read.object_stream import ObjectStream
from forebay.read.sidecar_index import SidecarIndexes
from forebay.settings import CloudReaderSettings
from support.stored_objects import TOPIC, StoredTopic, drained

PAYLOAD: Final = bytes(MIB // 2)
COUNT: Final = 400
MIDDLE: Final = 203
SETTINGS: Final = CloudReaderSettings(fetch_chunk_size=MIB, read_ahead_chunks=0)


class Sidecars(MemoryBackend):
    """Counts the requests for sidecars, and fails them if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = 0
        self.away = False

    def head(self, key: str) -> ObjectMeta:
        self.looked += 1
        if self.away:
            raise ServiceUnavailable("no connection")
        return super().head(key)


class Large:
    """An object of 200 MiB whose descriptor has an entry for every 3 MiB at most."""

    def __init__(self) -> None:
        self.store = Sidecars()
        self.topic = StoredTopic()
        frames = [encode_frame(offset, PAYLOAD) for offset in range(COUNT)]
        size = len(frames[0])
        index = tuple((at, at * size) for at in range(0, COUNT, 2))
        self.full = ObjectDescriptor(
            f"data-0-{COUNT - 1}.dnb1", 0, COUNT - 1, COUNT * size, None, 0, offset_index=index
        )
        self.kept = stored(self.full)
        self.topic.named.append(self.kept)
        self.store.put_object(object_key(TOPIC, self.full.object_id), b"".join(frames))
        self.put(encode_descriptor(self.full))
        self.indexes = SidecarIndexes(self.store)

    def put(self, data: bytes) -> None:
        self.store.put_object(object_key(TOPIC, sidecar(self.full.object_id)), data)

    def stream(self, indexes: SidecarIndexes | None, start: int = MIDDLE) -> ObjectStream:
        return ObjectStream(
            TOPIC, self.store, self.topic, None, SETTINGS, start, start + 1, indexes=indexes
        )

    def read(self, indexes: SidecarIndexes | None, start: int = MIDDLE) -> int:
        """Reads one message, and returns how many bytes that took."""
        with self.stream(indexes, start) as stream:
            assert [offset for offset, _ in drained(stream)] == [start]
            return stream.bytes_fetched


@pytest.fixture(scope="module")
def made() -> Large:
    return Large()


@pytest.fixture
def large(made: Large) -> Large:
    made.put(encode_descriptor(made.full))
    made.indexes = SidecarIndexes(made.store)
    made.store.looked, made.store.away = 0, False
    return made


def test_a_read_in_the_middle_fetches_little_and_the_sidecar_once(large: Large) -> None:
    assert large.read(None) > 2 * MIB
    for _ in range(3):
        assert large.read(large.indexes) <= 2 * MIB
    assert large.store.looked == 1
    assert large.read(large.indexes, 0) <= 2 * MIB


def test_few_indexes_are_kept(large: Large) -> None:
    for number in range(9):
        other = replace(large.kept, created_at=number)
        large.indexes.refined(TOPIC, other, MIDDLE, MIB)
    assert large.store.looked == 9
    large.indexes.refined(TOPIC, replace(large.kept, created_at=8), MIDDLE, MIB)
    assert large.store.looked == 9
    large.indexes.refined(TOPIC, replace(large.kept, created_at=0), MIDDLE, MIB)
    assert large.store.looked == 10


WRONG: Final[dict[str, Callable[[ObjectDescriptor], bytes]]] = {
    "empty": lambda _: b"",
    "damaged": lambda full: encode_descriptor(full)[:-9],
    "too large": lambda _: bytes(MIB),
    "of other bytes": lambda full: encode_descriptor(replace(full, size=full.size + 1)),
    "without an index": lambda full: encode_descriptor(replace(full, offset_index=None)),
    "with another index": lambda full: encode_descriptor(
        replace(full, offset_index=tuple((at, 99 * at) for at in range(COUNT)))
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_sidecar_is_not_used(large: Large, wrong: str) -> None:
    large.put(WRONG[wrong](large.full))
    assert large.read(large.indexes) == large.read(None)


def test_a_missing_sidecar_is_no_error(large: Large) -> None:
    large.store.delete_object(object_key(TOPIC, sidecar(large.full.object_id)))
    assert large.read(large.indexes) == large.read(None)


def test_a_store_that_does_not_respond_is_asked_again_for_the_sidecar(large: Large) -> None:
    large.store.away = True
    assert large.read(large.indexes) == large.read(None)
    large.store.away = False
    assert large.read(large.indexes) <= 2 * MIB


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_an_entry_at_a_wrong_position_costs_a_second_read_and_no_error(
    large: Large, shift: int
) -> None:
    known = set(large.kept.offset_index or ())
    index = tuple(
        entry if entry in known else (entry[0], entry[1] + shift)
        for entry in large.full.offset_index or ()
    )
    large.put(encode_descriptor(replace(large.full, offset_index=index)))
    assert large.read(large.indexes) > large.read(None)


def test_damage_is_still_an_error(large: Large) -> None:
    key = object_key(TOPIC, large.full.object_id)
    good = bytes(large.store.get_range(key, 0, large.full.size))
    position = MIDDLE * (len(good) // COUNT) + 100
    large.store.put_object(key, good[:position] + b"?" + good[position + 1 :])
    try:
        with large.stream(large.indexes) as stream, pytest.raises(CorruptFrame) as raised:
            stream.next()
        assert raised.value.offset == MIDDLE
    finally:
        large.store.put_object(key, good)


def test_a_pool_reads_the_sidecar_too(large: Large) -> None:
    pool = FetchPool(2)
    settings = CloudReaderSettings(fetch_chunk_size=MIB, read_ahead_chunks=2)
    with ObjectStream(
        TOPIC, large.store, large.topic, pool, settings, MIDDLE, None, indexes=large.indexes
    ) as stream:
        frames = stream.next()
        assert frames is not None
        assert frames.offsets[0] == MIDDLE
    pool.close()
    assert large.store.looked == 1
