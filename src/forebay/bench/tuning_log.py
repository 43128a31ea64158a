"""What producers choose (how many, how large, how many at a time), and how often the log syncs."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Final

from forebay.bench.measure import rate_of
from forebay.bench.tuning_knob import Knob, Levels, Panel
from forebay.limits import KIB, MIB
from forebay.settings import WalSettings
from forebay.wal.log import Wal

MESSAGE_BYTES: Final = 1024
PRODUCERS: Final = (1, 2, 4, 8, 16, 32)
BATCHES: Final = (1, 4, 16, 64, 256, 1024)
SIZES: Final = (64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
SYNC_BYTES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 10 * MIB, 32 * MIB)
_APPENDS_MAX: Final = 960
_APPENDS_OF_A_MIB: Final = 15
_SMALL_APPENDS: Final = 40_000
"""At most so many appends of small messages: a point must not take a second."""
_PLAIN_EACH: Final = "plain write + fdatasync, one by one"
_PLAIN_MIB: Final = "plain write + fdatasync of 1 MiB"


def log_knobs(mib: int) -> list[Knob]:
    rate = Panel(
        "producers",
        "Synced appends, 1 KiB each, by producers",
        "messages/s",
        ("append, synced",),
        (_PLAIN_EACH,),
    )
    wait = Panel(
        "producers-latency", "How long a synced append takes", "milliseconds", ("p50", "p99")
    )
    batch = Panel(
        "batch",
        "One producer, synced batches of 1 KiB messages",
        "MiB/s",
        ("append_many, synced",),
        (_PLAIN_MIB,),
    )
    large = Panel(
        "message-size",
        "One producer, by the size of its messages",
        "MiB/s",
        ("append, buffered, then flush", "append_many, synced"),
        (_PLAIN_MIB,),
    )
    syncing = Panel(
        "fsync-batch",
        "Buffered batches, by how often they are synced",
        "MiB/s",
        ("append_many, buffered",),
        (_PLAIN_MIB,),
    )
    return [
        Knob(
            "producers (threads)",
            PRODUCERS,
            (rate, wait),
            lambda path, value: _producers(path, value, _appends(mib)),
            bounds=lambda path: _plain_each(path, _appends(mib)),
        ),
        Knob(
            "messages in an append_many",
            BATCHES,
            (batch,),
            lambda path, value: {batch.curves[0]: _synced_batches(path, MESSAGE_BYTES, value, mib)},
            bounds=lambda path: _plain_mib(path, mib),
        ),
        Knob(
            "bytes in a message",
            SIZES,
            (large,),
            lambda path, value: {
                large.curves[0]: _buffered(path / "one", value, mib),
                large.curves[1]: _synced_batches(
                    path / "many", value, max(MIB // value, 1), mib
                ),
            },
            in_bytes=True,
            bounds=lambda path: _plain_mib(path, mib),
        ),
        Knob(
            "storage.wal.fsync_max_batch_bytes",
            SYNC_BYTES,
            (syncing,),
            lambda path, value: {syncing.curves[0]: _buffered_batches(path, value, mib)},
            in_bytes=True,
            default=WalSettings().fsync_max_batch_bytes,
            bounds=lambda path: _plain_mib(path, mib),
        ),
    ]  # fmt: skip


def payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _appends(mib: int) -> int:
    """How many synced appends a point has: each is a wait for the disk."""
    return min(mib * _APPENDS_OF_A_MIB, _APPENDS_MAX)


def _producers(path: Path, threads: int, appends: int) -> Levels:
    wal = Wal(WalSettings(dir=path / "wal"), "bench")
    message = payload(MESSAGE_BYTES)
    each = max(appends // threads, 4)
    waits: list[float] = []

    def produce() -> None:
        mine = []
        for _ in range(each):
            started = time.perf_counter()
            wal.append(message, durability="synced")
            mine.append((time.perf_counter() - started) * 1000)
        waits.extend(mine)

    def race() -> None:
        producers = [threading.Thread(target=produce) for _ in range(threads)]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join()

    try:
        wal.append(message, durability="synced")
        rate = rate_of(each * threads, race)
    finally:
        wal.shutdown()
    assert len(waits) == each * threads
    parts = statistics.quantiles(waits, n=100)
    return {"append, synced": rate, "p50": parts[49], "p99": parts[98]}


def _synced_batches(path: Path, size: int, count: int, mib: int) -> float:
    """MiB of payloads a second; a slow point moves less, so that no point takes long."""
    wal = Wal(WalSettings(dir=path / "wal"), "bench")
    batch = [payload(size)] * count
    turns = min(max(mib * MIB // (size * count), 1), _appends(mib))

    def produce() -> None:
        for _ in range(turns):
            wal.append_many(batch, durability="synced")

    try:
        wal.append(batch[0], durability="synced")
        return rate_of(turns * size * count / MIB, produce)
    finally:
        wal.shutdown()


def _buffered(path: Path, size: int, mib: int) -> float:
    wal = Wal(WalSettings(dir=path / "wal"), "bench")
    message = payload(size)
    turns = min(max(mib * MIB // size, 1), _SMALL_APPENDS)

    def produce() -> None:
        for _ in range(turns):
            wal.append(message)
        wal.flush()

    try:
        wal.append(message, durability="synced")
        return rate_of(turns * size / MIB, produce)
    finally:
        wal.shutdown()


def _buffered_batches(path: Path, sync_bytes: int, mib: int) -> float:
    """Nobody waits: the log syncs by its own bound, and once in the end."""
    count = 32
    settings = WalSettings(dir=path / "wal", fsync_max_batch_bytes=sync_bytes)
    wal = Wal(settings, "bench")
    batch = [payload(MESSAGE_BYTES)] * count
    turns = mib * MIB // (MESSAGE_BYTES * count)

    def produce() -> None:
        for _ in range(turns):
            wal.append_many(batch)
        wal.flush()

    try:
        wal.append(batch[0], durability="synced")
        return rate_of(turns * count * MESSAGE_BYTES / MIB, produce)
    finally:
        wal.shutdown()


def _plain_each(path: Path, appends: int) -> Levels:
    return {_PLAIN_EACH: _plain(path, MESSAGE_BYTES, appends) * MIB / MESSAGE_BYTES}


def _plain_mib(path: Path, mib: int) -> Levels:
    return {_PLAIN_MIB: _plain(path, MIB, mib)}


def _plain(path: Path, size: int, turns: int) -> float:
    """MiB a second by nothing but system calls."""
    data = payload(size)
    file = os.open(path / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write() -> None:
        for _ in range(turns):
            os.write(file, data)
            os.fdatasync(file)

    try:
        return rate_of(turns * size / MIB, write)
    finally:
        os.close(file)
