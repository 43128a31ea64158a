"""`forebay bench tier`: compares uploads and cold reads with the same client alone.

It measures local disk, and with `--config` also the object store of a configuration, with the
uploader's and the reader's settings of that configuration. Log and catalog are always in the
benchmark's own directory. Objects go below a new prefix of the store's root, and are deleted.

An upload is one `topic.upload()`: transfer, sidecar, reading back, commit. A second row has
`verify_after_upload: false`, which does not read back. A read checks every frame. What is uploaded
comes from the kernel's cache, for Forebay and for the limit; what is read from local disk does not,
unless a row says so. The limits are in `bare_store`.

Rows with zstd compare compressed objects with the same ones uncompressed, of JSON and of random
bytes. Their MiB are those before compression, and the row "stored" has the bytes in the store.

Rows with "+ 30 ms" wait before each request, for Forebay and for the limit. Where the server runs
on this machine, it, the reader and the producer share the processors: with two cores that limits
what read-ahead can gain, and how fast a producer is while a reader runs.
"""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from typing import Any, Final, Literal

from forebay.bench.bare_store import Move, bare_read, bare_upload
from forebay.bench.history import (
    Content,
    History,
    discard,
    drop_cached,
    open_history,
    payloads,
    read_frames,
    read_messages,
    warm_disk,
    write_history,
    write_plain,
)
from forebay.bench.history import fill as fill_topic
from forebay.bench.measure import (
    Measurement,
    Timed,
    open_topic,
    progress_line,
    rate_of,
    result_of,
    run_rounds,
    scratch,
)
from forebay.config import load_config
from forebay.errors import UsageError
from forebay.limits import MIB
from forebay.settings import CloudSettings, StoreSettings
from forebay.topic.store import Topic

LATENCY_MS: Final = 30
LOCAL: Final = "local disk"
UPLOAD_GOAL: Final = 0.8
READ_GOAL: Final = 0.8
READ_AHEAD_GOAL: Final = 4.0
SAME_PROCESS_GOAL: Final = 0.6
OTHER_PROCESS_GOAL: Final = 0.9
ZSTD_UPLOAD_GOAL: Final = 0.3
ZSTD_READ_GOAL: Final = 0.5
ZSTD_FAR_GOAL: Final = 1.0
APPENDED_TIMES: Final = 4
"""A producer that runs during a read appends this many objects: short runs vary too much."""
_NAMES: Final = {"s3": "S3", "gcs": "GCS", "azure": "Azure", "fs": "configured directory"}
_LOOK_SECONDS: Final = 0.05


def run(
    directory: Path | None,
    *,
    rounds: int,
    mib: int,
    message_bytes: int,
    config: Path | None,
    progress: bool,
) -> dict[str, Any]:
    """All measurements, as data for `forebay.bench.measure.show`."""
    started = time.time()
    say = progress_line(progress=progress)
    with scratch(directory) as home, ExitStack() as stack:
        places = [local_place(home)]
        if config is not None:
            places.append(configured_place(load_config(config)))
        say("preparing")
        plain = home / "plain"
        object_bytes = write_plain(plain, home / "log", mib, message_bytes)
        rows: list[Measurement] = []
        appends: list[Measurement] = []
        for number, place in enumerate(places):
            settings = stack.enter_context(place.new_store(home / f"history-{number}"))
            history = write_history(settings, mib, message_bytes)
            rows += _upload_rows(place, plain, mib, message_bytes)
            rows += _read_rows(place, history, message_bytes)
            for content in _CONTENTS:
                data = home / f"{content}-{number}"
                rows += _zstd_rows(place, stack, data, content, mib, message_bytes)
            appends += _append_rows(place, history, mib, message_bytes)
        results = run_rounds(rows + appends, rounds, directory, say)
    say("")
    return result_of(
        "tier",
        rounds,
        directory,
        mib=mib,
        object_bytes=object_bytes,
        results=[result.as_json() for result in results],
        seconds=time.time() - started,
    )


# ---- where the objects are ----


@dataclass(frozen=True, slots=True)
class Place:
    """An object store to measure, and the settings to use it with."""

    name: str
    settings: StoreSettings
    """Its `cloud.root` is the directory or prefix below which each store has its own."""

    @property
    def local(self) -> bool:
        return self.settings.cloud.backend == "fs"

    @contextmanager
    def new_store(self, data: Path) -> Iterator[StoreSettings]:
        """Settings of an empty store with log and catalog in `data`; its objects are deleted."""
        root = (
            f"{(self.settings.cloud.root or '').rstrip('/')}/forebay-bench-{secrets.token_hex(6)}"
        )
        cloud = replace(self.settings.cloud, root=root)
        try:
            yield replace(self.settings, data=data, cloud=cloud)
        finally:
            discard(cloud)


def local_place(home: Path) -> Place:
    objects = CloudSettings(root=str(home / "objects"))
    return Place(LOCAL, _idle(StoreSettings(data=None, cloud=objects)))


