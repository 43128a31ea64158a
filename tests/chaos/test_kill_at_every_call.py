"""kill -9 at every single call that an owner makes of the object store and of the catalog.

From the opening of the topic to its close: claims, intents, transfers, copies, sidecars, commits,
verification, trimming. Each time the next process finds everything that was acknowledged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.catalog.catalog import Catalog
from forebay.catalog.sqlite import SqliteKv
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.topic.store import Store
from support.killed_process import payload, settings
from support.paths import TESTS
from support.topic_evidence import (
    NAME,
    assert_chain,
    assert_each_committed_once,
    assert_only_orphans_are_swept,
    read_all,
)

MEMORY: Final = Path("/dev/shm")
NEEDED_BYTES: Final = 256 * MIB
"""Together they write less than half of this."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room for it: a kill loses nothing that was written."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < NEEDED_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="forebay-kills-") as name:
        yield Path(name)


def check(folder: Path, uploading: str) -> int:
    """What the next process finds; returns how many keys were orphans."""
    acknowledged = (folder / "acks").stat().st_size
    given = settings(folder, uploading)
    catalog = Catalog(SqliteKv(folder / "catalog.db"))
    objects = connect(given.cloud, folder)
    try:
        with Store(given, catalog=catalog, store=objects) as store:
            topic = store.topic(NAME)
            found = read_all(topic)
            assert len(found.messages) >= acknowledged
            for offset, message in found.messages.items():
                assert message == payload(offset)
            assert found.lost == []
            last = topic.append(b"the last one", durability="uploaded")
            assert last == len(found.messages), "no offset is left out"
            topic.rotate()
            topic.trim_local()
            again = read_all(topic)
            assert list(again.messages.values()) == [*found.messages.values(), b"the last one"]
        assert_chain(catalog, objects)
        assert_each_committed_once(catalog)
        return len(assert_only_orphans_are_swept(catalog, objects))
    finally:
        catalog.close()


def kill_at_calls(folder: Path, uploading: str, first: int, step: int) -> None:
    command = [sys.executable, "-m", "support.killed_process", str(folder), uploading]
    done = subprocess.run(
        [*command, str(first), str(step)],
        cwd=TESTS,
        check=True,
        stdout=subprocess.PIPE,
        timeout=1800,
        text=True,
    )
    numbers = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert done.stdout.splitlines()[-1].startswith("passed")
    assert numbers[-1] > 60
    orphans = sum(check(folder / str(number), uploading) for number in numbers)
    if uploading == "ledgers":
        assert orphans == 0, "the next attempt at a ledger removes what a killed one left"
    else:
        assert orphans > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("uploading", ["planned", "rolling", "ledgers"])
def test_a_kill_at_any_call_loses_nothing_and_doubles_nothing(folder: Path, uploading: str) -> None:
    """Every seventh call; the soak has all of them."""
    kill_at_calls(folder, uploading, 3, 7)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("uploading", ["planned", "rolling", "ledgers"])
def test_a_kill_at_every_call_loses_nothing_and_doubles_nothing(
    folder: Path, uploading: str
) -> None:
    kill_at_calls(folder, uploading, 1, 1)
