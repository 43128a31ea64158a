"""Settings: frozen data, one class for each component, checked when they are made.

Names and defaults are those of the configuration file. Byte and time bounds are in the unit that
the name ends with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import InvalidSetting
from forebay.limits import MIB, WRITER_THREADS, WRITER_THREADS_MAX


def _at_least(owner: object, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < minimum:
            raise InvalidSetting(f"{name} is {value}; it must be at least {minimum}")


@dataclass(frozen=True, slots=True)
class WalSettings:
    """One topic's write-ahead log."""

    dir: Path | None = None
    """The topic's own directory; None keeps everything in memory, up to the cache's bounds."""
    file_name: str = "wal.log"
    cache_capacity: int = 1024
    """Messages kept in memory for readers after they are synced."""
    cache_max_bytes: int = 16 * MIB
    queue_max_bytes: int = 32 * MIB
    """Bytes appended and not yet synced; an append that finds them used up waits."""
    fsync_interval_ms: int = 5000
    """The longest that an append nobody waits for stays unsynced."""
    fsync_max_batch_bytes: int = 10 * MIB
    rotate_max_bytes: int | None = 64 * MIB
    rotate_max_seconds: float | None = 3600

    def __post_init__(self) -> None:
        _at_least(self, 0, "cache_capacity", "cache_max_bytes")
        _at_least(
            self,
            1,
            "queue_max_bytes",
            "fsync_interval_ms",
            "fsync_max_batch_bytes",
            "rotate_max_bytes",
        )
        _at_least(self, 0.001, "rotate_max_seconds")
        if self.dir is None and not self.cache_capacity:
            raise InvalidSetting("a log in memory (dir is None) needs a cache_capacity above 0")


@dataclass(frozen=True, slots=True)
class DeleterSettings:
    """Retention of local segments; None switches a rule off."""

    check_interval_minutes: float = 5
    retention_time_minutes: float | None = 1440
    retention_size_mb: float | None = 10240

    def __post_init__(self) -> None:
        _at_least(self, 0, "retention_time_minutes", "retention_size_mb")
        _at_least(self, 0.01, "check_interval_minutes")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A whole store: where it is, and how each topic's log behaves."""

    data: Path | None
    """The data directory; None keeps everything in memory."""
    wal: WalSettings = field(default_factory=WalSettings)
    """For every topic; its `dir` is ignored in favour of `<data>/wal/<namespace>/<topic>`."""
    deleter: DeleterSettings = field(default_factory=DeleterSettings)
    writer_threads: int = WRITER_THREADS
    """Threads that all topics share for writing and syncing."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "writer_threads")
        if self.writer_threads > WRITER_THREADS_MAX:
            raise InvalidSetting(f"writer_threads is over {WRITER_THREADS_MAX}")