def configured_place(given: StoreSettings) -> Place:
    """The object store of a configuration, with its settings for uploads and reads."""
    cloud = given.cloud
    if cloud.backend == "memory":
        raise UsageError("storage.cloud.backend is memory: there is no store to measure")
    if cloud.root is None:
        cloud = replace(cloud, root=str(Path(given.data or "") / "objects"))
    settings = StoreSettings(
        data=None, cloud=cloud, uploader=given.uploader, cloud_reader=given.cloud_reader
    )
    return Place(_NAMES[cloud.backend], _idle(settings))


def _idle(settings: StoreSettings) -> StoreSettings:
    """Nothing is uploaded in the background while something is measured."""
    return replace(settings, uploader=replace(settings.uploader, enabled=False))


# ---- uploads ----


def _upload_rows(place: Place, plain: Path, mib: int, size: int) -> list[Measurement]:
    beside = "bare write + fsync + rename" if place.local else "bare multipart upload"
    limit = _bare_upload(place, plain)
    return [
        Measurement(
            f"upload, {place.name}", size, "MiB/s", _uploads(place, mib, size), beside, limit
        ),
        Measurement(
            f"upload without reading back, {place.name}", size, "MiB/s",
            _uploads(place, mib, size, read_back=False), beside, limit, UPLOAD_GOAL,
        ),
    ]  # fmt: skip


def _uploads(
    place: Place,
    mib: int,
    message_bytes: int,
    *,
    read_back: bool = True,
    content: Content = "random",
    compression: Literal["none", "zstd"] = "none",
) -> Timed:
    uploader = replace(
        place.settings.uploader, verify_after_upload=read_back, compression=compression
    )

    def ours(path: Path) -> float:
        with place.new_store(path / "data") as settings:
            if place.local:
                warm_disk(path, mib)
            with open_topic(replace(settings, uploader=uploader)) as topic:
                fill_topic(topic, mib, message_bytes, content)
                size = sum(segment.size for segment in topic.segments())

                def upload() -> None:
                    assert sum(made.logical_size for made in topic.upload()) == size

                return rate_of(size / MIB, upload)

    return ours


