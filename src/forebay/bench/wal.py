"""`forebay bench wal`: the log beside plain system calls on the same bytes.

The limits: for writing, the same bytes by plain `write` and `fdatasync`; for reading, a plain
read and `zlib.crc32` over the same bytes; for a single buffered append, a bare Python loop that
packs a header, computes the CRC and appends to a list.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from forebay.bench.measure import Measurement, Result, filesystem_of, machine, rate_of, run_rounds
from forebay.bench.memory import measure_memory
from forebay.format import pure
from forebay.format.codec import COMPILED
from forebay.format.message import message_columns
from forebay.limits import MIB, READ_CHUNK_BYTES
from forebay.settings import WalSettings
from forebay.wal.log import Durability, Wal
from forebay.wal.reader import LogReader

SIZES: Final = (100, 1024, 16 * 1024)
_SYNCED_APPENDS: Final = 400
_BUFFERED_BYTES: Final = 24 * MIB
_BATCH_BYTES: Final = MIB


def _payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _frame_bytes(size: int) -> int:
    """What a message of that payload takes in a segment."""
    wal = Wal(WalSettings())
    try:
        wal.append(_payload(size), durability="synced")
        return sum(len(run.data) for run in wal.cached_batches())
    finally:
        wal.shutdown()


def _open(path: Path) -> Wal:
    return Wal(WalSettings(dir=path / "wal"), "bench")


def _in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _appends(
    size: int,
    threads: int,
    count: int,
    durability: Durability,
    *,
    worth: float = 1,
    flush: bool = False,
) -> Callable[[Path], float]:
    """`count` single appends by each thread, `worth` so much each, with their sync if `flush`."""
    payload = _payload(size)

    def ours(path: Path) -> float:
        wal = _open(path)

        def produce() -> None:
            plain = durability == "buffered"
            append = wal.append if plain else partial(wal.append, durability=durability)
            for _ in range(count):
                append(payload)

        def race() -> None:
            _in_threads(threads, produce)
            if flush:
                wal.flush()

        try:
            wal.append(payload, durability="synced")
            return rate_of(count * threads * worth, race)
        finally:
            wal.shutdown()

    return ours


def _append_buffered(size: int, threads: int) -> Callable[[Path], float]:
    count = max(_BUFFERED_BYTES // (size + 100) // threads, 100)
    return _appends(size, threads, count, "buffered")


def _append_synced(size: int, threads: int) -> Callable[[Path], float]:
    return _appends(size, threads, _SYNCED_APPENDS, "synced")


def _append_and_flush(size: int, mib: int, threads: int) -> Callable[[Path], float]:
    frame = _frame_bytes(size)
    count = max(mib * MIB // frame // threads, 100)
    return _appends(size, threads, count, "buffered", worth=frame / MIB, flush=True)


def _bare_loop(size: int) -> Callable[[Path], float]:
    count = max(_BUFFERED_BYTES // (size + 100), 100)
    payload = _payload(size)

    def limit(_: Path) -> float:
        def loop() -> None:
            frames: list[bytes] = []
            append, pack, crc32 = frames.append, pure.HEADER.pack, zlib.crc32
            for offset in range(count):
                append(pack(offset, len(payload), crc32(payload)) + payload)

        return rate_of(count, loop)

    return limit


def _write_and_sync(piece: int, pieces: int, amount: float) -> Callable[[Path], float]:
    data = _payload(piece)

    def limit(path: Path) -> float:
        file = os.open(path / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

        def write() -> None:
            for _ in range(pieces):
                os.write(file, data)
                os.fdatasync(file)

        try:
            return rate_of(amount, write)
        finally:
            os.close(file)

    return limit


def _batches(size: int, mib: int) -> tuple[list[bytes], int]:
    frame = _frame_bytes(size)
    per_batch = max(_BATCH_BYTES // frame, 1)
    return [_payload(size)] * per_batch, max(mib * MIB // (per_batch * frame), 1)


def _append_many(size: int, mib: int) -> Callable[[Path], float]:
    batch, batches = _batches(size, mib)
    frame = _frame_bytes(size)

    def ours(path: Path) -> float:
        wal = _open(path)

        def produce() -> None:
            for _ in range(batches):
                wal.append_many(batch, durability="synced")

        try:
            wal.append(batch[0], durability="synced")
            return rate_of(batches * len(batch) * frame / MIB, produce)
        finally:
            wal.shutdown()

    return ours


def _tail(size: int, mib: int) -> Callable[[Path], float]:
    """A live reader's rate while a producer appends: from the first append to the last message."""
    batch, batches = _batches(size, mib)
    frame = _frame_bytes(size)
    total = batches * len(batch)

    def ours(path: Path) -> float:
        wal = _open(path)
        reader = wal.tail_reader(0, end=total)

        def produce() -> None:
            for _ in range(batches):
                wal.append_many(batch)

        def race() -> None:
            producer = threading.Thread(target=produce)
            producer.start()
            seen = sum(len(frames) for frames in reader.frames())
            producer.join()
            assert seen == total

        try:
            return rate_of(total * frame / MIB, race)
        finally:
            wal.shutdown()

    return ours


