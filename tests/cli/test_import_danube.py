"""`forebay import-danube`: a plan first, exact counts, and errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli_runs import done, facts, refused, run
from support.danube_files import Danube, frames

THREADS = ("--runner", "threads")


@pytest.fixture
def source(tmp_path: Path) -> Danube:
    source = Danube(tmp_path / "danube")
    source.put(0, 10)
    source.write(0, frames(range(5, 12)))
    source.write(1, b"")
    return source


def test_a_plan_is_printed_and_apply_carries_it_out(source: Danube, tmp_path: Path) -> None:
    where = ("--from", source.bucket, "--wal", source.wal, "--data", tmp_path / "data")
    size = len(frames(range(12)))
    found = f"12 messages, {size} bytes, offsets 0 to 11, from 1 objects and 2 WAL files"
    plan = done("import-danube", *where)
    assert plan.splitlines() == [
        f"/default/orders: {found}",
        "  12 would be imported into 1 objects, 0 are there",
        "  5 copies of messages in other files left out",
        "1 topics: 12 messages to import, 0 topics with errors",
        "nothing was changed; --apply imports",
    ]
    assert not (tmp_path / "data").exists()
    report = facts("import-danube", *where, "--apply")
    assert (report["applied"], report["ok"]) == (True, True)
    assert (report["messages"], report["bytes"]) == (12, size)
    assert report["rows"][0]["new_messages"] == 12
    assert "0 imported into 0 objects, 12 are there" in done("import-danube", *where, "--apply")
    read = done("consume", "orders", "--data", tmp_path / "data")
    assert read.splitlines() == [f"/default/orders {offset}" for offset in range(12)]


def test_a_configuration_file_may_name_the_bucket(source: Danube, tmp_path: Path) -> None:
    config = tmp_path / "danube.yml"
    config.write_text(f"storage:\n  cloud: {{backend: fs, root: '{source.bucket}'}}\n")
    report = facts("import-danube", "orders", "--from", config, "--data", tmp_path / "data")
    assert report["rows"][0]["messages"] == 10
    config.write_text("storage:\n  wal: {cache_capacity: 1}\n")
    assert "does not say where Danube's bucket is" in refused("import-danube", "--from", config)


def test_what_is_not_perfect_is_exit_code_1_and_named(source: Danube, tmp_path: Path) -> None:
    source.put(20, 5)
    source.object("/default/orders", "data-0-4.dnb1", frames(range(5), text="other "))
    source.object("/default/orders", "notes.txt", b"")
    source.object("/default/orders", "data-25-pending.dnb1", b"")
    text = done("import-danube", "--from", source.bucket, "--data", tmp_path / "data", code=1)
    assert "  gap: no file holds offsets 10 to 19\n" in text
    assert "  conflict: offsets 0 to 4 differ in " in text
    assert "  1 unfinished uploads of Danube left out\n" in text
    assert "not read, because it is not a file of Danube: " in text
    assert "1 topics with errors" in text


def test_bad_input_is_refused(source: Danube, tmp_path: Path) -> None:
    data = ("--data", tmp_path / "data")
    assert "--from, its WAL directory with --wal" in refused("import-danube", *data)
    assert "--etcd-prefix needs --etcd" in refused(
        "import-danube", *data, "--wal", source.wal, "--etcd-prefix", "/d"
    )
    assert "must be a directory, or begin with" in refused(
        "import-danube", *data, "--from", "ftp://host/x"
    )
    assert "has no topic /default/none" in refused(
        "import-danube", "none", *data, "--wal", source.wal
    )
    both = ("--runner", "threads", "--master", "local[1,1]")
    assert "choose one" in refused("import-danube", *data, "--wal", source.wal, *both)
    result = run("import-danube", *data, "--wal", source.wal, "--etcd", "127.0.0.1:1")
    assert "name Danube's bucket too" in result.stderr


def test_restore_says_that_a_bucket_is_danubes_and_records_nothing(tmp_path: Path) -> None:
    """Without this, everything would be recorded as lost with --allow-gaps."""
    data = tmp_path / "data"
    source = Danube(tmp_path / "danube")
    source.put_later(0, 10, "/default/older", folder="objects")
    source.put(0, 5, "/default/mixed")
    source.put_later(5, 10, "/default/mixed")
    source.put_later(0, 10, "/default/newer")
    data.mkdir()
    source.bucket.rename(data / "objects")
    for more in ((), ("--allow-gaps",), ("--allow-gaps", "--dry-run"), ("--verify",)):
        result = run("restore", "--all", "--data", data, *more, *THREADS)
        assert result.exit_code == 1
        assert result.stderr.count("use `forebay import-danube`") == 3
        assert not result.stdout
    assert done("topics", "--data", data) == ""


def test_restore_still_adopts_the_objects_of_v0_5_0(tmp_path: Path) -> None:
    source = Danube(tmp_path / "danube")
    source.put(0, 10)
    (tmp_path / "data").mkdir()
    source.bucket.rename(tmp_path / "data/objects")
    text = done("restore", "--all", "--data", tmp_path / "data", "--assume-nothing-lost", *THREADS)
    assert "adopted 1 objects with 10 messages" in text
