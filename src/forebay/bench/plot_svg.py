"""A small SVG canvas: text, bars, lines, in colours that suit a light page and a dark one.

The page's scheme is asked by the picture's own style, and the picture has a ground of its own, so
it can be read where a page is dark and the browser does not say so. Nothing is loaded from
elsewhere. The same calls give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

WIDTH: Final = 720
MARGIN: Final = 24
COLOURS: Final = 3
"""Series that can be told apart, by colour and by the shape of their marks."""

_STYLE: Final = """\
  text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; fill: #1f2328 }
  .ground { fill: #ffffff; stroke: #d1d9e0 }
  .title { font-size: 20px; font-weight: 600 } .head { font-size: 15px; font-weight: 600 }
  .text { font-size: 14px } .mute { font-size: 13px; fill: #59636e }
  .bad { font-size: 14px; font-weight: 600; fill: #b3261e }
  .grid { stroke: #d1d9e0; stroke-width: 1 } .axis { stroke: #59636e; stroke-width: 1.5 }
  .goal { stroke: #1f2328; stroke-width: 3 } .mark { stroke: #59636e; stroke-dasharray: 5 4 }
  .line { fill: none; stroke-width: 2.5 }
  .f0 { fill: #1f6fc4 } .f1 { fill: #c25700 } .f2 { fill: #2b7d46 }
  .s0 { stroke: #1f6fc4 } .s1 { stroke: #c25700 } .s2 { stroke: #2b7d46 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .ground { fill: #0d1117; stroke: #3d444d }
    .mute { fill: #9198a1 } .bad { fill: #ff8a80 }
    .grid { stroke: #3d444d } .axis, .mark { stroke: #9198a1 } .goal { stroke: #e6edf3 }
    .f0 { fill: #539bf5 } .f1 { fill: #f0883e } .f2 { fill: #57ab5a }
    .s0 { stroke: #539bf5 } .s1 { stroke: #f0883e } .s2 { stroke: #57ab5a }
  }
"""  # noqa: E501


def _number(value: float) -> str:
    """With a tenth of a pixel at most, and the same on every machine."""
    return f"{value:.1f}".removesuffix(".0")


def amount(value: float) -> str:
    """A figure for people: three digits that count, thousands with commas."""
    if value >= 1_000_000:
        return f"{value / 1_000_000:.3g} M"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in the unit that suits them, such as `64 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"


class Canvas:
    """Collects shapes; `svg` is the picture, as high as the lowest of them needs."""

    def __init__(self, title: str, description: str) -> None:
        self._title = title
        self._description = description
        self._shapes: list[str] = []
        self._bottom = 0.0

    def text(self, x: float, y: float, text: str, kind: str = "text", anchor: str = "") -> None:
        """`y` is the line that the letters stand on."""
        at = f' text-anchor="{anchor}"' if anchor else ""
        self._add(
            f'<text x="{_number(x)}" y="{_number(y)}" class="{kind}"{at}>{escape(text)}</text>', y
        )

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._add(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" rx="2" class="{kind}"/>',
            y + height,
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        self._add(
            f'<line x1="{_number(x)}" y1="{_number(y)}" x2="{_number(to_x)}" '
            f'y2="{_number(to_y)}" class="{kind}"/>',
            max(y, to_y),
        )

    def curve(self, points: Sequence[tuple[float, float]], number: int) -> None:
        """A line through the points, with the marks of series `number`."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add(f'<polyline points="{path}" class="line s{number}"/>', 0)
        for x, y in points:
            self.dot(x, y, number)

    def dot(self, x: float, y: float, number: int) -> None:
        shapes = [
            f'<circle cx="{_number(x)}" cy="{_number(y)}" r="5" class="f0"/>',
            f'<path d="M{_number(x - 4.5)} {_number(y - 4.5)}h9v9h-9z" class="f1"/>',
            f'<path d="M{_number(x)} {_number(y - 6)}l6 10h-12z" class="f2"/>',
        ]
        self._add(shapes[number], y + 6)

    def _add(self, shape: str, bottom: float) -> None:
        self._shapes.append(shape)
        self._bottom = max(self._bottom, bottom)

    def svg(self) -> str:
        height = int(self._bottom) + MARGIN
        shapes = "\n".join(f"  {shape}" for shape in self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title desc">\n'
            f'  <title id="title">{escape(self._title)}</title>\n'
            f'  <desc id="desc">{escape(self._description)}</desc>\n'
            f"  <style>\n{_STYLE}  </style>\n"
            f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            f'class="ground"/>\n{shapes}\n</svg>\n'
        )
