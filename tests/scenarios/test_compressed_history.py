"""A topic whose objects are partly compressed, through everything that reads and writes objects."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zstandard

from forebay.errors import CorruptFrame, ForeignObject
from forebay.format.blocks import BLOCK_HEADER_BYTES, RawBlock, compress_block
from forebay.format.descriptor import ObjectDescriptor
from forebay.format.frame import encode_frame
from forebay.inspect import inspect
from forebay.pipeline.jobs.verify import verify
from forebay.repair.repair import repair
from forebay.settings import UploaderSettings
from forebay.topic.describe import describe, explain
from forebay.topic.store import Store, Topic
from forebay.topic.view import StoreView
from forebay.upload import metrics
from support.cli_runs import done
from support.scan_stores import planned, settings_of
from support.scan_stores import read as scan

COUNT = 400
"""Messages of each object."""


def text(offset: int) -> bytes:
    return json.dumps({"id": offset, "event": "click", "user": f"user {offset % 7}"}).encode() * 8


def uploader(compression: Any, **changes: Any) -> UploaderSettings:
    return replace(UploaderSettings(enabled=False), compression=compression, **changes)


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
    """A directory with a plain object, two compressed ones, and a plain one; and a log."""
    for compression in ("none", "zstd", "zstd", "none"):
        with Store(settings_of(tmp_path, uploader=uploader(compression))) as store:
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


EXPECTED = [text(n) for n in range(4 * COUNT + 1)]


def test_a_mixed_history_is_read_as_one_log(data: Path) -> None:
    made = objects(data)
    assert [each.codec for each in made] == [None, "zstd", "zstd", None]
    assert [each.object_id for each in made][:2] == ["data-0-399.dnb1", "data-400-799.dnb1.zst"]
    assert made[1].logical_size > 3 * made[1].size
    assert read(data) == EXPECTED
    path = next(data.rglob("data-400-799.dnb1.zst"))
    reader = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    assert len(reader.read()) == made[1].raw_size


def test_stored_and_logical_bytes_are_counted(tmp_path: Path) -> None:
    before = metrics.bytes_uploaded.value(), metrics.logical_bytes_uploaded.value()
    with Store(settings_of(tmp_path, uploader=uploader("zstd"))) as store:
        append(store.topic("orders"))
        [made] = store.topic("orders").upload()
    assert metrics.bytes_uploaded.value() - before[0] == made.size
    assert metrics.logical_bytes_uploaded.value() - before[1] == made.raw_size


def test_the_size_limit_counts_bytes_before_compression(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, uploader=uploader("zstd", max_object_bytes=50_000))
    with Store(settings) as store:
        append(store.topic("orders"))
        made = store.topic("orders").upload()
    assert len(made) > 3
    assert all(40_000 < each.logical_size <= 50_000 for each in made[:-1])


def test_describe_explain_and_inspect_show_the_compression(data: Path) -> None:
    with StoreView(settings_of(data)) as view:
        topic = view.topic("orders")
        facts = describe(topic, 10).objects
        plain, packed = explain(topic, 7).places, explain(topic, 407).places
    made = objects(data)
    assert [(each.codec, each.bytes, each.raw_bytes) for each in facts] == [
        (each.codec, each.size, each.logical_size) for each in made
    ]
    assert (plain[0].codec, plain[0].position_in_block) == (None, None)
    assert (packed[0].codec, packed[0].position) == ("zstd", 0)
    assert packed[0].position_in_block == 7 * packed[0].frame_bytes
    path = next(data.rglob("data-400-799.dnb1.zst"))
    *records, summary = inspect(path, limit=3)
    assert [each["type"] for each in records] == ["Block", "Frame", "Frame", "Frame"]
    assert records[1]["payload"].encode() == text(400)[:64]
    assert (summary["frames"], summary["raw_bytes"]) == (COUNT, made[1].raw_size)
    assert (summary["bytes"], summary["damaged"]) == (made[1].size, False)
    beside = next(inspect(path.with_name(path.name + ".json")))
    assert (beside["codec"], beside["raw_size"]) == ("zstd", made[1].raw_size)


def test_inspect_reports_a_damaged_block(data: Path) -> None:
    path = next(data.rglob("data-400-799.dnb1.zst"))
    damage(path, BLOCK_HEADER_BYTES + 4)
    assert "damaged=True" in done("inspect", path, code=1)


def test_describe_and_explain_print_it(data: Path) -> None:
    assert "(zstd, " in done("describe", "orders", "--data", data)
    assert "in the zstd block" in done("explain", "orders", "407", "--data", data)


def damage(path: Path, at: int) -> None:
    path.chmod(0o600)
    changed = bytearray(path.read_bytes())
    changed[at] ^= 0xFF
    path.write_bytes(changed)


def lose_catalog(data: Path) -> None:
    for path in data.glob("catalog.db*"):
        path.unlink()


@pytest.mark.parametrize("sidecars", [True, False])
def test_a_restore_from_the_bucket_alone_finds_compressed_objects(
    data: Path, tmp_path: Path, sidecars: bool
) -> None:
    before = objects(data)
    if not sidecars:
        for path in data.rglob("*.json"):
            path.unlink()
    lose_catalog(data)
    done("restore", "--all", "--data", data, "--runner", "threads")
    after = objects(data)
    assert [replace(each, created_at=0, etag=None) for each in after] == [
        replace(each, created_at=0, etag=None) for each in before
    ]
    assert read(data) == EXPECTED


def test_verify_reads_compressed_objects_and_finds_damage(data: Path) -> None:
    report = verify(settings_of(data), runner="threads")
    assert (report.ok, report.objects, report.messages) == (True, 4, 4 * COUNT)
    damage(next(data.rglob("data-400-799.dnb1.zst")), BLOCK_HEADER_BYTES + 40)
    report = verify(settings_of(data), runner="threads")
    assert not report.ok
    [finding] = [each for each in report.findings if each.severity == "error"]
    assert finding.object_id == "data-400-799.dnb1.zst"


def test_damage_is_an_error_for_readers(data: Path) -> None:
    damage(next(data.rglob("data-400-799.dnb1.zst")), BLOCK_HEADER_BYTES + 40)
    with pytest.raises(CorruptFrame) as raised:
        read(data)
    assert raised.value.file.endswith("data-400-799.dnb1.zst")
    assert raised.value.offset is not None
    assert raised.value.position == 0


def test_a_sweep_removes_compressed_orphans_and_keeps_what_counts(data: Path) -> None:
    folder = next(data.rglob("data-400-799.dnb1.zst")).parent
    orphans = [folder / "data-5-9.dnb1.zst", folder / "data-1600-pending-ab.dnb1.zst"]
    for path in orphans:
        path.write_bytes(b"not yet")
    done("sweep", "--data", data, "--grace", "0s")
    assert not any(path.exists() for path in orphans)
    assert read(data) == EXPECTED


def test_a_scan_in_small_splits_reads_a_mixed_history(data: Path) -> None:
    splits = planned(data, subscribe="orders", splitBytes="64KiB")
    assert len(splits) > 4
    for chosen in (splits, planned(data, subscribe="orders")):
        found = scan(data, chosen, subscribe="orders")
        assert [row["value"] for row in found] == EXPECTED


# ---- names, repair, rolling ----


def test_a_name_that_is_taken_is_compared_by_its_frames(tmp_path: Path) -> None:
    """An attempt with another level has written the object, and died before its commit."""
    with Store(settings_of(tmp_path, uploader=uploader("zstd", compression_level=19))) as store:
        append(store.topic("orders"))
        [first] = store.topic("orders").upload()
    stored = next(tmp_path.rglob(first.object_id)).read_bytes()
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "wal", other / "wal")
    with Store(settings_of(other, uploader=uploader("zstd", compression_level=1))) as store:
        topic = store.topic("orders")
        target = other / "objects" / "storage/topics/default/orders/objects" / first.object_id
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(stored)
        [again] = topic.upload()
    assert target.read_bytes() == stored
    assert (again.size, again.offset_index) == (first.size, first.offset_index)
    assert again.content_hash == first.content_hash


def test_other_frames_under_the_name_are_foreign(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, uploader=uploader("zstd"))
    with Store(settings) as store:
        topic = store.topic("orders")
        append(topic)
        folder = tmp_path / "objects" / "storage/topics/default/orders/objects"
        folder.mkdir(parents=True, exist_ok=True)
        block = compress_block(RawBlock(0, 1, encode_frame(0, b"something else")), 3)
        (folder / f"data-0-{COUNT - 1}.dnb1.zst").write_bytes(block)
        with pytest.raises(ForeignObject, match="exists with 30 bytes"):
            topic.upload()


def test_repair_writes_a_damaged_compressed_object_again(tmp_path: Path) -> None:
    """Another level gives other bytes: the descriptor follows."""
    with Store(settings_of(tmp_path, uploader=uploader("zstd", compression_level=19))) as store:
        append(store.topic("orders"))
        [before] = store.topic("orders").upload()
    path = next(tmp_path.rglob(before.object_id))
    damage(path, BLOCK_HEADER_BYTES + 40)
    settings = settings_of(tmp_path, uploader=uploader("zstd", compression_level=1))
    report = repair(settings, apply=True)
    assert [each.repaired for each in report.findings] == [True]
    [after] = objects(tmp_path)
    assert (after.content_hash, after.raw_size) == (before.content_hash, before.raw_size)
    assert after.size == path.stat().st_size != before.size
    assert repair(settings).findings == []


def test_a_damaged_object_is_repaired_from_its_other_blocks_and_the_log(tmp_path: Path) -> None:
    """The log has the messages of the damaged block only."""
    settings = settings_of(tmp_path, uploader=uploader("zstd"))
    random = Random(1)
    payloads = [random.randbytes(1000) for _ in range(3000)]
    with Store(settings) as store:
        topic = store.topic("orders")
        topic.append_many(payloads[:2200], durability="synced")
        topic.rotate()
        topic.append_many(payloads[2200:], durability="synced")
        [made] = topic.upload()
        topic.trim_local()
        assert topic.segments()[0].first_offset == 2200
    assert len(made.offset_index or ()) > 2
    last = (made.offset_index or ())[-1]
    damage(next(tmp_path.rglob(made.object_id)), last[1] + 50)
    report = repair(settings, apply=True)
    assert [each.repaired for each in report.findings] == [True]
    with Store(settings) as store:
        assert [each.payload for each in store.topic("orders").read(0)] == payloads


def test_a_rolling_object_is_compressed(tmp_path: Path) -> None:
    changes = {"rolling": True, "max_object_bytes": 10**9, "max_open_seconds": 3600}
    settings = settings_of(tmp_path, uploader=uploader("zstd", **changes))
    with Store(settings) as store:
        topic = store.topic("orders")
        append(topic)
        append(topic)
        [made] = topic.upload()
    assert (made.object_id, made.codec) == (f"data-0-{2 * COUNT - 1}.dnb1.zst", "zstd")
    assert not list(tmp_path.rglob("*pending*"))
    assert read(tmp_path) == EXPECTED[: 2 * COUNT]
