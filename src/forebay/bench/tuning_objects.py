"""What objects cost and how fast they are read: requests by their size, and reading ahead.

Requests are counted by the store's own metrics while a log is uploaded to local disk, and given
for one GiB. Distance is a wait before each read, which costs no processor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.bench.measure import rate_of
from forebay.bench.tier_log import (
    TOPIC,
    BenchLog,
    History,
    read_through,
    reader,
    write_history,
    write_log,
)
from forebay.bench.tuning_knob import Knob, Levels, Panel
from forebay.limits import GIB, MIB
from forebay.objects.store import REQUESTS
from forebay.settings import CloudReaderSettings, CloudSettings, StoreSettings, UploaderSettings
from forebay.topic.factory import WalStorageFactory

OBJECT_MIB: Final = (1, 2, 4, 8, 16, 32, 64)
AHEAD: Final = (0, 1, 2, 4, 6, 8, 12)
FAR_MS: Final = 30
NEAR_MS: Final = 5
_MESSAGE_BYTES: Final = 1024
_WRITES: Final = ("put", "part", "complete", "copy")
_READS: Final = ("get_range", "head", "list")


def object_knobs(home: Path, mib: int) -> list[Knob]:
    home.mkdir(parents=True)
    log = write_log(home / "log", mib, _MESSAGE_BYTES)
    cloud = CloudSettings(root=str(home / "objects"))
    history = replace(write_history(log, home / "data", cloud), cached=True)
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
            lambda path, value: _requests(log, path, value),
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


def _requests(log: BenchLog, path: Path, object_bytes: int) -> Levels:
    settings = StoreSettings(
        data=path / "data",
        wal_root=log.wal_root,
        cloud=CloudSettings(root=str(path / "objects")),
        uploader=UploaderSettings(enabled=False, max_object_bytes=object_bytes),
    )
    factory = WalStorageFactory(settings)
    try:
        storage = factory.for_topic(str(TOPIC))
        assert storage.uploader is not None
        before = _counted(_WRITES), _counted(_READS)
        done = storage.uploader.run_once(force=True)
        writes, reads = _counted(_WRITES) - before[0], _counted(_READS) - before[1]
    finally:
        factory.close()
    scale = GIB / sum(descriptor.size for descriptor in done)
    return {"writes": writes * scale, "reads": reads * scale}


def _reading(history: History, chunks: int, away_ms: int) -> float:
    settings = CloudReaderSettings(read_ahead_chunks=chunks, fetch_threads=max(chunks, 8))
    away = replace(history, delay_seconds=away_ms / 1000)
    with reader(away, settings) as found:
        return rate_of(history.size / MIB, lambda: read_through(found))
