"""Log, tiers, server and command line work where Spark and Arrow are not installed.

`make test-bare` runs all suites but the pipeline's that way; here a sample of them does. How the
packages are made to be missing: `bare/sitecustomize.py`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from support.paths import ROOT, SUPPORT

pytestmark = pytest.mark.timeout(300)  # each test starts processes

SRC: Final = ROOT / "src"
BARE: Final = {**os.environ, "PYTHONPATH": str(SUPPORT / "bare")}

MADE_OF_SPARK: Final = {
    "forebay.bench.spark",
    "forebay.pipeline.pulsar.batches",
    "forebay.pipeline.pulsar.columns",
    "forebay.pipeline.pulsar.data_source",
    "forebay.pipeline.pulsar.scan",
    "forebay.pipeline.pulsar.stream",
    "forebay.pipeline.sink.columns",
    "forebay.pipeline.sink.writer",
    "forebay.pipeline.source.columns",
    "forebay.pipeline.source.data_source",
    "forebay.pipeline.source.stream",
}
"""Modules whose classes are Spark's or Arrow's; what imports them does so where it is used."""

SAMPLE: Final = [
    "tests/admin/test_sink_commits.py::test_rows_arrive_once_and_in_order",
    "tests/admin/test_app_health.py",
    "tests/cli/test_inspect.py",
    "tests/format/test_format_golden.py",
    "tests/topic/test_storage.py",
    "tests/test_main_module.py",
]


def bare(*command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Runs Python without the packages."""
    return subprocess.run(
        [sys.executable, *command],
        env=BARE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def modules() -> set[str]:
    found = {
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        for path in (SRC / "forebay").rglob("*.py")
    }
    return found - {"forebay.__main__"}


def test_every_module_that_is_not_made_of_spark_is_imported_without_it() -> None:
    program = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
"""
    done = bare("-c", program, *sorted(modules()))
    assert done.returncode == 0, done.stderr
    failed = dict(line.split(" ") for line in done.stdout.splitlines())
    assert set(failed) == MADE_OF_SPARK
    assert set(failed.values()) <= {"pyspark", "pyarrow", "pandas", "numpy"}


def test_suites_pass_without_spark() -> None:
    done = bare("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *SAMPLE)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.parametrize("job", [["offload"], ["replay", "orders", "copy"], ["export", "orders"]])
def test_a_job_that_needs_spark_says_what_to_install(job: list[str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    produce = "import forebay, sys; forebay.open(sys.argv[1]).topic('orders').append(b'one')"
    assert bare("-c", produce, str(data)).returncode == 0
    where = [str(tmp_path / "table")] if job[0] == "export" else []
    done = bare("-m", "forebay", *job, *where, "--data", str(data))
    assert done.returncode == 2, done.stderr
    assert "Spark needs pyspark, pyarrow, pandas, numpy, which are not installed" in done.stderr
    assert "pip install" in done.stderr


def test_up_says_what_to_install_before_anything_is_started(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = bare("-m", "forebay", "up", "--data", str(data), "--listen", "127.0.0.1:0")
    assert done.returncode == 2, done.stderr
    assert "pip install 'pyspark[sql]" in done.stderr
    assert not data.exists()


def test_the_library_says_what_to_install() -> None:
    program = """
import forebay.pipeline
from forebay.errors import UsageError
for use in (lambda: forebay.pipeline.register, forebay.pipeline.spark_session):
    try:
        use()
    except UsageError as error:
        print(error)
"""
    done = bare("-c", program)
    assert done.stdout.count("pip install 'pyspark[sql]") == 2, done.stderr


PROVIDERS: Final = {
    "danube": "danube-client",
    "google": "protobuf",
    "grpc": "grpcio",
    "jsonschema_rs": "jsonschema-rs",
    "yaml": "pyyaml",
}
"""Packages whose distributions have other names."""


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(each for extra in extras for each in extra)]
    declared = {re.split(r"[\[<>=!~ ]", each, maxsplit=1)[0] for each in wanted}
    imported = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.partition(".")[0])
    foreign = (
        imported
        - sys.stdlib_module_names
        - {"forebay", "pyspark_forebay", "pyspark_forebay_pulsar"}
    )
    assert {PROVIDERS.get(name, name) for name in foreign} - declared == set()
