"""An exception at every bytecode of every call of a log: no lock is lost, and nobody waits on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import LogClosed, TopicFenced
from forebay.format.message import StreamMessage
from forebay.settings import DeleterSettings
from forebay.testing import CrashDisk
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.retention import Deleter
from support.disks import LogDirectory, in_memory, in_thread, payloads, wait_until, waiting
from support.opcodes import interrupt_everywhere

SAMPLES = 30
"""Bytecodes of each call in the short run; the soak takes them all."""


class Case:
    """Two logs on one pool, and a reader that follows the first one before anything is synced."""

    def __init__(self, **changes: Any) -> None:
        self.pool = WriterPool(2)
        self.directory = in_memory()
        self.wal = self.directory.open(pool=self.pool, **{"fsync_interval_ms": 1, **changes})
        self.other = LogDirectory(CrashDisk(), Path("/other")).open(pool=self.pool)
        self.acknowledged: dict[int, bytes] = {}
        self.follower = self.wal.tail_reader(0, visibility="buffered")
        self.following = in_thread(self._follow)
        self.prepare()

    def _follow(self) -> None:
        with contextlib.suppress(LogClosed, TopicFenced):
            for _ in self.follower:
                pass

    def prepare(self) -> None:
        """What happens before the call."""

    def act(self) -> None:
        raise NotImplementedError

    def acknowledge(self, offset: int, payload: bytes) -> None:
        self.acknowledged[offset] = payload

    def acknowledge_all(self, offsets: range, batch: list[bytes]) -> None:
        self.acknowledged.update(zip(offsets, batch, strict=True))

    def check(self) -> None:
        self.check_waiters()
        self.acknowledge(self.wal.append(b"last", durability="synced"), b"last")
        self.check_rest()

    def check_waiters(self) -> None:
        """What was appended is read and synced, without another call."""
        end = self.wal.current_offset()
        wait_until(lambda: self.follower.position >= end)
        wait_until(lambda: self.wal.watermarks().synced >= end)

    def check_rest(self) -> None:
        self.other.append(b"other", durability="synced")
        self.wal.shutdown()
        self.other.shutdown()
        self.following.result()
        self.pool.close()
        assert self.pool._workers._alive == 0
        with contextlib.closing(_Closed(self.directory.open())) as again:
            found = dict(enumerate(payloads(again.wal), again.wal.start_offset))
        assert len(set(found.values())) == len(found), "a message was stored twice"
        for offset, payload in self.acknowledged.items():
            assert offset < again.wal.start_offset or found[offset] == payload


class _Closed:
    def __init__(self, wal: Wal) -> None:
        self.wal = wal

    def close(self) -> None:
        self.wal.shutdown()


class Append(Case):
    def act(self) -> None:
        self.acknowledge(self.wal.append(b"one"), b"one")


class AppendSynced(Case):
    def act(self) -> None:
        self.acknowledge(self.wal.append(b"one", durability="synced"), b"one")


class AppendToAFullQueue(Case):
    def __init__(self) -> None:
        super().__init__(queue_max_bytes=1, fsync_max_batch_bytes=1)

    def act(self) -> None:
        for payload in (b"one", b"two", b"three"):
            self.acknowledge(self.wal.append(payload), payload)


class AppendMessage(Case):
    def act(self) -> None:
        message = StreamMessage(b"one")
        self.acknowledge(self.wal.append_message(message, durability="synced"), b"one")


class AppendMany(Case):
    def act(self) -> None:
        batch = [b"one", b"two", b"three"]
        self.acknowledge_all(self.wal.append_many(batch, durability="synced"), batch)


class AppendMoreThanTheQueueHolds(Case):
    """Another producer waits meanwhile, until the batch is done or was given up."""

    def __init__(self) -> None:
        super().__init__(queue_max_bytes=200, rotate_max_bytes=500)

    def prepare(self) -> None:
        self.producer = in_thread(self._produce)

    def _produce(self) -> None:
        for number in range(3):
            payload = b"beside %d" % number
            self.acknowledge(self.wal.append(payload, durability="synced"), payload)

    def act(self) -> None:
        batch = [b"%d" % number for number in range(12)]
        self.acknowledge_all(self.wal.append_many(batch), batch)

    def check(self) -> None:
        self.producer.result()
        super().check()


class OnALoop(Case):
    def prepare(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def check(self) -> None:
        self.loop.run_until_complete(self._end_tasks())
        self.loop.close()
        super().check()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AppendAsync(OnALoop):
    def act(self) -> None:
        offset = self.run(self.wal.append_async(b"one", durability="synced"))
        self.acknowledge(offset, b"one")


class AppendAsyncToAFullQueue(OnALoop):
    def __init__(self) -> None:
        super().__init__(queue_max_bytes=1, fsync_max_batch_bytes=1)

    def act(self) -> None:
        for payload in (b"one", b"two"):
            self.acknowledge(self.run(self.wal.append_async(payload)), payload)


class AppendManyAsync(OnALoop):
    def act(self) -> None:
        batch = [b"one", b"two", b"three"]
        offsets = self.run(self.wal.append_many_async(batch, durability="synced"))
        self.acknowledge_all(offsets, batch)


class Wait(Case):
    def __init__(self) -> None:
        super().__init__(fsync_interval_ms=10**9)

    def prepare(self) -> None:
        self.acknowledge(self.wal.append(b"one"), b"one")

    def act(self) -> None:
        self.wal.wait(0)
        self.wal.flush(timeout=10)

    def check_waiters(self) -> None:
        self.wal.flush()
        super().check_waiters()


class Filled(Case):
    """A log with several sealed segments."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"rotate_max_bytes": 200, "cache_capacity": 1, **changes})

    def prepare(self) -> None:
        for number in range(8):
            payload = b"message %d" % number
            self.acknowledge(self.wal.append(payload, durability="synced"), payload)


