"""The processes of a walk (`walk.py`): real ones, which are stopped and killed.

`Nursery` starts one interpreter that imports everything and opens nothing. Each `Worker` is a fork
of it, which takes a few milliseconds. A worker carries out one command after the other: pairs of a
name and its arguments come over a socket, and what happened goes back:

    ("ack", topic, offset, number, started)    the message is stored, as far as the caller asked
    ("done", value)
    ("error", kind, text)                      a ForebayError; anything else is a bug of the product

A worker ends when its socket does. `Faults` sits in front of its disk, its object store and its
catalog: calls can fail, take their time, or be the last thing that the process does.

Beware: numbers stand for messages here. `payload(n)` makes the bytes, and no number is used twice.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

from forebay.catalog.connect import connect_kv
from forebay.catalog.kv import Compare, Kv, Put, Remove
from forebay.errors import ForebayError, LostOffsets, ServiceUnavailable
from forebay.files.local import LocalDisk
from forebay.format.message import MessageId, StreamMessage
from forebay.format.names import parse_topic
from forebay.objects.store import CloudStore, connect
from forebay.settings import StoreSettings
from forebay.testing.faults import FaultDisk
from forebay.testing.kv import FaultKv
from forebay.testing.objects import FaultBackend, ObjectOperation
from forebay.topic import resources as resources_module
from forebay.topic.accept import accept_loss
from forebay.topic.resources import close_executor_resources, open_existing
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from support.paths import TESTS
from support.storages import storage_of

FILLER_MAX: Final = 300
BURST_MAX: Final = 2000
"""Messages that a burst appends at most; it is killed or stopped long before."""
PATIENCE: Final = 120.0
"""Seconds without a word after which a process counts as hung, however busy the machine is."""


def payload(number: int) -> bytes:
    return b"%d;" % number + b"." * (number * 7919 % FILLER_MAX)


def number_of(data: bytes) -> int:
    """The number of a message; -1 if nobody wrote it."""
    head = bytes(data).partition(b";")[0]
    if head.isdigit() and payload(int(head)) == bytes(data):
        return int(head)
    return -1


# ---- the side of the walk -----------------------------------------------------------------------


class ProcessDied(Exception):
    """The process ended before it had answered."""


class Hung(AssertionError):
    """The process says nothing any more."""


class Channel:
    """Pickled values over a socket, each with its length before it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, value: Any) -> None:
        data = pickle.dumps(value)
        self.connection.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> Any:
        (size,) = struct.unpack("<I", self._exactly(4))
        return pickle.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.connection.recv(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Worker:
    """One process, seen from the walk."""

    def __init__(self, nursery: Nursery, settings: StoreSettings, *, plain: bool) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        with theirs:
            self.pid = nursery.fork(theirs)
        self._process = os.pidfd_open(self.pid)
        self._channel = Channel(ours)
        self.settings = settings
        self.acks: list[tuple[str, int, int, float]] = []
        """What it has acknowledged, and nobody has taken yet: topic, offset, number, start."""
        self.ended = False
        self.resting: dict[str, int] | None = None
        """What the process held when its store was first closed."""
        self._channel.send((settings, plain))

    def ask(self, command: str, *arguments: Any) -> Any:
        """Returns what the command returns. Raises ForebayError, ProcessDied or Hung."""
        self.begin(command, *arguments)
        return self.finish()

    def begin(self, command: str, *arguments: Any) -> None:
        try:
            self._channel.send((command, arguments))
        except OSError as error:
            self._bury()
            raise ProcessDied(command) from error

    def finish(self, acks_max: int | None = None) -> Any:
        """Waits for the end of the command, or for so many acknowledgements."""
        before = len(self.acks)
        while acks_max is None or len(self.acks) < before + acks_max:
            try:
                said = self._channel.receive()
            except TimeoutError:
                self._dump()
                raise Hung(f"process {self.pid} says nothing for {PATIENCE:g} s") from None
            except (EOFError, ConnectionResetError):
                self._bury()
                raise ProcessDied(f"process {self.pid}") from None
            if said[0] == "ack":
                self.acks.append(said[1:])
            elif said[0] == "done":
                return said[1]
            elif said[0] == "error":
                raise said[1]
            else:
                raise AssertionError(f"a bug, in process {self.pid}:\n{said[1]}")
        return None

    def drain(self) -> None:
        """Reads what it had said before it died."""
        with suppress(ProcessDied, ForebayError):
            self.finish()

    def taken_acks(self) -> list[tuple[str, int, int, float]]:
        taken, self.acks = self.acks, []
        return taken

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def stop(self) -> None:
        """SIGSTOP; when this returns, all of its threads stand still."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while not self.stopped:
            if time.monotonic() > deadline:
                raise Hung(f"process {self.pid} does not stop")
            time.sleep(0.001)

    @property
    def stopped(self) -> bool:
        return _state(self.pid) == "T"

    def kill(self) -> None:
        if not self.ended:
            self.signal(signal.SIGKILL)
            self.drain()

    def close(self) -> None:
        self.kill()
        self._bury()

    def _bury(self) -> None:
        if not self.ended:
            self.ended = True
            self.signal(signal.SIGKILL)
            os.close(self._process)
            self._channel.connection.close()

    def _dump(self) -> None:
        """Has it write where its threads are, to the log of the nursery."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        time.sleep(0.5)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        raise ProcessDied(f"process {pid}") from None


class Nursery:
    """Forks workers from a process that has imported everything. Close it when all have ended."""

    def __init__(self, log: Path, *, spark: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        ours.settimeout(PATIENCE)
        with theirs, log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.walk_nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                cwd=TESTS,
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
            )
        assert self._control.recv(1) == b"."

    def fork(self, connection: socket.socket) -> int:
        socket.send_fds(self._control, [b"f"], [connection.fileno()])
        return int(struct.unpack("<I", self._control.recv(4))[0])

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE)


