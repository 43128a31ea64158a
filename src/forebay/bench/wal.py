"""`forebay bench wal`: compares appends and reads with plain system calls on the same bytes.

Every rate of Forebay is measured through `forebay.open` with the default settings, but for replays,
which have no cache and come from the files. Rates in MiB/s count whole frames. The limits: for
writing, the same bytes by plain `write` and `fdatasync`; for reading, a plain read and `zlib.crc32`
over the same bytes; for a single buffered append, a bare Python loop that packs a header, computes
the CRC and appends to a list.

A reader returns messages when it is iterated, and chunks of checked frames from `frames()`, which
the HTTP server uses. Columns are what Spark makes of such frames.

`--memory` also measures how much memory a growing log takes: a separate process writes and reads
a million messages, then nine million more, and prints its peak memory after each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.bench.measure import (
    Measurement,
    Timed,
    in_threads,
    open_topic,
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
from forebay.settings import StoreSettings, WalSettings
from forebay.wal.log import Durability
from forebay.wal.reader import LogReader

SIZES: Final = (100, 1024, 16 * 1024)
_SYNCED_APPENDS: Final = 400
_BUFFERED_BYTES: Final = 24 * MIB
_BATCH_BYTES: Final = MIB
_MESSAGES_MIB_MAX: Final = 16
"""A read to message objects takes a tenth of the rate of the others."""

Read: TypeAlias = Callable[[LogReader], int]
"""Reads to the end and returns the number of messages."""


@dataclass(frozen=True, slots=True)
class Load:
    """Messages of one size, in batches of about 1 MiB of frames."""

    message_bytes: int
    frame_bytes: int
    """The size of one message in a segment."""
    mib: int
    """The total size of all batches."""

    @property
    def batch(self) -> list[bytes]:
        return [payload_of(self.message_bytes)] * max(_BATCH_BYTES // self.frame_bytes, 1)

    @property
    def batch_bytes(self) -> int:
        return len(self.batch) * self.frame_bytes

    @property
    def batches(self) -> int:
        return max(self.mib * MIB // self.batch_bytes, 1)

    @property
    def messages(self) -> int:
        return self.batches * len(self.batch)

    @property
    def moved_mib(self) -> float:
        """The exact size of all batches, in MiB of frames."""
        return self.batches * self.batch_bytes / MIB


def _load(directory: Path | None, message_bytes: int, mib: int) -> Load:
    with scratch(directory) as path, open_topic(path) as topic:
        topic.append(payload_of(message_bytes), durability="synced")
        frame_bytes = sum(segment.size for segment in topic.segments())
    return Load(message_bytes, frame_bytes, mib)


def _append(size: int, threads: int, durability: Durability, count: int) -> Timed:
    """`count` single appends by each thread."""
    payload = payload_of(size)

    def ours(path: Path) -> float:
        with open_topic(path) as topic:
            plain = durability == "buffered"
            append = topic.append if plain else partial(topic.append, durability=durability)

            def produce(_number: int) -> None:
                for _ in range(count):
                    append(payload)

            topic.append(payload, durability="synced")
            return rate_of(count * threads, lambda: in_threads(threads, produce))

    return ours


def _buffered_count(size: int) -> int:
    return max(_BUFFERED_BYTES // (size + 100), 100)


def _append_buffered(size: int, threads: int) -> Timed:
    return _append(size, threads, "buffered", _buffered_count(size) // threads)


def _append_synced(size: int, threads: int) -> Timed:
    return _append(size, threads, "synced", _SYNCED_APPENDS)


def _bare_loop(size: int) -> Timed:
    count, payload = _buffered_count(size), payload_of(size)

    def limit(_: Path) -> float:
        def loop() -> None:
            frames: list[bytes] = []
            append, pack, crc32 = frames.append, pure.HEADER.pack, zlib.crc32
            for offset in range(count):
                append(pack(offset, len(payload), crc32(payload)) + payload)

        return rate_of(count, loop)

    return limit


def _append_many(load: Load) -> Timed:
    batch, batches = load.batch, load.batches

    def ours(path: Path) -> float:
        with open_topic(path) as topic:

            def produce() -> None:
                for _ in range(batches):
                    topic.append_many(batch, durability="synced")

            topic.append(batch[0], durability="synced")
            return rate_of(load.moved_mib, produce)

    return ours


def _live(load: Load, read: Read) -> Timed:
    """A live reader's rate, from a producer's first batch to the last message read."""
    batch, batches, messages = load.batch, load.batches, load.messages

    def ours(path: Path) -> float:
        with open_topic(path) as topic:

            def produce() -> None:
                for _ in range(batches):
                    topic.append_many(batch)

            def race() -> None:
                reader = topic.read(0, end=messages)
                producer = threading.Thread(target=produce)
                producer.start()
                assert read(reader) == messages
                producer.join()

            return rate_of(load.moved_mib, race)

    return ours


def _replay(load: Load, read: Read) -> Timed:
    """A reader's rate over a log that is in the files only."""
    batch, batches, messages = load.batch, load.batches, load.messages

    def ours(path: Path) -> float:
        with open_topic(StoreSettings(data=path, wal=WalSettings(cache_capacity=0))) as topic:
            for _ in range(batches):
                topic.append_many(batch)
            topic.flush()

            def replay() -> None:
                assert read(topic.read(0)) == messages

            return rate_of(load.moved_mib, replay)

    return ours


