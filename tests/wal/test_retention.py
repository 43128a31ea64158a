"""Readers and retention: a segment in use stays, and reading a deleted one raises an error."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from forebay.errors import MissingData, OffsetOutOfRange
from forebay.files.local import LocalDisk
from forebay.settings import DeleterSettings
from forebay.testing import ManualClock
from forebay.wal.retention import Deleter
from forebay.wal.view import LogView
from support.disks import PATIENCE_SECONDS, LogDirectory, in_thread, texts, wait_until, waiting
from support.log_steps import take

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))


def test_a_segment_that_a_reader_is_on_stays(directory: LogDirectory) -> None:
    clock = ManualClock()
    wal = directory.open(clock=clock, cache_capacity=0, rotate_max_bytes=500)
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


def test_a_reader_that_waits_at_the_end_keeps_no_segment(directory: LogDirectory) -> None:
    wal = directory.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    reader = wal.tail_reader(0)
    assert take(reader, 40) == list(range(40))
    reading = in_thread(lambda: next(reader).offset)
    wait_until(lambda: waiting(wal) == 1)
    for payload in texts(40, 60):
        wal.append(payload)
    wal.flush()
    assert reading.result(PATIENCE_SECONDS) == 40
    assert take(reader, 19)[-1] == 59
    reading = in_thread(lambda: next(reader).offset)
    wait_until(lambda: waiting(wal) == 1)
    wal.retain(EVERYTHING, 60)
    assert len(wal.segments()) == 1
    reader.close()


def test_a_reader_that_stands_still_for_long_no_longer_keeps_its_segment_and_is_told(
    directory: LogDirectory,
) -> None:
    clock = ManualClock()
    wal = directory.open(clock=clock, cache_capacity=0, rotate_max_bytes=500)
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


def test_reading_while_retention_runs_ends_in_an_error_or_in_everything(
    directory: LogDirectory,
) -> None:
    wal = directory.open(cache_capacity=8, rotate_max_bytes=1000)
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
    for number, payload in enumerate(texts(0, 1000)):
        wal.append(payload)
        if number % 40 == 0:
            wal.flush()
            wal.retain(EVERYTHING, max(wal.current_offset() - 100, 0))
    done.set()
    for consumer in consumers:
        consumer.result(PATIENCE_SECONDS)
    # Readers may have held segments during the last pass; now there are none.
    wal.retain(EVERYTHING, wal.current_offset() - 100)
    assert wal.start_offset > 800


def test_a_view_whose_segment_was_removed_says_that_the_offset_is_gone(tmp_path: Path) -> None:
    directory = LogDirectory(LocalDisk(), tmp_path / "log")
    wal = directory.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    view = LogView(directory.path)
    wal.retain(EVERYTHING, 40)
    with pytest.raises(OffsetOutOfRange):
        list(view.reader(0))
    view.refresh()
    assert [m.offset for m in view.reader(view.start_offset)] == list(range(wal.start_offset, 40))
    directory.close()


def test_a_segment_that_somebody_else_deleted_is_missing_data(directory: LogDirectory) -> None:
    wal = directory.open(cache_capacity=0, rotate_max_bytes=500)
    for payload in texts(0, 40):
        wal.append(payload, durability="synced")
    victim = wal.segments()[1].path.name
    directory.remove(victim)
    reader = wal.tail_reader(0, end=40)
    with pytest.raises(MissingData, match=re.escape(victim)):
        list(reader)
