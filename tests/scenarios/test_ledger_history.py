"""A topic whose objects are partly ledgers of Pulsar, through everything that works on objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.errors import CorruptFrame, ServiceUnavailable
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.names import is_ledger
from forebay.limits import KIB
from forebay.pipeline.jobs.compact import compact
from forebay.pipeline.jobs.offload import Offload, offload
from forebay.pipeline.jobs.verify import verify
from forebay.pipeline.location import job_settings
from forebay.settings import StoreSettings, UploaderSettings
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from support.cli_runs import done
from support.inline_executor import InlineExecutor
from support.scan_stores import planned, settings_of
from support.scan_stores import read as scan

COUNT: Final = 400
"""Messages of each object."""
LEDGERS: Final = UploaderSettings(
    enabled=False, format="pulsar", ledger_block_bytes=4 * KIB, index_every_messages=50
)


def text(offset: int) -> bytes:
    return b"message %d of the topic" % offset * (1 + 9 * (offset % 9))


def uploading(data: Path, form: str) -> StoreSettings:
    uploader = LEDGERS if form == "pulsar" else UploaderSettings(enabled=False)
    return settings_of(data, uploader=uploader)


def append(topic: Topic) -> None:
    first = topic.watermarks().appended
    topic.append_many([text(n) for n in range(first, first + COUNT)], durability="synced")


def objects(data: Path) -> list[ObjectDescriptor]:
    with StoreView(settings_of(data)) as view:
        return view.topic("orders").objects(0)


def read(data: Path) -> list[bytes]:
    with Store(settings_of(data)) as store:
        return [message.payload for message in store.topic("orders").read(0)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory with an object of frames, two ledgers, and another object; and a log."""
    for form in ("dnb1", "pulsar", "pulsar", "dnb1"):
        with Store(uploading(tmp_path, form)) as store:
            topic = store.topic("orders")
            append(topic)
            topic.upload()
    with Store(settings_of(tmp_path)) as store:
        topic = store.topic("orders")
        topic.rotate()
        topic.append(text(4 * COUNT), durability="synced")
        topic.trim_local()
        assert topic.segments()[0].first_offset == 4 * COUNT
    return tmp_path


EXPECTED: Final = [text(n) for n in range(4 * COUNT + 1)]


def ledger_file(data: Path, start: int = COUNT) -> Path:
    [name] = [each.object_id for each in objects(data) if each.start_offset == start]
    return next(data.rglob(name))


def damage(path: Path, at: int) -> None:
    changed = bytearray(path.read_bytes())
    changed[at] ^= 0xFF
    path.write_bytes(changed)


def test_a_mixed_history_is_read_as_one_log(data: Path) -> None:
    assert [each.is_ledger for each in objects(data)] == [False, True, True, False]
    assert read(data) == EXPECTED


@pytest.mark.parametrize("sidecars", [True, False])
def test_a_restore_from_the_bucket_alone_finds_ledgers(data: Path, sidecars: bool) -> None:
    before = objects(data)
    for path in data.rglob("*.json"):
        if not sidecars:
            path.unlink()
    for path in data.glob("catalog.db*"):
        path.unlink()
    done("restore", "--all", "--data", data, "--runner", "threads")
    after = objects(data)

    def alike(each: ObjectDescriptor) -> ObjectDescriptor:
        """Without what may differ: an index is only a hint."""
        return replace(each, created_at=0, etag=None, offset_index=None)

    assert list(map(alike, after)) == list(map(alike, before))
    assert read(data) == EXPECTED
    with Store(uploading(data, "pulsar")) as store:
        topic = store.topic("orders")
        topic.append(b"one more")
        topic.upload()
    ids = [each.ledger_number("id") for each in objects(data) if each.is_ledger]
    assert len(set(ids)) == len(ids) == 3
    assert verify(settings_of(data), runner="threads").errors == 0


def test_verify_reads_ledgers_and_finds_damage_and_a_missing_index(data: Path) -> None:
    report = verify(settings_of(data), runner="threads")
    assert (report.ok, report.objects, report.messages) == (True, 4, 4 * COUNT)
    path = ledger_file(data)
    damage(path, 5000)
    index = ledger_file(data, 2 * COUNT)
    index.with_name(index.name + "-index").unlink()
    report = verify(settings_of(data), runner="threads")
    found = [each.object_id for each in report.findings if each.severity == "error"]
    assert found == [path.name, index.name]


def test_damage_is_an_error_for_readers_that_says_where(data: Path) -> None:
    path = ledger_file(data)
    damage(path, 5000)
    with pytest.raises(CorruptFrame) as raised:
        read(data)
    assert raised.value.file.endswith(path.name)
    assert raised.value.position < 5000
    assert raised.value.offset is not None
    assert COUNT <= raised.value.offset < 2 * COUNT