def _to_frames(reader: LogReader) -> int:
    return sum(len(frames) for frames in reader.frames())


def _to_columns(reader: LogReader) -> int:
    return sum(len(message_columns(frames)) for frames in reader.frames())


def _to_messages(reader: LogReader) -> int:
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


def _rows(load: Load) -> list[Measurement]:
    size = load.message_bytes
    few = replace(load, mib=min(load.mib, _MESSAGES_MIB_MAX))
    loop, read = _bare_loop(size), _read_and_check(load.mib)

    def sync_each(path: Path) -> float:
        return write_and_sync(path, load.frame_bytes, _SYNCED_APPENDS, _SYNCED_APPENDS)

    def sync_batch(path: Path) -> float:
        return write_and_sync(path, load.batch_bytes, load.batches, load.moved_mib)

    return [
        Measurement(
            "append buffered, 1 thread", size, "msg/s", _append_buffered(size, 1),
            "bare loop", loop, 0.35 if size == 100 and COMPILED else None,
        ),
        Measurement(
            "append buffered, 4 threads", size, "msg/s", _append_buffered(size, 4),
            "bare loop", loop,
        ),
        Measurement(
            "append synced, 1 thread", size, "msg/s", _append_synced(size, 1),
            "write + fdatasync", sync_each,
        ),
        Measurement(
            "append synced, 4 threads", size, "msg/s", _append_synced(size, 4),
            "append synced, 1 thread", _append_synced(size, 1), 3.0 if size == 100 else None,
        ),
        Measurement(
            "append_many synced", size, "MiB/s", _append_many(load),
            "write + fdatasync", sync_batch, 0.6 if size == 1024 else None,
        ),
        Measurement(
            "live read to frames", size, "MiB/s", _live(load, _to_frames),
            "write + fdatasync", sync_batch,
        ),
        Measurement(
            "live read to messages", size, "MiB/s", _live(few, _to_messages),
            "write + fdatasync", sync_batch,
        ),
        Measurement(
            "replay to columns", size, "MiB/s", _replay(load, _to_columns),
            "read + crc", read, {100: 0.25, 1024: 0.5}.get(size),
        ),
        Measurement(
            "replay to messages", size, "MiB/s", _replay(few, _to_messages), "read + crc", read,
        ),
    ]  # fmt: skip


_MEMORY_MARKS: Final = (1_000_000, 10_000_000)


def _measure_memory(parent: Path | None) -> dict[str, Any]:
    """Peak memory of a process that writes and reads 1 and then 10 million messages."""
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
    with open_topic(Path(path)) as topic:
        for mark in _MEMORY_MARKS:
            while (left := mark - topic.watermarks().appended) > 0:
                topic.append_many(batch[:left])
            topic.flush()
            assert _to_frames(topic.read(0)) == mark
            print(peak_mib())


def run(
    directory: Path | None, *, rounds: int, mib: int, memory: bool, progress: bool
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    rows = [row for size in SIZES for row in _rows(_load(directory, size, mib))]
    results = run_rounds(rows, rounds, directory, say)
    parts: dict[str, Any] = {"mib": mib, "results": [result.as_json() for result in results]}
    if memory:
        say("memory: 10 million messages")
        parts["memory"] = _measure_memory(directory)
    say("")
    return result_of("wal", rounds, directory, **parts, seconds=time.time() - started)
