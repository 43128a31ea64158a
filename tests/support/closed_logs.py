"""Logs that were filled and closed, for the suites of recovery."""

from __future__ import annotations

from forebay.format.frame import HEADER_BYTES
from forebay.settings import DeleterSettings
from forebay.wal.retention import Deleter
from support.disks import LogDirectory, texts

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))
SEGMENT_BYTES = 500


def fill(directory: LogDirectory, count: int = 5) -> None:
    wal = directory.open()
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    wal.shutdown()


def fill_segments(directory: LogDirectory, count: int = 30) -> list[str]:
    """Makes a log of several segments and closes it; returns their names, oldest first."""
    wal = directory.open(rotate_max_bytes=SEGMENT_BYTES)
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    names = [segment.path.name for segment in wal.segments()]
    wal.shutdown()
    assert len(names) >= 4
    return names


def forget_memories(directory: LogDirectory) -> None:
    for name in ("wal.ckpt", "wal.synced"):
        directory.remove(name)


def frame_starts(directory: LogDirectory, name: str = "wal.log") -> list[int]:
    return [position - HEADER_BYTES for position in directory.frames(name).positions]


def expect_unchanged(directory: LogDirectory, before: dict[str, bytes]) -> None:
    """Nothing but the lock and the published position may differ."""
    after = directory.contents()
    for contents in (before, after):
        contents.pop("wal.synced", None)
    assert after == before
