"""How far a log has got, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The next offset of each stage: every message before it has passed that stage."""

    appended: int
    synced: int
    uploaded: int = 0
    verified: int = 0
