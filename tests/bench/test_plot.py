"""The plots of benchmarks: what is drawn, that it is SVG, and the commands that draw."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.bench import plot, tuning
from forebay.bench.measure import Sweep, amount, show, size
from forebay.bench.plot import bar_figure, line_figure, plots, read_result, write_plots
from forebay.bench.tuning import Knob, Panel
from forebay.cli import main
from forebay.errors import UsageError
from forebay.limits import KIB, MIB

pytest.importorskip("numpy", reason="plots are drawn by matplotlib, which needs numpy")

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


def drawn(**parts: Any) -> bytes:
    """The one picture of a result."""
    found = {"benchmark": "wal", "machine": MACHINE, "rounds": 3, **parts}
    [svg] = plots(found).values()
    return svg


def bars_of(*rows: Any) -> bytes:
    return drawn(results=list(rows))


def curves_of(sweep: Sweep = SWEEP) -> bytes:
    return drawn(sweeps=[sweep.as_json()])


def texts(svg: bytes) -> list[str]:
    return ["".join(each.itertext()) for each in ET.fromstring(svg).iterfind(".//svg:text", SPACE)]


def marked(svg: bytes, name: str) -> list[ET.Element]:
    """The parts of a picture whose name begins so."""
    groups = ET.fromstring(svg).iterfind(".//svg:g", SPACE)
    return [each for each in groups if each.attrib.get("id", "").startswith(name)]


def lengths(*rows: Any) -> list[float]:
    """Of the bars, in ratios."""
    [axes] = bar_figure("title", "caption", rows).axes
    return [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]


def test_bars_are_as_long_as_their_ratios() -> None:
    half, twice = row("half", 0.5), row("twice", 2.0)
    assert lengths(half, twice) == [0.5, 2.0]
    svg = bars_of(half, twice)
    assert len(marked(svg, "bar-")) == 2
    caption = "medians of 3 rounds; 2 cores, ext4, Python 3.11, compiled codec"
    wanted = {"forebay bench wal", caption, "half", "twice", "0.50", "2.00", "500 msg/s"}
    assert wanted <= set(texts(svg))


def test_a_bar_that_would_dwarf_the_others_is_cut_and_says_how_long_it_is() -> None:
    rows = [row("usual", 1.0), row("huge", 50.0), row("huger", 90.0)]
    assert lengths(*rows) == [1.0, 5.0, 5.0]
    said = texts(bars_of(*rows))
    assert {"50.00", "90.00"} <= set(said)
    assert said.count("\u25b6") == 2


def test_a_goal_is_a_stroke_and_a_missed_one_is_said() -> None:
    svg = bars_of(row("met", 0.9, 0.8), row("not", 0.5, 0.6), row("none", 0.5))
    assert len(marked(svg, "goal-")) == 2
    assert [text for text in texts(svg) if "missed" in text] == ["missed 0.6"]


def test_rows_of_one_measurement_stand_together_whatever_their_order() -> None:
    rows = [row("a", 1, message_bytes=100), row("b", 1), row("a", 1, message_bytes=1024)]
    said = texts(bars_of(*rows))
    assert said.count("a") == said.count("b") == 1
    assert said.count("100 B") == 2
    assert said.count("1 KiB") == 1


def test_curves_have_a_point_for_each_value_and_higher_is_more() -> None:
    svg = curves_of()
    curves = marked(svg, "curve-")
    assert [len(each.findall(".//svg:use", SPACE)) for each in curves] == [3, 3]
    points = curves[0].findall(".//svg:use", SPACE)
    across = [float(each.attrib["x"]) for each in points]
    down = [float(each.attrib["y"]) for each in points]
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)


def test_the_default_and_the_machine_s_own_level_are_said() -> None:
    said = texts(curves_of())
    assert "dashed: plain write (600); the default, 10 MiB" in said
    assert {"64 KiB", "1 MiB", "10 MiB", "buffered", "synced", "MiB/s"} <= set(said)
    assert {SWEEP.title, SWEEP.knob} <= set(said)


def test_a_default_that_is_not_swept_is_not_drawn() -> None:
    values, curves = (1.0, 2.0), {"e": (1.0, 2.0)}
    sweep = Sweep("a", "b", "c", not BYTES, values, "d", curves, default=7.0)
    assert not any("dashed" in text for text in texts(curves_of(sweep)))
    [axes] = line_figure(sweep, "caption").axes
    assert len(axes.lines) == 1


def test_figures_are_short() -> None:
    assert [amount(each) for each in (0.5, 12.345, 999.6, 12345, 1_270_000)] == [
        "0.5", "12.3", "1,000", "12,345", "1.27 M",
    ]  # fmt: skip
    assert [size(each) for each in (100, 1024, 10 * MIB, 2**30)] == [
        "100 B", "1 KiB", "10 MiB", "1 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize("svg", [curves_of(), bars_of(row("n", 1, 0.9))], ids=["curves", "bars"])
def test_a_picture_stands_alone_and_suits_light_and_dark_pages(svg: bytes) -> None:
    title = ET.fromstring(svg).find("svg:title", SPACE)
    assert title is not None
    assert title.text in {"By the batch", "forebay bench wal"}
    described = ET.fromstring(svg).find("svg:desc", SPACE)
    assert described is not None
    bar = "n, 100 B, beside a <bare> loop & more: 1.00 (goal 0.9)"
    curves = (
        "MiB/s against fsync_max_batch_bytes; buffered: 10 at 64 KiB, 200 at 1 MiB, 410 at 10 MiB; "
        "synced: 1 at 64 KiB, 2 at 1 MiB, 3 at 10 MiB"
    )
    assert described.text in {bar, curves}
    assert b"<image" not in svg
    assert b'href="http' not in svg
    for shade in (b"#ffffff", b"#000000", b"white", b"black"):
        assert shade not in svg, "one of the two pages would hide it"


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_text_can_be_read_on_a_light_and_on_a_dark_page(page: str) -> None:
    def light(colour: str) -> float:
        """Relative luminance, as WCAG defines it."""
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in (plot.TEXT, plot.MISSED):
        dim, bright = sorted((light(page), light(colour)))
        assert (bright + 0.05) / (dim + 0.05) >= 3.8, colour


def test_words_are_written_as_they_are() -> None:
    said = texts(drawn(results=[row("a < b & c $d_e$", 1)]))
    assert {"a < b & c $d_e$", "beside a <bare> loop & more"} <= set(said)


def test_the_same_result_gives_the_same_bytes() -> None:
    found = result(row("a", 0.5, 0.4), row("b", 1.234))
    assert plots(found) == plots(json.loads(json.dumps(found)))


def test_a_sweep_survives_json() -> None:
    assert Sweep.of_json(json.loads(json.dumps(SWEEP.as_json()))) == SWEEP


def test_nothing_measured_has_no_picture() -> None:
    assert plots(result()) == {}


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


def test_without_matplotlib_it_says_what_to_install_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    where = ["--dir", str(tmp_path / "work"), "--plot", str(tmp_path / "plots")]
    done = CliRunner().invoke(main, ["bench", "wal", *where])
    assert done.exit_code == 2
    assert done.stderr == "forebay: plots need matplotlib: pip install 'forebay[plots]'\n"
    assert list(tmp_path.iterdir()) == []


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
