"""Readers that are closed, fail or are interrupted: nothing hangs, nothing is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.errors import LogClosed, MessageError
from forebay.format.frame import encode_frame
from forebay.format.message import StreamMessage, decode_messages
from forebay.wal.watermarks import Visibility
from support.disks import (
    PATIENCE_SECONDS,
    LogDirectory,
    in_thread,
    payloads,
    texts,
    wait_until,
    waiting,
)
from support.log_steps import fill, take

# -- closing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("visibility", ["synced", "buffered"])
def test_closing_from_another_thread_ends_a_reader_that_waits(
    directory: LogDirectory, visibility: Visibility
) -> None:
    wal = directory.open()
    fill(wal, 3)
    reader = wal.tail_reader(0, visibility=visibility)
    reading = in_thread(lambda: [message.offset for message in reader])
    wait_until(lambda: waiting(wal, visibility) == 1)
    reader.close()
    assert reading.result(PATIENCE_SECONDS) == [0, 1, 2]
    assert waiting(wal, visibility) == 0
    assert list(reader) == []
    reader.close()


def test_a_closed_reader_hands_out_nothing_more(directory: LogDirectory) -> None:
    wal = directory.open()
    fill(wal, 10)
    with wal.tail_reader(0) as reader:
        assert take(reader, 3) == [0, 1, 2]
    assert list(reader) == []
    assert reader.position == 3


def test_closing_and_appending_at_once_neither_hangs_nor_breaks_the_log(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
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
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    fill(wal, 3)
    reader = wal.tail_reader(0)
    got: list[int] = []

    def consume() -> None:
        for message in reader:
            got.append(message.offset)

    consumer = in_thread(consume)
    wait_until(lambda: waiting(wal) == 1)
    wal.append(b"last")
    wal.shutdown()
    with pytest.raises(LogClosed):
        consumer.result(PATIENCE_SECONDS)
    assert got == [0, 1, 2, 3]


# -- errors and interrupts ----------------------------------------------------------------------


def test_a_message_that_cannot_be_decoded_is_an_error_each_time_and_never_skipped(
    directory: LogDirectory,
) -> None:
    wal = directory.open()
    fill(wal, 3)
    wal.shutdown()
    whole = directory.read("wal.log")
    directory.write("wal.log", whole + encode_frame(3, b"not a message, but a valid frame"))
    wal = directory.open()
    wal.append(b"behind it", durability="synced")
    reader = wal.tail_reader(0)
    assert take(reader, 3) == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(MessageError):
            next(reader)
        assert reader.position == 3
    assert take(wal.tail_reader(4), 1) == [4]


def test_an_interrupt_in_the_middle_of_reading_loses_nothing(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = directory.open(cache_capacity=5, rotate_max_bytes=3000)
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
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = directory.open()

    def interrupt(self: object, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    reader = wal.tail_reader(0)
    with monkeypatch.context() as patch:
        patch.setattr("forebay.wal.watermarks.ThreadWaiter.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(reader)
        with pytest.raises(KeyboardInterrupt):
            wal.append(b"x", durability="synced")
    assert waiting(wal) == 0
    assert next(reader).payload == b"x"
    reader.close()