# ---- the side of the process --------------------------------------------------------------------


class Faults:
    """What befalls the calls of this process. Thread-safe enough: it is set between commands."""

    def __init__(self) -> None:
        self.death: int | None = None
        """Calls until the process kills itself; the last one is not made."""
        self.away: str | None = None
        """`store` or `catalog`: their calls fail."""
        self.lost = False
        """Whether calls are carried out before they fail."""
        self.pause = 0.0

    def before(self, where: str) -> None:
        self._count()
        if self.pause:
            time.sleep(self.pause)
        if self.away == where and not self.lost:
            raise ServiceUnavailable(f"{where}: no connection (a fault of the walk)")

    def after(self, where: str) -> None:
        self._count()
        if self.away == where and self.lost:
            raise ServiceUnavailable(f"{where}: no response in time (a fault of the walk)")

    def _count(self) -> None:
        if self.death is None or threading.current_thread().name.startswith("forebay-lease"):
            return
        self.death -= 1
        if self.death <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


class WalkKv(FaultKv):
    def __init__(self, inner: Kv, faults: Faults) -> None:
        super().__init__(inner, self._before)
        self._walk = faults

    def _before(self, operation: str) -> None:
        if operation != "keep_alive":
            self._walk.before("catalog")

    def commit(self, compares: Sequence[Compare], writes: Sequence[Put | Remove]) -> int | None:
        done = super().commit(compares, writes)
        self._walk.after("catalog")
        return done


class WalkDisk(FaultDisk, LocalDisk):  # type: ignore[misc]  # its files are those of FaultDisk
    """Fails as planned, and is a local disk to those who ask: its locks mean what they say."""


class WalkStore(CloudStore):
    """Files stay files: those who read them themselves still do."""

    def __init__(self, plain: CloudStore, faults: Faults) -> None:
        backend = FaultBackend(plain)
        backend.hook("any", lambda _key: faults.before("store"))
        changes: tuple[ObjectOperation, ...] = ("put", "complete", "copy", "delete")
        for operation in changes:
            backend.hook(operation, lambda _key: faults.after("store"), when="after")
        super().__init__(backend)
        self._plain = plain

    def local_path(self, key: str) -> Path | None:
        return self._plain.local_path(key)


