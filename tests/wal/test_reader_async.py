"""Readers in asyncio: streams that wait without a thread each and lose nothing when cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

import forebay
from forebay.settings import StoreSettings
from forebay.testing import CrashDisk
from forebay.wal.watermarks import Visibility
from support.disks import PATIENCE_SECONDS, LogDirectory, WatchedDisk, texts, until, waiting
from support.log_steps import fill


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
    directory: LogDirectory, visibility: Visibility
) -> None:
    wal = directory.open()
    await asyncio.to_thread(fill, wal, 3)
    for from_thread in (False, True):
        stream = wal.async_reader(0, visibility=visibility)

        async def consume(stream=stream) -> list[int]:  # type: ignore[no-untyped-def]
            return [message.offset async for message in stream]

        task = asyncio.create_task(consume())
        await until(lambda: waiting(wal, visibility) > 0)
        if from_thread:
            await asyncio.to_thread(stream.close)
        else:
            await stream.aclose()
        assert await asyncio.wait_for(task, PATIENCE_SECONDS) == [0, 1, 2]


async def test_cancelling_a_wait_for_the_next_message_loses_nothing(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    stream = wal.async_reader(0)
    got: list[int] = []
    for turn in range(50):
        reading = asyncio.create_task(stream.__anext__())
        await until(lambda reading=reading: waiting(wal) > 0 or reading.done())  # type: ignore[misc]
        await asyncio.to_thread(wal.append, f"{turn}".encode())
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got.append((await reading).offset)
    assert waiting(wal) == 0
    while len(got) < 50:
        got.append((await asyncio.wait_for(stream.__anext__(), PATIENCE_SECONDS)).offset)
    assert got == list(range(50))


async def test_cancelling_a_read_of_a_file_loses_nothing_and_mixes_nothing_up() -> None:
    disk = WatchedDisk(CrashDisk())
    directory = LogDirectory(disk, Path("/log"))
    wal = directory.open(cache_capacity=0, rotate_max_bytes=50_000)
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
        task = asyncio.create_task(stream.__anext__())
        await until(lambda task=task: reading.is_set() or task.done())  # type: ignore[misc]
        if task.done():
            got.append((await task).payload)
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held[0] = False  # the next fetch overtakes the one that was abandoned
        got.append((await asyncio.wait_for(stream.__anext__(), PATIENCE_SECONDS)).payload)
        held[0] = True
        go_on.release()
        for _ in range(100):
            got.append((await asyncio.wait_for(stream.__anext__(), PATIENCE_SECONDS)).payload)
            if len(got) % 50 == 0:
                break
    held[0] = False
    for _ in range(100):
        go_on.release()
    got += [message.payload async for message in stream]
    assert got == wanted
    directory.close()


async def test_many_streams_wait_without_a_thread_each(directory: LogDirectory) -> None:
    wal = directory.open()
    before = threading.active_count()
    streams = [wal.async_reader("latest") for _ in range(300)]
    tasks = [asyncio.create_task(stream.__anext__()) for stream in streams]
    await until(lambda: waiting(wal) == 300)
    assert threading.active_count() - before < 100  # asyncio may start up to 32 for reads of files
    await wal.append_async(b"for all", durability="synced")
    messages = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
    assert [message.payload for message in messages] == [b"for all"] * 300
    assert threading.active_count() - before < 100


async def test_a_wait_whose_loop_was_closed_does_not_disturb_the_log(
    directory: LogDirectory,
) -> None:
    wal = directory.open()

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
