"""A log in a difficult environment: directories that move, limits, callers that interfere."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event

import pytest

import forebay
from forebay.errors import (
    DiskError,
    LogLocked,
    LogStopped,
    MissingData,
    OffsetOutOfRange,
    UsageError,
)
from forebay.files.local import LocalDisk
from forebay.limits import READ_CHUNK_BYTES
from forebay.settings import StoreSettings, WalSettings
from forebay.testing import Fault, FaultDisk, ManualClock
from forebay.topic.store import Store
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.view import LogView
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    in_thread,
    open_files,
    until,
    wait_until,
    waiting,
    waiting_for_room,
)


def test_a_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with forebay.open("data") as store:
        store.topic("t").append(b"first", durability="synced")
        monkeypatch.chdir(tmp_path / "elsewhere")
        topic = store.topic("t")
        topic.rotate()
        topic.append(b"second", durability="synced")
        store.topic("later").append(b"third", durability="synced")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    with forebay.open(tmp_path / "data") as store:
        assert [m.payload for m in store.topic("t").read()] == [b"first", b"second"]
        assert [m.payload for m in store.topic("later").read()] == [b"third"]


def test_a_log_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    wal = Wal(WalSettings(dir="log"))
    wal.append(b"first", durability="synced")
    monkeypatch.chdir(tmp_path / "elsewhere")
    wal.rotate()
    wal.append(b"second", durability="synced")
    wal.shutdown()
    assert (tmp_path / "log" / "wal.1.log").exists()


def test_a_directory_that_forgot_what_was_acknowledged_is_refused(tmp_path: Path) -> None:
    store = Store(StoreSettings(data=tmp_path / "data"))
    topic = store.topic("t")
    topic.append(b"acknowledged", durability="synced")
    topic.rotate()
    (tmp_path / "data").rename(tmp_path / "gone")
    with pytest.raises(LogStopped):
        topic.append(b"more", durability="synced")
    with pytest.raises(MissingData, match="offset 1 "):
        store.topic("t")
    with pytest.raises(LogStopped):
        store.close()


def test_replacing_the_published_file_does_not_make_a_second_owner(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("t").append(b"x", durability="synced")
        (tmp_path / "wal" / "default" / "t" / "wal.synced").unlink()
        with forebay.open(tmp_path) as second, pytest.raises(LogLocked):
            second.topic("t")


@pytest.mark.parametrize("operation", ["create", "open_append", "open_read", "replace", "sync"])
def test_a_failed_open_holds_nothing(tmp_path: Path, operation: str) -> None:
    with forebay.open(tmp_path) as store:
        store.topic("t").append(b"x", durability="synced")
    (tmp_path / "wal" / "default" / "t" / "wal.synced").unlink()
    disk = FaultDisk(LocalDisk())
    store = Store(StoreSettings(data=tmp_path), disk=disk)
    store.topic("another")  # what all topics share is open from now on
    before = open_files(tmp_path / "wal")  # not the catalog: each thread opens it when it needs it
    disk.inject(Fault(operation, errno.EMFILE, times=None))  # type: ignore[arg-type]
    for _ in range(5):
        with pytest.raises(DiskError, match="ulimit"):
            store.topic("t")
    assert open_files(tmp_path / "wal") == before
    disk.clear()
    assert [message.payload for message in store.topic("t").read()] == [b"x"]
    store.close()


def test_a_stray_file_with_a_huge_number_is_an_error_and_no_more(tmp_path: Path) -> None:
    wal = Wal(WalSettings(dir=tmp_path / "log"))
    wal.append(b"x", durability="synced")
    wal.shutdown()
    (tmp_path / "log" / "wal.999999999999999999.log").touch()
    with pytest.raises(MissingData, match=r"wal\.1\.log"):
        Wal(WalSettings(dir=tmp_path / "log"))


def test_a_full_disk_does_not_fill_with_pieces_of_the_torn_tail(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    wal = Wal(WalSettings(dir=directory))
    wal.append(b"kept", durability="synced")
    wal.shutdown()
    with (directory / "wal.log").open("ab") as segment:
        segment.write(struct.pack("<QII", 1, 100_000, 0) + bytes(50_000))
    disk = FaultDisk(LocalDisk())
    disk.space = 10_000
    before = sorted(os.listdir(directory))  # noqa: PTH208 - names are enough
    for _ in range(3):
        with pytest.raises(DiskError, match="free some space"):
            Wal(WalSettings(dir=directory), disk=disk)
    assert sorted(os.listdir(directory)) == before  # noqa: PTH208 - names are enough
    disk.space = None
    wal = Wal(WalSettings(dir=directory), disk=disk)
    assert wal.append(b"next", durability="synced") == 1
    wal.shutdown()


def test_a_torn_message_full_of_numbers_is_told_from_frames_quickly(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    wal = Wal(WalSettings(dir=directory))
    wal.append_many([b"%d" % n for n in range(20)], durability="synced")
    wal.shutdown()
    payload = struct.pack("<100000q", *range(100_000))
    with (directory / "wal.log").open("ab") as segment:
        segment.write(struct.pack("<QII", 20, len(payload) + 5000, 0) + payload)
    wal = Wal(WalSettings(dir=directory))
    assert wal.current_offset() == 20
    wal.shutdown()


def test_timers_are_watched_while_jobs_run() -> None:
    clock = ManualClock()
    pool = WriterPool(2, clock)
    clock.subscribe(pool.recheck)
    release, running = [Event() for _ in range(2)]

    def slow() -> None:
        running.set()
        assert release.wait(PATIENCE_SECONDS)

    rang = Event()
    pool.call_at(clock.monotonic() + 1, slow)
    pool.call_at(clock.monotonic() + 2, rang.set)
    clock.advance(1)
    assert running.wait(PATIENCE_SECONDS)
    clock.advance(1)
    assert rang.wait(PATIENCE_SECONDS)
    release.set()
    pool.close()


class Meddling(Mapping[str, str]):
    """Attributes that append another message whenever they are read."""

    def __init__(self, topic: forebay.Topic) -> None:
        self.topic = topic

    def __getitem__(self, key: str) -> str:
        self.topic.append(b"from within")
        return "value"

    def __iter__(self) -> Iterator[str]:
        return iter(["key"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("many", [False, True])
def test_attributes_that_run_code_of_their_own_do_not_hold_the_log(many: bool) -> None:
    store = forebay.open(None)
    topic = store.topic("t")

    def append() -> None:
        if many:
            topic.append_many([b"outer"], attributes=[Meddling(topic)])
        else:
            topic.append(b"outer", attributes=Meddling(topic))

    in_thread(append).result(PATIENCE_SECONDS)
    *_, last = topic.read()
    assert (last.payload, last.attributes) == (b"outer", {"key": "value"})
    store.close()


async def test_two_tasks_cannot_ask_one_stream_at_once() -> None:
    with forebay.open(None) as store:
        topic = store.topic("t")
        stream = topic.stream()
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # starts it
        with pytest.raises(UsageError, match="one task"):
            await anext(stream)
        topic.append(b"x")
        assert (await first).payload == b"x"


def test_the_collector_may_meet_an_abandoned_stream_while_the_log_is_locked() -> None:
    wal = Wal(WalSettings())

    async def leave_one_waiting() -> None:
        task = asyncio.ensure_future(anext(wal.async_reader("latest")))
        await until(lambda: waiting(wal) == 1)
        assert not task.done()

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_one_waiting())
        loop.close()

    def collect() -> None:
        # The collector can run while an append holds the lock: no public call makes it do so.
        with wal._committer.lock:
            gc.collect()

    gc.collect()
    gc.disable()
    try:
        abandon()
        wal.append(b"what it waited for", durability="synced")
        quiet(lambda: in_thread(collect).result(PATIENCE_SECONDS))
    finally:
        gc.enable()
    assert wal.append(b"next", durability="synced") == 1
    wal.shutdown()


async def test_what_synced_producers_queue_counts(gated: GatedDirectory) -> None:
    wal = gated.open(queue_max_bytes=100_000)
    gated.gate.shut()
    first = in_thread(lambda: wal.append(bytes(60_000), durability="synced"))
    assert await asyncio.to_thread(gated.gate.reached.wait, PATIENCE_SECONDS)
    second = in_thread(lambda: wal.append(bytes(120_000), durability="synced"))
    await asyncio.to_thread(wait_until, lambda: wal.current_offset() == 2)
    third = asyncio.create_task(wal.append_async(b"no room"))
    await until(lambda: waiting_for_room(wal) == 1)
    assert wal.current_offset() == 2
    gated.gate.open()
    assert await asyncio.wait_for(third, PATIENCE_SECONDS) == 2
    assert (first.result(PATIENCE_SECONDS), second.result(PATIENCE_SECONDS)) == (0, 1)


async def test_streams_that_wait_hold_no_buffers(tmp_path: Path) -> None:
    wal = Wal(WalSettings(dir=tmp_path / "log", cache_capacity=0))
    wal.append(b"x", durability="synced")
    streams = [wal.async_reader(0) for _ in range(64)]
    tracemalloc.start()
    try:
        for stream in streams:
            assert (await anext(stream)).payload == b"x"
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: waiting(wal) == len(streams))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < len(streams) * READ_CHUNK_BYTES / 4
    wal.append(b"y", durability="synced")
    assert {(await task).payload for task in tasks} == {b"y"}
    wal.shutdown()


def test_a_view_refuses_offsets_that_are_not_there(tmp_path: Path) -> None:
    wal = Wal(WalSettings(dir=tmp_path / "log"))
    wal.append(b"x", durability="synced")
    view = LogView(tmp_path / "log")
    for bad in (-1, 2, 10**6):
        with pytest.raises(OffsetOutOfRange):
            view.reader(bad)
    assert list(view.reader(1)) == []
    wal.shutdown()


def test_a_topic_whose_storage_was_closed_is_opened_again(tmp_path: Path) -> None:
    factory = forebay.WalStorageFactory(StoreSettings(data=tmp_path))
    factory.for_topic("t").append_message(forebay.StreamMessage(b"one"))
    factory.for_topic("t").close()
    assert factory.for_topic("t").append_message(forebay.StreamMessage(b"two")) == 1
    factory.close()


def quiet(work: Callable[[], object]) -> None:
    """Runs it without asyncio's log lines about tasks that are destroyed while they wait."""
    asyncio_log = logging.getLogger("asyncio")
    before, asyncio_log.disabled = asyncio_log.disabled, True
    try:
        work()
    finally:
        asyncio_log.disabled = before