def _bare_upload(place: Place, plain: Path) -> Timed:
    def limit(path: Path) -> float:
        size = plain.stat().st_size
        with place.new_store(path / "data") as settings:
            if place.local:
                warm_disk(path, size // MIB)
            move = bare_upload(settings.cloud, plain, settings.uploader)
            return rate_of(size / MIB, partial(_moved, move, size))

    return limit


def _moved(move: Move, size: int) -> None:
    moved = move()
    assert moved == size, f"{moved} bytes were moved, not {size}"


# ---- reads ----


def _read_rows(place: Place, history: History, size: int) -> list[Measurement]:
    beside = "bare ranged reads" if place.local else "bare ranged GETs"
    far = replace(history, delay_seconds=LATENCY_MS / 1000)
    rows = [
        Measurement(
            f"read to frames, {place.name}", size, "MiB/s", _reads(history), beside,
            _bare_read(history), READ_GOAL,
        ),
        Measurement(
            f"read to messages, {place.name}", size, "MiB/s", _reads(history, read_messages),
            beside, _bare_read(history),
        ),
        Measurement(
            f"read to frames, {place.name} + {LATENCY_MS} ms", size, "MiB/s", _reads(far), beside,
            _bare_read(far), READ_GOAL,
        ),
        Measurement(
            f"read with read-ahead, {place.name} + {LATENCY_MS} ms", size, "MiB/s", _reads(far),
            "one request at a time", _reads(far, read_ahead_chunks=0), READ_AHEAD_GOAL,
        ),
    ]  # fmt: skip
    if place.local:
        cached = replace(history, cached=True)
        rows.append(
            Measurement(
                f"read to frames, {place.name}, cached", size, "MiB/s", _reads(cached), beside,
                _bare_read(cached),
            )
        )  # fmt: skip
    return rows


def _reads(
    history: History,
    read: Callable[[Topic], int] = read_frames,
    read_ahead_chunks: int | None = None,
) -> Timed:
    """The whole history, once the client has its connection."""

    def ours(_: Path) -> float:
        with open_history(history, read_ahead_chunks) as topic:
            next(topic.read(0))
            if history.cached:
                read_frames(topic)
            drop_cached(history)

            def all_messages() -> None:
                assert read(topic) == history.messages

            return rate_of(history.raw_size / MIB, all_messages)

    return ours


def _bare_read(history: History) -> Timed:
    def limit(_: Path) -> float:
        drop_cached(history)
        move = bare_read(history)
        return rate_of(history.size / MIB, partial(_moved, move, history.size))

    return limit


# ---- compressed objects, beside the same ones uncompressed ----

_CONTENTS: Final[tuple[Content, ...]] = ("JSON", "random")


def _zstd_rows(
    place: Place, stack: ExitStack, data: Path, content: Content, mib: int, size: int
) -> list[Measurement]:
    written: dict[str, History] = {}
    both: tuple[Literal["zstd", "none"], ...] = ("zstd", "none")
    for compression in both:
        settings = stack.enter_context(place.new_store(data / compression))
        uploader = replace(settings.uploader, compression=compression)
        given = replace(settings, uploader=uploader)
        written[compression] = write_history(given, mib, size, content)
    zstd, none = written["zstd"], written["none"]
    delay = LATENCY_MS / 1000
    far, far_none = (replace(each, delay_seconds=delay) for each in (zstd, none))
    uploads = partial(_uploads, place, mib, size, content=content)
    goals = (ZSTD_UPLOAD_GOAL, ZSTD_READ_GOAL) if place.local else (None, None)
    where, beside = f"{content}, zstd, {place.name}", "uncompressed"
    return [
        Measurement(
            f"stored, {where}", size, "MiB", lambda _: zstd.size / MIB, "before compression",
            lambda _: zstd.raw_size / MIB,
        ),
        Measurement(
            f"upload, {where}", size, "MiB/s", uploads(compression="zstd"), beside,
            uploads(compression="none"), goals[0],
        ),
        Measurement(
            f"read to frames, {where}", size, "MiB/s", _reads(zstd), beside, _reads(none),
            goals[1],
        ),
        Measurement(
            f"read to frames, {where} + {LATENCY_MS} ms", size, "MiB/s", _reads(far), beside,
            _reads(far_none), None if place.local or content != "JSON" else ZSTD_FAR_GOAL,
        ),
    ]  # fmt: skip


# ---- what a producer keeps of its speed while a history is read ----
#
# The producer appends batches of 1000 messages, buffered, and flushes at the end, which is timed
# too. The reader reads another store's topic again and again and checks every frame; it has begun
# before the time is taken and ends after it. Objects on local disk are read with the 30 ms, from
# the kernel's cache: a reader that takes all of the disk or of a processor would show nothing else.


def _append_rows(place: Place, history: History, mib: int, size: int) -> list[Measurement]:
    at = place.name
    if place.local:
        at = f"{place.name} + {LATENCY_MS} ms"
        history = replace(history, delay_seconds=LATENCY_MS / 1000, cached=True)
    mib *= APPENDED_TIMES
    idle = appending(mib, size)
    return [
        Measurement(
            f"append while a {kind} reads {at}", size, "MiB/s",
            appending(mib, size, partial(reader_beside, history, kind)), "append, idle", idle, goal,
        )
        for kind, goal in _READERS
    ]  # fmt: skip


_READERS: Final[tuple[tuple[Literal["thread", "process"], float], ...]] = (
    ("thread", SAME_PROCESS_GOAL),
    ("process", OTHER_PROCESS_GOAL),
)


def appending(
    mib: int,
    message_bytes: int,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Timed:
    """MiB of payload a second, while the work that `beside` starts is running."""
    batch = payloads(message_bytes)
    amount = len(batch) * message_bytes
    batches = max(mib * MIB // amount, 1)

    def ours(path: Path) -> float:
        warm_disk(path, mib)
        with open_topic(path / "live") as topic:

            def produce() -> None:
                for _ in range(batches):
                    topic.append_many(batch)
                topic.flush()

            topic.append(batch[0], durability="synced")
            with beside():
                return rate_of(batches * amount / MIB, produce)

    return ours


@contextmanager
def reader_beside(history: History, kind: Literal["thread", "process"]) -> Iterator[None]:
    """Reads the history in a thread of this process, or in a process that shares only the files."""
    begun: threading.Event | ProcessEvent
    stop: threading.Event | ProcessEvent
    if kind == "thread":
        begun, stop = threading.Event(), threading.Event()
        thread = threading.Thread(target=_read_on, args=(history, begun, stop), name="cold-reader")
        start, join, alive = thread.start, thread.join, thread.is_alive
    else:
        # Spawned: clients of stores do not survive a fork.
        context = multiprocessing.get_context("spawn")
        begun, stop = context.Event(), context.Event()
        process = context.Process(target=_read_on, args=(history, begun, stop))
        start, join, alive = process.start, process.join, process.is_alive
    start()
    try:
        while not begun.wait(_LOOK_SECONDS):
            assert alive(), "the reader ended before it read anything"
        yield
        assert alive(), "the reader ended before the producer"
    finally:
        stop.set()
        join()


def _read_on(
    history: History, begun: threading.Event | ProcessEvent, stop: threading.Event | ProcessEvent
) -> None:
    """Reads everything again and again until `stop`; ends if there is nothing."""
    with open_history(history) as topic:
        while not stop.is_set():
            drop_cached(history)
            with topic.read(0) as reader:
                for _ in reader.frames():
                    begun.set()
                    if stop.is_set():
                        break
            if not begun.is_set():
                return
