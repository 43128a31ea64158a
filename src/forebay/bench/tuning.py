"""`forebay bench tuning`: what one knob does, with everything else as it is by default.

Each sweep is run whole in every round, and each point is the median of its rounds. What the same
machine does with plain system calls is a level in the plot, where there is such a thing. The
measurements themselves are in `tuning_log` and `tuning_objects`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from forebay.bench.measure import machine, scratch
from forebay.bench.plot_lines import Sweep
from forebay.bench.tuning_knob import Knob, Levels
from forebay.bench.tuning_log import log_knobs
from forebay.bench.tuning_objects import object_knobs
from forebay.format.codec import COMPILED


def run(directory: Path | None, *, rounds: int, mib: int, progress: bool) -> dict[str, Any]:
    """All sweeps, as data for `forebay.bench.report` and `forebay.bench.plot`."""
    started = time.perf_counter()

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    with scratch(directory) as home:
        say("preparing")
        knobs = [*log_knobs(mib), *object_knobs(home / "history", mib)]
        found: list[list[_Round]] = [[] for _ in knobs]
        for number in range(rounds):
            for knob, past in zip(knobs, found, strict=True):
                say(f"round {number + 1}/{rounds}: {knob.setting}")
                past.append(_round(knob, home))
        about = machine(home, compiled=COMPILED)
    say("")
    result: dict[str, Any] = {
        "benchmark": "tuning",
        "machine": about,
        "rounds": rounds,
        "mib": mib,
        "sweeps": [
            sweep.as_json()
            for knob, past in zip(knobs, found, strict=True)
            for sweep in sweeps(knob, past)
        ],
        "seconds": time.perf_counter() - started,
    }
    if about["filesystem"] in {"tmpfs", "ramfs"}:
        result["warning"] = "the directory is in memory: name one on a disk with --dir"
    return result


_Round: TypeAlias = tuple[Sequence[Levels], Levels]
"""What each value of a knob gave, and the levels of the machine itself."""


def _round(knob: Knob, home: Path) -> _Round:
    points = []
    for value in knob.values:
        with scratch(home) as path:
            points.append(knob.measure(path, value))
    with scratch(home) as path:
        return points, knob.bounds(path)


def sweeps(knob: Knob, past: Sequence[_Round]) -> list[Sweep]:
    """The plots of a knob, with the median over the rounds at every point."""
    made = []
    for panel in knob.panels:
        curves = {
            curve: tuple(
                statistics.median(points[at][curve] for points, _ in past)
                for at in range(len(knob.values))
            )
            for curve in panel.curves
        }
        bounds = {
            name: statistics.median(levels[name] for _, levels in past) for name in panel.bounds
        }
        made.append(
            Sweep(
                panel.name,
                panel.title,
                knob.setting,
                knob.in_bytes,
                tuple(knob.values),
                panel.unit,
                curves,
                knob.default,
                bounds,
            )
        )
    return made