def test_a_sweep_removes_what_failed_attempts_left_and_keeps_what_counts(data: Path) -> None:
    path = ledger_file(data)
    orphan = path.with_name("0" * 8 + path.name[8:])
    orphan.write_bytes(b"not yet")
    done("sweep", "--data", data, "--grace", "0s")
    assert not orphan.exists()
    assert path.with_name(path.name + "-index").exists()
    assert read(data) == EXPECTED


def test_a_scan_in_small_splits_reads_a_mixed_history(data: Path) -> None:
    splits = planned(data, subscribe="orders", splitBytes="64KiB")
    assert len(splits) > 8
    for chosen in (splits, planned(data, subscribe="orders")):
        found = scan(data, chosen, subscribe="orders")
        assert [row["value"] for row in found] == EXPECTED


def test_compaction_leaves_ledgers_alone_and_says_so(data: Path) -> None:
    with Store(settings_of(data)) as store:
        topic = store.topic("orders")
        for _ in range(2):
            append(topic)
            topic.upload()
    report = compact(settings_of(data), executor=InlineExecutor())
    assert (report.ok, report.left_ledgers) == (True, 2)
    assert report.replaced == 3
    assert [each.is_ledger for each in objects(data)] == [False, True, True, False]
    assert report.facts()["left_ledgers"] == 2


def test_an_offload_by_another_process_makes_ledgers_of_sealed_segments(tmp_path: Path) -> None:
    settings: Any = uploading(tmp_path, "pulsar")
    settings = replace(
        settings,
        wal=replace(settings.wal, rotate_max_bytes=50_000),
        uploader=replace(settings.uploader, max_object_bytes=90_000),
    )
    with Store(settings) as store:
        topic = store.topic("orders")
        for first in range(0, COUNT, 20):
            topic.append_many([text(n) for n in range(first, first + 20)], durability="synced")
        ends = {each.end_offset for each in topic.segments() if each.sealed}
        would = offload(settings, runner="threads", dry_run=True)
        assert {row.object_id for row in would.rows} == {"a ledger"}
        assert objects(tmp_path) == []
        due = offload(settings, runner="threads", force=False)
        assert due.ok
        assert {each.next_offset for each in objects(tmp_path)} <= ends
        assert max(each.next_offset for each in objects(tmp_path)) == max(ends)
        report = offload(settings, runner="threads")
        assert report.ok
        assert objects(tmp_path)[-1].next_offset == COUNT
        append(topic)
        topic.upload()
    assert all(is_ledger(each.object_id) for each in objects(tmp_path))
    assert read(tmp_path) == [text(n) for n in range(2 * COUNT)]


def test_describe_explain_and_inspect_name_the_format(data: Path) -> None:
    said = done("explain", "orders", "407", "--data", data)
    assert f"{ledger_file(data).name}, position" in said
    assert "ledger" in done("describe", "orders", "--data", data)
    path = ledger_file(data)
    assert "entry" in done("inspect", path, "--limit", "2")
    assert "blocks" in done("inspect", path.with_name(path.name + "-index"))


def test_an_export_and_a_replay_read_ledgers(data: Path, tmp_path: Path) -> None:
    rows = done("consume", "orders", "--data", data, "--start", "0", "--limit", "1000")
    assert rows.splitlines()[999].encode() == text(999)


def test_a_task_that_runs_twice_finds_the_ledger_that_it_has_written(tmp_path: Path) -> None:
    settings = uploading(tmp_path, "pulsar")
    with Store(settings) as store:
        append(store.topic("orders"))
    executor = InlineExecutor()
    executor.twice = True
    with Offload(job_settings(settings), executor) as run:
        report = run.once(force=True)
    assert report.ok, report.rows
    assert report.messages == COUNT
    assert read(tmp_path) == [text(n) for n in range(COUNT)]


@pytest.mark.parametrize("failing", [0, 1, 2], ids=["first", "second", "third"])
def test_one_ledger_of_three_that_fails_in_a_job_does_not_stop_the_others(
    tmp_path: Path, failing: int
) -> None:
    settings = uploading(tmp_path, "pulsar")
    settings = replace(settings, uploader=replace(settings.uploader, max_object_messages=100))
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many([text(n) for n in range(300)], durability="synced")
    executor = InlineExecutor()

    def fail(task: Any) -> None:
        if task.planned.start_offset == failing * 100:
            raise ServiceUnavailable("the store is away")

    executor.before = fail
    with Offload(job_settings(settings), executor) as run:
        assert not run.once(force=True).ok
        assert len(objects(tmp_path)) == failing
        written = {each.name for each in tmp_path.rglob("*-ledger-*-index")}
        assert len(written) == 2, "the others are there, and nothing of the one that failed"
        executor.before = lambda _task: None
        assert run.once(force=True).ok
    assert len(objects(tmp_path)) == 3
    assert written < {each.name for each in tmp_path.rglob("*-ledger-*-index")}
    assert read(tmp_path) == [text(n) for n in range(300)]
