"""What a producer keeps of its speed while the history is read, in its process or in another.

The producer appends batches of 1000 messages, buffered, with the default settings of a log, and
flushes at the end, which is timed too. The reader reads all objects of another topic again and
again and checks every frame; it has begun before the time is taken and ends after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Final

from forebay.bench.measure import Timed, rate_of
from forebay.bench.tier_log import History, chill, opened, payloads, reader, warm_disk
from forebay.limits import MIB
from forebay.settings import CloudReaderSettings, CloudSettings

START_SECONDS_MAX: Final = 60.0
_CHILD: Final = """
from forebay.bench.tier_append import reader_child
reader_child()
"""


def appending(
    mib: int,
    message_bytes: int,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Timed:
    """MiB of payload a second, while what `beside` begins goes on."""
    batch = payloads(message_bytes)
    amount = sum(len(payload) for payload in batch)
    batches = max(mib * MIB // amount, 1)

    def ours(path: Path) -> float:
        warm_disk(path, mib)
        with opened(path / "live", CloudSettings(), path / "live" / "wal") as storage:
            wal = storage.wal

            def produce() -> None:
                for _ in range(batches):
                    wal.append_many(batch)
                wal.flush()

            wal.append(batch[0], durability="synced")
            with beside():
                rate = rate_of(batches * amount / MIB, produce)
            assert wal.watermarks().synced == batches * len(batch) + 1
        return rate

    return ours


@contextmanager
def reader_thread(history: History) -> Iterator[None]:
    """Reads the history in a thread of this process."""
    begun, stop, ended = threading.Event(), threading.Event(), threading.Event()
    counts: list[int] = []

    def work() -> None:
        try:
            counts.append(_read_on(history, begun.set, stop))
        finally:
            ended.set()
            begun.set()

    thread = threading.Thread(target=work, name="cold-reader")
    thread.start()
    try:
        assert begun.wait(START_SECONDS_MAX), "the reader does not begin"
        assert not ended.is_set(), "the reader has nothing to read"
        yield
        assert not ended.is_set(), "the reader ended before the producer"
    finally:
        stop.set()
        thread.join()
    assert sum(counts) > 0, "the reader failed"


@contextmanager
def reader_process(history: History) -> Iterator[None]:
    """Reads the history in a process of its own, which shares nothing but the files."""
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own program
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Options may be secrets: they go through a pipe, never into the arguments.
        cloud = {**asdict(history.cloud), "options": dict(history.cloud.options)}
        asked = {
            "data": str(history.data),
            "cloud": cloud,
            "delay_seconds": history.delay_seconds,
            "cached": history.cached,
        }
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "reading", "the reader has nothing to read"
        yield
        assert process.poll() is None, "the reader ended before the producer"
        read, _ = process.communicate(timeout=START_SECONDS_MAX)
        assert int(read) > 0, "the reader failed"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def reader_child() -> None:
    """Reads until its input ends; prints `reading` once it does, and the bytes in the end."""
    asked = json.loads(sys.stdin.readline())
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    history = History(
        Path(asked["data"]),
        CloudSettings(**asked["cloud"]),
        [],
        asked["delay_seconds"],
        asked["cached"],
    )
    count = _read_on(history, lambda: print("reading", flush=True), stop)
    print(count, flush=True)


def _read_on(history: History, begun: Callable[[], None], stop: threading.Event) -> int:
    """All objects again and again until `stop`, or until there are none; answers the bytes."""
    count = 0
    with reader(history, CloudReaderSettings()) as found:
        while not stop.is_set():
            chill(history)
            with found.stream(0) as stream:
                if stream.next() is None:
                    break
                if not count:
                    begun()
                while not stop.is_set() and stream.next() is not None:
                    pass
                count += stream.bytes_used
    return count
