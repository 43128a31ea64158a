"""What Spark's jobs and a plan need of memory: peaks, by process.

The jobs over 1 GiB and over 8 GiB are each done by a driver of its own, whose processes are watched
from outside: the driver's Python, the JVM, and the Python workers together. What is shared is
counted in shares (`Pss`). The JVM's heap has the size that it is given, and is touched in advance:
how much of it garbage has happened to fill says nothing. What is measured of the JVM beyond it is
all that could grow.

A scan is planned over very many objects, in time and memory, by a process of its own, whose peak
is the memory. Its catalog is made up: descriptors of objects that are not there, which planning
never opens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import forebay
from forebay.bench.measure import peak_mib, scratch
from forebay.catalog.catalog import Catalog, pointer
from forebay.catalog.kv import Put
from forebay.catalog.records import TopicRecord, encode_record
from forebay.catalog.sqlite import SqliteKv
from forebay.format.descriptor import ObjectDescriptor, encode_descriptor
from forebay.format.names import ObjectName, TopicName
from forebay.limits import GIB, MIB
from forebay.settings import SparkSettings, StoreSettings, UploaderSettings

GOAL_MIB: Final = 64
SIZES_GIB: Final = (1, 8)
TOPICS: Final = 8
JOBS: Final = ("offload", "scan", "verify", "compact")
_LOOK_SECONDS: Final = 0.1
_CHILD: Final = "import sys; from forebay.bench.spark_memory import {0}; {0}(sys.argv[1])"

PLAN_GOAL_MIB: Final = 200
_PLANNED: Final = TopicName("default", "long")
_OBJECT_BYTES: Final = 8 * MIB
_MESSAGES: Final = 8000
"""In each object; its index has an entry for a thousand of them."""


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
    with forebay.open(_settings_of(data)) as store:
        for number in range(TOPICS):
            topic = store.topic(f"t{number}")
            for _ in range(gib * GIB // TOPICS // (1024 * len(batch))):
                topic.append_many(batch)
            topic.flush()


def _watched(data: Path) -> dict[tuple[str, str], float]:
    """The peak in MiB of each kind of process during each job."""
    with subprocess.Popen(  # noqa: S603  # this interpreter, our own script
        [sys.executable, "-c", _CHILD.format("jobs_child"), str(data)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        sampler = _Sampler(driver.pid)
        assert driver.stdout is not None
        for line in driver.stdout:
            sampler.job = json.loads(line)["begins"]
        sampler.end()
        code = driver.wait()
    if code:
        raise RuntimeError(f"the driver ended with exit code {code}")
    return {key: peak for key, peak in sampler.peaks.items() if key[0] in JOBS}


class _Sampler:
    """Samples the processes of a session."""

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


def _settings_of(data: Path) -> StoreSettings:
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


def jobs_child(folder: str) -> None:
    """Runs the jobs one after the other, and prints when each begins."""
    from forebay.pipeline import compact, offload, spark_session, verify

    data = Path(folder)
    settings = _settings_of(data)
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


# ---- planning ----


def measure_planning(folder: Path, objects: int) -> dict[str, Any]:
    """The plan over so many descriptors, by a process of its own."""
    data = folder / "planned"
    _write_catalog(data, objects)
    output = subprocess.run(  # noqa: S603  # this interpreter, our own script
        [sys.executable, "-c", _CHILD.format("plan_child"), str(data)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout
    said = json.loads(output)
    return {
        "descriptors": objects,
        "splits": said["splits"],
        "seconds": said["seconds"],
        "mib": said["after"] - said["before"],
        "goal_mib": PLAN_GOAL_MIB,
    }


def _write_catalog(data: Path, objects: int) -> None:
    """A topic of so many objects, in SQLite."""
    data.mkdir(parents=True)
    (data / "objects").mkdir()
    kv = SqliteKv(data / "catalog.db")
    keys = Catalog(kv).keys
    end = objects * _MESSAGES
    record = TopicRecord(epoch=1, log_id="gone", tail=end, verified=end, reserved=end)
    kv.commit([], [Put(keys.record(_PLANNED), encode_record(record))])
    last = keys.current(_PLANNED)
    kv.commit([], [Put(last, pointer((objects - 1) * _MESSAGES))])
    step = _OBJECT_BYTES // 8
    for first in range(0, objects, 50):
        writes = []
        for number in range(first, min(first + 50, objects)):
            start = number * _MESSAGES
            name = str(ObjectName(start, start + _MESSAGES - 1))
            index = tuple((start + 1000 * at, step * at) for at in range(8))
            descriptor = ObjectDescriptor(
                name,
                start,
                start + _MESSAGES - 1,
                _OBJECT_BYTES,
                "0123456789abcdef",
                0,
                offset_index=index,
            )
            writes.append(Put(keys.descriptor(_PLANNED, start), encode_descriptor(descriptor)))
        kv.commit([], writes)
    kv.close()


def plan_child(data: str) -> None:
    """Prints seconds, splits, and the peak in MiB before and after planning."""
    from forebay.pipeline.source.options import scan_options
    from forebay.pipeline.source.scan import plan_scan
    from forebay.topic.view import StoreView

    options = scan_options({"path": data, "subscribe": str(_PLANNED)})
    StoreView(options.settings).close()  # what it imports is no part of a plan
    before = peak_mib()
    started = time.perf_counter()
    splits = plan_scan(options)
    seconds = time.perf_counter() - started
    said = {"seconds": seconds, "splits": len(splits), "before": before, "after": peak_mib()}
    print(json.dumps(said))
