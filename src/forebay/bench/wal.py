"""`forebay bench wal`: the log beside plain system calls on the same bytes.

The limits: for writing, the same bytes by plain `write` and `fdatasync`; for reading, a plain
read and `zlib.crc32` over the same bytes; for a single buffered append, a bare Python loop that
packs a header, computes the CRC and appends to a list.

With `--memory`, also how much memory a growing log takes: a process of its own writes and replays
a million messages, and then nine million more. What its peak grew by in between is what depends on
the amount of data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from forebay.bench.measure import (
    Measurement,
    Timed,
    in_threads,
    payload_of,
    peak_mib,
    progress_line,
    rate_of,
    result_of,
    run_rounds,
    scratch,
    write_and_sync,
)
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


def _frame_bytes(size: int) -> int:
    """What a message of that payload takes in a segment."""
    wal = Wal(WalSettings())
    try:
        wal.append(payload_of(size), durability="synced")
        return sum(len(batch.data) for batch in wal.cached_batches())
    finally:
        wal.shutdown()


@contextmanager
def opened(path: Path, **settings: Any) -> Iterator[Wal]:
    """A log in an empty directory, with these settings and the defaults."""
    wal = Wal(WalSettings(dir=path / "wal", **settings), "bench")
    try:
        yield wal
    finally:
        wal.shutdown()


def _appends(
    size: int,
    threads: int,
    count: int,
    durability: Durability,
    *,
    worth: float = 1,
    flush: bool = False,
) -> Timed:
    """`count` single appends by each thread, `worth` so much each, with their sync if `flush`."""
    payload = payload_of(size)

    def ours(path: Path) -> float:
        with opened(path) as wal:

            def produce(_number: int) -> None:
                plain = durability == "buffered"
                append = wal.append if plain else partial(wal.append, durability=durability)
                for _ in range(count):
                    append(payload)

            def race() -> None:
                in_threads(threads, produce)
                if flush:
                    wal.flush()

            wal.append(payload, durability="synced")
            return rate_of(count * threads * worth, race)

    return ours


def _append_buffered(size: int, threads: int) -> Timed:
    count = max(_BUFFERED_BYTES // (size + 100) // threads, 100)
    return _appends(size, threads, count, "buffered")


def _append_synced(size: int, threads: int) -> Timed:
    return _appends(size, threads, _SYNCED_APPENDS, "synced")


def _append_and_flush(size: int, mib: int, threads: int) -> Timed:
    frame = _frame_bytes(size)
    count = max(mib * MIB // frame // threads, 100)
    return _appends(size, threads, count, "buffered", worth=frame / MIB, flush=True)


def _bare_loop(size: int) -> Timed:
    count = max(_BUFFERED_BYTES // (size + 100), 100)
    payload = payload_of(size)

    def limit(_: Path) -> float:
        def loop() -> None:
            frames: list[bytes] = []
            append, pack, crc32 = frames.append, pure.HEADER.pack, zlib.crc32
            for offset in range(count):
                append(pack(offset, len(payload), crc32(payload)) + payload)

        return rate_of(count, loop)

    return limit


def _write_and_sync(piece: int, pieces: int, amount: float) -> Timed:
    return lambda path: write_and_sync(path, piece, pieces, amount)


def _batches(size: int, mib: int) -> tuple[list[bytes], int]:
    frame = _frame_bytes(size)
    per_batch = max(_BATCH_BYTES // frame, 1)
    return [payload_of(size)] * per_batch, max(mib * MIB // (per_batch * frame), 1)


def _append_many(size: int, mib: int) -> Timed:
    batch, batches = _batches(size, mib)
    frame = _frame_bytes(size)

    def ours(path: Path) -> float:
        with opened(path) as wal:

            def produce() -> None:
                for _ in range(batches):
                    wal.append_many(batch, durability="synced")

            wal.append(batch[0], durability="synced")
            return rate_of(batches * len(batch) * frame / MIB, produce)

    return ours


def _tail(size: int, mib: int) -> Timed:
    """A live reader's rate while a producer appends: from the first append to the last message."""
    batch, batches = _batches(size, mib)
    frame = _frame_bytes(size)
    total = batches * len(batch)

    def ours(path: Path) -> float:
        with opened(path) as wal:
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

            return rate_of(total * frame / MIB, race)

    return ours


def _replay(size: int, mib: int, read: Callable[[LogReader], int]) -> Timed:
    """How fast `read` gets through a log that is in the files only; it returns its messages."""
    batch, batches = _batches(size, mib)

    def ours(path: Path) -> float:
        with opened(path, cache_capacity=0) as wal:
            for _ in range(batches):
                wal.append_many(batch)
            wal.flush()
            total = wal.current_offset()
            written = sum(segment.size for segment in wal.segments())

            def replay() -> None:
                assert read(wal.tail_reader(0, end=total)) == total

            return rate_of(written / MIB, replay)

    return ours


def _to_frames(reader: LogReader) -> int:
    return sum(len(frames) for frames in reader.frames())


def _to_columns(reader: LogReader) -> int:
    return sum(len(message_columns(frames)) for frames in reader.frames())


def _to_messages(reader: LogReader) -> int:
    """Whole message objects, as `topic.read` gives them."""
    return sum(1 for _ in reader)


def _read_and_check(mib: int) -> Timed:
    def limit(path: Path) -> float:
        plain = path / "plain"
        plain.write_bytes(payload_of(MIB) * mib)
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


_MEMORY_MARKS: Final = (1_000_000, 10_000_000)


def _measure_memory(parent: Path | None) -> dict[str, Any]:
    """Peak memory of a process that writes and replays 1 and then 10 million messages."""
    script = "import sys; from forebay.bench.wal import memory_child; memory_child(sys.argv[1])"
    with scratch(parent) as path:
        output = subprocess.run(  # noqa: S603  # this interpreter, our own script
            [sys.executable, "-c", script, str(path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=1800,
        ).stdout
    first, second = map(float, output.split())
    return {
        "mib_at_1_million": first,
        "mib_at_10_million": second,
        "growth_mib": second - first,
        "goal_mib": 32,
    }


def memory_child(path: str) -> None:
    """Prints the process's peak memory in MiB when the log has grown to each mark."""
    batch = [bytes(range(100))] * 5000
    with opened(Path(path)) as wal:
        for mark in _MEMORY_MARKS:
            while wal.current_offset() < mark:
                wal.append_many(batch[: mark - wal.current_offset()])
            wal.flush()
            for _ in wal.tail_reader(0, end=mark).frames():
                pass
            print(peak_mib())


def run(
    directory: Path | None, *, rounds: int, mib: int, memory: bool, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    results = run_rounds(_measurements(mib), rounds, directory, say)
    parts: dict[str, Any] = {"mib": mib, "results": [result.as_json() for result in results]}
    if memory:
        say("memory: 10 million messages")
        parts["memory"] = _measure_memory(directory)
    say("")
    return result_of("wal", rounds, directory, **parts, seconds=time.time() - started)
