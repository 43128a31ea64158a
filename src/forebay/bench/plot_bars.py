"""A benchmark's rows as bars: each as long as its ratio to what it is held against.

The units of the rows differ, so the ratio is the one axis that all of them have. The line at 1 is
the other contender; a short thick stroke is the goal of a row that has one. A bar that would make
all others tiny is cut, with an arrow at its end; its figure stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.bench.plot_svg import COLOURS, MARGIN, WIDTH, Canvas, amount, size

_LEFT: Final = MARGIN + 68
_RIGHT: Final = WIDTH - MARGIN - 200
_LONGEST: Final = 5.0
_BAR: Final = 16
_STEP: Final = 22


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: how it did beside another, and how it should have."""

    name: str
    beside: str
    message_bytes: int
    rate: float
    unit: str
    ratio: float
    goal: float | None

    @property
    def missed(self) -> bool:
        return self.goal is not None and self.ratio < self.goal


def bars_of(results: Sequence[dict[str, Any]]) -> list[Bar]:
    """The rows that were measured; those that were skipped have nothing to draw."""
    return [
        Bar(
            row["name"],
            row["limit_name"],
            row["message_bytes"],
            row["rate"],
            row["unit"],
            row["ratio"],
            row["goal"],
        )
        for row in results
        if "skipped" not in row
    ]


def bar_plot(title: str, caption: str, bars: Sequence[Bar]) -> str:
    groups: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.name, bar.beside), []).append(bar)
    sizes = sorted({bar.message_bytes for bar in bars})
    wanted = max([1.2, *(max(bar.ratio, bar.goal or 0) for bar in bars)])
    longest = min(wanted, _LONGEST)
    scale = (_RIGHT - _LEFT) / longest
    canvas = Canvas(title, "; ".join(_said(bar) for bar in bars))
    canvas.text(MARGIN, 40, title, "title")
    canvas.text(MARGIN, 62, caption, "mute")
    canvas.text(MARGIN, 82, "bar: ratio to what it is measured beside; long line: 1", "mute")
    canvas.text(MARGIN, 102, "short stroke: the goal, where there is one", "mute")
    y = 136.0
    for (name, beside), rows in groups.items():
        canvas.text(MARGIN, y, name, "head")
        canvas.text(MARGIN, y + 18, f"beside {beside}", "mute")
        top, bottom = y + 24, y + 26 + _STEP * len(rows)
        canvas.line(_LEFT, top, _LEFT, bottom, "axis")
        canvas.line(_LEFT + scale, top, _LEFT + scale, bottom, "axis")
        for number, bar in enumerate(rows):
            shade = sizes.index(bar.message_bytes) % COLOURS
            _draw(canvas, bar, top + 4 + _STEP * number, scale, shade)
        y = bottom + 28
    return canvas.svg()


def _said(bar: Bar) -> str:
    goal = "" if bar.goal is None else f" (goal {bar.goal:g})"
    return f"{bar.name}, {size(bar.message_bytes)}, beside {bar.beside}: {bar.ratio:.2f}{goal}"


def _draw(canvas: Canvas, bar: Bar, y: float, scale: float, shade: int) -> None:
    line = y + _BAR - 3
    canvas.text(_LEFT - 8, line, size(bar.message_bytes), "mute", "end")
    length = bar.ratio * scale
    canvas.bar(_LEFT, y, min(length, _RIGHT - _LEFT), _BAR, f"f{shade}")
    if length > _RIGHT - _LEFT:
        canvas.text(_RIGHT - 2, line, "\u25b6", "text", "start")
    if bar.goal is not None:
        x = _LEFT + min(bar.goal * scale, _RIGHT - _LEFT)
        canvas.line(x, y - 2, x, y + _BAR + 2, "goal")
    canvas.text(_RIGHT + 60, line, f"{bar.ratio:.2f}", "bad" if bar.missed else "text", "end")
    if bar.missed:
        canvas.text(WIDTH - MARGIN, line, f"missed {bar.goal:g}", "bad", "end")
    else:
        canvas.text(WIDTH - MARGIN, line, f"{amount(bar.rate)} {bar.unit}", "mute", "end")
