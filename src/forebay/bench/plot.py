"""A benchmark's result as SVG plots, drawn by matplotlib (the extra `plots`).

`forebay bench plot` draws what `--json` printed, so that the plots and the figures of a document
can come from one run. The background is transparent and the colours are of medium brightness: text
has a contrast of about 4 to a white page and to a dark one. Text stays text, the description of a
plot has all of its figures, and the same result gives the same bytes.

Rows are bars, each as long as its ratio to its limit: their units differ, so the ratio is the one
axis that all of them have. A sweep is drawn as curves, with its points at equal steps, because the
values of a sweep double.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.bench.measure import Sweep, amount, size
from forebay.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH: Final = 7.5
TEXT: Final = "#757d87"
_GRID: Final = "#8b949e55"
MISSED: Final = "#e5484d"
_SERIES: Final = (("#3b82d6", "o"), ("#d4690a", "s"), ("#3a9257", "^"))
"""Colours and marks of curves, or colours of the sizes of messages."""
_LONGEST: Final = 5.0
"""Longer bars are cut here, so that the others stay visible; the figure is beside the bar."""
_RC: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "forebay",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": _GRID,
}


def require_matplotlib() -> None:
    """Raises UsageError where plots cannot be drawn; called before a benchmark takes minutes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install 'forebay[plots]'")


def read_result(path: Path) -> dict[str, Any]:
    """What `forebay bench ... --json` wrote."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a benchmark's result: {error}") from error
    wanted = {"benchmark", "machine", "rounds"}
    if not isinstance(found, dict) or not wanted <= found.keys():
        raise UsageError(f"{path} is not the result of a benchmark: create one with `--json`")
    return found


def write_plots(found: dict[str, Any], directory: Path) -> list[Path]:
    """Writes the plots of a result and returns their paths; creates the directory."""
    drawn = plots(found)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, svg in drawn.items():
            (directory / name).write_bytes(svg)
    except OSError as error:
        raise UsageError(f"{directory}: no plot can be written there: {error.strerror}") from error
    return [directory / name for name in drawn]


def plots(found: dict[str, Any]) -> dict[str, bytes]:
    """The plots of a result as SVG, by file name."""
    require_matplotlib()
    from matplotlib import rc_context

    name, caption = found["benchmark"], _caption(found)
    rows = found.get("results", ())
    with rc_context(_RC):  # type: ignore[arg-type]  # its keys are names that it knows
        drawn = {
            f"{name}-{sweep.name}.svg": _svg(line_figure(sweep, caption), _sweep_text(sweep))
            for sweep in map(Sweep.of_json, found.get("sweeps", ()))
        }
        if rows:
            figure = bar_figure(f"forebay bench {name}", caption, rows)
            drawn[f"bench-{name}.svg"] = _svg(figure, "; ".join(map(_row_text, rows)))
    return drawn


def _caption(found: dict[str, Any]) -> str:
    about = found["machine"]
    codec = "compiled" if about["compiled_codec"] else "pure Python"
    rounds = found["rounds"]
    median = "one round" if rounds == 1 else f"medians of {rounds} rounds"
    return (
        f"{median}; {about['cores']} cores, {about['filesystem']}, Python {about['python']}, "
        f"{codec} codec"
    )


def _svg(figure: Figure, description: str) -> bytes:
    file = io.StringIO()
    about = {"Title": figure.get_suptitle(), "Creator": None, "Date": None}
    figure.savefig(file, format="svg", metadata=about)
    described = f"</title>\n <desc>{escape(description)}</desc>"
    return file.getvalue().replace("</title>", described, 1).encode()


def _row_text(row: dict[str, Any]) -> str:
    goal = "" if row["goal"] is None else f" (goal {row['goal']:g})"
    what = f"{row['name']}, {size(row['message_bytes'])}, beside {row['limit_name']}"
    return f"{what}: {row['ratio']:.2f}{goal}"


def _sweep_text(sweep: Sweep) -> str:
    curves = []
    for name, points in sweep.curves.items():
        pairs = zip(sweep.values, points, strict=True)
        figures = ", ".join(f"{amount(point)} at {sweep.shown(value)}" for value, point in pairs)
        curves.append(f"{name}: {figures}")
    return f"{sweep.unit} against {sweep.knob}; {'; '.join(curves)}"


def _figure(title: str, caption: str, height: float) -> tuple[Figure, Axes]:
    """A titled figure with one pair of axes; lengths are in inches from its top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    figure.suptitle(title, x=0.03, y=1 - 0.12 / height, ha="left", va="top", fontsize=14)
    figure.text(0.03, 1 - 0.42 / height, caption, va="top", fontsize=9)
    return figure, figure.add_subplot()