def _replay(size: int, mib: int, read: Callable[[LogReader], int]) -> Callable[[Path], float]:
    """How fast `read` gets through a log that is in the files only; it answers what it saw."""
    batch, batches = _batches(size, mib)

    def ours(path: Path) -> float:
        wal = Wal(WalSettings(dir=path / "wal", cache_capacity=0), "bench")

        def replay() -> None:
            assert read(wal.tail_reader(0, end=total)) == total

        try:
            for _ in range(batches):
                wal.append_many(batch)
            wal.flush()
            total = wal.current_offset()
            written = sum(segment.size for segment in wal.segments())
            return rate_of(written / MIB, replay)
        finally:
            wal.shutdown()

    return ours


def _to_frames(reader: LogReader) -> int:
    return sum(len(frames) for frames in reader.frames())


def _to_columns(reader: LogReader) -> int:
    return sum(len(message_columns(frames)) for frames in reader.frames())


def _to_messages(reader: LogReader) -> int:
    """Whole message objects, as `topic.read` gives them."""
    return sum(1 for _ in reader)


def _read_and_check(mib: int) -> Callable[[Path], float]:
    def limit(path: Path) -> float:
        plain = path / "plain"
        plain.write_bytes(_payload(MIB) * mib)
        buffer = memoryview(bytearray(READ_CHUNK_BYTES))
        file = os.open(plain, os.O_RDONLY)

        def read() -> None:
            position = 0
            while taken := os.preadv(file, [buffer], position):
                zlib.crc32(buffer[:taken])
                position += taken

        try:
            return rate_of(mib, read)
        finally:
            os.close(file)

    return limit


def _measurements(mib: int) -> list[Measurement]:
    found: list[Measurement] = []
    for size in SIZES:
        frame = _frame_bytes(size)
        batch = max(_BATCH_BYTES // frame, 1) * frame
        sync_each = _write_and_sync(frame, _SYNCED_APPENDS, _SYNCED_APPENDS)
        sync_four = _write_and_sync(4 * frame, _SYNCED_APPENDS, 4 * _SYNCED_APPENDS)
        batches = max(mib * MIB // batch, 1)
        sync_batch = _write_and_sync(batch, batches, batches * batch / MIB)
        read = _read_and_check(mib)
        loop_goal = 0.35 if size == 100 and COMPILED else None
        found += [
            Measurement(
                "append buffered, 1 thread", size, "msg/s", _append_buffered(size, 1),
                "bare loop", _bare_loop(size), loop_goal,
            ),
            Measurement(
                "append buffered, 4 threads", size, "msg/s", _append_buffered(size, 4),
                "bare loop", _bare_loop(size),
            ),
            Measurement(
                "append buffered + flush, 1 thread", size, "MiB/s",
                _append_and_flush(size, mib, 1), "write + fdatasync", sync_batch,
            ),
            Measurement(
                "append buffered + flush, 4 threads", size, "MiB/s",
                _append_and_flush(size, mib, 4), "write + fdatasync", sync_batch,
            ),
            Measurement(
                "append synced, 1 thread", size, "msg/s", _append_synced(size, 1),
                "write + fdatasync", sync_each,
            ),
            Measurement(
                "append synced, 4 threads", size, "msg/s", _append_synced(size, 4),
                "write + fdatasync, 4 at once", sync_four,
            ),
            Measurement(
                "append synced, 4 threads", size, "msg/s", _append_synced(size, 4),
                "append synced, 1 thread", _append_synced(size, 1), 3.0 if size == 100 else None,
            ),
            Measurement(
                "append_many synced", size, "MiB/s", _append_many(size, mib),
                "write + fdatasync", sync_batch, 0.6 if size == 1024 else None,
            ),
            Measurement(
                "tail", size, "MiB/s", _tail(size, mib), "write + fdatasync", sync_batch,
            ),
            Measurement(
                "replay to frames", size, "MiB/s", _replay(size, mib, _to_frames),
                "read + crc", read,
            ),
            Measurement(
                "replay to columns", size, "MiB/s", _replay(size, mib, _to_columns),
                "read + crc", read, {100: 0.25, 1024: 0.5}.get(size),
            ),
            Measurement(
                "replay to messages", size, "MiB/s", _replay(size, min(mib, 16), _to_messages),
                "read + crc", read,
            ),
        ]  # fmt: skip
    return found


def run(
    directory: Path | None, *, rounds: int, mib: int, memory: bool, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.report`."""
    started = time.time()

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    target = directory or Path.cwd()
    results: list[Result] = run_rounds(_measurements(mib), rounds, directory, say)
    found: dict[str, Any] = {
        "benchmark": "wal",
        "machine": machine(target if target.exists() else Path.cwd(), compiled=COMPILED),
        "rounds": rounds,
        "mib": mib,
        "results": [result.as_json() for result in results],
    }
    if memory:
        say("memory: 10 million messages")
        found["memory"] = measure_memory(directory)
    say("")
    found["seconds"] = time.time() - started
    if filesystem_of(target) in {"tmpfs", "ramfs"}:
        found["warning"] = f"{target} is in memory: name a directory on a disk with --dir"
    return found
