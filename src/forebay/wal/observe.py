"""The log's metrics, counted for each group commit, never for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.metrics import SECONDS, Counter, Histogram
from forebay.wal.memory import Run

_appended: Final = Counter("forebay_wal_append_total", "Messages written and synced.")
_appended_bytes: Final = Counter("forebay_wal_append_bytes_total", "Bytes written and synced.")
_flush_seconds: Final = Histogram(
    "forebay_wal_fsync_latency_seconds", "Time of one group commit: write and sync.", SECONDS
)
rotations: Final = Counter("forebay_wal_rotation_total", "Segments that were sealed.")
readers: Final = Counter("forebay_wal_reader_create_total", "Readers that were made.")


def flushed(runs: Sequence[Run], seconds: float) -> None:
    """After a group commit."""
    _appended.add(runs[-1].end - runs[0].first)
    _appended_bytes.add(sum(len(run.data) for run in runs))
    _flush_seconds.observe(seconds)