def install(faults: Faults) -> None:
    """Everything that this process opens from now on has these faults."""

    def faulty_store(*given: Any) -> CloudStore:
        return WalkStore(connect(*given), faults)

    def faulty_kv(*given: Any) -> Kv:
        return WalkKv(connect_kv(*given), faults)

    vars(resources_module).update(connect=faulty_store, connect_kv=faulty_kv)


class Process:
    """Carries out commands: each is a method whose name begins with `do_`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.settings, plain = channel.receive()
        self.faults = Faults()
        if not plain:
            install(self.faults)
        self.disk = WalkDisk(LocalDisk())
        self.store: Store | None = None
        self.url: str | None = None
        self._serving = ExitStack()

    def run(self) -> None:
        while True:
            try:
                command, arguments = self.channel.receive()
            except EOFError:
                os._exit(0)
            try:
                self.channel.send(("done", getattr(self, f"do_{command}")(*arguments)))
            except ForebayError as error:
                self.channel.send(("error", error))
            except BaseException:  # noqa: BLE001  # told to the walk, which fails
                self.channel.send(("bug", traceback.format_exc()))

    def ack(self, topic: str, offset: int, number: int, started: float) -> None:
        self.channel.send(("ack", topic, offset, number, started))

    # -- the owner ------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        if self.store is None:
            self.store = Store(self.settings, disk=self.disk)
        return self.store.topic(name)

    def do_open(self, name: str) -> tuple[int, int]:
        """Returns the first offset and the next one."""
        topic = self.topic(name)
        return topic.start_offset, topic.watermarks().appended

    def do_faults(self, values: dict[str, Any], space: int | None) -> None:
        for name, value in values.items():
            setattr(self.faults, name, value)
        self.disk.space = space

    def do_append(self, name: str, way: str, numbers: list[int]) -> None:
        getattr(self, f"append_{way}")(self.topic(name), name, numbers)

    def append_synced(self, topic: Topic, name: str, numbers: list[int]) -> None:
        for number in numbers:
            started = time.monotonic()
            self.ack(name, topic.append(payload(number), durability="synced"), number, started)

    def append_many(self, topic: Topic, name: str, numbers: list[int]) -> None:
        started = time.monotonic()
        offsets = topic.append_many([payload(each) for each in numbers], durability="synced")
        self._acks(name, offsets, numbers, started)

    def append_buffered(self, topic: Topic, _name: str, numbers: list[int]) -> None:
        for number in numbers:
            topic.append(payload(number))

    def append_flushed(self, topic: Topic, name: str, numbers: list[int]) -> None:
        started = time.monotonic()
        offsets = [topic.append(payload(each), {"n": str(each)}, "key") for each in numbers]
        topic.flush()
        self._acks(name, offsets, numbers, started)

    def append_waited(self, topic: Topic, name: str, numbers: list[int]) -> None:
        started = time.monotonic()
        offsets = topic.append_many([payload(each) for each in numbers])
        topic.wait(offsets[-1])
        self._acks(name, offsets, numbers, started)

    def append_uploaded(self, topic: Topic, name: str, numbers: list[int]) -> None:
        started = time.monotonic()
        offsets = topic.append_many([payload(each) for each in numbers], durability="uploaded")
        self._acks(name, offsets, numbers, started)

    def append_async(self, topic: Topic, name: str, numbers: list[int]) -> None:
        async def one(number: int) -> None:
            started = time.monotonic()
            offset = await topic.append_async(payload(number), durability="synced")
            self.ack(name, offset, number, started)

        async def all_at_once() -> None:
            await asyncio.gather(*map(one, numbers))

        asyncio.run(all_at_once())

    def append_many_async(self, topic: Topic, name: str, numbers: list[int]) -> None:
        started = time.monotonic()
        data = [payload(each) for each in numbers]
        offsets = asyncio.run(topic.append_many_async(data, durability="synced"))
        self._acks(name, offsets, numbers, started)

    def append_message(self, topic: Topic, name: str, numbers: list[int]) -> None:
        """The interface of a dispatcher."""
        storage = storage_of(topic)
        started = time.monotonic()
        offsets = [storage.append_message(message(name, each)) for each in numbers]
        storage.flush()
        self._acks(name, offsets, numbers, started)

    def append_threads(self, topic: Topic, name: str, numbers: list[int]) -> None:
        failures: list[BaseException] = []
        found: list[tuple[int, int, float]] = []

        def produce(mine: list[int]) -> None:
            try:
                for number in mine:
                    started = time.monotonic()
                    offset = topic.append(payload(number), durability="synced")
                    found.append((offset, number, started))
            except ForebayError as error:
                failures.append(error)

        threads = [threading.Thread(target=produce, args=(numbers[at::3],)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for offset, number, started in found:
            self.ack(name, offset, number, started)
        if failures:
            raise failures[0]

    def append_http(self, topic: Topic, name: str, numbers: list[int]) -> None:
        """Through the server, which this process becomes."""
        if self.url is None:
            from forebay.admin.context import ServerContext
            from support.served import serving

            assert self.store is not None
            client = self._serving.enter_context(serving(ServerContext(self.store)))
            self.url = client.address.url
        lines = [json.dumps({"payload": payload(each).decode()}).encode() for each in numbers]
        started = time.monotonic()
        request = urllib.request.Request(
            f"{self.url}/v1/topics{name}/messages",
            data=b"\n".join(lines),
            headers={"Content-Type": "application/x-ndjson"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                said = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise ServiceUnavailable(f"HTTP {error.code}: {error.read()[:300]!r}") from None
        self._acks(name, range(said["first_offset"], said["next_offset"]), numbers, started)

    def _acks(self, name: str, offsets: Sequence[int], numbers: list[int], started: float) -> None:
        for offset, number in zip(offsets, numbers, strict=True):
            self.ack(name, offset, number, started)

    def do_burst(self, name: str, first: int) -> None:
        """Appends until it is killed or refused."""
        self.append_synced(self.topic(name), name, list(range(first, first + BURST_MAX)))

    def do_upload(self, name: str) -> int:
        topic = self.topic(name)
        topic.upload()
        return topic.watermarks().uploaded

    def do_upload_due(self, name: str) -> None:
        storage_of(self.topic(name)).upload_due()

    def do_trim(self, name: str) -> int:
        topic = self.topic(name)
        topic.rotate()
        return len(topic.trim_local())

    def do_retain(self, name: str) -> int:
        topic = self.topic(name)
        storage_of(topic).trim_remote()
        return topic.start_offset

    def do_read(self, name: str, way: str, known: list[int]) -> Reading:
        topic = self.topic(name)
        start, end = topic.start_offset, topic.watermarks().synced
        if way == "stream":
            return read_all(start, end, known, lambda at: _streamed(topic, at, end))
        return read_all(start, end, known, lambda at: topic.read(at, end=end))

    def do_close(self) -> dict[str, int]:
        """Closes the store, if it is open, and returns what the process still holds."""
        self._serving.close()
        self.url = None
        if self.store is not None:
            try:
                self.store.close()
            finally:
                self.store = None
        return self.do_holds()

    def do_holds(self) -> dict[str, int]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "kilobytes": int(rss.split()[1]),
        }

    # -- another process ------------------------------------------------------------------------

    def do_view(self, name: str, known: list[int]) -> Reading:
        """Reads as a process that does not own the topic."""
        with StoreView(self.settings) as store, store.topic(name) as view:
            start, end = view.start_offset, view.end_offset
            return read_all(start, end, known, lambda at: view.reader(at, end))

    def do_scan(self, name: str, _known: list[int]) -> Reading:
        """Reads as the tasks of Spark do."""
        from support.walk_export import scanned

        with StoreView(self.settings) as store, store.topic(name) as view:
            reading = Reading(view.start_offset, view.end_offset)
            parts = [(reading.start, reading.end)]
            while parts:
                start, end = parts.pop()
                try:
                    for batch in scanned(self.settings, view, start, end):
                        numbers = [number_of(each) for each in batch["value"].to_pylist()]
                        reading.found += zip(batch["offset"].to_pylist(), numbers, strict=True)
                except LostOffsets as hole:  # before anything was read
                    reading.holes.append((hole.start, hole.end))
                    parts += [(start, hole.start)] if start < hole.start else []
                    parts += [(hole.end, end)] if hole.end < end else []
        reading.found.sort()  # splits have no order
        close_executor_resources()
        return reading

    def do_job(self, job: str, *arguments: Any) -> Any:
        try:
            return getattr(self, f"job_{job}")(*arguments)
        finally:
            close_executor_resources()  # the walk replaces the files of the catalog

    def job_offload(self, *names: str) -> str:
        from forebay.pipeline.jobs.offload import offload

        return str(offload(self.settings, list(names) or None, runner="threads").rows)

    def job_compact(self, target_bytes: int) -> str:
        from forebay.pipeline.execute import ThreadExecutor
        from forebay.pipeline.jobs.compact import compact

        executor = ThreadExecutor(2)
        return str(compact(self.settings, target_bytes=target_bytes, executor=executor).rows)

    def job_undo(self, name: str) -> str:
        from forebay.pipeline.jobs.compact import undo_compaction

        return str(undo_compaction(self.settings, name).rows)

    def job_verify(self) -> list[str]:
        from forebay.pipeline.jobs.verify import verify

        report = verify(self.settings, runner="threads")
        return [str(row) for row in report.findings]

    def job_sweep(self, *names: str) -> list[str]:
        from forebay.upload.sweep import sweep

        topics = [parse_topic(name) for name in names] or None
        with closing(open_existing(self.settings)) as found:
            report = sweep(found.catalog, found.store, topics, grace_minutes=0, dry_run=False)
        return [str(item) for item in report.items]

    def job_restore(self, name: str, choices: dict[str, Any]) -> str:
        from support.restores import restore

        return str(restore(self.settings, name, **choices))

    def job_repair(self, name: str, accept: bool) -> tuple[str, list[str]]:
        from forebay.repair.repair import repair

        with closing(open_existing(self.settings)):
            pass
        report = repair(self.settings, [name], apply=True, accept_loss=accept)
        return str(report.findings), [left.remedy for left in report.left]

    def job_accept(self, name: str) -> str:
        with closing(open_existing(self.settings)) as found:
            return str(accept_loss(found.catalog, parse_topic(name)))

    def job_export(self, name: str, table: Path) -> int | None:
        from support.walk_export import export

        return export(self.settings, name, table)

    def job_record(self, name: str) -> Any:
        with closing(open_existing(self.settings)) as found:
            return found.catalog.record(parse_topic(name))


class Reading:
    """What a reader found: messages, holes that it was told of, and places where it failed."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.found: list[tuple[int, int]] = []
        """Offset and number."""
        self.holes: list[tuple[int, int]] = []
        self.errors: dict[int, str] = {}


