"""`forebay bench tier`: upload and cold reads beside the same client alone, in the same run.

The limits (`forebay.bench.bare`): for an upload, the same bytes from a plain file in one multipart
upload with the same part size and parts in flight, or a plain durable file on local disk; for a
read, ranged GETs of the same size, as many in flight as a reader has, dropped as they come.

An upload is one cycle over sealed segments: plan, transfer, sidecar, commit. Reading back what was
uploaded has a row of its own. A read checks every frame. What is uploaded comes from the kernel's
cache on both sides; what is read does not, unless a row says so: objects on local disk are dropped
from it before.

Latency is a proxy before the S3 server; for reads also a wait before every request, which takes no
processor. Server, proxy, reader and producer share this machine's: with two cores they, and not
the distance, bound what read-ahead can gain and what a producer keeps beside a reader of S3.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from forebay.bench import bare
from forebay.bench.measure import (
    Measurement,
    Timed,
    machine,
    rate_of,
    run_rounds,
    scratch,
)
from forebay.bench.tier_append import appending, reader_process, reader_thread
from forebay.bench.tier_log import (
    IDLE,
    BenchLog,
    History,
    chill,
    opened,
    read_through,
    reader,
    upload,
    warm_disk,
    write_history,
    write_log,
)
from forebay.bench.tier_place import (
    FAR,
    FAR_LOCAL,
    LATENCY_MS,
    LOCAL,
    S3,
    SKIPPED,
    Place,
    open_places,
)
from forebay.format.codec import COMPILED
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.settings import CloudReaderSettings
from forebay.topic.storage import StartPosition

UPLOAD_GOAL: Final = 0.8
FAR_UPLOAD_GOAL: Final = 0.9
READ_GOAL: Final = 0.8
READ_AHEAD_GOAL: Final = 4.0
SAME_PROCESS_GOAL: Final = 0.6
OTHER_PROCESS_GOAL: Final = 0.9
APPENDED_TIMES: Final = 4
"""So many times an object's bytes are appended beside a reader: a disk's moods even out."""
_READ: Final = CloudReaderSettings()


def _uploads(log: BenchLog, place: Place, verified: list[float]) -> Timed:
    """Leaves the rate of the reading back in `verified`."""

    def ours(path: Path) -> float:
        if not place.remote:
            warm_disk(path, log.size // MIB)
        cloud = place.fresh()
        done = upload(log, path, cloud)
        assert done.size == log.size
        verified.append(done.size / MIB / done.verify_seconds)
        _remove(History(path, cloud, done.objects))
        return done.size / MIB / done.upload_seconds

    return ours


def _remove(history: History) -> None:
    store = connect(history.cloud)
    for key, _ in history.objects_by_key():
        store.delete(key)
    store.close()


def _bare_upload(log: BenchLog, place: Place) -> Timed:
    def limit(path: Path) -> float:
        if not place.remote:
            warm_disk(path, log.size // MIB)
        cloud = place.fresh()
        move = bare.uploading(cloud, log.plain, IDLE)
        rate = rate_of(log.size / MIB, partial(_moved, move, log.size))
        bare.discard(cloud)
        return rate

    return limit


def _moved(move: bare.Move, size: int) -> None:
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
        move = bare.reading(history.cloud, objects, _READ, history.delay_seconds)
        return rate_of(history.size / MIB, partial(_moved, move, history.size))

    return limit


def _place_rows(log: BenchLog, history: History, place: Place, size: int) -> list[Measurement]:
    at = place.name
    verified: list[float] = []
    get = "bare ranged GETs" if place.remote else "bare ranged reads"
    put = "bare multipart upload" if place.remote else "bare write + fsync + rename"
    read = _bare_read(history)
    return [
        Measurement(
            f"upload, {at}", size, "MiB/s", _uploads(log, place, verified), put,
            _bare_upload(log, place), FAR_UPLOAD_GOAL if place.far else UPLOAD_GOAL,
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
    log: BenchLog, places: list[Place], home: Path, mib: int, size: int
) -> list[Measurement]:
    rows: list[Measurement] = []
    appends: list[Measurement] = []
    for place in places:
        data = home / f"history-{place.name.replace(' ', '-')}"
        history = write_history(log, data, place.fresh())
        rows += _place_rows(log, history, place, size)
        if place.far:
            rows.append(_read_ahead(history, place.name, size))
            continue
        far = replace(history, delay_seconds=LATENCY_MS / 1000, cached=True)
        if place.remote:
            rows.append(_read_ahead(far, f"{place.name}, a wait before each request", size))
            appends += _append_rows(history, place.name, mib, size)
        else:
            rows += _local_rows(history, size)
            appends += _append_rows(far, FAR_LOCAL, mib, size)
    return rows + appends


def _skipped(places: list[Place]) -> list[dict[str, Any]]:
    there = {place.name for place in places}
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
    """All measurements, as data for `forebay.bench.report`."""
    started = time.time()
    say = _teller(progress=progress)
    with scratch(directory) as home, open_places(home, s3_endpoint, s3_root) as places:
        say("preparing")
        log = write_log(home / "log", mib, message_bytes)
        rows = _measurements(log, places, home, mib, message_bytes)
        results = run_rounds(rows, rounds, directory, say)
        about = machine(home, compiled=COMPILED)
    say("")
    found: dict[str, Any] = {
        "benchmark": "tier",
        "machine": about,
        "rounds": rounds,
        "mib": mib,
        "object_bytes": log.size,
        "results": [*(result.as_json() for result in results), *_skipped(places)],
        "seconds": time.time() - started,
    }
    if about["filesystem"] in {"tmpfs", "ramfs"}:
        found["warning"] = "the directory is in memory: name one on a disk with --dir"
    return found


def _teller(*, progress: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return say
