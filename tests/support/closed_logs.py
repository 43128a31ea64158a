"""Logs that were filled and closed, for the suites of what opening them makes of damage."""

from __future__ import annotations

from forebay.format.frame import HEADER_BYTES
from forebay.settings import DeleterSettings
from forebay.wal.retention import Deleter
from support.disks import Place, texts

EVERYTHING = Deleter(DeleterSettings(retention_time_minutes=0))
SEGMENT_BYTES = 500


def fill(place: Place, count: int = 5) -> None:
    wal = place.open()
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    wal.shutdown()


def fill_segments(place: Place, count: int = 30) -> list[str]:
    """A log of several segments, closed; answers their names, oldest first."""
    wal = place.open(rotate_max_bytes=SEGMENT_BYTES)
    for payload in texts(0, count):
        wal.append(payload, durability="synced")
    names = [segment.path.name for segment in wal.segments()]
    wal.shutdown()
    assert len(names) >= 4
    return names


def forget_memories(place: Place) -> None:
    for name in ("wal.ckpt", "wal.synced"):
        place.remove(name)


def frame_starts(place: Place, name: str = "wal.log") -> list[int]:
    return [position - HEADER_BYTES for position in place.frames(name).positions]


def expect_unchanged(place: Place, before: dict[str, bytes]) -> None:
    """Nothing but the lock and the published position may differ."""
    after = place.contents()
    for contents in (before, after):
        contents.pop("wal.synced", None)
    assert after == before
