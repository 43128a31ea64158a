"""Commands start quickly: what they do not need is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support.cli_runs import make_tiered

HEAVY: Final = {
    "deltalake",
    "grpc",
    "msgspec",
    "numpy",
    "obstore",
    "orjson",
    "pandas",
    "pyarrow",
    "pyiceberg",
    "pyspark",
    "rich",
    "starlette",
    "uvicorn",
    "yaml",
}
FOR_NOTHING: Final = {*HEAVY, "asyncio", "http.client", "sqlite3", "ssl"}
PROGRAM: Final = """
import sys
from forebay.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as end:
        assert not end.code, end.code
print(*sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("startup") / "data"
    make_tiered(data)
    return data


def imported(*commands: str) -> set[str]:
    """By all of the commands, one after the other in one process."""
    arguments = [sys.executable, "-c", PROGRAM, *commands]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stderr.split())


def test_help_needs_next_to_nothing() -> None:
    found = imported("--help", "--version", "consume --help", "completion bash")
    assert "forebay.cli" in found
    assert found & FOR_NOTHING == set()
    assert not any(each.startswith(("forebay.topic", "forebay.wal")) for each in found)


def test_where_no_server_runs_no_client_is_imported(data: Path) -> None:
    commands = ("topics", "describe orders", "explain orders 3", "consume orders --limit 1")
    found = imported(*(f"{command} --data {data}" for command in commands))
    assert found & {*HEAVY, "http.client"} == set()


def test_commands_without_spark_import_nothing_heavy(data: Path) -> None:
    commands = ("sweep --dry-run", "repair")
    found = imported(*(f"{command} --data {data}" for command in commands))
    assert found & HEAVY == set()
