"""Readers in asyncio: streams that wait without a thread each and lose nothing when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.settings import StoreSettings
from forebay.testing import CrashDisk
from forebay.wal.watermarks import Visibility
from support.disks import PATIENCE_SECONDS, Place, WatchedDisk, texts
from support.log_steps import fill


async def until(condition: Callable[[], bool], task: asyncio.Task[Any] | None = None) -> None:
    """Lets the loop run until the condition holds, or the task is done."""
    for _ in range(1_000_000):
        if condition() or (task is not None and task.done()):
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


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
        await until(lambda: len(wal._committer._waiters[visibility]) > 0)
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
        await until(lambda: len(wal._committer._waiters["synced"]) > 0, waiting)
        await asyncio.to_thread(wal.append, f"{turn}".encode())
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got.append((await waiting).offset)
    assert wal._committer._gather.waiting == 0
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
    await until(lambda: len(wal._committer._waiters["synced"]) == 300)
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
