"""The README's commands and code, run as they stand there."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.paths import ROOT

README = ROOT / "README.md"
STOP = "<!-- tour: stop the server -->"
ADDRESS = "127.0.0.1:8650"
BROKER = "127.0.0.1:6650"
BOTH_KINDS = r"^```(console|python)\n(.*?)^```|^(<!-- tour: .*? -->)"
START_SECONDS = 400
COMMAND_SECONDS = 400  # the start of Spark on a machine that is busy
STOP_SECONDS = 400


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def tour() -> list[tuple[str, str]]:
    """Blocks and marks of the tour, in their order: (language, text), or ("mark", text)."""
    text = README.read_text()
    section = text[text.index("## Five minutes") : text.index("## From here")]
    found = re.findall(BOTH_KINDS, section, re.MULTILINE | re.DOTALL)
    return [("mark", mark) if mark else (language, body) for language, body, mark in found]


def steps(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, and what the README says that it prints."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    assert found
    return found


def free_address() -> str:
    """With a port below those that the system gives to clients: nobody else gets it meanwhile."""
    while True:
        address = ("127.0.0.1", random.randrange(10_000, 30_000))
        with socket.socket() as tried, suppress(OSError):
            tried.bind(address)
            return f"{address[0]}:{address[1]}"


class Tour:
    """Two terminals in one directory: the server's, and the other one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The README's own may be taken by somebody who follows it.
        self.address, self.broker = free_address(), free_address()
        self.server: subprocess.Popen[bytes] | None = None
        self.output = directory / "server.txt"

    def environment(self) -> dict[str, str]:
        kept = {name: each for name, each in os.environ.items() if not name.startswith("MAKE")}
        return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def matches(self, shown: str, printed: str) -> bool:
        expected = re.escape(self.placed(shown)).replace("…", ".*")
        if shown and not printed.endswith("\n"):  # as an answer that curl prints
            printed += "\n"
        return re.fullmatch(expected, printed, re.DOTALL) is not None

    def placed(self, text: str) -> str:
        """The text with this tour's addresses."""
        return text.replace(ADDRESS, self.address).replace(BROKER, self.broker)

    def make_up(self, shown: str) -> None:
        # What is installed is: the tests run in it.
        data = self.directory / "data"
        options = f"ARGS=--data {data} --listen {self.address} --broker {self.broker}"
        with self.output.open("wb") as output:
            self.server = subprocess.Popen(
                ["make", "--no-print-directory", "-o", ".venv/.installed", "up", options],
                cwd=ROOT,
                env=self.environment(),
                stdout=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.matches("…" + shown, self.output.read_text()):
            assert self.server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Ctrl-C: the whole group of processes gets it, as from a terminal."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGINT)
            self.server.wait(STOP_SECONDS)
            self.server = None
            assert not (self.directory / "data" / "server.json").exists()

    def run(self, command: str, shown: str) -> None:
        done = subprocess.run(
            ["bash", "-c", self.placed(command)],
            cwd=self.directory,
            env=self.environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert self.matches(shown, done.stdout), (command, done.stdout, done.stderr)


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_tour_prints_what_the_readme_shows_from_its_start_to_its_end(tmp_path: Path) -> None:
    walk = Tour(tmp_path)
    try:
        for language, text in tour():
            if language == "mark":
                assert text == STOP
                walk.stop()
            elif language == "python":
                run_code(walk.placed(text), tmp_path)
            else:
                for command, shown in steps(text):
                    if command == "make up":
                        walk.make_up(shown)
                    elif not command.startswith("export PATH="):
                        walk.run(command, shown)
    finally:
        walk.stop()


def run_code(block: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(each, marks=[pytest.mark.spark] if "spark" in each else [])
        for each in blocks("python")
        if each.startswith("import") and '"numbers"' not in each and BROKER not in each
    ],
)
def test_the_code_runs(block: str, tmp_path: Path) -> None:
    run_code(block, tmp_path)


def test_the_tour_goes_through_everything_that_it_promises() -> None:
    text = "\n".join(block for _, block in tour())
    for part in ("make up", "produce", "consume", "offload", "rm -r data/wal", STOP, "verify"):
        assert part in text
    assert 'spark.read.format("forebay")' in text


def test_the_readme_has_code_outside_the_tour() -> None:
    assert len([b for b in blocks("python") if b.startswith("import")]) >= 3