def bar_figure(title: str, caption: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """A bar for each row; the rows of one measurement are together, whatever their order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["limit_name"]), []).append(row)
    sizes = sorted({row["message_bytes"] for row in rows})
    longest = min(max(1.2, *(max(row["ratio"], row["goal"] or 0) for row in rows)), _LONGEST)
    lines = sum(2.6 + len(group) for group in groups.values())
    height = 1.35 + 0.23 * lines
    figure, axes = _figure(title, caption, height)
    figure.subplots_adjust(left=0.12, right=0.68, top=1 - 1.0 / height, bottom=0.35 / height)
    legend = "bar: ratio to what it is measured beside, which is the line at 1; "
    legend += "thick stroke: the goal"
    figure.text(0.03, 1 - 0.62 / height, legend, va="top", fontsize=9)
    y = 0.0
    ticks: list[float] = []
    for (name, beside), group in groups.items():
        across = axes.get_yaxis_transform()
        axes.text(-0.16, y + 0.5, name, transform=across, fontweight="bold", va="center")
        axes.text(-0.16, y + 1.4, f"beside {beside}", transform=across, fontsize=9, va="center")
        axes.vlines([0, 1], y + 1.9, y + 2.1 + len(group), color=TEXT, linewidth=1)
        for number, row in enumerate(group):
            color, _ = _SERIES[sizes.index(row["message_bytes"]) % len(_SERIES)]
            _bar(axes, row, y + 2.5 + number, longest, color, gid=f"bar-{len(ticks)}")
            ticks.append(y + 2.5 + number)
        y += 2.6 + len(group)
    axes.set(xlim=(0, longest), ylim=(y, 0))
    labels = [size(row["message_bytes"]) for group in groups.values() for row in group]
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.tick_params(left=False, labelsize=9)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _bar(
    axes: Axes, row: dict[str, Any], y: float, longest: float, color: str, *, gid: str
) -> None:
    ratio, goal = row["ratio"], row["goal"]
    axes.barh(y, min(ratio, longest), 0.72, color=color, gid=gid)
    if ratio > longest:
        axes.text(longest, y, "\u25b6", color=color, va="center")
    if goal is not None:
        at = min(goal, longest)
        axes.vlines(at, y - 0.5, y + 0.5, color=TEXT, linewidth=3.5, gid=f"goal-of-{gid}")
    missed = goal is not None and ratio < goal
    beside = f"missed {goal:g}" if missed else f"{amount(row['rate'])} {row['unit']}"
    across = axes.get_yaxis_transform()
    for x, text in ((1.14, f"{ratio:.2f}"), (1.52, beside)):
        tone = MISSED if missed else TEXT
        axes.text(x, y, text, transform=across, color=tone, ha="right", va="center", fontsize=9)


def line_figure(sweep: Sweep, caption: str) -> Figure:
    """A curve for each series; bounds, and the default of the setting, are dashed."""
    assert 0 < len(sweep.curves) <= len(_SERIES), "more curves than can be told apart"
    figure, axes = _figure(sweep.title, caption, 4.5)
    figure.subplots_adjust(left=0.11, right=0.97, top=0.77, bottom=0.2)
    places = range(len(sweep.values))
    dashed = []
    for name, level in (sweep.bounds or {}).items():
        axes.axhline(level, color=TEXT, linestyle="--", linewidth=1.2)
        dashed.append(f"{name} ({amount(level)})")
    if sweep.default in sweep.values:
        at = sweep.values.index(sweep.default)
        axes.axvline(at, color=TEXT, linestyle="--", linewidth=1.2)
        dashed.append(f"the default, {sweep.shown(sweep.default)}")
    for number, (name, points) in enumerate(sweep.curves.items()):
        color, marker = _SERIES[number]
        axes.plot(places, points, color=color, marker=marker, linewidth=2.2, markersize=7,
                  label=name, gid=f"curve-{number}")  # fmt: skip
    axes.set_xticks(places, [sweep.shown(value) for value in sweep.values])
    axes.set_xlabel(sweep.knob, labelpad=8)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value) if value else "0")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    figure.text(0.03, 0.84, sweep.unit, va="center")
    figure.legend(loc="center right", bbox_to_anchor=(0.99, 0.84), ncols=len(sweep.curves),
                  frameon=False, labelcolor=TEXT)  # fmt: skip
    if dashed:
        figure.text(0.54, 0.025, f"dashed: {'; '.join(dashed)}", ha="center", fontsize=9)
    return figure
