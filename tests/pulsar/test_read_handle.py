"""Reading an offloaded ledger: anywhere, again, side by side, and when it is damaged."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import (
    LedgerError,
    LogClosed,
    ObjectChanged,
    ObjectMissing,
    ServiceUnavailable,
    UsageError,
)
from forebay.format.pulsar.entry import MessageMetadata, encode_entry
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.pulsar import read_handle
from forebay.pulsar.offloader import LedgerOffloader, OffloadSettings
from forebay.pulsar.read_handle import OffloadedReadHandle, ReadSettings
from forebay.read.fetch_pool import FetchPool
from forebay.testing import FaultBackend, ObjectFault
from support.ledgers import HeldLedger, messages

UID: Final = "7f0e0000-0000-4000-8000-00000000002a"
VERSION: Final = {"s3managedledgeroffloaderformatversion": "1"}


class Place:
    """A ledger in a store in memory, whose requests can be watched."""

    def __init__(
        self,
        entries: list[bytes],
        *,
        block_bytes: int = 1024,
        reading: ReadSettings | None = None,
        pool: FetchPool | None = None,
    ) -> None:
        self.entries = entries
        self.backend = FaultBackend(MemoryBackend())
        self.store = CloudStore(self.backend)
        settings = OffloadSettings(block_bytes=block_bytes, reading=reading or ReadSettings())
        self.offloader = LedgerOffloader(self.store, settings, pool=pool)
        self.index = self.offloader.offload(HeldLedger(entries), UID)
        self.objects = self.offloader.objects(7, UID)
        self.requests = 0
        self.backend.hook("get_range", self._count)

    def _count(self, key: str) -> None:
        self.requests += key == self.objects.data

    def open(self) -> OffloadedReadHandle:
        return self.offloader.read_offloaded(7, UID)

    def replace(self, key: str, data: bytes, metadata: dict[str, str] | None = None) -> None:
        self.store.put_object(key, data, VERSION if metadata is None else metadata)

    def bytes_of(self, key: str) -> bytes:
        return bytes(self.store.get_range(key, 0, self.store.head(key).size))


def read(handle: OffloadedReadHandle, first: int, last: int) -> list[bytes]:
    found = list(handle.read(first, last))
    assert [entry.entry_id for entry in found] == list(range(first, last + 1))
    return [bytes(entry.data) for entry in found]


@pytest.fixture
def pool() -> Iterator[FetchPool]:
    pool = FetchPool(4)
    yield pool
    pool.close()


ranges = st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), min_size=1, max_size=6)


@given(
    st.lists(st.integers(0, 700), min_size=60, max_size=60),
    ranges,
    st.sampled_from([70, 500, 4096]),
)
def test_any_ranges_are_read_in_any_order(
    sizes: list[int], wanted: list[tuple[int, int]], read_bytes: int
) -> None:
    entries = [
        encode_entry(MessageMetadata("p", number, 1), bytes(size))
        for number, size in enumerate(sizes)
    ]
    place = Place(entries, reading=ReadSettings(read_bytes=read_bytes))
    with place.open() as handle:
        for pair in wanted:
            first, last = min(pair), max(pair)
            assert read(handle, first, last) == entries[first : last + 1]


def test_entries_that_are_no_messages_are_read_if_nothing_is_verified() -> None:
    entries = [b"", b"x", bytes(800), b"\x0e\x01", b""]
    with Place(entries, reading=ReadSettings(verify=False)).open() as handle:
        assert read(handle, 0, 4) == entries
    with Place(entries).open() as handle, pytest.raises(LedgerError, match="a damaged message"):
        read(handle, 0, 4)


def test_messages_without_a_checksum_are_read() -> None:
    entries = [encode_entry(MessageMetadata("", at, 1), b"", checksum=False) for at in range(9)]
    with Place(entries).open() as handle:
        assert read(handle, 0, 8) == entries


def test_with_a_pool_chunks_are_fetched_ahead_and_never_too_many(pool: FetchPool) -> None:
    settings = ReadSettings(read_bytes=512, read_ahead_chunks=3)
    place = Place(messages(200), block_bytes=1 << 20, reading=settings, pool=pool)
    most = []
    with place.open() as handle:
        for number, entry in enumerate(handle.read(0, 199)):
            assert entry.entry_id == number
            at = handle.index.data_bytes * number // 200
            most.append(place.requests - at // 512)
    assert place.requests == -(-handle.index.data_bytes // 512)
    assert 2 <= max(most) <= 3 + 3


def test_a_second_read_starts_at_a_place_that_is_known() -> None:
    settings = ReadSettings(read_bytes=64 * 1024)
    entries = messages(600, 4000)
    place = Place(entries, block_bytes=8 << 20, reading=settings)
    with place.open() as handle:
        read(handle, 0, 599)
        for first in (17, 300, 599):
            place.requests = 0
            assert read(handle, first, first) == [entries[first]]
            assert place.requests <= 2
        assert handle.places <= handle.index.data_bytes // read_handle.PLACE_BYTES + 1


def test_the_number_of_places_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_handle, "PLACES_MAX", 8)
    monkeypatch.setattr(read_handle, "PLACE_BYTES", 1)
    entries = messages(200)
    with Place(entries).open() as handle:
        for _ in range(2):
            assert read(handle, 0, 199) == entries
        assert 0 < handle.places <= 8
        for first in range(0, 200, 13):
            assert read(handle, first, first) == [entries[first]]


def test_readers_of_one_ledger_do_not_disturb_each_other(pool: FetchPool) -> None:
    entries = messages(300, 200)
    settings = ReadSettings(read_bytes=700, read_ahead_chunks=2)
    place = Place(entries, block_bytes=4096, reading=settings, pool=pool)
    started = threading.Barrier(8)

    def reader(seed: int) -> int:
        wrong, order = 0, random.Random(seed)
        started.wait()
        for _ in range(20):
            first = order.randrange(300)
            last = order.randrange(first, min(first + 60, 300))
            wrong += read(handle, first, last) != entries[first : last + 1]
        return wrong

    with place.open() as handle, ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(reader, range(8))) == 0


def test_readers_that_alternate_keep_their_places() -> None:
    entries = messages(50)
    with Place(entries).open() as handle:
        one, two = handle.read(0, 49), handle.read(20, 49)
        for number in range(20, 50):
            assert next(two).entry_id == number
            assert next(one).entry_id == number - 20


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (0, 50), (3, 2), (50, 50), (0, 2**70)])
def test_entry_ids_that_the_ledger_does_not_have_are_refused_at_once(first: int, last: int) -> None:
    with Place(messages(50)).open() as handle, pytest.raises(UsageError, match=r"0\.\.49"):
        handle.read(first, last)


def test_a_closed_handle_reads_nothing(pool: FetchPool) -> None:
    place = Place(messages(200), reading=ReadSettings(read_bytes=128), pool=pool)
    handle = place.open()
    entries = handle.read(0, 199)
    next(entries)
    handle.close()
    with pytest.raises(LogClosed, match="was closed"):
        list(entries)
    with pytest.raises(LogClosed, match="was closed"):
        handle.read(0, 1)


def test_a_closed_pool_ends_a_read(pool: FetchPool) -> None:
    place = Place(messages(200), reading=ReadSettings(read_bytes=128), pool=pool)
    with place.open() as handle:
        entries = handle.read(0, 199)
        next(entries)
        pool.close()
        with pytest.raises(LogClosed):
            list(entries)


def test_the_error_of_a_request_is_raised_and_another_read_works() -> None:
    entries = messages(100)
    place = Place(entries, reading=ReadSettings(read_bytes=512))
    with place.open() as handle:
        place.backend.inject(ObjectFault("get_range", key=place.objects.data, skip=2))
        with pytest.raises(ServiceUnavailable):
            read(handle, 0, 99)
        assert read(handle, 0, 99) == entries


# ---- what is refused ----


@pytest.mark.parametrize("version", [None, "2", ""])
@pytest.mark.parametrize("of_index", [True, False])
def test_another_format_version_is_refused(*, version: str | None, of_index: bool) -> None:
    place = Place(messages(5))
    key = place.objects.index if of_index else place.objects.data
    metadata = {} if not version else {"s3managedledgeroffloaderformatversion": version}
    place.replace(key, place.bytes_of(key), metadata)
    with pytest.raises(LedgerError, match="has the format version"):
        place.open()


def test_a_missing_data_object_is_named() -> None:
    place = Place(messages(5))
    place.store.delete_object(place.objects.data)
    with pytest.raises(ObjectMissing, match=r"its index .* is there"):
        place.open()


def test_an_object_that_is_replaced_while_it_is_read_is_noticed() -> None:
    place = Place(messages(100), reading=ReadSettings(read_bytes=512))
    with place.open() as handle:
        entries = handle.read(0, 99)
        next(entries)
        place.replace(place.objects.data, bytes(place.index.data_bytes))
        with pytest.raises(ObjectChanged):
            list(entries)


def test_an_index_that_is_too_large_is_not_read() -> None:
    place = Place(messages(5))
    place.replace(place.objects.index, bytes(5 << 20))
    with pytest.raises(LedgerError, match="an index has at most"):
        place.open()


# ---- damage: a clear error, or the right entries ----

FEW: Final = messages(14, 100)


def outcome(place: Place) -> list[bytes] | None:
    """The entries that are read, or None after an error of damage."""
    try:
        with place.open() as handle:
            return read(handle, 0, 13)
    except LedgerError:
        return None


def test_every_cut_of_either_object_is_noticed() -> None:
    place = Place(FEW)
    assert len(place.index.blocks) > 1
    for key in (place.objects.data, place.objects.index):
        whole = place.bytes_of(key)
        for size in range(len(whole)):
            place.replace(key, whole[:size])
            assert outcome(place) is None
        place.replace(key, whole)
    assert outcome(place) == FEW


def test_every_cut_that_the_index_does_not_tell_is_noticed() -> None:
    """The data object has its size, but its end is another."""
    place = Place(FEW)
    whole = place.bytes_of(place.objects.data)
    for size in range(len(whole)):
        place.replace(place.objects.data, whole[:size] + bytes(len(whole) - size))
        found = outcome(place)
        assert found is None or found == FEW


def test_every_flipped_bit_of_the_data_object_is_noticed_or_harmless() -> None:
    place = Place(FEW)
    whole = place.bytes_of(place.objects.data)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        place.replace(place.objects.data, bytes(flipped))
        found = outcome(place)
        assert found is None or found == FEW


def test_every_flipped_bit_of_the_index_is_noticed_or_harmless() -> None:
    place = Place(FEW)
    whole = place.bytes_of(place.objects.index)
    last = place.index.last_entry_id
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            place.replace(place.objects.index, bytes(flipped))
            try:
                with place.open() as handle:
                    found = read(handle, 0, handle.last_add_confirmed)
                    assert found == FEW[: len(found)]
                    if handle.last_add_confirmed == last:
                        assert found == FEW
            except (LedgerError, UsageError):
                continue


def test_a_block_without_entries_is_an_error_and_no_loop() -> None:
    """Pulsar leaves such a ledger if an entry did not fit into a block."""
    place = Place(FEW)
    size = place.index.blocks[1].position
    shorter = place.bytes_of(place.objects.data)[:size]
    index = bytearray(place.bytes_of(place.objects.index))
    index[8:16] = size.to_bytes(8, "big")
    index[24:28] = (2).to_bytes(4, "big")
    del index[-20 * (len(place.index.blocks) - 2) :]
    index[4:8] = len(index).to_bytes(4, "big")
    place.replace(place.objects.data, shorter)
    place.replace(place.objects.index, bytes(index))
    first = place.index.blocks[1].first_entry_id
    with place.open() as handle:
        assert read(handle, 0, first - 1) == FEW[:first]
        with pytest.raises(LedgerError, match="the object ends before the entry"):
            read(handle, first, first)


def test_a_damaged_message_is_not_returned_unless_it_is_wanted() -> None:
    place = Place(FEW)
    damaged = bytearray(place.bytes_of(place.objects.data))
    damaged[128 + 12 + 60] ^= 1
    place.replace(place.objects.data, bytes(damaged))
    with place.open() as handle:
        with pytest.raises(LedgerError, match=r"a damaged message at position 128 \(entry 0\)"):
            read(handle, 0, 3)
        assert read(handle, 1, 3) == FEW[1:4]
    unchecked = LedgerOffloader(
        place.store,
        OffloadSettings(block_bytes=1024, reading=ReadSettings(verify=False)),
    )
    with unchecked.read_offloaded(7, UID) as handle:
        assert read(handle, 0, 3) != FEW[:4]
