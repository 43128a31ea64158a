"""Ctrl-C at random moments of every call: the log stays usable and loses nothing it returned.

`test_log_interrupts_at_every_opcode.py` interrupts each call at every bytecode. Here real signals
arrive, many in a row, while other threads use the same log and the same pool.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from forebay.errors import UsageError
from forebay.wal.log import Durability, Wal
from forebay.wal.pool import WriterPool
from support.disks import PATIENCE_SECONDS, LogDirectory, in_memory, in_thread, payloads

INTERRUPTS = 100
TESTS = Path(__file__).parents[1]


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

    def append_more_than_the_queue_holds(payload: bytes) -> None:
        batch = [payload + b" %d" % part for part in range(600)]
        returned.update(zip(wal.append_many(batch), batch, strict=True))

    often = [append, append, append_synced, append_synced, append_many, read, read, flush]
    return [*often, *often, append_more_than_the_queue_holds, lambda _: wal.rotate()]


# An interrupt that lands in a finaliser or a weak reference's callback is reported and lost there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_call_leaves_the_log_usable_and_in_order(
    directory: LogDirectory, seed: int
) -> None:
    interrupt_calls(directory, seed, INTERRUPTS)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(100, 120))
def test_thousands_of_interrupted_calls_leave_the_log_usable_and_in_order(seed: int) -> None:
    interrupt_calls(in_memory(), seed, 20 * INTERRUPTS)


def interrupt_calls(directory: LogDirectory, seed: int, interrupts_min: int) -> None:
    pool = WriterPool(2)
    wal = directory.open(
        pool=pool, rotate_max_bytes=50_000, queue_max_bytes=20_000, cache_capacity=20
    )
    beside = in_memory().open(pool=pool)
    returned: dict[int, bytes] = {}
    stop = threading.Event()

    def compete(log: Wal, durability: Durability) -> None:
        while not stop.is_set():
            log.append(b"from another thread", durability=durability)

    others = [
        in_thread(partial(compete, wal, "buffered")),
        in_thread(partial(compete, wal, "synced")),
        in_thread(partial(compete, wal, "synced")),
        in_thread(partial(compete, beside, "synced")),
    ]
    choices = calls(wal, returned)
    rng = random.Random(seed)
    with interrupts(seed) as interrupter:
        number = 0
        while interrupter.count < interrupts_min and number < 2000 * interrupts_min:
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
    for close in (wal.shutdown, beside.shutdown, pool.close):
        in_thread(close).result(PATIENCE_SECONDS)
    again = directory.open()
    found = payloads(again, 0)
    again.shutdown()
    assert found[last] == b"last"
    for offset, payload in returned.items():
        assert found[offset] == payload


def test_a_signal_handler_that_appends_in_the_middle_of_an_append_is_refused() -> None:
    """It would otherwise wait for itself, or change the queue under the other append."""
    wal = in_memory().open()
    wal.append(b"one", durability="synced")

    def handle(number: int, frame: FrameType | None) -> None:
        with pytest.raises(UsageError, match="signal handler"):
            wal.append(b"from the handler")
        with pytest.raises(UsageError, match="signal handler"):
            wal.watermarks()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with wal._committer.lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert wal.append(b"two", durability="synced") == 1
    wal.shutdown()


@pytest.mark.parametrize("producers", [0, 2])
def test_a_timer_that_interrupts_most_appends_leaves_both_logs_of_a_pool_usable(
    producers: int,
) -> None:
    assert interrupted_process(producers, 500, producers) == "ok\n"


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(30))
def test_a_timer_that_interrupts_appends_for_long_leaves_both_logs_of_a_pool_usable(
    seed: int,
) -> None:
    assert interrupted_process(seed, 10_000, seed % 4) == "ok\n"


def interrupted_process(*arguments: int) -> str:
    """What the process printed; an error of its own is a failure of the test."""
    command = [sys.executable, "-m", "support.interrupted_process", *map(str, arguments)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
