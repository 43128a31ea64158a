"""A process whose main thread appends while a timer interrupts it, many thousand times a minute.

    python -m support.interrupted_process SEED INTERRUPTS PRODUCERS

The timer's signals come from the kernel, so that they arrive at any moment of a call of a few
microseconds. Prints "ok" if everything works at the end; ends with a traceback of all threads if
something hangs.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from forebay.settings import WalSettings
from forebay.testing import CrashDisk
from forebay.wal.log import Durability, Wal
from forebay.wal.pool import WriterPool

HANG_SECONDS = 30.0
DELAY_SECONDS_MAX = 200e-6


class Interrupts:
    """Raises KeyboardInterrupt once for each time it is armed, if the call lasts long enough."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.armed = False
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def append(self, wal: Wal, durability: Durability) -> None:
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + self.rng.random() * DELAY_SECONDS_MAX)
            wal.append(b"interrupted", durability=durability)
            self.armed = False
        except KeyboardInterrupt:
            return


def main(seed: int, interrupts: int, producers: int) -> None:
    pool = WriterPool(2)
    logs = [
        Wal(WalSettings(dir=Path(name), fsync_interval_ms=1), disk=CrashDisk(), pool=pool)
        for name in ("/data/first", "/data/second")
    ]
    stop = False
    errors: list[Exception] = []

    def compete() -> None:
        try:
            while not stop:
                logs[0].append(b"from another thread", durability="synced")
        except Exception as error:  # noqa: BLE001  # printed at the end
            errors.append(error)

    threads = [threading.Thread(target=compete, daemon=True) for _ in range(producers)]
    for thread in threads:
        thread.start()
    interrupter = Interrupts(seed)
    while interrupter.count < interrupts:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        interrupter.append(logs[0], "synced")
        interrupter.append(logs[0], "buffered")
    signal.setitimer(signal.ITIMER_REAL, 0)
    stop = True
    for thread in threads:
        thread.join()
    for log in logs:
        log.append(b"last", durability="synced")
        log.shutdown()
    pool.close()
    print(errors or "ok")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
