"""The package as a program: as a module, and as the file that `spark-submit` is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forebay

FILE = Path(forebay.__file__).with_name("__main__.py")


@pytest.mark.parametrize("how", [[str(FILE)], ["-m", "forebay"]], ids=["file", "module"])
@pytest.mark.parametrize("command", [[], ["offload"], ["inspect"]], ids=" ".join)
def test_the_package_runs_as_a_module_and_as_a_file(
    how: list[str], command: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *how, *command, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")


def test_the_file_runs_from_its_own_directory() -> None:
    done = subprocess.run(
        [sys.executable, FILE.name, "--help"],
        cwd=FILE.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
