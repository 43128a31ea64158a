"""The README's commands and code, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def steps(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what the README says that it prints."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    assert found
    return found


@pytest.mark.timeout(300)
def test_the_commands_print_what_the_readme_shows_one_after_the_other(tmp_path: Path) -> None:
    for command, shown in (step for block in blocks("console") for step in steps(block)):
        if command.startswith("export PATH="):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        )
        expected = re.escape(shown).replace("…", ".*")
        assert re.fullmatch(expected, done.stdout), (command, done.stdout)


@pytest.mark.parametrize("block", [b for b in blocks("python") if b.startswith("import")])
def test_the_code_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout


def test_the_readme_has_both_kinds_of_blocks() -> None:
    assert blocks("console")
    assert len([b for b in blocks("python") if b.startswith("import")]) >= 2