def read_all(start: int, end: int, known: list[int], reader: Callable[[int], Any]) -> Reading:
    """Reads from `start` to `end`, and goes on after every error, at the next of the `known`."""
    reading = Reading(start, end)
    at = start
    while at < end:
        try:
            with closing(reader(at)) as messages:
                for message in messages:
                    reading.found.append((message.offset, number_of(message.payload)))
                    at = message.offset + 1
            break
        except LostOffsets as hole:
            reading.holes.append((hole.start, hole.end))
            at = max(hole.end, at + 1)
        except ForebayError as error:
            reading.errors[at] = str(error)
            after = bisect_right(known, at)
            at = known[after] if after < len(known) else end
    return reading


def _streamed(topic: Topic, start: int, end: int) -> Generator[StreamMessage]:
    """Yields what a stream returns before it ends or fails; then raises its error."""
    found: list[StreamMessage] = []

    async def collect() -> None:
        stream = topic.stream(start, end=end)
        try:
            async for each in stream:
                found.append(each)
        finally:
            await stream.aclose()

    failure: ForebayError | None = None
    try:
        asyncio.run(collect())
    except ForebayError as error:
        failure = error
    yield from found
    if failure is not None:
        raise failure


def message(name: str, number: int) -> StreamMessage:
    return StreamMessage(payload(number), msg_id=MessageId(topic_name=name))
