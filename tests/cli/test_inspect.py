"""`forebay inspect`: every kind of file that a store has, and the refusal of all others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.client.address import ServerInfo, server_file
from support.cli_runs import make_tiered, refused, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("inspect") / "data"
    make_tiered(data)
    return data


@pytest.fixture
def data(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "data")
    note = ServerInfo("http://127.0.0.1:8650", "0" * 32, 1)
    server_file(tmp_path / "data").write_bytes(note.encode())
    (tmp_path / "data/store.id").write_text("0" * 32 + "\n")
    (tmp_path / "data/jobs.ndjson").write_text('{"id": "one", "state": "done"}\n')
    return tmp_path / "data"


def looked(*args: str | Path, code: int = 0) -> list[dict[str, Any]]:
    done = run("inspect", *args, "--json")
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


LOG = "wal/default/orders"
OBJECTS = "objects/storage/topics/default/orders/objects"
KINDS = {
    f"{LOG}/wal.ckpt": "WalCheckpoint",
    f"{LOG}/uploader.ckpt": "UploaderCheckpoint",
    f"{LOG}/wal.synced": "Published",
    f"{LOG}/wal.3.log": "Frames",
    f"{LOG}/wal.id": "LogId",
    f"{OBJECTS}/data-0-19.dnb1": "Frames",
    f"{OBJECTS}/data-0-19.dnb1.json": "ObjectDescriptor",
    "catalog.db": "Catalog",
    "server.json": "ServerInfo",
    "store.id": "StoreId",
    "jobs.ndjson": "Jobs",
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_is_known(name: str, data: Path) -> None:
    assert looked(data / name)[-1]["type"] == KINDS[name]


def test_a_segment_under_another_name_is_known_by_its_frames(data: Path) -> None:
    shutil.copy(data / LOG / "wal.3.log", data / "orders.seg")
    assert looked(data / "orders.seg", "--limit", "1")[-1]["frames"] > 0


def test_a_damaged_segment_is_looked_into_all_the_same(data: Path) -> None:
    path = data / LOG / "wal.3.log"
    path.write_bytes(b"\xff" * 40 + path.read_bytes()[40:])
    (found,) = looked(path, code=1)
    assert found["damaged"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"some notes\n" * 100),
        ("picture.png", b"\x89PNG\r\n\x1a\n" + bytes(400)),
        ("empty", b""),
        ("zeros", bytes(4096)),
        ("service.log", b"2026-01-31 a line of a log\n" * 50),
        ("server.json", b"{}"),
        ("store.id", b"0123"),
        ("other.json", b'{"name": "x"}'),
        ("jobs.ndjson", b"no json\n"),
        ("wal.synced", b"x" * 5000),
        ("wal.idx", b"x" * 100),
        ("wal.ckpt", b"x" * 100),
        ("wal.id", b"x" * 100),
        ("other.db", b"SQLite format 3\0" + bytes(100)),
    ],
)
def test_anything_else_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert str(path) in refused("inspect", path)
