"""Shutting down: everything accepted is synced, and nothing is accepted afterwards."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import forebay
from forebay.errors import LogClosed
from forebay.format.message import StreamMessage
from support.disks import (
    PATIENCE_SECONDS,
    GatedDirectory,
    LogDirectory,
    WatchedDisk,
    in_thread,
    payloads,
    texts,
    wait_until,
)
from support.log_steps import synced


def test_shutting_down_syncs_everything_and_may_be_done_twice(crashing: LogDirectory) -> None:
    assert crashing.crash is not None
    wal = crashing.open()
    wal.append_many(texts(0, 100))
    wal.shutdown()
    wal.shutdown()
    assert synced(wal) == 100
    wal.flush()
    wal.wait(99)
    crashing.crash.crash()
    assert payloads(crashing.open()) == texts(0, 100)


def test_everything_that_changes_a_closed_log_is_refused_and_touches_nothing(
    directory: LogDirectory,
) -> None:
    wal = directory.open(rotate_max_bytes=100)
    for payload in texts(0, 5):
        wal.append(payload, durability="synced")
    wal.shutdown()
    before = directory.contents()
    with pytest.raises(LogClosed):
        wal.append(b"x")
    with pytest.raises(LogClosed):
        wal.append(b"x", durability="synced")
    with pytest.raises(LogClosed):
        wal.append_many([b"x"])
    with pytest.raises(LogClosed):
        wal.append_message(StreamMessage(b"x"))
    with pytest.raises(LogClosed):
        wal.rotate()
    with pytest.raises(LogClosed):
        next(wal.tail_reader("latest"))
    assert directory.contents() == before
    assert payloads(wal) == texts(0, 5), "what was synced can still be read"


async def test_asyncio_appends_to_a_closed_log_are_refused(directory: LogDirectory) -> None:
    wal = directory.open()
    wal.shutdown()
    with pytest.raises(LogClosed):
        await wal.append_async(b"x")


def test_shutting_down_while_producers_append_syncs_exactly_what_was_accepted(
    directory: LogDirectory,
) -> None:
    wal = directory.open(queue_max_bytes=20_000, rotate_max_bytes=30_000)
    accepted: dict[int, bytes] = {}
    started = threading.Barrier(5)

    def produce(name: int) -> None:
        started.wait(PATIENCE_SECONDS)
        count = 0
        while True:
            payload = f"{name}:{count}".encode().ljust(200)
            try:
                if name == 0:
                    batch = [payload] * 150
                    accepted.update(zip(wal.append_many(batch), batch, strict=True))
                else:
                    accepted[wal.append(payload)] = payload
            except LogClosed:
                return
            count += 1

    producers = [in_thread(lambda name=name: produce(name)) for name in range(4)]  # type: ignore[misc]
    started.wait(PATIENCE_SECONDS)
    wait_until(lambda: wal.current_offset() > 500)
    wal.shutdown()
    for producer in producers:
        producer.result(PATIENCE_SECONDS)
    found = payloads(directory.open())
    for offset, payload in accepted.items():
        assert found[offset] == payload


def test_two_threads_that_shut_down_at_once_both_return_when_it_is_done(
    gated: GatedDirectory,
) -> None:
    wal = gated.open()
    wal.append(b"x")
    gated.gate.shut()
    first = in_thread(wal.shutdown)
    assert gated.gate.reached.wait(PATIENCE_SECONDS)
    second = in_thread(wal.shutdown)
    with pytest.raises(TimeoutError):
        second.result(0.05)  # it cannot return before the gate is opened
    gated.gate.open()
    first.result(PATIENCE_SECONDS)
    second.result(PATIENCE_SECONDS)
    assert payloads(gated.open()) == [b"x"]


def test_an_interrupted_shutdown_goes_on_and_the_next_one_waits_for_it(
    gated: GatedDirectory,
) -> None:
    wal = gated.open()
    wal.append(b"x", durability="synced")
    wal.append(b"y")
    gated.gate.shut()
    with interrupted_once(gated.gate.reached), pytest.raises(KeyboardInterrupt):
        wal.shutdown()
    assert not wal.stopped, "an interrupt is no error of the disk"
    gated.gate.open()
    wal.shutdown()
    assert payloads(gated.open()) == [b"x", b"y"]


def test_an_interrupted_rotation_goes_on_and_is_no_error_of_the_disk(
    gated: GatedDirectory,
) -> None:
    wal = gated.open()
    wal.append(b"x", durability="synced")
    begun, finish = threading.Event(), threading.Event()

    def hold(path: Path) -> None:
        if path.name == "wal.ckpt.tmp":
            begun.set()
            assert finish.wait(PATIENCE_SECONDS)

    assert isinstance(gated.disk, WatchedDisk)
    gated.disk.on_sync = hold
    with interrupted_once(begun), pytest.raises(KeyboardInterrupt):
        wal.rotate()
    finish.set()
    wait_until(lambda: wal.segments()[-1].index is None)
    wal.append(b"y", durability="synced")
    assert [segment.count for segment in wal.segments()] == [1, 1]
    assert payloads(wal) == [b"x", b"y"]


@contextlib.contextmanager
def interrupted_once(moment: threading.Event) -> Iterator[None]:
    """Interrupts the main thread when the moment has come."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        assert moment.wait(PATIENCE_SECONDS)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sending = in_thread(send)
    try:
        yield
    finally:
        sending.result(PATIENCE_SECONDS)
        signal.signal(signal.SIGUSR1, before)


def test_closing_the_store_syncs_and_closes_every_topic(tmp_path: Path) -> None:
    store = forebay.open(tmp_path)
    for name in ("a", "b"):
        store.topic(name).append(name.encode())
    store.close()
    store.close()
    with pytest.raises(LogClosed):
        store.topic("a")
    with forebay.open(tmp_path) as again:
        assert again.topics() == ["/default/a", "/default/b"]
        assert [m.payload for m in again.topic("b").read()] == [b"b"]
