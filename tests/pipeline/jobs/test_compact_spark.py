"""Compactions on Spark: the same result as in one process, and as a command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.format.names import TopicName
from forebay.pipeline.execute import SparkExecutor
from forebay.pipeline.jobs.compact import Rewrite, Rewritten, compact, rewrite
from support.cli_runs import facts
from support.compactions import TOPIC, Setup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OTHER = TopicName("default", "invoices")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path / "data")
    yield setup
    setup.close()


def test_topics_are_compacted_on_executors_in_rounds(spark: SparkSession, setup: Setup) -> None:
    setup.lay(range(0, 301, 3), sidecars=False)
    setup.lay(range(0, 31, 3), OTHER)
    told: list[tuple[int, int]] = []
    report = compact(
        setup.settings,
        spark=spark,
        target_bytes=10**6,
        progress=lambda *at: told.append(at),
    )
    assert report.ok
    assert report.rounds == 2
    assert setup.ranges() == [(0, 299)]
    assert setup.ranges(OTHER) == [(0, 29)]
    setup.require_readable(300)
    setup.require_readable(30, OTHER)
    assert told[-1][0] == told[-1][1]
    frame = report.dataframe(spark)
    assert frame.where("sha256_before = sha256_after and error is null").count() == len(report.rows)
    assert {row.topic for row in frame.select("topic").collect()} == {str(TOPIC), str(OTHER)}


def test_a_worker_that_is_killed_is_repeated(
    spark: SparkSession, setup: Setup, tmp_path: Path
) -> None:
    setup.lay(range(0, 61, 3))
    mark, settings = tmp_path / "mark", setup.settings

    def dying(job: Rewrite) -> Rewritten:
        """The object is written and read back; then the worker is gone, and nobody is told."""
        made = rewrite(settings, job)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def run(tasks: Any, work: Any, progress: Any) -> Any:
        assert work is not None
        return SparkExecutor(spark).run(tasks, dying, "compact", progress)

    assert setup.compacted(run=run).ok
    assert mark.exists()
    assert setup.ranges() == [(0, 59)]
    setup.require_readable(60)


def test_the_command(spark: SparkSession, setup: Setup, tmp_path: Path) -> None:
    assert spark is not None, "the command takes the session that there is"
    setup.lay(range(0, 31, 3))
    said = facts("compact", "orders", "--target", "1MiB", "--data", tmp_path / "data")
    assert (said["ok"], said["objects"], said["replaced"]) == (True, 1, 10)
    assert said["rows"][0]["sha256_before"] == said["rows"][0]["sha256_after"]
    setup.require_readable(30)
