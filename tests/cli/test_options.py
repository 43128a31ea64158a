"""Where a command finds its store, what it logs, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cli.options import chosen_settings
from forebay.config.reference import render
from forebay.errors import UsageError
from support.cli_runs import done, make_tiered, refused, run

COMMANDS = (
    ["produce", "t"],
    ["consume", "t"],
    ["topics"],
    ["describe", "t"],
    ["explain", "t", "0"],
    ["sweep"],
    ["restore", "--all"],
    ["config", "show"],
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forebay.yml"
    path.write_text(
        f"data: {tmp_path}/configured\n"
        "storage:\n"
        "  cloud: {root: '${OBJECTS}'}\n"
        "  uploader: {enabled: false}\n"
        "metadata: {path: meta/catalog.db, password: '${SECRET:-hush-hush}'}\n"
    )
    return path


def test_a_configuration_with_variables_serves_every_command(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJECTS", str(tmp_path / "elsewhere"))
    place = ("--config", file)
    done("produce", "t", *place, "--durability", "uploaded", stdin="a\nb\n")
    assert (tmp_path / "meta" / "catalog.db").exists()
    assert list((tmp_path / "elsewhere").rglob("data-0-1.dnb1"))
    assert (tmp_path / "configured" / "wal" / "default" / "t").is_dir()
    assert not (tmp_path / "configured" / "objects").exists()
    assert done("topics", *place) == "/default/t\n"
    assert done("consume", "t", *place) == "a\nb\n"
    assert "  uploaded   2\n" in done("describe", "t", *place)
    assert "  object storage/topics/" in done("explain", "t", "1", *place)
    assert "1 committed objects" in done("sweep", *place)
    assert "adopted 0 objects" in done("restore", "t", *place)
    shown = json.loads(done("config", "show", *place, "--json"))
    assert shown["storage"]["cloud"]["root"] == str(tmp_path / "elsewhere")


def test_a_variable_that_is_not_set_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OBJECTS", raising=False)
    assert "OBJECTS" in refused("topics", "--config", file)


def test_shown_settings_are_a_file_without_its_secrets(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJECTS", str(tmp_path / "o"))
    text = done("config", "show", "--config", file)
    assert "hush-hush" not in text
    again = tmp_path / "again.yml"
    again.write_text(text)
    assert done("config", "show", "--config", again) == text


def test_the_reference_is_the_page_of_the_guide() -> None:
    assert done("config", "reference") == render()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_every_command_takes_one_of_the_two(command: list[str], tmp_path: Path, file: Path) -> None:
    told = refused(*command, "--config", file, "--data", tmp_path)
    assert "--config and --data are given" in told
    assert "cannot be read" in refused(*command, "--config", tmp_path / "absent.yml")
    help_text = done(*command[:1], *(["show"] if command[0] == "config" else []), "--help")
    assert "Examples:" in help_text
    assert "FOREBAY_CONFIG" in help_text
    assert "FOREBAY_DATA" in help_text


def test_which_of_them_counts(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("data: from-file\n")
    both = {"FOREBAY_CONFIG": str(file), "FOREBAY_DATA": "from-env"}
    assert chosen_settings(None, Path("given"), both).data == Path("given")
    assert chosen_settings(None, None, both).data == tmp_path / "from-file"
    assert chosen_settings(file, None, {"FOREBAY_DATA": "from-env"}).data == tmp_path / "from-file"
    assert chosen_settings(None, None, {"FOREBAY_DATA": "from-env"}).data == Path("from-env")
    assert chosen_settings(None, None, {"FOREBAY_CONFIG": ""}).data == Path("data")
    with pytest.raises(UsageError, match=str(file)):
        chosen_settings(None, None, {"FOREBAY_DATA": str(file)})


def test_the_environment_reaches_a_command(tmp_path: Path) -> None:
    make_tiered(tmp_path / "data")
    listed = run("topics", env={"FOREBAY_DATA": str(tmp_path / "data")})
    assert listed.stdout == "/default/orders\n"
    assert "cannot be read" in refused("topics", env={"FOREBAY_CONFIG": str(tmp_path / "no.yml")})


# ---- log lines --------------------------------------------------------------------------------


def test_log_lines_are_json_if_asked_for(tmp_path: Path) -> None:
    data = tmp_path / "data"
    words = ["produce", "t", "--data", str(data), "--durability", "uploaded"]
    result = run("--log-level", "info", "--log-format", "json", *words, stdin="a\n")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert any(each["level"] == "info" and "topic" in each for each in events)
    plain = run("--log-level", "info", *words, stdin="b\n").stderr.splitlines()
    assert plain
    assert all(line.startswith("forebay: ") for line in plain)
    assert run(*words, stdin="c\n").stderr == ""
    assert run("--log-level", "loud", "topics").exit_code == 2


# ---- what is imported -------------------------------------------------------------------------

SLOW = ("obstore", "grpc", "rich", "yaml", "pyspark", "numpy")


@pytest.mark.parametrize(
    "words", [["--help"], ["topics"], ["consume", "orders"], ["describe", "orders"]], ids=str
)
def test_quick_commands_import_nothing_slow(words: list[str], tmp_path: Path) -> None:
    make_tiered(tmp_path / "data")
    script = (
        "import sys\n"
        "from forebay.cli import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        "print('loaded', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    loaded = set(shown.stdout.splitlines()[-1].split())
    assert {"loaded", "forebay", "click"} <= loaded
    assert loaded & set(SLOW) == set()
