"""Readers: from anywhere, in order, without gaps, at any speed, until they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from disks import (
    PATIENCE_SECONDS,
    GatedPlace,
    Place,
    WatchedDisk,
    in_thread,
    payloads,
    texts,
    wait_until,
)
from forebay.errors import LogClosed, MessageError, OffsetOutOfRange, UsageError
from forebay.files.local import LocalDisk
from forebay.format.frame import encode_frame
from forebay.format.message import StreamMessage, decode_messages
from forebay.limits import QUEUE_RUNS_MAX, READ_CHUNK_BYTES
from forebay.settings import DeleterSettings, StoreSettings
from forebay.testing import CrashDisk, ManualClock
from forebay.wal.commit import Visibility
from forebay.wal.log import Wal
from forebay.wal.reader import LogReader
from forebay.wal.retention import Deleter
from forebay.wal.view import LogView

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))


def fill(wal: Wal, count: int, size: int = 0) -> list[bytes]:
    wanted = texts(0, count, size)
    wal.append_many(wanted, durability="synced")
    return wanted


def take(reader: LogReader, count: int) -> list[int]:
    return [next(reader).offset for _ in range(count)]


# -- where a reader starts and ends -------------------------------------------------------------


@pytest.mark.parametrize("cache", [0, 7, 1000])
def test_a_reader_starts_at_any_offset_and_gets_everything_from_there(
    place: Place, cache: int
) -> None:
    wal = place.open(rotate_max_bytes=700, cache_capacity=cache)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    for start in range(41):
        assert payloads(wal, start) == texts(start, 40)
    for start in range(0, 41, 5):
        for end in range(start, 41, 3):
            assert payloads(wal, start, end) == texts(start, end)


def test_an_offset_that_is_not_there_is_refused_with_the_range_that_is(place: Place) -> None:
    wal = place.open()
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


def test_a_reader_of_the_latest_sees_what_is_appended_after_it_was_made(place: Place) -> None:
    wal = place.open()
    fill(wal, 10)
    wal.append(b"buffered, and before")
    reader = wal.tail_reader("latest")
    wal.append(b"after")
    assert (message := next(reader)).payload == b"after"
    assert message.offset == 11
    reader.close()


def test_pieces_of_frames_are_the_same_as_messages(place: Place) -> None:
    wal = place.open(rotate_max_bytes=700, cache_capacity=5)
    wanted = fill(wal, 40)
    reader = wal.tail_reader(3, end=37)
    got = [m.payload for frames in reader.frames() for m in decode_messages(frames)]
    assert got == wanted[3:37]
    assert reader.position == 37


def test_messages_and_pieces_of_one_reader_do_not_skip_each_other(place: Place) -> None:
    wal = place.open()
    fill(wal, 20)
    reader = wal.tail_reader(0, end=20)
    assert take(reader, 3) == [0, 1, 2]
    pieces = reader.frames()
    offsets = list(next(pieces).offsets)
    assert offsets[0] == 3
    assert [*offsets, *(m.offset for m in reader)] == list(range(3, 20))


# -- what a reader sees -------------------------------------------------------------------------


def test_a_reader_sees_what_is_synced_and_a_buffered_one_what_is_appended(
    gated_place: GatedPlace,
) -> None:
    wal = gated_place.open()
    fill(wal, 3)
    gated_place.gate.shut()
    for payload in texts(3, 6):
        wal.append(payload)
    eager = wal.tail_reader(0, visibility="buffered")
    assert take(eager, 6) == [0, 1, 2, 3, 4, 5]
    careful = wal.tail_reader(0)
    assert take(careful, 3) == [0, 1, 2]
    waiting = in_thread(lambda: next(careful).offset)
    assert gated_place.gate.reached.wait(PATIENCE_SECONDS)
    assert not waiting.done()
    wal.append(b"behind what is in flight")
    assert take(eager, 1) == [6]
    gated_place.gate.open()
    assert waiting.result(PATIENCE_SECONDS) == 3


@pytest.mark.parametrize("visibility", ["synced", "buffered"])
@pytest.mark.parametrize("how", ["append", "synced", "many", "message"])
def test_a_live_reader_gets_each_message_at_once_whatever_the_interval(
    place: Place, visibility: Visibility, how: str
) -> None:
    wal = place.open(clock=ManualClock())
    got: list[int] = []
    arrived = threading.Semaphore(0)
    reader = wal.tail_reader("latest", visibility=visibility)

    def consume() -> None:
        for message in reader:
            got.append(message.offset)
            arrived.release()

    consumer = in_thread(consume)
    for turn in range(20):
        wait_until(lambda: len(wal._waiters[visibility]) == 1)
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


def test_a_slow_reader_falls_back_to_the_files_and_catches_up_again(place: Place) -> None:
    wal = place.open(cache_capacity=4, rotate_max_bytes=2000)
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


def test_a_reader_of_each_unsynced_message_does_not_let_the_pieces_pile_up(place: Place) -> None:
    wal = place.open(clock=ManualClock())
    reader = wal.tail_reader(0, visibility="buffered")
    for number in range(5 * QUEUE_RUNS_MAX):
        wal.append(b"x")
        assert next(reader).offset == number
    wait_until(lambda: wal.watermarks().synced >= 4 * QUEUE_RUNS_MAX)
    reader.close()


def test_many_readers_at_once_all_get_everything_in_order(place: Place) -> None:
    wal = place.open(cache_capacity=16, rotate_max_bytes=5000)
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


def test_messages_larger_than_a_read_are_read(place: Place) -> None:
    wal = place.open(cache_capacity=0)
    sizes = [10, READ_CHUNK_BYTES - 100, READ_CHUNK_BYTES, READ_CHUNK_BYTES * 3 + 7, 5]
    for number, size in enumerate(sizes):
        wal.append(bytes([number]) * size)
    wal.flush()
    for start in range(5):
        assert [len(payload) for payload in payloads(wal, start)] == sizes[start:]


def test_a_reader_in_the_middle_of_a_segment_does_not_read_it_from_the_front() -> None:
    disk = WatchedDisk(CrashDisk())
    place = Place(disk, Path("/log"))
    wal = place.open(cache_capacity=0, rotate_max_bytes=16 << 20)
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
    wal = place.open(cache_capacity=0)
    for start in (count // 2, count - 1, 1):
        assert cost(start) <= 2 * READ_CHUNK_BYTES
    place.close()


def test_a_reader_in_memory_does_not_touch_the_files() -> None:
    disk = WatchedDisk(CrashDisk())
    place = Place(disk, Path("/log"))
    wal = place.open(cache_capacity=100)
    fill(wal, 50)
    disk.bytes_read = 0
    assert payloads(wal) == texts(0, 50)
    assert disk.bytes_read == 0
    place.close()


def test_the_cache_answers_what_came_after_an_offset(place: Place) -> None:
    wal = place.open(cache_capacity=10)
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


# -- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("visibility", ["synced", "buffered"])
def test_closing_from_another_thread_ends_a_reader_that_waits(
    place: Place, visibility: Visibility
) -> None:
    wal = place.open()
    fill(wal, 3)
    reader = wal.tail_reader(0, visibility=visibility)
    waiting = in_thread(lambda: [message.offset for message in reader])
    wait_until(lambda: len(wal._waiters[visibility]) == 1)
    reader.close()
    assert waiting.result(PATIENCE_SECONDS) == [0, 1, 2]
    assert len(wal._waiters[visibility]) == 0
    assert list(reader) == []
    reader.close()


def test_a_closed_reader_hands_out_nothing_more(place: Place) -> None:
    wal = place.open()
    fill(wal, 10)
    with wal.tail_reader(0) as reader:
        assert take(reader, 3) == [0, 1, 2]
    assert list(reader) == []
    assert reader.position == 3


def test_closing_and_appending_at_once_neither_hangs_nor_breaks_the_log(place: Place) -> None:
    wal = place.open()
    for turn in range(60):
        reader = wal.tail_reader("latest")
        consumer = in_thread(lambda reader=reader: list(reader))  # type: ignore[misc]
        closer = in_thread(reader.close)
        wal.append(b"x", durability="synced" if turn % 2 else "buffered")
        closer.result(PATIENCE_SECONDS)
        consumer.result(PATIENCE_SECONDS)
    wal.flush()
    assert len(payloads(wal)) == 60


def test_shutting_the_log_down_ends_a_live_reader_loudly_after_the_last_message(
    place: Place,
) -> None:
    wal = place.open()
    fill(wal, 3)
    reader = wal.tail_reader(0)
    got: list[int] = []

    def consume() -> None:
        for message in reader:
            got.append(message.offset)

    consumer = in_thread(consume)
    wait_until(lambda: len(wal._waiters["synced"]) == 1)
    wal.append(b"last")
    wal.shutdown()
    with pytest.raises(LogClosed):
        consumer.result(PATIENCE_SECONDS)
    assert got == [0, 1, 2, 3]


# -- errors and interrupts ----------------------------------------------------------------------


def test_a_message_that_cannot_be_decoded_is_an_error_each_time_and_never_skipped(
    place: Place,
) -> None:
    wal = place.open()
    fill(wal, 3)
    wal.shutdown()
    whole = place.read("wal.log")
    place.write("wal.log", whole + encode_frame(3, b"not a message, but a valid frame"))
    wal = place.open()
    wal.append(b"behind it", durability="synced")
    reader = wal.tail_reader(0)
    assert take(reader, 3) == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(MessageError):
            next(reader)
        assert reader.position == 3
    assert take(wal.tail_reader(4), 1) == [4]


def test_an_interrupt_in_the_middle_of_reading_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = place.open(cache_capacity=5, rotate_max_bytes=3000)
    for payload in texts(0, 100):
        wal.append(payload, durability="synced")
    calls = 0

    def interrupted(frames: object) -> Iterator[StreamMessage]:
        nonlocal calls
        for message in decode_messages(frames):  # type: ignore[arg-type]
            calls += 1
            if calls % 7 == 0:
                raise KeyboardInterrupt
            yield message

    monkeypatch.setattr("forebay.wal.reader.decode_messages", interrupted)
    reader = wal.tail_reader(0, end=100)
    got: list[int] = []
    interrupts = 0
    while len(got) < 100:
        try:
            got.append(next(reader).offset)
        except KeyboardInterrupt:
            interrupts += 1
    assert got == list(range(100))
    assert interrupts > 10


def test_an_interrupted_wait_leaves_nobody_behind_and_the_reader_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = place.open()

    def interrupt(self: object, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    reader = wal.tail_reader(0)
    with monkeypatch.context() as patch:
        patch.setattr("forebay.wal.waiters.ThreadWaiter.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(reader)
        with pytest.raises(KeyboardInterrupt):
            wal.append(b"x", durability="synced")
    assert len(wal._waiters["synced"]) == 0
    assert next(reader).payload == b"x"
    reader.close()


# -- retention ----------------------------------------------------------------------------------


def test_a_segment_that_a_reader_is_on_stays(place: Place) -> None:
    clock = ManualClock()
    wal = place.open(clock=clock, cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    third = wal.segments()[2]
    reader = wal.tail_reader(third.first_offset)
    next(reader)
    dropped = wal.retain(EVERYTHING, 40)
    assert [segment.seq for segment in dropped] == [0, 1]
    assert wal.start_offset == third.first_offset
    assert take(reader, 39 - third.first_offset) == list(range(third.first_offset + 1, 40))
    reader.close()
    wal.retain(EVERYTHING, 40)
    assert len(wal.segments()) == 1


def test_a_reader_that_waits_at_the_end_keeps_no_segment(place: Place) -> None:
    wal = place.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    reader = wal.tail_reader(0)
    assert take(reader, 40) == list(range(40))
    waiting = in_thread(lambda: next(reader).offset)
    wait_until(lambda: len(wal._waiters["synced"]) == 1)
    for payload in texts(40, 60):
        wal.append(payload)
    wal.flush()
    assert waiting.result(PATIENCE_SECONDS) == 40
    assert take(reader, 19)[-1] == 59
    waiting = in_thread(lambda: next(reader).offset)
    wait_until(lambda: len(wal._waiters["synced"]) == 1)
    wal.retain(EVERYTHING, 60)
    assert len(wal.segments()) == 1
    reader.close()


def test_a_reader_that_stands_still_for_long_no_longer_keeps_its_segment_and_is_told(
    place: Place,
) -> None:
    clock = ManualClock()
    wal = place.open(clock=clock, cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    reader = wal.tail_reader(0)
    next(reader)
    assert wal.retain(EVERYTHING, 40) == []
    clock.advance(601)
    assert wal.retain(EVERYTHING, 40)
    with pytest.raises(OffsetOutOfRange):
        for _ in reader:
            pass
    assert reader.position < wal.start_offset


def test_reading_while_retention_runs_ends_in_an_error_or_in_everything(place: Place) -> None:
    wal = place.open(cache_capacity=8, rotate_max_bytes=2000)
    done = threading.Event()

    def consume() -> None:
        while not done.is_set():
            start = wal.start_offset
            try:
                reader = wal.tail_reader(start, end=max(wal.watermarks().synced, start))
                expected = start
                for message in reader:
                    assert message.offset == expected
                    assert message.payload == f"message {expected}".encode()
                    expected += 1
            except OffsetOutOfRange:
                continue

    consumers = [in_thread(consume) for _ in range(3)]
    for number, payload in enumerate(texts(0, 3000)):
        wal.append(payload)
        if number % 100 == 0:
            wal.flush()
            wal.retain(EVERYTHING, max(wal.current_offset() - 300, 0))
    done.set()
    for consumer in consumers:
        consumer.result(PATIENCE_SECONDS)
    assert wal.start_offset > 2000


def test_a_view_whose_segment_was_removed_says_that_the_offset_is_gone(tmp_path: Path) -> None:
    place = Place(LocalDisk(), tmp_path / "log")
    wal = place.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    view = LogView(place.dir)
    wal.retain(EVERYTHING, 40)
    with pytest.raises(OffsetOutOfRange):
        list(view.reader(0))
    view.refresh()
    assert [m.offset for m in view.reader(view.start_offset)] == list(range(wal.start_offset, 40))
    place.close()


def test_a_segment_that_somebody_else_deleted_is_missing_data(place: Place) -> None:
    wal = place.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    place.remove(wal.segments()[1].path.name)
    reader = wal.tail_reader(0, end=40)
    with pytest.raises(forebay.ForebayError, match="missing"):
        list(reader)


async def until(condition: Callable[[], bool], task: asyncio.Task[Any] | None = None) -> None:
    """Lets the loop run until the condition holds, or the task is done."""
    for _ in range(1_000_000):
        if condition() or (task is not None and task.done()):
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


# -- asyncio ------------------------------------------------------------------------------------


async def test_a_stream_delivers_files_memory_and_what_comes_live(tmp_path: Path) -> None:
    settings = StoreSettings(
        data=tmp_path, wal=forebay.WalSettings(cache_capacity=10, rotate_max_bytes=2000)
    )
    with forebay.open(settings) as store:
        topic = store.topic("t")
        topic.append_many(texts(0, 100))
        got: list[bytes] = []
        async with topic.stream(0) as stream:
            async for message in stream:
                got.append(message.payload)
                if len(got) in {100, 101, 150}:
                    topic.append_many(texts(len(got), len(got) + 50 if len(got) < 150 else 160))
                if len(got) == 160:
                    break
        assert len(got) == 160
        end = topic.watermarks().appended
        assert [m.offset async for m in topic.stream(5, follow=False)] == list(range(5, end))


@pytest.mark.parametrize("visibility", ["synced", "buffered"])
async def test_closing_a_stream_from_another_task_or_thread_ends_it(
    place: Place, visibility: Visibility
) -> None:
    wal = place.open()
    await asyncio.to_thread(fill, wal, 3)
    for from_thread in (False, True):
        stream = wal.async_reader(0, visibility=visibility)

        async def consume(stream=stream) -> list[int]:  # type: ignore[no-untyped-def]
            return [message.offset async for message in stream]

        task = asyncio.create_task(consume())
        await until(lambda: len(wal._waiters[visibility]) > 0)
        if from_thread:
            await asyncio.to_thread(stream._reader.close)
        else:
            await stream.aclose()
        assert await asyncio.wait_for(task, PATIENCE_SECONDS) == [0, 1, 2]


async def test_cancelling_a_wait_for_the_next_message_loses_nothing(place: Place) -> None:
    wal = place.open()
    stream = wal.async_reader(0)
    got: list[int] = []
    for turn in range(50):
        waiting = asyncio.create_task(stream.__anext__())
        await until(lambda: len(wal._waiters["synced"]) > 0, waiting)
        await asyncio.to_thread(wal.append, f"{turn}".encode())
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got.append((await waiting).offset)
    assert wal._gather.waiting == 0
    while len(got) < 50:
        got.append((await asyncio.wait_for(stream.__anext__(), 60)).offset)
    assert got == list(range(50))


async def test_cancelling_a_read_of_a_file_loses_nothing_and_mixes_nothing_up() -> None:
    disk = WatchedDisk(CrashDisk())
    place = Place(disk, Path("/log"))
    wal = place.open(cache_capacity=0, rotate_max_bytes=50_000)
    wanted = texts(0, 2000, 300)
    await asyncio.to_thread(wal.append_many, wanted, durability="synced")
    reading = threading.Event()
    go_on = threading.Semaphore(0)
    held = [True]

    def hold(path: Path) -> None:
        if held[0] and path.name.endswith(".log"):
            reading.set()
            assert go_on.acquire(timeout=PATIENCE_SECONDS)

    disk.on_read = hold
    stream = wal.async_reader(0, end=2000)
    got: list[bytes] = []
    for _ in range(30):
        reading.clear()
        waiting = asyncio.create_task(stream.__anext__())
        await until(reading.is_set, waiting)
        if waiting.done():
            got.append((await waiting).payload)
            continue
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held[0] = False  # the next fetch overtakes the one that was abandoned
        got.append((await asyncio.wait_for(stream.__anext__(), 60)).payload)
        held[0] = True
        go_on.release()
        for _ in range(100):
            got.append((await asyncio.wait_for(stream.__anext__(), 60)).payload)
            if len(got) % 50 == 0:
                break
    held[0] = False
    for _ in range(100):
        go_on.release()
    got += [message.payload async for message in stream]
    assert got == wanted
    place.close()


async def test_many_streams_wait_without_a_thread_each(place: Place) -> None:
    wal = place.open()
    streams = [wal.async_reader("latest") for _ in range(300)]
    tasks = [asyncio.create_task(stream.__anext__()) for stream in streams]
    await until(lambda: len(wal._waiters["synced"]) == 300)
    before = threading.active_count()
    await wal.append_async(b"for all", durability="synced")
    messages = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
    assert [message.payload for message in messages] == [b"for all"] * 300
    assert threading.active_count() <= before + 2


async def test_a_wait_whose_loop_was_closed_does_not_disturb_the_log(place: Place) -> None:
    wal = place.open()

    def abandon_a_loop() -> None:
        loop = asyncio.new_event_loop()
        stream = wal.async_reader("latest")
        task = loop.create_task(stream.__anext__())
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    await asyncio.to_thread(abandon_a_loop)
    assert await wal.append_async(b"x", durability="synced") == 0
