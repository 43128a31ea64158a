"""The tables themselves: of commits that go on from the same end, one counts, lock or no lock."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

import exported_tables
from exported_tables import FORMATS
from forebay.errors import CommitRefused, FormatError, MissingData, UsageError
from forebay.pipeline.jobs.export import Format, export, open_target
from forebay.pipeline.jobs.export_parquet import NOTE, ParquetTable
from forebay.pipeline.jobs.export_tables import Commit, Staged, Staging, collect, decode_commit

TOPIC = "/default/orders"
SCHEMA = StructType([StructField("offset", LongType()), StructField("timestamp", TimestampType())])


def staged(staging: Staging, after: int, count: int) -> Staged:
    directory = staging.fresh(after)
    directory.mkdir()
    offsets = list(range(after, after + count))
    times = pa.array([offset * 1_500_001 for offset in offsets], pa.timestamp("us", tz="UTC"))
    table = pa.table({"offset": pa.array(offsets, pa.int64()), "timestamp": times})
    parquet.write_table(table, directory / "part.parquet")
    return collect(directory, after, after + count)


def commit_one(kind: Format, location: Path, reached: int | None, count: int) -> bool:
    """Whether the commit counted."""
    target = open_target(kind, location, TOPIC, None)
    after = reached or 0
    files = staged(target.staging, after, count)
    note = Commit(TOPIC, after, after + count, count, SCHEMA.json())
    try:
        target.table.commit(files, reached, note)
    except CommitRefused:
        return False
    finally:
        target.table.close()
    return True


@pytest.mark.parametrize("kind", FORMATS)
def test_of_commits_at_once_one_counts(kind: Format, tmp_path: Path) -> None:
    location = tmp_path / "lake" / "orders"
    reached: int | None = None
    for _ in range(4):
        counted: list[int] = []
        start = threading.Barrier(3)

        def work(
            count: int,
            reached: int | None = reached,
            counted: list[int] = counted,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            if commit_one(kind, location, reached, count):
                counted.append(count)

        threads = [threading.Thread(target=work, args=(count,)) for count in (2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(counted) == 1
        reached = (reached or 0) + counted[0]
        assert exported_tables.offsets(kind, location) == list(range(reached))


def test_a_commit_is_tried_again_when_somebody_else_changed_the_table(tmp_path: Path) -> None:
    location = tmp_path / "orders"
    assert commit_one("delta", location, None, 2)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            DeltaTable(str(location)).alter.set_table_properties({"delta.appendOnly": "false"})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        counted = [commit_one("delta", location, reached, 2) for reached in (2, 4)]
    finally:
        stop.set()
        thread.join()
    done = 2 + 2 * (counted.index(False) if False in counted else 2)
    assert exported_tables.offsets("delta", location) == list(range(done))


def test_a_parquet_table_without_its_note_is_refused(tmp_path: Path) -> None:
    assert commit_one("parquet", tmp_path / "t", None, 2)
    table = ParquetTable(tmp_path / "t", TOPIC)
    assert len(table.files()) == 1
    (table.batches()[-1] / NOTE).unlink()
    with pytest.raises(MissingData, match="nobody knows which offsets"):
        table.state()


def test_a_note_of_another_version_is_refused() -> None:
    with pytest.raises(FormatError, match="newer version"):
        decode_commit('{"version": 2}', "here")
    with pytest.raises(FormatError, match="not the note of an export"):
        decode_commit("[]", "here")


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_package_that_is_not_there_is_named(
    kind: Format, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_tables.append(tmp_path / "data", [b"x"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"pip install 'forebay\[{kind}\]'"):
        export(tmp_path / "data", "orders", tmp_path / "t", format=kind)
