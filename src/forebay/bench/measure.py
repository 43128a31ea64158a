"""How things are measured here: side by side, in interleaved rounds, and reported as medians.

Machines are noisy, so a figure on its own says little. Each contender runs next to the machine's
own limit for the same bytes, round after round, and the ratio of the medians is the result.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Timed: TypeAlias = Callable[[Path], float]
"""Does its work in an empty directory and answers its rate, in the unit of its measurement."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A contender and the limit it is held against."""

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

    @property
    def limit_rate(self) -> float:
        return statistics.median(self.limit)

    @property
    def ratio(self) -> float:
        return self.rate / self.limit_rate

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "message_bytes": self.message_bytes,
            "unit": self.unit,
            "rate": self.rate,
            "limit_name": self.limit_name,
            "limit": self.limit_rate,
            "ratio": self.ratio,
            "goal": self.goal,
            "rounds": {"ours": self.ours, "limit": self.limit},
        }


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A directory that is gone afterwards."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="forebay-bench-", dir=parent or Path.cwd()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_rounds(
    measurements: list[Measurement], rounds: int, parent: Path | None, say: Callable[[str], None]
) -> list[Result]:
    """Every measurement in every round, contender and limit next to each other."""
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


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that holds `path`, as the kernel names it."""
    real = str(path.resolve())
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > len(best):
            best, kind = mount, name
    return kind


def machine(path: Path, *, compiled: bool) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "filesystem": filesystem_of(path),
        "compiled_codec": compiled,
        "platform": sys.platform,
    }
