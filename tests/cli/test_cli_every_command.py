"""Every command: one thing that works, and bad input that is one line and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from forebay.cli import main
from support.cli_runs import make_tiered, run
from support.paths import ROOT

ELSEWHERE: Final = {
    "up": "tests/service",
    "serve": "tests/service",
    "demo": "tests/service",
    "pipeline": "tests/pipeline",
    "bench": "tests/bench",
    "import-danube": "tests/cli",
    "import-pulsar": "tests/cli",
}
"""Commands that run for long, or on Spark: what they do is tested there."""

WORKS: Final[Mapping[str, tuple[list[str], str]]] = {
    "produce": (["orders"], "1 message in /default/orders, synced"),
    "consume": (["orders", "--limit", "1"], "0\n"),
    "topics": ([], "/default/orders\n"),
    "subscriptions": (
        ["create", "orders", "billing"],
        "/default/orders: billing was created; it is at 100\n",
    ),
    "schemas": (
        ["register", "s", "{data}/../notes.txt", "--type", "string"],
        "s: version 1 was registered, id 1\n",
    ),
    "describe": (["orders"], "  uploaded   60\n"),
    "explain": (["orders", "70"], "/default/orders, offset 70: stored\n"),
    "offload": (["orders", "--dry-run"], "would upload 1 objects with 40 messages"),
    "offload-status": (["orders"], "next offset to upload: 60\n"),
    "compact": (["orders", "--dry-run"], "3 objects would be compacted into 1"),
    "sweep": (["orders", "--dry-run"], "nothing to remove"),
    "verify": (["orders", "--dry-run"], "3 objects would be read"),
    "restore": (["orders", "--dry-run"], "would adopt 0 objects with 0 messages, 3 were known"),
    "export": (["orders", "{tmp}/table", "--dry-run"], "100 messages would be exported"),
    "replay": (["orders", "copy", "--dry-run"], "would append 100 messages"),
    "inspect": (["{data}/wal/default/orders/wal.ckpt"], "WalCheckpoint: start_offset=60"),
    "repair": (["orders"], "1 topics: nothing is wrong"),
    "accept-loss": (["orders"], "/default/orders: nothing to accept\n"),
    "config": (["show"], "storage:"),
    "completion": (["bash"], "_FOREBAY_COMPLETE=bash_complete"),
}
_WITHOUT_A_STORE: Final = {"inspect", "completion"}

BAD: Final[Mapping[str, list[tuple[list[str], str]]]] = {
    "accept-loss": [
        ([], "Missing argument 'TOPIC...'"),
        (["absent"], "there is no topic /default/absent"),
        (["orders", "absent"], "there is no topic /default/absent"),
        (["orders", "--from", "7", "--to", "7"], "the range from 7 to 7 has no offsets"),
        (["orders", "--from", "x"], "'x' is not a valid integer"),
    ],
    "produce": [
        (["a/b"], "a topic is /namespace/topic"),
        (["t", "--durability", "later"], "is not one of 'buffered', 'synced', 'uploaded'"),
        ([], "Missing argument 'TOPIC'"),
    ],
    "consume": [
        (["absent"], "there is no topic /default/absent"),
        (["orders", "--start", "7x"], "it must be an offset, earliest or latest"),
        (["orders", "--start", "700"], "the next one is 100"),
        (["orders", "--start", "5", "--end", "4"], "--end 4 is before the start, offset 5"),
        (["orders", "--limit", "-1"], "Invalid value for '--limit'"),
        (["orders", "--consumer", "c"], "--type, --consumer and --filter need --subscription"),
        (["orders", "--subscription", "s", "--start", "5"], "a subscription continues where it is"),
        (["absent", "--subscription", "s"], "there is no topic /default/absent"),
        (["orders", "--subscription", "s" * 300], "256 bytes"),
    ],
    "topics": [
        (["surplus"], "No such command 'surplus'"),
        (["configure"], "Missing argument 'TOPIC'"),
        (["configure", "absent", "rolling=true"], "there is no topic /default/absent"),
        (["configure", "orders", "rollin=true"], "did you mean rolling?"),
        (["configure", "orders", "colour=red"], "known keys: rotate_max_bytes, "),
        (["configure", "orders", "max_object_bytes=big"], "it must be a size such as 8MiB"),
        (["configure", "orders", "max_object_bytes=0"], "max_object_bytes is 0; it must be"),
        (["configure", "orders", "rolling"], "it must be like max_open_seconds=60s"),
        (["configure", "orders", "rolling=on", "rolling=off"], "rolling is given twice"),
        (["configure", "orders", "--unset", "rollin"], "did you mean rolling?"),
        (["configure", "orders", "rolling=on", "--unset", "rolling"], "both set and unset"),
        (["--json", "configure", "orders"], "write the options after `configure`"),
    ],
    "subscriptions": [
        (["surplus"], "No such command 'surplus'"),
        (["list", "absent"], "there is no topic /default/absent"),
        (["seek", "orders", "absent", "--latest"], "has no subscription 'absent'"),
    ],
    "schemas": [
        (["surplus"], "No such command 'surplus'"),
        (["show", "absent"], "there is no subject 'absent'"),
        (["register", "s", "{tmp}/notes.txt"], "does not say what it is: give --type"),
        (["register", "s", "{tmp}/notes.txt", "--type", "avro"], "the Avro schema is not JSON"),
        (["topic", "orders"], "/default/orders has no schema"),
        (["topic", "orders", "--policy", "maybe"], "is not one of"),
    ],
    "describe": [(["absent"], "there is no topic /default/absent")],
    "explain": [
        (["orders", "many"], "it must be a whole number"),
        (["orders", "99999999999999999999"], "it must be a whole number"),
        (["absent", "0"], "there is no topic"),
    ],
    "offload": [(["absent"], "absent"), (["a/b"], "a topic is /namespace/topic")],
    "offload-status": [
        (["absent"], "there is no topic /default/absent"),
        (["a/b"], "a topic is /namespace/topic"),
        ([], "Missing argument 'TOPIC'"),
        (["orders", "--url", "ftp://x"], "it must be like http://127.0.0.1:8650"),
    ],
    "pipeline": [(["surplus"], "unexpected extra argument")],
    "compact": [
        (["orders", "--target", "big"], "it must be a size such as 256MiB"),
        (["--undo"], "--undo needs exactly one topic"),
        (["orders", "--object", "x"], "--object needs --undo"),
    ],
    "sweep": [
        (["absent"], "knows /default/absent"),
        (["--grace", "soon"], "it must be a duration such as 24h"),
    ],
    "verify": [(["--budget", "much"], "it must be a size such as 50GiB"), (["absent"], "absent")],
    "restore": [
        ([], "name the topics to restore, or give --all"),
        (["orders", "--all"], "not both"),
        (["a/b"], "a topic is /namespace/topic"),
    ],
    "import-danube": [
        ([], "name Danube's bucket with --from"),
        (["a/b", "--wal", "{tmp}"], "a topic is /namespace/topic"),
    ],
    "import-pulsar": [
        ([], "Missing argument 'SOURCE'"),
        (["{tmp}", "--topic", "orders", "--pattern", ".*"], "not both"),
        (["ftp://host/x"], "must be a directory, or begin with"),
    ],
    "export": [
        (["orders", "{tmp}/t", "--max-batch-bytes", "x"], "it must be a size"),
        (["absent", "{tmp}/t"], "absent"),
        (["orders", "{tmp}/t", "--format", "csv"], "is not one of"),
    ],
    "replay": [
        (["orders", "copy", "--since", "tomorrow"], "it must be like 2026-01-31T12:00:00Z"),
        (["absent", "copy"], "absent"),
    ],
    "inspect": [
        (["{tmp}/absent"], "no such file"),
        (["{data}"], "is a directory"),
        (["{tmp}/notes.txt"], "is not a file of a store"),
    ],
    "repair": [
        (["absent"], "there is no topic /default/absent"),
        (["--accept-loss"], "--accept-loss needs --apply"),
        (["a/b"], "a topic is /namespace/topic"),
    ],
    "config": [(["shout"], "No such command 'shout'")],
    "completion": [(["tcsh"], "is not one of 'bash', 'zsh', 'fish'")],
    "bench": [(["absent"], "No such command 'absent'")],
    "up": [(["--listen", "nowhere"], "listen")],
    "serve": [(["--listen", "nowhere"], "listen")],
    "demo": [(["--listen", "nowhere"], "listen")],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("model") / "data"
    make_tiered(data)
    return data


@pytest.fixture
def data(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "data")
    (tmp_path / "notes.txt").write_text("some notes of mine\n" * 20)
    return tmp_path / "data"


def placed(arguments: list[str], data: Path) -> list[str]:
    return [each.format(tmp=data.parent, data=data) for each in arguments]


def test_no_command_is_missing_here() -> None:
    assert set(main.commands) == {*WORKS, *ELSEWHERE}
    assert set(main.commands) == set(BAD)
    for name, folder in ELSEWHERE.items():
        tests = [path for path in (ROOT / folder).rglob("test_*.py") if path != Path(__file__)]
        assert any(f'"{name}"' in path.read_text() for path in tests), name


@pytest.mark.parametrize("name", WORKS)
def test_a_command_does_what_it_is_for(name: str, data: Path) -> None:
    arguments, told = WORKS[name]
    where = [] if name in _WITHOUT_A_STORE else ["--data", str(data)]
    done = run(name, *placed(arguments, data), *where, stdin="line\n")
    assert done.exit_code == 0, done.output
    assert told in done.stdout


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name in BAD for at in range(len(BAD[name]))]
)
def test_bad_input_is_one_line(name: str, at: int, data: Path) -> None:
    arguments, told = BAD[name][at]
    where = [] if name in {*_WITHOUT_A_STORE, "bench", "config"} else ["--data", str(data)]
    require_one_line([name, *placed(arguments, data), *where], told)


def require_one_line(arguments: list[str], told: str, env: Mapping[str, str] | None = None) -> None:
    refused = run(*arguments, env=env)
    assert refused.exit_code == 2, refused.output
    assert refused.exception is None or isinstance(refused.exception, SystemExit)
    assert told in refused.stderr
    assert refused.stderr.startswith("forebay: ")
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_with_examples(name: str) -> None:
    command = main.commands[name]
    parts = [[name]]
    if isinstance(command, click.Group):
        parts = [[name, each] for each in command.commands]
    for part in parts:
        shown = run(*part, "--help")
        assert shown.exit_code == 0
        assert "Examples:" in shown.stdout, part


# ---- what all of them take ----

ON_A_STORE: Final = sorted(
    name
    for name, command in main.commands.items()
    if any(each.name == "data" for each in command.params) and name not in ELSEWHERE
)


def _arguments(name: str, data: Path) -> list[str]:
    return placed(WORKS[name][0], data)


@pytest.mark.parametrize("name", ON_A_STORE)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("storage: {wal: {rotate: 1}}", "rotate"),
        ("- a list", "forebay.yml"),
        ("storage: [", "forebay.yml"),
        (None, "forebay.yml"),
    ],
    ids=["an unknown key", "a list", "no YAML", "no file"],
)
def test_a_bad_configuration_is_one_line(
    name: str, text: str | None, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "forebay.yml"
    if text is not None:
        config.write_text(text)
    require_one_line([name, *_arguments(name, tmp_path), "--config", str(config)], told)


@pytest.mark.parametrize("name", ON_A_STORE)
def test_both_a_directory_and_a_file_are_too_much(name: str, tmp_path: Path) -> None:
    arguments = [*_arguments(name, tmp_path), "--config", "x.yml", "--data", str(tmp_path)]
    require_one_line([name, *arguments], "choose one of them")


@pytest.mark.parametrize("name", sorted({*ON_A_STORE} - {"produce", "restore"}))
def test_a_directory_that_is_none_is_one_line(name: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    require_one_line([name, *_arguments(name, tmp_path), "--data", str(absent)], "absent")
    assert not absent.exists(), "and none is made"


@contextmanager
def locked_out(data: Path) -> Iterator[None]:
    """For as long as it lasts nobody here may read the directory, root neither."""
    data.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        data.chmod(0o755)


@pytest.mark.parametrize("name", ["topics", "describe", "repair", "consume", "produce"])
def test_a_directory_that_cannot_be_read_is_one_line(name: str, data: Path) -> None:
    arguments = [name, *_arguments(name, data), "--data", str(data)]
    run(*arguments)  # what is imported late is imported now
    with locked_out(data):
        require_one_line(arguments, "Permission denied")


def test_the_version_is_told() -> None:
    assert run("--version").stdout.startswith("forebay, version ")


def test_an_unknown_command_is_one_line() -> None:
    require_one_line(["frobnicate"], "No such command 'frobnicate'")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_each_shell_names_the_command(shell: str) -> None:
    assert "forebay" in run("completion", shell).stdout


def test_commands_are_completed() -> None:
    asked = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": "forebay des", "COMP_CWORD": "1"}
    told = CliRunner().invoke(main, [], prog_name="forebay", env=asked)
    assert "plain,describe" in told.stdout.splitlines()


# ---- words that were wrong once ----


def lose_catalog(data: Path) -> None:
    for path in data.glob("catalog.db*"):
        path.unlink()


@pytest.mark.parametrize(
    "arguments", [["consume", "orders"], ["describe", "orders"], ["explain", "orders", "1"]]
)
def test_a_lost_catalog_is_told_with_its_remedy(arguments: list[str], data: Path) -> None:
    lose_catalog(data)
    shutil.rmtree(data / "wal")
    told = "`forebay restore /default/orders` rebuilds the catalog"
    require_one_line([*arguments, "--data", str(data)], told)


def test_a_store_in_memory_is_not_called_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.cli import options

    monkeypatch.setattr(options, "chosen_settings", _in_memory)
    done = run("produce", "t", stdin="x\n")
    assert done.stdout == (
        "1 message in /default/t, in memory only, lost with this command; next offset 1\n"
    )


def _in_memory(*_: object) -> object:
    from forebay.settings import StoreSettings

    return StoreSettings(data=None)


def test_a_lost_range_below_a_watermark_is_said_beside_it(data: Path) -> None:
    shutil.rmtree(data / "wal")
    run("produce", "orders", "--data", str(data), stdin="x\n")
    told = run("describe", "orders", "--data", str(data)).stdout
    assert "  uploaded   100, except 40 offsets without messages\n" in told


def test_repair_tells_what_it_finds_does_it_and_keeps_copies(data: Path) -> None:
    command = ["repair", "--data", str(data)]
    (data / "wal/default/orders/wal.ckpt").unlink()
    looked = run(*command)
    assert looked.exit_code == 1
    assert "checkpoint: " in looked.stdout
    assert "1 findings, of which --apply would repair 1; nothing was changed" in looked.stdout
    done = run(*command, "--apply")
    assert done.exit_code == 0
    assert "1 repaired, 0 left" in done.stdout
    assert "copies of what was changed: " in done.stdout
    facts = json.loads(run(*command, "--json").stdout)
    assert facts == {"applied": False, "topics": 1, "findings": [], "copies": None, "left": 0}


def test_repair_leaves_what_is_lost_and_ends_with_1(data: Path) -> None:
    newest = max(
        (data / "wal/default/orders").glob("wal*.log"), key=lambda path: path.stat().st_mtime
    )
    newest.write_bytes(newest.read_bytes()[:-5])
    for options, code in ((["--apply"], 1), (["--apply", "--accept-loss"], 0)):
        done = run("repair", "--data", str(data), *options)
        assert done.exit_code == code
        assert "offsets 99 to 99 are nowhere else" in done.stdout
    assert run("consume", "orders", "--data", str(data), "--skip-lost").stdout.endswith("98\n")
