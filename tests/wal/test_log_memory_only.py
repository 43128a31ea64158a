"""Logs in memory only: they keep what the cache holds, and say what they dropped."""

from __future__ import annotations

import pytest

from forebay.errors import LogClosed, OffsetOutOfRange
from forebay.settings import WalSettings
from forebay.wal.log import Wal
from support.disks import NEVER_MS, payloads, texts


def test_a_log_in_memory_keeps_what_the_cache_holds_and_says_what_it_dropped() -> None:
    wal = Wal(WalSettings(cache_capacity=10, fsync_interval_ms=NEVER_MS))
    for payload in texts(0, 100):
        wal.append(payload, durability="synced")
    assert wal.start_offset == 90
    assert payloads(wal) == texts(90, 100)
    with pytest.raises(OffsetOutOfRange):
        wal.tail_reader(89)
    assert wal.segments() == []
    wal.rotate()
    assert wal.append(b"next") == 100
    wal.shutdown()
    with pytest.raises(LogClosed):
        wal.append(b"late")


def test_a_reader_of_a_log_in_memory_that_was_too_slow_is_told() -> None:
    wal = Wal(WalSettings(cache_capacity=10, fsync_interval_ms=NEVER_MS))
    wal.append_many(texts(0, 5), durability="synced")
    reader = wal.tail_reader(0)
    assert next(reader).offset == 0
    wal.append_many(texts(5, 100), durability="synced")
    got = [next(reader).offset for _ in range(4)]
    assert got == [1, 2, 3, 4]
    with pytest.raises(OffsetOutOfRange) as caught:
        next(reader)
    assert (caught.value.start, caught.value.end) == (90, 100)
    wal.shutdown()
