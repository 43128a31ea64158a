"""The log's metrics, updated once for each group commit or chunk read, never for each message."""

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
    "Time from a synced append to its acknowledgement; the longest wait of each group commit.",
    SECONDS,
)
rotations: Final = Counter("forebay_wal_rotation_total", "Segments sealed.")
readers: Final = Counter("forebay_wal_reader_create_total", "Readers created.")
_read: Final = Counter(
    "forebay_wal_reader_messages_total", "Messages that readers fetched, from any tier."
)
_read_bytes: Final = Counter(
    "forebay_wal_reader_bytes_total", "Bytes of the frames that readers fetched, from any tier."
)


def committed(messages: int, size: int, seconds: float) -> None:
    """Records one group commit: its messages, bytes and seconds."""
    _appended.add(messages)
    _appended_bytes.add(size)
    _commit_seconds.observe(seconds)


def fetched(frames: Scan) -> None:
    """Records one chunk that a reader got. Its frames must be adjacent in the buffer."""
    if len(frames):
        _read.add(len(frames))
        first = frames.positions[0] - HEADER_BYTES
        _read_bytes.add(frames.positions[-1] + frames.lengths[-1] - first)
