"""`--runner threads`: verify, restore and offload of a small store without Spark, or its packages.

The commands run in a process in which pyspark, pyarrow, pandas and numpy cannot be imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import forebay
from forebay.cli import main
from forebay.errors import UsageError
from forebay.pipeline import offload, restore, verify
from support.object_folders import Folders, payload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPICS = [f"topic-{number}" for number in range(3)]
COUNTS = (7, 20, 3)
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyspark", "py4j", "pyarrow", "pandas", "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from forebay.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "data")


def without_spark(*arguments: object, code: int = 0) -> str:
    """What a command says where nothing of Spark can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout or done.stderr


def facts(*arguments: object, code: int = 0) -> Any:
    return json.loads(without_spark(*arguments, "--json", code=code))


def test_what_is_synced_is_offloaded_and_verified_without_spark(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as store:
        for name in TOPICS:
            store.topic(name).append_many([payload(name, at) for at in range(300)])
    made = facts("offload", "--runner", "threads", "--data", tmp_path)
    assert (made["topics"], made["messages"]) == (3, 900)
    again = facts("offload", "--runner", "threads", "--data", tmp_path)
    assert (again["objects"], again["waves"]) == (0, 0)
    found = facts("verify", "--runner", "threads", "--data", tmp_path)
    assert (found["ok"], found["topics"], found["messages"]) == (True, 3, 900)
    with forebay.open(tmp_path) as store:
        assert store.topic(TOPICS[0]).watermarks().verified == 300


def test_damage_is_found_without_spark(folders: Folders) -> None:
    folders.fill(TOPICS, COUNTS)
    folders.flip(TOPICS[1], "data-7-26.dnb1", frame=2)
    found = facts("verify", "--runner", "threads", "--data", folders.data, code=1)
    assert (found["objects"], found["errors"]) == (8, 1)
    [row] = [row for row in found["rows"] if row["severity"] == "error"]
    assert (row["topic"], row["kind"]) == (f"/default/{TOPICS[1]}", "corrupt")


@pytest.mark.parametrize("whole", [True, False])
def test_the_catalog_is_restored_without_spark(folders: Folders, whole: bool) -> None:
    folders.fill(TOPICS, COUNTS)
    folders.lose_all_but_the_objects()
    folders.drop_sidecars(TOPICS[0])
    more = ["--verify"] if whole else []
    arguments = ["--all", "--assume-nothing-lost", *more, "--data", folders.data]
    lines = without_spark("restore", "--runner", "threads", "--json", *arguments).splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["read_whole"] for row in rows] == ([3, 3, 3] if whole else [3, 0, 0])
    for name in TOPICS:
        assert folders.messages(name) == [(at, payload(name, at)) for at in range(sum(COUNTS))]


@pytest.mark.parametrize("command", [["verify"], ["offload"], ["restore", "--all"]])
def test_a_master_does_not_go_with_threads(folders: Folders, command: list[str]) -> None:
    folders.fill(TOPICS[:1], COUNTS)
    arguments = [*command, "--runner", "threads", "--master", "local[2]", "--data"]
    done = CliRunner().invoke(main, [*arguments, str(folders.data)])
    assert done.exit_code == 2
    assert "choose one of them" in done.output


def test_a_server_decides_where_its_jobs_run(folders: Folders) -> None:
    arguments = ["verify", "--runner", "threads", "--url", "http://127.0.0.1:1", "--data"]
    done = CliRunner().invoke(main, [*arguments, str(folders.data)])
    assert done.exit_code == 2
    assert "--runner cannot be used with --url" in done.output


def test_the_help_says_when_to_choose_which() -> None:
    for command in ("verify", "offload", "restore"):
        said = " ".join(CliRunner().invoke(main, [command, "--help"]).output.split())
        assert "--runner [spark|threads]" in said
        assert "without Java" in said


def test_the_functions_take_a_runner(folders: Folders) -> None:
    seen: list[tuple[int, int]] = []
    folders.fill(TOPICS, COUNTS)
    report = verify(folders.data, runner="threads", progress=lambda *at: seen.append(at))
    assert (report.ok, report.objects) == (True, 9)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert offload(folders.data, runner="threads").ok
    folders.lose_all_but_the_objects()
    assert restore(folders.data, everything=True, verify=True, runner="threads").adopted == 9


def test_a_session_does_not_go_with_threads(spark: SparkSession, folders: Folders) -> None:
    with pytest.raises(UsageError, match="choose one of them"):
        verify(folders.data, spark=spark, runner="threads")
