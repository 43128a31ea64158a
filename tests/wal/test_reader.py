"""Readers start anywhere, read in order and without gaps, and may be slow."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import forebay
from forebay.errors import OffsetOutOfRange, UsageError
from forebay.format.frame import FrameTooLarge
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import QUEUE_BATCHES_MAX, READ_CHUNK_BYTES
from forebay.testing import CrashDisk, ManualClock
from forebay.wal.watermarks import Visibility
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    WatchedDisk,
    in_thread,
    payloads,
    texts,
    wait_until,
    waiting,
)
from support.log_steps import fill, take

# -- where a reader starts and ends -------------------------------------------------------------


@pytest.mark.parametrize("cache", [0, 7, 1000])
def test_a_reader_starts_at_any_offset_and_gets_everything_from_there(
    directory: LogDirectory, cache: int
) -> None:
    wal = directory.open(rotate_max_bytes=700, cache_capacity=cache)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    for start in range(41):
        assert payloads(wal, start) == texts(start, 40)
    for start in range(0, 41, 5):
        for end in range(start, 41, 3):
            assert payloads(wal, start, end) == texts(start, end)


def test_an_offset_that_is_not_there_is_refused_with_the_range_that_is(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    fill(wal, 5)
    for start in (-1, 6, 2**70):
        with pytest.raises(OffsetOutOfRange) as caught:
            wal.tail_reader(start)
        assert (caught.value.start, caught.value.end) == (0, 5)
    with pytest.raises(UsageError):
        wal.tail_reader(0, visibility="all")  # type: ignore[arg-type]


def test_a_bad_start_is_refused(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        topic = store.topic("t")
        topic.append(b"x")
        for start in (-1, "first", 1.5, None):
            with pytest.raises(UsageError):
                topic.read(start)  # type: ignore[arg-type]
        assert [m.offset for m in topic.read("earliest")] == [0]
        assert [m.offset for m in topic.read("latest")] == []


def test_a_reader_of_the_latest_sees_what_is_appended_after_it_was_made(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    fill(wal, 10)
    wal.append(b"buffered, and before")
    reader = wal.tail_reader("latest")
    wal.append(b"after")
    assert (message := next(reader)).payload == b"after"
    assert message.offset == 11
    reader.close()


def test_pieces_of_frames_are_the_same_as_messages(directory: LogDirectory) -> None:
    wal = directory.open(rotate_max_bytes=700, cache_capacity=5)
    wanted = fill(wal, 40)
    reader = wal.tail_reader(3, end=37)
    got = [m.payload for frames in reader.frames() for m in decode_messages(frames)]
    assert got == wanted[3:37]
    assert reader.position == 37


def test_messages_and_pieces_of_one_reader_do_not_skip_each_other(directory: LogDirectory) -> None:
    wal = directory.open()
    fill(wal, 20)
    reader = wal.tail_reader(0, end=20)
    assert take(reader, 3) == [0, 1, 2]
    pieces = reader.frames()
    offsets = list(next(pieces).offsets)
    assert offsets[0] == 3
    assert [*offsets, *(m.offset for m in reader)] == list(range(3, 20))


# -- what a reader sees -------------------------------------------------------------------------


def test_a_reader_sees_what_is_synced_and_a_buffered_one_what_is_appended(
    gated: GatedDirectory,
) -> None:
    wal = gated.open()
    fill(wal, 3)
    gated.gate.shut()
    for payload in texts(3, 6):
        wal.append(payload)
    eager = wal.tail_reader(0, visibility="buffered")
    assert take(eager, 6) == [0, 1, 2, 3, 4, 5]
    careful = wal.tail_reader(0)
    assert take(careful, 3) == [0, 1, 2]
    reading = in_thread(lambda: next(careful).offset)
    assert gated.gate.reached.wait(PATIENCE_SECONDS)
    assert not reading.done()
    wal.append(b"behind what is in flight")
    assert take(eager, 1) == [6]
    gated.gate.open()
    assert reading.result(PATIENCE_SECONDS) == 3


@pytest.mark.parametrize("visibility", ["synced", "buffered"])
@pytest.mark.parametrize("how", ["append", "synced", "many", "message"])
def test_a_live_reader_gets_each_message_at_once_whatever_the_interval(
    directory: LogDirectory, visibility: Visibility, how: str
) -> None:
    wal = directory.open(clock=ManualClock())
    got: list[int] = []
    arrived = threading.Semaphore(0)
    reader = wal.tail_reader("latest", visibility=visibility)

    def consume() -> None:
        for message in reader:
            got.append(message.offset)
            arrived.release()

    consumer = in_thread(consume)
    for turn in range(20):
        wait_until(lambda: waiting(wal, visibility) == 1)
        if how == "many":
            wal.append_many([b"x"])
        elif how == "message":
            wal.append_message(StreamMessage(b"x"))
        else:
            wal.append(b"x", durability="synced" if how == "synced" else "buffered")
        assert arrived.acquire(timeout=PATIENCE_SECONDS)
        assert got[-1] == turn
    reader.close()
    consumer.result(PATIENCE_SECONDS)


def test_a_slow_reader_falls_back_to_the_files_and_catches_up_again(
    directory: LogDirectory,
) -> None:
    wal = directory.open(cache_capacity=4, rotate_max_bytes=2000)
    reader = wal.tail_reader(0)
    got: list[int] = []
    for turn in range(30):
        for _ in range(turn):
            wal.append(b"message")
        wal.flush()
        got += take(reader, turn // 2)
    got += take(reader, wal.current_offset() - len(got))
    assert got == list(range(wal.current_offset()))
    reader.close()


def test_a_reader_of_each_unsynced_message_does_not_let_the_pieces_pile_up(
    directory: LogDirectory,
) -> None:
    wal = directory.open(clock=ManualClock())
    reader = wal.tail_reader(0, visibility="buffered")
    for number in range(5 * QUEUE_BATCHES_MAX):
        wal.append(b"x")
        assert next(reader).offset == number
    wait_until(lambda: wal.watermarks().synced >= 4 * QUEUE_BATCHES_MAX)
    reader.close()


def test_many_readers_at_once_all_get_everything_in_order(directory: LogDirectory) -> None:
    wal = directory.open(cache_capacity=16, rotate_max_bytes=5000)
    total = 600

    def consume(start: int, visibility: Visibility) -> list[int]:
        with wal.tail_reader(start, end=total, visibility=visibility) as reader:
            return [message.offset for message in reader]

    kinds: list[Visibility] = ["synced", "buffered"]
    readers = [
        in_thread(lambda kind=kinds[number % 2]: consume(0, kind))  # type: ignore[misc]
        for number in range(12)
    ]
    for number in range(total):
        wal.append(f"{number}".encode(), durability="synced" if number % 50 == 0 else "buffered")
    wal.flush()
    for reader in readers:
        assert reader.result(PATIENCE_SECONDS) == list(range(total))


def test_messages_larger_than_a_read_are_read(directory: LogDirectory) -> None:
    wal = directory.open(cache_capacity=0)
    sizes = [10, READ_CHUNK_BYTES - 100, READ_CHUNK_BYTES, READ_CHUNK_BYTES * 3 + 7, 5]
    for number, size in enumerate(sizes):
        wal.append(bytes([number]) * size)
    wal.flush()
    for start in range(5):
        assert [len(payload) for payload in payloads(wal, start)] == sizes[start:]


@pytest.mark.parametrize("cache", [0, 1000])
def test_a_reader_with_a_limit_gives_its_memory_back_and_continues_anywhere(
    directory: LogDirectory, cache: int
) -> None:
    wal = directory.open(rotate_max_bytes=5000, cache_capacity=cache)
    for payload in texts(0, 200):
        wal.append(payload, durability="synced")
    reader = wal.tail_reader(0, end=200)
    reader.limit(300)
    at = 0
    while at < 200:
        frames = next(reader.frames())
        assert frames.offsets[0] == at
        assert len(frames) <= 20
        at += min(3, len(frames))  # of these, it has used so many
        reader.release(at)
        assert reader.position == at


def test_a_frame_over_the_limit_of_a_reader_is_refused_until_the_limit_is_raised(
    directory: LogDirectory,
) -> None:
    wal = directory.open(cache_capacity=0)
    wal.append_many([b"a", b"x" * 5000, b"b"], durability="synced")
    reader = wal.tail_reader(0, end=3)
    reader.limit(300)
    assert [next(reader).payload] == [b"a"]
    with pytest.raises(FrameTooLarge) as refused:
        next(reader)
    reader.limit(refused.value.size)
    assert [each.payload for each in reader] == [b"x" * 5000, b"b"]


def test_a_reader_in_the_middle_of_a_segment_does_not_read_it_from_the_front() -> None:
    disk = WatchedDisk(CrashDisk())
    directory = LogDirectory(disk, Path("/log"))
    wal = directory.open(cache_capacity=0, rotate_max_bytes=16 << 20)
    count, size = 16_000, 1000
    for payload in texts(0, count, size):
        wal.append(payload)
    wal.flush()

    def cost(start: int) -> int:
        disk.bytes_read = 0
        assert payloads(wal, start, start + 1) == texts(start, start + 1, size)
        return disk.bytes_read

    for start in (count // 2, count - 1, 1):
        assert cost(start) <= 2 * READ_CHUNK_BYTES
    wal.rotate()
    cost(count // 2)  # loads the index of the sealed segment
    for start in (count // 2, count - 1, 1):
        assert cost(start) <= 2 * READ_CHUNK_BYTES
    wal.shutdown()
    wal = directory.open(cache_capacity=0)
    for start in (count // 2, count - 1, 1):
        assert cost(start) <= 2 * READ_CHUNK_BYTES
    directory.close()


def test_a_reader_in_memory_does_not_touch_the_files() -> None:
    disk = WatchedDisk(CrashDisk())
    directory = LogDirectory(disk, Path("/log"))
    wal = directory.open(cache_capacity=100)
    fill(wal, 50)
    disk.bytes_read = 0
    assert payloads(wal) == texts(0, 50)
    assert disk.bytes_read == 0
    directory.close()


def test_the_cache_answers_what_came_after_an_offset(directory: LogDirectory) -> None:
    wal = directory.open(cache_capacity=10)
    for payload in texts(0, 30):
        wal.append(payload, durability="synced")
    wal.append(b"buffered")
    messages, after = wal.read_cached_since(24)
    assert [offset for offset, _ in messages] == [25, 26, 27, 28, 29]
    assert [message.payload for _, message in messages] == texts(25, 30)
    assert after == 30
    assert [offset for offset, _ in wal.read_cached_since(-1)[0]] == list(range(20, 30))
    assert wal.read_cached_since(29) == ([], 30)
    assert wal.read_cached_since(1000) == ([], 30)
