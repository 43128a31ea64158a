"""Logs on every kind of disk, a disk that can be watched, and ways to wait for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forebay.clock import SYSTEM_CLOCK, Clock
from forebay.errors import ForebayError
from forebay.files.disk import AppendFile, Disk, ReadFile, append_all, read_file
from forebay.files.local import LocalDisk
from forebay.format.frame import Scan, scan
from forebay.format.layout import Buffer
from forebay.format.message import decode_messages
from forebay.settings import WalSettings
from forebay.testing import CrashDisk, FaultDisk
from forebay.wal.log import Wal
from forebay.wal.pool import WriterPool
from forebay.wal.watermarks import Visibility

SHORT_WRITES_SEED = 20_261_115
NEVER_MS = 10**9
"""An fsync interval that no test lives to see."""
PATIENCE_SECONDS = 60.0
"""How long a test waits for what must happen before it fails: no expectation of speed."""

Result = TypeVar("Result")


@dataclass
class LogDirectory:
    """A disk with a directory for one log, and the logs that a test opened there."""

    disk: Disk
    path: Path
    crash: CrashDisk | None = None
    opened: list[Wal] = field(default_factory=list)

    def settings(self, **changes: Any) -> WalSettings:
        return WalSettings(**{"dir": self.path, "fsync_interval_ms": NEVER_MS, **changes})

    def open(
        self, *, clock: Clock = SYSTEM_CLOCK, pool: WriterPool | None = None, **changes: Any
    ) -> Wal:
        wal = Wal(self.settings(**changes), disk=self.disk, clock=clock, pool=pool)
        self.opened.append(wal)
        return wal

    def close(self) -> None:
        for wal in self.opened:
            with contextlib.suppress(ForebayError, OSError):
                wal.shutdown()

    def names(self) -> list[str]:
        return self.disk.list_dir(self.path)

    def read(self, name: str) -> bytes:
        return read_file(self.disk, self.path / name, bytes_max=1 << 30)

    def frames(self, name: str) -> Scan:
        return scan(self.read(name))

    def contents(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in self.names()}

    def write(self, name: str, data: bytes) -> None:
        """Makes the file hold `data`, synced, as if somebody had put it there."""
        self.disk.make_dirs(self.path)
        if self.disk.exists(self.path / name):
            self.disk.unlink(self.path / name)
        file = self.disk.create(self.path / name)
        append_all(file, data)
        file.sync()
        file.close()
        self.disk.sync_dir(self.path)

    def remove(self, name: str) -> None:
        self.disk.unlink(self.path / name)
        self.disk.sync_dir(self.path)


def on_local_disk(path: Path) -> LogDirectory:
    return LogDirectory(LocalDisk(), path / "log")


def in_memory(*, short_writes: bool = False) -> LogDirectory:
    crash = CrashDisk()
    if not short_writes:
        return LogDirectory(crash, Path("/data/log"), crash)
    faults = FaultDisk(crash, short_writes=random.Random(SHORT_WRITES_SEED))
    return LogDirectory(faults, Path("/data/log"), crash)


DIRECTORIES: dict[str, Callable[[Path], LogDirectory]] = {
    "local": on_local_disk,
    "crash": lambda _: in_memory(),
    "short writes": lambda _: in_memory(short_writes=True),
}


def payloads(wal: Wal, start: int | None = None, end: int | None = None) -> list[bytes]:
    """What a reader that never waits gets; the offsets are checked too."""
    first = wal.start_offset if start is None else start
    stop = wal.watermarks().synced if end is None else end
    with wal.tail_reader(first, end=stop) as reader:
        messages = list(reader)
    assert [message.offset for message in messages] == list(range(first, stop))
    return [message.payload for message in messages]


def payloads_of(frames: Scan) -> list[bytes]:
    return [message.payload for message in decode_messages(frames)]


def texts(first: int, end: int, size: int = 0) -> list[bytes]:
    """Payloads that name their offset."""
    return [f"message {number}".encode().ljust(size, b".") for number in range(first, end)]


def in_thread(call: Callable[[], Result]) -> Future[Result]:
    """Runs `call` on its own thread; ask the future with a timeout."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # handed to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Returns once the condition holds; fails the test if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.0005)


