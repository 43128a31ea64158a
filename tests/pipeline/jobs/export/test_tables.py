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

from forebay.errors import (
    CommitRefused,
    FormatError,
    MissingData,
    ServiceUnavailable,
    UsageError,
)
from forebay.pipeline.jobs.export.job import Format, export, open_target, rejected_location
from forebay.pipeline.jobs.export.tables import (
    COMMIT_FILE,
    Commit,
    ParquetTable,
    Staged,
    Staging,
    collect,
    decode_commit,
)
from support import exported_tables
from support.exported_tables import FORMATS

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


def commit_one(
    kind: Format, location: Path, reached: int | None, count: int, log: str = TOPIC
) -> bool:
    """Whether the commit counted."""
    target = open_target(kind, location, TOPIC, None, log)
    after = reached or 0
    files = staged(target.staging, after, count)
    note = Commit(log, after, after + count, count, SCHEMA.json())
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


@pytest.mark.parametrize("kind", FORMATS)
def test_each_partition_has_its_own_end_and_last_batch(kind: Format, tmp_path: Path) -> None:
    location = tmp_path / "lake" / "orders"
    logs = [TOPIC, f"{TOPIC}-part-1", f"{TOPIC}-part-12"]
    for count, log in enumerate(logs, 2):
        assert commit_one(kind, location, None, count, log)
        assert not commit_one(kind, location, None, count, log), "it ends elsewhere now"
    assert commit_one(kind, location, 3, 5, logs[1])
    for log, end, rows in zip(logs, (2, 8, 4), (2, 5, 4), strict=True):
        table = open_target(kind, location, TOPIC, None, log).table
        state, last = table.state(), table.last()
        table.close()
        assert last is not None
        assert (state.next, last.end, last.rows, last.topic) == (end, end, rows, log)
    new = open_target(kind, location, TOPIC, None, f"{TOPIC}-part-2").table
    assert (new.state().next, new.last()) == (None, None)
    assert new.state().schema is not None, "the columns are those of the table"
    new.close()
    assert exported_tables.offsets(kind, location) == sorted([*range(2), *range(8), *range(4)])


def test_the_last_batch_of_a_log_is_found_behind_many_of_its_partitions(tmp_path: Path) -> None:
    """A topic may have a log of its own besides partitions, and they share the table's history."""
    assert commit_one("delta", tmp_path / "t", None, 2)
    for at in range(101):
        assert commit_one("delta", tmp_path / "t", at or None, 1, f"{TOPIC}-part-1")
    last = open_target("delta", tmp_path / "t", TOPIC, None).table.last()
    assert last is not None
    assert (last.topic, last.end) == (TOPIC, 2)


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
    (table.batches()[-1] / COMMIT_FILE).unlink()
    with pytest.raises(MissingData):
        table.state()


def test_a_note_of_another_version_is_refused() -> None:
    with pytest.raises(FormatError, match="newer version"):
        decode_commit('{"version": 2}', "here")
    with pytest.raises(FormatError, match="not the commit metadata"):
        decode_commit("[]", "here")


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_package_that_is_not_there_is_named(
    kind: Format, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_tables.append(tmp_path / "data", [b"x"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"pip install 'forebay\[{kind}\]'"):
        export(tmp_path / "data", "orders", tmp_path / "t", format=kind)


def reject(location: Path, start: int, end: int) -> None:
    """Commits one record of the batch to the table of rejected ones."""
    target = open_target("parquet", rejected_location(location), TOPIC, None)
    reached = target.table.state().next
    note = Commit(TOPIC, start, end, 1, SCHEMA.json())
    target.table.commit(staged(target.staging, start, 1), reached, note)


def test_rejected_records_of_another_batch_never_make_a_table_jump(tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "t"
    exported_tables.append(data, [b"{}"] * 25)
    reject(table, 20, 25)
    with pytest.raises(
        UsageError, match=r"t_rejected ends at offset 25.*t does not exist.*start=20"
    ):
        export(data, "orders", table, value="json", dry_run=True)
    anew = export(data, "orders", table, value="json", start=20, dry_run=True)
    assert [(row.start_offset, row.end_offset) for row in anew.rows] == [(20, 25)]
    assert commit_one("parquet", table, None, 10)
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"_rejected ends at offset 25.*/t ends at offset 10"):
            export(data, "orders", table, value="json", dry_run=dry_run)
    assert commit_one("parquet", table, 10, 10)
    report = export(data, "orders", table, value="json", dry_run=True)
    assert [(row.start_offset, row.end_offset) for row in report.rows] == [(20, 25)]


def test_a_table_of_iceberg_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    location = tmp_path / "or.ders"
    assert commit_one("iceberg", location, None, 2)
    assert commit_one("iceberg", location, 2, 3)
    target = open_target("iceberg", location, TOPIC, None)
    try:
        assert target.table.state().next == 5
    finally:
        target.table.close()


def test_a_damaged_log_of_a_delta_table_is_told_in_one_line(tmp_path: Path) -> None:
    location = tmp_path / "t"
    assert commit_one("delta", location, None, 2)
    for entry in (location / "_delta_log").glob("*.json"):
        entry.write_text("no JSON")
    with pytest.raises((UsageError, ServiceUnavailable)) as told:
        open_target("delta", location, TOPIC, None).table.state()
    assert len(str(told.value).splitlines()) == 1


def test_an_attempt_is_removed_with_what_was_made_ready_of_it(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "t")
    place = staging.fresh(0)
    place.mkdir()
    assert collect(place, 0, 1).directory.is_dir()
    staging.abandon(place)
    assert list(staging.root.iterdir()) == []
