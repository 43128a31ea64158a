"""An exception at every bytecode of a topic's and a store's calls: everything works afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.errors import UsageError
from forebay.objects.memory import MemoryBackend
from forebay.objects.store import CloudStore
from forebay.settings import DeleterSettings, StoreSettings, UploaderSettings, WalSettings
from forebay.testing import CrashDisk
from forebay.topic.store import Store, Topic
from support.disks import wait_until
from support.opcodes import interrupt_everywhere

SAMPLES = 12
"""Bytecodes of each call in the short run; the soak takes them all."""
SETTINGS = StoreSettings(
    data=Path("/data"),
    wal=WalSettings(rotate_max_bytes=600, cache_capacity=2, fsync_interval_ms=1),
    uploader=UploaderSettings(enabled=False),
    deleter=DeleterSettings(retention_size_mb=0, deletion_lag_minutes=0),
)


class Case:
    """A store with three topics; it is opened again after the call."""

    def __init__(self) -> None:
        self.threads = threads()
        self.disk = CrashDisk()
        self.kv = SqliteKv(None)
        self.backend = MemoryBackend()
        self.acknowledged: dict[int, bytes] = {}
        self.store = self.open()
        self.topic, *self.others = (self.store.topic(name) for name in ("a", "b", "c"))
        for other in self.others:
            other.append(b"other")
        self.prepare()

    def open(self) -> Store:
        catalog, objects = Catalog(self.kv), CloudStore(self.backend)
        return Store(SETTINGS, disk=self.disk, catalog=catalog, store=objects)

    def prepare(self) -> None:
        """What happens before the call."""

    def fill(self, count: int) -> None:
        for number in range(count):
            payload = b"message %d" % number
            self.acknowledged[self.topic.append(payload, durability="synced")] = payload

    def act(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        for each in (self.topic, *self.others):
            each.append(b"last", durability="synced")
        self.topic.append(b"uploaded", durability="uploaded")
        self.check_rest()

    def check_rest(self) -> None:
        self.store.close()
        wait_until(lambda: threads() <= self.threads)
        with self.open() as again:
            found = read(again.topic("a"))
            assert [read(again.topic(name))[0] for name in ("b", "c")] == [b"other"] * 2
        assert len(set(found.values())) == len(found), "a message was stored twice"
        for offset, payload in self.acknowledged.items():
            assert found[offset] == payload


def read(topic: Topic) -> dict[int, bytes]:
    with topic.read() as reader:
        found = {message.offset: message.payload for message in reader}
    assert list(found) == list(range(topic.start_offset, topic.watermarks().appended))
    return found


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("forebay-")}


class OpenTopics(Case):
    def act(self) -> None:
        self.store.topics()
        self.store.topic("d").append(b"new")

    def check(self) -> None:
        self.store.topic("d").append(b"later", durability="synced")
        assert list(read(self.store.topic("d")).values())[-1] == b"later"
        super().check()


class AppendUploaded(Case):
    def act(self) -> None:
        self.acknowledged[self.topic.append(b"one", durability="uploaded")] = b"one"


class AppendManyUploaded(Case):
    def act(self) -> None:
        batch = [b"one", b"two"]
        offsets = self.topic.append_many(batch, durability="uploaded")
        self.acknowledged.update(zip(offsets, batch, strict=True))


class UploadAndTrim(Case):
    def prepare(self) -> None:
        self.fill(12)

    def act(self) -> None:
        self.topic.rotate()
        self.topic.upload()
        self.topic.trim_local()


class ReadBothTiers(Case):
    """Objects first, then segments and memory."""

    def prepare(self) -> None:
        self.fill(20)
        self.topic.rotate()
        self.topic.upload()
        self.topic.trim_local()
        self.got: list[int] = []

    def act(self) -> None:
        with self.topic.read() as reader:
            for message in reader:
                self.got.append(message.offset)

    def check(self) -> None:
        assert self.got == list(range(len(self.got)))
        assert list(read(self.topic)) == list(range(20))
        super().check()


class Close(Case):
    def prepare(self) -> None:
        self.fill(3)

    def act(self) -> None:
        self.store.close()

    def check(self) -> None:
        self.check_rest()


CASES: list[Callable[[], Case]] = [
    OpenTopics,
    AppendUploaded,
    AppendManyUploaded,
    UploadAndTrim,
    ReadBothTiers,
    Close,
]


# An interrupt that lands in a finaliser or a weak reference's callback is reported and lost there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_a_bytecode_of_a_call_leaves_the_store_usable(
    case: Callable[[], Case],
) -> None:
    interrupt_everywhere(case, case.__name__, SAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_bytecode_of_a_call_leaves_the_store_usable(
    case: Callable[[], Case],
) -> None:
    print(case.__name__, interrupt_everywhere(case, case.__name__, None))


@pytest.mark.timeout(60)
def test_a_signal_handler_that_closes_the_store_in_the_middle_of_an_append_is_refused() -> None:
    """The closing thread would wait for the lock of the append, and the append for that thread."""
    store = Case().store
    topic = store.topic("orders")

    def handle(number: int, frame: FrameType | None) -> None:
        for call in (store.close, topic.trim_local, topic.upload):
            with pytest.raises(UsageError, match="signal handler"):
                call()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with topic._wal._committer.lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    topic.append(b"later", durability="synced")
    store.close()
