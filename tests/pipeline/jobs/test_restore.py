"""Restores of many topics from the objects alone, with the reading done by executors."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forebay.errors import UsageError
from forebay.format.names import SIDECAR_ENDING
from forebay.objects.store import connect
from forebay.pipeline.jobs.restore import restore
from forebay.pipeline.jobs.verify import verify
from forebay.settings import SparkSettings
from support.object_folders import Folders, payload
from support.s3_server import S3Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPICS = [f"topic-{number:02}" for number in range(20)]
COUNTS = (7, 20, 3)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "data")


def expected(name: str) -> list[tuple[int, bytes]]:
    return [(offset, payload(name, offset)) for offset in range(sum(COUNTS))]


@pytest.mark.parametrize("sidecars", [True, False])
def test_twenty_topics_come_back_as_they_were(
    spark: SparkSession, folders: Folders, sidecars: bool
) -> None:
    folders.fill(TOPICS, COUNTS)
    before = {name: folders.descriptors(name) for name in TOPICS}
    folders.lose_all_but_the_objects()
    if not sidecars:
        for name in TOPICS:
            folders.drop_sidecars(name)
    told: list[tuple[int, int]] = []
    report = restore(
        folders.settings,
        everything=True,
        assume_nothing_lost=True,
        spark=spark,
        progress=lambda *at: told.append(at),
    )
    assert report.ok
    assert (report.adopted, report.messages) == (60, 20 * sum(COUNTS))
    assert told == [(done, 20) for done in range(1, 21)]
    for row in report.rows:
        assert (row.by_sidecar, row.read_whole) == ((3, 0) if sidecars else (0, 3))
        assert (row.start_offset, row.tail, row.next_offset) == (0, 30, 30)
    for name in TOPICS:
        found = folders.descriptors(name)
        # When an object was made is told by the sidecar alone, to the second by the listing.
        assert [replace(each, created_at=0) for each in found] == [
            replace(each, created_at=0) for each in before[name]
        ]
        assert folders.messages(name) == expected(name)
    frame = report.dataframe(spark)
    assert frame.where("adopted = 3 and error is null").count() == 20


def test_a_store_in_a_bucket_is_restored_without_sidecars(
    spark: SparkSession, s3: S3Server, tmp_path: Path
) -> None:
    folders = Folders(tmp_path / "data", s3.settings())
    names = TOPICS[:3]
    folders.fill(names, COUNTS)
    with closing(connect(folders.settings.cloud, folders.data)) as objects:
        keys = [meta.key for meta in objects.list("") if meta.key.endswith(SIDECAR_ENDING)]
        for key in keys:
            objects.delete_object(key)
    assert len(keys) == 9
    folders.lose_all_but_the_objects()
    report = restore(folders.settings, names, assume_nothing_lost=True, spark=spark)
    assert report.ok
    assert [row.read_whole for row in report.rows] == [3, 3, 3]
    verified = verify(folders.settings, spark=spark)
    assert (verified.objects, verified.errors) == (9, 0)
    assert {row.kind for row in verified.findings} == {"sidecar"}
    for name in names:
        assert folders.messages(name) == expected(name)


def test_verifying_reads_all_of_it_on_executors_and_finds_damage(
    spark: SparkSession, folders: Folders
) -> None:
    names = TOPICS[:4]
    folders.fill(names, COUNTS)
    folders.lose_all_but_the_objects()
    folders.flip(names[1], "data-7-26.dnb1", frame=2)
    report = restore(folders.settings, [*names, "absent"], verify=True, spark=spark)
    rows = {row.topic: row for row in report.rows}
    assert not report.ok
    for name in (names[0], names[2], names[3]):
        assert (rows[f"/default/{name}"].read_whole, rows[f"/default/{name}"].error) == (3, None)
    assert "no undamaged object holds the offsets 7 to 26" in str(
        rows[f"/default/{names[1]}"].error
    )
    assert "has no objects of /default/absent" in str(rows["/default/absent"].error)
    again = restore(folders.settings, [names[1]], verify=True, allow_gaps=True, spark=spark)
    [row] = again.rows
    assert (row.adopted, row.known, row.damaged, row.gaps) == (1, 1, 1, 1)


def test_an_unusable_sidecar_is_as_good_as_none(spark: SparkSession, folders: Folders) -> None:
    """A bucket that was copied has other etags than its sidecars say."""
    [name] = TOPICS[:1]
    folders.fill([name], COUNTS)
    folders.lose_all_but_the_objects()
    for path in folders.objects(name).glob("*.dnb1"):
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    [row] = restore(folders.settings, [name], spark=spark).rows
    assert (row.adopted, row.by_sidecar, row.read_whole) == (3, 0, 3)


def test_a_dry_run_changes_nothing(folders: Folders) -> None:
    folders.fill(TOPICS[:2], COUNTS)
    folders.lose_all_but_the_objects()
    report = restore(folders.settings, everything=True, dry_run=True)
    assert (report.dry_run, report.adopted) == (True, 6)
    assert not list(folders.data.glob("catalog.db*"))


def test_a_restore_that_reads_little_starts_no_spark(folders: Folders) -> None:
    folders.fill(TOPICS[:2], COUNTS)
    folders.lose_all_but_the_objects()
    folders.drop_sidecars(TOPICS[0])
    program = (
        "import sys; from forebay.cli import main;"
        f"main(['restore', '--all', '--data', {str(folders.data)!r}], standalone_mode=False);"
        "assert 'pyspark' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count(": adopted 3 objects with 30 messages") == 2
    assert "  3 objects read in full, " in done.stdout


def test_bad_calls_are_refused(folders: Folders) -> None:
    with pytest.raises(UsageError, match="not both"):
        restore(folders.settings)
    with pytest.raises(UsageError, match="there are no objects"):
        restore(folders.settings, everything=True)
    with pytest.raises(UsageError, match="in memory"):
        restore(replace(folders.settings, data=None, spark=SparkSettings()), everything=True)
    assert not folders.data.exists()
