"""Ctrl-C at random moments of every call: the log stays usable and loses nothing it returned."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from forebay.wal.log import Wal
from support.disks import PATIENCE_SECONDS, LogDirectory, in_thread, payloads

INTERRUPTS = 100


class Interrupter:
    """Sends a signal to the main thread again and again, at random moments."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.armed = False
        self.done = threading.Event()

    def raise_it(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def run(self) -> None:
        target = threading.main_thread().ident
        assert target is not None
        while not self.done.wait(self.rng.random() * 0.002):
            signal.pthread_kill(target, signal.SIGUSR1)


@contextmanager
def interrupts(seed: int) -> Iterator[Interrupter]:
    interrupter = Interrupter(seed)
    before = signal.signal(signal.SIGUSR1, interrupter.raise_it)
    sender = in_thread(interrupter.run)
    try:
        yield interrupter
    finally:
        interrupter.armed = False
        interrupter.done.set()
        sender.result(PATIENCE_SECONDS)
        signal.signal(signal.SIGUSR1, before)


def calls(wal: Wal, returned: dict[int, bytes]) -> list[Callable[[bytes], None]]:
    reader = wal.tail_reader(0)

    def append(payload: bytes) -> None:
        returned[wal.append(payload)] = payload

    def append_synced(payload: bytes) -> None:
        returned[wal.append(payload, durability="synced")] = payload

    def append_many(payload: bytes) -> None:
        batch = [payload + bytes([part]) for part in range(5)]
        returned.update(zip(wal.append_many(batch), batch, strict=True))

    def read(payload: bytes) -> None:
        if reader.position < wal.current_offset():
            expected = reader.position
            assert next(reader).offset == expected

    def flush(payload: bytes) -> None:
        wal.flush()

    return [append, append, append, append_synced, append_many, read, read, flush]


# An interrupt that lands in a finaliser or a weak reference's callback is reported and lost there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_call_leaves_the_log_usable_and_in_order(
    directory: LogDirectory, seed: int
) -> None:
    wal = directory.open(rotate_max_bytes=50_000, queue_max_bytes=20_000, cache_capacity=20)
    returned: dict[int, bytes] = {}
    stop = threading.Event()

    def compete() -> None:
        while not stop.is_set():
            wal.append(b"from another thread")

    others = [in_thread(compete) for _ in range(2)]
    choices = calls(wal, returned)
    rng = random.Random(seed)
    with interrupts(seed) as interrupter:
        number = 0
        while interrupter.count < INTERRUPTS and number < 200_000:
            number += 1
            call, payload = rng.choice(choices), b"%d" % number
            try:
                interrupter.armed = True
                call(payload)
                interrupter.armed = False
            except KeyboardInterrupt:
                continue
    stop.set()
    for other in others:
        other.result(PATIENCE_SECONDS)
    last = in_thread(lambda: wal.append(b"last", durability="synced")).result(PATIENCE_SECONDS)
    in_thread(wal.shutdown).result(PATIENCE_SECONDS)
    found = payloads(directory.open(), 0)
    assert found[last] == b"last"
    for offset, payload in returned.items():
        assert found[offset] == payload
