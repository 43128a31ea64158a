"""`verify` finds every kind of damage, says where it is, and reads no more than it should."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forebay.catalog.catalog import Change
from forebay.catalog.job_state import ANYTHING, read_job_state, write_job_state
from forebay.catalog.kv import Put
from forebay.errors import UsageError
from forebay.format.descriptor import encode_descriptor
from forebay.format.names import object_key
from forebay.pipeline.jobs.verify import FINDINGS, VerifyReport, VerifyRow, verify
from forebay.pipeline.jobs.verify_plan import STATE_NAME, ScrubState, encode_state
from forebay.topic.store import Store
from support.cli_runs import done, facts, refused, run
from support.object_folders import Folders, make_old, topic_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = "data-20-39.dnb1"


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "data")


# ---- each kind of damage ----


def flip(at: Folders, name: str) -> int:
    return at.flip(name, SECOND, frame=1)


def truncate(at: Folders, name: str) -> int:
    path = at.objects(name) / SECOND
    path.write_bytes(path.read_bytes()[:-5])
    return path.stat().st_size


def shorten_quietly(at: Folders, name: str) -> int:
    """The size is as it was, and the last frame is not."""
    path = at.objects(name) / SECOND
    data = path.read_bytes()
    path.write_bytes(data[:-10] + bytes(10))
    return at.flip(name, SECOND, frame=19)


def delete(at: Folders, name: str) -> None:
    (at.objects(name) / SECOND).unlink()


def delete_sidecar(at: Folders, name: str) -> None:
    (at.objects(name) / f"{SECOND}.json").unlink()


def alter_sidecar(at: Folders, name: str) -> None:
    path = at.objects(name) / f"{SECOND}.json"
    path.write_bytes(path.read_bytes().replace(b'"end_offset":39', b'"end_offset":38'))


def garble_sidecar(at: Folders, name: str) -> None:
    (at.objects(name) / f"{SECOND}.json").write_bytes(b"{")


def misplace_index(at: Folders, name: str) -> int:
    """Another position for the second entry of an index; answers the right one."""
    at.fill([name], [1500])
    *_, last = at.descriptors(name)
    first, (offset, position) = last.offset_index or ()
    at.put_descriptor(name, replace(last, offset_index=(first, (offset, position + 1))))
    return position


def forget(at: Folders, name: str) -> None:
    at.forget_descriptor(name, 20)


def leave_orphan(at: Folders, name: str) -> None:
    path = at.objects(name) / "data-20-59.dnb1"
    path.write_bytes(bytes(100))
    make_old(path)


def leave_young_orphan(at: Folders, name: str) -> None:
    (at.objects(name) / "data-20-59.dnb1").write_bytes(bytes(100))


def rewrite(at: Folders, name: str) -> None:
    """The same bytes, and another etag."""
    path = at.objects(name) / SECOND
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def garble_descriptor(at: Folders, name: str) -> None:
    with at.catalog() as catalog:
        key = catalog.keys.descriptor(topic_name(name), 20)
        catalog.kv.commit([], [Put(key, b"{}")])


Damage = Callable[[Folders, str], int | None]
KINDS: dict[str, tuple[Damage, list[tuple[str, str, str | None, int | None]]]] = {
    # What is done, and what is found: severity, kind, object, offset.
    "flipped": (flip, [("error", "corrupt", SECOND, 21)]),
    "truncated": (truncate, [("error", "resized", SECOND, None)]),
    "ended": (shorten_quietly, [("error", "corrupt", SECOND, 39)]),
    "deleted": (delete, [("error", "missing", SECOND, 20)]),
    "bare": (delete_sidecar, [("warning", "sidecar", SECOND, None)]),
    "altered": (alter_sidecar, [("warning", "sidecar", SECOND, None)]),
    "garbled": (garble_sidecar, [("warning", "sidecar", SECOND, None)]),
    "misled": (misplace_index, [("note", "index", "data-60-1559.dnb1", 1060)]),
    "torn": (forget, [("error", "unnamed", SECOND, None), ("error", "gap", None, 20)]),
    "unreadable": (
        garble_descriptor,
        [("error", "descriptor", None, 20), ("error", "gap", None, 20)],
    ),
    "orphaned": (leave_orphan, [("warning", "orphan", "data-20-59.dnb1", None)]),
    "young": (leave_young_orphan, [("note", "orphan", None, None)]),
    "copied": (rewrite, [("note", "etag", SECOND, None)]),
    "good": (lambda _at, _name: None, []),
}


@pytest.fixture(scope="module")
def damaged(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VerifyReport, dict[str, int | None]]:
    """One run over a store in which every topic has another kind of damage."""
    at = Folders(tmp_path_factory.mktemp("damaged") / "data")
    at.fill(list(KINDS))
    positions = {name: harm(at, name) for name, (harm, _) in KINDS.items()}
    return verify(at.settings, spark=spark), positions


def found(report: VerifyReport, name: str) -> list[VerifyRow]:
    return [row for row in report.findings if row.topic == f"/default/{name}"]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_damage_is_found_where_it_is(
    damaged: tuple[VerifyReport, dict[str, int | None]], name: str
) -> None:
    report, positions = damaged
    rows = found(report, name)
    if name == "unreadable":  # its committed object is one more thing that the sweep stumbles over
        rows = [row for row in rows if row.kind in ("descriptor", "gap")]
    told = [(row.severity, row.kind, row.object_id, row.offset) for row in rows]
    assert sorted(told, key=str) == sorted(KINDS[name][1], key=str)
    if rows and positions[name] is not None:
        assert rows[0].position == positions[name]
    for row in rows:
        assert row.detail


def test_what_is_good_is_counted_for_each_topic(
    damaged: tuple[VerifyReport, dict[str, int | None]], spark: SparkSession
) -> None:
    report, _ = damaged
    good = {row.topic: row for row in report.rows if row.kind == "ok"}
    assert len(good) == report.topics == len(KINDS)
    assert (good["/default/good"].objects, good["/default/good"].messages) == (3, 60)
    assert (good["/default/flipped"].objects, good["/default/flipped"].messages) == (2, 40)
    assert report.objects == sum(row.objects for row in good.values())
    assert not report.ok
    frame = report.dataframe(spark)
    assert frame.where("severity = 'error'").count() == report.errors
    assert sum(row["bytes"] for row in frame.where("kind = 'ok'").collect()) == report.bytes


# ---- good stores ----


def test_a_good_store_is_good_and_its_watermark_moves(
    spark: SparkSession, folders: Folders
) -> None:
    folders.fill(["orders"])
    with folders.catalog() as catalog:
        record = catalog.record(topic_name("orders"))
        assert record is not None
        unread = Change(replace(record, verified=0))
        catalog.update(topic_name("orders"), None, lambda _: unread)
    report = verify(folders.settings, ["orders"], spark=spark)
    assert report.ok
    assert report.findings == ()
    assert (report.objects, report.messages) == (3, 60)
    assert report.bytes == sum(each.size for each in folders.descriptors("orders"))
    with folders.catalog() as catalog:
        assert catalog.record(topic_name("orders")) == record


def test_nothing_to_read_starts_no_spark(folders: Folders) -> None:
    with Store(folders.settings) as store:
        store.topic("empty").append(b"not uploaded")
    report = verify(folders.settings)
    assert (report.ok, report.topics, report.objects) == (True, 1, 0)


def test_what_cannot_be_verified_is_refused(folders: Folders) -> None:
    with pytest.raises(UsageError, match="there is no catalog"):
        verify(folders.settings)
    folders.fill(["orders"], [1])
    with pytest.raises(UsageError, match="/default/others"):
        verify(folders.settings, ["orders", "others"])
    with pytest.raises(UsageError, match="at least 1"):
        verify(folders.settings, budget_bytes=0)


# ---- incremental ----


def test_an_incremental_run_reads_what_is_new_and_what_was_damaged(
    spark: SparkSession, folders: Folders
) -> None:
    again = partial(verify, folders.settings, spark=spark, incremental=True, orphans=False)
    folders.fill(["orders", "others"])
    assert again().objects == 6
    assert again().objects == 0
    folders.flip("orders", SECOND)  # nobody reads it, so nobody knows
    folders.fill(["orders"], [20])
    report = again()
    assert (report.ok, report.objects, report.messages) == (True, 1, 20)
    full = verify(folders.settings, spark=spark, orphans=False)
    assert (full.errors, full.objects) == (1, 6)
    reminded = again()
    assert [row.object_id for row in reminded.findings] == [SECOND]
    assert reminded.objects == 0
    folders.flip("orders", SECOND)
    mended = again()
    assert (mended.ok, mended.objects) == (True, 1)
    # It has another etag now, which is put into its descriptor: that makes it new once more.
    assert (again().objects, again().objects) == (1, 0)


def test_a_budget_goes_round_until_everything_was_read(
    spark: SparkSession, folders: Folders
) -> None:
    names = ["a", "b", "c"]
    folders.fill(names)
    first = verify(folders.settings, spark=spark, orphans=False)
    budget = first.bytes // 3
    folders.flip("c", SECOND)
    bytes_read = 0
    reports: list[VerifyReport] = []
    while not reports or reports[-1].ok:
        reports.append(verify(folders.settings, spark=spark, orphans=False, budget_bytes=budget))
        bytes_read += reports[-1].bytes
        assert reports[-1].bytes <= budget
        assert bytes_read <= 2 * first.bytes, "it goes round, and finds it"
    assert [row.topic for row in reports[-1].findings] == ["/default/c"]


def test_a_run_that_is_interrupted_loses_its_own_progress_alone(
    spark: SparkSession, folders: Folders
) -> None:
    again = partial(verify, folders.settings, spark=spark, incremental=True, orphans=False)
    folders.fill(["orders"])
    assert again().objects == 3
    folders.fill(["orders"], [20])

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(progress=interrupt)
    assert (again().objects, again().objects) == (1, 0)


def test_a_memory_that_another_run_wrote_meanwhile_stays(
    spark: SparkSession, folders: Folders
) -> None:
    folders.fill(["orders"])
    others = encode_state(ScrubState(revision=1, cursor=20))

    def write(*_: int) -> None:
        with folders.catalog() as catalog:
            write_job_state(catalog, topic_name("orders"), STATE_NAME, others, expected=ANYTHING)

    assert verify(folders.settings, spark=spark, progress=write, orphans=False).ok
    with folders.catalog() as catalog:
        assert read_job_state(catalog, topic_name("orders"), STATE_NAME) == others
    assert verify(folders.settings, spark=spark, incremental=True, orphans=False).objects == 3


def test_a_memory_that_nobody_can_read_is_forgotten(spark: SparkSession, folders: Folders) -> None:
    folders.fill(["orders"])
    with folders.catalog() as catalog:
        write_job_state(catalog, topic_name("orders"), STATE_NAME, b"?", expected=None)
    again = partial(verify, folders.settings, spark=spark, incremental=True, orphans=False)
    assert (again().objects, again().objects) == (3, 0)


# ---- while others work ----


def test_what_is_uploaded_meanwhile_is_no_damage(spark: SparkSession, folders: Folders) -> None:
    folders.fill(["orders"])
    enough, uploads = threading.Event(), [0]

    def upload() -> None:
        with Store(folders.settings) as store:
            topic = store.topic("orders")
            while not enough.is_set():
                topic.append_many([b"more"] * 50, durability="synced")
                topic.upload()
                topic.rotate()
                uploads[0] += 1

    thread = threading.Thread(target=upload)
    thread.start()
    try:
        reports = [verify(folders.settings, spark=spark) for _ in range(3)]
    finally:
        enough.set()
        thread.join(120)
    assert uploads[0] > 0
    for report in reports:
        assert report.ok, report.findings
        assert report.objects >= 3


def test_an_object_that_was_replaced_meanwhile_is_read_under_its_new_name(
    spark: SparkSession, folders: Folders
) -> None:
    folders.fill(["orders"])
    first, second, third = folders.descriptors("orders")
    folder = folders.objects("orders")

    def compact(done: int, _total: int) -> None:
        """When the first wave begins, its tasks have not."""
        joined = folder / "data-0-39.dnb1"
        if done or joined.exists():
            return
        parts = [folder / each.object_id for each in (first, second)]
        joined.write_bytes(b"".join(part.read_bytes() for part in parts))
        new = replace(
            first,
            object_id=joined.name,
            end_offset=39,
            size=first.size + second.size,
            etag=None,
            content_hash=f"sha256:{sha256(joined.read_bytes()).hexdigest()}",
        )
        (folder / f"{joined.name}.json").write_bytes(encode_descriptor(new))
        folders.put_descriptor("orders", new)
        folders.forget_descriptor("orders", 20)
        for part in parts:
            part.unlink()

    report = verify(folders.settings, spark=spark, progress=compact, orphans=False)
    assert report.ok, report.findings
    assert (report.objects, report.messages) == (2, 60)
    assert report.bytes == first.size + second.size + third.size


# ---- the command ----


def test_the_command_tells_people_and_programs(
    spark: SparkSession, folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert spark is not None
    folders.fill(["orders"])
    would = facts("verify", "--data", folders.data, "--dry-run")
    assert (would["dry_run"], would["objects"], would["ok"]) == (True, 3, True)
    assert "1 topics: 3 objects read and found correct" in done("verify", "--data", folders.data)
    folders.flip("orders", SECOND)
    before = FINDINGS.value("corrupt", "error")
    caplog.set_level(logging.ERROR)
    written = tmp_path / "report.json"
    text = done("verify", "orders", "--data", folders.data, "--report", written, code=1)
    assert text.startswith(f"error: corrupt: /default/orders, {SECOND} at position 0: ")
    assert text.splitlines()[-1].endswith("1 errors, 0 warnings, 0 notes")
    report = json.loads(written.read_bytes())
    assert (report["ok"], report["errors"], report["objects"]) == (False, 1, 2)
    key = object_key(topic_name("orders"), SECOND)
    assert key in report["rows"][1]["detail"]
    assert FINDINGS.value("corrupt", "error") == before + 1
    assert any("verify: corrupt" in each.getMessage() for each in caplog.records)
    again = facts("verify", "--data", folders.data, "--budget", "1", "--no-orphans", code=1)
    assert again["errors"] == 1


def test_the_command_refuses_bad_input(folders: Folders) -> None:
    assert "there is no catalog" in refused("verify", "--data", folders.data)
    assert "must be a size" in refused("verify", "--data", folders.data, "--budget", "much")
    assert run("verify", "--help").exit_code == 0
