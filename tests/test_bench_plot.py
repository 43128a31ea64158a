"""The plots of benchmarks: what is drawn, that it is SVG, and the commands that draw."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.bench import tuning
from forebay.bench.plot import plots, read_result, write_plots
from forebay.bench.plot_bars import bar_plot, bars_of
from forebay.bench.plot_lines import Sweep, line_plot, step_of
from forebay.bench.plot_svg import amount, size
from forebay.bench.report import show
from forebay.bench.tuning_knob import Knob, Panel
from forebay.cli import main
from forebay.errors import UsageError
from forebay.limits import KIB, MIB

SPACE = {"svg": "http://www.w3.org/2000/svg"}
BYTES = True
MACHINE = {"python": "3.11", "cores": 2, "filesystem": "ext4", "compiled_codec": True}


def row(name: str, ratio: float, goal: float | None = None, message_bytes: int = 100) -> Any:
    return {
        "name": name,
        "message_bytes": message_bytes,
        "unit": "msg/s",
        "rate": ratio * 1000,
        "limit_name": "a <bare> loop & more",
        "limit": 1000,
        "ratio": ratio,
        "goal": goal,
        "rounds": {"ours": [ratio * 1000], "limit": [1000]},
    }


def result(*rows: Any) -> dict[str, Any]:
    return {"benchmark": "wal", "machine": MACHINE, "rounds": 3, "results": list(rows)}


SWEEP = Sweep(
    "batch",
    "By the batch",
    "fsync_max_batch_bytes",
    BYTES,
    (64 * KIB, MIB, 10 * MIB),
    "MiB/s",
    {"buffered": (10.0, 200.0, 410.0), "synced": (1.0, 2.0, 3.0)},
    10 * MIB,
    {"plain write": 600.0},
)


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in drawn(svg).findall("svg:text", SPACE)]


def bars(svg: str) -> list[float]:
    """How long each is."""
    found = drawn(svg).findall("svg:rect", SPACE)
    return [float(each.attrib["width"]) for each in found if each.attrib["class"] != "ground"]


def test_bars_are_as_long_as_their_ratios() -> None:
    svg = bar_plot("title", "caption", bars_of([row("half", 0.5), row("twice", 2.0)]))
    half, twice = bars(svg)
    assert twice == pytest.approx(4 * half, rel=0.01)
    assert {"title", "caption", "half", "twice", "0.50", "2.00", "500 msg/s"} <= set(texts(svg))


def test_a_bar_that_would_dwarf_the_others_is_cut_and_says_how_long_it_is() -> None:
    rows = bars_of([row("usual", 1.0), row("huge", 50.0), row("huger", 90.0)])
    usual, huge, huger = bars(bar_plot("title", "caption", rows))
    assert huge == huger == pytest.approx(5 * usual, rel=0.01)
    said = texts(bar_plot("title", "caption", rows))
    assert {"50.00", "90.00"} <= set(said)
    assert said.count("\u25b6") == 2


def test_a_goal_is_a_stroke_and_a_missed_one_is_said() -> None:
    svg = bar_plot("title", "caption", bars_of([row("met", 0.9, 0.8), row("not", 0.5, 0.6)]))
    strokes = drawn(svg).findall("svg:line", SPACE)
    assert [each.attrib["class"] for each in strokes].count("goal") == 2
    assert [text for text in texts(svg) if "missed" in text] == ["missed 0.6"]


def test_rows_of_one_measurement_stand_together_whatever_their_order() -> None:
    rows = [row("a", 1, message_bytes=100), row("b", 1), row("a", 1, message_bytes=1024)]
    said = texts(bar_plot("title", "caption", bars_of(rows)))
    assert said.count("a") == said.count("b") == 1
    assert said.count("100 B") == 2
    assert said.count("1 KiB") == 1


def test_curves_have_a_point_for_each_value_and_higher_is_more() -> None:
    lines = drawn(line_plot(SWEEP, "caption")).findall("svg:polyline", SPACE)
    assert len(lines) == 2
    points = [tuple(map(float, each.split(","))) for each in lines[0].attrib["points"].split()]
    across, down = zip(*points, strict=True)
    assert list(across) == sorted(across)
    assert list(down) == sorted(down, reverse=True)


def test_the_default_and_the_machine_s_own_level_are_told() -> None:
    said = texts(line_plot(SWEEP, "caption"))
    assert "dashed: plain write (600); the default, 10 MiB" in said
    assert {"64 KiB", "1 MiB", "10 MiB", "buffered", "synced", "MiB/s"} <= set(said)


def test_a_default_that_is_not_swept_is_not_drawn() -> None:
    assert not any("dashed" in text for text in texts(line_plot(_with(default=7.0), "caption")))


def _with(*, default: float) -> Sweep:
    return Sweep("a", "b", "c", not BYTES, (1, 2), "d", {"e": (1.0, 2.0)}, default)


@pytest.mark.parametrize(
    ("highest", "step"), [(1, 0.5), (3, 1), (10, 5), (0.02, 0.005), (900, 500), (4_000_000, 1e6)]
)
def test_a_scale_is_cut_at_round_numbers(highest: float, step: float) -> None:
    assert step_of(highest) == pytest.approx(step)


def test_figures_are_short() -> None:
    assert [amount(each) for each in (0.5, 12.345, 999.6, 12345, 1_270_000)] == [
        "0.5", "12.3", "1,000", "12,345", "1.27 M",
    ]  # fmt: skip
    assert [size(each) for each in (100, 1024, 10 * MIB, 2**30)] == [
        "100 B", "1 KiB", "10 MiB", "1 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "svg", [line_plot(SWEEP, "a < b & c"), bar_plot("x", "a < b & c", bars_of([row("n", 1)]))]
)
def test_a_picture_stands_alone_and_knows_dark_pages(svg: str) -> None:
    root = drawn(svg)
    assert "a < b & c" in texts(svg)
    assert root.attrib["role"] == "img"
    assert root.find("svg:title", SPACE) is not None
    assert root.find("svg:desc", SPACE) is not None
    assert "prefers-color-scheme: dark" in svg
    assert svg.count("http") == 1, "the name space, and nothing that would have to be fetched"


def test_the_same_result_gives_the_same_bytes() -> None:
    found = result(row("a", 0.5, 0.4), row("b", 1.234))
    assert plots(found) == plots(json.loads(json.dumps(found)))


def test_a_sweep_survives_json() -> None:
    assert Sweep.of_json(json.loads(json.dumps(SWEEP.as_json()))) == SWEEP


def test_what_was_skipped_has_no_bar_and_nothing_measured_has_no_picture() -> None:
    skipped = {"name": "S3", "skipped": "skipped: no S3 server"}
    assert "S3" not in texts(plots(result(row("a", 1), skipped))["bench-wal.svg"])
    assert plots(result(skipped)) == {}


# ---- the commands ----


def test_plots_are_drawn_from_saved_results(tmp_path: Path) -> None:
    bench, sweep = tmp_path / "wal.json", tmp_path / "tuning.json"
    bench.write_text(json.dumps(result(row("a", 1))))
    sweep.write_text(json.dumps({**result(), "benchmark": "tuning", "sweeps": [SWEEP.as_json()]}))
    out = tmp_path / "new" / "plots"
    done = CliRunner().invoke(main, ["bench", "plot", str(bench), str(sweep), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == ["bench-wal.svg", "tuning-batch.svg"]
    assert done.stdout.split() == [str(out / "bench-wal.svg"), str(out / "tuning-batch.svg")]


@pytest.mark.parametrize("content", ["no json", "[]", '{"benchmark": "wal"}', None])
def test_what_is_no_result_is_refused_by_its_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(main, ["bench", "plot", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "bad.json" in done.stderr
    with pytest.raises(UsageError):
        read_result(path)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="no plot can be written there"):
        write_plots(result(row("a", 1)), tmp_path / "file" / "plots")


def test_a_result_is_shown_and_drawn_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show({**result(row("a", 0.5, 0.6)), "seconds": 1.0}, as_json=False, plot=tmp_path)
    said = capsys.readouterr()
    assert "0.6 missed" in said.out
    assert said.err.split() == [str(tmp_path / "bench-wal.svg")]


def test_every_benchmark_can_draw() -> None:
    for name in main.commands["bench"].commands:  # type: ignore[attr-defined] # it is a group
        help_text = CliRunner().invoke(main, ["bench", name, "--help"]).output
        assert "--plot" in help_text or name == "plot", name


# ---- the sweeps ----


def test_a_point_of_a_sweep_is_the_median_of_its_rounds() -> None:
    panel = Panel("p", "title", "MiB/s", ("c",), ("plain",))
    knob = Knob("setting", (1, 2), (panel,), lambda _path, _value: {}, default=2)
    past = [
        ([{"c": 1.0}, {"c": 10.0}], {"plain": 7.0}),
        ([{"c": 5.0}, {"c": 30.0}], {"plain": 9.0}),
        ([{"c": 3.0}, {"c": 20.0}], {"plain": 8.0}),
    ]
    [sweep] = tuning.sweeps(knob, past)
    assert sweep.curves == {"c": (3.0, 20.0)}
    assert sweep.bounds == {"plain": 8.0}
    assert (sweep.knob, sweep.default, sweep.unit) == ("setting", 2, "MiB/s")


def test_all_sweeps_run_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tuning.run(tmp_path / "work", rounds=1, mib=2, progress=False)
    assert [sweep["name"] for sweep in found["sweeps"]] == [
        "producers",
        "producers-latency",
        "batch",
        "message-size",
        "fsync-batch",
        "object-size",
        "read-ahead",
    ]
    assert list((tmp_path / "work").iterdir()) == []
    for sweep in found["sweeps"]:
        for points in sweep["curves"].values():
            assert len(points) == len(sweep["values"])
            assert all(point > 0 for point in points)
    show(found, as_json=False, plot=tmp_path / "plots")
    said = capsys.readouterr()
    assert "storage.wal.fsync_max_batch_bytes" in said.out
    assert len(said.err.split()) == len(list((tmp_path / "plots").iterdir())) == 7
