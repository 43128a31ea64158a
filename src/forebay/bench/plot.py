"""A benchmark's result as pictures: SVG files, made with nothing but text.

What `--json` printed can be drawn later (`forebay bench plot`), so the pictures of the documents
and the figures in them come from one run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.bench.plot_bars import bar_plot, bars_of
from forebay.bench.plot_lines import Sweep, line_plot
from forebay.errors import UsageError


def plots(found: dict[str, Any]) -> dict[str, str]:
    """A picture for each part of a result, by the name of its file."""
    name = found["benchmark"]
    caption = _caption(found)
    drawn = {
        f"{name}-{sweep.name}.svg": line_plot(sweep, caption)
        for sweep in map(Sweep.of_json, found.get("sweeps", ()))
    }
    if bars := bars_of(found.get("results", ())):
        drawn[f"bench-{name}.svg"] = bar_plot(f"forebay bench {name}", caption, bars)
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


def write_plots(found: dict[str, Any], directory: Path) -> list[Path]:
    """Writes the pictures of a result; a directory that is missing is made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = []
        for name, svg in plots(found).items():
            path = directory / name
            path.write_text(svg, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise UsageError(f"{directory}: no plot can be written there: {error.strerror}") from error
    return written


def read_result(path: Path) -> dict[str, Any]:
    """What `forebay bench ... --json` wrote."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a benchmark's result: {error}") from error
    wanted = {"benchmark", "machine", "rounds"}
    if not isinstance(found, dict) or not wanted <= found.keys():
        raise UsageError(f"{path} is no result of a benchmark: make one with `--json`")
    return found
