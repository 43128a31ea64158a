"""Settings: frozen data, one class for each component, checked when they are made.

Names and defaults are those of the configuration file. Byte and time bounds are in the unit that
the name ends with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import InvalidSetting
from forebay.limits import (
    INTERVAL_SECONDS_MAX,
    MIB,
    OFFSET_MAX,
    WRITER_THREADS,
    WRITER_THREADS_MAX,
)


def _require(
    owner: object,
    *names: str,
    least: float,
    most: float = OFFSET_MAX,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """InvalidSetting unless each is a number in `least..most`, or None where that is allowed."""
    kind = "whole number" if whole else "number"
    for name in names:
        value = getattr(owner, name)
        if optional and value is None:
            continue
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not least <= value <= most:  # which refuses nan too
            raise InvalidSetting(
                f"{name} is {value!r}; it must be a {kind} of at least {least} and at most {most}"
            )


def _as_path(owner: object, name: str) -> None:
    """Makes the setting a Path where it is a str; InvalidSetting where it is neither nor None."""
    value = getattr(owner, name)
    if isinstance(value, str) and value and "\0" not in value:
        object.__setattr__(owner, name, Path(value))
    elif value is not None and not isinstance(value, Path):
        raise InvalidSetting(f"{name} is {value!r}; it must be the path of a directory, or None")


def _require_type(owner: object, name: str, kind: type) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind):
        raise InvalidSetting(f"{name} is {value!r}; it must be a {kind.__name__}")


@dataclass(frozen=True, slots=True)
class WalSettings:
    """One topic's write-ahead log."""

    dir: Path | str | None = None
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
        _as_path(self, "dir")
        _require_type(self, "file_name", str)
        _require(self, "cache_capacity", "cache_max_bytes", least=0, whole=True)
        _require(self, "queue_max_bytes", "fsync_max_batch_bytes", least=1, whole=True)
        _require(self, "rotate_max_bytes", least=1, whole=True, optional=True)
        _require(self, "fsync_interval_ms", least=1, most=INTERVAL_SECONDS_MAX * 1000, whole=True)
        _require(self, "rotate_max_seconds", least=0.001, most=INTERVAL_SECONDS_MAX, optional=True)


@dataclass(frozen=True, slots=True)
class DeleterSettings:
    """Retention of local segments; None switches a rule off."""

    check_interval_minutes: float = 5
    retention_time_minutes: float | None = 1440
    retention_size_mb: float | None = 10240

    def __post_init__(self) -> None:
        _require(self, "retention_time_minutes", "retention_size_mb", least=0, optional=True)
        _require(self, "check_interval_minutes", least=0.01, most=INTERVAL_SECONDS_MAX / 60)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A whole store: where it is, and how each topic's log behaves."""

    data: Path | str | None
    """The data directory; None keeps everything in memory."""
    wal: WalSettings = field(default_factory=WalSettings)
    """For every topic; its `dir` is ignored in favour of `<data>/wal/<namespace>/<topic>`."""
    deleter: DeleterSettings = field(default_factory=DeleterSettings)
    writer_threads: int = WRITER_THREADS
    """Threads that all topics share for writing and syncing."""

    def __post_init__(self) -> None:
        _as_path(self, "data")
        _require_type(self, "wal", WalSettings)
        _require_type(self, "deleter", DeleterSettings)
        _require(self, "writer_threads", least=1, most=WRITER_THREADS_MAX, whole=True)
