"""How much memory the jobs take of 1 GiB and of 8 GiB of data: peaks, by process.

Each size is done by a driver of its own, whose processes are watched from outside: the driver's
Python, the JVM, and the Python workers together. What is shared is counted in shares (`Pss`).

The JVM's heap has the size that it is given, and is touched in advance: how much of it garbage has
happened to fill says nothing. What is measured of the JVM beyond it is all that could grow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import forebay
from forebay.bench.measure import scratch
from forebay.limits import GIB, MIB
from forebay.settings import SparkSettings, StoreSettings, UploaderSettings

GOAL_MIB: Final = 64
SIZES_GIB: Final = (1, 8)
TOPICS: Final = 8
JOBS: Final = ("offload", "scan", "verify", "compact")
_LOOK_SECONDS: Final = 0.1
_SCRIPT: Final = """
import sys
from pathlib import Path
from forebay.bench.spark_memory import jobs_child
jobs_child(Path(sys.argv[1]))
"""


def settings_of(data: Path) -> StoreSettings:
    return StoreSettings(
        data=data,
        uploader=UploaderSettings(enabled=False, max_object_bytes=32 * MIB),
        spark=SparkSettings(
            "local[2,4]",
            {
                "spark.driver.memory": "512m",
                "spark.driver.extraJavaOptions": "-Xms512m -XX:+AlwaysPreTouch",
            },
        ),
    )


def jobs_child(data: Path) -> None:
    """Runs the jobs one after the other, and says when each begins."""
    from forebay.pipeline import compact, offload, spark_session, verify

    settings = settings_of(data)
    spark = spark_session(settings.spark)

    def scan() -> None:
        table = spark.read.format("forebay").option("path", str(data))
        rows = table.option("subscribePattern", ".*").option("columns", "offset,value").load()
        rows.selectExpr("count(*)", "sum(length(value))", "sum(offset)").collect()

    jobs: dict[str, Callable[[], object]] = {
        "offload": lambda: offload(settings, spark=spark),
        "scan": scan,
        "verify": lambda: verify(settings, spark=spark),
        "compact": lambda: compact(settings, spark=spark, target_bytes=256 * MIB),
    }
    for name in JOBS:
        print(json.dumps({"begins": name}), flush=True)
        jobs[name]()
    print(json.dumps({"begins": "end"}), flush=True)
    spark.stop()


def measure_memory(parent: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each job and kind of process."""
    peaks = {}
    for gib in SIZES_GIB:
        with scratch(parent) as folder:
            say(f"memory: writing {gib} GiB")
            _write(folder / "data", gib)
            say(f"memory: the jobs over {gib} GiB")
            peaks[gib] = _watched(folder / "data")
    small, large = (peaks[gib] for gib in SIZES_GIB)
    return [
        {
            "job": job,
            "process": kind,
            "mib_at_1_gib": small[job, kind],
            "mib_at_8_gib": large[job, kind],
            "growth_mib": large[job, kind] - small[job, kind],
            "goal_mib": GOAL_MIB,
        }
        for job, kind in large
    ]


def _write(data: Path, gib: int) -> None:
    batch = [b"x" * 1024] * 5000
    with forebay.open(settings_of(data)) as store:
        for number in range(TOPICS):
            topic = store.topic(f"t{number}")
            for _ in range(gib * GIB // TOPICS // (1024 * len(batch))):
                topic.append_many(batch)
            topic.flush()


def _watched(data: Path) -> dict[tuple[str, str], float]:
    """The peak in MiB of each kind of process during each job."""
    with subprocess.Popen(  # noqa: S603  # this interpreter, our own script
        [sys.executable, "-c", _SCRIPT, str(data)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        watch = _Watch(driver.pid)
        assert driver.stdout is not None
        for line in driver.stdout:
            watch.job = json.loads(line)["begins"]
        watch.end()
        code = driver.wait()
    if code:
        raise RuntimeError(f"the driver ended with exit code {code}")
    return {key: peak for key, peak in watch.peaks.items() if key[0] in JOBS}


class _Watch:
    """Looks again and again at the processes of a session."""

    def __init__(self, session: int) -> None:
        self.job = "start"
        self.peaks: dict[tuple[str, str], float] = {}
        self._session = session
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            job, now = self.job, self._now()
            for kind, mib in now.items():
                self.peaks[job, kind] = max(self.peaks.get((job, kind), 0.0), mib)

    def _now(self) -> dict[str, float]:
        found = dict.fromkeys(("driver", "jvm", "workers"), 0.0)
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
                if session != self._session:
                    continue
                command = os.fsdecode((folder / "cmdline").read_bytes())
                rollup = (folder / "smaps_rollup").read_text()
            except (OSError, ValueError):
                continue  # it has just ended
            pss = next(
                (line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")), "0"
            )
            found[self._kind(int(folder.name), command)] += int(pss) / 1024
        return found

    def _kind(self, pid: int, command: str) -> str:
        if pid == self._session:
            return "driver"
        return "jvm" if "org.apache.spark" in command else "workers"
