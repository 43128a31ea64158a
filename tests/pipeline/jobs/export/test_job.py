"""`export` brings a table up to its topic, each message once, in every format."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from forebay.cli.export import export as command
from forebay.errors import UsageError
from forebay.pipeline.jobs.export.job import Format, export
from forebay.pipeline.jobs.export.tables import Staging
from forebay.settings import RemoteRetentionSettings
from forebay.topic.store import Store
from forebay.topic.view import StoreView
from support import exported_tables
from support.exported_tables import FORMATS, append, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def payload(number: int) -> bytes:
    return b"%06d" % number + bytes([number % 256]) * (number % 50)


def digest(values: list[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(value).digest() for value in values)).hexdigest()


@pytest.mark.parametrize("kind", FORMATS)
def test_backfill_and_increments_hold_every_message_once(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "lake" / "orders"
    values = [payload(number) for number in range(300)]
    append(data, values[:150], upload=True)
    append(data, values[150:200])
    report = export(data, "orders", table, format=kind, max_batch_rows=90, spark=spark)
    assert [(row.start_offset, row.end_offset) for row in report.rows] == [
        (0, 90),
        (90, 180),
        (180, 200),
    ]
    assert report.ok
    assert report.records == 200
    append(data, values[200:])
    assert export(data, "orders", table, format=kind, spark=spark).records == 100
    again = export(data, "orders", table, format=kind, spark=spark)
    assert (again.rows, again.next_offset) == ((), 300)

    rows = exported_tables.arrow_table(kind, table).sort_by("offset").to_pydict()
    assert rows["offset"] == list(range(300))
    assert digest(rows["value"]) == digest(values)
    assert set(rows["key"]) == {b"k"}
    assert [dict(each)["n"] for each in rows["headers"]] == [str(len(value)) for value in values]
    assert set(rows["topic"]) == {"/default/orders"}
    assert set(rows["partition"]) == {0}
    assert all(rows["timestamp"])
    totals = 'count(*), sum("offset"), sum(octet_length(value))'
    expected = [(300, sum(range(300)), sum(map(len, values)))]
    assert exported_tables.query(kind, table, totals) == expected
    seen = exported_tables.spark_table(spark, kind, table)
    found = seen.selectExpr("count(*)", "sum(offset)", "sum(length(value))").collect()
    assert [tuple(row) for row in found] == expected
    if kind == "delta":
        delta = DeltaTable(str(table))
        assert delta.version() == 4, "one commit for each batch, after the one that made the table"
        late = delta.to_pyarrow_table(filters=[("offset", ">=", 280)])
        assert late.num_rows == 20


def append_to(data: Path, topic: str, values: list[bytes]) -> None:
    with Store(settings(data)) as store:
        store.topic(topic).append_many(values, durability="synced")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_topic_with_partitions_is_one_table_with_a_position_for_each(
    kind: Format, spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "lake" / "clicks"
    for partition in (0, 1):
        append_to(data, f"clicks-part-{partition}", [b"%d" % partition] * (5 + partition))
    first = export(data, "clicks", table, format=kind, spark=spark)
    assert (first.ok, first.records, first.next_offset) == (True, 11, None)
    assert [row.topic for row in first.rows] == ["/default/clicks-part-0", "/default/clicks-part-1"]
    append_to(data, "clicks-part-1", [b"1"] * 3)
    append_to(data, "clicks-part-2", [b"2"] * 2)
    more = export(data, "clicks", table, format=kind, spark=spark)
    assert [(row.topic, row.start_offset, row.end_offset) for row in more.rows] == [
        ("/default/clicks-part-1", 6, 9),
        ("/default/clicks-part-2", 0, 2),
    ]
    assert more.next_offsets == {f"/default/clicks-part-{at}": n for at, n in enumerate((5, 9, 2))}
    assert export(data, "clicks", table, format=kind, spark=spark).rows == ()
    found = exported_tables.query(kind, table, '"partition", "offset", value, topic')
    assert sorted(found) == [
        (partition, offset, b"%d" % partition, "/default/clicks")
        for partition, count in enumerate((5, 9, 2))
        for offset in range(count)
    ]
    assert exported_tables.spark_table(spark, kind, table).count() == 16
    for other in ("clicks-part-1", "clicks-part-2"):
        with pytest.raises(UsageError, match="is the table of /default/clicks"):
            export(data, other, table, format=kind, dry_run=True)


def test_partitions_share_the_columns_of_json_values(spark: SparkSession, tmp_path: Path) -> None:
    """Partition 1 has other types and fields than partition 0."""
    data, table = tmp_path / "data", tmp_path / "clicks"
    append_to(data, "clicks", [b'{"a": 1}'])
    assert export(data, "clicks", table, value="json", spark=spark).records == 1
    append_to(data, "clicks-part-1", [b'{"a": "x"}', b'{"a": 2, "b": true}'])
    report = export(data, "clicks", table, value="json", spark=spark)
    assert (report.ok, report.records, report.rejected) == (True, 1, 1)
    found = exported_tables.query("parquet", table, '"partition", "offset", a, b')
    assert sorted(found) == [(0, 0, 1, None), (1, 1, 2, True)]
    rejected = tmp_path / "clicks_rejected"
    assert exported_tables.query("parquet", rejected, '"partition", "offset"') == [(1, 0)]


def test_an_unfinished_batch_of_a_partition_is_finished_before_others_add_columns(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its rejected records are committed, and were chosen by the types that it found."""
    data, table = tmp_path / "data", tmp_path / "clicks"
    append_to(data, "clicks-part-1", [b'{"a": 1}', b"no JSON"])
    assert export(data, "clicks", table, value="json", spark=spark).records == 1
    shutil.rmtree(table)  # as if the run had ended before the second of its two commits
    append_to(data, "clicks-part-0", [b'{"a": "x"}'])
    append_to(data, "clicks-part-1", [b'{"a": 2}'])
    report = export(data, "clicks", table, value="json", spark=spark)
    assert report.ok
    assert [(row.topic, row.records, row.rejected) for row in report.rows] == [
        ("/default/clicks-part-1", 1, 0),
        ("/default/clicks-part-0", 0, 1),
        ("/default/clicks-part-1", 1, 0),
    ]
    assert report.next_offsets == {"/default/clicks-part-0": 1, "/default/clicks-part-1": 3}
    seen = exported_tables.spark_table(spark, "parquet", table).select("partition", "offset", "a")
    assert sorted(map(tuple, seen.collect())) == [(1, 0, 1), (1, 2, 2)]


