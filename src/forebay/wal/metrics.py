"""The log's metrics, counted for each group commit and each piece read, never for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.format.frame import HEADER_BYTES, Scan
from forebay.metrics import SECONDS, Counter, Histogram
from forebay.wal.cache import Run

_appended: Final = Counter("forebay_wal_append_total", "Messages written and synced.")
_appended_bytes: Final = Counter("forebay_wal_append_bytes_total", "Bytes written and synced.")
_flush_seconds: Final = Histogram(
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


def flushed(runs: Sequence[Run], seconds: float) -> None:
    """After a group commit."""
    _appended.add(runs[-1].end - runs[0].first)
    _appended_bytes.add(sum(len(run.data) for run in runs))
    _flush_seconds.observe(seconds)


def fetched(frames: Scan) -> None:
    """After a reader got a piece; its frames lie one behind the other."""
    if len(frames):
        _read.add(len(frames))
        first = frames.positions[0] - HEADER_BYTES
        _read_bytes.add(frames.positions[-1] + frames.lengths[-1] - first)
