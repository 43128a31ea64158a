"""The stream of a topic's objects: every message once, in order, in bounded memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import LostOffsets, OffsetOutOfRange, ServiceRefused, ServiceUnavailable
from forebay.format.frame import HEADER_BYTES, End, FrameTooLarge, encode_frame
from forebay.format.layout import Buffer
from forebay.objects.backend import ObjectMeta
from forebay.read.fetch_pool import FetchPool
from forebay.read.metrics import (
    BYTES_FETCHED,
    BYTES_USED,
    ERRORS,
    OBJECTS_READ,
    RANGE_REQUESTS,
)
from forebay.read.object_stream import ObjectStream
from forebay.read.plan import DESCRIPTOR_PAGE
from support.stored_objects import (
    PATIENCE,
    TOPIC,
    Gate,
    HookedStore,
    StoredTopic,
    drained,
    payload,
    plain,
    settings_of,
    stream_of,
)


def three_objects(every: int | None = 3) -> StoredTopic:
    topic = StoredTopic()
    for start, count in ((0, 5), (5, 1), (6, 4)):
        topic.add(start, [payload(n, 10 + n * 7 % 30) for n in range(start, start + count)], every)
    return topic


def expected(topic: StoredTopic, start: int, end: int | None = None) -> list[tuple[int, bytes]]:
    return [
        (offset, one)
        for offset, one in sorted(topic.frames.items())
        if offset >= start and (end is None or offset < end)
    ]


# ---- what comes out ----


@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("chunk_bytes", [1, 33, 1000])
def test_every_start_and_every_end_gives_exactly_its_messages(
    pool: FetchPool, every: int | None, chunk_bytes: int
) -> None:
    topic = three_objects(every)
    for start in range(11):
        for end in [*range(start, 12), None]:
            stream = stream_of(topic, pool, start, end, chunk_bytes=chunk_bytes)
            assert drained(stream) == expected(topic, start, end)
            assert stream.offset == max(start, min(10, 10 if end is None else end))
            assert stream.next() is None


def test_chunks_may_be_cut_at_every_byte(pool: FetchPool) -> None:
    topic = three_objects()
    for chunk_bytes in range(1, 200):
        stream = stream_of(topic, pool, chunk_bytes=chunk_bytes)
        assert drained(stream) == expected(topic, 0)


def test_frames_larger_than_all_chunks_together_are_read(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0), payload(1, 5000), payload(2), payload(3, 9000)], 1)
    assert drained(stream_of(topic, pool, chunk_bytes=50, ahead=2)) == expected(topic, 0)


@pytest.mark.parametrize("bytes_max", [60, 100, 250, 1000, None])
def test_a_limit_bounds_the_bytes_of_requests_and_of_all_that_is_held(
    pool: FetchPool, bytes_max: int | None
) -> None:
    topic = three_objects()
    stream = stream_of(topic, pool, chunk_bytes=100, ahead=6)
    found: list[tuple[int, bytes]] = []
    while True:
        stream.limit(bytes_max)
        frames = stream.next()
        if frames is None:
            break
        found += [(each.offset, bytes(each.payload)) for each in frames]
        if bytes_max is not None:
            assert (1 + stream.window) * min(bytes_max, 100) <= bytes_max
    assert found == expected(topic, 0)


def test_a_frame_over_the_limit_is_refused_until_the_limit_is_raised(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0), payload(1, 5000), payload(2)], 1)
    stream = stream_of(topic, pool, chunk_bytes=100, ahead=2)
    stream.limit(200)
    first = stream.next()
    assert first is not None
    with pytest.raises(FrameTooLarge) as refused:
        stream.next()
    assert stream.offset == 1
    stream.limit(refused.value.size)
    assert drained(stream) == expected(topic, 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_a_limit_bounds_the_messages_of_each_piece(pool: FetchPool, limit: int) -> None:
    topic = three_objects()
    stream = stream_of(topic, pool, 2, 9, chunk_bytes=1000)
    assert drained(stream, limit) == expected(topic, 2, 9)


def test_a_piece_ends_with_its_frames(pool: FetchPool) -> None:
    topic = three_objects()
    stream = stream_of(topic, pool, chunk_bytes=1000)
    frames = stream.next(2)
    assert frames is not None
    assert (frames.end, frames.offset) == (End.COMPLETE, 2)
    assert frames.safe_length == frames.positions[1] + frames.lengths[1]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_objects_any_range_and_any_chunks_give_the_plain_list(
    data: st.DataObject, pool: FetchPool
) -> None:
    topic, start = StoredTopic(), data.draw(st.integers(0, 5))
    for count in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)):
        sizes = data.draw(st.lists(st.integers(10, 200), min_size=count, max_size=count))
        every = data.draw(st.none() | st.integers(1, 4))
        made = topic.add(start, [payload(start + n, size) for n, size in enumerate(sizes)], every)
        start = made.next_offset
    first = data.draw(st.integers(topic.named[0].start_offset, start))
    last = data.draw(st.none() | st.integers(first, start + 3))
    stream = stream_of(
        topic,
        pool,
        first,
        last,
        chunk_bytes=data.draw(st.integers(1, 400)),
        ahead=data.draw(st.integers(0, 5)),
    )
    limit = data.draw(st.none() | st.integers(1, 4))
    assert drained(stream, limit) == expected(topic, first, last)


def test_overlapping_objects_give_each_message_once(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(n) for n in range(6)])
    topic.add(4, [payload(n) for n in range(4, 9)])
    assert drained(stream_of(topic, pool)) == expected(topic, 0)


def test_an_object_inside_another_is_left_out(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(n) for n in range(6)])
    topic.add(2, [payload(n) for n in range(2, 4)])
    topic.add(6, [payload(n) for n in range(6, 9)])
    stream = stream_of(topic, pool)
    assert drained(stream) == expected(topic, 0)
    assert stream.bytes_fetched == stream.bytes_used


def test_after_a_seek_the_stream_goes_on_with_the_other_offsets(pool: FetchPool) -> None:
    topic = three_objects()
    for start in range(11):
        for end in (None, start, min(start + 3, 10)):
            stream = stream_of(topic, pool, 3, 8, chunk_bytes=40)
            assert stream.next(1) is not None
            stream.seek(start, end)
            assert stream.offset == start
            assert drained(stream) == expected(topic, start, end)


def test_more_objects_than_a_page_of_descriptors_are_read(pool: FetchPool) -> None:
    topic = StoredTopic()
    count = 3 * DESCRIPTOR_PAGE + 1
    for offset in range(count):
        topic.add(offset, [payload(offset)])
    assert drained(stream_of(topic, pool)) == expected(topic, 0)
    # One for each page; none is asked for twice.
    assert topic.queried == [(page * DESCRIPTOR_PAGE, None) for page in range(4)] + [(count, None)]


# ---- the end, and what comes after ----


def test_the_stream_goes_on_when_an_object_was_added(pool: FetchPool) -> None:
    topic = StoredTopic()
    stream = stream_of(topic, pool)
    assert stream.next() is None
    for start in (0, 4, 8):
        topic.add(start, [payload(start + n) for n in range(4)])
        assert [offset for offset, _ in drained(stream)] == list(range(start, start + 4))
        assert stream.next() is None


def test_a_start_behind_the_last_object_is_no_error(pool: FetchPool) -> None:
    topic = three_objects()
    stream = stream_of(topic, pool, 10)
    assert stream.next() is None
    assert stream.offset == 10


def test_a_gap_is_raised_at_its_offset_and_not_before(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0), payload(1)])
    topic.add(5, [payload(5)])
    stream = stream_of(topic, pool, chunk_bytes=1000)
    frames = stream.next()
    assert frames is not None
    assert plain(frames) == [(0, payload(0)), (1, payload(1))]
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match="2"):
            stream.next()
    assert stream.offset == 2


def test_a_lost_range_is_raised_as_what_it_is(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0)])
    topic.add(5, [payload(5)])
    topic.lost = range(1, 5)
    stream = stream_of(topic, pool)
    assert stream.next() is not None
    with pytest.raises(LostOffsets) as raised:
        stream.next()
    assert raised.value.end == 5
    assert drained(stream_of(topic, pool, raised.value.end)) == [(5, payload(5))]


def test_an_offset_below_the_first_object_is_raised(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(5, [payload(5)])
    with pytest.raises(OffsetOutOfRange, match="3"):
        stream_of(topic, pool, 3).next()


def test_a_range_that_ends_at_a_gap_is_read_whole(pool: FetchPool) -> None:
    topic = StoredTopic()
    topic.add(0, [payload(0), payload(1)])
    topic.add(5, [payload(5)])
    assert drained(stream_of(topic, pool, 0, 2)) == expected(topic, 0, 2)


# ---- what is fetched, and when ----


def large_object(every: int | None = 50) -> StoredTopic:
    topic = StoredTopic()
    topic.add(0, [payload(n, 100) for n in range(2000)], every)
    return topic


FRAME = HEADER_BYTES + 100


def test_the_middle_of_an_object_fetches_at_most_two_intervals_more(pool: FetchPool) -> None:
    topic = large_object()
    for start, end in ((1, 2), (49, 50), (50, 100), (523, 1523), (1999, 2000)):
        stream = stream_of(topic, pool, start, end, chunk_bytes=4096)
        assert drained(stream) == expected(topic, start, end)
        assert stream.bytes_used == (end - start) * FRAME
        assert stream.bytes_fetched <= stream.bytes_used + 2 * 50 * FRAME


def test_a_full_scan_fetches_each_byte_once(pool: FetchPool) -> None:
    topic = large_object()
    stream = stream_of(topic, pool, chunk_bytes=4096)
    assert len(drained(stream)) == 2000
    assert stream.bytes_fetched == stream.bytes_used == 2000 * FRAME


def test_an_object_without_an_index_is_not_fetched_beyond_what_is_needed(pool: FetchPool) -> None:
    topic = large_object(None)
    stream = stream_of(topic, pool, 3, 5, chunk_bytes=4096)
    assert drained(stream) == expected(topic, 3, 5)
    assert stream.bytes_fetched <= 2 * 4096


def test_the_counters_count_what_the_streams_say(pool: FetchPool) -> None:
    counters = [BYTES_FETCHED, BYTES_USED, RANGE_REQUESTS, OBJECTS_READ]
    before = [counter.value() for counter in counters]
    topic = three_objects()
    stream = stream_of(topic, pool, 1, chunk_bytes=1000, ahead=0)
    drained(stream)
    grown = [counter.value() - was for counter, was in zip(counters, before, strict=True)]
    assert grown == [stream.bytes_fetched, stream.bytes_used, 3, 3]
    assert stream.bytes_used == sum(HEADER_BYTES + len(one) for _, one in expected(topic, 1))


def test_reading_ahead_starts_slowly_and_doubles(pool: FetchPool) -> None:
    topic = large_object()
    stream = stream_of(topic, pool, chunk_bytes=10 * FRAME, ahead=8)
    windows = []
    for _ in range(7):
        windows.append(stream.window)
        assert stream.next() is not None
    assert windows == [1, 1, 2, 4, 8, 8, 8]
    stream.close()


@pytest.mark.parametrize(("ahead", "under_way"), [(0, 1), (1, 2), (4, 2)])
def test_so_many_requests_are_under_way_at_the_start(
    pool: FetchPool, ahead: int, under_way: int
) -> None:
    topic, gate = large_object(), Gate()
    store = HookedStore(topic.store, gate)
    stream = stream_of(topic, pool, chunk_bytes=1000, ahead=ahead, store=store)
    reader = threading.Thread(target=stream.next)
    reader.start()
    gate.arrived(under_way)
    assert len(store.requests) == under_way
    gate.open()
    reader.join()
    stream.close()


def test_without_reading_ahead_there_is_one_request_at_a_time(pool: FetchPool) -> None:
    topic = three_objects()
    store = HookedStore(topic.store, lambda *_: None)
    stream = stream_of(topic, pool, chunk_bytes=40, ahead=0, store=store)
    handed_out = 0
    while (frames := stream.next(1)) is not None:
        handed_out += HEADER_BYTES + frames.lengths[0]
        asked = sum(end - start for _, start, end in store.requests)
        assert asked < handed_out + 40


class CountedBytes(bytearray):
    """A buffer that can be watched."""


class CountingStore:
    """Counts the bytes of buffers that were asked for and are still held by somebody."""

    def __init__(self, topic: StoredTopic) -> None:
        self._store = topic.store
        self._lock = threading.Lock()
        self._held = 0
        self.most = 0

    @property
    def name(self) -> str:
        return self._store.name

    def head(self, key: str) -> ObjectMeta:
        return self._store.head(key)

    def get_range(self, key: str, start: int, end: int, *, etag: str | None = None) -> Buffer:
        with self._lock:
            self._held += end - start
            self.most = max(self.most, self._held)
        data = CountedBytes(self._store.get_range(key, start, end, etag=etag))
        weakref.finalize(data, self._released, end - start)
        return data

    def _released(self, size: int) -> None:
        with self._lock:
            self._held -= size

    @property
    def held(self) -> int:
        gc.collect()
        return self._held


def settle(pool: FetchPool) -> None:
    """Waits until a pool of one thread has run everything submitted so far."""
    pool.submit(lambda: None).result()


@pytest.fixture
def lone() -> Iterator[FetchPool]:
    pool = FetchPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("ahead", [0, 1, 2, 4, 7])
def test_a_stream_never_holds_more_than_its_bound(lone: FetchPool, ahead: int) -> None:
    topic = StoredTopic()
    for start in range(0, 2000, 400):
        topic.add(start, [payload(start + n, 100) for n in range(400)], 10)
    store = CountingStore(topic)
    stream = ObjectStream(TOPIC, store, topic, lone, settings_of(ahead=ahead), 0, chunk_bytes=1500)
    count = 0
    while (frames := stream.next()) is not None:
        settle(lone)  # while the frames are held
        count += len(frames)
        del frames
    assert count == 2000
    assert store.most == (1 + ahead) * 1500
    assert store.held == 0


# ---- failures ----


class Failing:
    """Fails the requests whose numbers it was given."""

    def __init__(self, error: Exception, *numbers: int) -> None:
        self._error = error
        self._numbers = set(numbers)
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, *_: object) -> None:
        with self._lock:
            number, self._count = self._count, self._count + 1
        if number in self._numbers:
            raise self._error


@pytest.mark.parametrize("error", [ServiceUnavailable("later"), ServiceRefused("never")])
@pytest.mark.parametrize("ahead", [0, 4])
def test_after_a_failed_request_the_stream_goes_on_where_it_was(
    pool: FetchPool, error: Exception, ahead: int
) -> None:
    topic = three_objects()
    for number in range(12):
        store = HookedStore(topic.store, Failing(error, number, number + 1))
        stream = stream_of(topic, pool, chunk_bytes=40, ahead=ahead, store=store)
        found: list[tuple[int, bytes]] = []
        failures = 0
        while True:
            try:
                frames = stream.next()
            except type(error):
                failures += 1
                assert failures <= 2
                continue
            if frames is None:
                break
            found += plain(frames)
        assert found == expected(topic, 0)
        assert failures >= (1 if number < 9 else 0)


def test_errors_are_counted_by_their_kind(pool: FetchPool) -> None:
    topic = three_objects()
    before = ERRORS.value("unavailable")
    store = HookedStore(topic.store, Failing(ServiceUnavailable("later"), 0))
    with pytest.raises(ServiceUnavailable):
        stream_of(topic, pool, ahead=0, store=store).next()
    assert ERRORS.value("unavailable") == before + 1


def test_a_failing_catalog_is_raised_and_asked_again(pool: FetchPool) -> None:
    topic = StoredTopic()
    for offset in range(3 * DESCRIPTOR_PAGE):
        topic.add(offset, [payload(offset)])
    answers, calls = topic.descriptors, 0

    def sometimes(start: int, end: int | None, limit: int) -> list[object]:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise ServiceUnavailable("no catalog")
        return list(answers(start, end, limit))

    topic.descriptors = sometimes  # type: ignore[method-assign,assignment]
    stream = stream_of(topic, pool)
    found: list[tuple[int, bytes]] = []
    failures = 0
    while len(found) < 3 * DESCRIPTOR_PAGE:
        try:
            frames = stream.next()
        except ServiceUnavailable:
            failures += 1
            continue
        assert frames is not None
        found += plain(frames)
    assert found == expected(topic, 0)
    assert 1 <= failures <= calls


# ---- closing ----


def test_close_wakes_a_reader_that_waits_for_a_slow_request(pool: FetchPool) -> None:
    topic, gate = large_object(), Gate()
    stream = stream_of(topic, pool, store=HookedStore(topic.store, gate))
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(stream.next()))
    reader.start()
    gate.arrived(2)
    stream.close()
    reader.join(PATIENCE)
    assert answers == [None]
    assert stream.next() is None
    gate.open()


def test_close_wakes_a_reader_that_waits_for_the_catalog(pool: FetchPool) -> None:
    topic, gate = large_object(), Gate()
    topic.descriptors = gate  # type: ignore[method-assign,assignment]
    stream = stream_of(topic, pool)
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(stream.next()))
    reader.start()
    gate.arrived(1)
    stream.close()
    reader.join(PATIENCE)
    assert answers == [None]
    gate.open()


def test_close_cancels_requests_that_have_not_begun() -> None:
    topic, gate = large_object(), Gate()
    store = HookedStore(topic.store, gate)
    pool = FetchPool(1)
    stream = stream_of(topic, pool, store=store)
    reader = threading.Thread(target=stream.next)
    reader.start()
    gate.arrived(1)
    stream.close()
    reader.join(PATIENCE)
    gate.open()
    assert pool.submit(lambda: 1).result() == 1
    assert len(store.requests) == 1
    pool.close()


def test_close_drops_what_was_fetched(lone: FetchPool) -> None:
    topic = large_object()
    store = CountingStore(topic)
    stream = ObjectStream(TOPIC, store, topic, lone, settings_of(), 0, chunk_bytes=1000)
    for _ in range(5):
        assert stream.next(1) is not None
    settle(lone)
    assert store.held >= 2000
    stream.close()
    assert store.held == 0


# ---- objects of others ----


def test_payloads_are_handed_out_as_they_are(pool: FetchPool) -> None:
    topic = StoredTopic()
    vector = bytes.fromhex("0268656c6c6f") + bytes(20)
    topic.add(0, [vector], None)
    assert encode_frame(0, vector) == bytes(topic.data(topic.named[0]))
    assert drained(stream_of(topic, pool)) == [(0, vector)]
