"""An export that is killed, or that another one runs into, leaves each message in a table once."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from forebay.pipeline.jobs.export.job import Format, export, rejected_location
from support import exported_tables
from support.exported_tables import FORMATS, append
from support.paths import SUPPORT, TESTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROGRAM = SUPPORT / "exporting_process.py"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def run(*arguments: str | int | Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose topic has fourteen messages."""
    data = tmp_path_factory.mktemp("fourteen") / "data"
    append(data, [b"%d" % number for number in range(14)])
    return data


def require_kills(lines: list[str], step: int) -> None:
    assert lines[-1].startswith("passed")
    assert len(lines) > 40 / step


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_killed_at_a_change_of_a_file_is_finished_by_the_next(
    kind: Format, topic: Path, tmp_path: Path
) -> None:
    """At some of them; the soak has all."""
    step = 94 if kind == "iceberg" else 32
    require_kills(run("steps", topic, tmp_path, kind, 2, step), step)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_killed_at_any_change_of_a_file_is_finished_by_the_next(
    kind: Format, topic: Path, tmp_path: Path
) -> None:
    require_kills(run("steps", topic, tmp_path, kind, 1, 1), 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_exporters_that_race_commit_nothing_twice(
    kind: Format, topic: Path, tmp_path: Path
) -> None:
    run("race", topic, tmp_path, kind)


# ---- on Spark -----------------------------------------------------------------------------------

VALUES = [
    b"no JSON" if number % 10 == 0 else json.dumps({"n": number, f"f{number // 40}": "x"}).encode()
    for number in range(140)
]


def kill_an_export(data: Path, table: Path, kind: Format, seconds: float) -> None:
    """Starts an export, and kills it so long after it began, unless it is done before."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, "spark", data, table, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    ) as process:
        output = process.stdout
        assert output is not None
        assert output.readline() == b"ready\n"
        _wait(output, seconds)
        process.send_signal(signal.SIGKILL)


def _wait(output: IO[bytes], seconds: float) -> None:
    """Until the process says something, or for so long."""
    select.select([output], [], [], seconds)


def require_values_once(kind: Format, table: Path) -> None:
    good = [number for number, value in enumerate(VALUES) if value != b"no JSON"]
    found = exported_tables.query(kind, table, '"offset", n')
    assert sorted(found) == [(number, number) for number in good]
    aside = exported_tables.offsets(kind, rejected_location(table))
    assert aside == sorted(set(range(len(VALUES))) - set(good))


def kill_and_finish(
    spark: SparkSession, folder: Path, kind: Format, kills: int, random_: random.Random
) -> None:
    data, table = folder / "data", folder / "lake" / "orders"
    append(data, VALUES)
    for _ in range(kills):
        kill_an_export(data, table, kind, random_.uniform(0, 12))
    report = export(data, "orders", table, format=kind, value="json", spark=spark)
    assert report.ok
    assert report.next_offset == len(VALUES)
    require_values_once(kind, table)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_export_on_spark_that_is_killed_is_finished_by_the_next(
    spark: SparkSession, tmp_path: Path
) -> None:
    kill_and_finish(spark, tmp_path, "delta", 1, random.Random())


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FORMATS)
def test_exports_on_spark_that_are_killed_again_and_again(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(4):
        kill_and_finish(spark, tmp_path / str(number), kind, 3, random.Random(number))


def test_two_exports_at_once_share_the_work(spark: SparkSession, tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "lake" / "orders"
    append(data, VALUES)
    reports = []

    def work(rows: int) -> None:
        reports.append(
            export(
                data,
                "orders",
                table,
                format="iceberg",
                value="json",
                max_batch_rows=rows,
                spark=spark,
            )
        )

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (30, 45)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(report.ok for report in reports)
    assert sum(report.records + report.rejected for report in reports) == len(VALUES)
    require_values_once("iceberg", table)
