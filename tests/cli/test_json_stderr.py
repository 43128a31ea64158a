"""Standard error with `--log-format json`: JSON to the last line, whoever writes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.cli.json_stderr import as_json_line
from support.cli_runs import run
from support.server_processes import PATIENCE, ServerProcess

JSON: Final = ("--log-format", "json")

NOISE: Final = """
import logging, os, subprocess, sys, threading, warnings
import click
from forebay.cli import main

@main.command()
def noise():
    warnings.warn("a warning of Python")
    logging.getLogger("uvicorn.error").error("an error of another library")
    subprocess.run(["sh", "-c", "echo a child process >&2"], check=True)
    os.write(2, b"a library in C, \\xff\\n\\n")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    os.write(2, b"no end of line")
    raise RuntimeError("a bug")

main(["--log-format", "json", "noise"])
"""


def lines_of(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert {"at", "level", "logger", "event"} <= each.keys()
    return found


def test_a_line_that_is_nested_too_deeply_for_a_parser_is_wrapped() -> None:
    line = b"[" * 100_000
    assert json.loads(as_json_line(line))["event"] == line.decode()


def test_everything_that_a_process_and_its_children_write_is_json() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NOISE], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert ended.returncode == 1
    found = lines_of(ended.stderr)
    said = {each["event"] for each in found}
    assert "an error of another library" in said
    assert {"a child process", "no end of line"} <= said
    assert "a library in C, \ufffd" in said
    assert any("UserWarning: a warning of Python" in each for each in said)
    traces = {each["event"]: each["trace"] for each in found if "trace" in each}
    assert traces["a thread failed"].endswith("ZeroDivisionError: division by zero")
    assert traces["the process failed"].endswith("RuntimeError: a bug")


def test_lines_of_json_are_passed_on_as_they_are() -> None:
    assert as_json_line(b'{"a": 1}') == b'{"a": 1}\n'
    for line in (b"[1]", b"7", b'{"a": ', b"plain", b"\xff"):
        assert json.loads(as_json_line(line))["logger"] == "stderr"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("describe", "orders", "--data", "nowhere"), "nowhere is not a data directory"),
        (("describe",), "Missing argument 'TOPIC'. (see "),
        (("--bogus", "topics"), "No such option"),
    ],
)
def test_the_error_that_ends_a_command_is_a_line_of_json(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*JSON, *words)
    assert result.exit_code == 2
    [line] = lines_of(result.stderr)
    assert line["level"] == "error"
    assert message in line["event"]


def test_a_server_writes_json_from_its_start_to_its_end(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text(
        f"data: {tmp_path / 'data'}\nstorage: {{uploader: {{max_object_messages: 2, "
        "interval_seconds: 0.1}}\n"
    )
    log = tmp_path / "log"
    with ServerProcess("serve", config, log, options=JSON) as server:
        server.produce("orders", ["a", "b"])
        server.wait_until(lambda: "object committed" in log.read_text(), "it uploaded")
        second = subprocess.run(
            [sys.executable, "-m", "forebay", *JSON, "serve", "--config", str(config)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0
    found = lines_of(log.read_text())
    [committed] = [each for each in found if each["event"] == "object committed"]
    assert (committed["topic"], committed["closed_by"]) == ("/default/orders", "messages")
    assert found[-1]["event"] == "stopped; everything is synced"
    assert second.returncode == 2
    [refused] = lines_of(second.stderr)
    assert "server" in refused["event"]
