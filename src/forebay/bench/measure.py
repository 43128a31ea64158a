"""How benchmarks measure and report: side by side, in interleaved rounds, as medians.

Machines are noisy, so a rate alone says little. Each measurement runs next to its limit, which is
what this machine does with the same bytes without Forebay, round after round. The result is the
ratio of the medians. A benchmark returns plain data (`result_of`), which `show` prints as tables or
as JSON, and draws with `forebay.bench.plot` if a directory for plots is given.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import forebay
from forebay.errors import ServiceError
from forebay.format.codec import COMPILED
from forebay.settings import StoreSettings
from forebay.topic.store import Topic

_STOP_SECONDS: Final = 20.0

Timed: TypeAlias = Callable[[Path], float]
"""Does its work in an empty directory and returns its rate, in the unit of its measurement."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured, and the limit that it is compared to."""

    name: str
    message_bytes: int
    unit: str
    ours: Timed
    limit_name: str
    limit: Timed
    goal: float | None = None


@dataclass(slots=True)
class Result:
    name: str
    message_bytes: int
    unit: str
    limit_name: str
    goal: float | None
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.ours)

    def as_json(self) -> dict[str, Any]:
        limit = statistics.median(self.limit)
        return {
            "name": self.name,
            "message_bytes": self.message_bytes,
            "unit": self.unit,
            "rate": self.rate,
            "limit_name": self.limit_name,
            "limit": limit,
            "ratio": self.rate / limit,
            "goal": self.goal,
            "rounds": {"ours": self.ours, "limit": self.limit},
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """Curves over the values of one setting; every curve has a point for each of them."""

    name: str
    title: str
    knob: str
    in_bytes: bool
    values: tuple[float, ...]
    unit: str
    curves: Mapping[str, tuple[float, ...]]
    default: float | None = None
    """The default of the setting; None if the caller must choose a value."""
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
        values, curves = tuple(found["values"]), found["curves"].items()
        points = {name: tuple(each) for name, each in curves}
        return Sweep(**{**found, "values": values, "curves": points})

    def shown(self, value: float) -> str:
        return size(value) if self.in_bytes else f"{value:g}"


# ---- taking measurements ----


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A new directory, which is removed afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="forebay-bench-", dir=parent or Path.cwd()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def open_topic(source: Path | StoreSettings) -> Iterator[Topic]:
    """A topic as a user opens it: with the defaults, unless settings are given."""
    with forebay.open(source) as store:
        yield store.topic("bench")


def run_rounds(
    measurements: list[Measurement], rounds: int, parent: Path | None, say: Callable[[str], None]
) -> list[Result]:
    """Runs every measurement in every round, each followed by its limit."""
    results = [Result(m.name, m.message_bytes, m.unit, m.limit_name, m.goal) for m in measurements]
    for number in range(rounds):
        for measurement, result in zip(measurements, results, strict=True):
            say(f"round {number + 1}/{rounds}: {measurement.name} {measurement.message_bytes} B")
            with scratch(parent) as path:
                result.ours.append(measurement.ours(path))
            with scratch(parent) as path:
                result.limit.append(measurement.limit(path))
    return results


def rate_of(amount: float, work: Callable[[], object]) -> float:
    """`amount` a second, for what `work` does once."""
    started = time.perf_counter()
    work()
    return amount / (time.perf_counter() - started)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Calls `work` with 0 to `count` - 1, each in a thread; raises the first error."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def server_process(*arguments: str) -> Iterator[dict[str, Any]]:
    """Runs a module in a separate process; yields the line of JSON that it prints once it listens.

    The process ends with the block: its input is closed, and it gets SIGTERM.
    """
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(  # noqa: S603  # this interpreter, and a module of this package
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        if not said:
            raise ServiceError(f"{' '.join(command)} ended before it listened")
        yield json.loads(said)
    finally:
        process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def payload_of(size: int) -> bytes:
    """Random bytes, the same ones for the same size."""
    return random.Random(size).randbytes(size)


def write_and_sync(path: Path, piece: int, pieces: int, amount: float) -> float:
    """`amount` a second by nothing but `write` and `fdatasync`, one of each for every piece."""
    data = payload_of(piece)
    file = os.open(path / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write() -> None:
        for _ in range(pieces):
            os.write(file, data)
            os.fdatasync(file)

    try:
        return rate_of(amount, write)
    finally:
        os.close(file)


def peak_mib() -> float:
    """The peak memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def progress_line(*, progress: bool) -> Callable[[str], None]:
    """Shows what is being measured in one line of a terminal, each text over the last."""

    def say(text: str) -> None:
        if progress and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return say


# ---- results ----


def result_of(benchmark: str, rounds: int, directory: Path | None, **parts: Any) -> dict[str, Any]:
    """The result of a benchmark, with what its figures depend on."""
    filesystem = _filesystem_of(directory or Path.cwd())
    found: dict[str, Any] = {
        "benchmark": benchmark,
        "machine": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "filesystem": filesystem,
            "compiled_codec": COMPILED,
            "platform": sys.platform,
        },
        "rounds": rounds,
        **parts,
    }
    if filesystem in {"tmpfs", "ramfs"}:
        found["warning"] = "the directory is in memory: name one on a disk with --dir"
    return found


def _filesystem_of(path: Path) -> str:
    """The type of the filesystem that holds `path`, as the kernel names it."""
    real = str(path.resolve())
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > len(best):
            best, kind = mount, name
    return kind


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


def show(found: dict[str, Any], *, as_json: bool, plot: Path | None = None) -> None:
    """Prints a result: tables for people, JSON for everything else. Draws it if `plot` is given."""
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        print()
    elif "sweeps" in found:
        _print_sweeps(found)
    else:
        _print_results(found)
    if plot is not None:
        from forebay.bench.plot import write_plots

        for path in write_plots(found, plot):
            print(path, file=sys.stderr)


_TABLE_WIDTH = 132
"""Narrower than this, the names of the measurements would be cut."""


def _print_sweeps(found: dict[str, Any]) -> None:
    """A row for each curve, a column for each value of its setting."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, _TABLE_WIDTH))
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


def _print_results(found: dict[str, Any]) -> None:
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
        missed = row["goal"] is not None and row["ratio"] < row["goal"]
        table.add_row(
            row["name"],
            f"{row['message_bytes']} B",
            f"{row['rate']:,.0f} {row['unit']}",
            row["limit_name"],
            f"{row['limit']:,.0f}",
            f"{row['ratio']:.2f}",
            "" if row["goal"] is None else f"≥ {row['goal']}{' missed' if missed else ''}",
        )
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    console.print(table)
    for line in _remarks(found):
        console.print(line)
    if "warning" in found:
        console.print(f"warning: {found['warning']}", style="bold")


def _remarks(found: dict[str, Any]) -> Iterator[str]:
    """The figures that are not in the table, a line each."""
    if memory := found.get("memory"):
        yield (
            f"peak memory: {memory['mib_at_1_million']:.0f} MiB after 1 million messages, "
            f"{memory['mib_at_10_million']:.0f} MiB after 10 million "
            f"(growth {memory['growth_mib']:.1f} MiB, goal ≤ {memory['goal_mib']})"
        )
    if plan := found.get("planning"):
        yield (
            f"planning over {plan['descriptors']:,} descriptors: {plan['seconds']:.2f} s and "
            f"{plan['mib']:.0f} MiB (goal ≤ {plan['goal_mib']}), {plan['splits']:,} splits; "
            f"1 GiB is read in {plan['seconds_to_read_1_gib']:.2f} s"
        )
    if follow := found.get("follow"):
        yield (
            f"follow at {follow['rate']:,} messages a second: {follow['p50_ms']:.1f} ms at the "
            f"median, {follow['p99_ms']:.1f} ms at the 99th percentile, {follow['max_ms']:.0f} ms "
            "at most"
        )
    for delay in found.get("delays", ()):
        missed = " missed" if delay["ratio"] < delay["goal"] else ""
        yield (
            f"delivery at {delay['rate']:,} messages a second, {delay['name']}: "
            f"{delay['ms']:.2f} ms, the bare service {delay['bare_ms']:.2f} ms, ratio "
            f"{delay['ratio']:.2f} (goal ≥ {delay['goal']}{missed})"
        )
