"""One knob of `forebay bench tuning`: its values, how each is measured, and what is drawn of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Levels: TypeAlias = Mapping[str, float]
"""A figure for each curve, or for each bound, by its name."""


def _none(_path: Path) -> Levels:
    return {}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: curves of one unit, and the bounds that are drawn as levels."""

    name: str
    title: str
    unit: str
    curves: tuple[str, ...]
    bounds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Knob:
    setting: str
    values: tuple[int, ...]
    panels: tuple[Panel, ...]
    measure: Callable[[Path, int], Levels]
    """In an empty directory, with the knob at a value."""
    in_bytes: bool = False
    default: int | None = None
    bounds: Callable[[Path], Levels] = _none
