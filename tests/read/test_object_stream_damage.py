"""Damaged objects: an error names the place, and a lenient reader skips the damage."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from forebay.errors import CorruptFrame, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import HEADER_BYTES, encode_frame
from forebay.read.fetch_pool import FetchPool
from forebay.read.metrics import ERRORS, SKIPPED
from support.stored_objects import HookedStore, StoredTopic, drained, payload, stream_of

FRAME = HEADER_BYTES + 30
COUNT = 8


def topic_of_two(every: int | None = 3) -> tuple[StoredTopic, ObjectDescriptor]:
    """Two objects of equal frames; the first one is to be damaged."""
    topic = StoredTopic()
    first = topic.add(0, [payload(n, 30) for n in range(COUNT)], every)
    topic.add(COUNT, [payload(n, 30) for n in range(COUNT, COUNT + 3)], every)
    return topic, first


def offsets(found: list[tuple[int, bytes]]) -> list[int]:
    return [offset for offset, _ in found]


# ---- strict ----

DAMAGES = [
    pytest.param(0, b"\x63", "offset out of order", id="offset"),
    pytest.param(7, b"\xff", "offset out of order", id="huge offset"),
    pytest.param(11, b"\xff", "impossible frame length", id="length"),
    pytest.param(8, b"\0\0\0\0", "impossible frame length", id="no length"),
    pytest.param(9, b"\x40", "the object ends inside a frame", id="beyond the object"),
    pytest.param(12, b"\x01\x02\x03", "checksum mismatch", id="checksum"),
    pytest.param(20, b"\xee", "checksum mismatch", id="payload"),
]


@pytest.mark.parametrize(("at", "new", "reason"), DAMAGES)
@pytest.mark.parametrize("chunk_bytes", [7, 46, 1000])
def test_damage_is_raised_with_object_position_and_offset(
    pool: FetchPool, at: int, new: bytes, reason: str, chunk_bytes: int
) -> None:
    for frame in range(COUNT):
        topic, first = topic_of_two()
        topic.overwrite(first, frame * FRAME + at, new)
        stream = stream_of(topic, pool, chunk_bytes=chunk_bytes)
        found: list[tuple[int, bytes]] = []
        with pytest.raises(CorruptFrame) as raised:
            drained(stream, found=found)
        assert offsets(found) == list(range(frame))
        assert raised.value.file == topic.key(first)
        assert (raised.value.position, raised.value.offset) == (frame * FRAME, frame)
        assert reason in raised.value.reason
        with pytest.raises(CorruptFrame):
            stream.next()
        assert stream.offset == frame


def test_once_the_object_is_whole_again_the_stream_goes_on(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    whole = topic.data(first)
    topic.overwrite(first, 4 * FRAME + 20, b"\xee")
    stream = stream_of(topic, pool, chunk_bytes=1000)
    assert stream.next() is not None
    with pytest.raises(CorruptFrame):
        stream.next()
    topic.store.put_object(topic.key(first), bytes(whole))
    assert offsets(drained(stream)) == list(range(4, COUNT + 3))


def test_damage_beyond_the_end_that_was_asked_for_is_not_met(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    topic.overwrite(first, 6 * FRAME + 20, b"\xee")
    assert offsets(drained(stream_of(topic, pool, 1, 5))) == [1, 2, 3, 4]


def test_errors_of_damage_are_counted(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    topic.overwrite(first, 20, b"\xee")
    before = ERRORS.value("corrupt")
    with pytest.raises(CorruptFrame):
        stream_of(topic, pool).next()
    assert ERRORS.value("corrupt") == before + 1


@pytest.mark.parametrize("cut", [1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME])
@pytest.mark.parametrize("chunk_bytes", [40, 1000])
def test_an_object_shorter_than_its_descriptor_is_damage(
    pool: FetchPool, cut: int, chunk_bytes: int
) -> None:
    topic, first = topic_of_two()
    topic.store.put_object(topic.key(first), bytes(topic.data(first)[: first.size - cut]))
    stream = stream_of(topic, pool, chunk_bytes=chunk_bytes)
    with pytest.raises(CorruptFrame, match=f"shorter.* {first.size} ") as raised:
        drained(stream)
    assert raised.value.file == topic.key(first)
    assert raised.value.position == stream.offset * FRAME
    assert raised.value.offset == stream.offset


def short_of_a_frame(topic: StoredTopic, first: ObjectDescriptor) -> None:
    topic.rename(first, size=first.size - FRAME)


def ends_inside_a_frame(topic: StoredTopic, first: ObjectDescriptor) -> None:
    topic.rename(first, size=first.size - 5)


def claims_more(topic: StoredTopic, first: ObjectDescriptor) -> None:
    topic.rename(first, end_offset=first.end_offset + 1)
    topic.rename(topic.named[1], start_offset=first.end_offset + 2)


def claims_less(topic: StoredTopic, first: ObjectDescriptor) -> None:
    topic.rename(first, end_offset=first.end_offset - 1)


def starts_elsewhere(topic: StoredTopic, first: ObjectDescriptor) -> None:
    topic.overwrite(first, 0, encode_frame(1, payload(1, 30)))


@pytest.mark.parametrize(
    ("lie", "start", "end"),
    [
        (short_of_a_frame, 0, None),
        (ends_inside_a_frame, 0, None),
        (claims_more, 0, None),
        (claims_less, 0, None),
        (starts_elsewhere, 0, None),
    ],
)
def test_an_object_that_is_not_as_its_descriptor_says_is_damage(
    pool: FetchPool,
    lie: Callable[[StoredTopic, ObjectDescriptor], None],
    start: int,
    end: int | None,
) -> None:
    topic, first = topic_of_two(None)
    lie(topic, first)
    with pytest.raises(CorruptFrame) as raised:
        drained(stream_of(topic, pool, start, end))
    assert raised.value.file == topic.key(first)


WRONG_INDEXES: list[tuple[tuple[int, int], ...]] = [
    ((0, 0), (4, 3 * FRAME)),
    ((0, 0), (4, 4 * FRAME + 1)),
    ((0, 0), (4, 5 * FRAME), (6, 6 * FRAME)),
    ((0, 0), (2, 2 * FRAME), (4, 6 * FRAME + 7)),
]


@pytest.mark.parametrize("index", WRONG_INDEXES)
@pytest.mark.parametrize("chunk_bytes", [FRAME, 1000])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_wrong_index_misleads_no_reader(
    pool: FetchPool, index: tuple[tuple[int, int], ...], chunk_bytes: int, lenient: bool
) -> None:
    """An index is a hint: the object is read from its start, and no message is left out."""
    topic, first = topic_of_two(None)
    topic.rename(first, offset_index=index)
    for start in range(COUNT):
        for end in (*range(start + 1, COUNT + 1), None):
            stream = stream_of(topic, pool, start, end, chunk_bytes=chunk_bytes, lenient=lenient)
            last = topic.named[-1].next_offset if end is None else end
            assert offsets(drained(stream)) == list(range(start, last))
            stream.seek(start, end)
            assert offsets(drained(stream)) == list(range(start, last))


def test_a_damaged_frame_at_an_index_entry_is_damage_and_read_from_the_start_once(
    pool: FetchPool,
) -> None:
    topic, first = topic_of_two(None)
    topic.rename(first, offset_index=((0, 0), (4, 4 * FRAME)))
    topic.overwrite(first, 4 * FRAME + 20, b"??")
    store = HookedStore(topic.store, lambda *_: None)
    stream = stream_of(topic, pool, 4, chunk_bytes=FRAME, ahead=0, store=store)
    for requests in (1 + 5, 1):
        store.requests.clear()
        with pytest.raises(CorruptFrame) as raised:
            drained(stream)
        assert (raised.value.position, raised.value.offset) == (4 * FRAME, 4)
        assert len(store.requests) == requests


@pytest.mark.parametrize("chunk_bytes", [3 * FRAME, 1000])
@pytest.mark.parametrize("extra", [b"x", encode_frame(COUNT, payload(COUNT, 30))])
def test_what_follows_the_last_message_in_an_object_is_damage_to_who_reads_that_far(
    pool: FetchPool, chunk_bytes: int, extra: bytes
) -> None:
    topic, first = topic_of_two()
    data = bytes(topic.data(first)) + extra
    topic.store.put_object(topic.key(first), data)
    topic.rename(first, size=len(data))
    stream = stream_of(topic, pool, 0, COUNT, chunk_bytes=chunk_bytes)
    found: list[tuple[int, bytes]] = []
    with pytest.raises(CorruptFrame):
        drained(stream, found=found)
    assert offsets(found) == list(range(COUNT))
    assert offsets(drained(stream_of(topic, pool, 0, COUNT - 1))) == list(range(COUNT - 1))


# ---- lenient ----


@pytest.mark.parametrize(("at", "new"), [damage.values[:2] for damage in DAMAGES])
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("chunk_bytes", [20, 1000])
def test_a_lenient_reader_loses_the_damaged_message_and_no_other(
    pool: FetchPool, at: int, new: bytes, every: int | None, chunk_bytes: int
) -> None:
    for frame in range(COUNT):
        topic, first = topic_of_two(every)
        topic.overwrite(first, frame * FRAME + at, new)
        stream = stream_of(topic, pool, chunk_bytes=chunk_bytes, lenient=True)
        found = drained(stream)
        assert offsets(found) == [one for one in range(COUNT + 3) if one != frame]
        assert found == [(offset, payload(offset, 30)) for offset, _ in found]
        assert stream.skipped == 1


def test_what_is_skipped_is_counted_and_logged(
    pool: FetchPool, caplog: pytest.LogCaptureFixture
) -> None:
    topic, first = topic_of_two()
    topic.overwrite(first, 4 * FRAME, bytes(2 * FRAME))
    before = SKIPPED.value()
    with caplog.at_level(logging.WARNING, "forebay.read"):
        found = drained(stream_of(topic, pool, lenient=True))
    assert offsets(found) == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert SKIPPED.value() == before + 2
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("damaged frames skipped topic=/default/orders object=data-0-7.dnb1")
    assert f"position={4 * FRAME} offset=4 skipped=2 resumed_at=6" in line


@pytest.mark.parametrize("every", [None, 3])
def test_damage_up_to_the_end_of_the_object_loses_the_rest_of_it(
    pool: FetchPool, every: int | None
) -> None:
    topic, first = topic_of_two(every)
    topic.overwrite(first, 4 * FRAME, b"\xa5" * (4 * FRAME))
    stream = stream_of(topic, pool, lenient=True)
    assert offsets(drained(stream)) == [0, 1, 2, 3, 8, 9, 10]
    assert stream.skipped == 4


@pytest.mark.parametrize("every", [None, 3])
def test_a_message_under_the_number_of_a_later_one_is_not_handed_out_as_that(
    pool: FetchPool, every: int | None
) -> None:
    topic, first = topic_of_two(every)
    topic.overwrite(first, 1 * FRAME, b"\x02")
    found = drained(stream_of(topic, pool, chunk_bytes=1000, lenient=True))
    assert found == [(one, payload(one, 30)) for one in range(COUNT + 3) if one != 1]


def test_several_damages_are_each_stepped_over(pool: FetchPool) -> None:
    topic, first = topic_of_two(2)
    for frame in (0, 2, 3, 6):
        topic.overwrite(first, frame * FRAME + 8, b"\xff" * 8)
    stream = stream_of(topic, pool, chunk_bytes=50, lenient=True)
    assert offsets(drained(stream)) == [1, 4, 5, 7, 8, 9, 10]
    assert stream.skipped == 4


def test_only_messages_that_were_asked_for_count_as_skipped(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    topic.overwrite(first, 3 * FRAME, bytes(3 * FRAME))
    stream = stream_of(topic, pool, 4, 5, lenient=True)
    assert drained(stream) == []
    assert (stream.skipped, stream.offset) == (1, 5)
    behind = stream_of(topic, pool, 5, 7, lenient=True)
    assert offsets(drained(behind)) == [6]
    assert behind.skipped == 1


def test_messages_that_an_object_never_had_are_skipped(pool: FetchPool) -> None:
    topic = StoredTopic()
    whole = topic.add(0, [payload(n, 30) for n in range(5)], None)
    data = topic.data(whole)
    del data[2 * FRAME : 3 * FRAME]
    topic.store.put_object(topic.key(whole), bytes(data))
    topic.rename(whole, size=len(data))
    stream = stream_of(topic, pool, lenient=True)
    assert offsets(drained(stream)) == [0, 1, 3, 4]
    assert stream.skipped == 1


def test_the_rest_of_a_short_object_is_skipped(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    topic.store.put_object(topic.key(first), bytes(topic.data(first)[: 5 * FRAME + 3]))
    stream = stream_of(topic, pool, chunk_bytes=FRAME, lenient=True)
    assert offsets(drained(stream)) == [0, 1, 2, 3, 4, 8, 9, 10]
    assert stream.skipped == 3


def test_more_frames_than_the_descriptor_says_are_not_handed_out(pool: FetchPool) -> None:
    topic = StoredTopic()
    first = topic.add(0, [payload(n, 30) for n in range(5)], None)
    topic.rename(first, end_offset=2)
    stream = stream_of(topic, pool, lenient=True)
    assert offsets(drained(stream)) == [0, 1, 2]
    assert stream.skipped == 0


def test_a_store_that_fails_in_mid_rescue_is_raised_and_tried_again(pool: FetchPool) -> None:
    topic, first = topic_of_two()
    topic.overwrite(first, 4 * FRAME + 20, b"\xee")
    outage = [False]

    def before(*_: object) -> None:
        if outage[0]:
            raise ServiceUnavailable("later")

    store = HookedStore(topic.store, before)
    stream = stream_of(topic, pool, chunk_bytes=1000, lenient=True, ahead=0, store=store)
    assert stream.next() is not None
    outage[0] = True
    for _ in range(2):
        with pytest.raises(ServiceUnavailable):
            stream.next()
    outage[0] = False
    assert offsets(drained(stream)) == [5, 6, 7, 8, 9, 10]
    assert stream.skipped == 1
