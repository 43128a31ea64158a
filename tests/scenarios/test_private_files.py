"""What Forebay writes is private to its user, whatever the umask is.

Files have the mode 0600 and directories 0700, after all kinds of work. A process of another user
cannot see the store, and works through its server.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from forebay.client.address import ServerInfo
from forebay.client.disk import server_to_ask
from forebay.pipeline.jobs.compact import compact
from forebay.service.directory import DataDirectory
from forebay.service.driver import _open_log
from forebay.service.jobs import write_jobs
from forebay.settings import ServerAddress, StoreSettings
from forebay.topic.store import Store
from support.cli_runs import done, facts, run, small_segments
from support.inline_executor import InlineExecutor
from support.server_processes import ServerProcess

NOBODY: Final = 65534
NOWHERE: Final = ServerAddress("http://127.0.0.1:9", "0" * 32)
"""Nothing listens at the port for `discard`."""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before, compiled = os.umask(mask), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        os.umask(before)
        sys.dont_write_bytecode = compiled


@contextmanager
def another_user() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def modes(root: Path) -> dict[str, str]:
    """The modes of everything below `root`, and its own, that are not private."""
    found = {}
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found[str(path.relative_to(root))] = oct(mode)
    return found


def all_kinds_of_work(data: Path) -> None:
    """Appends, rotation, uploads, retention, compaction, a repair, a restore and a server."""
    settings = small_segments(data)
    with Store(settings) as store:
        topic = store.topic("orders")
        for _ in range(3):
            topic.append_many([b"." * 100] * 20, durability="synced")
            topic.rotate()
            topic.upload()
        topic.trim_local()
        topic.append(b"last")
    rolling = replace(settings, uploader=replace(settings.uploader, rolling=True))
    with Store(rolling) as store:
        store.topic("rolling").append(b"one", durability="uploaded")
    report = compact(settings, target_bytes=10**6, executor=InlineExecutor())
    assert report.rows
    damaged = data / "objects/storage/topics/default/rolling/objects/data-0-0.dnb1"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    facts("repair", "rolling", "--apply", "--data", data)
    assert (data / "repair").is_dir()
    done("sweep", "--grace", "0s", "--data", data)
    for name in ("catalog.db", "catalog.db-wal", "catalog.db-shm"):
        (data / name).unlink(missing_ok=True)
    done("restore", "--all", "--data", data, "--runner", "threads")
    directory = DataDirectory(data)
    directory.announce(ServerInfo("http://127.0.0.1:9", "0" * 32, 1, directory.store_id))
    write_jobs(data / "jobs.jsonl", [])
    _open_log(data / "driver.log").close()
    assert modes(data) == {}, "while a server has it open"
    directory.close()


@pytest.mark.parametrize("mask", [0, 0o777], ids=oct)
def test_everything_is_private_to_its_user_whatever_the_umask_is(tmp_path: Path, mask: int) -> None:
    data = tmp_path / "parent" / "data"
    with umask(mask):
        all_kinds_of_work(data)
    assert {path.name for path in data.iterdir()} >= {"wal", "objects", "catalog.db", "store.id"}
    assert modes(data.parent) == {}


@pytest.mark.long
def test_what_a_server_writes_is_private_to_its_user(tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = ["sh", "-c", 'umask 0000; exec "$@"', "sh"]
    with ServerProcess("serve", data, tmp_path / "log", before) as server:
        server.wait_ready()
        server.produce("/default/orders", ["one"])
        assert modes(data) == {}
        server.stop()
    assert modes(data) == {}


def test_directories_and_files_that_are_there_keep_their_modes(tmp_path: Path) -> None:
    """An upgrade changes nothing, and a directory that the user made is the user's."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with Store(StoreSettings(data)) as store:
        store.topic("orders").append(b"one")
    log = data / "wal/default/orders/wal.log"
    log.chmod(0o644)
    (data / "catalog.db").chmod(0o640)
    with Store(StoreSettings(data)) as store:
        store.topic("orders").append(b"two", durability="synced")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (data, log, data / "catalog.db")] == [
        0o755,
        0o644,
        0o640,
    ]


@pytest.fixture
def open_place(tmp_path: Path) -> Iterator[Path]:
    """A data directory that everybody may enter, as its user made it, with a private log in it."""
    above = [tmp_path, *tmp_path.parents]
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in above}
    changed = [path for path in above if not before[path] & 0o001]
    for path in changed:
        path.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with Store(StoreSettings(data)) as store:
        store.topic("orders").append(b"one")
    yield data
    for path in changed:
        path.chmod(before[path])


def test_an_executor_of_another_user_goes_through_the_server(open_place: Path) -> None:
    """Even if the server does not respond: reading the directory would fail in any case."""
    settings = replace(StoreSettings(open_place), server=NOWHERE)
    assert server_to_ask(settings) is None, "its own user reads it"
    with another_user():
        assert server_to_ask(settings) == NOWHERE


@pytest.mark.parametrize("command", ["consume", "describe"])
def test_a_command_of_another_user_is_refused_in_one_line(open_place: Path, command: str) -> None:
    run(command, "orders", "--data", open_place)  # what is imported late is imported now
    with another_user():
        result = run(command, "orders", "--data", open_place)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("forebay: ")
    assert result.stderr.count("\n") == 1
    assert "ermission" in result.stderr
