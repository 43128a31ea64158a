"""A real cluster of two workers: work goes to both, and a lost one costs no result."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.driver_processes import DriverProcess
from support.paths import SUPPORT
from support.spark_cluster import LocalCluster

WHOLE = sum(range(4000))


@contextmanager
def counting(cluster: LocalCluster, folder: Path) -> Iterator[DriverProcess]:
    settings = cluster.settings()
    options = json.dumps(dict(settings.options))
    arguments = [str(SUPPORT / "cluster_count.py"), settings.master, str(folder), options]
    with DriverProcess(arguments, cluster.environment()) as driver:
        driver.wait_until(lambda: len(marks(folder)) == 2, "a task on each of both workers")
        yield driver


def marks(folder: Path) -> set[int]:
    """The sessions of the workers that run tasks or ran them."""
    return {int(path.name.rpartition("-")[2]) for path in folder.glob("task-*")}


def found(lines: list[str]) -> list[tuple[int, int]]:
    [line] = [line for line in lines if line.startswith("found ")]
    return [(worker, part) for worker, part in json.loads(line.removeprefix("found "))]


@pytest.mark.soak  # the kills in tests/chaos show as much, in every run
def test_a_job_runs_on_both_workers(spark_cluster: LocalCluster, tmp_path: Path) -> None:
    with counting(spark_cluster, tmp_path) as driver:
        assert {each.worker for each in spark_cluster.executors()} == set(spark_cluster.workers)
        (tmp_path / "go").touch()
        lines = driver.finish()
    results = found(lines)
    assert len({worker for worker, _ in results}) == 2
    assert sum(part for _, part in results) == WHOLE
    assert "slots 2" in lines


@pytest.mark.soak
def test_a_worker_that_is_lost_in_the_middle_costs_no_result(
    spark_cluster: LocalCluster, tmp_path: Path
) -> None:
    with counting(spark_cluster, tmp_path) as driver:
        lost, kept = spark_cluster.executors()
        survivor = os.getsid(kept.pid)
        spark_cluster.kill_worker(lost.worker)
        assert spark_cluster.executors() == [kept]
        (tmp_path / "go").touch()
        results = found(driver.finish())
    assert sum(part for _, part in results) == WHOLE
    # No task had ended before, so the other worker did the work of both.
    assert {worker for worker, _ in results} == {survivor}
    joined = spark_cluster.start_worker()
    assert spark_cluster.workers == [kept.worker, joined]


@pytest.mark.soak
def test_nothing_is_left_of_a_cluster_that_was_stopped() -> None:
    before = sessions()
    with LocalCluster(workers=1) as cluster:
        leaders = sessions() - before
    assert len(leaders) == 2
    assert sessions() == before
    assert cluster.workers == []


def sessions() -> set[int]:
    """Of the processes that this one started, and that live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(fields[3]))
    return found - {os.getsid(0)}
