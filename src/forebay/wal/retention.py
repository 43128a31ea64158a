"""Retention: which local segments may be deleted. A pure decision, without I/O.

Segments are deleted oldest first. One must stay if it reaches beyond the committed offset, if a
reader is on it, or if it holds the newest message (so that the log always knows its next offset).
The first segment that must stay ends the selection, so that the rest is one contiguous range.

A segment that was written in the future counts as old: the clock was wrong then, or is now, and
its age is unknown.

Beware: `choose` trusts `committed_offset`. Messages below it must be stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forebay.settings import DeleterSettings
from forebay.wal.segment import Segment

_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Deleter:
    """Chooses segments by age and by total size, according to the settings."""

    settings: DeleterSettings

    def choose(
        self,
        segments: Sequence[Segment],
        *,
        committed_offset: int,
        pinned: Collection[int],
        now_ms: int,
    ) -> list[Segment]:
        """Returns the segments to delete now, oldest first.

        `segments` are all that hold messages, oldest first. `committed_offset` is the first offset
        that is stored nowhere else. `pinned` are the numbers of the segments that readers are on.
        """
        chosen: list[Segment] = []
        local_bytes = sum(segment.size for segment in segments)
        for segment in segments[:-1]:
            if segment.end_offset > committed_offset or segment.seq in pinned:
                break
            if not (self._too_old(segment, now_ms) or self._too_much(local_bytes)):
                break
            chosen.append(segment)
            local_bytes -= segment.size
        return chosen

    def _too_old(self, segment: Segment, now_ms: int) -> bool:
        minutes = self.settings.retention_time_minutes
        return minutes is not None and not 0 <= now_ms - segment.modified_ms < minutes * 60_000

    def _too_much(self, local_bytes: int) -> bool:
        limit = self.settings.retention_size_mb
        return limit is not None and local_bytes > limit * _MB
