"""`forebay bench tier` at a small size: what it measures, and that the bytes really move."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from forebay.bench.bare_store import BARE_KEY, bare_read, bare_upload
from forebay.bench.history import (
    History,
    discard,
    fill,
    open_history,
    payloads,
    read_frames,
    read_messages,
    write_history,
    write_plain,
)
from forebay.bench.measure import open_topic
from forebay.bench.tier import appending, reader_beside
from forebay.cli import main
from forebay.format.blocks import RawBlock, compress_block
from forebay.format.frame import encode_frame
from forebay.limits import MIB
from forebay.objects.store import connect
from forebay.settings import CloudSettings, StoreSettings, UploaderSettings
from support.s3_server import S3Server

ROWS = [
    "upload, {}",
    "upload without reading back, {}",
    "read to frames, {}",
    "read to messages, {}",
    "read to frames, {} + 30 ms",
    "read with read-ahead, {} + 30 ms",
]
APPENDS = ["append while a thread reads {}", "append while a process reads {}"]
CACHED = "read to frames, local disk, cached"
GOALS = dict(zip(ROWS, [None, 0.8, 0.8, None, 0.8, 4.0], strict=True))


def bench(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "forebay", "bench", "tier", "--dir", str(directory)]
    done = subprocess.run(
        [*command, "--mib", "9", "--rounds", "1", "--json", *options],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert all(row["rate"] > 0 and row["limit"] > 0 for row in found["results"])
    assert found["object_bytes"] >= 9 * MIB
    return found


def rows(place: str) -> dict[str, float | None]:
    """The names of a place's rows, with their goals."""
    return {name.format(place): goal for name, goal in GOALS.items()}


def compressed(place: str) -> dict[str, float | None]:
    """The rows of compressed objects, with their goals."""
    found: dict[str, float | None] = {}
    local = place == "local disk"
    for content in ("JSON", "random"):
        where = f"{content}, zstd, {place}"
        found[f"stored, {where}"] = None
        found[f"upload, {where}"] = 0.3 if local else None
        found[f"read to frames, {where}"] = 0.5 if local else None
        found[f"read to frames, {where} + 30 ms"] = 1.0 if content == "JSON" and not local else None
    return found


def appends(place: str) -> dict[str, float | None]:
    return dict(zip((name.format(place) for name in APPENDS), (0.6, 0.9), strict=True))


def test_it_measures_local_disk_and_a_configured_store_and_leaves_nothing(
    tmp_path: Path, s3: S3Server
) -> None:
    work, config = tmp_path / "work", tmp_path / "forebay.yml"
    cloud = s3.settings()
    configured = {"backend": "s3", "root": cloud.root, "options": dict(cloud.options)}
    config.write_text(json.dumps({"storage": {"cloud": configured}}))
    found = bench(work, "--config", str(config))
    store = connect(cloud)
    try:
        assert list(store.list("")) == []
    finally:
        store.close()
    local = rows("local disk") | {CACHED: None} | compressed("local disk")
    expected = local | rows("S3") | compressed("S3") | appends("local disk + 30 ms") | appends("S3")
    assert [(row["name"], row["goal"]) for row in found["results"]] == list(expected.items())
    assert list(work.iterdir()) == []


@pytest.mark.soak
def test_a_configured_directory_is_measured_below_its_root_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    root, config = tmp_path / "objects", tmp_path / "forebay.yml"
    root.mkdir()
    (root / "kept").write_text("of somebody else")
    config.write_text(f"storage: {{cloud: {{backend: fs, root: {root}}}}}\n")
    found = bench(tmp_path / "work", "--config", str(config))
    names = {row["name"] for row in found["results"]}
    assert rows("configured directory").keys() <= names
    assert [path.name for path in root.iterdir()] == ["kept"]


def test_a_store_in_memory_is_no_store_to_measure(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text("storage: {cloud: {backend: memory}}\n")
    done = CliRunner().invoke(
        main, ["bench", "tier", "--dir", str(tmp_path / "work"), "--config", str(config)]
    )
    assert done.exit_code == 2
    assert "storage.cloud.backend is memory" in done.stderr


# ---- the bytes ----


def test_json_payloads_are_the_same_in_every_run_and_compress_to_a_third() -> None:
    found = payloads(1000, "JSON")
    assert found == payloads(1000, "JSON")
    assert {len(each) for each in found} == {1000}
    assert len(set(found)) == len(found) > MIB // 1000
    frames = b"".join(encode_frame(at, each) for at, each in enumerate(found[:1000]))
    assert len(compress_block(RawBlock(0, 1000, frames), 3)) <= 0.35 * len(frames)


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    objects = CloudSettings(root=str(tmp_path / "objects"))
    uploader = UploaderSettings(enabled=False)
    return StoreSettings(data=tmp_path / "data", cloud=objects, uploader=uploader)


@pytest.fixture
def history(settings: StoreSettings) -> History:
    return write_history(settings, 9, 1000)


def test_the_upload_and_its_limit_store_as_many_bytes(
    tmp_path: Path, settings: StoreSettings
) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    size = write_plain(plain, tmp_path / "log", 9, 1000)
    with open_topic(settings) as topic:
        fill(topic, 9, 1000)
        [stored] = topic.upload()
    assert stored.size == size == plain.stat().st_size
    assert bare_upload(CloudSettings(root=str(other)), plain, UploaderSettings())() == size
    assert (other / BARE_KEY).read_bytes() == plain.read_bytes()
    discard(CloudSettings(root=str(other)))
    assert not other.exists()


def test_a_history_is_read_from_objects_and_its_limit_moves_the_same_bytes(
    history: History,
) -> None:
    with open_history(history) as topic:
        assert topic.segments()[0].first_offset == history.messages - 1
        assert read_frames(topic) == read_messages(topic) == history.messages
    assert bare_read(history)() == history.size >= 9 * MIB


def test_each_request_of_a_distant_history_waits(history: History) -> None:
    far = replace(history, delay_seconds=0.05)
    with open_history(far, read_ahead_chunks=0) as topic:
        started = time.perf_counter()
        assert read_frames(topic) == history.messages
        assert time.perf_counter() - started >= 0.05 * 3  # 9 MiB in chunks of 4 MiB
    started = time.perf_counter()
    assert bare_read(far)() == history.size
    assert time.perf_counter() - started >= 0.05


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_read_is_beside_every_append_that_is_measured_so(
    history: History, tmp_path: Path, kind: Literal["thread", "process"]
) -> None:
    assert appending(1, 1000, lambda: reader_beside(history, kind))(tmp_path / "live") > 0


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_reader_that_cannot_read_is_no_measurement(
    history: History, tmp_path: Path, kind: Literal["thread", "process"]
) -> None:
    objects = CloudSettings(root=str(tmp_path / "none"))
    empty = replace(history.settings, data=tmp_path / "empty", cloud=objects)
    missing = reader_beside(replace(history, settings=empty), kind)
    with pytest.raises(AssertionError, match="ended before it read anything"), missing:
        pass
