"""A process that appends until it is killed, and prints what was synced.

Each acknowledged append is one line, `offset payload`, written in one system call after the
append returned. Started by the tests that kill it; its arguments are the directory of the log,
a name for this run and what else to do: `buffered`, `reader`, `many`.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from forebay.settings import WalSettings
from forebay.wal.log import Wal

PRODUCERS = 4


def tell(offset: int, payload: bytes) -> None:
    os.write(sys.stdout.fileno(), b"%d %s\n" % (offset, payload))


def produce(wal: Wal, name: str, many: bool) -> None:
    rng = random.Random(name)
    for number in range(1_000_000):
        payload = f"{name}:{number}:".encode().ljust(rng.randint(20, 400), b".")
        if many and rng.random() < 0.2:
            batch = [payload + b"%d" % part for part in range(rng.randint(1, 8))]
            offsets = wal.append_many(batch, durability="synced")
            for offset, part in zip(offsets, batch, strict=True):
                tell(offset, part)
        else:
            tell(wal.append(payload, durability="synced"), payload)


def produce_buffered(wal: Wal, name: str) -> None:
    for number in range(1_000_000):
        offset = wal.append(f"{name}:{number}:".encode().ljust(100, b"b"))
        if number % 20 == 19:
            wal.wait(offset)  # or it would fill the disk


def follow(wal: Wal) -> None:
    expected = wal.start_offset
    for message in wal.tail_reader(expected):
        if message.offset != expected:
            os.write(sys.stdout.fileno(), b"reader: expected %d\n" % expected)
            os._exit(1)
        expected += 1


def main() -> None:
    directory, run, *what = sys.argv[1:]
    settings = WalSettings(
        dir=Path(directory),
        cache_capacity=16,
        queue_max_bytes=100_000,
        fsync_interval_ms=5,
        rotate_max_bytes=8192,
    )
    wal = Wal(settings)
    threads = [
        threading.Thread(target=produce, args=(wal, f"{run}-{number}", "many" in what))
        for number in range(PRODUCERS)
    ]
    if "buffered" in what:
        threads.append(threading.Thread(target=produce_buffered, args=(wal, f"{run}-buffered")))
    if "reader" in what:
        threads.append(threading.Thread(target=follow, args=(wal,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
