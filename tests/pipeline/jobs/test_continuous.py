"""The pipeline: cycle after cycle, until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.errors import ServiceUnavailable
from forebay.pipeline.jobs.continuous import FAILURES, Pipeline
from forebay.pipeline.jobs.offload import OffloadReport
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.view import StoreView
from support.disks import wait_until
from support.inline_executor import InlineExecutor
from support.prometheus_text import parse

NAME = "/default/orders"


def settings_of(data: Path) -> StoreSettings:
    uploader = UploaderSettings(runner="spark", interval_seconds=0.02, max_open_seconds=0)
    return job_settings(StoreSettings(data=data, uploader=uploader))


def failures() -> float:
    return parse(forebay.metrics.render())[FAILURES.name].total


def test_it_uploads_what_comes_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    executor = InlineExecutor()
    reports: list[OffloadReport] = []
    with forebay.open(settings) as store:
        topic = store.topic(NAME)
        driver = Pipeline(settings, executor)
        thread = threading.Thread(target=driver.run, args=[reports.append])
        thread.start()
        for round_ in range(1, 4):
            topic.append_many([b"x"] * 100)
            topic.flush()
            wait_until(lambda: topic.watermarks().verified == 100 * round_)  # noqa: B023
        runs = executor.runs
        wait_until(lambda: len(reports) > runs + 5)
        assert executor.runs == runs, "a cycle with nothing to do runs nothing"
        driver.stop()
        thread.join(120)
        assert not thread.is_alive()
    assert sum(report.messages for report in reports) == 300


def test_a_cycle_that_fails_is_counted_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path)
    before = failures()
    with forebay.open(settings) as store:
        store.topic(NAME).append_many([b"x"] * 100)

    class Failing(InlineExecutor):
        def run(self, *arguments: Any, **more: Any) -> Any:
            if self.runs < 2:
                self.runs += 1
                raise ServiceUnavailable("Spark gave it up")
            return super().run(*arguments, **more)

    driver = Pipeline(settings, Failing())
    driver.run(lambda report: driver.stop() if report.rows else None)
    assert failures() == before + 2
    assert "a cycle of the pipeline failed" in caplog.text
    with StoreView(settings) as view:
        record = view.topic(NAME).record
    assert record is not None
    assert record.verified == 100


def test_it_ends_when_spark_has_ended(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with forebay.open(settings) as store:
        store.topic(NAME).append(b"x", durability="synced")

    class Dead(InlineExecutor):
        def run(self, *_arguments: Any, **_more: Any) -> Any:
            raise ServiceUnavailable("no JVM")

        def alive(self) -> bool:
            return False

    with pytest.raises(ServiceUnavailable, match="start the pipeline again"):
        Pipeline(settings, Dead()).run()


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_command_uploads_until_sigterm(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text(
        f"storage:\n  wal: {{dir: {tmp_path}/data/wal}}\n"
        f"  cloud: {{backend: fs, root: {tmp_path}/data/objects}}\n"
        "  uploader: {runner: spark, interval_seconds: 0.1, max_open_seconds: 0}\n"
        f"metadata: {{backend: sqlite, path: {tmp_path}/data/catalog.db}}\n"
        "spark: {master: 'local[1,4]'}\n"
    )
    with forebay.open(config) as store:
        topic = store.topic(NAME)
        topic.append_many([b"x"] * 1000)
        topic.flush()
        driver = subprocess.Popen(
            [sys.executable, "-m", "forebay", "pipeline", "--config", str(config), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            wait_until(lambda: topic.watermarks().verified == 1000, seconds=400)
        finally:
            os.kill(driver.pid, signal.SIGTERM)
            output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0
    reports = [json.loads(line) for line in output.splitlines()]
    assert sum(report["messages"] for report in reports) == 1000
