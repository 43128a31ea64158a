"""Which local segments may go: a pure decision.

Oldest first, and never one that is not wholly below the committed offset, never one that a reader
is on, never the one that holds the newest message (so that a log always knows its next offset).
The first segment that must stay ends the removal: what remains is one contiguous range.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forebay.settings import DeleterSettings
from forebay.wal.segment import Segment

_MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Deleter:
    """Retention by age and by size, as the settings say."""

    settings: DeleterSettings

    def choose(
        self,
        segments: Sequence[Segment],
        *,
        committed_offset: int,
        pinned: Collection[int],
        now_ms: int,
    ) -> list[Segment]:
        """The segments that may go now, out of all that hold messages, oldest first.

        `committed_offset` is the first offset that exists nowhere else; `pinned` are the segments
        that readers are on.
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
        return minutes is not None and now_ms - segment.modified_ms >= minutes * 60_000

    def _too_much(self, local_bytes: int) -> bool:
        limit = self.settings.retention_size_mb
        return limit is not None and local_bytes > limit * _MB