def test_a_partition_by_its_name_is_a_table_of_its_own(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("clicks-part-0", "clicks-part-1"):
        append_to(data, name, [b"x"] * 3)
    one = export(data, "clicks-part-1", tmp_path / "t", start=1, dry_run=True)
    assert [(row.topic, row.start_offset) for row in one.rows] == [("/default/clicks-part-1", 1)]
    for bounds in ({"start": 1}, {"end": 2}):
        with pytest.raises(UsageError, match="export a partition by its name"):
            export(data, "clicks", tmp_path / "t", dry_run=True, **bounds)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the end, 1, is before the start, 2"):
        export(data, "clicks-part-1", tmp_path / "t", start=2, end=1, dry_run=True)
    append_to(data, "clicks", [b"x"])
    with pytest.raises(UsageError, match="clicks-part-0 are both partition 0 of /default/clicks"):
        export(data, "clicks", tmp_path / "t", dry_run=True)
    told = CliRunner().invoke(
        command, ["clicks-part-0", str(tmp_path / "t"), "--data", str(data), "--dry-run"]
    )
    assert "the next offset is 3" in told.output


def test_offsets_that_retention_took_end_the_export_unless_gaps_are_allowed(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, table = tmp_path / "data", tmp_path / "t"
    append(data, [payload(number) for number in range(50)], upload=True)
    assert export(data, "orders", table, end=10, spark=spark).next_offset == 10
    with Store(
        replace(settings(data), remote_retention=RemoteRetentionSettings(size_mb=0))
    ) as store:
        topic = store.topic("orders")
        topic.append(payload(50), durability="synced")
        topic.upload()  # retention keeps the newest object
        topic._storage.trim_remote()  # a server does it now and then
    with StoreView(settings(data)) as view:
        first = view.topic("orders").start_offset
    assert first > 10
    stopped = export(data, "orders", table, spark=spark)
    assert not stopped.ok
    assert "offset 10 next" in str(stopped.rows[-1].error)
    report = export(data, "orders", table, allow_gaps=True, spark=spark)
    assert report.ok
    assert (report.records, report.skipped) == (51 - first, first - 10)
    assert exported_tables.offsets("parquet", table) == [*range(10), *range(first, 51)]


def test_a_dry_run_tells_the_batches_and_writes_nothing(tmp_path: Path) -> None:
    append(tmp_path / "data", [b"x"] * 5)
    for kind in FORMATS:
        table = tmp_path / "lake" / kind
        report = export(
            tmp_path / "data", "orders", table, format=kind, max_batch_rows=3, dry_run=True
        )
        assert [(row.start_offset, row.end_offset) for row in report.rows] == [(0, 3), (3, 5)]
        assert report.next_offset == 5
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_place_that_is_taken_is_left_alone(kind: Format, tmp_path: Path) -> None:
    append(tmp_path / "data", [b"x"])
    taken = tmp_path / "t"
    taken.mkdir()
    (taken / "part.parquet").touch()
    with pytest.raises(UsageError, match="not created by an export"):
        export(tmp_path / "data", "orders", taken, format=kind)


def test_a_table_is_one_topics_and_has_one_beginning(spark: SparkSession, tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "t"
    append(data, [b"x"] * 5)
    with Store(settings(data)) as store:
        store.topic("other").append(b"y", durability="synced")
    seen: list[tuple[int, int]] = []
    report = export(
        data, "orders", table, start=2, end=4, spark=spark, progress=lambda *at: seen.append(at)
    )
    assert (report.records, report.next_offset, seen[-1]) == (2, 4, (2, 2))
    assert report.dataframe(spark).collect()[0]["records"] == 2
    with pytest.raises(UsageError, match="is the table of /default/orders"):
        export(data, "other", table)
    with pytest.raises(UsageError, match="ends at offset 4"):
        export(data, "orders", table, start=5)
    assert export(data, "orders", table, start=2, dry_run=True).records == 1


def test_what_can_never_be_committed_is_removed_when_it_is_old(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "t")
    passed, recent, waiting = staging.fresh(3), staging.fresh(3), staging.fresh(7)
    for directory in (passed, recent, waiting):
        directory.mkdir()
    now = recent.stat().st_mtime
    for directory in (passed, waiting):
        os.utime(directory, (now - 7200, now - 7200))
    assert staging.sweep(7, now) == 1
    assert not passed.exists()
    assert recent.exists()
    assert waiting.exists()


def test_the_command_tells_what_it_did(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "data", [b'{"a": 1}', b"{"])
    arguments = ["orders", str(tmp_path / "t"), "--data", str(tmp_path / "data"), "--json-values"]
    text = CliRunner().invoke(command, [*arguments, "--max-batch-bytes", "1MiB"])
    assert text.exit_code == 0, text.output
    assert "1 messages exported to" in text.stdout
    assert f"1 to {tmp_path / 't'}_rejected, in 1 commits; the next offset is 2" in text.stdout
    facts = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert (facts["ok"], facts["rows"], facts["next_offset"]) == (True, [], 2)
    wrong = CliRunner().invoke(command, [*arguments, "--max-batch-bytes", "much"])
    assert wrong.exit_code == 2


def test_a_damaged_object_is_told_in_one_line_and_leaves_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    append(tmp_path / "data", [payload(number) for number in range(20)], upload=True)
    for path in (tmp_path / "data" / "objects").rglob("*.dnb1"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    arguments = ["orders", str(tmp_path / "t"), "--data", str(tmp_path / "data")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1, result.output
    stopped, summary = result.stdout.splitlines()
    assert "stopped: " in stopped
    assert "Corrupt" in stopped
    assert summary.endswith("in 0 commits; nothing was committed")
    assert list(Staging(tmp_path / "t").root.iterdir()) == []