class Rotate(Filled):
    def act(self) -> None:
        self.wal.rotate()


class Trim(Filled):
    def prepare(self) -> None:
        super().prepare()
        wait_until(lambda: self.follower.position >= 8)  # what it has not read, it would miss

    def act(self) -> None:
        deleter = Deleter(DeleterSettings(retention_time_minutes=0, deletion_lag_minutes=0))
        self.wal.retain(deleter, 6)


class Read(Filled):
    """From segments, then from memory: a message is returned or still due, and none is skipped."""

    def __init__(self) -> None:
        super().__init__(cache_capacity=3)

    def prepare(self) -> None:
        super().prepare()
        self.got: list[int] = []

    def act(self) -> None:
        self.reader = self.wal.tail_reader(0, end=8)
        for message in self.reader:
            self.got.append(message.offset)

    def check(self) -> None:
        assert self.got == list(range(len(self.got)))
        reader = getattr(self, "reader", None)
        if reader is not None:
            assert reader.position in {len(self.got), len(self.got) + 1}
            rest = [message.offset for message in reader]
            assert rest == list(range(8))[8 - len(rest) :]
            reader.close()
        super().check()


class ReadAtTheEnd(Case):
    """It waits for a message that another thread appends."""

    def prepare(self) -> None:
        self.over = threading.Event()
        self.reader = self.wal.tail_reader(0)
        self.appending = in_thread(self._append)

    def _append(self) -> None:
        wait_until(lambda: self.over.is_set() or waiting(self.wal) > 0)
        self.acknowledge(self.wal.append(b"one"), b"one")

    def act(self) -> None:
        assert next(self.reader).payload == b"one"

    def check(self) -> None:
        self.over.set()
        self.appending.result()
        super().check()
        assert waiting(self.wal) == 0


class CloseAReaderThatWaits(Case):
    def prepare(self) -> None:
        self.reader = self.wal.tail_reader(0)
        self.reading = in_thread(lambda: list(self.reader))
        wait_until(lambda: waiting(self.wal) == 1)

    def act(self) -> None:
        self.reader.close()

    def check(self) -> None:
        self.reader.close()
        assert self.reading.result() == []
        super().check()


class Observe(Case):
    def prepare(self) -> None:
        self.acknowledge(self.wal.append(b"one"), b"one")

    def act(self) -> None:
        self.wal.watermarks()
        self.wal.in_memory()
        self.wal.cached_batches()
        self.wal.read_cached_since(-1)


class Close(Case):
    """A reader and a producer wait meanwhile."""

    def prepare(self) -> None:
        self.acknowledge(self.wal.append(b"one"), b"one")

    def act(self) -> None:
        self.wal.shutdown()

    def check(self) -> None:
        self.check_rest()


class CloseWithItsOwnPool(Close):
    def prepare(self) -> None:
        super().prepare()
        self.own = LogDirectory(CrashDisk(), Path("/own"))
        self.lone = self.own.open()
        self.lone.append(b"one")

    def act(self) -> None:
        self.lone.shutdown()

    def check(self) -> None:
        self.lone.shutdown()
        again = self.own.open()
        assert payloads(again) == [b"one"]
        again.shutdown()
        Case.check(self)


class Fence(Case):
    def act(self) -> None:
        self.wal.fence(TopicFenced("another process owns it"))

    def check(self) -> None:
        self.wal.fence(TopicFenced("another process owns it"))
        with pytest.raises(TopicFenced):
            self.wal.append(b"refused")
        self.check_rest()


class UseThePool(Case):
    """Jobs and timers; a job that was accepted runs."""

    def prepare(self) -> None:
        self.mine = WriterPool(1)
        self.accepted: list[int] = []
        self.ran: list[int] = []

    def act(self) -> None:
        self.mine.submit(lambda: self.ran.append(1))
        self.accepted.append(1)
        self.mine.call_at(0.0, lambda: self.ran.append(2))
        self.accepted.append(2)
        wait_until(lambda: len(self.ran) == 2)
        self.mine.close()

    def check(self) -> None:
        wait_until(lambda: set(self.accepted) <= set(self.ran))
        self.mine.close()
        assert self.mine._workers._alive == 0
        super().check()


CASES: list[Callable[[], Case]] = [
    Append,
    AppendSynced,
    AppendToAFullQueue,
    AppendMessage,
    AppendMany,
    AppendMoreThanTheQueueHolds,
    AppendAsync,
    AppendAsyncToAFullQueue,
    AppendManyAsync,
    Wait,
    Rotate,
    Trim,
    Read,
    ReadAtTheEnd,
    CloseAReaderThatWaits,
    Observe,
    Close,
    CloseWithItsOwnPool,
    Fence,
    UseThePool,
]


# An interrupt that lands in a finaliser or a weak reference's callback is reported and lost there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_a_bytecode_of_a_call_leaves_nobody_waiting(
    case: Callable[[], Case],
) -> None:
    interrupt_everywhere(case, case.__name__, SAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_bytecode_of_a_call_leaves_nobody_waiting(
    case: Callable[[], Case],
) -> None:
    print(case.__name__, interrupt_everywhere(case, case.__name__, None))
