"""The log's metrics, counted for each group commit and each chunk read, never for each message."""

from __future__ import annotations

from typing import Final

from forebay.format.frame import HEADER_BYTES, Scan
from forebay.metrics import SECONDS, Counter, Histogram

_appended: Final = Counter("forebay_wal_append_total", "Messages written and synced.")
_appended_bytes: Final = Counter("forebay_wal_append_bytes_total", "Bytes written and synced.")
_commit_seconds: Final = Histogram(
    "forebay_wal_fsync_latency_seconds", "Time of one group commit: write and sync.", SECONDS
)
append_seconds: Final = Histogram(
    "forebay_wal_append_latency_seconds",
    "Time from a synced append to its acknowledgement, of the one that waited longest for a sync.",
    SECONDS,
)
rotations: Final = Counter("forebay_wal_rotation_total", "Segments that were sealed.")
readers: Final = Counter("forebay_wal_reader_create_total", "Readers that were made.")
_read: Final = Counter(
    "forebay_wal_reader_messages_total", "Messages that readers fetched, from whichever tier."
)
_read_bytes: Final = Counter(
    "forebay_wal_reader_bytes_total", "Bytes of the frames that readers fetched."
)


def committed(messages: int, size: int, seconds: float) -> None:
    """After a group commit of so many messages and bytes."""
    _appended.add(messages)
    _appended_bytes.add(size)
    _commit_seconds.observe(seconds)


def fetched(frames: Scan) -> None:
    """After a reader got a chunk, whose frames lie one behind the other."""
    if len(frames):
        _read.add(len(frames))
        first = frames.positions[0] - HEADER_BYTES
        _read_bytes.add(frames.positions[-1] + frames.lengths[-1] - first)