async def until(condition: Callable[[], bool]) -> None:
    """`wait_until` for asyncio: the event loop runs meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0)


# Nothing public says who waits for a log: callers have no use for it. Tests that act on somebody
# who already waits ask here, instead of sleeping until that is likely.


def waiting(wal: Wal, visibility: Visibility = "synced") -> int:
    """How many threads and tasks wait for the log's watermark to move."""
    return len(wal._committer._waiters[visibility])


def waiting_for_room(wal: Wal) -> int:
    """How many appends wait for room in the queue."""
    return len(wal._committer._room_waiters)


def idle_threads(pool: WriterPool) -> int:
    """How many threads of the pool have started and wait for work."""
    return pool.idle_count


def open_files(below: Path) -> list[str]:
    """Files and directories below a path that this process holds open."""
    held = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now
            held.append(str(each.readlink()))
    return sorted(each for each in held if Path(each).is_relative_to(below))


def errno_text(code: int) -> str:
    """How the text of an `OSError` with that errno begins, as a pattern."""
    return rf"\[Errno {code}\]"


class WatchedDisk:
    """Counts the bytes read, and calls `on_sync` before each sync of a file."""

    def __init__(self, inner: Disk) -> None:
        self.inner = inner
        self.bytes_read = 0
        self.on_sync: Callable[[Path], None] = lambda _: None
        self.on_read: Callable[[Path], None] = lambda _: None

    def make_dirs(self, path: Path) -> None:
        self.inner.make_dirs(path)

    def list_dir(self, path: Path) -> list[str]:
        return self.inner.list_dir(path)

    def exists(self, path: Path) -> bool:
        return self.inner.exists(path)

    def size(self, path: Path) -> int:
        return self.inner.size(path)

    def modified(self, path: Path) -> float:
        return self.inner.modified(path)

    def create(self, path: Path) -> AppendFile:
        return _WatchedAppendFile(self, self.inner.create(path), path)

    def open_append(self, path: Path) -> AppendFile:
        return _WatchedAppendFile(self, self.inner.open_append(path), path)

    def open_read(self, path: Path) -> ReadFile:
        return _WatchedReadFile(self, self.inner.open_read(path), path)

    def replace(self, source: Path, target: Path) -> None:
        self.inner.replace(source, target)

    def unlink(self, path: Path) -> None:
        self.inner.unlink(path)

    def remove_dir(self, path: Path) -> None:
        self.inner.remove_dir(path)

    def sync_dir(self, path: Path) -> None:
        self.inner.sync_dir(path)

    def open_locked(self, path: Path) -> AppendFile:
        return self.inner.open_locked(path)


class _WatchedAppendFile:
    def __init__(self, disk: WatchedDisk, inner: AppendFile, path: Path) -> None:
        self._disk, self._inner, self._path = disk, inner, path

    def append(self, data: Buffer) -> int:
        return self._inner.append(data)

    def append_parts(self, parts: Sequence[Buffer]) -> int:
        return self._inner.append_parts(parts)

    def write_at(self, data: Buffer, position: int) -> int:
        return self._inner.write_at(data, position)

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)

    def size(self) -> int:
        return self._inner.size()

    def sync(self) -> None:
        self._disk.on_sync(self._path)
        self._inner.sync()

    def in_place(self) -> bool:
        return self._inner.in_place()

    def close(self) -> None:
        self._inner.close()


class _WatchedReadFile:
    def __init__(self, disk: WatchedDisk, inner: ReadFile, path: Path) -> None:
        self._disk, self._inner, self._path = disk, inner, path

    def read_into(self, buffer: memoryview, position: int) -> int:
        self._disk.on_read(self._path)
        taken = self._inner.read_into(buffer, position)
        self._disk.bytes_read += taken
        return taken

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()


class Gate:
    """Where syncs of segments wait until it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()
        """A sync has begun to wait since the gate was shut."""

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self, path: Path) -> None:
        if path.name.endswith(".log") and not self._open.is_set():
            self.reached.set()
            assert self._open.wait(PATIENCE_SECONDS)


@dataclass
class GatedDirectory(LogDirectory):
    """A directory whose segments are synced only while the gate is open."""

    gate: Gate = field(default_factory=Gate)

    def close(self) -> None:
        self.gate.open()
        super().close()


def gated_directory() -> GatedDirectory:
    crash = CrashDisk()
    disk = WatchedDisk(crash)
    directory = GatedDirectory(disk, Path("/data/log"), crash)
    disk.on_sync = directory.gate.pass_through
    return directory
