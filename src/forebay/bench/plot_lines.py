"""What one knob does, as curves: points at equal steps, because a sweep doubles its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.bench.plot_svg import COLOURS, MARGIN, WIDTH, Canvas, amount, size

_LEFT: Final = MARGIN + 62
_RIGHT: Final = WIDTH - MARGIN - 26
_TOP: Final = 118.0
_HEIGHT: Final = 250.0
_TICKS: Final = 4


@dataclass(frozen=True, slots=True)
class Sweep:
    """Curves over the values of one knob; every curve has a point for each of them."""

    name: str
    title: str
    knob: str
    in_bytes: bool
    values: tuple[float, ...]
    unit: str
    curves: Mapping[str, tuple[float, ...]]
    default: float | None = None
    """What the knob is when nobody sets it; None if it is the caller's to choose."""
    bounds: Mapping[str, float] | None = None
    """Levels that no curve can pass, such as the machine's own."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "knob": self.knob,
            "in_bytes": self.in_bytes,
            "values": list(self.values),
            "unit": self.unit,
            "curves": {name: list(points) for name, points in self.curves.items()},
            "default": self.default,
            "bounds": dict(self.bounds or {}),
        }

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> Sweep:
        return Sweep(
            found["name"],
            found["title"],
            found["knob"],
            found["in_bytes"],
            tuple(found["values"]),
            found["unit"],
            {name: tuple(points) for name, points in found["curves"].items()},
            found["default"],
            found["bounds"],
        )

    def shown(self, value: float) -> str:
        return size(value) if self.in_bytes else f"{value:g}"


def step_of(highest: float) -> float:
    """How far apart the lines of a scale are: 1, 2 or 5 times a power of 10."""
    rough = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough)


def line_plot(sweep: Sweep, caption: str) -> str:
    assert 0 < len(sweep.curves) <= COLOURS, "more curves than can be told apart"
    levels = [*(point for points in sweep.curves.values() for point in points)]
    levels += (sweep.bounds or {}).values()
    step = step_of(max(levels))
    top = step * math.ceil(max(levels) / step)
    canvas = Canvas(sweep.title, _said(sweep))
    canvas.text(MARGIN, 40, sweep.title, "title")
    canvas.text(MARGIN, 62, caption, "mute")
    _legend(canvas, sweep)

    def high(value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / top)

    for number in range(round(top / step) + 1):
        y = high(number * step)
        canvas.line(_LEFT, y, _RIGHT, y, "grid" if number else "axis")
        canvas.text(_LEFT - 8, y + 5, amount(number * step) if number else "0", "mute", "end")
    places = _places(len(sweep.values))
    for x, value in zip(places, sweep.values, strict=True):
        if value == sweep.default:
            canvas.line(x, _TOP, x, _TOP + _HEIGHT, "mark")
        canvas.text(x, _TOP + _HEIGHT + 20, sweep.shown(value), "mute", "middle")
    for level in (sweep.bounds or {}).values():
        canvas.line(_LEFT, high(level), _RIGHT, high(level), "mark")
    for number, points in enumerate(sweep.curves.values()):
        canvas.curve([(x, high(y)) for x, y in zip(places, points, strict=True)], number)
    middle, below = (_LEFT + _RIGHT) / 2, _TOP + _HEIGHT + 46
    canvas.text(middle, below, sweep.knob, "text", "middle")
    if dashed := _dashed(sweep):
        canvas.text(middle, below + 22, f"dashed: {dashed}", "mute", "middle")
    return canvas.svg()


def _dashed(sweep: Sweep) -> str:
    lines = [f"{name} ({amount(level)})" for name, level in (sweep.bounds or {}).items()]
    if sweep.default in sweep.values:
        lines.append(f"the default, {sweep.shown(sweep.default)}")
    return "; ".join(lines)


def _places(count: int) -> Sequence[float]:
    inset = 22
    if count == 1:
        return [(_LEFT + _RIGHT) / 2]
    width = _RIGHT - _LEFT - 2 * inset
    return [_LEFT + inset + width * number / (count - 1) for number in range(count)]


def _legend(canvas: Canvas, sweep: Sweep) -> None:
    canvas.text(MARGIN, 94, sweep.unit, "text")
    x = MARGIN + 20 + 7.5 * len(sweep.unit)
    for number, name in enumerate(sweep.curves):
        canvas.dot(x + 6, 89, number)
        canvas.text(x + 18, 94, name)
        x += 42 + 7.5 * len(name)


def _said(sweep: Sweep) -> str:
    curves = (
        f"{name}: "
        + ", ".join(
            f"{amount(point)} at {sweep.shown(value)}"
            for value, point in zip(sweep.values, points, strict=True)
        )
        for name, points in sweep.curves.items()
    )
    return f"{sweep.unit} against {sweep.knob}; " + "; ".join(curves)
