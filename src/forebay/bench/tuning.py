"""`forebay bench tuning`: what one setting does, with everything else as it is by default.

Everything is measured through `forebay.open`. Each sweep is run whole in every round, and each
point is the median of its rounds. Where plain system calls can do the same work, their rate on this
machine is a level in the plot.

Of the log: what producers choose (how many, how large, how many at a time), and how often it
syncs. Of objects: requests by object size, counted by the metric `forebay_store_requests_total`
while a log is uploaded to local disk and scaled to one GiB; and reading ahead, where distance is a
wait before each request.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from forebay.bench.history import History, fill, open_history, read_frames, write_history
from forebay.bench.measure import (
    Sweep,
    in_threads,
    open_topic,
    payload_of,
    progress_line,
    rate_of,
    result_of,
    scratch,
    write_and_sync,
)
from forebay.limits import GIB, KIB, MIB
from forebay.objects.store import REQUESTS
from forebay.settings import (
    CloudReaderSettings,
    CloudSettings,
    StoreSettings,
    UploaderSettings,
    WalSettings,
)

Levels: TypeAlias = Mapping[str, float]
"""A figure for each curve, or for each bound, by its name."""


def _no_bounds(_path: Path) -> Levels:
    return {}


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: curves with the same unit, and bounds drawn as horizontal lines."""

    name: str
    title: str
    unit: str
    curves: tuple[str, ...]
    bounds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting to vary: its values, how each is measured, and the charts to draw."""

    setting: str
    values: tuple[int, ...]
    panels: tuple[Panel, ...]
    measure: Callable[[Path, int], Levels]
    """Measures one value of the setting, in an empty directory."""
    in_bytes: bool = False
    default: int | None = None
    bounds: Callable[[Path], Levels] = _no_bounds


_Round: TypeAlias = tuple[Sequence[Levels], Levels]
"""The results for each value of a knob, and the bounds of the machine."""


def run(directory: Path | None, *, rounds: int, mib: int, progress: bool) -> dict[str, Any]:
    """All sweeps, as data for `forebay.bench.measure.show`."""
    started = time.perf_counter()
    say = progress_line(progress=progress)
    with scratch(directory) as home:
        say("preparing")
        knobs = [*_log_knobs(mib), *_object_knobs(home / "history", mib)]
        found: list[list[_Round]] = [[] for _ in knobs]
        for number in range(rounds):
            for knob, past in zip(knobs, found, strict=True):
                say(f"round {number + 1}/{rounds}: {knob.setting}")
                past.append(_round(knob, home))
    say("")
    drawn = [
        sweep.as_json()
        for knob, past in zip(knobs, found, strict=True)
        for sweep in sweeps(knob, past)
    ]
    seconds = time.perf_counter() - started
    return result_of("tuning", rounds, directory, mib=mib, sweeps=drawn, seconds=seconds)


def _round(knob: Knob, home: Path) -> _Round:
    points = []
    for value in knob.values:
        with scratch(home) as path:
            points.append(knob.measure(path, value))
    with scratch(home) as path:
        return points, knob.bounds(path)


def sweeps(knob: Knob, past: Sequence[_Round]) -> list[Sweep]:
    """The plots of a knob, with the median over the rounds at every point."""
    made = []
    for panel in knob.panels:
        curves = {
            curve: tuple(
                statistics.median(points[at][curve] for points, _ in past)
                for at in range(len(knob.values))
            )
            for curve in panel.curves
        }
        bounds = {
            name: statistics.median(levels[name] for _, levels in past) for name in panel.bounds
        }
        made.append(
            Sweep(
                panel.name,
                panel.title,
                knob.setting,
                knob.in_bytes,
                tuple(knob.values),
                panel.unit,
                curves,
                knob.default,
                bounds,
            )
        )
    return made


# ---- the log ----

MESSAGE_BYTES: Final = 1024
PRODUCERS: Final = (1, 2, 4, 8, 16, 32)
BATCHES: Final = (1, 4, 16, 64, 256, 1024)
SIZES: Final = (64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
SYNC_BYTES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 10 * MIB, 32 * MIB)
_APPENDS_MAX: Final = 960
_APPENDS_OF_A_MIB: Final = 15
_SMALL_APPENDS: Final = 40_000
"""The most appends of small messages for a point, which must take less than a second."""
_PLAIN_EACH: Final = "plain write + fdatasync, one by one"
_PLAIN_MIB: Final = "plain write + fdatasync of 1 MiB"


def _log_knobs(mib: int) -> list[Knob]:
    rate = Panel(
        "producers",
        "Synced appends, 1 KiB each, by producers",
        "messages/s",
        ("append, synced",),
        (_PLAIN_EACH,),
    )
    wait = Panel(
        "producers-latency", "How long a synced append takes", "milliseconds", ("p50", "p99")
    )
    batch = Panel(
        "batch",
        "One producer, synced batches of 1 KiB messages",
        "MiB/s",
        ("append_many, synced",),
        (_PLAIN_MIB,),
    )
    large = Panel(
        "message-size",
        "One producer, by the size of its messages",
        "MiB/s",
        ("append, buffered, then flush", "append_many, synced"),
        (_PLAIN_MIB,),
    )
    syncing = Panel(
        "fsync-batch",
        "Buffered batches, by how often they are synced",
        "MiB/s",
        ("append_many, buffered",),
        (_PLAIN_MIB,),
    )
    return [
        Knob(
            "producers (threads)",
            PRODUCERS,
            (rate, wait),
            lambda path, value: _producers(path, value, _appends(mib)),
            bounds=lambda path: _plain_each(path, _appends(mib)),
        ),
        Knob(
            "messages in an append_many",
            BATCHES,
            (batch,),
            lambda path, value: {batch.curves[0]: _synced_batches(path, MESSAGE_BYTES, value, mib)},
            bounds=lambda path: _plain_mib(path, mib),
        ),
        Knob(
            "bytes in a message",
            SIZES,
            (large,),
            lambda path, value: {
                large.curves[0]: _buffered(path / "one", value, mib),
                large.curves[1]: _synced_batches(
                    path / "many", value, max(MIB // value, 1), mib
                ),
            },
            in_bytes=True,
            bounds=lambda path: _plain_mib(path, mib),
        ),
        Knob(
            "storage.wal.fsync_max_batch_bytes",
            SYNC_BYTES,
            (syncing,),
            lambda path, value: {syncing.curves[0]: _buffered_batches(path, value, mib)},
            in_bytes=True,
            default=WalSettings().fsync_max_batch_bytes,
            bounds=lambda path: _plain_mib(path, mib),
        ),
    ]  # fmt: skip


def _appends(mib: int) -> int:
    """How many synced appends a point has: each is a wait for the disk."""
    return min(mib * _APPENDS_OF_A_MIB, _APPENDS_MAX)


def _producers(path: Path, threads: int, appends: int) -> Levels:
    message = payload_of(MESSAGE_BYTES)
    each = max(appends // threads, 4)
    waits: list[float] = []

    def produce(_number: int) -> None:
        mine = []
        for _ in range(each):
            started = time.perf_counter()
            topic.append(message, durability="synced")
            mine.append((time.perf_counter() - started) * 1000)
        waits.extend(mine)

    with open_topic(path) as topic:
        topic.append(message, durability="synced")
        rate = rate_of(each * threads, lambda: in_threads(threads, produce))
    assert len(waits) == each * threads
    parts = statistics.quantiles(waits, n=100)
    return {"append, synced": rate, "p50": parts[49], "p99": parts[98]}


def _synced_batches(path: Path, size: int, count: int, mib: int) -> float:
    """MiB of payloads a second; a slow point moves less, so that no point takes long."""
    batch = [payload_of(size)] * count
    turns = min(max(mib * MIB // (size * count), 1), _appends(mib))

    def produce() -> None:
        for _ in range(turns):
            topic.append_many(batch, durability="synced")

    with open_topic(path) as topic:
        topic.append(batch[0], durability="synced")
        return rate_of(turns * size * count / MIB, produce)


def _buffered(path: Path, size: int, mib: int) -> float:
    message = payload_of(size)
    turns = min(max(mib * MIB // size, 1), _SMALL_APPENDS)

    def produce() -> None:
        for _ in range(turns):
            topic.append(message)
        topic.flush()

    with open_topic(path) as topic:
        topic.append(message, durability="synced")
        return rate_of(turns * size / MIB, produce)


def _buffered_batches(path: Path, sync_bytes: int, mib: int) -> float:
    """Nobody waits: the log syncs by its own bound, and once in the end."""
    count = 32
    batch = [payload_of(MESSAGE_BYTES)] * count
    turns = mib * MIB // (MESSAGE_BYTES * count)

    def produce() -> None:
        for _ in range(turns):
            topic.append_many(batch)
        topic.flush()

    settings = StoreSettings(data=path, wal=WalSettings(fsync_max_batch_bytes=sync_bytes))
    with open_topic(settings) as topic:
        topic.append(batch[0], durability="synced")
        return rate_of(turns * count * MESSAGE_BYTES / MIB, produce)


def _plain_each(path: Path, appends: int) -> Levels:
    return {_PLAIN_EACH: write_and_sync(path, MESSAGE_BYTES, appends, appends)}


def _plain_mib(path: Path, mib: int) -> Levels:
    return {_PLAIN_MIB: write_and_sync(path, MIB, mib, mib)}


# ---- objects ----

OBJECT_MIB: Final = (1, 2, 4, 8, 16, 32, 64)
AHEAD: Final = (0, 1, 2, 4, 6, 8, 12)
FAR_MS: Final = 30
NEAR_MS: Final = 5
_WRITES: Final = ("put", "part", "complete", "copy")
_READS: Final = ("get_range", "head", "list")


def _object_knobs(home: Path, mib: int) -> list[Knob]:
    objects = CloudSettings(root=str(home / "objects"))
    uploader = UploaderSettings(enabled=False)
    settings = StoreSettings(data=home / "data", cloud=objects, uploader=uploader)
    history = replace(write_history(settings, mib, MESSAGE_BYTES), cached=True)
    requests = Panel(
        "object-size", "Requests to upload and read back one GiB", "requests", ("writes", "reads")
    )
    ahead = Panel(
        "read-ahead",
        "Reading objects from afar, in chunks of 4 MiB",
        "MiB/s",
        (f"{NEAR_MS} ms away", f"{FAR_MS} ms away"),
    )
    return [
        Knob(
            "storage.uploader.max_object_bytes",
            tuple(each * MIB for each in OBJECT_MIB if each <= mib),
            (requests,),
            lambda path, value: _requests(path, value, mib),
            in_bytes=True,
        ),
        Knob(
            "storage.cloud_reader.read_ahead_chunks",
            AHEAD,
            (ahead,),
            lambda _path, value: {
                ahead.curves[0]: _reading(history, value, NEAR_MS),
                ahead.curves[1]: _reading(history, value, FAR_MS),
            },
            default=CloudReaderSettings().read_ahead_chunks,
        ),
    ]


def _counted(operations: tuple[str, ...]) -> float:
    return sum(REQUESTS.value(operation, "ok") for operation in operations)


def _requests(path: Path, object_bytes: int, mib: int) -> Levels:
    uploader = UploaderSettings(enabled=False, max_object_bytes=object_bytes)
    with open_topic(StoreSettings(data=path, uploader=uploader)) as topic:
        fill(topic, mib, MESSAGE_BYTES)
        before = _counted(_WRITES), _counted(_READS)
        done = topic.upload()
        writes, reads = _counted(_WRITES) - before[0], _counted(_READS) - before[1]
    scale = GIB / sum(descriptor.size for descriptor in done)
    return {"writes": writes * scale, "reads": reads * scale}


def _reading(history: History, chunks: int, away_ms: int) -> float:
    away = replace(history, delay_seconds=away_ms / 1000)
    with open_history(away, chunks) as topic:
        return rate_of(history.size / MIB, lambda: read_frames(topic))
