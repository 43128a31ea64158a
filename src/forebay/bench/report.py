"""Shows what a benchmark found: a table for people, JSON for everything else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from forebay.bench.plot import write_plots
from forebay.bench.plot_lines import Sweep
from forebay.bench.plot_svg import amount


def _goal(row: dict[str, Any]) -> str:
    if row["goal"] is None:
        return ""
    return f"≥ {row['goal']}" + ("" if row["ratio"] >= row["goal"] else " missed")


def show(found: dict[str, Any], *, as_json: bool, plot: Path | None = None) -> None:
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        print()
    else:
        _show_tables(found)
    if plot is not None:
        for path in write_plots(found, plot):
            print(path, file=sys.stderr)


def _show_sweeps(found: dict[str, Any]) -> None:
    """A row for each curve, a column for each value of its knob."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 132))
    for sweep in map(Sweep.of_json, found["sweeps"]):
        table = Table(title=f"{sweep.title}: {sweep.unit}, by {sweep.knob}", title_justify="left")
        table.add_column("")
        for value in sweep.values:
            mark = " (default)" if value == sweep.default else ""
            table.add_column(sweep.shown(value) + mark, justify="right")
        for name, points in sweep.curves.items():
            table.add_row(name, *map(amount, points))
        for name, level in (sweep.bounds or {}).items():
            table.add_row(name, amount(level))
        console.print(table)


def _show_tables(found: dict[str, Any]) -> None:
    if "sweeps" in found:
        _show_sweeps(found)
        return
    from rich.console import Console
    from rich.table import Table

    about = found["machine"]
    codec = "compiled" if about["compiled_codec"] else "pure Python"
    table = Table(
        title=f"forebay bench {found['benchmark']}, medians of {found['rounds']} rounds",
        caption=f"Python {about['python']}, {about['cores']} cores, {about['filesystem']}, "
        f"{codec} codec, {found['seconds']:.0f} s",
    )
    for name in ("measurement", "payload", "rate", "beside", "its rate", "ratio", "goal"):
        table.add_column(name, justify="left" if name in {"measurement", "beside"} else "right")
    for row in found["results"]:
        if "skipped" in row:
            table.add_row(row["name"], "", row["skipped"])
            continue
        table.add_row(
            row["name"],
            f"{row['message_bytes']} B",
            f"{row['rate']:,.0f} {row['unit']}",
            row["limit_name"],
            f"{row['limit']:,.0f}",
            f"{row['ratio']:.2f}",
            _goal(row),
        )
    # Narrower than this the names of the measurements would be cut.
    console = Console(width=max(Console().width, 132))
    console.print(table)
    if "memory" in found:
        memory = found["memory"]
        console.print(
            f"peak memory: {memory['mib_at_1_million']:.0f} MiB after 1 million messages, "
            f"{memory['mib_at_10_million']:.0f} MiB after 10 million "
            f"(growth {memory['growth_mib']:.1f} MiB, goal ≤ {memory['goal_mib']})"
        )
    if "planning" in found:
        plan = found["planning"]
        console.print(
            f"planning over {plan['descriptors']:,} descriptors: {plan['seconds']:.2f} s and "
            f"{plan['mib']:.0f} MiB (goal ≤ {plan['goal_mib']}), {plan['splits']:,} splits; "
            f"1 GiB is read in {plan['seconds_to_read_1_gib']:.2f} s"
        )
    if "follow" in found:
        follow = found["follow"]
        console.print(
            f"follow at {follow['rate']:,} messages a second: {follow['p50_ms']:.1f} ms at the "
            f"median, {follow['p99_ms']:.1f} ms at the 99th percentile, {follow['max_ms']:.0f} ms "
            "at most"
        )
    for row in found.get("spark_memory", ()):
        console.print(
            f"peak memory of {row['job']}, {row['process']}: {row['mib_at_1_gib']:.0f} MiB at "
            f"1 GiB, {row['mib_at_8_gib']:.0f} MiB at 8 GiB (growth {row['growth_mib']:.0f}, "
            f"goal ≤ {row['goal_mib']})"
        )
    if "warning" in found:
        console.print(f"warning: {found['warning']}", style="bold")
